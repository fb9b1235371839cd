"""One study for display: its description, its report, and some slices of one series.

Slices become gray values, with orientation letters and scale bars. Thumbnails are also fields of a dataset
(docs/adr/0113): all parameters of the JPEG encoder are fixed, so that the same slice and version of OpenCV
produce the same bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.format import Dataset, decode_array
from shardflow.format.contents.pictures import opencv
from shardflow.format.keys import REPORT_FIELD, SAMPLE_KEY_PATTERN, STUDY_FIELD

_ROW = re.compile(r"([a-z0-9]{1,32}):(\d{1,12})", re.ASCII)
# Beginnings of the first lines of reports that shardflow's own generators write.
_MARKS = (
    (re.compile(r"\s*SYNTHETIC\b", re.IGNORECASE), "GENERATED"),
    (re.compile(r"\s*generated text\b", re.IGNORECASE), "GENERATED TEXT"),
)
_SYNTH_MAKER = "SYNTHETIC"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyView:
    """The parts of a study to display."""

    sample_key: str
    place: str
    """Split and row in it, such as ``train:12``."""
    patient: dict[str, Any]
    series: dict[str, Any]
    """Description of the chosen series in ``study.json`` (docs/format.md, section 4)."""
    series_number: int
    """Of the chosen series in the sample, from 0."""
    num_series: int
    report: str | None
    slices: tuple[NDArray[Any], ...]
    """Each ``(rows, columns)`` or ``(rows, columns, 3)`` in the unit of the series."""
    indexes: tuple[int, ...]
    """Places of these slices along the normal, from 0."""
    generated: str
    """Label of generated content, or an empty string."""


def find_row(dataset: Dataset, key: str) -> int:
    """Find a sample.

    Args:
        dataset: The dataset.
        key: A sample key, or a split and a row of it such as ``train:0``.

    Returns:
        The row in the samples table.

    Raises:
        ConfigError: There is no such sample.
    """
    place = _ROW.fullmatch(key)
    if place:
        split, number = place[1], int(place[2])
        rows = dataset.splits.get(split)
        if rows is None:
            known = ", ".join(sorted(dataset.splits)) or "none"
            raise ConfigError(f"KEY names the split {split!r}, which has no samples; choose from: {known}.")
        if number >= len(rows):
            raise ConfigError(f"KEY must be a row of {split}, 0 to {len(rows) - 1}, got {number}.")
        return rows[number]
    if SAMPLE_KEY_PATTERN.fullmatch(key):
        try:
            return dataset.samples.find(key)
        except FormatError:
            pass
    # The text is not repeated: it may be an identifier of the source.
    raise ConfigError("KEY must be a sample key of the dataset, or a row such as train:0, got neither.")


def place_of(dataset: Dataset, row: int) -> str:
    """Return the split of a row of the samples table and the row in it, such as ``train:12``."""
    split, rows = next(item for item in dataset.splits.items() if row in item[1])
    return f"{split}:{row - rows.start}"


def read_study(dataset: Dataset, row: int, *, series: int = 0, num_slices: int = 12) -> StudyView:
    """Read a study for display; only the chosen slices of one series are decoded.

    Args:
        dataset: The dataset.
        row: Row in the samples table.
        series: Number of the series; 0 is the primary one.
        num_slices: How many slices at most, evenly spread.

    Raises:
        ConfigError: The study has no such series.
        FormatError: ``study.json`` is no description of a study.
    """
    _, fields = dataset.sample_fields(row)
    present = {field.name for field in fields}
    texts = dataset.read_fields(row, present & {REPORT_FIELD, STUDY_FIELD})
    # Lines of a text corpus have no `study.json`.
    study = _parse_study(texts[STUDY_FIELD], row) if STUDY_FIELD in texts else {"series": []}
    all_series = study["series"]
    if not all_series:
        raise ConfigError(
            "KEY names a sample of text alone, but this picture needs images; choose another one, or read it "
            "with: shardflow view."
        )
    if series >= len(all_series):
        raise ConfigError(f"--series must be below {len(all_series)} in this study, got {series}.")
    names = dataset.slice_names(row, series)
    indexes = choose_slices(len(names), num_slices)
    payloads = dataset.read_fields(row, [names[index] for index in indexes])
    report = texts[REPORT_FIELD].decode("utf-8", errors="replace") if REPORT_FIELD in texts else None
    return StudyView(
        sample_key=dataset.samples.sample_key(row),
        place=place_of(dataset, row),
        patient=study.get("patient") or {},
        series=all_series[series],
        series_number=series,
        num_series=len(all_series),
        report=report,
        slices=tuple(decode_slice(names[index], payloads[names[index]]) for index in indexes),
        indexes=indexes,
        generated=made_by_synth(all_series) or generated_mark(report),
    )


def choose_slices(num_slices: int, num_wanted: int) -> tuple[int, ...]:
    """Choose slices evenly: the middles of equal parts, as fields of slices do."""
    num_chosen = min(num_slices, num_wanted)
    return tuple((2 * place + 1) * num_slices // (2 * num_chosen) for place in range(num_chosen))


def generated_mark(report: str | None) -> str:
    """Return the label of generated text, from the first line of a report; empty if there is none."""
    first = (report or "").lstrip().split("\n", 1)[0]
    return next((mark for pattern, mark in _MARKS if pattern.match(first)), "")


def made_by_synth(series: Sequence[Mapping[str, Any]]) -> str:
    """Return the label of generated images, from the manufacturer that `shardflow synth` writes, or empty."""
    makers = {(one.get("technical") or {}).get("manufacturer") for one in series}
    return "GENERATED" if _SYNTH_MAKER in makers else ""


def decode_slice(name: str, payload: bytes) -> NDArray[Any]:
    """Decode the field of a slice: ``(rows, columns)``, or ``(rows, columns, 3)`` of colors."""
    pixels = decode_array(name.rpartition(".")[2], payload)
    return pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else np.asarray(pixels)


def _parse_study(payload: bytes, row: int) -> dict[str, Any]:
    try:
        study: dict[str, Any] = json.loads(payload)
        usable = isinstance(study["series"], list)
    except (ValueError, KeyError, TypeError):
        usable = False
    if not usable:
        raise FormatError(
            f"study.json of samples row {row} does not describe a study (docs/format.md, section 4)."
        )
    return study


# Positive and negative direction of the axes of LPS: x to the patient's left, y to the back, z to the head.
_SIDES = (("L", "R"), ("P", "A"), ("H", "F"))
_OPPOSITE = {"L": "R", "R": "L", "P": "A", "A": "P", "H": "F", "F": "H"}
# sin 20 degrees: a direction closer to a plane gets no second letter.
_MIN_SHARE = 0.342
_NUM_16_BIT_VALUES = 1 << 16
_ROWS_AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class Window:
    """Values shown black and white, in the unit of the slices."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Window:
        """Parse ``center,width`` or the name of a usual CT window.

        Raises:
            ConfigError: It is neither.
        """
        if text in WINDOWS:
            return WINDOWS[text]
        try:
            center, width = (float(part) for part in text.split(","))
        except ValueError:
            center, width = math.nan, math.nan
        if not (math.isfinite(center) and math.isfinite(width) and width > 0):
            known = ", ".join(sorted(WINDOWS))
            raise ConfigError(f"--window must be CENTER,WIDTH or one of {known}, got {text!r}.")
        return cls(center - width / 2, center + width / 2)

    @classmethod
    def of_series(cls, series: Mapping[str, Any]) -> Window | None:
        """Return the series' own ``display_range``, or None where it states none."""
        limits = series.get("display_range")
        return cls(float(limits[0]), float(limits[1])) if limits else None

    def __str__(self) -> str:
        return f"center {(self.low + self.high) / 2:g}, width {self.high - self.low:g}"


WINDOWS: Final[Mapping[str, Window]] = {
    "bone": Window(-500.0, 1300.0),
    "brain": Window(0.0, 80.0),
    "lung": Window(-1350.0, 150.0),
    "soft": Window(-160.0, 240.0),
}
"""Usual windows of CT, in HU."""


@dataclass(frozen=True, slots=True)
class EdgeLetters:
    """Sides of the patient at the edges of a picture; empty where unknown."""

    left: str = ""
    right: str = ""
    top: str = ""
    bottom: str = ""


def to_gray(pixels: NDArray[Any], window: Window | None) -> NDArray[np.uint8]:
    """Map a slice to 8 bits.

    Args:
        pixels: ``(rows, columns)`` of any number type, or ``(rows, columns, 3)`` uint8, which is returned.
        window: None uses the slice's own extremes.

    Returns:
        The same shape, uint8; NaN is black.
    """
    if pixels.ndim == 3 and pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype.kind in "iu" and pixels.dtype.itemsize <= 2 and pixels.size > _NUM_16_BIT_VALUES:
        # There are fewer values than pixels: map each value once, and look the pixels up.
        code = np.dtype(f"u{pixels.dtype.itemsize}")
        every = np.arange(1 << 8 * code.itemsize, dtype=code).view(pixels.dtype)
        window = window or Window(float(pixels.min()), float(pixels.max()))
        grays, codes = _map_to_gray(every, window), pixels.view(code)
        gray = np.empty(pixels.shape, np.uint8)
        # NumPy makes indexes of 8 bytes of them: of a few rows, they stay in the cache.
        for row in range(0, len(gray), _ROWS_AT_ONCE):
            rows = slice(row, row + _ROWS_AT_ONCE)
            grays.take(codes[rows], out=gray[rows], mode="clip")
        return gray
    return _map_to_gray(pixels, window)


def _map_to_gray(pixels: NDArray[Any], window: Window | None) -> NDArray[np.uint8]:
    values = pixels.astype(np.float32)
    finite = np.isfinite(values)
    if window is None:
        known = values[finite]
        window = Window(float(known.min()), float(known.max())) if known.size else Window(0.0, 1.0)
    span = max(window.high - window.low, 1e-6)
    scaled = np.clip((values - window.low) * (255.0 / span), 0.0, 255.0)
    return np.where(finite, np.rint(scaled), 0).astype(np.uint8)


def to_size(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """Resize a picture: by area if it shrinks, linearly if it grows, to the nearest pixel if it is tiny."""
    cv2 = opencv()
    rows, columns = pixels.shape[:2]
    if rows >= height and columns >= width:
        method = cv2.INTER_AREA
    else:
        method = cv2.INTER_LINEAR if min(rows, columns) >= 48 else cv2.INTER_NEAREST
    return np.asarray(cv2.resize(pixels, (width, height), interpolation=method), dtype=np.uint8)


def pixel_spacing(series: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return millimeters ``(between rows, between columns)``, or None where they are unknown or absurd."""
    spacing = series.get("pixel_spacing_mm")
    if not spacing or not all(isinstance(value, int | float) and value > 0 for value in spacing):
        return None
    rows, columns = map(float, spacing)
    return (rows, columns) if max(rows, columns) < 50 * min(rows, columns) else None


def edge_letters(series: Mapping[str, Any]) -> EdgeLetters:
    """Name the sides of the patient at the edges: from the affine, else from the source's own statement.

    A second letter follows if the edge faces between two sides by more than 20 degrees.
    """
    affine = series.get("affine_lps")
    if affine:
        matrix = np.asarray(affine, dtype=np.float64)
        right, bottom = _direction(matrix[:3, 0]), _direction(matrix[:3, 1])
    else:
        stated = (series.get("technical") or {}).get("patient_orientation")
        if not (isinstance(stated, list) and len(stated) == 2 and all(_is_direction(s) for s in stated)):
            return EdgeLetters()
        right, bottom = stated
    return EdgeLetters(left=_reverse(right), right=right, top=_reverse(bottom), bottom=bottom)


def _direction(vector: NDArray[np.float64]) -> str:
    length = float(np.linalg.norm(vector))
    if not (math.isfinite(length) and length > 0):
        return ""
    shares = (vector / length).tolist()
    order = sorted(range(3), key=lambda axis: -abs(shares[axis]))
    return "".join(_SIDES[axis][shares[axis] < 0] for axis in order if abs(shares[axis]) > _MIN_SHARE)[:2]


def _is_direction(text: object) -> bool:
    return isinstance(text, str) and 1 <= len(text) <= 3 and set(text) <= _OPPOSITE.keys()


def _reverse(letters: str) -> str:
    return "".join(_OPPOSITE[letter] for letter in letters)


def scale_bar_mm(width_mm: float) -> float:
    """Choose a round length of at most a third of a width, in mm."""
    largest = width_mm / 3
    power = 10.0 ** math.floor(math.log10(largest))
    return max(step * power for step in (1, 2, 5) if step * power <= largest)


# Largest ratio of the two pixel spacings that is believed.
_MAX_STRETCH: Final = 50.0
_MIN_SIDE: Final = 8


class Picture(NamedTuple):
    """An encoded picture and its size in pixels, which are squares."""

    jpeg: bytes
    width: int
    height: int


def encode_thumbnail(
    pixels: NDArray[Any],
    spacing_mm: Sequence[float] | None,
    display_range: Sequence[float] | None,
    *,
    max_side: int,
    may_grow: bool = False,
) -> Picture:
    """Encode a slice in its true proportions: in its display range, with square pixels.

    Args:
        pixels: ``(rows, columns)`` of any number type, or ``(rows, columns, 1 or 3)``, RGB of 8 bits.
        spacing_mm: Between rows and between columns; None and absurd ones count as equal.
        display_range: Values shown black and white; None uses the slice's extremes.
        max_side: Longer side in pixels, at most.
        may_grow: Whether a smaller slice is enlarged to it.

    Raises:
        FormatError: It is no picture.
    """
    pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    between_rows, between_columns = spacing_mm or (1.0, 1.0)
    if not 1 / _MAX_STRETCH < between_rows / between_columns < _MAX_STRETCH:
        between_rows = between_columns = 1.0
    finest = min(between_rows, between_columns)
    height, width = pixels.shape[0] * between_rows / finest, pixels.shape[1] * between_columns / finest
    scale = max_side / max(height, width)
    scale = scale if may_grow else min(scale, 1.0)
    height, width = (max(round(side * scale), min(_MIN_SIDE, max_side)) for side in (height, width))
    window = Window(float(display_range[0]), float(display_range[1])) if display_range else None
    gray = to_size(to_gray(pixels, window), height, width)
    # OpenCV writes colors as blue, green, red.
    plain = np.ascontiguousarray(gray[..., ::-1] if gray.ndim == 3 else gray)
    cv2 = opencv()
    parameters = (
        *(cv2.IMWRITE_JPEG_QUALITY, 85),
        *(cv2.IMWRITE_JPEG_PROGRESSIVE, 0),
        *(cv2.IMWRITE_JPEG_OPTIMIZE, 0),
        *(cv2.IMWRITE_JPEG_RST_INTERVAL, 0),
        *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444),
    )
    ok, encoded = cv2.imencode(".jpg", plain, parameters)
    if not ok:
        raise FormatError("a slice must have one or three samples per pixel to be shown as a picture.")
    return Picture(encoded.tobytes(), width, height)
