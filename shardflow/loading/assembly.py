"""Assembly of a micro-batch from plan to `Batch`: lay it out, fill its slots sample by sample, finish it.

Sizes follow from the samples table before anything is read, so memory is allocated once and every slice is
decoded into its place. A bad sample leaves a masked slot and does not affect the others.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, SampleError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import ArraySpec, BoundField, SlotRequest, Slots
from shardflow.fields.quarantine import (
    PREVIOUS_STUDY,
    BadSample,
    BadSampleReason,
    Quarantine,
    QuarantineRow,
    remedy_of,
)
from shardflow.fields.registry import FieldSet
from shardflow.fields.slots import SlotAssembler
from shardflow.fields.transforming import SampleTransform
from shardflow.fields.types.findings import FindingArrays
from shardflow.fields.types.text import TextAssembler
from shardflow.loading.batch import Batch, SlotKeys
from shardflow.loading.config import LoaderConfig, check_fits, check_layout
from shardflow.loading.engine import Pool
from shardflow.loading.layout import BatchLayout
from shardflow.loading.prefetch import StreamReads
from shardflow.loading.rows.selection import Selection
from shardflow.sampling import EpochPlan, RankSchedule
from shardflow.sampling.micro_batches import PADDING_ROW
from shardflow.telemetry import StageCounters

_LOGGER = logging.getLogger(__name__)
# Without images a sample is a few kilobytes, and the costly work is done once per shard.
_TEXT_SAMPLES = 1024
_PARTS_PER_THREAD = 2
_LOCAL_BYTES = 1 << 20


class PartSize:
    """Rule that divides micro-batches into parts; one for all micro-batches of a loader.

    Args:
        selection: The samples and their datasets.
        config: Its number of threads.
        fields: What is read of them.
    """

    __slots__ = ("_has_images", "_max_bytes", "_num_parts")

    def __init__(self, selection: Selection, config: LoaderConfig, fields: FieldSet) -> None:
        self._has_images = fields.reads_members
        self._num_parts = _PARTS_PER_THREAD * config.num_threads
        self._max_bytes = _LOCAL_BYTES if selection.is_local else None

    def divide_among(self, num_threads: int) -> None:
        """Set the number of threads; applies to micro-batches divided afterwards."""
        self._num_parts = _PARTS_PER_THREAD * num_threads

    def cut(
        self,
        slots: NDArray[np.int64],
        *,
        shards: NDArray[np.int64],
        offsets: NDArray[np.int64],
        num_bytes: NDArray[np.int64],
    ) -> list[NDArray[np.int64]]:
        """Divide slots into parts, in the order of their samples on disk.

        Args:
            slots: ``(n,)``, slots that hold a sample.
            shards: ``(B,)``, shard of each slot.
            offsets: ``(B,)``, offset of the sample in its shard.
            num_bytes: ``(B,)``, size of the sample; 0 if unknown.

        Returns:
            Parts; with images, each of a single shard.
        """
        slots = slots[np.lexsort((offsets[slots], shards[slots]))]
        if not self._has_images:
            return [slots[first : first + _TEXT_SAMPLES] for first in range(0, len(slots), _TEXT_SAMPLES)]
        max_samples = max(1, len(slots) // self._num_parts)
        parts: list[NDArray[np.int64]] = []
        first = held = 0
        where, sizes = shards[slots].tolist(), num_bytes[slots].tolist()
        for place, size in enumerate(sizes):
            is_full = place - first == max_samples or (
                self._max_bytes is not None and held + size > self._max_bytes
            )
            if place > first and (is_full or where[place] != where[first]):
                parts.append(slots[first:place])
                first, held = place, 0
            held += size
        return [*parts, slots[first:]] if len(slots) else parts


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSource:
    """What all micro-batches of a stream have in common; shared by all threads."""

    selection: Selection
    plan: EpochPlan
    schedule: RankSchedule
    rank: int
    config: LoaderConfig
    pool: Pool
    assembler: SlotAssembler
    previous: SlotAssembler
    """Fills slots with the earlier studies of the same persons."""
    texts: TextAssembler | None
    """Fast path for samples of text alone."""
    part_size: PartSize
    warned: set[tuple[str, str]] = field(default_factory=set)
    """Reasons and fields of masked samples that the log has."""
    counters: StageCounters
    known_masks: Quarantine
    """Slots that are masked according to a checkpoint; they are not read."""
    findings: FindingArrays | None = None
    """Arrays of slots whose samples are findings; None if no sample is one."""
    fields: FieldSet
    """What a batch holds."""
    reads: StreamReads | None = None
    """Tracks the reads for the forecast of a cache."""

    def num_threads(self, config: LoaderConfig) -> int:
        """Return how many of the configured threads are useful.

        Tokens alone are copied out of memory maps under the interpreter's lock, so a second thread would only
        add switches. Remote tokens are fetched first, which threads do wait for.
        """
        is_copied = not self.fields.reads_shards and self.selection.is_local
        return 1 if is_copied else config.num_threads

    def open(self, number: int) -> MicroBatchTask:
        """Open micro-batch ``number`` of this rank, counted over the steps of the epoch."""
        step, slot = divmod(number, self.schedule.num_micro_batches_per_rank)
        if self.reads is not None:
            self.reads.opened(number)
        with self.counters.timed("plan"):
            return MicroBatchTask(self, step, slot)


@dataclass(frozen=True, slots=True)
class _Previous:
    """Earlier studies of the samples of a micro-batch."""

    slots: Slots
    shard: NDArray[np.int64]
    """``(B,)``, as in the samples table; 0 where there is none."""
    row_in_shard: NDArray[np.int64]
    keys: Mapping[int, str]
    """Their keys, by the slots that have one to read."""

    def request(self, slot: int) -> SlotRequest:
        """Return the request for the earlier study of a slot."""
        row = int(self.slots.table_rows[slot])
        return SlotRequest(
            slot=slot,
            draw=self.slots.draw(slot),
            row_in_shard=int(self.row_in_shard[slot]),
            key=self.keys[slot],
            component=int(self.slots.components[slot]),
            study_row=row,
            table_row=row,
        )


class MicroBatchTask:
    """Micro-batch being made; see `engine.Task`.

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
        self._num_crops = source.fields.num_crops
        self._rows, self._weights = planned.rows, planned.weights
        if self._num_crops > 1:
            self._rows = np.repeat(planned.rows, self._num_crops)
            self._weights = np.repeat(planned.weights, self._num_crops)
        self._bad: dict[int, QuarantineRow] = {}
        self._is_sample = self._rows >= 0
        at = self._rows if self._is_sample.all() else self._rows[self._is_sample]
        self._keys = self._study_keys = SlotKeys(source.selection.key_bytes, self._rows)
        if source.selection.has_derived_keys:
            self._study_keys = SlotKeys(source.selection.study_key_bytes, self._rows)
        self._modalities: list[str] = []
        if source.fields.has_pictures:
            self._modalities = [""] * len(self._rows)
            places = np.flatnonzero(self._is_sample).tolist()
            for place, modality in zip(places, source.selection.modalities(at), strict=True):
                self._modalities[place] = modality
        self._table_rows, self._components = self._rows, None
        if source.selection.is_blend:
            self._table_rows = self._by_slot(source.selection.table_rows(at), PADDING_ROW)
            self._components = self._by_slot(source.selection.components_of(at), PADDING_ROW)
        nothing = np.zeros_like(self._rows)
        is_read = source.fields.reads_shards
        self._shard = self._column("shard", at) if is_read else nothing
        self._row_in_shard = self._column("row_in_shard", at) if is_read else nothing
        self._offset = self._column("offset_bytes", at) if is_read else nothing
        self._num_bytes = self._column("num_bytes", at) if source.fields.reads_members else nothing
        self._mask_known()
        self._slots = self._read_slots(self._by_slot(source.selection.study_rows(at)))
        self._previous = self._open_previous()
        self._transforming = source.fields.transform
        # What is made of all fields of a sample needs those beside the shards in any part.
        self._needs_beside = self._transforming is not None or bool(source.fields.derived)
        self._inputs_layout = BatchLayout.of(self._input_specs())
        self._layout = BatchLayout.of(self._array_specs())
        check_layout(self._layout)
        self._parts = self._cut_parts()
        self._buffer = np.empty(0, np.uint8)
        self._arrays: dict[str, NDArray[Any]] = {}
        # With a transform: the fields as they are read, and what it returned by slot and is not stored yet.
        self._inputs: dict[str, NDArray[Any]] = {}
        self._outputs: dict[int, dict[str, Any]] = {}

    # ---- engine.Task ---------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Memory of the batch's buffer, and with a transform of the fields that it gets."""
        size_of = self._source.pool.size_of
        if self._transforming is None:
            return size_of(self._layout.num_bytes)
        num_bytes = self._layout.num_bytes
        if self._is_held:
            num_bytes += (
                self._transforming.contract.num_bytes(len(self._rows)) or self._inputs_layout.num_bytes
            )
        return size_of(num_bytes) + size_of(self._inputs_layout.num_bytes)

    @property
    def num_parts(self) -> int:
        """Number of parts: one for all stored tokens, and those of `PartSize`."""
        return len(self._parts)

    def begin(self) -> None:
        """Allocate memory and fill in what follows from the plan and the samples table."""
        self._buffer = self._source.pool.lend(self._layout.num_bytes)
        self._arrays = self._layout.views(self._buffer)
        self._arrays["row"][:] = self._table_rows
        if self._components is not None:
            self._arrays["component"][:] = self._components
        self._arrays["weight"][:] = self._weights
        if self._source.findings is not None:
            self._source.findings.put(self._rows, self._arrays)
        self._inputs = self._arrays
        if self._transforming is not None:
            inputs = self._source.pool.lend(self._inputs_layout.num_bytes)
            self._inputs = self._inputs_layout.views(inputs)
        self._source.fields.prepare(self._inputs, self._slots)
        if self._needs_beside:
            self._fill_beside(self._source.fields.beside, ThreadState())

    def run(self, part: int, thread: ThreadState) -> None:
        """Fill the slots of a part.

        Raises:
            SampleError: A sample is bad, and the loader is configured to raise.
            StorageError: A shard cannot be read.
        """
        source, fields, slots = self._source, self._source.fields, self._parts[part]
        if part == 0 and (fields.beside or not fields.reads_shards):
            if not self._needs_beside:
                self._fill_beside(fields.beside, thread)
            elif not fields.reads_shards:
                self._complete(slots, thread)
            return
        own = slots if fields.reads_own else slots[:0]
        if source.texts is not None and fields.report is not None and len(own):
            own = source.texts.fill(
                own,
                shards=self._shard[own],
                rows_in_shard=self._row_in_shard[own],
                keys=self._study_keys.of(own),
                text_bytes=fields.report.spaces(self._slots)[own],
                arrays=self._inputs,
                thread=thread,
            )
        for here in np.split(own, np.flatnonzero(np.diff(self._shard[own])) + 1) if len(own) else []:
            requests = [self._request(slot) for slot in here.tolist()]
            shard = int(self._shard[here[0]])
            for slot, bad in source.assembler.fill(shard, requests, self._inputs, thread).items():
                self._mask(slot, bad)
        if self._previous is not None:
            self._read_previous(self._previous, slots, thread)
        self._complete(slots, thread)

    def finish(self) -> Batch:
        """Blank the slots without a sample and return the batch."""
        if self._source.reads is not None:
            per_rank = self._source.schedule.num_micro_batches_per_rank
            self._source.reads.finished(self._step * per_rank + self._slot)
        has_padding = not self._is_sample.all()
        blank = {*np.flatnonzero(~self._is_sample).tolist()} if has_padding else set()
        for slot in sorted(blank | self._bad.keys()):
            self._arrays["weight"][slot] = 0
            if self._transforming is None:
                self._source.fields.blank(self._arrays, slot)
        if self._transforming is None:
            described = self._source.fields.describe()
        else:
            described = self._store_outputs(self._transforming)
        named = [] if self._transforming is None else self._source.fields.describe_names()
        return Batch(
            self._buffer,
            {
                "version": 1,
                "epoch": self._source.plan.epoch,
                "step": self._step,
                "micro": self._micro,
                "slot": self._slot,
                "arrays": None,
                **self._units(),
                "entries": described,
                **({"named": named} if named else {}),
                "keys": None,
                **({"modalities": self._modalities} if self._source.fields.has_pictures else {}),
                "quarantined": [self._bad[slot].to_json() for slot in sorted(self._bad)],
            },
            arrays=self._arrays,
            layout=self._layout,
            keys=self._keys,
        )

    def _units(self) -> dict[str, Any]:
        """Return what the samples are, by component, if they are not all studies."""
        units = self._source.selection.units
        return {"units": list(units)} if {*units} != {"study"} else {}

    # ---- for data servers ------------------------------------------------------------------------

    @property
    def is_padding(self) -> bool:
        """Whether it holds no sample, so that nothing is read for it."""
        return not self._is_sample.any()

    def request(self) -> dict[str, Any]:
        """Return its address in the run, and its slots that a checkpoint knows to be masked, as JSON."""
        masks = [self._bad[slot].to_json() for slot in sorted(self._bad)]
        return {"epoch": self._source.plan.epoch, "step": self._step, "micro": self._micro, "masks": masks}

    @property
    def known_num_bytes(self) -> int | None:
        """Size of the batch, as it follows from the tables; None if only a transform will tell."""
        return None if self._is_held else self._layout.num_bytes

    def received(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return memory, ``(num_bytes,)`` uint8, for what another machine made of it.

        Raises:
            FormatError: It is not of the size that follows from the tables.
        """
        if not self._is_held and num_bytes != self._layout.num_bytes:
            raise FormatError(
                f"{self.describe()} must have {self._layout.num_bytes} bytes, got {num_bytes} from a data "
                "server; run the same shardflow on all machines."
            )
        check_fits(num_bytes, self.describe(), "lower its samples, or what the transform returns")
        return self._source.pool.lend(num_bytes)

    def batch_of(self, buffer: NDArray[np.uint8], descriptor: dict[str, Any]) -> Batch:
        """Return the batch of what another machine made of it, given the flat buffer and the descriptor.

        Raises:
            FormatError: It is another micro-batch, or its arrays are not those that follow from the tables.
        """
        found = [descriptor.get(name) for name in ("version", "epoch", "step", "micro")]
        arrays = descriptor.get("arrays")
        is_right = found == [1, self._source.plan.epoch, self._step, self._micro]
        if not is_right or not (self._is_held or arrays == self._layout.to_json()):
            raise FormatError(
                f"{self.describe()} must come with its own arrays, got others from a data server; run the "
                "same shardflow on all machines."
            )
        return Batch(buffer, {**descriptor, "slot": self._slot})

    def describe(self) -> str:
        """Name the micro-batch for a message."""
        return f"micro-batch {self._micro} of step {self._step} of epoch {self._source.plan.epoch}"

    # ---- slots -----------------------------------------------------------------------------------

    def _request(self, slot: int) -> SlotRequest:
        return SlotRequest(
            slot=slot,
            draw=self._slots.draw(slot),
            row_in_shard=int(self._row_in_shard[slot]),
            key=self._keys[slot] or "",
            entity=self._source.selection.entity(int(self._rows[slot])),
            component=int(self._slots.components[slot]),
            study_row=int(self._slots.study_rows[slot]),
            table_row=int(self._slots.table_rows[slot]),
            study_key=self._study_keys[slot] or "",
        )

    def _open_previous(self) -> _Previous | None:
        """Return where the earlier studies of the samples are stored; None if no field reads them."""
        previous, selection = self._source.fields.previous, self._source.selection
        if previous is None:
            return None
        slots = previous.slots(self._slots)
        used = np.flatnonzero(slots.rows >= 0)
        rows = slots.rows[used]
        places = np.zeros((2, len(slots)), np.int64)
        for place, name in zip(places, ("shard", "row_in_shard"), strict=True):
            place[used] = selection.column(name, rows)
        if self._source.fields.reads_members:  # so that parts are of even size
            self._num_bytes[used] += selection.column("num_bytes", rows)
        keys = dict(zip(used.tolist(), selection.keys(rows), strict=True))
        return _Previous(slots, places[0], places[1], keys)

    def _read_previous(self, previous: _Previous, slots: NDArray[np.int64], thread: ThreadState) -> None:
        """Fill slots with the earlier studies, those of one shard at once."""
        used = [slot for slot in slots.tolist() if slot in previous.keys and slot not in self._bad]
        for shard in np.unique(previous.shard[used]).tolist():
            requests = [previous.request(slot) for slot in used if previous.shard[slot] == shard]
            for slot, bad in self._source.previous.fill(shard, requests, self._inputs, thread).items():
                self._mask(slot, bad, of_previous=True)

    def _complete(self, slots: NDArray[np.int64], thread: ThreadState) -> None:
        """Derive fields from the others, and apply the user's transform, to samples that have been read."""
        for slot in slots.tolist() if self._source.fields.derived else ():
            if slot in self._bad:
                continue
            thread.enter("decode", "fields that are made of others")
            found = self._source.fields.derive(self._inputs, self._slots, slot)
            if found is not None:
                reason, detail, name = found
                self._mask(slot, self._bad_beside(slot, reason, name, detail))
        if self._transforming is not None:
            self._transform_samples(self._transforming, slots, thread)

    @property
    def _is_held(self) -> bool:
        """Whether what a transform returns is stored after all samples have been transformed."""
        transform = self._transforming
        return transform is not None and (transform.has_collate or not transform.contract.is_fixed)

    def _transform_samples(
        self, transform: SampleTransform, slots: NDArray[np.int64], thread: ThreadState
    ) -> None:
        """Apply the user's transform to the samples of some slots."""
        thread.enter("transform", "")
        for slot in [slot for slot in slots.tolist() if slot not in self._bad]:
            with self._source.counters.timed("user_transform", 0, 1):
                found = transform.run(
                    self._source.fields.sample(self._inputs, slot, len(self._rows)),
                    self._keys[slot] or "",
                    self._slots.draw(slot),
                    int(self._slots.components[slot]),
                    int(self._slots.table_rows[slot]),
                )
            if self._is_held:  # a transform may return the same memory for the next sample
                found = copy.deepcopy(found)
            else:
                transform.contract.put(self._arrays, slot, found)
                found = {one: value for one, value in found.items() if not isinstance(value, np.ndarray)}
            self._outputs[slot] = found

    def _store_outputs(self, transform: SampleTransform) -> list[dict[str, Any]]:
        """Store what is not stored yet, blank the other slots, and return the entries of the batch."""
        contract = transform.contract
        blank = contract.blank()
        samples = [self._outputs.get(slot, blank) for slot in range(len(self._rows))]
        if not self._is_held:
            for slot in set(range(len(samples))) - self._outputs.keys():
                contract.put(self._arrays, slot, blank)
            return contract.describe(samples)
        collated = None
        if transform.has_collate:
            with self._source.counters.timed("user_transform"):
                collated = transform.collate([dict(one) for one in samples], self.describe())
        kept = list(self._layout.arrays)
        specs = contract.array_specs(len(samples), samples) if collated is None else collated.array_specs()
        self._layout = BatchLayout.of(kept + specs)
        check_layout(self._layout)
        before, self._buffer = self._arrays, self._source.pool.lend(self._layout.num_bytes)
        self._arrays = self._layout.views(self._buffer)
        for spec in kept:
            self._arrays[spec.name][...] = before[spec.name]
        if collated is not None:
            collated.put(self._arrays)
            return collated.entries
        for slot, sample in enumerate(samples):
            contract.put(self._arrays, slot, sample)
        contract.put_items(self._arrays, samples)
        return contract.describe(samples)

    def _mask(self, slot: int, bad: BadSample, *, of_previous: bool = False) -> None:
        """Mask the slots of a bad sample."""
        first = slot - slot % self._num_crops
        for crop in range(first, first + self._num_crops):
            if crop not in self._bad:
                self._mask_slot(crop, bad, of_previous=of_previous)

    def _mask_slot(self, slot: int, bad: BadSample, *, of_previous: bool) -> None:
        row = QuarantineRow(
            epoch=self._source.plan.epoch,
            step=self._step,
            micro=self._micro,
            slot_in_batch=slot,
            row=int(self._table_rows[slot]),
            key=self._keys[slot] or "",
            shard=bad.shard,
            field=bad.field,
            reason=f"{PREVIOUS_STUDY if of_previous else ''}{bad.reason.value}",
            component=None if self._components is None else int(self._components[slot]),
        )
        if self._source.config.on_bad_sample == "raise":
            raise SampleError(
                f"{'the previous study of ' if of_previous else ''}sample {row.key} must be readable, got "
                f'{bad} ({self.describe()}); {remedy_of(row.reason)}, or set on_bad_sample to "mask".'
            )
        self._bad[slot] = row
        if (row.reason, row.field) not in self._source.warned:
            self._source.warned.add((row.reason, row.field))
            _LOGGER.warning(
                "masked a sample: %s; %s; further ones with this reason are counted, not logged",
                bad,
                remedy_of(row.reason),
            )

    def _fill_beside(self, fields: Sequence[BoundField], thread: ThreadState) -> None:
        """Fill the fields whose content is stored beside the shards."""
        for one in fields:
            thread.enter("read", one.name)
            with self._source.counters.timed("tokens", 0, len(self._rows)):
                bad = one.fill_beside(self._inputs, self._slots)
            for slot, reason in bad.items():
                self._mask(slot, self._bad_beside(slot, reason, one.name))

    def _bad_beside(self, slot: int, reason: BadSampleReason, field: str, detail: str = "") -> BadSample:
        number = int(self._source.selection.column("shard", self._rows[slot : slot + 1])[0])
        component, position = self._source.selection.shard(number)
        shard = self._source.selection.datasets[component].manifest.shards[position]
        return BadSample(reason, shard.name, field, detail)

    # ---- layout ----------------------------------------------------------------------------------

    def _column(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a column of the samples table, ``(B,)`` int64, zero in padding slots."""
        return self._by_slot(self._source.selection.column(name, rows))

    def _by_slot(self, found: NDArray[np.int64], padding: int = 0) -> NDArray[np.int64]:
        """Return numbers of samples by slot, ``(B,)`` int64."""
        if len(found) == len(self._rows):
            return found
        values = np.full(len(self._rows), padding, np.int64)
        values[self._is_sample] = found
        return values

    def _mask_known(self) -> None:
        if not self._source.known_masks:
            return
        for slot in np.flatnonzero(self._is_sample).tolist():
            known = self._source.known_masks.find((self._source.plan.epoch, self._step, self._micro, slot))
            if known is not None:
                self._bad[slot] = known

    def _read_slots(self, studies: NDArray[np.int64]) -> Slots:
        """Return the samples that fields are laid out for; a slot that is masked already has none."""
        rows, plan = self._rows, self._source.plan
        if self._bad:
            rows, studies, masked = rows.copy(), studies.copy(), list(self._bad)
            rows[masked], studies[masked] = PADDING_ROW, 0
        components = np.zeros_like(rows) if self._components is None else np.maximum(self._components, 0)
        return Slots(
            rows,
            studies,
            components,
            np.maximum(self._table_rows, 0),
            plan.seed,
            plan.epoch,
            (self._step, self._micro) if self._source.selection.repeats else None,
            self._num_crops,
            is_planned=self._is_sample,
        )

    def _input_specs(self) -> list[ArraySpec]:
        """Name the arrays of the fields that a transform gets."""
        if self._transforming is None:
            return []
        return self._source.fields.array_specs(self._slots)

    def _array_specs(self) -> list[ArraySpec]:
        num_slots = len(self._rows)
        specs = [ArraySpec.of("row", np.int64, num_slots), ArraySpec.of("weight", np.float32, num_slots)]
        if self._components is not None:
            specs.append(ArraySpec.of("component", np.int64, num_slots))
        if self._source.findings is not None:
            specs += self._source.findings.array_specs(num_slots)
        if self._transforming is not None:
            if not self._is_held:
                specs += self._transforming.contract.array_specs(num_slots, None)
        else:
            specs += self._source.fields.array_specs(self._slots)
        return specs

    def _cut_parts(self) -> list[NDArray[np.int64]]:
        """Divide the slots that must be read into parts."""
        fields = self._source.fields
        is_wanted = self._is_sample
        if self._bad:
            is_wanted = is_wanted.copy()
            is_wanted[list(self._bad)] = False
        slots = np.flatnonzero(is_wanted)
        is_beside = fields.beside or (self._needs_beside and not fields.reads_shards)
        beside = [slots] if is_beside else []
        if not fields.reads_shards:
            return beside
        # The crops of a sample stay together, so that it is read once.
        num_crops = self._num_crops
        firsts = slots if num_crops == 1 else np.unique(slots // num_crops) * num_crops
        parts = self._source.part_size.cut(
            firsts, shards=self._shard, offsets=self._offset, num_bytes=self._num_bytes
        )
        if num_crops > 1:
            together = [(part[:, None] + np.arange(num_crops)).reshape(-1) for part in parts]
            parts = [part[is_wanted[part]] for part in together]
        return beside + parts
