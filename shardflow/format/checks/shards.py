"""Integrity checks of the parts of a dataset: tables, shards byte by byte, and rows of the samples table.

With its index every byte of a shard is known or checksummed: headers, padding and the end of the archive are
rebuilt and compared, payloads have a crc32c, and nothing lies between. Shards are read in order through one
window of memory. A check raises `DamageError` with the first damage of its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import google_crc32c
import numpy as np

from shardflow.errors import FormatError, NotFoundError, StorageError
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.keys import sha256_hex
from shardflow.format.manifest import FileEntry, Manifest
from shardflow.format.samples import (
    DERIVED_COLUMNS,
    SamplesTable,
    derived_column,
    key_hashes,
    repeated_hashes,
)
from shardflow.format.table import Table, TableDamageError
from shardflow.format.tar import (
    BLOCK_NUM_BYTES,
    END_OF_ARCHIVE,
    HashedStream,
    member_header,
    padding,
    parse_member_header,
)
from shardflow.format.volumes.bricks import BrickVolume
from shardflow.storage import ByteStore

WHOLE_FILE = "whole file"
_ROWS_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """The first damage of a file."""

    path: str
    place: str
    """In words: header, payload or padding of a member; column of a table; line of the ledger."""
    problem: str
    offset: int | None = None
    """First wrong byte, or first byte of the smallest part that is known to be wrong; None: the file."""
    sample_key: str | None = None
    field: str | None = None


class DamageError(Exception):
    """A check found the first damage of a file; stays inside verification."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(damage.problem)
        self.damage = damage


class Collecting:
    """Context that appends the damage which a check finds to a list, and continues."""

    def __init__(self, damages: list[Damage]) -> None:
        self._damages = damages

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, DamageError):
            self._damages.append(error.damage)
        return isinstance(error, DamageError)


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A file, and its size and digest where a manifest that can be trusted names them."""

    path: str
    num_bytes: int | None = None
    sha256: str | None = None

    @classmethod
    def of(cls, entry: FileEntry) -> ExpectedFile:
        """Return what a manifest records of a file."""
        return cls(entry.path, entry.num_bytes, entry.sha256)

    def compare(self, data: bytes | memoryview) -> None:
        """Compare a file that is consistent in itself with the manifest: it may be a different one."""
        self._compare(len(data), lambda: sha256_hex(data))

    def compare_stream(self, stream: HashedStream) -> None:
        """Compare a file that is read in pieces, see `compare`; reads the rest of it."""
        self._compare(stream.num_bytes, stream.hexdigest)

    def _compare(self, num_bytes: int, digest: Callable[[], str]) -> None:
        if self.num_bytes not in (None, num_bytes):
            raise DamageError(Damage(self.path, WHOLE_FILE, f"{num_bytes} bytes instead of {self.num_bytes}"))
        if self.sha256 is not None and digest() != self.sha256:
            raise DamageError(Damage(self.path, WHOLE_FILE, "another sha256 than in the manifest"))


@contextmanager
def checking(path: str) -> Iterator[None]:
    """Turn errors of reading a file into its damage."""
    try:
        yield
    except TableDamageError as error:
        raise DamageError(Damage(path, error.place, error.problem, error.offset)) from None
    except NotFoundError:
        raise DamageError(Damage(path, WHOLE_FILE, "missing")) from None
    except StorageError as error:
        raise DamageError(Damage(path, WHOLE_FILE, f"unreadable: {error.message}")) from None
    except FormatError as error:
        raise DamageError(Damage(path, WHOLE_FILE, error.message)) from None


def open_table(store: ByteStore, expected: ExpectedFile) -> Table:
    """Open a table and check all of it; the place of a damage is the column if there is one."""
    with checking(expected.path):
        buffer = store.map(expected.path)
        table = Table(buffer, name=expected.path)
        table.verify()
    expected.compare(buffer)
    return table


def check_tar(store: ByteStore, tar: ExpectedFile, index: ShardIndex | None) -> None:
    """Check every byte of a shard.

    Args:
        store: Where the shard lies.
        tar: The shard.
        index: Its index; None where that is damaged itself, and payloads can only be judged by the digest.
    """
    path, sha256 = tar.path, tar.sha256
    with checking(path):
        stream = HashedStream(store, path)
        walk = _Walk(path, stream)
        if index is None:
            # The tar of another writer may look wrong here and still be what the manifest names.
            found = None
            try:
                walk.headers()
            except DamageError as error:
                found = error
            if found and (sha256 is None or stream.hexdigest() != sha256):
                raise found
            problem = "a payload, which one only its index could tell"
        elif index.is_foreign:
            walk.foreign(index)
            problem = "a header, padding or what no sample has"
        else:
            walk.members(index)
            problem = "a payload, which one only its index could tell"
        if sha256 is not None and stream.hexdigest() != sha256:
            raise DamageError(Damage(path, problem, "another sha256", 0))


class _Walk:
    """Sequential check of a shard from its first byte to its last."""

    def __init__(self, path: str, stream: HashedStream) -> None:
        self._path = path
        self._stream = stream

    def members(self, index: ShardIndex) -> None:
        """Compare every byte with the index."""
        number = 0
        for row in range(index.num_samples):
            key = index.sample_key(row)
            for field in index.fields(row):
                member, names = f"{key}.{field.name}, member {number}", (key, field.name)
                self._compare(
                    member_header(f"{key}.{field.name}", field.num_bytes), f"header of {member}", names
                )
                place = f"payload of {member}"
                if index.bricks is not None and index.bricks.row_of(number) is not None:
                    self._volume(index.volume(number), field, place, names)
                else:
                    self._payload(field.num_bytes, field.crc32c, place, names)
                self._compare(padding(field.num_bytes), f"padding after {member}", names)
                number += 1
        self._end(END_OF_ARCHIVE)

    def foreign(self, index: ShardIndex) -> None:
        """Check size and payloads; what lies between them only the digest of the whole tar covers."""
        stream = self._stream
        if stream.num_bytes != index.shard_num_bytes:
            problem = f"{stream.num_bytes} bytes instead of {index.shard_num_bytes}"
            self._fail(min(stream.num_bytes, index.shard_num_bytes), "end of the file", problem)
        rows = np.repeat(np.arange(index.num_samples), np.diff(index.first_field).astype(np.int64))
        for number in np.argsort(index.field_offsets, kind="stable").tolist():
            for _ in stream.take(int(index.field_offsets[number]) - stream.position):
                pass
            names = (
                index.sample_key(int(rows[number])),
                index.field_names[int(index.field_name_ids[number])],
            )
            size, crc = int(index.field_num_bytes[number]), int(index.field_crc32c[number])
            self._payload(size, crc, f"payload of {'.'.join(names)}", names)

    def headers(self) -> None:
        """Check headers and padding by themselves; each header determines where the next one is."""
        stream, number = self._stream, 0
        while True:
            start = stream.position
            header = stream.take_bytes(BLOCK_NUM_BYTES)
            if header == END_OF_ARCHIVE[:BLOCK_NUM_BYTES]:
                self._end(END_OF_ARCHIVE[BLOCK_NUM_BYTES:])
                return
            if len(header) < BLOCK_NUM_BYTES:
                self._fail(start + len(header), f"header of member {number}", "the end of the file")
            try:
                _, num_bytes = parse_member_header(header)
            except FormatError:
                self._fail(start, f"header of member {number}", "no header of format 1")
            for _ in stream.take(num_bytes):
                pass
            self._compare(padding(num_bytes), f"padding after member {number}")
            number += 1

    def _end(self, expected: bytes) -> None:
        self._compare(expected, "end of the archive")
        extra = self._stream.num_bytes - self._stream.position
        if extra:
            self._fail(self._stream.position, "after the end of the archive", f"{extra} bytes too many")

    def _payload(self, num_bytes: int, expected: int, place: str, names: tuple[str, str]) -> None:
        start, found = self._stream.position, 0
        for piece in self._stream.take(num_bytes):
            found = int(google_crc32c.extend(found, piece))
        if self._stream.position < start + num_bytes:
            self._fail(self._stream.position, place, "the end of the file", names)
        if found != expected:
            self._fail(start, place, f"crc32c {found:08x} instead of {expected:08x}", names)

    def _volume(self, volume: BrickVolume, field: FieldLocation, place: str, names: tuple[str, str]) -> None:
        """Check a volume in bricks, and that the index describes its frame and each of its bricks."""
        start = self._stream.position
        sizes = volume.columns["num_bytes"].tolist()
        header = self._stream.take_bytes(int(volume.starts[0]) - start)
        found, wrong = google_crc32c.value(header), None
        for number, (size, expected) in enumerate(zip(sizes, volume.columns["crc32c"].tolist(), strict=True)):
            at, chunk = self._stream.position, self._stream.take_bytes(size)
            found = google_crc32c.extend(found, chunk)
            if google_crc32c.value(chunk) != expected and wrong is None:
                wrong = at, f"brick {number} has another crc32c than in the index"
        ending = self._stream.take_bytes(start + field.num_bytes - self._stream.position)
        found = google_crc32c.extend(found, ending)
        if self._stream.position < start + field.num_bytes:
            self._fail(self._stream.position, place, "the end of the file", names)
        if found != field.crc32c:
            self._fail(
                wrong[0] if wrong else start,
                place,
                f"crc32c {found:08x} instead of {field.crc32c:08x}",
                names,
            )
        if wrong is None and not volume.is_in(header, ending):
            wrong = start, "a frame of another shape, dtype or order than in the index"
        if wrong is not None:
            self._fail(wrong[0], place, wrong[1], names)

    def _compare(self, expected: bytes, place: str, names: tuple[str, str] | None = None) -> None:
        """Compare the next bytes with the expected ones; report the first that differs."""
        start = self._stream.position
        found = self._stream.take_bytes(len(expected))
        if found == expected:
            return
        for at, (byte, wanted) in enumerate(zip(found, expected, strict=False)):
            if byte != wanted:
                self._fail(start + at, place, f"byte {byte:#04x} instead of {wanted:#04x}", names)
        self._fail(start + len(found), place, "the end of the file", names)

    def _fail(
        self, offset: int, place: str, problem: str, names: tuple[str | None, str | None] | None = None
    ) -> NoReturn:
        raise DamageError(Damage(self._path, place, problem, offset, *(names or ())))


class RowDamage(NamedTuple):
    """A wrong row of the samples table, its column, and the problem; row -1 stands for the table."""

    row: int
    column: str
    problem: str

    def describe(self, path: str) -> Damage:
        """Return it as the damage of its table."""
        row = f"row {self.row}, " if self.row >= 0 else ""
        return Damage(path, f"{row}column {self.column}", self.problem)


class SamplesChecker:
    """Compares one samples table with the manifest it belongs to, and with the indexes of its shards.

    Args:
        manifest: The manifest that names the table.
        samples: The table, whole.

    Raises:
        FormatError: A column is missing.
    """

    def __init__(self, manifest: Manifest, samples: SamplesTable) -> None:
        self.manifest = manifest
        self.samples = samples
        self._numbers = {shard.path: number for number, shard in enumerate(manifest.shards)}
        self._shards = samples.column("shard")

    def check_table(self) -> RowDamage | None:
        """Compare splits, shard numbers and their order with the manifest, and keys with each other."""
        stop = 0
        for name, rows in sorted(self.samples.splits.items()):
            if rows.start != stop:
                return RowDamage(-1, "splits", f"split {name} begins at {rows.start} instead of {stop}")
            if rows.stop < stop:
                return RowDamage(-1, "splits", f"split {name} ends at {rows.stop}, before it begins")
            stop = rows.stop
            damage = self._check_split(name, rows)
            if damage is not None:
                return damage
        if stop != len(self._shards):
            return RowDamage(-1, "splits", f"splits of {stop} rows instead of {len(self._shards)}")
        row = self._repeated_row()
        return None if row is None else RowDamage(row, "sample_key", "a key that an earlier row has")

    def _check_split(self, name: str, rows: range) -> RowDamage | None:
        """Check that the rows of a split are of its shards, one shard after another."""
        is_own = np.array([*(shard.split == name for shard in self.manifest.shards), False], bool)
        before = 0
        for start in range(rows.start, rows.stop, _ROWS_AT_ONCE):
            shards = self._shards[start : min(start + _ROWS_AT_ONCE, rows.stop)].astype(np.int64)
            wrong = np.flatnonzero(~is_own[np.minimum(shards, len(is_own) - 1)])
            if len(wrong):
                return RowDamage(start + int(wrong[0]), "shard", f"a shard that is not of split {name}")
            wrong = np.flatnonzero(np.diff(shards, prepend=before) < 0)
            if len(wrong):
                return RowDamage(start + int(wrong[0]), "shard", "a shard before that of the row above")
            before = int(shards[-1])
        return None

    def _repeated_row(self) -> int | None:
        """Return the first row whose key an earlier row has, in 9 bytes a row."""
        keys = self.samples.column("sample_key")
        starts = range(0, len(keys), _ROWS_AT_ONCE)
        blocks = [keys[start : start + _ROWS_AT_ONCE] for start in starts]
        hashes = repeated_hashes(blocks, len(keys))
        if not len(hashes):
            return None
        is_repeated = (np.isin(key_hashes(block), hashes, kind="sort") for block in blocks)
        rows = np.concatenate([np.flatnonzero(one) + at for at, one in zip(starts, is_repeated, strict=True)])
        order = np.argsort(keys[rows], kind="stable")
        again = np.flatnonzero(keys[rows[order[1:]]] == keys[rows[order[:-1]]])
        return int(rows[order[1:][again]].min()) if len(again) else None

    def check_shard(self, path: str, index: ShardIndex) -> RowDamage | None:
        """Compare the rows of a shard with its index: keys, places, and the facts that field names imply."""
        shard = self._numbers.get(path)
        if shard is None:
            return None
        split = self.samples.splits.get(self.manifest.shards[shard].split, range(0))
        wanted = np.array(shard).astype(self._shards.dtype)  # of another type, a copy would be searched
        within = self._shards[split.start : split.stop]
        start, stop = (int(np.searchsorted(within, wanted, side=side)) for side in ("left", "right"))
        rows = np.arange(split.start + start, split.start + stop)
        num_samples = index.num_samples - self.manifest.shards[shard].num_removed
        if len(rows) != num_samples:
            return RowDamage(-1, "shard", f"{len(rows)} rows of {index.shard} instead of {num_samples}")
        places: Any = slice(None)
        if num_samples != index.num_samples:
            places = self.samples.gather("row_in_shard", rows).astype(np.int64)
            if (np.diff(places) <= 0).any() or (len(places) and places[-1] >= index.num_samples):
                problem = f"rows of {index.shard} that do not ascend, or that it does not have"
                return RowDamage(-1, "row_in_shard", problem)
        findings = []
        for column in DERIVED_COLUMNS:
            expected, found = derived_column(index, column)[places], self.samples.gather(column, rows)
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                first = int(wrong[0])
                values = f"{_show(found[first])} instead of {_show(expected[first])}"
                findings.append(RowDamage(int(rows[first]), column, f"{values} ({index.shard})"))
        return min(findings, default=None)


def _show(value: Any) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else str(int(value))
