"""Shards of a large manifest as a table that the processes of a node share.

The manifest of 10^5 shards is 35 MB of JSON: parsing it whole takes seconds of CPU, and its entries take
140 MB. So the first process of a node that opens such a dataset reads its entries from the stream of its
bytes, checks them, and writes them as columns to a node file named by the SHA-256 of those bytes; the others
digest the bytes and map the columns. An entry is made when it is asked for.

An entry as every writer of the format makes it is matched by one pattern, which is also the check that its
bytes are canonical. A manifest with anything else is parsed whole, and that says what is wrong with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, ManifestError, ShardflowError
from shardflow.format.keys import Json, canonical_json
from shardflow.format.manifest import (
    BRICKS_FORMAT_VERSION,
    FORMAT,
    FORMAT_VERSION,
    CheckedShards,
    FileEntry,
    Manifest,
    ShardEntry,
    ShardPlace,
    check_size,
    latest_version,
    load,
    manifest_path,
)
from shardflow.format.samples import repeated_key
from shardflow.format.table import StreamedColumn, Table, stream_table
from shardflow.storage import ByteStore, LocalStore
from shardflow.storage.node_files import named_bytes, node_file, object_pieces

MIN_SHARED_BYTES = 4 << 20
"""Size from which a manifest is shared; it has some 12,000 shards."""
_KIND: Final = "manifest-shards"
_KIND_VERSION: Final = 1
_BLOCK: Final = 4096
_PIECE_NUM_BYTES: Final = 1 << 20
_COLUMNS: Final = {
    "name": "S",
    "split": "<u4",
    "path": "S",
    "num_bytes": "<u8",
    "sha256": "S64",
    "index_path": "S",
    "index_num_bytes": "<u8",
    "index_sha256": "S64",
    "num_samples": "<u8",
    "num_fields": "<u8",
    "num_removed": "<u8",
    "num_volumes": "<u8",
}
"""The columns of the node file; ``split`` is a position in the sorted names."""
_COUNT: Final = rb"(0|[1-9][0-9]{0,17})"
_PATH: Final = rb'"path":"([A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*)"'
_FILE: Final = rb'"num_bytes":' + _COUNT + b"," + _PATH + rb',"sha256":"([0-9a-f]{64})"'
_ENTRY: Final = re.compile(
    rb'((?:,|(?<=\[))\{"index":\{'
    + _FILE
    + rb'\},"name":"([a-z0-9]+(?:-[a-z0-9]+)*)","num_bytes":'
    + _COUNT
    # A count that is 0 is left out.
    + rb',"num_fields":'
    + _COUNT
    + rb'(?:,"num_removed":([1-9][0-9]{0,17}))?,"num_samples":'
    + _COUNT
    + rb'(?:,"num_volumes":([1-9][0-9]{0,17}))?,'
    + _PATH
    + rb',"sha256":"([0-9a-f]{64})","split":"([a-z0-9]{1,32})"\})'
)
"""One entry of ``shards``, with the comma before it; what it finds are itself and `_MATCHED`."""
_MATCHED: Final = (
    *("index_num_bytes", "index_path", "index_sha256", "name", "num_bytes", "num_fields", "num_removed"),
    *("num_samples", "num_volumes", "path", "sha256", "split"),
)
_SHARDS: Final = b',"shards":[{'
_BEFORE_ENTRY: Final = len(_SHARDS) - 1
_TAIL: Final = b'],"splits":{'
_MAX_REST_NUM_BYTES: Final = 64 << 10
"""More than an entry, or than the end of a manifest; what is longer is none of this form."""
_MAX_HEAD_NUM_BYTES: Final = 8 << 20
_MAX_PLACES: Final = 16
"""Of ``shards`` that are tried: each one is a parse of all that precedes it."""
_Block: TypeAlias = dict[str, NDArray[Any]]
_Entry = TypeVar("_Entry", FileEntry, ShardEntry)
logger = logging.getLogger(__name__)


def load_shared(store: ByteStore, version: int | None = None) -> Manifest:
    """Load a version of the dataset in a store, see `shardflow.format.manifest.load`.

    Raises:
        ManifestError: There is no such manifest, or it cannot be trusted.
        StorageError: Reading failed.
    """
    number = latest_version(store) if version is None else version
    path = manifest_path(number)
    try:
        num_bytes = store.size(path)
        check_size(num_bytes)
        if num_bytes < MIN_SHARED_BYTES:
            return load(store, number, num_bytes=num_bytes)
        digest = hashlib.sha256()
        for piece in object_pieces(store, path, num_bytes, _PIECE_NUM_BYTES):
            digest.update(piece)
        name = f"manifest-{digest.hexdigest()}.tbl"

        def make(_: Path) -> Iterator[bytes]:
            # The bytes that were digested, though the file may be another one now.
            found = _streamed(object_pieces(store, path, num_bytes, _PIECE_NUM_BYTES), digest.hexdigest())
            if found is None:
                data = named_bytes(store, path, sha256=digest.hexdigest(), num_bytes=num_bytes)
                try:
                    found = _parsed(Manifest.parse(data))
                except ManifestError as error:
                    raise ManifestError(f"{path}: {error.message}") from None
            return found.encoded(digest.hexdigest())

        place = node_file(name, make)
        try:
            return SharedShards(place).manifest(digest.hexdigest(), number)
        except (FormatError, KeyError, TypeError, ValueError):
            place.unlink(missing_ok=True)  # the next process makes it again
            raise
    except ManifestError:
        raise
    except (ShardflowError, KeyError, TypeError, ValueError, OverflowError) as error:
        logger.warning("The manifest is parsed by each process, which is slower: %s", error)
        return load(store, number)


@dataclass(slots=True)
class _Shards:
    """The shards of a manifest as columns in blocks, and what else it says."""

    blocks: list[_Block] = field(default_factory=list)
    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    """Numbers of samples and shards of each, in the order in which they come."""
    body: dict[str, Json] = field(default_factory=dict)
    """The other entries, without the digest."""
    dataset_id: str = ""

    def add(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Append a block of entries: the values of each column, or the bytes of them."""
        block = {
            name: _numbers(values[name]) if dtype == "<u8" else _texts(values[name])
            for name, dtype in _COLUMNS.items()
            if name != "split"
        }
        found = _texts(values["split"])
        numbers = np.empty(len(found), "<u4")
        for split in sorted(set(found.tolist())):
            counts = self.splits.setdefault(split.decode("ascii"), {"num_samples": 0, "num_shards": 0})
            here = found == split
            numbers[here] = list(self.splits).index(split.decode("ascii"))
            kept = block["num_samples"][here] - block["num_removed"][here]
            counts["num_samples"] += sum(kept.tolist())
            counts["num_shards"] += int(here.sum())
        self.blocks.append(block | {"split": numbers})

    def is_valid(self) -> bool:
        """Tell whether the entries are those of a manifest, and fit what else it says."""
        removed = ((block["num_removed"], block["num_samples"]) for block in self.blocks)
        if any(((some > 0) & (some >= samples)).any() for some, samples in removed):
            return False
        has_volumes = any(block["num_volumes"].any() for block in self.blocks)
        try:
            manifest = Manifest.checked(self.body, (), self.dataset_id)
            others = np.array([entry.path for entry in manifest.files()], "S")
        except (ManifestError, KeyError, TypeError, AttributeError, UnicodeEncodeError):
            return False
        expected = {
            **manifest.body_without_shards(),
            "format_version": BRICKS_FORMAT_VERSION if has_volumes else FORMAT_VERSION,
            "splits": self.splits,
        }
        num_shards = sum(len(block["split"]) for block in self.blocks)

        def names() -> Iterator[NDArray[np.bytes_]]:
            return (block["name"] for block in self.blocks)

        def paths() -> Iterator[NDArray[np.bytes_]]:
            yield others
            for block in self.blocks:
                yield block["path"]
                yield block["index_path"]

        return (
            expected == self.body
            and self.body["format"] == FORMAT
            and repeated_key(names, num_shards) is None
            and repeated_key(paths, len(others) + 2 * num_shards) is None
        )

    def encoded(self, file_sha256: str) -> Iterator[bytes]:
        """Yield the node file."""
        splits = sorted(self.splits)
        places = np.array([splits.index(split) for split in self.splits], "<u4")
        num_rows = sum(len(block["split"]) for block in self.blocks)

        def pieces(name: str) -> Iterator[NDArray[Any]]:
            for block in self.blocks:
                yield places[block["split"]] if name == "split" else block[name]

        columns = [
            StreamedColumn(
                name=name,
                dtype=max((block[name].dtype for block in self.blocks), key=lambda dtype: dtype.itemsize),
                shape=(num_rows,),
                pieces=pieces(name),
            )
            for name in _COLUMNS
        ]
        meta: dict[str, Json] = {
            "kind": _KIND,
            "format_version": _KIND_VERSION,
            "file_sha256": file_sha256,
            "dataset_id": self.dataset_id,
            "splits": splits,
            "body": self.body,
        }
        return stream_table(columns, meta)


def _numbers(values: Sequence[int | bytes]) -> NDArray[np.uint64]:
    if b"" in values:  # the count is left out
        values = [value or 0 for value in values]
    return np.fromiter(map(int, values), "<u8", len(values))


def _texts(values: Sequence[str | bytes]) -> NDArray[np.bytes_]:
    if isinstance(values[0], bytes) and len(set(map(len, values))) == 1:
        return np.frombuffer(b"".join(values), f"S{len(values[0])}")  # type: ignore[arg-type]  # all are bytes
    return np.array(values, "S")


def _parsed(manifest: Manifest) -> _Shards:
    """Return the shards of a manifest that was parsed whole."""
    found = _Shards(body=manifest.body_without_shards(), dataset_id=manifest.dataset_id)
    for start in range(0, len(manifest.shards), _BLOCK):
        shards = manifest.shards[start : start + _BLOCK]
        values: dict[str, list[Any]] = {
            "index_path": [shard.index.path for shard in shards],
            "index_num_bytes": [shard.index.num_bytes for shard in shards],
            "index_sha256": [shard.index.sha256 for shard in shards],
        }
        found.add({name: values.get(name) or [getattr(one, name) for one in shards] for name in _COLUMNS})
    return found


def _streamed(pieces: Iterable[bytes | memoryview], file_sha256: str) -> _Shards | None:
    """Read a manifest from its bytes in pieces; None where only parsing it whole can judge it."""
    whole, own = hashlib.sha256(), hashlib.sha256()
    found, head, rest, at = _Shards(), None, b"", _BEFORE_ENTRY
    for piece in pieces:
        whole.update(piece)
        rest += piece
        if head is None:
            place = _head(rest)
            if place is None:
                if len(rest) > _MAX_HEAD_NUM_BYTES:
                    return None
                continue
            head, found.body = place
            found.dataset_id = str(found.body.pop("digest", None))
            own.update(head.replace(_named(found.dataset_id), b""))
            rest = rest[len(head) :]
        stop = _take(found, rest, at)
        if stop > at:
            own.update(rest[:stop])
            rest, at = rest[stop:], 0
        if len(rest) > _MAX_REST_NUM_BYTES:
            return None
    if head is None or head.count(_named(found.dataset_id)) != 1 or not rest.startswith(_TAIL):
        return None
    own.update(rest[:-1])
    if (own.hexdigest(), whole.hexdigest()) != (found.dataset_id, file_sha256):
        return None
    try:
        found.body |= json.loads(b"{" + rest[2:])
        is_canonical = canonical_json({**found.body, "digest": found.dataset_id}) == head + rest[1:-1]
    except (ValueError, RecursionError, FormatError):
        return None
    return found if is_canonical and rest.endswith(b"\n") and found.is_valid() else None


def _named(digest: str) -> bytes:
    return f',"digest":"{digest}"'.encode("ascii", "replace")


def _head(text: bytes) -> tuple[bytes, dict[str, Any]] | None:
    """Return the bytes before ``shards`` and the entries in them; None if there is no such place (yet)."""
    at = text.find(_SHARDS)
    for _ in range(_MAX_PLACES):
        if at < 0:
            return None
        try:
            body = json.loads(text[:at] + b"}")
        except (ValueError, RecursionError):
            at = text.find(_SHARDS, at + 1)  # that of an object inside
        else:
            return (text[:at], body) if isinstance(body, dict) else None
    return None


def _take(found: _Shards, text: bytes, at: int) -> int:
    """Add the whole entries of some bytes, and return where the first one begins that is not."""
    entries = _ENTRY.findall(text, at)
    for start in range(0, len(entries), _BLOCK):
        whole, *values = zip(*entries[start : start + _BLOCK], strict=True)
        joined = b"".join(whole)
        if not text.startswith(joined, at):
            break  # there is something between them
        at += len(joined)
        found.add(dict(zip(_MATCHED, values, strict=True)))
    return at


class SharedShards(CheckedShards):
    """Shards in the order of the manifest, made of columns when they are asked for. Safe for many threads.

    Args:
        path: The node file.

    Raises:
        FormatError: It is damaged, or another file.
    """

    def __init__(self, path: Path) -> None:
        table = Table(LocalStore(path.parent).map(path.name), name=path.name)
        table.expect_kind(_KIND, _KIND_VERSION)
        self._path, self._meta = path, table.meta
        self._names: list[str] = table.meta["splits"]
        self._columns = {name: table.column(name) for name in table.column_names}
        self._orders: dict[str, NDArray[np.uint32]] = {}
        self.splits = self._meta["body"]["splits"]
        self.has_volumes = bool(self._columns["num_volumes"].any())
        self.index_num_bytes = int(self._columns["index_num_bytes"].sum())

    def manifest(self, file_sha256: str, version: int) -> Manifest:
        """Return the manifest.

        Raises:
            FormatError: It is one of other bytes.
        """
        body = self._meta["body"]
        if (self._meta["file_sha256"], body["manifest_version"]) != (file_sha256, version):
            raise FormatError(f"{self._path} is of another manifest.")
        return Manifest.checked(body, self, self._meta["dataset_id"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross a process boundary as the node file; as entries where that was deleted."""
        return (SharedShards, (self._path,)) if self._path.exists() else (tuple, (list(self),))

    def __len__(self) -> int:
        return len(self._columns["split"])

    @overload
    def __getitem__(self, place: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, place: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        if isinstance(place, slice):
            return tuple(self._entries(place))
        return next(self._entries(slice(place, place + 1 or None)), None) or self._missing(place)

    def place(self, place: int) -> ShardPlace:
        """Return name, path and sizes of a shard; an entry takes several times as long."""
        columns = self._columns
        return ShardPlace(
            columns["name"][place].decode("ascii"),
            columns["path"][place].decode("ascii"),
            int(columns["num_bytes"][place]),
            int(columns["num_volumes"][place]),
        )

    def find(self, path: str) -> int | None:
        """Return the position of the shard whose tar or index has a path; None if none has."""
        wanted = path.encode("utf-8")
        for name in ("path", "index_path"):
            column = self._columns[name]
            if len(wanted) > column.dtype.itemsize:
                continue
            if name not in self._orders:
                self._orders[name] = np.argsort(column, kind="stable").astype(np.uint32)
            order = self._orders[name]
            at = int(np.searchsorted(column, np.bytes_(wanted), sorter=order))
            if at < len(order) and column[order[at]] == wanted:
                return int(order[at])
        return None

    def __iter__(self) -> Iterator[ShardEntry]:
        for start in range(0, len(self), _BLOCK):
            yield from self._entries(slice(start, start + _BLOCK))

    def _missing(self, place: int) -> ShardEntry:
        raise IndexError(f"a shard must be one of {len(self)}, got {place}.")

    def _entries(self, here: slice) -> Iterator[ShardEntry]:
        columns = (column[here].tolist() for column in self._columns.values())
        for name, split, path, num_bytes, sha256, *index, samples, fields, removed, volumes in zip(
            *columns, strict=True
        ):
            yield _made(
                ShardEntry,
                name=name.decode("ascii"),
                split=self._names[split],
                path=path.decode("ascii"),
                num_bytes=num_bytes,
                sha256=sha256.decode("ascii"),
                index=_made(
                    FileEntry,
                    path=index[0].decode("ascii"),
                    num_bytes=index[1],
                    sha256=index[2].decode("ascii"),
                ),
                num_samples=samples,
                num_fields=fields,
                num_removed=removed,
                num_volumes=volumes,
            )


def _made(kind: type[_Entry], **values: Any) -> _Entry:
    """Make an entry without the checks that it passed when the manifest was parsed."""
    entry = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(entry, name, value)
    return entry
