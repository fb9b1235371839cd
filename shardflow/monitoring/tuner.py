"""Online tuner: finds the loader settings under which the loop waits least, one proven change at a time.

Hill climbing guided by what limited a window of steps (`candidates`): a loop that waits for data gets more of
what its loader lacks, fetches if storage is slow, threads if decoding is, prefetch bytes if threads idle at
the bound; or fewer threads, if they take processors or the interpreter from the model. A loop that does not
wait is only ever offered less.

A change without gain is dropped after one window, so that a search fits many tries. It is kept only if steps
were faster than before *and* than under the old settings again afterwards (A-B-A), so that drift of the
machine is not taken for gain; one that frees resources is kept if nothing was lost. Values are bounded by
their limits, a search by `TunerRules.settle_steps`. Afterwards the tuner monitors the rate, and searches
again when it drops for long. It knows settings by name and number only; the caller applies the changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from shardflow.monitoring.tuner_numbers import LoaderTotals, StepNumbers, Window, measure_window
from shardflow.telemetry import Move, MoveKind, TunableLimit
from shardflow.telemetry.intervals import setting_text

Direction = Literal["more", "less", "other"]
"""``more`` or ``less`` resources; ``other``: a different use of them, or less to make steps faster. Only
``less`` is kept without a gain."""

Values = Mapping[str, int | str]
Limits = Mapping[str, TunableLimit]

_THREADS: Final = "loader.num_threads"
_EXECUTION: Final = "loader.execution"
_PREFETCH: Final = "loader.prefetch_bytes"
_FETCHES: Final = ("cache.read_ahead_threads", "store.max_concurrency", "cache.read_ahead_bytes")
"""Settings that bound how much is fetched at once, those that help most often first."""
_SHARES: Final = ("cache.max_bytes", "cache.ram_bytes")
_MOST_FACTOR: Final = 4.0
"""Of one move: a window's conclusions hold only near the settings that it was measured under."""
_HELD_BACK: Final = 0.6
"""Threads that are busy for a smaller share of their time are held back by something else."""
_HELD: Final = 0.3
"""Share of the time that the interpreter must be held for another execution to be tried first."""
_SOMETIMES_HELD: Final = 0.1
"""Share for another execution to be tried at all if the loop does not wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A move that may help."""

    setting: str
    value: int | str
    direction: Direction
    why: str


def candidates(window: Window, values: Values, limits: Limits, *, waits: bool) -> Iterator[Candidate]:
    """Yield moves, the most promising first.

    Args:
        window: Measured under ``values``.
        values: The settings as they are.
        limits: What each may be; settings that are not in it cannot be changed.
        waits: Whether the loop waits for data so much that it matters.
    """
    if not waits:
        yield from _leaner(window, values, limits)
        return
    factor = min(_MOST_FACTOR, max(1.5, 1 / max(0.05, 1 - window.wait_share)))
    num_threads = _number(values, _THREADS) or 1
    is_held_back = window.num_busy < _HELD_BACK * num_threads
    fetches = [
        one for name in _FETCHES for one in _more(name, factor, values, limits, "bytes come too slowly")
    ]
    if window.origin_share > max(0.5, window.num_making) or window.is_fetching:
        yield from fetches
        fetches = []
    if window.gil_wait_share > _HELD:
        yield from _other_execution(window, values, limits)
    if is_held_back:
        yield from _more(_PREFETCH, factor, values, limits, "threads wait for room")
    yield from _more(_THREADS, factor, values, limits, "micro-batches are made too slowly")
    yield from _other_execution(window, values, limits)
    for fewer in (num_threads // 2, math.ceil(0.7 * num_threads)):
        yield from _fewer(_THREADS, fewer, values, limits, "other", "threads may be in each other's way")
    if window.origin_share > 0.05:
        yield from fetches
        ahead = _number(values, _FETCHES[0]) or 1
        why = "requests may be in each other's way"
        yield from _fewer(_FETCHES[0], ahead // 2, values, limits, "other", why)
    if not is_held_back:
        yield from _more(_PREFETCH, factor, values, limits, "more room ahead of the loop")


def grants(window: Window, values: Values, limits: Limits) -> Iterator[Candidate]:
    """Yield larger shares of memory and disk for a cache whose store is still waited for.

    What they bring shows in the next pass over the data, so no window can try them.
    """
    if window.origin_share < 0.05:
        return
    for name in _SHARES:
        value, limit = _number(values, name), limits.get(name)
        if value and limit is not None and value < limit.most:
            new = min(limit.most, 2 * value)
            yield Candidate(setting=name, value=new, direction="more", why="the store is still read from")


def _leaner(window: Window, values: Values, limits: Limits) -> Iterator[Candidate]:
    """Yield resources to give back without loss, or with a gain: the model gets what the loader leaves.

    Only threads that make micro-batches take processors from others. A thread that waits for a store costs
    nothing, and how many are needed shows only in the worst minute of a pass, so these stay.
    """
    if window.gil_wait_share > _HELD:
        yield from _other_execution(window, values, limits)
    num_threads = _number(values, _THREADS) or 1
    if (needed := 1.25 * window.num_needed) < num_threads:
        why = f"{window.num_needed:.1f} of {num_threads} threads are busy"
        wanted = max(math.ceil(needed), num_threads // 4)
        yield from _fewer(_THREADS, wanted, values, limits, "less", why)
    why = "the model may lack what they take"
    yield from _fewer(_THREADS, num_threads - 1, values, limits, "other", why)
    if _SOMETIMES_HELD < window.gil_wait_share <= _HELD:
        yield from _other_execution(window, values, limits)


def _fewer(
    name: str, wanted: int, values: Values, limits: Limits, direction: Direction, why: str
) -> Iterator[Candidate]:
    value, limit = _number(values, name), limits.get(name)
    if value is None or limit is None:
        return
    new = max(wanted, limit.least, 1)
    if new < value:
        yield Candidate(setting=name, value=new, direction=direction, why=why)


def _more(name: str, factor: float, values: Values, limits: Limits, why: str) -> Iterator[Candidate]:
    """Yield a large stride, then its square root in case the first is too much."""
    value, limit = _number(values, name), limits.get(name)
    if value is None or limit is None or limit.choices or value >= limit.most:
        return
    found = set()
    for stride in (factor, math.sqrt(factor)):
        new = min(limit.most, max(value + 1, round(value * stride)))
        if new not in found:
            found.add(new)
            yield Candidate(setting=name, value=new, direction="more", why=why)


def _other_execution(window: Window, values: Values, limits: Limits) -> Iterator[Candidate]:
    present, limit = values.get(_EXECUTION), limits.get(_EXECUTION)
    if limit is None or not isinstance(present, str):
        return
    others = ["process", "threads"]
    if window.user_share > 0.5:
        others.insert(0, "workers")
    elif window.gil_wait_share > _HELD:
        others.insert(1, "workers")
    for word in others:
        if word in limit.choices and word != present:
            yield Candidate(
                setting=_EXECUTION, value=word, direction="other", why="the loop and its threads share Python"
            )


def _number(values: Values, name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A setting to apply now."""

    setting: str
    value: int | str


@dataclass(frozen=True, kw_only=True, slots=True)
class TunerRules:
    """Thresholds of the tuner."""

    settle_steps: int = 200
    """A search ends within so many steps."""
    least_window: int = 6
    """Steps that a rate is measured over, at least."""
    most_window: int = 12
    """And at most; a window grows until its rate is certain."""
    skip_steps: int = 3
    """Steps after a decision that are not measured: one still has the old settings, as a decision travels in
    the next exchange, and two consume what was already under way."""
    start_steps: int = 4
    """More of them if the loader is restarted: processes start slowly."""
    sure_error: float = 0.02
    """A rate is certain if its standard error is below this share of it."""
    least_gain: float = 0.03
    """Gain that a change must bring, unless it only frees resources."""
    most_loss: float = 0.015
    """Loss that freeing resources may cost: indistinguishable from noise."""
    stale_after: int = 3
    """Tries without gain after which the present settings are measured again: machines drift."""
    waiting: float = 0.03
    """Share of the steps' time that a loop may wait for data without a search for more."""
    watch_steps: int = 50
    """Steps of a window once settled."""
    fall: float = 0.15
    """Fall of the rate, in two consecutive windows, that starts another search."""


_Search = Generator[Change | None, StepNumbers, None]
_Windows = Generator[Change | None, StepNumbers, Window]
_Try = Generator[Change | None, StepNumbers, Window | None]


class Tuner:
    """Decides which settings to try and to keep; deterministic in its inputs.

    Args:
        values: The settings as they are, by name.
        limits: Bounds of each, all caps included; other settings are never changed.
        report: Called with each move.
        mode: ``observe`` only proposes.
        rules: Thresholds.

    Attributes:
        values: The settings as they are.
        is_settled: Whether the search has ended.
        num_steps: Steps seen so far.
        settled_in: Steps that the last search took; None before the first has ended.
    """

    def __init__(
        self,
        values: Mapping[str, int | str],
        limits: Mapping[str, TunableLimit],
        *,
        report: Callable[[Move], None],
        mode: Literal["observe", "on"] = "on",
        rules: TunerRules | None = None,
    ) -> None:
        self.values = dict(values)
        self.is_settled = False
        self.num_steps = 0
        self.settled_in: int | None = None
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
        """Process a step; return the setting to apply before the next one, if any."""
        self.num_steps += 1
        self._global_step = global_step
        change = self._search.send(numbers)
        if change is not None:
            self.values[change.setting] = change.value
        return change

    def _tune(self) -> _Search:
        while True:
            window = yield from self._climb()
            yield from self._watch(window)
            self.is_settled = False

    def _climb(self) -> _Windows:
        """Try one change after the other until none is left, or the steps are used up."""
        rules = self._rules
        # A try takes at most four windows of the least length, and the steps skipped before each.
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
                # Moves that did not help under the old settings may help now.
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
        """Change a setting and decide; return the window under the new value if it stays, None if not."""
        name, old, new = candidate.setting, self.values[candidate.setting], candidate.value
        was, now = setting_text(name, old), setting_text(name, new)
        change, undo = Change(setting=name, value=new), Change(setting=name, value=old)

        def reverted(before: Window, after: Window, why: str) -> None:
            self._say("revert", name, new, old, before, after, text=f"{name} stays {was}: {why}")

        self._say("try", name, old, new, first, text=f"{name} {was} -> {now}: {candidate.why}")
        tried = yield from self._measure(change)
        if not self._is_better(candidate, tried, first.rate):
            reverted(first, tried, "no gain")
            yield undo
            return None
        second = yield from self._measure(undo)
        if not self._is_better(candidate, tried, second.rate):
            reverted(second, tried, "the machine drifts")
            return None
        kept = yield from self._measure(change)
        if not self._is_better(candidate, kept, min(first.rate, second.rate), certain=False):
            reverted(second, kept, "the gain did not last")
            yield undo
            return None
        self._say("keep", name, old, new, second, kept, text=f"{name} is {now}")
        return kept

    def _is_better(self, candidate: Candidate, tried: Window, rate: float, *, certain: bool = True) -> bool:
        rules = self._rules
        if candidate.direction == "less":
            return math.isfinite(tried.num_needed) and tried.rate >= rate * (1 - rules.most_loss)
        return tried.rate > rate * (1 + (max(rules.least_gain, tried.error / 2) if certain else 0.0))

    def _watch(self, settled: Window) -> _Search:
        """Monitor the rate; return once it has fallen for long because of waits for data."""
        rules, num_low, since = self._rules, 0, self.num_steps
        while True:
            window = yield from self._measure(num_steps=rules.watch_steps)
            is_low = window.rate < settled.rate * (1 - rules.fall)
            num_low = num_low + 1 if is_low and window.wait_share > settled.wait_share + 0.05 else 0
            if num_low >= 2 and self.num_steps - since >= self._pause:
                break
        # Searches of a job that never stays settled become rarer and rarer.
        self._pause *= 2
        text = f"steps are {1 - window.rate / settled.rate:.0%} slower than when it settled: searching again"
        self._say("resume", before=settled, after=window, text=text)

    def _observe(self) -> _Search:
        """Propose what it would try, whenever that changes."""
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

    def _measure(self, change: Change | None = None, *, num_steps: int = 0, skips: bool = False) -> _Windows:
        """Make a change, if any, and measure the steps that follow."""
        rules = self._rules
        steps: list[StepNumbers] = []
        if change is not None or skips or not self.num_steps:
            # The run's first steps are skipped as well: they fill empty buffers.
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
