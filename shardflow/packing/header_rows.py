"""Header rows: what the header pass found, one JSON line for each input file, kept in the private folder.

The job keeps a few numbers per file in memory (`shardflow.packing.inventory`); everything else about a file
waits here until its study is packed, so that memory does not grow with the number of attributes. Rows hold
identifiers and therefore lie in the private folder, and only while the job runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shardflow.errors import SourceError, StorageError
from shardflow.packing.workplace import storage_error, write_plainly
from shardflow.sources.dicom import InstanceHeader, header_from_json, header_to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["HeaderRow", "RowPlace", "load_rows", "read_rows", "store_rows"]

RowPlace: TypeAlias = "tuple[str, int, int]"
"""Name of the file of rows, offset and number of bytes of one row."""

_END: Final = b"end\n"


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
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> HeaderRow:
        """Read what `to_json` wrote."""
        header = None if row["header"] is None else header_from_json(row["header"])
        identifiers = (row["patient_id"], row["study_instance_uid"], row["sop_instance_uid"])
        return cls(row["root"], row["path"], header, row["reason"], *identifiers)

    def instance_digest(self) -> int:
        """Return 64 bits that stand for the SOP Instance UID, to tell copies; 0 where it is missing."""
        uid = self.sop_instance_uid if self.header is None else self.header.sop_instance_uid
        return int.from_bytes(hashlib.sha256(uid.encode()).digest()[:8], "little") if uid else 0

    def digest(self) -> int:
        """Return 64 bits of the row's content: equal for a file that was moved or renumbered."""
        content = self.to_json()
        del content["root"], content["path"]
        if content["header"] is not None:
            del content["header"]["file_index"]
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
        for name, offset, num_bytes in places:
            if name not in descriptors:
                descriptors[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            rows.append(HeaderRow.from_json(json.loads(os.pread(descriptors[name], num_bytes, offset))))
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
    # ASCII: a file name that is not UTF-8 travels as lone surrogates, which only escapes can carry.
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")
