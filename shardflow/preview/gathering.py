"""Collect the facts of a dataset: the samples table and the ledger in blocks, studies in threads.

A whole pass reads every description and every slice of CT. A bounded one reads studies that stand for the
others (`choice`), so that it ends after seconds for any dataset; what was counted is part of the facts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardflow.preview.choice import lowest_rows
from shardflow.preview.facts import DatasetFacts
from shardflow.preview.study_facts import StudyOrder, read_facts
from shardflow.shards import Dataset
from shardflow.storage import ByteRange

__all__ = ["Bounds", "gather"]

# Studies handed to the threads at once: a bound on memory.
_STUDIES_AT_ONCE: Final = 256
_LEDGER_BYTES_AT_ONCE: Final = 4 << 20
# Canonical JSON sorts its keys, so that the three stand in one order, with nothing but the hash between them.
_REASON: Final = re.compile(
    rb'"kind":"([a-z0-9_]+)","outcome":"([a-z]+)","prev":"[0-9a-f]{64}","reason":"([A-Z0-9_]+)"'
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of a dataset a bounded pass reads."""

    num_studies: int = 20_000
    """Descriptions."""
    num_ct_slices: int = 256
    """Slices that the histogram of CT counts, dealt evenly to as many studies."""


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
        FormatError: Bytes of the dataset are not what its manifest says.
        StorageError: Reading failed.
    """
    facts = DatasetFacts()
    _count_samples(dataset, facts)
    _count_reasons(dataset, facts)
    orders = _orders(dataset, num_thumbnails, slices_per_series, bounds)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="shardflow-page") as pool:
        for start in range(0, len(orders), _STUDIES_AT_ONCE):
            part = orders[start : start + _STUDIES_AT_ONCE]
            for done, study in enumerate(pool.map(lambda order: read_facts(dataset, order), part), 1):
                facts.add(study)
                if progress is not None:
                    progress(start + done, len(orders))
    return facts


def _orders(
    dataset: Dataset, num_thumbnails: int, slices_per_series: int | None, bounds: Bounds | None
) -> _Orders:
    """Say what is read of which study."""
    samples = dataset.samples
    shown = frozenset(lowest_rows(samples, num_thumbnails, samples.column("num_slices") > 0))
    if bounds is None:
        return _Orders(range(samples.num_samples), None, shown, None, slices_per_series)
    described = lowest_rows(samples, bounds.num_studies)
    is_ct = samples.column("modality") == _modality(samples.modalities, "CT")
    counted = lowest_rows(samples, bounds.num_ct_slices, is_ct)
    each = max(bounds.num_ct_slices // max(len(counted), 1), 1)
    rows = sorted({*described, *counted, *shown})
    return _Orders(rows, frozenset(described), shown, frozenset(counted), each)


@dataclass(frozen=True, slots=True)
class _Orders:
    """What to read of each study, as a sequence that makes its items when they are asked for."""

    rows: range | list[int]
    described: frozenset[int] | None
    """None for all."""
    shown: frozenset[int]
    counted: frozenset[int] | None
    """Studies whose primary series counts in the histogram of CT; None for all series of all."""
    slices_per_series: int | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: slice) -> list[StudyOrder]:
        return [self._order(row) for row in self.rows[places]]

    def _order(self, row: int) -> StudyOrder:
        is_counted = self.counted is None or row in self.counted
        return StudyOrder(
            row=row,
            is_described=self.described is None or row in self.described,
            is_shown=row in self.shown,
            ct_slices=self.slices_per_series if is_counted else 0,
            is_primary_only=self.counted is not None,
        )


def _modality(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else -1


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
    facts.num_reports = int(np.count_nonzero(samples.column("text_bytes")))


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
