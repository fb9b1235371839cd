"""Fields of stored members as they are: texts, JSON, bytes and arrays.

The size of a report is a column of the samples table. Of other members no table knows the size, so their
specs declare a bound, and a larger one masks its slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import BoundField, Coverage, Field, FieldContext, Slots, check_choice, check_count
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.slots import SlotRequest
from shardflow.fields.views import Arrays, ArraySpec
from shardflow.format.keys import REPORT_FIELD


@dataclass(frozen=True, kw_only=True)
class Text(Field):
    """Text of a sample: its report, or another text field.

    The entry is a list of B strings; ``NAME_mask`` ``(B,)`` uint8 is 1 where there is a text.

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "text"

    member: str | None = None
    """Stored field that holds the text, UTF-8; None is the report, whose size tables know."""
    max_bytes: int = 1 << 16
    """Size that a text of ``member`` may have; a larger one masks its slot. Reports need no bound."""

    def __post_init__(self) -> None:
        _check_member(self)

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundText(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the texts and their mask."""
        return present_texts(entry, arrays)


def _check_member(spec: Any) -> None:
    check_choice("missing", spec.missing, ("pad", "drop", "error"))
    check_count("max_bytes", spec.max_bytes, 1 << 40)


class BoundMember(BoundField):
    """Field that delivers the bytes of one member, in a flat array with a start and a length by slot.

    Args:
        name: Name of the entry.
        member: Name of the stored field.
        max_bytes: Size that a member may have.
        missing: What a sample without it means.
        type_name: Of the field.
    """

    def __init__(self, name: str, member: str, max_bytes: int, missing: str, type_name: str) -> None:
        super().__init__(name)
        self.member, self.max_bytes, self.missing, self.type_name = member, max_bytes, missing, type_name
        if missing == "drop" and self.has_content is None:
            raise ConfigError(
                f"No table knows which samples have {member}, so the field {name!r} cannot drop the others; "
                "write missing='pad', or missing='error' to mask them."
            )

    def _spaces(self, slots: Slots) -> NDArray[np.int64]:
        """Return the bytes that each slot may need, ``(B,)``."""
        return np.where(slots.rows >= 0, self.max_bytes, 0)

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        return [
            ArraySpec.of(f"{self.name}.data", np.uint8, int(self._spaces(slots).sum())),
            ArraySpec.of(f"{self.name}.start", np.int64, len(slots) + 1),
            ArraySpec.of(f"{self.name}.length", np.int64, len(slots)),
        ]

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Lay out the slots, all of them empty: their length is -1."""
        starts = arrays[f"{self.name}.start"]
        starts[0] = 0
        np.cumsum(self._spaces(slots), out=starts[1:])
        arrays[f"{self.name}.length"][:] = -1

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the number of the member, if the sample has it.

        Raises:
            BadSample: It has none, and ``missing`` is ``error``.
        """
        number = self.find(shard, request.row_in_shard)
        if number is None and self.missing == "error":
            raise shard.bad(BadSampleReason.FIELD_MISSING, self.member)
        return () if number is None else (number,)

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> _SlotMember:
        """Begin a slot."""
        fields = self.needed(shard, request)
        starts = arrays[f"{self.name}.start"]
        start, stop = starts[request.slot : request.slot + 2].tolist()
        if fields and shard.num_bytes(fields[0]) > stop - start:
            detail = f"{shard.num_bytes(fields[0]):,} bytes, and {stop - start:,} are allowed"
            raise shard.bad(BadSampleReason.SIZE_MISMATCH, fields[0], detail)
        return _SlotMember(self, shard, request.slot, arrays, start, fields)

    def find(self, shard: Shard, row_in_shard: int) -> int | None:
        """Return the number of the member of a sample; None if it has none."""
        return shard.find(row_in_shard, self.member)

    def check(self, shard: Shard, number: int, payload: NDArray[np.uint8]) -> None:
        """Refuse bytes that are not what the field promises; by default all are.

        Raises:
            BadSample: They are not.
        """

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without the member."""
        arrays[f"{self.name}.length"][slot] = -1

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs."""
        return {"type": self.type_name, "name": self.name}


class _SlotMember:
    """Member of one slot."""

    __slots__ = ("_arrays", "_field", "_shard", "_slot", "_start", "fields")

    def __init__(
        self, field: BoundMember, shard: Shard, slot: int, arrays: Arrays, start: int, fields: Sequence[int]
    ) -> None:
        self._field, self._shard, self._slot, self._arrays = field, shard, slot, arrays
        self._start, self.fields = start, fields

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:  # noqa: ARG002
        """Copy the bytes into their place."""
        self._field.check(self._shard, self.fields[place], payload)
        name = self._field.name
        self._arrays[f"{name}.data"][self._start : self._start + len(payload)] = payload
        self._arrays[f"{name}.length"][self._slot] = len(payload)

    def close(self) -> None:
        """Do nothing: the slot is complete."""


class BoundText(BoundMember):
    """Text of a sample, bound to a selection; the report's size is that of the samples table."""

    def __init__(self, name: str, spec: Text, context: FieldContext) -> None:
        self._sizes = None
        if spec.member in (None, REPORT_FIELD):
            self._sizes = [dataset.studies.column("text_bytes") for dataset in context.samples.datasets]
        super().__init__(name, spec.member or REPORT_FIELD, spec.max_bytes, spec.missing, spec.type_name)
        self._num_samples = context.num_samples
        self._num_missing = 0
        if self._sizes is not None:
            self._num_missing = context.count_missing([sizes > 0 for sizes in self._sizes])
            if self._num_missing and spec.missing == "error":
                raise ConfigError(
                    f"{self._num_missing:,} of {self._num_samples:,} samples have no report for the field "
                    f"{name!r}; write missing='pad' for an empty text, or missing='drop' to leave them out."
                )

    @property
    def has_content(self) -> Sequence[NDArray[np.bool_]] | None:
        """Which samples have a report; None for another member."""
        return None if self._sizes is None else [sizes > 0 for sizes in self._sizes]

    @property
    def coverage(self) -> Coverage | None:
        """How many samples have a report."""
        if self._sizes is None:
            return None
        return Coverage(num_samples=self._num_samples, num_missing=self._num_missing)

    def _spaces(self, slots: Slots) -> NDArray[np.int64]:
        if self._sizes is None:
            return super()._spaces(slots)
        spaces = np.zeros(len(slots), np.int64)
        for slot in slots.used:
            spaces[slot] = self._sizes[int(slots.components[slot])][int(slots.study_rows[slot])]
        return spaces

    def find(self, shard: Shard, row_in_shard: int) -> int | None:
        """Return the number of the text; foreign shards name their text field themselves."""
        return super().find(shard, row_in_shard) if self._sizes is None else shard.report(row_in_shard)

    def check(self, shard: Shard, number: int, payload: NDArray[np.uint8]) -> None:
        """Refuse what is not UTF-8."""
        try:
            str(payload.data, "utf-8")
        except UnicodeDecodeError:
            raise shard.bad(BadSampleReason.TEXT_UNREADABLE, number, "no UTF-8") from None


def member_bytes(entry: Mapping[str, Any], arrays: Arrays) -> list[NDArray[np.uint8] | None]:
    """Return the bytes of each slot without a copy; None where there is no member."""
    name = entry["name"]
    data, starts = arrays[f"{name}.data"], arrays[f"{name}.start"].tolist()
    lengths = arrays[f"{name}.length"].tolist()
    return [
        None if length < 0 else data[start : start + length]
        for start, length in zip(starts[:-1], lengths, strict=True)
    ]


def present_texts(entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return the texts of a batch and their mask, see `Text`."""
    found = member_bytes(entry, arrays)
    mask = np.array([one is not None for one in found], np.uint8)
    return {
        entry["name"]: ["" if one is None else str(one.data, "utf-8") for one in found],
        f"{entry['name']}_mask": mask,
    }
