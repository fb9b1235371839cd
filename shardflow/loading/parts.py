"""How the slots of a micro-batch are cut into parts, which threads work on at the same time.

A part's fields are read together: sorted by their place in the shard, in one call to its store, which reads
over small gaps. So samples that cost little beside a call, or that wait for a network, share a part; those
that keep a thread busy by themselves do not, and every thread has something to do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardflow.loading.config import LoaderConfig
from shardflow.loading.selection import Selection

__all__ = ["PartSize"]

# Without images a sample is a few kilobytes, and what costs time is done once for all of a shard.
_TEXT_SAMPLES = 1024
_PARTS_PER_THREAD = 2
_LOCAL_BYTES = 1 << 20


class PartSize:
    """How large parts are; the same for all micro-batches of a loader.

    Args:
        selection: The samples, and the datasets that hold them.
        config: What is read of them.
    """

    __slots__ = ("_has_images", "_max_bytes", "_num_parts")

    def __init__(self, selection: Selection, config: LoaderConfig) -> None:
        self._has_images = config.view is not None
        self._num_parts = _PARTS_PER_THREAD * config.num_threads
        self._max_bytes = _LOCAL_BYTES if selection.is_local else None

    def divide_among(self, num_threads: int) -> None:
        """Say how many threads there are now; holds for micro-batches that are cut afterwards."""
        self._num_parts = _PARTS_PER_THREAD * num_threads

    def cut(
        self,
        slots: NDArray[np.int64],
        *,
        shards: NDArray[np.int64],
        offsets: NDArray[np.int64],
        num_bytes: NDArray[np.int64],
    ) -> list[NDArray[np.int64]]:
        """Cut slots into parts, in the order in which they lie on disk.

        Args:
            slots: ``(n,)``, those that hold a sample.
            shards: ``(B,)``, shard of each slot.
            offsets: ``(B,)``, where the sample lies in it.
            num_bytes: ``(B,)``, size of the sample; zeros where none is known.

        Returns:
            Parts of one shard each, where samples have images.
        """
        slots = slots[np.lexsort((offsets[slots], shards[slots]))]
        if not self._has_images:
            return [slots[first : first + _TEXT_SAMPLES] for first in range(0, len(slots), _TEXT_SAMPLES)]
        max_samples = max(1, len(slots) // self._num_parts)
        parts: list[NDArray[np.int64]] = []
        first = held = 0
        where, sizes = shards[slots].tolist(), num_bytes[slots].tolist()
        for place, size in enumerate(sizes):
            is_full = place - first == max_samples or (
                self._max_bytes is not None and held + size > self._max_bytes
            )
            if place > first and (is_full or where[place] != where[first]):
                parts.append(slots[first:place])
                first, held = place, 0
            held += size
        return [*parts, slots[first:]] if len(slots) else parts
