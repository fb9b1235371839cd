"""One study for display: its description, its report, and some slices of one series."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.format import Dataset, decode_array
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
