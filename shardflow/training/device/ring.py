"""Pinned memory of a fixed size, lent region by region in a circle.

A region belongs to one copy to the device and is free again when the device has passed the copy's mark. Who
asks for more than is free waits for the oldest copy, never for the newest. Pinned memory is what the
operating system cannot page out, so its size is a setting and no consequence of the load; a micro-batch that
is larger than the whole ring gets memory of its own, alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from shardflow.errors import ConfigError

__all__ = ["Mark", "PinnedRing", "Region"]

_ALIGNMENT = 512  # what device copies like, and a multiple of every array's own alignment


class Mark(Protocol):
    """A point in a device's work, such as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""


@dataclass(slots=True, eq=False)
class Region:
    """A piece of pinned memory that one copy reads from."""

    memory: torch.Tensor
    """``(num_bytes,)`` uint8."""
    start: int
    """Where it lies in the ring."""
    stop: int
    mark: Mark | None = None
    """Set once the copy is under way; the region is free when the device has passed it."""


class PinnedRing:
    """Lends regions of ``num_bytes`` of pinned memory; one thread uses it.

    Args:
        num_bytes: Size of the ring; taken with the first region.
        allocate: Returns pinned memory, ``(num_bytes,)`` uint8.

    Attributes:
        num_waits: How often a region had to wait for an older copy: if often, the ring is too small.

    Raises:
        ConfigError: ``num_bytes`` is not positive.
    """

    def __init__(self, num_bytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        if num_bytes < 1:
            raise ConfigError(f"the pinned ring must have at least 1 byte, got {num_bytes}.")
        self.num_waits = 0
        self._num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._allocate = allocate
        self._memory: torch.Tensor | None = None
        self._lent: deque[Region] = deque()
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Pinned memory of the ring; 0 before the first region."""
        return 0 if self._memory is None else self._num_bytes

    @property
    def num_lent(self) -> int:
        """Regions whose copy is not known to be done."""
        return len(self._lent)

    def lend(self, num_bytes: int) -> Region:
        """Return a region that nobody else reads or writes until its mark is passed.

        Args:
            num_bytes: Its size.

        Raises:
            ConfigError: The newest region has got no mark: its copy was never started.
        """
        if self._lent and self._lent[-1].mark is None:
            raise ConfigError("a region must be marked before the next one is lent, got one without a mark.")
        size = max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        if size > self._num_bytes:
            # Alone: not beside a ring full of other copies.
            while self._lent:
                self._take_back_oldest()
            return Region(self._allocate(num_bytes), 0, 0)
        if self._memory is None:
            self._memory = self._allocate(self._num_bytes)
        while self._lent and self._is_passed(self._lent[0]):
            self._lent.popleft()
        start = self._next if self._next + size <= self._num_bytes else 0
        while any(region.start < start + size and start < region.stop for region in self._lent):
            self._take_back_oldest()
        region = Region(self._memory[start : start + num_bytes], start, start + size)
        self._lent.append(region)
        self._next = start + size
        return region

    def _take_back_oldest(self) -> None:
        region = self._lent.popleft()
        if region.mark is not None and not region.mark.query():
            self.num_waits += 1
            region.mark.synchronize()

    @staticmethod
    def _is_passed(region: Region) -> bool:
        return region.mark is not None and region.mark.query()
