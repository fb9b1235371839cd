"""Siemens mosaics: many slices of a volume, tiled into one image, and where each of them lies.

The number of slices and their common normal are in the CSA header, a private element with a format of its
own. A mosaic states the position of its own first pixel as if it were one large slice around the same center,
so the position of a tile is found from there. A mosaic whose CSA header was removed or is damaged stays as it
is.

Source: nibabel's description of CSA headers and mosaics (nibabel.nicom.csareader, ``dicom_mosaic``), which
follows the Siemens ICE documentation.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.elements import HeaderLimits, read_elements
from shardflow.packing.sources.dicom.planes import PlaneHeader

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
