"""Slot assembly: reads the fields that the samples of a micro-batch need from a shard, and fills their slots.

Each field names the stored fields that a sample needs and takes their bytes; the assembler reads those of
many samples at once. A bad sample affects its own slot alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.decode import ThreadState
from shardflow.fields.field import (
    Arrays,
    BoundField,
    RegionContent,
    SlotContent,
    SlotRequest,
    StackContent,
)
from shardflow.fields.quarantine import BadSample, BadSampleReason
from shardflow.fields.reader import FieldReader, Payload, Shard
from shardflow.format.entities import entity_key


class SlotAssembler:
    """Assembler of slots for the micro-batches of a stream. Safe for many threads.

    Args:
        reader: Reads the fields.
        fields: Content of a slot.
    """

    def __init__(self, reader: FieldReader, fields: Sequence[BoundField]) -> None:
        self._reader = reader
        self._fields = fields

    def fill(
        self, shard_number: int, requests: Sequence[SlotRequest], arrays: Arrays, thread: ThreadState
    ) -> dict[int, BadSample]:
        """Fill slots whose samples are in one shard.

        Args:
            shard_number: Position of the shard in the manifest; in a blend, counted over all manifests.
            requests: The slots.
            arrays: The arrays of the micro-batch.
            thread: Of the caller.

        Returns:
            The slots whose sample is bad, and why; the content of their arrays is undefined.

        Raises:
            StorageError: The store cannot read the shard at all.
        """
        try:
            shard = self._reader.open_shard(shard_number, thread)
        except BadSample as bad:
            return {request.slot: bad for request in requests}
        opened: dict[int, list[SlotContent]] = {}
        bad_slots: dict[int, BadSample] = {}
        for request in requests:
            try:
                opened[request.slot] = self._open(shard, request, arrays)
            except BadSample as bad:
                bad_slots[request.slot] = bad
        wanted = _by_field(opened)
        numbers = list(wanted)
        for payloads in self._reader.read(shard, np.array(numbers, np.int64), thread):
            for slot, content, parts in _by_content(wanted, numbers, payloads):
                try:
                    if slot not in bad_slots:
                        _put(content, parts, thread)
                except BadSample as bad:
                    bad_slots[slot] = bad
        for slot in sorted(opened.keys() - bad_slots.keys()):
            try:
                for content in opened[slot]:
                    self._close(shard, content, thread)
            except BadSample as bad:
                bad_slots[slot] = bad
        return bad_slots

    def _close(self, shard: Shard, content: SlotContent, thread: ThreadState) -> None:
        """Finish the content of a slot, after its regions of volumes in bricks, if there are any."""
        if isinstance(content, RegionContent):
            for place, plan in enumerate(content.plans):
                target = content.target(place, thread)
                if target is None:
                    continue
                bad = self._reader.read_region(shard, plan, target, thread)
                if bad is not None:
                    raise bad
                content.put_region(place, thread)
        content.close()

    def _open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> list[SlotContent]:
        _check_row(shard, request)
        return [field.open(shard, request, arrays) for field in self._fields]


def _by_content(
    wanted: Mapping[int, Sequence[tuple[int, SlotContent, int]]],
    numbers: Sequence[int],
    payloads: Sequence[Payload],
) -> Iterable[tuple[int, SlotContent, list[Payload]]]:
    """Return what each content gets of some payloads, with the places of the fields in the content."""
    found: dict[int, tuple[int, SlotContent, list[Payload]]] = {}
    for position, payload in payloads:
        for slot, content, place in wanted[numbers[position]]:
            found.setdefault(id(content), (slot, content, []))[2].append((place, payload))
    return found.values()


def _put(content: SlotContent, parts: Sequence[Payload], thread: ThreadState) -> None:
    """Give a content the bytes of some of its fields.

    Raises:
        BadSample: One of them is bad.
    """
    good: list[tuple[int, NDArray[np.uint8]]] = []
    bad: BadSample | None = None
    for place, payload in parts:
        if isinstance(payload, BadSample):
            bad = payload
            break
        good.append((place, payload))
    if isinstance(content, StackContent) and len(good) > 1:
        content.put_all(good, thread)
    else:
        for place, payload in good:
            content.put(place, payload, thread)
    if bad is not None:
        raise bad


def _by_field(opened: Mapping[int, list[SlotContent]]) -> dict[int, list[tuple[int, SlotContent, int]]]:
    """Return the contents that need each field, so that a shared field is read once."""
    wanted: dict[int, list[tuple[int, SlotContent, int]]] = {}
    for slot, contents in opened.items():
        for content in contents:
            for place, number in enumerate(content.fields):
                wanted.setdefault(number, []).append((slot, content, place))
    return wanted


def _check_row(shard: Shard, request: SlotRequest) -> None:
    """Check that index and samples table agree on a sample.

    Raises:
        BadSample: They name different samples.
    """
    index, row = shard.index, request.row_in_shard
    key = index.sample_key(row) if row < index.num_samples else ""
    if key and request.entity is not None:
        key = entity_key(key, request.entity.entity, request.entity.series)
    if key != (request.study_key or request.key):
        raise shard.bad(BadSampleReason.INDEX_DAMAGED, "", "the samples table names another sample")
