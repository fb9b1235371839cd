"""Duplicate lines: those with the texts or the key of an earlier line, anywhere in the inputs.

Memory is bounded for any number of lines. Each part sorts the digests of its lines in runs and drops
repeats within a run at once; then each bucket of the digests is gathered from all runs, and of equal ones all
but the first are dropped. Dropped lines are listed in order, for packing to merge with the lines.
"""

from __future__ import annotations

import hashlib
import heapq
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import naming_os_errors
from shardflow.format.table import Table, encode_table
from shardflow.packing.corpora.config import CorpusConfig, LineError, LineReason, number_of
from shardflow.packing.corpora.content import ContentMaker
from shardflow.packing.corpora.inputs import PartTask, part_lines
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.workspace import write_plainly
from shardflow.storage import LocalStore

RUN_ROWS: Final = 1 << 18
BUCKET_ROWS: Final = 1 << 20
_READ_ROWS: Final = 1 << 12
_KINDS: Final = ("text", "key")
_REASONS: Final = {"text": LineReason.DUPLICATE_TEXT, "key": LineReason.DUPLICATE_KEY}
_DONE: Final = "done"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanDone:
    """Result of the scan of a part."""

    num_rows: int
    """Number of digests in its runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolveTask:
    """Find the duplicates in one bucket of the digests."""

    parts: tuple[int, ...]
    """Numbers of all parts, in order."""
    bucket: int
    count: int
    """Number of buckets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DigestScanner:
    """Reads parts for the digests of their lines; runs in a packing process."""

    config: CorpusConfig
    key: SecretKey
    folder: Path
    run_rows: int = RUN_ROWS

    def scan(self, task: PartTask) -> ScanDone:
        """Write the runs of a part.

        Raises:
            StorageError: Something cannot be read or written.
        """
        folder = self.folder / f"{task.number:06d}"
        with suppress(OSError, ValueError):
            digest, num_rows = (folder / _DONE).read_text(encoding="ascii").split()
            if digest == task.digest:
                return ScanDone(num_rows=int(num_rows))
        make_fresh(folder)
        runs = {kind: _Runs(folder, kind, self.run_rows) for kind in self._kinds()}
        maker = ContentMaker(self.config, self.key)
        for line, (number, _, fields) in enumerate(part_lines(task.pieces, self.config, maker.columns)):
            if isinstance(fields, LineReason):
                continue
            try:
                record = maker.read(fields)
                user_key = maker.user_key(fields)
            except LineError:
                continue
            if "text" in runs:
                runs["text"].add(maker.digest(record, task.pieces[number].path), line)
            if user_key is not None:
                runs["key"].add(self.key.surrogate("corpus-key", user_key).encode("ascii"), line)
        done = ScanDone(num_rows=max((each.close() for each in runs.values()), default=0))
        write_plainly(folder / _DONE, f"{task.digest} {done.num_rows}".encode("ascii"), mode=0o644)
        return done

    def _kinds(self) -> list[str]:
        wanted = {"text": self.config.policy.duplicates == "skip", "key": bool(self.config.fields.key)}
        return [kind for kind in _KINDS if wanted[kind]]


class _Runs:
    """Digests of one kind, sorted and written in runs."""

    def __init__(self, folder: Path, kind: str, run_rows: int) -> None:
        self._folder = folder
        self._kind = kind
        self._run_rows = run_rows
        self._digests: list[bytes] = []
        self._lines: list[int] = []
        self._num_runs = 0
        self._num_rows = 0

    def add(self, name: bytes, line: int) -> None:
        self._digests.append(name)
        self._lines.append(line)
        if len(self._lines) >= self._run_rows:
            self._flush()

    def close(self) -> int:
        self._flush()
        return self._num_rows

    def _flush(self) -> None:
        if not self._lines:
            return
        high, low = _halves(self._digests)
        lines = np.array(self._lines, "<u8")
        order = np.lexsort((lines, low, high))
        high, low, lines = high[order], low[order], lines[order]
        again = np.zeros(len(lines), bool)
        again[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        kept = ~again
        self._write("run", {"high": high[kept], "low": low[kept], "line": lines[kept]})
        self._write("drop", {"line": np.sort(lines[again])})
        self._num_rows += int(kept.sum())
        self._num_runs += 1
        self._digests.clear()
        self._lines.clear()

    def _write(self, what: str, columns: Mapping[str, NDArray[Any]]) -> None:
        name = f"{what}-{self._kind}-{self._num_runs:06d}"
        table = encode_table(columns, {"kind": f"corpus-{what}", "format_version": 1})
        write_plainly(self._folder / name, table, mode=0o644)


def _halves(names: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return 128 bits of each name as two numbers; surrogates, which have 130, are hashed."""
    digests = [name if len(name) == 16 else hashlib.blake2b(name, digest_size=16).digest() for name in names]
    both = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype("<u8")
    return both[:, 0].copy(), both[:, 1].copy()


def write_existing(scans: Path, keys: Iterable[NDArray[Any]], run_rows: int = RUN_ROWS) -> int:
    """Write the sample keys of an earlier version as the runs of part 0, which comes before all others.

    Args:
        scans: Folder of all runs.
        keys: ``(n,)`` byte strings each.
        run_rows: Keys of a run.

    Returns:
        Number of keys.

    Raises:
        StorageError: A run cannot be written.
    """
    folder = scans / f"{0:06d}"
    make_fresh(folder)
    runs = _Runs(folder, "key", run_rows)
    for line, key in enumerate(key for piece in keys for key in piece.tolist()):
        runs.add(key, line)
    return runs.close()


def num_buckets(num_rows: int) -> int:
    """Return the number of buckets for a number of digests."""
    return max(-(-num_rows // BUCKET_ROWS), 1)


def resolve_bucket(scans: Path, task: ResolveTask, into: Path) -> None:
    """Find the digests of a bucket that several runs have, and write which lines they drop.

    Args:
        scans: Folder of all runs.
        task: The bucket.
        into: Folder for the result.

    Raises:
        StorageError: A run cannot be read or the result not written.
        ChecksumError: A run is damaged.
    """
    low_end, high_end = (task.bucket << 64) // task.count, ((task.bucket + 1) << 64) // task.count
    for kind in _KINDS:
        found: list[tuple[NDArray[Any], ...]] = []
        for number in task.parts:
            for path in sorted((scans / f"{number:06d}").glob(f"run-{kind}-*")):
                table = _open(path)
                rows = range(_first(table, "high", low_end), _first(table, "high", high_end))
                high, low, line = (_rows(table, name, rows) for name in ("high", "low", "line"))
                found.append((high, low, np.full(len(rows), number, np.uint32), line))
        if not found:
            continue
        high, low, part, line = (np.concatenate(columns) for columns in zip(*found, strict=True))
        order = np.lexsort((line, part, low, high))
        again = np.zeros(len(order), bool)
        first, second = order[:-1], order[1:]
        again[1:] = (high[first] == high[second]) & (low[first] == low[second])
        dropped = order[again]
        dropped = dropped[np.lexsort((line[dropped], part[dropped]))]
        columns = {"part": part[dropped].astype("<u4"), "line": line[dropped].astype("<u8")}
        table_bytes = encode_table(columns, {"kind": "corpus-dropped", "format_version": 1})
        with naming_os_errors("making a work folder"):
            into.mkdir(parents=True, exist_ok=True)
        write_plainly(into / f"{kind}-{task.bucket:06d}", table_bytes, mode=0o644)


def dropped_lines(scans: Path, resolved: Path, number: int) -> Iterator[tuple[int, int]]:
    """Yield the lines of a part that are dropped, ascending, each with the number of its reason.

    Raises:
        StorageError: A list cannot be read.
        ChecksumError: A list is damaged.
    """
    lists: list[Iterable[tuple[int, int]]] = []
    for kind in _KINDS:
        code = number_of(_REASONS[kind])
        runs = sorted((scans / f"{number:06d}").glob(f"drop-{kind}-*"))
        lists += [_listed(_open(path).column("line"), code) for path in runs]
        for path in sorted(resolved.glob(f"{kind}-*")):
            table = _open(path)
            rows = range(_first(table, "part", number), _first(table, "part", number + 1))
            if rows:
                lists.append(_listed(_rows(table, "line", rows), code))
    last = -1
    # If both the texts and the key are repeated, the reason is that of the texts.
    for line, code in heapq.merge(*lists):
        if line != last:
            yield line, code
        last = line


def _first(table: Table, name: str, value: int) -> int:
    """Return the first row of an ascending column that is not below a value, by bisection."""
    start, stop = 0, table.num_rows(name)
    while start < stop:
        middle = (start + stop) // 2
        if int(table.gather(name, middle)) < value:
            start = middle + 1
        else:
            stop = middle
    return start


def _rows(table: Table, name: str, rows: range) -> NDArray[Any]:
    """Read some rows of a column."""
    return table.spans(name, np.array([rows.start]), np.array([rows.stop]))[rows.start : rows.stop]


def _listed(lines: NDArray[Any], code: int) -> Iterator[tuple[int, int]]:
    for start in range(0, len(lines), _READ_ROWS):
        for line in lines[start : start + _READ_ROWS].tolist():
            yield line, code


def _open(path: Path) -> Table:
    return Table(LocalStore(path.parent).map(path.name), name="a list of digests")


def make_fresh(folder: Path) -> None:
    """Create the folder of a part, empty of what a stopped process left in it.

    Raises:
        StorageError: It cannot be made.
    """
    with naming_os_errors("making the folder of a part"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
