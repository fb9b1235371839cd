"""The gate through which every number enters the plan: exact Python integers inside stated bounds.

NumPy integers, such as a count taken from a table, are accepted and become Python integers, so that every
number that leaves the plan (a summary, a state) can be written as JSON and no product wraps at 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import index

import numpy as np
import numpy.typing as npt

from shardflow.errors import ShardflowError

__all__ = ["MAX_COUNTER", "check_ints", "checked_int", "sums"]

MAX_COUNTER = 2**63 - 1
"""Largest seed, epoch or step: what other languages too can hold in a signed 64-bit integer."""


def checked_int(
    name: str, value: object, *, low: int, high: int, where: str, error: type[ShardflowError]
) -> int:
    """Return ``value`` as a Python integer, or say what is wrong with it.

    Args:
        name: What the number is, as the caller spells it.
        value: Anything; only integers (Python's or NumPy's, no booleans) pass.
        low: Smallest value that passes.
        high: Largest value that passes.
        where: Where the value was given, for the message.
        error: The class to raise.

    Raises:
        ShardflowError: Of class ``error``, when ``value`` is no integer or lies outside ``[low, high]``.
    """
    number = _as_int(value)
    if number is not None and low <= number <= high:
        return number
    bounds = f"of at least {low}" if high == MAX_COUNTER else f"in [{low}, {high}]"
    if number is not None and number > high:
        bounds = f"of at most {high}"
    # Text is not repeated: a state or a config may hold anything where a number should be.
    found = f"{value!r}" if number is not None or isinstance(value, bool | float) else type(value).__name__
    raise error(f"{name} must be an integer {bounds}, got {found} ({where}).")


def check_ints(
    owner: object, bounds: Mapping[str, tuple[int, int]], *, where: str, error: type[ShardflowError]
) -> None:
    """Check the attributes of a frozen dataclass, and make them exact Python integers; see `checked_int`."""
    for name, (low, high) in bounds.items():
        number = checked_int(name, getattr(owner, name), low=low, high=high, where=where, error=error)
        object.__setattr__(owner, name, number)


def sums(values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return the sums of the values before each one, and the sum of all: ``(n + 1,)`` int64."""
    return np.concatenate(([0], np.cumsum(np.asarray(values, np.int64)))).astype(np.int64)


def _as_int(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
