"""The header pass over one batch of files; runs in a packing process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import SourceError
from shardflow.packing.header_rows import HeaderRow, load_rows, store_rows
from shardflow.sources.dicom import BrokenInstance, HeaderLimits, InstanceHeader, read_header

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from shardflow.deid.pseudonyms import SecretKey

__all__ = ["NUM_BUCKETS", "Scanner", "decoded_num_bytes"]

NUM_BUCKETS: Final = 10_000
"""Patients are dealt to splits by one of so many keyed buckets; part of the format of a split, never
changed."""

# Raised when a header row means something else than before: rows of another version are read anew.
_ROWS_VERSION: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Scanner:
    """Reads headers and turns identifiers into surrogates at once: the job itself never sees one."""

    roots: tuple[Path, ...]
    folder: Path
    """Where header rows go."""
    key: SecretKey
    limits: HeaderLimits

    def scan(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Read the headers of a batch, or take them from a former run.

        Args:
            payload: ``name`` of the file of rows, ``files`` as ``[root_index, relative_path, num_bytes,
                reason]`` each; a file with a reason is not opened.

        Returns:
            ``rows``: for each file its surrogate, reason, study and patient surrogates, bucket, decoded
            bytes, slices, instance digest, content digest, modification time, and the offset and size of its
            row.
        """
        files = [(int(root), str(path), int(size), reason) for root, path, size, reason in payload["files"]]
        times = [self._modified_ns(root, path) for root, path, _, _ in files]
        digest = self._digest(files, times)
        path = self.folder / str(payload["name"])
        stored = load_rows(path, digest)
        if stored is None:
            rows = [self._read(root, name, reason) for root, name, _, reason in files]
            stored = rows, store_rows(path, digest, rows)
        return {
            "rows": [
                [*self._facts(row), modified_ns, *place]
                for row, place, modified_ns in zip(*stored, times, strict=True)
            ]
        }

    def _read(self, root_index: int, relative_path: str, reason: str | None) -> HeaderRow:
        row = HeaderRow(root_index, relative_path, reason=reason)
        if reason is not None:
            return row
        try:
            header = read_header(self.roots[root_index] / relative_path, limits=self.limits)
        except SourceError as error:
            return replace(row, reason=error.reason)
        if isinstance(header, BrokenInstance):
            return replace(
                row,
                reason=header.reason.value,
                patient_id=header.patient_id,
                study_instance_uid=header.study_instance_uid,
                sop_instance_uid=header.sop_instance_uid,
            )
        return replace(row, header=header)

    def _facts(self, row: HeaderRow) -> list[Any]:
        surrogate = self.key.surrogate("input", f"{row.root_index}/{row.relative_path}")
        header = row.header
        patient = row.patient_id if header is None else header.patient_id
        study = row.study_instance_uid if header is None else header.study_instance_uid
        return [
            surrogate,
            row.reason,
            self.key.surrogate("study", study) if study else "",
            self.key.surrogate("patient", patient) if patient else "",
            self.key.bucket("split", patient, NUM_BUCKETS) if patient else 0,
            0 if header is None else decoded_num_bytes(header),
            0 if header is None else header.image.num_frames,
            row.instance_digest(),
            row.digest(),
        ]

    def _modified_ns(self, root_index: int, relative_path: str) -> int:
        try:
            return (self.roots[root_index] / relative_path).stat().st_mtime_ns
        except (OSError, ValueError):
            return 0

    def _digest(self, files: Sequence[tuple[int, str, int, str | None]], times: Sequence[int]) -> str:
        limits = [getattr(self.limits, name) for name in HeaderLimits.__slots__]
        text = json.dumps([_ROWS_VERSION, self.key.key_id, limits, [*map(str, self.roots)], files, times])
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def decoded_num_bytes(header: InstanceHeader) -> int:
    """Return how many bytes the slices of an instance take once decoded, from what its header declares."""
    image = header.image
    samples = image.rows * image.columns * (3 if image.is_colour else 1) * image.num_frames
    return samples * max(1, -(-image.bits_allocated // 8))
