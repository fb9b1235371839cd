"""Fields of another study: what the same person's earlier study holds, or one that a column names.

The study facts table names the study of the latest earlier day in the same split; a column of an attached
table may name another study of the split by its key. Such a field is one of that study, bound to these
studies of the population; only what a slot refers to differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.catalog import SeriesCatalog
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    Coverage,
    Field,
    FieldContext,
    SlotContent,
    SlotRequest,
    Slots,
)
from shardflow.fields.reader import Samples, Shard
from shardflow.fields.units import unit_of
from shardflow.format import Dataset
from shardflow.format.facts.columns import open_columns
from shardflow.format.facts.studies import NO_ROW, open_studies
from shardflow.format.volumes.bricks import RegionPlan

Int64Array = NDArray[np.int64]


class PreviousStudies:
    """Earlier study of the same person of each study, by the study facts tables. Safe for many threads.

    Args:
        samples: The samples; all of them are studies.

    Attributes:
        tables: For each dataset the row of the earlier study, ``(num_rows,)``; -1 for none.
        digests: SHA-256 of the study facts table of each dataset.
        attached: Names of attached tables that name the studies.
        what: The study, for messages.

    Raises:
        ConfigError: A dataset has no table, is of another writer, or its samples are no studies.
        FormatError: A table cannot be trusted.
    """

    attached: Sequence[str] = ()
    what = "an earlier study of the same person in its split"

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        opened = [self._open(dataset) for dataset in samples.datasets]
        self.tables: list[Int64Array] = [rows for rows, _ in opened]
        self.digests: list[str] = [digest for _, digest in opened]

    def _open(self, dataset: Dataset) -> tuple[Int64Array, str]:
        """Return the rows of earlier studies of a dataset, and the digest of their table."""
        return _open(dataset)

    def rows(self, rows: Int64Array) -> Int64Array:
        """Return the rows of the earlier studies of rows of the selection, ``(n,)``; -1 for none."""
        inside = self._samples.table_rows(rows)
        earlier = self._earlier(self._samples.components_of(rows), inside)
        return np.where(earlier >= 0, rows - inside + earlier, NO_ROW)

    def slots(self, slots: Slots) -> Slots:
        """Return the earlier studies of the samples of a micro-batch, in the same slots."""
        return slots.once("previous", self._slots)

    def _slots(self, slots: Slots) -> Slots:
        earlier = self._earlier(slots.components, slots.table_rows)
        is_planned = np.zeros(len(slots), bool)
        is_planned[slots.planned] = True
        has_one = is_planned & (earlier >= 0)
        inside = np.where(has_one, earlier, 0)
        rows = np.where(has_one & (slots.rows >= 0), slots.rows - slots.table_rows + earlier, NO_ROW)
        return replace(slots, rows=rows, study_rows=inside, table_rows=inside, is_planned=has_one)

    def _earlier(self, components: Int64Array, table_rows: Int64Array) -> Int64Array:
        found = np.full(len(table_rows), NO_ROW, np.int64)
        for component, table in enumerate(self.tables):
            here = components == component
            found[here] = table[table_rows[here]]
        return found


class NamedStudies(PreviousStudies):
    """Other studies of the same split, which a column names by their sample keys.

    Args:
        samples: The samples; all of them are studies.
        column: A column of texts of an attached table, such as ``negatives.study``.

    Raises:
        ConfigError: There is no such column, its values name other than studies of the same split, or the
            samples are no studies.
    """

    def __init__(self, samples: Samples, column: str) -> None:
        self._column = column
        self.attached = (column.partition(".")[0],)
        self.what = f"a study that {column} names"
        super().__init__(samples)

    def _open(self, dataset: Dataset) -> tuple[Int64Array, str]:
        """Return the rows of the studies that are named, and the digest of the column's table."""
        name = self._column
        columns = open_columns(dataset)
        if (unit := unit_of(dataset)) != "study":
            raise ConfigError(
                f"study={name!r} is of samples that are studies, and here they are of unit {unit!r}; leave "
                "it out, or write unit='study'."
            )
        if name not in columns or columns[name].unit != "study":
            raise ConfigError(
                "study is one of 'own', 'previous', or a column with the sample key of another study, got "
                f"{name!r}; attach its table, or correct the name."
            )
        found = columns.column(name)
        if found.values.dtype.kind != "S" and found.names is None:
            raise ConfigError(f"The column {name} has no texts, so it names no studies; name another one.")
        is_named = np.ones(len(found.values), bool) if found.is_missing is None else ~found.is_missing
        keys = found.values if found.names is None else np.array([*found.names, ""], "S")[found.values]
        own = dataset.studies.column("sample_key")[:]
        order = np.argsort(own)
        places = np.minimum(np.searchsorted(own, keys, sorter=order), len(own) - 1)
        rows = np.where(is_named, order[places], NO_ROW)
        split = np.zeros(len(own), np.int64)
        for number, span in enumerate(dataset.splits.values()):
            split[span.start : span.stop] = number
        num_unknown = int((is_named & (own[rows] != keys)).sum())
        num_elsewhere = int((is_named & (split[rows] != split)).sum())
        if num_unknown or num_elsewhere:
            raise ConfigError(
                f"Of {int(is_named.sum()):,} values of {name}, {num_unknown:,} are no sample keys of the "
                f"dataset and {num_elsewhere:,} name a study of another split, which must not be trained on; "
                "correct them, and attach the table again."
            )
        return rows.astype(np.int64), columns.digest(name)


def open_studies_of(samples: Samples, study: str) -> PreviousStudies:
    """Return the other studies that fields read: the ``previous`` ones, or those that a column names.

    Raises:
        ConfigError: There are none.
        FormatError: A table cannot be trusted.
    """
    return PreviousStudies(samples) if study == "previous" else NamedStudies(samples, study)


def _open(dataset: Dataset) -> tuple[Int64Array, str]:
    """Return the rows of earlier studies of a dataset, and the digest of their table."""
    if dataset.is_foreign:
        raise ConfigError(
            "study='previous' needs the persons and days of studies, which tars of other writers do not say; "
            "leave it out, or pack the studies with `shardflow pack`."
        )
    if (unit := unit_of(dataset)) != "study":
        raise ConfigError(
            f"study='previous' is of samples that are studies, and here they are of unit {unit!r}; leave it "
            "out, or write unit='study'."
        )
    table, digest = open_studies(dataset)
    rows = table.array("previous_row").astype(np.int64)
    is_right = rows == NO_ROW
    for span in dataset.splits.values():
        here = slice(span.start, span.stop)
        is_right[here] |= (rows[here] >= span.start) & (rows[here] < span.stop)
    if not is_right.all():
        raise FormatError(
            "the study facts table names an earlier study outside the split; delete its folder and run: "
            "shardflow attach DATASET --facts"
        )
    return rows, digest


class _PreviousContext(FieldContext):
    """Context of a field of the previous study: the population are the earlier studies."""

    def __init__(self, context: FieldContext, populations: Sequence[NDArray[np.bool_]]) -> None:
        super().__init__(context.samples, populations, context.counters)
        self._context = context

    @cached_property
    def catalog(self) -> SeriesCatalog:
        """Series tables, which are those of the samples."""
        return self._context.catalog


class BoundPrevious(BoundField):
    """Field of the previous study, or of one that a column names, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver; its ``study`` is ``previous`` or a column.
        context: The samples and their tables.
        previous: Their earlier studies, or those that are named.

    Attributes:
        of: The field of these studies.
        study: Which ones they are, as the spec says.

    Raises:
        ConfigError: The type reads no earlier study, no sample has one, some lack it and ``missing`` is
            ``error``, or the field does not fit the earlier studies.
    """

    def __init__(self, name: str, spec: Field, context: FieldContext, previous: PreviousStudies) -> None:
        super().__init__(name)
        if not spec.reads_previous:
            raise ConfigError(
                f"study={spec.study!r} is not for fields of type {spec.type_name or type(spec).__name__!r}; "
                "images, slices, text, json, bytes and arrays have it."
            )
        self._previous, self.study = previous, spec.study
        used = [np.flatnonzero(each) for each in context.populations]
        populations = [np.zeros(len(each), bool) for each in context.populations]
        for population, table, rows in zip(populations, self._previous.tables, used, strict=True):
            earlier = table[rows]
            population[earlier[earlier >= 0]] = True
        if not any(each.any() for each in populations):
            raise ConfigError(
                f"No sample has {previous.what}, so the field {name!r} has nothing to deliver; leave it out."
            )
        within = _PreviousContext(context, populations)
        self.of = replace(spec, study="own", missing="pad").bind(name, within)
        if self.of.has_content is None and spec.missing != "pad":
            # No table knows which earlier studies have it: the type masks the slot, or refuses to drop.
            self.of = replace(spec, study="own").bind(name, within)
        self._num_samples = context.num_samples
        self._num_missing = context.count_missing(self.has_content)
        if self._num_missing and spec.missing == "error":
            raise ConfigError(
                f"{self._num_missing:,} of {self._num_samples:,} samples lack {previous.what}, or it has "
                f"nothing for the field {name!r}; write missing='pad' to pad and mask them, or "
                "missing='drop' to leave these samples out."
            )

    def _slots(self, slots: Slots) -> Slots:
        return self._previous.slots(slots)

    @property
    def varying(self) -> Sequence[str]:
        """Those of the field of the earlier studies."""
        return self.of.varying

    @property
    def digests(self) -> Sequence[str]:
        """Those of the field, and of the tables that name the studies."""
        return [*self.of.digests, *self._previous.digests]

    @property
    def tables(self) -> Sequence[str]:
        """Names of the attached tables that the field reads, or that name the studies."""
        return [*self.of.tables, *self._previous.attached]

    @property
    def named_by(self) -> Sequence[str]:
        """SHA-256 of the table of each dataset that names its studies."""
        return self._previous.digests

    @property
    def has_content(self) -> Sequence[NDArray[np.bool_]]:
        """Rows whose earlier study has content, or may have where no table knows."""
        known: Sequence[NDArray[np.bool_] | None] = self.of.has_content or [None] * len(self._previous.tables)
        return [
            (table >= 0) if has is None else (table >= 0) & has[np.maximum(table, 0)]
            for table, has in zip(self._previous.tables, known, strict=True)
        ]

    def num_delivered(self, place: int) -> Int64Array | None:
        """Return how many pictures or tiles of the earlier study of each row are delivered."""
        found = self.of.num_delivered(place)
        return None if found is None else self.gathered(place, found)

    def gathered(self, place: int, of_studies: NDArray[Any]) -> NDArray[Any]:
        """Return numbers of the earlier study of each row of a dataset, 0 for none."""
        earlier = self._previous.tables[place]
        found: NDArray[Any] = of_studies[np.maximum(earlier, 0)] * (earlier >= 0)
        return found

    @property
    def coverage(self) -> Coverage:
        """Samples with content, and the images of distinct earlier studies."""
        coverage = self.of.coverage
        return Coverage(
            num_samples=self._num_samples,
            num_missing=self._num_missing,
            delivered={} if coverage is None else coverage.delivered,
            left_out={} if coverage is None else coverage.left_out,
        )

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        return self.of.array_specs(self._slots(slots))

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Empty every slot, and lay out the earlier studies."""
        earlier = self._slots(slots)
        self.of.prepare(arrays, earlier)
        # Nothing opens the slot of a sample that has none, which is when fields fill what they leave empty.
        for slot in np.flatnonzero((slots.rows >= 0) & (earlier.rows < 0)).tolist():
            self.of.blank(arrays, slot)

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the numbers of the stored fields of an earlier study."""
        return self.of.needed(shard, request)

    def needed_regions(self, shard: Shard, request: SlotRequest) -> Sequence[RegionPlan]:
        """Return the regions of volumes of an earlier study."""
        return self.of.needed_regions(shard, request)

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot with an earlier study."""
        return self.of.open(shard, request, arrays)

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without an earlier study."""
        self.of.blank(arrays, slot)

    def example(self, arrays: Arrays) -> None:
        """Fill the only slot as the field does."""
        self.of.example(arrays)

    def describe(self) -> dict[str, Any]:
        """Return what `Field.present` needs."""
        return self.of.describe()
