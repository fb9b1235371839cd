"""Header rows: what the header pass found, one JSON line for each input file, kept in the private folder.

The job keeps a few numbers per file in memory (`shardflow.packing.inventory`); everything else about a file
waits here until its study is packed, so that memory does not grow with the number of attributes. Rows hold
identifiers and therefore lie in the private folder, and only while the job runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import SourceError, StorageError
from shardflow.packing.workplace import storage_error, write_plainly
from shardflow.sources.attachments import AttachmentItem
from shardflow.sources.dicom import InstanceHeader, header_from_json, header_to_json
from shardflow.sources.layouts import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["AttachmentRow", "HeaderRow", "RowPlace", "load_rows", "read_rows", "store_rows"]

_END: Final = b"end\n"
# ASCII: a file name that is not UTF-8 travels as lone surrogates, which only escapes can carry.
_ENCODER: Final = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where one header row is stored."""

    name: str
    """Of the file of rows."""
    offset: int
    num_bytes: int


# Facts of an image by which attachments are linked with its study: they decide none of its bytes.
_LINKING: Final = ("accession_number", "study_date", "study_time")


@dataclass(frozen=True, slots=True)
class AttachmentRow:
    """What the header pass found out about an attachment; private as all of a row."""

    kind: str
    """Name of the `shardflow.sources.attachments.AttachmentKind`."""
    version: int
    content: str
    """Digest of what the file holds."""
    items: tuple[AttachmentItem, ...]
    study_beside: str = ""
    """Study of the layout in whose place the file lies."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        items = [
            {**asdict(item), "time": None if item.time is None else item.time.isoformat()}
            for item in self.items
        ]
        return {
            "kind": self.kind,
            "version": self.version,
            "content": self.content,
            "items": items,
            "study_beside": self.study_beside,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> AttachmentRow:
        """Read what `to_json` wrote."""
        items = tuple(
            AttachmentItem(
                item=item["item"],
                study_uids=tuple(item["study_uids"]),
                series_uids=tuple(item["series_uids"]),
                sop_uids=tuple(item["sop_uids"]),
                accession=item["accession"],
                patient_id=item["patient_id"],
                time=None if item["time"] is None else datetime.fromisoformat(item["time"]),
                content=item["content"],
            )
            for item in row["items"]
        )
        return cls(row["kind"], row["version"], row["content"], items, row["study_beside"])


@dataclass(frozen=True, slots=True)
class HeaderRow:
    """One input file after the header pass."""

    root_index: int
    relative_path: str
    header: InstanceHeader | None = None
    """None where the file cannot be packed; then there is a reason."""
    reason: str | None = None
    patient_id: str = ""
    """Of a file that cannot be packed and still says where it belongs; else empty."""
    study_instance_uid: str = ""
    sop_instance_uid: str = ""
    placement: Placement | None = None
    """What the layout says of the file."""
    attachment: AttachmentRow | None = None
    """Set for a file that is no image and that a kind of attachments knows."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return {
            "root": self.root_index,
            "path": self.relative_path,
            "header": None if self.header is None else header_to_json(self.header),
            "reason": self.reason,
            "patient_id": self.patient_id,
            "study_instance_uid": self.study_instance_uid,
            "sop_instance_uid": self.sop_instance_uid,
            # Absent where there is none: the digest of a row says whether an input is known already.
            **({} if self.placement is None else {"placement": self.placement.to_json()}),
            **({} if self.attachment is None else {"attachment": self.attachment.to_json()}),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> HeaderRow:
        """Read what `to_json` wrote."""
        header = None if row["header"] is None else header_from_json(row["header"])
        identifiers = (row["patient_id"], row["study_instance_uid"], row["sop_instance_uid"])
        placed = row.get("placement")
        placement = None if placed is None else Placement.from_json(placed)
        found = row.get("attachment")
        attachment = None if found is None else AttachmentRow.from_json(found)
        return cls(row["root"], row["path"], header, row["reason"], *identifiers, placement, attachment)

    def instance_digest(self) -> int:
        """Return 64 bits that stand for the SOP Instance UID, to tell copies; 0 where it is missing."""
        uid = self.sop_instance_uid if self.header is None else self.header.sop_instance_uid
        # A layout may name an image by its path, and a path need not be UTF-8.
        encoded = uid.encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "little") if uid else 0

    def digest(self) -> int:
        """Return 64 bits of the row's content: equal for a file that was moved or renumbered.

        The split is no content: it is the patient's, and the plan holds it in the names of its shards. Nor
        are further identifiers of the study, which only its report is searched for.
        """
        if self.attachment is not None:
            # Not what a kind makes of it: a later version of shardflow knows the file again.
            return int(self.attachment.content[:16], 16)
        content = self.to_json()
        del content["root"], content["path"]
        if "placement" in content:
            content["placement"]["split"] = ""
            del content["placement"]["other_ids"]
        if content["header"] is not None:
            for name in ("file_index", *_LINKING):
                del content["header"][name]
        return int.from_bytes(hashlib.sha256(_encode(content)).digest()[:8], "little")


def store_rows(path: Path, digest: str, rows: Sequence[HeaderRow]) -> list[tuple[int, int]]:
    """Write the rows of a batch of files.

    Args:
        path: File in the private folder.
        digest: What the batch depends on; `load_rows` takes the file only for the same digest.
        rows: One for each input file.

    Returns:
        Offset and number of bytes of each row in the file.
    """
    lines = [_encode(row.to_json()) + b"\n" for row in rows]
    places: list[tuple[int, int]] = []
    offset = len(digest) + 1
    for line in lines:
        places.append((offset, len(line)))
        offset += len(line)
    write_plainly(path, b"".join([digest.encode(), b"\n", *lines, _END]))
    return places


def load_rows(path: Path, digest: str) -> tuple[list[HeaderRow], list[tuple[int, int]]] | None:
    """Read a batch's rows and their places back; None where absent, torn or of another digest."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(digest) + 1
    if data[:start] != digest.encode() + b"\n" or not data.endswith(b"\n" + _END):
        return None
    lines = data[start : -len(_END)].splitlines(keepends=True)
    places: list[tuple[int, int]] = []
    for line in lines:
        places.append((start, len(line)))
        start += len(line)
    try:
        return [HeaderRow.from_json(json.loads(line)) for line in lines], places
    except (ValueError, KeyError, TypeError, SourceError):
        return None


def read_rows(folder: Path, places: Sequence[RowPlace]) -> list[HeaderRow]:
    """Read single rows, in the order of ``places``.

    Raises:
        StorageError: A row cannot be read back; the header pass has to run again.
    """
    rows: list[HeaderRow] = []
    descriptors: dict[str, int] = {}
    try:
        for place in places:
            if place.name not in descriptors:
                descriptors[place.name] = os.open(folder / place.name, os.O_RDONLY | os.O_CLOEXEC)
            line = os.pread(descriptors[place.name], place.num_bytes, place.offset)
            rows.append(HeaderRow.from_json(json.loads(line)))
    except OSError as error:
        raise storage_error("reading header rows of the private folder", error) from None
    except (ValueError, KeyError, TypeError, SourceError) as error:
        raise StorageError(
            f"header rows must be as they were written, got {type(error).__name__}; "
            "remove the headers folder in the private folder and run the job again."
        ) from None
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return rows


def _encode(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("ascii")
