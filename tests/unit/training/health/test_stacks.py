"""The stacks of a process that runs: asked for thousands of times, they must do no harm."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from shardflow.training.health.heartbeat import MAIN_STACK_SIGNAL

REPOSITORY = Path(__file__).resolve().parents[4]
NUM_SIGNALS = 3000

BUSY = """
import sys, threading, time
from pathlib import Path
from shardflow.training.health.monitor import StacksFile

SOURCE = "def deep(number): return 0 if number == 0 else deep(number - 1) + 1"

def work():
    while True:  # code that comes and goes: who reads its frames without the lock reads freed memory
        own = {}
        exec(compile(SOURCE, "<made>", "exec"), own)
        own["deep"](30)

stacks = StacksFile(Path(sys.argv[1]))
for number in range(3):
    threading.Thread(target=work, name=f"work-{number}", daemon=True).start()
stacks.write()
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


def test_running_threads_survive_being_written_down(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    process = subprocess.Popen(
        [sys.executable, "-Wignore", "-c", BUSY, str(path)], cwd=REPOSITORY, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for _ in range(NUM_SIGNALS):
            process.send_signal(MAIN_STACK_SIGNAL)
            time.sleep(0.001)
        assert process.poll() is None, "the process died of being looked at"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    text = path.read_text(encoding="utf-8")
    for number in range(3):
        assert f"Thread work-{number} (most recent call first):\n  File" in text
    assert "Stack (most recent call first):\n  File" in text
