"""Computed volumes: dose grids, parametric maps, and reconstructions of nuclear medicine.

None states its places or values as other images do. A reconstruction is a classic multi-frame object whose
one position is that of a detector, with a spacing whose sign says where the next slices lie. A dose grid is a
classic multi-frame object with one position, an offset of each frame along the normal, and one scaling for
all. A parametric map is an enhanced object of integers or floating point numbers, which real world value
mappings turn into a quantity with a UCUM unit. Here all become planes with position, slope, intercept and
unit, and the rest of packing knows nothing of them.

Source: DICOM PS3.3, C.8.4.8, C.8.4.11 and C.8.4.15 (nuclear medicine), C.8.8.3 (RT dose: Grid Frame Offset
Vector, Dose Grid Scaling), A.75 (parametric map), C.7.6.16.2.11 (real world value mapping), C.7.6.3 (float
pixel data); PS3.16, CID 82, 7180 and 9301 (units).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from shardflow.format.reasons import PHASE_NAMES
from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.dictionary import DOSE_GRID, MAP_UNITS, PARAMETRIC_MAP
from shardflow.packing.sources.dicom.elements import Elements
from shardflow.packing.sources.dicom.geometry import normal_of
from shardflow.packing.sources.dicom.planes import PlaneHeader, plane_place

_DOSE_UNITS, _DOSE_TYPE, _DOSE_SUMMATION = 0x30040002, 0x30040004, 0x3004000A
_FRAME_OFFSETS, _DOSE_SCALING = 0x3004000C, 0x3004000E
_SHARED_GROUPS, _FRAME_GROUPS = 0x52009229, 0x52009230
_MAPPINGS, _VALUE_INTERCEPT, _VALUE_SLOPE, _UNIT_CODES = 0x00409096, 0x00409224, 0x00409225, 0x004008EA
_QUANTITIES, _CONCEPT_NAME, _CONCEPT_CODE = 0x00409220, 0x0040A043, 0x0040A168
_CODE, _SCHEME = 0x00080100, 0x00080102
_DETECTORS, _SLICES, _SLOTS, _INTERVALS = 0x00540022, 0x00540080, 0x00540070, 0x00540060
_BETWEEN_SLICES = 0x00180088
_FLOAT_PADDING, _DOUBLE_PADDING = 0x00280122, 0x00280123

MAP_TAGS: Final = frozenset(
    {_DOSE_UNITS, _FRAME_OFFSETS, _DOSE_SCALING, _MAPPINGS, _FLOAT_PADDING, _DOUBLE_PADDING}
    | {_DETECTORS, _SLICES, _SLOTS, _INTERVALS}
)
"""Tags that `read_map` and `read_reconstruction` use, beside those of planes."""
MAP_FACT_TAGS: Final = frozenset({_DOSE_TYPE, _DOSE_SUMMATION, _MAPPINGS, _SHARED_GROUPS, _FRAME_GROUPS})
"""Tags that `map_facts` uses."""

_DOSE_TYPES: Final = frozenset({"EFFECTIVE", "ERROR", "PHYSICAL"})
_SUMMATIONS: Final = frozenset(
    {"BEAM", "BEAM_SESSION", "BRACHY", "BRACHY_SESSION", "CONTROL_POINT", "FRACTION", "FRACTION_SESSION"}
    | {"MULTI_PLAN", "PLAN", "PLAN_OVERVIEW", "RECORD"}
)
_RECONSTRUCTIONS: Final = (("RECON TOMO",), ("RECON GATED TOMO",))
_TEMPORAL: Final = PHASE_NAMES.index("temporal_position")
_QUANTITY: Final = "246205007"
"""SNOMED code of "Quantity", the name of what a quantity definition states."""
_QUANTITY_SCHEMES: Final = frozenset({"DCM", "IBSI", "NCIT", "SCT", "SRT", "UMLS"})
_QUANTITY_CODE: Final = re.compile(r"[A-Z0-9][A-Z0-9.-]{0,15}", re.IGNORECASE | re.ASCII)
_OFFSET_TOLERANCE_MM: Final = 0.01


def read_map(
    elements: Elements, sop_class: str, planes: Sequence[PlaneHeader], num_frames: int
) -> tuple[tuple[PlaneHeader, ...], str, tuple[str, ...]]:
    """Return the planes of a computed volume with what its values are, the unit, and flags.

    Args:
        elements: Of the file.
        sop_class: One of `dictionary.MAP_CLASSES`.
        planes: As `shardflow.packing.sources.dicom.planes.read_planes` returns them.
        num_frames: Of the object.

    Returns:
        Planes, one for all frames or one per frame; the unit, ``""`` where none of the known ones is stated;
        flags.

    Raises:
        SourceError: HEADER_UNREADABLE or LIMIT_EXCEEDED where a sequence is damaged.
    """
    if sop_class == DOSE_GRID:
        return _dose(elements, planes[0], num_frames)
    return _parametric(elements, planes)


def _dose(
    elements: Elements, plane: PlaneHeader, num_frames: int
) -> tuple[tuple[PlaneHeader, ...], str, tuple[str, ...]]:
    scaling = values.decimals(elements, _DOSE_SCALING, 1)
    is_scaled = scaling is not None and scaling[0] > 0
    # Relative doses refer to a value that is stated nowhere.
    unit = "GY" if is_scaled and values.code(elements, _DOSE_UNITS).upper() == "GY" else ""
    plane = replace(plane, slope=scaling[0] if scaling and is_scaled else None, intercept=None)
    if num_frames == 1:
        return (plane,), unit, ()
    positions = _dose_positions(plane, values.decimals(elements, _FRAME_OFFSETS, num_frames))
    if positions is None:
        return (replace(plane, position=None),), unit, ("frame_offsets_unusable",)
    return tuple(replace(plane, position=position) for position in positions), unit, ()


def _dose_positions(
    plane: PlaneHeader, offsets: tuple[float, ...] | None
) -> list[tuple[float, float, float]] | None:
    """Return the position of each frame; None where the offsets do not say it (C.8.8.3.2)."""
    position, orientation = plane.position, plane.orientation
    if offsets is None or position is None or orientation is None or len({*offsets}) < len(offsets):
        return None
    normal = normal_of(orientation)
    if offsets[0] == 0:
        return [_moved(position, normal, offset) for offset in offsets]
    # Offsets of transverse planes may be their coordinates instead: the first is that of the first position.
    is_transverse = abs(abs(normal[2]) - 1) < 1e-6
    if is_transverse and abs(offsets[0] - position[2]) <= _OFFSET_TOLERANCE_MM:
        return [(position[0], position[1], offset) for offset in offsets]
    return None


def _moved(
    position: tuple[float, float, float], normal: Sequence[float], offset: float
) -> tuple[float, float, float]:
    x, y, z = (start + offset * step for start, step in zip(position, normal, strict=True))
    return x, y, z


def read_reconstruction(
    elements: Elements, image_type: Sequence[str], planes: tuple[PlaneHeader, ...], num_frames: int
) -> tuple[PlaneHeader, ...]:
    """Return the planes of a reconstruction of nuclear medicine, one per frame; of other images as they are.

    Args:
        elements: Of the file.
        image_type: Its *Image Type*.
        planes: As `shardflow.packing.sources.dicom.planes.read_planes` returns them.
        num_frames: Of the object.

    Raises:
        SourceError: HEADER_UNREADABLE or LIMIT_EXCEEDED where a sequence is damaged.
    """
    spacing = values.decimals(elements, _BETWEEN_SLICES, 1)
    if len(planes) != 1 or num_frames == 1 or image_type[2:3] not in _RECONSTRUCTIONS or spacing is None:
        return planes
    detector = next(iter(elements.items(_DETECTORS)), elements)
    position, orientation = plane_place(detector)
    slices = values.integers(elements, _SLICES) or tuple(range(1, num_frames + 1))
    slots, intervals = (values.integers(elements, tag) or (1,) * num_frames for tag in (_SLOTS, _INTERVALS))
    if position is None or orientation is None or spacing[0] == 0:
        return planes
    if any(len(vector) != num_frames for vector in (slices, slots, intervals)):
        return planes
    normal, phase = normal_of(orientation), planes[0].phase
    found = []
    for number, slot, interval in zip(slices, slots, intervals, strict=True):
        time = (interval - 1) * max(slots) + slot
        found.append(
            replace(
                planes[0],
                position=_moved(position, normal, (number - 1) * spacing[0]),
                orientation=orientation,
                phase=(*phase[:_TEMPORAL], str(time), *phase[_TEMPORAL + 1 :]),
            )
        )
    return tuple(found)


def _parametric(
    elements: Elements, planes: Sequence[PlaneHeader]
) -> tuple[tuple[PlaneHeader, ...], str, tuple[str, ...]]:
    found = [_mapping(elements, groups) for groups in _levels(elements, len(planes))]
    units = {unit for *_, unit in found}
    mapped = tuple(
        replace(plane, slope=slope, intercept=intercept)
        for plane, (slope, intercept, _) in zip(planes, found, strict=True)
    )
    is_mapped = all(slope is not None for slope, *_ in found)
    flags = () if is_mapped else ("no_real_world_value",)
    return mapped, units.pop() if is_mapped and len(units) == 1 else "", flags


def _levels(elements: Elements, num_planes: int) -> list[list[Elements]]:
    """Return where each plane's functional groups are looked up, the most specific first."""
    shared, frames = elements.items(_SHARED_GROUPS)[:1], elements.items(_FRAME_GROUPS)
    if len(frames) == num_planes:
        return [[frame, *shared, elements] for frame in frames]
    return [[*shared, elements]] * num_planes


def _mapping(elements: Elements, levels: Sequence[Elements]) -> tuple[float | None, float | None, str]:
    """Return slope, intercept and unit of a frame's first mapping; others say the same in other units."""
    item = next((one for level in levels for one in level.items(_MAPPINGS)[:1]), elements)
    slope, intercept = values.doubles(item, _VALUE_SLOPE), values.doubles(item, _VALUE_INTERCEPT)
    if slope is None or intercept is None or slope[0] == 0:
        return None, None, ""
    codes = item.items(_UNIT_CODES)[:1]
    stated = values.code(codes[0], _CODE) if codes and values.code(codes[0], _SCHEME) == "UCUM" else ""
    return slope[0], intercept[0], stated if stated in MAP_UNITS else ""


def float_padding(elements: Elements) -> tuple[float, float] | None:
    """Return the value that means "no data" in float pixel data, twice; None where none is stated."""
    for tag, form in ((_FLOAT_PADDING, "f"), (_DOUBLE_PADDING, "d")):
        number = values.single(elements, tag, form)
        if number is not None:
            return number, number
    return None


def map_facts(elements: Elements, sop_class: str) -> dict[str, Any]:
    """Return what a computed volume says of itself: objects of ``study.json`` by key, none where unknown.

    Raises:
        SourceError: HEADER_UNREADABLE or LIMIT_EXCEEDED where a sequence is damaged.
    """
    if sop_class == DOSE_GRID:
        kind, summation = (values.code(elements, tag).upper() for tag in (_DOSE_TYPE, _DOSE_SUMMATION))
        facts = {
            "summation": summation.lower() if summation in _SUMMATIONS else None,
            "type": kind.lower() if kind in _DOSE_TYPES else None,
        }
        return {"dose": {name: value for name, value in facts.items() if value}}
    if sop_class != PARAMETRIC_MAP:
        return {}
    groups = [*elements.items(_FRAME_GROUPS)[:1], *elements.items(_SHARED_GROUPS)[:1], elements]
    mapping = next((one for level in groups for one in level.items(_MAPPINGS)[:1]), elements)
    quantity = _quantity(mapping)
    return {"parametric_map": {} if quantity is None else {"quantity": quantity}}


def _quantity(mapping: Elements) -> str | None:
    """Return the code of what is measured, such as ``DCM:113041``; None for private ones."""
    for item in mapping.items(_QUANTITIES):
        names, codes = item.items(_CONCEPT_NAME)[:1], item.items(_CONCEPT_CODE)[:1]
        if names and codes and values.code(names[0], _CODE) in (_QUANTITY, "G-C1C6"):
            scheme, code = values.code(codes[0], _SCHEME), values.code(codes[0], _CODE)
            if scheme.upper() in _QUANTITY_SCHEMES and _QUANTITY_CODE.fullmatch(code):
                return f"{scheme}:{code}"
    return None
