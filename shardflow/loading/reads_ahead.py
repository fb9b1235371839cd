"""The reads that come next, brought into the cache before the loader asks, in the order of the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardflow.epochs import EpochPlan, RankSchedule
from shardflow.fields.quarantine import BadSample
from shardflow.fields.reader import FieldReader, Shard
from shardflow.fields.scratch import ThreadState
from shardflow.fields.slots import needed_fields
from shardflow.loading.config import LoaderConfig
from shardflow.loading.selection import Selection
from shardflow.storage import ByteRange
from shardflow.storage.cache import CachedStore
from shardflow.telemetry import StageCounters

__all__ = ["ReadsAhead", "ShardRead"]


@dataclass(frozen=True, slots=True, eq=False)
class ShardRead:
    """A part of a wish that lies in one shard."""

    store: CachedStore
    path: str
    ranges: Sequence[ByteRange]

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that it needs."""
        return self.store.num_bytes_ahead(self.path, self.ranges)

    def run(self) -> Callable[[], None] | None:
        """Read what is not kept; returns what publishes it, see `CachedStore.read_ahead`."""
        return self.store.read_ahead(self.path, self.ranges)


class ReadsAhead:
    """The reads to come, in order: of this epoch, then of the next. Safe for many threads.

    A wish is the samples of a micro-batch that are fetched at once: one with images, all of them without.

    Args:
        selection: The samples.
        schedule: Who runs what.
        rank: This rank.
        config: What is read of a sample.
        plan: The present epoch.
        numbers: The rank's micro-batches of it that are read, in order.
    """

    def __init__(
        self,
        selection: Selection,
        schedule: RankSchedule,
        rank: int,
        config: LoaderConfig,
        plan: EpochPlan,
        numbers: range,
    ) -> None:
        self._selection, self._schedule, self._rank, self._config = selection, schedule, rank, config
        self._lock = threading.Lock()
        self._plans = {plan.epoch: plan.for_epoch(plan.epoch)}
        self._reader = FieldReader(selection, read_bytes=1, counters=StageCounters())
        self._generator = self._all(plan, numbers)

    def take(self, next_number: int) -> tuple[int, int, int, NDArray[np.int64]] | None:
        """Return the next wish that the loader has not come to itself.

        Returns:
            Its place among the micro-batches of both epochs, epoch, number, and rows; None at the end.
        """
        with self._lock:
            for wish in self._generator:
                if wish[0] >= next_number:
                    return wish
            return None

    def reads(self, epoch: int, number: int, rows: NDArray[np.int64], thread: ThreadState) -> list[ShardRead]:
        """Return what the fields of samples are read from.

        Raises:
            StorageError: The index of a shard cannot be read.
        """
        selection = self._selection
        found: list[ShardRead] = []
        shards, inside = selection.column("shard", rows), selection.column("row_in_shard", rows)
        for shard_number in np.unique(shards).tolist():
            try:
                shard = self._reader.open_shard(shard_number, thread)
            except BadSample:
                continue  # the loader finds it again and masks it
            if not isinstance(shard.store, CachedStore):
                continue
            fields: list[int] = []
            for place in np.flatnonzero(shards == shard_number).tolist():
                if int(inside[place]) < shard.index.num_samples:
                    fields += self._fields(shard, int(inside[place]), int(rows[place]), epoch, number)
            offsets = shard.index.field_offsets[fields].tolist()
            sizes = shard.index.field_num_bytes[fields].tolist()
            ranges = [ByteRange(offset, size) for offset, size in zip(offsets, sizes, strict=True)]
            if ranges:
                found.append(ShardRead(shard.store, shard.path, ranges))
        return found

    def _fields(self, shard: Shard, row_in_shard: int, row: int, epoch: int, number: int) -> list[int]:
        step, slot = divmod(number, self._schedule.num_micro_batches_per_rank)
        place: tuple[int, ...] = ()
        if self._selection.is_blend:
            # The slot in the micro-batch: the plan says it.
            micro = self._schedule.micro(self._rank, slot)
            planned = self._plans[epoch].micro_batch(step, micro).rows
            place = (step, micro, int(np.flatnonzero(planned == row)[0]))
        found = needed_fields(
            shard,
            row_in_shard,
            self._config.view,
            text=self._config.text,
            seed=self._plans[epoch].seed,
            epoch=epoch,
            row=row,
            table_row=int(self._selection.table_rows(np.array([row], np.int64))[0]),
            place=place,
            entity=self._selection.entity(row),
        )
        return [int(field) for field in found]

    def _all(self, plan: EpochPlan, numbers: range) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
        per_rank = self._schedule.num_micro_batches_per_rank
        yield from self._epoch(plan.epoch, numbers, 0)
        following = self._plans[plan.epoch + 1] = plan.for_epoch(plan.epoch + 1)
        first = numbers.start % numbers.step
        num_before = plan.num_steps * per_rank
        yield from self._epoch(
            following.epoch, range(first, following.num_steps * per_rank, numbers.step), num_before
        )

    def _epoch(
        self, epoch: int, numbers: range, num_before: int
    ) -> Iterator[tuple[int, int, int, NDArray[np.int64]]]:
        plan = self._plans[epoch]
        for number in numbers:
            step, slot = divmod(number, self._schedule.num_micro_batches_per_rank)
            rows = plan.micro_batch(step, self._schedule.micro(self._rank, slot)).rows
            rows = rows[rows >= 0]
            if self._config.view is None:
                if len(rows):
                    yield num_before + number, epoch, number, rows
                continue
            for place in range(len(rows)):
                yield num_before + number, epoch, number, rows[place : place + 1]
