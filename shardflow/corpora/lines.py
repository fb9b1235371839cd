"""Lines of JSONL files: any range of a plain file, or all of a compressed one, in constant memory.

A line belongs to the range in which its first byte lies, so ranges that touch each other give every line
once, wherever they are cut. A line above the limit is read past, and never held.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from shardflow.errors import StorageError

__all__ = ["DamagedFileError", "gzip_chunks", "plain_lines", "split_lines", "stream_lines", "zstd_chunks"]

Line = tuple[int, bytes | None]
"""Offset of its first byte (in the decompressed text), and the line without its end; None if too long."""

_CHUNK_BYTES: Final = 1 << 20
_GZIP_WINDOW: Final = 31  # zlib: a gzip header and the largest window


class DamagedFileError(Exception):
    """A file cannot be read further; what came before it is good. Stays inside the package."""


def plain_lines(path: Path, start: int, stop: int, max_line_bytes: int) -> Iterator[Line]:
    """Yield the lines that begin in ``[start, stop)`` of a plain file.

    Raises:
        StorageError: The file cannot be read.
    """
    # The byte before tells whether a line begins at the start.
    first = max(start - 1, 0)
    with _opened(path) as file:
        _reading(file.seek, first)
        chunks = _chunks(file)
        yield from split_lines(
            chunks, offset=first, stop=stop, max_line_bytes=max_line_bytes, skips_first=start > 0
        )


def stream_lines(path: Path, suffix: str, max_line_bytes: int) -> Iterator[Line]:
    """Yield all lines of a compressed file.

    Args:
        path: The file.
        suffix: ``"gz"`` or ``"zst"``.
        max_line_bytes: A longer line is None.

    Raises:
        StorageError: The file cannot be read.
        DamagedFileError: It is cut or damaged; all whole lines before that came.
    """
    with _opened(path) as file:
        chunks = gzip_chunks(file) if suffix == "gz" else zstd_chunks(file)
        yield from split_lines(chunks, offset=0, stop=None, max_line_bytes=max_line_bytes)


def split_lines(
    chunks: Iterator[bytes],
    *,
    offset: int,
    stop: int | None,
    max_line_bytes: int,
    skips_first: bool = False,
) -> Iterator[Line]:
    """Cut chunks into lines.

    Args:
        chunks: Bytes in order, of any lengths.
        offset: Place of their first byte.
        stop: Lines that begin here or behind are left out; None for none.
        max_line_bytes: A longer line is None.
        skips_first: Leave out what comes before the first line end, and that.
    """
    held: list[bytes] = []
    begin, num_held = offset, 0
    is_skipping, is_too_long = skips_first, False
    for chunk in chunks:
        pieces = chunk.split(b"\n")
        rest = pieces.pop()
        for piece in pieces:
            num_bytes = num_held + len(piece)
            if is_skipping:
                is_skipping = False
            elif is_too_long or num_bytes > max_line_bytes:
                yield begin, None
            elif held:
                held.append(piece)
                yield begin, b"".join(held)
            else:
                yield begin, piece
            begin += num_bytes + 1
            held, num_held, is_too_long = [], 0, False
            if stop is not None and begin >= stop:
                return
        num_held += len(rest)
        if is_skipping and stop is not None and begin + num_held >= stop:
            return  # the line that reaches into this range goes on behind it
        if num_held > max_line_bytes:
            held, is_too_long = [], True
        elif rest and not is_skipping:
            held.append(rest)
    if num_held and not is_skipping:
        yield begin, None if is_too_long else b"".join(held)


def gzip_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress a gzip file of any number of members, a chunk at a time.

    Raises:
        DamagedFileError: It is cut or damaged.
    """
    stream = None
    while data := _reading(file.read, _CHUNK_BYTES):
        while data:
            if stream is None:
                # Between members, and behind the last one, there may be zeros.
                data = data.lstrip(b"\0")
                if not data:
                    break
                stream = zlib.decompressobj(_GZIP_WINDOW)
            try:
                out = stream.decompress(data, _CHUNK_BYTES)
            except zlib.error:
                raise DamagedFileError from None
            if out:
                yield out
            data = stream.unconsumed_tail
            if stream.eof:
                data, stream = stream.unused_data, None
    while stream is not None and not stream.eof:
        # What the last call had no room for.
        out = stream.decompress(stream.unconsumed_tail, _CHUNK_BYTES)
        if not out:
            break
        yield out
    if stream is not None and not stream.eof:
        raise DamagedFileError


def zstd_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress a zstd file of any number of frames, a chunk at a time.

    Raises:
        DamagedFileError: It is cut or damaged.
    """
    import pyarrow as pa

    source = _Source(file)
    if not source.size():
        return
    with pa.CompressedInputStream(pa.PythonFile(source, "r"), "zstd") as stream:
        while True:
            try:
                out = stream.read(_CHUNK_BYTES)
            except StorageError:
                raise
            except OSError:
                if source.failure is not None:
                    raise source.failure from None
                raise DamagedFileError from None
            if not out:
                return
            yield out


class _Source:
    """A file for pyarrow, which forgets why a read failed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.failure: StorageError | None = None
        self.closed = False

    def size(self) -> int:
        size: int = _reading(self._file.seek, 0, 2)
        _reading(self._file.seek, 0)
        return size

    def read(self, num_bytes: int = -1) -> bytes:
        try:
            data: bytes = _reading(self._file.read, num_bytes)
        except StorageError as error:
            self.failure = error
            raise
        return data

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True


def _opened(path: Path) -> IO[bytes]:
    file: IO[bytes] = _reading(path.open, "rb", 0)
    return file


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := _reading(file.read, _CHUNK_BYTES):
        yield chunk


def _reading(call: Any, *arguments: Any) -> Any:
    """Call the operating system; its errors are named without a path."""
    try:
        return call(*arguments)
    except OSError as error:
        raise StorageError(
            f"an input file must be readable, got {type(error).__name__} {error.errno}; check the file "
            "system, and run the job again."
        ) from None
