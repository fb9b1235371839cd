"""Samples tables made up: shards of any size, bytes, report-like lengths."""

from __future__ import annotations

import numpy as np

from shardflow.sampling import SampleLayout

__all__ = ["layout_of", "report_bytes"]

DATASET_ID = "0123456789abcdef" * 4


def report_bytes(num_samples: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """Lengths as radiology reports have them: log-normal, median 1,300 bytes, a long tail."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(7.2, 0.6, num_samples), 8, 20_000).astype(np.uint32)


def layout_of(
    num_samples: int, num_shards: int, *, start: int = 0, seed: int = 0, mean_bytes: int = 3000
) -> SampleLayout:
    """Cut rows into shards at random places; rows before ``start`` belong to another split."""
    rng = np.random.default_rng(seed)
    total = start + num_samples
    cuts = np.sort(rng.choice(np.arange(1, num_samples), min(num_shards, num_samples) - 1, replace=False))
    firsts = np.concatenate(([0] if start else [], [start], start + cuts)).astype(np.int64)
    sizes = np.diff(np.append(firsts, total))
    num_bytes = rng.integers(mean_bytes // 3, 2 * mean_bytes, total)
    before = np.concatenate(([0], np.cumsum(num_bytes)))
    return SampleLayout.of_columns(
        range(start, total),
        dataset_id=DATASET_ID,
        shard=np.repeat(np.arange(len(firsts)), sizes).astype(np.uint32),
        offset_bytes=(before[:-1] - np.repeat(before[firsts], sizes)).astype(np.uint64),
        num_bytes=num_bytes.astype(np.uint64),
        facts={
            "text_bytes": report_bytes(total, seed),
            "num_slices": rng.integers(0, 60, total).astype(np.uint32),
        },
    )
