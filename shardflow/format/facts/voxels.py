"""Voxel table: a keyed sample of the voxels of each class of regions, by series, for crops around them.

A sidecar that ``shardflow attach DATASET --voxels`` writes from the annotations and masks of the shards; no
shard is touched. Of each series and class (a label of regions, or the value of a code) it has at most 256
voxels, those whose keyed hashes are the least, so they are spread over all voxels of the class and are the
same for any order of reading. ``facts/voxels/<dataset_id>/voxels.tbl`` has the order of the samples table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.format.codecs import codec_rank, decode_array
from shardflow.format.dataset import Dataset
from shardflow.format.facts.series import FactsManifest, SeriesTable, encode_names, open_series
from shardflow.format.keys import ANNOTATIONS_FIELD, Json, parse_mask_field
from shardflow.format.manifest import load, versions
from shardflow.format.regions import Region, read_regions
from shardflow.format.table import Table, encode_table
from shardflow.seeds import derive
from shardflow.storage import LocalStore, write_atomic

VOXELS_NAME: Final = "voxels.tbl"
MAX_VOXELS: Final = 256
"""Voxels of a class in a series."""
_KIND: Final = "voxels"
_FORMAT_VERSION: Final = 1
_THRESHOLD: Final = 0.5
"""Part of a voxel that a fractional mask covers at least."""
_SAMPLES_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class ClassVoxels:
    """Voxels of one class in one series."""

    series: int
    """Number of the series in its sample."""
    name: str
    """Label or value of a code; empty for regions that have neither."""
    num_voxels: int
    """Voxels of the class in all."""
    voxels: NDArray[np.uint16]
    """``(n, 3)``: slice, row and column of its sampled voxels, ascending."""


class _Chosen:
    """The voxels of a class whose hashes are the least; slices may come in any order."""

    def __init__(self, key: int) -> None:
        self._key = np.uint64(key)
        self._places, self._hashes = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        self._slices: dict[int, NDArray[np.bool_]] = {}

    def add(self, index: int, mask: NDArray[np.bool_]) -> None:
        """Add the pixels of a slice."""
        known = self._slices.get(index)
        self._slices[index] = mask if known is None else known | mask

    def entry(self, series: int, name: str) -> ClassVoxels | None:
        """Return the sampled voxels; None if there are none."""
        num_voxels = 0
        for index, mask in self._slices.items():
            rows, columns = np.nonzero(mask)
            num_voxels += len(rows)
            places = (
                np.uint64(index) << np.uint64(32)
                | rows.astype(np.uint64) << np.uint64(16)
                | columns.astype(np.uint64)
            )
            places = np.concatenate([self._places, places])
            hashes = np.concatenate([self._hashes, _hash(places[len(self._places) :] ^ self._key)])
            if len(places) > MAX_VOXELS:
                least = np.argpartition(hashes, MAX_VOXELS)[:MAX_VOXELS]
                places, hashes = places[least], hashes[least]
            self._places, self._hashes = places, hashes
        if not num_voxels:
            return None
        places = np.sort(self._places)
        parts = [places >> np.uint64(32), places >> np.uint64(16), places]
        voxels = np.stack(parts, axis=1).astype(np.uint16)
        return ClassVoxels(series, name, num_voxels, voxels)


def _hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64-bit integers (splitmix64, Steele et al. 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def sample_voxels(
    regions: Iterable[Region],
    masks: Callable[[Region, int], NDArray[np.bool_] | None],
    shapes: Mapping[int, tuple[int, int]],
    *,
    key: str,
) -> list[ClassVoxels]:
    """Sample the voxels of each class in each series of a study.

    Args:
        regions: Of its annotations.
        masks: Returns the stored mask ``(rows, columns)`` of a region in a slice; None if there is none.
        shapes: Rows and columns of each series, by its number.
        key: Key of the sample, which decides the choice.

    Raises:
        FormatError: An outline is malformed.
    """
    classes: dict[tuple[int, str], list[Region]] = {}
    for region in regions:
        for name in region.names or [""]:
            classes.setdefault((region.series, name), []).append(region)
    found = []
    for (series, name), members in sorted(classes.items()):  # one at a time: its masks are in memory
        chosen = _Chosen(derive(0, f"voxels {key} {name}", series))
        for region in members:
            for index in region.places:
                pixels = masks(region, index)
                if pixels is None and region.volume is None:
                    filled = region.fill(index, shapes[series])
                    pixels = None if filled is None else filled > 0
                if pixels is not None:
                    chosen.add(index, pixels)
        entry = chosen.entry(series, name)
        if entry is not None:
            found.append(entry)
    return found


def encode_voxels(samples: Sequence[Sequence[ClassVoxels]]) -> bytes:
    """Encode a table.

    Args:
        samples: The classes of each sample, in the order of the samples table.
    """
    entries = [one for each in samples for one in each]
    names, vocabulary = encode_names("name", [one.name for one in entries])
    voxels = [np.zeros((0, 3), "<u2"), *(one.voxels for one in entries)]
    columns: dict[str, NDArray[Any]] = {
        "first_entry": _starts([len(each) for each in samples]),
        "series": np.array([one.series for one in entries], "<u4"),
        "name": names,
        "num_voxels": np.array([one.num_voxels for one in entries], "<u8"),
        "first_voxel": _starts([len(one.voxels) for one in entries]),
        "voxel": np.concatenate(voxels).astype("<u2"),
    }
    meta: dict[str, Json] = {"kind": _KIND, "format_version": _FORMAT_VERSION, "names": vocabulary}
    return encode_table(columns, meta)


def _starts(lengths: Sequence[int]) -> NDArray[np.uint64]:
    starts = np.zeros(len(lengths) + 1, "<u8")
    np.cumsum(lengths, out=starts[1:])
    return starts


class VoxelTable:
    """Voxel table, open for reading; memory-mapped.

    Attributes:
        num_samples: Number of samples, as in the samples table.
        names: Classes; an entry's ``name`` indexes them.
        first_entry: ``(num_samples + 1,)``: entries of each sample.
        series: ``(num_entries,)``: number of the series in its sample.
        name: ``(num_entries,)``: class.

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
        self._first_voxel = table.column("first_voxel")
        is_whole = (
            len(self.series) == len(self.name) == len(self._first_voxel) - 1 == int(self.first_entry[-1])
        )
        if not is_whole or int(self.name.max(initial=0)) >= max(len(self.names), 1):
            raise FormatError(f"{table.name} is no whole voxel table; {VoxelsManifest.remedy}")

    def voxels(self, entry: int) -> NDArray[np.uint16]:
        """Return the sampled voxels of an entry, ``(n, 3)``: slice, row and column."""
        first, stop = self._first_voxel[entry : entry + 2].tolist()
        found: NDArray[np.uint16] = self._table.column("voxel")[first:stop]
        return found

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


def attach_voxels(
    dataset: Dataset, *, num_threads: int = 2, on_samples: Callable[[int, int], None] | None = None
) -> AttachedVoxels:
    """Write the voxel table of a dataset from its annotations and masks; no shard is touched.

    Samples of shards that an earlier version shares are taken from its table.

    Args:
        dataset: A dataset in a folder, with its series table.
        num_threads: Samples read at once.
        on_samples: Called with the number of samples done, and of all samples.

    Raises:
        ConfigError: The dataset is not in a local folder, or has no series table.
        ShardflowError: A field cannot be read or trusted.
    """
    if not isinstance(dataset.store, LocalStore):
        raise ConfigError(
            "Voxels are attached to a dataset in a local folder, this one is remote; run the command where "
            "it "
            "was packed, or copy it first."
        )
    series, _ = open_series(dataset)
    known, num_samples = _known(dataset), dataset.studies.num_samples
    shards, rows = (dataset.studies.column(name) for name in ("shard", "row_in_shard"))
    digests = [shard.sha256 for shard in dataset.manifest.shards]
    found: list[list[ClassVoxels]] = []
    num_kept = 0

    def voxels_of(sample: int) -> tuple[list[ClassVoxels], bool]:
        former = known.get((digests[int(shards[sample])], int(rows[sample])))
        if former is not None:
            return former[0].of_sample(former[1]), True
        return _read(dataset, series, sample), False

    with ThreadPoolExecutor(num_threads) as pool:
        for first in range(0, num_samples, _SAMPLES_AT_ONCE):
            part = range(first, min(first + _SAMPLES_AT_ONCE, num_samples))
            for entries, is_kept in pool.map(voxels_of, part):
                found.append(entries)
                num_kept += is_kept
            if on_samples is not None:
                on_samples(len(found), num_samples)
    data, root = encode_voxels(found), dataset.store.root
    manifest = VoxelsManifest.of(dataset.manifest.dataset_id, data)
    folder = root / VoxelsManifest.folder(dataset.manifest.dataset_id)
    write_atomic(folder / VOXELS_NAME, [data], replace=True)
    write_atomic(folder / manifest.file_name, [manifest.encode()], replace=True)
    counts: dict[str, int] = {}
    for one in (one for each in found for one in each):
        counts[one.name] = counts.get(one.name, 0) + 1
    return AttachedVoxels(
        num_samples=num_samples,
        num_annotated=sum(bool(each) for each in found),
        num_samples_kept=num_kept,
        classes=dict(sorted(counts.items())),
    )


def _read(dataset: Dataset, series: SeriesTable, sample: int) -> list[ClassVoxels]:
    """Sample the voxels of one study from its shard."""
    _, fields = dataset.sample_fields(sample)
    if not any(one.name == ANNOTATIONS_FIELD for one in fields):
        return []
    masks = {one.name: parsed for one in fields if (parsed := parse_mask_field(one.name)) is not None}
    names = [name for name, parsed in masks.items() if codec_rank(parsed.codec) is not None]
    payloads = dataset.read_fields(sample, [ANNOTATIONS_FIELD, *names])
    stored = {(masks[name].series, masks[name].roi, masks[name].index): name for name in names}
    held: dict[tuple[int, int], NDArray[Any]] = {}

    def mask(region: Region, index: int) -> NDArray[np.bool_] | None:
        if region.volume is not None:
            place = region.series, region.volume
            if place not in held:
                held.clear()  # one volume of small numbers is in memory
                held[place] = dataset.read_masks(sample, *place)
            is_inside = region.table(held[place].dtype, _THRESHOLD)
            found: NDArray[np.bool_] = is_inside[held[place][index]]
            return found
        name = stored.get((region.series, region.number, index))
        if name is None:
            return None
        return decode_array(masks[name].codec, payloads[name]) >= region.mask_level(_THRESHOLD)

    first, stop = series.array("first_series")[sample : sample + 2].tolist()
    sides = zip(
        series.array("rows")[first:stop].tolist(), series.array("columns")[first:stop].tolist(), strict=True
    )
    regions = read_regions(payloads[ANNOTATIONS_FIELD])
    return sample_voxels(regions, mask, dict(enumerate(sides)), key=dataset.studies.sample_key(sample))


def _known(dataset: Dataset) -> dict[tuple[str, int], tuple[VoxelTable, int]]:
    """Return the samples that tables of stored versions have, by shard and row in it; newer ones first."""
    known: dict[tuple[str, int], tuple[VoxelTable, int]] = {}
    for number in reversed(versions(dataset.store)):
        try:
            manifest = load(dataset.store, number)
            table = VoxelsManifest.read(dataset.store, manifest.dataset_id)
            table.verify()
        except (NotFoundError, FormatError):
            continue  # a version without the table, or with a damaged one
        former = Dataset(dataset.store, manifest)
        if (
            table.num_samples != former.studies.num_samples
            or manifest.dataset_id == dataset.manifest.dataset_id
        ):
            continue
        shards = [manifest.shards[shard].sha256 for shard in former.studies.column("shard").tolist()]
        rows = former.studies.column("row_in_shard").tolist()
        for sample, place in enumerate(zip(shards, rows, strict=True)):
            known.setdefault(place, (table, sample))
    return known
