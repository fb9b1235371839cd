"""Task handlers of a corpus: the kinds of tasks, and the packing of one part.

The lines of a part become samples in shards of the part, and one byte each in its outcomes. The record comes
last and vouches for the rest; a part without one is packed again. When all parts are done, shards get their
final numbers, which follow from the order of the parts: a link under another name, and an index with it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import StorageError
from shardflow.format.table import crc32c
from shardflow.format.writer import SplitFiles, link_shard, naming_os_errors
from shardflow.packing.corpora.config import (
    PACKED,
    REASON_TABLE,
    CorpusConfig,
    CorpusDeidConfig,
    CorpusInputsConfig,
    CorpusLimitsConfig,
    CorpusPolicyConfig,
    CorpusShardsConfig,
    CorpusSplitsConfig,
    FieldsConfig,
    LineError,
    LineReason,
    number_of,
)
from shardflow.packing.corpora.content import ContentMaker
from shardflow.packing.corpora.duplicates import DigestScanner, dropped_lines, make_fresh, resolve_bucket
from shardflow.packing.corpora.inputs import Fields, inspect_file, part_lines
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.workspace import write_plainly

if TYPE_CHECKING:
    from shardflow.packing.engines.worker import Handler

HANDLERS: Final = "corpus"
"""Name of `make_handler` in the registry of packing."""

_RECORD: Final = "record.json"
_OUTCOMES: Final = "outcomes"
_BUFFER_LINES: Final = 1 << 20
_SECTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "fields": FieldsConfig,
    "splits": CorpusSplitsConfig,
    "shards": CorpusShardsConfig,
    "policy": CorpusPolicyConfig,
    "limits": CorpusLimitsConfig,
    "deid": CorpusDeidConfig,
}


def make_setup(config: CorpusConfig, output: Path, work: Path) -> dict[str, Any]:
    """Gather what every task needs, as JSON; the key goes as the path of its file."""
    return {
        "key_file": str(config.key_file),
        "output": str(output),
        "work": str(work),
        "sections": {name: asdict(getattr(config, name)) for name in _SECTIONS},
    }


def make_handler(setup: Mapping[str, Any]) -> Handler:
    """Make the function that answers tasks inside a packing process.

    Raises:
        ConfigError: The key file cannot be used.
    """
    output, work, key_file = (Path(setup[name]) for name in ("output", "work", "key_file"))
    key = SecretKey.load(key_file)
    sections = {name: _section(make, setup["sections"][name]) for name, make in _SECTIONS.items()}
    config = CorpusConfig(
        output=output, private_dir=key_file.parent, inputs=CorpusInputsConfig(files=(output,)), **sections
    )
    parts, scans, resolved = work / "parts", work / "scans", work / "resolved"
    packer = PartPacker(config=config, key=key, parts=parts)
    scanner = DigestScanner(config=config, key=key, folder=scans)

    def inspect(payload: Mapping[str, Any]) -> dict[str, Any]:
        return {"files": [inspect_file(Path(path), kind) for path, kind in payload["files"]]}

    def pack(payload: Mapping[str, Any]) -> dict[str, Any]:
        return packer.pack(payload, dropped_lines(scans, resolved, payload["number"]))

    def resolve(payload: Mapping[str, Any]) -> dict[str, Any]:
        return resolve_bucket(scans, payload["parts"], payload["bucket"], payload["count"], resolved)

    def number(payload: Mapping[str, Any]) -> dict[str, Any]:
        source = part_folder(parts, payload["part"])
        return asdict(link_shard(source, payload["source"], output, payload["name"]))

    kinds: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "inspect": inspect,
        "number": number,
        "pack": pack,
        "resolve": resolve,
        "scan": scanner.scan,
    }
    return lambda kind, payload: kinds[kind](payload)


def _section(make: Callable[..., Any], table: Mapping[str, Any]) -> Any:
    return make(**{name: tuple(value) if isinstance(value, list) else value for name, value in table.items()})


def part_folder(parts: Path, number: int) -> Path:
    """Return where the files of a part lie."""
    return parts / f"{number:06d}"


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
        make_fresh(folder)
        maker = ContentMaker(self.config, self.key)
        shards = {
            split: SplitFiles(folder, split, self.config.shards.target_bytes)
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
            entries = [asdict(entry) for files in shards.values() for entry in files.close()]
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
            "shards": entries,
            "tallies": dict(sorted(maker.tallies.items())),
        }
        text = json.dumps(record, separators=(",", ":")).encode("ascii")
        write_plainly(folder / _RECORD, text, mode=0o644)
        return {"num_lines": sum(num_lines)}

    def _lines(
        self,
        payload: Mapping[str, Any],
        maker: ContentMaker,
        shards: Mapping[str, SplitFiles],
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
    maker: ContentMaker, shards: Mapping[str, SplitFiles], fields: Fields, file: str, place: int
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
        self.crc32c = _extend(self.crc32c, bytes(self._buffer))
        with naming_os_errors("writing outcomes"), self._path.open("wb" if self._is_new else "ab") as file:
            file.write(self._buffer)
        self._is_new = False
        self._buffer.clear()


def _extend(checksum: int, piece: bytes) -> int:
    """Extend a checksum of checksums; a plain crc32c cannot be extended."""
    return crc32c(checksum.to_bytes(4, "little") + crc32c(piece).to_bytes(4, "little"))


def outcome_pieces(folder: Path, record: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the outcomes of a part, some at a time.

    Raises:
        StorageError: They cannot be read, or are not what the record says: the part is forgotten, and made
            again by the next run.
    """
    checksum = 0
    with naming_os_errors("reading outcomes"), (folder / _OUTCOMES).open("rb") as file:
        while piece := file.read(_BUFFER_LINES):
            checksum = _extend(checksum, piece)
            yield piece
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
    expected = {shard["path"]: shard["num_bytes"] for shard in record["shards"]}
    expected[_OUTCOMES] = sum(record["num_lines"])
    with naming_os_errors("looking for a part"):
        for name, num_bytes in expected.items():
            path = folder / name
            if not path.exists() or path.stat().st_size != num_bytes:
                return None
    return record
