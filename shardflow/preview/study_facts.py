"""Read one study for the page: its description, a few slices of CT, a thumbnail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.preview.counts import count_hounsfield, hounsfield_bins
from shardflow.preview.facts import StudyFacts, Thumbnail
from shardflow.preview.planes import pixel_spacing
from shardflow.preview.study import choose_slices, generated_mark, made_by_synth, slice_names
from shardflow.preview.thumbnails import Picture, encode_thumbnail
from shardflow.shards import Dataset, FieldLocation, decode_array
from shardflow.shards.decoder import decode_field
from shardflow.shards.keys import REPORT_FIELD, STUDY_FIELD, thumbnail_field

__all__ = ["StudyOrder", "read_facts"]

_SIDE: Final = 168
"""Longer side of a thumbnail on the page, in pixels."""
# Slices read at once: a bound on memory.
_SLICES_AT_ONCE: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOrder:
    """What to read of a study."""

    row: int
    """Row in the samples table."""
    is_described: bool
    is_shown: bool
    ct_slices: int | None
    """Slices of a CT series to count, evenly spread; all if None."""
    is_primary_only: bool
    """Whether the primary series alone is counted."""


def read_facts(dataset: Dataset, order: StudyOrder) -> StudyFacts:
    """Read what was ordered of a study, checked.

    Raises:
        FormatError: Bytes are not what the index says, or a slice is no picture.
        StorageError: Reading failed.
    """
    row = order.row
    _, fields = dataset.sample_fields(row)
    present = {name.name for name in fields}
    texts = dataset.read_fields(row, present & {STUDY_FIELD, REPORT_FIELD})
    series = _series_of(texts.get(STUDY_FIELD))
    report = texts.get(REPORT_FIELD, b"")[:400].decode("utf-8", "replace")
    generated = made_by_synth(series or ()) or generated_mark(report)
    counts: NDArray[np.int64] | None = None
    num_slices = num_counted = 0
    for number, one in enumerate((series or [])[: 1 if order.is_primary_only else None]):
        if order.ct_slices != 0 and one.get("modality") == "CT" and one.get("unit") == "HU":
            names = slice_names(fields, number)
            num_slices += len(names)
            chosen = [names[i] for i in choose_slices(len(names), order.ct_slices or len(names))]
            num_counted += len(chosen)
            counts = hounsfield_bins() if counts is None else counts
            for name, payload in _read_slices(dataset, row, chosen):
                counts += count_hounsfield(decode_array(name.rpartition(".")[2], payload))
    thumbnail, is_burned_in = None, False
    if order.is_shown and series:
        is_burned_in = (series[0].get("technical") or {}).get("burned_in_annotation") == "YES"
        if not is_burned_in:
            thumbnail = _thumbnail(dataset, row, series[0], fields, generated)
    return StudyFacts(
        is_described=order.is_described,
        series=series,
        hounsfield=counts,
        num_ct_slices=num_slices,
        num_ct_slices_counted=num_counted,
        thumbnail=thumbnail,
        is_burned_in=is_burned_in,
        generated=generated,
    )


def _series_of(payload: bytes | None) -> list[dict[str, Any]] | None:
    try:
        series = json.loads(payload or b"")["series"]
    except (ValueError, KeyError, TypeError):
        return None
    return series if isinstance(series, list) and all(isinstance(one, dict) for one in series) else None


def _read_slices(dataset: Dataset, row: int, names: list[str]) -> Iterator[tuple[str, bytes]]:
    for start in range(0, len(names), _SLICES_AT_ONCE):
        yield from dataset.read_fields(row, names[start : start + _SLICES_AT_ONCE]).items()


def _thumbnail(
    dataset: Dataset, row: int, series: dict[str, Any], fields: list[FieldLocation], generated: str
) -> Thumbnail | None:
    names = slice_names(fields, 0)
    if not names:
        return None
    picture = _packed_thumbnail(dataset, row, fields) or _make_thumbnail(dataset, row, series, names)
    split, rows = next(item for item in dataset.splits.items() if row in item[1])
    return Thumbnail(
        place=f"{split}:{row - rows.start}",
        modality=str(series.get("modality") or ""),
        num_slices=len(names),
        jpeg=picture.jpeg,
        width=picture.width,
        height=picture.height,
        generated=generated,
    )


def _packed_thumbnail(dataset: Dataset, row: int, fields: list[FieldLocation]) -> Picture | None:
    """Take the thumbnail that stands beside the slices, unless it is much larger than the page shows it."""
    name = thumbnail_field(0)
    if all(field.name != name for field in fields):
        return None
    jpeg = dataset.read_fields(row, [name])[name]
    height, width = decode_field(name, jpeg).shape[:2]
    if not _SIDE // 2 <= max(height, width) <= 2 * _SIDE:
        return None
    scale = _SIDE / max(height, width)
    return Picture(jpeg, max(round(width * scale), 1), max(round(height * scale), 1))


def _make_thumbnail(dataset: Dataset, row: int, series: dict[str, Any], names: list[str]) -> Picture:
    name = names[len(names) // 2]
    pixels = decode_array(name.rpartition(".")[2], dataset.read_fields(row, [name])[name])
    window = series.get("display_range")
    return encode_thumbnail(pixels, pixel_spacing(series), window, max_side=_SIDE, may_grow=True)
