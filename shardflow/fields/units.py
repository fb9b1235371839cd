"""Units: a dataset whose samples are studies, series, images, windows, parts of conversations, or findings.

A dataset of series or images is derived when it is opened, from the samples table, the series table and an
expression, one of windows or parts from the samples table and counts; nothing is stored. Its digest is that
of the rows, so two expressions that select the same rows are the same dataset. Findings come from an entity
view, which is stored beside the dataset.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.types.pixel_field import DEFAULT_SERIES
from shardflow.fields.where import SeriesWhere
from shardflow.format import Dataset
from shardflow.format.counts import open_conversation_counts
from shardflow.format.entities import EntityDataset
from shardflow.format.facts.series import open_series
from shardflow.format.facts.units import (
    DerivedTable,
    DerivedUnit,
    PartTable,
    UnitTable,
    WindowTable,
    check_unit,
)
from shardflow.format.manifest import Manifest
from shardflow.format.tables import AttachedTables
from shardflow.storage import ByteStore

_LOGGER = logging.getLogger(__name__)


class DerivedDataset(Dataset):
    """A version of a dataset whose samples belong to studies, and are computed from tables.

    `samples` are the rows, `studies` what they belong to, and `dataset_id` is the digest of the rows.
    """

    samples: DerivedTable
    unit: str
    where_tables: tuple[str, ...] = ()

    def study_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the samples table that each row belongs to."""
        return self.samples.study_rows(rows)

    @property
    def text_id(self) -> str:
        """Digest of the manifest: texts are those of the studies."""
        return self.manifest.dataset_id

    @property
    def num_texts(self) -> int:
        """Number of studies."""
        return self.studies.num_samples

    def text_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the samples table that each row belongs to."""
        return self.study_rows(rows)


class WindowDataset(DerivedDataset):
    """Version of a dataset as windows of its studies, see `shardflow.loading.rows.windows.select_windows`.

    Args:
        store: Where the dataset is stored.
        manifest: Its version.
        counts: ``(num_studies,)`` windows of each study.
        tables: Attached tables; None for the newest.
    """

    samples: WindowTable
    unit = "window"

    def __init__(
        self,
        store: ByteStore,
        manifest: Manifest,
        counts: NDArray[np.int64],
        tables: AttachedTables | None = None,
    ) -> None:
        super().__init__(store, manifest, tables)
        self._counts = counts
        self.samples = WindowTable(self.studies, counts)
        self.dataset_id = self.samples.digest(manifest.dataset_id)

    def _place(self) -> tuple[Any, ...]:
        return self.store, self.manifest, self._counts, self.tables


class PartDataset(DerivedDataset):
    """A version of a dataset seen as parts of its conversations, which are whole where they are short.

    Args:
        store: Where the dataset is stored.
        manifest: Its version.
        processor: Digest of the processor whose tokens were counted.
        split_at: Tokens above which a conversation is split.
        tables: Attached tables; None for the newest.

    Attributes:
        counts: Tokens and pictures of each part.

    Raises:
        ConfigError: The tokens of such parts were not counted.
        FormatError: The counts cannot be trusted.
    """

    samples: PartTable
    unit = "part"

    def __init__(
        self,
        store: ByteStore,
        manifest: Manifest,
        processor: str,
        split_at: int,
        tables: AttachedTables | None = None,
    ) -> None:
        super().__init__(store, manifest, tables)
        self.processor, self.split_at = processor, split_at
        self.counts = open_conversation_counts(self, processor, split_at=split_at)
        assert self.counts.messages is not None  # noqa: S101 - checked when they were opened
        self.samples = PartTable(self.studies, self.counts.first_rows(), self.counts.messages)
        self.dataset_id = self.samples.digest(manifest.dataset_id)

    def _place(self) -> tuple[Any, ...]:
        return self.store, self.manifest, self.processor, self.split_at, self.tables


class UnitDataset(DerivedDataset):
    """A version of a dataset seen as series or images.

    `samples` are the series or images, `studies` what they belong to, and `dataset_id` is the digest of the
    selected rows, so plans and states belong to them; ``manifest.dataset_id`` is that of the dataset.

    Args:
        store: Where the dataset is stored.
        manifest: Its version.
        unit: What a sample is.
        where: Expression over facts of series, of their study (``facts.age_years``) and attached tables: it
            selects series, and single images of series with several roles; None selects all but localizers
            and secondary captures (`DEFAULT_SERIES`). Series without images have no rows.
        tables: Attached tables; None for the newest.

    Attributes:
        where_tables: Names of the attached tables that the expression reads.

    Raises:
        ConfigError: The dataset has no series table, or the expression is malformed or selects nothing.
        FormatError: The series table cannot be trusted.
    """

    samples: UnitTable

    def __init__(
        self,
        store: ByteStore,
        manifest: Manifest,
        unit: DerivedUnit,
        where: str | None = None,
        tables: AttachedTables | None = None,
    ) -> None:
        super().__init__(store, manifest, tables)
        self.unit, self.where = unit, where
        table, _ = open_series(self)
        chosen_by = SeriesWhere(self, DEFAULT_SERIES if where is None else where, unit)
        self.where_tables = chosen_by.tables
        chosen, self.num_series_missing = chosen_by.choose()
        if not len(chosen.rows):
            raise ConfigError(
                f"where={where!r} selects no series with images; of {table.num_series:,} series "
                f"{self.num_series_missing:,} lack a value. `shardflow columns DATASET` lists values."
            )
        self.samples = UnitTable(self.studies, table, unit, chosen)
        self.dataset_id = self.samples.digest(manifest.dataset_id)
        self.num_series_left_out = table.num_series - len(chosen.rows)

    @classmethod
    def beside(cls, dataset: Dataset, unit: DerivedUnit, where: str | None = None) -> UnitDataset:
        """Return the series or images of a dataset that is open; errors as of the class."""
        return cls(dataset.store, dataset.manifest, unit, where, dataset.tables)

    def _place(self) -> tuple[Any, ...]:
        return self.store, self.manifest, self.unit, self.where, self.tables


def unit_of(dataset: Dataset) -> str:
    """Return what a sample is: ``study``, ``series``, ``image``, ``window``, ``part`` or ``entity``."""
    if isinstance(dataset, DerivedDataset):
        return dataset.unit
    return "entity" if isinstance(dataset, EntityDataset) else "study"


def open_unit(dataset: Dataset, unit: str, where: str | None = None) -> Dataset:
    """Return a dataset seen as studies, series, images or findings.

    Args:
        dataset: The dataset; one that is seen as something already is returned as it is.
        unit: ``study``, ``series``, ``image``, or ``entity`` for the entity view of that name.
        where: For series and images, the expression that selects them, see `UnitDataset`.

    Raises:
        ConfigError: The unit is unknown, does not fit the dataset or the expression, or lacks its table.
    """
    check_unit(unit)
    if where is not None and unit not in ("series", "image"):
        raise ConfigError(
            f"where= of open_unit needs unit='series' or unit='image', whose rows it selects, got {unit!r}."
        )
    current = unit_of(dataset)
    if current != "study":
        if unit in ("study", current) and where is None:
            return dataset
        raise ConfigError(
            f"unit={unit!r} needs a dataset of whole studies, got one whose rows are of unit {current!r}; "
            "pass the dataset that sf.open returned."
        )
    if unit == "study":
        return dataset
    if unit == "window":
        raise ConfigError(
            "unit='window' follows the field with center='grid'; write it for sf.Loader, beside fields=."
        )
    if unit == "entity":
        return EntityDataset.beside(dataset)
    derived = UnitDataset.beside(dataset, "series" if unit == "series" else "image", where)
    samples = derived.samples
    studies = derived.study_rows(np.arange(samples.num_samples))  # ascending
    _LOGGER.info(
        "unit=%r: %d rows of %d of %d studies; %d series left out, %d of them because a value is missing",
        unit,
        samples.num_samples,
        1 + np.count_nonzero(np.diff(studies)),
        dataset.studies.num_samples,
        derived.num_series_left_out,
        derived.num_series_missing,
    )
    return derived
