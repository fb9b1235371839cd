"""Input files of a corpus: the list of files, their division into parts, and the lines of a part.

Files are JSON lines, compressed or not, and Parquet; of conversations JSON too. A part is what one task
reads: some bytes of a plain file, some row groups of a Parquet file, whole compressed files, or many small
ones. Parts follow from names and sizes alone, so every run cuts the same parts.

The list, one line of JSON for each file, is in the private folder, mode 0600: it maps surrogates back to
files, and an append compares files with it. A line is located by its place in the file (docs/corpora.md).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from shardflow.errors import ConfigError, FormatError, StorageError, os_reason
from shardflow.packing.corpora.config import LineError, LineReason
from shardflow.packing.corpora.lines import (
    DamagedFileError,
    Fields,
    TarLine,
    array_lines,
    parquet_rows,
    parse_line,
    plain_lines,
    reading,
    row_groups,
    stream_lines,
    tar_samples,
)
from shardflow.storage import write_atomic

if TYPE_CHECKING:
    from shardflow.packing.corpora.config import CorpusConfig
    from shardflow.packing.deid.pseudonyms import SecretKey

Source = TypeVar("Source")
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
_PICTURES: Final = (".jpg", ".jpeg", ".png")
_LISTED: Final = ("file", "path", "format", "num_bytes", "probe", "num_lines")
_PLAN_VERSION: Final = 1
_PROBE_BYTES: Final = 1 << 16
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
    """``jsonl``, ``json``, ``tar``, ``gz``, ``zst``, ``parquet``, or ``other``, which is not read."""
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
    is_counted: bool = True
    """Whether the lines of such a part are counted; otherwise each of its files counts as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPlan:
    """Files and parts, in their order. Parts are numbered from 1."""

    files: tuple[InputFile, ...]
    parts: tuple[tuple[Piece, ...], ...]
    digest: str
    """Digest of files, settings, key and parent version: equal plans give equal datasets."""
    basis: str
    """Digest of all that every part depends on."""
    studies: str | None = None
    """``dataset_id`` of the studies that lines may name."""

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


def discover(roots: Sequence[Path], *, has_conversations: bool = False) -> list[InputFile]:
    """List every file below the roots, in the order of their names.

    Args:
        roots: Folders and files.
        has_conversations: Whether ``.json`` is read too, one array of lines or objects one after another, and
            ``.tar`` of WebDataset; JPEG and PNG below folders belong to lines and are no files of their own.

    Raises:
        ConfigError: A root does not exist.
        StorageError: A folder cannot be listed.
    """
    files: list[InputFile] = []
    for number, root in enumerate(roots):
        if not root.exists():
            raise ConfigError(f"inputs.files[{number}] does not exist; correct the path.")
        if root.is_file():
            files.append(_input_file(root, f"{number}/{root.name}", has_conversations))
        else:
            files += [
                _input_file(path, f"{number}/{path.relative_to(root).as_posix()}", has_conversations)
                for path in _walk(root)
                if not (has_conversations and path.suffix.lower() in _PICTURES)
            ]
    return sorted(files, key=lambda file: file.name.encode("utf-8", "surrogatepass"))


def _walk(root: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise StorageError(f"an input folder cannot be listed ({os_reason(error)}); check it.") from None

    for folder, _, names in os.walk(root, onerror=fail):
        for name in names:
            yield Path(folder) / name


def _input_file(path: Path, name: str, has_conversations: bool) -> InputFile:
    kind = next((kind for suffix, kind in _FORMATS.items() if path.name.lower().endswith(suffix)), "other")
    if has_conversations:
        kind = {".json": "json", ".tar": "tar"}.get(path.suffix.lower(), kind)
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
    """Read the size and digest that detect a changed file, and the row groups of Parquet.

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
    groups = row_groups(path) if file.format == "parquet" else None
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
    studies: str | None = None,
) -> CorpusPlan:
    """Cut the files into parts.

    Args:
        config: The settings.
        key: The secret key.
        files: The files to pack, in order.
        created_with: Versions of the packages that decide the bytes.
        parent: ``dataset_id`` of the previous version; None for a first one.
        studies: ``dataset_id`` of the studies that lines may name.
    """
    settings = [config.content_digest(), key.key_id]
    pictures = [str(config.conversations.image_root), *([studies] if studies else [])]
    known = [[file.file, file.num_bytes, file.probe, file.format] for file in files]
    return CorpusPlan(
        files=tuple(files),
        parts=cut_parts(files, config.shards.part_bytes),
        digest=_digest([_PLAN_VERSION, settings, parent, known]),
        basis=_digest([created_with, settings, *(pictures if config.has_conversations else ())]),
        studies=studies,
    )


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()


def list_path(private: Path, plan_digest: str) -> Path:
    """Return the path of the list of a version's files."""
    return private / f"corpus-{plan_digest[:16]}.jsonl"


def bad_lines_path(private: Path, plan_digest: str) -> Path:
    """Return the path of the list of a version's lines that are not packed."""
    return private / f"bad-lines-{plan_digest[:16]}.jsonl"


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


def part_lines(
    pieces: Sequence[Piece], config: CorpusConfig, columns: Sequence[str] | None
) -> Iterator[tuple[int, int, Fields | LineReason]]:
    """Yield the lines of a part: number of the piece, place in the file, and the fields or an error.

    Args:
        pieces: The part.
        config: All settings.
        columns: Columns of Parquet to read; None counts: no line is parsed, and all fields are empty.

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
    piece: Piece, config: CorpusConfig, columns: Sequence[str] | None
) -> Iterator[tuple[int, Fields | LineReason]]:
    path, kind, start, stop = Path(piece.path), piece.format, piece.start, piece.stop
    if kind == "other":
        yield -1, LineReason.NOT_A_CORPUS_FILE
        return
    if kind == "parquet":
        yield from parquet_rows(path, range(start, stop), columns or ())
        return
    limit = config.limits.max_line_bytes
    if kind == "tar":
        for sample in tar_samples(path, limit, config.conversations.max_image_bytes):
            yield sample.place, {} if columns is None else _read(TarLine.of, sample)
        return
    if kind == "json":
        lines = array_lines(path, limit)
    else:
        lines = plain_lines(path, start, stop, limit) if kind == "jsonl" else stream_lines(path, kind, limit)
    for place, line in lines:
        if line is None:
            yield place, LineReason.LINE_TOO_LONG
            continue
        yield place, {} if columns is None else _read(parse_line, line)


def _read(read: Callable[[Source], Fields], source: Source) -> Fields | LineReason:
    try:
        return read(source)
    except LineError as error:
        return error.reason
