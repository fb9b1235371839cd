"""DICOM files from planned slices: stored integers, encoded pixel data, and all attributes.

Every file is marked as generated in its institution, patient, manufacturer, study and series description.
Files contain no time, host or library version, and deflated ones use stored blocks, so the bytes are the same
on every machine. Only this module of the generator imports pydicom.

Source: DICOM PS3.3 (modules of CT, MR, CR and DX image), PS3.5 (encoding), PS3.10 (file format).
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.filebase import DicomBytesIO
from pydicom.filewriter import write_dataset, write_file_meta_info
from pydicom.uid import (
    ComputedRadiographyImageStorage,
    CTImageStorage,
    DeflatedExplicitVRLittleEndian,
    DigitalXRayImageStorageForPresentation,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    MRImageStorage,
    RLELossless,
)

from shardflow.synthetic.draws import INSTITUTION, patient_id, patient_name
from shardflow.synthetic.geometry import Vector, dot, move, round_vector
from shardflow.synthetic.options import SynthOptions
from shardflow.synthetic.study import Encoding, SeriesPlan, SlicePlan, StudyPlan, Syntax

_Array = np.ndarray[Any, np.dtype[Any]]
_RUN, _MAX_PACKET = 3, 128


def store(values: _Array, encoding: Encoding, *, full_scale: bool) -> _Array:
    """Return the stored integers, int16 or uint16, of one slice.

    Args:
        values: ``(rows, columns)`` float32; overwritten.
        encoding: How to store them.
        full_scale: Whether 1.0 stands for the highest stored value (radiographs); else values are in the
            unit that slope and intercept lead to.
    """
    if full_scale:
        values *= np.float32(encoding.highest)
    else:
        if float(encoding.intercept):
            values -= np.float32(encoding.intercept)
        if encoding.slope is not None and float(encoding.slope) != 1:
            values /= np.float32(encoding.slope)
    np.rint(values, out=values)
    np.clip(values, np.float32(encoding.lowest), np.float32(encoding.highest), out=values)
    stored: _Array = values.astype(np.int32).astype(np.int16 if encoding.is_signed else np.uint16)
    if encoding.photometric == "MONOCHROME1":
        stored = (encoding.highest - stored).astype(stored.dtype)
    if encoding.padding is not None:
        stored[_outside(*stored.shape)] = encoding.padding
    if encoding.has_high_bits:
        _set_high_bits(stored, encoding.bits_stored)
    return stored


@lru_cache(maxsize=4)
def _outside(rows: int, columns: int) -> _Array:
    """Return the pixels outside the reconstructed circle."""
    down = (np.arange(rows) * 2 - rows + 1) ** 2
    across = (np.arange(columns) * 2 - columns + 1) ** 2
    outside: _Array = down[:, None] + across[None, :] > min(rows, columns) ** 2
    outside.flags.writeable = False
    return outside


def _set_high_bits(stored: _Array, bits_stored: int) -> None:
    """Write an overlay, a frame in the corner, into the bit above the stored ones, and clear the others.

    This destroys the sign extension of signed pixels, which a reader must restore.
    """
    bits = stored.view(np.uint16)
    bits &= np.uint16((1 << bits_stored) - 1)
    high = np.uint16(1 << bits_stored)
    rows, columns = stored.shape
    bits[: rows // 4, : columns // 4] |= high
    bits[rows // 16 : rows // 5, columns // 16 : columns // 5] &= np.uint16(0xFFFF) ^ high


def pixel_bytes(stored: _Array, *, big_endian: bool) -> bytes:
    """Return native pixel data; its length is even."""
    data = stored.astype(stored.dtype.newbyteorder(">" if big_endian else "<"), copy=False).tobytes()
    return data + b"\0" * (len(data) % 2)


def rle_frame(stored: _Array) -> bytes:
    """Return one frame of 16 bit pixels in RLE Lossless.

    Source: DICOM PS3.5, annex G: a header of segment offsets, most significant bytes first, each row on its
    own.
    """
    planes = stored.astype(stored.dtype.newbyteorder(">"), copy=False)
    split = np.ascontiguousarray(planes).view(np.uint8).reshape(*stored.shape, 2)
    segments = [_pack_bits(np.ascontiguousarray(split[:, :, byte])) for byte in (0, 1)]
    header = np.zeros(16, dtype="<u4")
    header[:3] = (2, 64, 64 + len(segments[0]))
    return header.tobytes() + b"".join(segments)


def _pack_bits(rows: _Array) -> bytes:
    """Encode rows of bytes as PackBits, each row starting a new packet; padded to an even length."""
    flat, width = rows.reshape(-1), rows.shape[1]
    starts, lengths = _runs(flat, width)
    is_run = lengths >= _RUN
    # Neighboring short runs of one row make one literal packet.
    row = starts // width
    begins = np.ones(len(starts), dtype=bool)
    begins[1:] = is_run[1:] | is_run[:-1] | (row[1:] != row[:-1])
    first = starts[begins]
    length = np.diff(np.append(first, flat.size))
    repeats = is_run[begins]
    # Packets hold at most 128 bytes.
    pieces = (length + _MAX_PACKET - 1) // _MAX_PACKET
    owner = np.repeat(np.arange(len(first)), pieces)
    piece = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    source = first[owner] + piece * _MAX_PACKET
    size = np.minimum(length[owner] - piece * _MAX_PACKET, _MAX_PACKET)
    repeated = repeats[owner]
    stored_size = np.where(repeated, 1, size)
    target = np.cumsum(stored_size + 1) - (stored_size + 1)
    packed = np.zeros(int((stored_size + 1).sum()), dtype=np.uint8)
    packed[target] = np.where(repeated, 257 - size, size - 1) & 0xFF
    # Bytes follow their packet's control byte.
    within = np.arange(int(stored_size.sum())) - np.repeat(np.cumsum(stored_size) - stored_size, stored_size)
    packed[np.repeat(target + 1, stored_size) + within] = flat[np.repeat(source, stored_size) + within]
    data = packed.tobytes()
    return data + b"\0" * (len(data) % 2)


def _runs(flat: _Array, width: int) -> tuple[_Array, _Array]:
    """Return starts and lengths of runs of equal bytes; a run ends with its row."""
    change = np.empty(flat.size, dtype=bool)
    change[1:] = flat[1:] != flat[:-1]
    change[0::width] = True
    starts = np.flatnonzero(change)
    return starts, np.diff(np.append(starts, flat.size))


_SOP_CLASSES = {
    "CR": ComputedRadiographyImageStorage,
    "CT": CTImageStorage,
    "DX": DigitalXRayImageStorageForPresentation,
    "MR": MRImageStorage,
}
_SYNTAXES: dict[Syntax, str] = {
    "deflated": DeflatedExplicitVRLittleEndian,
    "explicit-big": ExplicitVRBigEndian,
    "explicit-little": ExplicitVRLittleEndian,
    "implicit-little": ImplicitVRLittleEndian,
    "rle": RLELossless,
}
_IMPLEMENTATION_UID = "2.25.197203459301224930154021948235021174301"
_BODY_PARTS = {"abdomen": "ABDOMEN", "chest": "CHEST", "head": "HEAD", "spine": "LSPINE"}
_PATIENT_ORIENTATIONS = {"AP": ["L", "F"], "PA": ["L", "F"], "LL": ["P", "F"]}
_CONTRAST_AGENTS = {"arterial", "portal", "delayed", "t1-contrast"}
_B_VALUES = {"dwi-b0": 0.0, "dwi-b1000": 1000.0}
_MAX_BLOCK = 65535


def decimal_text(value: float, decimals: int = 6) -> str:
    """Render a number as a DICOM decimal string (at most 16 characters for what is written here)."""
    text = f"{value:.{decimals}f}".rstrip("0").rstrip(".")
    return "0" if text in {"-0", ""} else text


def position_of(study: StudyPlan, item: SlicePlan) -> Vector:
    """Return the center of a slice's first pixel in the study's frame of reference, as written, mm."""
    return round_vector(move(item.plane.position, study.origin))


class SeriesWriter:
    """Encodes the instances of one series."""

    def __init__(self, options: SynthOptions, study: StudyPlan, series: SeriesPlan) -> None:
        self._study = study
        self._series = series
        self._meta = FileMetaDataset()
        self._dataset = Dataset()
        _describe_patient(self._dataset, options, study)
        _describe_series(self._dataset, study, series)
        _describe_pixels(self._dataset, series.encoding)
        self._meta.MediaStorageSOPClassUID = self._dataset.SOPClassUID
        self._meta.TransferSyntaxUID = _SYNTAXES[series.syntax]
        self._meta.ImplementationClassUID = _IMPLEMENTATION_UID
        self._meta.ImplementationVersionName = "SHARDFLOW_SYNTH"

    def encode(self, item: SlicePlan, stored: _Array) -> bytes:
        """Return the bytes of one file."""
        dataset, series = self._dataset, self._series
        dataset.SOPInstanceUID = self._meta.MediaStorageSOPInstanceUID = item.sop_instance_uid
        dataset.InstanceNumber = str(item.instance_number)
        if series.modality in {"CT", "MR"}:
            dataset.AcquisitionNumber = str(item.acquisition_number)
        dataset.Rows, dataset.Columns = stored.shape
        self._place(item)
        if series.syntax == "rle":
            dataset.PixelData = encapsulate([rle_frame(stored)])
            dataset["PixelData"].is_undefined_length = True
            dataset["PixelData"].VR = "OB"
        else:
            dataset.PixelData = pixel_bytes(stored, big_endian=series.syntax == "explicit-big")
            dataset["PixelData"].VR = "OW"
        data = self._file()
        # An interrupted transfer: the file ends within its pixel data.
        return data[: len(data) - int(stored.nbytes * 0.4)] if item.is_truncated else data

    def _place(self, item: SlicePlan) -> None:
        """Write what differs from slice to slice."""
        dataset, plane = self._dataset, item.plane
        spacing = [decimal_text(plane.grid.row_spacing_mm), decimal_text(plane.grid.column_spacing_mm)]
        if self._series.kind == "projection":
            dataset.ImagerPixelSpacing = spacing
            dataset.ViewPosition = item.view
            dataset.PatientOrientation = _PATIENT_ORIENTATIONS[item.view]
            return
        position = position_of(self._study, item)
        dataset.PixelSpacing = spacing
        dataset.ImagePositionPatient = [decimal_text(value) for value in position]
        directions = (*plane.row_direction, *plane.column_direction)
        dataset.ImageOrientationPatient = [decimal_text(value, 10) for value in directions]
        dataset.SliceLocation = decimal_text(dot(position, plane.normal), 3)
        if item.contrast in _CONTRAST_AGENTS:
            dataset.ContrastBolusAgent = "SYNTHETIC AGENT"
        elif "ContrastBolusAgent" in dataset:
            del dataset.ContrastBolusAgent
        if item.contrast in _B_VALUES:
            dataset.DiffusionBValue = _B_VALUES[item.contrast]

    def _file(self) -> bytes:
        """Encode preamble, file meta information and data set."""
        syntax = self._series.syntax
        head = DicomBytesIO()
        head.write(b"\0" * 128 + b"DICM")
        write_file_meta_info(head, self._meta, enforce_standard=True)
        body = DicomBytesIO()
        body.is_little_endian = syntax != "explicit-big"
        body.is_implicit_VR = syntax == "implicit-little"
        write_dataset(body, self._dataset)
        data = body.getvalue()
        return b"".join((head.getvalue(), _deflated(data) if syntax == "deflated" else data))


def _describe_patient(dataset: Dataset, options: SynthOptions, study: StudyPlan) -> None:
    patient, visit = study.patient, study.visit
    dataset.SpecificCharacterSet = "ISO_IR 100"
    dataset.PatientName = patient_name(patient.number)
    dataset.PatientID = patient_id(options.seed, patient.number)
    dataset.PatientBirthDate = f"{patient.birth_day:%Y%m%d}"
    dataset.PatientSex = patient.sex
    dataset.PatientAge = f"{patient.age_years(visit):03d}Y"
    dataset.PatientComments = "SYNTHETIC"
    dataset.StudyInstanceUID = study.uid
    dataset.StudyDate = dataset.SeriesDate = dataset.AcquisitionDate = dataset.ContentDate = (
        f"{visit.day:%Y%m%d}"
    )
    dataset.StudyTime = f"{visit.minute // 60:02d}{visit.minute % 60:02d}00"
    dataset.StudyID = f"SYN{study.number}"
    dataset.AccessionNumber = f"SYN{study.number:010d}"
    dataset.StudyDescription = f"SYNTHETIC {visit.modality} {study.region}"
    dataset.ReferringPhysicianName = "SYNTHETIC^Referrer"
    dataset.InstitutionName = INSTITUTION
    dataset.StationName = "SYNTHETIC1"


def _describe_series(dataset: Dataset, study: StudyPlan, series: SeriesPlan) -> None:
    visit = study.visit
    minute = visit.minute + 2 * series.index + 1
    dataset.SOPClassUID = _SOP_CLASSES[series.modality]
    dataset.Modality = series.modality
    dataset.Manufacturer = "SYNTHETIC"
    dataset.ManufacturerModelName = "shardflow phantom"
    dataset.SeriesInstanceUID = series.uid
    dataset.SeriesNumber = str(series.number)
    dataset.SeriesDescription = f"SYNTHETIC {series.name}"[:64]
    time = f"{minute // 60 % 24:02d}{minute % 60:02d}00"
    dataset.SeriesTime = dataset.AcquisitionTime = dataset.ContentTime = time
    dataset.ProtocolName = f"SYNTHETIC {study.region}"
    dataset.BodyPartExamined = _BODY_PARTS[study.region]
    dataset.ImageType = list(series.image_type)
    dataset.BurnedInAnnotation = "NO"
    if series.kind != "projection":
        dataset.FrameOfReferenceUID = series.frame_of_reference_uid
        dataset.PatientPosition = "HFS"
        dataset.PositionReferenceIndicator = ""
    else:
        dataset.PixelIntensityRelationship = "LOG"
        dataset.PixelIntensityRelationshipSign = 1 if series.encoding.photometric == "MONOCHROME2" else -1
    if series.modality == "DX":
        dataset.PresentationIntentType = "FOR PRESENTATION"
        dataset.PresentationLUTShape = (
            "INVERSE" if series.encoding.photometric == "MONOCHROME1" else "IDENTITY"
        )
        dataset.ImageLaterality = "U"
    if series.thickness_mm is not None:
        dataset.SliceThickness = f"{series.thickness_mm:g}"
    for keyword, text in series.attributes.items():
        setattr(dataset, keyword, text.split("\\") if "\\" in text else text)


def _describe_pixels(dataset: Dataset, encoding: Encoding) -> None:
    dataset.SamplesPerPixel = 1
    dataset.PhotometricInterpretation = encoding.photometric
    dataset.BitsAllocated = 16
    dataset.BitsStored = encoding.bits_stored
    dataset.HighBit = encoding.bits_stored - 1
    dataset.PixelRepresentation = int(encoding.is_signed)
    if encoding.slope is not None:
        dataset.RescaleSlope = encoding.slope
        dataset.RescaleIntercept = encoding.intercept
        dataset.RescaleType = "HU" if dataset.Modality == "CT" else "US"
    if encoding.padding is not None and encoding.has_padding_attribute:
        dataset.PixelPaddingValue = encoding.padding
        dataset["PixelPaddingValue"].VR = "SS" if encoding.is_signed else "US"


def _deflated(data: bytes) -> bytes:
    """Wrap bytes in a deflate stream of stored blocks.

    A compressor's output depends on its build (zlib, zlib-ng, ...); stored blocks are defined to the bit.

    Source: RFC 1951, 3.2.4; padded to an even length (DICOM PS3.5, A.5).
    """
    blocks = []
    for start in range(0, len(data), _MAX_BLOCK):
        block = data[start : start + _MAX_BLOCK]
        is_last = start + _MAX_BLOCK >= len(data)
        blocks.append(struct.pack("<BHH", is_last, len(block), len(block) ^ 0xFFFF) + block)
    stream = b"".join(blocks)
    return stream + b"\0" * (len(stream) % 2)
