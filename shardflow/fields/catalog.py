"""Series catalog: which images of which series each sample of a population has, from tables alone."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.reader import Samples
from shardflow.fields.series_rows import (
    ImageSet,
    Int64Array,
    Limits,
    SeriesImages,
    TableSelection,
    Weights,
    rows_of,
)
from shardflow.format import Dataset
from shardflow.format.codecs import codec_rank
from shardflow.format.facts.series import SeriesTable, encode_no_series, open_series
from shardflow.format.keys import sha256_hex
from shardflow.format.table import Table
from shardflow.format.volumes.bricks import BRICKS_CODEC
from shardflow.format.volumes.tiles import TILES_CODEC
from shardflow.sampling.expressions import Expression, parse_expression


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Images of a population by role, and how many of them at least one field delivers."""

    stored: Mapping[str, int]
    reachable: Mapping[str, int]


class SeriesCatalog:
    """Series tables of a selection's datasets. Safe for many threads.

    Args:
        samples: The samples.

    Raises:
        ConfigError: A dataset has no series table.
        FormatError: A table cannot be trusted.
    """

    def __init__(self, samples: Samples) -> None:
        opened: dict[str, tuple[SeriesTable, str]] = {}
        for dataset in samples.datasets:
            if dataset.manifest.dataset_id not in opened:
                opened[dataset.manifest.dataset_id] = _open(dataset)
        self.datasets = samples.datasets
        self.tables = [opened[dataset.manifest.dataset_id][0] for dataset in samples.datasets]
        self.digests = [opened[dataset.manifest.dataset_id][1] for dataset in samples.datasets]

    def select(self, text: str | None, populations: Sequence[NDArray[np.bool_]]) -> SelectedSeries:
        """Return the series, and single images, for which an expression is true; None selects all.

        Args:
            text: The expression, such as ``"role == 'frontal'"``.
            populations: For each dataset which rows of its own table are used, ``(num_rows,)``.

        Raises:
            ConfigError: The expression is malformed, names an unknown column, or selects nothing.
        """
        known = sorted({name for table in self.tables for name in table.column_names})
        expression = None if text is None else parse_expression(text, known)
        return SelectedSeries(self, expression, populations)

    def reach(
        self, populations: Sequence[NDArray[np.bool_]], delivered: Sequence[Sequence[ImageSet]]
    ) -> Reach:
        """Count the images of populations, and those that fields deliver.

        Args:
            populations: For each dataset the rows whose images are counted, ``(num_rows,)``.
            delivered: For each dataset the images of each field.
        """
        stored, _ = self.select(None, populations).roles()
        reachable: Counter[str] = Counter()
        for table, sets in zip(self.tables, delivered, strict=True):
            if sets:
                reachable += functools.reduce(operator.or_, sets).count_roles(table)
        return Reach(stored=stored, reachable=reachable)


class SelectedSeries:
    """Series and images that an expression selects, by component and sample."""

    def __init__(
        self,
        catalog: SeriesCatalog,
        expression: Expression | None,
        populations: Sequence[NDArray[np.bool_]],
    ) -> None:
        self.catalog, self.expression = catalog, expression
        parts = {
            id(table): TableSelection(table, expression)
            for table in {id(t): t for t in catalog.tables}.values()
        }
        self._rows = [
            rows_of(dataset, parts[id(table)])
            for dataset, table in zip(catalog.datasets, catalog.tables, strict=True)
        ]
        self._populations = self._typical = populations

    def check(
        self, name: str, series: str | None, *, pads: bool, is_tiled: bool = False, default: str | None = None
    ) -> None:
        """Refuse a selection without images, or with images that cannot be decoded.

        Args:
            name: Name of the field.
            series: The expression that it selects by.
            pads: Whether samples without images are padded; it then needs none if other samples have some.
            is_tiled: Whether it delivers slides, which no other field does.
            default: Expression that it selects by otherwise.

        Raises:
            ConfigError: It is such a selection.
        """
        if not self.roles()[0] and not (pads and self._take_others(series)):
            every = self.catalog.select(None, self._populations)
            held = {
                what: ", ".join(one or "unknown" for one in every.values(column)) or "none"
                for what, column in (("Modalities", "modality"), ("Kinds of series", "kind"))
            }
            roles = [f"{role} ({count:,})" for role, count in every.roles()[0].most_common()]
            held["Roles of their images"] = ", ".join(roles) or "none"
            used = default if series is None else series
            raise ConfigError(
                f"The field {name!r} matches no image of the selected samples"
                f"{'' if used is None else f' with series={used!r}'}"
                f"{' (the default)' if used and series is None else ''}. "
                + " ".join(f"{what}: {there}." for what, there in held.items())
            )
        for codec in self.values("codec"):
            if (codec == TILES_CODEC) != is_tiled:
                what = "series that are no slides" if is_tiled else "slides, which sf.Tiles delivers"
                sign = "==" if is_tiled else "!="
                raise ConfigError(
                    f"The field {name!r} selects {what}; add \"and kind {sign} 'slide'\" to its series."
                )
            if codec not in ("", BRICKS_CODEC, TILES_CODEC) and codec_rank(codec) is None:
                raise ConfigError(
                    f"Images of the field {name!r} are stored as {codec!r}, which no installed codec reads; "
                    f'install the package that offers it, or select others by series="codec != {codec!r}".'
                )

    def _take_others(self, series: str | None) -> bool:
        """Let all samples decide `values` and `shapes`; False where the expression is a slip."""
        every = [np.ones(len(each), bool) for each in self._populations]
        is_slip = series is not None and self.catalog.select(None, every).roles()[0]
        if is_slip and not self.catalog.select(series, every).roles()[0]:
            return False
        self._typical = every
        return True

    # ---- the population --------------------------------------------------------------------------

    def num_images(self, component: int) -> Int64Array:
        """Return how many images of each row are selected, ``(num_rows,)``."""
        return self._rows[component].num_images

    def values(self, name: str) -> list[Any]:
        """Return the distinct values of a column over the selected series of the population, ascending.

        ``num_slices`` are the slices of a series that belong to a row: one where rows are images.
        """
        found: set[Any] = set()
        for rows, population in zip(self._rows, self._typical, strict=True):
            column, names = rows.values(name, population), rows.part.table.column(name).names
            is_small = column.dtype.kind in "iu" and int(column.max(initial=0)) < len(column)
            values = (np.flatnonzero(np.bincount(column)) if is_small else np.unique(column)).tolist()
            found |= {value if names is None else names[value] for value in values}
        return sorted(found)

    def num_flagged(self, flag: str) -> int:
        """Return how many selected series of the population have a flag."""
        found = 0
        for rows, population in zip(self._rows, self._populations, strict=True):
            flags = rows.part.table.flags
            if flag in flags:
                bits = rows.values("flags", population) >> np.uint64(flags.index(flag))
                found += int(np.count_nonzero(bits & np.uint64(1)))
        return found

    def num_without_affine(self) -> int:
        """Return how many selected series of the population have no known geometry."""
        pairs = zip(self._rows, self._populations, strict=True)
        affines = (rows.values("affine_lps", population) for rows, population in pairs)
        return sum(int(np.isnan(each).any(axis=(1, 2)).sum()) for each in affines)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column of numbers for the selected series of the population, ``(num_series,)``."""
        pairs = zip(self._rows, self._populations, strict=True)
        return np.concatenate([rows.values(name, population) for rows, population in pairs])

    def count_names(self, name: str) -> Counter[str]:
        """Count the strings of a column over the selected series of the population; empty where missing."""
        found: Counter[str] = Counter()
        for rows, population in zip(self._rows, self._populations, strict=True):
            names = rows.part.table.vocabulary(name)
            counts = np.bincount(rows.values(name, population), minlength=len(names)).tolist()
            found.update({known: count for known, count in zip(names, counts, strict=True) if count})
        return found

    def shapes(self) -> Int64Array:
        """Return the distinct rows and columns of the selected images of the population, ``(n, 2)``."""
        pairs = zip(self._rows, self._typical, strict=True)
        found = [rows.part.shapes(rows.used(population)) for rows, population in pairs]
        # As one number each: sorting rows of an array takes ten times as long.
        packed = np.unique(np.concatenate([rows.astype(np.int64) << 32 | columns for rows, columns in found]))
        return np.stack([packed >> 32, packed & (2**32 - 1)], axis=1)

    def images(self, component: int, limits: Limits) -> ImageSet:
        """Return the selected images of the population of a dataset that there are places for."""
        return self._rows[component].images(self._populations[component], limits)

    def num_delivered(self, component: int, limits: Limits, weights: Weights | None) -> Int64Array:
        """Return how many selected images of each row there are places for, ``(num_rows,)``.

        Args:
            component: Of a blend.
            limits: What there are places for.
            weights: Returns the places of an image of each series, given its rows and columns; None for one.
        """
        return self._rows[component].num_delivered(limits, weights)

    def roles(self, limits: Limits | None = None) -> tuple[Counter[str], Counter[str]]:
        """Return how many selected images of the population are delivered and left out, by role.

        Args:
            limits: What there are places for; None for all.
        """
        delivered: Counter[str] = Counter()
        selected: Counter[str] = Counter()
        for rows, population in zip(self._rows, self._populations, strict=True):
            selected += rows.images(population, Limits()).count_roles(rows.part.table)
            if limits is not None:
                delivered += rows.images(population, limits).count_roles(rows.part.table)
        return (selected, Counter()) if limits is None else (delivered, selected - delivered)

    def first_series(self, component: int) -> Int64Array:
        """Return the row of the first selected series of each row, ``(num_rows,)``; -1 for none."""
        return self._rows[component].first_selected()

    # ---- one row ---------------------------------------------------------------------------------

    def of_row(self, component: int, row: int) -> list[SeriesImages]:
        """Return the selected images of a row, by series in the order of acquisition."""
        return self._rows[component].of_row(row)


def _open(dataset: Dataset) -> tuple[SeriesTable, str]:
    """Return the series table of a dataset; of texts alone, which have none, one without series."""
    studies = dataset.studies
    if dataset.is_foreign or not studies.num_samples or studies.column("num_series").any():
        return open_series(dataset)
    data = encode_no_series(studies.num_samples)
    return SeriesTable(Table(memoryview(data), name="a table without series")), sha256_hex(data)
