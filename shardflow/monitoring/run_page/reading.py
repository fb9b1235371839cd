"""Data of the run page: a run folder condensed to bounded size, however long the run was.

Each group of steps keeps its minimum, median and maximum beside the mean, so that one slow step in ten
thousand is still visible.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from shardflow.monitoring.goodput import SECONDS, Goodput, GoodputMeter
from shardflow.monitoring.history import MetricsLine, RunFile, read_settings, run_name
from shardflow.monitoring.units import duration, show
from shardflow.monitoring.verdict.intervals import Settings
from shardflow.monitoring.verdict.judging import WINDOW, judge
from shardflow.telemetry import Interval, Move, RankNumbers, Verdict

MOST_POINTS: Final = 1200
"""Groups of steps: more than a page is wide."""
MOST_SUMMARIES: Final = 400
"""Groups of intervals, which hold much more."""
MOST_RANKS: Final = 64
"""Ranks of a summary."""

_MOST_MOVES: Final = 200
_MOST_RESTARTS: Final = 200
_MOST_CODES: Final = 40
_MOST_JUDGED: Final = 2000
_ENVELOPES: Final = ("step_s", "data_wait_s", "loss", "gradient_norm")
_SECRET: Final = re.compile(r"secret|password|credential|access_key|authorization", re.IGNORECASE)
_MOST_CHARACTERS: Final = 200


class StepColumns:
    """Steps in order, as columns of at most `MOST_POINTS` rows.

    Args:
        num_steps: Steps of the run.

    Attributes:
        steps_per_row: Global steps of a row.
        columns: ``first`` and ``last`` (global steps); of step_s, data_wait_s, loss and gradient_norm
            ``_least``, ``_median``, ``_most`` and ``_mean``; ``learning_rate`` of the last step;
            ``samples_per_s``. None where no step of the row has a number.
    """

    def __init__(self, num_steps: int) -> None:
        self.steps_per_row = max(1, math.ceil(num_steps / MOST_POINTS))
        names = [f"{name}_{what}" for name in _ENVELOPES for what in ("least", "median", "most", "mean")]
        self.columns: dict[str, list[float | None]] = {
            name: [] for name in ("first", "last", "learning_rate", "samples_per_s", *names)
        }
        self._rows: list[Mapping[str, Any]] = []
        self._place = -1

    def add(self, step: Mapping[str, Any]) -> None:
        """Add the line of a step, later than those before it."""
        place = int(step["global_step"]) // self.steps_per_row
        if place != self._place:
            self.finish()
            self._place = place
        self._rows.append(step)

    def finish(self) -> None:
        """Close the open row."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        seconds = math.fsum(number(step.get("step_s")) or 0.0 for step in rows)
        samples = math.fsum(number(step.get("num_samples")) or 0.0 for step in rows)
        row: dict[str, float | None] = {
            "first": float(rows[0]["global_step"]),
            "last": float(rows[-1]["global_step"]),
            "learning_rate": number(rows[-1].get("learning_rate")),
            "samples_per_s": samples / seconds if seconds else None,
        }
        for name in _ENVELOPES:
            values = [value for step in rows if (value := number(step.get(name))) is not None]
            row[f"{name}_least"] = min(values, default=None)
            row[f"{name}_median"] = median(values) if values else None
            row[f"{name}_most"] = max(values, default=None)
            row[f"{name}_mean"] = mean_of(values)
        for name, value in row.items():
            self.columns[name].append(value)


@dataclass(slots=True)
class RankSums:
    """A rank in a group of intervals; seconds are sums, bytes the most."""

    host: str = ""
    data_wait_s: float = 0.0
    compute_s: float = 0.0
    exchange_s: float = 0.0
    step_s: float = 0.0
    """Of the steps in which it was measured."""
    pss_bytes: int = 0
    pinned_bytes: int = 0
    device_bytes: int = 0
    cache_ram_bytes: int = 0
    cache_disk_bytes: int = 0

    def add(self, other: RankNumbers | RankSums, step_s: float) -> None:
        """Add the same rank of another interval or group, and the time of its steps."""
        self.host = other.host
        self.step_s += step_s
        for name in ("data_wait_s", "compute_s", "exchange_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("pss_bytes", "pinned_bytes", "device_bytes", "cache_ram_bytes", "cache_disk_bytes"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


@dataclass(slots=True)
class Summary:
    """Consecutive intervals together."""

    last: int = 0
    """Last global step."""
    num_steps: int = 0
    wall_s: float = 0.0
    rank_wall_s: float = 0.0
    """Wall time summed over ranks."""
    stage_s: dict[str, float] = field(default_factory=dict)
    """Of a stage, summed over ranks and threads."""
    stage_bytes: dict[str, int] = field(default_factory=dict)
    ready: tuple[float, float, float] | None = None
    """Micro-batches ready when the loop asked: mean times steps, least, most."""
    ranks: dict[int, RankSums] = field(default_factory=dict)
    available_bytes: int = 0
    """Least."""

    def busy(self, stage: str) -> float | None:
        """Return the ranks or threads that were in a stage, as a mean per rank; None without time."""
        return self.stage_s.get(stage, 0.0) / self.rank_wall_s if self.rank_wall_s else None

    def add(self, interval: Interval) -> None:
        """Add the next interval."""
        self.last = interval.global_step
        self.num_steps += interval.num_steps
        self.wall_s += interval.wall_s
        self.rank_wall_s += interval.wall_s * interval.world_size
        if available := interval.available_bytes:
            self.available_bytes = min(self.available_bytes or available, available)
        for name, stage in interval.stages.items():
            self.stage_s[name] = self.stage_s.get(name, 0.0) + stage.seconds
            self.stage_bytes[name] = self.stage_bytes.get(name, 0) + stage.num_bytes
        if (gauge := interval.gauges.get("ready_batches")) is not None:
            total, least, most = self.ready or (0.0, math.inf, -math.inf)
            total += gauge.mean * interval.num_steps
            self.ready = (total, min(least, gauge.least), max(most, gauge.most))
        for rank in interval.ranks:
            self.ranks.setdefault(rank.rank, RankSums()).add(rank, interval.step_s)


class Summaries:
    """Intervals in order, in at most `MOST_SUMMARIES` groups, and one more.

    Args:
        num_steps: Steps of the run.
    """

    def __init__(self, num_steps: int) -> None:
        self.rows: list[Summary] = []
        self.ranks: dict[int, RankSums] = {}
        """Over the whole run."""
        self._steps_per_row = max(1, math.ceil(num_steps / MOST_SUMMARIES))
        self._place = -1

    def add(self, interval: Interval) -> None:
        """Add the next interval."""
        place = interval.global_step // self._steps_per_row
        if place != self._place:
            self.finish()
            self._place = place
            self.rows.append(Summary())
        self.rows[-1].add(interval)

    def finish(self) -> None:
        """Close the open group: of many ranks keep the slowest, as an interval does."""
        if not self.rows:
            return
        ranks = self.rows[-1].ranks
        slowest = sorted(ranks, key=lambda rank: -(ranks[rank].compute_s + ranks[rank].data_wait_s))
        self.rows[-1].ranks = {rank: ranks[rank] for rank in sorted(slowest[:MOST_RANKS])}
        for rank, sums in self.rows[-1].ranks.items():
            self.ranks.setdefault(rank, RankSums()).add(sums, sums.step_s)


@dataclass(slots=True)
class Mark:
    """An event on the step axis, or the last one of several where there are very many."""

    kind: str
    step: int
    """Steps done before it."""
    text: str


@dataclass(slots=True)
class Restart:
    """A start after the first; times are seconds since the run began."""

    step: int
    """Where it began."""
    reached: int
    """Steps that had been done before it."""
    num_lost_steps: int
    """Steps of the start before it that were done again."""
    died_s: float
    """Time of the last measurement of the start before it."""
    began_s: float | None = None
    """Beginning of its own first step; None if it measured none."""


@dataclass(slots=True)
class VerdictTotal:
    """A verdict over the whole run."""

    code: str
    first: int
    num_steps: int = 0
    """Steps that it was the most important verdict of."""
    number: int = 0
    """How often it was given."""
    last: Verdict | None = None


@dataclass(slots=True)
class VerdictSpan:
    """Consecutive steps with the same most important verdict."""

    code: str
    first: int
    last: int


@dataclass(kw_only=True, slots=True)
class RunNumbers:
    """Data of a run for the pages."""

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
    summaries: list[Summary]
    ranks: Mapping[int, RankSums]
    """Over the whole run."""
    num_planned_steps: int = 0
    """Of the whole run; 0 if not known."""
    outcome: str = ""
    """End of the newest start, ``finished`` or ``stopped``; empty while it runs, or after a kill."""
    latest: Interval | None = None
    """The newest interval."""
    evaluations: dict[int, tuple[int, float | None]] = field(default_factory=dict)
    """Steps done and loss, by group of steps."""
    marks: list[Mark] = field(default_factory=list)
    num_checkpoints: int = 0
    restarts: list[Restart] = field(default_factory=list)
    num_restarts: int = 0
    verdicts: list[VerdictTotal] = field(default_factory=list)
    """The one of most steps first."""
    is_judged_here: bool = False
    """Whether the run wrote no verdicts, so that they were derived from its intervals."""
    verdict_spans: list[VerdictSpan] = field(default_factory=list)
    moves: Sequence[Move] = ()
    """The newest."""
    num_moves: int = 0
    settings: dict[str, str] = field(default_factory=dict)
    tunables: dict[str, str] = field(default_factory=dict)
    """Tunables as they were in the first interval."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and device, as the newest start wrote them."""
    total_samples: float = 0.0
    total_tokens: float = 0.0
    num_damaged: int = 0
    """Lines that were left out."""


def read_run(run: Path) -> RunNumbers:
    """Read a run that has ended, is running, or has measured nothing yet.

    Raises:
        ConfigError: The folder holds no metrics.
        StorageError: They cannot be read.
    """
    file, settings = RunFile(run), read_settings(run)
    judge_every = 0 if file.has_verdicts else max(1, -(-file.num_intervals // _MOST_JUDGED))
    reader = _Reader(run_name(run), file.num_steps, judge_every, settings)
    for line, counts in file.lines():
        reader.add(line, counts=counts)
    numbers = reader.finish()
    numbers.settings = dict(_shown_settings(settings))
    numbers.num_damaged = file.num_damaged
    return numbers


class _Reader:
    """Condenses the lines of a run, added in order."""

    def __init__(self, name: str, num_steps: int, judge_every: int, config: Settings) -> None:
        self._judge_every = judge_every
        self._config = config
        self._newest: deque[Interval] = deque(maxlen=WINDOW + 1)
        self._num_intervals = 0
        self._before: list[Verdict] = []
        self._meter = GoodputMeter()
        self._steps = StepColumns(num_steps)
        self._summaries = Summaries(num_steps)
        self._steps_per_span = max(1, math.ceil(num_steps / MOST_SUMMARIES))
        self._marks: dict[tuple[str, int], Mark] = {}
        self._moves: deque[Move] = deque(maxlen=_MOST_MOVES)
        self._totals: dict[str, VerdictTotal] = {}
        self._judged = -1
        self._died_s = 0.0
        self._reached = self._num_lost = self._num_starts = 0
        self.run = RunNumbers(
            name=name,
            goodput=self._meter.measured(),
            steps=self._steps.columns,
            steps_per_row=self._steps.steps_per_row,
            summaries=self._summaries.rows,
            ranks=self._summaries.ranks,
        )

    def add(self, line: MetricsLine, *, counts: bool) -> None:
        self._meter.add(line)
        kind, event, run = line.event, line.values, self.run
        run.began_at_s = run.began_at_s or line.time_s
        time_s = line.time_s - run.began_at_s
        run.wall_s = max(run.wall_s, time_s)
        match kind:
            case "attempt":
                self._start(event)
            case "plan":
                run.num_planned_steps = event["num_steps"]
            case "end":
                run.outcome = event["outcome"]
            case "step" | "checkpoint" | "evaluation":
                if run.restarts and run.restarts[-1].began_s is None:
                    began_s = time_s - event[SECONDS[kind]]
                    run.restarts[-1].began_s = max(began_s, run.restarts[-1].died_s)
                self._died_s = max(self._died_s, time_s)
                if kind == "step":
                    self._reached = event["global_step"] + 1
                    self._num_lost += not counts
                if counts:
                    self._measured(kind, event)
        if counts and line.record is not None:
            self._conclude(line.record)

    def _start(self, event: Mapping[str, Any]) -> None:
        run = self.run
        run.outcome = ""
        versions = event.get("versions")
        run.environment = {
            **({str(name): str(one) for name, one in versions.items()} if isinstance(versions, dict) else {}),
            **({"device": str(event["device"])} if event.get("device") else {}),
        }
        self._num_starts += 1
        if self._num_starts > 1:
            run.num_restarts += 1
            run.restarts.append(Restart(event["start"], self._reached, self._num_lost, self._died_s))
            del run.restarts[:-_MOST_RESTARTS]
        self._num_lost = 0

    def _measured(self, kind: str, event: Mapping[str, Any]) -> None:
        run, step = self.run, event["global_step"]
        place = step // run.steps_per_row
        if kind == "step":
            self._steps.add(event)
            run.num_steps = max(run.num_steps, step + 1)
            run.total_samples += event["num_samples"]
            run.total_tokens += event["num_tokens"]
        elif kind == "checkpoint":
            run.num_checkpoints += 1
            text = f"checkpoint at step {step}: training paused for {duration(event['stall_s'])}"
            self._marks[kind, place] = Mark("saved", step, text)
        else:
            loss, seconds = number(event.get("loss")), duration(event["evaluation_s"])
            run.evaluations[place] = (step, loss)
            text = f"evaluation at step {step}: {seconds}, loss {show(loss)}"
            self._marks[kind, place] = Mark("evaluated", step, text)

    def _conclude(self, record: Interval | Verdict | Move) -> None:
        run = self.run
        match record:
            case Interval():
                self._summaries.add(record)
                if run.latest is None:
                    run.tunables = {name: str(value) for name, value in record.settings.items()}
                run.latest = record
                run.num_planned_steps = record.total_steps or run.num_planned_steps
                self._judge(record)
            case Verdict():
                self._add_verdict(record)
            case Move():
                run.num_moves += 1
                self._moves.append(record)

    def _judge(self, interval: Interval) -> None:
        """Derive verdicts for a run that wrote none."""
        self._newest.append(interval)
        self._num_intervals += 1
        if self._judge_every and self._num_intervals % self._judge_every == 0:
            self.run.is_judged_here = True
            self._before = judge(list(self._newest), config=self._config, before=self._before)
            for verdict in self._before:
                self._add_verdict(verdict)

    def _add_verdict(self, verdict: Verdict) -> None:
        code = verdict.code if verdict.code in self._totals or len(self._totals) < _MOST_CODES else "others"
        total = self._totals.setdefault(code, VerdictTotal(code, verdict.global_step))
        total.number += 1
        total.last = verdict
        # The first of several is the most important; it covers the steps since the one before.
        if verdict.global_step <= self._judged:
            return
        total.num_steps += verdict.global_step - self._judged
        spans, first = self.run.verdict_spans, self._judged + 1
        self._judged = verdict.global_step
        size = self._steps_per_span
        if spans and (spans[-1].code == code or first // size == spans[-1].first // size):
            spans[-1].last = verdict.global_step
        else:
            spans.append(VerdictSpan(code, first, verdict.global_step))

    def finish(self) -> RunNumbers:
        run = self.run
        self._steps.finish()
        self._summaries.finish()
        run.goodput = self._meter.measured()
        run.marks = list(self._marks.values())
        run.moves = list(self._moves)
        run.verdicts = sorted(self._totals.values(), key=lambda one: (-one.num_steps, one.first))
        return run


def number(value: object) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def shown(value: object) -> str:
    """Render a setting for a page that may be shared: a path or an address is cut to its last part."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    text = str(value)
    if re.search(r"[/\\]", text):
        parts = [part for part in re.split(r"[/\\]", text) if part]
        # What follows ? in an address may be a signature.
        text = f"\u2026/{parts[-1].partition('?')[0]}" if parts else "/"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}\u2026"


def _shown_settings(settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield settings without secrets and paths; tables in lists are named by number."""
    for name, value in settings.items():
        if isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            value = {str(place): one for place, one in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _shown_settings({f"{name}.{key}": one for key, one in value.items()})
        else:
            yield name, "(not shown)" if _SECRET.search(name) else shown(value)
