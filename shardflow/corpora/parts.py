"""Pack one part: its lines become samples in shards of the part, and one byte each in its outcomes.

Runs in a packing process. The record comes last and vouches for the rest; a part without one is made again.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from shardflow.corpora.config import CorpusConfig
from shardflow.corpora.content import ContentMaker
from shardflow.corpora.lines import DamagedFileError, plain_lines, stream_lines
from shardflow.corpora.mapping import parse_line
from shardflow.corpora.reasons import PACKED, REASON_TABLE, LineError, LineReason, number_of
from shardflow.corpora.rows import parquet_rows
from shardflow.corpora.shard_files import ShardFiles
from shardflow.deid.pseudonyms import SecretKey
from shardflow.errors import StorageError
from shardflow.packing.workplace import storage_error, write_plainly
from shardflow.shards.table_layout import crc32c

__all__ = ["PartPacker", "load_part", "outcome_pieces", "part_folder", "part_lines"]

Fields: TypeAlias = Mapping[str, Any]

_RECORD: Final = "record.json"
_OUTCOMES: Final = "outcomes"
_BUFFER_LINES: Final = 1 << 20


def part_folder(parts: Path, number: int) -> Path:
    """Return where the files of a part lie."""
    return parts / f"{number:06d}"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PartPacker:
    """Packs parts, with the folder that all of them share."""

    config: CorpusConfig
    key: SecretKey
    parts: Path

    def pack(self, payload: Mapping[str, Any], dropped: Iterator[tuple[int, int]]) -> dict[str, Any]:
        """Write the shards, the outcomes and the record of a part.

        Args:
            payload: ``number``; ``digest`` of all that it depends on; ``pieces``, each with ``file`` (its
                surrogate), ``path``, ``format``, ``start`` and ``stop``; ``failed``, a reason for all of it.
            dropped: Lines that an earlier line rules out, ascending, with the number of the reason.

        Returns:
            ``num_lines``.

        Raises:
            StorageError: Something cannot be read or written.
        """
        folder = part_folder(self.parts, payload["number"])
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise storage_error("making the folder of a part", error) from None
        maker = ContentMaker(self.config, self.key)
        shards = {
            split: ShardFiles(folder, split, self.config.shards.target_bytes)
            for split in self.config.splits.parts
        }
        pieces = payload["pieces"]
        num_lines = [0] * len(pieces)
        outcomes = _Outcomes(folder / _OUTCOMES)
        try:
            for piece, code in self._lines(payload, maker, shards, dropped):
                outcomes.add(code)
                num_lines[piece] += 1
            outcomes.close()
            records = [record for split in shards for record in shards[split].close()]
        finally:
            for files in shards.values():
                files.abandon()
        record = {
            "digest": payload["digest"],
            "num_lines": num_lines,
            "outcomes": {
                REASON_TABLE[code][0]: count for code, count in sorted(outcomes.counts.items()) if count
            },
            "outcomes_crc32c": outcomes.crc32c,
            "shards": records,
            "tallies": dict(sorted(maker.tallies.items())),
        }
        text = json.dumps(record, separators=(",", ":")).encode("ascii")
        write_plainly(folder / _RECORD, text, mode=0o644)
        return {"num_lines": sum(num_lines)}

    def _lines(
        self,
        payload: Mapping[str, Any],
        maker: ContentMaker,
        shards: Mapping[str, ShardFiles],
        dropped: Iterator[tuple[int, int]],
    ) -> Iterator[tuple[int, int]]:
        """Pack line after line; yield the piece that each is of, and its outcome."""
        pieces = payload["pieces"]
        if payload.get("failed"):
            code = number_of(LineReason(payload["failed"]))
            yield from ((number, code) for number in range(len(pieces)))
            return
        next_dropped, why = next(dropped, (-1, 0))
        for line, (number, place, got) in enumerate(part_lines(pieces, self.config, maker.columns)):
            if line == next_dropped:
                code = why
                next_dropped, why = next(dropped, (-1, 0))
            elif isinstance(got, LineReason):
                code = number_of(got)
            else:
                code = _pack_line(maker, shards, got, pieces[number]["file"], place)
            yield number, code


def _pack_line(
    maker: ContentMaker, shards: Mapping[str, ShardFiles], fields: Fields, file: str, place: int
) -> int:
    try:
        record = maker.read(fields)
        identity = maker.identify(fields, record, file, place)
    except LineError as error:
        return number_of(error.reason)
    shards[identity.split].add(identity.sample_key, maker.fields(fields, record))
    return PACKED


class _Outcomes:
    """One byte a line, written as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffer = bytearray()
        self.counts: Counter[int] = Counter()
        self.crc32c = 0
        self._is_new = True

    def add(self, code: int) -> None:
        self._buffer.append(code)
        if len(self._buffer) >= _BUFFER_LINES:
            self._flush()

    def close(self) -> None:
        # The last piece may be empty only where it is the first: readers see no empty one.
        if self._buffer or self._is_new:
            self._flush()

    def _flush(self) -> None:
        self.counts.update(self._buffer)
        self.crc32c = _go_on(self.crc32c, bytes(self._buffer))
        try:
            with self._path.open("wb" if self._is_new else "ab") as file:
                file.write(self._buffer)
        except OSError as error:
            raise storage_error("writing outcomes", error) from None
        self._is_new = False
        self._buffer.clear()


def _go_on(checksum: int, piece: bytes) -> int:
    """Go on with a checksum of checksums: a crc32c itself cannot be gone on with."""
    return crc32c(checksum.to_bytes(4, "little") + crc32c(piece).to_bytes(4, "little"))


def outcome_pieces(folder: Path, record: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the outcomes of a part, some at a time.

    Raises:
        StorageError: They cannot be read, or are not what the record says: the part is forgotten, and made
            again by the next run.
    """
    checksum = 0
    try:
        with (folder / _OUTCOMES).open("rb") as file:
            while piece := file.read(_BUFFER_LINES):
                checksum = _go_on(checksum, piece)
                yield piece
    except OSError as error:
        raise storage_error("reading outcomes", error) from None
    # A part without a line has written one empty piece.
    if checksum != record["outcomes_crc32c"] and sum(record["num_lines"]):
        (folder / _RECORD).unlink(missing_ok=True)
        raise StorageError("a work file must be as it was written, got other bytes; run the job again.")


def load_part(parts: Path, number: int, digest: str) -> dict[str, Any] | None:
    """Read the record of a part that stands; None where it does not, or is of other inputs.

    Its shards were on the disk before the record was, so sizes tell enough.

    Raises:
        StorageError: The work folder cannot be read.
    """
    folder = part_folder(parts, number)
    record: dict[str, Any] | None = None
    with suppress(OSError, ValueError):
        record = json.loads((folder / _RECORD).read_bytes())
    if record is None or record.get("digest") != digest:
        return None
    expected = {f"{shard['name']}.tar": shard["num_bytes"] for shard in record["shards"]}
    expected[_OUTCOMES] = sum(record["num_lines"])
    for name, num_bytes in expected.items():
        try:
            if (folder / name).stat().st_size != num_bytes:
                return None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error("looking for a part", error) from None
    return record
