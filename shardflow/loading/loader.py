"""The loader of one rank: iterate, know the length before the first step, stop and go on anywhere.

Owns the position (contract S4): it counts micro-batches that the consumer has received, never those that are
only prefetched. What is in a micro-batch is the plan's business, how it gets there the stream's.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from shardflow.epochs import BatchSpec, EpochPlan, LoaderState, Position, RankSchedule
from shardflow.errors import StateError
from shardflow.loading.assemble import BatchSource
from shardflow.loading.batch import Batch
from shardflow.loading.buffers import BufferPool
from shardflow.loading.config import LoaderConfig
from shardflow.loading.fill import SlotFiller
from shardflow.loading.layout import open_plan
from shardflow.loading.quarantine import Quarantine, QuarantineRow
from shardflow.loading.reader import FieldReader
from shardflow.loading.stream import BatchStream
from shardflow.loading.world import World
from shardflow.shards import Dataset
from shardflow.telemetry import StageCounters

__all__ = ["Loader"]


class Loader:
    """Yields this rank's micro-batches of an epoch, in the plan's order.

    Every rank yields exactly ``len(loader)`` micro-batches an epoch; where the world size does not divide
    ``micro_batches_per_step`` some of them are fillers of weight 0.

    ``iter()`` goes on at the position: the start of the first step that is not consumed yet. So an iteration
    that was broken off inside a step begins with that step again, and after an epoch was exhausted ``iter()``
    begins the next one. One iteration is alive at a time: a second ``iter()``, `load_state_dict` and a
    `set_epoch` that changes the epoch retire it, and its next step raises `StateError`.

    Threads start with the first micro-batch of an iteration and end with it; nothing runs before or between,
    so a process may fork there.

    Args:
        dataset: The dataset.
        split: Which of its splits.
        spec: How steps are formed.
        seed: Run-level seed.
        world: This rank; one of one by default.
        config: How to run; never changes what a micro-batch holds.

    Raises:
        ConfigError: The dataset has no such split.
        PlanError: No step can be formed, or there are more ranks than micro-batches in a step.

    Example::

        loader = Loader(Dataset.open("data"), split="train", spec=spec, seed=7, world=world)
        for epoch in range(loader.epoch, 3):
            loader.set_epoch(epoch)
            for batch in loader:
                train(batch.arrays["image"], batch.arrays["weight"])
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        split: str,
        spec: BatchSpec,
        seed: int,
        world: World | None = None,
        config: LoaderConfig | None = None,
    ) -> None:
        self.world = world or World()
        self.config = config or LoaderConfig()
        self._schedule = RankSchedule(
            spec.micro_batches_per_step,
            self.world.world_size,
            lanes=spec.lanes,
            ranks_per_node=self.world.ranks_per_node,
        )
        self._plan = open_plan(dataset, split, spec, seed=seed, epoch=0)
        self._plan_before = self._plan
        self._state = LoaderState(
            dataset_id=dataset.dataset_id,
            manifest_version=dataset.manifest_version,
            split=split,
            seed=self._plan.seed,
            spec=spec,
        )
        self._position = self._state.position
        self._quarantine = Quarantine(self.config.max_bad_samples)
        self._active: weakref.ref[_EpochIterator] | None = None
        self._own_process(dataset)

    # ---- what is known before the first step -----------------------------------------------------

    @property
    def dataset(self) -> Dataset:
        """The dataset."""
        return self._dataset

    @property
    def plan_id(self) -> str:
        """Identity of the plan: equal for runs that make the same steps, whatever their world size."""
        return self._state.plan_id

    @property
    def plan(self) -> EpochPlan:
        """The plan of the present epoch."""
        return self._plan_of(self.epoch)

    @property
    def num_steps(self) -> int:
        """Steps of the present epoch; under a token budget epochs may differ by a few."""
        return self.plan.num_steps

    def num_steps_in(self, epoch: int) -> int:
        """Return the steps of any epoch."""
        return self._plan_of(epoch).num_steps

    @property
    def num_micro_batches_per_rank(self) -> int:
        """Micro-batches of a step that this rank runs, fillers included."""
        return self._schedule.num_micro_batches_per_rank

    def __len__(self) -> int:
        """Micro-batches that this rank yields in the whole present epoch, wherever the position is."""
        return self.num_steps * self.num_micro_batches_per_rank

    def num_micro_batches_in(self, epoch: int) -> int:
        """Return the micro-batches that this rank yields in a whole epoch, any one."""
        return self.num_steps_in(epoch) * self.num_micro_batches_per_rank

    # ---- iteration -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Go on at the position, to the end of its epoch."""
        self._retire()
        start = self._position.step * self.num_micro_batches_per_rank
        numbers = range(start, len(self))
        iterator = _EpochIterator(self, self.stream(self.epoch, numbers), numbers)
        self._active = weakref.ref(iterator)
        return iterator

    def stream(self, epoch: int, numbers: range) -> BatchStream:
        """Yield some of the rank's micro-batches of any epoch, without moving the position.

        For those who deal micro-batches among processes and count for themselves.

        Args:
            epoch: The epoch.
            numbers: Which, counted over the epoch's steps, 0 to ``len(loader) - 1``.
        """
        if self._pid != os.getpid():
            self._own_process(Dataset(self._dataset.store, self._dataset.manifest))
        plan = self._plan_of(epoch)
        reader = FieldReader(self._dataset, read_bytes=self.config.read_bytes, counters=self._counters)
        filler = SlotFiller(reader, self.config, seed=plan.seed, epoch=epoch, counters=self._counters)
        source = BatchSource(
            dataset=self._dataset,
            plan=plan,
            schedule=self._schedule,
            rank=self.world.rank,
            config=self.config,
            pool=self._pool,
            filler=filler,
            counters=self._counters,
            known_masks=self._quarantine,
        )
        return BatchStream(source, numbers)

    def count(self, batch: Batch, number: int) -> None:
        """Count a micro-batch as consumed and keep its masks.

        The loader's own iteration does it; it is public for those who iterate a `stream` themselves.

        Args:
            batch: The micro-batch.
            number: Its number among the rank's micro-batches of the epoch.

        Raises:
            SampleError: There are more bad samples than ``max_bad_samples`` allows.
        """
        self._quarantine.record(batch.quarantined)
        self._position = Position.after(
            epoch=batch.epoch,
            num_consumed=number + 1,
            num_micro_batches_per_rank=self.num_micro_batches_per_rank,
            num_steps=self.num_steps_in(batch.epoch),
        )

    def close(self) -> None:
        """End the running iteration, if any; the loader can be iterated again."""
        self._retire()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- position --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the position."""
        return self._position.epoch

    @property
    def position(self) -> Position:
        """The first step that is not consumed yet."""
        return self._position

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing happens if the position lies in it already.

        Raises:
            StateError: ``epoch`` is no number from 0.
        """
        if epoch != self.epoch:
            self._retire()
            self._position = Position(epoch, 0)

    def state_dict(self) -> dict[str, object]:
        """Return the position and the run it belongs to: under 1 KB of JSON, equal on all ranks.

        Taken after the last micro-batch of step k was received it says k + 1; inside a step it says that
        step; after an epoch's last step it says step 0 of the next epoch.
        """
        return self._state.at(self._position).to_json()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position; takes effect at the next ``iter()`` and retires a running iteration.

        The state may have been saved with another world size.

        Raises:
            StateError: The state is malformed or of another seed, dataset, split or batch spec; the message
                names the field, and the loader stays where it is.
        """
        loaded = LoaderState.from_json(state)
        loaded.check_matches(self._state)
        loaded.check_within(self.num_steps_in(loaded.epoch))
        self._retire()
        self._position = loaded.position

    # ---- what happened ---------------------------------------------------------------------------

    @property
    def counters(self) -> StageCounters:
        """Time, bytes and items per stage since the loader was made."""
        return self._counters

    @property
    def num_buffers_allocated(self) -> int:
        """Batch buffers asked from the system so far; stands still once iteration is in its stride."""
        return self._pool.num_allocated

    @property
    def quarantined(self) -> list[QuarantineRow]:
        """The slots masked because their sample is bad, in the order of the run; loaded ones included."""
        return self._quarantine.rows

    def masks(self) -> list[dict[str, int | str]]:
        """Return `quarantined` as JSON objects, for a checkpoint."""
        return [row.to_json() for row in self.quarantined]

    def load_masks(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Mask the slots of a checkpoint again, without reading their samples.

        Pass the rows of all ranks: on another world size a slot may have moved to this one. They do not count
        towards ``max_bad_samples``.

        Raises:
            StateError: A row is malformed.
        """
        self._quarantine.load(rows)

    # ---- inside ----------------------------------------------------------------------------------

    def _check_alive(self, iterator: _EpochIterator) -> None:
        if iterator is not self._current():
            raise StateError(
                "an iteration must be the loader's newest, got one that iter(), load_state_dict(), "
                "set_epoch() or close() retired; call iter() again."
            )

    def _own_process(self, dataset: Dataset) -> None:
        """Take memory and locks of this process.

        A forked child cannot use its parent's: they may be held by threads that are not here.
        """
        self._pid = os.getpid()
        self._dataset = dataset
        self._counters = StageCounters()
        self._pool = BufferPool(self.config.prefetch_bytes)

    def _plan_of(self, epoch: int) -> EpochPlan:
        # Where one epoch ends and the next begins both are asked for, in turn.
        for plan in (self._plan, self._plan_before):
            if plan.epoch == epoch:
                return plan
        self._plan, self._plan_before = self._plan.for_epoch(epoch), self._plan
        return self._plan

    def _current(self) -> _EpochIterator | None:
        return self._active() if self._active is not None else None

    def _retire(self) -> None:
        current = self._current()
        self._active = None
        if current is not None:
            current.close()


class _EpochIterator(Iterator[Batch]):
    """An iteration of a loader. The loader knows it weakly: when its user drops it, its threads end."""

    def __init__(self, loader: Loader, stream: BatchStream, numbers: range) -> None:
        self._loader = loader
        self._stream = stream
        self._numbers = numbers
        self._num_delivered = 0

    def __next__(self) -> Batch:
        if self._num_delivered == len(self._numbers):
            self.close()
            raise StopIteration
        self._loader._check_alive(self)
        batch = next(self._stream)
        try:
            self._loader.count(batch, self._numbers[self._num_delivered])
        except BaseException:
            self.close()
            raise
        self._num_delivered += 1
        return batch

    def close(self) -> None:
        self._stream.close()
