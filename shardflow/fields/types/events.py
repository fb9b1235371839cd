"""Field of clinical events: what records state before an image, such as vitals, results and medications.

The facts of a sample are a member of it, so what is in them is known when they are read; their number in a
batch is bounded by ``max_events``. A vocabulary says which codes make an event, and in which unit its value
is delivered.
"""

from __future__ import annotations

import csv
import logging
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, cast

import numpy as np
from numpy.typing import NDArray

from shardflow.config import PLACE
from shardflow.errors import ConfigError, FormatError, os_reason
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    Field,
    FieldContext,
    Missing,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
    check_count,
)
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.types.members import BoundMember, present_beside
from shardflow.format import Dataset
from shardflow.format.contents.records import RECORD_TIMES, Code, read_statements
from shardflow.format.contents.ucum import conversion
from shardflow.format.keys import RECORDS_FIELD

_LOGGER = logging.getLogger(__name__)
_MAX_EVENTS: Final = 1 << 20
_MAX_BYTES: Final = 1 << 40
_RECORDS_BEFORE_WARNING: Final = 16
_MAX_LISTED: Final = 12
_KEYS: Final = frozenset({"codes", "unit", "factors"})
_BESIDE: Final = ("time_s", "code", "mask", "has_value", "recorded")
_SECONDS: Final = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_557_600}
_DISTANCE: Final = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(s|min|h|d|w|y)", re.ASCII)
_EXAMPLE: Final = '("-48h", "0h")'


@dataclass(frozen=True, slots=True)
class EventKind:
    """Entry of a vocabulary: what is delivered as one kind of event.

    Raises:
        ConfigError: A setting is malformed.
    """

    codes: tuple[str, ...]
    """Codes as ``SYSTEM:CODE``, such as ``LOINC:8867-4`` or ``RXNORM:1191``, systems as docs/attachments.md
    names them; ``mapped-NAME:FIELD`` for a field of one's own mapped files."""
    unit: str | None = None
    """Unit of its values, in UCUM or as laboratories write it; None delivers no values."""
    factors: dict[str, float] | None = None
    """By stored unit the factor to ``unit``, where the two differ in kind: ``{"mmol/L": 18.016}`` for glucose
    in mg/dL."""


@dataclass(frozen=True, kw_only=True)
class Events(Field):
    """Clinical events around the study, in time order.

    The entry is ``(B, N)`` float32: the value of each event in the unit of its kind, 0 for none. Beside it,
    ``(B, N)`` each: ``NAME_time_s`` int64, seconds from the first image of the study (from the study, where
    its acquisition is not known), negative before it; ``NAME_code`` int64, the position of its kind in
    ``batch.info.classes[NAME]``, -1 for none; ``NAME_mask`` uint8, 1 where there is an event;
    ``NAME_has_value`` uint8, 1 where its value is known. ``NAME_recorded`` ``(B,)`` uint8 is 1 where the
    sample has records: no event there means that none was recorded.

    Events of one second keep the order of their source. Of an event whose day alone is known the end of the
    day counts, as far as it may have been, so that nothing later than the image seems earlier. Of more events
    than places the latest are delivered; the others count as ``events_left_out`` of `Loader.counters`, values
    in a unit that does not convert as ``unknown_units``, events without any time as ``undated_events``.

    Example::

        sf.Events(codes={"heart_rate": {"codes": ["LOINC:8867-4"], "unit": "/min"}}, window=("-48h", "0h"))

    Raises:
        ConfigError: A setting is out of range, or the vocabulary cannot be read.
    """

    type_name: ClassVar[str] = "events"

    codes: dict[str, Any] | Annotated[str, PLACE]
    """Vocabulary: by name a table of ``codes``, ``unit`` and ``factors``, see `EventKind`, or the path of a
    TOML file of such tables or of a CSV file with the columns ``name``, ``code`` and ``unit``. Names are in
    the order of ``NAME_code``."""
    window: tuple[str, str] | tuple[float, float] = ("-48h", "0h")
    """Begin and end, both inclusive: seconds from the study, or text such as ``"-48h"``, ``"30min"``,
    ``"-inf"``."""
    max_events: int = 256
    """Places for events (N)."""
    max_bytes: int = 1 << 24
    """Size that the records of a sample may have; larger ones mask its slot."""
    missing: Missing = "pad"
    """Meaning of a sample without records. ``error`` masks its slot and counts a bad sample; ``drop`` is
    refused, since no table knows which samples have them."""

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, ("pad", "drop", "error"))
        check_count("max_bytes", self.max_bytes, _MAX_BYTES)
        check_count("max_events", self.max_events, _MAX_EVENTS)
        window_seconds(self.window)
        # The content of a file, so that it is part of what the batch holds.
        object.__setattr__(self, "window", tuple(self.window))
        object.__setattr__(self, "codes", _vocabulary(self.codes))

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundEvents(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the values and what is beside them."""
        return present_beside(entry, arrays, _BESIDE)


def _vocabulary(codes: Any) -> dict[str, EventKind]:
    """Read a vocabulary.

    Raises:
        ConfigError: It cannot be read, is empty, or gives a code to two names.
    """
    tables = _read(Path(codes).expanduser()) if isinstance(codes, str | Path) else codes
    if not isinstance(tables, Mapping) or not tables:
        raise ConfigError(
            "codes is a vocabulary: the path of a TOML or CSV file, or a mapping such as {'heart_rate': "
            "{'codes': ['LOINC:8867-4'], 'unit': '/min'}}."
        )
    found = {str(name): _kind(str(name), table) for name, table in tables.items()}
    owner: dict[Code, str] = {}
    for name, kind in found.items():
        for code in kind.codes:
            other = owner.setdefault(_split(code), name)
            if other != name:
                raise ConfigError(f"codes gives {code} to {other!r} and to {name!r}; leave it out of one.")
    return found


def _read(path: Path) -> Any:
    try:
        if path.suffix.lower() == ".csv":
            with path.open(newline="", encoding="utf-8-sig") as file:
                return _rows(csv.DictReader(file))
        with path.open("rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError, csv.Error) as error:  # TOML and encodings raise ValueError
        raise ConfigError(
            f"codes must be a readable TOML or CSV file, got {os_reason(error)} for {path.name}; correct it."
        ) from None


def _rows(rows: csv.DictReader[str]) -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = {}
    if not {"name", "code"} <= set(rows.fieldnames or ()):
        raise ConfigError("a vocabulary in CSV has the columns name, code and unit; add them.")
    for row in rows:
        unit = (row.get("unit") or "").strip() or None
        table = tables.setdefault((row["name"] or "").strip(), {"codes": [], "unit": unit})
        if table["unit"] != unit:
            raise ConfigError(
                f"the vocabulary gives {row['name']!r} two units; write one of them in all its rows."
            )
        table["codes"].append((row["code"] or "").strip())
    return tables


def _kind(name: str, table: Any) -> EventKind:
    if isinstance(table, EventKind):
        table = {"codes": table.codes, "unit": table.unit, "factors": table.factors}
    if not isinstance(table, Mapping) or not table.keys() <= _KEYS or not name:
        raise ConfigError(
            f"codes[{name!r}] is a table of codes, unit and factors, such as {{'codes': ['LOINC:8867-4'], "
            "'unit': '/min'}."
        )
    codes, unit, factors = table.get("codes"), table.get("unit"), table.get("factors")
    if isinstance(codes, str) or not codes or not all(_is_code(code) for code in codes):
        raise ConfigError(
            f"codes[{name!r}] lists codes as SYSTEM:CODE, such as ['LOINC:8867-4'], got {codes!r}."
        )
    if unit is not None and (not isinstance(unit, str) or not unit):
        raise ConfigError(
            f"the unit of {name!r} is text, such as 'mg/dL' ('1' for a plain number), got {unit!r}."
        )
    if factors is not None and (
        unit is None or not all(type(one) in (int, float) for one in factors.values())
    ):
        raise ConfigError(f"factors of {name!r} maps stored units to numbers, beside a unit; correct it.")
    return EventKind(tuple(codes), unit, None if factors is None else dict(factors))


def _is_code(code: object) -> bool:
    return isinstance(code, str) and all(part.strip() for part in code.partition(":")[::2])


def _split(code: str) -> Code:
    system, _, value = code.partition(":")
    return system.strip().lower(), value.strip()


class BoundEvents(BoundMember):
    """Field of events, bound to a selection."""

    spec: Events

    def __init__(self, name: str, spec: Events, context: FieldContext) -> None:
        super().__init__(name, spec, context, RECORDS_FIELD, spec.max_bytes)
        check_record_times(self._datasets, name)
        kinds = cast("dict[str, EventKind]", spec.codes)
        self._kinds = list(kinds.values())
        self.names = list(kinds)
        self._places = {_split(code): place for place, kind in enumerate(self._kinds) for code in kind.codes}
        self._window = window_seconds(spec.window)
        self._counters = context.counters
        self._seen = _SeenCodes()

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        name, shape = self.name, (len(slots), self.spec.max_events)
        return [
            ArraySpec.of(name, np.float32, *shape),
            ArraySpec.of(f"{name}_time_s", np.int64, *shape),
            ArraySpec.of(f"{name}_code", np.int64, *shape),
            ArraySpec.of(f"{name}_mask", np.uint8, *shape),
            ArraySpec.of(f"{name}_has_value", np.uint8, *shape),
            ArraySpec.of(f"{name}_recorded", np.uint8, len(slots)),
        ]

    def prepare(self, arrays: Arrays, slots: Slots) -> None:  # noqa: ARG002
        """Empty every slot."""
        self.blank(arrays, slice(None))

    def blank(self, arrays: Arrays, slot: int | slice) -> None:
        """Make a slot look like one without records."""
        for beside in ("", "_time_s", "_mask", "_has_value", "_recorded"):
            arrays[f"{self.name}{beside}"][slot] = 0
        arrays[f"{self.name}_code"][slot] = -1

    def example(self, arrays: Arrays) -> None:
        """Make the only slot one of events of the first kind."""
        super().example(arrays)
        arrays[f"{self.name}_code"][:] = 0
        arrays[f"{self.name}_has_value"][:] = arrays[f"{self.name}_recorded"][:] = 1

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        return _SlotEvents(self, shard, request.slot, arrays, self.needed(shard, request))

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs, and the names of the codes."""
        return {**super().describe(), "classes": self.names}

    def read(self, payload: bytes) -> Iterator[tuple[int, int, float | None]]:
        """Yield second, kind and value of the events in the window, in the order of their sources.

        Raises:
            FormatError: The records cannot be read.
        """
        start, stop = self._window
        counts, seen = Counter[str](), Counter[Code]()
        found = False
        for said in read_statements(payload):
            place = next((self._places[code] for code in said.codes if code in self._places), None)
            if place is None:
                seen.update(said.codes)
                continue
            found = True
            if said.time_s is None:
                counts["undated_events"] += 1
            elif start <= said.time_s <= stop:
                value = self._value(place, said.number, said.unit)
                counts["unknown_units"] += said.number is not None and value is None and self._has_unit(place)
                yield said.time_s, place, value
        for stage, count in counts.items():
            self._counters.add(stage, num_items=count)
        self._seen.note(self.name, seen, has_event=found)

    def put(self, arrays: Arrays, slot: int, payload: bytes) -> None:
        """Fill a slot.

        Raises:
            FormatError: The records cannot be read.
        """
        # Sorting is stable: events of one second keep the order of their source.
        events = sorted(self.read(payload), key=lambda event: event[0])
        most = self.spec.max_events
        if len(events) > most:
            self._counters.add("events_left_out", num_items=len(events) - most)
            events = events[-most:]
        name = self.name
        arrays[f"{name}_recorded"][slot] = 1
        if not events:
            return
        times, codes, values = zip(*events, strict=True)
        part = slice(len(events))
        arrays[f"{name}_time_s"][slot, part] = times
        arrays[f"{name}_code"][slot, part] = codes
        arrays[f"{name}_mask"][slot, part] = 1
        arrays[f"{name}_has_value"][slot, part] = [value is not None for value in values]
        arrays[name][slot, part] = [0.0 if value is None else value for value in values]

    def _has_unit(self, place: int) -> bool:
        return self._kinds[place].unit is not None

    def _value(self, place: int, number: float | None, unit: str) -> float | None:
        """Return a number in the unit of its kind; None if it has none."""
        kind = self._kinds[place]
        if number is None or kind.unit is None:
            return None
        factor = (kind.factors or {}).get(unit)
        scale, offset = (factor, 0.0) if factor is not None else conversion(unit, kind.unit) or (None, 0.0)
        if scale is None:
            self._seen.note_unit(self.name, self.names[place], unit, kind.unit)
            return None
        value = number * scale + offset
        return value if abs(value) <= _MAX_VALUE else None


_MAX_VALUE: Final = float(np.finfo(np.float32).max)


class _SeenCodes:
    """Codes and units of records read so far; warns once of what a vocabulary probably means otherwise.

    Every rank warns for itself; two threads at once may both warn.
    """

    def __init__(self) -> None:
        self._others = Counter[Code]()
        self._units: set[tuple[str, str]] = set()
        self._num_records = 0
        self._is_done = False

    def note(self, field: str, others: Counter[Code], *, has_event: bool) -> None:
        """Take the records of a sample into account."""
        if self._is_done:
            return
        self._is_done = has_event
        self._num_records += 1
        self._others.update(others)
        if not has_event and self._num_records == _RECORDS_BEFORE_WARNING:
            self._is_done = True
            known = [f"{system}:{code}" for (system, code), _ in self._others.most_common(_MAX_LISTED)]
            _LOGGER.warning(
                "field %r: none of the first %d samples with records has one of its codes; they have %s",
                field,
                self._num_records,
                ", ".join(known) or "no coded facts",
            )

    def note_unit(self, field: str, name: str, unit: str, wanted: str) -> None:
        """Warn of a unit that does not convert."""
        if (name, unit) not in self._units:
            self._units.add((name, unit))
            _LOGGER.warning(
                "field %r: values of %r in %r have no form in %r and are masked; add factors to its codes",
                field,
                name,
                unit,
                wanted,
            )


class _SlotEvents:
    """Events of one slot."""

    __slots__ = ("_arrays", "_field", "_shard", "_slot", "fields")

    def __init__(
        self, field: BoundEvents, shard: Shard, slot: int, arrays: Arrays, fields: Sequence[int]
    ) -> None:
        self._field, self._shard, self._slot, self._arrays = field, shard, slot, arrays
        self.fields = fields
        field.blank(arrays, slot)

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Read the records."""
        thread.enter("decode", f"shard {self._shard.name}")
        try:
            self._field.put(self._arrays, self._slot, payload.tobytes())
        except FormatError as error:
            reason = BadSampleReason.TEXT_UNREADABLE
            raise self._shard.bad(reason, self.fields[place], error.message) from None

    def close(self) -> None:
        """Do nothing: the slot is complete."""


def window_seconds(window: Sequence[str | float]) -> tuple[float, float]:
    """Return begin and end of a window in seconds from the study, both inclusive.

    Args:
        window: Two of a number of seconds, or a text of a number and ``s``, ``min``, ``h``, ``d``, ``w`` or
            ``y``; ``"-inf"`` and ``"inf"`` are no bound.

    Raises:
        ConfigError: It is no such pair, or ends before it begins.

    Example:
        >>> window_seconds(("-48h", "0h"))
        (-172800.0, 0.0)
    """
    ends = [] if isinstance(window, str) else list(window)
    if len(ends) != 2:
        raise ConfigError(f"window is a begin and an end, such as {_EXAMPLE}, got {window!r}.")
    start, stop = map(_seconds, ends)
    if start > stop:
        raise ConfigError(f"window begins before it ends, such as {_EXAMPLE}, got {window!r}.")
    return start, stop


def _seconds(end: Any) -> float:
    if isinstance(end, str):
        if end in ("-inf", "inf"):
            return float(end)
        match = _DISTANCE.fullmatch(end.strip())
        if match is not None:
            return float(match[1]) * _SECONDS[match[2]]
    elif isinstance(end, int | float) and not isinstance(end, bool) and not math.isnan(end):
        return float(end)
    raise ConfigError(
        f"an end of window is a number with s, min, h, d, w or y, such as '-48h', got {end!r}; correct it."
    )


def check_record_times(datasets: Sequence[Dataset], name: str) -> None:
    """Refuse packed datasets whose records do not state when things happened.

    Args:
        datasets: Those of the loader; what other writers made is taken as it is.
        name: Of the field, for the message.

    Raises:
        ConfigError: The dataset was packed before records had times of day, or without dates.
    """
    for dataset in datasets:
        extra: Mapping[str, Any] = dataset.manifest.extra
        resolution = extra.get(RECORD_TIMES)
        if "plan_digest" in extra and resolution is None:
            raise ConfigError(
                f"The field {name!r} needs the times of records, and this dataset was packed without them; "
                "pack it again into a new output: shardflow pack --config FILE"
            )
        if resolution == "none":
            raise ConfigError(
                f"The field {name!r} needs the times of records, and this dataset was packed with "
                "deid.dates = 'remove'; pack it again with 'days': shardflow pack --config FILE"
            )
