"""A dataset whose samples are entities: findings of reports, each with the slices that show it.

To whoever plans and loads it is a dataset like any other: a table of samples with the columns of the samples
table, ordered like it, and a digest. Its rows point into the shards of the studies, and none of their bytes
are copied. Columns and meta data are in docs/format.md, section 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, ConfigError, FormatError
from shardflow.shards.dataset import Dataset
from shardflow.shards.entity_manifest import TABLE_NAME, load_entity_manifest, view_folder
from shardflow.shards.manifest import Manifest
from shardflow.shards.samples import SamplesTable
from shardflow.shards.table import Table
from shardflow.storage import ByteStore

__all__ = [
    "ASSERTIONS",
    "ENTITY_COLUMNS",
    "LATERALITIES",
    "TABLE_KIND",
    "EntityDataset",
    "EntityPlace",
    "EntityTable",
    "entity_key",
]

TABLE_KIND: Final = "entities"
ASSERTIONS: Final = ("present", "uncertain")
"""What a report may say of an entity that has a row."""
LATERALITIES: Final = ("", "L", "R", "B")
_PLACES: Final = ("study", "entity", "series", "centre", "text_start", "span_start", "span_bytes")
_CODES: Final = ("label", "anatomy", "assertion", "laterality")
ENTITY_COLUMNS: Final = (*_PLACES, *_CODES, "confidence")
"""Columns of a row beside those of the samples table."""
_FLAT: Final = ("first_slice", "slices", "slice_weights")


def entity_key(study_key: str, entity: int, series: int) -> str:
    """Return the sample key of an entity: that of its study, its number in the report, and its series.

    Example:
        >>> entity_key("ab12", 3, 0)
        'ab12e3s0'
    """
    return f"{study_key}e{entity}s{series}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EntityPlace:
    """Where an entity is, in the fields of its study."""

    entity: int
    """Number in ``report.json``."""
    series: int
    """Number of the series in the sample."""
    slices: NDArray[np.int64]
    """``(n,)`` indices in the series, ascending; the context among them."""
    centre: int
    """Place of the weightiest slice among ``slices``."""
    text_start: int
    """First byte of the text in ``report.txt``; how many there are is the column ``text_bytes``."""


class EntityTable(SamplesTable):
    """The rows of an entity view; memory-mapped, checked block by block as it is touched.

    Raises:
        FormatError: The table is no table of entities.
        ChecksumError: Its header is damaged.
    """

    kind: ClassVar[str] = TABLE_KIND

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        lengths = {table.num_rows(name) for name in ENTITY_COLUMNS}
        if lengths != {self.num_samples} or table.num_rows("first_slice") != self.num_samples + 1:
            raise FormatError(
                f"{table.name} must have columns of {self.num_samples} rows, got others; delete its folder "
                "and make the view again."
            )
        try:
            self.labels = tuple(str(name) for name in table.meta["labels"])
            self.anatomies = tuple(str(name) for name in table.meta["anatomies"])
        except (KeyError, TypeError):
            raise FormatError(f"{table.name} must name labels and anatomies, got other meta data.") from None

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns with a number for each row."""
        hidden = {*_FLAT, *_PLACES}
        return tuple(name for name in super().column_names if name not in hidden)

    @property
    def vocabularies(self) -> Mapping[str, tuple[str, ...]]:
        """The columns whose numbers are positions in a list of names, and those names."""
        return {
            "modality": self.modalities,
            "label": self.labels,
            "anatomy": self.anatomies,
            "assertion": ASSERTIONS,
            "laterality": LATERALITIES,
        }

    def place(self, row: int) -> EntityPlace:
        """Return where an entity is.

        Raises:
            ChecksumError: A block of the table is damaged.
            FormatError: The row points nowhere.
        """
        start, stop = self._table.gather("first_slice", np.array([row, row + 1])).astype(np.int64).tolist()
        num_slices, centre = int(self.gather("num_slices", row)), int(self.gather("centre", row))
        if stop - start != num_slices or not 0 <= centre < num_slices:
            raise FormatError(
                f"{self._table.name} must place each entity on its slices, got another place (row {row}); "
                "delete its folder and make the view again."
            )
        slices = self._table.gather_spans("slices", np.array([start]), np.array([stop])).astype(np.int64)
        return EntityPlace(
            entity=int(self.gather("entity", row)),
            series=int(self.gather("series", row)),
            slices=slices,
            centre=centre,
            text_start=int(self.gather("text_start", row)),
        )

    def centre_slices(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index in the series of the weightiest slice of some entities, ``(n,)``."""
        places = self._table.gather("first_slice", rows).astype(np.int64) + self.gather("centre", rows)
        return self._table.gather("slices", places).astype(np.int64)

    def weights(self, row: int) -> NDArray[np.float32]:
        """Return how much of an entity each of its slices shows, ``(n,)`` from 0 to 1; 0 in the context."""
        bounds = self._table.gather("first_slice", np.array([row, row + 1])).astype(np.int64)
        return self._table.gather_spans("slice_weights", bounds[:1], bounds[1:])


class EntityDataset(Dataset):
    """A version of a dataset seen as entities.

    `samples` are the entities, `studies` what they point into, and `dataset_id` is the digest of the view, so
    that plans and states are those of these rows; ``manifest.dataset_id`` is that of the dataset.

    Args:
        store: Where the dataset lies.
        manifest: Its version.
        name: Of the view.

    Raises:
        ConfigError: There is no view of this name beside this version.
        FormatError: The view cannot be trusted.
        ChecksumError: Its table is damaged.

    Example::

        entities = EntityDataset.beside(Dataset.open("data"))
    """

    samples: EntityTable

    def __init__(self, store: ByteStore, manifest: Manifest, name: str = "entity") -> None:
        super().__init__(store, manifest)
        self.name = name
        self.view = view = load_entity_manifest(self.store, manifest, name)
        path = f"{view_folder(name, manifest.dataset_id)}/{TABLE_NAME}"
        buffer = self.map_beside(path, sha256=view.sha256, num_bytes=view.num_bytes, rows=range(0))
        if buffer.nbytes != view.num_bytes:
            raise ChecksumError(
                f"{path} must have {view.num_bytes} bytes, got {buffer.nbytes}; delete its folder and make "
                "the view again."
            )
        table = Table(buffer, name=path)
        self.samples = EntityTable(table)
        found = (table.meta.get("dataset_id"), self.samples.num_samples, self.studies.num_samples)
        if found != (manifest.dataset_id, view.num_entities, view.num_studies):
            raise FormatError(
                f"{path} must be the table of this view, got another; delete its folder and make the view "
                "again."
            )
        self.dataset_id = view.digest

    @classmethod
    def beside(cls, dataset: Dataset, name: str = "entity") -> EntityDataset:
        """Open a view of a dataset that is open; errors as of the class."""
        if dataset.is_foreign:
            raise ConfigError(
                "a view of entities must be of a packed dataset, got shards that others wrote; they have no "
                "reports that were read."
            )
        return cls(dataset.store, dataset.manifest, name)

    def __reduce__(self) -> tuple[type[EntityDataset], tuple[ByteStore, Manifest, str]]:  # type: ignore[override]
        """Cross a process boundary without maps and caches."""
        return type(self), (self.store, self.manifest, self.name)

    def reopened(self) -> EntityDataset:
        """Return the same view with maps and locks of its own, for a process that was forked."""
        return EntityDataset(self.store, self.manifest, self.name)

    def study_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the samples table that each entity belongs to."""
        return self.samples.gather("study", rows).astype(np.int64)
