"""Where the time of a run went, over all its starts: steps that count, waits, restarts, lost work.

Read from ``metrics.jsonl`` alone, of a run that goes on or has ended. The share of useful steps is what
others call goodput, or the effective training time ratio (Kokolis et al., Revisiting Reliability in
Large-Scale Machine Learning Research Clusters, 2024), with the wait for data counted as what it is: no
training.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from shardflow.monitoring.tail import EventTail

__all__ = ["Goodput", "GoodputMeter", "measure_goodput"]

_SECONDS: Final = {"step": "step_s", "checkpoint": "stall_s", "evaluation": "evaluation_s"}
"""Events that take a run's time, and the key that says how much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """A run's time in seconds, in parts that add up to ``wall_s``."""

    wall_s: float
    """From when the first start had joined its ranks to the last thing that was measured."""
    useful_s: float
    """Steps that count, without their wait for data."""
    data_wait_s: float
    """How long the slowest rank waited for data in steps that count."""
    checkpoint_s: float
    """How long training stood still for checkpoints that count."""
    evaluation_s: float
    """Evaluations that count."""
    restart_s: float
    """Before the first step, and from the last thing that a start measured to the first step of the next."""
    lost_s: float
    """Steps, checkpoints and evaluations that a later start did again."""
    other_s: float
    """Between these: logs, agreements between ranks, what a loop does beside its steps."""
    num_starts: int
    num_steps: int
    """Steps that count."""
    num_lost_steps: int

    @property
    def useful_share(self) -> float:
        """``useful_s`` of ``wall_s``, 0 to 1; 0 for a run without time."""
        return min(1.0, self.useful_s / self.wall_s) if self.wall_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return all numbers and the share."""
        return {**asdict(self), "useful_share": self.useful_share}


class _Done:
    """What was measured of one kind and counts so far, in the order of steps; 24 bytes each."""

    __slots__ = ("seconds", "steps_done", "waits")

    def __init__(self) -> None:
        self.steps_done = array("q")
        self.seconds = array("d")
        self.waits = array("d")

    def add(self, steps_done: int, seconds: float, wait_s: float) -> None:
        self.steps_done.append(steps_done)
        self.seconds.append(seconds)
        self.waits.append(wait_s)

    def take_after(self, start: int) -> list[float]:
        """Remove what a start after so many steps does again; returns the seconds of each."""
        keep = len(self.steps_done)
        while keep and self.steps_done[keep - 1] > start:
            keep -= 1
        lost = self.seconds[keep:].tolist()
        for column in (self.steps_done, self.seconds, self.waits):
            del column[keep:]
        return lost


class GoodputMeter:
    """Splits a run's time while its events come in, in their order."""

    def __init__(self) -> None:
        self._done = {kind: _Done() for kind in _SECONDS}
        self._lost: list[float] = []
        self._num_lost_steps = 0
        self._began_at = self._last_at = self._restart_s = 0.0
        self._num_starts = 0
        self._is_starting = False

    def add(self, event: Mapping[str, Any]) -> None:
        """Take an event; those that say nothing about time are left alone."""
        kind = event["event"]
        if kind == "attempt":
            self._start(int(event["start"]), float(event["time_s"]))
        elif kind in _SECONDS and self._num_starts:
            at, seconds = float(event["time_s"]), float(event[_SECONDS[kind]])
            if self._is_starting:
                self._restart_s += max(0.0, at - seconds - self._last_at)
                self._is_starting = False
            self._last_at = max(self._last_at, at)
            # A step is named by its number, all else by the number of steps done before it.
            steps_done = int(event["global_step"]) + (kind == "step")
            self._done[kind].add(steps_done, seconds, float(event.get("data_wait_s") or 0.0))

    def measured(self) -> Goodput:
        """Return how the time was spent so far."""
        wall_s = max(0.0, self._last_at - self._began_at)
        steps = self._done["step"]
        parts = {
            "useful_s": sum(steps.seconds) - sum(steps.waits),
            "data_wait_s": sum(steps.waits),
            "checkpoint_s": sum(self._done["checkpoint"].seconds),
            "evaluation_s": sum(self._done["evaluation"].seconds),
            "restart_s": self._restart_s,
            "lost_s": sum(self._lost),
        }
        return Goodput(
            wall_s=wall_s,
            **parts,
            # A checkpoint of a step may stand inside another interval by some microseconds.
            other_s=max(0.0, wall_s - sum(parts.values())),
            num_starts=self._num_starts,
            num_steps=len(steps.seconds),
            num_lost_steps=self._num_lost_steps,
        )

    def _start(self, start: int, at: float) -> None:
        # Between the end of one start and this line nothing is measured: it is part of the restart.
        if not self._num_starts:
            self._began_at = self._last_at = at
        self._num_starts += 1
        self._is_starting = True
        for kind, done in self._done.items():
            lost = done.take_after(start)
            self._lost += lost
            self._num_lost_steps += len(lost) if kind == "step" else 0


def measure_goodput(run: Path) -> Goodput:
    """Measure a run.

    Args:
        run: The run folder.

    Raises:
        ConfigError: It holds no metrics.
    """
    meter = GoodputMeter()
    for event in EventTail(run).read():
        meter.add(event)
    return meter.measured()
