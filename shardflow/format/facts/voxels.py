"""Voxel tables: for each series a few voxels of each class of regions and of its body, and their boxes.

Packing makes one, and ``shardflow attach DATASET --voxels`` does for any dataset; no shard is touched.
`shardflow.format.facts.sampling` chooses the voxels. ``facts/voxels/<dataset_id>/voxels.tbl`` has the order
of the samples table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.format.codecs import decode_array
from shardflow.format.dataset import Dataset
from shardflow.format.facts.sampling import BODY, BodyFinder, ClassVoxels, voxels_of_study
from shardflow.format.facts.series import (
    FactsManifest,
    SeriesTable,
    encode_names,
    open_series,
    spans_of,
    starts_of,
)
from shardflow.format.foreign.places import local_folder
from shardflow.format.keys import ANNOTATIONS_FIELD, Json, parse_mask_field
from shardflow.format.manifest import load, versions
from shardflow.format.table import Table, encode_table
from shardflow.format.volumes.encoder import suits_bricks
from shardflow.storage import ByteStore, LocalStore, write_atomic

VOXELS_NAME: Final = "voxels.tbl"
_KIND: Final = "voxels"
_FORMAT_VERSION: Final = 1
_SAMPLES_AT_ONCE: Final = 32


def encode_voxels(samples: Sequence[Sequence[ClassVoxels]]) -> bytes:
    """Encode a table.

    Args:
        samples: The classes of each sample, in the order of the samples table.
    """
    entries = [one for each in samples for one in each]
    voxels = [np.zeros((0, 3), "<u2"), *(one.voxels for one in entries)]
    return _encode(
        [one.name for one in entries],
        {
            "first_entry": starts_of([len(each) for each in samples]),
            "series": np.array([one.series for one in entries], "<u4"),
            "num_voxels": np.array([one.num_voxels for one in entries], "<u8"),
            "box": np.array([one.box for one in entries], "<u2").reshape(-1, 6),
            "first_voxel": starts_of([len(one.voxels) for one in entries]),
            "voxel": np.concatenate(voxels).astype("<u2"),
        },
    )


def merge_voxels(parts: Iterable[tuple[VoxelTable, NDArray[np.int64]]]) -> bytes:
    """Encode the entries of chosen samples of tables: the bytes that `encode_voxels` makes of these samples.

    Args:
        parts: Tables, and the chosen samples of each, in order.
    """
    names: list[str] = []
    counts: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    found: dict[str, list[NDArray[Any]]] = {name: [] for name in ("series", "num_voxels", "box", "voxel")}
    for table, samples in parts:
        num_entries, entries = spans_of(table.first_entry, samples)
        counts.append(num_entries)
        names += [table.names[name] for name in table.name[entries].tolist()]
        num_voxels, voxels = spans_of(table.first_voxel, entries)
        lengths.append(num_voxels)
        for name in ("series", "num_voxels", "box"):
            found[name].append(table.column(name)[entries])
        found["voxel"].append(table.column("voxel")[voxels])
    shapes = {"series": ("<u4", ()), "num_voxels": ("<u8", ()), "box": ("<u2", (6,)), "voxel": ("<u2", (3,))}
    columns = {
        name: np.concatenate([np.zeros((0, *shape), dtype), *found[name]])
        for name, (dtype, shape) in shapes.items()
    }
    nothing = [np.zeros(0, np.int64)]
    columns["first_entry"] = starts_of(np.concatenate([*nothing, *counts]))
    columns["first_voxel"] = starts_of(np.concatenate([*nothing, *lengths]))
    return _encode(names, columns)


def _encode(names: Sequence[str], columns: Mapping[str, NDArray[Any]]) -> bytes:
    codes, vocabulary = encode_names("name", names)
    every = {**columns, "name": codes}
    order = ("first_entry", "series", "name", "num_voxels", "box", "first_voxel", "voxel")
    meta: dict[str, Json] = {"kind": _KIND, "format_version": _FORMAT_VERSION, "names": vocabulary}
    return encode_table({name: every[name] for name in order}, meta)


class VoxelTable:
    """Voxel table, open for reading; memory-mapped.

    Attributes:
        num_samples: Number of samples, as in the samples table.
        names: Classes; an entry's ``name`` indexes them.
        first_entry: ``(num_samples + 1,)``: entries of each sample.
        series: ``(num_entries,)``: number of the series in its sample.
        name: ``(num_entries,)``: class.
        first_voxel: ``(num_entries + 1,)``: sampled voxels of each entry.
        has_boxes: Whether it has boxes and bodies; tables of former versions have none.

    Raises:
        FormatError: The table is no voxel table of format 1.
        ChecksumError: It is damaged.
    """

    def __init__(self, table: Table) -> None:
        table.expect_kind(_KIND, _FORMAT_VERSION)
        self._table = table
        names = table.meta.get("names")
        self.names: tuple[str, ...] = tuple(names) if isinstance(names, list) else ()
        self.num_samples = table.num_rows("first_entry") - 1
        self.first_entry = table.column("first_entry").astype(np.int64)
        self.series, self.name = table.column("series"), table.column("name")
        self.first_voxel = table.column("first_voxel").astype(np.int64)
        self.has_boxes = "box" in table.column_names
        is_whole = (
            len(self.series) == len(self.name) == len(self.first_voxel) - 1 == int(self.first_entry[-1])
        )
        if not is_whole or int(self.name.max(initial=0)) >= max(len(self.names), 1):
            raise FormatError(f"{table.name} is no whole voxel table; {VoxelsManifest.remedy}")

    def column(self, name: str) -> NDArray[Any]:
        """Return a column, see docs/format.md, section 21."""
        return self._table.column(name)

    def voxels(self, entry: int) -> NDArray[np.uint16]:
        """Return the sampled voxels of an entry, ``(n, 3)``: slice, row and column."""
        first, stop = self.first_voxel[entry : entry + 2].tolist()
        found: NDArray[np.uint16] = self._table.column("voxel")[first:stop]
        return found

    def box(self, entry: int) -> tuple[int, ...]:
        """Return the box of an entry, see `ClassVoxels.box`."""
        return tuple(self._table.column("box")[entry].tolist())

    def of_sample(self, sample: int) -> list[ClassVoxels]:
        """Return the classes of a sample."""
        first, stop = self.first_entry[sample : sample + 2].tolist()
        counts = self._table.column("num_voxels")
        return [
            ClassVoxels(
                int(self.series[entry]),
                self.names[int(self.name[entry])],
                int(counts[entry]),
                self.voxels(entry),
                self.box(entry) if self.has_boxes else (),
            )
            for entry in range(first, stop)
        ]

    def verify(self) -> None:
        """Check every column, whether or not it is used.

        Raises:
            FormatError: One is damaged.
        """
        self._table.verify()


@dataclass(frozen=True, kw_only=True)
class VoxelsManifest(FactsManifest[VoxelTable]):
    """Manifest that makes a voxel table valid for one version of a dataset."""

    remedy = "run: shardflow attach DATASET --voxels"
    name: ClassVar[str] = "voxels"
    table_name = VOXELS_NAME
    what = "the table of voxels of its annotations"
    head: ClassVar[Mapping[str, Json]] = {"format": "shardflow-voxels", "format_version": _FORMAT_VERSION}

    @classmethod
    def wrap(cls, table: Table) -> VoxelTable:
        """Return a table as one of voxels."""
        return VoxelTable(table)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachedVoxels:
    """Result of a job that attached voxels."""

    num_samples: int
    num_annotated: int
    """Samples that have a voxel of some class."""
    num_samples_kept: int
    """Samples that an earlier version had in its table already."""
    classes: Mapping[str, int]
    """Number of series of each class."""
    num_bodies: int
    """Series of which a body is known."""


def attach_voxels(
    dataset: Dataset, *, num_threads: int = 2, on_samples: Callable[[int, int], None] | None = None
) -> AttachedVoxels:
    """Write the voxel table of a dataset from its annotations, masks and images; no shard is touched.

    Samples of shards that an earlier version shares are taken from its table.

    Args:
        dataset: A dataset in a folder, with its series table.
        num_threads: Samples read at once.
        on_samples: Called with the number of samples done, and of all samples.

    Raises:
        ConfigError: The dataset is not in a local folder, or has no series table.
        ShardflowError: A field cannot be read or trusted.
    """
    store = local_folder(dataset.store)
    if store is None:
        raise ConfigError(
            "Voxels are attached to a dataset in a local folder, this one is remote; run the command where "
            "it was packed, or copy it first."
        )
    series, _ = open_series(dataset)
    known, num_samples = _known(dataset, store), dataset.studies.num_samples
    found: list[tuple[VoxelTable, int] | None] = [known.get(place) for place in _places(dataset)]
    missing = [sample for sample, former in enumerate(found) if former is None]
    num_kept = num_samples - len(missing)
    with ThreadPoolExecutor(num_threads) as pool:
        for first in range(0, len(missing), _SAMPLES_AT_ONCE):
            part = missing[first : first + _SAMPLES_AT_ONCE]
            table = _wrap(encode_voxels([*pool.map(lambda sample: _read(dataset, series, sample), part)]))
            for place, sample in enumerate(part):
                found[sample] = table, place
            if on_samples is not None:
                on_samples(num_kept + first + len(part), num_samples)
    table = _write(dataset, store.root, [one for one in found if one is not None])
    owners = np.repeat(np.arange(num_samples), np.diff(table.first_entry))
    is_body = table.name == (table.names.index(BODY) if BODY in table.names else len(table.names))
    counts = np.bincount(table.name, minlength=len(table.names)).tolist()
    classes = {name: count for name, count in zip(table.names, counts, strict=True) if count and name != BODY}
    return AttachedVoxels(
        num_samples=num_samples,
        num_annotated=len(np.unique(owners[~is_body])),
        num_samples_kept=num_kept,
        classes=classes,
        num_bodies=int(is_body.sum()),
    )


def write_voxels(dataset: Dataset, root: Path, *, parts: Path | None = None) -> bool:
    """Write the voxel table of a version, which need not be published yet, if all of it is known.

    Args:
        dataset: The version.
        root: Folder of the dataset.
        parts: Folder of tables of single shards, see `write_shard_voxels`.

    Returns:
        Whether there is one now: not where a sample is in no part and in no table of a stored version, nor
        where no sample has an entry. ``shardflow attach DATASET --voxels`` makes it then.

    Raises:
        StorageError: A file cannot be written.
    """
    known = _known(dataset, LocalStore(root))
    tables: dict[str, VoxelTable | None] = {}
    found = []
    for sha256, row in _places(dataset):
        former = known.get((sha256, row))
        if former is None and parts is not None:
            if sha256 not in tables:
                tables[sha256] = _read_part(part_path(parts, sha256))
            part = tables[sha256]
            former = None if part is None or row >= part.num_samples else (part, row)
        if former is None:
            return False
        found.append(former)
    if all(int(table.first_entry[row]) == int(table.first_entry[row + 1]) for table, row in found):
        return False
    _write(dataset, root, found)
    return True


def copy_voxels(source: Dataset, rows: NDArray[np.int64], new: Dataset, root: Path) -> bool:
    """Write the voxel table of a copy of some samples; return whether the source has one.

    Args:
        source: The former dataset.
        rows: Of the samples there.
        new: The new dataset.
        root: Its folder.

    Raises:
        FormatError: The table cannot be trusted.
        StorageError: Reading or writing failed.
    """
    try:
        table, _ = VoxelsManifest.open(source)
    except ConfigError:
        return False
    if not table.has_boxes:
        return False
    _write(new, root, [(table, row) for row in rows.tolist()])
    return True


def part_path(parts: Path, sha256: str) -> Path:
    """Return the path of the voxels of a whole shard in a folder of parts."""
    return parts / f"{sha256}.voxels.tbl"


def write_shard_voxels(parts: Path, sha256: str, samples: Sequence[Sequence[ClassVoxels]]) -> None:
    """Write the voxels of a shard as a part of a table.

    Args:
        parts: Folder of parts.
        sha256: Digest of the shard.
        samples: The classes of each sample, in the order of the shard.

    Raises:
        StorageError: The file cannot be written.
    """
    write_atomic(part_path(parts, sha256), [encode_voxels(samples)], replace=True)


def carry_shard_voxels(
    dataset: Dataset, shard: int, rows_in_shard: Sequence[int], parts: Path, sha256: str
) -> None:
    """Write the voxels of a shard whose samples come from one of a stored version, if that has a table.

    Args:
        dataset: The stored version.
        shard: Number of the shard in it.
        rows_in_shard: Of the samples in that shard, in the order of the new one.
        parts: Folder of parts.
        sha256: Digest of the new shard.

    Raises:
        FormatError: The table cannot be trusted.
        StorageError: A file cannot be read or written.
    """
    try:
        table, _ = VoxelsManifest.open(dataset)
    except ConfigError:
        return
    samples = np.flatnonzero(dataset.studies.column("shard") == shard)
    known = dict(zip(dataset.studies.column("row_in_shard")[samples].tolist(), samples.tolist(), strict=True))
    if table.has_boxes:
        chosen = np.array([known[row] for row in rows_in_shard], np.int64)
        write_atomic(part_path(parts, sha256), [merge_voxels([(table, chosen)])], replace=True)


def _read_part(path: Path) -> VoxelTable | None:
    try:
        table = _wrap(path.read_bytes())
        table.verify()
    except (OSError, FormatError):
        return None
    return table


def _wrap(data: bytes) -> VoxelTable:
    return VoxelTable(Table(memoryview(data), name=VOXELS_NAME))


def _write(dataset: Dataset, root: Path, samples: Iterable[tuple[VoxelTable, int]]) -> VoxelTable:
    """Write the table of a version from entries of other tables."""
    groups = ([*each] for _, each in itertools.groupby(samples, key=lambda one: id(one[0])))
    data = merge_voxels((group[0][0], np.array([row for _, row in group], np.int64)) for group in groups)
    manifest = VoxelsManifest.of(dataset.manifest.dataset_id, data)
    folder = root / VoxelsManifest.folder(dataset.manifest.dataset_id)
    write_atomic(folder / VOXELS_NAME, [data], replace=True)
    write_atomic(folder / manifest.file_name, [manifest.encode()], replace=True)
    return _wrap(data)


def _places(dataset: Dataset) -> Iterator[tuple[str, int]]:
    """Yield shard and row in it of each sample, in the order of the samples table."""
    digests = [shard.sha256 for shard in dataset.manifest.shards]
    shards, rows = (dataset.studies.column(name).tolist() for name in ("shard", "row_in_shard"))
    return ((digests[shard], row) for shard, row in zip(shards, rows, strict=True))


def _read(dataset: Dataset, series: SeriesTable, sample: int) -> list[ClassVoxels]:
    """Sample the voxels of one study from its shard."""
    first, stop = series.array("first_series")[sample : sample + 2].tolist()
    sides = (series.array(name)[first:stop].tolist() for name in ("num_slices", "rows", "columns"))
    shapes = dict(enumerate(zip(*sides, strict=True)))
    key, names = dataset.studies.sample_key(sample), [one.name for one in dataset.sample_fields(sample)[1]]
    found: list[ClassVoxels] = []
    if ANNOTATIONS_FIELD in names:
        masks = [name for name in names if parse_mask_field(name) is not None]
        payloads = dataset.read_fields(sample, [ANNOTATIONS_FIELD, *masks])
        annotations = payloads.pop(ANNOTATIONS_FIELD)
        read_masks = partial(dataset.read_masks, sample)
        found = voxels_of_study(annotations, payloads, shapes, key=key, read_masks=read_masks)
    kinds, units = (series.vocabulary(name) for name in ("kind", "unit"))
    for number, shape in shapes.items():
        kind, unit, channels = (
            int(series.array(name)[first + number]) for name in ("kind", "unit", "channels")
        )
        if not suits_bricks(kind=kinds[kind] or "volume", num_slices=shape[0], num_samples=channels):
            continue
        finder, slices = BodyFinder(shape, units[unit]), dataset.slice_names(sample, number)
        wanted = {index: slices[index] for index in finder.indices if len(slices) == shape[0]}
        read = dataset.read_fields(sample, [*wanted.values()])
        for index, name in wanted.items():
            finder.add(index, decode_array(name.rpartition(".")[2], read[name]))
        body = finder.entry(number, key) if wanted else None
        found += [] if body is None else [body]
    return sorted(found, key=lambda one: (one.series, one.name))


def _known(dataset: Dataset, store: ByteStore) -> dict[tuple[str, int], tuple[VoxelTable, int]]:
    """Return the samples that tables of stored versions have, by shard and row in it; newer ones first."""
    known: dict[tuple[str, int], tuple[VoxelTable, int]] = {}
    for number in reversed(versions(store)):
        try:
            manifest = load(store, number)
            table = VoxelsManifest.read(store, manifest.dataset_id)
            table.verify()
        except (NotFoundError, FormatError):
            continue  # a version without the table, or with a damaged one
        former = Dataset(store, manifest)
        if (
            table.num_samples != former.studies.num_samples
            or manifest.dataset_id == dataset.manifest.dataset_id
            or not table.has_boxes
        ):
            continue
        for sample, place in enumerate(_places(former)):
            known.setdefault(place, (table, sample))
    return known
