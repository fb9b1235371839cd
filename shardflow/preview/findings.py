"""Read one study for looking at its findings: what the report says, and the slices that show it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.preview.study import StudyView, read_study, slice_names
from shardflow.shards import Dataset, decode_array
from shardflow.shards.keys import REPORT_FIELD, STUDY_FIELD

__all__ = ["FindingRow", "FindingTile", "FindingsView", "Outline", "read_findings"]

_REPORT, _ALIGNMENT, _ANNOTATIONS = "report.json", "alignment.json", "annotations.json"
_MOST_TILES = 3


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
    """A finding and where it is thought to be best seen."""

    entity: int
    series: dict[str, Any]
    entry: dict[str, Any]
    """Of ``alignment.json``; of several series the most confident one."""
    num_entries: int
    """Series that the finding is placed in."""
    tiles: tuple[FindingTile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FindingsView:
    """A report with its findings, as far as it is to be looked at."""

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
    """Whether the dataset holds the alignment; else it was made for the picture, with the default rules."""


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
        raise ConfigError(
            "--findings must be given for a sample with a report, got one without; leave it out."
        )
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
    names = {one["series"]: slice_names(fields, one["series"]) for one in best.values()}
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
    """Read the best slice and one towards either end of what the finding reaches."""
    weights = dict(zip(entry["slices"], entry["weights"], strict=True))
    best = min(weights, key=lambda place: (-weights[place], place))
    reach = {entry["slices"][0], best, entry["slices"][-1]}
    places = sorted(reach, key=lambda place: (place != best, place))[:_MOST_TILES]
    payloads = dataset.read_fields(row, {names[place] for place in places})
    numbers = series.get("instance_numbers") or []
    tiles = []
    for place in sorted(places):
        pixels = decode_array(names[place].rpartition(".")[2], payloads[names[place]])
        tiles.append(
            FindingTile(
                index=place,
                number=numbers[place] if place < len(numbers) else None,
                weight=weights[place],
                pixels=pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else np.asarray(pixels),
                outlines=_outlines(annotations, entry["series"], place),
            )
        )
    return tuple(tiles)


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
        from shardflow.alignment import AlignmentRules, align
        from shardflow.reports import ReportReader
    except ModuleNotFoundError as error:
        if error.name != "ahocorasick":
            raise
        raise ConfigError(
            "--findings must have pyahocorasick for a dataset that holds no alignment, got none; install the "
            "extra: pip install 'shardflow[pack]'."
        ) from None
    report = ReportReader().read(text).to_json()
    return report, align(study, report, annotations, AlignmentRules(), text=text)


def _parse(payload: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(payload)
    except ValueError:
        raise FormatError(
            "the fields of a sample that end in .json must hold JSON, got others; verify the dataset."
        ) from None
    return found
