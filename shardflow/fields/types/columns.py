"""Fields of columns: labels and other values of attached tables and facts, from memory maps.

The values of a whole micro-batch are gathered at once, without an object per sample; no shard is read.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, ConfigError, FormatError
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    Coverage,
    Field,
    FieldContext,
    NoContent,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
)
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.types.members import present_beside
from shardflow.format.facts.columns import ColumnInfo, open_columns
from shardflow.format.facts.columns import Columns as DatasetColumns

_DTYPES: Final[Mapping[str, type[np.generic]]] = {
    "bool": np.bool_,
    "int": np.int64,
    "float": np.float32,
    "category": np.int64,
    "floats": np.float32,
}
_WIDER: Final = ("bool", "int", "float")
_NO_CLASS: Final = -1
_MISSING: Final = ("pad", "drop", "error")
_KIND_OF: Final[Mapping[str, str]] = {"bool": "bool", "int64": "int", "float32": "float"}
_DTYPE_CHOICES: Final = (None, *_KIND_OF)
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Column(Field):
    """Values of one column: a label, a score, an embedding, or a fact.

    ``(B,)`` by the kind of the column: bool, int64, or float32; of a category int64, the position in
    ``batch.info.classes[NAME]``; of lists of floats ``(B, d)`` float32. ``NAME_mask`` ``(B,)`` uint8 is 1
    where there is a value; elsewhere the value is 0 or False, and -1 of a category. A value of a study
    repeats for its series and images.

    Example::

        sf.Column("chexpert.edema", missing="pad")

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "column"

    column: str
    """Name of the column: ``TABLE.COLUMN`` of an attached table, or ``facts.NAME``."""
    dtype: str | None = None
    """Dtype of the entry, ``bool``, ``int64`` or ``float32``, which must hold the values; the column's own by
    default. A loss over labels may want ``float32``, which rounds integers beyond 2^24."""

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, _MISSING)
        check_choice("dtype", self.dtype, _DTYPE_CHOICES)
        _check_text("column", self.column, "chexpert.edema")

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundColumns(
            name, self, lambda known: find_column(self.column, known), context, is_single=True
        )

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the values and their mask."""
        return present_beside(entry, arrays, ("mask",))


@dataclass(frozen=True)
class Columns(Field):
    """Values of several columns side by side, such as all labels of a table.

    ``(B, n)`` in the order of ``batch.info.columns[NAME]``, of ``dtype`` or the one that holds all: bool,
    int64 or float32; of categories int64 positions in ``batch.info.classes["NAME.COLUMN"]``.
    ``NAME_mask`` ``(B, n)`` uint8 is 1 where there is a value; elsewhere it is 0 or False, and -1 of a
    category. With ``missing="error"`` every value must be there; ``drop`` leaves out samples that have none.
    Of columns that ``*`` stands for, those of numbers are taken or, if there are none, categories; a warning
    names what is left out.

    Example::

        sf.Columns("chexpert.*", missing="pad")

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "columns"

    columns: str | tuple[str, ...]
    """Names of the columns, in order; ``*`` stands for any characters: ``"chexpert.*"``."""
    dtype: str | None = None
    """As that of `Column`."""

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, _MISSING)
        check_choice("dtype", self.dtype, _DTYPE_CHOICES)
        patterns: Any = self.columns
        patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        for one in patterns:
            _check_text("columns", one, "chexpert.*")
        if not patterns:
            raise ConfigError("columns names no column; write for example sf.Columns('chexpert.*').")
        object.__setattr__(self, "columns", patterns)

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""

        def chosen(known: Mapping[str, ColumnInfo]) -> list[str]:
            found: dict[str, bool] = {}  # whether the column was named, not only matched
            for pattern in self.columns:
                matches = [one for one in known if fnmatchcase(one, pattern)] if "*" in pattern else []
                found |= {one: found.get(one, False) for one in matches}
                found |= dict.fromkeys(() if matches else find_column(pattern, known), True)
            return _side_by_side(name, found, known)

        return BoundColumns(name, self, chosen, context, is_single=False)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the values and their masks."""
        return present_beside(entry, arrays, ("mask",))


def _side_by_side(field: str, found: Mapping[str, bool], known: Mapping[str, ColumnInfo]) -> list[str]:
    """Return named columns, and of the matched ones those that an array holds beside them.

    Raises:
        ConfigError: None is left.
    """
    kinds = {known[one].kind for one, is_named in found.items() if is_named}
    if not kinds:
        kinds = {known[one].kind for one in found}
    wanted = set(_WIDER) if kinds & set(_WIDER) else {"category"}
    taken = [one for one, is_named in found.items() if is_named or known[one].kind in wanted]
    left = [f"{one} ({known[one].kind})" for one in found if one not in taken]
    if not taken:
        raise ConfigError(
            f"The columns of the field {field!r} are {', '.join(left)}, which no array holds side by side; "
            "use sf.Column for each of them."
        )
    if left:
        _LOGGER.warning(
            "field %r delivers %d columns side by side and leaves out %s; make sf.Column fields of these",
            field,
            len(taken),
            ", ".join(left),
        )
    return taken


def _check_text(name: str, value: object, example: str) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{name} is the name of a column, such as {example!r}, got {value!r}.")


def find_column(name: str, known: Mapping[str, ColumnInfo]) -> list[str]:
    """Return the column of a name.

    Raises:
        ConfigError: There is none.
    """
    if name in known:
        return [name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif known:
        hint = "`shardflow columns DATASET` lists them."
    else:
        hint = "there are none; attach a table: shardflow attach DATASET FILE --name NAME --on KEY"
    raise ConfigError(f"There is no column {name!r}; {hint}")


class _Values:
    """One column of all datasets, converted to one kind.

    Args:
        name: Of the column.
        columns: Columns of each dataset.

    Raises:
        ConfigError: A dataset lacks it, or the kinds do not go together.
    """

    def __init__(self, name: str, columns: Sequence[DatasetColumns]) -> None:
        self.name, self._columns = name, columns
        for one in columns:
            find_column(name, one)
        kinds = {one[name].kind for one in columns}
        if kinds == {"string"}:
            raise ConfigError(
                f"The column {name} holds too many different texts for classes; use it in where=, or attach "
                "it with --type COLUMN=category."
            )
        if len(kinds) > 1 and not kinds <= set(_WIDER):
            raise ConfigError(
                f"The column {name} is of the kinds {', '.join(sorted(kinds))} in the datasets of the blend; "
                "attach tables of one kind, see --type."
            )
        self.kind: str = max(kinds, key=_WIDER.index) if kinds <= set(_WIDER) else next(iter(kinds))
        self.classes = tuple(sorted({known for one in columns for known in one[name].names}))
        number = {known: place for place, known in enumerate(self.classes)}
        self._codes = [
            np.array([*(number[known] for known in one[name].names), _NO_CLASS], np.int64) for one in columns
        ]
        widths = {self._width(one) for one in columns} if self.kind == "floats" else {0}
        if len(widths) > 1:
            raise ConfigError(
                f"The lists of the column {name} have other lengths in some datasets of the blend."
            )
        self.width: int = next(iter(widths))
        self.unit = columns[0][name].unit

    def _width(self, columns: DatasetColumns) -> int:
        return int(columns.gather(self.name, np.zeros(0, np.int64)).values.shape[1])

    def has_value(self, place: int) -> NDArray[np.bool_]:
        """Return which rows of a dataset's own table have a value."""
        missing = self._columns[place].column(self.name).is_missing
        if missing is not None:
            return ~missing
        return np.ones(self._columns[place].num_rows, bool)

    def gather(self, place: int, rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return values of rows of a dataset's own table, and which of them exist."""
        found = self._columns[place].gather(self.name, rows)
        there = np.ones(len(rows), bool) if found.is_missing is None else ~found.is_missing
        values = found.values
        if self.kind == "category":
            values = self._codes[place][np.minimum(values, len(self._codes[place]) - 1)]
        return values, there


class BoundColumns(BoundField):
    """Columns, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        choose: Returns the names of the columns of a dataset.
        context: The samples.
        is_single: Whether there is one column, and no axis for several.

    Raises:
        ConfigError: A column is missing or of another unit or kind, or a sample has no value and ``missing``
            is ``error``.
    """

    is_beside = True

    def __init__(
        self, name: str, spec: Column | Columns, choose: Any, context: FieldContext, *, is_single: bool
    ) -> None:
        super().__init__(name)
        self.spec, self._samples, self._is_single = spec, context.samples, is_single
        datasets = context.samples.datasets
        opened = {id(one): open_columns(one) for one in datasets}
        columns = [opened[id(one)] for one in datasets]
        self._values = [_Values(column, columns) for column in choose(columns[0])]
        kinds = {one.kind for one in self._values}
        if not is_single and (kinds & {"category", "floats"}) and len(kinds) > 1:
            raise ConfigError(
                f"The columns of the field {name!r} are of the kinds {', '.join(sorted(kinds))}, which no "
                "array holds side by side; make a field of each kind, or name columns of numbers alone."
            )
        if not is_single and "floats" in kinds:
            raise ConfigError(
                f"The columns of the field {name!r} hold lists; use sf.Column for each of them."
            )
        self._kind = self._kind_of(kinds)
        names = [one.name for one in self._values]
        self._digests = list(
            filter(None, dict.fromkeys(one.digest(name) for one in columns for name in names))
        )
        owners = dict.fromkeys(name.partition(".")[0] for name in names)
        self._tables = [table for table in owners if any(table in one.tables for one in datasets)]
        self._has = [
            np.stack([one.has_value(place) for one in self._values]) for place in range(len(datasets))
        ]
        self._num_samples = context.num_samples
        self._num_missing = context.count_missing(self.has_content)
        num_gaps = context.count_missing([np.asarray(has.all(axis=0)) for has in self._has])
        if num_gaps and spec.missing == "error":
            what = f"no value of {self._values[0].name}" if is_single else "not every value"
            raise ConfigError(
                f"{num_gaps:,} of {self._num_samples:,} samples have {what} for the field {name!r}; write "
                "missing='pad', which masks what is missing, or missing='drop' to leave out samples without "
                "any."
            )

    def _kind_of(self, kinds: set[str]) -> str:
        """Return the kind of the array: the widest of the columns', or that of the dtype asked for."""
        kind = max(kinds, key=_WIDER.index) if kinds <= set(_WIDER) else next(iter(kinds))
        if self.spec.dtype is None:
            return kind
        wanted = _KIND_OF[self.spec.dtype]
        if _DTYPES[kind] is _DTYPES[wanted]:  # of lists and categories, too
            return kind
        if kind not in _WIDER or _WIDER.index(wanted) < _WIDER.index(kind):
            raise ConfigError(
                f"The field {self.name!r} holds values of the kind {kind}, which dtype={self.spec.dtype!r} "
                f"does not hold; write {np.dtype(_DTYPES[kind]).name!r}, or leave dtype out."
            )
        return wanted

    @property
    def digests(self) -> Sequence[str]:
        """Digests of the tables of the columns."""
        return self._digests

    @property
    def tables(self) -> Sequence[str]:
        """Names of those that are attached."""
        return self._tables

    @property
    def has_content(self) -> Sequence[NDArray[np.bool_]]:
        """Rows that have a value of any of the columns."""
        return [np.asarray(has.any(axis=0)) for has in self._has]

    @property
    def coverage(self) -> Coverage:
        """Number of samples that have a value."""
        return Coverage(num_samples=self._num_samples, num_missing=self._num_missing)

    @property
    def _shape(self) -> tuple[int, ...]:
        if not self._is_single:
            return (len(self._values),)
        return (self._values[0].width,) if self._kind == "floats" else ()

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        num = len(slots)
        mask = () if self._is_single else self._shape
        return [
            ArraySpec.of(self.name, _DTYPES[self._kind], num, *self._shape),
            ArraySpec.of(f"{self.name}_mask", np.uint8, num, *mask),
        ]

    def prepare(self, arrays: Arrays, slots: Slots) -> None:  # noqa: ARG002
        """Make all slots ones without a value."""
        arrays[self.name][:] = self._fill
        arrays[f"{self.name}_mask"][:] = 0

    @property
    def _fill(self) -> int:
        return _NO_CLASS if self._kind == "category" else 0

    def fill_beside(self, arrays: Arrays, slots: Slots) -> Mapping[int, BadSampleReason]:
        """Gather the values of all slots; a damaged block is that of its slots alone."""
        used = np.flatnonzero(slots.rows >= 0)
        bad: dict[int, BadSampleReason] = {}
        for place in range(len(self._samples.datasets)):
            here = used if not self._samples.is_blend else used[slots.components[used] == place]
            try:
                self._gather(arrays, place, here, slots)
            except FormatError:
                for one in here.tolist():
                    try:
                        self._gather(arrays, place, np.array([one]), slots)
                    except FormatError as error:
                        is_checksum = isinstance(error, ChecksumError)
                        reason = (
                            BadSampleReason.CHECKSUM_MISMATCH
                            if is_checksum
                            else BadSampleReason.INDEX_DAMAGED
                        )
                        bad[one] = reason
        return bad

    def _gather(self, arrays: Arrays, place: int, here: NDArray[np.int64], slots: Slots) -> None:
        rows = slots.table_rows[here]
        out, mask = arrays[self.name], arrays[f"{self.name}_mask"]
        for number, column in enumerate(self._values):
            values, there = column.gather(place, rows)
            at: Any = here if self._is_single else (here, number)
            expanded = there[:, None] if values.ndim > 1 else there
            out[at] = np.where(expanded, values, self._fill)
            mask[at] = there

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:  # noqa: ARG002
        """Return nothing: columns are stored beside the shards."""
        return ()

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:  # noqa: ARG002
        """Begin a slot, of which nothing is in a shard."""
        return NoContent()

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without a value."""
        arrays[self.name][slot] = self._fill
        arrays[f"{self.name}_mask"][slot] = 0

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs, and the names that ``batch.info`` has."""
        found: dict[str, Any] = {"type": self.spec.type_name, "name": self.name}
        if self._is_single:
            return {**found, "classes": list(self._values[0].classes)} if self._kind == "category" else found
        classes = {
            f"{self.name}.{one.name.rpartition('.')[2]}": list(one.classes)
            for one in self._values
            if one.kind == "category"
        }
        return {**found, "columns": [one.name for one in self._values], "column_classes": classes}
