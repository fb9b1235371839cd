"""Lanes: a population cut into L equal parts of few shards each, walked window by window.

Shards are arranged in a keyed order that is cut at L - 1 places: lanes differ by at most a sample, and all
but L - 1 shards belong to one lane. Neighboring lanes share the shards that are cut, so a node that serves a
run of lanes reads hardly a shard of another node. The cut depends on dataset, seed and batch spec, never on
epoch or world, so a node's cache serves every epoch (`LaneMap`).

In an epoch the chunks of a lane follow each other in a new order. A shuffle window is the part between two
cuts of that sequence, near multiples of the window size, and samples are shuffled within a window
(`LaneWindows`). So a rank keeps few shards open, and a cache knows which.

Each lane is a sequence of micro-batches. All lanes give their first T micro-batches to steps, equally many
to each step as far as the numbers allow; what a lane has beyond T is the *remainder* (`Interleave`). None of
this depends on the world size. `choose_lanes` takes as many lanes as leave a small remainder and fill
micro-batches well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import Generic, Protocol, TypeVar

import numpy as np

from shardflow.errors import PlanError
from shardflow.sampling.layout import SampleLayout
from shardflow.sampling.permutation import Int64Array, shuffled, sums
from shardflow.sampling.spec import BatchSpec
from shardflow.seeds import derive

_Value = TypeVar("_Value")
Weigh = Callable[[int, int], Int64Array]
"""Returns the weights of the rows ``[start, stop)`` of the table, such as their tokens."""
CHUNKS_PER_LANE = 32
"""Approximate minimum of chunks per lane; their order changes with each epoch."""
MAX_CHOSEN_LANES = 64
"""Largest number chosen: enough for 64 nodes to read shards of their own; more keep more windows open."""
_REMAINDER_PARTS = 20  # at most one twentieth of the samples is in the remainder
# With fewer micro-batches per lane, padding exceeds 1 % of report-like lengths, and the longest micro-batches
# share their step with shorter ones.
_MICRO_BATCHES_PER_LANE = 128
_PROBED_ROWS = 2**16


class Recent(Generic[_Value]):
    """Bounded cache of computed values, safe between threads and forks without a lock.

    A lock would be held forever in a child forked while a thread computed. Two threads may compute the same
    value; neither ever sees a partial one.

    Args:
        size: Number of values kept; the oldest is evicted first.
    """

    __slots__ = ("_size", "_values")

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[Hashable, _Value] = {}

    def get(self, key: Hashable, compute: Callable[[], _Value]) -> _Value:
        """Return the value of ``key``, computed if it is not kept."""
        found = self._values.get(key)
        if found is None:
            found = compute()
            if len(self._values) >= self._size:
                # The copy of the keys is atomic; a key that another thread removed meanwhile does no harm.
                for oldest in list(self._values)[: len(self._values) + 1 - self._size]:
                    self._values.pop(oldest, None)
            self._values[key] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class LaneWalk:
    """Contents of a lane in an epoch: pieces of shards, in order."""

    first_row: Int64Array
    """``(P,)`` int64, first row of each piece."""
    num_samples: Int64Array
    """``(P,)`` int64, rows of each piece, at least 1."""
    num_bytes: Int64Array
    """``(P,)`` int64."""


class Lanes(Protocol):
    """Interface of lanes: of one dataset (`LaneMap`) or of a blend (`BlendLanes`)."""

    @property
    def num_lanes(self) -> int:
        """L."""

    @property
    def num_chunks(self) -> int:
        """Chunks of all lanes."""

    def walk(self, lane: int, *, seed: int, epoch: int) -> LaneWalk:
        """Return the contents of a lane in an epoch."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneMap:
    """The chunks of a population, lane by lane; the same in every epoch.

    A chunk is a run of rows of one shard: a whole shard, the part of one beside a cut, or an equal part of
    these if a lane would otherwise have too few chunks.
    """

    num_lanes: int
    first_row: Int64Array
    """``(C,)`` int64, first row of each chunk."""
    num_samples: Int64Array
    """``(C,)`` int64, rows of each chunk, at least 1."""
    num_bytes: Int64Array
    """``(C,)`` int64."""
    shard: Int64Array
    """``(C,)`` int64, the shard of each chunk, among those of the layout."""
    lane_chunks: Int64Array
    """``(L + 1,)`` int64: lane l has the chunks ``[lane_chunks[l], lane_chunks[l + 1])``; some have none."""

    @classmethod
    def of(
        cls,
        layout: SampleLayout,
        num_lanes: int,
        *,
        seed: int,
        weigh: Weigh | None = None,
        targets: Sequence[int] | None = None,
    ) -> LaneMap:
        """Cut the shards, in a keyed order, into lanes.

        Args:
            layout: The population.
            num_lanes: L, at least 1.
            seed: Run-level seed.
            weigh: Weights to share equally among lanes; by default every sample weighs the same.
            targets: Cuts instead of equal parts: ``num_lanes - 1`` sums of weights, ascending.

        Raises:
            PlanError: The bytes of the layout do not ascend.
        """
        num_shards, num_samples = layout.num_shards, layout.num_samples
        key = derive(seed, "lane-shards", int(layout.dataset_id, 16))
        order = shuffled(num_shards, key)
        samples_before = sums(np.diff(layout.shard_rows)[order])
        if weigh is None:
            equal = [lane * num_samples // num_lanes for lane in range(1, num_lanes)]
            cuts = np.array(equal if targets is None else targets, np.int64)
        else:
            cuts = _weighed_cuts(layout, order, samples_before, num_lanes, weigh, targets)
        starts = np.unique(np.concatenate((samples_before[:-1], cuts[cuts < num_samples])))
        lengths = np.diff(np.append(starts, num_samples))
        lanes = np.searchsorted(cuts, starts, side="right")
        # Equal parts if a lane would have too few chunks to permute.
        parts = np.minimum(lengths, -(-lengths * (CHUNKS_PER_LANE * num_lanes) // num_samples))
        piece = np.repeat(np.arange(len(starts)), parts)
        part = np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts)
        first = starts[piece] + part * lengths[piece] // parts[piece]
        last = starts[piece] + (part + 1) * lengths[piece] // parts[piece]
        place = np.searchsorted(samples_before, first, side="right") - 1
        shard = order[place]
        first_row = layout.shard_rows[shard] + first - samples_before[place]
        num_bytes = layout.ends_of(first_row + last - first, shard) - layout.offset_bytes[first_row].astype(
            np.int64
        )
        if int(num_bytes.min()) < 0:
            raise PlanError(
                "offset_bytes must ascend inside a shard, got a table in another order (sample layout); run "
                "`shardflow verify` on the dataset."
            )
        counts = np.bincount(lanes[piece], minlength=num_lanes)
        return cls(
            num_lanes=num_lanes,
            first_row=first_row,
            num_samples=last - first,
            num_bytes=num_bytes,
            shard=shard,
            lane_chunks=sums(counts),
        )

    def lane_samples(self) -> Int64Array:
        """Return the samples of each lane, ``(L,)`` int64."""
        return np.diff(sums(self.num_samples)[self.lane_chunks])

    @property
    def num_chunks(self) -> int:
        """Chunks of all lanes."""
        return len(self.first_row)

    def walk(self, lane: int, *, seed: int, epoch: int) -> LaneWalk:
        """Return a lane's chunks in the order of an epoch."""
        chunks = self.chunks(lane)
        found = self.first_row[chunks], self.num_samples[chunks], self.num_bytes[chunks]
        if not len(found[0]):
            return LaneWalk(*found)
        order = shuffled(len(found[0]), derive(seed, "chunk-order", epoch, lane))
        return LaneWalk(*(column[order] for column in found))

    def chunks(self, lane: int) -> slice:
        """Return the chunks of a lane."""
        return slice(int(self.lane_chunks[lane]), int(self.lane_chunks[lane + 1]))


def _weighed_cuts(
    layout: SampleLayout,
    order: Int64Array,
    samples_before: Int64Array,
    num_lanes: int,
    weigh: Weigh,
    targets: Sequence[int] | None,
) -> Int64Array:
    """Return the positions in samples at which the sum of weights reaches each target."""
    rows = layout.shard_rows.tolist()
    weights = np.array([int(weigh(rows[shard], rows[shard + 1]).sum()) for shard in order.tolist()], np.int64)
    before = sums(weights)
    total = int(before[-1])
    cuts = []
    if targets is None:
        targets = [lane * total // num_lanes for lane in range(1, num_lanes)]
    for target in targets:
        place = min(int(np.searchsorted(before, target, side="right")) - 1, len(weights) - 1)
        shard = int(order[place])
        inside = np.cumsum(weigh(rows[shard], rows[shard + 1]))
        cuts.append(int(samples_before[place]) + int(np.searchsorted(inside, target - int(before[place]))))
    return np.array(cuts, np.int64)


def weight_of(layout: SampleLayout, weigh: Weigh | None) -> int:
    """Return the weight of all samples; their number without weights."""
    if weigh is None:
        return layout.num_samples
    rows = layout.shard_rows.tolist()
    return sum(int(weigh(start, stop).sum()) for start, stop in pairwise(rows))


class LaneWindows:
    """The shuffle windows of all lanes in one epoch; only open windows take memory per sample.

    Args:
        layout: The population.
        lanes: Its lanes.
        window_bytes: Approximate size of a window, at least 1.
        seed: Run-level seed.
        epoch: Number of the epoch.

    Attributes:
        num_samples: ``(L,)`` int64, samples of each lane.
        num_windows: Windows of all lanes.
        lane_windows: ``(L + 1,)`` int64: lane l has the windows ``[lane_windows[l], lane_windows[l + 1])``.
    """

    def __init__(
        self, layout: SampleLayout, lanes: Lanes, *, window_bytes: int, seed: int, epoch: int
    ) -> None:
        self._layout, self._lanes, self._seed, self._epoch = layout, lanes, seed, epoch
        self._first_row: list[Int64Array] = []
        self._samples_before: list[Int64Array] = []
        self._cuts: list[Int64Array] = []
        for lane in range(lanes.num_lanes):
            self._open_lane(lane, window_bytes)
        self.num_samples = np.array([int(cuts[-1]) for cuts in self._cuts], np.int64)
        counts = [len(cuts) - 1 for cuts in self._cuts]
        self.lane_windows = sums(counts)
        self.num_windows = int(self.lane_windows[-1])
        self._open: Recent[Int64Array] = Recent(2 * lanes.num_lanes + 8)

    def _open_lane(self, lane: int, window_bytes: int) -> None:
        walk = self._lanes.walk(lane, seed=self._seed, epoch=self._epoch)
        samples_before = sums(walk.num_samples)
        self._first_row.append(walk.first_row)
        self._samples_before.append(samples_before)
        self._cuts.append(self._cut(walk.first_row, samples_before, walk.num_bytes, window_bytes))

    def _cut(
        self, first_row: Int64Array, samples_before: Int64Array, num_bytes: Int64Array, window_bytes: int
    ) -> Int64Array:
        """Return the cuts of a lane as positions in it: ascending, the first 0, the last its end."""
        if not len(first_row):
            return np.zeros(1, np.int64)
        bytes_before = sums(num_bytes)
        total = int(bytes_before[-1])
        num_windows = max(1, (2 * total + window_bytes) // (2 * window_bytes))
        num_windows = min(num_windows, int(samples_before[-1]))
        targets = np.array([number * total // num_windows for number in range(1, num_windows)], np.int64)
        chunk = np.searchsorted(bytes_before, targets, side="right") - 1
        cuts = [0]
        offsets = self._layout.offset_bytes
        for number, target in zip(chunk.tolist(), targets.tolist(), strict=True):
            start = int(first_row[number])
            stop = start + int(samples_before[number + 1] - samples_before[number])
            beyond = int(offsets[start]) + target - int(bytes_before[number])
            inside = int(np.searchsorted(offsets[start:stop], offsets.dtype.type(beyond)))
            cuts.append(int(samples_before[number]) + inside)
        cuts.append(int(samples_before[-1]))
        return np.unique(np.array(cuts, np.int64))

    def size(self, lane: int, window: int) -> int:
        """Return the samples of a window, at least 1."""
        return int(self._cuts[lane][window + 1] - self._cuts[lane][window])

    def pieces(self, lane: int, window: int) -> list[tuple[int, int]]:
        """Return a window as ranges of rows ``[start, stop)``, in the order of the lane."""
        start, stop = self._cuts[lane][window : window + 2].tolist()
        before, first_row = self._samples_before[lane], self._first_row[lane]
        first, last = np.searchsorted(before, [start, stop - 1], side="right").tolist()
        bounds = before[first - 1 : last + 1].tolist()
        rows = first_row[first - 1 : last].tolist()
        return [
            (row + max(start - low, 0), row + min(stop, high) - low)
            for row, low, high in zip(rows, bounds[:-1], bounds[1:], strict=True)
        ]

    def rows(self, lane: int, window: int) -> Int64Array:
        """Return the rows of a window, in the order of the lane."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.pieces(lane, window)])

    def mixed_rows(self, lane: int, window: int) -> Int64Array:
        """Return the shuffled rows of a window; the last windows used are kept."""
        return self._open.get((lane, window), lambda: self.mix(lane, window))

    def mix(self, lane: int, window: int) -> Int64Array:
        """Return the shuffled rows of a window."""
        rows = self.rows(lane, window)
        key = derive(self._seed, "window-order", self._epoch, lane, window)
        mixed: Int64Array = rows[shuffled(len(rows), key)]
        return mixed

    def take(self, lane: int, positions: Int64Array) -> Int64Array:
        """Return the rows at positions of a lane, counted over its windows."""
        cuts = self._cuts[lane]
        window = np.searchsorted(cuts, positions, side="right") - 1
        first, last = int(window.min()), int(window.max())
        if first == last:
            found: Int64Array = self.mixed_rows(lane, first)[positions - cuts[first]]
            return found
        rows = np.empty(positions.shape, np.int64)
        for number in np.unique(window).tolist():
            here = window == number
            rows[here] = self.mixed_rows(lane, number)[positions[here] - cuts[number]]
        return rows

    def shards(self, lane: int, window: int) -> Int64Array:
        """Return the shards that a window reads, ascending."""
        starts = np.array([start for start, _ in self.pieces(lane, window)], np.int64)
        return np.unique(self._layout.shards_of(starts))


@dataclass(frozen=True, slots=True, eq=False)
class Interleave:
    """The equal parts of all lanes, cut into groups of steps within which micro-batches are ranked by cost.

    Always ``num_lane_steps * M == T * L``, and every group consists of whole steps.
    """

    num_lanes: int
    per_step: int
    """M, micro-batches of a step."""
    num_common: int
    """T, micro-batches that every lane contributes."""
    bounds: Int64Array
    """``(G + 1,)`` int64: group g takes the micro-batches ``[bounds[g], bounds[g + 1])`` of each lane."""
    remainder_before: Int64Array
    """``(L + 1,)`` int64: micro-batches of the remainder in the lanes before each one."""

    @classmethod
    def of(cls, num_micros: Int64Array, per_step: int, *, group_micros: int) -> Interleave:
        """Cut lanes into groups.

        Args:
            num_micros: ``(L,)`` int64, micro-batches of each lane.
            per_step: M.
            group_micros: Approximate number of micro-batches per lane and group, such as those of a
                window; at least 1.
        """
        num_lanes = len(num_micros)
        # Whole steps from all lanes equally need a multiple of this from each.
        unit = per_step // gcd(per_step, num_lanes)
        num_units = int(num_micros.min()) // unit
        num_groups = max(1, min(num_units, num_units * unit // group_micros))
        numbers = np.arange(num_groups + 1, dtype=np.int64)
        return cls(
            num_lanes=num_lanes,
            per_step=per_step,
            num_common=num_units * unit,
            bounds=unit * (numbers * num_units // num_groups),
            remainder_before=sums(num_micros - num_units * unit),
        )

    @property
    def num_lane_steps(self) -> int:
        """Steps that take from all lanes."""
        return self.num_common * self.num_lanes // self.per_step

    @property
    def num_remainder(self) -> int:
        """Micro-batches of the remainder."""
        return int(self.remainder_before[-1])

    def group_of(self, step: int) -> tuple[int, int, int]:
        """Return the group of a lane step, the step's number in it, and the number of steps of the group."""
        steps = self.bounds * self.num_lanes // self.per_step
        number = int(np.searchsorted(steps, step, side="right")) - 1
        return number, step - int(steps[number]), int(steps[number + 1] - steps[number])


def choose_lanes(layout: SampleLayout, spec: BatchSpec) -> int:
    """Return the largest power of two, at most 64, that leaves at most 5 % in the remainder; else 1.

    Under a token budget a lane also has about 128 micro-batches or more, which padding and balance need. The
    result depends on the data and the sizes of a step, never on the world size; the size of a micro-batch
    under a budget is estimated from a sample of the lengths.

    Args:
        layout: The population.
        spec: How steps are formed; its own lanes are ignored.
    """
    size, per_step = _micro_batch_size(layout, spec), spec.micro_batches_per_step
    num_lanes = MAX_CHOSEN_LANES
    if spec.budget is not None:
        most = max(1, layout.num_drawn // (size * _MICRO_BATCHES_PER_LANE))
        num_lanes = min(num_lanes, 2 ** (most.bit_length() - 1))
    while num_lanes > 1:
        unit = size * (per_step // gcd(per_step, num_lanes))
        num_remainder = layout.num_drawn - layout.num_drawn // num_lanes // unit * unit * num_lanes
        if num_remainder * _REMAINDER_PARTS <= layout.num_drawn:
            break
        num_lanes //= 2
    return num_lanes


def with_lanes(spec: BatchSpec, layout: SampleLayout) -> BatchSpec:
    """Return a spec with the lanes that :func:`choose_lanes` returns."""
    return replace(spec, lanes=choose_lanes(layout, spec))


def _micro_batch_size(layout: SampleLayout, spec: BatchSpec) -> int:
    if spec.budget is None:
        return spec.micro_batch_size
    rows = layout.population
    probed = np.unique(np.linspace(rows.start, rows.stop - 1, min(len(rows), _PROBED_ROWS), dtype=np.int64))
    facts = {name: column[probed] for name, column in layout.facts.items()}
    mean = max(1, int(spec.budget.cost.lengths(facts).sum()) // len(probed))
    return max(1, min(spec.budget.max_samples, spec.budget.max_tokens // mean))
