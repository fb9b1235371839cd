"""Small synthetic DICOM files, written by pydicom: never by the code under test."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code
from pydicom.uid import ExplicitVRLittleEndian

from shardflow.packing.sources.dicom.headers import InstanceHeader, read_header

UID_ROOT = "1.2.826.0.1.3680043.10.1510."
AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
SOP_CLASSES = {
    "CT": "1.2.840.10008.5.1.4.1.1.2",
    "MR": "1.2.840.10008.5.1.4.1.1.4",
    "CR": "1.2.840.10008.5.1.4.1.1.1",
    "DX": "1.2.840.10008.5.1.4.1.1.1.1",
    "US": "1.2.840.10008.5.1.4.1.1.6.1",
    "NM": "1.2.840.10008.5.1.4.1.1.20",
    "PT": "1.2.840.10008.5.1.4.1.1.128",
    "OT": "1.2.840.10008.5.1.4.1.1.7",
}


def make_dataset(
    *,
    modality: str = "CT",
    pixels: np.ndarray[Any, np.dtype[Any]] | None = None,
    number: int = 1,
    position: tuple[float, float, float] | None = (0.0, 0.0, 0.0),
    orientation: tuple[float, ...] | None = AXIAL,
    **attributes: Any,
) -> Dataset:
    """One image. ``attributes`` override by keyword; None removes an element."""
    if pixels is None:
        pixels = np.arange(12, dtype=np.uint16).reshape(3, 4) + 16 * number
    num_frames = pixels.shape[0] if pixels.ndim == 4 or (pixels.ndim == 3 and pixels.shape[-1] != 3) else None
    shape: tuple[int, ...] = pixels.shape[1:] if num_frames else pixels.shape
    dataset = Dataset()
    dataset.SOPClassUID = SOP_CLASSES[modality]
    dataset.SOPInstanceUID = f"{UID_ROOT}3.{number}"
    dataset.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    dataset.Modality = modality
    dataset.PatientName = "Test^Patient"
    dataset.PatientID = "patient-1"
    dataset.StudyInstanceUID = UID_ROOT + "1.1"
    dataset.SeriesInstanceUID = UID_ROOT + "2.1"
    dataset.SeriesNumber = 1
    dataset.InstanceNumber = number
    if position is not None:
        dataset.ImagePositionPatient = list(position)
    if orientation is not None:
        dataset.ImageOrientationPatient = list(orientation)
    dataset.PixelSpacing = [0.5, 0.75]
    dataset.SliceThickness = 2.5
    dataset.Rows, dataset.Columns = shape[:2]
    dataset.SamplesPerPixel = shape[2] if len(shape) == 3 else 1
    dataset.PhotometricInterpretation = "RGB" if len(shape) == 3 else "MONOCHROME2"
    if len(shape) == 3:
        dataset.PlanarConfiguration = 0
    if num_frames:
        dataset.NumberOfFrames = num_frames
    bits = pixels.dtype.itemsize * 8
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = bits, bits, bits - 1
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    if modality == "CT":
        dataset.RescaleSlope, dataset.RescaleIntercept = 1, -1024
    dataset.PixelData = pixels.tobytes() + b"\0" * (pixels.nbytes % 2)
    dataset["PixelData"].VR = "OW" if bits > 8 else "OB"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wrong values on purpose
        for keyword, value in attributes.items():
            if value is None:
                delattr(dataset, keyword)
            else:
                setattr(dataset, keyword, value)
    return dataset


def write(
    path: Path,
    dataset: Dataset,
    *,
    syntax: str = ExplicitVRLittleEndian,
    frames: list[bytes] | None = None,
) -> Path:
    """Write a file; ``frames`` replace the pixel data by encapsulated frames."""
    if frames is not None:
        dataset.PixelData = encapsulate(frames)
        dataset["PixelData"].VR = "OB"
        dataset["PixelData"].is_undefined_length = True
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.file_meta.MediaStorageSOPClassUID = dataset.get("SOPClassUID", "1.2.3") or "1.2.3"
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.get("SOPInstanceUID", "1.2.3") or "1.2.3"
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the factory writes wrong files on purpose
        dataset.save_as(path, enforce_file_format=True)
    return path


def make_file(path: Path, *, syntax: str = ExplicitVRLittleEndian, **options: Any) -> Path:
    """Write one image; options of `make_dataset`."""
    return write(path, make_dataset(**options), syntax=syntax)


def header_of(path: Path, *, file_index: int = 0) -> InstanceHeader:
    """Header of a file that can be packed."""
    header = read_header(path, file_index=file_index)
    assert isinstance(header, InstanceHeader), header
    return header


def make_header(folder: Path, number: int, **options: Any) -> InstanceHeader:
    """Header of one image of a series, read back from a file."""
    path = make_file(folder / f"{number}.dcm", number=number, **options)
    return header_of(path, file_index=number)


def make_tomosynthesis(pixels: np.ndarray[Any, np.dtype[Any]]) -> Dataset:
    """Return a breast tomosynthesis of ``(planes, rows, columns)``: sagittal, 1 mm apart, values 2 v - 5."""

    def item(**attributes: Any) -> Dataset:
        found = Dataset()
        for keyword, value in attributes.items():
            setattr(found, keyword, value)
        return found

    dataset = make_dataset(
        pixels=pixels[..., None],
        position=None,
        orientation=None,
        Modality="MG",
        SOPClassUID="1.2.840.10008.5.1.4.1.1.13.1.3",
        ImageType=["ORIGINAL", "PRIMARY", "TOMOSYNTHESIS", "NONE"],
        SamplesPerPixel=1,
        PhotometricInterpretation="MONOCHROME2",
        PlanarConfiguration=None,
        FrameOfReferenceUID=UID_ROOT + "4.1",
        RescaleSlope=None,
        RescaleIntercept=None,
        PixelSpacing=None,
        SliceThickness=None,
    )
    dataset.SharedFunctionalGroupsSequence = [
        item(
            PixelMeasuresSequence=[item(PixelSpacing=[0.1, 0.2], SliceThickness=1.0)],
            PlaneOrientationSequence=[item(ImageOrientationPatient=[0, 1, 0, 0, 0, -1])],
            PixelValueTransformationSequence=[item(RescaleSlope=2, RescaleIntercept=-5, RescaleType="US")],
            FrameAnatomySequence=[item(FrameLaterality="L")],
        )
    ]
    dataset.PerFrameFunctionalGroupsSequence = [
        item(
            FrameContentSequence=[item(DimensionIndexValues=[number + 1], StackID="1")],
            PlanePositionSequence=[item(ImagePositionPatient=[-30.0 + number, -10, 20])],
        )
        for number in range(len(pixels))
    ]
    return dataset


def value_mapping(
    unit: Code, slope: float, intercept: float, quantity: Code = codes.DCM.ApparentDiffusionCoefficient
) -> Any:
    """A mapping of stored values to a quantity, of highdicom's."""
    import highdicom as hd

    return hd.pm.RealWorldValueMapping(
        "1", "a map", unit, (-1e9, 1e9) if slope != 0.5 else (0, 65535), slope, intercept, None, quantity
    )


def make_parametric_map(
    folder: Path,
    pixels: np.ndarray[Any, np.dtype[Any]],
    mapping: Any,
    change: Callable[[Dataset], None] = lambda _: None,
) -> Path:
    """A map of highdicom's over six oblique MR slices with gaps of 4 mm."""
    import highdicom as hd

    sources = []
    for number in range(len(pixels)):
        image = make_dataset(
            modality="MR",
            number=number + 1,
            position=(1.0, 2.0 - 0.6 * 4 * number, 3.0 + 0.8 * 4 * number),
            orientation=(1, 0, 0, 0, 0.8, 0.6),
            pixels=np.zeros(pixels.shape[1:], np.uint16),
        )
        image.FrameOfReferenceUID = "1.2.3.4"
        for keyword in ("StudyID", "StudyDate", "StudyTime", "AccessionNumber", "PatientBirthDate"):
            setattr(image, keyword, "")
        image.PatientSex = image.ReferringPhysicianName = image.PositionReferenceIndicator = ""
        sources.append(image)
    made = hd.pm.ParametricMap(
        sources,
        pixels,
        hd.UID(),
        7,
        hd.UID(),
        1,
        "maker",
        "model",
        "1",
        "serial",
        contains_recognizable_visual_features=False,
        real_world_value_mappings=[mapping],
        voi_lut_transformations=[hd.VOILUTTransformation(window_center=0.0, window_width=1.0)],
    )
    change(made)
    made.save_as(folder / "map.dcm")
    return folder / "map.dcm"
