"""From a run folder to the numbers of its page, in bounded memory however long the run was."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shardflow.monitoring.goodput import Goodput, GoodputMeter
from shardflow.monitoring.lines import MetricsLine, run_name
from shardflow.monitoring.run_file import RunFile
from shardflow.monitoring.run_page.columns import (
    MOST_POINTS,
    MOST_STRETCHES,
    StepColumns,
    Stretch,
    Stretches,
    number,
)
from shardflow.monitoring.run_page.settings import shown_settings
from shardflow.monitoring.settings import read_settings
from shardflow.monitoring.verdict import Settings, judge
from shardflow.monitoring.verdict.judging import WINDOW
from shardflow.telemetry import Interval, Move, Verdict

__all__ = ["Check", "Checkpoints", "Restart", "RunNumbers", "VerdictSpan", "VerdictTotal", "read_run"]

_MOST_MOVES: Final = 200
_MOST_RESTARTS: Final = 200
_MOST_CODES: Final = 40
_MOST_JUDGED: Final = 2000
_MEASURED_S: Final = {"step": "step_s", "checkpoint": "stall_s", "evaluation": "evaluation_s"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """An evaluation, or the last one of several where there are very many."""

    step: int
    """Steps done before it."""
    time_s: float
    """When it ended, since the run began."""
    loss: float | None
    seconds: float


@dataclass(slots=True)
class Checkpoints:
    """Checkpoints that stand close together."""

    step: int
    time_s: float
    """When the last of them stood, since the run began."""
    number: int = 0
    stall_s: float = 0.0
    most_stall_s: float = 0.0
    write_s: float = 0.0
    num_bytes: int = 0
    """Of the last."""


@dataclass(slots=True)
class Restart:
    """A start after the first; times since the run began."""

    step: int
    """Where it began."""
    reached: int
    """Steps that had been done before it."""
    died_s: float
    """When the start before it measured last."""
    num_lost_steps: int = 0
    """Steps of the start before it that were done again."""
    lost_from_s: float | None = None
    """When the first of them began."""
    began_s: float | None = None
    """When its own first step began; None if it measured none."""


@dataclass(slots=True)
class VerdictTotal:
    """A verdict over the whole run."""

    code: str
    num_steps: int = 0
    """Steps that it was the most important verdict of."""
    number: int = 0
    """How often it was given."""
    first: int = 0
    last: Verdict | None = None


@dataclass(slots=True)
class VerdictSpan:
    """Consecutive steps with the same most important verdict."""

    code: str
    first: int
    last: int
    began_s: float
    ended_s: float


@dataclass(kw_only=True, slots=True)
class RunNumbers:
    """All that the page says about a run."""

    name: str
    """Last part of the folder's path."""
    began_at_s: float = 0.0
    """Seconds since 1970; 0 for a run without lines."""
    wall_s: float = 0.0
    """To the newest line."""
    num_steps: int = 0
    """One more than the largest global step that counts."""
    goodput: Goodput
    steps: Mapping[str, list[float | None]]
    """See `StepColumns`."""
    steps_per_row: int = 1
    stretches: list[Stretch]
    num_planned_steps: int = 0
    """Of the whole run; 0 where it is not known."""
    outcome: str = ""
    """How the newest start ended, ``finished`` or ``stopped``; empty while it goes on, or after a kill."""
    latest: Interval | None = None
    """The newest interval."""
    evaluations: list[Check] = field(default_factory=list)
    checkpoints: list[Checkpoints] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    num_restarts: int = 0
    verdicts: list[VerdictTotal] = field(default_factory=list)
    """The one of most steps first."""
    is_judged_here: bool = False
    """Whether the verdicts were made of the intervals just now; the run wrote none."""
    verdict_spans: list[VerdictSpan] = field(default_factory=list)
    moves: list[tuple[float, Move]] = field(default_factory=list)
    """The newest, with when each was, since the run began."""
    num_moves: int = 0
    settings: dict[str, str] = field(default_factory=dict)
    knobs: dict[str, str] = field(default_factory=dict)
    """As they stood in the first interval."""
    surroundings: dict[str, str] = field(default_factory=dict)
    """Versions and device, as the newest start wrote them."""
    total_samples: float = 0.0
    total_tokens: float = 0.0
    num_damaged: int = 0
    """Lines that were left out."""


def read_run(run: Path) -> RunNumbers:
    """Read a run that has ended, goes on, or has measured nothing yet.

    Raises:
        ConfigError: The folder holds no metrics.
        StorageError: They cannot be read.
    """
    file, settings = RunFile(run), read_settings(run)
    judge_every = 0 if file.has_verdicts else max(1, -(-file.num_intervals // _MOST_JUDGED))
    reader = _Reader(file.num_steps, judge_every, settings)
    for line, counts in file.lines():
        reader.add(line, counts=counts)
    numbers = reader.finish(run_name(run))
    numbers.settings = shown_settings(settings)
    numbers.num_damaged = file.num_damaged
    return numbers


class _Reader:
    """Takes lines in their order."""

    def __init__(self, num_steps: int, judge_every: int, config: Settings) -> None:
        self._judge_every = judge_every
        self._config = config
        self._newest: deque[Interval] = deque(maxlen=WINDOW + 1)
        self._num_intervals = 0
        self._before: list[Verdict] = []
        self._meter = GoodputMeter()
        self._steps = StepColumns(num_steps)
        self._stretches = Stretches(num_steps)
        self._steps_per_mark = max(1, math.ceil(num_steps / MOST_POINTS))
        self._steps_per_span = max(1, math.ceil(num_steps / MOST_STRETCHES))
        self._moves: deque[tuple[float, Move]] = deque(maxlen=_MOST_MOVES)
        self._totals: dict[str, VerdictTotal] = {}
        self._judged = -1
        self._died_s = 0.0
        self._reached = 0
        self._num_lost = 0
        self._lost_from_s: float | None = None
        self._is_first = True
        self._num_starts = 0
        self.run = RunNumbers(name="", goodput=self._meter.measured(), steps={}, stretches=[])

    def add(self, line: MetricsLine, *, counts: bool) -> None:
        self._meter.add(line)
        kind, event = line.event, line.values
        if self._is_first:
            self._is_first, self.run.began_at_s = False, line.time_s
        time_s = line.time_s - self.run.began_at_s
        self.run.wall_s = max(self.run.wall_s, time_s)
        if kind == "attempt":
            self._start(event)
            return
        if kind in ("plan", "end"):
            self.run.num_planned_steps = event["num_steps"] if kind == "plan" else self.run.num_planned_steps
            self.run.outcome = event["outcome"] if kind == "end" else ""
            return
        if kind in _MEASURED_S:
            self._measured(line, time_s, counts=counts)
        if counts and line.record is not None:
            self._conclude(line.record, time_s)
        elif counts:
            self._count(event, kind, time_s)

    def _start(self, event: Mapping[str, Any]) -> None:
        self.run.outcome = ""
        versions = event.get("versions")
        self.run.surroundings = {
            **({str(name): str(one) for name, one in versions.items()} if isinstance(versions, dict) else {}),
            **({"device": str(event["device"])} if event.get("device") else {}),
        }
        self._num_starts += 1
        if self._num_starts > 1:
            self.run.num_restarts += 1
            restart = Restart(event["start"], self._reached, self._died_s)
            restart.num_lost_steps, restart.lost_from_s = self._num_lost, self._lost_from_s
            self.run.restarts.append(restart)
            del self.run.restarts[:-_MOST_RESTARTS]
        self._num_lost, self._lost_from_s = 0, None

    def _measured(self, line: MetricsLine, time_s: float, *, counts: bool) -> None:
        kind, event = line.event, line.values
        began_s = time_s - event[_MEASURED_S[kind]]
        restarts = self.run.restarts
        if restarts and restarts[-1].began_s is None:
            restarts[-1].began_s = max(began_s, restarts[-1].died_s)
        self._died_s = max(self._died_s, time_s)
        if kind == "step":
            self._reached = event["global_step"] + 1
        if not counts:
            self._num_lost += kind == "step"
            self._lost_from_s = began_s if self._lost_from_s is None else self._lost_from_s

    def _count(self, event: Mapping[str, Any], kind: str, time_s: float) -> None:
        run = self.run
        match kind:
            case "step":
                self._steps.add(event, time_s)
                run.num_steps = max(run.num_steps, event["global_step"] + 1)
                run.total_samples += event["num_samples"]
                run.total_tokens += event["num_tokens"]
            case "checkpoint":
                self._checkpoint(event, time_s)
            case "evaluation":
                step, loss = event["global_step"], number(event.get("loss"))
                check = Check(step=step, time_s=time_s, loss=loss, seconds=event["evaluation_s"])
                if run.evaluations and self._is_near(run.evaluations[-1].step, step):
                    run.evaluations[-1] = check
                else:
                    run.evaluations.append(check)

    def _conclude(self, record: Interval | Verdict | Move, time_s: float) -> None:
        run = self.run
        match record:
            case Interval():
                self._stretches.add(record, time_s)
                if run.latest is None:
                    run.knobs = {name: str(value) for name, value in record.settings.items()}
                run.latest = record
                run.num_planned_steps = record.total_steps or run.num_planned_steps
                self._judge_ourselves(record, time_s)
            case Verdict():
                self._judge(record, time_s)
            case Move():
                run.num_moves += 1
                self._moves.append((time_s, record))

    def _is_near(self, one: int, other: int) -> bool:
        return one // self._steps_per_mark == other // self._steps_per_mark

    def _checkpoint(self, event: Mapping[str, Any], time_s: float) -> None:
        step, stall_s = event["global_step"], event["stall_s"]
        rows = self.run.checkpoints
        if not rows or not self._is_near(rows[-1].step, step):
            rows.append(Checkpoints(step, time_s))
        row = rows[-1]
        row.step, row.time_s = step, time_s
        row.number += 1
        row.stall_s += stall_s
        row.most_stall_s = max(row.most_stall_s, stall_s)
        row.write_s += event["write_s"]
        row.num_bytes = event["num_bytes"]

    def _judge_ourselves(self, interval: Interval, time_s: float) -> None:
        """Say what a run that wrote no verdicts was bound by."""
        self._newest.append(interval)
        self._num_intervals += 1
        if self._judge_every and self._num_intervals % self._judge_every == 0:
            self.run.is_judged_here = True
            self._before = judge(list(self._newest), config=self._config, before=self._before)
            for verdict in self._before:
                self._judge(verdict, time_s)

    def _judge(self, verdict: Verdict, time_s: float) -> None:
        code = verdict.code if verdict.code in self._totals or len(self._totals) < _MOST_CODES else "others"
        total = self._totals.setdefault(code, VerdictTotal(code, first=verdict.global_step))
        total.number += 1
        total.last = verdict
        # The first of several is the most important; it stands for the steps since the one before.
        if verdict.global_step <= self._judged:
            return
        total.num_steps += verdict.global_step - self._judged
        spans = self.run.verdict_spans
        before_s = spans[-1].ended_s if spans else 0.0
        first, self._judged = self._judged + 1, verdict.global_step
        last = spans[-1] if spans else None
        is_short = last is not None and first // self._steps_per_span == last.first // self._steps_per_span
        if last is not None and (last.code == code or is_short):
            last.last, last.ended_s = verdict.global_step, time_s
        else:
            spans.append(VerdictSpan(code, first, verdict.global_step, before_s, time_s))

    def finish(self, name: str) -> RunNumbers:
        run = self.run
        self._steps.finish()
        run.name = name
        run.goodput = self._meter.measured()
        run.steps, run.steps_per_row = self._steps.columns, self._steps.steps_per_row
        run.stretches = self._stretches.finish()
        run.moves = list(self._moves)
        run.verdicts = sorted(self._totals.values(), key=lambda one: (-one.num_steps, one.first))
        return run
