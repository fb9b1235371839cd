"""Input files of a corpus: the list of files, their cut into parts, and the lines and rows of a part.

Files are JSON lines, compressed or not, and Parquet. A part is what one task reads: some bytes of a plain
file, some row groups of a Parquet file, whole compressed files, or many small ones. Parts follow from names
and sizes alone, so every run cuts the same parts. A line belongs to the range that contains its first byte,
so adjacent ranges yield every line once. A line above the limit is skipped and never held.

The list, one line of JSON for each file, is in the private folder, mode 0600: it maps surrogates back to
files, and an append compares files with it. A line of a file is located by its place there (docs/corpora.md).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

from shardflow.errors import ConfigError, FormatError, StorageError, os_reason
from shardflow.packing.corpora.config import LineError, LineReason
from shardflow.storage import write_atomic

if TYPE_CHECKING:
    from shardflow.packing.corpora.config import CorpusConfig
    from shardflow.packing.deid.pseudonyms import SecretKey

Fields: TypeAlias = Mapping[str, Any]
Line: TypeAlias = tuple[int, bytes | None]
"""Offset of its first byte (in the decompressed text), and the line without its end; None if too long."""

_FORMATS: Final = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "gz",
    ".ndjson.gz": "gz",
    ".json.gz": "gz",
    ".jsonl.zst": "zst",
    ".ndjson.zst": "zst",
    ".parquet": "parquet",
}
_LISTED: Final = ("file", "path", "format", "num_bytes", "probe", "num_lines")
_PLAN_VERSION: Final = 1
_PROBE_BYTES: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 20
_BATCH_ROWS: Final = 256
_BOM: Final = b"\xef\xbb\xbf"
_INFLATION: Final = 4
"""Estimated ratio of decompressed to compressed bytes. Parts depend on it, so it is never tuned."""
_SECONDS_PER_MIB: Final = 60.0
"""Seconds of a task for each MiB of input, beside ``execution.task_timeout_s``: twice the slowest case
measured, a Parquet file whose texts are scrubbed strictly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file of the inputs; what `inspect_file` finds, and its lines, are filled in once they are known."""

    path: str
    format: str
    """``jsonl``, ``gz``, ``zst``, ``parquet``, or ``other``, which is not read."""
    num_bytes: int
    file: str = ""
    """Surrogate of its name."""
    name: str = ""
    """Number of its folder and path below it: what identifies it."""
    modified_ns: int = 0
    probe: str = ""
    """Digest of its ends."""
    groups: tuple[int, ...] | None = None
    """Bytes of each row group of a Parquet file; None for any other, and for a damaged one."""
    num_lines: int = 0

    def is_same(self, other: InputFile) -> bool:
        """Return whether the content is unchanged, as far as size and ends show."""
        return (self.file, self.num_bytes, self.probe) == (other.file, other.num_bytes, other.probe)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileProbe:
    """What `inspect_file` finds in a file."""

    probe: str = ""
    """Digest of its first and last 64 KiB."""
    groups: tuple[int, ...] | None = None
    """Bytes of each row group, without compression; None for what is no Parquet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Range of a file that a part reads."""

    index: int
    """Position of the file in the plan."""
    file: str
    """Surrogate of the file."""
    path: str
    format: str
    start: int
    """First byte of a plain file, first row group of a Parquet file; 0 of any other."""
    stop: int
    weight_bytes: int
    """Size of the range, estimated for compressed files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTask:
    """Scan or pack one part."""

    number: int
    digest: str
    """Digest of all that the part depends on."""
    pieces: tuple[Piece, ...]
    failed: str | None = None
    """Reason for all lines of a part that no process could read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPlan:
    """Files and parts, in their order. Parts are numbered from 1."""

    files: tuple[InputFile, ...]
    parts: tuple[tuple[Piece, ...], ...]
    digest: str
    """Digest of files, settings, key and parent version: equal plans give equal datasets."""
    basis: str
    """Digest of all that every part depends on."""

    def part_digest(self, number: int) -> str:
        """Return the digest of all that a part depends on."""
        facts: list[Any] = []
        for piece in self.parts[number - 1]:
            file = self.files[piece.index]
            facts.append([file.file, file.num_bytes, file.probe, file.modified_ns])
            facts.append([piece.start, piece.stop])
        return _digest([self.basis, number, facts])

    def num_bytes(self, number: int) -> int:
        """Return the estimated input size of a part."""
        return sum(piece.weight_bytes for piece in self.parts[number - 1])

    def timeout_s(self, number: int, base_s: float) -> float:
        """Return the time limit of a task of a part."""
        return base_s + _SECONDS_PER_MIB * self.num_bytes(number) / (1 << 20)


def discover(roots: Sequence[Path]) -> list[InputFile]:
    """List every file below the roots, in the order of their names.

    Raises:
        ConfigError: A root does not exist.
        StorageError: A folder cannot be listed.
    """
    files: list[InputFile] = []
    for number, root in enumerate(roots):
        if not root.exists():
            raise ConfigError(f"inputs.files[{number}] does not exist; correct the path.")
        if root.is_file():
            files.append(_input_file(root, f"{number}/{root.name}"))
        else:
            files += [
                _input_file(path, f"{number}/{path.relative_to(root).as_posix()}") for path in _walk(root)
            ]
    return sorted(files, key=lambda file: file.name.encode("utf-8", "surrogatepass"))


def _walk(root: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise StorageError(f"an input folder cannot be listed ({os_reason(error)}); check it.") from None

    for folder, _, names in os.walk(root, onerror=fail):
        for name in names:
            yield Path(folder) / name


def _input_file(path: Path, name: str) -> InputFile:
    kind = next((kind for suffix, kind in _FORMATS.items() if path.name.lower().endswith(suffix)), "other")
    num_bytes = modified_ns = 0
    try:
        status = path.stat()
        modified_ns = status.st_mtime_ns
        if path.is_file():
            num_bytes = status.st_size
        else:
            kind = "other"
    except OSError:
        kind = "other"
    return InputFile(
        path=str(path.absolute()), name=name, num_bytes=num_bytes, modified_ns=modified_ns, format=kind
    )


def inspect_file(file: InputFile) -> FileProbe:
    """Read what distinguishes a file from a changed one, and the row groups of Parquet.

    Raises:
        StorageError: It cannot be read.
    """
    if file.format == "other":
        return FileProbe()
    path, digest = Path(file.path), hashlib.sha256()
    with reading(path.open, "rb") as stream:
        digest.update(reading(stream.read, _PROBE_BYTES))
        reading(stream.seek, max(reading(stream.seek, 0, os.SEEK_END) - _PROBE_BYTES, 0))
        digest.update(reading(stream.read, _PROBE_BYTES))
    groups = _row_groups(path) if file.format == "parquet" else None
    return FileProbe(probe=digest.hexdigest()[:32], groups=groups)


def cut_parts(files: Sequence[InputFile], part_bytes: int) -> tuple[tuple[Piece, ...], ...]:
    """Cut files into parts of about so many bytes, in their order.

    A compressed file or a row group that is larger than a part is a part alone.
    """
    parts: list[list[Piece]] = []
    weight = 0
    for index, file in enumerate(files):
        for start, stop, weight_bytes in _ranges(file, part_bytes):
            if not parts or weight + weight_bytes > part_bytes:
                parts.append([])
                weight = 0
            parts[-1].append(
                Piece(
                    index=index,
                    file=file.file,
                    path=file.path,
                    format=file.format,
                    start=start,
                    stop=stop,
                    weight_bytes=weight_bytes,
                )
            )
            weight += weight_bytes
    return tuple(map(tuple, parts))


def _ranges(file: InputFile, part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and bytes of each range that a file is read in."""
    size, groups = file.num_bytes, file.groups
    if file.format == "jsonl":
        count = max(-(-size // part_bytes), 1)
        for index in range(count):
            start, stop = index * size // count, (index + 1) * size // count
            yield start, stop, stop - start
        return
    if file.format != "parquet" or not groups:
        factor = {"gz": _INFLATION, "zst": _INFLATION, "other": 0}.get(file.format, 1)
        yield 0, 0, size * factor
        return
    start = weight = 0
    for group, num_bytes in enumerate(groups):
        if group > start and weight + num_bytes > part_bytes:
            yield start, group, weight
            start, weight = group, 0
        weight += num_bytes
    yield start, len(groups), weight


def build_plan(
    config: CorpusConfig,
    key: SecretKey,
    files: Sequence[InputFile],
    *,
    created_with: dict[str, str],
    parent: str | None,
) -> CorpusPlan:
    """Cut the files into parts.

    Args:
        config: The settings.
        key: The secret key.
        files: The files to pack, in order.
        created_with: Versions of the packages that decide the bytes.
        parent: ``dataset_id`` of the previous version; None for a first one.
    """
    settings = [config.content_digest(), key.key_id]
    known = [[file.file, file.num_bytes, file.probe, file.format] for file in files]
    return CorpusPlan(
        files=tuple(files),
        parts=cut_parts(files, config.shards.part_bytes),
        digest=_digest([_PLAN_VERSION, settings, parent, known]),
        basis=_digest([created_with, settings]),
    )


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()


def list_path(private: Path, plan_digest: str) -> Path:
    """Return the path of the list of a version's files."""
    return private / f"corpus-{plan_digest[:16]}.jsonl"


def write_list(path: Path, files: Iterable[InputFile]) -> None:
    """Write the list of a version's files.

    Raises:
        StorageError: It cannot be written.
    """
    lines = (
        json.dumps({name: getattr(file, name) for name in _LISTED}, separators=(",", ":")) + "\n"
        for file in files
    )
    write_atomic(path, (line.encode("ascii") for line in lines), replace=True, mode=0o600)


def read_list(path: Path) -> list[InputFile]:
    """Read the list of a version's files.

    Raises:
        ConfigError: There is none: another private folder, or a dataset of another job.
        FormatError: It is damaged.
    """
    try:
        return [InputFile(**json.loads(line)) for line in path.read_bytes().splitlines()]
    except OSError:
        raise ConfigError(
            "private_dir has no list of the corpus' files (corpus-*.jsonl) for this dataset; name the folder "
            "that it was packed with."
        ) from None
    except (ValueError, TypeError):
        raise FormatError(
            "the list of the corpus' files (corpus-*.jsonl) is damaged; restore it from a backup."
        ) from None


class DamagedFileError(Exception):
    """A file cannot be read further; what came before is good. Never leaves the package."""


def part_lines(
    pieces: Sequence[Piece], config: CorpusConfig, columns: Sequence[str]
) -> Iterator[tuple[int, int, Fields | LineReason]]:
    """Yield the lines of a part: number of the piece, place in the file, and the fields or what is wrong.

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
    piece: Piece, config: CorpusConfig, columns: Sequence[str]
) -> Iterator[tuple[int, Fields | LineReason]]:
    path, kind, start, stop = Path(piece.path), piece.format, piece.start, piece.stop
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
            return  # the line that reaches into this range does not end in it
        if num_held > max_line_bytes:
            held, is_too_long = [], True
        elif rest and not is_skipping:
            held.append(rest)
    if num_held and not is_skipping:
        yield begin, None if is_too_long else b"".join(held)


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
    """A file whose reads raise `StorageError`, and which remembers it: pyarrow does not."""

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


def _row_groups(path: Path) -> tuple[int, ...] | None:
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
        DamagedFileError: It is no Parquet, or damaged; all rows before were yielded.
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
    """Call the operating system; an error is reported without the path.

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
