"""The header pass over one batch of files; runs in a packing process."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import SourceError
from shardflow.packing.finding import AttachmentFinder
from shardflow.packing.header_rows import AttachmentRow, HeaderRow, load_rows, store_rows
from shardflow.packing.links import digest64, image_facts, link_facts
from shardflow.sources.dicom import BrokenInstance, HeaderLimits, InstanceHeader
from shardflow.sources.images import read_image
from shardflow.sources.layouts import Placement
from shardflow.sources.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from shardflow.deid.pseudonyms import SecretKey

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

    def scan(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Read the headers of a batch, or take them from a former run.

        Args:
            payload: ``name`` of the file of rows, ``files`` as ``[root_index, relative_path, num_bytes,
                reason]`` each; a file with a reason is not opened. ``placements`` of the same length: what
                the layout says of each file, or None.

        Returns:
            ``rows``: for each file its surrogate, reason, study and patient surrogates, bucket, decoded
            bytes, slices, digests of instance, series and content, modification time, and the offset and size
            of its row. ``studies``: what tells attachments that the study of a file is theirs, see
            `shardflow.packing.links.image_facts`. ``attachments``: what the records of files that are no
            images are linked by, by position.
        """
        files = [(int(root), str(path), int(size), reason) for root, path, size, reason in payload["files"]]
        times = [self._modified_ns(root, path) for root, path, _, _ in files]
        placed = list(payload["placements"])
        placements = [None if one is None else Placement.from_json(one) for one in placed]
        digest = self._digest(files, times, placed)
        path = self.folder / str(payload["name"])
        stored = load_rows(path, digest)
        if stored is None:
            rows = [
                self._read(root, name, reason, placement)
                for (root, name, _, reason), placement in zip(files, placements, strict=True)
            ]
            stored = rows, store_rows(path, digest, rows)
        attachments = {
            str(at): {"kind": "", "version": 0, "items": []}
            if row.attachment is None
            else link_facts(row.attachment, self.key)
            for at, row in enumerate(stored[0])
            if row.attachment is not None or self._is_for_attachments(row.root_index)
        }
        return {
            "rows": [
                [*self._facts(row), modified_ns, *place]
                for row, place, modified_ns in zip(*stored, times, strict=True)
            ],
            "studies": [image_facts(row) for row in stored[0]],
            "attachments": attachments,
        }

    def probe(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Read one file for nothing: whoever asks wants to know whether it can be survived."""
        placed = payload["placement"]
        placement = None if placed is None else Placement.from_json(placed)
        self._read(payload["root"], payload["path"], payload["reason"], placement)
        return {}

    def _is_for_attachments(self, root_index: int) -> bool:
        return self.num_image_roots is not None and root_index >= self.num_image_roots

    def _read(
        self, root_index: int, relative_path: str, reason: str | None, placement: Placement | None
    ) -> HeaderRow:
        row = HeaderRow(root_index, relative_path, placement=placement)
        path = self.roots[root_index] / relative_path
        if self._is_for_attachments(root_index):
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
        return HeaderRow(root_index, relative_path, header, placement=placement)

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
            self._bucket(patient, row.placement),
            0 if header is None else decoded_num_bytes(header),
            0 if header is None else header.image.num_frames,
            row.instance_digest(),
            0 if header is None else digest64(header.series_instance_uid),
            row.digest(),
        ]

    def _bucket(self, patient: str, placement: Placement | None) -> int:
        """Return the keyed bucket of a patient; above `NUM_BUCKETS` the split that the layout names."""
        if placement is not None and placement.split:
            return NUM_BUCKETS + self.splits.index(placement.split)
        return self.key.bucket("split", patient, NUM_BUCKETS) if patient else 0

    def _modified_ns(self, root_index: int, relative_path: str) -> int:
        try:
            return (self.roots[root_index] / relative_path).stat().st_mtime_ns
        except (OSError, ValueError):
            return 0

    def _digest(
        self,
        files: Sequence[tuple[int, str, int, str | None]],
        times: Sequence[int],
        placements: Sequence[Mapping[str, Any] | None],
    ) -> str:
        limits = [getattr(self.limits, name) for name in HeaderLimits.__slots__]
        text = json.dumps(
            [
                _ROWS_VERSION,
                self.key.key_id,
                limits,
                [*map(str, self.roots)],
                None if self.finder is None else self.finder.identity(),
                files,
                times,
                placements,
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
