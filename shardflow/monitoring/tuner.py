"""Finds settings under which the loop waits least, while it runs: one change at a time, each one proven.

Hill climbing guided by what a window of steps was held up by (`candidates`). What is no better than before is
dropped after one window, so that many tries fit into a search. A change is kept only if steps were faster
than before *and* than under the old settings again afterwards (A-B-A), so that a machine that drifts is no
gain; one that gives resources back is kept if nothing was lost. Whatever it does is bounded: values by their
limits, the search by `TunerRules.settle_steps`. Then it watches, and looks again when the rate falls for
long. Knows settings by name and numbers only; who drives it carries the changes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Literal

from shardflow.monitoring.tuner_candidates import Candidate, candidates, grants
from shardflow.monitoring.tuner_numbers import LoaderTotals, StepNumbers, Window, measure_window
from shardflow.telemetry import KnobLimit, Move, MoveKind
from shardflow.telemetry.knobs import setting_text

__all__ = ["Change", "Tuner", "TunerRules"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What is to be set now."""

    setting: str
    value: int | str


@dataclass(frozen=True, kw_only=True, slots=True)
class TunerRules:
    """When something counts as what."""

    settle_steps: int = 200
    """A search ends within so many steps."""
    least_window: int = 6
    """Steps that a rate is measured over, at least."""
    most_window: int = 12
    """And at most; more than the least are taken while the rate is not sure."""
    skip_steps: int = 3
    """Steps after a decision that count for nothing: one still has the old settings, as a decision travels in
    the next exchange, and two are made of what was under way."""
    start_steps: int = 4
    """More of them where a loader was started anew: processes begin slowly."""
    sure_error: float = 0.02
    """A rate is sure when its standard error is below this share of it."""
    least_gain: float = 0.03
    """A change must bring so much, but for one that only takes less."""
    most_loss: float = 0.015
    """That may cost so much: what cannot be told from nothing."""
    stale_after: int = 3
    """Tries that brought nothing after which the present settings are measured again: machines drift."""
    waiting: float = 0.03
    """Share of the steps' time that a loop may wait for data before anything is done about it."""
    watch_steps: int = 50
    """Steps of a window once settled."""
    fall: float = 0.15
    """The rate must fall by so much, in two windows one after the other, for another search."""


_Search = Generator[Change | None, StepNumbers, None]
_Windows = Generator[Change | None, StepNumbers, Window]
_Try = Generator[Change | None, StepNumbers, Window | None]


class Tuner:
    """Decides; deterministic in what it is told.

    Args:
        values: The settings as they are, by name.
        limits: What each may be, all caps included; others are never touched.
        report: Gets what it does.
        mode: ``observe`` only ever proposes.
        rules: When something counts as what.
    """

    def __init__(
        self,
        values: Mapping[str, int | str],
        limits: Mapping[str, KnobLimit],
        *,
        report: Callable[[Move], None],
        mode: Literal["observe", "on"] = "on",
        rules: TunerRules | None = None,
    ) -> None:
        self.values = dict(values)
        self.is_settled = False
        self.num_steps = 0
        """Told so far."""
        self.settled_in: int | None = None
        """Steps that the last search took."""
        self._limits = dict(limits)
        self._rules = rules or TunerRules()
        self._report = report
        self._global_step = 0
        self._before = LoaderTotals()
        self._hurry_at = 0
        self._pause = self._rules.settle_steps
        self._search = self._observe() if mode == "observe" else self._tune()
        next(self._search)

    def step(self, numbers: StepNumbers, global_step: int) -> Change | None:
        """Hear of a step; returns what is to be set before the next one."""
        self.num_steps += 1
        self._global_step = global_step
        change = self._search.send(numbers)
        if change is not None:
            self.values[change.setting] = change.value
        return change

    # ---- what it does ----------------------------------------------------------------------------

    def _tune(self) -> _Search:
        while True:
            window = yield from self._climb()
            yield from self._watch(window)
            self.is_settled = False

    def _climb(self) -> _Windows:
        """Try one change after the other until none is left, or the steps are used up."""
        rules = self._rules
        # A try takes four windows at most, each of the least length by then, and what is skipped before them.
        longest = 4 * (rules.least_window + rules.skip_steps + rules.start_steps)
        began_at = self.num_steps
        self._hurry_at = began_at + rules.settle_steps - longest
        tried: set[tuple[str, int | str]] = set()
        window = yield from self._measure()
        num_misses = 0
        while self.num_steps <= self._hurry_at:
            candidate = self._next(window, tried)
            if candidate is None:
                break
            tried |= {(candidate.setting, candidate.value)}
            before = window.rate
            kept = yield from self._try(candidate, window)
            num_misses = 0 if kept is not None else num_misses + 1
            if kept is not None:
                window = kept
            elif num_misses % rules.stale_after == 0:
                window = yield from self._measure(skips=True)
            if window.rate > 1.1 * before:
                # What was of no use under other settings may be of use now.
                tried = {one for one in tried if one[0] == candidate.setting}
        if num_misses % rules.stale_after:
            window = yield from self._measure(skips=True)
        for grant in grants(window, self.values, self._limits):
            text = f"{grant.setting}: {grant.why}; it shows in the next pass"
            self._say("keep", grant.setting, self.values[grant.setting], grant.value, window, text=text)
            yield Change(setting=grant.setting, value=grant.value)
        self.is_settled, self.settled_in = True, self.num_steps - began_at
        self._say("settle", after=window, text=f"settled after {self.settled_in} steps")
        return window

    def _next(self, window: Window, tried: set[tuple[str, int | str]]) -> Candidate | None:
        waits = window.wait_share > self._rules.waiting
        found = candidates(window, self.values, self._limits, waits=waits)
        return next((one for one in found if (one.setting, one.value) not in tried), None)

    def _try(self, candidate: Candidate, first: Window) -> _Try:
        """Change, and decide; returns the window under the new value if it stays, None if not."""
        name, old, new = candidate.setting, self.values[candidate.setting], candidate.value
        was, now = setting_text(name, old), setting_text(name, new)
        self._say("try", name, old, new, first, text=f"{name} {was} -> {now}: {candidate.why}")
        tried = yield from self._measure(Change(setting=name, value=new))
        if not self._is_better(candidate, tried, first.rate):
            self._say("revert", name, new, old, first, tried, text=f"{name} stays {was}: no gain")
            yield Change(setting=name, value=old)
            return None
        second = yield from self._measure(Change(setting=name, value=old))
        if not self._is_better(candidate, tried, second.rate):
            text = f"{name} stays {was}: the machine drifts"
            self._say("revert", name, new, old, second, tried, text=text)
            return None
        kept = yield from self._measure(Change(setting=name, value=new))
        if not self._is_better(candidate, kept, min(first.rate, second.rate), certain=False):
            self._say(
                "revert", name, new, old, second, kept, text=f"{name} stays {was}: the gain did not last"
            )
            yield Change(setting=name, value=old)
            return None
        self._say("keep", name, old, new, second, kept, text=f"{name} is {now}")
        return kept

    def _is_better(self, candidate: Candidate, tried: Window, rate: float, *, certain: bool = True) -> bool:
        rules = self._rules
        if candidate.direction == "less":
            return math.isfinite(tried.num_needed) and tried.rate >= rate * (1 - rules.most_loss)
        return tried.rate > rate * (1 + (max(rules.least_gain, tried.error / 2) if certain else 0.0))

    def _watch(self, settled: Window) -> _Search:
        """Return when the rate has fallen for long, and waiting is why."""
        rules, num_low, since = self._rules, 0, self.num_steps
        while True:
            window = yield from self._measure(num_steps=rules.watch_steps)
            is_low = window.rate < settled.rate * (1 - rules.fall)
            num_low = num_low + 1 if is_low and window.wait_share > settled.wait_share + 0.05 else 0
            if num_low >= 2 and self.num_steps - since >= self._pause:
                break
        # A job that never stays settled is left in peace for longer and longer.
        self._pause *= 2
        text = f"steps are {1 - window.rate / settled.rate:.0%} slower than when it settled: looking again"
        self._say("resume", before=settled, after=window, text=text)

    def _observe(self) -> _Search:
        """Say what it would try, whenever that is something else."""
        said: tuple[str, int | str] | None = None
        while True:
            window = yield from self._measure(num_steps=self._rules.watch_steps)
            candidate = self._next(window, set()) if window.wait_share > self._rules.waiting else None
            if candidate is None or (candidate.setting, candidate.value) == said:
                continue
            said = (name, new) = (candidate.setting, candidate.value)
            old = self.values[name]
            text = (
                f"the loop waits for data {window.wait_share:.0%} of its time; try {name} "
                f"{setting_text(name, old)} -> {setting_text(name, new)}: {candidate.why}"
            )
            self._say("propose", name, old, new, window, text=text)

    # ---- windows ---------------------------------------------------------------------------------

    def _measure(self, change: Change | None = None, *, num_steps: int = 0, skips: bool = False) -> _Windows:
        """Make a change, if any, and measure the steps that follow."""
        rules = self._rules
        steps: list[StepNumbers] = []
        if change is not None or skips or not self.num_steps:
            # Of the run's first steps as well: they fill what is empty.
            is_live = change is None or self._limits[change.setting].is_live
            numbers = yield change
            for _ in range(rules.skip_steps - 1 + (0 if is_live else rules.start_steps)):
                numbers = yield None
            self._before = numbers.loader
        before = self._before
        least = num_steps or rules.least_window
        while True:
            steps.append((yield None))
            if len(steps) < least:
                continue
            window = measure_window(before, steps, int(self.values.get("loader.num_threads", 1)))
            is_sure = window.error <= rules.sure_error or len(steps) >= rules.most_window
            if num_steps or is_sure or self.num_steps >= self._hurry_at:
                self._before = steps[-1].loader
                return window

    def _say(
        self,
        kind: MoveKind,
        setting: str = "",
        old: int | str = "",
        new: int | str = "",
        before: Window | None = None,
        after: Window | None = None,
        *,
        text: str,
    ) -> None:
        self._report(
            Move(
                global_step=self._global_step,
                kind=kind,
                setting=setting,
                old=str(old),
                new=str(new),
                rate_before=before.samples_per_s if before else 0.0,
                rate_after=after.samples_per_s if after else 0.0,
                text=text,
            )
        )
