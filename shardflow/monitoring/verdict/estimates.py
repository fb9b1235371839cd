"""What a change may gain, and the advice that several findings share.

Gains are estimates by Amdahl's law from shares of the step: what a change makes faster, and what stays as it
is.
"""

from __future__ import annotations

import math
from typing import Final

from shardflow.monitoring.verdict.stretch import Stretch
from shardflow.telemetry import Advice
from shardflow.telemetry.knobs import size_text

__all__ = [
    "byte_size_advice",
    "faster",
    "fewer_pixels",
    "more_cache",
    "more_reading_threads",
    "more_working_threads",
]

_MOST_GAIN: Final = 20.0
_READS_PER_CPU: Final = 4
"""Threads that wait for reads need hardly any processor, but each holds what it reads."""
_MOST_READ_AHEAD_THREADS: Final = 64
_FULL_CACHE: Final = 0.9


def faster(share: float, factor: float = math.inf) -> float:
    """Return the rate of steps over the present one, less 1, if this share of the step took ``1 / factor``.

    Example:
        >>> faster(0.5, 2.0)
        0.33
    """
    left = 1.0 - share + share / factor
    return round(min(_MOST_GAIN, 1.0 / left - 1.0), 2) if left > 0 else _MOST_GAIN


def more_working_threads(stretch: Stretch, share: float) -> list[Advice]:
    """Threads that need a processor each."""
    old = stretch.number("loader.num_threads")
    if not old or stretch.wait >= 1.0:
        return []
    per_rank = int(stretch.cpus_free / max(1, stretch.ranks_per_node))
    # So many keep up with a loop that never waits.
    wanted = math.ceil(old / (1.0 - share)) if share < 1.0 else 2 * old
    new = min(wanted, old + per_rank, 2 * old)
    if new > old:
        return [_threads("Processors are free", old, new, _paced(share, new / old))]
    missing = (wanted - old) * max(1, stretch.ranks_per_node)
    return [
        Advice(
            text=f"All {stretch.num_cpus} processors of the node are in use: about {missing} more are wanted "
            f"for loader.num_threads {old} -> {wanted}.",
            gain=_paced(share, wanted / old),
        )
    ]


def more_reading_threads(stretch: Stretch, share: float) -> list[Advice]:
    """Threads that mostly wait for a store or a disk."""
    old = stretch.number("loader.num_threads")
    most = _READS_PER_CPU * stretch.num_cpus // max(1, stretch.ranks_per_node)
    if not old or 2 * old > max(most, 2):
        return []
    return [_threads("Reads wait more than they work", old, 2 * old, _paced(share, 2.0))]


def _paced(share: float, factor: float) -> float:
    """What faster threads gain: at most all waits that they explain, at most their factor."""
    left = max(1.0 - share, 1.0 / factor)
    return round(1.0 / left - 1.0, 2)


def more_cache(stretch: Stretch, share: float) -> list[Advice]:
    """Read further ahead, more at once, and keep more, where there is a cache."""
    found = []
    if old := stretch.number("cache.read_ahead_bytes"):
        found.append(
            byte_size_advice("Read further ahead", "cache.read_ahead_bytes", old, 2 * old, faster(share, 2.0))
        )
    threads = stretch.number("cache.read_ahead_threads")
    if threads and 2 * threads <= _MOST_READ_AHEAD_THREADS:
        found.append(
            Advice(
                text=f"Ask the store for more at once: cache.read_ahead_threads {threads} -> {2 * threads}.",
                setting="cache.read_ahead_threads",
                old=str(threads),
                new=str(2 * threads),
                gain=faster(share, 2.0),
            )
        )
    bound = stretch.number("cache.max_bytes")
    if bound and stretch.cache_disk_bytes >= _FULL_CACHE * bound:
        found.append(
            byte_size_advice(
                "The cache on disk is full; give it more",
                "cache.max_bytes",
                bound,
                2 * bound,
                faster(share, 2.0),
            )
        )
    return found


def fewer_pixels(stretch: Stretch, share: float) -> list[Advice]:
    """Small versions of slices, where large ones are read to be made small."""
    if stretch.word("image.resolution") != "full":
        return []
    rows = stretch.number("image.rows") or 0
    return [
        Advice(
            text="Read small versions of the slices: image.resolution full -> small, of a dataset packed "
            f"with [variants] small_px (at least {rows} here); the model then sees other pixels.",
            setting="image.resolution",
            old="full",
            new="small",
            gain=faster(share, 4.0),
        )
    ]


def _threads(why: str, old: int, new: int, gain: float) -> Advice:
    return Advice(
        text=f"{why}: loader.num_threads {old} -> {new}.",
        setting="loader.num_threads",
        old=str(old),
        new=str(new),
        gain=gain,
    )


def byte_size_advice(why: str, setting: str, old: int, new: int, gain: float) -> Advice:
    """Advise another size."""
    return Advice(
        text=f"{why}: {setting} {size_text(old)} -> {size_text(new)}.",
        setting=setting,
        old=size_text(old),
        new=size_text(new),
        gain=gain,
    )
