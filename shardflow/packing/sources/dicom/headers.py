"""Header pass: reads the few facts of a DICOM file that packing plans with, and drops everything else.

A header is plain, small and picklable: one per file crosses from the reading process to the planning one.
Its JSON form, in which a plan keeps headers between the two passes, is exact: floats survive, and tuples
are restored as tuples.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardflow.errors import SourceError
from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.description import DESCRIPTION_TAGS, ImageDescription, describe_image
from shardflow.packing.sources.dicom.dictionary import (
    ENCAPSULATED_SYNTAXES,
    IMAGE_CLASSES,
    MAP_CLASSES,
    MEDIA_DIRECTORY,
    NATIVE_SYNTAXES,
    NUCLEAR,
    STATED_UNITS,
    WHOLE_SLIDE,
)
from shardflow.packing.sources.dicom.elements import Elements, FileElements, HeaderLimits, read_elements
from shardflow.packing.sources.dicom.maps import MAP_TAGS, float_padding, read_map, read_reconstruction
from shardflow.packing.sources.dicom.planes import (
    MAX_SPACING_MM,
    PLANE_TAGS,
    PlaneHeader,
    read_mosaic,
    read_planes,
    read_rescale_types,
)
from shardflow.packing.sources.dicom.slides import (
    SLIDE_TAGS,
    check_slide,
    describe_level,
    pyramid_of,
    slide_limits,
)

_SOP_CLASS, _SOP_INSTANCE, _STUDY, _SERIES, _PATIENT = (
    0x00080016,
    0x00080018,
    0x0020000D,
    0x0020000E,
    0x00100020,
)
_IMAGE_TYPE, _MODALITY, _SERIES_TEXT = 0x00080008, 0x00080060, 0x0008103E
_SERIES_NUMBER, _INSTANCE_NUMBER, _FRAME_OF_REFERENCE, _LOCATION = (
    0x00200011,
    0x00200013,
    0x00200052,
    0x00201041,
)
_BETWEEN_SLICES, _DETECTOR_SPACING, _PADDING, _PADDING_LIMIT = 0x00180088, 0x00181164, 0x00280120, 0x00280121
_ACCESSION, _STUDY_DATE, _STUDY_TIME = 0x00080050, 0x00080020, 0x00080030
_ACQUISITION, _ACQUISITION_DATE, _ACQUISITION_TIME = 0x0008002A, 0x00080022, 0x00080032
_UTC_OFFSET = 0x00080201
_MODALITY_LUT, _VOI_FUNCTION, _UNITS, _BURNED_IN = 0x00283000, 0x00281056, 0x00541001, 0x00280301
_NAME, _BIRTH_DATE, _SEX, _AGE = 0x00100010, 0x00100030, 0x00100040, 0x00101010
_ISSUER, _OTHER_IDS, _OTHER_IDS_ITEMS = 0x00100021, 0x00101000, 0x00101002
_SYNTAXES = NATIVE_SYNTAXES | ENCAPSULATED_SYNTAXES
_PIXEL_VRS = {0x7FE00008: "OF", 0x7FE00009: "OD"}
"""Of float pixel data, which the implicit encoding does not state."""

_WANTED = (
    frozenset({_SOP_CLASS, _SOP_INSTANCE, _STUDY, _SERIES, _PATIENT, _IMAGE_TYPE, _MODALITY})
    | frozenset({values.CHARACTER_SET, _SERIES_TEXT, _SERIES_NUMBER, _INSTANCE_NUMBER, _LOCATION})
    | frozenset({_FRAME_OF_REFERENCE, _BETWEEN_SLICES, _DETECTOR_SPACING, _PADDING, _PADDING_LIMIT})
    | frozenset({_MODALITY_LUT, _VOI_FUNCTION, _UNITS, _BURNED_IN})
    | frozenset({_ACCESSION, _STUDY_DATE, _STUDY_TIME})
    | frozenset({_ACQUISITION, _ACQUISITION_DATE, _ACQUISITION_TIME, _UTC_OFFSET})
    | frozenset({_NAME, _BIRTH_DATE, _SEX, _AGE, _ISSUER, _OTHER_IDS, _OTHER_IDS_ITEMS})
    | MAP_TAGS
    | PLANE_TAGS
    | SLIDE_TAGS
    | DESCRIPTION_TAGS
)
_OFFSET = re.compile(r"[+-](?:0\d|1[0-4])[0-5]\d", re.ASCII)
_MOMENT = re.compile(rf"\d{{12,14}}(?:\.\d{{1,6}})?(?:{_OFFSET.pattern})?", re.ASCII)
_MAX_OTHER_IDS = 32
_BETWEEN_IDS = re.compile(r"[\\,;|]")
"""Some devices write several into one value."""
_SCOUT_WORDS = ("LOCALI", "SCOUT", "TOPOGRAM", "SURVIEW")
_DEFAULT_LIMITS = HeaderLimits()
_MISSING_NUMBER = 1 << 62

Identify = Callable[[dict[str, str]], dict[str, str]]
"""Takes and returns ``patient_id``, ``study_instance_uid``, ``series_instance_uid``, ``sop_instance_uid``."""

UNKNOWN_UNIT = "OTHER"
"""Stands for a unit that is stated and not on the list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceHeader:
    """One image instance. Holds identifiers: it never goes into a message, log or dataset as it is."""

    file_index: int
    """The caller's number for the file, such as its place in the list of inputs."""
    patient_id: str
    study_instance_uid: str
    series_instance_uid: str
    sop_instance_uid: str
    sop_class_uid: str
    transfer_syntax_uid: str
    modality: str
    image_type: tuple[str, ...]
    series_number: int | None
    instance_number: int | None
    image: ImageDescription
    planes: tuple[PlaneHeader, ...]
    """One for all frames, or one per frame."""
    frame_of_reference_uid: str
    slice_location: float | None
    spacing_between_slices: float | None
    detector_spacing: tuple[float, float] | None
    """(0018,1164) *Imager Pixel Spacing*: on the detector, between rows and between columns, mm."""
    unit: str
    """(0028,1054) *Rescale Type* or (0054,1001) *Units*: a known one, `UNKNOWN_UNIT`, or ``""``: absent."""
    window_function: str
    """(0028,1056) *VOI LUT Function*."""
    burned_in: str
    """(0028,0301) *Burned In Annotation*, upper-cased; ``""`` where absent, which is no "no"."""
    padding: tuple[float, float] | None
    """Lowest and highest stored value that means "no data", inclusive."""
    has_modality_lut: bool
    is_localizer: bool
    pixel_vr: str
    pixel_offset: int
    """Where the value of the pixel data begins in the file; in the inflated stream for the deflated
    syntax."""
    pixel_num_bytes: int | None
    """Length of that value; None where it is encapsulated."""
    num_bytes: int
    """Size of the file."""
    flags: tuple[str, ...]
    """Irregularities that were corrected; docs/dicom.md lists the codes."""
    accession_number: str = ""
    """This and the next two link attachments with the study."""
    study_date: str = ""
    study_time: str = ""
    acquired: str = ""
    """Date and time of the acquisition, ``YYYYMMDDHHMMSS...`` on the clock of the device; ``""`` without
    either. Records and recordings count their seconds from it."""
    utc_offset: str = ""
    """(0008,0201) *Timezone Offset From UTC* of that clock, such as ``+0100``; else ``""``."""
    mosaic: int = 0
    """Tiles in a row of the one stored image whose tiles are the frames; 0 where frames are stored."""
    pyramid: tuple[str, ...] = ()
    """Container, optical path and pyramid of a level of a slide; see `pyramid_of`."""
    patient_name: str = ""
    """This and the rest tell whether two patient IDs are one person."""
    birth_date: str = ""
    sex: str = ""
    patient_age: str = ""
    patient_id_issuer: str = ""
    other_patient_ids: tuple[str, ...] = ()

    def plane(self, frame: int) -> PlaneHeader:
        """Return the facts of one frame."""
        return self.planes[frame if len(self.planes) > 1 else 0]

    @property
    def is_slide(self) -> bool:
        """Whether it is a whole slide, or a level of one: an image that is read tile by tile."""
        return self.sop_class_uid == WHOLE_SLIDE

    @property
    def is_native(self) -> bool:
        """Whether the pixels are stored uncompressed."""
        return self.transfer_syntax_uid in NATIVE_SYNTAXES

    @property
    def is_float(self) -> bool:
        """Whether the stored values are floating point numbers, as in parametric maps and other formats."""
        return self.pixel_vr in {"OD", "OF"}

    def __repr__(self) -> str:
        image = self.image
        return f"InstanceHeader({self.modality}, {image.num_frames} x {image.rows} x {image.columns})"


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRef:
    """One slice: a frame of an instance."""

    instance: InstanceHeader
    frame: int

    @property
    def plane(self) -> PlaneHeader:
        """Facts of this frame."""
        return self.instance.plane(self.frame)

    @property
    def number(self) -> int | None:
        """Number of the image in reports: *Instance Number*, or the 1-based frame of a multi-frame file."""
        return self.frame + 1 if self.instance.image.num_frames > 1 else self.instance.instance_number

    @property
    def order(self) -> tuple[int, str, int]:
        """Order where positions do not decide; the last two are unique, so it is always total."""
        number = self.instance.instance_number
        return (_MISSING_NUMBER if number is None else number, self.instance.sop_instance_uid, self.frame)


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenInstance:
    """An image that cannot be packed although its file states its study, which is therefore incomplete."""

    file_index: int
    patient_id: str
    """``""`` where it is missing, as with the other identifiers."""
    study_instance_uid: str
    sop_instance_uid: str
    reason: Reason
    detail: str
    """Numbers and tags; never a value of the file."""

    def __repr__(self) -> str:
        return f"BrokenInstance({self.reason})"


def read_header(
    path: Path,
    *,
    file_index: int = 0,
    limits: HeaderLimits = _DEFAULT_LIMITS,
    identify: Identify | None = None,
) -> InstanceHeader | BrokenInstance:
    """Read what packing needs of one file; pixels are not read.

    Args:
        path: The file.
        file_index: Handed through to the header.
        limits: Bounds on what the file declares.
        identify: Puts right what the file says of its patient, study, series and instance, before anything
            missing is missed; by default the file has the last word.

    Returns:
        The header, or what is known of an image that should have been packable and is not.

    Raises:
        SourceError: The file is no image, or damaged so that nobody can say what it is; ``reason`` is a
            `Reason`.
    """
    elements = read_elements(path, _WANTED, limits)
    sop_class = _check_kind(elements)
    try:
        return _read_instance(path, elements, sop_class, file_index, limits, identify)
    except SourceError as error:
        said = _said_identifiers(elements, identify)
        return BrokenInstance(
            file_index=file_index,
            patient_id=said["patient_id"],
            study_instance_uid=said["study_instance_uid"],
            sop_instance_uid=said["sop_instance_uid"],
            reason=Reason(error.reason),
            detail=error.message,
        )


def sop_class_of(path: Path, *, limits: HeaderLimits = _DEFAULT_LIMITS) -> str:
    """Return the SOP Class UID of a DICOM object of any class; ``""`` for other and unreadable files."""
    try:
        elements = read_elements(path, {_SOP_CLASS}, limits)
    except SourceError:
        return ""
    return values.code(elements, _SOP_CLASS) or elements.media_sop_class_uid


def _read_instance(
    path: Path,
    elements: FileElements,
    sop_class: str,
    file_index: int,
    limits: HeaderLimits,
    identify: Identify | None,
) -> InstanceHeader:
    _check_readable(elements, sop_class)
    identifiers: Mapping[str, Any] = _identifiers(elements, identify)
    is_slide = sop_class == WHOLE_SLIDE
    image, image_flags = describe_image(elements, slide_limits(limits) if is_slide else limits)
    image = _with_sample_format(elements, image)
    pixel_flags = _check_pixel_extent(elements, image)
    planes, plane_flags = read_planes(elements, image.num_frames)
    if is_slide:
        # Tiles differ in their place alone.
        image, planes = describe_level(elements, image), planes[:1]
    unit = _unit(elements)
    if sop_class in MAP_CLASSES:
        planes, unit, map_flags = read_map(elements, sop_class, planes, image.num_frames)
        plane_flags += map_flags
    series = _series_facts(elements)
    image_type = series["image_type"]
    if sop_class == NUCLEAR:
        planes = read_reconstruction(elements, image_type, planes, image.num_frames)
    mosaic = read_mosaic(path, image, planes[0], limits) if "MOSAIC" in image_type else None
    if mosaic is not None:
        image, planes, plane_flags = mosaic.image, mosaic.planes, (*plane_flags, "mosaic_unfolded")
    return InstanceHeader(
        file_index=file_index,
        **identifiers,
        **series,
        sop_class_uid=sop_class,
        transfer_syntax_uid=sys.intern(elements.transfer_syntax_uid),
        instance_number=values.integer(elements, _INSTANCE_NUMBER),
        image=image,
        planes=planes,
        slice_location=_single(values.decimals(elements, _LOCATION)),
        unit=unit,
        padding=float_padding(elements)
        if elements.pixel_tag in _PIXEL_VRS
        else _padding(elements, is_signed=image.is_signed),
        has_modality_lut=bool(elements.items(_MODALITY_LUT)),
        pixel_vr=_PIXEL_VRS.get(elements.pixel_tag or 0, elements.pixel_vr),
        pixel_offset=elements.pixel_offset,
        pixel_num_bytes=elements.pixel_num_bytes,
        num_bytes=elements.num_bytes,
        flags=(*elements.flags, *image_flags, *pixel_flags, *plane_flags),
        acquired=_acquired(elements),
        mosaic=0 if mosaic is None else mosaic.tiles_per_row,
        pyramid=pyramid_of(elements) if is_slide else (),
        other_patient_ids=_other_patient_ids(elements),
    )


@values.shared(
    *(values.CHARACTER_SET, _IMAGE_TYPE, _MODALITY, _SERIES_TEXT, _SERIES_NUMBER, _FRAME_OF_REFERENCE),
    *(_BETWEEN_SLICES, _DETECTOR_SPACING, _VOI_FUNCTION, _BURNED_IN, _ACCESSION, _STUDY_DATE, _STUDY_TIME),
    *(_UTC_OFFSET, _NAME, _BIRTH_DATE, _SEX, _AGE, _ISSUER),
)
def _series_facts(elements: Elements) -> Mapping[str, Any]:
    """Fields of the header that differ between series, and seldom in one."""
    image_type = values.codes(elements, _IMAGE_TYPE)
    detector = values.decimals(elements, _DETECTOR_SPACING, 2)
    is_spacing = detector and 0 < min(detector) <= max(detector) <= MAX_SPACING_MM
    return MappingProxyType(
        {
            "modality": values.code(elements, _MODALITY).upper(),
            "image_type": image_type,
            "series_number": values.integer(elements, _SERIES_NUMBER),
            "frame_of_reference_uid": values.code(elements, _FRAME_OF_REFERENCE),
            "spacing_between_slices": _single(values.decimals(elements, _BETWEEN_SLICES)),
            "detector_spacing": detector if is_spacing else None,
            "window_function": values.code(elements, _VOI_FUNCTION).upper(),
            "burned_in": values.code(elements, _BURNED_IN).upper(),
            "is_localizer": _is_localizer(elements, image_type),
            "accession_number": values.text(elements, _ACCESSION),
            "study_date": values.code(elements, _STUDY_DATE),
            "study_time": values.code(elements, _STUDY_TIME),
            "utc_offset": _utc_offset(elements),
            "patient_name": values.text(elements, _NAME, has_escapes=True),
            "birth_date": values.code(elements, _BIRTH_DATE),
            "sex": values.code(elements, _SEX),
            "patient_age": values.code(elements, _AGE),
            "patient_id_issuer": values.text(elements, _ISSUER),
        }
    )


def _check_kind(elements: FileElements) -> str:
    """Return the SOP class of an image file, which may still be unreadable."""
    if elements.media_sop_class_uid == MEDIA_DIRECTORY:
        raise source_error(Reason.DICOM_DIRECTORY)
    sop_class = values.code(elements, _SOP_CLASS) or elements.media_sop_class_uid
    if sop_class and sop_class not in IMAGE_CLASSES:
        raise source_error(Reason.UNSUPPORTED_SOP_CLASS)
    if elements.problem is None and elements.pixel_tag is None:
        raise source_error(Reason.NO_PIXEL_DATA, "" if sop_class else "and no SOP Class UID")
    if not sop_class:
        if elements.problem is not None:
            raise source_error(Reason.HEADER_UNREADABLE, elements.problem)
        raise source_error(Reason.UNSUPPORTED_SOP_CLASS, "no SOP Class UID")
    if sop_class == WHOLE_SLIDE:
        check_slide(elements)
    return sop_class


def _check_readable(elements: FileElements, sop_class: str) -> None:
    if elements.problem is not None:
        raise source_error(Reason.HEADER_UNREADABLE, elements.problem)
    if elements.transfer_syntax_uid not in _SYNTAXES:
        raise source_error(Reason.UNSUPPORTED_TRANSFER_SYNTAX)
    if elements.pixel_tag in _PIXEL_VRS and sop_class not in MAP_CLASSES:
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, "floating point pixel data")


def _with_sample_format(elements: FileElements, image: ImageDescription) -> ImageDescription:
    """Check that the allocated bits fit the kind of pixel data (PS3.3, C.7.6.24 and C.7.6.25)."""
    kind = _PIXEL_VRS.get(elements.pixel_tag or 0)
    is_float = kind is not None
    expected = (64,) if kind == "OD" else (32,) if is_float else (1, 8, 16, 32)
    is_plain = image.samples_per_pixel == 1 and elements.transfer_syntax_uid in NATIVE_SYNTAXES
    if image.bits_allocated not in expected or (is_float and not is_plain):
        raise source_error(
            Reason.INVALID_IMAGE_DESCRIPTION, f"{image.bits_allocated} bits of {kind or 'integer'} pixel data"
        )
    # Float pixel data has no Pixel Representation.
    return replace(image, is_signed=True) if is_float else image


def _said_identifiers(elements: FileElements, identify: Identify | None) -> dict[str, str]:
    said = {
        "patient_id": values.text(elements, _PATIENT),
        "study_instance_uid": values.code(elements, _STUDY),
        "series_instance_uid": values.code(elements, _SERIES),
        "sop_instance_uid": values.code(elements, _SOP_INSTANCE),
    }
    return said if identify is None else identify(said)


def _identifiers(elements: FileElements, identify: Identify | None) -> dict[str, str]:
    identifiers = _said_identifiers(elements, identify)
    if not all(identifiers.values()):
        missing = sorted(name for name, value in identifiers.items() if not value)
        raise source_error(Reason.MISSING_IDENTIFIER, ", ".join(missing))
    return identifiers


def _check_pixel_extent(elements: FileElements, image: ImageDescription) -> tuple[str, ...]:
    """Whether the file is long enough for the pixels that it declares; flags."""
    declared = elements.pixel_num_bytes
    available = elements.num_bytes - elements.pixel_offset
    is_native = elements.transfer_syntax_uid in NATIVE_SYNTAXES
    if (declared is None) == is_native:
        raise source_error(
            Reason.INVALID_IMAGE_DESCRIPTION, "the pixel data is not encapsulated as its syntax says"
        )
    if declared is None:
        if available <= 0:
            raise source_error(Reason.PIXEL_DATA_TRUNCATED, "no bytes")
        return ()
    needed = image.native_num_bytes
    if min(declared, available) < needed:
        raise source_error(
            Reason.PIXEL_DATA_TRUNCATED, f"{max(0, min(declared, available))} of {needed} bytes"
        )
    return ("excess_pixel_bytes",) if declared > needed + needed % 2 else ()


def _padding(elements: FileElements, *, is_signed: bool) -> tuple[int, int] | None:
    """Range of padding values. Their VR depends on the pixels': read by their signedness."""
    bounds = [
        *values.integers(elements, _PADDING, is_signed=is_signed)[:1],
        *values.integers(elements, _PADDING_LIMIT, is_signed=is_signed)[:1],
    ]
    return (min(bounds), max(bounds)) if bounds and _PADDING in elements.values else None


def _unit(elements: FileElements) -> str:
    """The unit that the file states, if it is one that we know; free text goes no further."""
    types = read_rescale_types(elements)
    if len(types) > 1:
        return UNKNOWN_UNIT
    stated = next(iter(types)) or values.code(elements, _UNITS).upper()
    return stated if stated in STATED_UNITS or not stated else UNKNOWN_UNIT


def _is_localizer(elements: Elements, image_type: tuple[str, ...]) -> bool:
    """Whether the image type or the series description calls it a scout; the text itself goes no further."""
    said = (*image_type[2:], values.text(elements, _SERIES_TEXT).upper())
    return any(word in part for part in said for word in _SCOUT_WORDS)


def _acquired(elements: FileElements) -> str:
    """Date and time of the acquisition in digits; a date alone is none."""
    day, time = (values.code(elements, tag) for tag in (_ACQUISITION_DATE, _ACQUISITION_TIME))
    both = f"{day.replace('.', '')}{time.replace(':', '')}" if day and time else ""
    stated = values.code(elements, _ACQUISITION) or both
    return stated if _MOMENT.fullmatch(stated) else ""


def _utc_offset(elements: Elements) -> str:
    stated = values.code(elements, _UTC_OFFSET)
    return stated if _OFFSET.fullmatch(stated) else ""


def _other_patient_ids(elements: FileElements) -> tuple[str, ...]:
    """Return the patient's further identifiers; a damaged sequence of them names none."""
    stated = _BETWEEN_IDS.split(values.text(elements, _OTHER_IDS))
    with suppress(SourceError):
        stated += [values.text(item, _PATIENT) for item in elements.items(_OTHER_IDS_ITEMS)]
    return tuple(sorted({one.strip() for one in stated} - {""}))[:_MAX_OTHER_IDS]


def _single(numbers: tuple[float, ...] | None) -> float | None:
    return numbers[0] if numbers else None


_HEADER = tuple(field.name for field in fields(InstanceHeader))
_TUPLES = tuple(field.name for field in fields(InstanceHeader) if str(field.type).startswith("tuple["))
"""Fields whose values JSON makes lists of."""
_IMAGE = tuple(field.name for field in fields(ImageDescription))
_PLANE = tuple(field.name for field in fields(PlaneHeader))
_header_values, _image_values, _plane_values = attrgetter(*_HEADER), attrgetter(*_IMAGE), attrgetter(*_PLANE)


def header_to_json(header: InstanceHeader) -> dict[str, Any]:
    """Turn a header into an object that ``json.dumps`` takes. It holds identifiers: private folder only."""
    row = dict(zip(_HEADER, _header_values(header), strict=True))
    row["image"] = _image_values(header.image)
    row["planes"] = [_plane_values(plane) for plane in header.planes]
    return row


def header_from_json(row: dict[str, Any]) -> InstanceHeader:
    """Turn such an object back.

    Raises:
        SourceError: HEADER_UNREADABLE where the object is not one that `header_to_json` made.
    """
    try:
        known = {name: row[name] for name in _HEADER}
        for name in _TUPLES:
            known[name] = None if known[name] is None else tuple(known[name])
        known["image"] = _image_of(*row["image"])
        known["planes"] = tuple([_plane_of(plane) for plane in row["planes"]])
        return InstanceHeader(**known)
    except (KeyError, TypeError, ValueError) as error:
        raise source_error(Reason.HEADER_UNREADABLE, f"stored header: {type(error).__name__}") from None


@lru_cache(maxsize=1024)
def _image_of(*values: Any) -> ImageDescription:
    """One object for all equal descriptions, as `describe_image` makes them."""
    return ImageDescription(**dict(zip(_IMAGE, values, strict=True)))


def _plane_of(values: Sequence[Any]) -> PlaneHeader:
    found: list[Any] = [tuple(value) if type(value) is list else value for value in values]
    return PlaneHeader(**dict(zip(_PLANE, found, strict=True)))
