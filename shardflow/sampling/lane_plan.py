"""Lane plan: the part of an epoch plan between the layout of the samples and the micro-batches of the steps.

::

    chunks      shards, or parts of them, dealt to L lanes     LaneMap             once a run
    windows     the contents of each lane in an epoch          LaneWindows
    micros      B neighbors of a lane                          LaneMicroBatches
                or a shuffle window filled to a budget         BudgetWindows, BudgetMicroBatches
    interleave  steps take equally from all lanes              Interleave

With micro-batches of a fixed size, the samples of the lanes beyond their equal parts (the remainder) are
permuted and appended, so an epoch has the same number of steps and the same tail as one without lanes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from shardflow.sampling.blend import BlendLanes, BlendLayout
from shardflow.sampling.budget_batches import BudgetMicroBatches, BudgetWindows, weigh_tokens
from shardflow.sampling.lanes import Interleave, LaneMap, Lanes, LaneWindows
from shardflow.sampling.layout import SampleLayout
from shardflow.sampling.micro_batches import EpochSlots, MicroBatch, MicroBatches, frozen, padding
from shardflow.sampling.permutation import Int64Array, Permutation, sums
from shardflow.sampling.spec import BatchSpec
from shardflow.seeds import derive


class LaneMicroBatches(MicroBatches):
    """Micro-batch g of the epoch is number ``g // L`` of lane ``g mod L``, as long as all lanes have one.

    Safe to share between threads. A micro-batch opens the windows of its own lane only.

    Args:
        windows: The lanes in this epoch.
        slots: The slots of the epoch.
        size: B.
        per_step: M.
        seed: Run-level seed.
        epoch: Number of the epoch.

    Attributes:
        num_remainder: Samples beyond the equal parts of the lanes.
    """

    def __init__(
        self, windows: LaneWindows, slots: EpochSlots, *, size: int, per_step: int, seed: int, epoch: int
    ) -> None:
        self._windows, self._slots, self._size = windows, slots, size
        self.interleave = Interleave.of(windows.num_samples // size, per_step, group_micros=2**62)
        self._num_main = self.interleave.num_common * self.interleave.num_lanes * size
        left = windows.num_samples - self.interleave.num_common * size
        self._remainder_before = sums(left)
        self.num_remainder = int(self._remainder_before[-1])
        self._remainder: Permutation | None = None
        if self.num_remainder:
            self._remainder = Permutation(self.num_remainder, derive(seed, "pool-order", epoch))

    def micro_batch(self, number: int) -> MicroBatch:
        """Return micro-batch ``number`` of the epoch."""
        size = self._size
        if number * size < self._num_main:
            place, lane = divmod(number, self.interleave.num_lanes)
            rows = self._windows.take(lane, np.arange(place * size, (place + 1) * size))
            return MicroBatch(*frozen(rows, np.ones(size, np.uint8)))
        rows, weights = padding((size,))
        found = self._rows(self._slots.positions(number * size, (number + 1) * size))
        rows[: found.size] = found
        weights[: found.size] = 1
        return MicroBatch(*frozen(rows, weights))

    def _rows(self, positions: Int64Array) -> Int64Array:
        """Return the rows at positions of the epoch's order, in the lanes or in the remainder."""
        lane, place = np.empty_like(positions), np.empty_like(positions)
        main = positions < self._num_main
        micro, slot = np.divmod(positions[main], self._size)
        lane[main] = micro % self.interleave.num_lanes
        place[main] = micro // self.interleave.num_lanes * self._size + slot
        if self._remainder is not None and not main.all():
            remaining = self._remainder(positions[~main] - self._num_main)
            lanes = np.searchsorted(self._remainder_before, remaining, side="right") - 1
            lane[~main] = lanes
            place[~main] = self.interleave.num_common * self._size + remaining - self._remainder_before[lanes]
        rows = np.empty_like(positions)
        for number in np.unique(lane).tolist():
            here = lane == number
            rows[here] = self._windows.take(number, place[here])
        return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSummary:
    """Numbers of the lanes and windows of one epoch."""

    lanes: int
    window_bytes: int
    num_chunks: int
    num_windows: int
    num_remainder: int
    """Samples, or micro-batches under a budget, that steps do not take equally from all lanes."""
    remainder_share: float
    num_shards: int
    num_shards_open: int
    """Largest number of shards that are open at the same time, with one window per lane; up to twice as many
    while windows change."""
    num_over_budget: int
    """Samples longer than the token budget."""

    def to_json(self) -> dict[str, int | float]:
        """Return the numbers as a JSON object; the remainder keeps the keys of older versions."""
        numbers = asdict(self)
        numbers["num_pooled"] = numbers.pop("num_remainder")
        numbers["pooled_share"] = numbers.pop("remainder_share")
        return numbers

    def lines(self) -> dict[str, str]:
        """Return the numbers as text by label."""
        return {
            "lanes": (
                f"{self.lanes:,} of {self.num_chunks:,} chunks, {self.num_windows:,} windows of about "
                f"{self.window_bytes:,} bytes"
            ),
            "remainder": f"{self.remainder_share:.1%}, the lanes' uneven ends",
            "shards open": f"{self.num_shards_open:,} of {self.num_shards:,}",
        }


class BudgetSlots:
    """Tail of an epoch under a token budget; numbers that need open windows are computed on request.

    Args:
        micros: The micro-batches.
        spec: The batch spec, with a budget.
        num_samples: Samples of the population.
        num_skipped: Samples over the budget that are skipped by rule.
    """

    def __init__(
        self, micros: BudgetMicroBatches, spec: BatchSpec, *, num_samples: int, num_skipped: int
    ) -> None:
        self.num_samples, self.num_skipped = num_samples, num_skipped
        self.num_steps = micros.num_steps
        self.num_padding_slots = micros.num_padding_micros
        self._micros, self._tail = micros, spec.tail
        self._end = micros.num_steps * spec.micro_batches_per_step

    @property
    def num_dropped(self) -> int:
        """Samples that the epoch leaves out: dropped by the tail, or skipped by rule."""
        left = self._micros.num_samples(self._end, self._micros.num_micros) if self._tail == "drop" else 0
        return left + self.num_skipped

    @property
    def num_repeated(self) -> int:
        """Samples that the tail repeats."""
        return self._micros.num_samples(self._micros.num_micros, self._end) if self._tail == "repeat" else 0


class LanePlan:
    """The lanes of one epoch.

    Args:
        layout: The population.
        lanes: Its lanes.
        spec: The batch spec, with lanes.
        seed: Run-level seed.
        epoch: Number of the epoch.

    Attributes:
        slots: Steps and tail in numbers.
        micros: The micro-batches of the epoch.
        filled: The windows under a budget; None without one.

    Raises:
        PlanError: No step can be formed, or a fact is missing.
    """

    slots: EpochSlots | BudgetSlots
    micros: LaneMicroBatches | BudgetMicroBatches

    def __init__(self, layout: SampleLayout, lanes: Lanes, spec: BatchSpec, *, seed: int, epoch: int) -> None:
        self.layout, self.lanes, self.spec, self._seed = layout, lanes, spec, seed
        self.windows = windows = LaneWindows(
            layout, lanes, window_bytes=spec.window_bytes, seed=seed, epoch=epoch
        )
        self.filled = None
        per_step = spec.micro_batches_per_step
        if spec.budget is None:
            self.slots = EpochSlots.of(int(windows.num_samples.sum()), spec)
            self.micros = LaneMicroBatches(
                windows, self.slots, size=spec.micro_batch_size, per_step=per_step, seed=seed, epoch=epoch
            )
            return
        self.filled = filled = BudgetWindows(layout, windows, spec.budget, seed=seed, epoch=epoch)
        self.micros = BudgetMicroBatches(windows, filled, spec, seed=seed, epoch=epoch)
        self.slots = BudgetSlots(
            self.micros,
            spec,
            num_samples=int(windows.num_samples.sum()),
            num_skipped=filled.num_over_budget if spec.budget.over_budget == "skip" else 0,
        )

    @classmethod
    def first(cls, layout: SampleLayout, spec: BatchSpec, *, seed: int, epoch: int) -> LanePlan:
        """Cut the lanes of a run, and plan one of its epochs."""
        lanes: Lanes
        weigh = None if spec.budget is None else partial(weigh_tokens, budget=spec.budget)
        if isinstance(layout, BlendLayout):
            lanes = BlendLanes(layout, spec.lanes, seed=seed, weigh=weigh)
        else:
            lanes = LaneMap.of(layout, spec.lanes, seed=seed, weigh=weigh(layout) if weigh else None)
        return cls(layout, lanes, spec, seed=seed, epoch=epoch)

    def for_epoch(self, epoch: int) -> LanePlan:
        """Plan another epoch in the same lanes."""
        return LanePlan(self.layout, self.lanes, self.spec, seed=self._seed, epoch=epoch)

    def summary(self) -> LaneSummary:
        """Return the numbers of the epoch."""
        if isinstance(self.micros, LaneMicroBatches):
            num_remainder, of = self.micros.num_remainder, self.slots.num_samples
        else:
            num_remainder, of = self.micros.interleave.num_remainder, self.micros.num_micros
        return LaneSummary(
            lanes=self.spec.lanes,
            window_bytes=self.spec.window_bytes,
            num_chunks=self.lanes.num_chunks,
            num_windows=self.windows.num_windows,
            num_remainder=num_remainder,
            remainder_share=num_remainder / max(1, of),
            num_shards=self.layout.num_shards,
            num_shards_open=self._num_shards_open(),
            num_over_budget=0 if self.filled is None else self.filled.num_over_budget,
        )

    def _num_shards_open(self) -> int:
        counts = np.diff(self.windows.lane_windows)
        most = 0
        for window in range(int(counts.max(initial=0))):
            lanes = np.flatnonzero(counts > window).tolist()
            shards = [self.windows.shards(lane, window) for lane in lanes]
            most = max(most, len(np.unique(np.concatenate(shards))))
        return most
