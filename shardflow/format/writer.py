"""Dataset writer: tar shards, their indexes, the samples table, and the manifest last.

`ShardWriter` is the public interface. The pieces below it also serve text corpora: a shard that grows on
disk, the cut of a split into shards, and the samples table streamed from the indexes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, StorageError
from shardflow.format.codecs import CODECS, array_header, encode_array
from shardflow.format.index import ShardIndex
from shardflow.format.keys import (
    SPLIT_PATTERN,
    STUDY_FIELD,
    Json,
    check_field,
    check_sample_key,
    parse_slice_field,
    shard_name,
    slice_field,
)
from shardflow.format.manifest import FileEntry, Manifest, ShardEntry, commit
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.samples import COLUMNS, derived_column
from shardflow.format.table import StreamedColumn, Table, crc32c, stream_table
from shardflow.format.tar import BLOCK_NUM_BYTES, END_OF_ARCHIVE, member_header, member_num_bytes, padding
from shardflow.storage import LocalStore, write_atomic

Fields = Sequence[tuple[str, bytes]]
"""Names of fields in ascending order, with their bytes."""

_BUFFER_BYTES: Final = 1 << 20
_MAX_MODALITIES: Final = 255
# The packages whose versions decide the bytes that `ShardWriter` writes.
_PACKAGES: Final = ("blosc2", "imagecodecs", "numpy", "opencv-python-headless", "shardflow")
_DTYPES: Final = {"offset_bytes": "<u8", "num_bytes": "<u8", "modality": "u1"}


class ShardWriter:
    """Writes a dataset from Python, sample by sample; a context manager.

    The dataset appears when the block ends: the manifest is written last, and an exception removes what was
    written before it. The same samples in the same order give the same bytes. Held in memory are the index of
    the open shard of each split and about 100 bytes for each sample.

    A sample is a mapping with a ``__key__`` (1 to 64 of ``a-z`` and ``0-9``) and fields named as in
    docs/format.md, section 4. The last part of a field's name says how its value is stored:

    ============================  ==============================================================
    value                         field
    ============================  ==============================================================
    ``bytes``                     any; stored as they are
    ``str``                       ``*.txt``; stored as UTF-8
    dict or list                  ``*.json``, ``json``; stored as JSON
    array                         ``*.b2nd``, ``*.npy``, ``*.htj2k``, ``*.png16``; one image
    array ``(slices, ...)``       ``sSSS.CODEC``, such as ``s000.b2nd``: all slices of a series
    ============================  ==============================================================

    Fields of a loader (docs/fields.md) deliver slices as images once ``shardflow attach --facts`` has run.
    ``study.json`` may state facts of series that pixels do not, such as ``{"series": [{"modality": "DX",
    "technical": {"view_position": "PA"}}]}``. Names that begin with two underscores are notes of WebDataset
    and are not stored.

    Args:
        path: Folder of the dataset; must be new or empty.
        split: Split of samples that `write` is given without one.
        splits: Parts of each split, such as ``{"train": 90, "val": 10}``, instead of ``split``: a sample goes
            where its group (else its key) falls, whatever else is written.
        target_bytes: A shard is closed before it passes this; a larger sample is alone in one.
        max_samples: A shard is closed when it holds so many samples; None for no limit.

    Attributes:
        dataset_id: Of the dataset; None until it is closed.

    Raises:
        ConfigError: The folder holds something, or a setting is wrong.
        StorageError: The folder cannot be made.

    Example::

        with ShardWriter("chest", splits={"train": 90, "val": 10}) as writer:
            for number, (pixels, report) in enumerate(studies):
                writer.write({"__key__": f"study{number}", "s000.b2nd": pixels, "report.txt": report})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str = "train",
        splits: Mapping[str, int] | None = None,
        target_bytes: int = 512 << 20,
        max_samples: int | None = None,
    ) -> None:
        if target_bytes < 1 or (max_samples is not None and max_samples < 1):
            raise ConfigError("target_bytes and max_samples must be at least 1, got less; correct them.")
        self._parts = {split: 1} if splits is None else dict(splits)
        if min(self._parts.values(), default=0) < 0 or not sum(self._parts.values()):
            raise ConfigError("splits must give parts of at least 0, and some split a part; correct them.")
        for name in self._parts:
            _check_split(name)
        self._root = Path(path).absolute()
        self._target_bytes = target_bytes
        self._max_samples = max_samples
        self._splits: dict[str, _WrittenSplit] = {}
        self._modalities: dict[str, int] = {}
        self._keys: set[str] = set()
        self._is_open = True
        self.dataset_id: str | None = None
        with naming_os_errors("making the folder of a dataset"):
            self._root.mkdir(parents=True, exist_ok=True)
            if any(self._root.iterdir()):
                raise ConfigError(
                    "a dataset must be written into a new or empty folder, got one that holds something; "
                    "name another, or delete what a stopped writer left."
                )
            # Of two writers that find the folder empty one makes this.
            (self._root / "shards").mkdir()

    def write(self, sample: Mapping[str, Any], *, split: str | None = None, group: str | None = None) -> None:
        """Append a sample.

        Args:
            sample: ``__key__`` and fields, see the class.
            split: The split it goes to; as the writer's settings have it if not given.
            group: Name of samples that stay in one split, such as a patient; replaces the key in the choice.

        Raises:
            FormatError: The sample cannot be stored as it is; the writer stays as it was.
            StorageError: It cannot be written.
        """
        if not self._is_open:
            raise ConfigError("a writer must be open for a sample, got a closed one; open another.")
        key = sample.get("__key__")
        if not isinstance(key, str):
            raise FormatError('a sample must have a text as its "__key__", got none; name each sample.')
        check_sample_key(key)
        if key in self._keys:
            raise FormatError(f"each sample must have a key of its own, got {key} twice.")
        fields = encode_fields(sample)
        rows, columns = _check_series(fields)
        modality = _modality(sample)
        if modality not in self._modalities and len(self._modalities) == _MAX_MODALITIES:
            raise FormatError(f"a dataset must have at most {_MAX_MODALITIES} modalities, got more.")
        name = self._split_of(key if group is None else group) if split is None else _check_split(split)
        if name not in self._splits:
            files = SplitFiles(self._root, name, self._target_bytes, self._max_samples)
            self._splits[name] = _WrittenSplit(files)
        written = self._splits[name]
        written.files.add(key, fields)
        written.rows.append(rows)
        written.columns.append(columns)
        written.modality.append(self._modalities.setdefault(modality, len(self._modalities)))
        self._keys.add(key)

    def close(self) -> None:
        """Write what is left, the manifest last; a closed writer stays as it is.

        Raises:
            FormatError: No sample was written.
            StorageError: A file cannot be written; there is no dataset then.
        """
        if self._is_open:
            try:
                self.dataset_id = self._publish()
            except BaseException:
                self.abandon()
                raise
            self._is_open = False

    def abandon(self) -> None:
        """Remove what was written; there is no dataset."""
        self._is_open = False
        for written in self._splits.values():
            written.files.abandon()
        for folder in ("shards", "samples"):
            shutil.rmtree(self._root / folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._is_open:
            self.abandon()

    def _split_of(self, group: str) -> str:
        digest = hashlib.sha256(b"split\0" + group.encode("utf-8", "surrogatepass")).digest()
        position, end = int.from_bytes(digest[:8], "big"), 0
        total = sum(self._parts.values())
        for name, parts in self._parts.items():
            end += parts
            if position * total < end << 64:
                return name
        raise AssertionError  # the position is below the last end

    def _publish(self) -> str:
        if not self._keys:
            raise FormatError("a dataset must hold a sample, got none; write one.")
        splits = [self._splits[name] for name in sorted(self._splits)]
        shards = [shard for written in splits for shard in written.files.close()]
        modalities = sorted(self._modalities)
        places = np.array([modalities.index(name) for name in self._modalities], "u1")
        samples = write_samples(
            self._root,
            "samples/samples-000001.tbl",
            shards,
            key_num_bytes=max(map(len, self._keys)),
            modalities=modalities,
            given={
                "rows": np.concatenate([np.asarray(written.rows) for written in splits]),
                "columns": np.concatenate([np.asarray(written.columns) for written in splits]),
                "modality": places[np.concatenate([np.asarray(written.modality) for written in splits])],
            },
        )
        manifest = Manifest(
            manifest_version=1,
            shards=tuple(shards),
            samples=samples,
            counts=OutcomeCounts(packed=len(self._keys), skipped=0, quarantined=0),
            created_with=package_versions(_PACKAGES),
        )
        return commit(LocalStore(self._root), manifest)


class _WrittenSplit:
    """A split being written: its shards, and the facts of its samples that no index holds."""

    def __init__(self, files: SplitFiles) -> None:
        self.files = files
        self.rows = array("I")
        self.columns = array("I")
        self.modality = array("B")


class SplitFiles:
    """Cuts the samples of one split into shards.

    Args:
        root: Folder of the dataset; shards go into ``shards/`` below it.
        split: The split; its shards are numbered from 0.
        target_bytes: A shard is closed before it passes this; a larger sample is alone in one.
        max_samples: A shard is closed when it holds so many; None for no limit.
    """

    def __init__(self, root: Path, split: str, target_bytes: int, max_samples: int | None = None) -> None:
        self._root = root
        self._split = split
        self._target_bytes = target_bytes
        self._max_samples = max_samples
        self._shard: _OpenShard | None = None
        self._entries: list[ShardEntry] = []

    def add(self, key: str, fields: Fields) -> None:
        """Append a sample.

        Raises:
            FormatError: A name is too long for a tar; nothing is written.
            StorageError: It cannot be written.
        """
        members = [(name, payload, member_header(f"{key}.{name}", len(payload))) for name, payload in fields]
        num_bytes = sum(member_num_bytes(len(payload)) for _, payload in fields)
        shard = self._shard
        if shard is not None and (
            shard.num_bytes + num_bytes > self._target_bytes or shard.num_samples == self._max_samples
        ):
            self._end()
        if self._shard is None:
            self._shard = _OpenShard(self._root, self._split, len(self._entries))
        self._shard.add(key, members)

    def close(self) -> list[ShardEntry]:
        """End the last shard; return all of them.

        Raises:
            StorageError: It cannot be written.
        """
        self._end()
        return self._entries

    def abandon(self) -> None:
        """Close what is open and remove it."""
        if self._shard is not None:
            self._shard.abandon()
            self._shard = None

    def _end(self) -> None:
        if self._shard is not None:
            self._entries.append(self._shard.close())
            self._shard = None


class _OpenShard:
    """A shard being written: members go to disk as they come, the columns of the index stay in memory."""

    def __init__(self, root: Path, split: str, number: int) -> None:
        self._root = root
        self._split = split
        self._name = shard_name(split, number)
        self._path = root / "shards" / f"{self._name}.tar"
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.tmp")
        self.num_bytes = 0
        with naming_os_errors("writing a shard"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("xb", buffering=0)
        self._sha256 = hashlib.sha256()
        self._buffer: list[bytes] = []
        self._num_buffered = 0
        self._keys: list[bytes] = []
        self._num_fields = array("I")
        self._names: dict[str, int] = {}
        self._field_name = array("I")
        self._offsets = array("Q")
        self._sizes = array("Q")
        self._crcs = array("I")

    @property
    def num_samples(self) -> int:
        return len(self._keys)

    def add(self, key: str, members: Sequence[tuple[str, bytes, bytes]]) -> None:
        """Append a sample: name, payload and header of each member."""
        for name, payload, header in members:
            size = len(payload)
            self._buffer += (header, payload, padding(size))
            self._field_name.append(self._names.setdefault(name, len(self._names)))
            self._offsets.append(self.num_bytes + BLOCK_NUM_BYTES)
            self._sizes.append(size)
            self._crcs.append(crc32c(payload))
            num_bytes = member_num_bytes(size)
            self.num_bytes += num_bytes
            self._num_buffered += num_bytes
        self._keys.append(key.encode("ascii"))
        self._num_fields.append(len(members))
        if self._num_buffered >= _BUFFER_BYTES:
            self._flush()

    def close(self) -> ShardEntry:
        """End the tar and write its index; both are on the disk then."""
        self._buffer.append(END_OF_ARCHIVE)
        self.num_bytes += len(END_OF_ARCHIVE)
        self._flush()
        with naming_os_errors("writing a shard"):
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self._path)
        names = sorted(self._names)
        position = np.empty(len(names), "<u4")
        position[[self._names[name] for name in names]] = np.arange(len(names))
        columns = {
            "sample_key": np.array(self._keys, "S"),
            "sample_first_field": np.cumsum([0, *self._num_fields]).astype("<u4"),
            "field_name": position[np.asarray(self._field_name)],
            "field_offset": np.asarray(self._offsets, "<u8"),
            "field_num_bytes": np.asarray(self._sizes, "<u8"),
            "field_crc32c": np.asarray(self._crcs, "<u4"),
        }
        index = ShardIndex.encode_columns(self._name, self.num_bytes, names, columns)
        # Syncs the folder, and with it the name of the tar.
        entry = write_file(self._root, f"shards/{self._name}.idx", [index])
        return ShardEntry(
            name=self._name,
            split=self._split,
            path=f"shards/{self._name}.tar",
            num_bytes=self.num_bytes,
            sha256=self._sha256.hexdigest(),
            index=entry,
            num_samples=len(self._keys),
            num_fields=len(self._offsets),
        )

    def abandon(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        data = memoryview(b"".join(self._buffer))
        self._buffer.clear()
        self._num_buffered = 0
        self._sha256.update(data)
        with naming_os_errors("writing a shard"):
            while data:
                data = data[self._file.write(data) :]


def encode_fields(sample: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Encode the fields of a sample, in the order of a shard; see `ShardWriter` for values and names.

    Raises:
        FormatError: A name or a value is none that can be stored.
    """
    fields: dict[str, bytes] = {}
    for name, value in sample.items():
        if name.startswith("__"):
            continue
        check_field(name)
        for stored, payload in _encoded(name, value):
            if stored in fields:
                raise FormatError(f"a sample must have each field once, got {stored} twice.")
            fields[stored] = payload
    if not fields:
        raise FormatError("a sample must have a field beside its __key__, got none.")
    return sorted(fields.items())


def _encoded(name: str, value: Any) -> Iterator[tuple[str, bytes]]:
    head, _, kind = name.rpartition(".")
    if isinstance(value, (bytes, bytearray, memoryview)):
        yield name, bytes(value)
    elif isinstance(value, str) and kind == "txt":
        try:
            yield name, value.encode("utf-8")
        except UnicodeEncodeError:
            raise FormatError(f"a text must be Unicode without lone surrogates ({name}).") from None
    elif isinstance(value, (dict, list)) and kind == "json":
        try:
            text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(
                f"a value must be one that JSON holds, got {type(error).__name__} ({name})."
            ) from None
        yield name, text.encode("ascii")
    elif isinstance(value, np.ndarray) and kind in CODECS:
        if parse_slice_field(f"{head}.i0000.{kind}") is None:
            yield name, encode_array(kind, value)
        else:
            for index, plane in enumerate(value):
                yield slice_field(int(head[1:]), index, kind), encode_array(kind, plane)
    else:
        raise FormatError(
            f"a field must be bytes, a str in .txt, a dict or list in .json, or an array in "
            f"{', '.join(f'.{codec}' for codec in CODECS)}, got a {type(value).__name__} in {name}; rename "
            "the field, or encode its value to bytes."
        )


def _check_series(fields: Fields) -> tuple[int, int]:
    """Return rows and columns of the primary series, 0 without one; refuse series that no reader expects.

    Raises:
        FormatError: Series or slices are not numbered from 0, or slices of a series differ in form.
    """
    forms: dict[int, set[tuple[str, tuple[int, ...], np.dtype[Any]]]] = {}
    numbers: dict[int, list[int]] = {}
    for name, payload in fields:
        part = parse_slice_field(name)
        if part is not None and part.codec in CODECS:
            form = (part.codec, *array_header(part.codec, payload))
            forms.setdefault(part.series, set()).add(form)
            numbers.setdefault(part.series, []).append(part.index)
    for place, series in enumerate(sorted(numbers)):
        if series != place or sorted(numbers[series]) != list(range(len(numbers[series]))):
            raise FormatError("series and their slices must be numbered from 0 without gaps, got others.")
        if len(forms[series]) > 1:
            raise FormatError(
                f"slices of a series must have one shape, dtype and codec, got others (s{series:03d})."
            )
    if not forms:
        return 0, 0
    ((_, (rows, columns, *_), _),) = forms[0]
    return rows, columns


def _modality(sample: Mapping[str, Any]) -> str:
    """Return the modality of the primary series, as ``study.json`` has it."""
    study: Any = sample.get(STUDY_FIELD)
    with suppress(LookupError, TypeError, ValueError, RecursionError):
        if isinstance(study, (bytes, bytearray)):
            study = json.loads(study)
        modality = study["series"][0]["modality"]
        return modality if isinstance(modality, str) else ""
    return ""


def _check_split(split: str) -> str:
    if not SPLIT_PATTERN.fullmatch(split):
        raise ConfigError("a split's name must be 1 to 32 of [a-z0-9], got another; rename it.")
    return split


def link_shard(source: Path, entry: str, root: Path, name: str) -> FileEntry:
    """Link a finished shard into a dataset under a new name.

    Args:
        source: The folder it was written to.
        entry: Its name there.
        root: Folder of the dataset, on the same file system.
        name: Its new name; an existing file of that name is replaced.

    Returns:
        Its new index.

    Raises:
        StorageError: A file cannot be written.
        ChecksumError: The index is damaged.
    """
    tar, target = source / "shards" / f"{entry}.tar", root / "shards" / f"{name}.tar"
    with naming_os_errors("putting a shard into its place"):
        target.parent.mkdir(exist_ok=True)
        if not (target.exists() and target.samefile(tar)):
            target.unlink(missing_ok=True)
            os.link(tar, target)
    table = Table(LocalStore(source).map(f"shards/{entry}.idx"), name="the index of a part")
    columns = {column: table.column(column) for column in table.column_names}
    meta = table.meta
    index = ShardIndex.encode_columns(name, meta["shard_num_bytes"], meta["field_names"], columns)
    # Syncs the folder, and with it the name of the tar.
    return write_file(root, f"shards/{name}.idx", [index])


def write_samples(
    root: Path,
    path: str,
    shards: Sequence[ShardEntry],
    *,
    key_num_bytes: int,
    modalities: Sequence[str] = ("",),
    given: Mapping[str, NDArray[Any]] | None = None,
) -> FileEntry:
    """Write the samples table as a stream over the indexes of all shards.

    Args:
        root: Folder of the dataset, where the indexes are.
        path: Of the table.
        shards: In the order of the manifest.
        key_num_bytes: Length of the longest sample key.
        modalities: Names that the column ``modality`` points into.
        given: Columns that no index determines (rows, columns, modality), all rows of each; zeros if not
            given.

    Raises:
        StorageError: It cannot be written.
        FormatError: An index cannot be trusted.
    """
    store = LocalStore(root)
    num_rows = sum(shard.num_samples for shard in shards)
    splits: dict[str, list[int]] = {}
    row = 0
    for shard in shards:
        span = splits.setdefault(shard.split, [row, row])
        row = span[1] = row + shard.num_samples

    def pieces(name: str) -> Iterator[NDArray[Any]]:
        start = 0
        for number, shard in enumerate(shards):
            stop = start + shard.num_samples
            if name == "shard":
                yield np.full(shard.num_samples, number)
            elif name in ("rows", "columns", "modality"):
                yield np.zeros(shard.num_samples, "u1") if given is None else given[name][start:stop]
            else:
                index = shard.index.path
                yield derived_column(ShardIndex(Table(store.map(index), name=index)), name)
            start = stop

    dtypes = {"sample_key": f"S{key_num_bytes}", **_DTYPES}
    columns = [
        StreamedColumn(
            name=name, dtype=np.dtype(dtypes.get(name, "<u4")), shape=(num_rows,), pieces=pieces(name)
        )
        for name in COLUMNS
    ]
    meta: dict[str, Json] = {
        "kind": "samples",
        "format_version": 1,
        "splits": splits,
        "modalities": list(modalities),
    }
    return write_file(root, path, stream_table(columns, meta))


def write_file(root: Path, path: str, pieces: Iterable[bytes]) -> FileEntry:
    """Write a file of a dataset from its pieces, and return what a manifest says of it.

    Raises:
        StorageError: It cannot be written.
    """
    sha256, num_bytes = hashlib.sha256(), 0

    def counted() -> Iterator[bytes]:
        nonlocal num_bytes
        for piece in pieces:
            sha256.update(piece)
            num_bytes += len(piece)
            yield piece

    write_atomic(root / path, counted(), replace=True)
    return FileEntry(path=path, num_bytes=num_bytes, sha256=sha256.hexdigest())


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed ones of some packages, for a manifest's ``created_with``."""
    found: dict[str, str] = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@contextmanager
def naming_os_errors(action: str) -> Iterator[None]:
    """Turn errors of the operating system into `StorageError` without a path, which may name a person."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        raise StorageError(
            f"{action} must succeed, got: {reason}; make room or repair it, and run the job again."
        ) from None
