"""Picture of one report: its findings marked on the left, the slices that show them on the right.

Needs Pillow (the extra ``view``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.format import Dataset
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD
from shardflow.viewing.study import (
    StudyView,
    Window,
    decode_slice,
    edge_letters,
    pixel_spacing,
    read_study,
    to_gray,
    to_size,
)
from shardflow.viewing.typeface import (
    FAINT,
    INK,
    LETTER,
    PAPER,
    RULE,
    Mark,
    Typeface,
    draw_legend,
    draw_lines,
    lay_out,
    png_of,
    tag,
)

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

_REPORT, _ALIGNMENT, _ANNOTATIONS = "report.json", "alignment.json", "annotations.json"
_MAX_TILES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A marked region on one slice."""

    box: tuple[float, float, float, float]
    """First column, first row, last column, last row; edges of pixels, pixel 0 from 0 to 1."""
    label: str
    polygons: tuple[tuple[float, ...], ...] = ()
    """Outlines ``x, y, x, y, ...`` in the same pixels; the box is drawn where there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingTile:
    """One slice of a finding."""

    index: int
    """Place in the series."""
    number: int | None
    """InstanceNumber."""
    weight: float
    pixels: NDArray[Any]
    outlines: tuple[Outline, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingRow:
    """A finding and the slices that show it best."""

    entity: int
    series: dict[str, Any]
    entry: dict[str, Any]
    """Of ``alignment.json``; of several series the most confident one."""
    num_entries: int
    """Series that the finding is placed in."""
    tiles: tuple[FindingTile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingsView:
    """A report with the findings to display."""

    study: StudyView
    text: str
    report: dict[str, Any]
    """``report.json``."""
    rows: tuple[FindingRow, ...]
    num_left_out: int
    """Aligned findings that are not drawn."""
    unaligned: Mapping[int, str]
    """Finding to the reason why no slice shows it."""
    threshold: float
    is_stored: bool
    """Whether the dataset holds the alignment; if not, it was computed here with the default rules."""


def read_findings(dataset: Dataset, row: int, *, num_findings: int = 8) -> FindingsView:
    """Read a study's findings; holds a few slices of each.

    Args:
        dataset: The dataset.
        row: Row in the samples table.
        num_findings: How many findings to show at most, in the report's order.

    Raises:
        ConfigError: The study has no report, or none is stored of what it says and it cannot be read here.
        FormatError: A field is not what it should be.
    """
    view = read_study(dataset, row, num_slices=1)
    fields = dataset.sample_fields(row)[1]
    present = {one.name for one in fields}
    if view.report is None:
        raise ConfigError("--findings needs a sample with a report; this one has none. Leave the option out.")
    wanted = present & {STUDY_FIELD, REPORT_FIELD, _REPORT, _ALIGNMENT, _ANNOTATIONS}
    payloads = dataset.read_fields(row, wanted)
    text = payloads[REPORT_FIELD].decode("utf-8", errors="replace")
    study = _parse(payloads[STUDY_FIELD])
    annotations = _parse(payloads[_ANNOTATIONS]) if _ANNOTATIONS in payloads else None
    is_stored = _REPORT in payloads and _ALIGNMENT in payloads
    if is_stored:
        report, aligned = _parse(payloads[_REPORT]), _parse(payloads[_ALIGNMENT])
    else:
        report, aligned = _read_here(text, study, annotations)
    best: dict[int, dict[str, Any]] = {}
    counts: dict[int, int] = {}
    for entry in aligned["entities"]:
        number = entry["entity"]
        counts[number] = counts.get(number, 0) + 1
        if number not in best or entry["confidence"] > best[number]["confidence"]:
            best[number] = entry
    chosen = sorted(best, key=lambda number: report["entities"][number]["span"])
    names = {one["series"]: dataset.slice_names(row, one["series"]) for one in best.values()}
    rows = []
    for number in chosen[:num_findings]:
        entry = best[number]
        series = study["series"][entry["series"]]
        rows.append(
            FindingRow(
                entity=number,
                series=series,
                entry=entry,
                num_entries=counts[number],
                tiles=_tiles(dataset, row, entry, series, names[entry["series"]], annotations),
            )
        )
    return FindingsView(
        study=view,
        text=text,
        report=report,
        rows=tuple(rows),
        num_left_out=len(chosen) - len(rows),
        unaligned={one["entity"]: one["reason"] for one in aligned["unaligned"]},
        threshold=aligned["threshold"],
        is_stored=is_stored,
    )


def _tiles(
    dataset: Dataset,
    row: int,
    entry: Mapping[str, Any],
    series: Mapping[str, Any],
    names: Sequence[str],
    annotations: Mapping[str, Any] | None,
) -> tuple[FindingTile, ...]:
    """Read the best slice, and the first and last one of the finding."""
    weights = dict(zip(entry["slices"], entry["weights"], strict=True))
    best = min(weights, key=lambda place: (-weights[place], place))
    reach = {entry["slices"][0], best, entry["slices"][-1]}
    places = sorted(reach, key=lambda place: (place != best, place))[:_MAX_TILES]
    payloads = dataset.read_fields(row, {names[place] for place in places})
    numbers = series.get("instance_numbers") or []
    return tuple(
        FindingTile(
            index=place,
            number=numbers[place] if place < len(numbers) else None,
            weight=weights[place],
            pixels=decode_slice(names[place], payloads[names[place]]),
            outlines=_outlines(annotations, entry["series"], place),
        )
        for place in sorted(places)
    )


def _outlines(annotations: Mapping[str, Any] | None, series: int, place: int) -> tuple[Outline, ...]:
    if annotations is None:
        return ()
    found = []
    for one in annotations["rois"]:
        if one["series"] != series:
            continue
        polygons = one.get("polygons") or [[] for _ in one["slices"]]
        found += [
            Outline(
                box=tuple(part["box_px"]),
                label=str(one.get("label") or ""),
                polygons=tuple(map(tuple, drawn)),
            )
            for part, drawn in zip(one["slices"], polygons, strict=False)
            if part["slice"] == place and part.get("box_px")
        ]
    return tuple(found)


def _read_here(
    text: str, study: Mapping[str, Any], annotations: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the report and align it, for datasets that were packed without."""
    try:
        from shardflow.reports import ReportReader
        from shardflow.reports.alignment.aligning import align
        from shardflow.reports.alignment.evidence import AlignmentRules
    except ModuleNotFoundError as error:
        if error.name != "ahocorasick":
            raise
        raise ConfigError(
            "--findings needs pyahocorasick for a dataset that holds no alignment; install the extra: pip "
            "install 'shardflow[pack]'."
        ) from None
    report = ReportReader().read(text).to_json()
    return report, align(study, report, annotations, AlignmentRules(), text=text)


def _parse(payload: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(payload)
    except ValueError:
        raise FormatError(
            "a field of the sample that ends in .json holds no JSON; verify the dataset."
        ) from None
    return found


_MARGIN: Final = 28
_TEXT_WIDTH: Final = 690
_FACTS_WIDTH: Final = 280
_TILE: Final = 232
_GAP: Final = 8
_WIDTH: Final = 3 * _MARGIN + _TEXT_WIDTH + _FACTS_WIDTH + 3 * (_TILE + _GAP)
_MAX_LINES: Final = 90
_OUTLINE, _BAR, _LOW_BAR = "#ffd75e", "#0072b2", "#a8b3bd"

_RULES: Final[Mapping[str, str]] = {
    "E1": "series and image named",
    "E2": "image named, series left open",
    "E3": "region marked as this finding",
    "E4": "region marked in this place",
    "E5": "outline of the organ",
    "E6": "view of the whole part",
    "E7": "usual level of this anatomy",
}
_CHANGES: Final[Mapping[str, str]] = {
    "disjoint": "other evidence disagrees",
    "other_plane": "another plane is named",
    "other_side": "the sides differ",
    "other_size": "the sizes differ",
    "same_finding": "named where the report says it again",
    "uncertain": "left open by the report",
}

_EXPLAINED: Final = (
    "Bar: confidence; the tick is the threshold. Blue frame: the best slice, beside the first and last slice "
    "of the finding. Yellow: regions marked in the dataset."
)


def render_findings(view: FindingsView, *, window: Window | None = None, font: Path | None = None) -> bytes:
    """Draw a report with its findings and the slices that show them.

    Args:
        view: From `read_findings`.
        window: Values shown black and white, in the series' unit; each series' ``display_range`` by default.
        font: A font file for the text, preferred to those of the system.

    Returns:
        A PNG file. The same study and fonts give the same bytes.

    Raises:
        ConfigError: Pillow is missing, or the font file cannot be read.
    """
    body, small, title = Typeface(18, font), Typeface(14, font), Typeface(26, font)
    from PIL import Image, ImageDraw

    lines = lay_out(view.text.strip("\n"), body, _TEXT_WIDTH)
    cut = max(0, len(lines) - _MAX_LINES)
    lines = lines[:_MAX_LINES]
    top = _MARGIN + title.line_height + small.line_height + 14
    text_height = 70 + len(lines) * body.line_height
    rows_height = max(1, len(view.rows)) * (_TILE + 22)
    size = (_WIDTH, top + max(text_height, rows_height) + 3 * small.line_height + _MARGIN)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)

    title.draw(
        draw, (_MARGIN, _MARGIN - 6), f"What the report says, and where  -  {view.study.place}", fill=INK
    )
    small.draw(draw, (_MARGIN, _MARGIN + title.line_height), _summary(view), fill=FAINT)
    if view.study.generated:
        body.draw_badge(draw, view.study.generated, right=size[0] - _MARGIN, top=_MARGIN - 6)

    legend = draw_legend(draw, small, (_MARGIN, top), _TEXT_WIDTH)
    shift = len(view.text) - len(view.text.lstrip("\n"))
    numbers = {row.entity: number for number, row in enumerate(view.rows, 1)}
    draw_lines(
        draw,
        body,
        small,
        (_MARGIN, top + legend + 10),
        lines,
        _marks(view, numbers, shift),
        [_moved(one["header"], shift) for one in view.report["sections"]],
        [_moved(one["span"], shift) for one in view.report["mentions"]],
    )
    left = 2 * _MARGIN + _TEXT_WIDTH
    draw.line(
        (left - _MARGIN // 2, top, left - _MARGIN // 2, size[1] - 3 * small.line_height), fill=RULE, width=2
    )
    if not view.rows:
        body.draw(draw, (left, top), "No finding of this report is placed on an image.", fill=FAINT)
    for number, row in enumerate(view.rows, 1):
        y = top + (number - 1) * (_TILE + 22)
        _draw_facts(draw, view, row, number, (left, y), body, small)
        _draw_tiles(sheet, row, (left + _FACTS_WIDTH, y), window, small)
        if number < len(view.rows):
            draw.line((left, y + _TILE + 10, size[0] - _MARGIN, y + _TILE + 10), fill=RULE, width=1)
    _draw_footer(draw, view, cut, small, (_MARGIN, size[1] - 2 * small.line_height - _MARGIN // 2))
    return png_of(sheet)


def _summary(view: FindingsView) -> str:
    accepted = sum(row.entry["confidence"] > view.threshold for row in view.rows)
    said = len(view.report["entities"])
    parts = [
        f"{said} {'finding' if said == 1 else 'findings'} named",
        f"{len(view.rows) + view.num_left_out} placed on images",
        f"{accepted} of those shown above {view.threshold:g}",
        view.study.sample_key,
    ]
    return "   |   ".join(parts)


def _marks(view: FindingsView, numbers: Mapping[int, int], shift: int) -> list[Mark]:
    return [
        Mark(_moved(one["span"], shift), one["assertion"], numbers.get(number))
        for number, one in enumerate(view.report["entities"])
    ]


def _moved(span: Any, shift: int) -> tuple[int, int]:
    return span[0] - shift, span[1] - shift


def _draw_facts(
    draw: ImageDraw,
    view: FindingsView,
    row: FindingRow,
    number: int,
    place: tuple[int, int],
    body: Typeface,
    small: Typeface,
) -> None:
    """Write the finding, its confidence and the reasons beside the slices."""
    x, y = place
    entity, entry = view.report["entities"][row.entity], row.entry
    tag(draw, small, (x, y + 4), number, Mark(entity["span"], entity["assertion"]).style.line)
    name = " ".join(view.text[slice(*entity["span"])].split())
    for line in body.wrap(name, _FACTS_WIDTH - 44)[:2]:
        body.draw(draw, (x + 26, y), line, fill=INK)
        y += body.line_height
    about = ", ".join(
        part
        for part in (
            {"L": "left", "R": "right", "B": "both sides"}.get(entity["laterality"], ""),
            (entity["anatomy"] or {}).get("name", ""),
            " x ".join(f"{value:g}" for value in entity["size_mm"]) + " mm" if entity["size_mm"] else "",
        )
        if part
    )
    for line in small.wrap(about, _FACTS_WIDTH - 26)[:2] if about else ():
        small.draw(draw, (x, y), line, fill=FAINT)
        y += small.line_height
    y += 6
    _draw_confidence(draw, small, (x, y), entry["confidence"], view.threshold)
    y += small.line_height + 12
    for line in _reasons(row):
        for part in small.wrap(line, _FACTS_WIDTH - 18)[:2]:
            if y > place[1] + _TILE - small.line_height:
                return
            small.draw(draw, (x, y), part, fill=FAINT)
            y += small.line_height


def _reasons(row: FindingRow) -> list[str]:
    entry = row.entry
    first = {one["rule"]: one["confidence"] for one in reversed(entry["evidence"])}
    rules = dict.fromkeys(one["rule"] for one in entry["evidence"])
    lines = [f"{rule} {first[rule]:.2f}: {_RULES[rule]}" for rule in rules]
    marks = {mark for one in entry["evidence"] for mark in one.get("modifiers", ())}
    lines += [f"- {_CHANGES.get(mark, mark)}" for mark in sorted(marks | set(entry.get("modifiers", ())))]
    if row.num_entries > 1:
        lines.append(f"and in {row.num_entries - 1} more series")
    return lines


def _draw_confidence(
    draw: ImageDraw, small: Typeface, place: tuple[int, int], confidence: float, threshold: float
) -> None:
    """Draw a bar with a tick at the threshold; below it the bar is hollow."""
    x, y = place
    width = _FACTS_WIDTH - 110
    is_above = confidence > threshold
    draw.rectangle((x, y + 4, x + width, y + 16), outline=_LOW_BAR, width=1)
    filled = x + round(width * confidence)
    draw.rectangle((x, y + 4, filled, y + 16), fill=_BAR if is_above else _LOW_BAR)
    tick = x + round(width * threshold)
    draw.line((tick, y, tick, y + 20), fill=INK, width=2)
    small.draw(draw, (x + width + 8, y), f"{confidence:.2f}" + ("" if is_above else " (low)"), fill=INK)


def _draw_tiles(
    sheet: Image, row: FindingRow, place: tuple[int, int], window: Window | None, small: Typeface
) -> None:
    from PIL import Image, ImageDraw

    draw = ImageDraw.Draw(sheet)
    window = window or Window.of_series(row.series)
    height, width = _tile_size(row.series)
    best = max(row.tiles, key=lambda tile: tile.weight)
    letters = edge_letters(row.series)
    for number, tile in enumerate(row.tiles):
        x, y = place[0] + number * (_TILE + _GAP), place[1]
        left, upper = x + (_TILE - width) // 2, y + (_TILE - height) // 2
        draw.rectangle((x, y, x + _TILE - 1, y + _TILE - 1), fill="#000000")
        sheet.paste(Image.fromarray(to_size(to_gray(tile.pixels, window), height, width)), (left, upper))
        _draw_outlines(draw, tile, row.series, (left, upper, width, height))
        if tile is best:
            draw.rectangle((x, y, x + _TILE - 1, y + _TILE - 1), outline=_BAR, width=3)
        stated = row.series.get("series_number")
        source = f"series {stated}" if stated is not None else f"#{row.entry['series']}"
        image = f"image {tile.number}" if tile.number is not None else f"#{tile.index}"
        small.draw_outlined(draw, (x + 6, y + 3), f"{source}, {image}", "#ffffff")
        bottom = y + _TILE - small.line_height - 5
        small.draw_outlined(draw, (x + 6, bottom), f"weight {tile.weight:.2f}", "#ffffff")
        if letters.left:
            small.draw_outlined(draw, (x + 5, y + _TILE / 2 - 9), letters.left, LETTER)
            right = small.width(letters.right)
            small.draw_outlined(draw, (x + _TILE - right - 6, y + _TILE / 2 - 9), letters.right, LETTER)


def _tile_size(series: Mapping[str, Any]) -> tuple[int, int]:
    """Fit a slice into a square tile, in the proportions of the patient: height, width."""
    between_rows, between_columns = pixel_spacing(series) or (1.0, 1.0)
    high, wide = series["rows"] * between_rows, series["columns"] * between_columns
    scale = _TILE / max(high, wide)
    return max(1, round(high * scale)), max(1, round(wide * scale))


def _draw_outlines(
    draw: ImageDraw, tile: FindingTile, series: Mapping[str, Any], area: tuple[int, int, int, int]
) -> None:
    left, upper, width, height = area
    across, down = width / series["columns"], height / series["rows"]
    for outline in tile.outlines:
        x0, y0, x1, y1 = outline.box
        for points in outline.polygons:
            drawn = [
                (left + x * across, upper + y * down) for x, y in zip(points[::2], points[1::2], strict=False)
            ]
            if drawn:
                draw.line([*drawn, drawn[0]], fill=_OUTLINE, width=2)
        if outline.polygons:
            continue
        # With a small margin, so that the region stays visible.
        box = (left + x0 * across - 3, upper + y0 * down - 3, left + x1 * across + 2, upper + y1 * down + 2)
        draw.rectangle(box, outline=_OUTLINE, width=2)


def _draw_footer(
    draw: ImageDraw, view: FindingsView, cut: int, small: Typeface, place: tuple[int, int]
) -> None:
    notes = []
    if cut:
        notes.append(f"{cut} more lines of the report")
    if view.num_left_out:
        notes.append(f"{view.num_left_out} more findings with slices")
    if not view.is_stored:
        notes.append("the dataset holds no alignment: computed for this picture with the default rules")
    for number, line in enumerate([_EXPLAINED, *(["; ".join(notes)] if notes else [])]):
        small.draw(draw, (place[0], place[1] + number * small.line_height), line, fill=FAINT)
