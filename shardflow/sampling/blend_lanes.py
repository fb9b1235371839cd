"""Lanes of a blend: the draws of all components in one sequence, cut into equal parts.

The sequence holds one component after the other, each as long as its draws of an epoch, so a lane covers
part of one component, or the end of one and the start of the next. The samples of a lane are the same in
every epoch. Lanes with neighboring numbers are far apart in the sequence: any few of them contain all
components in about their shares, and since steps take from lanes in turn, so does every step.

A part walks its own samples pass after pass, in chunks, like the lane of a single dataset. In an epoch it
gives its share of the component's draws, whole chunks except for the first and last. So a node reads the
same shards in every epoch, and only 0.3 of the shards of a component that is repeated 0.3 times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardflow.sampling.blend import Blend, split_draws
from shardflow.sampling.lanes import LaneMap, LaneWalk, Recent, Weigh, weight_of
from shardflow.sampling.layout import ChosenColumn, EvenOffsets, SampleLayout
from shardflow.sampling.permutation import shuffled
from shardflow.seeds import derive

Int64Array = npt.NDArray[np.int64]

_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_WORD = 2**64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlendLayout(SampleLayout):
    """Where the samples of a blend lie, by their numbers."""

    parts: tuple[SampleLayout, ...]
    """The layout of each component, as if it were alone."""
    counts: tuple[int, ...]
    """Draws of each component in an epoch."""

    @property
    def num_drawn(self) -> int:
        """Samples of an epoch."""
        return sum(self.counts)


def blend_layout(blend: Blend, parts: Sequence[SampleLayout]) -> BlendLayout:
    """Join the layouts of components.

    Args:
        blend: The blend.
        parts: The layout of each component; all have the same facts.
    """
    starts = blend.starts()
    rows = [
        part.shard_rows - part.population.start + start for part, start in zip(parts, starts, strict=False)
    ]
    shard_rows = np.concatenate([*(found[:-1] for found in rows), rows[-1][-1:]])
    shard_bytes = np.concatenate(
        [part.shard_end_bytes - part.offset_bytes[part.shard_rows[:-1]].astype(np.int64) for part in parts]
    )
    return BlendLayout(
        dataset_id=blend.digest,
        population=range(blend.num_samples),
        shard_rows=shard_rows,
        shard_end_bytes=shard_bytes,
        offset_bytes=EvenOffsets(shard_rows, shard_bytes),
        facts={name: _JoinedColumn(starts, parts, name) for name in parts[0].facts},
        parts=tuple(parts),
        counts=tuple(component.count for component in blend.components),
    )


class _JoinedColumn:
    """A fact of all components, asked for by the number of a sample."""

    __slots__ = ("_columns", "_starts", "dtype", "ndim", "shape")

    def __init__(self, starts: list[int], parts: Sequence[SampleLayout], name: str) -> None:
        # A split's layout asks for rows of the table, a subset's for numbers from 0.
        self._columns = [ChosenColumn(part.facts[name], part.population) for part in parts]
        self._starts = np.array(starts, np.int64)
        self.dtype = np.result_type(*(column.dtype for column in self._columns))
        self.ndim, self.shape = 1, (starts[-1],)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self))
            first = int(np.searchsorted(self._starts, start, side="right")) - 1
            if stop <= self._starts[min(first + 1, len(self._starts) - 1)]:
                base = int(self._starts[first])
                return self._columns[first][start - base : stop - base]
            key = np.arange(start, stop)
        numbers = np.asarray(key, np.int64)
        found = np.searchsorted(self._starts, numbers, side="right") - 1
        values = np.empty(numbers.shape, self.dtype)
        for component in np.unique(found).tolist():
            here = found == component
            values[here] = self._columns[component][numbers[here] - self._starts[component]]
        return values


@dataclass(frozen=True, slots=True, eq=False)
class _Spread:
    """A component over the lanes of the line."""

    first_lane: int
    """The first lane of the line that holds some of it; the others follow."""
    start: int
    """Number of its first sample."""
    count: int
    lanes: LaneMap
    """Its part in each of those lanes, by its own numbers."""
    sizes: Int64Array
    """``(K,)`` int64, samples of each part."""


class BlendLanes:
    """The lanes of a blend; which samples belong to a lane is the same in every epoch.

    Args:
        layout: The blend's layout.
        num_lanes: L, at least 1.
        seed: Run-level seed.
        weigh: Makes, from a component's layout, what lanes should have equally much of; samples by default.

    Attributes:
        num_lanes: L.
        num_chunks: Chunks of all lanes.
    """

    def __init__(
        self,
        layout: BlendLayout,
        num_lanes: int,
        *,
        seed: int,
        weigh: Callable[[SampleLayout], Weigh] | None = None,
    ) -> None:
        self._layout, self.num_lanes = layout, num_lanes
        weighs = [None if weigh is None else weigh(part) for part in layout.parts]
        totals = [weight_of(part, found) for part, found in zip(layout.parts, weighs, strict=True)]
        sizes = [part.num_samples for part in layout.parts]
        drawn = [
            total * count // size for total, count, size in zip(totals, layout.counts, sizes, strict=True)
        ]
        bounds = [lane * sum(drawn) // num_lanes for lane in range(1, num_lanes)]
        spreads = []
        before = first_number = 0
        for part, size, count, weight, found in zip(
            layout.parts, sizes, layout.counts, drawn, weighs, strict=True
        ):
            inside = [bound for bound in bounds if before < bound < before + weight]
            targets = [(bound - before) * size // count for bound in inside]
            lanes = LaneMap.of(part, len(targets) + 1, seed=seed, weigh=found, targets=targets)
            first_lane = sum(bound <= before for bound in bounds)
            spreads.append(
                _Spread(first_lane, first_number - part.population.start, count, lanes, lanes.lane_samples())
            )
            before, first_number = before + weight, first_number + size
        self._spreads = tuple(spreads)
        self._draws_before: Recent[list[int]] = Recent(4 * len(spreads))
        self.num_chunks = sum(len(spread.lanes.first_row) for spread in spreads)
        # Lane i lies where the i-th multiple of the golden ratio does: any few neighbours cover the line.
        words = [(lane + 1) * _GOLDEN_RATIO % _WORD for lane in range(num_lanes)]
        self._line_lane = np.argsort(np.argsort(np.array(words, np.uint64), kind="stable"), kind="stable")

    def walk(self, lane: int, *, seed: int, epoch: int) -> LaneWalk:
        """Return the pieces of an epoch's walk through a lane, see `LaneMap.walk`."""
        line_lane = int(self._line_lane[lane])
        rows: list[Int64Array] = []
        sizes: list[Int64Array] = []
        for number, spread in enumerate(self._spreads):
            part = line_lane - spread.first_lane
            if not 0 <= part < spread.lanes.num_lanes or not spread.sizes[part]:
                continue
            start, stop = (self._given(number, at)[part] for at in (epoch, epoch + 1))
            if start == stop:  # its turn comes in another epoch
                continue
            found = _pieces(spread.lanes, part, start, stop, key=(seed, number, lane))
            rows += [first + spread.start for first, _ in found]
            sizes += [size for _, size in found]
        if not rows:
            return LaneWalk(*(np.zeros(0, np.int64) for _ in range(3)))
        first_row, num_samples = np.concatenate(rows), np.concatenate(sizes)
        order = shuffled(len(first_row), derive(seed, "blend-order", epoch, lane))
        first_row, num_samples = first_row[order], num_samples[order]
        shards = self._layout.shards_of(first_row)
        ends = self._layout.ends_of(first_row + num_samples, shards)
        return LaneWalk(first_row, num_samples, ends - self._layout.offset_bytes[first_row])

    def _given(self, number: int, epoch: int) -> list[int]:
        """Return how many draws each part of a component has given before an epoch, over all passes."""

        def compute() -> list[int]:
            spread = self._spreads[number]
            passes, rest = divmod(epoch * spread.count, int(spread.sizes.sum()))
            left = split_draws(spread.sizes, rest).tolist()
            return [passes * size + more for size, more in zip(spread.sizes.tolist(), left, strict=True)]

        return self._draws_before.get((number, epoch), compute)


def _pieces(
    lanes: LaneMap, part: int, start: int, stop: int, *, key: tuple[int, int, int]
) -> list[tuple[Int64Array, Int64Array]]:
    """Return the draws ``[start, stop)`` of a part as first rows and sizes, a pair a pass."""
    chunks = lanes.chunks(part)
    first_row, sizes = lanes.first_row[chunks], lanes.num_samples[chunks]
    total = int(sizes.sum())
    seed, component, lane = key
    found = []
    for number in range(start // total, -(-stop // total)):
        order = shuffled(len(sizes), derive(seed, "blend-chunks", component, lane, number))
        stops = np.cumsum(sizes[order])
        begins = stops - sizes[order]
        low, high = max(start - number * total, 0), min(stop - number * total, total)
        cut_begins, cut_stops = np.maximum(begins, low), np.minimum(stops, high)
        is_drawn = cut_stops > cut_begins
        found.append(((first_row[order] + cut_begins - begins)[is_drawn], (cut_stops - cut_begins)[is_drawn]))
    return found
