"""LightningDataModule over a dataset: equal steps on every rank, and exact resume from its checkpoints.

Needs the package lightning (``shardflow[lightning]``). Lightning saves and restores the state of any loader
that has one, and does not skip through batches then, so a resume is exact at the end of a step. The trainer
must accumulate as many micro-batches as a rank has in a step (`ShardDataModule.accumulation`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from lightning import LightningDataModule

from shardflow.format import Dataset
from shardflow.loading import Loader, World
from shardflow.sampling import BatchSpec
from shardflow.training.frameworks import Convert, EvaluationBatches, TrainingBatches, check_accumulation

Part: TypeAlias = str | tuple[str, str]
"""A split, or a split and which of its samples, such as ``("val", "facts.modality == 'CT'")``."""


class ShardDataModule(LightningDataModule):
    """Training, validation and test batches of a dataset, dealt by its plan.

    Args:
        dataset: Folder or address of a packed dataset.
        batch: How micro-batches and steps are formed.
        seed: Of the order.
        train_split: Split that is trained on, or a split and an expression.
        eval_split: What is validated on: a split, a split and an expression, or a list of these, each of
            which becomes a loader with a ``dataloader_idx`` of its own; empty for none. Every sample counts
            once: padding slots of the last batches have weight 0.
        test_split: What is tested on, likewise.
        convert: Makes what the module's steps get from a batch; `shardflow.loading.Batch.torch` by default,
            whose tensors Lightning moves to the device.
        **settings: More arguments of every `shardflow.loading.Loader`, such as ``fields``, ``where`` and
            ``config``; the expression of a single part holds beside ``where``.

    Example::

        parts = ["val", ("val", "facts.modality == 'CT'")]
        data = ShardDataModule("chest", batch=spec, fields=fields, eval_split=parts, test_split="test")
        trainer = Trainer(accumulate_grad_batches=data.accumulation(world_size))
        trainer.fit(module, data, ckpt_path="last")
    """

    def __init__(
        self,
        dataset: str | Path,
        *,
        batch: BatchSpec,
        seed: int = 0,
        train_split: Part = "train",
        eval_split: Part | list[Part] = "",
        test_split: Part | list[Part] = "",
        convert: Convert | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._dataset = dataset
        self._spec = batch
        self._seed = seed
        self._train, self._eval, self._test = train_split, eval_split, test_split
        self._convert = convert
        self._settings = settings
        self._loaders: list[Loader] = []

    def accumulation(self, world_size: int) -> int:
        """Return the ``accumulate_grad_batches`` that the trainer needs on so many ranks."""
        return -(-self._spec.micro_batches_per_step // world_size)

    def train_dataloader(self) -> Any:
        """Open the training batches at the start, or at the position of Lightning's checkpoint.

        Raises:
            ConfigError: The trainer would step after another number of micro-batches than the plan.
        """
        loader = self._open(self._train, self._spec)
        trainer: Any = self.trainer
        check_accumulation(loader, "accumulate_grad_batches", trainer.accumulate_grad_batches)
        return TrainingBatches(loader, self._convert)

    def val_dataloader(self) -> Any:
        """Open the validation batches; a list for a list of splits, empty without one."""
        return self._open_evaluations(self._eval)

    def test_dataloader(self) -> Any:
        """Open the test batches; a list for a list of splits, empty without one."""
        return self._open_evaluations(self._test)

    def teardown(self, stage: str) -> None:  # noqa: ARG002 - Lightning names it
        """Close the loaders."""
        while self._loaders:
            self._loaders.pop().close()

    def _open_evaluations(self, parts: Part | list[Part]) -> Any:
        spec = replace(self._spec, tail="mask")  # every sample once, whatever training draws
        if isinstance(parts, list):
            return [EvaluationBatches(self._open(part, spec, sampling=None), self._convert) for part in parts]
        return EvaluationBatches(self._open(parts, spec, sampling=None), self._convert) if parts else []

    def _open(self, part: Part, spec: BatchSpec, **changed: Any) -> Loader:
        trainer: Any = self.trainer
        split, own = (part, None) if isinstance(part, str) else part
        conditions = [one for one in (self._settings.get("where"), own) if one is not None]
        where = " and ".join(f"({one})" for one in conditions) or None
        settings = {**self._settings, **changed, "where": where}
        loader = Loader(
            Dataset.open(self._dataset),
            split=split,
            batch=spec,
            seed=self._seed,
            world=World(rank=trainer.global_rank, world_size=trainer.world_size),
            **settings,
        )
        self._loaders.append(loader)
        return loader
