"""The windows of lanes under a token budget: how many micro-batches each has, and which samples those hold.

The count of every window is known before the first step; what a window holds is worked out when it is opened.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardflow.epochs.buckets import BucketDraw
from shardflow.epochs.budget import LengthArray, TokenBudget, count_micro_batches, cut_micro_batches
from shardflow.epochs.lanes import Weigh
from shardflow.epochs.layout import SampleLayout
from shardflow.epochs.recent import Recent
from shardflow.epochs.windows import LaneWindows
from shardflow.errors import PlanError
from shardflow.seeds import derive

__all__ = ["BudgetWindow", "BudgetWindows", "weigh_tokens"]

Int64Array = npt.NDArray[np.int64]

# Memory for lengths that are looked at together, all windows side by side, at its largest.
_BLOCK_BYTES = 48 * 2**20
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_WORD = 2**64
_WORD_BITS = 62


@dataclass(frozen=True, slots=True, eq=False)
class BudgetWindow:
    """A window that is open; micro-batches are numbered as its lane walks them."""

    rows: Int64Array
    """``(n,)`` int64, the longest sample first."""
    starts: Int64Array
    """``(m,)`` int64, where each micro-batch begins in ``rows``."""
    stops: Int64Array
    """``(m,)`` int64, where it ends."""
    costs: Int64Array
    """``(m,)`` int64, the declared cost of each micro-batch."""
    tokens: Int64Array
    """``(m,)`` int64, tokens of each micro-batch, with its padding where the budget is padded."""
    used_tokens: Int64Array
    """``(m,)`` int64, tokens of each micro-batch without padding."""


class BudgetWindows:
    """The windows of one epoch, filled to a budget.

    Args:
        layout: The population, with the facts that the cost rule needs.
        windows: Its windows in this epoch.
        budget: The budget.
        seed: Run-level seed.
        epoch: Number of the epoch.

    Attributes:
        num_micros: ``(num_windows,)`` int64, micro-batches of each window.
        num_over_budget: Samples that are longer than the budget.

    Raises:
        PlanError: A fact is missing.
    """

    def __init__(
        self, layout: SampleLayout, windows: LaneWindows, budget: TokenBudget, *, seed: int, epoch: int
    ) -> None:
        self._layout, self._windows, self._budget = layout, windows, budget
        self._seed, self._epoch = seed, epoch
        self._draw = BucketDraw.of(seed, epoch)
        self._open: Recent[BudgetWindow] = Recent(2 * (len(windows.lane_windows) - 1) + 8)
        self.num_micros = np.zeros(windows.num_windows, np.int64)
        self._max_tokens = np.zeros(windows.num_windows, np.int64)
        self._max_samples = np.zeros(windows.num_windows, np.int64)
        self.num_over_budget = 0
        self._count()

    def open(self, lane: int, window: int) -> BudgetWindow:
        """Return what a window of a lane holds; the newest windows are kept."""
        return self._open.get((lane, window), lambda: self._materialise(lane, window))

    def _lengths(self, lane: int, window: int) -> npt.NDArray[np.uint32 | np.int64]:
        """Return the lengths of a window's samples, ``(n,)`` int64, in the order of the lane."""
        return _lengths_of(self._layout, self._budget, self._windows.pieces(lane, window), self._draw)

    def _count(self) -> None:
        lane_windows = self._windows.lane_windows
        places = [
            (lane, window)
            for lane in range(len(lane_windows) - 1)
            for window in range(int(lane_windows[lane + 1] - lane_windows[lane]))
        ]
        max_tokens = self._budget.max_tokens
        # How far a sample is over the budget does not matter, so short words do, which are sorted faster.
        word = np.dtype(np.uint16 if max_tokens < 2**16 - 1 else np.uint32)
        # All lengths twice while they are joined, then their sums where padding does not count.
        block = _BLOCK_BYTES // (
            2 * word.itemsize + (0 if self._budget.padded else np.dtype(np.uint32).itemsize)
        )
        parts: list[LengthArray] = []
        num_skipped: list[int] = []
        num_held, first = 0, 0
        for number, (lane, window) in enumerate(places, start=1):
            lengths = np.minimum(self._lengths(lane, window), max_tokens + 1).astype(word)
            lengths.sort()
            over = len(lengths) - int(np.searchsorted(lengths, word.type(max_tokens), side="right"))
            self.num_over_budget += over
            if self._budget.over_budget == "truncate":
                lengths[len(lengths) - over :] = max_tokens
            num_skipped.append(over if self._budget.over_budget == "skip" else 0)
            parts.append(lengths[::-1])
            num_held += len(lengths)
            if num_held >= block or number == len(places):
                self._count_block(first, number, parts, num_skipped)
                parts, num_skipped, num_held, first = [], [], 0, number

    def _count_block(self, first: int, last: int, parts: list[LengthArray], num_skipped: list[int]) -> None:
        sizes = np.array([len(part) for part in parts], np.int64)
        stops = np.cumsum(sizes)
        starts = stops - sizes + np.array(num_skipped, np.int64)
        lengths = np.concatenate(parts)
        parts.clear()
        found = count_micro_batches(lengths, starts, stops, self._budget)
        self.num_micros[first:last], self._max_tokens[first:last], self._max_samples[first:last] = found

    def _materialise(self, lane: int, window: int) -> BudgetWindow:
        budget, number = self._budget, int(self._windows.lane_windows[lane]) + window
        # Mixed first and then sorted stably, so that equal lengths meet others in every epoch.
        rows = self._windows.mix(lane, window)
        lengths = budget.cost.lengths(
            {name: self._layout.facts[name][rows] for name in budget.cost.used_facts()}, self._draw
        )
        if budget.over_budget == "truncate":
            np.minimum(lengths, budget.max_tokens, out=lengths)
        order = _longest_first(lengths)
        lengths = lengths[order]
        skipped = budget.over_budget == "skip"
        first = int(np.count_nonzero(lengths > budget.max_tokens)) if skipped else 0
        rows, lengths = rows[order[first:]], lengths[first:]
        cuts = cut_micro_batches(
            lengths,
            max_tokens=int(self._max_tokens[number]),
            max_samples=int(self._max_samples[number]),
            padded=budget.padded,
        )
        count = int(self.num_micros[number])
        if len(cuts) - 1 != count:  # two ways to one number; they are tested against each other
            raise PlanError(f"a window must have {count} micro-batches, got {len(cuts) - 1}; this is a bug.")
        if not count:
            none = np.zeros(0, np.int64)
            return BudgetWindow(rows, none, none, none, none, none)
        sizes = np.diff(cuts)
        used = np.add.reduceat(lengths, cuts[:-1])
        costs = budget.cost.costs(lengths)
        if budget.padded:
            tokens, costs = sizes * lengths[cuts[:-1]], sizes * costs[cuts[:-1]]
        else:
            tokens, costs = used, np.add.reduceat(costs, cuts[:-1])
        walk = self._walk(lane, window, count)
        return BudgetWindow(rows, cuts[:-1][walk], cuts[1:][walk], costs[walk], tokens[walk], used[walk])

    def _walk(self, lane: int, window: int, count: int) -> Int64Array:
        """Return the order in which a lane walks the micro-batches of a window.

        Multiples of the golden ratio: any stretch of the walk holds long and short micro-batches in nearly
        the share that the whole window has them, so a round may end inside a window.
        """
        start = derive(self._seed, "window-walk", self._epoch, lane, window)
        words = np.arange(1, count + 1, dtype=np.uint64)
        np.multiply(words, np.uint64(_GOLDEN_RATIO), out=words)
        np.add(words, np.uint64(start % _WORD), out=words)
        return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def _longest_first(lengths: Int64Array) -> Int64Array:
    """Return the stable order by falling length; a sort of single words is ten times faster than argsort."""
    bits, longest = len(lengths).bit_length(), int(lengths.max())
    if longest.bit_length() + bits > _WORD_BITS:
        return np.argsort(-lengths, kind="stable")
    words = ((longest - lengths) << bits) | np.arange(len(lengths))
    words.sort()
    order: Int64Array = words & ((1 << bits) - 1)
    return order


def weigh_tokens(layout: SampleLayout, budget: TokenBudget) -> Weigh:
    """Return what gives the tokens of rows."""

    def weigh(start: int, stop: int) -> Int64Array:
        return _lengths_of(layout, budget, [(start, stop)]).astype(np.int64, copy=False)

    return weigh


def _lengths_of(
    layout: SampleLayout, budget: TokenBudget, pieces: list[tuple[int, int]], draw: BucketDraw | None = None
) -> npt.NDArray[np.uint32 | np.int64]:
    facts = {}
    for name in budget.cost.used_facts():
        column = layout.facts.get(name)
        if column is None:
            raise PlanError(
                f"the samples must have the fact {name!r} for the cost rule, got {sorted(layout.facts)} "
                f"(sample layout)."
            )
        # Slices of a memmap are three times as slow to make; a subset's column is no array.
        plain = np.asarray(column) if isinstance(column, np.ndarray) else column
        parts = [plain[start:stop] for start, stop in pieces]
        facts[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return budget.cost.short_lengths(facts, draw)
