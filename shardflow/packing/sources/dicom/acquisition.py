"""Facts that make values usable: dose and decay of PET, diffusion, regions of ultrasound, times of frames.

They come from sequences and private elements that are published in no other way: each is a number within
plausible bounds or a word of a closed list, and a moment leaves only as the seconds between two of them.

Source: DICOM PS3.3, C.8.9.1 and C.8.9.2 (PET), C.8.13.5.9 (diffusion), C.8.5.5 (ultrasound regions), C.7.6.5
(cine); QIBA, "SUV vendor-neutral pseudo-code" (qibawiki.rsna.org), for the factor of the standardized uptake
value by body weight; dcm2niix for the axes of GE's diffusion directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from shardflow.format.reasons import PHASE_NAMES
from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.dictionary import MAP_CLASSES
from shardflow.packing.sources.dicom.elements import Elements, FileElements, HeaderLimits, read_elements
from shardflow.packing.sources.dicom.geometry import Orientation, normal_of
from shardflow.packing.sources.dicom.headers import SliceRef
from shardflow.packing.sources.dicom.maps import MAP_FACT_TAGS, map_facts
from shardflow.packing.sources.dicom.planes import (
    DIFFUSION_TAGS,
    GE_CREATORS,
    has_standard_direction,
    read_diffusion,
)

_MANUFACTURER, _PHASE_ENCODING = 0x00080070, 0x00181312
_CONTENT_DATE, _CONTENT_TIME = 0x00080023, 0x00080033
_SERIES_DATE, _SERIES_TIME, _ACQUISITION_DATE, _ACQUISITION_TIME = (
    *(0x00080021, 0x00080031),
    *(0x00080022, 0x00080032),
)
_WEIGHT, _UNITS, _DECAY_CORRECTION, _REFERENCE_TIME, _FRAME_DURATION = (
    *(0x00101030, 0x00541001),
    *(0x00541102, 0x00541300, 0x00181242),
)
_TRACER, _DOSE, _HALF_LIFE, _START_TIME, _START = 0x00540016, 0x00181074, 0x00181075, 0x00181072, 0x00181078
_GE_CREATOR, _GE_SCAN = 0x00090010, 0x0009100D
_PHILIPS_CREATOR, _PHILIPS_SUV, _PHILIPS_ACTIVITY = 0x70530010, 0x70531000, 0x70531009
_REGIONS = 0x00186011
_FRAME_TIME, _FRAME_TIMES, _CINE_RATE, _DISPLAY_RATE = 0x00181063, 0x00181065, 0x00180040, 0x00082144

_PET_TAGS: Final = frozenset(
    {
        _WEIGHT,
        _UNITS,
        _DECAY_CORRECTION,
        _REFERENCE_TIME,
        _FRAME_DURATION,
        _TRACER,
        _SERIES_DATE,
        _SERIES_TIME,
    }
    | {_ACQUISITION_DATE, _ACQUISITION_TIME, _GE_CREATOR, _GE_SCAN}
    | {_PHILIPS_CREATOR, _PHILIPS_SUV, _PHILIPS_ACTIVITY}
)
_CINE_TAGS: Final = frozenset({_FRAME_TIME, _FRAME_TIMES, _CINE_RATE, _DISPLAY_RATE})
_MR_TAGS: Final = DIFFUSION_TAGS | {_MANUFACTURER, _PHASE_ENCODING}
_DECAY_CORRECTIONS: Final = frozenset({"NONE", "START", "ADMIN"})
_DAY_S: Final = 86_400.0
_MAX_DOSE_BQ: Final = 1e12
_MIN_DOSE_BQ: Final = 1e4
"""Less was written in another unit."""
_MAX_B_VALUE: Final = 100_000.0
_B_VALUE_PHASE: Final = PHASE_NAMES.index("diffusion_b_value")
"""Of `PlaneHeader.phase`; the direction follows it."""
_MAX_REGIONS: Final = 64
_SPATIAL_FORMATS: Final = {1: "2d", 2: "m_mode", 3: "spectral", 4: "waveform", 5: "graphics"}
_DATA_TYPES: Final = {
    1: "tissue",
    2: "color_flow",
    3: "pw_spectral_doppler",
    4: "cw_spectral_doppler",
    5: "doppler_mean_trace",
    6: "doppler_mode_trace",
    7: "doppler_max_trace",
    8: "volume_trace",
    10: "ecg_trace",
    11: "pulse_trace",
    12: "phonocardiogram_trace",
    13: "gray_bar",
    14: "color_bar",
    15: "integrated_backscatter",
    16: "area_trace",
    17: "d_area_dt",
}
_REGION_UNITS: Final = {
    1: "percent",
    2: "db",
    3: "cm",
    4: "s",
    5: "hz",
    6: "db_per_s",
    7: "cm_per_s",
    8: "cm2",
    9: "cm2_per_s",
    10: "cm3",
    11: "cm3_per_s",
    12: "degree",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AcquisitionFacts:
    """Facts of one stack. Moments are on the clock of the device: they leave as distances alone."""

    published: Mapping[str, Any]
    """Objects of ``study.json`` by key: ``pet``, ``diffusion``, ``ultrasound_regions``, ``dose``,
    ``parametric_map``, ``frame_time_ms`` and ``frame_times_ms``; what is not known is left out."""
    injection_to_scan_s: float | None = None
    """Seconds from the injection to the moment that the values of a PET are corrected to, or, where they are
    not, to the start of the acquisition."""
    content: float | None = None
    """When the content of the first image was made, as `values.seconds`."""


def read_acquisition(path: Path, slices: Sequence[SliceRef], *, limits: HeaderLimits) -> AcquisitionFacts:
    """Read the facts of a stack from the file of its first slice.

    Args:
        path: The file.
        slices: Of the stack.
        limits: Bounds on what is read.

    Raises:
        SourceError: As `read_elements`.
    """
    first = slices[0]
    modality, is_cine = first.instance.modality, first.instance.image.num_frames > 1
    wanted = {_CONTENT_DATE, _CONTENT_TIME}
    wanted |= _PET_TAGS if modality == "PT" else _MR_TAGS if modality == "MR" else set()
    wanted |= {_REGIONS} if modality == "US" else set()
    wanted |= _CINE_TAGS if is_cine else set()
    is_map = first.instance.sop_class_uid in MAP_CLASSES
    wanted |= MAP_FACT_TAGS if is_map else set()
    elements = read_elements(path, wanted, limits)
    content = _moment(elements, _CONTENT_DATE, _CONTENT_TIME)
    found: dict[str, Any] = {}
    injection = None
    if is_map:
        found.update(map_facts(elements, first.instance.sop_class_uid))
    elif modality == "PT":
        found["pet"], injection = _pet(elements, slices)
    elif modality == "MR":
        found["diffusion"] = _diffusion(elements, slices)
    elif modality == "US":
        found["ultrasound_regions"] = _ultrasound_regions(elements)
    if is_cine and first.plane.position is None:
        found.update(_frame_times(elements, [one.frame for one in slices]))
    return AcquisitionFacts(
        published={key: value for key, value in found.items() if value},
        injection_to_scan_s=injection,
        content=content,
    )


def _pet(elements: FileElements, slices: Sequence[SliceRef]) -> tuple[dict[str, Any], float | None]:
    """Return what uptake values are computed from, their factor, and the seconds since the injection."""
    tracers = elements.items(_TRACER)
    tracer = tracers[0] if len(tracers) == 1 else Elements()  # of two tracers nobody knows the shares
    weight = _bounded(values.decimals(elements, _WEIGHT, 1), 0.2, 500)
    dose = _bounded(values.decimals(tracer, _DOSE, 1), _MIN_DOSE_BQ, _MAX_DOSE_BQ)
    half_life = _bounded(values.decimals(tracer, _HALF_LIFE, 1), 1, 1e9)
    correction = values.code(elements, _DECAY_CORRECTION).upper()
    acquired = _earliest(slices) or _moment(elements, _ACQUISITION_DATE, _ACQUISITION_TIME)
    scan = _corrected_to(elements, half_life, acquired) if correction == "START" else acquired
    injection = _since_injection(elements, tracer, scan)
    units = values.code(elements, _UNITS).upper()
    facts: dict[str, Any] = {
        "decay_correction": correction if correction in _DECAY_CORRECTIONS else None,
        "half_life_s": half_life,
        "injected_dose_bq": dose,
        "patient_weight_kg": weight,
    }
    if units == "GML":
        facts["suvbw_factor"] = 1.0
    elif units in ("BQML", "CNTS"):
        facts["suvbw_factor"] = _suvbw_factor(elements, units, facts, injection)
    return {key: value for key, value in facts.items() if value is not None}, injection


def _suvbw_factor(
    elements: FileElements, units: str, facts: Mapping[str, Any], injection: float | None
) -> float | None:
    """Return what values are multiplied by to be g/ml of body weight (QIBA); None where it is not known."""
    to_bqml = 1.0
    if units == "CNTS":
        if values.code(elements, _PHILIPS_CREATOR).upper() != "PHILIPS PET PRIVATE GROUP":
            return None
        stated = _bounded(values.decimals(elements, _PHILIPS_SUV, 1), 1e-12, 1e12)
        if stated is not None:
            return stated
        activity = _bounded(values.decimals(elements, _PHILIPS_ACTIVITY, 1), 1e-12, 1e12)
        if activity is None:
            return None
        to_bqml = activity
    dose, half_life, weight = (
        facts[name] for name in ("injected_dose_bq", "half_life_s", "patient_weight_kg")
    )
    correction = facts["decay_correction"]
    if dose is None or weight is None or correction in (None, "NONE"):
        return None
    if correction == "ADMIN":
        return float(to_bqml * weight * 1000 / dose)
    if half_life is None or injection is None:
        return None
    return float(to_bqml * weight * 1000 / (dose * 2 ** (-injection / half_life)))


def _corrected_to(elements: FileElements, half_life: float | None, acquired: float | None) -> float | None:
    """Return the moment that values are decay-corrected to: the start of the scan (QIBA).

    The time of the series, unless that is later than an acquisition, as where the series was made anew; then
    what GE writes, then what the reference time of the frame says, then the first acquisition.
    """
    series = _moment(elements, _SERIES_DATE, _SERIES_TIME)
    if series is not None and (acquired is None or series <= acquired):
        return series
    if values.code(elements, _GE_CREATOR).upper() == "GEMS_PETD_01":
        stated = values.seconds(values.code(elements, _GE_SCAN))
        if stated is not None:
            return stated
    own = _moment(elements, _ACQUISITION_DATE, _ACQUISITION_TIME)
    reference = _bounded(values.decimals(elements, _REFERENCE_TIME, 1), 1e-3, 1e9)
    duration = _bounded(values.decimals(elements, _FRAME_DURATION, 1), 1e-3, 1e9)
    if own is not None and half_life is not None and reference is not None and duration is not None:
        rate = math.log(2) / half_life
        decay = rate * duration / 1000
        average = math.log(decay / -math.expm1(-decay)) / rate
        return own - reference / 1000 + average
    return acquired


def _since_injection(elements: FileElements, tracer: Elements, scan: float | None) -> float | None:
    """Return the seconds from the injection to the scan; a time without a date is that of the last 24 h."""
    if scan is None:
        return None
    start = values.seconds(values.code(tracer, _START))
    if start is None:
        day = values.code(elements, _SERIES_DATE) or values.code(elements, _ACQUISITION_DATE)
        start = values.seconds(day.replace(".", "") + values.code(tracer, _START_TIME).replace(":", ""))
        if start is not None and start > scan:
            start -= _DAY_S
    interval = None if start is None else round(scan - start, 3)
    return interval if interval is not None and 0 <= interval <= _DAY_S else None


def _earliest(slices: Sequence[SliceRef]) -> float | None:
    moments = [values.seconds(text) for text in {one.instance.acquired for one in slices}]
    return min((moment for moment in moments if moment is not None), default=None)


def _moment(elements: Elements, date: int, time: int) -> float | None:
    day, clock = values.code(elements, date).replace(".", ""), values.code(elements, time).replace(":", "")
    return values.seconds(day + clock) if day and clock else None


def _diffusion(elements: FileElements, slices: Sequence[SliceRef]) -> dict[str, Any]:
    """Return b-value and unit direction in LPS, where all slices share them."""
    first = slices[0]
    if len({one.plane.phase[_B_VALUE_PHASE : _B_VALUE_PHASE + 2] for one in slices}) > 1:
        return {}
    b_text, direction_text = first.plane.phase[_B_VALUE_PHASE : _B_VALUE_PHASE + 2]
    is_ge = "GE MED" in values.code(elements, _MANUFACTURER).upper()
    is_stripped = not any(tag in elements.values for tag, _ in GE_CREATORS)
    if not b_text and is_ge and is_stripped:
        # Tools that remove private elements leave these, which they know to be safe, without their creators.
        elements.values.update(GE_CREATORS)
        b_text, direction_text = read_diffusion(elements)
    b_value = _bounded(_floats(b_text), 0, _MAX_B_VALUE)
    if b_value is None:
        return {}
    facts: dict[str, Any] = {"b_value_s_mm2": b_value}
    direction = _floats(direction_text)
    if b_value > 0 and direction is not None and len(direction) == 3:
        if is_ge and first.instance.image.num_frames == 1 and not has_standard_direction(elements):
            encoding = values.code(elements, _PHASE_ENCODING).upper()
            direction = _of_ge(direction, encoding, first.plane.orientation)
        length = 0.0 if direction is None else math.hypot(*direction)
        if direction is not None and abs(length - 1) < 0.05:
            facts["direction_lps"] = [round(part / length, 6) + 0.0 for part in direction]
    return facts


def _of_ge(
    direction: Sequence[float], encoding: str, orientation: Orientation | None
) -> tuple[float, ...] | None:
    """Turn a direction along GE's axes of frequency, phase and slice into LPS, up to its sign."""
    if orientation is None or encoding not in ("COL", "ROW"):
        return None
    a, b, c = direction
    normal = normal_of(orientation)
    is_coronal = abs(normal[1]) > max(abs(normal[0]), abs(normal[2]))
    across, down = (-a, b if is_coronal else -b) if encoding == "COL" else (b if is_coronal else -b, a)
    return tuple(
        across * orientation[axis] + down * orientation[axis + 3] + c * normal[axis] for axis in range(3)
    )


def _ultrasound_regions(elements: FileElements) -> list[dict[str, Any]]:
    """Return the regions of an ultrasound image, each with the unit of its axes."""
    found = []
    for item in elements.items(_REGIONS)[:_MAX_REGIONS]:
        corners = [values.single(item, tag, "I") for tag in (0x00186018, 0x0018601A, 0x0018601C, 0x0018601E)]
        if any(corner is None or corner > 1 << 16 for corner in corners):
            continue
        x0, y0, x1, y1 = (int(corner or 0) for corner in corners)
        x_unit, y_unit = (_REGION_UNITS.get(values.short(item, tag) or 0) for tag in (0x00186024, 0x00186026))
        steps = [values.doubles(item, tag) for tag in (0x0018602C, 0x0018602E)]
        x_step, y_step = (_bounded(step, -1e6, 1e6) for step in steps)
        spacing = None
        if x_unit == y_unit == "cm" and x_step and y_step:
            spacing = [abs(y_step) * 10, abs(x_step) * 10]
        found.append(
            {
                "box_px": [x0, y0, x1 + 1, y1 + 1],
                "data_type": _DATA_TYPES.get(values.short(item, 0x00186014) or 0),
                "pixel_spacing_mm": spacing,
                "spatial_format": _SPATIAL_FORMATS.get(values.short(item, 0x00186012) or 0),
                "x_step": x_step,
                "x_unit": x_unit,
                "y_step": y_step,
                "y_unit": y_unit,
            }
        )
    return found


def _frame_times(elements: FileElements, frames: Sequence[int]) -> dict[str, Any]:
    """Return the time between frames and, where it varies, the time of each frame from the first, ms."""
    steps = values.decimals(elements, _FRAME_TIMES)
    if steps is not None and len(steps) > max(frames) and all(0 <= step <= 1e7 for step in steps):
        times = [0.0, *accumulate(steps[1:])]
        typical = sorted(steps[1:])[len(steps[1:]) // 2] if len(steps) > 1 else 0.0
        return {"frame_time_ms": typical, "frame_times_ms": [round(times[frame], 6) for frame in frames]}
    step = _bounded(values.decimals(elements, _FRAME_TIME, 1), 1e-3, 1e7)
    if step is None:
        rate = values.integer(elements, _CINE_RATE) or values.integer(elements, _DISPLAY_RATE)
        step = 1000 / rate if rate and 0 < rate <= 100_000 else None
    return {} if step is None else {"frame_time_ms": step}


def _bounded(numbers: Sequence[float] | None, low: float, high: float) -> float | None:
    return numbers[0] if numbers and math.isfinite(numbers[0]) and low <= numbers[0] <= high else None


def _floats(text: str) -> tuple[float, ...] | None:
    return tuple(float(part) for part in text.split("\\")) if text else None
