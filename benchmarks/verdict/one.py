"""One run of a scenario, by the real training job, and the verdict on what it measured.

Runs of two ranks go one after another in one launch::

    torchrun --standalone --nproc-per-node 2 -m benchmarks.verdict.one FOLDER SEED CAUSE [SEED CAUSE ...]
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.verdict.scenarios import SAMPLE_SIZES, Scenario, draw
from benchmarks.verdict.slowness import slowed
from shardflow.config import load_config
from shardflow.format import Dataset
from shardflow.monitoring import read_history, read_settings
from shardflow.monitoring.verdict.judging import judge_all
from shardflow.telemetry import Interval, Verdict
from shardflow.training.config import TimeoutConfig, TrainConfig
from shardflow.training.distributed import Ranks, StopRequest, join_ranks
from shardflow.training.metrics import StepMetrics
from shardflow.training.run import train_on
from shardflow.training.text import train_tokenizer
from tests.factories import make_dataset

__all__ = ["WAIT", "Found", "make_inputs", "run_scenario"]

WAIT: Final = 60.0
_INTERVAL_S: Final = 0.3
_LEAST_STEPS: Final = 12
_MOST_S: Final = 8.0
_TEMPLATE: Final = """
[batch]
micro_batches_per_step = 2
[fields.image]
type = "slices"
num_slices = 3
size = [16, 16]
missing = "pad"
[fields.report]
type = "text"
missing = "pad"
[image]
rows = 16
columns = 16
[text]
max_tokens = 24
[model]
patch_size = 8
vision_width = 16
vision_layers = 1
vision_heads = 2
language_width = 16
language_layers = 1
language_heads = 2
[loader]
prefetch_bytes = "8MiB"
wait_timeout_s = 50
[run]
checkpoint_every_steps = 100000
num_epochs = 1000
device = "cpu"
tensorboard = false
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What came of a run."""

    scenario: Scenario
    verdicts: list[Verdict]
    intervals: list[Interval]
    elapsed_s: float

    @property
    def code(self) -> str:
        """What came first at its end; empty where nothing was said."""
        return self.verdicts[0].code if self.verdicts else ""

    @property
    def code_alone(self) -> str:
        """The same, had its threads never waited for a processor: what others do there is no cause."""
        if self.scenario.slowness.num_burners:
            return self.code
        alone = [
            replace(one, ranks=tuple(replace(rank, runnable_s=0.0) for rank in one.ranks))
            for one in self.intervals
        ]
        found = judge_all(alone)
        return found[-1][0].code if found else ""

    def to_json(self) -> dict[str, Any]:
        """Return what the table of results keeps."""
        return {
            "seed": self.scenario.seed,
            "cause": self.scenario.cause,
            "expected": self.scenario.expected,
            "severity": round(self.scenario.severity, 2),
            "samples": self.scenario.samples,
            "micro_batch_size": self.scenario.micro_batch_size,
            "num_threads": self.scenario.num_threads,
            "verdicts": {one.code: one.share for one in self.verdicts},
            "first_had_it_been_alone": self.code_alone,
            "num_intervals": len(self.intervals),
            "elapsed_s": round(self.elapsed_s, 1),
        }


def make_inputs(folder: Path, names: Sequence[str] = tuple(SAMPLE_SIZES), *, num_samples: int = 240) -> None:
    """Generate datasets and a tokenizer, a few seconds; what is there already stays.

    Args:
        folder: Gets them.
        names: Keys of `SAMPLE_SIZES`.
        num_samples: Of each.
    """
    for name in names:
        size, slices, codec = SAMPLE_SIZES[name]
        if (folder / name / "done").exists():
            continue
        shutil.rmtree(folder / name, ignore_errors=True)
        make_dataset(
            folder / name,
            num_samples=num_samples,
            samples_per_shard=24,
            slices=slices,
            size=(size, size),
            codec=codec,
            facts=True,
        )
        if not (folder / "tokenizer").exists():
            train_tokenizer(Dataset.open(folder / name), "train", 320, folder / "tokenizer")
        (folder / name / "done").touch()
    (folder / "train.toml").write_text(_TEMPLATE, encoding="utf-8")


def run_scenario(
    ranks: Ranks,
    inputs: Path,
    output: Path,
    scenario: Scenario,
    *,
    least_s: float = 1.8,
    least_steps: int = _LEAST_STEPS,
) -> Found:
    """Run one scenario: two seconds of steps, more where they are few.

    Args:
        ranks: One rank, or two.
        inputs: What `make_inputs` made.
        output: The run folder, which must not exist.
        scenario: The scenario.
        least_s: After its first step.
        least_steps: Of the run, whatever they take; at most 8 seconds of them.
    """
    config = load_config(
        TrainConfig,
        inputs / "train.toml",
        [
            f"data.dataset={inputs / scenario.samples}",
            f"text.tokenizer={inputs / 'tokenizer'}",
            f"run.output={output}",
            f"run.seed={scenario.seed}",
            f"batch.micro_batch_size={scenario.micro_batch_size}",
            f"loader.num_threads={scenario.num_threads}",
            f"monitor.interval_s={_INTERVAL_S}",
            *scenario.settings,
        ],
    )
    stop = StopRequest()
    started = first_done = time.perf_counter()

    def on_step(metrics: StepMetrics, _: int) -> None:
        nonlocal first_done
        now = time.perf_counter()
        if metrics.global_step == 0:
            first_done = now
        is_enough = now - first_done > least_s and metrics.global_step >= least_steps
        if is_enough or now - first_done > _MOST_S:
            stop.signal_name = "SIGTERM"

    with slowed(scenario.slow_rank if ranks.rank == 1 else scenario.slowness):
        train_on(ranks, config, on_step=on_step, stop=stop)
    elapsed_s = time.perf_counter() - started
    if ranks.rank:
        return Found(scenario=scenario, verdicts=[], intervals=[], elapsed_s=elapsed_s)
    intervals = [interval for _, interval in read_history(output).intervals]
    found = judge_all(intervals, config=read_settings(output))
    return Found(
        scenario=scenario,
        verdicts=found[-1] if found else [],
        intervals=intervals,
        elapsed_s=elapsed_s,
    )


def main(arguments: Sequence[str]) -> None:
    """Run scenarios on the ranks of this launch; rank 0 writes ``FOLDER/found.jsonl``."""
    folder = Path(arguments[0])
    torch.set_num_threads(1)
    with join_ranks("cpu", TimeoutConfig(startup_s=WAIT, steady_s=WAIT, control_s=WAIT, hang_s=0)) as ranks:
        for seed, cause in zip(arguments[1::2], arguments[2::2], strict=True):
            output = folder / f"run-{seed}-{cause.replace(' ', '-')}"
            found = run_scenario(ranks, folder, output, draw(int(seed), cause))
            if ranks.rank == 0:
                with (folder / "found.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found.to_json()) + "\n")
            ranks.barrier("end of a run", WAIT)


if __name__ == "__main__":
    main(sys.argv[1:])
