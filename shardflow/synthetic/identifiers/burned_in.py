"""Images with planted text: identifiers burned into generated or given pictures, at known pixels.

Fonts, phrases and bodies are divided into a development part, which a detector is tuned with, and a test
part, which it is measured with. Sizes, values, turns and places are drawn: bright, dark and saturated
letters, with and without a plate behind them, upright, turned by a quarter, a half or a few degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.synthetic.draws import Draws, filtered_noise
from shardflow.synthetic.identifiers.corpus import Part
from shardflow.synthetic.options import SynthOptions, iter_visits
from shardflow.synthetic.planning import plan_study
from shardflow.synthetic.render import Renderer

Pixels: TypeAlias = NDArray[Any]
"""``(rows, columns)`` or ``(rows, columns, 3)``."""
Coverage: TypeAlias = NDArray[np.uint8]
"""Coverage of pixels by letters, 0 to 255, cut to the ink."""
Letters: TypeAlias = Callable[[str, int], Coverage]
"""Draws a line of text with capitals of a given height in pixels."""

_FONTS: Final[Mapping[Part, Mapping[str, int]]] = {
    "development": {
        "cv2 simplex": cv2.FONT_HERSHEY_SIMPLEX,
        "cv2 small": cv2.FONT_HERSHEY_COMPLEX_SMALL,
        "cv2 duplex": cv2.FONT_HERSHEY_DUPLEX,
    },
    "test": {
        "cv2 plain": cv2.FONT_HERSHEY_PLAIN,
        "cv2 complex": cv2.FONT_HERSHEY_COMPLEX,
        "cv2 triplex": cv2.FONT_HERSHEY_TRIPLEX,
    },
}
_FAMILIES: Final[Mapping[Part, tuple[str, ...]]] = {
    "development": ("DOE", "Schmidt", "Garcia", "OKAFOR", "Nguyen", "Rossi", "KOWALSKI", "Hansen"),
    "test": ("MILLER", "Weber", "Fernandez", "ADEYEMI", "Tanaka", "Dubois", "NOVAK", "Lindqvist"),
}
_GIVEN: Final[Mapping[Part, tuple[str, ...]]] = {
    "development": ("JANE", "Karl", "Lucia", "CHIDI", "Linh", "Marco", "EWA", "Nils"),
    "test": ("GRACE", "Uwe", "Pablo", "TUNDE", "Yuki", "Amelie", "PETR", "Astrid"),
}
_PHRASES: Final[Mapping[Part, tuple[str, ...]]] = {
    "development": (
        "{family}, {given}", "{family}^{given}", "{date}", "DOB {date}", "MRN {digits}", "ID: {digits}-A",
        "St. Mary Hospital", "Dr. {family}", "ACC {digits}", "{family} 45Y F", "Acq {date} 10:42:17",
        "M. {family}",
    ),
    "test": (
        "{given} {family}", "{family} {given}", "born {date}", "{date}", "PID {digits}", "No. {digits}",
        "County General Hospital", "Ref: {family} MD", "Accession {digits}", "{family} M/067Y",
        "{date} 08:15", "{digits}",
    ),
}  # fmt: skip
_DATES: Final[Mapping[Part, tuple[str, ...]]] = {
    "development": ("{d:02}/{m:02}/{y}", "{y}-{m:02}-{d:02}", "{d} Mar {y}"),
    "test": ("{d:02}.{m:02}.{y}", "{m}/{d}/{y}", "{d:02}-Oct-{y}"),
}
_MARKERS: Final = ("L", "R", "LAT", "PA", "RMLO", "LCC")
_TURNS: Final = ((0, 70), (90, 8), (270, 6), (180, 4), (4, 6), (-7, 6))
_CONTRASTS: Final = {"0.3": 0.3, "0.5": 0.5, "0.75": 0.75, "1.0": 1.0}
"""Contrasts of the letters with their background, as shares of the displayed range."""
_KINDS: Final = (
    ("0.3", 2),
    ("0.5", 3),
    ("0.75", 3),
    ("1.0", 3),
    ("saturated", 6),
    ("black", 2),
    ("plate", 2),
)
_LEAST: Final = 0.25
"""Least contrast; letters with less could not be read."""
_HEIGHTS: Final = ((8, 3), (10, 3), (13, 3), (18, 2), (26, 1))
"""Heights of capitals in an image of up to 640 pixels, with weights; they grow with the root of its size."""
_INK: Final = 0.4
_TRIES: Final = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedLine:
    """One line of text in an image."""

    text: str
    ink: NDArray[np.bool_]
    """Pixels of its letters, ``(rows, columns)``."""
    font: str
    height_px: int
    """Of its capitals."""
    contrast: str
    turn: int
    """Degrees, counterclockwise."""
    is_marker: bool = False
    """Whether it names a side or view and no person."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedImage:
    """An image with text."""

    pixels: Pixels
    clean: Pixels
    """The same without text."""
    modality: str
    lines: tuple[PlantedLine, ...]


def letters_of(part: Part) -> dict[str, Letters]:
    """Return the fonts of a part that every installation has, by name."""
    return {name: _strokes(font) for name, font in _FONTS[part].items()}


def plant_text(
    pixels: Pixels,
    modality: str,
    part: Part,
    draws: Draws,
    fonts: Mapping[str, Letters],
    *,
    num_lines: int = 3,
) -> PlantedImage:
    """Burn lines of text, and in every other image a marker, into a copy of an image, none over another.

    Args:
        pixels: The image.
        modality: Of the image.
        part: Whose phrases to take.
        draws: Source of all other choices.
        fonts: By name, see `letters_of`.
        num_lines: Lines of text; fewer if there is no room.
    """
    burned = pixels.copy()
    gray = np.asarray(pixels if pixels.ndim == 2 else pixels.mean(2), np.float32)
    taken = np.zeros(gray.shape, bool)
    wanted = num_lines + draws.chance(50)
    lines: list[PlantedLine] = []
    for _ in range(_TRIES):
        if len(lines) == wanted:
            break
        is_marker = len(lines) == num_lines
        name = draws.choice(sorted(fonts))
        height = round(draws.weighted(_HEIGHTS) * max(1.0, (max(gray.shape) / 640) ** 0.5)) * (1 + is_marker)
        turn = 0 if is_marker else draws.weighted(_TURNS)
        text = draws.choice(_MARKERS) if is_marker else _phrase(part, draws)
        coverage = _turned(fonts[name](text, height), turn)
        place = _place(coverage.shape, taken, draws)
        if place is None:
            continue
        top, left = place
        bottom, right = top + coverage.shape[0], left + coverage.shape[1]
        kind = "1.0" if is_marker else draws.weighted(_KINDS)
        letters, plate = _values(kind, gray[top:bottom, left:right], gray, pixels.dtype)
        _blend(burned[top:bottom, left:right], coverage, letters, plate)
        ink = np.zeros(gray.shape, bool)
        ink[top:bottom, left:right] = coverage > 255 * _INK
        room = 3 * height
        taken[max(0, top - room) : bottom + room, max(0, left - room) : right + room] = True
        lines.append(
            PlantedLine(
                text=text,
                ink=ink,
                font=name,
                height_px=height,
                contrast=kind,
                turn=turn,
                is_marker=is_marker,
            )
        )
    return PlantedImage(pixels=burned, clean=pixels, modality=modality, lines=tuple(lines))


def make_backgrounds(part: Part, num: int) -> Iterator[tuple[str, Pixels]]:
    """Yield generated images without text with their modality: CT, MR, radiographs and ultrasound in turn."""
    seed = {"development": 11, "test": 23}[part]
    makers = [_rendered("CT", seed), _rendered("MR", seed), _rendered("CR", seed), _ultrasound(seed)]
    for number in range(num):
        yield next(makers[number % len(makers)])


def typeface(load: Callable[[int], Any]) -> Letters:
    """Return the letters of a font of Pillow.

    Args:
        load: Returns the ``ImageFont`` of a size in pixels.
    """

    def draw(text: str, height: int) -> Coverage:
        from PIL import Image, ImageDraw

        font = load(round(height * 1.38))
        box = font.getbbox(text)
        canvas = Image.new("L", (int(box[2]) + 8, int(box[3]) + 8))
        ImageDraw.Draw(canvas).text((4, 4), text, fill=255, font=font)
        return _cut(np.asarray(canvas, np.uint8))

    return draw


def _strokes(font: int) -> Letters:
    def draw(text: str, height: int) -> Coverage:
        thick = max(1, round(height / 12))
        scale = cv2.getFontScaleFromHeight(font, height, thick)
        (width, tall), base = cv2.getTextSize(text, font, scale, thick)
        canvas = np.zeros((tall + base + 8 + 2 * thick, width + 8 + 2 * thick), np.uint8)
        cv2.putText(canvas, text, (4, tall + 4), font, scale, 255, thick, cv2.LINE_AA)
        return _cut(canvas)

    return draw


def _cut(canvas: Coverage) -> Coverage:
    rows, columns = np.flatnonzero(canvas.any(1)), np.flatnonzero(canvas.any(0))
    return np.ascontiguousarray(canvas[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])


def _phrase(part: Part, draws: Draws) -> str:
    """Draw an identifier as devices write it."""
    date = draws.choice(_DATES[part]).format(
        d=draws.integer(1, 28), m=draws.integer(1, 12), y=draws.integer(1931, 2019)
    )
    return draws.choice(_PHRASES[part]).format(
        family=draws.choice(_FAMILIES[part]),
        given=draws.choice(_GIVEN[part]),
        date=date,
        digits=draws.integer(10**5, 10**8),
    )


def _values(kind: str, behind: Pixels, gray: Pixels, dtype: np.dtype[Any]) -> tuple[float, float | None]:
    """Return the value of letters, and of the plate behind them, without which some could not be read."""
    low, high = (float(one) for one in np.percentile(gray, (1, 99.5)))
    span = max(high - low, 1.0)
    below, above = (float(one) for one in np.percentile(behind, (5, 95)))
    white = 255.0 if dtype == np.uint8 else high + span
    if kind == "saturated":
        white = 255.0 if dtype == np.uint8 else max(float(gray.max()), high + 2 * span)
    share = _CONTRASTS.get(kind, 0.5)
    wanted = {
        "plate": (),
        "saturated": (white, above + share * span),
        "black": (low, below - share * span),
    }.get(kind, (above + share * span, below - share * span))
    for value in wanted:
        is_apart = value >= above + _LEAST * span or value <= below - _LEAST * span
        if low <= value <= white and is_apart:
            return value, None
    return high, low


def _blend(area: Pixels, coverage: Coverage, letters: float, plate: float | None) -> None:
    weight = coverage.astype(np.float32) / 255
    if area.ndim == 3:
        weight = weight[..., None]
    ground = area.astype(np.float32) if plate is None else np.full(area.shape, plate, np.float32)
    mixed = ground * (1 - weight) + letters * weight
    if area.dtype.kind in "iu":
        limits = np.iinfo(area.dtype)
        mixed = np.clip(np.rint(mixed), limits.min, limits.max)
    area[...] = mixed.astype(area.dtype)


def _turned(coverage: Coverage, turn: int) -> Coverage:
    if turn % 90 == 0:
        return np.ascontiguousarray(np.rot90(coverage, turn // 90))
    height, width = coverage.shape
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), turn, 1.0)
    cos, sin = abs(matrix[0, 0]), abs(matrix[0, 1])
    size = int(height * sin + width * cos) + 2, int(height * cos + width * sin) + 2
    matrix[:, 2] += (size[0] - width) / 2, (size[1] - height) / 2
    return _cut(np.asarray(cv2.warpAffine(coverage, matrix, size), np.uint8))


def _place(shape: tuple[int, ...], taken: NDArray[np.bool_], draws: Draws) -> tuple[int, int] | None:
    """Return a free place: at an edge mostly, as devices do."""
    rows, columns = taken.shape[0] - shape[0] - 4, taken.shape[1] - shape[1] - 4
    if rows < 0 or columns < 0:
        return None
    for _ in range(12):
        top, left = draws.integer(0, rows), draws.integer(0, columns)
        if draws.chance(60):
            margin = min(rows, max(1, taken.shape[0] // 12))
            top = draws.choice((draws.integer(0, margin), rows - draws.integer(0, margin), top))
            inset = draws.integer(0, min(6, columns))
            left = draws.choice((inset, columns - inset))
        if not taken[top : top + shape[0] + 4, left : left + shape[1] + 4].any():
            return top + 2, left + 2
    return None


def _rendered(modality: Literal["CT", "MR", "CR"], seed: int) -> Iterator[tuple[str, Pixels]]:
    size = 384 if modality == "CR" else 512
    options = SynthOptions(num_studies=10_000, seed=seed, modality=modality, size=size)
    for number, (patient, visit) in enumerate(iter_visits(options)):
        study = plan_study(options, number, patient, visit)
        draws = Draws(seed, "burned-in", number)
        series = draws.choice(study.series)
        values = Renderer(options.seed, study).render(series, draws.choice(series.slices))
        if modality == "CR":
            stored = np.rint(values * 4095)
            # Detectors show air dark, films show it bright.
            yield modality, np.asarray(4095 - stored if draws.chance(50) else stored, np.uint16)
        else:
            low = -1024 if modality == "CT" else 0
            yield modality, np.rint(values).clip(low, 32000).astype(np.int16)


def _ultrasound(seed: int) -> Iterator[tuple[str, Pixels]]:
    """Yield speckle in a sector on black, in gray or color."""
    number = 0
    while True:
        draws = Draws(seed, "ultrasound", number)
        rows, columns = draws.choice(((480, 640), (600, 800), (768, 1024)))
        y, x = np.mgrid[:rows, :columns].astype(np.float32)
        depth = np.hypot(y + 0.15 * rows, x - columns / 2) / rows
        angle = np.abs(np.arctan2(x - columns / 2, y + 0.15 * rows))
        grain = filtered_noise(draws.key(), rows, columns, "smooth", 1.0)
        tissue = cv2.GaussianBlur(filtered_noise(draws.key(), rows, columns, "smooth", 14.0), (0, 0), 14)
        gray = 70 * np.exp(0.7 * grain + tissue - 0.8 * depth)
        for _ in range(draws.integer(1, 4)):
            center = draws.real(0.3, 0.8) * rows, draws.real(0.3, 0.7) * columns
            flat, radius = draws.real(0.8, 1.3), draws.real(0.03, 0.1) * rows
            gray[np.hypot((y - center[0]) * flat, x - center[1]) < radius] *= draws.choice((0.1, 0.2, 1.8))
        gray[(angle > 0.6) | (depth > 1.08) | (depth < 0.2)] = 0
        image = np.clip(gray, 0, 255).astype(np.uint8)
        yield "US", np.ascontiguousarray(np.repeat(image[..., None], 3, 2) if draws.chance(40) else image)
        number += 1
