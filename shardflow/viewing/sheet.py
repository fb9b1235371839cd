"""Pictures of one study, and of one slot of a batch.

A study is drawn as slices on the left, its report on the right, a title and facts above; a slot as its images
in their display range, with masks and boxes, and its texts below. Needs Pillow (the extra ``view``) and no
display.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.field import RESERVED_SUFFIXES
from shardflow.logs import counted
from shardflow.viewing.study import (
    EdgeLetters,
    StudyView,
    Window,
    choose_slices,
    edge_letters,
    pixel_spacing,
    scale_bar_mm,
    to_gray,
    to_size,
)
from shardflow.viewing.typeface import FAINT, INK, LETTER, PAPER, RULE, Typeface, png_of

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
    return png_of(sheet)


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
        f"{counted(amount, 'slice')} of {size}, {len(view.slices)} shown",
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


_SLOT_MARGIN, _WIDTH, _TILE, _COLUMNS = 24, 1120, 272, 4
_MAX_LINES: Final = 40
_MAX_VALUES, _MAX_CHARACTERS = 48, 4000
_COLORS: Final = ("#ff5a5f", "#3fb950", "#58a6ff", "#d29922", "#bc8cff", "#39c5cf")
"""Colors of labels, in turn."""
_OPACITY: Final = 0.4
_MIN_CONTRAST: Final = 0.01
"""Smallest part of a display range that pixels use; those that use less are of another unit."""


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """One image, and what is drawn over it."""

    pixels: NDArray[Any]
    """``(C, H, W)``, C of 1 or 3."""
    window: tuple[float, float] | None = None
    """Values shown black and white; the image's extremes if None, or if they leave no contrast."""
    masks: Sequence[NDArray[Any]] = ()
    """``(H, W)`` each: a color per plane where it is not 0."""
    boxes: Sequence[tuple[float, float, float, float, int]] = ()
    """First column, first row, end column, end row, and the number of the color."""


@dataclass(frozen=True, slots=True)
class ShownField:
    """One entry of a batch as a person sees it."""

    name: str
    note: str = ""
    pictures: Sequence[ShownPicture] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class SlotSheet:
    """Picture of a slot, which a notebook displays."""

    png: bytes = field(repr=False)
    title: str

    def _repr_png_(self) -> bytes:
        return self.png

    def save(self, path: str | Path) -> None:
        """Write the PNG file."""
        Path(path).write_bytes(self.png)


def render_slot(title: str, fields: Sequence[ShownField], *, max_pictures: int = 12) -> SlotSheet:
    """Draw a slot.

    Args:
        title: Its first line.
        fields: What it holds, from top to bottom.
        max_pictures: Images shown of a field; of more, as many evenly spaced ones.

    Returns:
        A picture of 1120 pixels and its margins in width, as high as it must be.

    Raises:
        ConfigError: Pillow is missing.
    """
    body, small, head = Typeface(17), Typeface(14), Typeface(20)
    from PIL import Image, ImageDraw

    blocks = [(one, _tiles(one, max_pictures), _lines(one, body)) for one in fields]
    height = 2 * _SLOT_MARGIN + head.line_height + 8
    for _, tiles, lines in blocks:
        rows = -(-len(tiles) // _COLUMNS)
        height += small.line_height + rows * (_TILE + _GAP) + len(lines) * body.line_height + 10
    sheet = Image.new("RGB", (2 * _SLOT_MARGIN + _WIDTH, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    head.draw(draw, (_SLOT_MARGIN, _SLOT_MARGIN), title, fill=INK)
    y = _SLOT_MARGIN + head.line_height + 8
    for one, tiles, lines in blocks:
        small.draw(draw, (_SLOT_MARGIN, y), " · ".join(filter(None, (one.name, one.note))), fill=FAINT)
        y += small.line_height
        for place, (number, tile) in enumerate(tiles):
            x = _SLOT_MARGIN + place % _COLUMNS * (_TILE + _GAP)
            if place and not place % _COLUMNS:
                y += _TILE + _GAP
            rendered, boxes, scale = tile
            sheet.paste(Image.fromarray(rendered), (x, y))
            _draw_boxes(draw, boxes, (x, y), scale)
            if len(one.pictures) > 1:
                small.draw_outlined(draw, (x + 4, y + 2), f"#{number}", "#ffffff")
        y += (_TILE + _GAP) * bool(tiles)
        for line in lines:
            body.draw(draw, (_SLOT_MARGIN, y), line, fill=INK)
            y += body.line_height
        y += 10
    return SlotSheet(png_of(sheet), title)


_Boxes = Sequence[tuple[float, float, float, float, int]]
_Tile = tuple[NDArray[np.uint8], _Boxes, float]


def _tiles(one: ShownField, most: int) -> list[tuple[int, _Tile]]:
    """Return the images to draw, each with its number."""
    chosen = choose_slices(len(one.pictures), most) if one.pictures else ()
    return [(number, _draw_picture(one.pictures[number])) for number in chosen]


def _draw_picture(picture: ShownPicture) -> _Tile:
    """Return a picture as ``(h, w, 3)`` uint8 of at most a tile, its boxes, and its scale."""
    pixels = picture.pixels
    plane = np.ascontiguousarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1))
    high, wide = pixels.shape[1:]
    scale = _TILE / max(high, wide)
    gray = to_gray(plane, _window(plane, picture.window))
    shown = np.stack([gray] * 3, axis=-1) if gray.ndim == 2 else gray
    size = max(1, round(high * scale)), max(1, round(wide * scale))
    shown = to_size(np.ascontiguousarray(shown), *size).copy()
    for number, mask in enumerate(picture.masks):
        is_marked = to_size((np.asarray(mask) != 0).astype(np.uint8) * 255, *size) >= 128
        color = np.array([int(_color(number)[at : at + 2], 16) for at in (1, 3, 5)], np.float32)
        shown[is_marked] = (shown[is_marked] * (1 - _OPACITY) + color * _OPACITY).astype(np.uint8)
    return shown, picture.boxes, scale


def _window(plane: NDArray[Any], limits: tuple[float, float] | None) -> Window | None:
    """Return the window to show pixels in; None where theirs would leave no contrast, as of another unit."""
    if limits is None or not plane.size:
        return None
    low, high = limits
    darkest, brightest = float(plane.min()), float(plane.max())
    used = min(brightest, high) - max(darkest, low)
    has_contrast = used >= _MIN_CONTRAST * (high - low) or darkest == brightest
    return Window(low, high) if has_contrast and high > low else None


def _draw_boxes(draw: ImageDraw, boxes: _Boxes, corner: tuple[int, int], scale: float) -> None:
    x, y = corner
    for left, top, right, bottom, number in boxes:
        ends = x + left * scale, y + top * scale, x + right * scale - 1, y + bottom * scale - 1
        end = max(ends[0], ends[2]), max(ends[1], ends[3])
        draw.rectangle((*ends[:2], *end), outline=_color(number), width=2)


def _color(number: int) -> str:
    return _COLORS[max(number, 0) % len(_COLORS)]


def _lines(one: ShownField, face: Typeface) -> list[str]:
    lines = face.wrap(one.text, _WIDTH) if one.text else []
    more = len(lines) - _MAX_LINES
    return lines if more <= 0 else [*lines[:_MAX_LINES], f"({more:,} more lines)"]


def show_entries(
    entries: Sequence[Mapping[str, Any]], values: Mapping[str, Any], slot: int, *, num_slots: int
) -> list[ShownField]:
    """Return what a slot of a batch holds, as a person sees it.

    Args:
        entries: Name and type of the fields, and ``like`` of those that lie over another.
        values: The batch. What has no item per slot, as ``collate=`` may return it, is shown whole.
        slot: Which slot.
        num_slots: Number of slots.
    """
    types = {entry["name"]: entry["type"] for entry in entries}
    over: dict[str, list[str]] = {}
    for entry in entries:
        if types.get(entry.get("like", "")) in _PICTURES and entry["name"] in values:
            over.setdefault(entry["like"], []).append(entry["name"])
    beside = {f"{name}_{suffix}" for name in values for suffix in RESERVED_SUFFIXES}
    hidden = beside.union(*over.values())
    found = []
    for name in values:
        if name in hidden:
            continue
        whole = values[name]
        is_array = isinstance(whole, np.ndarray) and whole.ndim > 0
        is_by_slot = (is_array or isinstance(whole, list)) and len(whole) == num_slots
        if is_by_slot and f"{name}_range" in values:
            layers = [(one, types[one]) for one in over.get(name, ())]
            found.append(_show_pictures(name, values, slot, layers))
        else:
            value = whole[slot] if is_by_slot else whole
            found.append(ShownField(name, _note(value), text=_text(value)))
    return found


_PICTURES: Final = ("image", "slices")


def _show_pictures(
    name: str, values: Mapping[str, Any], slot: int, layers: Sequence[tuple[str, str]]
) -> ShownField:
    """Return the pictures of a slot with the masks and boxes over them."""
    pictures = list(_each_picture(values[name][slot]))
    present = np.ravel(values[f"{name}_mask"][slot]) if f"{name}_mask" in values else np.ones(len(pictures))
    ranges = np.reshape(values[f"{name}_range"][slot], (-1, 2)) if f"{name}_range" in values else ()
    masks = [list(_each_picture(values[one][slot])) for one, kind in layers if kind == "mask"]
    boxes = [_boxes(one, values, slot) for one, kind in layers if kind == "boxes"]
    shown = []
    for number, pixels in enumerate(pictures):
        if len(present) == len(pictures) and not present[number]:
            continue
        limits = ranges[number * len(ranges) // len(pictures)].tolist() if len(ranges) else None
        planes = [plane for one in masks if number < len(one) for plane in one[number]]
        inside = [box for one in boxes for place, box in one if place == number]
        shown.append(ShownPicture(pixels, limits and (limits[0], limits[1]), planes, inside))
    note = _note(pictures[0]) if shown else "none"
    if shown and shown[0].window:
        low, high = shown[0].window
        note += f", display range {low:g} to {high:g}"
    return ShownField(name, note, shown)


def _boxes(name: str, values: Mapping[str, Any], slot: int) -> list[tuple[int, Any]]:
    """Return the boxes of a slot, each with the place of its picture."""
    rows = zip(
        *(values[key][slot].tolist() for key in (f"{name}_mask", f"{name}_index", name, f"{name}_label")),
        strict=True,
    )
    return [(place, (*box, label)) for is_box, place, box, label in rows if is_box]


def _each_picture(value: Any) -> Iterator[NDArray[Any]]:
    """Iterate over images, ``(C, H, W)`` each, of an array of any more axes, a list, or None."""
    if isinstance(value, list):
        for one in value:
            yield from _each_picture(one)
    elif isinstance(value, np.ndarray) and value.ndim >= 3:
        yield from value.reshape(-1, *value.shape[-3:])


def _note(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{'x'.join(map(str, value.shape))} {value.dtype}".strip()
    if isinstance(value, str | bytes | list | dict):
        unit = {str: "characters", bytes: "bytes"}.get(type(value), "items")
        return f"{len(value):,} {unit}"
    return "none" if value is None else ""


def _text(value: Any) -> str:
    """Return a value as text; of an array and of bytes the beginning."""
    if isinstance(value, str):
        return value
    if isinstance(value, np.ndarray):
        return " ".join(map(str, value.ravel()[:_MAX_VALUES].tolist()))
    if isinstance(value, bytes):
        return value[:_MAX_VALUES].hex(" ")
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)[:_MAX_CHARACTERS]
