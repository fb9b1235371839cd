"""Fragments: one packed study each, waiting in the work folder to become part of a shard.

A fragment is the contiguous tar members of one sample and a trailer: what became of the study, where its
fields lie, facts, checksums. Studies are packed in any order by any process; a shard is then the
concatenation of its fragments in planned order, which is how the same bytes come out of any number of
processes and restarts (see docs/adr/0030-fragments.md). A study that cannot be packed leaves a
fragment without members, so that a restart does not try it again.

Which attachment a packing process is converting, in a file that outlives the process.

A process that dies says nothing. Before each attachment it writes the position of that file in the study, and
takes the note back when all are converted; the job reads what is left when a study has failed, and knows
whether an attachment or the study did it (docs/adr/0031). No other process packs the study meanwhile.

Fields in the order of their names, though some are made long before their place comes.

Slices stream by; what is made beside them (masks, annotations, documents) waits here until the next name is
behind theirs.
"""

from __future__ import annotations

import heapq
import json
import os
import secrets
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, BinaryIO, Final, Self

import google_crc32c

from shardflow.errors import ChecksumError
from shardflow.format.index import FieldLocation
from shardflow.format.samples import SampleFacts
from shardflow.format.tar import BLOCK_NUM_BYTES, member_header, padding
from shardflow.packing.engines.base import decode
from shardflow.packing.workspace import storage_error, write_plainly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

_FOOTER: Final = struct.Struct("<II8s")
_MAGIC: Final = b"SFFRAG02"
# Stays in the second-level cache on its way from one file through checksum and digest to the other.
_COPY_BYTES: Final = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOutcome:
    """What became of one study and of each of its files."""

    outcome: str
    """``packed``, ``skipped`` or ``quarantined``."""
    reason: str | None = None
    """Code, unless packed."""
    instances: dict[int, str] = field(default_factory=dict)
    """Reason of each file (by its position in the study's list) that did not share the study's fate."""

    tallies: dict[str, int] = field(default_factory=dict)
    """What de-identification did how often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """The trailer of a fragment, checked."""

    sample_key: str
    task_digest: str
    """What the fragment depends on: settings, versions, headers and report of the study."""
    outcome: StudyOutcome
    facts: SampleFacts | None
    fields: tuple[FieldLocation, ...]
    """Offsets are relative to the sample's first byte."""
    num_bytes: int
    """Bytes of all members."""
    crc32c: int
    """Of all members."""


def fragment_path(folder: Path, sample_key: str) -> Path:
    """Place of a study's fragment; 1,024 folders keep each one small."""
    return folder / sample_key[:2] / f"{sample_key}.fragment"


class FragmentWriter:
    """Writes one fragment, which appears whole with `commit` or not at all; a context manager.

    Args:
        path: From `fragment_path`.
        sample_key: Key of the sample.
        task_digest: What the fragment depends on.
    """

    def __init__(self, path: Path, *, sample_key: str, task_digest: str) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        self._sample_key = sample_key
        self._task_digest = task_digest
        self._fields: list[FieldLocation] = []
        self._crc32c = google_crc32c.Checksum()
        self._num_bytes = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._temporary.open("xb", buffering=0)
        except OSError as error:
            raise storage_error("creating a fragment", error) from None

    @property
    def folder(self) -> Path:
        """Where the fragment is written; what is written aside for it may lie there, without a name."""
        return self._path.parent

    def add(self, name: str, payload: bytes) -> None:
        """Append a field; fields come in sorted order.

        Raises:
            StorageError: No space left, or the like.
        """
        parts = [member_header(f"{self._sample_key}.{name}", len(payload)), payload, padding(len(payload))]
        self._fields.append(
            FieldLocation(
                name=name,
                offset=self._num_bytes + BLOCK_NUM_BYTES,
                num_bytes=len(payload),
                crc32c=google_crc32c.value(payload),
            )
        )
        self._write(*parts)
        for part in parts:
            self._crc32c.update(part)
            self._num_bytes += len(part)

    def restart(self) -> None:
        """Forget the fields that were added."""
        try:
            self._file.seek(0)
            self._file.truncate()
        except OSError as error:
            raise storage_error("writing a fragment", error) from None
        self._fields = []
        self._crc32c = google_crc32c.Checksum()
        self._num_bytes = 0

    def commit(self, outcome: StudyOutcome, facts: SampleFacts | None) -> Fragment:
        """Close the fragment and give it its name; without facts it has no members."""
        if facts is None:
            self.restart()
        fragment = Fragment(
            sample_key=self._sample_key,
            task_digest=self._task_digest,
            outcome=outcome,
            facts=facts,
            fields=tuple(self._fields),
            num_bytes=self._num_bytes,
            crc32c=int.from_bytes(self._crc32c.digest(), "big"),
        )
        # A list for each of what may be thousands of fields: `asdict` copies them value by value.
        fields = [[field.name, field.offset, field.num_bytes, field.crc32c] for field in self._fields]
        rest = asdict(replace(fragment, fields=()))
        trailer = json.dumps({**rest, "fields": fields}, separators=(",", ":")).encode("ascii")
        self._write(trailer + _FOOTER.pack(len(trailer), google_crc32c.value(trailer), _MAGIC))
        try:
            self._file.close()
            self._temporary.replace(self._path)
        except OSError as error:
            raise storage_error("writing a fragment", error) from None
        return fragment

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, *parts: bytes) -> None:
        """Write parts one after another, without putting them together first."""
        rest = [memoryview(part) for part in parts if part]
        try:
            while rest:
                num_bytes = os.writev(self._file.fileno(), rest)
                while rest and num_bytes >= rest[0].nbytes:
                    num_bytes -= rest.pop(0).nbytes
                if rest:
                    rest[0] = rest[0][num_bytes:]
        except OSError as error:
            raise storage_error("writing a fragment", error) from None


def read_fragment(path: Path, task_digest: str) -> Fragment | None:
    """Read the trailer of a fragment; None where it is absent, torn, or depends on something else."""
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
    )


def copy_members(path: Path, fragment: Fragment) -> Iterator[bytes]:
    """Yield the members of a fragment in pieces, and check them on the way.

    Raises:
        ChecksumError: The bytes are not those that were written (after a power cut, say); the message names
            the sample.
        StorageError: They cannot be read.
    """
    checksum = google_crc32c.Checksum()
    remaining = fragment.num_bytes
    try:
        with path.open("rb", buffering=0) as file:
            while remaining and (piece := file.read(min(_COPY_BYTES, remaining))):
                checksum.update(piece)
                remaining -= len(piece)
                yield piece
    except OSError as error:
        raise storage_error("reading a fragment", error) from None
    if remaining or int.from_bytes(checksum.digest(), "big") != fragment.crc32c:
        raise ChecksumError(
            f"the fragment of sample {fragment.sample_key} must be as it was written, got other bytes; "
            "the study is packed again."
        )


@dataclass(frozen=True, slots=True)
class AttachmentMark:
    """The note of one study.

    Args:
        fragments: Folder of the fragments.
        sample_key: Key of the sample.
        task_digest: What its fragment depends on: a note of another task says nothing of this one.
    """

    fragments: Path
    sample_key: str
    task_digest: str

    def write(self, position: int) -> None:
        """Say that the file at a position of the study is converted from now on.

        Raises:
            StorageError: It cannot be written.
        """
        text = json.dumps({"task_digest": self.task_digest, "position": position})
        write_plainly(self._path, text.encode("ascii"))

    def clear(self) -> None:
        """Take the note back."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def read(self) -> int | None:
        """Return the position of the file that was under way; None if it was none."""
        # Cut where its writer died, or on a disk that is gone: then nobody knows, and the study answers.
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(self._path.read_bytes())
            if said["task_digest"] == self.task_digest:
                return int(said["position"])
        return None

    @property
    def _path(self) -> Path:
        return fragment_path(self.fragments, self.sample_key).with_suffix(".attaching")


class InOrder:
    """Writes fields of one sample, and those that wait between them.

    Args:
        writer: Of the study's fragment.
    """

    def __init__(self, writer: FragmentWriter) -> None:
        self._writer = writer
        self._waiting: list[tuple[str, bytes]] = []

    @property
    def folder(self) -> Path:
        """See `shardflow.packing.studies.fragment.FragmentWriter.folder`."""
        return self._writer.folder

    def hold(self, name: str, payload: bytes) -> None:
        """Take a field whose place comes with the first `add` of a name behind it, or with `finish`."""
        heapq.heappush(self._waiting, (name, payload))

    def add(self, name: str, payload: bytes) -> None:
        """Write a field, and before it those that wait and belong there.

        Raises:
            StorageError: No space left, or the like.
        """
        while self._waiting and self._waiting[0][0] < name:
            self._writer.add(*heapq.heappop(self._waiting))
        self._writer.add(name, payload)

    def finish(self) -> None:
        """Write what still waits."""
        while self._waiting:
            self._writer.add(*heapq.heappop(self._waiting))
