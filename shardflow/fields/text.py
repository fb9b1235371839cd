"""Field kind of texts, and the fast path for micro-batches of texts alone.

A text of a kilobyte is read in two microseconds, while creating a request, a range and a view for it takes
ten. So the fast path finds and compares all texts of a shard in arrays, reads them straight into their
places, and checks them there. It leaves any unusual sample to the general path, which reads it again and
names the problem.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ShortReadError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import Arrays, SlotRequest
from shardflow.fields.quarantine import BadSample, BadSampleReason
from shardflow.fields.reader import FieldReader, Shard
from shardflow.storage import ByteRange, LocalStore
from shardflow.telemetry import StageCounters

_MAX_TABLES = 512
_CONTINUATION = 0xC0, 0x80  # mask and value of a UTF-8 continuation byte


class Texts:
    """Field kind of texts: reports, or the parts of them that findings refer to."""

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the number of the text field."""
        report = shard.report(request.row_in_shard)
        return () if report is None else (report,)

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> _SlotText:
        """Begin a slot.

        Raises:
            BadSample: The size of the text is not that of the samples table.
        """
        report = shard.report(request.row_in_shard)
        num_bytes = 0 if report is None else shard.num_bytes(report)
        if request.entity is not None:
            # Part of a report: all of it is read, because the checksum covers all of it.
            num_bytes = min(request.text_bytes, max(num_bytes - request.entity.text_start, 0))
        if num_bytes != request.text_bytes:
            reason = BadSampleReason.FIELD_MISSING if report is None else BadSampleReason.SIZE_MISMATCH
            detail = f"{num_bytes} bytes instead of {request.text_bytes}"
            raise shard.bad(reason, shard.index.text_field, detail)
        fields = () if report is None or not num_bytes else (report,)
        return _SlotText(fields, shard, request, arrays)


@dataclass(frozen=True, slots=True)
class _SlotText:
    """Text of one slot."""

    fields: Sequence[int]
    shard: Shard
    request: SlotRequest
    arrays: Arrays

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:  # noqa: ARG002
        """Copy the text into its place, if it is UTF-8."""
        request, shard = self.request, self.shard
        if request.entity is not None:
            first = request.entity.text_start
            payload = payload[first : first + request.text_bytes]
        if not _is_utf8(payload):
            raise shard.bad(BadSampleReason.TEXT_UNREADABLE, shard.index.text_field, "no UTF-8")
        start = int(self.arrays["text_offsets"][request.slot])
        self.arrays["text_bytes"][start : start + len(payload)] = payload

    def close(self) -> None:
        """Do nothing: the text is complete."""


def text_of(arrays: Arrays, slot: int) -> NDArray[np.uint8]:
    """Return the text of a slot, ``(num_bytes,)``, without a copy."""
    start, stop = arrays["text_offsets"][slot : slot + 2].tolist()
    text: NDArray[np.uint8] = arrays["text_bytes"][start:stop]
    return text


class TextAssembler:
    """Fast path that fills texts into micro-batches without images. Safe for many threads.

    Args:
        reader: Opens shards.
        counters: Gets the stages ``read`` and ``check``.
        field: Name of the field whose arrays are filled; by default those of `LoaderConfig.text`.
    """

    def __init__(self, reader: FieldReader, counters: StageCounters, field: str = "") -> None:
        self._reader = reader
        self._counters = counters
        self._data, self._starts = (
            (f"{field}.data", f"{field}.start") if field else ("text_bytes", "text_offsets")
        )
        self._tables: dict[int, tuple[Shard, NDArray[np.int64]]] = {}

    def fill(
        self,
        shard_number: int,
        slots: NDArray[np.int64],
        *,
        rows_in_shard: NDArray[np.int64],
        keys: NDArray[Any],
        text_bytes: NDArray[np.int64],
        arrays: Arrays,
        thread: ThreadState,
    ) -> NDArray[np.int64]:
        """Fill the slots whose texts are valid.

        Args:
            shard_number: Position of the shard in the manifest; in a blend, counted over all manifests.
            slots: ``(n,)``, slots whose samples are in the shard.
            rows_in_shard: ``(n,)``, rows of their samples in it.
            keys: ``(n,)``, their sample keys as byte strings.
            text_bytes: ``(n,)``, sizes of the texts according to the samples table.
            arrays: Of the micro-batch.
            thread: Of the caller.

        Returns:
            The slots that are left to the general path.

        Raises:
            StorageError: The store cannot read the shard.
        """
        try:
            shard = self._reader.open_shard(shard_number, thread)
        except BadSample:
            return slots
        index = shard.index
        if rows_in_shard.max(initial=0) >= index.num_samples:
            return slots
        fields = self._report_fields(shard_number, shard)[rows_in_shard]
        sizes = np.where(fields >= 0, index.field_num_bytes[fields].astype(np.int64), 0)
        if (sizes != text_bytes).any() or (index.sample_keys[rows_in_shard] != keys).any():
            return slots
        has_text = sizes > 0
        if not has_text.all():
            slots, fields, sizes = slots[has_text], fields[has_text], sizes[has_text]
        starts = arrays[self._starts][slots]
        text = arrays[self._data]
        ends = (starts + sizes).tolist()
        pieces = [text[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]
        num_bytes = int(sizes.sum())
        thread.enter("read", shard.place)
        try:
            with self._counters.timed("read", num_bytes, len(pieces)):
                _read(shard, index.field_offsets[fields].tolist(), pieces)
        except ShortReadError:
            return slots
        thread.enter("check", shard.place)
        start_s = time.perf_counter()
        checksum = google_crc32c.value
        is_right = np.array([checksum(piece) for piece in pieces]) == index.field_crc32c[fields]
        is_right &= _are_utf8(text, starts, pieces)
        self._counters.add("check", time.perf_counter() - start_s, num_bytes, len(pieces))
        left: NDArray[np.int64] = slots[~is_right]
        return left

    def _report_fields(self, number: int, shard: Shard) -> NDArray[np.int64]:
        """Return the text field of each sample of a shard, ``(num_samples,)``; -1 for none."""
        known = self._tables.get(number)
        if known is not None and known[0] is shard:
            return known[1]
        index = shard.index
        fields = np.flatnonzero(index.field_name_ids == shard.names.report)
        table = np.full(index.num_samples, -1, np.int64)
        table[np.searchsorted(index.first_field, fields, side="right") - 1] = fields
        if len(self._tables) >= _MAX_TABLES:
            self._tables.clear()
        self._tables[number] = shard, table
        return table


def _read(shard: Shard, offsets: list[int], pieces: list[NDArray[np.uint8]]) -> None:
    if isinstance(shard.store, LocalStore):
        shard.store.read_pieces(shard.path, offsets, pieces)
        return
    ranges = [ByteRange(offset, len(piece)) for offset, piece in zip(offsets, pieces, strict=True)]
    shard.store.read_ranges(shard.path, ranges, [piece.data for piece in pieces])


def _are_utf8(
    text: NDArray[np.uint8], starts: NDArray[np.int64], pieces: list[NDArray[np.uint8]]
) -> NDArray[np.bool_]:
    """Tell which texts are UTF-8, ``(n,)``.

    All are, if their concatenation is and none begins inside a character.
    """
    mask, continuation = _CONTINUATION
    try:
        str(b"".join(pieces), "utf-8")  # type: ignore[arg-type]  # arrays are buffers
    except UnicodeDecodeError:
        return np.array([_is_utf8(piece) for piece in pieces], bool)
    is_cut: NDArray[np.bool_] = (text[starts] & mask) == continuation
    if not is_cut.any():
        return ~is_cut
    return np.array([_is_utf8(piece) for piece in pieces], bool)


def _is_utf8(piece: NDArray[np.uint8]) -> bool:
    try:
        str(piece.data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True
