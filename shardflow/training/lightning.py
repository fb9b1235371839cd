"""LightningDataModule over a dataset: equal steps on every rank, and exact resume from its checkpoints.

Needs the package lightning (``shardflow[lightning]``). Lightning saves and restores the state of any loader
that has one, and does not skip through batches then, so a resume is exact at the end of a step. The trainer
must accumulate as many micro-batches as a rank has in a step (`ShardDataModule.accumulation`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning import LightningDataModule

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading import Batch, Loader, LoaderConfig, World
from shardflow.sampling import BatchSpec


class ShardDataModule(LightningDataModule):
    """Training and validation batches of a dataset, dealt by its plan.

    Args:
        dataset: Folder or address of a packed dataset.
        batch: How micro-batches and steps are formed.
        config: How bytes become batches.
        seed: Of the order.
        train_split: Split that is trained on.
        eval_split: Split that is validated on; empty for none. Every sample counts once: padding slots of its
            last batches have weight 0.
        convert: Makes what the module's steps get from a batch; the batch itself by default.
    """

    def __init__(
        self,
        dataset: str | Path,
        *,
        batch: BatchSpec,
        config: LoaderConfig,
        seed: int = 0,
        train_split: str = "train",
        eval_split: str = "",
        convert: Callable[[Batch], Any] | None = None,
    ) -> None:
        super().__init__()
        self._dataset = dataset
        self._spec = batch
        self._config = config
        self._seed = seed
        self._splits = train_split, eval_split
        self._convert = convert
        self._loaders: list[Loader] = []

    def accumulation(self, world_size: int) -> int:
        """Return the ``accumulate_grad_batches`` that the trainer needs on so many ranks."""
        return -(-self._spec.micro_batches_per_step // world_size)

    def train_dataloader(self) -> Any:
        """Open the training batches at the start, or at the position of Lightning's checkpoint.

        Raises:
            ConfigError: the trainer would step after another number of micro-batches than the plan.
        """
        trainer: Any = self.trainer
        wanted = self.accumulation(trainer.world_size)
        if trainer.accumulate_grad_batches != wanted:
            raise ConfigError(
                f"accumulate_grad_batches must be {wanted}, for steps of {self._spec.micro_batches_per_step} "
                f"micro-batches on {trainer.world_size} ranks, got {trainer.accumulate_grad_batches}; take "
                "what ShardDataModule.accumulation(world_size) says."
            )
        return _TrainBatches(self._open(self._splits[0], self._spec), self._convert)

    def val_dataloader(self) -> Any:
        """Open the validation batches; none without a split."""
        if not self._splits[1]:
            return []
        return _EvaluationBatches(
            self._open(self._splits[1], replace(self._spec, tail="mask")), self._convert
        )

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - Lightning names it
        """Close the loaders."""
        while self._loaders:
            self._loaders.pop().close()

    def _open(self, split: str, spec: BatchSpec) -> Loader:
        trainer: Any = self.trainer
        loader = Loader(
            Dataset.open(self._dataset),
            split=split,
            batch=spec,
            seed=self._seed,
            world=World(rank=trainer.global_rank, world_size=trainer.world_size),
            config=self._config,
        )
        self._loaders.append(loader)
        return loader


class _Batches:
    """A loader's batches, converted."""

    def __init__(self, loader: Loader, convert: Callable[[Batch], Any] | None) -> None:
        self._loader = loader
        self._convert = convert

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader) if self._convert is None else map(self._convert, self._loader)


class _TrainBatches(_Batches):
    """Training batches, epoch after epoch; Lightning saves and restores their position."""

    def state_dict(self) -> dict[str, object]:
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._loader.load_state_dict(state)


class _EvaluationBatches(_Batches):
    """Evaluation batches, the same at every evaluation."""

    def __iter__(self) -> Iterator[Any]:
        self._loader.close()
        self._loader.set_epoch(1)
        self._loader.set_epoch(0)  # from its start, also where an evaluation was cut off
        return super().__iter__()
