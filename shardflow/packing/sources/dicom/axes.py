"""Axes of 4-D objects: what tells volumes of one series at the same positions apart, in order, with values.

Time series, echoes and diffusion weightings come as volumes that repeat their positions. They are points of
one axis: their order and value along it is found here, as dcm2niix orders the volumes of a file. Images of
another kind (magnitude and phase, kernels, with and without contrast) are never points of one axis.

Source: DICOM PS3.3, C.8.3.1 (echo, trigger time, temporal position), C.8.13.5.9 (diffusion).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardflow.format.reasons import PHASE_NAMES
from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.headers import SliceRef

_PHASE = {name: place for place, name in enumerate(PHASE_NAMES)}
_KINDS = ("stack_id", "image_type", "convolution_kernel", "contrast")
_DIFFUSION = ("diffusion_b_value", "diffusion_direction")
_ECHO = ("echo_time", "echo_number")
_TIME = ("temporal_position", "trigger_time", "acquisition_number")
_DIFFUSION_NAME = re.compile(r"b\d+(?:[#t]|$)")
"""In a (0018,0024) *Sequence Name* such as ``*ep_b1000#3``."""

Volume = Sequence[SliceRef]


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPoint:
    """Place of a stack in a 4-D object: stacks of one series at the same positions, along one axis."""

    name: str
    """``time``, ``echo``, ``diffusion``, or ``order``: only their numbers tell the stacks apart."""
    first: int = 0
    """Smallest stack index of the object."""
    index: int | None
    """Place along the axis, from 0; None where the slices of the stack are the axis, as in a cine."""
    num: int
    """Points of the axis."""
    value: float | None = None
    """Of this point: seconds from the first one, echo time in ms, or b-value in s/mm2."""


def find_axes(volumes: Sequence[Volume]) -> list[tuple[int, AxisPoint | None]]:
    """Return the number of the 4-D object of each volume and its place there; None if it is alone.

    Args:
        volumes: At least one, all with slices at the same positions.
    """
    found: dict[int, tuple[int, AxisPoint | None]] = {}
    number = 0
    for group in _by_phases(range(len(volumes)), volumes, _KINDS):
        echoes = _by_phases(group, volumes, _ECHO[:1])
        # Echoes that were each measured several times are objects of their own, with time as their axis.
        is_split = len(echoes) > 1 and min(map(len, echoes)) > 1
        for members in echoes if is_split else [group]:
            points = _points([volumes[at] for at in members])
            found.update((at, (number, point)) for at, point in zip(members, points, strict=True))
            number += 1
    return [found[at] for at in range(len(volumes))]


def _by_phases(places: Iterable[int], volumes: Sequence[Volume], names: Sequence[str]) -> list[list[int]]:
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for at in places:
        groups[tuple(_phase(volumes[at], name) for name in names)].append(at)
    return list(groups.values())


def _phase(volume: Volume, name: str) -> str:
    """Phase of the first slice; that of the other volumes lies at the same position."""
    return volume[0].plane.phase[_PHASE[name]]


def _points(volumes: Sequence[Volume]) -> list[AxisPoint | None]:
    """Return the places of volumes along the axis that they form."""
    if len(volumes) == 1:
        return [None]
    first_numbers = [min(one.order for one in volume) for volume in volumes]
    order = sorted(range(len(volumes)), key=lambda at: first_numbers[at])
    name, keys, known = _axis(volumes)
    if keys is not None:
        order.sort(key=lambda at: keys[at])
    if name == "time":
        known = _from_first(known, order)
    points = [
        AxisPoint(name=name, index=order.index(at), num=len(volumes), value=known[at])
        for at in range(len(volumes))
    ]
    return list(points)


def _from_first(times: list[float | None], order: Sequence[int]) -> list[float | None]:
    """Return times from that of the first point; none if they do not rise along the axis."""
    along = [time for at in order if (time := times[at]) is not None]
    if len(along) < len(times) or along != sorted(along):
        return [None] * len(times)
    return [None if time is None else round(time - along[0], 6) for time in times]


def _axis(volumes: Sequence[Volume]) -> tuple[str, list[float] | None, list[float | None]]:
    """Return the name of an axis, what orders it (None: numbers), and the value of each volume."""

    def numbers(name: str) -> list[float | None]:
        return [_number(_phase(volume, name)) for volume in volumes]

    def differs(name: str) -> bool:
        return len({_phase(volume, name) for volume in volumes}) > 1

    nothing: list[float | None] = [None] * len(volumes)
    names = {_phase(volume, "sequence_name") for volume in volumes}
    if any(map(differs, _DIFFUSION)) or (len(names) > 1 and all(map(_DIFFUSION_NAME.search, names))):
        return "diffusion", None, numbers(_DIFFUSION[0])
    name = next(filter(differs, _ECHO), None)
    if name is not None:
        return "echo", _whole(numbers(name)), numbers("echo_time")
    starts = [values.seconds(volume[0].instance.acquired) for volume in volumes]
    has_starts = None not in starts and len({*starts}) == len(starts)
    name = next(filter(differs, _TIME), None)
    if name is None:
        return ("time", _whole(starts), starts) if has_starts else ("order", None, nothing)
    if has_starts:
        return "time", _whole(numbers(name)), starts
    if name == "trigger_time":
        delays = numbers(name)
        return "time", _whole(delays), [None if delay is None else delay / 1000 for delay in delays]
    return "time", _whole(numbers(name)), nothing


def _whole(keys: list[float | None]) -> list[float] | None:
    """Return numbers that all volumes have; None if one lacks it."""
    known = [key for key in keys if key is not None]
    return known if len(known) == len(keys) else None


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
