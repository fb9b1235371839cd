"""Processes that share a cache folder: each reads all pieces of an object, and can be killed at a point.

Run as a program: ``python processes.py FOLDER NUMBER MODE``. The origin notes each read in a file of its own,
and takes a moment, so that processes meet.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import google_crc32c
import numpy as np

from shardflow.storage import ByteRange, Cache, CacheConfig, CachedStore, LocalStore
from shardflow.storage.cache.blocks import ObjectBlocks
from shardflow.storage.cache.folder import CacheFolder

__all__ = ["MODES", "NUM_PIECES", "NotingStore", "blocks_of", "make_origin", "spans", "start"]

NUM_PIECES = 48
PIECE_BYTES = 5000
MODES = ("read", "die-fetching", "die-writing", "die-linked")


class NotingStore(LocalStore):
    """A folder whose reads are noted, and take a moment."""

    def __init__(self, root: Path, notes: Path, *, delay_s: float = 0.0) -> None:
        super().__init__(root)
        self._notes, self._delay_s = notes, delay_s

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        with self._notes.open("a") as file:
            file.writelines(f"{span.offset} {span.num_bytes}\n" for span in ranges)
        time.sleep(self._delay_s)
        super().read_ranges(path, ranges, buffers)

    def __reduce__(self) -> tuple[type[NotingStore], tuple[Path, Path]]:  # type: ignore[override]
        return type(self), (self.root, self._notes)


def make_origin(folder: Path) -> bytes:
    content = np.random.default_rng(3).bytes(NUM_PIECES * PIECE_BYTES)
    LocalStore(folder / "origin").put_new("a.tar", content)
    (folder / "notes").mkdir()
    return content


def spans() -> list[ByteRange]:
    return [ByteRange(number * PIECE_BYTES, PIECE_BYTES) for number in range(NUM_PIECES)]


def blocks_of(content: bytes) -> ObjectBlocks:
    checksums = [google_crc32c.value(content[s.offset : s.offset + s.num_bytes]) for s in spans()]
    found = ObjectBlocks.of_pieces(
        hashlib.sha256(content).hexdigest(),
        np.array([span.offset for span in spans()], np.int64),
        np.full(NUM_PIECES, PIECE_BYTES, np.int64),
        np.array(checksums, np.uint32),
        block_bytes=4096,
    )
    assert found is not None
    return found


def start(folder: Path, numbers: Iterable[int], modes: Sequence[str]) -> list[subprocess.Popen[str]]:
    program = [sys.executable, __file__, str(folder)]
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return [
        subprocess.Popen([*program, str(number), mode], stdout=subprocess.PIPE, text=True, env=environment)
        for number, mode in zip(numbers, modes, strict=True)
    ]


def _die_when(mode: str, after: int) -> None:
    """Kill this process in the middle of its n-th publication."""
    if mode == "read":
        return
    left = [after]

    def falls() -> bool:
        left[0] -= 1
        return left[0] == 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if mode == "die-fetching":
        real_read = NotingStore.read_ranges

        def read(
            self: NotingStore, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]
        ) -> None:
            real_read(self, path, ranges, buffers)
            if falls():
                die()

        NotingStore.read_ranges = read  # type: ignore[method-assign]
    elif mode == "die-writing":
        real_write = os.write

        def write(descriptor: int, data: memoryview) -> int:
            if len(data) > 100 and falls():
                real_write(descriptor, data[: len(data) // 2])
                die()
            return real_write(descriptor, data)

        os.write = write  # type: ignore[assignment]
    else:
        real_link = CacheFolder._link

        def link(self: CacheFolder, name: str, number: int, incoming: str, num_bytes: int) -> bool:
            found = real_link(self, name, number, incoming, num_bytes)
            if falls():
                die()
            return found

        CacheFolder._link = link  # type: ignore[method-assign]


def main() -> None:
    folder, number, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    content = (folder / "origin" / "a.tar").read_bytes()
    blocks = blocks_of(content)
    config = CacheConfig(directory=folder / "cache", max_bytes=1 << 26, min_free_bytes=0, block_bytes=4096)
    origin = NotingStore(folder / "origin", folder / "notes" / f"{number}", delay_s=0.002)
    store = CachedStore(origin, Cache(config))
    store.bind(lambda _: blocks)
    order = np.random.default_rng(number).permutation(NUM_PIECES)
    _die_when(mode, after=1 + number % 7)
    wrong, longest_s = 0, 0.0
    for first in range(0, NUM_PIECES, 3):
        wanted = [spans()[piece] for piece in order[first : first + 3].tolist()]
        buffers = [bytearray(PIECE_BYTES) for _ in wanted]
        began = time.monotonic()
        store.read_ranges("a.tar", wanted, [memoryview(buffer) for buffer in buffers])
        longest_s = max(longest_s, time.monotonic() - began)
        wrong += sum(
            bytes(buffer) != content[span.offset : span.offset + span.num_bytes]
            for span, buffer in zip(wanted, buffers, strict=True)
        )
    counters = {stage: values["num_items"] for stage, values in store.cache.counters.snapshot().items()}
    sys.stdout.write(json.dumps({"wrong": wrong, "longest_s": longest_s, **counters}) + "\n")


if __name__ == "__main__":
    main()
