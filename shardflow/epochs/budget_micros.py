"""Micro-batches under a token budget: equal costs meet in a step, whatever lanes they come from.

In a round every lane gives equally many micro-batches. They are ranked by cost, lane by lane, and a step
takes those of neighbouring ranks from all lanes; then the steps of the round are permuted. The pool is ranked
as a whole. A rank opens the windows of its own lanes only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardflow.epochs.budget_windows import BudgetWindow, BudgetWindows
from shardflow.epochs.integers import sums
from shardflow.epochs.micros import PADDING_ROW, MicroBatch, MicroBatches, frozen
from shardflow.epochs.permutation import shuffled
from shardflow.epochs.recent import Recent
from shardflow.epochs.rounds import Rounds
from shardflow.epochs.spec import BatchSpec
from shardflow.epochs.windows import LaneWindows
from shardflow.errors import PlanError
from shardflow.seeds import derive

__all__ = ["BudgetMicroBatches"]

Int64Array = npt.NDArray[np.int64]


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
        num_micros: Micro-batches that hold samples, once each.
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
        self.rounds = Rounds.of(per_lane, per_step, round_micros=mean)
        full, rest = divmod(self.num_micros, per_step)
        self.num_padding_micros = per_step - rest if rest and spec.tail == "mask" else 0
        self.num_steps = full + bool(rest and spec.tail != "drop")
        if not self.num_steps:
            raise PlanError(
                f"num_steps must be at least 1, got 0 (tail {spec.tail!r}: {self.num_micros} micro-batches "
                f"under the token budget do not fill one step of {per_step}); choose tail 'repeat' or "
                f"'mask', a smaller budget, or at most {max(1, self.num_micros)} micro_batches_per_step."
            )
        self._pool_bounds = self._cut_pool(mean)
        self._orders: Recent[Int64Array] = Recent(2 * self.rounds.num_lanes + 8)

    def micro_batch(self, number: int) -> MicroBatch:
        """Return micro-batch ``number`` of the epoch."""
        if number >= self.num_micros:
            if self._spec.tail == "mask":
                return self.filler()
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
        if step < self.rounds.num_lane_steps:
            lane, place = self._lane_place(step, micro)
        else:
            lane, place = self._pool_place(number - self.rounds.num_common * self.rounds.num_lanes)
        return self._window(lane, place)

    def _window(self, lane: int, place: int) -> tuple[BudgetWindow, int]:
        """Return the window that holds micro-batch ``place`` of a lane, and its number there."""
        first, last = int(self._lane_windows[lane]), int(self._lane_windows[lane + 1])
        target = int(self._before[first]) + place
        window = int(np.searchsorted(self._before[first : last + 1], target, side="right")) - 1
        return self._filled.open(lane, window), target - int(self._before[first + window])

    def _lane_place(self, step: int, micro: int) -> tuple[int, int]:
        number, inside, num_steps = self.rounds.round_of(step)
        key = derive(self._seed, "round-steps", self._epoch, number)
        order = self._orders.get(("steps", number), lambda: shuffled(num_steps, key))
        place = int(order[inside]) * self._spec.micro_batches_per_step + micro
        rank, lane = divmod(place, self.rounds.num_lanes)
        start, stop = self.rounds.bounds[number : number + 2].tolist()
        ranked = self._orders.get((lane, number), lambda: self._rank_lane(lane, start, stop))
        return lane, start + int(ranked[rank])

    def _rank_lane(self, lane: int, start: int, stop: int) -> Int64Array:
        """Return the micro-batches ``[start, stop)`` of a lane by rising cost, as offsets from ``start``."""
        costs = np.empty(stop - start, np.int64)
        place = start
        while place < stop:
            window, inside = self._window(lane, place)
            size = min(stop - place, len(window.costs) - inside)
            costs[place - start : place - start + size] = window.costs[inside : inside + size]
            place += size
        return np.argsort(costs, kind="stable")

    # ---- the pool --------------------------------------------------------------------------------

    def _cut_pool(self, round_micros: int) -> Int64Array:
        """Return the cuts of the pool's rounds: whole steps each, but for the last."""
        per_step, num_pooled = self._spec.micro_batches_per_step, self.rounds.num_pooled
        num_steps = num_pooled // per_step
        num_rounds = max(1, num_steps * per_step // (round_micros * self.rounds.num_lanes))
        numbers = np.arange(num_rounds, dtype=np.int64)
        return np.append(numbers * num_steps // num_rounds * per_step, num_pooled)

    def _pool_place(self, number: int) -> tuple[int, int]:
        bounds = self._pool_bounds
        round_number = int(np.searchsorted(bounds[:-1], number, side="right")) - 1
        start, stop = bounds[round_number : round_number + 2].tolist()
        order = self._orders.get(("pool", round_number), lambda: self._rank_pool(round_number, start, stop))
        return self._pooled(int(order[number - start]))

    def _pooled(self, entry: int) -> tuple[int, int]:
        """Return lane and place of an entry of the pool, which has the end of one lane after the other's."""
        before = self.rounds.pool_before
        lane = int(np.searchsorted(before, entry, side="right")) - 1
        return lane, self.rounds.num_common + entry - int(before[lane])

    def _rank_pool(self, number: int, start: int, stop: int) -> Int64Array:
        """Return the entries of a pool round: whole steps of equal cost rank, permuted, then the rest.

        The rest, which tail ``drop`` leaves out, is chosen before anything is ranked, so that no cost is
        more likely to be left out than another.
        """
        per_step, size = self._spec.micro_batches_per_step, stop - start
        key = derive(self._seed, "pool-order", self._epoch, number)
        mixed = self._pool_order()[start:stop][shuffled(size, key)]
        num_steps = size // per_step
        if not num_steps:
            return mixed
        whole, rest = mixed[: num_steps * per_step], mixed[num_steps * per_step :]
        costs = np.empty(len(whole), np.int64)
        # Window by window: entries of one window are neighbours in the pool.
        for at in np.argsort(whole, kind="stable").tolist():
            window, place = self._window(*self._pooled(int(whole[at])))
            costs[at] = window.costs[place]
        ranked = whole[np.argsort(costs, kind="stable")].reshape(num_steps, per_step)
        key = derive(self._seed, "pool-steps", self._epoch, number)
        return np.concatenate([ranked[shuffled(num_steps, key)].reshape(-1), rest])

    def _pool_order(self) -> Int64Array:
        """Return all entries of the pool, the lanes side by side, so that a round opens few windows."""

        def compute() -> Int64Array:
            before = self.rounds.pool_before
            depth = np.arange(before[-1]) - np.repeat(before[:-1], np.diff(before))
            return np.argsort(depth, kind="stable")

        return self._orders.get("pool", compute)
