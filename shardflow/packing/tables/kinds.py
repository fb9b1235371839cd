"""Kinds of the columns of a table, found from all values, and columns that must stay out of a dataset.

A string is a number if it looks like one, so CSV, JSON and Parquet of equal values give equal columns.
``1.0`` is an integer: writers that have no missing integers write it. Left out unless they are named are
columns that look like identifiers, dates or free text; a DICOM UID never enters a dataset.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast, get_args

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.format.tables import MAX_CLASSES, ColumnKind
from shardflow.packing.tables.readers import Values

MISSING: Final = frozenset({"", "#N/A", "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"})
"""Strings that stand for no value."""
_BOOLEANS: Final = {"true": True, "false": False}
_NUMBER: Final = re.compile(
    r"[+-]?(?:(?:0|[1-9]\d*)(?P<point>\.\d*)?|(?P<bare>\.\d+))(?P<exponent>[eE][+-]?\d{1,3})?", re.ASCII
)
"""A number without the leading zeros that codes have."""
_MAX_DIGITS: Final = 18
_UID: Final = re.compile(r"[0-2](?:\.(?:0|[1-9]\d*)){4,}", re.ASCII)
_MIN_UID_CHARACTERS: Final = 16
_DATE: Final = re.compile(
    r"(?:18|19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])|"
    r"(?:18|19|20)\d\d[-/.](?:0?[1-9]|1[0-2])[-/.](?:0?[1-9]|[12]\d|3[01])(?:[ T].*)?|"
    r"(?:0?[1-9]|[12]\d|3[01])[-/.](?:0?[1-9]|[12]\d|3[01])[-/.](?:18|19|20)\d\d(?:[ T].*)?",
    re.ASCII,
)
_NAMES_OF_IDENTIFIERS: Final = re.compile(
    r"(?:^|_)(?:id|ids|uid|uids|uuid|mrn|ssn|accession|dob|birth|birthdate|address|phone|email|path|paths|"
    r"filename|file|files|date|datetime|timestamp|name|names|surname)(?:_|$)"
)
_MAX_DISTINCT: Final = 20_000
_MAX_PARSED: Final = 65_536
_MIN_DISTINCT: Final = 5
_MIN_IDENTIFIER: Final = 10_000
_MIN_NUMBERS: Final = 20
_MAX_TEXT: Final = 200
_WORDS: Final = 4
_MOSTLY: Final = 0.9
_MAX_INT: Final = 1 << 62
_EXACT: Final = 1 << 53
_NUMBERS: Final = frozenset({"int", "float"})


def column_name(name: str) -> str:
    """Return the name that a column has in expressions: lower case, with underscores between words.

    Example:
        >>> column_name("No Finding"), column_name("AP/PA"), column_name("SOPInstanceUID")
        ('no_finding', 'ap_pa', 'sop_instance_uid')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})", "_", name)
    found = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")[:60]
    return found if found[:1].isalpha() else f"c_{found}".rstrip("_")


def parse_value(value: Any) -> tuple[str, Any]:
    """Return the kind of a value and the value; the kind is ``missing`` where there is none.

    Kinds are ``bool``, ``int``, ``float``, ``text``, ``floats``, and ``other`` for what cannot be stored.
    """
    if value is None:
        return "missing", None
    if isinstance(value, str):
        return _parse_text(value.strip())
    if isinstance(value, bool | np.bool_):
        return "bool", bool(value)
    if isinstance(value, int | np.integer):
        return ("int", int(value)) if abs(int(value)) < _MAX_INT else ("text", str(value))
    if isinstance(value, float | np.floating):
        return _parse_number(float(value))
    if isinstance(value, list | tuple | np.ndarray):
        return _parse_list(value)
    return "other", None


def _parse_text(text: str) -> tuple[str, Any]:
    if text in MISSING:
        return "missing", None
    found = _NUMBER.fullmatch(text)
    if found is not None and found.lastgroup is None:
        return ("int", int(text)) if len(text) <= _MAX_DIGITS else ("text", text)
    if found is not None:
        kind, number = _parse_number(float(text))
        return (kind, number) if kind != "missing" else ("text", text)
    if text.lower() in _BOOLEANS:
        return "bool", _BOOLEANS[text.lower()]
    if text[0] == "[":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return "text", text
        return _parse_list(found) if isinstance(found, list) else ("text", text)
    return "text", text


def _parse_number(number: float) -> tuple[str, Any]:
    if not math.isfinite(number):
        return "missing", None
    return ("int", int(number)) if number.is_integer() and abs(number) < _EXACT else ("float", number)


def _parse_list(values: Values) -> tuple[str, Any]:
    try:
        found = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        return "other", None
    is_list = found.ndim == 1 and len(found) > 0 and not any(isinstance(one, str) for one in values)
    return ("floats", found) if is_list else ("other", None)


class Parser(dict[str | None, int]):
    """Positions of texts among those that were parsed, within a bound.

    A batch looks up all of its texts at once; what is done with them is done once for each different text.
    """

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.parsed: list[Any] = []
        self.generation = 0

    def __missing__(self, text: str | None) -> int:
        kind, value = parse_value(text)
        self[text] = len(self.kinds)
        self.kinds.append(kind)
        self.parsed.append(value)
        return len(self.kinds) - 1

    def look_up(self, values: Values) -> NDArray[np.intp] | None:
        """Return the position of each value; None if some are no texts, of which True would equal 1."""
        if not isinstance(values, tuple) and not {*map(type, values)} <= {str, type(None)}:
            return None
        if len(self) > _MAX_PARSED:
            self.clear()
            self.kinds, self.parsed, self.generation = [], [], self.generation + 1
        return np.fromiter(map(self.__getitem__, values), np.intp, len(values))


@dataclass(slots=True)
class Profile:
    """Profile of a column after all of its values were seen once."""

    source: str
    """Name in the file."""
    counts: Counter[str] = field(default_factory=Counter)
    """Values by kind."""
    texts: set[str] = field(default_factory=set)
    """Distinct texts, at most `_MAX_DISTINCT`."""
    numbers: set[float] = field(default_factory=set)
    """Distinct numbers, likewise."""
    widths: set[int] = field(default_factory=set)
    """Lengths of lists."""
    num_dates: int = 0
    num_uids: int = 0
    num_long: int = 0
    """Texts of several words."""
    longest: int = 0
    smallest: float = 0.0
    """Smallest magnitude of a number."""
    low: float = 0.0
    high: float = 0.0
    parser: Parser = field(default_factory=Parser)

    def add(self, values: Values) -> None:
        """Count the values of a batch."""
        if isinstance(values, np.ndarray) and values.ndim > 1:
            self.counts["floats"] += len(values)
            self.widths.add(values.shape[1])
            return
        if isinstance(values, np.ndarray):
            seen, counts = np.unique(values, return_counts=True)
            for value, count in zip(seen.tolist(), counts.tolist(), strict=True):
                self._add(*parse_value(value), count)
            return
        positions = self.parser.look_up(values)
        if positions is None:
            for value in values:
                self._add(*parse_value(value), 1)
            return
        counts = np.bincount(positions, minlength=len(self.parser.kinds))
        for place in np.flatnonzero(counts).tolist():
            self._add(self.parser.kinds[place], self.parser.parsed[place], int(counts[place]))

    def _add(self, kind: str, value: Any, count: int) -> None:
        self.counts[kind] += count
        if kind == "text":
            self.longest = max(self.longest, len(value))
            self.num_long += count * (value.count(" ") >= _WORDS - 1)
            self.num_dates += count * bool(_DATE.fullmatch(value))
            self.num_uids += count * bool(_UID.fullmatch(value) and len(value) >= _MIN_UID_CHARACTERS)
            if len(self.texts) < _MAX_DISTINCT:
                self.texts.add(value)
        elif kind in _NUMBERS:
            self.smallest = min(self.smallest, abs(value)) if self.numbers else abs(value)
            self.low, self.high = min(self.low, value), max(self.high, value)
            self.num_dates += count * bool(kind == "int" and _DATE.fullmatch(str(value)))
            if len(self.numbers) < _MAX_DISTINCT:
                self.numbers.add(value)
        elif kind == "floats":
            self.widths.add(len(value))

    @property
    def num_values(self) -> int:
        """Values that are not missing."""
        return self.counts.total() - self.counts["missing"]

    def refusal(self) -> str | None:
        """Return why the column looks like none that belongs into a dataset; None if it does not."""
        num = self.num_values
        if self.num_uids:
            return "DICOM UIDs"
        if not num:
            return "no value"
        if self.counts["other"]:
            return "values that are neither numbers, texts nor lists of numbers"
        if _NAMES_OF_IDENTIFIERS.search(column_name(self.source)):
            return "the name of an identifier, a file or a date"
        if self.num_dates * 2 > num:
            return "dates"
        texts = self.counts["text"]
        if texts and (self.longest > _MAX_TEXT or self.num_long * 2 > texts):
            return "free text"
        if len(self.texts) >= _MIN_DISTINCT and len(self.texts) * 2 > texts:
            return "a different text in most rows"
        if len(self.texts) > MAX_CLASSES:
            return f"more than {MAX_CLASSES:,} different texts"
        is_many = num >= _MIN_NUMBERS and len(self.numbers) > _MOSTLY * min(num, _MAX_DISTINCT)
        if is_many and not self.counts["float"] and self.smallest >= _MIN_IDENTIFIER:
            return "a different large number in most rows, as identifiers have"
        return None

    def kind(self) -> ColumnKind:
        """Return the kind that holds all values.

        Raises:
            ConfigError: Most values are of one kind and some are not, or lists have several lengths.
        """
        kinds = {kind for kind, count in self.counts.items() if count and kind != "missing"}
        num_numbers = self.counts["int"] + self.counts["float"]
        if kinds == {"floats"}:
            if len(self.widths) > 1:
                raise ConfigError(
                    f"The lists of the column {self.source!r} have {len(self.widths)} lengths; all must have "
                    "the same."
                )
            return "floats"
        if kinds <= _NUMBERS:
            return "float" if self.counts["float"] else "int"
        if kinds == {"bool"}:
            return "bool"
        mostly = max(num_numbers, self.counts["bool"], self.counts["floats"])
        if mostly >= _MOSTLY * self.num_values:
            num_others = self.num_values - mostly
            name = column_name(self.source)
            raise ConfigError(
                f"The column {self.source!r} has {mostly:,} values of one kind and {num_others:,} of another "
                f"(type conflict); write --type {name}=float, which takes the others as missing, or --type "
                f"{name}=category."
            )
        return "category" if len(self.texts) + len(self.numbers) <= MAX_CLASSES else "string"


def parse_kind(text: str) -> ColumnKind:
    """Return the kind of that name.

    Raises:
        ConfigError: There is none.
    """
    if text not in get_args(ColumnKind):
        raise ConfigError(f"A type is one of {', '.join(get_args(ColumnKind))}, got {text!r}.")
    return cast(ColumnKind, text)


def holds(kind: ColumnKind, found: str, value: Any) -> bool:
    """Return whether a column of a kind can hold a parsed value."""
    return found in _ACCEPTED[kind] or (kind == "bool" and found == "int" and value in (0, 1))


@dataclass(slots=True)
class ColumnBuilder:
    """Values of a column by the target that they are joined to.

    Args:
        profile: Of the column.
        kind: Kind to store.
        num_targets: Targets of the join.
    """

    profile: Profile
    kind: ColumnKind
    num_targets: int
    num_conflicts: int = 0
    """Values that the kind cannot hold; they count as missing."""
    values: NDArray[Any] = field(init=False)
    is_missing: NDArray[np.bool_] = field(init=False)
    _codes: dict[str, int] = field(init=False, default_factory=dict)
    _known: tuple[tuple[int, int], NDArray[Any], NDArray[Any], NDArray[Any]] | None = field(
        init=False, default=None
    )

    def __post_init__(self) -> None:
        width = (next(iter(self.profile.widths), 1),) if self.kind == "floats" else ()
        dtype = np.dtype(_DTYPES[self.kind])
        if self.kind == "int":
            largest = min(max(-self.profile.low, self.profile.high), float(_MAX_INT))
            dtype = np.min_scalar_type(-1 - int(largest))
        self.values = np.zeros((self.num_targets, *width), dtype)
        self.is_missing = np.ones(self.num_targets, bool)

    def convert(self, values: Values) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.int64]]:
        """Return values as stored, which are missing, and the places of those that the kind cannot hold."""
        if isinstance(values, np.ndarray) and values.ndim > 1 and self.kind == "floats":
            return values, np.asarray(np.isnan(values).any(axis=1)), np.zeros(0, np.int64)
        plain: Values = values.tolist() if isinstance(values, np.ndarray) else values
        parser = self.profile.parser
        positions = parser.look_up(plain)
        if positions is None:
            parsed = [parse_value(value) for value in plain]
            found, missing, is_conflict = self._stored(
                [kind for kind, _ in parsed], [one for _, one in parsed]
            )
        else:
            key = (parser.generation, len(parser.kinds))
            if self._known is None or self._known[0] != key:
                self._known = (key, *self._stored(parser.kinds, parser.parsed))
            found, missing, is_conflict = (known[positions] for known in self._known[1:])
        conflicts = np.flatnonzero(is_conflict)
        self.num_conflicts += len(conflicts)
        return found, missing, conflicts

    def _stored(
        self, kinds: Sequence[str], values: Sequence[Any]
    ) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
        """Return parsed values as stored, which are missing, and which of these the kind cannot hold."""
        there = [holds(self.kind, kind, value) for kind, value in zip(kinds, values, strict=True)]
        out = np.zeros((len(kinds), *self.values.shape[1:]), self.values.dtype)
        if self.kind in ("category", "string"):
            codes = self._codes
            for place in np.flatnonzero(there).tolist():
                out[place] = codes.setdefault(str(values[place]), len(codes))
        elif kinds:
            empty: Any = out[0] if self.kind == "floats" else 0
            out[:] = [value if is_there else empty for value, is_there in zip(values, there, strict=True)]
        missing = ~np.array(there, bool)
        is_conflict = missing & np.array([kind != "missing" for kind in kinds], bool)
        return out, missing, is_conflict

    def names(self) -> tuple[str, ...]:
        """Return the values of a category or of strings, ascending, and renumber the codes by them."""
        names = sorted(self._codes)
        order = np.zeros(len(names) + 1, np.int64)
        for place, name in enumerate(names):
            order[self._codes[name]] = place
        if names:
            self.values = order.astype(self.values.dtype)[self.values]
        return tuple(names)


_DTYPES: Final[Mapping[str, str]] = {
    "bool": "?",
    "int": "<i8",
    "float": "<f8",
    "category": "<i4",
    "string": "<i4",
    "floats": "<f4",
}
_ACCEPTED: Final[Mapping[str, frozenset[str]]] = {
    "bool": frozenset({"bool"}),
    "int": frozenset({"int"}),
    "float": _NUMBERS,
    "category": frozenset({"text", "int", "float", "bool"}),
    "string": frozenset({"text", "int", "float", "bool"}),
    "floats": frozenset({"floats"}),
}
