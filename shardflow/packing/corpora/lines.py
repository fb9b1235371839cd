"""Lines and rows of input files: JSON lines, arrays of JSON, compressed texts, Parquet, tars.

Memory is bounded by the longest line that is allowed: a line above the limit is skipped and never held. A
line belongs to the range that contains its first byte, so adjacent ranges yield every line once.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final, Self, TypeAlias

from shardflow.errors import FormatError, StorageError, os_reason
from shardflow.format.foreign.scan import scan_tar, split_member
from shardflow.format.tar import HashedStream
from shardflow.packing.corpora.config import LineError, LineReason
from shardflow.storage import LocalStore

Fields: TypeAlias = Mapping[str, Any]
Line: TypeAlias = tuple[int, bytes | None]
"""Offset of its first byte (in the decompressed text), and the line without its end; None if too long."""

_CHUNK_BYTES: Final = 1 << 20
_BATCH_ROWS: Final = 256
_BOM: Final = b"\xef\xbb\xbf"
_LINE: Final = "json"
_PICTURES: Final = ("jpg", "jpeg", "png")
_WHITE: Final = b" \t\r\n"
_STRUCTURE: Final = re.compile(rb'["{}\[\],]')
_STRING_END: Final = re.compile(rb'["\\]')


class DamagedFileError(Exception):
    """A file cannot be read further; lines before that are valid. Never leaves the package."""


def parse_line(line: bytes) -> Mapping[str, Any]:
    """Read a line of JSON.

    Raises:
        LineError: It is blank, not UTF-8, or not a JSON object; NaN and repeated keys are not JSON.
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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError  # a key given twice
    return value


def _refuse(_: str) -> None:
    raise ValueError


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse)


def plain_lines(path: Path, start: int, stop: int, max_line_bytes: int) -> Iterator[Line]:
    """Yield the lines that begin in ``[start, stop)`` of a plain file.

    Raises:
        StorageError: The file cannot be read.
    """
    # The previous byte shows whether a line begins at the start.
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
        DamagedFileError: It is truncated or damaged; all complete lines before that were yielded.
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
        stop: Lines that begin at or after this offset are left out; None for no bound.
        max_line_bytes: A longer line is None.
        skips_first: Leave out everything up to the first line end.
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
            return  # the line that reaches into this range does not end in it
        if num_held > max_line_bytes:
            held, is_too_long = [], True
        elif rest and not is_skipping:
            held.append(rest)
    if num_held and not is_skipping:
        yield begin, None if is_too_long else b"".join(held)


def array_lines(path: Path, max_line_bytes: int) -> Iterator[Line]:
    """Yield the values of a file that is one array of JSON, or has objects one after another.

    Raises:
        StorageError: The file cannot be read.
        DamagedFileError: It ends within a value or the array; all values before were yielded.
    """
    with reading(path.open, "rb", 0) as file:
        yield from split_array(iter(lambda: reading(file.read, _CHUNK_BYTES), b""), max_line_bytes)


def split_array(chunks: Iterator[bytes], max_line_bytes: int) -> Iterator[Line]:
    """Cut chunks into the values of an array, or into objects that follow each other; nothing is parsed.

    Args:
        chunks: Bytes in order, of any lengths.
        max_line_bytes: A longer value is None.

    Raises:
        DamagedFileError: The text ends within a value or the array, or continues after the array.
    """
    cut = _Cut(max_line_bytes)
    is_array: bool | None = None
    is_string, depth, position, num_escaped = False, 0, 0, 0
    for chunk in chunks:
        start, at = 0, num_escaped
        if is_array is None:
            start = len(chunk) - len(chunk.removeprefix(_BOM).lstrip(_WHITE))
            if start == len(chunk):
                position += start
                continue
            is_array = chunk[start : start + 1] == b"["
            depth = int(is_array)
            start = at = start + depth
            cut.begin = position + start
        while found := (_STRING_END if is_string else _STRUCTURE).search(chunk, at):
            sign, at = found[0], found.end()
            if is_string:
                is_string = sign != b'"'
                at += sign == b"\\"
                continue
            is_string = sign == b'"'
            depth += (sign in b"{[") - (sign in b"}]")
            is_last = is_array and depth == 0 and sign in b"}]"
            if is_array and (is_last or (sign == b"," and depth == 1)):
                yield from cut.end(chunk[start : found.start()], position + at, may_be_empty=is_last)
                start = at
            elif not is_array and depth == 0 and sign in b"}]":
                yield from cut.end(chunk[start:at], position + at)
                start = at
            if depth < 0:
                raise DamagedFileError
        num_escaped = max(at - len(chunk), 0)
        cut.hold(chunk[start:])
        position += len(chunk)
    if depth or is_string or cut.is_open:
        raise DamagedFileError


class _Cut:
    """Value that is being read, held up to a limit."""

    def __init__(self, max_bytes: int) -> None:
        self.begin = 0
        self._max_bytes = max_bytes
        self._held: list[bytes] = []
        self._num_held = 0

    @property
    def is_open(self) -> bool:
        """Whether a value has begun."""
        return self._num_held > 0

    def hold(self, piece: bytes) -> None:
        if not self._num_held:
            piece = piece.lstrip(_WHITE)
        self._num_held += len(piece)
        if self._num_held > self._max_bytes:
            self._held = []
        elif piece:
            self._held.append(piece)

    def end(self, piece: bytes, following: int, *, may_be_empty: bool = False) -> Iterator[Line]:
        """Yield the value that ends with a piece; the next one begins at ``following``."""
        self.hold(piece)
        value = b"".join(self._held).strip(_WHITE)
        if self._num_held > self._max_bytes:
            yield self.begin, None
        elif value or not may_be_empty:
            yield self.begin, value
        self.begin, self._held, self._num_held = following, [], 0


class TarLine(dict[str, Any]):
    """Fields of a line of a tar, with the pictures stored beside it.

    Attributes:
        pictures: JPEG and PNG of the sample by the ending of their names (``jpg``, ``1.png``), in the order
            of the tar.
    """

    pictures: dict[str, bytes]
    _key: str

    @classmethod
    def of(cls, sample: TarSample) -> Self:
        """Read the line of a sample.

        Raises:
            LineError: It cannot be read, or is too long.
        """
        if sample.line is None:
            raise LineError(LineReason.LINE_TOO_LONG)
        made = cls(parse_line(sample.line))
        made.pictures, made._key = sample.pictures, PurePosixPath(sample.key.decode("utf-8", "replace")).name
        return made

    def picture(self, name: str) -> bytes | None:
        """Return the picture of a name, with or without the sample's key; None for another sample's."""
        key, _, ending = PurePosixPath(name).name.partition(".")
        return self.pictures.get(name, self.pictures.get(ending.lower()) if key == self._key else None)


@dataclass(slots=True)
class TarSample:
    """Members of one sample of a tar."""

    key: bytes
    place: int
    """Offset of its first header."""
    line: bytes | None = b"{}"
    """Its ``json``; None if too long."""
    pictures: dict[str, bytes] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pictures."""
        return sum(map(len, self.pictures.values()))


def tar_samples(path: Path, max_line_bytes: int, max_picture_bytes: int) -> Iterator[TarSample]:
    """Yield the samples of a tar of WebDataset: adjacent members of one key.

    Args:
        path: The tar.
        max_line_bytes: A longer line is None.
        max_picture_bytes: Pictures of a sample beyond this are cut after their first byte.

    Raises:
        StorageError: The file cannot be read.
        DamagedFileError: It is not a plain tar, is truncated, or has links; samples before that were yielded.
    """
    sample: TarSample | None = None
    try:
        stream = HashedStream(LocalStore(path.parent), path.name, window_bytes=_CHUNK_BYTES)
        most = max(max_line_bytes, max_picture_bytes) + 1
        for member in scan_tar(stream, shard="a tar of the inputs", head_bytes=most):
            found = split_member(member.name)
            if found is None:
                continue
            if sample is None or found[0] != sample.key:
                if sample is not None:
                    yield sample
                sample = TarSample(found[0], member.header_offset)
            if found[1] == _LINE:
                sample.line = member.head if member.num_bytes <= max_line_bytes else None
            elif found[1].rpartition(".")[2] in _PICTURES:
                rest = max(max_picture_bytes - sample.num_bytes, 0)
                sample.pictures[found[1]] = member.head[: rest + 1]
    except FormatError:
        raise DamagedFileError from None
    except StorageError:
        # Its text may name the file.
        raise StorageError(
            "an input file cannot be read; check the file system, and run the job again."
        ) from None
    if sample is not None:
        yield sample


def gzip_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress a gzip file of any number of members, a chunk at a time.

    Raises:
        StorageError: The file cannot be read.
        DamagedFileError: It is truncated or damaged.
    """
    stream = gzip.GzipFile(fileobj=_Source(file))  # type: ignore[call-overload] # reads are all it needs
    try:
        while chunk := stream.read1(_CHUNK_BYTES):
            yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise DamagedFileError from None


def zstd_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Decompress a zstd file of any number of frames, a chunk at a time.

    Raises:
        StorageError: The file cannot be read.
        DamagedFileError: It is truncated or damaged.
    """
    import pyarrow as pa

    source = _Source(file)
    if not source.size():
        return
    with pa.CompressedInputStream(pa.PythonFile(source, "r"), "zstd") as stream:
        try:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
        except OSError:
            raise source.failure or DamagedFileError() from None


class _Source:
    """File whose reads raise `StorageError`, and which keeps the error, because pyarrow replaces it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.failure: StorageError | None = None
        self.closed = False

    def size(self) -> int:
        size: int = reading(self._file.seek, 0, os.SEEK_END)
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


def row_groups(path: Path) -> tuple[int, ...] | None:
    """Return the bytes of each row group of a Parquet file; None if it is not Parquet."""
    try:
        with _open_parquet(path) as file:
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            return tuple(max(int(group.total_byte_size), 0) for group in groups)
    except DamagedFileError:
        return None


def parquet_rows(path: Path, groups: range, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows with their place in the file, counted from 0.

    Args:
        path: The file.
        groups: Row groups to read.
        columns: Top-level columns to read; those that the file does not have are left out of the rows.

    Raises:
        StorageError: The file cannot be read.
        DamagedFileError: It is not Parquet, or is damaged; all rows before that were yielded.
    """
    import pyarrow as pa

    with _open_parquet(path) as file:
        try:
            metadata = file.metadata
            row = sum(metadata.row_group(number).num_rows for number in range(groups.start))
            names = [name for name in file.schema_arrow.names if name in set(columns)]
            # One by one: a reader of several groups prefetches, and would lose those before a damaged one.
            for group in groups:
                for batch in file.iter_batches(
                    batch_size=_BATCH_ROWS, row_groups=[group], columns=names, use_threads=False
                ):
                    # Without columns pyarrow forgets the rows.
                    for fields in batch.to_pylist() if names else [{}] * batch.num_rows:
                        yield row, fields
                        row += 1
        except pa.ArrowMemoryError:
            raise MemoryError from None
        except (pa.ArrowException, OSError, ValueError, OverflowError):
            raise DamagedFileError from None


def _open_parquet(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    # The error of pyarrow for a file that cannot be read contains its path.
    with reading(path.open, "rb", 0) as probe:
        reading(probe.read, 1)
    try:
        return parquet.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=1 << 20)
    except pa.ArrowMemoryError:
        raise MemoryError from None
    except (pa.ArrowException, OSError, ValueError):
        raise DamagedFileError from None


def reading(call: Any, *arguments: Any) -> Any:
    """Translate errors of the operating system, without the path.

    Raises:
        StorageError: The call failed.
    """
    try:
        return call(*arguments)
    except OSError as error:
        raise StorageError(
            f"an input file cannot be read ({os_reason(error)}); check the file "
            "system, and run the job again."
        ) from None
