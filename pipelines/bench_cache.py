"""What a cache brings a dataset: the first epoch through an empty one, and the second.

The samples are those of the other measurements. Where they are a part of the split, the cache is made as much
smaller: it holds the share of them that the real one would hold of the split.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.bench_loader import bench_config, bench_spec
from pipelines.bench_measure import BenchOptions, Measured
from shardflow.epochs.rows import rows_digest, select_rows
from shardflow.errors import ChecksumError
from shardflow.loading import Loader, Selection, select
from shardflow.loading.selection import choose_rows
from shardflow.shards import Dataset
from shardflow.storage import CacheConfig

__all__ = ["CacheMeasured", "EpochRound", "describe_cache", "measure_cache", "tier_shares"]

_TIERS = ("ram", "disk", "origin")
# Of a cache that is made smaller: room for what is under way, or it would measure that.
_LEAST_BLOCKS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRound:
    """One epoch through the cache."""

    seconds: float
    tiers: dict[str, float]
    """Shares of the bytes that were read, by `tier_shares`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheMeasured:
    """The rounds of the first epoch and of the second, and the cache that they went through."""

    used: CacheConfig
    """Made smaller where the samples are a part of the split."""
    share_of_split: float
    """Share of the split's samples that were read."""
    first: list[EpochRound]
    second: list[EpochRound]


def measure_cache(
    dataset: Dataset,
    options: BenchOptions,
    measured: Measured,
    cache: CacheConfig,
    progress: Callable[[int, int], None] | None = None,
) -> CacheMeasured:
    """Read two epochs through an empty cache, as often as there are rounds.

    Args:
        dataset: The dataset, without a cache.
        options: As the other measurements had them.
        measured: Names the samples.
        cache: As it would be in training; a new folder in its directory is used, and removed.
        progress: Called with the epochs that are done, and of all.

    Raises:
        ChecksumError: A byte of the dataset is wrong.
    """
    num_samples = len(choose_rows(dataset, options.split, options.subset).rows)
    share = measured.content.num_samples / num_samples
    first: list[EpochRound] = []
    second: list[EpochRound] = []
    used = _scaled(cache, share)
    for number in range(options.num_repeats):
        with tempfile.TemporaryDirectory(prefix="shardflow-bench-", dir=cache.directory) as folder:
            directory = None if cache.directory is None else Path(folder)
            cached = Dataset.open(
                dataset.store.url,
                version=dataset.manifest_version,
                cache=replace(used, directory=directory),
            )
            selection = _only(select(cached, options.split, options.subset), measured)
            loader = Loader(
                selection,
                spec=bench_spec(cached),
                seed=0,
                config=bench_config(cached, num_threads=options.num_threads),
            )
            with loader:
                for done, rounds in enumerate((first, second), start=1):
                    rounds.append(_epoch(loader))
                    if progress is not None:
                        progress(2 * number + done, 2 * options.num_repeats)
    return CacheMeasured(used=used, share_of_split=share, first=first, second=second)


def describe_cache(found: CacheMeasured, num_samples: int, cache: CacheConfig) -> dict[str, Any]:
    """Turn rounds into rates and shares.

    Args:
        found: What was measured.
        num_samples: Samples of an epoch of it.
        cache: As it would be in training.
    """
    return {
        "directory_bytes": cache.max_bytes,
        "ram_bytes": cache.ram_bytes,
        "share_of_split": round(found.share_of_split, 6),
        "used_directory_bytes": found.used.max_bytes,
        "used_ram_bytes": found.used.ram_bytes,
        "epochs": [_describe_epoch(rounds, num_samples) for rounds in (found.first, found.second)],
    }


def _describe_epoch(rounds: Sequence[EpochRound], num_samples: int) -> dict[str, Any]:
    seconds = [one.seconds for one in rounds]
    return {
        "seconds": [round(value, 6) for value in seconds],
        "samples_per_s": round(num_samples / statistics.median(seconds), 2),
        "tiers": {
            tier: round(statistics.median(one.tiers.get(tier, 0.0) for one in rounds), 4) for tier in _TIERS
        },
    }


def tier_shares(num_bytes: Mapping[str, float]) -> dict[str, float]:
    """Return from where bytes came: ``origin`` for those that were fetched, ahead or not, and the caches.

    What was fetched ahead is found in a cache when it is read; it counts as fetched.

    Args:
        num_bytes: ``read``: all that was read; ``origin``: fetched; ``ram``, ``disk``: found by readers.
    """
    found = num_bytes["ram"] + num_bytes["disk"]
    total = max(num_bytes["read"], num_bytes["origin"])
    if not total:
        return {}
    origin = num_bytes["origin"] / total
    kept = {tier: (1 - origin) * (num_bytes[tier] / found if found else 0.0) for tier in ("ram", "disk")}
    return {**{tier: round(share, 4) for tier, share in kept.items()}, "origin": round(origin, 4)}


def _epoch(loader: Loader) -> EpochRound:
    before = _totals(loader)
    start = time.perf_counter()
    for batch in loader:
        if batch.quarantined:
            raise ChecksumError(
                "DATASET must be whole to be measured, got a damaged sample; run: shardflow verify DATASET."
            )
    seconds = time.perf_counter() - start
    after = _totals(loader)
    return EpochRound(
        seconds=seconds, tiers=tier_shares({name: after[name] - before[name] for name in after})
    )


def _totals(loader: Loader) -> dict[str, float]:
    counters = loader.counters
    found = {tier: float(counters.totals(f"cache_{tier}").num_bytes) for tier in _TIERS}
    return {**found, "read": float(counters.totals("read").num_bytes)}


def _scaled(cache: CacheConfig, share: float) -> CacheConfig:
    least = _LEAST_BLOCKS * cache.block_bytes

    def scale(num_bytes: int) -> int:
        return min(num_bytes, max(least, int(num_bytes * share)))

    return replace(
        cache,
        max_bytes=scale(cache.max_bytes),
        ram_bytes=scale(cache.ram_bytes),
        read_ahead_bytes=scale(cache.read_ahead_bytes),
    )


def _only(selection: Selection, measured: Measured) -> Selection:
    """Return a selection of nothing but the measured samples."""
    wanted = measured.rows
    span = range(int(wanted.min()), int(wanted.max()) + 1)

    def choose(start: int, stop: int) -> NDArray[np.bool_]:
        chosen = np.zeros(stop - start, bool)
        chosen[wanted[(wanted >= start) & (wanted < stop)] - start] = True
        return chosen

    rows = select_rows(span, choose)
    return replace(selection, population=rows, subset=rows_digest(rows))
