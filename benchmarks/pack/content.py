"""The input that packing is measured on: folders of CT studies and of chest-like radiographs, with reports.

CT slices are those of the CT phantom beside the repository where it is present, with its whole header,
shifted and mirrored so that no two are alike; else smooth random fields. Radiographs are generated: smooth
fields with noise between dark borders, 12 bits. The results say which. Files are made from one header whose
identifiers are replaced byte for byte, because pydicom would take longer to write them than packing to pack
them.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian

__all__ = ["CT", "CXR", "Kind", "make_content", "make_small_content"]

PHANTOM = Path(__file__).resolve().parents[3] / "shared" / "data" / "ct_philips_phantom" / "S21570" / "S2010"
UID_ROOT = "1.2.826.0.1.3680043.10.1510"
# As long as what takes their place.
MARKS = {
    "patient": "PATIENTX",
    "study": f"{UID_ROOT}.1.9999999",
    "series": f"{UID_ROOT}.2.9999999",
    "instance": f"{UID_ROOT}.3.9999999.9999999",
    "height": "99999.75",
    "number": "9999",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of study."""

    name: str
    rows: int
    columns: int
    slices_per_study: int
    small_side: int
    """Longest side that people scale such images to for training."""


CT = Kind(name="ct", rows=512, columns=512, slices_per_study=40, small_side=256)
CXR = Kind(name="cxr", rows=2500, columns=2048, slices_per_study=1, small_side=1024)


def make_content(folder: Path, kind: Kind, num_studies: int) -> str:
    """Write ``folder/dicom/*/*.dcm`` and ``folder/reports.csv``; return what the pixels are.

    Args:
        folder: Where to write; new.
        kind: `CT` or `CXR`.
        num_studies: How many studies, each of a patient of its own.
    """
    dataset, source, said = _ct_source() if kind is CT else _cxr_source(kind)
    _write(folder, dataset, source, num_studies, kind.slices_per_study)
    return said


def make_small_content(folder: Path, num_studies: int) -> None:
    """Write many studies of one CT slice of 32 x 32: what memory grows with is their number."""
    dataset, source, _ = _ct_source()
    dataset.Rows, dataset.Columns = 32, 32
    small = [np.ascontiguousarray(one[::16, ::16]) for one in source[:4]]
    _write(folder, dataset, small, num_studies, 1)


def _write(
    folder: Path, dataset: Dataset, source: list[NDArray[np.uint16]], num_studies: int, num_slices: int
) -> None:
    head = _head(dataset, source[0].nbytes)
    rng = np.random.default_rng(1)
    with _reports(folder) as reports:
        for study in range(num_studies):
            place = folder / "dicom" / f"{study:05d}"
            place.mkdir(parents=True)
            for index in range(num_slices):
                values = {
                    "patient": f"P{study:07d}",
                    "study": f"{UID_ROOT}.1.{1_000_000 + study}",
                    "series": f"{UID_ROOT}.2.{1_000_000 + study}",
                    "instance": f"{UID_ROOT}.3.{1_000_000 + study}.{1_000_000 + index}",
                    "height": f"{746.25 + 5 * index:08.2f}",
                    "number": f"{index + 1:04d}",
                }
                own = head
                for name, mark in MARKS.items():
                    own = own.replace(mark.encode(), values[name].encode())
                pixels = _variant(source[(study + index) % len(source)], rng)
                # Names are not in slice order, as in life.
                (place / f"{(index * 17) % 1009:04d}.dcm").write_bytes(own + pixels.tobytes())
            reports.writerow([f"{UID_ROOT}.1.{1_000_000 + study}", "No acute finding. " * 40])


class _Reports:
    """A table of reports; a context manager that gives its csv writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = io.StringIO()

    def __enter__(self) -> Any:
        writer = csv.writer(self._text)
        writer.writerow(["study_instance_uid", "text"])
        return writer

    def __exit__(self, *_: object) -> None:
        self._path.write_text(self._text.getvalue(), encoding="utf-8")


def _reports(folder: Path) -> _Reports:
    folder.mkdir(parents=True)
    return _Reports(folder / "reports.csv")


def _head(dataset: Dataset, num_bytes: int) -> bytes:
    """A file up to its pixels, with marks where identifiers go."""
    dataset.PatientID = MARKS["patient"]
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = MARKS["study"], MARKS["series"]
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = MARKS["instance"]
    dataset.InstanceNumber = MARKS["number"]
    dataset.ImagePositionPatient = ["-115.5", "-1.85", MARKS["height"]]
    for keyword in ("SliceLocation", "DataSetTrailingPadding"):
        if keyword in dataset:
            delattr(dataset, keyword)
    dataset.PixelData = bytes(num_bytes)
    dataset["PixelData"].VR = "OW"
    text = io.BytesIO()
    dataset.save_as(text, enforce_file_format=True)
    whole = text.getvalue()
    for mark in MARKS.values():
        if mark.encode() not in whole:
            raise RuntimeError("a mark is missing in the header")
    return whole[:-num_bytes]


def _ct_source() -> tuple[Dataset, list[NDArray[np.uint16]], str]:
    if PHANTOM.is_dir():
        found = [pydicom.dcmread(path) for path in sorted(PHANTOM.iterdir())]
        images = [image for image in found if (image.get("Rows"), image.get("Columns")) == (512, 512)]
        source = [image.pixel_array for image in images]
        return images[0], source, f"{len(source)} slices of the CT phantom, shifted and mirrored"
    rng = np.random.default_rng(0)
    source = [_smooth(rng, 512, 512, 400, 12, 1024) for _ in range(16)]
    dataset = _plain_dataset("CT", "1.2.840.10008.5.1.4.1.1.2", 512, 512)
    dataset.RescaleSlope, dataset.RescaleIntercept = 1, -1024
    return dataset, source, "16 smooth random fields with noise of 12 HU, shifted and mirrored"


def _cxr_source(kind: Kind) -> tuple[Dataset, list[NDArray[np.uint16]], str]:
    rng = np.random.default_rng(0)
    source = []
    for _ in range(4):
        pixels = _smooth(rng, kind.rows, kind.columns, 700, 4, 2048)
        pixels[:, : kind.columns // 16] = pixels[:, -kind.columns // 16 :] = 20
        source.append(pixels)
    dataset = _plain_dataset("DX", "1.2.840.10008.5.1.4.1.1.1.1", kind.rows, kind.columns)
    dataset.WindowCenter, dataset.WindowWidth = 2048, 4096
    return dataset, source, "4 generated radiographs, 12 bits, noise of 4 levels, shifted and mirrored"


def _plain_dataset(modality: str, sop_class: str, rows: int, columns: int) -> Dataset:
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID = sop_class
    dataset.Modality = modality
    dataset.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    dataset.SeriesNumber = 1
    dataset.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    dataset.PixelSpacing = [0.5, 0.5]
    dataset.Rows, dataset.Columns = rows, columns
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit, dataset.PixelRepresentation = 16, 12, 11, 0
    return dataset


def _smooth(
    rng: np.random.Generator, rows: int, columns: int, spread: float, noise: float, middle: float
) -> NDArray[np.uint16]:
    field = cv2.resize(rng.normal(0, spread, (24, 24)), (columns, rows), interpolation=cv2.INTER_CUBIC)
    noisy = field + rng.normal(0, noise, field.shape) + middle
    return np.asarray(np.clip(noisy, 0, 4095), np.uint16)


def _variant(pixels: NDArray[np.uint16], rng: np.random.Generator) -> NDArray[np.uint16]:
    moved = np.roll(pixels, tuple(rng.integers(-20, 21, 2).tolist()), axis=(0, 1))
    return np.ascontiguousarray(moved[:, ::-1] if rng.integers(2) else moved)
