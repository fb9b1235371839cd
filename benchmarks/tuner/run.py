"""Does the tuner find what a sweep over all settings finds? Four jobs, two starts each.

    python -m benchmarks.tuner.run --output benchmarks/results/tuner.json

For each job of ``benchmarks.tuner.jobs``:

1. ``sweep``: steps a second under every setting of the grid, in turns, ``--rounds`` times; the medians say
   which one is best.
2. ``tuned``: the tuner runs from the defaults and from a bad start until it has settled.
3. ``final``: the best of the sweep, what the tuner found from either start, and the default itself, in turns
   with fresh loaders. ``share`` is the median of a found setting over the median of the best one; so the
   best one has no luck of the sweep in it.

A step takes four micro-batches and does the job's work for each; decisions act a step later, as in training.
Takes a quarter of an hour on two quiet cores; ``--quick`` shows in four minutes that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.about import about_run
from benchmarks.tuner.jobs import JOBS, MICRO_BATCHES, Job, Settings, make_data, opened
from shardflow.loading import Loader
from shardflow.monitoring.tuner import Change, Tuner
from shardflow.monitoring.tuner_numbers import LoaderTotals, StepNumbers
from shardflow.telemetry import Move
from shardflow.telemetry.process import ProcessProbe
from tests.object_stores import WebServer

REPOSITORY = Path(__file__).resolve().parents[2]
LATENCY_MS, LINK_MB_PER_S = 60, 60
WARM_STEPS = 10
MOST_STEPS = 400
_PROBE_STEPS = 5
_SHARES = ("cache.max_bytes", "cache.ram_bytes")


def take_steps(loader: Loader, job: Job, tuner: Tuner | None, num_steps: int) -> list[float]:
    """Run steps, until the tuner has settled where there is one; return the seconds of each."""
    work, taken = job.make_step(), list[float]()
    due: Change | None = None
    batches, gil_wait_share = iter(loader), 0.0
    probe = ProcessProbe() if tuner is not None else None
    for number in range(num_steps):
        began, waited, is_first = time.perf_counter(), 0.0, False
        for _ in range(MICRO_BATCHES):
            asked = time.perf_counter()
            if next(batches, None) is None:
                batches, is_first = iter(loader), True
                next(batches)
            waited += time.perf_counter() - asked
            work()
        taken.append(time.perf_counter() - began)
        if tuner is None:
            continue
        if due is not None:
            loader.tunables.set(due.setting, due.value)
            loader.apply_pending()
            due = None
        if probe is not None and number % _PROBE_STEPS == 0:
            gil_wait_share = probe.take().gil_wait_share
        if is_first:
            continue
        due = tuner.step(
            StepNumbers(
                step_s=taken[-1],
                data_wait_s=waited,
                num_samples=MICRO_BATCHES,
                num_micro_batches=MICRO_BATCHES,
                loader=LoaderTotals.of(loader.counters.snapshot()),
                gil_wait_share=gil_wait_share,
            ),
            number,
        )
        if tuner.is_settled and due is None:
            break
    if probe is not None:
        probe.close()
    loader.close()
    return taken


def measure_fixed(job: Job, place: str, settings: Settings, num_steps: int) -> float:
    """Return steps a second under fixed settings, once warm."""
    with opened(job, place, settings) as loader:
        taken = take_steps(loader, job, None, WARM_STEPS + num_steps)[WARM_STEPS:]
    return len(taken) / sum(taken)


def tune(job: Job, place: str, start: Settings) -> dict[str, Any]:
    """Run the tuner until it has settled; return where it went."""
    moves: list[Move] = []
    with opened(job, place, start) as loader:
        # A larger cache is no setting of the sweep, and would be no merit.
        limits = {name: one for name, one in loader.tunables.limits().items() if name not in _SHARES}
        tuner = Tuner(loader.tunables.values(), limits, report=moves.append)
        take_steps(loader, job, tuner, MOST_STEPS)
        names = {name for name, _ in job.grid} | {move.setting for move in moves if move.kind == "keep"}
        found = {name: value for name, value in tuner.values.items() if name in names}
    return {
        "start": start,
        "found": found,
        "steps_to_settle": tuner.settled_in,
        "moves": [
            [move.global_step, move.kind, move.setting, move.old, move.new]
            for move in moves
            if move.kind in {"try", "keep", "revert"}
        ],
    }


def measure_job(job: Job, place: str, *, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Sweep, tune, and compare."""
    grid = job.settings
    rates: list[list[float]] = [[] for _ in grid]
    for turn in range(num_rounds):
        order = range(len(grid)) if turn % 2 == 0 else reversed(range(len(grid)))
        for index in order:
            rates[index].append(measure_fixed(job, place, grid[index], num_steps))
    best = max(range(len(grid)), key=lambda index: statistics.median(rates[index]))
    default: Settings = {}
    tuned = {"default": tune(job, place, default), "bad": tune(job, place, job.bad_start)}
    finals: dict[str, Settings] = {
        "best of sweep": grid[best],
        **{f"from {name} start": one["found"] for name, one in tuned.items()},
        "default, untuned": default,
        "bad, untuned": job.bad_start,
    }
    again: dict[str, list[float]] = {name: [] for name in finals}
    for _ in range(num_rounds + 1):
        for name, settings in finals.items():
            again[name].append(measure_fixed(job, place, settings, num_steps))
    reference = statistics.median(again["best of sweep"])
    return {
        "sweep": [
            {"settings": one, "steps_per_s": [round(rate, 2) for rate in found]}
            for one, found in zip(grid, rates, strict=True)
        ],
        "best": grid[best],
        "tuned": tuned,
        "final": {
            name: {
                "settings": finals[name],
                "steps_per_s": [round(rate, 2) for rate in found],
                "share": round(statistics.median(found) / reference, 3),
            }
            for name, found in again.items()
        },
    }


@contextmanager
def _behind_a_link(folder: Path) -> Iterator[str]:
    """Serve a folder through a slow link; both servers are processes of their own but for the web's."""
    with WebServer(folder) as server:
        command = [sys.executable, "-m", "tests.fault_proxy", "--target", str(server.port)]
        command += ["--latency-ms", str(LATENCY_MS), "--mb-per-s", str(LINK_MB_PER_S)]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
            try:
                if process.stdout is None:
                    raise RuntimeError("the proxy has no output")
                yield f"http://127.0.0.1:{int(process.stdout.readline())}"
            finally:
                process.kill()


def main() -> int:
    """Measure all jobs, or one in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="one round of 15 steps")
    parser.add_argument("--jobs", nargs="+", choices=tuple(JOBS), default=list(JOBS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds, steps = (1, 15) if options.quick else (options.rounds, options.steps)
    if options.place:
        (name,) = options.jobs
        found = measure_job(JOBS[name], options.place, num_rounds=rounds, num_steps=steps)
        print(json.dumps(found))
        return 0
    start, results = time.monotonic(), {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shardflow-bench-") as where:
        folder = Path(where)
        make_data(folder)
        with _behind_a_link(folder) as address:
            for name in options.jobs:
                data = JOBS[name].data
                place = f"{address}/{data}" if data == "store" else str(folder / data)
                command = [sys.executable, "-m", "benchmarks.tuner.run", "--jobs", name, "--place", place]
                command += ["--rounds", str(rounds), "--steps", str(steps)]
                done = subprocess.run(
                    command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, timeout=3600
                )
                results[name] = json.loads(done.stdout.splitlines()[-1])
                print(name, json.dumps(results[name]["final"]), file=sys.stderr, flush=True)
    text = json.dumps(
        {
            "what": (__doc__ or "").strip().splitlines()[0],
            **about_run(("blosc2", "numpy", "torch")),
            "load_average_1min_before": load,
            "rounds": rounds,
            "steps": steps,
            "seconds": round(time.monotonic() - start),
            "jobs": results,
        },
        indent=1,
    )
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
