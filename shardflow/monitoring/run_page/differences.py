"""How two runs differ, in numbers and in settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardflow.monitoring.run_page.columns import mean_of
from shardflow.monitoring.run_page.reading import RunNumbers
from shardflow.monitoring.run_page.settings import shown

__all__ = ["Difference", "differences", "different_settings", "loss_caution"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One number of both runs."""

    key: str
    name: str
    unit: str
    """See `scales.show`."""
    a: float | None
    b: float | None
    better: int = 0
    """1 where more is better, -1 where less is, 0 where neither."""

    @property
    def change(self) -> float | None:
        """How much more B is, of A; of shares the plain difference. None where one is missing."""
        if self.a is None or self.b is None:
            return None
        if self.unit == "share":
            return self.b - self.a
        return self.b / self.a - 1.0 if self.a else None

    @property
    def is_better(self) -> bool | None:
        """Whether B is better; None where that is not said."""
        if not self.change or not self.better:
            return None
        return (self.change > 0) == (self.better > 0)

    @property
    def shown_change(self) -> str:
        """The change in words."""
        if self.change is None:
            return ""
        if self.unit == "share":
            return f"{100 * self.change:+.1f} points"
        return f"{100 * self.change:+.1f} %"

    def to_json(self) -> dict[str, Any]:
        """Return the numbers."""
        return {"key": self.key, "a": self.a, "b": self.b, "change": self.change}


def differences(runs: tuple[RunNumbers, RunNumbers]) -> list[Difference]:
    """Return the numbers that people compare; those that neither run has are left out."""
    found = [
        _of(runs, "num_steps", "steps that count", "", lambda run: run.goodput.num_steps),
        _of(runs, "wall_s", "time, all starts", "s", lambda run: run.goodput.wall_s or None),
        _of(runs, "samples_per_s", "samples a second, in steps", "", _samples_per_s, 1),
        _of(runs, "wall_samples_per_s", "samples a second of all its time", "", _wall_samples_per_s, 1),
        _of(runs, "step_s", "time of a step, median", "s", lambda run: _median(run, "step_s"), -1),
        _of(runs, "wait_share", "step time that waits for data", "share", _wait_share, -1),
        _of(runs, "useful_share", "useful (goodput)", "share", _useful_share, 1),
        _of(
            runs,
            "checkpoint_s",
            "standing still for checkpoints",
            "s",
            lambda run: run.goodput.checkpoint_s,
            -1,
        ),
        _of(runs, "lost_s", "work done again", "s", lambda run: run.goodput.lost_s, -1),
        _of(runs, "restarts", "restarts", "", lambda run: float(run.num_restarts), -1),
        _of(runs, "pss_bytes", "memory of a rank, most", "bytes", _most_pss, -1),
    ]
    window = _loss_window(runs)
    if window is not None:
        first, last = window
        name = f"loss, mean of steps {first:,} to {last:,}, which both have taken"
        # Of other schedules neither loss is the better one.
        better = 0 if loss_caution(runs) else -1
        found.append(_of(runs, "loss", name, "nats", lambda run: _loss_in(run, first, last), better))
    return [one for one in found if one.a is not None or one.b is not None]


def different_settings(runs: tuple[RunNumbers, RunNumbers]) -> dict[str, tuple[str, str]]:
    """Return the settings that differ, those that a tuner changed as they stood at the end.

    A setting that one of both does not have is an empty text there. Runs without a configuration are compared
    by their knobs alone.
    """
    a, b = (_final_settings(run) for run in runs)
    # What only one run could tell is no difference between them.
    if not (runs[0].settings and runs[1].settings):
        both = a.keys() & b.keys()
        a, b = ({name: one[name] for name in both} for one in (a, b))
    names = sorted(a.keys() | b.keys())
    return {name: (a.get(name, ""), b.get(name, "")) for name in names if a.get(name) != b.get(name)}


def _final_settings(run: RunNumbers) -> Mapping[str, str]:
    knobs = {name: shown(value) for name, value in run.latest.settings.items()} if run.latest else {}
    # Where both name it, the knob is what was in force.
    return {**run.settings, **{f"{name} (at the end)": value for name, value in knobs.items()}}


def _of(
    runs: tuple[RunNumbers, RunNumbers],
    key: str,
    name: str,
    unit: str,
    value: Callable[[RunNumbers], float | None],
    better: int = 0,
) -> Difference:
    a, b = (value(run) if run.num_steps else None for run in runs)
    return Difference(key=key, name=name, unit=unit, a=a, b=b, better=better)


def _step_s(run: RunNumbers) -> float:
    return run.goodput.useful_s + run.goodput.data_wait_s


def _samples_per_s(run: RunNumbers) -> float | None:
    return run.total_samples / _step_s(run) if _step_s(run) else None


def _wall_samples_per_s(run: RunNumbers) -> float | None:
    return run.total_samples / run.goodput.wall_s if run.goodput.wall_s else None


def _wait_share(run: RunNumbers) -> float | None:
    return run.goodput.data_wait_s / _step_s(run) if _step_s(run) else None


def _useful_share(run: RunNumbers) -> float | None:
    return run.goodput.useful_share if run.goodput.wall_s else None


def _median(run: RunNumbers, name: str) -> float | None:
    values = [value for value in run.steps[f"{name}_median"] if value is not None]
    return median(values) if values else None


def _most_pss(run: RunNumbers) -> float | None:
    return (
        max((float(one.pss_bytes) for row in run.stretches for one in row.ranks.values()), default=0.0)
        or None
    )


def loss_caution(runs: Sequence[RunNumbers]) -> str:
    """Return in a sentence why the difference of the losses says little; empty where nothing says so.

    Where a run is to be longer, its learning rate falls later: at the same step the other one has a lower
    rate, and for that alone a lower loss.
    """
    window = _loss_window(runs)
    if window is None:
        return ""
    lengths = [run.num_planned_steps for run in runs]
    rates = [_rate_at(run, window[1]) for run in runs]
    causes = []
    if all(lengths) and lengths[0] != lengths[1]:
        causes.append(f"A is planned for {lengths[0]:,} steps and B for {lengths[1]:,}")
    a, b = rates
    if a is not None and b is not None and abs(a - b) > _SAME_RATE * max(abs(a), abs(b)):
        causes.append(f"at step {window[1]:,} their learning rates are {a:.2e} and {b:.2e}")
    if not causes:
        return ""
    return (
        f"Losses at the same step compare little here: {', and '.join(causes)}. A run whose rate has fallen "
        "further has a lower loss for that alone; compare runs of one schedule, or both at their ends."
    )


_WINDOW = 20
"""A loss is read as a mean over so many steps: one step alone is mostly noise."""
_SAME_RATE = 0.01


def _loss_window(runs: Sequence[RunNumbers]) -> tuple[int, int] | None:
    """First and last step that the losses of two runs are read over; None where they share none.

    Of long runs only whole places are known, so the one with the larger ones decides.
    """
    if not all(run.num_steps for run in runs):
        return None
    last = min(run.num_steps for run in runs) - 1
    coarse = max(runs, key=lambda run: run.steps_per_row)
    places = [
        (int(begin), int(end))
        for begin, end in zip(coarse.steps["first"], coarse.steps["last"], strict=True)
        if begin is not None and end is not None
    ]
    taken = [place for place in places if place[1] <= last]
    if not taken:
        return None
    last = taken[-1][1]
    return next(begin for begin, end in taken if end >= last - _WINDOW), last


def _loss_in(run: RunNumbers, first: int, last: int) -> float | None:
    rows = zip(run.steps["first"], run.steps["last"], run.steps["loss_mean"], strict=True)
    return mean_of(
        [
            loss
            for begin, end, loss in rows
            if loss is not None and end is not None and begin is not None and end >= first and begin <= last
        ]
    )


def _rate_at(run: RunNumbers, step: int) -> float | None:
    rows = zip(run.steps["last"], run.steps["learning_rate"], strict=True)
    return next((rate for end, rate in rows if end is not None and end >= step), None)
