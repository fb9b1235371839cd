"""Lines of the input files: JSON lines, compressed or not, and Parquet rows, in constant memory.

A part reads ranges of files. A line belongs to the range in which its first byte lies, so ranges that touch
each other give every line once, wherever they are cut. A line above the limit is read past, and never held.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

from shardflow.corpora.reasons import LineError, LineReason
from shardflow.errors import StorageError

if TYPE_CHECKING:
    from shardflow.corpora.config import CorpusConfig

Fields: TypeAlias = Mapping[str, Any]
Line = tuple[int, bytes | None]
"""Offset of its first byte (in the decompressed text), and the line without its end; None if too long."""

_CHUNK_BYTES: Final = 1 << 20
_GZIP_WINDOW: Final = 31  # zlib: a gzip header and the largest window
_BATCH_ROWS: Final = 256
_BOM: Final = b"\xef\xbb\xbf"


class DamagedFileError(Exception):
    """A file cannot be read further; what came before it is good. Stays inside the package."""


def part_lines(
    pieces: Sequence[Mapping[str, Any]], config: CorpusConfig, columns: Sequence[str]
) -> Iterator[tuple[int, int, Fields | LineReason]]:
    """Yield the lines of a part: number of the piece, place in the file, and fields or what is wrong.

    Raises:
        StorageError: A file cannot be read.
    """
    for number, piece in enumerate(pieces):
        try:
            for place, fields in _piece_lines(piece, config, columns):
                yield number, place, fields
        except DamagedFileError:
            yield number, -1, LineReason.FILE_DAMAGED


def _piece_lines(
    piece: Mapping[str, Any], config: CorpusConfig, columns: Sequence[str]
) -> Iterator[tuple[int, Fields | LineReason]]:
    path, kind, start, stop = Path(piece["path"]), piece["format"], piece["start"], piece["stop"]
    if kind == "other":
        yield -1, LineReason.NOT_A_CORPUS_FILE
        return
    if kind == "parquet":
        yield from parquet_rows(path, range(start, stop), columns)
        return
    limit = config.limits.max_line_bytes
    lines = plain_lines(path, start, stop, limit) if kind == "jsonl" else stream_lines(path, kind, limit)
    for place, line in lines:
        if line is None:
            yield place, LineReason.LINE_TOO_LONG
            continue
        try:
            fields: Fields | LineReason = parse_line(line)
        except LineError as error:
            fields = error.reason
        yield place, fields


def parse_line(line: bytes) -> Mapping[str, Any]:
    """Read a line of JSON.

    Raises:
        LineError: It is white space, no UTF-8, or no JSON object; NaN, and a key given twice, are no JSON.
    """
    line = line.removeprefix(_BOM)
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise LineError(LineReason.INVALID_UTF8) from None
    if not text or text.isspace():
        raise LineError(LineReason.EMPTY_LINE)
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        raise LineError(LineReason.INVALID_JSON) from None
    if not isinstance(value, dict):
        raise LineError(LineReason.INVALID_JSON)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError  # which of the two was meant?
    return value


def _refuse(_: str) -> None:
    raise ValueError


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse)


def plain_lines(path: Path, start: int, stop: int, max_line_bytes: int) -> Iterator[Line]:
    """Yield the lines that begin in ``[start, stop)`` of a plain file.

    Raises:
        StorageError: The file cannot be read.
    """
    # The byte before tells whether a line begins at the start.
    first = max(start - 1, 0)
    with reading(path.open, "rb", 0) as file:
        reading(file.seek, first)
        chunks = iter(lambda: reading(file.read, _CHUNK_BYTES), b"")
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
    with reading(path.open, "rb", 0) as file:
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
    while data := reading(file.read, _CHUNK_BYTES):
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
        size: int = reading(self._file.seek, 0, 2)
        reading(self._file.seek, 0)
        return size

    def read(self, num_bytes: int = -1) -> bytes:
        try:
            data: bytes = reading(self._file.read, num_bytes)
        except StorageError as error:
            self.failure = error
            raise
        return data

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True


def row_groups(path: Path) -> list[int] | None:
    """Return the size of each row group, in bytes without compression; None where there is no Parquet.

    Raises:
        StorageError: The file cannot be read.
    """
    try:
        file = _open_parquet(path)
    except DamagedFileError:
        return None
    with file:
        metadata = file.metadata
        return [
            max(int(metadata.row_group(number).total_byte_size), 0)
            for number in range(metadata.num_row_groups)
        ]


def parquet_rows(path: Path, groups: range, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows with their place in the file, counted from 0.

    Args:
        path: The file.
        groups: Row groups to read.
        columns: Top-level columns to read; those that the file does not have are left out of the rows.

    Raises:
        StorageError: The file cannot be read.
        DamagedFileError: It is no Parquet, or damaged; all rows before came.
    """
    import pyarrow as pa

    with _open_parquet(path) as file:
        try:
            metadata = file.metadata
            row = sum(metadata.row_group(number).num_rows for number in range(groups.start))
            names = [name for name in file.schema_arrow.names if name in set(columns)]
            # One after another: a reader of several looks ahead, and would lose those before a damaged one.
            for group in groups:
                for batch in file.iter_batches(
                    batch_size=_BATCH_ROWS, row_groups=[group], columns=names, use_threads=False
                ):
                    for fields in _batch_rows(names, batch):
                        yield row, fields
                        row += 1
        except pa.ArrowMemoryError:
            raise MemoryError from None
        except (pa.ArrowException, OSError, ValueError, OverflowError):
            raise DamagedFileError from None


def _batch_rows(names: Sequence[str], batch: Any) -> Iterator[dict[str, Any]]:
    values = [column.to_pylist() for column in batch.columns]
    for cells in zip(*values, strict=True) if values else ((),) * batch.num_rows:
        yield dict(zip(names, cells, strict=True))


def _open_parquet(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    # What pyarrow says of a file that cannot be read names its path.
    with reading(path.open, "rb", 0) as probe:
        reading(probe.read, 1)
    try:
        return parquet.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=1 << 20)
    except pa.ArrowMemoryError:
        raise MemoryError from None
    except (pa.ArrowException, OSError, ValueError):
        raise DamagedFileError from None


def reading(call: Any, *arguments: Any) -> Any:
    """Call the operating system; its errors are named without a path.

    Raises:
        StorageError: The call failed.
    """
    try:
        return call(*arguments)
    except OSError as error:
        raise StorageError(
            f"an input file must be readable, got {type(error).__name__} {error.errno}; check the file "
            "system, and run the job again."
        ) from None
