"""Picture of one slot of a batch: its images in their display range, with masks and boxes, and texts below.

Needs Pillow (the extra ``view``), and no display.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.field import RESERVED_SUFFIXES
from shardflow.viewing.planes import Window, to_gray, to_size
from shardflow.viewing.study import choose_slices
from shardflow.viewing.typeface import FAINT, INK, PAPER, Typeface

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_MARGIN, _GAP, _WIDTH, _TILE, _COLUMNS = 24, 6, 1120, 272, 4
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
    height = 2 * _MARGIN + head.line_height + 8
    for _, tiles, lines in blocks:
        rows = -(-len(tiles) // _COLUMNS)
        height += small.line_height + rows * (_TILE + _GAP) + len(lines) * body.line_height + 10
    sheet = Image.new("RGB", (2 * _MARGIN + _WIDTH, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    head.draw(draw, (_MARGIN, _MARGIN), title, fill=INK)
    y = _MARGIN + head.line_height + 8
    for one, tiles, lines in blocks:
        small.draw(draw, (_MARGIN, y), " · ".join(filter(None, (one.name, one.note))), fill=FAINT)
        y += small.line_height
        for place, (number, tile) in enumerate(tiles):
            x = _MARGIN + place % _COLUMNS * (_TILE + _GAP)
            if place and not place % _COLUMNS:
                y += _TILE + _GAP
            rendered, boxes, scale = tile
            sheet.paste(Image.fromarray(rendered), (x, y))
            _draw_boxes(draw, boxes, (x, y), scale)
            if len(one.pictures) > 1:
                small.draw_outlined(draw, (x + 4, y + 2), f"#{number}", "#ffffff")
        y += (_TILE + _GAP) * bool(tiles)
        for line in lines:
            body.draw(draw, (_MARGIN, y), line, fill=INK)
            y += body.line_height
        y += 10
    stream = io.BytesIO()
    sheet.save(stream, "PNG", optimize=False)
    return SlotSheet(stream.getvalue(), title)


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
