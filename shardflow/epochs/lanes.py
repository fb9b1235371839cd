"""Lanes: the samples dealt to L near-equal parts, each made of few shards, the same parts in every epoch.

Shards, or parts of shards where there are too few, are *chunks*. Which lane a chunk belongs to depends on the
dataset, the seed and the batch spec, never on the epoch or the world: a node that serves some lanes meets the
same shards every epoch, and its cache pays.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardflow.epochs.layout import SampleLayout
from shardflow.epochs.permutation import Permutation
from shardflow.errors import PlanError
from shardflow.seeds import derive

__all__ = ["CHUNKS_PER_LANE", "LaneMap", "cut_chunks", "deal_chunks"]

Int64Array = npt.NDArray[np.int64]

CHUNKS_PER_LANE = 32
"""A lane has about this many chunks or more, so that lanes differ by about a thirty-second at most."""


@dataclass(frozen=True, slots=True, eq=False)
class LaneMap:
    """The chunks of a population, sorted by lane; the same in every epoch."""

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
        cls, layout: SampleLayout, num_lanes: int, *, seed: int, weights: Int64Array | None = None
    ) -> LaneMap:
        """Deal the chunks of a layout.

        Args:
            layout: The population.
            num_lanes: L, at least 1.
            seed: Run-level seed.
            weights: ``(C,)`` int64, what the lanes should have equally much of, by chunk of
                :func:`cut_chunks`; samples by default.

        Raises:
            PlanError: The bytes of the layout do not ascend.
        """
        first_row, num_samples, shard = cut_chunks(layout, num_lanes)
        ends = layout.ends_of(first_row + num_samples, shard)
        num_bytes = ends - layout.offset_bytes[first_row].astype(np.int64)
        if int(num_bytes.min()) < 0:
            raise PlanError(
                "offset_bytes must ascend inside a shard, got a table in another order (sample layout); run "
                "`shardflow verify` on the dataset."
            )
        key = derive(seed, "lane-chunks", int(layout.dataset_id, 16))
        order = Permutation(len(first_row), key)(np.arange(len(first_row)))
        lane = deal_chunks(num_samples if weights is None else weights, order, num_lanes)
        # Inside a lane in the order of the table: the order of an epoch is another matter.
        by_lane = np.argsort(lane, kind="stable")
        counts = np.bincount(lane, minlength=num_lanes)
        return cls(
            num_lanes=num_lanes,
            first_row=first_row[by_lane],
            num_samples=num_samples[by_lane],
            num_bytes=num_bytes[by_lane],
            shard=shard[by_lane],
            lane_chunks=np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        )

    def lane_samples(self) -> Int64Array:
        """Return the samples of each lane, ``(L,)`` int64."""
        sums = np.concatenate(([0], np.cumsum(self.num_samples)))
        return np.diff(sums[self.lane_chunks])

    def chunks(self, lane: int) -> slice:
        """Return which chunks a lane has."""
        return slice(int(self.lane_chunks[lane]), int(self.lane_chunks[lane + 1]))


def cut_chunks(layout: SampleLayout, num_lanes: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut shards into chunks: whole where there are many, else into near-equal parts.

    Returns:
        First row, number of rows (at least 1) and shard of each chunk, ``(C,)`` int64 each, in table order.
    """
    sizes = np.diff(layout.shard_rows)
    wanted = -(-sizes * (CHUNKS_PER_LANE * num_lanes) // layout.num_samples)
    parts = np.minimum(sizes, np.maximum(1, wanted))
    shard = np.repeat(np.arange(len(sizes)), parts)
    part = np.arange(len(shard)) - np.repeat(np.cumsum(parts) - parts, parts)
    start = part * sizes[shard] // parts[shard]
    stop = (part + 1) * sizes[shard] // parts[shard]
    return layout.shard_rows[shard] + start, stop - start, shard


def deal_chunks(weights: Int64Array, order: Int64Array, num_lanes: int) -> Int64Array:
    """Give chunk after chunk, in ``order``, to the lane that has least; the lowest of several such lanes.

    Returns:
        The lane of each chunk, ``(C,)`` int64.
    """
    lane_of = np.zeros(len(order), np.int64)
    heap = [(0, lane) for lane in range(num_lanes)]
    for chunk, weight in zip(order.tolist(), weights[order].tolist(), strict=True):
        load, lane = heap[0]
        lane_of[chunk] = lane
        heapq.heapreplace(heap, (load + weight, lane))
    return lane_of
