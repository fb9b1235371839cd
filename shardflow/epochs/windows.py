"""Windows: the walk of an epoch through each lane, so many bytes at a time.

Chunks follow each other in an order of the epoch. A window is what lies between two cuts of that line, near
multiples of the window size; samples are mixed inside a window. So a rank holds few shards open, and a cache
knows which.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardflow.epochs.integers import sums
from shardflow.epochs.lanes import Lanes
from shardflow.epochs.layout import SampleLayout
from shardflow.epochs.permutation import shuffled
from shardflow.epochs.recent import Recent
from shardflow.seeds import derive

__all__ = ["LaneWindows"]

Int64Array = npt.NDArray[np.int64]


class LaneWindows:
    """The windows of all lanes in one epoch; nothing is stored per sample but the windows that are open.

    Args:
        layout: The population.
        lanes: Its lanes.
        window_bytes: About the size of a window, at least 1.
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
        """Return the rows of a window in the order of the epoch; the newest windows are kept."""
        return self._open.get((lane, window), lambda: self.mix(lane, window))

    def mix(self, lane: int, window: int) -> Int64Array:
        """Return the rows of a window in the order of the epoch."""
        rows = self.rows(lane, window)
        key = derive(self._seed, "window-order", self._epoch, lane, window)
        mixed: Int64Array = rows[shuffled(len(rows), key)]
        return mixed

    def take(self, lane: int, positions: Int64Array) -> Int64Array:
        """Return the rows at some positions of a lane, counted over its windows."""
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
