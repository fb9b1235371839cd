"""Which samples stand for a dataset: those whose keys hash lowest.

The choice depends on the keys alone, not on the order, number or place of the other samples: where a dataset
grows, most of the chosen stay. It is made block by block, so a table of any length takes the same memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.seeds import derive

if TYPE_CHECKING:
    from shardflow.shards.samples import SamplesTable

__all__ = ["key_hashes", "lowest_rows"]

_ROWS_AT_ONCE: Final = 1 << 16
_WORD_BYTES: Final = 8


def lowest_rows(samples: SamplesTable, wanted: int, where: NDArray[np.bool_] | None = None) -> list[int]:
    """Choose samples.

    Args:
        samples: The samples table.
        wanted: How many at most.
        where: ``(num_samples,)``, the samples to choose from; all of them if not given.

    Returns:
        Their rows, ascending.
    """
    keys = samples.column("sample_key")
    rows: NDArray[np.int64] = np.empty(0, np.int64)
    hashes: NDArray[np.uint64] = np.empty(0, np.uint64)
    for start in range(0, samples.num_samples, _ROWS_AT_ONCE):
        block = np.arange(start, min(start + _ROWS_AT_ONCE, samples.num_samples), dtype=np.int64)
        if where is not None:
            block = block[where[block]]
        rows = np.concatenate([rows, block])
        hashes = np.concatenate([hashes, key_hashes(keys[block])])
        best = np.lexsort((rows, hashes))[:wanted]
        rows, hashes = rows[best], hashes[best]
    return sorted(rows.tolist())


def key_hashes(keys: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash sample keys, ``(n,)`` byte strings; a key hashes the same in a column of any width."""
    num_words = max(-(-keys.dtype.itemsize // _WORD_BYTES), 1)
    words = np.ascontiguousarray(keys, f"S{num_words * _WORD_BYTES}").view("<u8").reshape(-1, num_words)
    hashes = np.full(len(keys), derive(0, "page-sample"), np.uint64)
    for place in range(num_words):
        word = words[:, place].astype(np.uint64)
        # What is past a key's end changes nothing, so that a wider column hashes alike.
        hashes = np.where(word == 0, hashes, _mix(hashes ^ word))
    return hashes


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
