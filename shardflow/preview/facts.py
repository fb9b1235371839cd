"""Collect what the page about a dataset shows: one pass over all studies, in threads.

Only sums and the chosen thumbnails are kept, so memory does not grow with the dataset; sums do not depend
on the order in which threads finish, so the page is the same for any number of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.preview.counts import Histogram, count_hounsfield, hounsfield_bins
from shardflow.preview.planes import Window, pixel_spacing, to_grey, to_size
from shardflow.preview.study import choose_slices, generated_mark, slice_names
from shardflow.shards import Dataset, decode_array
from shardflow.shards.keys import REPORT_FIELD, STUDY_FIELD
from shardflow.storage import ByteRange

__all__ = ["DatasetFacts", "Thumbnail", "gather"]

_THUMBNAIL_SIDE = 168
_JPEG_QUALITY = 82
# Studies handed to the threads at once, slices read at once: bounds on memory.
_STUDIES_AT_ONCE = 256
_SLICES_AT_ONCE = 16
_LEDGER_BYTES_AT_ONCE = 4 << 20
_CATEGORIES = 1000
_OTHER = "(other)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Thumbnail:
    """The middle slice of a study's primary series."""

    place: str
    """Split and row, such as ``train:12``."""
    modality: str
    num_slices: int
    jpeg: bytes
    width: int
    height: int
    generated: str


@dataclass(kw_only=True, slots=True)
class DatasetFacts:
    """Everything the page shows, but for what stands in the manifest."""

    modalities: dict[str, Counter[str]] = field(default_factory=dict)
    """Modality of the primary series by split."""
    body_parts: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    """Series by what is odd about them."""
    reasons: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Inputs that are not packed: ``(outcome, reason, kind)``."""
    slices: Histogram = field(default_factory=lambda: Histogram.doubling(1024))
    series: Histogram = field(default_factory=lambda: Histogram.doubling(32))
    sides: Histogram = field(default_factory=lambda: Histogram.doubling(4096))
    text: Histogram = field(default_factory=lambda: Histogram.doubling(16384))
    spacing: Histogram = field(
        default_factory=lambda: Histogram.between(
            [0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 2, 3, 5], " mm"
        )
    )
    gap: Histogram = field(
        default_factory=lambda: Histogram.between([0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10], " mm")
    )
    hounsfield: NDArray[np.int64] = field(default_factory=hounsfield_bins)
    num_ct_slices: int = 0
    num_ct_slices_counted: int = 0
    thumbnails: list[Thumbnail] = field(default_factory=list)
    num_generated: int = 0
    num_burned_in: int = 0
    """Thumbnails left out, because the source says that text is burned into the pixels."""
    num_not_described: int = 0
    """Samples whose ``study.json`` is missing or describes no study."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _StudyFacts:
    series: list[dict[str, Any]] | None
    hounsfield: NDArray[np.int64] | None
    num_ct_slices: int
    num_counted: int
    thumbnail: Thumbnail | None
    burned_in: bool
    generated: str


def gather(
    dataset: Dataset,
    *,
    num_thumbnails: int = 24,
    slices_per_series: int | None = None,
    num_threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetFacts:
    """Collect the facts of a dataset.

    Args:
        dataset: The dataset.
        num_thumbnails: Studies to show, evenly spread over the dataset's rows.
        slices_per_series: Slices of each CT series that the HU histogram counts; all if not given.
        num_threads: Studies read at once.
        progress: Called with the number of studies done and of all.

    Raises:
        FormatError: Bytes of the dataset are not what its manifest says.
        StorageError: Reading failed.
    """
    facts = DatasetFacts()
    _count_samples(dataset, facts)
    _count_ledger(dataset, facts)
    total = dataset.samples.num_samples
    shown = set(choose_slices(total, num_thumbnails))

    def read(row: int) -> _StudyFacts:
        return _read_study(dataset, row, show=row in shown, slices_per_series=slices_per_series)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="shardflow-report") as pool:
        for start in range(0, total, _STUDIES_AT_ONCE):
            rows = range(start, min(start + _STUDIES_AT_ONCE, total))
            for row, study in zip(rows, pool.map(read, rows), strict=True):
                _add(facts, study)
                if progress is not None:
                    progress(row + 1, total)
    return facts


def _count_samples(dataset: Dataset, facts: DatasetFacts) -> None:
    """Count what the samples table says."""
    samples = dataset.samples
    for split, rows in dataset.splits.items():
        numbers = np.bincount(
            samples.column("modality")[rows.start : rows.stop], minlength=len(samples.modalities)
        )
        named = zip(samples.modalities, numbers.tolist(), strict=True)
        facts.modalities[split] = Counter({name or "(unknown)": count for name, count in named if count})
    facts.slices.add_all(samples.column("num_slices"))
    facts.series.add_all(samples.column("num_series"))
    facts.text.add_all(samples.column("text_bytes"))
    facts.sides.add_all(np.maximum(samples.column("rows"), samples.column("columns")))


def _count_ledger(dataset: Dataset, facts: DatasetFacts) -> None:
    entry = dataset.manifest.ledger
    if entry is None:
        return
    for line in _lines(dataset, entry.path, entry.num_bytes):
        row = json.loads(line)
        if row.get("reason"):
            facts.reasons[row["outcome"], row["reason"], row["kind"]] += 1


def _lines(dataset: Dataset, path: str, num_bytes: int) -> Iterator[bytes]:
    """Read a file line by line without holding it."""
    rest = b""
    for start in range(0, num_bytes, _LEDGER_BYTES_AT_ONCE):
        buffer = bytearray(min(_LEDGER_BYTES_AT_ONCE, num_bytes - start))
        dataset.store.read_ranges(path, [ByteRange(start, len(buffer))], [memoryview(buffer)])
        *lines, rest = (rest + buffer).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _read_study(dataset: Dataset, row: int, *, show: bool, slices_per_series: int | None) -> _StudyFacts:
    _, fields = dataset.sample_fields(row)
    present = {name.name for name in fields}
    texts = dataset.read_fields(row, present & {STUDY_FIELD, REPORT_FIELD})
    series = _series_of(texts.get(STUDY_FIELD))
    generated = (
        generated_mark(texts[REPORT_FIELD][:400].decode("utf-8", "replace")) if REPORT_FIELD in texts else ""
    )
    counts: NDArray[np.int64] | None = None
    num_slices = num_counted = 0
    for number, one in enumerate(series or ()):
        if one.get("modality") == "CT" and one.get("unit") == "HU":
            names = slice_names(fields, number)
            num_slices += len(names)
            chosen = [names[i] for i in choose_slices(len(names), slices_per_series or len(names))]
            num_counted += len(chosen)
            counts = hounsfield_bins() if counts is None else counts
            for name, payload in _read_slices(dataset, row, chosen):
                counts += count_hounsfield(decode_array(name.rpartition(".")[2], payload))
    thumbnail, burned_in = None, False
    if show and series:
        burned_in = (series[0].get("technical") or {}).get("burned_in_annotation") == "YES"
        names = slice_names(fields, 0)
        if names and not burned_in:
            thumbnail = _thumbnail(dataset, row, series[0], names, generated)
    return _StudyFacts(
        series=series,
        hounsfield=counts,
        num_ct_slices=num_slices,
        num_counted=num_counted,
        thumbnail=thumbnail,
        burned_in=burned_in,
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
    dataset: Dataset, row: int, series: dict[str, Any], names: list[str], generated: str
) -> Thumbnail:
    name = names[len(names) // 2]
    pixels = decode_array(name.rpartition(".")[2], dataset.read_fields(row, [name])[name])
    pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    between_rows, between_columns = pixel_spacing(series) or (1.0, 1.0)
    height, width = pixels.shape[0] * between_rows, pixels.shape[1] * between_columns
    scale = _THUMBNAIL_SIDE / max(height, width)
    height, width = max(round(height * scale), 8), max(round(width * scale), 8)
    grey = to_size(to_grey(pixels, Window.of_series(series)), height, width)
    # OpenCV writes colours as blue, green, red.
    ok, encoded = cv2.imencode(
        ".jpg", grey[..., ::-1] if grey.ndim == 3 else grey, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY]
    )
    if not ok:
        raise FormatError(f"a slice must be a picture of 8 bits, got another (samples row {row}).")
    split, rows = next(item for item in dataset.splits.items() if row in item[1])
    return Thumbnail(
        place=f"{split}:{row - rows.start}",
        modality=str(series.get("modality") or ""),
        num_slices=len(names),
        jpeg=encoded.tobytes(),
        width=width,
        height=height,
        generated=generated,
    )


def _add(facts: DatasetFacts, study: _StudyFacts) -> None:
    facts.num_generated += bool(study.generated)
    facts.num_burned_in += study.burned_in
    facts.num_ct_slices += study.num_ct_slices
    facts.num_ct_slices_counted += study.num_counted
    if study.hounsfield is not None:
        facts.hounsfield += study.hounsfield
    if study.thumbnail is not None:
        facts.thumbnails.append(study.thumbnail)
    if study.series is None:
        facts.num_not_described += 1
        return
    for one in study.series:
        for flag in one.get("flags") or ():
            _count_name(facts.flags, str(flag))
    if study.series:
        primary = study.series[0]
        spacing, gap = pixel_spacing(primary), primary.get("slice_spacing_mm")
        facts.spacing.add(max(spacing) if spacing else None)
        facts.gap.add(float(gap) if gap else None)
        _count_name(facts.body_parts, str(primary.get("body_part") or "(unknown)"))


def _count_name(counter: Counter[str], name: str) -> None:
    """Count a name; a dataset of others may hold any number of different ones."""
    counter[name if name in counter or len(counter) < _CATEGORIES else _OTHER] += 1
