"""Task handlers of a corpus: the records and functions of its tasks, and the packing of one part.

The lines of a part become samples in shards of the part, and one byte each in its outcomes. The record is
written last, so it implies the rest; a part without one is packed again. When all parts are done, shards get
their final numbers, which follow from the order of the parts: a link under another name, and a new index.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import ShardflowError, StorageError, naming_os_errors
from shardflow.format.foreign.places import ImageFacts
from shardflow.format.manifest import FileEntry, ShardEntry
from shardflow.format.shard_files import SplitFiles, link_shard
from shardflow.packing.corpora.config import (
    PACKED,
    REASON_TABLE,
    CorpusConfig,
    LineError,
    LineReason,
    number_of,
)
from shardflow.packing.corpora.content import ContentMaker
from shardflow.packing.corpora.duplicates import (
    DigestScanner,
    ResolveTask,
    dropped_lines,
    make_fresh,
    resolve_bucket,
)
from shardflow.packing.corpora.inputs import (
    FileProbe,
    InputFile,
    PartTask,
    Piece,
    inspect_file,
    part_lines,
)
from shardflow.packing.corpora.lines import Fields
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.engines.base import decode, encode
from shardflow.packing.engines.worker import answering
from shardflow.packing.workspace import write_plainly

if TYPE_CHECKING:
    from shardflow.packing.engines.worker import Handler

HANDLERS: Final = "corpus"
"""Name of `make_handler` in the registry of packing."""

_RECORD: Final = "record.json"
_OUTCOMES: Final = "outcomes"
_BLOCK_LINES: Final = 1 << 20
_MAX_SOURCES: Final = 1000
OTHERS: Final = "(others)\t"
"""Source and license of the conversations that are not counted one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSetup:
    """Setup of a packing process; the secret key is sent as the path of its file."""

    config: CorpusConfig
    output: Path
    work: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectTask:
    """Inspect input files."""

    files: tuple[InputFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectDone:
    """Results of each file of an `InspectTask`, in its order."""

    files: tuple[FileProbe, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberTask:
    """Link a shard of a part into the dataset under its final name."""

    part: int
    source: str
    """Name of the shard in its part."""
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Result of a task that only writes files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """Content of a packed part: ``record.json`` in its folder."""

    digest: str
    """Digest of all that the part depends on."""
    num_lines: tuple[int, ...]
    """Lines of each piece."""
    outcomes: dict[str, int]
    """Lines by the name of their outcome."""
    outcomes_crc32: int
    shards: tuple[ShardEntry, ...]
    tallies: dict[str, int]
    """Number of scrubbed places by category."""
    forms: dict[str, int] = field(default_factory=dict)
    """Conversations by form."""
    sources: dict[str, int] = field(default_factory=dict)
    """Conversations by source and license, tab-separated; of very many, the rarer ones as one."""
    images: dict[str, ImageFacts] = field(default_factory=dict)
    """Common facts of the pictures of each name."""


def make_handler(fields: Mapping[str, Any]) -> Handler:
    """Make the task handler of a packing process.

    Args:
        fields: A `CorpusSetup` as JSON.

    Raises:
        ConfigError: The key file cannot be used.
    """
    setup = decode(CorpusSetup, fields)
    config, key = setup.config, SecretKey.load(setup.config.key_file)
    parts, scans, resolved = setup.work / "parts", setup.work / "scans", setup.work / "resolved"
    scanner = DigestScanner(config=config, key=key, folder=scans)

    def inspect(task: InspectTask) -> InspectDone:
        return InspectDone(files=tuple(map(inspect_file, task.files)))

    def pack(task: PartTask) -> Finished:
        pack_part(task, config, key, parts, dropped_lines(scans, resolved, task.number))
        return Finished()

    def resolve(task: ResolveTask) -> Finished:
        resolve_bucket(scans, task, resolved)
        return Finished()

    def number(task: NumberTask) -> FileEntry:
        return link_shard(part_folder(parts, task.part), task.source, setup.output, task.name)

    return answering(
        {
            "inspect": (InspectTask, inspect),
            "number": (NumberTask, number),
            "pack": (PartTask, pack),
            "resolve": (ResolveTask, resolve),
            "scan": (PartTask, scanner.scan),
        }
    )


def part_folder(parts: Path, number: int) -> Path:
    """Return the folder of a part's files."""
    return parts / f"{number:06d}"


def pack_part(
    task: PartTask, config: CorpusConfig, key: SecretKey, parts: Path, dropped: Iterator[tuple[int, int]]
) -> None:
    """Write the shards, the outcomes and the record of a part.

    Args:
        task: The part.
        config: All settings.
        key: Makes sample keys and splits.
        parts: Folder that all parts share.
        dropped: Duplicate lines, ascending, each with the number of its reason.

    Raises:
        StorageError: Something cannot be read or written.
    """
    folder = part_folder(parts, task.number)
    make_fresh(folder)
    maker = ContentMaker(config, key)
    shards = {split: SplitFiles(folder, split, config.shards.target_bytes) for split in config.splits.parts}
    num_lines = [0] * len(task.pieces)
    counts: Counter[int] = Counter()
    checksum = 0
    codes = _pack_lines(task, maker, shards, dropped, num_lines)
    try:
        with naming_os_errors("writing outcomes"):
            (folder / _OUTCOMES).touch()
        while block := bytes(islice(codes, _BLOCK_LINES)):
            counts.update(block)
            checksum = zlib.crc32(block, checksum)
            with naming_os_errors("writing outcomes"), (folder / _OUTCOMES).open("ab") as file:
                file.write(block)
        entries = [entry for files in shards.values() for entry in files.close()]
    finally:
        for files in shards.values():
            files.abandon()
    record = PartRecord(
        digest=task.digest,
        num_lines=tuple(num_lines),
        outcomes={REASON_TABLE[code][0]: count for code, count in sorted(counts.items())},
        outcomes_crc32=checksum,
        shards=tuple(entries),
        tallies=dict(sorted(maker.tallies.items())),
        forms=dict(sorted(maker.forms.items())),
        sources=most_frequent(maker.sources),
        images=dict(sorted(maker.images.items())),
    )
    text = json.dumps(encode(record), separators=(",", ":")).encode("ascii")
    write_plainly(folder / _RECORD, text, mode=0o644)


def _pack_lines(
    task: PartTask,
    maker: ContentMaker,
    shards: Mapping[str, SplitFiles],
    dropped: Iterator[tuple[int, int]],
    num_lines: list[int],
) -> Iterator[int]:
    """Pack line after line; count the lines of each piece and yield their outcomes."""
    if task.failed is not None:
        lines = part_lines(task.pieces, maker.config, None)
        for number in (line[0] for line in lines) if task.is_counted else range(len(task.pieces)):
            num_lines[number] += 1
            yield number_of(LineReason(task.failed))
        return
    next_dropped, reason_of_dropped = next(dropped, (-1, 0))
    for line, (number, place, found) in enumerate(part_lines(task.pieces, maker.config, maker.columns)):
        num_lines[number] += 1
        if line == next_dropped:
            yield reason_of_dropped
            next_dropped, reason_of_dropped = next(dropped, (-1, 0))
        elif isinstance(found, LineReason):
            yield number_of(found)
        else:
            yield _pack_line(maker, shards, found, task.pieces[number], place)


def _pack_line(
    maker: ContentMaker, shards: Mapping[str, SplitFiles], fields: Fields, piece: Piece, place: int
) -> int:
    try:
        record = maker.read(fields)
        identity = maker.identify(fields, record, piece.file, place)
        members = maker.fields(fields, record, Path(piece.path).parent)
    except LineError as error:
        return number_of(error.reason)
    shards[identity.split].add(identity.sample_key, members)
    return PACKED


def most_frequent(counts: Counter[str]) -> dict[str, int]:
    """Return the counts of the most frequent names, and the sum of all others under `OTHERS`."""
    ranked = sorted(counts.items(), key=lambda item: (item[0] == OTHERS, -item[1], item[0]))
    kept = dict(sorted(ranked[:_MAX_SOURCES]))
    if len(ranked) > _MAX_SOURCES:
        kept[OTHERS] = kept.get(OTHERS, 0) + sum(count for _, count in ranked[_MAX_SOURCES:])
    return kept


def outcome_blocks(folder: Path, record: PartRecord) -> Iterator[bytes]:
    """Yield the outcomes of a part, one byte per line, a block at a time.

    Raises:
        StorageError: They cannot be read, or differ from the record: the part is discarded, and the next run
            packs it again.
    """
    checksum = 0
    with naming_os_errors("reading outcomes"), (folder / _OUTCOMES).open("rb") as file:
        while block := file.read(_BLOCK_LINES):
            checksum = zlib.crc32(block, checksum)
            yield block
    if checksum != record.outcomes_crc32:
        (folder / _RECORD).unlink(missing_ok=True)
        raise StorageError("a file of the work folder has changed since it was written; run the job again.")


def load_part(parts: Path, number: int, digest: str) -> PartRecord | None:
    """Read the record of a packed part; return None if there is none, or it was packed from other inputs.

    Shards are durable before the record is written, so comparing sizes is enough.

    Raises:
        StorageError: The work folder cannot be read.
    """
    folder = part_folder(parts, number)
    record: PartRecord | None = None
    with suppress(OSError, ValueError, ShardflowError):
        record = decode(PartRecord, json.loads((folder / _RECORD).read_bytes()))
    if record is None or record.digest != digest:
        return None
    expected = {shard.path: shard.num_bytes for shard in record.shards}
    expected[_OUTCOMES] = sum(record.num_lines)
    with naming_os_errors("looking for a part"):
        for name, num_bytes in expected.items():
            path = folder / name
            if not path.exists() or path.stat().st_size != num_bytes:
                return None
    return record
