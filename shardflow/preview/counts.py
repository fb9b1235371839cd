"""Histograms over fixed bins: they take the same memory for any number of values, and merge in any order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HU_START", "HU_STEP", "HU_STOP", "Histogram", "count_hounsfield", "hounsfield_bins"]

HU_START, HU_STOP, HU_STEP = -1100, 3100, 20
"""Bins of the histogram of CT: from, to, and width, in HU."""


class Histogram:
    """Counts of values between edges; what lies below the first bin counts there, above in the last.

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
        pixels: Of any shape and number type; what is not a number is left out.

    Returns:
        As `hounsfield_bins`.
    """
    values = pixels.ravel()
    if values.dtype == np.int16:
        # Values are counted first, and the counts of each bin, which lie together, added up then.
        counts = np.roll(np.bincount(values.view(np.uint16), minlength=1 << 16), 1 << 15)
        starts = np.arange(HU_START, HU_STOP + 1, HU_STEP) + (1 << 15)
        return np.add.reduceat(counts, [0, *starts]).astype(np.int64)
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)].clip(-32768, 32767)
    num_bins = len(hounsfield_bins())
    places = np.floor_divide(values.astype(np.int32) - HU_START, HU_STEP) + 1
    return np.bincount(places.clip(0, num_bins - 1), minlength=num_bins).astype(np.int64)
