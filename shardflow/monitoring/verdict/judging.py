"""From intervals to verdicts: which of the newest count, which rules hold, and what is said first.

A verdict that was given holds on until its share has fallen well below its threshold, and another one comes
first only when it is clearly larger: two causes of about the same size do not take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from shardflow.monitoring.verdict.rules import COMPUTE, RULES, Rule
from shardflow.monitoring.verdict.stretch import Settings, Stretch, pool
from shardflow.telemetry import Interval, Verdict

__all__ = ["WINDOW", "judge", "judge_all", "judge_each", "newest"]

WINDOW: Final = 6
"""Intervals that are judged together, the newest."""
_LEAST_STEPS: Final = 3
_LEAST_S: Final = 15.0
"""One long step says as much as a few short ones."""
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
    """Say what the newest intervals were bound by.

    Args:
        intervals: Of one run, in order; all of them, or at least the newest `WINDOW` and one.
        config: Settings that the intervals do not name, by dotted name: advice names only what the run has.
        before: What was said last, see above.

    Returns:
        The most important first; one at least, but none before enough was measured.
    """
    chosen = newest(intervals)
    if not chosen:
        return []
    stretch = pool(chosen, config)
    held = {one.code for one in before}
    first = before[0].code if before else ""
    found = [(rule, share) for rule in RULES if (share := rule.share(stretch)) >= _threshold(rule, held)]
    found.sort(key=lambda one: -one[1] * (_AHEAD if one[0].code == first else 1.0))
    computing = COMPUTE.share(stretch)
    if not found or computing >= COMPUTE.least:
        # Computing is what the run is for: it comes first only where there is nothing to mend.
        found.append((COMPUTE, computing))
    return [_verdict(rule, share, stretch) for rule, share in found]


def judge_each(intervals: Iterable[Interval], *, config: Settings | None = None) -> Iterator[list[Verdict]]:
    """Judge a run from its start, interval after interval, as it would have been judged under way.

    Yields:
        What `judge` says after each interval, from the first one on after which it says something.
    """
    held: deque[Interval] = deque(maxlen=WINDOW + 1)
    before: list[Verdict] = []
    for interval in intervals:
        held.append(interval)
        if verdicts := judge(tuple(held), config=config, before=before):
            before = verdicts
            yield verdicts


def judge_all(intervals: Iterable[Interval], *, config: Settings | None = None) -> list[list[Verdict]]:
    """Return all that `judge_each` says."""
    return list(judge_each(intervals, config=config))


def _threshold(rule: Rule, held: Collection[str]) -> float:
    return rule.least * (_KEPT_AT if rule.code in held else 1.0)


def _verdict(rule: Rule, share: float, stretch: Stretch) -> Verdict:
    share = min(1.0, share)
    return Verdict(
        global_step=stretch.global_step,
        code=rule.code,
        text=rule.say(stretch, share),
        share=round(share, 3),
        evidence={name: round(float(value), 4) for name, value in rule.evidence(stretch).items()},
        advice=tuple(rule.advise(stretch)),
    )
