"""Entity views: datasets whose samples are findings of reports, each with the slices that show it.

A view is a sidecar, added later without touching a shard: ``views/<name>/<dataset_id>/`` holds
``entities.tbl`` and ``view.json``, which names the dataset, the rules and the table, and is written last.
Planning and loading treat it like any dataset: a table ordered like the samples table and with its columns,
and a digest. Its rows point into the shards of the studies; no bytes are copied. The layout is in
docs/format.md, section 16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.format.dataset import Dataset
from shardflow.format.keys import Json
from shardflow.format.manifest import Manifest
from shardflow.format.samples import SamplesTable
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.table import Table
from shardflow.format.tables import AttachedTables
from shardflow.storage import ByteStore

MANIFEST_NAME: Final = "view.json"
TABLE_NAME: Final = "entities.tbl"
EntityText: TypeAlias = Literal["sentence", "entity", "report"]
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_STUDIES: Final = "full_study"
_MAX_CONTEXT: Final = 1000
TABLE_KIND: Final = "entities"
ASSERTIONS: Final = ("present", "uncertain")
"""Assertions of the entities that have a row."""
LATERALITIES: Final = ("", "L", "R", "B")
_PLACES: Final = ("study", "entity", "series", "centre", "text_start", "span_start", "span_bytes")
_CODES: Final = ("label", "anatomy", "assertion", "laterality")
ENTITY_COLUMNS: Final = (*_PLACES, *_CODES, "confidence")
"""Columns of a row beside those of the samples table."""
LATER_COLUMNS: Final = {
    "kind": "kinds",
    "section": "sections",
    "certainty": "certainties",
    "change": "changes",
    "severity": "severities",
    "reader": "readers",
}
"""Columns that tables of earlier versions lack, and where the meta lists their names."""
LABEL_FACTS: Final = ("radlex", "snomed_ct", "chexpert", "padchest")
"""Codes and classes of labels; columns of an expression like others."""
RADGRAPH: Final = {"present": "OBS-DP", "uncertain": "OBS-U"}
"""Classes of RadGraph, by assertion."""
USUAL_WHERE: Final = (
    "kind == 'finding' and section in ('findings', 'impression', 'findings_impression', 'addendum')"
)
_FLAT: Final = ("first_slice", "slices", "slice_weights")


@dataclass(frozen=True, kw_only=True, slots=True)
class EntityRules:
    """Rules for which entities become rows, and what a row holds beside its own slices.

    Raises:
        ConfigError: A value is out of range.
    """

    threshold: float = 0.7
    """An entity becomes a row if its probability times the confidence of its place is above this; equal is
    not enough."""
    context_slices: int = 1
    """Number of neighbors on either side of each slice that belong to the row, with weight 0."""
    text: EntityText = "sentence"
    """Text that goes with the slices: the sentence, the words of the entity, or the whole report."""
    where: str = USUAL_WHERE
    """Condition for entities, in the grammar of `shardflow.sampling.expressions`; empty: none."""
    corrections: str = ""
    """Digest of a person's corrections; empty: none."""

    def to_json(self) -> dict[str, Json]:
        """Return the entries of ``view.json``; views of earlier versions had no condition or corrections."""
        # Canonical JSON has no fractions: the threshold is the shortest text of its number.
        rules: dict[str, Json] = {**asdict(self), "threshold": repr(float(self.threshold))}
        later = {"where": self.where, "corrections": self.corrections}
        return {name: value for name, value in rules.items() if later.get(name, True)}

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold must be from 0 to 1, got {self.threshold}; 0.7 is usual.")
        if not 0 <= self.context_slices <= _MAX_CONTEXT:
            raise ConfigError(
                f"context_slices must be from 0 to {_MAX_CONTEXT}, got {self.context_slices}; 1 is usual."
            )
        if self.text not in get_args(EntityText):
            known = ", ".join(get_args(EntityText))
            raise ConfigError(f"text must be one of {known}, got {self.text!r}; correct it.")


@dataclass(frozen=True, kw_only=True)
class EntityManifest(SidecarManifest):
    """The manifest of a view; its digest identifies the rows: a different dataset, rule or row changes it."""

    root = "views"
    file_name = MANIFEST_NAME
    head: ClassVar[Mapping[str, Json]] = {"format": "shardflow-view", "format_version": 1, "kind": "entity"}
    remedy = "make the view again"

    dataset_id: str
    rules: EntityRules
    num_studies: int
    """Samples of the dataset."""
    num_entities: int
    num_bytes: int
    """Of the table."""
    sha256: str
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Findings with slices that are no rows, by reason; empty in views of earlier versions."""

    def body(self) -> dict[str, Json]:
        """Return the entries beside `head` and the digest."""
        left_out: dict[str, Json] = dict(self.left_out)
        return {
            **({"left_out": left_out} if left_out else {}),
            "dataset_id": self.dataset_id,
            "rules": self.rules.to_json(),
            "num_studies": self.num_studies,
            "num_entities": self.num_entities,
            "table": {"num_bytes": self.num_bytes, "sha256": self.sha256},
        }

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> EntityManifest:
        """Make a manifest of its entries."""
        table, rules = body.pop("table"), body.pop("rules")
        rules = EntityRules(**{"where": "", **rules, "threshold": float(rules["threshold"])})
        return cls(**body, **table, rules=rules)

    def tables(self) -> dict[str, tuple[int | None, str]]:
        """Return size and SHA-256 of the table."""
        return {TABLE_NAME: (self.num_bytes, self.sha256)}

    @classmethod
    def is_name(cls, name: str) -> bool:
        """Return whether a view may have a name."""
        return _NAME.fullmatch(name) is not None and name != _STUDIES


def view_folder(name: str, dataset_id: str) -> str:
    """Return where a view is stored in a dataset.

    Args:
        name: Name of the view.
        dataset_id: Digest of the open manifest: rows of a different version are different rows.

    Raises:
        ConfigError: The name is not allowed.
    """
    if not EntityManifest.is_name(name):
        raise ConfigError(
            f"a view must have a name of a-z, 0-9, '-' and '_' other than {_STUDIES}, got {name!a}; "
            "entity is usual."
        )
    return f"{EntityManifest.root}/{name}/{dataset_id}"


def load_entity_manifest(store: ByteStore, manifest: Manifest, name: str) -> EntityManifest:
    """Return the manifest of a view.

    Args:
        store: Of the dataset.
        manifest: The version that is open.
        name: Of the view.

    Raises:
        ConfigError: This version has no such view.
        FormatError: The view is another dataset's, or cannot be trusted.
    """
    view_folder(name, manifest.dataset_id)
    try:
        return EntityManifest.load(store, name, manifest.dataset_id)
    except NotFoundError:
        raise ConfigError(
            f"the dataset must have a view {name!r} beside version {manifest.manifest_version}, got none; "
            f"run: shardflow entities DATASET --name {name}"
        ) from None


def view_digests(store: ByteStore, manifests: Iterable[Manifest]) -> set[str]:
    """Return the identities of all views beside some versions of a dataset.

    Raises:
        FormatError: A view cannot be trusted.
    """
    owners = {manifest.dataset_id for manifest in manifests}
    found = (path.split("/") for path in store.list(f"{EntityManifest.root}/"))
    return {
        EntityManifest.load(store, parts[1], parts[2]).digest
        for parts in found
        if parts[3:] == [MANIFEST_NAME] and parts[2] in owners
    }


def entity_key(study_key: str, entity: int, series: int) -> str:
    """Return the sample key of an entity: that of its study, its number in the report, and its series.

    Example:
        >>> entity_key("ab12", 3, 0)
        'ab12e3s0'
    """
    return f"{study_key}e{entity}s{series}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EntityPlace:
    """Place of an entity in the fields of its study."""

    entity: int
    """Number in ``report.json``."""
    series: int
    """Number of the series in the sample."""
    slices: NDArray[np.int64]
    """``(n,)`` indices in the series, ascending, including the context."""
    centre: int
    """Position of the slice with the largest weight among ``slices``."""
    text_start: int
    """First byte of the text in ``report.txt``; the column ``text_bytes`` has its size."""


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
            self._later = {
                name: tuple(map(str, table.meta[key]))
                for name, key in LATER_COLUMNS.items()
                if key in table.meta
            }
            self._facts: Mapping[str, Sequence[Any]] = table.meta.get("label_facts") or {}
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
            **self._later,
        }

    @property
    def label_facts(self) -> Mapping[str, tuple[str, ...]]:
        """The codes and classes of the labels, by scheme; none in tables of earlier versions."""
        return {name: tuple(self._facts[name]) for name in LABEL_FACTS if name in self._facts}

    @property
    def label_names(self) -> tuple[frozenset[str], ...] | None:
        """For each label, the names that find it too: its synonyms and what it is a kind of."""
        return tuple(map(frozenset, self._facts["also"])) if "also" in self._facts else None

    def place(self, row: int) -> EntityPlace:
        """Return the place of an entity.

        Raises:
            ChecksumError: A block of the table is damaged.
            FormatError: The row points outside its slices.
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
        """Return the index in the series of the slice with the largest weight of some entities, ``(n,)``."""
        places = self._table.gather("first_slice", rows).astype(np.int64) + self.gather("centre", rows)
        return self._table.gather("slices", places).astype(np.int64)

    def weights(self, row: int) -> NDArray[np.float32]:
        """Return how much of an entity each of its slices shows, ``(n,)`` from 0 to 1; 0 in the context."""
        bounds = self._table.gather("first_slice", np.array([row, row + 1])).astype(np.int64)
        return self._table.gather_spans("slice_weights", bounds[:1], bounds[1:])


class EntityDataset(Dataset):
    """A version of a dataset seen as entities.

    `samples` are the entities, `studies` what they point into, and `dataset_id` is the digest of the view, so
    plans and states belong to these rows; ``manifest.dataset_id`` is that of the dataset.

    Args:
        store: Where the dataset is stored.
        manifest: Its version.
        name: Of the view.
        tables: Attached tables; None for the newest.

    Raises:
        ConfigError: There is no view of this name beside this version.
        FormatError: The view cannot be trusted.
        ChecksumError: Its table is damaged.

    Example::

        entities = EntityDataset.beside(Dataset.open("data"))
    """

    samples: EntityTable

    def __init__(
        self,
        store: ByteStore,
        manifest: Manifest,
        name: str = "entity",
        tables: AttachedTables | None = None,
    ) -> None:
        super().__init__(store, manifest, tables)
        self.name = name
        self.view = view = load_entity_manifest(self.store, manifest, name)
        path = f"{view_folder(name, manifest.dataset_id)}/{TABLE_NAME}"
        table = self.table_beside(path, sha256=view.sha256, num_bytes=view.num_bytes, rows=range(0))
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
        return cls(dataset.store, dataset.manifest, name, dataset.tables)

    def _place(self) -> tuple[Any, ...]:
        return self.store, self.manifest, self.name, self.tables

    def study_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the samples table that each entity belongs to."""
        return self.samples.gather("study", rows).astype(np.int64)
