"""Epochs of equal length, and a resume on another number of ranks: peers and shardflow in one harness.

    python -m benchmarks.peers.run --output benchmarks/results/peers_epochs.json

Makes an environment for each peer (needs the package index once), writes 103 samples in 7 shards in its
format, starts real processes with gloo, and notes what each rank received. The page is made of it by
``benchmarks.peers.table``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.about import processor
from benchmarks.peers.environments import PEERS, environment, installed
from benchmarks.peers.experiment import STOPPED, Experiment
from benchmarks.peers.launch import REPOSITORY, run_tasks
from benchmarks.peers.task import GLOBAL_BATCH, NUM_SAMPLES, SEED, SHARDS
from shardflow import __version__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="peers that are not run keep their place")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--environments", type=Path, default=Path(tempfile.gettempdir()) / "shardflow-peers")
    parser.add_argument(
        "--deadline", type=float, default=60.0, help="seconds without a batch that are a hang"
    )
    parser.add_argument("--jobs", type=int, default=1, help="peers that run beside each other")
    parser.add_argument("--keep", type=Path, help="folder to keep content and events in")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}

    def measured(key: str) -> None:
        with _folder(arguments.keep, key) as folder:
            found[key] = measure(key, folder, arguments.environments, arguments.deadline)
        print(key, "done", flush=True)

    # No time is measured here, so that peers may run beside each other.
    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(measured, arguments.peers))
    _write(arguments.output, found)


@contextmanager
def _folder(keep: Path | None, key: str) -> Iterator[Path]:
    if keep is not None:
        (keep / key).mkdir(parents=True)
        yield keep / key
        return
    with tempfile.TemporaryDirectory(prefix=f"peer-{key}-") as folder:
        yield Path(folder)


def measure(key: str, folder: Path, environments: Path, deadline_s: float) -> dict[str, Any]:
    """Run everything of one peer."""
    peer, python = PEERS[key], environment(key, environments)
    prepare = [python, "-m", "benchmarks.peers.prepare", peer.module, folder]
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(folder)}
    subprocess.run(prepare, check=True, cwd=folder, env=variables, stdout=subprocess.DEVNULL)
    experiment = Experiment(folder, settings_of(python, peer.module))
    for tasks in experiment.stages():
        # Two ranks first: they leave the states that the others begin with.
        for world_size in (2, 1, 4):
            mine = [task for task in tasks if task.world_size == world_size]
            run_tasks(peer.module, python, folder, mine, deadline_s=deadline_s)
    return {
        "name": peer.name,
        "version": _version(key, python),
        "command": f"python -m benchmarks.peers.run {' '.join(sys.argv[1:])}",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"processor": processor(), "num_cpus": os.cpu_count()},
        "python": platform.python_version(),
        "torch": installed(python, ["torch"])["torch"],
        "deadline_s": deadline_s,
        "settings": experiment.results(),
    }


def settings_of(python: Path, module: str) -> dict[str, dict[str, Any]]:
    """Ask a peer's module for the settings it is measured in; only its own environment can import it."""
    code = f"import json; from benchmarks.peers.{module} import SETTINGS; print(json.dumps(SETTINGS))"
    done = subprocess.run([python, "-c", code], check=True, cwd=REPOSITORY, capture_output=True, text=True)
    settings: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return settings


def _version(key: str, python: Path) -> str:
    requirement = PEERS[key].requirement
    if requirement is None:
        return __version__
    return installed(python, [requirement.split("==")[0]])[requirement.split("==")[0]]


def _write(output: Path, found: dict[str, Any]) -> None:
    """Write what was found; peers that were not run now keep what the file says of them."""
    before = json.loads(output.read_text("utf-8"))["peers"] if output.exists() else {}
    peers = {key: found.get(key, before.get(key)) for key in PEERS if key in found or key in before}
    report = {
        "content": {
            "num_samples": NUM_SAMPLES,
            "shards": [len(keys) for keys in SHARDS],
            "global_batch": GLOBAL_BATCH,
            "seed": SEED,
            "stopped": STOPPED,
        },
        "peers": peers,
    }
    output.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
