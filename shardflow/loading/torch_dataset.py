"""Adapter for torch's DataLoader: the same micro-batches in the same order, the same length, exact resume.

The DataLoader asks its workers in turn, so worker ``w`` of ``n`` makes every n-th micro-batch, and their
order is the plan's. A batch crosses the process boundary as one tensor in shared memory and a JSON text. Each
worker reads and decodes with threads of its own, which start in the worker.

Workers run ahead, so only the main process knows what was consumed: `ShardIterableDataset.track` counts
there. The `Loader` is faster (no copies between processes); this is for pipelines that need the DataLoader.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardflow.errors import StateError
from shardflow.fields.quarantine import QuarantineRow
from shardflow.format import Dataset
from shardflow.loading.batch import Batch
from shardflow.loading.config import LoaderConfig, World
from shardflow.loading.loader import Loader
from shardflow.loading.selection import Selection
from shardflow.sampling import BatchSpec, Position


class ShardIterableDataset(IterableDataset[Batch]):
    """Iterable dataset of whole micro-batches; pass it to a ``DataLoader`` with ``batch_size=None``.

    An iteration runs from the position to the end of its epoch. The position moves with `track`, `set_epoch`
    and `load_state_dict`, even with persistent workers; never while workers run ahead.

    Args:
        dataset: The dataset, or a blend of several; workers open it anew.
        split: As in `Loader`, like the arguments below.
        batch: How micro-batches and steps are formed.
        seed: Run-level seed.
        subset: Terms that all samples must satisfy.
        world: This rank, as in `Loader`; workers get the one that is found here.
        config: How to run, per worker.

    Raises:
        ConfigError: The dataset has no such split.
        PlanError: No step can be formed, or there are more ranks than micro-batches in a step.

    Example::

        dataset = ShardIterableDataset(Dataset.open("data"), split="train", batch=spec, seed=7)
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        for epoch in range(3):
            dataset.set_epoch(epoch)
            for batch in dataset.track(loader):
                train(torch.from_numpy(batch.arrays["image"]))
                save(dataset.state_dict())
    """

    def __init__(
        self,
        dataset: Dataset | Selection,
        *,
        split: str = "",
        batch: BatchSpec,
        seed: int,
        subset: Sequence[str] = (),
        world: World | Literal["single"] | Any = None,
        config: LoaderConfig | None = None,
    ) -> None:
        super().__init__()
        self._arguments: dict[str, Any] = {
            "split": split,
            "batch": batch,
            "seed": seed,
            "subset": tuple(subset),
            "config": config or LoaderConfig(),
        }
        self._dataset = dataset
        # Counts, and records masks, in the main process; never iterated there.
        self._loader = Loader(dataset, world=world, **self._arguments)
        self._arguments["world"] = self._loader.world  # workers are told, and resolve nothing
        # Where an iteration begins; in shared memory, because persistent workers keep their first copy of
        # self.
        self._start: torch.Tensor = torch.zeros(2, dtype=torch.int64)
        self._start.share_memory_()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Return what crosses to a worker: the arguments, the start and the masks."""
        state = {key: value for key, value in self.__dict__.items() if key != "_loader"}
        return {**state, "_masks": self._loader.masks()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        masks = state.pop("_masks")
        self.__dict__.update(state)
        self._loader = Loader(self._dataset, **self._arguments)
        self._loader.load_masks(masks)

    def __len__(self) -> int:
        """Micro-batches that this rank yields in the whole current epoch."""
        return len(self._loader)

    @property
    def num_steps(self) -> int:
        """Steps of the current epoch."""
        return self._loader.num_steps

    @property
    def plan_id(self) -> str:
        """Identity of the plan, as in `Loader`."""
        return self._loader.plan_id

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches of this worker; called by the DataLoader in each of its workers."""
        worker = get_worker_info()
        number, num_workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        epoch, step = (int(value) for value in self._start)
        first = step * self._loader.num_micro_batches_per_rank + number
        last = self._loader.num_micro_batches_in(epoch)
        stream = self._loader.stream(epoch, range(first, last, num_workers))
        if worker is None:
            return map(_WholeBatch.of, stream)
        return cast("Iterator[Batch]", map(_Parcel, stream))

    def track(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate a DataLoader over this dataset and count what is consumed.

        Args:
            batches: The DataLoader.

        Yields:
            Its batches.

        Raises:
            SampleError: There are more bad samples than ``max_bad_samples`` allows.
            StateError: The batches are not the next ones: the DataLoader shuffles or drops them, or is over
                another dataset.
        """
        self._move()
        expected = self._loader.position
        epoch, per_rank = expected.epoch, self._loader.num_micro_batches_per_rank
        for number, batch in enumerate(batches, start=expected.step * per_rank):
            if self._loader.position != expected:
                raise StateError(
                    "the position must stay while batches are tracked, got set_epoch() or load_state_dict() "
                    "in between; call track() again."
                )
            if (batch.epoch, batch.step, batch.slot) != (epoch, *divmod(number, per_rank)):
                raise StateError(
                    f"micro-batch {number} of epoch {epoch} must come next, got step {batch.step} slot "
                    f"{batch.slot} of epoch {batch.epoch}; leave order and sampling to the dataset, and "
                    "iterate the DataLoader through track() only."
                )
            self._loader.count(batch, number)
            expected = self._loader.position
            yield batch

    # ---- state, as in Loader ---------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the position."""
        return self._loader.epoch

    @property
    def position(self) -> Position:
        """The first step that is not consumed yet."""
        return self._loader.position

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch; does nothing if the position is in it already."""
        self._loader.set_epoch(epoch)
        self._move()

    def state_dict(self) -> dict[str, object]:
        """Return the position after what `track` has yielded, see `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Move to a saved position, also one of a `Loader`; takes effect at the next iteration.

        Raises:
            StateError: See `Loader.load_state_dict`.
        """
        self._loader.load_state_dict(state)
        self._move()

    @property
    def quarantined(self) -> list[QuarantineRow]:
        """Masked slots among what `track` has yielded."""
        return self._loader.quarantined

    def masks(self) -> list[dict[str, int | str]]:
        """Return `quarantined` as JSON objects, for a checkpoint."""
        return self._loader.masks()

    def load_masks(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Mask the slots of a checkpoint again; before the DataLoader starts its workers."""
        self._loader.load_masks(rows)

    def _move(self) -> None:
        position = self._loader.position
        self._start[:] = torch.tensor([position.epoch, position.step])


class _WholeBatch(Batch):
    """Batch that a DataLoader without workers leaves as it is.

    Its default conversion would turn a mapping into a new one; of a mutable mapping it converts and updates a
    copy, which here is the batch itself, unchanged.
    """

    __slots__ = ()

    @classmethod
    def of(cls, batch: Batch) -> _WholeBatch:
        """Return the same micro-batch."""
        return cls(batch.buffer, batch.descriptor)

    def __copy__(self) -> _WholeBatch:
        return self

    def update(self, converted: Mapping[str, Any]) -> None:
        """Keep the arrays."""


MutableMapping.register(_WholeBatch)


class _Parcel:
    """Batch on its way to the main process, where it is unpickled as a `Batch`.

    The DataLoader's queue passes a tensor as shared memory, and copies everything else.
    """

    __slots__ = ("_batch",)

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, tuple[torch.Tensor, str]]:
        return _unpack, (torch.from_numpy(self._batch.buffer), json.dumps(self._batch.descriptor))


def _unpack(buffer: torch.Tensor, descriptor: str) -> Batch:
    return Batch(buffer.numpy(), json.loads(descriptor))
