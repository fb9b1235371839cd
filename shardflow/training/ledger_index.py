"""Index of a run ledger: the committed steps that drew a sample, found without reading the whole ledger.

Every draw is a row: a 64-bit hash of its sample key, the place of its line, and its step. Rows are kept in
segments of at most `SEGMENT_ROWS`, each sorted by hash, so a search reads a few pages of each, and the lines
that it describes. The index is made on first use and catches up with what ranks have appended since; it takes
20 bytes a draw, and memory for one segment whatever the run's length. Nothing in it is a decision: which
attempt's work is committed is determined at each search, from the checkpoints and the starts of attempts.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import mmap
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import CheckpointError, ConfigError, StorageError
from shardflow.format import Dataset
from shardflow.format.facts.studies import open_studies
from shardflow.format.manifest import versions
from shardflow.logs import read_events
from shardflow.sampling.permutation import mix_array
from shardflow.storage import open_store, write_atomic
from shardflow.storage.local import make_directories
from shardflow.training.ledger import (
    LedgerStep,
    attempt_starts,
    ledger_files,
    merge_lines,
    num_committed_steps,
)

_LOGGER = logging.getLogger(__name__)

SEGMENT_ROWS: Final = 1 << 21
FOLDER: Final = "ledger-index"
"""Name of the folder of an index in a run folder."""
_META: Final = "index.json"
_VERSION: Final = 1
_ROWS_AT_ONCE: Final = 1 << 18
_OFFSET_BITS: Final = 40
_ROW_BYTES: Final = 20
_LOG_BYTES: Final = 1 << 30
_STEP: Final = re.compile(rb'\{"event":\s*"step",\s*"global_step":\s*(\d{1,18})\b')
_HEAD_BYTES: Final = 200
_PERSONS_AT_ONCE: Final = 1 << 20
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FEW_HASHES: Final = 64
"""Up to so many are sought one by one."""

Hashes: TypeAlias = NDArray[np.uint64]
Segment: TypeAlias = tuple[Hashes, Hashes, NDArray[np.uint32]]
"""Rows: hash of the key; number of the file and offset of the line; step, and whether the slot was masked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One draw of a sample in a committed step."""

    sample_key: str
    global_step: int
    epoch: int
    step: int
    micro: int
    slot: int
    weight: float
    """0 where the sample was masked because it could not be read."""
    attempt: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """All draws of some samples in the committed steps of a run."""

    num_committed_steps: int
    num_draws: int
    num_masked: int
    """Of these: masked because the sample could not be read."""
    num_steps: int
    first_step: int | None
    """Global step of the first draw; None without one."""
    last_step: int | None
    described: tuple[Draw, ...]
    """The first ones, in the order of their steps."""


class LedgerIndex:
    """Index of the ledger of a run; made, or brought up to date, when it is opened.

    Args:
        run: The run folder; the run may be going on.
        folder: Where the index is kept; by default in the run folder.

    Raises:
        ConfigError: The index cannot be written there.
        CheckpointError: The run has no ledger.
    """

    def __init__(self, run: Path, folder: Path | None = None) -> None:
        self._run, self._folder = run, folder or run / FOLDER
        if not ledger_files(run):
            raise CheckpointError(
                f"{run.name} holds no ledger of a run; name the folder that run.output named."
            )
        self._files: list[str] = []  # names below the ledger folder; rows point into this list
        self._num_bytes: list[int] = []  # indexed of each
        self._segments: list[tuple[str, int]] = []  # name and number of rows
        try:
            make_directories(self._folder)
            with _locked(self._folder):  # two searches at once would write the same rows
                self._load()
                self._update()
                self._opened = [self._open(segment) for segment in self._segments]
        except StorageError as error:
            raise ConfigError(
                f"the index of the ledger cannot be written into {self._folder.name} ({error.message}); name "
                "another folder by --index-dir."
            ) from None

    def find(self, keys: Sequence[str], *, after_step: int = -1, limit: int = 20) -> Draws:
        """Find all draws of some samples.

        Args:
            keys: Sample keys.
            after_step: Leave out global steps up to this one.
            limit: Draws that are described; all are counted, by the hashes of their keys.

        Raises:
            CheckpointError: A line of the ledger is not the one that was indexed.
        """
        committed = num_committed_steps(self._run)
        hashes = np.unique(hash_keys(keys))
        found = [_search(segment, hashes) for segment in self._opened]
        places = np.concatenate([np.zeros(0, np.uint64), *(one for one, _ in found)])
        marks = np.concatenate([np.zeros(0, np.uint32), *(one for _, one in found)])
        steps = (marks >> np.uint32(1)).astype(np.int64)
        limits = self._first_not_committed(committed)
        files = (places >> np.uint64(_OFFSET_BITS)).astype(np.int64)
        kept = np.flatnonzero((steps < limits[files]) & (steps > after_step)) if len(files) else files
        kept = kept[np.argsort(steps[kept], kind="stable")]
        wanted, described = frozenset(keys), list[Draw]()
        some = kept[steps[kept] <= steps[kept[:limit]].max(initial=-1)]  # whole steps, whatever the ranks
        for place in dict.fromkeys(places[some].tolist()):
            described.extend(self._describe(place, wanted))
        described.sort(key=lambda one: (one.global_step, one.micro, one.slot))
        return Draws(
            num_committed_steps=committed,
            num_draws=len(kept),
            num_masked=int((marks[kept] & np.uint32(1)).sum()),
            num_steps=len(np.unique(steps[kept])),
            first_step=int(steps[kept[0]]) if len(kept) else None,
            last_step=int(steps[kept[-1]]) if len(kept) else None,
            described=tuple(described[:limit]),
        )

    def _open(self, segment: tuple[str, int]) -> Segment:
        name, num_rows = segment
        path = self._folder / name
        data: NDArray[np.uint8] = np.zeros(0, np.uint8)
        with suppress(OSError, ValueError), path.open("rb") as file:  # ValueError: an empty file
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            pages.madvise(mmap.MADV_RANDOM)  # a search takes single pages; what is read around them is waste
            data = np.frombuffer(pages, np.uint8)
        if len(data) != num_rows * _ROW_BYTES:
            raise CheckpointError(
                f"the index of the ledger is damaged; delete {self._folder.name} and repeat."
            )
        words = data[: num_rows * 16].view("<u8")
        return words[:num_rows], words[num_rows:], data[num_rows * 16 :].view("<u4")

    def _first_not_committed(self, committed: int) -> NDArray[np.int64]:
        """Return by file the first step that is not committed work of its attempt."""
        limits, lowest = {}, committed
        for attempt, start in reversed(attempt_starts(self._run)):
            limits[attempt] = lowest
            lowest = min(lowest, start)
        return np.array([limits.get(_attempt_of(name), 0) for name in self._files], np.int64)

    def _describe(self, place: int, keys: frozenset[str]) -> Iterator[Draw]:
        number, offset = place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)
        name = self._files[number]
        try:
            with (self._run / "ledger" / name).open("rb") as file:
                file.seek(offset)
                line = json.loads(file.readline())
            for micro, found, weights, *_ in line["micros"]:
                for slot, (key, weight) in enumerate(zip(found, weights, strict=True)):
                    if key in keys:
                        yield Draw(
                            sample_key=key,
                            global_step=int(line["global_step"]),
                            epoch=int(line["epoch"]),
                            step=int(line["step"]),
                            micro=int(micro),
                            slot=slot,
                            weight=float(weight),
                            attempt=_attempt_of(name),
                            rank=int(name[-11:-6]),
                        )
        except (OSError, ValueError, KeyError, TypeError):
            raise CheckpointError(
                f"the ledger was changed since it was indexed; delete {self._folder.name} and repeat."
            ) from None

    # ---- making -------------------------------------------------------------------------------------

    def _load(self) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            meta = json.loads((self._folder / _META).read_text("utf-8"))
            if meta["version"] != _VERSION:
                return
            files, segments = dict(meta["files"]), [(str(name), int(rows)) for name, rows in meta["segments"]]
            sizes = {name: (self._run / "ledger" / name).stat().st_size for name in files}
            if all(sizes[name] >= num_bytes for name, num_bytes in files.items()):
                self._files, self._num_bytes, self._segments = [*files], [*files.values()], segments

    def _update(self) -> None:
        known = dict(zip(self._files, self._num_bytes, strict=True))
        grown = [
            (name, num_bytes)
            for name, num_bytes in ledger_files(self._run).items()
            if num_bytes > known.get(name, 0)
        ]
        if not grown and self._segments:
            return
        rest = sum(num_bytes - known.get(name, 0) for name, num_bytes in grown)
        if rest > _LOG_BYTES:
            _LOGGER.info("indexing %.1f GB of the ledger, once", rest / 1e9)
        rows = _Rows()
        if self._segments and self._segments[-1][1] < SEGMENT_ROWS:  # rows are added to the last, short one
            hashes, places, marks = self._open(self._segments.pop())
            rows.add(hashes, places, marks)
        for name, _ in grown:
            if name not in known:
                self._files.append(name)
                self._num_bytes.append(0)
            number = self._files.index(name)
            for part in self._read(number):
                rows.add(*part)
                if rows.num_rows >= SEGMENT_ROWS:
                    self._segments.extend(self._write(one) for one in rows.take(SEGMENT_ROWS))
        self._segments.extend(self._write(one) for one in rows.take(1))
        meta = {
            "version": _VERSION,
            "files": dict(zip(self._files, self._num_bytes, strict=True)),
            "segments": self._segments,
        }
        write_atomic(self._folder / _META, [json.dumps(meta).encode()], replace=True)
        for path in self._folder.glob("segment-*"):
            if path.name not in dict(self._segments):  # grown into another, or of a search that was killed
                path.unlink(missing_ok=True)

    def _write(self, rows: Segment) -> tuple[str, int]:
        hashes, places, marks = rows
        order = np.argsort(hashes, kind="stable")
        name = f"segment-{secrets.token_hex(8)}"
        chunks = (hashes[order].astype("<u8"), places[order].astype("<u8"), marks[order].astype("<u4"))
        write_atomic(self._folder / name, [one.tobytes() for one in chunks])
        return name, len(hashes)

    def _read(self, number: int) -> Iterator[Segment]:
        """Read what a rank has appended since it was indexed, in parts."""
        keys: list[str] = []
        weights: list[float] = []
        lines: list[tuple[int, int, int]] = []  # offset, step, draws

        def rows() -> Segment:
            offsets, steps, counts = np.array(lines, np.uint64).reshape(-1, 3).T
            places = np.repeat(offsets | np.uint64(number << _OFFSET_BITS), counts.astype(np.int64))
            masked = np.array(weights) <= 0
            marks = np.repeat(steps << np.uint64(1), counts.astype(np.int64)) | masked
            hashes, is_sample = hash_keys(keys), np.array([key != "" for key in keys], bool)
            return hashes[is_sample], places[is_sample], marks[is_sample].astype(np.uint32)

        path = self._run / "ledger" / self._files[number]
        with path.open("rb") as file:
            offset = file.seek(self._num_bytes[number])
            for line in file:
                if not line.endswith(b"\n"):
                    break  # of a rank that is writing, or was killed
                before = len(keys)
                if step := _STEP.match(line):
                    with suppress(ValueError, TypeError, KeyError):  # a line that a kill left unfinished
                        for _, found, given, *_ in json.loads(line)["micros"]:
                            keys.extend(key or "" for key in found)
                            weights.extend(given)
                if len(keys) > before:
                    assert step is not None  # noqa: S101
                    lines.append((offset, int(step[1]), len(keys) - before))
                offset += len(line)
                if len(keys) >= _ROWS_AT_ONCE:
                    yield rows()
                    keys, weights, lines = [], [], []
            self._num_bytes[number] = offset
        if lines:
            yield rows()


def _search(segment: Segment, hashes: Hashes) -> tuple[Hashes, NDArray[np.uint32]]:
    sorted_hashes, places, marks = segment
    if len(hashes) <= _FEW_HASHES:
        starts, stops = (
            np.array([_equal_range(sorted_hashes, one) for one in hashes], np.int64).reshape(-1, 2).T
        )
    else:
        starts = np.searchsorted(sorted_hashes, hashes, side="left")
        stops = np.searchsorted(sorted_hashes, hashes, side="right")
    rows = [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True) if stop > start]
    chosen = np.concatenate([np.zeros(0, np.int64), *rows])
    return np.asarray(places[chosen]), np.asarray(marks[chosen])


def _equal_range(sorted_hashes: Hashes, wanted: np.uint64) -> tuple[int, int]:
    """Return the rows of a hash: sought around where it is expected, which reads a third of the pages."""
    num_rows = len(sorted_hashes)
    expected = int(wanted) * num_rows >> 64  # hashes are uniform
    reach = math.isqrt(num_rows) + 1
    while True:
        start, stop = max(expected - reach, 0), min(expected + reach, num_rows)
        is_behind = start == 0 or sorted_hashes[start - 1] < wanted
        if is_behind and (stop == num_rows or sorted_hashes[stop] > wanted):
            break
        reach *= 4
    window = sorted_hashes[start:stop]
    return start + int(np.searchsorted(window, wanted)), start + int(
        np.searchsorted(window, wanted, side="right")
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Rows:
    """Rows on their way into segments."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, Any, Any]] = []
        self.num_rows = 0

    def add(self, hashes: Hashes, places: Hashes, marks: NDArray[np.uint32]) -> None:
        self._parts.append((hashes, places, marks))
        self.num_rows += len(hashes)

    def take(self, at_least: int) -> Iterator[tuple[Any, Any, Any]]:
        """Take segments of ``SEGMENT_ROWS``, and the rest if it has at least so many rows."""
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        start = 0
        while self.num_rows - start >= at_least:
            stop = min(start + SEGMENT_ROWS, self.num_rows)
            yield columns[0][start:stop], columns[1][start:stop], columns[2][start:stop]
            start = stop
        self._parts = [tuple(column[start:] for column in columns)] if start < self.num_rows else []  # type: ignore[list-item]
        self.num_rows -= start


def hash_keys(keys: Sequence[str]) -> Hashes:
    """Hash sample keys to 64 bits; the same key always to the same ones.

    Returns:
        ``(len(keys),)``; 0 words at the end of a key change nothing.
    """
    if not keys:
        return np.zeros(0, np.uint64)
    encoded = np.array([key.encode() for key in keys], "S")
    num_words = -(-encoded.dtype.itemsize // 8)
    words = encoded.astype(f"S{num_words * 8}").view("<u8").reshape(len(keys), num_words)
    hashes, scratch = np.zeros(len(keys), np.uint64), np.empty(len(keys), np.uint64)
    for number in range(num_words):
        word = words[:, number].astype(np.uint64)
        is_empty = word == 0
        word += np.uint64((number + 1) * _GOLDEN % (1 << 64))
        mix_array(word, scratch)
        word[is_empty] = 0
        hashes += word
    mix_array(hashes, scratch)
    return hashes


def open_versions(url: str) -> list[Dataset]:
    """Open all versions of a dataset that exist, the newest first.

    Raises:
        ConfigError: There is no dataset.
    """
    found = versions(open_store(url))
    if not found:
        raise ConfigError(
            "the dataset of the run is not there any more (a relative path counts from this folder); give it "
            "by --dataset."
        )
    return [Dataset.open(url, version=version) for version in reversed(found)]


def keys_of_shard(datasets: Sequence[Dataset], name: str) -> list[str]:
    """Return the sample keys of a shard, by the newest version that has it.

    Raises:
        ConfigError: None has.
    """
    for dataset in datasets:
        names = [shard.name for shard in dataset.manifest.shards]
        if name in names:
            rows = np.flatnonzero(dataset.samples.column("shard") == names.index(name))
            return [bytes(key).decode("ascii") for key in dataset.samples.column("sample_key")[rows]]
    raise ConfigError(
        "no version of the dataset has a shard of this name; `shardflow info` lists names such as "
        "train-000000."
    )


def keys_of_person(datasets: Sequence[Dataset], patient_key: str) -> tuple[list[str], int | None]:
    """Return the sample keys of a person over all versions.

    Args:
        datasets: Versions, the newest first.
        patient_key: The person's surrogate.

    Returns:
        The keys, sorted, and the number of the newest version if it holds some of them.

    Raises:
        ConfigError: No version knows the person, or the newest has no table of facts.
    """
    wanted, keys, holding = patient_key.encode("utf-8"), set[str](), []
    for number, dataset in enumerate(datasets):
        try:
            table, _ = open_studies(dataset)
        except ConfigError:
            if number == 0:
                raise
            continue  # made for later versions only
        persons = table.array("patient_key")
        for start in range(0, len(persons), _PERSONS_AT_ONCE):
            rows = start + np.flatnonzero(persons[start : start + _PERSONS_AT_ONCE] == wanted)
            if len(rows):
                keys |= {bytes(key).decode("ascii") for key in dataset.samples.column("sample_key")[rows]}
                holding.append(number)
    if not keys:
        raise ConfigError(
            "no version of the dataset knows this person; --patient takes a surrogate, as in the column "
            "facts.patient_key. After `shardflow compact --delete-old`, name the samples by --sample."
        )
    return sorted(keys), datasets[0].manifest_version if 0 in holding else None


def _attempt_of(name: str) -> int:
    return int(name.partition("/")[0].removeprefix("attempt-"))


def read_step(run: Path, global_step: int) -> LedgerStep | None:
    """Read one committed step, by bisection of each rank's file.

    Returns:
        The step, or None if no committed work is of this number.
    """
    if global_step >= num_committed_steps(run):
        return None
    owner = max((attempt for attempt, start in attempt_starts(run) if start <= global_step), default=None)
    if owner is None:
        return None
    names = [name for name in ledger_files(run) if _attempt_of(name) == owner]
    lines = [_line_of_step(run / "ledger" / name, global_step) for name in names]
    found = [line for line in lines if line is not None]
    return merge_lines(global_step, owner, found) if found and len(found) == len(names) else None


def check_whole(run: Path, first_step: int) -> None:
    """Refuse a ledger that lacks committed steps: all ranks' first and last one of each attempt are read.

    Args:
        run: The run folder.
        first_step: Steps before it are not asked for.

    Raises:
        CheckpointError: Steps are missing, none is committed, or the run began with another one's checkpoint.
    """
    committed = covered = num_committed_steps(run)
    if not committed or committed < first_step:
        raise CheckpointError(
            f"nothing is proven: the run has {committed} committed steps, by its checkpoints, and those from "
            f"step {first_step} on are asked for; restore its checkpoints, or give another --after-step."
        )
    names = ledger_files(run)
    for attempt, start in reversed(attempt_starts(run)):
        first, stop, covered = max(start, first_step), covered, min(covered, start)
        if first >= stop:
            continue
        files = [run / "ledger" / name for name in names if _attempt_of(name) == attempt]
        headers = [next(read_events(file), {}) for file in files]
        is_whole = all(header.get("world_size") == len(files) for header in headers)
        ends = ((file, step) for file in files for step in (first, stop - 1))
        if not is_whole or any(_line_of_step(file, step) is None for file, step in ends):
            raise CheckpointError(
                f"nothing is proven: attempt {attempt} of the run ledger lacks ranks or committed steps; "
                "restore the ledger folder."
            )
    if covered > first_step:
        raise CheckpointError(
            f"nothing is proven: the run ledger begins with step {covered}; search also the run whose "
            f"checkpoint this one began with, and give --after-step {covered - 1} here; or restore the "
            "ledger folder."
        )


def _line_of_step(path: Path, global_step: int) -> dict[str, Any] | None:
    with path.open("rb") as file:
        low, high = 0, path.stat().st_size  # the line begins in [low, high)
        while low < high:
            middle = (low + high) // 2
            file.seek(middle)
            if middle > 0:
                file.seek(middle - 1)
                file.readline()
            start = file.tell()
            head = _STEP.match(file.read(_HEAD_BYTES)) if start < high else None
            while head is None and start < high:  # the header, and what a kill left unfinished
                file.seek(start)
                file.readline()
                start = file.tell()
                head = _STEP.match(file.read(_HEAD_BYTES))
            if head is None:
                high = middle
            elif (number := int(head[1])) == global_step:
                file.seek(start)
                with suppress(ValueError):
                    return dict(json.loads(file.readline()))
                low = start + 1
            elif number < global_step:
                low = start + 1
            else:
                high = middle
    return None
