"""What the page about a dataset shows: sums over fixed bins, and a few pictures.

Nothing here grows with the dataset, and sums do not depend on the order in which studies are read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.preview.counts import Histogram, hounsfield_bins
from shardflow.preview.planes import pixel_spacing

__all__ = ["DatasetFacts", "StudyFacts", "Thumbnail"]

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
    jpeg: bytes
    width: int
    height: int
    generated: str
    """What is to be called generated, or an empty string."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFacts:
    """What one study adds."""

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
    """Everything the page shows, but for what stands in the manifest."""

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
    """Studies that the following counts are of; all of them, or those that `choice` chose."""
    num_not_described: int = 0
    """Of these, the ones whose ``study.json`` is missing or describes no study."""
    num_generated: int = 0
    body_parts: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    """Series by what is odd about them."""
    num_series: int = 0
    num_missing: int = 0
    """Slices that are missing from regular grids."""
    num_clipped: int = 0
    """Pixels that did not fit their dtype."""
    num_padding: int = 0
    """Pixels that the source calls padding."""
    spacing: Histogram = field(default_factory=lambda: Histogram.between(_SPACINGS_MM, " mm"))
    gap: Histogram = field(default_factory=lambda: Histogram.between(_GAPS_MM, " mm"))

    hounsfield: NDArray[np.int64] = field(default_factory=hounsfield_bins)
    num_ct_slices: int = 0
    """Slices of the CT series that were looked at."""
    num_ct_slices_counted: int = 0
    num_ct_studies_counted: int = 0
    thumbnails: list[Thumbnail] = field(default_factory=list)
    num_burned_in: int = 0
    """Thumbnails left out, because the source says that text is burned into the pixels."""

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
    """Return a count, or 0 where a dataset of others has none."""
    value = series.get(name)
    return value if isinstance(value, int) else 0


def _count_name(counter: Counter[str], name: str) -> None:
    """Count a name; a dataset of others may hold any number of different ones."""
    counter[name if name in counter or len(counter) < _CATEGORIES else _OTHER] += 1
