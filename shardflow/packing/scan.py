"""The header pass over one batch of files; runs in a packing process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from shardflow.errors import SourceError
from shardflow.packing.finding import AttachmentFinder
from shardflow.packing.header_rows import AttachmentRow, HeaderRow, load_rows, store_rows
from shardflow.packing.inventory import Attachment, ScannedFile
from shardflow.packing.links import digest64, image_facts, link_facts
from shardflow.packing.tasks import ProbeDone, ScanDone
from shardflow.sources.dicom import BrokenInstance, HeaderLimits, InstanceHeader
from shardflow.sources.images import read_image
from shardflow.sources.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardflow.deid.pseudonyms import SecretKey
    from shardflow.packing.tasks import InputFile, ProbeTask, ScanTask
    from shardflow.sources.layouts import Placement

__all__ = ["NO_IMAGE", "NUM_BUCKETS", "Scanner", "decoded_num_bytes"]

NUM_BUCKETS: Final = 10_000
"""Patients are dealt to splits by one of so many keyed buckets; part of the format of a split, never
changed."""

# Raised when a header row means something else than before: rows of another version are read anew.
_ROWS_VERSION: Final = 4

NO_IMAGE: Final = frozenset(
    {
        Reason.ANNOTATION_FILE,
        Reason.LAYOUT_FILE,
        Reason.NOT_DICOM,
        Reason.NOT_IMAGE,
        Reason.NO_PIXEL_DATA,
        Reason.UNSUPPORTED_SOP_CLASS,
    }
)
"""What a file is said to be that is no image, and may be an attachment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scanner:
    """Reads headers and turns identifiers into surrogates at once: the job itself never sees one."""

    roots: tuple[Path, ...]
    """Folders of images, and then those of attachments alone."""
    folder: Path
    """Where header rows go."""
    key: SecretKey
    limits: HeaderLimits
    splits: tuple[str, ...] = ()
    """Names of the splits, in the order of the settings."""
    finder: AttachmentFinder | None = None
    """Recognises attachments; None packs images alone."""
    num_image_roots: int | None = None
    """How many of the roots hold images; None for all."""

    def scan(self, task: ScanTask) -> ScanDone:
        """Read the headers of a batch, or take them from a former run."""
        times = [self._modified_ns(file) for file in task.files]
        digest = self._digest(task.files, times)
        path = self.folder / task.name
        stored = load_rows(path, digest)
        if stored is None:
            rows = [self._read(file) for file in task.files]
            stored = rows, store_rows(path, digest, rows)
        return ScanDone(
            files=tuple(
                self._scanned(row, place, modified_ns)
                for row, place, modified_ns in zip(*stored, times, strict=True)
            )
        )

    def probe(self, task: ProbeTask) -> ProbeDone:
        """Read one file for nothing: the job wants to know whether a process survives it."""
        self._read(task.file)
        return ProbeDone()

    def _is_for_attachments(self, root_index: int) -> bool:
        return self.num_image_roots is not None and root_index >= self.num_image_roots

    def _read(self, file: InputFile) -> HeaderRow:
        reason, placement = file.reason, file.placement
        row = HeaderRow(file.root_index, file.relative_path, placement=placement)
        path = self.roots[file.root_index] / file.relative_path
        if self._is_for_attachments(file.root_index):
            found = None if reason is not None else self._find_attachment(row, path)
            return found or _without_header(row, reason or Reason.NOT_ATTACHMENT)
        if reason is not None:
            # A placement says then in whose place the file lies, not that it is an image.
            found = self._find_attachment(row, path) if reason in NO_IMAGE else None
            return found or _without_header(
                replace(row, placement=None) if reason in NO_IMAGE else row, reason
            )
        try:
            header = read_image(path, placement, limits=self.limits)
        except SourceError as error:
            found = self._find_attachment(row, path) if error.reason in NO_IMAGE else None
            return found or _without_header(row, error.reason)
        if isinstance(header, BrokenInstance):
            return replace(
                row,
                reason=header.reason.value,
                patient_id=header.patient_id,
                study_instance_uid=header.study_instance_uid,
                sop_instance_uid=header.sop_instance_uid,
            )
        return replace(row, header=header)

    def _find_attachment(self, row: HeaderRow, path: Path) -> HeaderRow | None:
        """Return the row of a file that is an attachment, or one that cannot be read; else None."""
        if self.finder is None:
            return None
        found = self.finder.find(path)
        if found is None:
            return None
        if not isinstance(found, AttachmentRow):
            return replace(row, placement=None, attachment=AttachmentRow("", 0, "0" * 16, ()), reason=found)
        reason = None if found.items else Reason.ATTACHMENT_PART.value
        beside = "" if row.placement is None else row.placement.study
        found = replace(found, study_beside=beside)
        return replace(row, placement=None, attachment=found, reason=reason)

    def _scanned(self, row: HeaderRow, place: tuple[int, int], modified_ns: int) -> ScannedFile:
        """Turn a row into what the job may know of it."""
        header = row.header
        patient = row.patient_id if header is None else header.patient_id
        study = row.study_instance_uid if header is None else header.study_instance_uid
        attachment = None
        if row.attachment is not None:
            attachment = link_facts(row.attachment, self.key)
        elif self._is_for_attachments(row.root_index):
            attachment = Attachment(kind="", version=0, links=())
        offset, num_bytes = place
        return ScannedFile(
            surrogate=self.key.surrogate("input", f"{row.root_index}/{row.relative_path}"),
            reason=row.reason,
            study=self.key.surrogate("study", study) if study else "",
            patient=self.key.surrogate("patient", patient) if patient else "",
            bucket=self._bucket(patient, row.placement),
            decoded_bytes=0 if header is None else decoded_num_bytes(header),
            num_slices=0 if header is None else header.image.num_frames,
            instance=row.instance_digest(),
            series=0 if header is None else digest64(header.series_instance_uid),
            digest=row.digest(),
            modified_ns=modified_ns,
            row_offset=offset,
            row_num_bytes=num_bytes,
            facts=image_facts(row),
            attachment=attachment,
        )

    def _bucket(self, patient: str, placement: Placement | None) -> int:
        """Return the keyed bucket of a patient; above `NUM_BUCKETS` the split that the layout names."""
        if placement is not None and placement.split:
            return NUM_BUCKETS + self.splits.index(placement.split)
        return self.key.bucket("split", patient, NUM_BUCKETS) if patient else 0

    def _modified_ns(self, file: InputFile) -> int:
        try:
            return (self.roots[file.root_index] / file.relative_path).stat().st_mtime_ns
        except (OSError, ValueError):
            return 0

    def _digest(self, files: Sequence[InputFile], times: Sequence[int]) -> str:
        limits = [getattr(self.limits, name) for name in HeaderLimits.__slots__]
        text = json.dumps(
            [
                _ROWS_VERSION,
                self.key.key_id,
                limits,
                [*map(str, self.roots)],
                None if self.finder is None else self.finder.identity(),
                [[file.root_index, file.relative_path, file.num_bytes, file.reason] for file in files],
                times,
                [None if file.placement is None else file.placement.to_json() for file in files],
            ]
        )
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def _without_header(row: HeaderRow, reason: str) -> HeaderRow:
    """Say where a file without a usable header belongs, as far as its layout knows."""
    placement = row.placement
    if placement is None:
        return replace(row, reason=reason)
    if reason in {Reason.NOT_DICOM, Reason.NOT_IMAGE} and placement.study:
        reason = Reason.DAMAGED_IMAGE
    said = placement.identify(
        {"patient_id": "", "study_instance_uid": "", "series_instance_uid": "", "sop_instance_uid": ""}
    )
    return replace(
        row,
        reason=str(reason),
        patient_id=said["patient_id"],
        study_instance_uid=said["study_instance_uid"],
        sop_instance_uid=said["sop_instance_uid"],
    )


def decoded_num_bytes(header: InstanceHeader) -> int:
    """Return how many bytes the slices of an instance take once decoded, from what its header declares."""
    image = header.image
    samples = image.rows * image.columns * (3 if image.is_colour else 1) * image.num_frames
    return samples * max(1, -(-image.bits_allocated // 8))
