"""Picture of one study: slices on the left, the report on the right, a title and facts above.

Needs Pillow (the extra ``view``).
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from shardflow.viewing.planes import (
    EdgeLetters,
    Window,
    edge_letters,
    pixel_spacing,
    scale_bar_mm,
    to_gray,
    to_size,
)
from shardflow.viewing.study import StudyView
from shardflow.viewing.typeface import FAINT, INK, LETTER, PAPER, RULE, Typeface

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

_MARGIN: Final = 28
_GAP: Final = 6
_MONTAGE_WIDTH: Final = 1120
_MONTAGE_HEIGHT: Final = 860
_TEXT_WIDTH: Final = 560
_MAX_TEXT_HEIGHT: Final = 1800
_MAX_REPORT_CHARACTERS: Final = 20_000
_BAR = "#ffffff"
_SMALL_TILE: Final = 150


class _Grid(NamedTuple):
    """Grid of the tiles, in pixels."""

    columns: int
    rows: int
    width: int
    height: int
    step_x: int
    """From a tile's left edge to the next one's: narrow pictures are spaced so that their letters fit."""


def render_study(view: StudyView, *, window: Window | None = None, font: Path | None = None) -> bytes:
    """Draw a study.

    Args:
        view: From `read_study`.
        window: Values shown black and white, in the series' unit; the series' ``display_range`` by default.
        font: A font file for the text, preferred to those of the system.

    Returns:
        A PNG file. The same study and fonts give the same bytes.

    Raises:
        ConfigError: Pillow is missing, or the font file cannot be read.
    """
    body, small, title = Typeface(19, font), Typeface(15, font), Typeface(27, font)
    from PIL import Image, ImageDraw

    window = window or Window.of_series(view.series)
    heading = title.wrap(_title(view), _MONTAGE_WIDTH + _TEXT_WIDTH - 240)[:2]
    facts = small.wrap(_facts(view, window), _MONTAGE_WIDTH + _TEXT_WIDTH)[:3]
    top = _MARGIN + len(heading) * title.line_height + len(facts) * small.line_height + 22
    lines = body.wrap(_report_text(view), _TEXT_WIDTH)
    most = _MAX_TEXT_HEIGHT // body.line_height
    if len(lines) > most:
        lines = [*lines[:most], f"({len(lines) - most:,} more lines)"]
    grid = _lay_out(view)
    montage_height = grid.rows * (grid.height + _GAP) - _GAP
    content = max(montage_height, body.line_height * (len(lines) + 2))
    footer_top = top + content + 18
    size = (_MARGIN * 3 + _MONTAGE_WIDTH + _TEXT_WIDTH, footer_top + small.line_height * 2 + _MARGIN // 2)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)

    y = _MARGIN
    for line in heading:
        title.draw(draw, (_MARGIN, y), line, fill=INK)
        y += title.line_height
    for line in facts:
        small.draw(draw, (_MARGIN, y), line, fill=FAINT)
        y += small.line_height
    if view.generated:
        body.draw_badge(draw, view.generated, right=size[0] - _MARGIN, top=_MARGIN)

    draw.rectangle((_MARGIN, top, _MARGIN + _MONTAGE_WIDTH - 1, top + montage_height - 1), fill="#000000")
    _draw_tiles(sheet, view, window, grid, top, font)

    left = 2 * _MARGIN + _MONTAGE_WIDTH
    draw.line((left - _MARGIN // 2, top, left - _MARGIN // 2, top + content), fill=RULE, width=2)
    small.draw(draw, (left, top), "REPORT", fill=FAINT)
    y = top + body.line_height + 4
    for line in lines:
        body.draw(draw, (left, y), line, fill=INK if view.report else FAINT)
        y += body.line_height

    for line in _footer(view, body):
        small.draw(draw, (_MARGIN, footer_top), line, fill=FAINT)
        footer_top += small.line_height
    stream = io.BytesIO()
    sheet.save(stream, "PNG", optimize=False)
    return stream.getvalue()


def _title(view: StudyView) -> str:
    series, patient = view.series, view.patient
    age, sex = patient.get("age_years"), patient.get("sex")
    who = ", ".join(
        part
        for part in ({"F": "female", "M": "male"}.get(sex or "", ""), f"{age} years" if age else "")
        if part
    )
    what = " ".join(str(part) for part in (series.get("modality"), _lower(series.get("body_part"))) if part)
    return " - ".join(part for part in (what or "Study", who, view.place) if part)


def _lower(text: object) -> str:
    return str(text).lower() if text else ""


def _facts(view: StudyView, window: Window | None) -> str:
    series = view.series
    spacing, gap = pixel_spacing(series), series.get("slice_spacing_mm")
    size = f"{series['rows']} x {series['columns']}"
    amount, stated = series["num_slices"], series.get("series_number")
    source = "" if stated is None else f" (the source's {stated})"
    parts = [
        f"series {view.series_number} of {view.num_series}{source}",
        f"{amount} {'slice' if amount == 1 else 'slices'} of {size}, {len(view.slices)} shown",
    ]
    if spacing:
        each = [*spacing, gap] if gap and amount > 1 else spacing
        parts.append(" x ".join(f"{value:.3g}" for value in each) + " mm")
    if not _is_color(view):
        unit = series.get("unit") or "raw"
        parts.append(
            f"window {window} ({unit})" if window else f"each slice from its lowest to its highest ({unit})"
        )
    parts += [flag.replace("_", " ") for flag in series.get("flags") or ()]
    return f"{'   |   '.join(parts)}   |   {view.sample_key}"


def _is_color(view: StudyView) -> bool:
    return bool(view.slices) and view.slices[0].ndim == 3


def _report_text(view: StudyView) -> str:
    if view.report is None:
        return "(no report)"
    text = view.report.strip()
    if len(text) > _MAX_REPORT_CHARACTERS:
        return f"{text[:_MAX_REPORT_CHARACTERS]}\n({len(text) - _MAX_REPORT_CHARACTERS:,} more characters)"
    return text or "(an empty report)"


def _footer(view: StudyView, body: Typeface) -> list[str]:
    lines = []
    letters = edge_letters(view.series)
    if letters != EdgeLetters():
        lines.append(
            "Sides of the patient: R right, L left, A front, P back, H head, F feet.   "
            "#: index in the series, from 0; image: the source's number."
        )
    else:
        lines.append("The source does not state the patient's orientation; no sides are marked.")
    if body.missing:
        lines.append(
            f"{len(body.missing)} different characters of the report are in no font here and show as boxes; "
            "give one with --font."
        )
    return lines


def _lay_out(view: StudyView) -> _Grid:
    """Choose the number of columns that makes the tiles largest."""
    rows, columns = view.series["rows"], view.series["columns"]
    between_rows, between_columns = pixel_spacing(view.series) or (1.0, 1.0)
    shape = max(min(columns * between_columns / (rows * between_rows), 6.0), 1 / 6)
    number = max(len(view.slices), 1)
    best = _Grid(1, 1, 1, 1, 1)
    for across in range(1, number + 1):
        down = math.ceil(number / across)
        cell_width = (_MONTAGE_WIDTH - _GAP * (across - 1)) // across
        cell_height = (_MONTAGE_HEIGHT - _GAP * (down - 1)) // down
        width = min(cell_width, round(cell_height * shape))
        height = min(cell_height, round(width / shape))
        if width * height > best.width * best.height:
            best = _Grid(across, down, max(width, 1), max(height, 1), cell_width + _GAP)
    return best


def _draw_tiles(
    sheet: Image, view: StudyView, window: Window | None, grid: _Grid, top: int, font: Path | None
) -> None:
    from PIL import Image, ImageDraw

    draw = ImageDraw.Draw(sheet)
    text = Typeface(17 if grid.width >= _SMALL_TILE else 12, font)
    letters = edge_letters(view.series)
    spacing = pixel_spacing(view.series)
    numbers = view.series.get("instance_numbers") or []
    pad = (grid.step_x - _GAP - grid.width) // 2
    for place, (index, pixels) in enumerate(zip(view.indexes, view.slices, strict=True)):
        x = _MARGIN + (place % grid.columns) * grid.step_x + pad
        y = top + (place // grid.columns) * (grid.height + _GAP)
        picture = to_size(to_gray(pixels, window), grid.height, grid.width)
        sheet.paste(Image.fromarray(picture), (x, y))
        text.draw_outlined(draw, (x + 5, y + 2), f"#{index}", "#ffffff")
        if index < len(numbers) and numbers[index] is not None and grid.width >= _SMALL_TILE:
            # Below, not beside: the letter of the upper edge needs the middle.
            text.draw_outlined(draw, (x + 5, y + text.line_height), f"image {numbers[index]}", "#ffffff")
        _draw_letters(draw, text, letters, x, y, grid)
        if spacing:
            _draw_scale(draw, text, view.series["columns"] * spacing[1], x, y, grid)


def _draw_letters(draw: ImageDraw, text: Typeface, letters: EdgeLetters, x: int, y: int, grid: _Grid) -> None:
    middle_x, middle_y = x + grid.width / 2, y + grid.height / 2 - text.size / 2
    width = text.width
    places = (
        (letters.left, (x + 5, middle_y)),
        (letters.right, (x + grid.width - 5 - width(letters.right), middle_y)),
        (letters.top, (middle_x - width(letters.top) / 2, y + 2)),
        (letters.bottom, (middle_x - width(letters.bottom) / 2, y + grid.height - text.size - 8)),
    )
    for letter, place in places:
        if letter:
            text.draw_outlined(draw, place, letter, LETTER)


def _draw_scale(draw: ImageDraw, text: Typeface, width_mm: float, x: int, y: int, grid: _Grid) -> None:
    """Draw a bar in the lower left corner, its length above it."""
    length_mm = scale_bar_mm(width_mm)
    length = round(grid.width * length_mm / width_mm)
    left, bottom = x + 8, y + grid.height - 9
    draw.rectangle((left - 1, bottom - 4, left + length + 1, bottom + 1), fill="#000000")
    draw.rectangle((left, bottom - 3, left + length, bottom), fill=_BAR)
    text.draw_outlined(draw, (left, bottom - 8 - text.line_height), f"{length_mm:g} mm", _BAR)
