"""Two ranks train on a blend; ``torchrun --nproc-per-node 2 -m ... INPUT OUTPUT [TABLE.KEY=VALUE ...]``.

Two lanes and two micro-batches a step: of images and texts, in most steps one rank has text alone and the
other has images. A run that goes through, and one that is stopped and resumed, leave run folders for the test
to compare.
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardflow.config import load_config
from shardflow.training.config import TimeoutConfig, TrainConfig
from shardflow.training.distributed import StopRequest, join_ranks
from shardflow.training.metrics import StepMetrics
from shardflow.training.run import train_on

WAIT = 300.0
SETTINGS = (
    "batch.micro_batch_size=2",
    "batch.micro_batches_per_step=2",
    "batch.lanes=2",
    'batch.tail="mask"',
    "data.eval_split=val",
    "run.num_epochs=2",
)


def blend_config(source: Path, output: Path, *more: str) -> TrainConfig:
    """Settings of the run."""
    overrides = [f"data.dataset={source / 'blend.toml'}", f"run.output={output}", *SETTINGS, *more]
    return load_config(TrainConfig, source / "train.toml", overrides)


def main() -> None:
    """Run a whole run, and one in two parts."""
    source, output, more = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    with join_ranks("cpu", TimeoutConfig(startup_s=WAIT, steady_s=WAIT, control_s=WAIT, hang_s=0)) as ranks:
        whole = train_on(ranks, blend_config(source, output / "whole", *more))
        stop = StopRequest()

        def ask(metrics: StepMetrics, num_steps: int) -> None:
            if metrics.global_step + 1 == num_steps // 2 + 1:  # in the second epoch
                stop.signal_name = "SIGTERM"

        train_on(ranks, blend_config(source, output / "parts", *more), on_step=ask, stop=stop)
        resumed = train_on(ranks, blend_config(source, output / "parts", *more))
        if (whole.outcome, resumed.outcome) != ("finished", "finished") or resumed.resumed_from is None:
            raise SystemExit(f"runs must finish, got {whole} and {resumed}")


if __name__ == "__main__":
    main()
