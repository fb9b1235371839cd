"""What the tuner hears of each step, and what it makes of a window of them.

The rate of a window is the rate that can last: micro-batches that were only taken out of buffers, or made of
bytes that were fetched long ago, do not count. Without this a loop that lives on what was made or fetched
ahead would look as fast as one whose loader keeps up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shardflow.telemetry import STAGES

__all__ = ["LoaderTotals", "StepNumbers", "Window", "measure_window"]

_FETCH: Final = tuple(
    name
    for name, stage in STAGES.items()
    if stage.group == "fetch" and not stage.is_part_of and name != "cache_origin"
)
_MAKE: Final = tuple(name for name, stage in STAGES.items() if stage.group == "make")
_MOST_DRAINED: Final = 0.95
_RESTS: Final = 0.05
"""Threads that are busy for less have nothing to do, whatever the reason."""
_LEAST_MADE: Final = 0.5
"""Of what is taken: with less nobody knows what threads are needed for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderTotals:
    """What a loader has done since it was made; seconds are summed over its threads."""

    fetch_s: float = 0.0
    make_s: float = 0.0
    user_s: float = 0.0
    """Of ``make_s``: the user's own transform."""
    origin_s: float = 0.0
    """Threads that read ahead waited for the store behind the cache."""
    num_ready: float = 0.0
    """Micro-batches that are made and not taken."""
    num_ahead: float = 0.0
    """Micro-batches that are fetched and not begun."""

    @classmethod
    def of(cls, snapshot: Mapping[str, Mapping[str, float]]) -> LoaderTotals:
        """Return the totals of a snapshot of counters, see `shardflow.telemetry.StageCounters`."""

        def seconds(*names: str) -> float:
            return sum(snapshot[name]["seconds"] for name in names if name in snapshot)

        return cls(
            fetch_s=seconds(*_FETCH),
            make_s=seconds(*_MAKE),
            user_s=seconds("user_transform"),
            origin_s=seconds("cache_origin"),
            num_ready=snapshot.get("ready_batches", {}).get("last", 0.0),
            num_ahead=snapshot.get("ahead_batches", {}).get("last", 0.0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNumbers:
    """One step, as the rank that decides sees it."""

    step_s: float
    """Wall time, waiting for data included."""
    data_wait_s: float
    """Of the rank that waited longest."""
    num_samples: float = 0.0
    num_micro_batches: int = 1
    """That this rank took."""
    loader: LoaderTotals = field(default_factory=LoaderTotals)
    """At the end of the step."""
    gil_wait_share: float = 0.0
    """As last measured, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Steps in a row under the same settings."""

    num_steps: int
    rate: float
    """Steps a second that can last."""
    error: float
    """Standard error of the rate, as a share of it."""
    samples_per_s: float
    """At that rate."""
    wait_share: float
    """Of the steps' time that the loop waits for data, or will once what lies ready is used up."""
    own_s: float
    """Of a step, without waiting."""
    drained: float
    """Of the micro-batches: those that came out of what was made or fetched before, 0 to 1."""
    num_fetching: float
    """Threads of the loader that read, on average; 1.5 of 2 is one and a half."""
    num_making: float
    """Threads of the loader that check, decode, transform."""
    num_needed: float
    """Threads that are busy when as much is made as is taken; infinite where too little was made to tell."""
    user_share: float
    """Of their making: the user's own transform."""
    origin_share: float
    """Of the steps' time that the store behind the cache was waited for, summed over the threads that read
    ahead: above 1 where several wait."""
    gil_wait_share: float

    @property
    def is_fetching(self) -> bool:
        """Whether bytes hold the loader up more than what is made of them."""
        return self.num_fetching > self.num_making

    @property
    def num_busy(self) -> float:
        """Threads of the loader at work, on average."""
        return self.num_fetching + self.num_making


def measure_window(before: LoaderTotals, steps: Sequence[StepNumbers], num_threads: int = 1) -> Window:
    """Measure a window.

    Args:
        before: The loader at the end of the step before.
        steps: At least one.
        num_threads: Of the loader.
    """
    num, seconds = len(steps), sum(step.step_s for step in steps)
    waited = sum(min(step.data_wait_s, step.step_s) for step in steps)
    after = steps[-1].loader
    wall_s = max(seconds, 1e-9)
    fetching_s = max(0.0, after.fetch_s - before.fetch_s)
    making_s = max(0.0, after.make_s - before.make_s)
    num_busy = (fetching_s + making_s) / wall_s
    # What is made falls short of what is taken by what fewer lie ready, and what is fetched falls short of
    # that by what fewer lie ahead. A loader whose threads rest makes less than it can: an epoch has no more
    # to make, or there is less room than before.
    taken = [step.num_micro_batches for step in steps]
    num_taken = max(1, sum(taken))
    seen = [before, *(step.loader for step in steps)]
    num_made = num_taken - _fall([one.num_ready for one in seen], taken)
    busy_share = min(1.0, num_busy / num_threads)
    could_make = num_made / busy_share if busy_share > _RESTS else num_taken
    fallen = max(0.0, num_taken - could_make) + _fall([one.num_ahead for one in seen], taken)
    drained = min(_MOST_DRAINED, fallen / num_taken)
    rate = num / wall_s * (1 - drained)
    own_s = (seconds - waited) / num
    return Window(
        num_steps=num,
        rate=rate,
        error=_error([step.step_s for step in steps]),
        samples_per_s=sum(step.num_samples for step in steps) / num * rate,
        wait_share=max(0.0, 1 - rate * own_s),
        own_s=own_s,
        drained=drained,
        num_fetching=fetching_s / wall_s,
        num_making=making_s / wall_s,
        num_needed=num_busy * num_taken / num_made if num_made > _LEAST_MADE * num_taken else math.inf,
        user_share=max(0.0, after.user_s - before.user_s) / max(making_s, 1e-9),
        origin_share=max(0.0, after.origin_s - before.origin_s) / wall_s,
        gil_wait_share=steps[-1].gil_wait_share,
    )


def _fall(seen: Sequence[float], taken: Sequence[int]) -> float:
    """Return by how much a level falls on the straight line through what was seen of it; 0 where it rises.

    A single look is too high or too low by as much as a window's fall. What falls by more than was taken was
    dropped: a new epoch's stream begins with nothing.
    """
    level, levels = seen[0], [seen[0]]
    for old, new, most in zip(seen, seen[1:], taken, strict=False):
        level += max(new - old, -most)
        levels.append(level)
    num, middle = len(levels), (len(levels) - 1) / 2
    mean = sum(levels) / num
    spread = sum((place - middle) ** 2 for place in range(num))
    slope = sum((place - middle) * (level - mean) for place, level in enumerate(levels)) / spread
    return max(0.0, -slope * (num - 1))


def _error(seconds: Sequence[float]) -> float:
    """Standard error of the mean as a share of it."""
    num = len(seconds)
    mean = sum(seconds) / num
    if num < 2 or mean <= 0:
        return 1.0
    variance = sum((one - mean) ** 2 for one in seconds) / (num - 1)
    return math.sqrt(variance / num) / mean
