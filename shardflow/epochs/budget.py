"""The token budget: how many of a window's samples make a micro-batch.

Samples are taken from the longest to the shortest, so those of one micro-batch are of nearly equal length and
little is padded; where a micro-batch ends follows from the lengths of the window alone. A first filling says
how many micro-batches a window needs; a second one, with a smaller budget, makes them equally full, so that
no rank waits for the others because its micro-batch is the last and least of its window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from shardflow.epochs.cost import CostRule
from shardflow.epochs.integers import check_ints
from shardflow.errors import ConfigError

__all__ = ["OVER_BUDGET", "OverBudget", "TokenBudget", "count_micro_batches", "cut_micro_batches"]

Int64Array = npt.NDArray[np.int64]
LengthArray = npt.NDArray[np.uint16 | np.uint32 | np.int64]
SumArray = npt.NDArray[np.uint32]
OverBudget = Literal["alone", "skip", "truncate"]
OVER_BUDGET: Final[tuple[OverBudget, ...]] = get_args(OverBudget)

_BOUNDS = {"max_tokens": (1, 2**31 - 2), "max_samples": (1, 2**24)}
# How many smaller budgets are tried, on the way from the smallest that could do to the full one.
_TRIES = 4
_WORD_BITS = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget:
    """How much a micro-batch may hold.

    Raises:
        ConfigError: A number is out of range or the policy is unknown.
    """

    max_tokens: int
    """Tokens of a micro-batch: padded ones where ``padded``, else the sum of the lengths."""
    max_samples: int
    """Samples of a micro-batch, whatever their length."""
    padded: bool = True
    """A micro-batch is a rectangle of its longest sample; False for packed sequences."""
    over_budget: OverBudget = "alone"
    """What becomes of a sample that is longer than ``max_tokens``: it is a micro-batch ``alone``, over the
    budget; it is left out of every epoch (``skip``); or it counts as ``max_tokens``, and the consumer cuts it
    (``truncate``). The plan says how many there are."""
    cost: CostRule = field(default_factory=CostRule)
    """What a sample's length is, and what a length costs."""

    def __post_init__(self) -> None:
        check_ints(self, _BOUNDS, where="token budget", error=ConfigError)
        if not isinstance(self.padded, bool):
            raise ConfigError(f"padded must be true or false, got {self.padded!r} (token budget).")
        if self.over_budget not in OVER_BUDGET:
            raise ConfigError(
                f"over_budget must be one of {', '.join(OVER_BUDGET)}, got {self.over_budget!r} (token "
                f"budget)."
            )

    def to_json(self) -> dict[str, object]:
        """Return the budget as a JSON object; it is part of the plan's identity."""
        return {**asdict(self), "cost": self.cost.to_json()}

    @classmethod
    def from_json(cls, value: object) -> TokenBudget:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: A missing or unknown key, or a value that the constructor refuses.
        """
        names = {entry.name for entry in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != names:
            raise ConfigError(f"token budget must have the keys {', '.join(sorted(names))}, got others.")
        return cls(**{**value, "cost": CostRule.from_json(value["cost"])})


def cut_micro_batches(lengths: Int64Array, *, max_tokens: int, max_samples: int, padded: bool) -> Int64Array:
    """Cut samples into micro-batches, each as full as the budget allows.

    Args:
        lengths: ``(n,)`` int64, descending, each at least 1.
        max_tokens: Budget; a longer sample is alone.
        max_samples: Budget.
        padded: Whether padding counts.

    Returns:
        ``(m + 1,)`` int64, where each micro-batch begins, and ``n``.
    """
    cuts = [0]
    num_samples = len(lengths)
    if padded:
        values = lengths.tolist()
        while cuts[-1] < num_samples:
            size = max(1, min(max_samples, max_tokens // values[cuts[-1]]))
            cuts.append(min(num_samples, cuts[-1] + size))
    else:
        before = np.concatenate(([0], np.cumsum(lengths)))
        while cuts[-1] < num_samples:
            start = cuts[-1]
            stop = int(np.searchsorted(before, int(before[start]) + max_tokens, side="right")) - 1
            cuts.append(min(num_samples, max(start + 1, min(stop, start + max_samples))))
    return np.array(cuts, np.int64)


def count_micro_batches(
    lengths: LengthArray, starts: Int64Array, stops: Int64Array, budget: TokenBudget
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Count the micro-batches of many windows at once, and find the budget that fills them equally.

    Args:
        lengths: Lengths of the samples of all windows, one window after the other, descending in each.
        starts: ``(w,)`` int64, where each window begins in ``lengths``.
        stops: ``(w,)`` int64, where it ends; an empty window has no micro-batch.
        budget: The budget.

    Returns:
        ``(w,)`` int64 each: the micro-batches of each window, and the ``max_tokens`` and ``max_samples`` with
        which :func:`cut_micro_batches` makes just as many, equally full.
    """
    before = None if budget.padded else _sums(lengths)
    tokens = np.full(len(starts), budget.max_tokens, np.int64)
    samples = np.full(len(starts), budget.max_samples, np.int64)
    counts, last_fill, last_room = _fill(lengths, before, starts, stops, tokens, samples)
    # As full as the last one is on the average of all: parts of `whole`, between the smallest that could do
    # and the full budget; all tries side by side, the smallest that does is taken.
    whole = np.maximum(1, counts * last_room)
    part = np.maximum(1, (counts - 1) * last_room + last_fill)
    tries = [part + (whole - part) * number // _TRIES for number in range(_TRIES)]
    try_tokens = [np.maximum(1, _scaled(budget.max_tokens, at, whole)) for at in tries]
    try_samples = [np.maximum(1, _scaled(budget.max_samples, at, whole)) for at in tries]
    found, _, _ = _fill(
        lengths,
        before,
        np.tile(starts, _TRIES),
        np.tile(stops, _TRIES),
        np.concatenate(try_tokens),
        np.concatenate(try_samples),
    )
    for number in reversed(range(_TRIES)):
        fits = found[number * len(starts) : (number + 1) * len(starts)] == counts
        tokens = np.where(fits, try_tokens[number], tokens)
        samples = np.where(fits, try_samples[number], samples)
    return counts, tokens, samples


def _sums(lengths: LengthArray) -> SumArray:
    """Return what lies before each sample, modulo 2**32: only differences of less than that are looked at."""
    before = np.zeros(len(lengths) + 1, np.uint32)
    # NumPy sums twice as fast in place as from one type to another.
    np.copyto(before[1:], lengths, casting="unsafe")
    np.cumsum(before[1:], out=before[1:])
    return before


def _scaled(number: int, part: Int64Array, whole: Int64Array) -> Int64Array:
    """Return ``ceil(number * part / whole)``, with ``part <= whole``."""
    if number.bit_length() + int(whole.max(initial=1)).bit_length() < _WORD_BITS:
        scaled: Int64Array = -(-(number * part) // whole)
        return scaled
    # Budgets of millions of tokens leave 64 bits.
    pairs = zip(part.tolist(), whole.tolist(), strict=True)
    return np.array([-(-number * one // other) for one, other in pairs], np.int64)


def _fill(
    lengths: LengthArray,
    before: SumArray | None,
    starts: Int64Array,
    stops: Int64Array,
    max_tokens: Int64Array,
    max_samples: Int64Array,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Fill the micro-batches of all windows side by side: the first of each, the second of each, ...

    Returns:
        The micro-batches of each window, and of its last one what it holds and what it could hold.
    """
    counts = np.zeros(len(starts), np.int64)
    last_fill = np.zeros(len(starts), np.int64)
    last_room = np.ones(len(starts), np.int64)
    window = np.flatnonzero(starts < stops)
    at, end, tokens, samples = starts[window], stops[window], max_tokens[window], max_samples[window]
    number = 0
    while window.size:
        number += 1
        if before is None:
            room = tokens // lengths[at]
        else:
            room = _packed_room(before, at, np.minimum(end - at, samples), tokens, tokens // lengths[at])
        np.minimum(room, samples, out=room)
        np.maximum(room, 1, out=room)
        following = at + room
        is_last = following >= end
        if is_last.any():
            done = window[is_last]
            counts[done] = number
            fill, full = (end - at)[is_last], room[is_last]
            if before is not None:
                fill, full = _packed_fill(
                    before, at[is_last], end[is_last], tokens[is_last], samples[is_last]
                )
            last_fill[done], last_room[done] = fill, full
            going = ~is_last
            window, end, following = window[going], end[going], following[going]
            tokens, samples = tokens[going], samples[going]
        at = following
    return counts, last_fill, last_room


def _packed_room(
    before: SumArray, at: Int64Array, most: Int64Array, tokens: Int64Array, least: Int64Array
) -> Int64Array:
    """Return how many samples from ``at``, ``most`` at most, have ``tokens`` tokens at most.

    The samples that follow are no longer than the first, so ``least`` of them fit for certain, and hardly
    more: counting up from there takes two or three looks, a search takes seven.
    """
    room = np.minimum(least, most)
    limit = tokens.astype(np.uint32)
    start = before[at]
    growing = np.flatnonzero(room < most)
    while growing.size:
        here = at[growing]
        fits = before[here + room[growing] + 1] - start[growing] <= limit[growing]
        growing = growing[fits]
        room[growing] += 1
        growing = growing[room[growing] < most[growing]]
    return room


def _packed_fill(
    before: SumArray, at: Int64Array, end: Int64Array, tokens: Int64Array, samples: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return how full the last micro-batches are: in tokens or in samples, whichever bounds them more."""
    held, num_held = (before[end] - before[at]).astype(np.int64), end - at
    # A sample over the budget is alone, and full.
    held = np.minimum(held, tokens)
    by_samples = num_held * tokens >= held * samples
    return np.where(by_samples, num_held, held), np.where(by_samples, samples, tokens)
