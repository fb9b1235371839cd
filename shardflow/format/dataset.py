"""Dataset: the manifest, samples table, indexes and checked fields of one version, open for reading.

The simple way to bytes, for tools and tests; the loader fetches many fields at once through the same
indexes. Everything returned is checked: the samples table, an index and every table beside the dataset
against size and SHA-256 in their manifests, a field against its crc32c in the index. No table is read where
others may still change it, see `own_bytes`. `DatasetBlocks` gives a cache the digests, the checksummed pieces
and the rows that need them.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, ConfigError, FormatError, ShardflowError
from shardflow.format.codecs import codec_rank, encode_array
from shardflow.format.dataset_index import DatasetIndex, ShardIndexes
from shardflow.format.field_digests import FieldDigests
from shardflow.format.file_blocks import open_large
from shardflow.format.foreign.places import is_foreign, located
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.keys import parse_slice_field, slice_field, volume_field
from shardflow.format.manifest import CheckedShards, Manifest, ShardEntry
from shardflow.format.manifest_table import load_shared
from shardflow.format.samples import SamplesTable
from shardflow.format.signatures import trust_of, trust_only
from shardflow.format.table import Table, crc32c
from shardflow.format.tables import AttachedTables
from shardflow.format.volumes.bricks import BrickVolume
from shardflow.storage import ByteRange, ByteStore, open_store
from shardflow.storage.cache.blocks import ObjectBlocks
from shardflow.storage.cache.config import CacheConfig
from shardflow.storage.cache.store import Cache, CachedStore, read_afresh
from shardflow.storage.node_files import own_bytes

# Of a block in a shard with volumes: a crop of 96 voxels then fetches 1.0 to 1.4 times the bricks it touches,
# with whole blocks 1.4 to 2.9 times (bricks of 15 to 90 KB).
_BRICK_BLOCK_PART = 4


class DatasetBlocks:
    """Blocks of the files of a dataset for a cache; rows of the samples table are their units.

    A shard is cut between its fields; an index and the samples table are one block each. Manifests are not
    cached, because a reader asks for the newest one.

    Args:
        dataset: The dataset; its samples table need not be open yet.
        block_bytes: Largest block of several fields.
        digests: With which what is read is proven; None proves nothing.
    """

    def __init__(self, dataset: Dataset, *, block_bytes: int, digests: FieldDigests | None) -> None:
        self._dataset, self._manifest, self._digests = dataset, dataset.manifest, digests
        self._block_bytes = block_bytes
        shards = dataset.manifest.shards
        self._find: Callable[[str], int | None]
        if isinstance(shards, CheckedShards):
            self._find = shards.find
        else:
            places = enumerate(shards)
            self._find = {path: place for place, one in places for path in (one.path, one.index.path)}.get

    def __call__(self, path: str) -> ObjectBlocks | None:
        """Return the blocks of a file; None for one that is not cached."""
        samples, space = self._manifest.samples, self._manifest.dataset_id
        if path == samples.path:
            return ObjectBlocks.whole(samples.sha256, samples.num_bytes, space=space)
        place = self._find(path)
        if place is not None:
            entry = self._manifest.shards[place]
            if path == entry.path:
                return self._of_shard(place, entry)
            index, rows = entry.index, self._rows(place, entry)
            units = (rows.start, rows.stop)
            return ObjectBlocks.whole(index.sha256, index.num_bytes, space=space, units=units)
        table = None if self._digests is None else self._digests.paths.get(path)
        return None if table is None else ObjectBlocks.whole(table.sha256, table.num_bytes, space=space)

    def _of_shard(self, place: int, entry: ShardEntry) -> ObjectBlocks | None:
        try:
            index = self._dataset.shard_index(place)
        except FormatError:
            return None  # a damaged index names no blocks; the reader masks its samples
        rows = self._rows(place, entry)
        row_of_sample = np.full(index.num_samples, -1, np.int64)
        inside = self._dataset.studies.gather("row_in_shard", np.arange(rows.start, rows.stop)).astype(
            np.int64
        )
        known = inside < index.num_samples
        row_of_sample[inside[known]] = np.arange(rows.start, rows.stop)[known]
        first: NDArray[np.int64] = index.first_field.astype(np.int64)
        units = np.repeat(row_of_sample, first[1:] - first[:-1])
        pieces, block_bytes = index.pieces(), self._block_bytes
        if index.bricks is not None:
            block_bytes = max(block_bytes // _BRICK_BLOCK_PART, 1)
        digests = None if self._digests is None else self._digests.of_shard(place, len(pieces.offsets))
        return ObjectBlocks.of_pieces(
            entry.sha256,
            pieces.offsets,
            pieces.num_bytes,
            pieces.crc32c,
            digests=digests,
            block_bytes=block_bytes,
            space=self._manifest.dataset_id,
            units=units[pieces.fields],
        )

    def _rows(self, place: int, entry: ShardEntry) -> range:
        """Return the rows of a shard: they follow each other, in the rows of its split."""
        samples = self._dataset.studies
        rows = samples.splits.get(entry.split, range(0))

        def shard_of(row: int) -> int:
            return int(samples.gather("shard", row))

        start = bisect_left(rows, place, key=shard_of)
        last = min(start + entry.num_samples, len(rows))
        return rows[start : bisect_left(rows, place + 1, lo=start, hi=last, key=shard_of)]


SampleReader: TypeAlias = Callable[[str | int, Any, int], dict[str, Any]]
"""Function that reads a sample: gets its key or row, fields and seed, see `Dataset.sample`."""
_SAMPLE_READERS: Final[list[Callable[[Dataset], SampleReader]]] = []


def register_sample_reader(make: Callable[[Dataset], SampleReader]) -> None:
    """Register what makes the reader of a dataset's samples; it lives in a package above this one."""
    _SAMPLE_READERS.append(make)


class Dataset:
    """One version of a dataset. Safe for many threads; crosses process boundaries as its place.

    Args:
        store: Where the dataset is stored.
        manifest: Its version.
        tables: Attached tables; None for the newest.

    Attributes:
        store: Where the bytes lie.
        manifest: The list of files.
        dataset_id: Digest of the manifest, 64 hexadecimal digits.
        manifest_version: Number of the version.
        studies: The samples table.
        samples: What is drawn from: the same table; of an `EntityDataset` another one, with its columns.

    Raises:
        FormatError: The samples table is not the one that the manifest names.
        SignatureError: The store trusts signed versions only, and this is none.
    """

    samples: SamplesTable

    def __init__(self, store: ByteStore, manifest: Manifest, tables: AttachedTables | None = None) -> None:
        trust = trust_of(store)
        signed = {} if trust is None else trust.admit(store, manifest).files  # before anything named is read
        self.store = _located(store, manifest)
        self.manifest = manifest
        self.dataset_id = manifest.dataset_id
        self.manifest_version = manifest.manifest_version
        if isinstance(self.store, CachedStore):
            digests = FieldDigests.where_signed(self.store, self.dataset_id, signed)
            block_bytes = self.store.cache.config.block_bytes
            self.store.bind(DatasetBlocks(self, block_bytes=block_bytes, digests=digests))
        entry = manifest.samples
        self.studies = self.samples = SamplesTable(open_large(self.store, entry, manifest.samples_blocks))
        counts = {split: len(rows) for split, rows in self.studies.splits.items()}
        expected = {split: numbers["num_samples"] for split, numbers in manifest.splits.items()}
        if counts != {split: count for split, count in expected.items() if count}:
            raise FormatError(
                f"{entry.path} must hold the manifest's samples {expected}, got {counts}; "
                "is it another dataset's?"
            )
        self._indexes = ShardIndexes(self.store, manifest)
        self._read_sample: SampleReader | None = None
        self._tables = tables

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        version: int | None = None,
        cache: Cache | CacheConfig | None = None,
        tables: Sequence[str | os.PathLike[str]] = (),
        signed_by: str | os.PathLike[str] | None = None,
    ) -> Dataset:
        """Open a dataset.

        Args:
            url: A folder, or a ``file://`` URL of one.
            version: The manifest version; the newest if not given.
            cache: Settings of a read cache, or a `Cache` that several datasets share.
            tables: Folders of tables that belong to the dataset and are stored elsewhere, as ``shardflow
                attach --to DIR`` writes them beside a dataset that is read-only.
            signed_by: File of public keys, OpenSSH's allowed signers or a ``.pub`` file: the version and
                every table beside it must be signed by one of them (``shardflow sign``).

        Raises:
            SignatureError: They are not.
            ConfigError: The directory of the cache holds something and is no cache; or a folder holds no
                table of this version of the dataset, or one of a name that the dataset has.
            ManifestError: There is no manifest, or it cannot be trusted.
            FormatError: The samples table is not the one that the manifest names.
            StorageError: The store's scheme is unknown, or reading failed.
        """
        if isinstance(tables, str | os.PathLike):
            raise ConfigError("tables= is a list of folders; write tables=[folder].")
        store = open_store(url, cache=cache)
        if signed_by is not None:
            store, _ = trust_only(store, signed_by)
            if tables:
                raise _not_covered()
        manifest = load_shared(store, version)
        if not tables:
            return cls(store, manifest)
        beside = [open_store(folder) for folder in tables]
        return cls(store, manifest, AttachedTables.newest(store, manifest.dataset_id, beside))

    @property
    def tables(self) -> AttachedTables:
        """Digests of the attached tables by name: the newest of each, chosen at the first use and kept.

        Raises:
            FormatError: A manifest cannot be trusted.
            StorageError: Reading failed.
        """
        if self._tables is None:
            self._tables = AttachedTables.newest(self.store, self.manifest.dataset_id)
        return self._tables

    def sample(
        self, key: str | int, fields: Mapping[str, Any] | None = None, *, seed: int = 0
    ) -> dict[str, Any]:
        """Read one sample with the fields of a loader, for notebooks and debugging.

        It equals what a `Loader` over the whole split of the sample delivers in epoch 0 with this seed:
        random choices are keyed by seed, epoch and row, and what depends on the samples beside it, such as a
        dtype that holds every image, is that of the split. Fields are bound once and kept. What other samples
        lack does not matter.

        Args:
            key: Sample key, or row of the table of samples, negative from its end. Of a dataset of series or
                images, and of fields with ``center="grid"``, their own keys.
            fields: Fields by name; None takes the default fields, as a loader does.
            seed: That of the loader.

        Returns:
            The entries of a batch for this one sample, without the axis B: an image is ``(C, H, W)``, a text
            a string, a mask a number.

        Raises:
            ConfigError: A field does not fit the dataset, or this sample lacks it and ``missing`` is not
                ``pad``.
            KeyError: No sample has this key.
            IndexError: There is no such row.
            SampleError: A field of the sample cannot be read.

        Example::

            sf.open("chest").sample(key, {"frontal": sf.Image(series="role == 'frontal'")})["frontal"]
        """
        if self._read_sample is None:
            if not _SAMPLE_READERS:
                raise ShardflowError(
                    "Samples are decoded by the loader, which is not imported; open the dataset with "
                    "sf.open, or import shardflow.loading.sample."
                )
            self._read_sample = _SAMPLE_READERS[-1](self)
        return self._read_sample(key, fields, seed)

    def __getitem__(self, key: str | int) -> dict[str, Any]:
        """Return one sample with the default fields, see `sample`; -1 is the last row."""
        return self.sample(key)

    def __len__(self) -> int:
        """Return the number of samples, over all splits."""
        return self.samples.num_samples

    def __bool__(self) -> bool:
        """Return True: a dataset without samples is one too."""
        return True

    def __repr__(self) -> str:
        """Return version, identity, splits and modalities in a line; a place may name people, so none."""
        splits = ", ".join(f"{name} {len(rows):,}" for name, rows in self.samples.splits.items()) or "none"
        modalities = ", ".join(filter(None, self.samples.modalities)) or "none"
        return (
            f"<{type(self).__name__} {self.dataset_id[:12]}, version {self.manifest_version}: "
            f"{len(self):,} samples ({splits}), modalities {modalities}>"
        )

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """Cross a process boundary without maps and caches, with the tables that were chosen."""
        return type(self), self._place()

    def signed(self, signed_by: str | os.PathLike[str]) -> Dataset:
        """Return the same dataset, which a key must have signed; nothing that was read before is taken over.

        This one, and others of its store, stay as they are.

        Args:
            signed_by: File of public keys, see `open`.

        Raises:
            ConfigError: It has tables from outside, its rows are no studies, or the keys cannot be read.
            SignatureError: The version, or an attached table, is not signed by one of the keys.
        """
        if type(self) is not Dataset:
            raise ConfigError(
                "signed_by= of a loader takes a dataset as sf.open returns it, whose rows are studies; pass "
                "signed_by to sf.open or sf.blend instead."
            )
        store, trust = trust_only(self.store, signed_by)
        found = Dataset(store, self.manifest, self._tables)
        for place in found.tables.places.values():
            if place.store is not None:
                raise _not_covered()
            trust.check(f"{place.manifest.folder}/{place.manifest.file_name}", place.manifest.encode())
        return found

    def reopened(self) -> Self:
        """Return the same dataset with maps and locks of its own, for a process that was forked."""
        return type(self)(*self._place())

    def _place(self) -> tuple[Any, ...]:
        """Return the arguments that open this dataset again, with the tables that were chosen."""
        return self.store, self.manifest, self.tables

    @property
    def cache(self) -> Cache | None:
        """The read cache; None where the dataset is read from its store directly."""
        return self.store.cache if isinstance(self.store, CachedStore) else None

    def table_beside(self, path: str, *, sha256: str, num_bytes: int | None, rows: range) -> Table:
        """Open a table of a sidecar, cached as the dataset's own files are; see `own_bytes`.

        Args:
            path: The file.
            sha256: Its digest.
            num_bytes: Its size; None if its manifest has none.
            rows: The rows of the samples table that need it.

        Raises:
            ChecksumError: It is damaged, cut, or another one than its manifest names.
            StorageError: It cannot be read.
        """
        if isinstance(self.store, CachedStore) and num_bytes is not None:
            units = (rows.start, rows.stop)
            blocks = ObjectBlocks.whole(sha256, num_bytes, space=self.manifest.dataset_id, units=units)
            self.store.know(path, blocks)
        return Table(own_bytes(self.store, path, sha256=sha256, num_bytes=num_bytes), name=path)

    def study_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the samples table that each row of `samples` reads; a cache counts in those."""
        return rows

    @property
    def text_id(self) -> str:
        """Identity of the rows by which tokens of texts are stored: those of `samples`, or of studies."""
        return self.dataset_id

    @property
    def num_texts(self) -> int:
        """Number of the rows of `text_id`."""
        return self.samples.num_samples

    def text_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of `text_id` that each row of `samples` has its text in."""
        return rows

    @property
    def splits(self) -> dict[str, range]:
        """The rows of each split in the samples table."""
        return self.samples.splits

    @property
    def is_foreign(self) -> bool:
        """Whether others wrote the shards: fields have any names, and there is no study in them."""
        return is_foreign(self.manifest)

    def original_key(self, row: int) -> str:
        """Return the key that a sample has in its tar; in foreign shards another one than its sample key.

        Args:
            row: Row in the samples table.
        """
        index = self._indexes.open(int(self.studies.gather("shard", row)))
        if index.original_keys is None:
            return self.studies.sample_key(row)
        key: bytes = index.original_keys[int(self.studies.gather("row_in_shard", row))]
        return key.decode("utf-8", "replace")

    def shard_index(self, shard: int) -> ShardIndex:
        """Return the index of a shard by its position in the manifest.

        Raises:
            ChecksumError: The index differs from what the manifest says.
            FormatError: It is the index of another shard.
        """
        return self._indexes.shard(shard)

    @property
    def index(self) -> DatasetIndex | None:
        """The indexes of all shards, once they are collected, else None."""
        return self._indexes.collected

    def collect_indexes(self) -> None:
        """Open the indexes of all shards at once, if there are many; for a reader of many samples.

        They are collected in a file that the processes of this machine share (`DatasetIndex`). Where that is
        impossible, each index is opened when it is first needed.
        """
        self._indexes.collect()

    def sample_fields(self, row: int) -> tuple[str, list[FieldLocation]]:
        """Return the path of a sample's shard, and its fields in the order of the tar.

        Args:
            row: Row in the samples table.

        Raises:
            ChecksumError: The index or the table is damaged.
            FormatError: Samples table and index disagree.
        """
        shard = int(self.studies.gather("shard", row))
        row_in_shard = int(self.studies.gather("row_in_shard", row))
        if shard >= len(self.manifest.shards):
            raise FormatError(
                f"a sample's shard must be one of the manifest, got {shard} (samples row {row})."
            )
        index = self.shard_index(shard)
        if row_in_shard >= index.num_samples or index.sample_key(row_in_shard) != self.studies.sample_key(
            row
        ):
            raise FormatError(
                f"samples table and index must name the same sample, got two ({index.shard}, row "
                f"{row_in_shard}); run `shardflow verify`."
            )
        return self.manifest.shards[shard].path, index.fields(row_in_shard)

    def read_fields(self, row: int, names: Iterable[str] | None = None) -> dict[str, bytes]:
        """Read fields of a sample, checked.

        Args:
            row: Row in the samples table.
            names: The fields to read, slices of series in bricks among them, see `slice_names`; all that are
                stored if not given.

        Returns:
            The bytes of each field, in the order of the tar.

        Raises:
            ChecksumError: A field's bytes differ from their crc32c.
            FormatError: The sample has no such field, or its index cannot be trusted.
            ShortReadError: The shard ends early.
        """
        path, fields = self.sample_fields(row)
        of_bricks: dict[str, bytes] = {}
        if names is not None:
            wanted = set(names)
            missing = wanted - {field.name for field in fields}
            if missing:
                of_bricks = self._slices_of_bricks(row, missing)
                missing -= of_bricks.keys()
                wanted -= of_bricks.keys()
            if missing:
                raise FormatError(
                    f"a sample must have the field {min(missing)!a}, got none (samples row {row})."
                )
            fields = [field for field in fields if field.name in wanted]
        buffers = [bytearray(field.num_bytes) for field in fields]
        ranges = [ByteRange(field.offset, field.num_bytes) for field in fields]
        self.store.read_ranges(path, ranges, [memoryview(buffer) for buffer in buffers])
        for field, span, buffer in zip(fields, ranges, buffers, strict=True):
            if isinstance(self.store, CachedStore) and crc32c(memoryview(buffer)) != field.crc32c:
                read_afresh(self.store, path, [span], [memoryview(buffer)])
            check_field_bytes(field, memoryview(buffer), path=path, sample_key=self.studies.sample_key(row))
        return {field.name: bytes(buffer) for field, buffer in zip(fields, buffers, strict=True)} | of_bricks

    def slice_names(self, row: int, series: int) -> list[str]:
        """Return what `read_fields` calls the slices of a series, in geometric order; empty without any.

        Of several codecs it is the one that a loader takes. A series in bricks has names of codec ``npy``.

        Args:
            row: Row in the samples table.
            series: Number of the series.
        """
        _, fields = self.sample_fields(row)
        found: dict[int, tuple[int, str]] = {}
        for field in fields:
            part = parse_slice_field(field.name)
            rank = None if part is None or part.series != series else codec_rank(part.codec)
            if part is not None and rank is not None:
                ranked = (rank, field.name)
                found[part.index] = min(ranked, found.get(part.index, ranked))
        volume = None if found else self.volume(row, series)
        if volume is not None:
            return [slice_field(series, index, "npy") for index in range(volume.shape[0])]
        return [found[index][1] for index in sorted(found)]

    def volume(self, row: int, series: int, region: int | None = None) -> BrickVolume | None:
        """Return where the bricks of a series are; None where it is stored in slices.

        Args:
            row: Row in the samples table.
            series: Number of the series.
            region: Number of the region that a volume of masks is named after, for that in place of the
                series.
        """
        index, fields = self._volume_fields(row, region)
        return index.volume(fields[series]) if series in fields else None

    def volumes(self, row: int) -> dict[int, BrickVolume]:
        """Return where the bricks of each series of a sample are that is not stored in slices."""
        index, fields = self._volume_fields(row)
        return {series: index.volume(field) for series, field in fields.items()}

    def _volume_fields(self, row: int, region: int | None = None) -> tuple[ShardIndex, dict[int, int]]:
        """Return the index of a sample's shard, and the fields of its volumes by their series."""
        index = self.shard_index(int(self.studies.gather("shard", row)))
        return index, index.volumes_of(int(self.studies.gather("row_in_shard", row)), region)

    def read_volume(
        self, row: int, series: int, start: Sequence[int] = (0, 0, 0), stop: Sequence[int] | None = None
    ) -> NDArray[Any]:
        """Read a region of a series in bricks, checked.

        Args:
            row: Row in the samples table.
            series: Number of the series.
            start: First slice, row and column.
            stop: Those after the last; by default those of the volume.

        Returns:
            ``stop - start`` voxels in the stored dtype and unit.

        Raises:
            FormatError: The series is not stored in bricks, or a brick cannot be decoded.
            ChecksumError: A brick has other bytes than its index says.
            ShortReadError: The shard ends early.
        """
        volume = self.volume(row, series)
        if volume is None:
            raise FormatError(
                f"series {series} of sample {self.studies.sample_key(row)} must be stored in bricks, and is "
                "not; read its slices."
            )
        return self._read_region(row, volume, start, volume.shape if stop is None else stop)

    def read_masks(self, row: int, series: int, region: int, slices: slice = slice(None)) -> NDArray[Any]:
        """Read slices of a volume of masks in bricks, checked; docs/format.md, section 20, has its values.

        Args:
            row: Row in the samples table.
            series: Number of the series.
            region: Number of the region that the volume is named after.
            slices: Which slices.

        Returns:
            ``(slices, rows, columns)`` uint8 or uint16.

        Raises:
            FormatError: There is no such volume, or a brick cannot be decoded.
            ChecksumError: A brick has other bytes than its index says.
            ShortReadError: The shard ends early.
        """
        volume = self.volume(row, series, region)
        if volume is None:
            key = self.studies.sample_key(row)
            raise FormatError(
                f"{volume_field(series, region)} of sample {key} must be stored; run `shardflow verify`."
            )
        first, stop, _ = slices.indices(volume.shape[0])
        return self._read_region(row, volume, (first, 0, 0), (stop, *volume.shape[1:]))

    def _read_region(
        self, row: int, volume: BrickVolume, start: Sequence[int], stop: Sequence[int]
    ) -> NDArray[Any]:
        path, _ = self.sample_fields(row)
        plan = volume.plan(start, stop)
        found = np.empty(plan.shape, volume.dtype)
        try:
            plan.decode(plan.read(self.store, path), found)
        except ChecksumError:
            if not isinstance(self.store, CachedStore):
                raise
            plan.decode(plan.read(self.store, path, afresh=True), found)
        return found

    def _slices_of_bricks(self, row: int, names: Iterable[str]) -> dict[str, bytes]:
        """Read slices of series in bricks, each layer of bricks once; other names are left out."""
        parsed = [part for part in map(parse_slice_field, names) if part is not None and part.codec == "npy"]
        layers: dict[tuple[int, int], tuple[BrickVolume, list[int]]] = {}
        volumes = {series: self.volume(row, series) for series in {part.series for part in parsed}}
        for part in parsed:
            volume = volumes[part.series]
            if volume is not None and part.index < volume.shape[0]:
                layer = part.series, part.index // volume.brick_shape[0]
                layers.setdefault(layer, (volume, []))[1].append(part.index)
        found = {}
        for (series, _), (volume, indexes) in sorted(layers.items()):
            first, last = min(indexes), max(indexes)
            slab = self.read_volume(row, series, (first, 0, 0), (last + 1, *volume.shape[1:]))
            for index in sorted(indexes):
                found[slice_field(series, index, "npy")] = encode_array("npy", slab[index - first])
        return found


def _not_covered() -> ConfigError:
    return ConfigError(
        "tables= has folders outside the dataset, which its signature does not cover; attach the tables to "
        "the dataset and sign it again, or leave signed_by out."
    )


def _located(store: ByteStore, manifest: Manifest) -> ByteStore:
    """Return a store that also finds foreign shards; a cache stays in front of it."""
    if not isinstance(store, CachedStore):
        return located(store, [manifest])
    origin = located(store.origin, [manifest])
    return store if origin is store.origin else CachedStore(origin, store.cache)


def check_field_bytes(field: FieldLocation, payload: memoryview, *, path: str, sample_key: str) -> None:
    """Compare a field's bytes with the crc32c of its index.

    Raises:
        ChecksumError: They differ; the message names shard, sample and field.
    """
    found = crc32c(payload)
    if found != field.crc32c:
        raise ChecksumError(
            f"{path} must hold crc32c {field.crc32c:08x} for {sample_key}.{field.name}, got {found:08x} "
            f"(offset {field.offset}); run `shardflow verify` and fetch the shard again."
        )
