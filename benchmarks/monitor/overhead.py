r"""What measuring costs a training step: the same run, measured and not, in turns.

    python -m benchmarks.monitor.overhead --output benchmarks/results/monitor_overhead.json
    python -m benchmarks.monitor.overhead --interval-s 5 --block-s 12 --pairs 6 --models long \
        --output benchmarks/results/monitor_overhead_default.json

One process, or two that torchrun starts, builds the parts of a run once and trains on: a block of steps with
``monitor.interval_s = 0``, one with an interval every second, the other way round, and so on; the second
command has the default interval of five seconds. Both kinds of block share model, loader and processes, so
that what differs is the measuring: the thread that watches the process, the clock of the step, its hook, and
the exchange and line of each interval. The overhead is the time of a step of a measured block over that of
the block beside it, less 1; the median and the quartiles of all pairs are given, and each pair. Quiet: about
seven minutes on two cores, and five.
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
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.about import REPOSITORY, about_run
from shardflow.config import load_config
from shardflow.format import Dataset
from shardflow.training.checkpoint.files import CheckpointFolder
from shardflow.training.checkpoint.start import StartDecision
from shardflow.training.config import TimeoutConfig, TrainConfig
from shardflow.training.distributed import StopRequest, join_ranks
from shardflow.training.inputs import DeviceFeed
from shardflow.training.interval import RunMeasures
from shardflow.training.loop import LoopProgress, RunParts, TrainingLoop
from shardflow.training.run import prepare_run
from shardflow.training.text import train_tokenizer
from tests.factories import make_dataset
from tests.tiny_runs import make_tiny_input

LIMIT: Final = 0.01
WAIT: Final = 600.0
RUN_IN: Final = 2
MODELS: Final = {
    "short": (
        "model.vision_width=32",
        "model.vision_layers=2",
        "model.language_width=32",
        "model.language_layers=2",
    ),
    "long": (
        "model.vision_width=256",
        "model.vision_layers=4",
        "model.language_width=256",
        "model.language_layers=4",
        "image.rows=64",
        "image.columns=64",
    ),
}


class Blocks:
    """Trains in blocks of steps, measured or not."""

    def __init__(self, parts: RunParts, config: TrainConfig, interval_s: float) -> None:
        self._parts, self._interval_s = parts, interval_s
        self._config = config
        self._progress = LoopProgress()
        self._feed: DeviceFeed | None = None

    def run(self, num_steps: int, *, is_measured: bool) -> float:
        """Return the seconds of a step, of all ranks together: each ends with an exchange."""
        interval_s = self._interval_s if is_measured else 0.0
        parts = self._parts
        measures = RunMeasures(
            interval_s,
            parts.ranks,
            parts.loader,
            parts.wrapped,
            parts.inputs.transfer,
            parts.metrics,
            pinned_bytes=self._config.loader.pinned_bytes,
        )
        try:
            loop = TrainingLoop(replace(parts, measures=measures), self._progress)
            for _ in range(RUN_IN):
                self._step(loop)
            started = time.perf_counter()
            for _ in range(num_steps):
                self._step(loop)
            return (time.perf_counter() - started) / num_steps
        finally:
            measures.close()

    def _step(self, loop: TrainingLoop) -> None:
        position = self._parts.loader.position
        if self._feed is None or position.step == 0:
            if self._feed is not None:
                self._feed.close()
            self._feed = DeviceFeed(self._parts.loader, self._parts.inputs, looks_ahead=False)
        loop.run_step(self._feed, position.epoch, position.step)
        self._progress.global_step += 1


def measure(
    config: TrainConfig, *, num_pairs: int, block_s: float, interval_s: float
) -> dict[str, Any] | None:
    """Run the blocks; every rank calls this, and rank 0 gets the numbers."""
    with (
        join_ranks("cpu", TimeoutConfig(startup_s=WAIT, steady_s=WAIT, control_s=WAIT, hang_s=0)) as ranks,
        ExitStack() as stack,
    ):
        first = StartDecision(attempt=1, checkpoint=None, damaged=())
        checkpoints = CheckpointFolder(config.run.output / "checkpoints", keep_last=1)
        parts = prepare_run(config, ranks, checkpoints, first, None, StopRequest(), stack)
        blocks = Blocks(parts, config, interval_s)
        trial_s = blocks.run(10, is_measured=False)
        agreed = ranks.all_gather_numbers([block_s / trial_s], WAIT)
        num_steps = max(4, int(agreed[0, 0]))
        step_s: dict[bool, list[float]] = {False: [], True: []}
        for number in range(num_pairs):
            for is_measured in (number % 2 == 0, number % 2 == 1):
                step_s[is_measured].append(blocks.run(num_steps, is_measured=is_measured))
        if ranks.rank != 0:
            return None
    overheads = [on / off - 1 for on, off in zip(step_s[True], step_s[False], strict=True)]
    quartiles = statistics.quantiles(overheads, n=4) if num_pairs > 1 else overheads * 3
    return {
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "num_steps_a_block": num_steps,
        "median_step_ms": {
            "not measured": round(1e3 * statistics.median(step_s[False]), 3),
            "measured": round(1e3 * statistics.median(step_s[True]), 3),
        },
        "overhead": {
            "median": round(statistics.median(overheads), 5),
            "quartiles": [round(quartiles[0], 5), round(quartiles[2], 5)],
        },
        "raw_step_ms": {
            "not measured": [round(1e3 * one, 3) for one in step_s[False]],
            "measured": [round(1e3 * one, 3) for one in step_s[True]],
        },
    }


def run_case(folder: Path, model: str, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one case in processes of its own; returns what rank 0 found."""
    result = folder / "result.json"
    launcher = [sys.executable]
    if world_size > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    case = ["--case", model, "--folder", str(folder), "--pairs", str(options.pairs)]
    case += ["--block-s", str(options.block_s), "--interval-s", str(options.interval_s)]
    command = [*launcher, "-m", "benchmarks.monitor.overhead", *case, "--output", str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL, env=environment)
    return {"model": model, **json.loads(result.read_text(encoding="utf-8"))}


def make_input(folder: Path) -> None:
    """Generate the data: the tests' studies, more of them."""
    make_tiny_input(folder / "tiny")
    make_dataset(
        folder / "data",
        num_samples=800,
        samples_per_shard=100,
        slices=(1, 5),
        splits={"train": 800},
        facts=True,
    )
    train_tokenizer(Dataset.open(folder / "data"), "train", 320, folder / "tokenizer")


def main() -> int:
    """Parse, run the cases, write, report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitor.overhead")
    parser.add_argument("--output", type=Path, help="write the results here as well")
    parser.add_argument("--pairs", type=int, default=12, help="blocks of each kind")
    parser.add_argument("--block-s", type=float, default=4.0, help="seconds of a block, about")
    parser.add_argument("--interval-s", type=float, default=1.0, help="monitor.interval_s of measured blocks")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--case", choices=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        settings = [
            f"run.output={options.folder / 'run' / (options.case + os.environ.get('WORLD_SIZE', ''))}",
            f"data.dataset={options.folder / 'data'}",
            f"text.tokenizer={options.folder / 'tokenizer'}",
            "run.num_epochs=1000",
            "monitor.interval_s=0",
            *MODELS[options.case],
        ]
        config = load_config(TrainConfig, options.folder / "tiny" / "train.toml", settings)
        found = measure(
            config, num_pairs=options.pairs, block_s=options.block_s, interval_s=options.interval_s
        )
        if found is not None:
            options.output.write_text(json.dumps(found), encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory() as text:
        make_input(Path(text))
        cases = [
            run_case(Path(text), model, world_size, options)
            for model in options.models
            for world_size in (1, 2)
        ]
    report = {
        "command": " ".join(["python -m benchmarks.monitor.overhead", *sys.argv[1:]]),
        "about": about_run(["torch"]),
        "limit": LIMIT,
        "interval_s": options.interval_s,
        "cases": cases,
    }
    for case in cases:
        low, high = case["overhead"]["quartiles"]
        print(
            f"{case['model']:>6}, {case['world_size']} rank(s), step "
            f"{case['median_step_ms']['not measured']:.1f} ms: overhead {case['overhead']['median']:+.2%} "
            f"(quartiles {low:+.2%} to {high:+.2%})"
        )
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(case["overhead"]["median"] <= LIMIT for case in cases) else 1


if __name__ == "__main__":
    raise SystemExit(main())
