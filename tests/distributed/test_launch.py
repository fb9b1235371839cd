"""``shardflow train``: torchrun with the exit code of the ranks."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.distributed.launcher import Job, job
from tests.tiny_runs import CLASSIFY, make_tiny_input, write_config

pytestmark = pytest.mark.distributed


def test_the_code_of_the_ranks_comes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no folder stays behind: an hour of restarts would leave hundreds."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    config = write_config(make_tiny_input(tmp_path), tmp_path / "tiny.toml", tmp_path / "run", {})
    arguments = [f"--config={config}", "--set=run.sede=4"]
    with job(tmp_path, "shardflow.training", arguments, num_ranks=2, passes_codes=True) as running:
        finished = running.wait(600)
    assert finished.exit_code == 2, finished.text
    assert finished.stderr.count("nearest known key is 'seed'") == 1
    assert not [*temporary.glob("torchelastic_*"), *temporary.glob("shardflow-launch-*")]


def test_all_ranks_leave_with_the_code_for_too_much_damaged_data(tmp_path: Path) -> None:
    tiny = make_tiny_input(tmp_path)
    for index in (tiny.dataset / "shards").glob("train-*.idx"):
        if not index.name.startswith("train-000000"):
            with index.open("r+b") as file:
                file.truncate(index.stat().st_size // 2)
    settings = {"loader.max_bad_samples": 100}
    config = write_config(tiny, tmp_path / "tiny.toml", tmp_path / "run", settings, file=CLASSIFY)
    arguments = [f"--config={config}"]
    with job(tmp_path, "shardflow.training", arguments, num_ranks=2, passes_codes=True) as running:
        finished = running.wait(600)
    assert finished.exit_code == 3, finished.text
    assert "max_bad_share" in finished.stderr


def test_a_stop_signal_before_there_are_ranks_is_answered_at_once(tmp_path: Path) -> None:
    """While it imports torch, or waits for a machine that never comes."""
    options = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    with job(
        tmp_path,
        "shardflow.training",
        ["--config=none.toml"],
        num_ranks=1,
        options=options,
        passes_codes=True,
        standalone=False,
    ) as running:
        wait_until_it_listens(running)
        running.process.send_signal(signal.SIGTERM)
        finished = running.wait(300)  # a rendezvous waits for 600
    assert finished.exit_code == 75, finished.text


def wait_until_it_listens(running: Job) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
        if int(caught, 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.01)
    pytest.fail("the launcher does not listen to SIGTERM")
