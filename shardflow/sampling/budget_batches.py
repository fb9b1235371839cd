"""Micro-batches under a token budget: shuffle windows filled to the budget, and steps of equal cost.

`BudgetWindows` counts the micro-batches of every window before the first step; the contents of a window are
computed when it is opened.

`BudgetMicroBatches` orders them. Every lane gives the same number of micro-batches to a group of steps. They
are ranked by cost within their lane, a step takes neighboring ranks from all lanes, and the steps of the
group are permuted. The remainder is ranked as a whole. A rank opens the windows of its own lanes only.

Sequences of fixed length are packed by best-fit decreasing: a sample goes into the fullest sequence that has
room for it, longest samples first (Johnson et al., "Worst-case performance bounds for simple one-dimensional
packing algorithms", SIAM J. Comput. 3, 1974). Samples of equal length are interchangeable, so sequences are
filled in groups of equal content: the time depends on the number of distinct lengths, not of samples, and
only lengths decide.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import PlanError
from shardflow.sampling.budget import LengthArray, TokenBudget, count_micro_batches, cut_micro_batches
from shardflow.sampling.image_sizes import BucketDraw
from shardflow.sampling.lanes import Interleave, LaneWindows, Recent, Weigh
from shardflow.sampling.layout import SampleLayout
from shardflow.sampling.micro_batches import PADDING_ROW, MicroBatch, MicroBatches, frozen
from shardflow.sampling.permutation import Int64Array, golden_words, shuffled, sums
from shardflow.sampling.spec import BatchSpec
from shardflow.seeds import derive


@dataclass(frozen=True, slots=True)
class _Part:
    """Samples of one length in each sequence of a group, and those before them."""

    length: int
    """Number of the length among the distinct ones."""
    num_samples: int
    before: _Part | None


@dataclass(slots=True)
class _Group:
    """Sequences of equal content."""

    num_sequences: int
    num_free: int
    """Samples that each may still take."""
    content: _Part


def count_sequences(lengths: NDArray[Any], *, max_tokens: int, max_samples: int) -> int:
    """Return how many sequences `pack_sequences` makes of samples, ``(n,)`` descending."""
    values, counts = _distinct(lengths)
    return sum(one.num_sequences for one in _groups(values, counts, max_tokens, max_samples))


def pack_sequences(
    lengths: Int64Array, *, max_tokens: int, max_samples: int
) -> tuple[Int64Array, Int64Array]:
    """Pack samples into sequences.

    Args:
        lengths: ``(n,)`` integers, descending, each at least 1.
        max_tokens: Length of a sequence; a longer sample is alone.
        max_samples: Most samples of a sequence.

    Returns:
        order: ``(n,)`` int64, the samples in the order of the sequences.
        cuts: ``(m + 1,)`` int64, where each sequence begins in ``order``, and ``n``.
    """
    values, counts = _distinct(lengths)
    following = np.cumsum(counts) - counts
    order: list[Int64Array] = [np.zeros(0, np.int64)]
    sizes: list[Int64Array] = [np.zeros(0, np.int64)]
    for group in _groups(values, counts, max_tokens, max_samples):
        columns: list[Int64Array] = []
        part: _Part | None = group.content
        while part is not None:
            first, num = int(following[part.length]), group.num_sequences * part.num_samples
            columns.append(np.arange(first, first + num).reshape(group.num_sequences, part.num_samples))
            following[part.length] += num
            part = part.before
        members = np.concatenate(columns[::-1], axis=1)
        order.append(members.reshape(-1))
        sizes.append(np.full(group.num_sequences, members.shape[1], np.int64))
    cuts = np.zeros(sum(map(len, sizes)) + 1, np.int64)
    np.cumsum(np.concatenate(sizes), out=cuts[1:])
    return np.concatenate(order), cuts


def _distinct(lengths: NDArray[Any]) -> tuple[Int64Array, Int64Array]:
    """Return the distinct lengths, descending, and how many samples have each."""
    starts = np.append(0, np.flatnonzero(np.diff(lengths)) + 1)[: len(lengths)]
    counts = np.diff(np.append(starts, len(lengths)))
    return lengths[starts].astype(np.int64), counts.astype(np.int64)


def _groups(values: Int64Array, counts: Int64Array, max_tokens: int, max_samples: int) -> list[_Group]:
    """Fill sequences with the samples of each length, groups of sequences at a time."""
    open_groups: dict[int, list[_Group]] = {}
    rooms: list[int] = []  # ascending, each with a group
    done: list[_Group] = []

    def keep(group: _Group, room: int) -> None:
        if not group.num_sequences:
            return
        if room <= 0 or not group.num_free:
            done.append(group)
            return
        if room not in open_groups:
            insort(rooms, room)
        open_groups.setdefault(room, []).append(group)

    for number, (length, count) in enumerate(zip(values.tolist(), counts.tolist(), strict=True)):
        left = count
        while left:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                each = min(max(1, max_tokens // length), max_samples)
                num_full, rest = divmod(left, each)
                keep(
                    _Group(num_full, max_samples - each, _Part(number, each, None)),
                    max_tokens - each * length,
                )
                if rest:
                    keep(_Group(1, max_samples - rest, _Part(number, rest, None)), max_tokens - rest * length)
                break
            room = rooms[at]
            group = open_groups[room].pop()
            if not open_groups[room]:
                del open_groups[room], rooms[at]
            # A sequence stays the fullest with room while it takes samples of this length.
            each = min(room // length, group.num_free, left)
            num = min(group.num_sequences, left // each)
            keep(_Group(group.num_sequences - num, group.num_free, group.content), room)
            filled = _Group(num, group.num_free - each, _Part(number, each, group.content))
            keep(filled, room - each * length)
            left -= num * each
    for room in rooms:
        done += open_groups[room]
    return done


# Limit on the lengths of windows that are counted together.
_BLOCK_BYTES = 48 * 2**20
_WORD_BITS = 62


@dataclass(frozen=True, slots=True, eq=False)
class BudgetWindow:
    """An open window; its micro-batches are numbered in the order of the lane."""

    rows: Int64Array
    """``(n,)`` int64, the longest sample first, or micro-batch after micro-batch."""
    starts: Int64Array
    """``(m,)`` int64, where each micro-batch begins in ``rows``."""
    stops: Int64Array
    """``(m,)`` int64, where it ends."""
    costs: Int64Array
    """``(m,)`` int64, the declared cost of each micro-batch."""
    tokens: Int64Array
    """``(m,)`` int64, tokens of each micro-batch, with padding if the budget is padded."""
    used_tokens: Int64Array
    """``(m,)`` int64, tokens of each micro-batch without padding."""


class BudgetWindows:
    """The shuffle windows of one epoch, filled to a budget.

    Args:
        layout: The population, with the facts that the cost rule needs.
        windows: Its windows in this epoch.
        budget: The budget.
        seed: Run-level seed.
        epoch: Number of the epoch.

    Attributes:
        num_micros: ``(num_windows,)`` int64, micro-batches of each window.
        num_over_budget: Samples longer than the budget.

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
        """Return the contents of a window; the last windows used are kept."""
        return self._open.get((lane, window), lambda: self._materialize(lane, window))

    def _count(self) -> None:
        lane_windows = self._windows.lane_windows
        places = [
            (lane, window)
            for lane in range(len(lane_windows) - 1)
            for window in range(int(lane_windows[lane + 1] - lane_windows[lane]))
        ]
        max_tokens = self._budget.max_tokens
        # The excess of a sample over the budget does not matter, so short words, which sort faster, suffice.
        word = np.dtype(np.uint16 if max_tokens < 2**16 - 1 else np.uint32)
        # All lengths twice while they are concatenated, and their sums if padding does not count.
        block = _BLOCK_BYTES // (
            2 * word.itemsize + (0 if self._budget.padded else np.dtype(np.uint32).itemsize)
        )
        parts: list[LengthArray] = []
        num_skipped: list[int] = []
        num_held, first = 0, 0
        for number, (lane, window) in enumerate(places, start=1):
            pieces = self._windows.pieces(lane, window)
            lengths = _lengths_of(self._layout, self._budget, pieces, self._draw)
            lengths = np.minimum(lengths, max_tokens + 1).astype(word)
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
        budget = self._budget
        if budget.fit == "best":
            limits = {"max_tokens": budget.max_tokens, "max_samples": budget.max_samples}
            for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True), first):
                self.num_micros[number] = count_sequences(lengths[start:stop], **limits)
            return
        found = count_micro_batches(lengths, starts, stops, budget)
        self.num_micros[first:last], self._max_tokens[first:last], self._max_samples[first:last] = found

    def _materialize(self, lane: int, window: int) -> BudgetWindow:
        budget, number = self._budget, int(self._windows.lane_windows[lane]) + window
        # Shuffled first and then sorted stably, so that samples of equal length are grouped anew in every
        # epoch.
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
        if budget.fit == "best":
            order, cuts = pack_sequences(
                lengths, max_tokens=budget.max_tokens, max_samples=budget.max_samples
            )
            rows, lengths = rows[order], lengths[order]
        else:
            cuts = cut_micro_batches(
                lengths,
                max_tokens=int(self._max_tokens[number]),
                max_samples=int(self._max_samples[number]),
                padded=budget.padded,
            )
        count = int(self.num_micros[number])
        if len(cuts) - 1 != count:  # two implementations, which tests compare
            raise PlanError(
                f"a window has {len(cuts) - 1} micro-batches, but {count} were counted; this is a bug."
            )
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
        order = self._order(lane, window, count)
        return BudgetWindow(rows, cuts[:-1][order], cuts[1:][order], costs[order], tokens[order], used[order])

    def _order(self, lane: int, window: int, count: int) -> Int64Array:
        """Return the order of the micro-batches of a window in its lane.

        By multiples of the golden ratio: any consecutive micro-batches are long and short in nearly the same
        proportion as in the whole window, so a group may end inside a window.
        """
        start = derive(self._seed, "window-walk", self._epoch, lane, window)
        return np.argsort(golden_words(count, start), kind="stable").astype(np.int64, copy=False)


def _longest_first(lengths: Int64Array) -> Int64Array:
    """Return the stable order by descending length; sorting single words is ten times as fast as argsort."""
    bits, longest = len(lengths).bit_length(), int(lengths.max())
    if longest.bit_length() + bits > _WORD_BITS:
        return np.argsort(-lengths, kind="stable")
    words = ((longest - lengths) << bits) | np.arange(len(lengths))
    words.sort()
    order: Int64Array = words & ((1 << bits) - 1)
    return order


def weigh_tokens(layout: SampleLayout, budget: TokenBudget) -> Weigh:
    """Return a function that returns the tokens of a range of rows."""

    def weigh(start: int, stop: int) -> Int64Array:
        return _lengths_of(layout, budget, [(start, stop)]).astype(np.int64, copy=False)

    return weigh


def _lengths_of(
    layout: SampleLayout, budget: TokenBudget, pieces: list[tuple[int, int]], draw: BucketDraw | None = None
) -> LengthArray:
    facts = {}
    for name in budget.cost.used_facts():
        column = layout.facts.get(name)
        if column is None:
            raise PlanError(
                f"the cost rule needs the fact {name!r} of the samples, but the sample layout has only "
                f"{sorted(layout.facts)}."
            )
        # Slicing a memmap takes three times as long; the column of a subset is no array.
        plain = np.asarray(column) if isinstance(column, np.ndarray) else column
        parts = [plain[start:stop] for start, stop in pieces]
        facts[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return budget.cost.short_lengths(facts, draw)


class BudgetMicroBatches(MicroBatches):
    """The micro-batches of an epoch in the order of its steps. Safe to share between threads.

    Args:
        windows: The lanes in this epoch.
        filled: Their windows, filled to the budget.
        spec: How steps are formed.
        seed: Run-level seed.
        epoch: Number of the epoch.

    Attributes:
        num_steps: Steps of the epoch.
        num_micros: Micro-batches that hold samples, each counted once.
        num_padding_micros: Micro-batches without samples that fill the last step (tail ``mask``).

    Raises:
        PlanError: No step can be formed.
    """

    def __init__(
        self, windows: LaneWindows, filled: BudgetWindows, spec: BatchSpec, *, seed: int, epoch: int
    ) -> None:
        self._filled, self._spec, self._seed, self._epoch = filled, spec, seed, epoch
        self._lane_windows = windows.lane_windows
        # Micro-batches before each window, over all lanes.
        self._before = sums(filled.num_micros)
        per_lane = np.diff(self._before[self._lane_windows])
        self.num_micros = int(self._before[-1])
        mean = max(1, self.num_micros // max(1, windows.num_windows))
        per_step = spec.micro_batches_per_step
        self.interleave = Interleave.of(per_lane, per_step, group_micros=mean)
        full, rest = divmod(self.num_micros, per_step)
        self.num_padding_micros = per_step - rest if rest and spec.tail == "mask" else 0
        self.num_steps = full + bool(rest and spec.tail != "drop")
        if not self.num_steps:
            raise PlanError(
                f"num_steps must be at least 1, got 0 (tail {spec.tail!r}: {self.num_micros} micro-batches "
                f"under the token budget do not fill one step of {per_step}); choose tail 'repeat' or "
                f"'mask', a smaller budget, or at most {max(1, self.num_micros)} micro_batches_per_step."
            )
        self._remainder_bounds = self._cut_remainder(mean)
        self._orders: Recent[Int64Array] = Recent(2 * self.interleave.num_lanes + 8)

    def micro_batch(self, number: int) -> MicroBatch:
        """Return micro-batch ``number`` of the epoch."""
        if number >= self.num_micros:
            if self._spec.tail == "mask":
                return self.padding_micro_batch()
            number %= self.num_micros
        window, place = self._find(number)
        rows = window.rows[int(window.starts[place]) : int(window.stops[place])]
        return MicroBatch(*frozen(rows, np.ones(len(rows), np.uint8)))

    def cost(self, number: int) -> tuple[int, int, int]:
        """Return cost, tokens and tokens without padding of a micro-batch; zeros if it holds no sample."""
        if number >= self.num_micros:
            if self._spec.tail == "mask":
                return 0, 0, 0
            number %= self.num_micros
        window, place = self._find(number)
        return int(window.costs[place]), int(window.tokens[place]), int(window.used_tokens[place])

    def num_samples(self, start: int, stop: int) -> int:
        """Return the samples of the micro-batches ``[start, stop)`` of the epoch."""
        return sum(int((self.micro_batch(n).rows != PADDING_ROW).sum()) for n in range(start, stop))

    # ---- from a number to a lane and a place in it -----------------------------------------------

    def _find(self, number: int) -> tuple[BudgetWindow, int]:
        step, micro = divmod(number, self._spec.micro_batches_per_step)
        if step < self.interleave.num_lane_steps:
            lane, place = self._lane_place(step, micro)
        else:
            lane, place = self._remainder_place(
                number - self.interleave.num_common * self.interleave.num_lanes
            )
        return self._window(lane, place)

    def _window(self, lane: int, place: int) -> tuple[BudgetWindow, int]:
        """Return the window that holds micro-batch ``place`` of a lane, and its number there."""
        first, last = int(self._lane_windows[lane]), int(self._lane_windows[lane + 1])
        target = int(self._before[first]) + place
        window = int(np.searchsorted(self._before[first : last + 1], target, side="right")) - 1
        return self._filled.open(lane, window), target - int(self._before[first + window])

    def _lane_place(self, step: int, micro: int) -> tuple[int, int]:
        number, inside, num_steps = self.interleave.group_of(step)
        key = derive(self._seed, "round-steps", self._epoch, number)
        order = self._orders.get(("steps", number), lambda: shuffled(num_steps, key))
        place = int(order[inside]) * self._spec.micro_batches_per_step + micro
        rank, lane = divmod(place, self.interleave.num_lanes)
        start, stop = self.interleave.bounds[number : number + 2].tolist()
        ranked = self._orders.get((lane, number), lambda: self._rank_lane(lane, start, stop))
        return lane, start + int(ranked[rank])

    def _rank_lane(self, lane: int, start: int, stop: int) -> Int64Array:
        """Rank the micro-batches ``[start, stop)`` of a lane by ascending cost, as offsets from ``start``."""
        costs = np.empty(stop - start, np.int64)
        place = start
        while place < stop:
            window, inside = self._window(lane, place)
            size = min(stop - place, len(window.costs) - inside)
            costs[place - start : place - start + size] = window.costs[inside : inside + size]
            place += size
        return np.argsort(costs, kind="stable")

    # ---- the remainder ---------------------------------------------------------------------------

    def _cut_remainder(self, group_micros: int) -> Int64Array:
        """Return the bounds of the remainder's groups: whole steps, except for the last."""
        per_step, num_remainder = self._spec.micro_batches_per_step, self.interleave.num_remainder
        num_steps = num_remainder // per_step
        num_groups = max(1, num_steps * per_step // (group_micros * self.interleave.num_lanes))
        numbers = np.arange(num_groups, dtype=np.int64)
        return np.append(numbers * num_steps // num_groups * per_step, num_remainder)

    def _remainder_place(self, number: int) -> tuple[int, int]:
        bounds = self._remainder_bounds
        group = int(np.searchsorted(bounds[:-1], number, side="right")) - 1
        start, stop = bounds[group : group + 2].tolist()
        order = self._orders.get(("remainder", group), lambda: self._rank_remainder(group, start, stop))
        return self._remainder_entry(int(order[number - start]))

    def _remainder_entry(self, entry: int) -> tuple[int, int]:
        """Return lane and place of an entry of the remainder, which holds the ends of all lanes."""
        before = self.interleave.remainder_before
        lane = int(np.searchsorted(before, entry, side="right")) - 1
        return lane, self.interleave.num_common + entry - int(before[lane])

    def _rank_remainder(self, group: int, start: int, stop: int) -> Int64Array:
        """Return a group of the remainder: permuted whole steps of equal cost rank, then the rest.

        The rest, which tail ``drop`` leaves out, is chosen before ranking, so every cost is equally likely to
        be left out.
        """
        per_step, size = self._spec.micro_batches_per_step, stop - start
        key = derive(self._seed, "pool-order", self._epoch, group)
        mixed = self._remainder_order()[start:stop][shuffled(size, key)]
        num_steps = size // per_step
        if not num_steps:
            return mixed
        whole, rest = mixed[: num_steps * per_step], mixed[num_steps * per_step :]
        costs = np.empty(len(whole), np.int64)
        # Window by window: entries of one window are neighbors in the remainder.
        for at in np.argsort(whole, kind="stable").tolist():
            window, place = self._window(*self._remainder_entry(int(whole[at])))
            costs[at] = window.costs[place]
        ranked = whole[np.argsort(costs, kind="stable")].reshape(num_steps, per_step)
        key = derive(self._seed, "pool-steps", self._epoch, group)
        return np.concatenate([ranked[shuffled(num_steps, key)].reshape(-1), rest])

    def _remainder_order(self) -> Int64Array:
        """Return all entries of the remainder, lanes interleaved, so that a group opens few windows."""

        def compute() -> Int64Array:
            before = self.interleave.remainder_before
            depth = np.arange(before[-1]) - np.repeat(before[:-1], np.diff(before))
            return np.argsort(depth, kind="stable")

        return self._orders.get("remainder", compute)
