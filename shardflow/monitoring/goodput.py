"""Goodput of a run: its wall time by purpose, over all its starts.

Computed from ``metrics.jsonl`` alone, for a running or finished run. Goodput is the share of useful steps, or
effective training time ratio (Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research
Clusters, 2024); waits for data do not count as training.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from shardflow.monitoring.history import MetricsLine, MetricsTail

SECONDS: Final = {"step": "step_s", "checkpoint": "stall_s", "evaluation": "evaluation_s"}
"""Events that take a run's time, and the key that holds the seconds."""


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
    """How long training was paused for checkpoints that count."""
    evaluation_s: float
    """Evaluations that count."""
    restart_s: float
    """Before the first step, and from the last thing that a start measured to the first step of the next."""
    lost_s: float
    """Steps, checkpoints and evaluations that a later start did again."""
    other_s: float
    """Everything between these: logging, agreement between ranks, other work of the loop."""
    num_starts: int
    num_steps: int
    """Steps that count."""
    num_lost_steps: int

    def share(self, part: str) -> float:
        """Return a part, such as ``lost_s``, of ``wall_s``; 0 for a run without time."""
        return min(1.0, getattr(self, part) / self.wall_s) if self.wall_s else 0.0

    @property
    def steps_s(self) -> float:
        """Time of the steps that count, waits for data included."""
        return self.useful_s + self.data_wait_s

    @property
    def useful_share(self) -> float:
        """``useful_s`` of ``wall_s``, 0 to 1; 0 for a run without time."""
        return self.share("useful_s")

    def to_json(self) -> dict[str, Any]:
        """Return all numbers and the share."""
        return {**asdict(self), "useful_share": self.useful_share}


class _Done:
    """Measurements of one kind that count so far, in the order of steps; 24 bytes each.

    Attributes:
        total_s: Of all that counts.
        total_wait_s: The same of waits for data.
    """

    __slots__ = ("_steps_done", "_totals", "_wait_totals")

    def __init__(self) -> None:
        self._steps_done = array("q")
        # Running sums, so that neither a query nor a restart adds all of them up again.
        self._totals = array("d", [0.0])
        self._wait_totals = array("d", [0.0])

    def __len__(self) -> int:
        return len(self._steps_done)

    @property
    def total_s(self) -> float:
        return self._totals[-1]

    @property
    def total_wait_s(self) -> float:
        return self._wait_totals[-1]

    def add(self, steps_done: int, seconds: float, wait_s: float) -> None:
        self._steps_done.append(steps_done)
        self._totals.append(self._totals[-1] + seconds)
        self._wait_totals.append(self._wait_totals[-1] + wait_s)

    def take_after(self, start: int) -> tuple[int, float]:
        """Remove what a start at a global step repeats; return how many measurements, and their seconds."""
        keep = len(self._steps_done)
        while keep and self._steps_done[keep - 1] > start:
            keep -= 1
        num_lost, lost_s = len(self._steps_done) - keep, self._totals[-1] - self._totals[keep]
        del self._steps_done[keep:]
        for totals in (self._totals, self._wait_totals):
            del totals[keep + 1 :]
        return num_lost, lost_s


class GoodputMeter:
    """Splits a run's time by purpose, line by line in the order of the file."""

    def __init__(self) -> None:
        self._done = {kind: _Done() for kind in SECONDS}
        self._lost_s = 0.0
        self._num_lost_steps = 0
        self._began_at = self._last_at = self._restart_s = 0.0
        self._num_starts = 0
        self._is_starting = False

    def add(self, line: MetricsLine) -> None:
        """Add the next line; lines without a duration are ignored."""
        kind, values = line.event, line.values
        if kind == "attempt":
            self._start(values["start"], line.time_s)
        elif kind in SECONDS and self._num_starts:
            seconds = float(values[SECONDS[kind]])
            if self._is_starting:
                self._restart_s += max(0.0, line.time_s - seconds - self._last_at)
                self._is_starting = False
            self._last_at = max(self._last_at, line.time_s)
            # A step is named by its number, all else by the number of steps done before it.
            steps_done = values["global_step"] + (kind == "step")
            wait_s = float(values["data_wait_s"]) if kind == "step" else 0.0
            self._done[kind].add(steps_done, seconds, wait_s)

    def measured(self) -> Goodput:
        """Return how the time was spent so far."""
        wall_s = max(0.0, self._last_at - self._began_at)
        steps = self._done["step"]
        parts = {
            "useful_s": steps.total_s - steps.total_wait_s,
            "data_wait_s": steps.total_wait_s,
            "checkpoint_s": self._done["checkpoint"].total_s,
            "evaluation_s": self._done["evaluation"].total_s,
            "restart_s": self._restart_s,
            "lost_s": self._lost_s,
        }
        return Goodput(
            wall_s=wall_s,
            **parts,
            # A checkpoint may overlap another measurement by some microseconds.
            other_s=max(0.0, wall_s - sum(parts.values())),
            num_starts=self._num_starts,
            num_steps=len(steps),
            num_lost_steps=self._num_lost_steps,
        )

    def _start(self, start: int, at: float) -> None:
        # Nothing is measured between the end of one start and this line: it is part of the restart.
        if not self._num_starts:
            self._began_at = self._last_at = at
        self._num_starts += 1
        self._is_starting = True
        for kind, done in self._done.items():
            num_lost, lost_s = done.take_after(start)
            self._lost_s += lost_s
            self._num_lost_steps += num_lost if kind == "step" else 0


def goodput_of(lines: Iterable[MetricsLine]) -> Goodput:
    """Return how the time of a run was spent.

    Args:
        lines: Of the run, in the order of the file.
    """
    meter = GoodputMeter()
    for line in lines:
        meter.add(line)
    return meter.measured()


def measure_goodput(run: Path) -> Goodput:
    """Measure a run.

    Args:
        run: The run folder.

    Raises:
        ConfigError: It holds no metrics.
        StorageError: They cannot be read.
    """
    return goodput_of(MetricsTail(run).read())
