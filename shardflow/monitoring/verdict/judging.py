"""Judgment of intervals: which of the newest count, which rules hold, and the order of the verdicts.

Verdicts have hysteresis: one that was given stays until its share is well below its threshold, and another
one comes first only if it is clearly larger, so two causes of similar size do not alternate. During a run a
new first verdict must hold for two intervals before it is logged, except the very first.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final

from shardflow.monitoring.verdict.intervals import IntervalSummary, Settings, pool
from shardflow.monitoring.verdict.rules import COMPUTE, RULES, Rule
from shardflow.telemetry import Interval, Verdict

WINDOW: Final = 6
"""Intervals that are judged together, the newest."""
_LEAST_STEPS: Final = 3
_LEAST_S: Final = 15.0
"""One long step is as conclusive as a few short ones."""
_KEPT_AT: Final = 0.8
"""Share of a rule's threshold at which it still holds, if it held before."""
_AHEAD: Final = 1.2
"""The first verdict stays first until another one's share is so many times its own."""


def newest(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the intervals that are judged: the last few, without those of first steps of a start.

    Nothing is returned before enough was measured.
    """
    steady = [one for one in intervals if one.num_steps > 0 and one.step_s > 0 and not one.is_warm_up]
    steady = [one for one in steady[-WINDOW:] if one.world_size == steady[-1].world_size]
    num_steps, step_s = sum(one.num_steps for one in steady), sum(one.step_s for one in steady)
    return steady if num_steps >= _LEAST_STEPS or step_s >= _LEAST_S else []


def judge(
    intervals: Sequence[Interval], *, config: Settings | None = None, before: Sequence[Verdict] = ()
) -> list[Verdict]:
    """Judge what the newest intervals were bound by.

    Args:
        intervals: Of one run, in order; all of them, or at least the newest `WINDOW` and one.
        config: Settings that the intervals do not name, by dotted name: advice names only what the run has.
        before: The last verdicts, for hysteresis.

    Returns:
        The most important first; one at least, but none before enough was measured.
    """
    chosen = newest(intervals)
    if not chosen:
        return []
    summary = pool(chosen, config)
    held = {one.code for one in before}
    first = before[0].code if before else ""
    found = [(rule, share) for rule in RULES if (share := rule.share(summary)) >= _threshold(rule, held)]
    found.sort(key=lambda one: -one[1] * (_AHEAD if one[0].code == first else 1.0))
    computing = COMPUTE.share(summary)
    if not found or computing >= COMPUTE.least:
        # Computing is the purpose of the run: it comes first only if no other rule applies.
        found.append((COMPUTE, computing))
    return [_verdict(rule, share, summary) for rule, share in found]


def judge_each(intervals: Iterable[Interval], *, config: Settings | None = None) -> Iterator[list[Verdict]]:
    """Judge a run from its start, interval by interval, as it would have been judged while running.

    Yields:
        The verdicts after each interval, from the first one that gives any.
    """
    held: deque[Interval] = deque(maxlen=WINDOW + 1)
    before: list[Verdict] = []
    for interval in intervals:
        held.append(interval)
        if verdicts := judge(tuple(held), config=config, before=before):
            before = verdicts
            yield verdicts


def judge_all(intervals: Iterable[Interval], *, config: Settings | None = None) -> list[list[Verdict]]:
    """Return all verdicts of `judge_each`."""
    return list(judge_each(intervals, config=config))


def _threshold(rule: Rule, held: Collection[str]) -> float:
    return rule.least * (_KEPT_AT if rule.code in held else 1.0)


def _verdict(rule: Rule, share: float, summary: IntervalSummary) -> Verdict:
    share = min(1.0, share)
    return Verdict(
        global_step=summary.global_step,
        code=rule.code,
        text=rule.sentence(summary, share),
        share=round(share, 3),
        evidence={name: round(float(value), 4) for name, value in rule.evidence(summary).items()},
        advice=tuple(rule.advise(summary)),
    )


_LOGGER = logging.getLogger(__name__)

_NEEDED: Final = 2
"""Intervals in a row that a new first verdict must hold for."""
_WRITTEN_EVERY: Final = 12
"""Intervals after which an unchanged verdict is written again, with its current numbers."""
_QUIET_S: Final = 60.0
"""Least time between two log lines; changes in between are only written."""


class VerdictReporter:
    """Judges the intervals of a run while it runs, on rank 0.

    Args:
        write: Called with each verdict to write, as the event ``"verdict"``.
        config: Settings of the run by dotted name, see `judge`.
        clock: Seconds that only grow.

    Attributes:
        verdicts: The current verdicts, the most important first.
    """

    def __init__(
        self,
        write: Callable[[Verdict], object],
        *,
        config: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.verdicts: list[Verdict] = []
        self._write = write
        self._config = config
        self._clock = clock
        self._intervals: deque[Interval] = deque(maxlen=WINDOW)
        self._num_differing = 0
        self._num_since_written = 0
        self._logged = ""
        self._logged_s = -_QUIET_S

    def measured(self, interval: Interval) -> None:
        """Judge the next interval."""
        self._intervals.append(interval)
        found = judge(tuple(self._intervals), config=self._config, before=self.verdicts)
        if not found:
            return
        self._num_since_written += 1
        is_changed = [one.code for one in found] != [one.code for one in self.verdicts]
        if self.verdicts and found[0].code != self.verdicts[0].code:
            self._num_differing += 1
            if self._num_differing < _NEEDED:
                return
        self._num_differing = 0
        self.verdicts = found
        if is_changed or self._num_since_written >= _WRITTEN_EVERY:
            self._num_since_written = 0
            for verdict in found:
                self._write(verdict)
        self._log(found[0])

    def _log(self, verdict: Verdict) -> None:
        now_s = self._clock()
        if verdict.code == self._logged or now_s - self._logged_s < _QUIET_S:
            return
        self._logged, self._logged_s = verdict.code, now_s
        _LOGGER.info("%s", " ".join([verdict.text, *(one.text for one in verdict.advice[:1])]))
