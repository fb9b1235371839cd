"""Transforms that tests name, and what stores do before a read, which cross to a loader process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardflow.storage import ByteRange

__all__ = ["fail", "fail_oddly", "jitter", "stall"]


class OddError(Exception):
    """An error of a class that needs more than a message."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first, second)


def jitter(sample: dict[str, Any]) -> dict[str, Any]:
    """Add noise to the slices, and a letter to the text."""
    rng = sample["__rng__"]
    noise = rng.integers(-50, 51, sample["image"].shape, dtype=np.int16)
    return {"image": sample["image"] + noise, "report": chr(rng.integers(97, 123)) + sample["report"]}


def fail(sample: dict[str, Any]) -> dict[str, Any]:
    """Fail on every sample but the synthetic one."""
    if sample["__key__"] != "synthetic":
        raise ZeroDivisionError
    return sample


def fail_oddly(path: str, ranges: Sequence[ByteRange]) -> None:
    """Raise an error that cannot be made again from its message, from a read of a shard."""
    if path.endswith(".tar"):
        raise OddError("no", 7)


def stall(path: str, ranges: Sequence[ByteRange]) -> None:
    """Never come back from a read of a shard."""
    if path.endswith(".tar"):
        time.sleep(3600)
