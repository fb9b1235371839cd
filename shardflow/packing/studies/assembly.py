"""Fragments and shards: one file for each packed study, and their assembly into shards.

A fragment is the contiguous tar members of one sample and a trailer: the outcome of the study, the places
of its fields, facts, checksums. Studies are packed in any order by any process, and a shard is the
concatenation of its fragments in planned order: this makes its bytes independent of the number of processes
and restarts (docs/adr/0030). A study that cannot be packed leaves a fragment without members, so that a
restart does not try it again.

A shard is written, fsynced and renamed before its record is, which has the facts of its series beside it;
its fragments are removed after that: at any moment either the fragments or a whole shard with its record
exist. A shard without a record is assembled again. `Assembler` does this in a packing process.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import secrets
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self

import google_crc32c
import numpy as np

from shardflow.errors import naming_os_errors
from shardflow.format.facts.making import write_shard_facts
from shardflow.format.facts.sampling import ClassVoxels
from shardflow.format.facts.voxels import write_shard_voxels
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.keys import STUDY_FIELD
from shardflow.format.samples import SampleFacts
from shardflow.format.shard_files import write_file
from shardflow.format.tar import BLOCK_NUM_BYTES, END_OF_ARCHIVE, member_header, padding
from shardflow.format.volumes.bricks import BRICK_COLUMNS, EncodedVolume, Extents, StoredVolume
from shardflow.packing.engines.base import decode
from shardflow.packing.studies.tasks import CheckDone, ShardDone, StudyOutcome
from shardflow.packing.workspace import write_plainly

if TYPE_CHECKING:
    from types import TracebackType

    from shardflow.format.manifest import FileEntry
    from shardflow.packing.studies.tasks import CheckTask, ShardTask
    from shardflow.packing.workspace import Workspace

_FOOTER: Final = struct.Struct("<II8s")
_MAGIC: Final = b"SFFRAG04"
# Members of slices are a few hundred KB: some of them are written by one call.
_WRITE_BYTES: Final = 1 << 20
_MAX_PARTS: Final = 512
"""Parts of one call; Linux and macOS take 1,024."""
# Small enough to stay in the second-level cache between read, checksum, digest and write.
_COPY_BYTES: Final = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """Verified trailer of a fragment."""

    sample_key: str
    task_digest: str
    """Of all that the fragment depends on: settings, versions, headers and report of the study."""
    outcome: StudyOutcome
    facts: SampleFacts | None
    fields: tuple[FieldLocation, ...]
    """Offsets are relative to the sample's first byte."""
    num_bytes: int
    """Bytes of all members."""
    crc32c: int
    """Of all members."""
    volumes: tuple[tuple[str, StoredVolume], ...] = ()
    """Fields that are volumes in bricks."""
    voxels: tuple[ClassVoxels, ...] = ()
    """Sampled voxels of its classes."""


class DamagedFragmentError(Exception):
    """A fragment holds other bytes than were written: its study is packed again. Never leaves the package."""

    def __init__(self, sample_key: str) -> None:
        super().__init__(sample_key)
        self.sample_key = sample_key


def fragment_path(folder: Path, sample_key: str) -> Path:
    """Return the path of a study's fragment; 1,024 folders keep each one small."""
    return folder / sample_key[:2] / f"{sample_key}.fragment"


class FragmentWriter:
    """Writer of one fragment, which appears whole with `commit` or not at all; a context manager.

    Slices stream by in the order of their names. Fields that are made beside them (masks, annotations,
    documents) are held until the next name sorts behind theirs.

    Args:
        path: From `fragment_path`.
        sample_key: Key of the sample.
        task_digest: Of all that the fragment depends on.
    """

    def __init__(self, path: Path, *, sample_key: str, task_digest: str) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        self._sample_key = sample_key
        self._task_digest = task_digest
        self._forget()
        with naming_os_errors("creating a fragment"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._temporary.open("xb", buffering=0)

    @property
    def folder(self) -> Path:
        """Folder of the fragment, for unnamed temporary files beside it."""
        return self._path.parent

    def hold(self, name: str, payload: bytes | EncodedVolume) -> None:
        """Take a field that is written before the first `add` of a later name, or by `commit`."""
        heapq.heappush(self._held, (name, payload))

    def add(self, name: str, payload: bytes) -> None:
        """Append a field, after the held fields that sort before it; names come in sorted order.

        Raises:
            StorageError: There is no space left, or the disk fails.
        """
        while self._held and self._held[0][0] < name:
            self._append_held()
        self._append(name, payload)

    def add_volume(self, name: str, volume: EncodedVolume) -> None:
        """Append a volume in bricks, see `add`."""
        while self._held and self._held[0][0] < name:
            self._append_held()
        self._append_volume(name, volume)

    def _append_held(self) -> None:
        name, payload = heapq.heappop(self._held)
        if isinstance(payload, bytes):
            self._append(name, payload)
        else:
            self._append_volume(name, payload)

    def _append_volume(self, name: str, volume: EncodedVolume) -> None:
        start, checksum = self._num_bytes + BLOCK_NUM_BYTES, 0
        self._append_bytes(member_header(f"{self._sample_key}.{name}", volume.num_bytes))
        for piece in volume.pieces:
            checksum = google_crc32c.extend(checksum, piece)
            self._append_bytes(piece)
        self._append_bytes(padding(volume.num_bytes))
        self._fields.append(FieldLocation(name, start, volume.num_bytes, checksum))
        self._volumes.append((name, volume.stored))

    def _append(self, name: str, payload: bytes) -> None:
        self._fields.append(
            FieldLocation(
                name=name,
                offset=self._num_bytes + BLOCK_NUM_BYTES,
                num_bytes=len(payload),
                crc32c=google_crc32c.value(payload),
            )
        )
        header = member_header(f"{self._sample_key}.{name}", len(payload))
        self._append_bytes(header, payload, padding(len(payload)))

    def _append_bytes(self, *parts: bytes) -> None:
        self._waiting += parts
        num_bytes = sum(map(len, parts))
        self._num_bytes += num_bytes
        self._num_waiting += num_bytes
        if self._num_waiting >= _WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        for part in self._waiting:
            self._crc32c.update(part)
        self._write(self._waiting)
        self._waiting.clear()
        self._num_waiting = 0

    def restart(self) -> None:
        """Drop all fields."""
        with naming_os_errors("writing a fragment"):
            self._file.seek(0)
            self._file.truncate()
        self._forget()

    def _forget(self) -> None:
        self._held: list[tuple[str, bytes | EncodedVolume]] = []
        self._fields: list[FieldLocation] = []
        self._volumes: list[tuple[str, StoredVolume]] = []
        self._crc32c = google_crc32c.Checksum()
        self._num_bytes = 0
        self._waiting: list[bytes] = []
        self._num_waiting = 0

    def commit(
        self, outcome: StudyOutcome, facts: SampleFacts | None, voxels: Sequence[ClassVoxels] = ()
    ) -> Fragment:
        """Finish the fragment and rename it into place; without facts it has no members."""
        if facts is None:
            self.restart()
        while self._held:
            self._append_held()
        self._flush()
        fragment = Fragment(
            sample_key=self._sample_key,
            task_digest=self._task_digest,
            outcome=outcome,
            facts=facts,
            fields=tuple(self._fields),
            num_bytes=self._num_bytes,
            crc32c=int.from_bytes(self._crc32c.digest(), "big"),
            volumes=tuple(self._volumes),
            voxels=tuple(voxels),
        )
        # Thousands of fields: lists are cheaper than `asdict`, which deep-copies every value.
        fields = [[field.name, field.offset, field.num_bytes, field.crc32c] for field in self._fields]
        rest = asdict(replace(fragment, fields=(), volumes=(), voxels=()))
        volumes = [_volume_to_json(name, volume) for name, volume in self._volumes]
        whole = {**rest, "fields": fields, "volumes": volumes, "voxels": [*map(_voxels_to_json, voxels)]}
        trailer = json.dumps(whole, separators=(",", ":")).encode("ascii")
        self._write([trailer, _FOOTER.pack(len(trailer), google_crc32c.value(trailer), _MAGIC)])
        with naming_os_errors("writing a fragment"):
            self._file.close()
            self._temporary.replace(self._path)
        return fragment

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, parts: Sequence[bytes]) -> None:
        """Write parts one after another, without joining them."""
        rest = [memoryview(part) for part in parts if part]
        with naming_os_errors("writing a fragment"):
            while rest:
                num_bytes = os.writev(self._file.fileno(), rest[:_MAX_PARTS])
                while rest and num_bytes >= rest[0].nbytes:
                    num_bytes -= rest.pop(0).nbytes
                if rest:
                    rest[0] = rest[0][num_bytes:]


def read_fragment(path: Path, task_digest: str) -> Fragment | None:
    """Read the trailer of a fragment; None if it is missing, torn, or of another digest."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            footer = os.pread(file.fileno(), _FOOTER.size, max(0, size - _FOOTER.size))
            if len(footer) != _FOOTER.size:
                return None
            num_bytes, checksum, magic = _FOOTER.unpack(footer)
            start = size - _FOOTER.size - num_bytes
            if magic != _MAGIC or start < 0:
                return None
            trailer = os.pread(file.fileno(), num_bytes, start)
    except OSError:
        return None
    if google_crc32c.value(trailer) != checksum:
        return None
    fields = json.loads(trailer)
    if fields["task_digest"] != task_digest or fields["num_bytes"] != start:
        return None
    return Fragment(
        sample_key=fields["sample_key"],
        task_digest=task_digest,
        outcome=decode(StudyOutcome, fields["outcome"]),
        facts=None if fields["facts"] is None else SampleFacts(**fields["facts"]),
        fields=tuple(FieldLocation(*location) for location in fields["fields"]),
        num_bytes=fields["num_bytes"],
        crc32c=fields["crc32c"],
        volumes=tuple(_volume_from_json(*volume) for volume in fields["volumes"]),
        voxels=tuple(_voxels_from_json(*one) for one in fields["voxels"]),
    )


def _volume_to_json(name: str, volume: StoredVolume) -> list[Any]:
    columns = {key: b64encode(column.tobytes()).decode("ascii") for key, column in volume.columns.items()}
    return [name, volume.shape, volume.brick_shape, volume.dtype.str, volume.first_chunk, columns]


def _volume_from_json(
    name: str, shape: Extents, brick_shape: Extents, dtype: str, first_chunk: int, columns: Mapping[str, str]
) -> tuple[str, StoredVolume]:
    found = {key: np.frombuffer(b64decode(columns[key]), kind) for key, kind in BRICK_COLUMNS.items()}
    return name, StoredVolume(shape, brick_shape, np.dtype(dtype), first_chunk, found)


def _voxels_to_json(one: ClassVoxels) -> list[Any]:
    return [one.series, one.name, one.num_voxels, one.voxels.tolist(), list(one.box)]


def _voxels_from_json(
    series: int, name: str, num_voxels: int, voxels: list[list[int]], box: list[int]
) -> ClassVoxels:
    return ClassVoxels(series, name, num_voxels, np.array(voxels, np.uint16).reshape(-1, 3), tuple(box))


def copy_members(path: Path, fragment: Fragment) -> Iterator[bytes]:
    """Yield the members of a fragment in pieces, verifying their checksum.

    Raises:
        DamagedFragmentError: The bytes differ from those that were written, after a power cut for example.
        StorageError: They cannot be read.
    """
    checksum = google_crc32c.Checksum()
    remaining = fragment.num_bytes
    with naming_os_errors("reading a fragment"), path.open("rb", buffering=0) as file:
        while remaining and (piece := file.read(min(_COPY_BYTES, remaining))):
            checksum.update(piece)
            remaining -= len(piece)
            yield piece
    if remaining or int.from_bytes(checksum.digest(), "big") != fragment.crc32c:
        raise DamagedFragmentError(fragment.sample_key)


@dataclass(frozen=True, slots=True)
class AttachmentMark:
    """Note on disk of the attachment that is being converted, which outlives a crash of its process.

    A packing process writes the position of each attachment before converting it, and removes the note when
    all are converted. After a crash the job reads the note, and knows whether an attachment or the study
    itself caused it (docs/adr/0031). No other process packs the study meanwhile.

    Args:
        fragments: Folder of the fragments.
        sample_key: Key of the sample.
        task_digest: Digest of the study's task; notes of other tasks are ignored.
    """

    fragments: Path
    sample_key: str
    task_digest: str

    def write(self, position: int) -> None:
        """Note that the file at a position of the study is now being converted.

        Raises:
            StorageError: The note cannot be written.
        """
        text = json.dumps({"task_digest": self.task_digest, "position": position})
        write_plainly(self._path, text.encode("ascii"))

    def clear(self) -> None:
        """Remove the note."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def read(self) -> int | None:
        """Return the position of the file that was being converted, or None."""
        # The note may be torn, or its disk gone: the crash is then attributed to the study.
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = json.loads(self._path.read_bytes())
            if note["task_digest"] == self.task_digest:
                return int(note["position"])
        return None

    @property
    def _path(self) -> Path:
        return fragment_path(self.fragments, self.sample_key).with_suffix(".attaching")


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
