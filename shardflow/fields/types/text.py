"""Texts: the report of a sample or another text member, and the fast path for micro-batches of reports alone.

The size of a report is a column of the samples table. A text of a kilobyte is read in two microseconds, while
creating a request, a range and a view for it takes ten. So the fast path finds and compares the reports of a
micro-batch in arrays, reads them straight into their places, and checks them there. It leaves any unusual
sample to the general path, which reads it again and names the problem.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, ShortReadError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import (
    Arrays,
    BoundField,
    Field,
    FieldContext,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
)
from shardflow.fields.quarantine import BadSample, BadSampleReason
from shardflow.fields.reader import FieldReader, Samples, Shard
from shardflow.fields.types.members import (
    MAX_BYTES,
    BoundBytes,
    SlotBytes,
    check_member,
    mask_of,
    member_bytes,
)
from shardflow.format.entities import EntityDataset
from shardflow.format.index import TextPlaces
from shardflow.format.keys import REPORT_FIELD, REPORT_JSON_FIELD
from shardflow.storage import ByteRange, LocalStore
from shardflow.telemetry import StageCounters

_BLOCK_ROWS: Final = 1 << 20
_EXAMPLE_TEXT: Final = (
    b"FINDINGS: The lungs are clear. The heart is not enlarged.\n\nIMPRESSION: No acute disease.\n"
)
_CONTINUATION = 0xC0, 0x80  # mask and value of a UTF-8 continuation byte
SECTIONS: Final = (
    "addendum", "comparison", "examination", "findings", "findings_impression", "impression", "indication",
    "notification", "other", "preamble", "recommendation", "signature", "technique",
)  # fmt: skip
"""Kinds of sections in ``report.json``."""


@dataclass(frozen=True, kw_only=True)
class Text(Field):
    """Text of a sample: its report, or another text field.

    The entry is a list of B strings; ``NAME_mask`` ``(B,)`` uint8 is 1 where there is a text.

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "text"
    reads_previous: ClassVar[bool] = True

    member: str | None = None
    """Stored field that holds the text, UTF-8; None is the report, whose size tables know."""
    max_bytes: int = 1 << 16
    """Size that a text of ``member`` may have; a larger one masks its slot. Reports need no bound."""
    section: str | None = None
    """Of a report only its first section of this kind, such as ``"findings"`` or ``"impression"``, without
    the header, with its sub-sections: where ``report.json`` says that it is. `SECTIONS` lists the kinds."""

    def __post_init__(self) -> None:
        check_member(self)
        check_choice("section", self.section, (None, *SECTIONS))
        if self.section is not None and self.member not in (None, REPORT_FIELD):
            raise ConfigError(f"section is one of the report; leave out member={self.member!r}.")

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return (BoundText if self.section is None else BoundSection)(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the texts and their mask."""
        return present_texts(entry, arrays)


def _is_positive(sizes: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which sizes are above 0; takes no memory where all are, as in most datasets of many samples."""
    starts = range(0, len(sizes), _BLOCK_ROWS)
    if all((sizes[start : start + _BLOCK_ROWS] > 0).all() for start in starts):
        return np.broadcast_to(np.True_, len(sizes))
    return np.concatenate([np.asarray(sizes[start : start + _BLOCK_ROWS]) > 0 for start in starts])


class BoundText(BoundBytes):
    """Text of a sample, bound to a selection; the report's size is that of the samples table."""

    def __init__(self, name: str, spec: Text, context: FieldContext) -> None:
        datasets = context.samples.datasets
        is_packed = not any(dataset.is_foreign for dataset in datasets)
        is_report = spec.member is None or (spec.member == REPORT_FIELD and is_packed)
        # Of a finding the text is a part of the report, of a series or an image that of its study.
        self._sizes = [each.samples.column("text_bytes") for each in datasets] if is_report else None
        self._has_text = None if self._sizes is None else [_is_positive(sizes) for sizes in self._sizes]
        super().__init__(name, spec, context)
        if self._has_text is not None:
            self.member, self._max_bytes = None, MAX_BYTES
            self._num_missing = context.count_missing(self._has_text)
            if self._num_missing and spec.missing == "error":
                raise ConfigError(
                    f"{self._num_missing:,} of {self._num_samples:,} samples have no report for the field "
                    f"{name!r}; write missing='pad' for an empty text, or missing='drop' to leave them out."
                )

    @property
    def has_content(self) -> Sequence[NDArray[np.bool_]] | None:
        """Rows that have a report; for another member None, unless all samples have it."""
        return super().has_content if self._has_text is None else self._has_text

    @property
    def is_report(self) -> bool:
        """Whether the text is the report."""
        return self._sizes is not None

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Lay out the slots; the length of a report is known, so that its fast path need not write it."""
        super().prepare(arrays, slots)
        if self._sizes is not None:
            spaces = self.spaces(slots)
            np.copyto(arrays[f"{self.name}.length"], spaces, where=spaces > 0)

    def _spaces(self, slots: Slots) -> NDArray[np.int64]:
        if self._sizes is None:
            return super()._spaces(slots)
        spaces = np.zeros(len(slots), np.int64)
        used = np.flatnonzero(slots.rows >= 0)
        for component, dataset in enumerate(self._datasets):
            here = used if len(self._datasets) == 1 else used[slots.components[used] == component]
            spaces[here] = dataset.samples.gather("text_bytes", slots.table_rows[here])
        return spaces

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot; of a finding only its words are taken."""
        if self._sizes is None or request.entity is None:
            return super().open(shard, request, arrays)
        fields = self.needed(shard, request)
        start, stop = arrays[f"{self.name}.start"][request.slot : request.slot + 2].tolist()
        words = range(request.entity.text_start, request.entity.text_start + stop - start)
        return _SlotWords(self, shard, request.slot, arrays, start, fields, words)

    def find(self, shard: Shard, row_in_shard: int) -> int | None:
        """Return the number of the text; an empty report is none."""
        found = super().find(shard, row_in_shard)
        is_empty = self._sizes is not None and found is not None and not shard.num_bytes(found)
        return None if is_empty else found

    def check_size(self, shard: Shard, fields: Sequence[int], num_bytes: int) -> None:
        """Refuse a report of another size than the samples table says, and any other text that is larger."""
        if self._sizes is None:
            super().check_size(shard, fields, num_bytes)
            return
        found = shard.num_bytes(fields[0]) if fields else 0
        if found != num_bytes:
            reason = BadSampleReason.SIZE_MISMATCH if fields else BadSampleReason.FIELD_MISSING
            raise shard.bad(reason, shard.index.text_field, f"{found} bytes instead of {num_bytes}")

    def example(self, arrays: Arrays) -> None:
        """Fill the only slot with a text, as much of it as there is place for."""
        data = arrays[f"{self.name}.data"]
        text = np.frombuffer(_EXAMPLE_TEXT, np.uint8)[: len(data)]
        data[: len(text)] = text
        arrays[f"{self.name}.length"][:] = len(text)

    def check(self, shard: Shard, number: int, payload: NDArray[np.uint8]) -> None:
        """Refuse what is not UTF-8."""
        try:
            str(payload.data, "utf-8")
        except UnicodeDecodeError:
            raise shard.bad(BadSampleReason.TEXT_UNREADABLE, number, "no UTF-8") from None


class _SlotWords(SlotBytes):
    """Part of the report of one slot."""

    __slots__ = ("_words",)

    def __init__(
        self,
        field: BoundBytes,
        shard: Shard,
        slot: int,
        arrays: Arrays,
        start: int,
        fields: Sequence[int],
        words: range,
    ) -> None:
        super().__init__(field, shard, slot, arrays, start, fields)
        self._words = words

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Copy the words into their place."""
        if len(payload) < self._words.stop:
            detail = f"{len(payload):,} bytes, and the words of a finding end at {self._words.stop:,}"
            raise self._shard.bad(BadSampleReason.SIZE_MISMATCH, self.fields[place], detail)
        super().put(place, payload[self._words.start : self._words.stop], thread)


class BoundSection(BoundText):
    """Section of a report, bound to a selection; its size is known once it is read."""

    is_uncounted = True
    spec: Text

    def __init__(self, name: str, spec: Text, context: FieldContext) -> None:
        super().__init__(name, spec, context)
        datasets = context.samples.datasets
        if any(dataset.is_foreign or isinstance(dataset, EntityDataset) for dataset in datasets):
            raise ConfigError(
                "section is one of the report of a packed study; leave it out for findings, whose text is "
                "theirs, and for tars of other writers."
            )
        if spec.missing == "drop":
            raise ConfigError(
                f"No table knows which reports have the section {spec.section!r}, so the field {name!r} "
                "cannot drop the others; write missing='pad', or missing='error' to mask them."
            )

    @property
    def has_content(self) -> None:
        """Return None: no table knows."""
        return

    @property
    def is_report(self) -> bool:
        """Whether the text is the whole report."""
        return False

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Lay out the slots with the space of the whole report each, all of them empty."""
        BoundBytes.prepare(self, arrays, slots)

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the numbers of the report and of what it says; nothing where either is missing.

        Raises:
            BadSample: One is missing, and ``missing`` is ``error``.
        """
        report = super().needed(shard, request)
        content = shard.find(request.row_in_shard, REPORT_JSON_FIELD) if report else None
        if content is not None:
            return (*report, content)
        if self.spec.missing == "error":
            raise shard.bad(BadSampleReason.FIELD_MISSING, REPORT_JSON_FIELD)
        return ()

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        fields = self.needed(shard, request)
        start, stop = arrays[f"{self.name}.start"][request.slot : request.slot + 2].tolist()
        if fields:
            self.check_size(shard, fields, stop - start)
        return _SlotSection(self, shard, request.slot, arrays, start, fields)


class _SlotSection(SlotBytes):
    """Section of the report of one slot."""

    __slots__ = ("_payloads", "_spec")

    def __init__(
        self,
        field: BoundSection,
        shard: Shard,
        slot: int,
        arrays: Arrays,
        start: int,
        fields: Sequence[int],
    ) -> None:
        super().__init__(field, shard, slot, arrays, start, fields)
        self._spec = field.spec
        self._payloads: dict[int, bytes] = {}

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:  # noqa: ARG002
        """Keep the bytes until both have come."""
        self._payloads[place] = payload.tobytes()

    def close(self) -> None:
        """Put the section into its place."""
        if not self._payloads:
            return
        shard, (report, content) = self._shard, self.fields
        try:
            text = self._payloads[0].decode("utf-8")
            words = _section(text, json.loads(self._payloads[1]), self._spec.section).encode("utf-8")
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise shard.bad(BadSampleReason.TEXT_UNREADABLE, content, type(error).__name__) from None
        if words:
            super().put(0, np.frombuffer(words, np.uint8), ThreadState())
        elif self._spec.missing == "error":
            detail = f"a report without the section {self._spec.section!r}"
            raise shard.bad(BadSampleReason.FIELD_MISSING, report, detail)


def _section(text: str, content: Any, kind: str | None) -> str:
    """Return the first section of a kind and those of the kind that follow it at once, without its header.

    Args:
        text: The report.
        content: What ``report.json`` says of it.
        kind: Of the section.

    Returns:
        Its words; empty where there is none.
    """
    sections = content["sections"]
    first = next((place for place, one in enumerate(sections) if one["kind"] == kind), None)
    if first is None:
        return ""
    last = first
    while last + 1 < len(sections) and all(
        sections[last + 1][name] == sections[first][name] for name in ("kind", "exam")
    ):
        last += 1
    start, stop = int(sections[first]["header"][1]), int(sections[last]["span"][1])
    return text[start:stop].strip()


def present_texts(entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return the texts of a batch and their mask, see `Text`."""
    found = member_bytes(entry, arrays)
    values = ["" if one is None else str(one.data, "utf-8") for one in found]
    return {entry["name"]: values, f"{entry['name']}_mask": mask_of(found)}


# ---- the fast path ---------------------------------------------------------------------------------


class TextAssembler:
    """Fast path that fills texts into micro-batches without images. Safe for many threads.

    Args:
        reader: Opens shards.
        samples: The samples and their datasets.
        counters: Gets the stages ``read`` and ``check``.
        field: Name of the field whose arrays are filled.
    """

    def __init__(self, reader: FieldReader, samples: Samples, counters: StageCounters, field: str) -> None:
        self._reader = reader
        self._samples = samples
        self._counters = counters
        self._data, self._starts = f"{field}.data", f"{field}.start"

    def fill(
        self,
        slots: NDArray[np.int64],
        *,
        shards: NDArray[np.int64],
        rows_in_shard: NDArray[np.int64],
        keys: NDArray[Any],
        text_bytes: NDArray[np.int64],
        arrays: Arrays,
        thread: ThreadState,
    ) -> NDArray[np.int64]:
        """Fill the slots whose texts are valid.

        Args:
            slots: ``(n,)``, slots in the order of their shards.
            shards: ``(n,)``, positions of their shards in the manifest; in a blend, counted over all
                manifests.
            rows_in_shard: ``(n,)``, rows of their samples in them.
            keys: ``(n,)``, their sample keys as byte strings.
            text_bytes: ``(n,)``, sizes of the texts according to the samples table.
            arrays: Of the micro-batch.
            thread: Of the caller.

        Returns:
            The slots that are left to the general path.

        Raises:
            StorageError: The store cannot read a shard.
        """
        texts = self._places(shards, rows_in_shard, thread)
        is_known = (texts.num_bytes == text_bytes) & (texts.keys == keys)
        is_read = is_known & (text_bytes > 0)
        starts, data = arrays[self._starts][slots], arrays[self._data]
        at = np.flatnonzero(is_read)
        pieces = [
            data[start:stop]
            for start, stop in zip(starts[at].tolist(), (starts + text_bytes)[at].tolist(), strict=True)
        ]
        num_bytes = int(text_bytes[at].sum())
        with self._counters.timed("read", num_bytes, len(pieces)):
            is_complete = self._read(shards[at], texts.offsets[at], pieces, thread)
        thread.enter("check", "")
        start_s = time.perf_counter()
        checksum = google_crc32c.value
        is_right = is_complete & (
            np.array([checksum(piece) for piece in pieces], np.int64) == texts.crc32c[at]
        )
        is_right &= _are_utf8(data, starts[at], pieces)
        self._counters.add("check", time.perf_counter() - start_s, num_bytes, len(pieces))
        is_left = ~is_known
        is_left[at[~is_right]] = True
        left: NDArray[np.int64] = slots[is_left]
        return left

    def _places(self, shards: NDArray[np.int64], rows: NDArray[np.int64], thread: ThreadState) -> TextPlaces:
        """Find the texts of samples; where an index is damaged or has no such row, none has its key."""
        datasets = self._samples.datasets
        if not self._samples.is_blend and datasets[0].index is not None:
            thread.enter("index", "all shards")
            with suppress(FormatError, IndexError):
                return datasets[0].index.texts(shards, rows)
        found = TextPlaces.none(len(shards))
        for here in _runs(shards):
            try:
                shard = self._reader.open_shard(int(shards[here.start]), thread)
            except BadSample:
                continue
            if rows[here].max() < shard.index.num_samples:
                found.put(here, shard.index.texts(rows[here]))
        return found

    def _read(
        self,
        shards: NDArray[np.int64],
        offsets: NDArray[np.int64],
        pieces: list[NDArray[np.uint8]],
        thread: ThreadState,
    ) -> NDArray[np.bool_]:
        """Read texts into their places, those of a shard together; tell which shards are whole, ``(n,)``."""
        is_whole = np.ones(len(pieces), bool)
        for here in _runs(shards):
            store, path, place = self._reader.place(int(shards[here.start]))
            thread.enter("read", place)
            try:
                if isinstance(store, LocalStore):
                    store.read_pieces(path, offsets[here].tolist(), pieces[here])
                else:
                    ranges = [
                        ByteRange(offset, len(piece))
                        for offset, piece in zip(offsets[here].tolist(), pieces[here], strict=True)
                    ]
                    store.read_ranges(path, ranges, [piece.data for piece in pieces[here]])
            except ShortReadError:
                is_whole[here] = False
        return is_whole


def _runs(shards: NDArray[np.int64]) -> Iterator[slice]:
    """Yield the slices of samples that are in one shard each."""
    bounds = np.flatnonzero(np.diff(shards, prepend=-1, append=-1)).tolist()
    return (slice(start, stop) for start, stop in pairwise(bounds))


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
