"""Live state of a run in bounded memory: the numbers that ``shardflow top`` draws.

Decides which numbers are shown and how they are condensed; knows nothing of terminals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from shardflow.errors import ConfigError, StorageError
from shardflow.monitoring.goodput import Goodput, GoodputMeter
from shardflow.monitoring.history import MetricsLine, RunHistory, run_name
from shardflow.telemetry import Interval, Move, Verdict

RunState = Literal["waiting", "starting", "running", "silent", "finished", "stopped"]
"""``waiting``: nothing is written yet. ``silent``: no new line for long; the run hangs, or was killed."""

Step = Mapping[str, Any]
"""The line of a step."""

_NUM_KEPT: Final = 512
_RECENT_S: Final = 15.0
_LEAST_RECENT: Final = 8
_SILENT_S: Final = 30.0
_SILENT_STEPS: Final = 10
"""A run is silent after so many seconds, and so many of its steps, without a line."""
_STARTING_S: Final = 900.0
_SKEW_S: Final = 5.0
"""Clocks of machines, and folders that they share, lag by less; a larger lag is subtracted from ages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveView:
    """State of a run at an instant."""

    name: str
    """Of its folder."""
    state: RunState
    now_s: float
    """Seconds since 1970."""
    age_s: float = 0.0
    """Since the newest line."""
    num_done: int = 0
    """Steps."""
    num_steps: int = 0
    """Of the whole run; 0 while it is not known."""
    epoch: int = 0
    num_starts: int = 0
    ended_s: float = 0.0
    """When it finished or was stopped; 0 else."""
    left_s: float | None = None
    """Time to the end at the pace of the last steps, checkpoints and evaluations counted; None if unknown."""
    recent: tuple[Step, ...] = ()
    """The newest steps of this start, at most 512."""
    steps_per_s: float = 0.0
    """Over the last 15 seconds, and at least eight steps."""
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    wait_share: float = 0.0
    """Of these steps' time, the wait for data of the rank that waited longest."""
    step: Step | None = None
    """The newest line of a step."""
    losses: tuple[float, ...] = ()
    """Over the whole run, condensed."""
    evaluation: Mapping[str, Any] | None = None
    checkpoint: Mapping[str, Any] | None = None
    interval: Interval | None = None
    """The newest one, apart from a short last one at the end of a run."""
    verdicts: tuple[Verdict, ...] = ()
    """Of the newest judgement, the most important one first."""
    verdict_since: int = 0
    """Step since which the most important one has led."""
    moves: tuple[Move, ...] = ()
    """Of the tuner, the newest one last."""
    goodput: Goodput | None = None
    num_damaged: int = 0
    """Lines that were left out, see `shardflow.monitoring.history`."""


class Curve:
    """A curve over a run of any length in bounded memory: means over ever longer groups of steps.

    Args:
        most: Groups that are held; when there are more, each two neighbors become one.
    """

    def __init__(self, most: int = _NUM_KEPT) -> None:
        self._most = most
        self._steps_each = 1
        self._groups: dict[int, tuple[float, int]] = {}

    def add(self, step: int, value: float | None) -> None:
        """Add the value of a step; None is ignored. Steps arrive in order."""
        if value is None:
            return
        _add(self._groups, step // self._steps_each, value, 1)
        if len(self._groups) > self._most:
            self._steps_each *= 2
            joined: dict[int, tuple[float, int]] = {}
            for number, (total, count) in self._groups.items():
                _add(joined, number // 2, total, count)
            self._groups = joined

    def go_back_to(self, step: int) -> None:
        """Drop the values of this step and later ones, and of the group that holds it."""
        self._groups = {
            number: held for number, held in self._groups.items() if (number + 1) * self._steps_each <= step
        }

    def values(self) -> tuple[float, ...]:
        """Return the mean of each group, in order."""
        return tuple(total / count for total, count in self._groups.values())


def _add(groups: dict[int, tuple[float, int]], number: int, total: float, count: int) -> None:
    before, held = groups.get(number, (0.0, 0))
    groups[number] = (before + total, held + count)


class LiveRun:
    """Follows a run.

    Args:
        run: The run folder; it need not exist yet.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._begin()

    def _begin(self) -> None:
        self._history = RunHistory(self._run, keep=_NUM_KEPT, on_line=self._take)
        self._meter = GoodputMeter()
        self._losses = Curve()
        self._attempt_start = 0
        self._skew_s = math.inf

    def follow(self, now_s: float) -> LiveView:
        """Read the new lines and return the state of the run.

        Args:
            now_s: The current time, seconds since 1970.
        """
        if self._history.is_of_another_run:
            self._begin()
        was_known = self._history.last_event_s > 0
        try:
            if self._history.follow() and was_known:
                self._skew_s = min(self._skew_s, now_s - self._history.last_event_s)
        except ConfigError:  # not there yet, or gone, which may be for a moment only
            return LiveView(name=run_name(self._run), state="waiting", now_s=now_s)
        except StorageError:
            pass  # show what was read last until the file can be read again
        return self._view(now_s)

    def _take(self, line: MetricsLine) -> None:
        self._meter.add(line)
        if line.event == "attempt":
            self._attempt_start = line.values["start"]
            self._losses.go_back_to(self._attempt_start)
        elif line.event == "step":
            self._losses.add(line.values["global_step"], line.values.get("loss"))

    def _view(self, now_s: float) -> LiveView:
        history = self._history
        name = run_name(self._run)
        if not history.last_event_s:
            return LiveView(name=name, state="waiting", now_s=now_s)
        attempt = history.attempts[-1]["attempt"] if history.attempts else 1
        recent = tuple(line for line in history.steps[-_NUM_KEPT:] if line["attempt"] == attempt)
        pace_s = _pace_s(recent)
        age_s = self._age_s(now_s)
        state = self._state(age_s, pace_s, has_steps=bool(recent))
        last = history.steps[-1] if history.steps else None
        num_done = last["global_step"] + 1 if last is not None else self._attempt_start
        goodput = self._meter.measured()
        samples, tokens, steps_per_s = _rates(recent)
        verdicts, verdict_since = _newest_verdicts([one for _, one in history.verdicts[-_NUM_KEPT:]])
        num_left = history.num_planned_steps - num_done
        return LiveView(
            name=name,
            state=state,
            now_s=now_s,
            age_s=age_s,
            num_done=num_done,
            num_steps=history.num_planned_steps,
            epoch=last["epoch"] if last is not None else 0,
            num_starts=goodput.num_starts,
            ended_s=history.end["time_s"] if history.end is not None else 0.0,
            left_s=max(0.0, num_left * pace_s - age_s)
            if pace_s and num_left > 0 and state == "running"
            else None,
            recent=recent,
            steps_per_s=steps_per_s,
            samples_per_s=samples,
            tokens_per_s=tokens,
            wait_share=_wait_share(_newest(recent)),
            step=last,
            losses=self._losses.values(),
            evaluation=history.evaluations[-1] if history.evaluations else None,
            checkpoint=history.checkpoints[-1] if history.checkpoints else None,
            interval=_newest_interval([one for _, one in history.intervals[-2:]]),
            verdicts=verdicts,
            verdict_since=verdict_since,
            moves=tuple(move for _, move in history.moves[-8:]),
            goodput=goodput,
            num_damaged=history.num_damaged,
        )

    def _age_s(self, now_s: float) -> float:
        age_s = now_s - self._history.last_event_s
        if math.isfinite(self._skew_s) and abs(self._skew_s) > _SKEW_S:
            age_s -= self._skew_s
        return max(0.0, age_s)

    def _state(self, age_s: float, pace_s: float, *, has_steps: bool) -> RunState:
        end = self._history.end
        if end is not None:
            return "finished" if end["outcome"] == "finished" else "stopped"
        if not has_steps:
            # Data, compilation and connections come before the first step.
            return "starting" if age_s < _STARTING_S else "silent"
        return "silent" if age_s > max(_SILENT_S, _SILENT_STEPS * pace_s) else "running"


def _newest(recent: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return the steps that current rates are computed from."""
    if not recent:
        return ()
    since_s = recent[-1]["time_s"] - _RECENT_S
    first = len(recent)
    while first and (recent[first - 1]["time_s"] > since_s or len(recent) - first < _LEAST_RECENT):
        first -= 1
    return recent[first:]


def _began_s(points: tuple[Step, ...]) -> float:
    """Return when the first of some steps began."""
    return float(points[0]["time_s"] - points[0]["step_s"])


def _pace_s(recent: tuple[Step, ...]) -> float:
    """Return the wall time of a step with what comes between steps; 0 before the first."""
    # The first step builds connections, and may compile.
    points = recent[1:] or recent
    return max(0.0, points[-1]["time_s"] - _began_s(points)) / len(points) if points else 0.0


def _rates(recent: tuple[Step, ...]) -> tuple[float, float, float]:
    """Return samples, tokens and steps per second."""
    points = _newest(recent)
    span_s = points[-1]["time_s"] - _began_s(points) if points else 0.0
    if span_s <= 0:
        return 0.0, 0.0, 0.0
    samples = math.fsum(point["num_samples"] for point in points)
    tokens = math.fsum(point["num_tokens"] for point in points)
    return samples / span_s, tokens / span_s, len(points) / span_s


def _wait_share(points: tuple[Step, ...]) -> float:
    total_s = math.fsum(point["step_s"] for point in points)
    return min(1.0, math.fsum(point["data_wait_s"] for point in points) / total_s) if total_s else 0.0


def _newest_interval(intervals: list[Interval]) -> Interval | None:
    """Return the newest interval, or the one before a run's short last one, whose loader had run dry."""
    if len(intervals) == 2 and not any(one.is_warm_up for one in intervals):
        before, last = intervals
        if last.step_s < before.step_s / 2 and last.num_steps < before.num_steps:
            return before
    return intervals[-1] if intervals else None


def _newest_verdicts(found: list[Verdict]) -> tuple[tuple[Verdict, ...], int]:
    """Return the verdicts of the newest step that was judged, and since when the first one has led."""
    if not found:
        return (), 0
    newest = tuple(one for one in found if one.global_step == found[-1].global_step)
    since = newest[0].global_step
    leading: dict[int, str] = {}
    for one in found:
        leading.setdefault(one.global_step, one.code)
    for step in sorted(leading, reverse=True):
        if leading[step] != newest[0].code:
            break
        since = step
    return newest, since
