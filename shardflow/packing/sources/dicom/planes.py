"""Facts that may differ from frame to frame: position, spacing, rescale, window, phase, diffusion weighting.

An enhanced multi-frame object states each of these in its per-frame functional groups, or once in the
shared groups, or (wrongly, but often) at its root; the most specific statement wins. The b-value and
direction of a classic image tell images at one position apart; `acquisition` publishes them. A private
element counts only where its block has the creator that the vendor documents, so another vendor's element
is never read.

A Siemens mosaic holds many slices of a volume, tiled into one image. Their number and common normal are in
the CSA header, a private element with a format of its own. A mosaic states the position of its own first
pixel as if it were one large slice around the same center, so the position of a tile is found from there. A
mosaic whose CSA header was removed or is damaged stays as it is.

Source: DICOM PS3.3, C.7.6.16 (multi-frame functional groups), C.7.6.2 (image plane), C.11.1 (modality LUT),
C.8.13.5.9 (diffusion); the conformance statements of the vendors: SIEMENS MR HEADER, GEMS_PARM_01 and
GEMS_ACQU_01, Philips Imaging DD 001 and Philips MR Imaging DD 001; nibabel's description of CSA headers and
mosaics (nibabel.nicom.csareader, ``dicom_mosaic``), which follows the Siemens ICE documentation.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.elements import Elements, HeaderLimits, read_elements

_B_VALUE: Final = 0x00189087
_DIRECTION: Final = 0x00189089

_SIEMENS: Final = (0x00190010, b"SIEMENS MR HEADER")
_SIEMENS_B_VALUE: Final = 0x0019100C
_SIEMENS_DIRECTION: Final = 0x0019100E
_GE_NUMBERS: Final = (0x00430010, b"GEMS_PARM_01")
_GE_B_VALUE: Final = 0x00431039
_GE_ACQUISITION: Final = (0x00190010, b"GEMS_ACQU_01")
_GE_DIRECTION: Final = (0x001910BB, 0x001910BC, 0x001910BD)
_PHILIPS: Final = (0x20010010, b"PHILIPS IMAGING DD 001")
_PHILIPS_B_VALUE: Final = 0x20011003
_PHILIPS_MR: Final = (0x20050010, b"PHILIPS MR IMAGING DD 001")
_PHILIPS_DIRECTION: Final = (0x200510B0, 0x200510B1, 0x200510B2)

DIFFUSION_TAGS: Final = frozenset(
    {_B_VALUE, _DIRECTION, _SIEMENS_B_VALUE, _SIEMENS_DIRECTION, _GE_B_VALUE, _PHILIPS_B_VALUE}
    | {tag for tag, _ in (_SIEMENS, _GE_NUMBERS, _PHILIPS, _PHILIPS_MR)}
    | {*_GE_DIRECTION, *_PHILIPS_DIRECTION}
)
"""Tags that `read_diffusion` uses."""
GE_CREATORS: Final = (_GE_NUMBERS, _GE_ACQUISITION)
"""Tags of the creators of GE's private blocks that hold the diffusion weighting, and their values."""

_GE_OFFSET: Final = 1_000_000_000
"""Newer GE software adds it to the b-value."""
_MAX_B_VALUE: Final = 100_000.0


def read_diffusion(root: Elements) -> tuple[str, str]:
    """Return b-value (s/mm2) and direction as texts, only to be compared; ``""`` where not stated."""
    b_value = values.doubles(root, _B_VALUE) or _private_b_value(root)
    direction = values.doubles(root, _DIRECTION, 3) or _private_direction(root)
    return _text(b_value), _text(direction)


def has_standard_direction(root: Elements) -> bool:
    """Return whether the direction of a classic image is stated by the standard's own attribute."""
    return _DIRECTION in root.values


def _private_b_value(root: Elements) -> tuple[float, ...] | None:
    if _is_of(root, _SIEMENS):
        stated = values.integer(root, _SIEMENS_B_VALUE)
    elif _is_of(root, _GE_NUMBERS):
        stated = values.integer(root, _GE_B_VALUE)
        stated = None if stated is None else stated % _GE_OFFSET
    elif _is_of(root, _PHILIPS):
        numbers = _singles(root, _PHILIPS_B_VALUE)
        return numbers if numbers and 0 <= numbers[0] <= _MAX_B_VALUE else None
    else:
        return None
    return (float(stated),) if stated is not None and 0 <= stated <= _MAX_B_VALUE else None


def _private_direction(root: Elements) -> tuple[float, ...] | None:
    parts: list[tuple[float, ...] | None]
    if _is_of(root, _SIEMENS):
        return values.doubles(root, _SIEMENS_DIRECTION, 3)
    if _is_of(root, _GE_ACQUISITION):
        parts = [values.decimals(root, tag, 1) for tag in _GE_DIRECTION]
    elif _is_of(root, _PHILIPS_MR):
        parts = [_singles(root, tag) for tag in _PHILIPS_DIRECTION]
    else:
        return None
    found = [part[0] for part in parts if part]
    return tuple(found) if len(found) == len(parts) else None


def _is_of(root: Elements, block: tuple[int, bytes]) -> bool:
    tag, creator = block
    return root.values.get(tag, b"").strip(b"\0 ").upper() == creator


def _singles(root: Elements, tag: int) -> tuple[float, ...] | None:
    """One value of VR FL."""
    number = values.single(root, tag, "f")
    return (number,) if number is not None and math.isfinite(number) else None


def _text(numbers: tuple[float, ...] | None) -> str:
    return "\\".join(f"{number:g}" for number in numbers) if numbers else ""


_SHARED_GROUPS, _FRAME_GROUPS = 0x52009229, 0x52009230
_POSITION, _ORIENTATION, _PIXEL_SPACING, _THICKNESS = 0x00200032, 0x00200037, 0x00280030, 0x00180050
_INTERCEPT, _SLOPE, _CENTER, _WIDTH = 0x00281052, 0x00281053, 0x00281050, 0x00281051
_IMAGE_TYPE, _FRAME_TYPE = 0x00080008, 0x00089007
_POSITION_GROUP, _ORIENTATION_GROUP, _MEASURES_GROUP = 0x00209113, 0x00209116, 0x00289110
_RESCALE_GROUP, _WINDOW_GROUP = 0x00289145, 0x00289132
_RESCALE_TYPE = 0x00281054

_DIFFUSION_GROUP, _DIRECTION_GROUP = 0x00189117, 0x00189076
_CONTENT_GROUP, _ECHO_GROUP, _CARDIAC_GROUP = 0x00209111, 0x00189114, 0x00189118
_TYPE_GROUPS = (0x00189226, 0x00189329, 0x00189751, 0x00189412)  # MR, CT, PET, X-ray frame type

# What is larger is no geometry, and may be a date or a record number in the wrong field: these values leave.
MAX_SPACING_MM = 1000.0
_MAX_POSITION_MM = 100_000.0
_MAX_WINDOW_CENTER, _MAX_WINDOW_WIDTH = 100_000.0, 1_000_000.0

_ACQUISITION, _ECHO_NUMBER, _ECHO_TIME, _TEMPORAL, _TRIGGER = (
    0x00200012,
    0x00180086,
    0x00180081,
    0x00200100,
    0x00181060,
)
_SEQUENCE_NAME, _KERNEL, _CONTRAST = 0x00180024, 0x00181210, 0x00180010
_STACK_ID, _TEMPORAL_INDEX, _EFFECTIVE_ECHO, _CARDIAC_DELAY = 0x00209056, 0x00209128, 0x00189082, 0x00209153

PLANE_TAGS = frozenset(
    {_POSITION, _ORIENTATION, _PIXEL_SPACING, _THICKNESS, _INTERCEPT, _SLOPE, _CENTER, _WIDTH, _IMAGE_TYPE}
    | {
        _RESCALE_TYPE,
        _SHARED_GROUPS,
        _FRAME_GROUPS,
        _ACQUISITION,
        _ECHO_NUMBER,
        _ECHO_TIME,
        _TEMPORAL,
        _TRIGGER,
    }
    | {_SEQUENCE_NAME, _KERNEL, _CONTRAST}
    | DIFFUSION_TAGS
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneHeader:
    """Facts of one frame."""

    position: tuple[float, float, float] | None = None
    """(0020,0032) *Image Position (Patient)*: center of the first pixel, mm, LPS."""
    orientation: tuple[float, float, float, float, float, float] | None = None
    """(0020,0037) *Image Orientation (Patient)*: direction along a row, then down a column, LPS."""
    pixel_spacing: tuple[float, float] | None = None
    """(0028,0030) *Pixel Spacing*: between rows, then between columns, mm."""
    slice_thickness: float | None = None
    """(0018,0050) *Slice Thickness*, mm."""
    slope: float | None = None
    """(0028,1053) *Rescale Slope*."""
    intercept: float | None = None
    """(0028,1052) *Rescale Intercept*."""
    window: tuple[float, float] | None = None
    """(0028,1050), (0028,1051): first *Window Center* and *Window Width* with a positive width, modality
    units."""
    phase: tuple[str, ...] = field(default=(), repr=False)
    """Values of `PHASE_NAMES`, as text, only to be compared."""


def read_planes(root: Elements, num_frames: int) -> tuple[tuple[PlaneHeader, ...], tuple[str, ...]]:
    """Read one plane for all frames, or one per frame; and flags.

    Raises:
        SourceError: HEADER_UNREADABLE or LIMIT_EXCEEDED where the functional groups are damaged.
    """
    shared = root.items(_SHARED_GROUPS)[:1]
    frames = root.items(_FRAME_GROUPS)
    if not shared and not frames:
        return (_classic_plane(root),), ()
    if frames and len(frames) != num_frames:
        return (_enhanced_plane(root, shared),), ("functional_groups_mismatch",)
    if not frames:
        return (_enhanced_plane(root, shared),), ()
    return tuple(_enhanced_plane(root, [frame, *shared]) for frame in frames), ()


def plane_place(
    item: Elements,
) -> tuple[tuple[float, float, float] | None, tuple[float, float, float, float, float, float] | None]:
    """Return position and orientation that an item states, each None where it is absent or implausible."""
    return _triple(values.decimals(item, _POSITION, 3)), _six(values.decimals(item, _ORIENTATION, 6))


def read_rescale_types(root: Elements) -> set[str]:
    """(0028,1054) *Rescale Type* of all frames, upper-cased; ``""`` for a frame that states none."""
    shared = root.items(_SHARED_GROUPS)[:1]
    levels: list[list[Elements]] = [[frame, *shared] for frame in root.items(_FRAME_GROUPS)] or [shared]
    return {
        values.code(_nearest(root, groups, _RESCALE_GROUP, _RESCALE_TYPE), _RESCALE_TYPE).upper()
        for groups in levels
    }


def _nearest(root: Elements, groups: Sequence[Elements], group: int, tag: int) -> Elements:
    """Return the level that states a tag of a functional group: the first one that does, else the root."""
    for level in groups:
        for item in level.items(group)[:1]:
            if tag in item.values:
                return item
    return root


def _classic_plane(root: Elements) -> PlaneHeader:
    position = _triple(values.decimals(root, _POSITION, 3))
    return PlaneHeader(position=position, **_classic_facts(root), phase=_classic_phase(root))


@values.shared(_ORIENTATION, _PIXEL_SPACING, _THICKNESS, _SLOPE, _INTERCEPT, _CENTER, _WIDTH)
def _classic_facts(root: Elements) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "orientation": _six(values.decimals(root, _ORIENTATION, 6)),
            "pixel_spacing": _positive_pair(values.decimals(root, _PIXEL_SPACING, 2)),
            "slice_thickness": _first(values.decimals(root, _THICKNESS)),
            "slope": _first(values.decimals(root, _SLOPE)),
            "intercept": _first(values.decimals(root, _INTERCEPT)),
            "window": _window(root, root),
        }
    )


@values.shared(
    *(_ACQUISITION, _ECHO_NUMBER, _ECHO_TIME, _TEMPORAL, _TRIGGER, _SEQUENCE_NAME, _IMAGE_TYPE, _KERNEL),
    *(_CONTRAST, *DIFFUSION_TAGS),
)
def _classic_phase(root: Elements) -> tuple[str, ...]:
    return _phase(
        "",
        *(values.code(root, tag) for tag in (_ACQUISITION, _ECHO_NUMBER, _ECHO_TIME, _TEMPORAL, _TRIGGER)),
        *read_diffusion(root),
        *(values.code(root, _SEQUENCE_NAME), _type_tail(root, _IMAGE_TYPE), values.code(root, _KERNEL)),
        "contrast" if root.values.get(_CONTRAST, b"").strip(b"\0 ") else "",
    )


def _enhanced_plane(root: Elements, groups: Sequence[Elements]) -> PlaneHeader:
    nearest = partial(_nearest, root, groups)
    diffusion = next((item for level in groups for item in level.items(_DIFFUSION_GROUP)[:1]), root)
    direction = next(iter(diffusion.items(_DIRECTION_GROUP)[:1]), root)
    frame_type = next(
        (item for group in _TYPE_GROUPS if (item := nearest(group, _FRAME_TYPE)) is not root), root
    )
    position = values.single(nearest(_CONTENT_GROUP, _TEMPORAL_INDEX), _TEMPORAL_INDEX, "I")
    return PlaneHeader(
        position=_triple(values.decimals(nearest(_POSITION_GROUP, _POSITION), _POSITION, 3)),
        orientation=_six(values.decimals(nearest(_ORIENTATION_GROUP, _ORIENTATION), _ORIENTATION, 6)),
        pixel_spacing=_positive_pair(
            values.decimals(nearest(_MEASURES_GROUP, _PIXEL_SPACING), _PIXEL_SPACING, 2)
        ),
        slice_thickness=_first(values.decimals(nearest(_MEASURES_GROUP, _THICKNESS), _THICKNESS)),
        slope=_first(values.decimals(nearest(_RESCALE_GROUP, _SLOPE), _SLOPE)),
        intercept=_first(values.decimals(nearest(_RESCALE_GROUP, _INTERCEPT), _INTERCEPT)),
        window=_window(nearest(_WINDOW_GROUP, _CENTER), nearest(_WINDOW_GROUP, _WIDTH)),
        phase=_phase(
            values.code(nearest(_CONTENT_GROUP, _STACK_ID), _STACK_ID),
            values.code(root, _ACQUISITION),
            "",
            _double(nearest(_ECHO_GROUP, _EFFECTIVE_ECHO), _EFFECTIVE_ECHO),
            "" if position is None else str(position),
            _double(nearest(_CARDIAC_GROUP, _CARDIAC_DELAY), _CARDIAC_DELAY),
            _double(diffusion, _B_VALUE),
            _double(direction, _DIRECTION, 3),
            "",
            _type_tail(frame_type, _FRAME_TYPE),
            "",
            "",
        ),
    )


@lru_cache(maxsize=4096)
def _phase(*parts: str) -> tuple[str, ...]:
    """One tuple for all equal phases; most slices of a series share theirs."""
    return parts


def _type_tail(elements: Elements, tag: int) -> str:
    """Image type without its first two values: magnitude, phase, kernel variants and the like."""
    return "\\".join(values.codes(elements, tag)[2:])


def _double(elements: Elements, tag: int, count: int = 1) -> str:
    return _text(values.doubles(elements, tag, count))


def _window(centers: Elements, widths: Elements) -> tuple[float, float] | None:
    pairs = zip(values.decimals(centers, _CENTER) or (), values.decimals(widths, _WIDTH) or (), strict=False)
    return next(
        (
            (center, width)
            for center, width in pairs
            if 0 < width <= _MAX_WINDOW_WIDTH and abs(center) <= _MAX_WINDOW_CENTER
        ),
        None,
    )


def _first(numbers: tuple[float, ...] | None) -> float | None:
    return numbers[0] if numbers else None


def _triple(numbers: tuple[float, ...] | None) -> tuple[float, float, float] | None:
    if not numbers or max(map(abs, numbers)) > _MAX_POSITION_MM:
        return None
    return numbers[0], numbers[1], numbers[2]


def _six(numbers: tuple[float, ...] | None) -> tuple[float, float, float, float, float, float] | None:
    """Direction cosines, where they are two unit vectors at a right angle (within 1 %)."""
    if not numbers:
        return None
    a, b, c, d, e, f = numbers
    lengths = math.hypot(a, b, c), math.hypot(d, e, f)
    if any(abs(length - 1) > 0.01 for length in lengths) or abs(a * d + b * e + c * f) > 0.01:
        return None
    return a, b, c, d, e, f


def _positive_pair(numbers: tuple[float, ...] | None) -> tuple[float, float] | None:
    return (
        (numbers[0], numbers[1]) if numbers and 0 < min(numbers) <= max(numbers) <= MAX_SPACING_MM else None
    )


_CREATOR, _HEADER = 0x00290010, 0x00291010
_NUM_SLICES = (0x00190010, 0x0019100A)
_BETWEEN_SLICES = 0x00180088
_MAX_TAGS, _MAX_ITEMS = 1 << 10, 1 << 12
_PARALLEL = 0.99


@dataclass(frozen=True, slots=True)
class Mosaic:
    """A mosaic, taken apart."""

    tiles_per_row: int
    image: ImageDescription
    """Of a tile; its frames are the slices."""
    planes: tuple[PlaneHeader, ...]
    """Of each slice."""


def read_mosaic(
    path: Path, image: ImageDescription, plane: PlaneHeader, limits: HeaderLimits
) -> Mosaic | None:
    """Take a mosaic apart; None where its header does not say how.

    Args:
        path: The file.
        image: Of the whole mosaic.
        plane: Of the whole mosaic, as its header states it.
        limits: Bounds on what is read.
    """
    if (
        plane.position is None
        or plane.orientation is None
        or plane.pixel_spacing is None
        or image.num_frames > 1
    ):
        return None
    wanted = {_CREATOR, _HEADER, *_NUM_SLICES, _BETWEEN_SLICES}
    elements = read_elements(path, wanted, limits)
    if elements.values.get(_CREATOR, b"").strip(b"\0 ").upper() != b"SIEMENS CSA HEADER":
        return None
    try:
        header = dict(_csa_values(elements.values.get(_HEADER, b"")))
        num_slices = int(header["NumberOfImagesInMosaic"][0])
        normal = tuple(map(float, header["SliceNormalVector"]))
    except (KeyError, IndexError, ValueError, struct.error):
        return None
    spacing = (values.decimals(elements, _BETWEEN_SLICES, 1) or (plane.slice_thickness,))[0]
    per_row = math.isqrt(max(num_slices - 1, 0)) + 1
    stated = _normal(plane.orientation)
    if (
        num_slices < 1
        or spacing is None
        or spacing <= 0
        or image.rows % per_row
        or image.columns % per_row
        or len(normal) != 3
        or abs(sum(a * b for a, b in zip(normal, stated, strict=True))) < _PARALLEL
    ):
        return None
    rows, columns = image.rows // per_row, image.columns // per_row
    # The center of the mosaic is the center of a tile.
    down = (image.rows - rows) / 2 * plane.pixel_spacing[0]
    across = (image.columns - columns) / 2 * plane.pixel_spacing[1]
    along_row, down_column = plane.orientation[:3], plane.orientation[3:]
    planes = []
    for index in range(num_slices):
        x, y, z = (
            plane.position[axis]
            + across * along_row[axis]
            + down * down_column[axis]
            + index * spacing * normal[axis]
            for axis in range(3)
        )
        planes.append(replace(plane, position=(x, y, z)))
    tile = replace(image, rows=rows, columns=columns, num_frames=num_slices)
    return Mosaic(per_row, tile, tuple(planes))


def _normal(orientation: tuple[float, ...]) -> tuple[float, float, float]:
    a, b, c, d, e, f = orientation
    return b * f - c * e, c * d - a * f, a * e - b * d


def _csa_values(data: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yield the tags of a CSA header of type 1 or 2 with their values as texts.

    Raises:
        struct.error, ValueError: The header is damaged.
    """
    is_second = data[:4] == b"SV10"
    position = 8 if is_second else 0
    num_tags, _ = struct.unpack_from("<II", data, position)
    position += 8
    if not 1 <= num_tags <= _MAX_TAGS:
        raise ValueError("number of tags")
    first_num_items: int | None = None
    for _ in range(num_tags):
        raw, num_values, _, _, num_items, _ = struct.unpack_from("<64si4siii", data, position)
        position += 84
        if not 0 <= num_items <= _MAX_ITEMS:
            raise ValueError("number of items")
        first_num_items = num_items if first_num_items is None else first_num_items
        found: list[str] = []
        for item in range(num_items):
            first, second, _, _ = struct.unpack_from("<4i", data, position)
            position += 16
            num_bytes = second if is_second else first - first_num_items
            if not 0 <= num_bytes <= len(data) - position:
                if item < num_values:
                    raise ValueError("length of an item")
                break  # of a first type, items behind the values hold anything
            if item < num_values or num_values == 0:
                text = data[position : position + num_bytes].split(b"\0", 1)[0]
                found.append(text.decode("latin-1").strip())
            position += -(-num_bytes // 4) * 4
        yield raw.split(b"\0", 1)[0].decode("latin-1"), [text for text in found if text]
