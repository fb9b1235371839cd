"""Images of every format (DICOM, NIfTI, PNG, JPEG, and slides in TIFF), and the reader of PNG and JPEG.

Every format is read as an `InstanceHeader` and decoded to slices in modality units, so the rest of packing
does not depend on the file format.

The size of a PNG or JPEG is read from the file's own header and checked before anything is decoded. OpenCV
fills the missing part of a truncated file with gray and reports nothing, so files are checked for
completeness: the checksum of every chunk of a PNG, the end marker of a JPEG.

Source: PNG specification (third edition), 5 and 11.2.1; ITU T.81, annex B.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardflow.format.reasons import Reason, reading_source, source_error
from shardflow.packing.sources.dicom.acquisition import AcquisitionFacts, read_acquisition
from shardflow.packing.sources.dicom.attributes import (
    read_attributes,
    read_everywhere,
    read_frame_attributes,
)
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.elements import HeaderLimits, check_limits
from shardflow.packing.sources.dicom.headers import BrokenInstance, InstanceHeader, read_header
from shardflow.packing.sources.dicom.planes import PlaneHeader
from shardflow.packing.sources.dicom.stored import iter_stored
from shardflow.packing.sources.dicom.values import holds_end_of_jpeg, read_jpeg_header
from shardflow.packing.sources.nifti import NIFTI, iter_nifti, read_nifti
from shardflow.packing.sources.placement import make_header
from shardflow.packing.sources.slides import read_tiff

if TYPE_CHECKING:
    from shardflow.packing.sources.dicom.attributes import AttributeValue
    from shardflow.packing.sources.dicom.headers import SliceRef
    from shardflow.packing.sources.placement import Placement

PNG: Final = "png"
JPEG: Final = "jpeg"

Array = np.ndarray[Any, np.dtype[Any]]

_PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_JPEG_START: Final = b"\xff\xd8\xff"
_PNG_SAMPLES: Final = {0: 1, 2: 3, 3: 3}
"""Samples of a pixel once decoded, by color type; types with transparency are no images of patients."""
# Of a picture in color that is gray, samples differ by no more than JPEG's color conversion makes them.
_GRAY_TOLERANCE: Final = 3


class _Size(NamedTuple):
    syntax: str
    rows: int
    columns: int
    samples: int
    bits: int


def read_raster(path: Path, placement: Placement, *, limits: HeaderLimits) -> InstanceHeader:
    """Read what packing needs of a picture; nothing is decoded.

    Args:
        path: The file.
        placement: Whose it is; ``patient``, ``study``, ``series`` and ``instance`` must be set.
        limits: Bounds on what the file declares.

    Raises:
        SourceError: FILE_UNREADABLE, NOT_IMAGE, HEADER_UNREADABLE, INVALID_IMAGE_DESCRIPTION,
            LIMIT_EXCEEDED.
    """
    data = _read(path, limits)
    size = _size_of(data)
    pixels = size.rows * size.columns
    if pixels == 0:
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, f"{size.rows} rows and {size.columns} columns")
    num_bytes = pixels * size.samples * (size.bits // 8)
    check_limits(
        ("pixels", pixels, limits.max_frame_pixels),
        ("bytes of pixels", num_bytes, limits.max_pixel_bytes),
    )
    if size.samples == 3 and size.bits != 8:
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, f"color of {size.bits} bits")
    is_color = size.samples == 3 and not placement.is_gray
    if is_color and placement.rescale is not None:
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, "slope and intercept of a picture in color")
    slope, intercept = placement.rescale or (None, None)
    image = ImageDescription(
        rows=size.rows,
        columns=size.columns,
        samples_per_pixel=3 if is_color else 1,
        num_frames=1,
        bits_allocated=size.bits,
        bits_stored=size.bits,
        high_bit=size.bits - 1,
        is_signed=False,
        planar_configuration=0,
        photometric_interpretation="RGB" if is_color else "MONOCHROME2",
    )
    plane = PlaneHeader(
        pixel_spacing=placement.spacing_mm and placement.spacing_mm[:2], slope=slope, intercept=intercept
    )
    unit = "HU" if placement.modality == "CT" and placement.rescale is not None else ""
    return make_header(placement, image, (plane,), syntax=size.syntax, num_bytes=len(data), unit=unit)


def iter_raster(
    path: Path, header: InstanceHeader, frames: Sequence[int], limits: HeaderLimits
) -> Iterator[tuple[Array, str]]:
    """Decode the picture; as `shardflow.packing.sources.dicom.stored.iter_stored`.

    Raises:
        SourceError: FILE_UNREADABLE, PIXEL_DATA_TRUNCATED, DECODE_FAILED, LIMIT_EXCEEDED or
            INVALID_IMAGE_DESCRIPTION.
    """
    import cv2

    data = _read(path, limits)
    _check_whole(data)
    try:
        # Pixels as stored: no rotation by a camera's note, no reduction to 8 bits.
        decoded: Array | None = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        decoded = None
    if decoded is None:
        raise source_error(Reason.DECODE_FAILED, "opencv")
    pixels = decoded[..., ::-1] if decoded.ndim == 3 else decoded
    if decoded.ndim == 3 and not header.image.is_color:
        pixels = _gray(pixels)
    expected = (header.image.rows, header.image.columns, *((3,) if header.image.is_color else ()))
    if pixels.shape != expected or pixels.dtype.itemsize * 8 != header.image.bits_allocated:
        raise source_error(Reason.DECODE_FAILED, "another image than the head declares")
    for _ in frames:
        yield np.ascontiguousarray(pixels), "opencv"


def _gray(pixels: Array) -> Array:
    """Take one sample of three that are equal; a radiograph with color in it is annotated, or none."""
    wide = pixels.astype(np.int16)
    if int((wide.max(axis=2) - wide.min(axis=2)).max()) > _GRAY_TOLERANCE:
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, "color in an image that must be gray")
    return np.ascontiguousarray(pixels[..., 1])


def _read(path: Path, limits: HeaderLimits) -> bytes:
    with reading_source(), path.open("rb") as file:
        # As many as there are: to ask for as many as are allowed would reserve them, for every picture.
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes <= limits.max_inflated_bytes:
            return file.read(num_bytes)
    raise source_error(Reason.LIMIT_EXCEEDED, f"a picture of more than {limits.max_inflated_bytes} bytes")


def _size_of(data: bytes) -> _Size:
    if data.startswith(_PNG_SIGNATURE):
        return _png_size(data)
    if data.startswith(_JPEG_START):
        return _jpeg_size(data)
    raise source_error(Reason.NOT_IMAGE)


def _png_size(data: bytes) -> _Size:
    if len(data) < 33 or data[12:16] != b"IHDR" or zlib.crc32(data[12:29]) != _big(data, 29, 4):
        raise source_error(Reason.HEADER_UNREADABLE, "the first chunk of the PNG")
    columns, rows, depth, color = _big(data, 16, 4), _big(data, 20, 4), data[24], data[25]
    if color not in _PNG_SAMPLES or depth not in {1, 2, 4, 8, 16}:
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, f"color type {color}, {depth} bits")
    return _Size(PNG, rows, columns, _PNG_SAMPLES[color], 16 if depth == 16 and color != 3 else 8)


def _jpeg_size(data: bytes) -> _Size:
    header = read_jpeg_header(data)
    if header is None:
        raise source_error(Reason.HEADER_UNREADABLE, "no frame header in the JPEG")
    samples, depth = header.num_components, header.precision
    if depth != 8 or samples not in {1, 3}:
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, f"{samples} samples of {depth} bits")
    return _Size(JPEG, header.rows, header.columns, samples, 8)


def _check_whole(data: bytes) -> None:
    if data.startswith(_JPEG_START):
        if not holds_end_of_jpeg(data):
            raise source_error(Reason.PIXEL_DATA_TRUNCATED, "no end of the JPEG")
        return
    position = len(_PNG_SIGNATURE)
    view = memoryview(data)
    while position + 12 <= len(data):
        end = position + 8 + _big(data, position, 4)
        if end + 4 > len(data):
            break
        if zlib.crc32(view[position + 4 : end]) != _big(data, end, 4):
            raise source_error(Reason.DECODE_FAILED, "a chunk of the PNG has another checksum")
        if data[position + 4 : position + 8] == b"IEND":
            return
        position = end + 4
    raise source_error(Reason.PIXEL_DATA_TRUNCATED, "no end of the PNG")


def _big(data: bytes, offset: int, num_bytes: int) -> int:
    return int.from_bytes(data[offset : offset + num_bytes], "big")


_READERS = {JPEG: iter_raster, NIFTI: iter_nifti, PNG: iter_raster}


def read_image(
    path: Path, placement: Placement | None, *, limits: HeaderLimits
) -> InstanceHeader | BrokenInstance:
    """Read what packing needs of one file.

    Args:
        path: The file.
        placement: What the layout says of it; None where DICOM headers say everything.
        limits: Bounds on what the file declares.

    Raises:
        SourceError: The file is no image, or damaged; ``reason`` is a `Reason`.
    """
    if placement is None:
        return read_header(path, limits=limits)
    match placement.form:
        case "dicom":
            return read_header(path, limits=limits, identify=placement.identify)
        case "nifti":
            return read_nifti(path, placement, limits=limits)
        case "raster":
            return read_raster(path, placement, limits=limits)
        case "slide":
            return read_tiff(path, placement, limits=limits)


def iter_stored_image(
    path: Path, header: InstanceHeader, frames: Sequence[int], limits: HeaderLimits
) -> Iterator[tuple[np.ndarray[Any, np.dtype[Any]], str]]:
    """Yield stored values of any form; as `shardflow.packing.sources.dicom.stored.iter_stored`."""
    return _READERS.get(header.transfer_syntax_uid, iter_stored)(path, header, frames, limits)


def read_image_attributes(
    path: Path, placement: Placement | None, keywords: Sequence[str], *, limits: HeaderLimits
) -> dict[str, AttributeValue]:
    """Read technical attributes: of the header where there is one, then of the layout for what it lacks.

    Raises:
        SourceError: As `shardflow.packing.sources.dicom.attributes.read_attributes`.
    """
    given = _said(placement, keywords)
    if placement is not None and placement.form != "dicom":
        return given
    return {**given, **read_attributes(path, keywords, limits=limits)}


def _said(placement: Placement | None, keywords: Sequence[str]) -> dict[str, AttributeValue]:
    """Return the attributes that a layout states."""
    if placement is None:
        return {}
    given = {keyword: values for keyword, values in placement.attributes.items() if keyword in keywords}
    # What identifies a patient is asked for where it is looked for in texts, to be taken out.
    modality = placement.modality or ("SM" if placement.form == "slide" else "")
    said = {"Modality": modality, "PatientID": placement.patient, "StudyID": placement.study}
    given.update({keyword: (text,) for keyword, text in said.items() if text and keyword in keywords})
    return given


def read_frame_facts(
    path: Path,
    placement: Placement | None,
    keywords: Sequence[str],
    frames: Sequence[int],
    *,
    limits: HeaderLimits,
) -> list[dict[str, AttributeValue]]:
    """Read technical attributes of frames, as `read_image_attributes`; of an enhanced object those of each.

    Raises:
        SourceError: As `shardflow.packing.sources.dicom.attributes.read_frame_attributes`.
    """
    given = _said(placement, keywords)
    if placement is not None and placement.form != "dicom":
        return [given] * len(frames)
    return [{**given, **one} for one in read_frame_attributes(path, keywords, frames, limits=limits)]


def read_stack_facts(
    path: Path, placement: Placement | None, slices: Sequence[SliceRef], *, limits: HeaderLimits
) -> AcquisitionFacts:
    """Read the facts of a stack that its values need, of its first file; of other formats what points have.

    Raises:
        SourceError: As `shardflow.packing.sources.dicom.acquisition.read_acquisition`.
    """
    if placement is not None and placement.form != "dicom":
        first = slices[0]
        num_frames = first.instance.image.num_frames
        found: dict[str, Any] = {}
        if placement.channels:
            point = first.frame * len(placement.channels) // num_frames
            found["channel"] = placement.channels[point]
        if placement.b_values:
            point = first.frame * len(placement.b_values) // num_frames
            found["diffusion"] = {"b_value_s_mm2": placement.b_values[point]}
        return AcquisitionFacts(published=found)
    return read_acquisition(path, slices, limits=limits)


def read_image_people(
    path: Path, placement: Placement | None, keywords: Sequence[str], *, limits: HeaderLimits
) -> dict[str, tuple[str, ...]]:
    """Read the people named anywhere in a header, and the patient named by the layout.

    Raises:
        SourceError: As `shardflow.packing.sources.dicom.attributes.read_everywhere`.
    """
    if placement is None:
        return read_everywhere(path, keywords, limits=limits)
    found = read_everywhere(path, keywords, limits=limits) if placement.form == "dicom" else {}
    said = {
        "AccessionNumber": placement.other_ids,
        "PatientID": (placement.patient,),
        "StudyID": (placement.study,),
    }
    given = {keyword: texts for keyword, texts in said.items() if any(texts) and keyword in keywords}
    return {**found, **{keyword: (*found.get(keyword, ()), *texts) for keyword, texts in given.items()}}
