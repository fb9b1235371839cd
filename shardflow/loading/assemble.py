"""One micro-batch from plan to `Batch`: lay it out, fill its slots sample by sample, close it.

Sizes are known from facts before anything is read, so memory is taken once and every slice is decoded into
its place. A sample that turns out to be bad leaves a masked slot; the other slots never notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.epochs import EpochPlan, RankSchedule
from shardflow.errors import SampleError
from shardflow.loading.batch import ArraySpec, Batch, BatchLayout
from shardflow.loading.buffers import BufferPool
from shardflow.loading.config import LoaderConfig
from shardflow.loading.fill import SlotFiller, SlotRequest
from shardflow.loading.quarantine import BadSample, Quarantine, QuarantineRow
from shardflow.loading.thread_state import ThreadState
from shardflow.loading.view import SliceFacts
from shardflow.shards import Dataset
from shardflow.telemetry import StageCounters

__all__ = ["BatchSource", "MicroBatchTicket"]

# Without images a sample is a few kilobytes: a part of many costs one hand-over between threads.
_TEXT_SAMPLES_PER_PART = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSource:
    """Everything that the micro-batches of one epoch have in common; shared by all threads."""

    dataset: Dataset
    plan: EpochPlan
    schedule: RankSchedule
    rank: int
    config: LoaderConfig
    pool: BufferPool
    filler: SlotFiller
    counters: StageCounters
    known_masks: Quarantine
    """Slots that a checkpoint says are masked; they are not read."""

    def open(self, number: int) -> MicroBatchTicket:
        """Open this rank's micro-batch ``number`` of the epoch, counted over steps."""
        step, slot = divmod(number, self.schedule.num_micro_batches_per_rank)
        with self.counters.timed("plan"):
            return MicroBatchTicket(self, step, slot)


class MicroBatchTicket:
    """A micro-batch under way; see `engine.Ticket`.

    Args:
        source: What it is made from.
        step: Step of the epoch.
        slot: Which of the rank's micro-batches of the step.
    """

    def __init__(self, source: BatchSource, step: int, slot: int) -> None:
        self._source = source
        self._step = step
        self._slot = slot
        self._micro = source.schedule.micro(source.rank, slot)
        planned = source.plan.micro_batch(step, self._micro)
        self._rows = planned.rows
        self._weights = planned.weights
        self._bad: dict[int, QuarantineRow] = {}
        samples = source.dataset.samples
        self._is_sample = self._rows >= 0
        at = self._rows[self._is_sample]
        self._keys: list[str | None] = [None] * len(self._rows)
        for place, key in zip(
            np.flatnonzero(self._is_sample).tolist(), samples.gather("sample_key", at), strict=True
        ):
            self._keys[place] = key.decode("ascii")
        self._shard = self._column("shard", at)
        self._row_in_shard = self._column("row_in_shard", at)
        self._offset = self._column("offset_bytes", at)
        self._text_bytes = self._column("text_bytes", at) if source.config.text else np.zeros_like(self._rows)
        self._mask_known()
        self._facts = self._read_facts(at)
        self._layout = BatchLayout.of(self._array_specs())
        self._parts = self._cut_parts()
        self._buffer = np.empty(0, np.uint8)
        self._arrays: dict[str, NDArray[Any]] = {}

    # ---- engine.Ticket ---------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Memory of the batch's buffer."""
        return self._source.pool.size_of(self._layout.num_bytes)

    @property
    def num_parts(self) -> int:
        """Parts: one per sample with images, one per some dozen samples without."""
        return len(self._parts)

    def begin(self) -> None:
        """Take memory and fill what the plan and the facts say."""
        self._buffer = self._source.pool.lend(self._layout.num_bytes)
        self._arrays = self._layout.views(self._buffer)
        self._arrays["row"][:] = self._rows
        self._arrays["weight"][:] = self._weights
        if self._source.config.text:
            offsets = self._arrays["text_offsets"]
            offsets[0] = 0
            np.cumsum(self._text_bytes, out=offsets[1:])
        if self._source.config.view is not None:
            self._arrays["display_range"][:] = 0
            self._source.config.view.prepare(self._arrays, self._facts)

    def run(self, part: int, thread: ThreadState) -> None:
        """Fill the slots of a part.

        Raises:
            SampleError: A sample is bad, and the loader is told to raise.
            StorageError: A shard cannot be read at all.
        """
        for slots in self._by_shard(self._parts[part]):
            requests = [self._request(slot) for slot in slots.tolist()]
            shard = int(self._shard[slots[0]])
            for slot, bad in self._source.filler.fill(shard, requests, self._arrays, thread).items():
                self._mask(slot, bad)

    def finish(self) -> Batch:
        """Blank what holds no sample and make the batch."""
        view, text = self._source.config.view, self._source.config.text
        blank = sorted({*np.flatnonzero(~self._is_sample).tolist(), *self._bad})
        for slot in blank:
            self._arrays["weight"][slot] = 0
            if view is not None:
                self._arrays["display_range"][slot] = 0
                view.blank(self._arrays, slot)
        entries = self._layout.to_json()
        if text:
            self._close_text_gaps([slot for slot in blank if self._text_bytes[slot]], entries)
        return Batch(
            self._buffer,
            {
                "version": 1,
                "epoch": self._source.plan.epoch,
                "step": self._step,
                "micro": self._micro,
                "slot": self._slot,
                "arrays": entries,
                "keys": self._keys,
                "quarantined": [self._bad[slot].to_json() for slot in sorted(self._bad)],
            },
        )

    def describe(self) -> str:
        """Name the micro-batch for a message."""
        return f"micro-batch {self._micro} of step {self._step} of epoch {self._source.plan.epoch}"

    # ---- slots -----------------------------------------------------------------------------------

    def _request(self, slot: int) -> SlotRequest:
        return SlotRequest(
            slot=slot,
            row=int(self._rows[slot]),
            row_in_shard=int(self._row_in_shard[slot]),
            key=self._keys[slot] or "",
            text_bytes=int(self._text_bytes[slot]),
        )

    def _mask(self, slot: int, bad: BadSample) -> None:
        row = QuarantineRow(
            epoch=self._source.plan.epoch,
            step=self._step,
            micro=self._micro,
            slot_in_batch=slot,
            row=int(self._rows[slot]),
            key=self._keys[slot] or "",
            shard=bad.shard,
            field=bad.field,
            reason=bad.reason.value,
        )
        if self._source.config.on_bad_sample == "raise":
            raise SampleError(
                f"sample {row.key} must be readable, got {bad} ({self.describe()}); run `shardflow verify` "
                'on the dataset, or set on_bad_sample to "mask".'
            )
        self._bad[slot] = row

    def _close_text_gaps(self, slots: list[int], entries: list[dict[str, Any]]) -> None:
        """Take the text of masked slots out of the flat array, so that the offsets say what is there."""
        if not slots:
            return
        offsets, text = self._arrays["text_offsets"], self._arrays["text_bytes"]
        kept = np.ones(len(text), bool)
        for slot in slots:
            kept[offsets[slot] : offsets[slot + 1]] = False
            self._text_bytes[slot] = 0
        num_bytes = int(np.count_nonzero(kept))
        text[:num_bytes] = text[kept]
        np.cumsum(self._text_bytes, out=offsets[1:])
        next(entry for entry in entries if entry["name"] == "text_bytes")["shape"] = [num_bytes]

    # ---- layout ----------------------------------------------------------------------------------

    def _column(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a column of the samples table, ``(B,)`` int64, zero in padding slots."""
        values = np.zeros(len(self._rows), np.int64)
        values[self._is_sample] = self._source.dataset.samples.gather(name, rows)
        return values

    def _mask_known(self) -> None:
        if not self._source.known_masks:
            return
        for slot in np.flatnonzero(self._is_sample).tolist():
            known = self._source.known_masks.find((self._source.plan.epoch, self._step, self._micro, slot))
            if known is not None:
                self._bad[slot] = known
                self._text_bytes[slot] = 0

    def _read_facts(self, rows: NDArray[np.int64]) -> SliceFacts:
        names = ("num_slices", "rows", "columns")
        if self._source.config.view is None:
            return SliceFacts(*(np.zeros(len(self._rows), np.int64) for _ in names))
        return SliceFacts(*(self._column(name, rows) for name in names))

    def _array_specs(self) -> list[ArraySpec]:
        num_slots = len(self._rows)
        specs = [ArraySpec.of("row", np.int64, num_slots), ArraySpec.of("weight", np.float32, num_slots)]
        if self._source.config.view is not None:
            specs += self._source.config.view.array_specs(self._facts)
            specs.append(ArraySpec.of("display_range", np.float32, num_slots, 2))
        if self._source.config.text:
            specs.append(ArraySpec.of("text_offsets", np.int64, num_slots + 1))
            specs.append(ArraySpec.of("text_bytes", np.uint8, int(self._text_bytes.sum())))
        return specs

    def _cut_parts(self) -> list[NDArray[np.int64]]:
        """Cut the slots that need reading into parts, in the order in which they lie on disk."""
        config = self._source.config
        if config.view is None and not config.text:
            return []
        slots = np.array(
            [slot for slot in np.flatnonzero(self._is_sample).tolist() if slot not in self._bad], np.int64
        )
        slots = slots[np.lexsort((self._offset[slots], self._shard[slots]))]
        size = 1 if config.view is not None else _TEXT_SAMPLES_PER_PART
        return [slots[first : first + size] for first in range(0, len(slots), size)]

    def _by_shard(self, slots: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        yield from np.split(slots, np.flatnonzero(np.diff(self._shard[slots])) + 1)
