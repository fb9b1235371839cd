"""Index of foreign tars: reads each tar once and writes a dataset folder that points at them.

Members are grouped into samples as webdataset does it; members that it would split or mix are refused or
repaired, as the options say. Nothing is copied. The result depends on the tars, their order and the options
alone, so a killed run is started again and produces identical bytes.

Only the tars being read have their samples in memory. The index of each goes to a folder for temporary files
until all keys are known to be different, since a refused run must leave nothing behind; per sample some 20
bytes are held, and 20 for each class.
"""

from __future__ import annotations

import os
import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from shardflow._version import __version__
from shardflow.errors import AlreadyExistsError, ConfigError, FormatError, StorageError, naming_os_errors
from shardflow.format.contents.pictures import HEAD_NUM_BYTES, image_header
from shardflow.format.foreign.places import (
    LOCATIONS_VERSION,
    ImageFacts,
    join_images,
    plain_images,
    split_location,
)
from shardflow.format.foreign.scan import (
    FOREIGN_FIELD_PATTERN,
    FOREIGN_KEY_NUM_BYTES,
    TarMember,
    foreign_sample_key,
    is_meta,
    scan_tar,
    split_member,
)
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.keys import SPLIT_PATTERN, Json, canonical_json, sha256_hex, shard_name
from shardflow.format.manifest import FileEntry, Manifest, ShardEntry, commit, versions
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.samples import IMAGE_KINDS, key_hashes, repeated_hashes
from shardflow.format.shard_files import write_samples
from shardflow.format.table import Table, encode_table
from shardflow.format.tables import COLUMN_NAME, StoredColumn, write_table
from shardflow.format.tar import HashedStream
from shardflow.storage import ByteStore, LocalStore, open_store

_MAX_KEY_BYTES = 4096
_MAX_MEMBER_NAMES = 1000
# A remote store answers a window of this with several requests side by side.
_WINDOW_BYTES = 16 << 20
_PIECE_BYTES: Final = 4 << 20
CLASSES_TABLE: Final = "members"
"""Name of the attached table of the integers of ``cls`` fields."""
_CLASS: Final = re.compile(rb"\s*([+-]?\d{1,18})\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexOptions:
    """Options that decide the result, beside the tars.

    Raises:
        ConfigError: The text field is no field name.
    """

    interleaved: Literal["refuse", "repair"] = "refuse"
    """A sample whose members do not follow each other. ``repair``: they form one sample nevertheless."""
    duplicate_keys: Literal["refuse", "rename"] = "refuse"
    """A key that a second sample has. ``rename``: the second one gets a sample key of its own."""
    other_members: Literal["refuse", "skip"] = "refuse"
    """Members whose field is not of ``[a-z0-9_@+-]`` and dots. ``skip``: they are left out."""
    text_field: str = "txt"
    """The field whose size is a sample's ``text_bytes``, and which the loader gives as its text."""

    def __post_init__(self) -> None:
        if not FOREIGN_FIELD_PATTERN.fullmatch(self.text_field):
            raise ConfigError("the text field must be a field name such as txt, got another; correct it.")

    def digest(self) -> str:
        """Return the digest of the options, for the manifest."""
        return sha256_hex(canonical_json({"foreign": LOCATIONS_VERSION, **asdict(self)}))


@dataclass(slots=True)
class ForeignSample:
    """A sample under way: its fields in the order of the tar."""

    key: bytes
    fields: dict[str, FieldLocation] = field(default_factory=dict)
    rows: int = 0
    """The largest height of its images, in pixels, as their headers tell; 0 without any."""
    columns: int = 0
    classes: dict[str, int | None] = field(default_factory=dict)
    """Integers of its fields that end with ``cls``; None of one that holds none."""


@dataclass(slots=True)
class GroupedShard:
    """The samples of a shard, by their first members."""

    samples: list[ForeignSample] = field(default_factory=list)
    num_skipped: int = 0
    """Regular members that are no fields."""
    num_repaired: int = 0
    """Members that came after those of another sample."""
    images: dict[str, ImageFacts] = field(default_factory=dict)
    """Facts of the images of each member name."""


def group_members(members: Iterable[TarMember], *, shard: str, options: IndexOptions) -> GroupedShard:
    """Group the members of one tar.

    Args:
        members: In the order of the tar.
        shard: What errors call it.
        options: What to do with members that do not fit.

    Raises:
        FormatError: A member does not fit and is refused; the message names shard and member.
    """
    grouped = GroupedShard()
    latest: dict[bytes, ForeignSample] = {}
    current: ForeignSample | None = None
    for member in members:
        parts = None if is_meta(member.name) else split_member(member.name)
        if parts is None:
            grouped.num_skipped += 1
            continue
        key, name = parts
        if len(key) > _MAX_KEY_BYTES:
            raise FormatError(
                f"a key must have at most {_MAX_KEY_BYTES} bytes, got {len(key)} ({shard}, member "
                f"{member.number}); write the shard again with shorter names."
            )
        if not FOREIGN_FIELD_PATTERN.fullmatch(name):
            if options.other_members == "refuse":
                raise _error(
                    shard, member, "a field name of [a-z0-9_@+-] and dots", "another", "--other-members skip"
                )
            grouped.num_skipped += 1
            continue
        sample = latest.get(key)
        if sample is not None and name in sample.fields:
            if options.duplicate_keys == "refuse":
                raise _error(
                    shard,
                    member,
                    "a key and field of its own",
                    "one that was there",
                    "--duplicate-keys rename",
                )
            sample = None
        elif sample is not None and sample is not current:
            if options.interleaved == "refuse":
                raise _error(
                    shard,
                    member,
                    "to follow the others of its sample",
                    "members of another sample between",
                    "--interleaved repair",
                )
            grouped.num_repaired += 1
        if sample is None:
            sample = latest[key] = ForeignSample(key)
            grouped.samples.append(sample)
        current = sample
        sample.fields[name] = FieldLocation(name, member.offset, member.num_bytes, member.crc32c)
        _add_facts(grouped, sample, name, member.head)
    return grouped


def _add_facts(grouped: GroupedShard, sample: ForeignSample, name: str, head: bytes) -> None:
    """Note the integer of a class, and the size and kind of an image."""
    kind = name.rpartition(".")[2]
    if kind == "cls":
        found = _CLASS.fullmatch(head)
        sample.classes[name] = int(found[1]) if found else None
    header = image_header(head) if kind in IMAGE_KINDS else None
    if header is None:
        return
    sample.rows, sample.columns = max(sample.rows, header.rows), max(sample.columns, header.columns)
    join_images([(name, ImageFacts.of(header))], grouped.images)


def _error(shard: str, member: TarMember, expected: str, found: str, option: str) -> FormatError:
    return FormatError(
        f"a member must have {expected}, got {found} ({shard}, member {member.number}); "
        f"write the shard again, or index it with {option}."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignSource:
    """A tar to index: its location, and the split it belongs to."""

    place: str
    """A path or an address."""
    split: str = "train"

    def __post_init__(self) -> None:
        if not SPLIT_PATTERN.fullmatch(self.split):
            raise ConfigError("a split must match [a-z0-9]{1,32}, got another name; correct it.")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexReport:
    """Result of indexing."""

    dataset_id: str
    num_shards: int
    num_samples: int
    num_fields: int
    num_bytes: int
    """Size of the tars."""
    num_skipped: int
    """Members that webdataset skips too, or that the options skip."""
    num_repaired: int
    """Members that were joined to their sample across others."""
    num_renamed: int
    """Samples whose key another one had before."""
    fields: dict[str, int]
    """How many samples have each field."""
    columns: tuple[str, ...]
    """Columns that hold the integers of fields that end with ``cls``, such as ``members.cls``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scanned:
    """One tar after its reading; what grows with its samples are arrays, and its index is in the spool."""

    name: str
    split: str
    location: str
    num_bytes: int
    sha256: str
    num_samples: int
    num_skipped: int
    num_repaired: int
    fields: Counter[str]
    """How many samples have each field."""
    images: dict[str, ImageFacts]
    rows: NDArray[np.uint32]
    """``(num_samples,)``, see `ForeignSample.rows`."""
    columns: NDArray[np.uint32]
    classes: dict[str, tuple[array[int], array[int]]]
    """Samples with an integer in a field that ends with ``cls``, and these integers."""
    unreadable: frozenset[str]
    """Fields that end with ``cls`` and hold something else somewhere."""

    @property
    def index_path(self) -> str:
        return f"shards/{self.name}.idx"


def index_tars(
    sources: Sequence[ForeignSource],
    url: str | os.PathLike[str],
    options: IndexOptions | None = None,
    *,
    num_threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> IndexReport:
    """Index tars and write a dataset that points at them.

    Args:
        sources: The tars; their order is the order of the shards of each split.
        url: Where to write the dataset: manifest, indexes and samples table.
        options: What to do with members that do not fit.
        num_threads: Tars read at once; each holds 16 MiB, and its samples.
        progress: Called with the numbers of tars read and of all tars.

    Raises:
        ConfigError: There are no tars, one is given twice, or the folder already holds a dataset.
        FormatError: A tar cannot be indexed as it is, or no sample is in any.
        StorageError: A tar cannot be read, or the dataset cannot be written.
    """
    options = options or IndexOptions()
    store = open_store(url)
    if versions(store):
        raise ConfigError("OUT must hold no dataset, got one that stands there; name another folder.")
    named = _name_shards(sources)
    shards: list[_Scanned] = []
    with (
        tempfile.TemporaryDirectory(prefix="shardflow-index-") as folder,
        ThreadPoolExecutor(max_workers=num_threads) as pool,
    ):
        spool = Path(folder)
        (spool / "shards").mkdir()
        scans = [pool.submit(_scan, store, source, name, options, spool) for source, name in named]
        try:
            for scan in scans:
                shards.append(scan.result())
                if progress:
                    progress(len(shards), len(scans))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return _write(store, spool, shards, options)


def _name_shards(sources: Sequence[ForeignSource]) -> list[tuple[ForeignSource, str]]:
    if not sources:
        raise ConfigError("TARS must name at least one tar, got none.")
    if len({source.place for source in sources}) < len(sources):
        raise ConfigError("TARS must name each tar once, got one twice.")
    numbers: Counter[str] = Counter()
    named = []
    for source in sorted(sources, key=lambda source: source.split):
        named.append((source, shard_name(source.split, numbers[source.split])))
        numbers[source.split] += 1
    return named


def _scan(store: ByteStore, source: ForeignSource, name: str, options: IndexOptions, spool: Path) -> _Scanned:
    is_local = "://" not in source.place
    place = str(Path(source.place).absolute()) if is_local else source.place
    folder, tar = split_location(place)
    try:
        stream = HashedStream(open_store(folder), tar, window_bytes=_WINDOW_BYTES)
        members = scan_tar(stream, shard=name, head_bytes=HEAD_NUM_BYTES)
        grouped = group_members(members, shard=name, options=options)
        digest = stream.hexdigest()
    except StorageError as error:
        # Its text names the tar, and with it a path of the user's.
        raise type(error)(f"the tar of {name} must be readable: {error.message.replace(tar, 'it')}") from None
    if is_local and isinstance(store, LocalStore):
        place = Path(os.path.relpath(place, store.root)).as_posix()
    samples = grouped.samples
    classes: dict[str, tuple[array[int], array[int]]] = {}
    unreadable = set()
    for row, sample in enumerate(samples):
        for field_name, number in sample.classes.items():
            if number is None:
                unreadable.add(field_name)
            else:
                rows, numbers = classes.setdefault(field_name, (array("I"), array("q")))
                rows.append(row)
                numbers.append(number)
    scanned = _Scanned(
        name=name,
        split=source.split,
        location=place,
        num_bytes=stream.num_bytes,
        sha256=digest,
        num_samples=len(samples),
        num_skipped=grouped.num_skipped,
        num_repaired=grouped.num_repaired,
        fields=Counter(field_name for sample in samples for field_name in sample.fields),
        images=grouped.images,
        rows=np.array([sample.rows for sample in samples], np.uint32),
        columns=np.array([sample.columns for sample in samples], np.uint32),
        classes=classes,
        unreadable=frozenset(unreadable),
    )
    data = ShardIndex.encode_foreign(
        name,
        stream.num_bytes,
        [(foreign_sample_key(sample.key), list(sample.fields.values())) for sample in samples],
        original_keys=[sample.key for sample in samples],
        text_field=options.text_field,
    )
    _keep(spool, scanned, data)
    return scanned


def _keep(spool: Path, shard: _Scanned, data: bytes) -> None:
    with naming_os_errors("keeping an index in the folder for temporary files (TMPDIR)"):
        (spool / shard.index_path).write_bytes(data)


def _kept(spool: Path, shard: _Scanned) -> Table:
    return Table(LocalStore(spool).map(shard.index_path), name=shard.index_path)


def _rename_repeated(spool: Path, shards: Sequence[_Scanned], options: IndexOptions) -> int:
    """Give samples whose key another one had before a key of their own, in the indexes of the spool.

    Returns:
        How many samples were renamed.

    Raises:
        FormatError: There is such a sample, and the options refuse it; or there is no sample at all.
    """
    num_samples = sum(shard.num_samples for shard in shards)
    if not num_samples:
        raise FormatError(
            f"tars must hold samples, got none in {len(shards)}; are their members named KEY.FIELD?"
        )
    repeated = repeated_hashes((_kept(spool, shard).column("sample_key") for shard in shards), num_samples)
    taken: dict[bytes, str] = {}
    num_renamed = 0
    for shard in shards if len(repeated) else ():
        table = _kept(spool, shard)
        columns = {name: table.column(name) for name in table.column_names}
        keys = columns["sample_key"] = columns["sample_key"].copy()
        before = num_renamed
        for row in np.flatnonzero(np.isin(key_hashes(keys), repeated, kind="sort")).tolist():
            key = bytes(keys[row])
            if key not in taken:
                taken[key] = shard.name
                continue
            if options.duplicate_keys == "refuse":
                raise FormatError(
                    f"a key must be of one sample, got the one of sample {row} of {shard.name} in "
                    f"{taken[key]} as well; index with --duplicate-keys rename."
                )
            original = bytes(columns["original_key"][row])
            keys[row] = foreign_sample_key(original, shard=shard.name, occurrence=row).encode()
            num_renamed += 1
        if num_renamed > before:
            _keep(spool, shard, encode_table(columns, table.meta))
    return num_renamed


def _write(store: ByteStore, spool: Path, shards: Sequence[_Scanned], options: IndexOptions) -> IndexReport:
    num_renamed = _rename_repeated(spool, shards, options)
    fields: Counter[str] = Counter()
    entries: list[ShardEntry] = []
    for shard in shards:
        fields.update(shard.fields)
        data = (spool / shard.index_path).read_bytes()
        index = FileEntry(path=shard.index_path, num_bytes=len(data), sha256=sha256_hex(data))
        entry = ShardEntry(
            name=shard.name,
            split=shard.split,
            path=f"shards/{shard.name}.tar",
            num_bytes=shard.num_bytes,
            sha256=shard.sha256,
            index=_put(store, spool, index),
            num_samples=shard.num_samples,
            num_fields=shard.fields.total(),
        )
        entries.append(entry)
    samples = write_samples(
        spool,
        "samples/samples-000001.tbl",
        entries,
        key_num_bytes=FOREIGN_KEY_NUM_BYTES,
        given={
            "rows": np.concatenate([shard.rows for shard in shards]),
            "columns": np.concatenate([shard.columns for shard in shards]),
        },
    )
    if samples.blocks is not None:
        _put(store, spool, samples.blocks)
    num_fields = fields.total()
    num_skipped = sum(shard.num_skipped for shard in shards)
    manifest = Manifest(
        manifest_version=1,
        shards=tuple(entries),
        samples=_put(store, spool, samples.table),
        counts=OutcomeCounts(packed=num_fields, skipped=num_skipped, quarantined=0),
        created_with={"shardflow": __version__},
        config_digest=options.digest(),
        extra={
            "foreign": {
                "version": LOCATIONS_VERSION,
                "locations": [shard.location for shard in shards],
                **_member_facts(shards, fields),
            },
            **samples.extra,
        },
    )
    classes = _class_columns(shards)
    if classes:
        # Before the manifest, so that no reader sees the samples without them.
        write_table(store, manifest.dataset_id, CLASSES_TABLE, "study", classes, number=1)
    return IndexReport(
        dataset_id=commit(store, manifest),
        num_shards=len(shards),
        num_samples=sum(shard.num_samples for shard in shards),
        num_fields=num_fields,
        num_bytes=sum(shard.num_bytes for shard in shards),
        num_skipped=num_skipped,
        num_repaired=sum(shard.num_repaired for shard in shards),
        num_renamed=num_renamed,
        fields=dict(sorted(fields.items())),
        columns=tuple(f"{CLASSES_TABLE}.{column.name}" for column in classes),
    )


def _class_columns(shards: Sequence[_Scanned]) -> list[StoredColumn]:
    """Return a column for each field that ends with ``cls`` and holds an integer wherever it is."""
    num_rows = sum(shard.num_samples for shard in shards)
    values: dict[str, NDArray[np.int64]] = {}
    known: dict[str, NDArray[np.bool_]] = {}
    others = {name for shard in shards for name in shard.unreadable}
    start = 0
    for shard in shards:
        for name, (rows, numbers) in shard.classes.items():
            if name not in values and len(values) < _MAX_MEMBER_NAMES:
                values[name], known[name] = np.zeros(num_rows, np.int64), np.zeros(num_rows, bool)
            if name in values:
                at = start + np.asarray(rows)
                values[name][at], known[name][at] = numbers, True
        start += shard.num_samples
    columns: dict[str, StoredColumn] = {}
    for name in sorted(values.keys() - others):
        column = re.sub("[^a-z0-9_]", "_", name)
        if COLUMN_NAME.fullmatch(column) and column not in columns:
            columns[column] = StoredColumn(
                name=column, kind="int", values=values[name], is_missing=~known[name]
            )
    return list(columns.values())


def _member_facts(shards: Sequence[_Scanned], fields: Counter[str]) -> dict[str, Json]:
    """Return what the manifest says of members by their names; nothing where names are as many as samples."""
    if len(fields) > _MAX_MEMBER_NAMES:
        return {}
    images: dict[str, ImageFacts] = {}
    for shard in shards:
        join_images(shard.images.items(), images)
    return {"fields": dict(sorted(fields.items())), "images": plain_images(images)}


def _put(store: ByteStore, spool: Path, entry: FileEntry) -> FileEntry:
    """Put a file of the spool into the dataset."""

    def pieces() -> Iterator[bytes]:
        with (spool / entry.path).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    try:
        store.put_stream(entry.path, pieces(), entry.num_bytes)
    except AlreadyExistsError:
        # A killed run left it, before it wrote the manifest that would name it.
        if HashedStream(store, entry.path).hexdigest() != entry.sha256:
            raise ConfigError(
                f"OUT must hold nothing of another dataset, got {entry.path}; name an empty folder."
            ) from None
    return entry
