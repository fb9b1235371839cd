"""Assemble one shard from its fragments, and check one that stands; runs in a packing process.

A shard is written, fsynced and renamed before its record is, and its fragments are removed after that: at any
moment either the fragments or a whole shard with its record stand. A shard without a record is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import ChecksumError
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.tar import END_OF_ARCHIVE
from shardflow.packing.studies.fragment import Fragment, copy_members, fragment_path, read_fragment
from shardflow.packing.studies.tasks import CheckDone, ShardDone
from shardflow.packing.workspace import storage_error, write_plainly
from shardflow.storage.local import write_atomic

if TYPE_CHECKING:
    from shardflow.packing.studies.tasks import CheckTask, ShardTask

_READ_BYTES: Final = 1 << 22


class _DigestingCopy:
    """Copies the members of fragments, taking size and SHA-256 on the way."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()
        self.damaged: str | None = None

    def chunks(self, parts: Sequence[tuple[Path, Fragment]]) -> Iterator[bytes]:
        for path, fragment in parts:
            try:
                for piece in copy_members(path, fragment):
                    yield self._count(piece)
            except ChecksumError:
                self.damaged = fragment.sample_key
                raise
        yield self._count(END_OF_ARCHIVE)

    def _count(self, piece: bytes) -> bytes:
        self.num_bytes += len(piece)
        self.sha256.update(piece)
        return piece


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembler:
    """Makes shards out of fragments, with the folders that all of them share."""

    output: Path
    fragments: Path
    records: Path

    def assemble(self, task: ShardTask) -> ShardDone:
        """Write a shard, its index and its record; then remove the fragments.

        Raises:
            StorageError: A file cannot be written.
        """
        name = task.name
        places = {one.sample_key: fragment_path(self.fragments, one.sample_key) for one in task.fragments}
        found = [read_fragment(places[one.sample_key], one.task_digest) for one in task.fragments]
        missing = [one.sample_key for one, part in zip(task.fragments, found, strict=True) if part is None]
        if missing:
            return ShardDone(missing=tuple(missing))
        parts = [fragment for fragment in found if fragment is not None]
        packed = [(places[part.sample_key], part) for part in parts if part.facts is not None]
        record: dict[str, Any] = {
            "digest": task.digest,
            "name": name,
            "tar": None,
            "index": None,
            "samples": [],
        }
        if packed:
            copy = _DigestingCopy()
            try:
                write_atomic(self.output / "shards" / f"{name}.tar", copy.chunks(packed), replace=True)
            except ChecksumError:
                with suppress(OSError):
                    places[str(copy.damaged)].unlink()
                return ShardDone(missing=(str(copy.damaged),))
            record["tar"] = {"num_bytes": copy.num_bytes, "sha256": copy.sha256.hexdigest()}
            samples, table = _index(name, copy.num_bytes, [part for _, part in packed])
            write_atomic(self.output / "shards" / f"{name}.idx", [table], replace=True)
            record["index"] = {"num_bytes": len(table), "sha256": hashlib.sha256(table).hexdigest()}
            record["samples"] = samples
        record["outcomes"] = {part.sample_key: asdict(part.outcome) for part in parts}
        text = json.dumps(record, separators=(",", ":")).encode("ascii")
        write_plainly(self.records / f"{name}.json", text, mode=0o644)
        for path in places.values():
            with suppress(OSError):
                path.unlink()
        return ShardDone(missing=())

    def check(self, task: CheckTask) -> CheckDone:
        """Check whether a shard of a former run exists and is whole."""
        record = load_record(self.records, task.name)
        if record is None or record["digest"] != task.digest:
            return CheckDone(is_whole=False)
        if task.trusts_sizes:
            return CheckDone(is_whole=has_sizes(self.output, record))
        files = [(f"{task.name}.tar", record["tar"]), (f"{task.name}.idx", record["index"])]
        return CheckDone(
            is_whole=all(
                entry is None or _has_digest(self.output / "shards" / file, entry) for file, entry in files
            )
        )


def load_record(folder: Path, name: str) -> dict[str, Any] | None:
    """Read what is known of a shard; None where it does not stand."""
    try:
        record: dict[str, Any] = json.loads((folder / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return record


def has_sizes(output: Path, record: Mapping[str, Any]) -> bool:
    """Tell whether the files of a shard stand with the sizes of its record.

    They were on the disk before the record was, so this misses only what happened to them later.
    """
    for suffix, entry in (("tar", record["tar"]), ("idx", record["index"])):
        path = output / "shards" / f"{record['name']}.{suffix}"
        try:
            if entry is not None and path.stat().st_size != entry["num_bytes"]:
                return False
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error("looking for a shard", error) from None
    return True


def _index(name: str, num_bytes: int, parts: Sequence[Fragment]) -> tuple[list[dict[str, Any]], bytes]:
    """Move the fields to their places in the shard; return the samples' rows and the index."""
    samples: list[dict[str, Any]] = []
    located = []
    offset = 0
    for part in parts:
        places = [
            FieldLocation(place.name, place.offset + offset, place.num_bytes, place.crc32c)
            for place in part.fields
        ]
        located.append((part.sample_key, places))
        samples.append(
            {
                "sample_key": part.sample_key,
                "offset_bytes": offset,
                "num_bytes": part.num_bytes,
                "num_fields": len(part.fields),
                "facts": None if part.facts is None else asdict(part.facts),
            }
        )
        offset += part.num_bytes
    return samples, ShardIndex.encode(name, num_bytes, located)


def _has_digest(path: Path, entry: Mapping[str, Any]) -> bool:
    hasher = hashlib.sha256()
    try:
        if path.stat().st_size != entry["num_bytes"]:
            return False
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_READ_BYTES):
                hasher.update(piece)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise storage_error("reading a shard back", error) from None
    return bool(hasher.hexdigest() == entry["sha256"])
