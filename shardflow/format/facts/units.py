"""Unit tables: rows of a dataset seen as series, images, windows or parts, derived from its stored tables.

Nothing is stored by row. A row of series is one number; rows of images are prefix sums over the series, those
of windows and of parts of conversations over the studies. All columns of the samples table are computed for
the rows that are asked for, so that planning and loading treat them like studies. Facts of cost are those of
the series, image or window.
"""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.format.facts.series import SeriesTable, starts_of
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.format.samples import COLUMNS, SamplesTable

DerivedUnit: TypeAlias = Literal["series", "image"]
Int64Array: TypeAlias = NDArray[np.int64]
_OF_STUDIES: Final = frozenset({"shard", "row_in_shard", "text_bytes"})
_OF_SERIES: Final = frozenset({"num_slices", "rows", "columns", "modality"})
# Shares of a study's bytes are counted in this many bits, so that no product leaves 64 bits.
_SHARE_BITS: Final = 20
_MANY: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class ChosenSeries:
    """Series of a table that have rows, and their images."""

    rows: Int64Array
    """``(n,)`` rows of the series table, ascending."""
    num_images: Int64Array
    """``(n,)`` images of each, at least 1."""
    image_ids: Int64Array
    """Numbers of the chosen images among the image roles of the table, ascending: of a series of several
    roles single images may be chosen, of every other one all are. With ``starts`` numbers of images of any
    series."""
    starts: Int64Array | None = None
    """``(num_series + 1,)`` number of the first image of each series; None where only those of series of
    several roles have numbers."""


class UnitColumn:
    """Column of a unit table, computed where it is read; indexed like an array."""

    __slots__ = ("_name", "_table", "dtype", "ndim", "shape")

    def __init__(self, table: DerivedTable, name: str) -> None:
        self._table, self._name = table, name
        self.dtype = table.gather(name, np.zeros(0, np.int64)).dtype
        self.ndim, self.shape = 1, (table.num_samples,)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    def __getitem__(self, key: Any) -> NDArray[Any]:
        if isinstance(key, slice):
            rows = np.arange(*key.indices(len(self)), dtype=np.int64)
        else:
            rows = np.flatnonzero(key) if np.asarray(key).dtype == bool else np.asarray(key, np.int64)
        return self._table.gather(self._name, rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the whole column; ``copy`` has no effect, because it is computed."""
        return np.asarray(self[:], dtype)


class DerivedTable(SamplesTable):
    """Rows that belong to studies, with the columns of the samples table. Safe for many threads.

    Attributes:
        unit: What a row is.
    """

    kind: ClassVar[str] = "units"
    unit: str

    @abstractmethod
    def digest(self, dataset_id: str) -> str:
        """Return the identity of the rows: other ones change it."""

    @abstractmethod
    def study_rows(self, rows: Int64Array) -> Int64Array:
        """Return the row of the samples table that each row belongs to."""

    @abstractmethod
    def _gather(self, name: str, rows: Int64Array) -> NDArray[Any]:
        """Return some rows of a column, ``(n,)``; raises what `gather` raises."""

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns of the samples table."""
        return COLUMNS

    def sample_key(self, row: int) -> str:
        """Return the key of a row."""
        return bytes(self.gather("sample_key", row)[()]).decode("ascii")

    def modality(self, row: int) -> str:
        """Return the modality of a row's series."""
        return self.modalities[int(self.gather("modality", row))]

    def column(self, name: str) -> Any:
        """Return a column, computed where it is indexed."""
        return UnitColumn(self, name)

    def gather(self, name: str, rows: NDArray[Any] | int) -> NDArray[Any]:
        """Return some rows of a column.

        Raises:
            FormatError: There is no such column.
            IndexError: A row is outside the table.
        """
        rows = np.asarray(rows, np.int64)
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.num_samples:
            raise IndexError(f"rows are from 0 to {self.num_samples - 1} in this table, got others ({name}).")
        return self._gather(name, np.atleast_1d(rows)).reshape(rows.shape)

    @property
    def vocabularies(self) -> Mapping[str, tuple[str, ...]]:
        """The columns whose numbers are positions in a list of names, and those names."""
        return {"modality": self.modalities}


class UnitTable(DerivedTable):
    """Rows of series or images with the columns of the samples table. Safe for many threads.

    Keys are that of the study followed by ``s`` and the number of the series, and for images by ``i`` and the
    position in the series: ``ab12s0i3``. ``offset_bytes`` and ``num_bytes`` are shares of the study's, in
    proportion to the pixels, since no table knows where a series is stored; rows of a study never overlap.

    Args:
        studies: The samples table.
        series: The series table beside it.
        unit: What a row is.
        chosen: The series that have rows.
    """

    def __init__(
        self, studies: SamplesTable, series: SeriesTable, unit: DerivedUnit, chosen: ChosenSeries
    ) -> None:
        self.unit, self._studies, self._series_table, self._chosen = unit, studies, series, chosen
        self._first_series = series.first_series()
        self._first_image = series.first_image() if chosen.starts is None else chosen.starts
        # Where the rows of each chosen series begin.
        counts = chosen.num_images if unit == "image" else np.ones(len(chosen.rows), np.int64)
        self._first_row = starts_of(counts).astype(np.int64)
        # The study of each chosen series.
        self._study_of = np.searchsorted(self._first_series, chosen.rows, side="right") - 1
        sizes = np.maximum(_pixel_bytes(series), 1)
        self._pixels_before = starts_of(sizes).astype(np.int64)
        self.num_samples = int(self._first_row[-1])
        self.modalities = series.vocabulary("modality")
        self.splits = {name: self._rows_of(span) for name, span in studies.splits.items()}

    def _rows_of(self, span: range) -> range:
        bounds = self._first_series[[span.start, span.stop]]
        start, stop = self._first_row[np.searchsorted(self._chosen.rows, bounds)].tolist()
        return range(start, stop)

    def digest(self, dataset_id: str) -> str:
        """Return the identity of the rows: a different dataset, unit, series or image changes it."""
        parts = [self._study_of, self._series_table.array("series")[self._chosen.rows]]
        if self.unit == "image":
            parts += [self._chosen.num_images, self._chosen.image_ids]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(part, "<i8").data)
        numbered = {} if self._chosen.starts is None else {"images": "all"}
        return sha256_hex(
            canonical_json(
                {"dataset_id": dataset_id, "unit": self.unit, "rows": digest.hexdigest(), **numbered}
            )
        )

    # ---- places ----------------------------------------------------------------------------------

    def series_rows(self, rows: Int64Array) -> Int64Array:
        """Return the row of the series table that each row belongs to."""
        return self._chosen.rows[self._places(rows)]

    def images(self, rows: Int64Array) -> Int64Array:
        """Return the position in its series of each row's image; 0 for rows of series."""
        return self._images(rows, self._places(rows))

    def _images(self, rows: Int64Array, places: Int64Array) -> Int64Array:
        if self.unit == "series":
            return np.zeros(rows.shape, np.int64)
        series = self._chosen.rows[places]
        inside = rows - self._first_row[places]
        is_mixed = self._first_image[series + 1] > self._first_image[series]
        if is_mixed.any():
            first = self._first_image[series[is_mixed]]
            ids = self._chosen.image_ids
            inside[is_mixed] = ids[np.searchsorted(ids, first) + inside[is_mixed]] - first
        return inside

    def study_rows(self, rows: Int64Array) -> Int64Array:
        """Return the row of the samples table that each row belongs to."""
        return self._study_of[self._places(rows)]

    def _places(self, rows: Int64Array) -> Int64Array:
        """Return the position of each row's series among the chosen ones."""
        if self.unit == "series":
            return rows
        if len(rows) < _MANY or (np.diff(rows) != 1).any():
            return np.searchsorted(self._first_row, rows, side="right") - 1
        # Consecutive rows, as of a whole column: several times as fast as searching each.
        start, stop = int(rows[0]), int(rows[-1]) + 1
        first, last = (np.searchsorted(self._first_row, [start, stop - 1], side="right") - 1).tolist()
        bounds = np.clip(self._first_row[first : last + 2], start, stop)
        return np.repeat(np.arange(first, last + 1), np.diff(bounds))

    # ---- SamplesTable ----------------------------------------------------------------------------

    def _gather(self, name: str, rows: Int64Array) -> NDArray[Any]:
        if name == "num_series" or (name == "num_slices" and self.unit == "image"):
            return np.ones(rows.shape, "<u4")
        places = self._places(rows)
        series, studies = self._chosen.rows[places], self._study_of[places]
        if name in _OF_SERIES:
            return np.asarray(self._series_table.array(name)[series])
        if name in _OF_STUDIES:
            return self._studies.gather(name, studies)
        if name == "sample_key":
            return self._keys(series, studies, self._images(rows, places))
        if name in ("offset_bytes", "num_bytes"):
            images = self._images(rows, places)
            start = self._byte_before(series, studies, images)
            if name == "offset_bytes":
                return start
            last = images + 1 if self.unit == "image" else self._num_stored(series)
            return self._byte_before(series, studies, last) - start
        raise FormatError(f"A table of {self.unit} has no column {name}; it has {', '.join(COLUMNS)}.")

    def find(self, key: str) -> int:
        """Return the row of a key.

        Raises:
            FormatError: No row has this key.
        """
        parsed = parse_unit_key(key, self.unit)
        if parsed is not None:
            study = self._studies.find(parsed.study_key)
            first, last = np.searchsorted(self._chosen.rows, self._first_series[[study, study + 1]]).tolist()
            rows = np.arange(int(self._first_row[first]), int(self._first_row[last]))
            found = rows[self.gather("sample_key", rows) == np.bytes_(key.encode())]
            if len(found):
                return int(found[0])
        raise FormatError("a sample key must be one of the dataset, got another one.")

    def _keys(self, series: Int64Array, studies: Int64Array, images: Int64Array) -> NDArray[Any]:
        numbers = self._series_table.array("series")[series]
        keys = np.strings.add(self._studies.gather("sample_key", studies), b"s")
        keys = np.strings.add(keys, numbers.astype("S10"))
        if self.unit == "image":
            keys = np.strings.add(np.strings.add(keys, b"i"), images.astype("S10"))
        return np.asarray(keys)

    def _byte_before(self, series: Int64Array, studies: Int64Array, image: Int64Array) -> Int64Array:
        """Return the byte of the shard at which an image of a series would begin, if pixels cost alike."""
        pixels, first = self._pixels_before, self._first_series
        of_series = pixels[series + 1] - pixels[series]
        start = pixels[first[studies]]
        before = pixels[series] - start + of_series * image // self._num_stored(series)
        share = (before << _SHARE_BITS) // (pixels[first[studies + 1]] - start)
        offset = self._studies.gather("offset_bytes", studies).astype(np.int64)
        num_bytes = self._studies.gather("num_bytes", studies).astype(np.int64)
        found: Int64Array = offset + (num_bytes * share >> _SHARE_BITS)
        return found

    def _num_stored(self, series: Int64Array) -> Int64Array:
        """Return how many images of a series are stored, at least 1."""
        return np.maximum(self._series_table.array("num_slices")[series].astype(np.int64), 1)


class NumberedTable(DerivedTable):
    """Rows that are numbered within studies: windows, or parts of a conversation. Safe for many threads.

    Keys are that of the study followed by the first letter of the unit and the number: ``ab12w7``.
    ``offset_bytes`` and ``num_bytes`` are equal shares of the study's, since no table knows where a row is
    stored.

    Args:
        studies: The samples table.
        counts: ``(num_studies,)`` rows of each study; 0 for none.
    """

    def __init__(self, studies: SamplesTable, counts: Int64Array) -> None:
        self._studies, self._first_row = studies, starts_of(counts).astype(np.int64)
        self.num_samples = int(self._first_row[-1])
        self.modalities = studies.modalities
        self.splits = {
            name: range(int(self._first_row[span.start]), int(self._first_row[span.stop]))
            for name, span in studies.splits.items()
        }

    def digest(self, dataset_id: str) -> str:
        """Return the identity of the rows: another dataset, or number of rows of a study, changes it."""
        rows = sha256_hex(np.ascontiguousarray(self._first_row, "<i8").tobytes())
        return sha256_hex(canonical_json({"dataset_id": dataset_id, "unit": self.unit, "rows": rows}))

    def first_rows(self) -> Int64Array:
        """Return the first row of each study, and the number of rows, ``(num_studies + 1,)``."""
        return self._first_row

    def study_rows(self, rows: Int64Array) -> Int64Array:
        """Return the row of the samples table that each row belongs to."""
        return np.searchsorted(self._first_row, rows, side="right") - 1

    def numbers(self, rows: Int64Array) -> Int64Array:
        """Return the number of each row among those of its study, from 0."""
        return rows - self._first_row[self.study_rows(rows)]

    def counts(self, studies: Int64Array) -> Int64Array:
        """Return the number of rows of studies, given their rows of the samples table."""
        found: Int64Array = self._first_row[studies + 1] - self._first_row[studies]
        return found

    def find(self, key: str) -> int:
        """Return the row of a key.

        Raises:
            FormatError: No row has this key.
        """
        parsed = parse_unit_key(key, self.unit)
        if parsed is not None:
            study = np.array([self._studies.find(parsed.study_key)])
            number = int(getattr(parsed, self.unit))
            if number < int(self.counts(study)[0]):
                return int(self._first_row[study[0]]) + number
        raise FormatError("a sample key must be one of the dataset, got another one.")

    def _gather(self, name: str, rows: Int64Array) -> NDArray[Any]:
        studies = self.study_rows(rows)
        if name not in ("sample_key", "offset_bytes", "num_bytes"):
            return self._studies.gather(name, studies)
        numbers, counts = rows - self._first_row[studies], self.counts(studies)
        if name == "sample_key":
            keys = np.strings.add(self._studies.gather("sample_key", studies), self.unit[0].encode())
            return np.asarray(np.strings.add(keys, numbers.astype("S10")))
        num_bytes = self._studies.gather("num_bytes", studies).astype(np.int64)
        before = num_bytes * numbers // counts
        if name == "num_bytes":
            return np.asarray(num_bytes * (numbers + 1) // counts - before)
        return np.asarray(self._studies.gather("offset_bytes", studies).astype(np.int64) + before)


class WindowTable(NumberedTable):
    """Rows that are windows of the volumes of studies."""

    unit = "window"


class PartTable(NumberedTable):
    """Rows that are parts of the conversations of studies.

    Args:
        studies: The samples table.
        first_rows: ``(num_studies + 1,)``, the first part of each study, and the number of parts.
        messages: ``(num_parts, 2)``, the first message of each part, and the one behind its last.
    """

    unit = "part"

    def __init__(self, studies: SamplesTable, first_rows: Int64Array, messages: NDArray[Any]) -> None:
        super().__init__(studies, np.diff(first_rows))
        self.messages = messages

    def digest(self, dataset_id: str) -> str:
        """Return the identity of the rows: another dataset, or a part of other messages, changes it."""
        rows = sha256_hex(np.ascontiguousarray(self.messages, "<u4").tobytes())
        return sha256_hex(canonical_json({"dataset_id": dataset_id, "unit": self.unit, "rows": rows}))


@dataclass(frozen=True, slots=True)
class Unit:
    """Place of a sample in its study."""

    study_key: str
    """Sample key of the study."""
    series: int | None = None
    """Number of the series in the study; None for a whole study."""
    image: int | None = None
    """Position in the series; None for a whole series."""
    window: int | None = None
    """Number among the windows of the study; None for what is no window."""
    part: int | None = None
    """Number among the parts of a conversation; None for a whole one."""


_KEYS: Final = {
    "study": re.compile(r"([a-z0-9]+)", re.ASCII),
    "series": re.compile(r"([a-z0-9]+)s(?P<series>\d+)", re.ASCII),
    "image": re.compile(r"([a-z0-9]+)s(?P<series>\d+)i(?P<image>\d+)", re.ASCII),
    "window": re.compile(r"([a-z0-9]+)w(?P<window>\d+)", re.ASCII),
    "part": re.compile(r"([a-z0-9]+)p(?P<part>\d+)", re.ASCII),
    "entity": re.compile(r"([a-z0-9]+)e\d+s(?P<series>\d+)", re.ASCII),
}


def parse_unit_key(key: str, unit: str) -> Unit | None:
    """Return the place that the key of a sample names; None if it is no key of this unit."""
    found = _KEYS[unit].fullmatch(key)
    if found is None:
        return None
    return Unit(found[1], **{name: int(number) for name, number in found.groupdict().items()})


def _pixel_bytes(series: SeriesTable) -> Int64Array:
    """Return the size of the decoded pixels of each series, in the dtype in which they are stored."""
    itemsize = [np.dtype(name).itemsize if name else 1 for name in series.vocabulary("dtype")]
    found = np.array(itemsize, np.int64)[series.array("dtype")]
    for name in ("num_slices", "rows", "columns", "channels"):
        found = found * series.array(name)
    return np.asarray(found, np.int64)


def check_unit(unit: object) -> None:
    """Refuse what is no unit of a loader.

    Raises:
        ConfigError: It is none.
    """
    if unit not in UNITS:
        raise ConfigError(f"unit is one of {', '.join(map(repr, UNITS))}, got {unit!r}.")


UNITS: Final = ("study", "series", "image", "window", "entity")
"""What a row of a loader can be."""
