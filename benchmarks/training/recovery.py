"""How long a run stands still: from a kill, a stop or a signal to the next step, or to the end.

    python -m benchmarks.training.recovery --output benchmarks/results/recovery.json

A tiny model on two ranks under torchrun, so what is measured is ours and torch's: noticing, ending the other
rank, starting Python and torch anew, joining, reading the checkpoint. For a real model add what its own
checkpoint takes to read. Each kind of fault is repeated; a run's first start is measured beside it, because a
restart is mostly that.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from shardflow import __version__
from shardflow.monitoring.history import METRICS_FILE, MetricsTail
from tests.distributed.launcher import Job, job
from tests.tiny_runs import make_tiny_input, write_config

LIMIT_S = {"killed": 30.0, "stopped": 90.0, "asked": 10.0}
"""Kill to next step; SIGSTOP to next step, noticing it included; SIGTERM to the end."""
HANG_S = 10.0
"""``timeouts.hang_s``; 60 s by default, which adds 50 s to a stop."""
DEADLINE_S = 300.0


def lines_of(run: Path, event: str) -> list[dict[str, Any]]:
    lines = MetricsTail(run).read() if (run / METRICS_FILE).is_file() else ()
    return [line.values for line in lines if line.event == event]


def wait_for(holds: Callable[[], bool], running: Job) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline or running.process.poll() is not None:
            raise SystemExit(f"the job did not get on\n{running.wait(1).text}")
        time.sleep(0.005)


def measure(folder: Path, kind: str) -> dict[str, float]:
    """Hurt one run once and take the times from the clocks of its own metrics lines."""
    tiny = make_tiny_input(folder)
    run = folder / "run"
    settings = {"run.num_epochs": 100_000, "run.checkpoint_every_steps": 20, "timeouts.hang_s": HANG_S}
    config = write_config(tiny, folder / "train.toml", run, settings)
    options = ["--max-restarts=1", "--monitor-interval=0.1"]
    began = time.time()
    with job(folder, "shardflow.training", [f"--config={config}"], num_ranks=2, options=options) as running:
        wait_for(lambda: len(lines_of(run, "step")) >= 30, running)
        first_step_s = lines_of(run, "step")[0]["time_s"] - began
        hurt_at = time.time()
        if kind == "asked":
            running.process.send_signal(signal.SIGTERM)
            running.process.wait(DEADLINE_S)
            return {"first_start_s": first_step_s, "seconds": time.time() - hurt_at}
        os.kill(running.rank_pids()[1], signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        wait_for(lambda: any(line["attempt"] == 2 for line in lines_of(run, "step")), running)
        again = next(line for line in lines_of(run, "step") if line["attempt"] == 2)
        return {"first_start_s": first_step_s, "seconds": again["time_s"] - hurt_at}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    results = {}
    for kind, limit_s in LIMIT_S.items():
        measured = []
        for _ in range(arguments.repeats):
            with tempfile.TemporaryDirectory() as folder:
                measured.append(measure(Path(folder), kind))
        seconds = [each["seconds"] for each in measured]
        results[kind] = {
            "limit_s": limit_s,
            "median_s": round(statistics.median(seconds), 2),
            "largest_s": round(max(seconds), 2),
            "first_start_median_s": round(statistics.median(each["first_start_s"] for each in measured), 2),
        }
        print(kind, results[kind])
    record = {
        "command": f"python -m benchmarks.training.recovery --output {arguments.output}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "shardflow": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "hardware": {"cores": os.cpu_count(), "system": platform.platform()},
        "load_average_at_start": load,
        "hang_s": HANG_S,
        "results": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
