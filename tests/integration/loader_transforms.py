"""Functions that tests name as `LoaderConfig.transform`, and stores that cross to a loader process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.storage import ByteRange

__all__ = ["fail", "fail_oddly", "jitter", "stall"]


class OddError(Exception):
    """An error of a class that needs more than a message."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first, second)


def jitter(sample: dict[str, NDArray[Any]], rng: np.random.Generator) -> None:
    """Add noise to the slices, and a word to the text."""
    sample["image"] += rng.integers(-50, 51, sample["image"].shape, dtype=np.int16)
    sample["text"][:1] = rng.integers(97, 123)


def fail(sample: dict[str, NDArray[Any]], rng: np.random.Generator) -> None:
    """Raise an error that every process knows."""
    raise ZeroDivisionError("no")


def fail_oddly(sample: dict[str, NDArray[Any]], rng: np.random.Generator) -> None:
    """Raise one that cannot be made again from its message."""
    raise OddError("no", 7)


def stall(path: str, ranges: Sequence[ByteRange]) -> None:
    """Never come back from a read of a shard."""
    if path.endswith(".tar"):
        time.sleep(3600)
