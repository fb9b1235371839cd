"""The sample keys of a micro-batch's slots, as the table's bytes until someone asks for strings.

A string for every sample of every micro-batch costs as much as copying its tokens, and most training loops
never look at one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SlotKeys"]


class SlotKeys:
    """Keys by slot; immutable.

    Args:
        keys: ``(n,)`` byte strings, keys of the slots that hold a sample.
        is_sample: ``(B,)`` bool, which slots those are.
    """

    __slots__ = ("_is_sample", "_keys")

    def __init__(self, keys: NDArray[Any], is_sample: NDArray[np.bool_]) -> None:
        self._is_sample = is_sample
        self._keys = keys
        if len(keys) != len(is_sample):
            self._keys = np.zeros(len(is_sample), keys.dtype)
            self._keys[is_sample] = keys

    def __len__(self) -> int:
        """Number of slots, padding included."""
        return len(self._is_sample)

    def __getitem__(self, slot: int) -> str | None:
        """Return the key of a slot; None in padding."""
        return self._keys[slot].decode("ascii") if self._is_sample[slot] else None

    def of(self, slots: NDArray[np.int64]) -> NDArray[Any]:
        """Return the keys of some slots as byte strings, ``(n,)``."""
        keys: NDArray[Any] = self._keys[slots]
        return keys

    def to_list(self) -> list[str | None]:
        """Return the key of each slot."""
        keys: list[str | None] = self._keys.astype("U").tolist()
        for slot in np.flatnonzero(~self._is_sample).tolist():
            keys[slot] = None
        return keys
