"""Attachment kinds of annotation files; see `shardflow.packing.sources.attachments`.

The readers, and with them pydicom and highdicom, are imported when the first file of a kind is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

from shardflow.format.reasons import Reason
from shardflow.format.volumes.bricks import BRICKS_CODEC
from shardflow.packing.sources.attachments import (
    LABEL_VOLUMES,
    Attached,
    AttachmentItem,
    StoredSeries,
    StudyContext,
)

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.packing.attachments.annotations.targets import AnnotationLimits, Target
    from shardflow.packing.attachments.annotations.vocabulary import Vocabulary

_SR: Final = "1.2.840.10008.5.1.4.1.1.88."


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotationKind:
    """One kind of annotation files."""

    name: str
    version: int = 1
    sop_classes: frozenset[str] = frozenset()
    describer: str
    """``module:function`` of this package: ``(path, limits)`` to an item, or to several."""
    reader: str
    """``module:function``: ``(path, targets, writer)``; ``(path, items, ...)`` if it has several items."""
    recogniser: str = ""
    """``module:function``: ``(path, head)``; none for DICOM objects."""
    has_items: bool = False
    """Whether a file may hold records of several studies."""

    def recognise(self, path: Path, head: bytes) -> bool:
        """Tell whether a file that is not DICOM is of this kind."""
        return bool(self.recogniser) and bool(_resolve(self.recogniser)(path, head))

    def describe(self, path: Path) -> Sequence[AttachmentItem]:
        """Identify the patients and studies of a file's records; see `AttachmentKind`."""
        described = _resolve(self.describer)(path, _limits())
        return tuple(described) if isinstance(described, list) else (described,)

    def convert(self, path: Path, items: Sequence[int], study: StudyContext) -> Attached:
        """Turn records of a file into regions; see `shardflow.packing.sources.attachments.AttachmentKind`.

        Raises:
            SourceError: As the reader says; or the reason is ANNOTATION_WITHOUT_PLACE through ``reasons``.
        """
        from shardflow.packing.attachments.annotations.region_writer import RegionWriter
        from shardflow.packing.attachments.annotations.targets import Targets

        writer = RegionWriter(
            vocabulary=_vocabulary(),
            surrogate=study.surrogate,
            first_region=study.num("annotations", "rois"),
            limits=_limits(),
            classes=study.classes,
        )
        targets = Targets([target_of(series) for series in study.series])
        read = _resolve(self.reader)
        if self.has_items:
            read(path, items, targets, writer)
        else:
            read(path, targets, writer)
        part, fields = writer.finish()
        reasons = (
            {} if part["rois"] or writer.is_placed else dict.fromkeys(items, Reason.ANNOTATION_WITHOUT_PLACE)
        )
        return Attached(fields=fields, parts={"annotations": part}, reasons=reasons)


def target_of(series: StoredSeries) -> Target:
    """Return the facts of a stored series that annotations need."""
    from shardflow.packing.attachments.annotations.targets import Target

    facts = series.facts
    return Target(
        number=series.number,
        rows=series.rows,
        columns=series.columns,
        instances=tuple(zip(series.sop_uids, (frame + 1 for frame in series.frames), strict=True)),
        series_uid=series.series_uid,
        frame_of_reference_uid=series.frame_of_reference_uid,
        affine_lps=series.affine_lps,
        slice_offsets_mm=facts.get("slice_offsets_mm"),
        pixel_spacing_mm=facts.get("pixel_spacing_mm"),
        slice_spacing_mm=facts.get("slice_spacing_mm"),
        # Masks are slices, also those of a volume in bricks.
        codec=str(facts.get("codec", "b2nd")).replace(BRICKS_CODEC, "b2nd"),
    )


KINDS: Final = (
    AnnotationKind(
        name="dicom-seg",
        sop_classes=frozenset({"1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7"}),
        describer="dicom_seg:describe_segmentation",
        reader="dicom_seg:read_segmentation",
    ),
    AnnotationKind(
        name="rtstruct",
        sop_classes=frozenset({"1.2.840.10008.5.1.4.1.1.481.3"}),
        describer="dicom_drawings:describe_structure_set",
        reader="dicom_drawings:read_structure_set",
    ),
    AnnotationKind(
        name="sr-tid1500",
        # Enhanced, comprehensive, comprehensive 3D, mammography, chest and colon CAD: those with coordinates.
        sop_classes=frozenset(_SR + end for end in ("22", "33", "34", "50", "65", "69")),
        describer="dicom_drawings:describe_report_object",
        reader="dicom_drawings:read_structured_report",
    ),
    AnnotationKind(
        name="gsps",
        # Gray, color, pseudo-color, blending, and those of XA and XRF.
        sop_classes=frozenset(f"1.2.840.10008.5.1.4.1.1.11.{end}" for end in (1, 2, 3, 4, 5)),
        describer="dicom_drawings:describe_report_object",
        reader="dicom_drawings:read_presentation_state",
    ),
    AnnotationKind(
        name="ko",
        sop_classes=frozenset({_SR + "59"}),
        describer="dicom_drawings:describe_report_object",
        reader="dicom_drawings:read_key_objects",
    ),
    AnnotationKind(
        name="lidc-xml",
        describer="box_files:describe_lidc",
        reader="box_files:read_lidc",
        recogniser="box_files:is_lidc",
    ),
    AnnotationKind(
        name="coco",
        describer="box_files:describe_coco",
        reader="box_files:read_coco",
        recogniser="box_files:is_coco",
        has_items=True,
    ),
    AnnotationKind(
        name="csv",
        describer="box_files:describe_boxes",
        reader="box_files:read_boxes",
        recogniser="box_files:is_box_table",
        has_items=True,
    ),
    AnnotationKind(
        name=LABEL_VOLUMES,
        describer="nifti_mask:describe_label_volume",
        reader="nifti_mask:read_label_volume",
        recogniser="nifti_mask:is_label_volume",
    ),
)
"""All kinds, in the order in which files are offered to them, and in which their regions are numbered."""


def _resolve(name: str) -> Any:
    return resolve_name(f"{__package__}.{name}")


@cache
def _limits() -> AnnotationLimits:
    from shardflow.packing.attachments.annotations.targets import AnnotationLimits

    return AnnotationLimits()


@cache
def _vocabulary() -> Vocabulary:
    from shardflow.packing.attachments.annotations.vocabulary import Vocabulary

    return Vocabulary()
