"""Annotation objects for tests: written by highdicom or pydicom, with values that are known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import ExplicitVRLittleEndian

from shardflow.packing.attachments.annotations.targets import Target
from tests.unit.packing.annotations.scene import FRAME, SERIES, sop_uid

__all__ = [
    "code",
    "contour",
    "item",
    "make_object",
    "make_segmentation",
    "make_structure_set",
    "reference",
    "source_images",
]

STUDY = "1.2.826.0.1.3680043.8.498.66"
CT = "1.2.840.10008.5.1.4.1.1.2"


def item(**values: Any) -> Dataset:
    """Make a dataset of keywords; lists of datasets become sequences."""
    dataset = Dataset()
    for keyword, value in values.items():
        is_items = isinstance(value, list) and all(isinstance(one, Dataset) for one in value)
        setattr(dataset, keyword, Items(value) if is_items else value)
    return dataset


def code(value: str, scheme: str = "SCT", meaning: str = "") -> Dataset:
    return item(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)


def reference(index: int, frames: Sequence[int] = ()) -> Dataset:
    one = item(ReferencedSOPClassUID=CT, ReferencedSOPInstanceUID=sop_uid(index))
    if frames:
        one.ReferencedFrameNumber = list(frames)
    return one


def make_object(path: Path, sop_class: str, **values: Any) -> Path:
    """Write an object of a class."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = sop_class
    meta.MediaStorageSOPInstanceUID = "1.2.826.0.1.3680043.8.498.1"
    dataset = FileDataset(str(path), item(**values), file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPClassUID, dataset.SOPInstanceUID = sop_class, "1.2.826.0.1.3680043.8.498.1"
    dataset.StudyInstanceUID, dataset.PatientID = STUDY, "P1"
    dataset.save_as(path, enforce_file_format=True)
    return path


def source_images(target: Target) -> list[Dataset]:
    """Headers of the images of a series, as highdicom asks for them."""
    images = []
    for index in range(target.num_slices):
        plane = target.plane(index)
        turn = [*(plane.per_column / plane.spacing_mm[1]), *(plane.per_row / plane.spacing_mm[0])]
        image = item(
            SOPClassUID=CT,
            SOPInstanceUID=sop_uid(index),
            StudyInstanceUID=STUDY,
            SeriesInstanceUID=SERIES,
            FrameOfReferenceUID=FRAME,
            PatientID="P1",
            PatientName="Canary^Name",
            PatientBirthDate="",
            PatientSex="O",
            StudyID="",
            StudyDate="20200101",
            StudyTime="120000",
            AccessionNumber="",
            ReferringPhysicianName="",
            Modality="CT",
            Rows=target.rows,
            Columns=target.columns,
            PixelSpacing=[str(round(one, 6)) for one in plane.spacing_mm],
            SliceThickness=str(target.thickness_mm),
            ImagePositionPatient=[f"{one:.8f}" for one in plane.origin],
            ImageOrientationPatient=[f"{one:.8f}" for one in turn],
            SamplesPerPixel=1,
            PhotometricInterpretation="MONOCHROME2",
            BitsAllocated=16,
            BitsStored=16,
            HighBit=15,
            PixelRepresentation=0,
        )
        image.file_meta = FileMetaDataset()
        image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        images.append(image)
    return images


def make_segmentation(
    path: Path,
    target: Target,
    masks: NDArray[Any],
    kind: str = "BINARY",
    *,
    labels: Sequence[str] = ("Liver", "Lesion"),
    **options: Any,
) -> Path:
    """Write a segmentation by highdicom.

    Args:
        path: Where to.
        target: The series it is drawn on.
        masks: ``(num_slices, rows, columns, num_segments)``.
        kind: ``BINARY``, ``FRACTIONAL`` or ``LABELMAP``.
        labels: Of the segments.
        options: Of ``highdicom.seg.Segmentation``.
    """
    import highdicom as hd
    from pydicom.sr.codedict import codes

    num_segments = masks.shape[3] if masks.ndim == 4 else int(masks.max())
    descriptions = [
        hd.seg.SegmentDescription(
            segment_number=number + 1,
            segment_label=labels[number],
            segmented_property_category=codes.SCT.Organ,
            segmented_property_type=codes.SCT.Liver if number == 0 else codes.SCT.Lesion,
            algorithm_type=hd.seg.SegmentAlgorithmTypeValues.MANUAL,
            tracking_uid=f"1.2.3.4.{number}",
            tracking_id=f"canary tracking {number}",
        )
        for number in range(num_segments)
    ]
    made = hd.seg.Segmentation(
        source_images=source_images(target),
        pixel_array=masks,
        segmentation_type=kind,
        segment_descriptions=descriptions,
        series_instance_uid="1.2.826.0.1.3680043.8.498.2",
        series_number=9,
        sop_instance_uid="1.2.826.0.1.3680043.8.498.3",
        instance_number=1,
        manufacturer="m",
        manufacturer_model_name="m",
        software_versions="1",
        device_serial_number="1",
        content_creator_name="Canary^Operator",
        **options,
    )
    made.save_as(path)
    return path


def contour(points: NDArray[Any], kind: str = "CLOSED_PLANAR", image: int | None = None) -> Dataset:
    """One contour of a structure set, of points in space."""
    made = item(
        ContourGeometricType=kind,
        NumberOfContourPoints=len(points),
        ContourData=[f"{value:.10g}"[:16] for value in np.asarray(points, float).ravel()],
    )
    if image is not None:
        made.ContourImageSequence = Items([reference(image)])
    return made


def make_structure_set(path: Path, rois: dict[str, list[Dataset]], *, frame: str = FRAME) -> Path:
    """Write a structure set: name of each ROI, and its contours."""
    numbered = list(enumerate(rois.items(), start=1))
    series = item(SeriesInstanceUID=SERIES, ContourImageSequence=[reference(0)])
    study = item(ReferencedSOPInstanceUID=STUDY, RTReferencedSeriesSequence=[series])
    return make_object(
        path,
        "1.2.840.10008.5.1.4.1.1.481.3",
        ReferencedFrameOfReferenceSequence=[
            item(FrameOfReferenceUID=frame, RTReferencedStudySequence=[study])
        ],
        StructureSetROISequence=[
            item(ROINumber=number, ROIName=name, ReferencedFrameOfReferenceUID=frame)
            for number, (name, _) in numbered
        ],
        ROIContourSequence=[
            item(ReferencedROINumber=number, ContourSequence=contours) for number, (_, contours) in numbered
        ],
        RTROIObservationsSequence=[
            item(ReferencedROINumber=number, RTROIInterpretedType="", ROIInterpreter="Canary^Operator")
            for number, _ in numbered
        ],
    )
