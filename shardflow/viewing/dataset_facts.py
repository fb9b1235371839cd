"""Facts of a whole dataset for its page: histograms over fixed bins, counts, and a few thumbnails.

Nothing grows with the dataset, and sums do not depend on the order in which studies are read. The samples
table and the ledger are read in blocks, studies in threads. A full pass reads every description and every CT
slice. A bounded one reads the studies whose keys hash lowest, so that it takes seconds for any dataset; the
facts record what was counted. That choice depends on the keys alone, so most of it stays when a dataset
grows.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format import Dataset, FieldLocation, decode_array
from shardflow.format.contents.pictures import picture_size
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD, thumbnail_field
from shardflow.format.samples import FACT_COLUMNS
from shardflow.seeds import derive
from shardflow.storage import ByteRange
from shardflow.viewing.study import (
    Picture,
    choose_slices,
    encode_thumbnail,
    generated_mark,
    made_by_synth,
    pixel_spacing,
    place_of,
)

if TYPE_CHECKING:
    from shardflow.format.samples import SamplesTable

HU_START, HU_STOP, HU_STEP = -1100, 3100, 20
"""Bins of the histogram of CT: from, to, and width, in HU."""


class Histogram:
    """Counts of values between edges; values below the first bin count there, above in the last.

    Args:
        edges: Lower edge of every bin, ascending.
        labels: Name of every bin.
    """

    def __init__(self, edges: Sequence[float], labels: Sequence[str]) -> None:
        self.edges = np.asarray(edges, np.float64)
        self.labels = tuple(labels)
        self.counts: NDArray[np.int64] = np.zeros(len(edges), np.int64)
        self.unknown = 0

    @classmethod
    def between(cls, edges: Sequence[float], unit: str = "") -> Histogram:
        """Make bins ``[a, b)`` named by their edges; the last one is open."""
        pairs = itertools.pairwise(edges)
        labels = [f"{low:g} to {high:g}{unit}" for low, high in pairs]
        return cls(edges, [*labels, f"{edges[-1]:g}{unit} or more"])

    @classmethod
    def doubling(cls, last: int) -> Histogram:
        """Make bins of integers 0, 1, 2, 3-4, 5-8, ... up to ``last``, a power of two."""
        edges, labels = [0, 1, 2], ["0", "1", "2"]
        low = 3
        while low <= last:
            edges.append(low)
            labels.append(f"{low}-{(low - 1) * 2}")
            low = (low - 1) * 2 + 1
        labels[-1] = f"{edges[-1]} or more"
        return cls(edges, labels)

    @property
    def total(self) -> int:
        """All values, without those that are unknown."""
        return int(self.counts.sum())

    def add(self, value: float | None) -> None:
        """Count one value; None is unknown."""
        if value is None:
            self.unknown += 1
        else:
            place = int(np.searchsorted(self.edges, value, side="right")) - 1
            self.counts[max(place, 0)] += 1

    def add_all(self, values: NDArray[Any]) -> None:
        """Count many values."""
        places = np.searchsorted(self.edges, values, side="right") - 1
        self.counts += np.bincount(np.maximum(places, 0), minlength=len(self.edges))


def hounsfield_bins() -> NDArray[np.int64]:
    """Return empty counts of the bins of CT, with one bin below and one above: ``(n + 2,)``."""
    return np.zeros((HU_STOP - HU_START) // HU_STEP + 2, np.int64)


def count_hounsfield(pixels: NDArray[Any]) -> NDArray[np.int64]:
    """Count the pixels of a slice in HU.

    Args:
        pixels: Of any shape and number type; NaN and infinities are left out.

    Returns:
        As `hounsfield_bins`.
    """
    values = pixels.ravel()
    if values.dtype == np.int16:
        # Count values first, then add up the counts of each bin, which are adjacent: the sign turned, codes
        # have the order of values.
        counts = np.bincount(values.view(np.uint16) ^ np.uint16(1 << 15), minlength=1 << 16)
        starts = np.arange(HU_START, HU_STOP + 1, HU_STEP) + (1 << 15)
        return np.add.reduceat(counts, [0, *starts]).astype(np.int64)
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)].clip(-32768, 32767)
    num_bins = len(hounsfield_bins())
    places = np.floor_divide(values.astype(np.int32) - HU_START, HU_STEP) + 1
    return np.bincount(places.clip(0, num_bins - 1), minlength=num_bins).astype(np.int64)


_ROWS_AT_ONCE: Final = 1 << 16
_WORD_BYTES: Final = 8


def lowest_rows(
    samples: SamplesTable, wanted: int, where: Callable[[slice], NDArray[np.bool_]] | None = None
) -> list[int]:
    """Choose samples.

    Args:
        samples: The samples table.
        wanted: How many at most.
        where: Returns which samples of a block of rows to choose from; all of them if not given.

    Returns:
        Their rows, ascending.
    """
    keys = samples.column("sample_key")
    rows: NDArray[np.int64] = np.empty(0, np.int64)
    hashes: NDArray[np.uint64] = np.empty(0, np.uint64)
    for part in _blocks(range(samples.num_samples)):
        block = np.arange(part.start, part.stop, dtype=np.int64)
        found = key_hashes(keys[part])
        is_lower = np.ones(len(block), bool) if where is None else where(part)
        if len(rows) == wanted:  # few are left to be sorted
            is_lower = is_lower & (found < hashes.max(initial=0))
        rows = np.concatenate([rows, block[is_lower]])
        hashes = np.concatenate([hashes, found[is_lower]])
        best = np.lexsort((rows, hashes))[:wanted]
        rows, hashes = rows[best], hashes[best]
    return sorted(rows.tolist())


def _blocks(rows: range) -> Iterator[slice]:
    """Cut rows into blocks, so that what is computed of a column is not as long as the column."""
    for start in range(rows.start, rows.stop, _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, rows.stop))


def key_hashes(keys: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash sample keys, ``(n,)`` byte strings; a key hashes the same in a column of any width."""
    num_words = max(-(-keys.dtype.itemsize // _WORD_BYTES), 1)
    words = np.ascontiguousarray(keys, f"S{num_words * _WORD_BYTES}").view("<u8").reshape(-1, num_words)
    hashes = np.full(len(keys), derive(0, "page-sample"), np.uint64)
    for place in range(num_words):
        word = words[:, place].astype(np.uint64)
        # Padding past a key's end changes nothing, so that a wider column hashes alike.
        hashes = np.where(word == 0, hashes, _mix(hashes ^ word))
    return hashes


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_CATEGORIES: Final = 1000
_OTHER: Final = "(other)"
_SPACINGS_MM: Final = (0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 2, 3, 5)
_GAPS_MM: Final = (0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Thumbnail:
    """The middle slice of a study's primary series."""

    place: str
    """Split and row, such as ``train:12``."""
    modality: str
    num_slices: int
    picture: Picture
    generated: str
    """Label of generated content, or an empty string."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFacts:
    """Facts of one study."""

    is_described: bool
    """Whether its description counts; a study may be read for a picture alone."""
    series: list[dict[str, Any]] | None
    """Of ``study.json``; None where that is missing or describes no study."""
    hounsfield: NDArray[np.int64] | None
    num_ct_slices: int
    num_ct_slices_counted: int
    thumbnail: Thumbnail | None
    is_burned_in: bool
    generated: str


@dataclass(kw_only=True, slots=True)
class DatasetFacts:
    """Everything the page shows that is not in the manifest."""

    modalities: dict[str, Counter[str]] = field(default_factory=dict)
    """Modality of the primary series by split."""
    reasons: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Inputs that are not packed: ``(outcome, reason, kind)``."""
    slices: Histogram = field(default_factory=lambda: Histogram.doubling(1024))
    series: Histogram = field(default_factory=lambda: Histogram.doubling(32))
    sides: Histogram = field(default_factory=lambda: Histogram.doubling(4096))
    text: Histogram = field(default_factory=lambda: Histogram.doubling(16384))
    num_reports: int = 0

    num_described: int = 0
    """Studies behind the following counts; all of them, or a choice by the hash of their keys."""
    num_not_described: int = 0
    """Of these, the ones whose ``study.json`` is missing or describes no study."""
    num_generated: int = 0
    body_parts: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    """Series by their flags."""
    num_series: int = 0
    num_missing: int = 0
    """Slices that are missing from regular grids."""
    num_clipped: int = 0
    """Pixels that did not fit their dtype."""
    num_padding: int = 0
    """Pixels marked as padding by the source."""
    spacing: Histogram = field(default_factory=lambda: Histogram.between(_SPACINGS_MM, " mm"))
    gap: Histogram = field(default_factory=lambda: Histogram.between(_GAPS_MM, " mm"))

    hounsfield: NDArray[np.int64] = field(default_factory=hounsfield_bins)
    num_ct_slices: int = 0
    """Slices of the CT series of the histogram."""
    num_ct_slices_counted: int = 0
    num_ct_studies_counted: int = 0
    thumbnails: list[Thumbnail] = field(default_factory=list)
    num_burned_in: int = 0
    """Thumbnails left out because the source marks text burned into the pixels."""

    def add(self, study: StudyFacts) -> None:
        """Add a study."""
        self.num_burned_in += study.is_burned_in
        if study.hounsfield is not None:
            self.hounsfield += study.hounsfield
            self.num_ct_slices += study.num_ct_slices
            self.num_ct_slices_counted += study.num_ct_slices_counted
            self.num_ct_studies_counted += 1
        if study.thumbnail is not None:
            self.thumbnails.append(study.thumbnail)
        if not study.is_described:
            return
        self.num_described += 1
        self.num_generated += bool(study.generated)
        if study.series is None:
            self.num_not_described += 1
            return
        for one in study.series:
            self._add_series(one)
        if study.series:
            primary = study.series[0]
            spacing, gap = pixel_spacing(primary), primary.get("slice_spacing_mm")
            self.spacing.add(max(spacing) if spacing else None)
            self.gap.add(float(gap) if isinstance(gap, int | float) and gap else None)
            _count_name(self.body_parts, str(primary.get("body_part") or "(unknown)"))

    def _add_series(self, series: dict[str, Any]) -> None:
        self.num_series += 1
        self.num_missing += _count_of(series, "num_missing")
        self.num_clipped += _count_of(series, "num_clipped")
        self.num_padding += _count_of(series, "num_padding")
        for flag in series.get("flags") or ():
            _count_name(self.flags, str(flag))


def _count_of(series: dict[str, Any], name: str) -> int:
    """Return a count, or 0 if another writer left it out."""
    value = series.get(name)
    return value if isinstance(value, int) else 0


def _count_name(counter: Counter[str], name: str) -> None:
    """Count a name; datasets of other writers may hold any number of different ones."""
    counter[name if name in counter or len(counter) < _CATEGORIES else _OTHER] += 1


_SIDE: Final = 168
"""Longer side of a thumbnail on the page, in pixels."""
# Slices read at once: a bound on memory.
_SLICES_AT_ONCE: Final = 16


def _read_facts(dataset: Dataset, scope: _Scope, row: int) -> StudyFacts:
    """Read the parts of a study that are in scope, checked.

    Raises:
        FormatError: Bytes do not match the index, or a slice is no picture.
        StorageError: Reading failed.
    """
    _, fields = dataset.sample_fields(row)
    present = {name.name for name in fields}
    texts = dataset.read_fields(row, present & {STUDY_FIELD, REPORT_FIELD})
    series = _series_of(texts.get(STUDY_FIELD))
    report = texts.get(REPORT_FIELD, b"")[:400].decode("utf-8", "replace")
    generated = made_by_synth(series or ()) or generated_mark(report)
    counts: NDArray[np.int64] | None = None
    num_slices = num_counted = 0
    for number in scope.ct_series(row, series or []):
        names = dataset.slice_names(row, number)
        num_slices += len(names)
        chosen = [names[i] for i in choose_slices(len(names), scope.slices_per_series or len(names))]
        num_counted += len(chosen)
        counts = hounsfield_bins() if counts is None else counts
        for start in range(0, len(chosen), _SLICES_AT_ONCE):
            payloads = dataset.read_fields(row, chosen[start : start + _SLICES_AT_ONCE])
            for name, payload in payloads.items():
                counts += count_hounsfield(decode_array(name.rpartition(".")[2], payload))
    thumbnail, is_burned_in = None, False
    if row in scope.shown and series:
        is_burned_in = (series[0].get("technical") or {}).get("burned_in_annotation") == "YES"
        if not is_burned_in:
            thumbnail = _thumbnail(dataset, row, series[0], fields, generated)
    return StudyFacts(
        is_described=scope.described is None or row in scope.described,
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


def _thumbnail(
    dataset: Dataset, row: int, series: dict[str, Any], fields: list[FieldLocation], generated: str
) -> Thumbnail | None:
    names = dataset.slice_names(row, 0)
    if not names:
        return None
    picture = _packed_thumbnail(dataset, row, fields) or _make_thumbnail(dataset, row, series, names)
    return Thumbnail(
        place=place_of(dataset, row),
        modality=str(series.get("modality") or ""),
        num_slices=len(names),
        picture=picture,
        generated=generated,
    )


def _packed_thumbnail(dataset: Dataset, row: int, fields: list[FieldLocation]) -> Picture | None:
    """Return the thumbnail stored beside the slices, unless its size is far from the page's."""
    name = thumbnail_field(0)
    if all(field.name != name for field in fields):
        return None
    jpeg = dataset.read_fields(row, [name])[name]
    size = picture_size(jpeg)
    if size is None:
        raise FormatError(f"{name} must be a JPEG, got other bytes; run `shardflow verify`.")
    height, width = size
    if not _SIDE // 2 <= max(height, width) <= 2 * _SIDE:
        return None
    scale = _SIDE / max(height, width)
    return Picture(jpeg, max(round(width * scale), 1), max(round(height * scale), 1))


def _make_thumbnail(dataset: Dataset, row: int, series: dict[str, Any], names: list[str]) -> Picture:
    name = names[len(names) // 2]
    pixels = decode_array(name.rpartition(".")[2], dataset.read_fields(row, [name])[name])
    window = series.get("display_range")
    return encode_thumbnail(pixels, pixel_spacing(series), window, max_side=_SIDE, may_grow=True)


# Studies handed to the threads at once: a bound on memory.
_STUDIES_AT_ONCE: Final = 256
_LEDGER_BYTES_AT_ONCE: Final = 4 << 20
# Canonical JSON sorts its keys, so the three are in one order, with nothing but the hash between them.
_REASON: Final = re.compile(
    rb'"kind":"([a-z0-9_]+)","outcome":"([a-z]+)","prev":"[0-9a-f]{64}","reason":"([A-Z0-9_]+)"'
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Amount of a dataset that a bounded pass reads."""

    num_studies: int = 20_000
    """Descriptions."""
    num_ct_slices: int = 256
    """Slices that the histogram of CT counts, spread evenly over as many studies."""


def gather(
    dataset: Dataset,
    *,
    num_thumbnails: int = 24,
    slices_per_series: int | None = None,
    bounds: Bounds | None = None,
    num_threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> DatasetFacts:
    """Collect the facts of a dataset.

    Args:
        dataset: The dataset.
        num_thumbnails: Studies to show at most.
        slices_per_series: Slices of each CT series that the HU histogram counts; all if not given.
        bounds: How much to read; everything if not given.
        num_threads: Studies read at once.
        progress: Called with the number of studies done and of all that are read.

    Raises:
        FormatError: Bytes of the dataset do not match its manifest.
        StorageError: Reading failed.
    """
    facts = DatasetFacts()
    _count_samples(dataset, facts)
    _count_reasons(dataset, facts)
    scope = _Scope.of(dataset, num_thumbnails, slices_per_series, bounds)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="shardflow-page") as pool:
        for start in range(0, len(scope.rows), _STUDIES_AT_ONCE):
            part = scope.rows[start : start + _STUDIES_AT_ONCE]
            for done, study in enumerate(pool.map(lambda row: _read_facts(dataset, scope, row), part), 1):
                facts.add(study)
                if progress is not None:
                    progress(start + done, len(scope.rows))
    return facts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scope:
    """The parts of the dataset that are read."""

    rows: range | list[int]
    described: frozenset[int] | None
    """Studies whose description counts; None for all."""
    shown: frozenset[int]
    """Studies with a thumbnail."""
    counted: frozenset[int] | None
    """Studies whose primary series counts in the histogram of CT; None for all series of all."""
    slices_per_series: int | None
    """Slices of a CT series to count, evenly spread; None for all."""

    @classmethod
    def of(
        cls, dataset: Dataset, num_thumbnails: int, slices_per_series: int | None, bounds: Bounds | None
    ) -> _Scope:
        samples = dataset.samples
        num_slices, modality = samples.column("num_slices"), samples.column("modality")
        shown = frozenset(lowest_rows(samples, num_thumbnails, lambda part: num_slices[part] > 0))
        if bounds is None:
            return cls(
                rows=range(samples.num_samples),
                described=None,
                shown=shown,
                counted=None,
                slices_per_series=slices_per_series,
            )
        described = lowest_rows(samples, bounds.num_studies)
        names = samples.modalities
        ct = names.index("CT") if "CT" in names else -1
        counted = lowest_rows(samples, bounds.num_ct_slices, lambda part: modality[part] == ct)
        return cls(
            rows=sorted({*described, *counted, *shown}),
            described=frozenset(described),
            shown=shown,
            counted=frozenset(counted),
            slices_per_series=max(bounds.num_ct_slices // max(len(counted), 1), 1),
        )

    def ct_series(self, row: int, series: list[dict[str, Any]]) -> Iterator[int]:
        """Yield the numbers of the series that the histogram of CT counts."""
        if self.counted is not None:
            series = series[:1] if row in self.counted else []
        if self.slices_per_series != 0:
            for number, one in enumerate(series):
                if one.get("modality") == "CT" and one.get("unit") == "HU":
                    yield number


def _count_samples(dataset: Dataset, facts: DatasetFacts) -> None:
    """Add the counts of the samples table."""
    samples = dataset.samples
    columns = {name: samples.column(name) for name in (*FACT_COLUMNS, "modality")}
    for split, rows in dataset.splits.items():
        numbers = np.zeros(len(samples.modalities), np.int64)
        for part in _blocks(rows):
            found = {name: column[part] for name, column in columns.items()}
            numbers += np.bincount(found["modality"], minlength=len(numbers))
            facts.slices.add_all(found["num_slices"])
            facts.series.add_all(found["num_series"])
            facts.text.add_all(found["text_bytes"])
            facts.sides.add_all(np.maximum(found["rows"], found["columns"]))
            facts.num_reports += int(np.count_nonzero(found["text_bytes"]))
        named = zip(samples.modalities, numbers.tolist(), strict=True)
        facts.modalities[split] = Counter({name or "(unknown)": count for name, count in named if count})


def _count_reasons(dataset: Dataset, facts: DatasetFacts) -> None:
    """Count the ledger's inputs that are not packed."""
    entry = dataset.manifest.ledger
    if entry is None:
        return
    for lines in _blocks_of_lines(dataset, entry.path, entry.num_bytes):
        for (kind, outcome, reason), count in Counter(_REASON.findall(lines)).items():
            facts.reasons[outcome.decode("ascii"), reason.decode("ascii"), kind.decode("ascii")] += count


def _blocks_of_lines(dataset: Dataset, path: str, num_bytes: int) -> Iterator[bytes]:
    """Read a file in blocks that end with a line, without holding it."""
    rest = b""
    for start in range(0, num_bytes, _LEDGER_BYTES_AT_ONCE):
        buffer = bytearray(min(_LEDGER_BYTES_AT_ONCE, num_bytes - start))
        dataset.store.read_ranges(path, [ByteRange(start, len(buffer))], [memoryview(buffer)])
        block = rest + buffer
        end = block.rfind(b"\n") + 1
        yield block[:end]
        rest = block[end:]
    yield rest
