"""Assembler of shards: concatenates fragments into a tar with its index, and checks shards of earlier runs.

Runs in a packing process. A shard is written, fsynced and renamed before its record is, which has the facts
of its series beside it; its fragments are removed after that: at any moment either the fragments or a whole
shard with its record exist. A shard without a record is assembled again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardflow.errors import naming_os_errors
from shardflow.format.facts.making import write_shard_facts
from shardflow.format.facts.voxels import write_shard_voxels
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.keys import STUDY_FIELD
from shardflow.format.shard_files import write_file
from shardflow.format.tar import END_OF_ARCHIVE
from shardflow.packing.studies.fragment import (
    DamagedFragmentError,
    Fragment,
    copy_members,
    fragment_path,
    read_fragment,
)
from shardflow.packing.studies.tasks import CheckDone, ShardDone
from shardflow.packing.workspace import write_plainly

if TYPE_CHECKING:
    from shardflow.format.manifest import FileEntry
    from shardflow.format.volumes.bricks import StoredVolume
    from shardflow.packing.studies.tasks import CheckTask, ShardTask
    from shardflow.packing.workspace import Workspace


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembler:
    """Assembles shards from fragments."""

    workspace: Workspace

    def assemble(self, task: ShardTask) -> ShardDone:
        """Write a shard, its index and its record; then remove the fragments.

        Raises:
            StorageError: A file cannot be written.
        """
        name, output = task.name, self.workspace.output
        places = {
            one.sample_key: fragment_path(self.workspace.fragments, one.sample_key) for one in task.fragments
        }
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
            "num_volumes": 0,
            "samples": [],
        }
        if packed:
            try:
                record["tar"] = _entry(write_file(output, f"shards/{name}.tar", _members(packed)))
            except DamagedFragmentError as error:
                with suppress(OSError):
                    places[error.sample_key].unlink()
                return ShardDone(missing=(error.sample_key,))
            num_bytes = record["tar"]["num_bytes"]
            record["samples"], table = _index(name, num_bytes, [part for _, part in packed])
            record["num_volumes"] = sum(len(part.volumes) for _, part in packed)
            record["index"] = _entry(write_file(output, f"shards/{name}.idx", [table]))
            # The tables of facts are made of these parts, wherever the shards are by then.
            studies = _studies(output / f"shards/{name}.tar", [part for _, part in packed])
            write_shard_facts(self.workspace.records, record["tar"]["sha256"], studies)
            voxels = [part.voxels for _, part in packed]
            write_shard_voxels(self.workspace.records, record["tar"]["sha256"], voxels)
        record["outcomes"] = {part.sample_key: asdict(part.outcome) for part in parts}
        text = json.dumps(record, separators=(",", ":")).encode("ascii")
        write_plainly(self.workspace.records / f"{name}.json", text, mode=0o644)
        for path in places.values():
            with suppress(OSError):
                path.unlink()
        return ShardDone(missing=())

    def check(self, task: CheckTask) -> CheckDone:
        """Check whether a shard of a former run exists and is whole."""
        record = load_record(self.workspace.records, task.name)
        if record is None or record["digest"] != task.digest:
            return CheckDone(is_whole=False)
        if task.trusts_sizes:
            return CheckDone(is_whole=has_sizes(self.workspace.output, record))
        files = [(f"{task.name}.tar", record["tar"]), (f"{task.name}.idx", record["index"])]
        shards = self.workspace.output / "shards"
        return CheckDone(
            is_whole=all(entry is None or _has_digest(shards / name, entry) for name, entry in files)
        )


def _members(parts: Sequence[tuple[Path, Fragment]]) -> Iterator[bytes]:
    for path, fragment in parts:
        yield from copy_members(path, fragment)
    yield END_OF_ARCHIVE


def _studies(path: Path, parts: Sequence[Fragment]) -> Iterator[bytes]:
    """Yield ``study.json`` of each sample of a shard that was just written."""
    start = 0
    with naming_os_errors("reading a shard back"), path.open("rb", buffering=0) as file:
        for part in parts:
            (study,) = (field for field in part.fields if field.name == STUDY_FIELD)
            yield os.pread(file.fileno(), study.num_bytes, start + study.offset)
            start += part.num_bytes


def _entry(file: FileEntry) -> dict[str, Any]:
    return {"num_bytes": file.num_bytes, "sha256": file.sha256}


def load_record(folder: Path, name: str) -> dict[str, Any] | None:
    """Read the record of a shard; None if the shard does not exist."""
    try:
        record: dict[str, Any] = json.loads((folder / f"{name}.json").read_bytes())
    except (OSError, ValueError):
        return None
    return record


def has_sizes(output: Path, record: Mapping[str, Any]) -> bool:
    """Return whether the files of a shard exist with the sizes of its record.

    They were on disk before the record was, so sizes only miss later damage.
    """
    with naming_os_errors("looking for a shard"):
        for suffix, entry in (("tar", record["tar"]), ("idx", record["index"])):
            path = output / "shards" / f"{record['name']}.{suffix}"
            if entry is not None and not (path.exists() and path.stat().st_size == entry["num_bytes"]):
                return False
    return True


def _index(name: str, num_bytes: int, parts: Sequence[Fragment]) -> tuple[list[dict[str, Any]], bytes]:
    """Locate the fields in the shard; return one row for each sample, and the index."""
    samples: list[dict[str, Any]] = []
    located = []
    volumes: list[tuple[int, StoredVolume]] = []
    offset = num_fields = 0
    for part in parts:
        numbers = {place.name: num_fields + number for number, place in enumerate(part.fields)}
        volumes += [(numbers[name], volume) for name, volume in part.volumes]
        num_fields += len(part.fields)
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
    return samples, ShardIndex.encode(name, num_bytes, located, volumes)


def _has_digest(path: Path, entry: Mapping[str, Any]) -> bool:
    with naming_os_errors("reading a shard back"):
        if not path.exists() or path.stat().st_size != entry["num_bytes"]:
            return False
        with path.open("rb") as file:
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"])
