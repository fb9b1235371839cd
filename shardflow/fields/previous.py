"""Fields of the previous study: what the same person's earlier study holds, in the slot of a sample.

The study facts table names the study of the latest earlier day in the same split. Such a field is one of that
study, bound to the earlier studies of the population; only what a slot refers to differs.
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

    Raises:
        ConfigError: A dataset has no table, is of another writer, or its samples are no studies.
        FormatError: A table cannot be trusted.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.tables: list[Int64Array] = []
        self.digests: list[str] = []
        for dataset in samples.datasets:
            rows, digest = _open(dataset)
            self.tables.append(rows)
            self.digests.append(digest)

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
    """Field of the previous study, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver; its ``study`` is ``previous``.
        context: The samples and their tables.
        previous: Their earlier studies.

    Attributes:
        of: The field of the earlier studies.

    Raises:
        ConfigError: The type reads no earlier study, no sample has one, some lack it and ``missing`` is
            ``error``, or the field does not fit the earlier studies.
    """

    def __init__(self, name: str, spec: Field, context: FieldContext, previous: PreviousStudies) -> None:
        super().__init__(name)
        if not spec.reads_previous:
            raise ConfigError(
                f"study='previous' is not for fields of type {spec.type_name or type(spec).__name__!r}; "
                "images, slices, text, json, bytes and arrays have it."
            )
        self._previous = previous
        used = [np.flatnonzero(each) for each in context.populations]
        populations = [np.zeros(len(each), bool) for each in context.populations]
        for population, table, rows in zip(populations, self._previous.tables, used, strict=True):
            earlier = table[rows]
            population[earlier[earlier >= 0]] = True
        if not any(each.any() for each in populations):
            raise ConfigError(
                f"No sample has an earlier study of the same person in its split, so the field {name!r} has "
                "nothing to deliver; leave it out."
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
                f"{self._num_missing:,} of {self._num_samples:,} samples have no earlier study of the same "
                f"person in their split, or it has nothing for the field {name!r}; write missing='pad' to "
                "pad and mask them, or missing='drop' to leave these samples out."
            )

    def _slots(self, slots: Slots) -> Slots:
        return self._previous.slots(slots)

    @property
    def varying(self) -> Sequence[str]:
        """Those of the field of the earlier studies."""
        return self.of.varying

    @property
    def digests(self) -> Sequence[str]:
        """Those of the field, and of the study facts tables."""
        return [*self.of.digests, *self._previous.digests]

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
