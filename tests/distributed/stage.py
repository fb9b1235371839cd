"""What the scenarios of several ranks work with: groups of the first ranks, tiny runs, a model in float64."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardflow.format import Dataset
from shardflow.loading import Loader, World
from shardflow.sampling import BatchSpec
from shardflow.training.config import TrainConfig
from shardflow.training.distributed import Ranks, StopRequest
from shardflow.training.metrics import StepMetrics
from shardflow.training.models.reference import ReportModel, build_model
from shardflow.training.run import TrainSummary, train_on
from shardflow.training.text import ReportTokenizer
from tests.tiny_runs import TinyInput, tiny_config, tiny_fields

__all__ = ["NUM_EPOCHS", "WAIT", "WORLD_SIZES", "Result", "Stage", "exact_model", "open_loader"]

Result = dict[str, Any]
WORLD_SIZES = (1, 2, 3, 4)
WAIT = 300.0
NUM_EPOCHS = 4  # of 6 steps
SETTINGS = (f"run.num_epochs={NUM_EPOCHS}",)


class Stage:
    """What a scenario works with."""

    def __init__(self, ranks: Ranks, tiny: TinyInput, output: Path) -> None:
        self.ranks = ranks
        self.tiny = tiny
        self.output = output
        # Every rank must take part in making every group, in the same order.
        self._groups = {size: (self._group(size), self._group(size)) for size in WORLD_SIZES}

    def _group(self, size: int) -> dist.ProcessGroup:
        group = dist.new_group(list(range(size)), backend="gloo", timeout=timedelta(seconds=WAIT))
        return group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD  # type: ignore[return-value]

    def first(self, size: int) -> Ranks | None:
        """The first ranks as a world of their own; None on the others."""
        if self.ranks.rank >= size:
            return None
        group, control = self._groups[size]
        return replace(self.ranks, world_size=size, group=group, control=control)

    def config(self, name: str, *overrides: str) -> TrainConfig:
        return tiny_config(self.tiny, self.output / name, *SETTINGS, *overrides)

    def train(
        self,
        ranks: Ranks | None,
        name: str,
        *overrides: str,
        stop_after: int | None = None,
        stop_rank: int = 0,
    ) -> TrainSummary | None:
        """Train in the folder ``name``; a stop request reaches one rank only."""
        if ranks is None:
            return None
        stop = StopRequest()

        def ask(metrics: StepMetrics, num_steps: int) -> None:
            if metrics.global_step + 2 == stop_after and ranks.rank == stop_rank:
                stop.signal_name = "SIGTERM"

        return train_on(ranks, self.config(name, *overrides), on_step=ask, stop=stop)


def exact_model(stage: Stage) -> ReportModel:
    """The tiny model in double precision, with dropout."""
    config = stage.config("unused")
    tokenizer = ReportTokenizer.load(config.text.folder)
    return build_model(
        config.model,
        config.image,
        num_places=3,
        vocab_size=tokenizer.vocab_size,
        max_tokens=config.text.max_tokens,
        seed=7,
    ).double()


def open_loader(stage: Stage, ranks: Ranks, split: str, tail: Any) -> Loader:
    return Loader(
        Dataset.open(stage.tiny.dataset),
        split=split,
        batch=BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail=tail),
        seed=11,
        world=World(rank=ranks.rank, world_size=ranks.world_size),
        fields=tiny_fields(),
    )
