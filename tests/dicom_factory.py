"""Small DICOM studies for tests, written with pydicom: real files, generated pixels, known values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian

__all__ = ["MadeStudy", "dicom_uid", "make_study", "truncate"]

_ROOT = "1.2.826.0.1.3680043.10.1234."
_SOP_CLASSES = {
    "CT": "1.2.840.10008.5.1.4.1.1.2",
    "MR": "1.2.840.10008.5.1.4.1.1.4",
    "CR": "1.2.840.10008.5.1.4.1.1.1",
    "SR": "1.2.840.10008.5.1.4.1.1.88.11",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeStudy:
    """What was written."""

    study_instance_uid: str
    patient_id: str
    files: tuple[Path, ...]
    """In geometric order."""
    stored: NDArray[Any]
    """``(num_slices, rows, columns)``, stored values in geometric order."""
    modality_units: NDArray[Any]
    """The same in modality units: HU for CT, stored values else."""


def dicom_uid(*parts: object) -> str:
    """Make a UID that is the same for the same parts in every run."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return _ROOT + str(int.from_bytes(digest[:12], "big"))


def make_study(
    folder: Path,
    *,
    patient: str = "P1",
    study: str = "A",
    series: int = 1,
    modality: str = "CT",
    num_slices: int = 4,
    size: tuple[int, int] = (16, 12),
    seed: int = 0,
    shuffle_names: bool = True,
    change: Callable[[FileDataset, int], None] | None = None,
) -> MadeStudy:
    """Write one series of single-frame files.

    Args:
        folder: Where to write; made if need be.
        patient: Patient ID.
        study: Label of the study; with the patient it decides the UIDs.
        series: Series number.
        modality: ``CT`` (slope 1, intercept -1024), ``MR``, ``CR`` or ``SR`` (no pixels).
        num_slices: Number of files.
        size: Rows and columns.
        seed: Of the pixels.
        shuffle_names: Give the files names whose order is not that of the slices.
        change: Called with each dataset and its index before it is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, num_slices, *patient.encode(), *study.encode()])
    stored = rng.integers(0, 4096, (num_slices, *size)).astype(np.uint16)
    stored = np.sort(stored, axis=2)  # smooth enough to compress
    study_uid = dicom_uid("study", patient, study)
    files = []
    for index in range(num_slices):
        uid = dicom_uid("instance", patient, study, series, index)
        dataset = _dataset(uid, study_uid, patient, study, series, modality, index, stored[index])
        if change is not None:
            change(dataset, index)
        name = hashlib.sha256(uid.encode()).hexdigest()[:12] if shuffle_names else f"{index:05d}"
        path = folder / f"{name}.dcm"
        pydicom.dcmwrite(path, dataset, enforce_file_format=True)
        files.append(path)
    units = stored.astype(np.int16) - 1024 if modality == "CT" else stored
    return MadeStudy(
        study_instance_uid=study_uid,
        patient_id=patient,
        files=tuple(files),
        stored=stored,
        modality_units=units,
    )


def truncate(path: Path, num_bytes: int = 100) -> None:
    """Cut bytes off the end of a file: what a broken transfer leaves."""
    data = path.read_bytes()
    path.write_bytes(data[:-num_bytes])


def _dataset(
    uid: str,
    study_uid: str,
    patient: str,
    study: str,
    series: int,
    modality: str,
    index: int,
    pixels: NDArray[Any],
) -> FileDataset:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = _SOP_CLASSES[modality]
    meta.MediaStorageSOPInstanceUID = uid
    dataset = FileDataset("", {}, file_meta=meta, preamble=bytes(128))
    dataset.SOPClassUID = _SOP_CLASSES[modality]
    dataset.SOPInstanceUID = uid
    dataset.StudyInstanceUID = study_uid
    dataset.SeriesInstanceUID = dicom_uid("series", patient, study, series)
    dataset.PatientID = patient
    dataset.PatientName = f"Test^{patient}"
    dataset.PatientSex = "F"
    dataset.PatientAge = "041Y"
    dataset.Modality = modality
    dataset.SeriesNumber = series
    dataset.InstanceNumber = index + 1
    if modality == "SR":
        return dataset
    dataset.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    dataset.BodyPartExamined = "CHEST"
    if modality in {"CT", "MR"}:
        dataset.FrameOfReferenceUID = dicom_uid("frame", patient, study)
        dataset.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        dataset.ImagePositionPatient = [-10.0, -20.0, 2.5 * index]
        dataset.PixelSpacing = [0.5, 0.75]
        dataset.SliceThickness = 2.5
    if modality == "CT":
        dataset.RescaleSlope, dataset.RescaleIntercept, dataset.RescaleType = 1, -1024, "HU"
    dataset.Rows, dataset.Columns = pixels.shape
    dataset.SamplesPerPixel = 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = 16, 12, 11, 0
    dataset.PixelData = pixels.astype("<u2").tobytes()
    return dataset
