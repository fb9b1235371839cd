"""Which setting to try next, and in which direction: what a window says, as a list of moves.

A loop that waits for data gets more of what its loader lacks: fetches where bytes hold it up, threads where
decoding does, room where threads are held back by the bound on what is under way. Where that is of no use it
may be less that helps: threads that take processors or the interpreter from the model. A loop that does not
wait is only ever offered less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from shardflow.monitoring.tuner_numbers import Window
from shardflow.telemetry import KnobLimit

__all__ = ["Candidate", "Direction", "candidates", "grants"]

Direction = Literal["more", "less", "other"]
"""``more`` or ``less`` resources; ``other``: those in another way, or less for the sake of a gain. Only
``less`` is kept without a gain."""

Values = Mapping[str, int | str]
Limits = Mapping[str, KnobLimit]

_THREADS: Final = "loader.num_threads"
_EXECUTION: Final = "loader.execution"
_PREFETCH: Final = "loader.prefetch_bytes"
_FETCHES: Final = (
    "cache.read_ahead_threads",
    "store.max_concurrency",
    "cache.read_ahead_bytes",
)
"""Settings of how many bytes are fetched at once, those that help most often first."""
_SHARES: Final = ("cache.max_bytes", "cache.ram_bytes")
_MOST_FACTOR: Final = 4.0
"""Of one move: what a window says holds near the settings that it was measured under."""
_HELD_BACK: Final = 0.6
"""Threads that are busy for less of a wait than this are held back by something else."""
_HELD: Final = 0.3
"""Share of the time that the interpreter must be held for another execution to come first."""
_SOMETIMES_HELD: Final = 0.1
"""And for one to be tried at all where the loop does not wait."""


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
    """What can be given back without loss, or with a gain: the model gets what the loader leaves.

    Only threads that make micro-batches take processors from others. A thread that waits for a store costs
    nothing, and how many it takes is seen in the worst minute of a pass, so these stay.
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
    """A large stride, then half of it in the exponent: where the first is too much, the second may do."""
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
