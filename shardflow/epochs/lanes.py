"""Lanes: the samples cut into L equal parts, each made of few shards, the same parts in every epoch.

Shards are laid in a line, in a keyed order, and the line is cut at L - 1 places: lanes differ by a sample,
and all but L - 1 shards lie in one lane. Neighbouring lanes share the shards that are cut, so a node that
serves a run of lanes reads hardly a shard that another one reads. The line depends on the dataset, the seed
and the batch spec, never on the epoch or the world: a node meets the same shards every epoch, and its cache
pays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardflow.epochs.integers import sums
from shardflow.epochs.layout import SampleLayout
from shardflow.epochs.permutation import shuffled
from shardflow.errors import PlanError
from shardflow.seeds import derive

__all__ = ["CHUNKS_PER_LANE", "LaneMap", "LaneWalk", "Lanes", "Weigh", "weight_of"]

Int64Array = npt.NDArray[np.int64]
Weigh = Callable[[int, int], Int64Array]
"""Returns the weights of the rows ``[start, stop)`` of the table, such as their tokens."""

CHUNKS_PER_LANE = 32
"""A lane has about this many chunks or more, whose order is another one in each epoch."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneWalk:
    """What a lane holds in an epoch, as pieces of shards in the order of the walk."""

    first_row: Int64Array
    """``(P,)`` int64, first row of each piece."""
    num_samples: Int64Array
    """``(P,)`` int64, rows of each piece, at least 1."""
    num_bytes: Int64Array
    """``(P,)`` int64."""


class Lanes(Protocol):
    """Lanes that can be walked."""

    @property
    def num_lanes(self) -> int:
        """L."""

    @property
    def num_chunks(self) -> int:
        """Chunks of all lanes."""

    def walk(self, lane: int, *, seed: int, epoch: int) -> LaneWalk:
        """Return what a lane holds in an epoch."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneMap:
    """The chunks of a population, lane by lane; the same in every epoch.

    A chunk is a run of rows of one shard: a whole shard, what a cut left of one, or an equal part of it where
    a lane would have too few.
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
        """Cut the line of shards.

        Args:
            layout: The population.
            num_lanes: L, at least 1.
            seed: Run-level seed.
            weigh: What the lanes should have equally much of; samples by default.
            targets: Where the line is cut instead of into equal parts: ``num_lanes - 1`` sums of weights,
                ascending.

        Raises:
            PlanError: The bytes of the layout do not ascend.
        """
        num_shards, num_samples = layout.num_shards, layout.num_samples
        key = derive(seed, "lane-shards", int(layout.dataset_id, 16))
        order = shuffled(num_shards, key)
        sizes = np.diff(layout.shard_rows)
        line = sums(sizes[order])
        if weigh is None:
            equal = [lane * num_samples // num_lanes for lane in range(1, num_lanes)]
            cuts = np.array(equal if targets is None else targets, np.int64)
        else:
            cuts = _weighed_cuts(layout, order, line, num_lanes, weigh, targets)
        starts = np.unique(np.concatenate((line[:-1], cuts[cuts < num_samples])))
        lengths = np.diff(np.append(starts, num_samples))
        lanes = np.searchsorted(cuts, starts, side="right")
        # Equal parts where a lane would have too few chunks to permute.
        parts = np.minimum(lengths, -(-lengths * (CHUNKS_PER_LANE * num_lanes) // num_samples))
        piece = np.repeat(np.arange(len(starts)), parts)
        part = np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts)
        first = starts[piece] + part * lengths[piece] // parts[piece]
        last = starts[piece] + (part + 1) * lengths[piece] // parts[piece]
        place = np.searchsorted(line, first, side="right") - 1
        shard = order[place]
        first_row = layout.shard_rows[shard] + first - line[place]
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
        """Return which chunks a lane has."""
        return slice(int(self.lane_chunks[lane]), int(self.lane_chunks[lane + 1]))


def _weighed_cuts(
    layout: SampleLayout,
    order: Int64Array,
    line: Int64Array,
    num_lanes: int,
    weigh: Weigh,
    targets: Sequence[int] | None,
) -> Int64Array:
    """Return the places of the line, in samples, where the sum of weights reaches the targets."""
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
        cuts.append(int(line[place]) + int(np.searchsorted(inside, target - int(before[place]))))
    return np.array(cuts, np.int64)


def weight_of(layout: SampleLayout, weigh: Weigh | None) -> int:
    """Return the weight of all samples; their number where nothing weighs them."""
    if weigh is None:
        return layout.num_samples
    rows = layout.shard_rows.tolist()
    return sum(int(weigh(start, stop).sum()) for start, stop in pairwise(rows))
