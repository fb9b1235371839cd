"""The most memory that the loaders of a node's ranks may take, checked before the first byte is read.

Every part of it is bounded where it is taken: batches by ``prefetch_bytes``, what a cache keeps and fetches
by its own settings, answers of a remote store by its concurrent requests. So their sum times the ranks is a
cap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardflow.errors import ConfigError
from shardflow.loading.config import LoaderConfig
from shardflow.loading.world import World
from shardflow.shards import Dataset
from shardflow.storage import ByteStore, CacheConfig, CachedStore, RemoteStore
from shardflow.telemetry.machine import machine_bytes

__all__ = ["check_node", "rank_num_bytes"]


def rank_num_bytes(
    config: LoaderConfig, datasets: Sequence[Dataset], changes: Mapping[str, int | str] | None = None
) -> dict[str, int]:
    """Return the most bytes that the loader of one rank takes, by what for.

    Not in it: batches that the consumer holds, a micro-batch that exceeds ``prefetch_bytes`` alone, the
    samples table (mapped, and shared by the ranks of a node) and the interpreter itself.

    Args:
        config: The loader's.
        datasets: What it reads.
        changes: Settings by name, such as ``cache.ram_bytes``, that are to be others than they are.
    """
    changes = changes or {}

    def number(settings: LoaderConfig | CacheConfig, name: str) -> int:
        table = "loader" if settings is config else "cache"
        return int(changes.get(f"{table}.{name}", getattr(settings, name)))

    num_threads = number(config, "num_threads")
    num_readers = num_threads if changes.get("loader.execution", config.execution) == "workers" else 1
    caches = {id(each.cache): each.cache.config for each in datasets if each.cache is not None}.values()
    ahead = max((number(cache, "read_ahead_bytes") for cache in caches), default=0)
    remote = {id(store): store for store in map(_origin, datasets) if isinstance(store, RemoteStore)}.values()
    at_once = changes.get("store.max_concurrency")
    answers = sum(store.answer_bytes(None if at_once is None else int(at_once)) for store in remote)
    return {
        # As much again lies idle in the pool, for the next batches.
        "prefetch_bytes, twice": 2 * number(config, "prefetch_bytes"),
        "read_bytes of each thread": num_threads * number(config, "read_bytes"),
        "ram_bytes of the cache": num_readers * sum(number(cache, "ram_bytes") for cache in caches),
        "read_ahead_bytes of the cache": num_readers * ahead,
        "answers of the store": num_readers * answers,
    }


def check_node(config: LoaderConfig, datasets: Sequence[Dataset], world: World) -> None:
    """Refuse settings with which the loaders of a node could take more memory than they may.

    Args:
        config: The loader's; ``max_node_bytes`` is the cap, 0 the memory of the machine or its cgroup.
        datasets: What it reads.
        world: Says how many ranks a node has; one where that is not known.

    Raises:
        ConfigError: The sum is above the cap, or the cap above the memory.
    """
    room, cap = machine_bytes(), config.max_node_bytes
    if cap > room:
        raise ConfigError(
            f"max_node_bytes must be at most the {_gb(room)} of memory of this machine or its cgroup, got "
            f"{_gb(cap)}; lower it."
        )
    parts = rank_num_bytes(config, datasets)
    num_ranks = max(1, world.ranks_per_node)
    total = num_ranks * sum(parts.values())
    if total <= (cap or room):
        return
    what = "max_node_bytes" if cap else "the memory of this machine or its cgroup"
    each = ", ".join(f"{_gb(num_bytes)} {name}" for name, num_bytes in parts.items() if num_bytes)
    raise ConfigError(
        f"the loaders of a node must take at most {_gb(cap or room)} ({what}), got {_gb(total)}: {num_ranks} "
        f"rank(s) with {each}; lower the largest of these{', or raise max_node_bytes' if cap else ''}."
    )


def _origin(dataset: Dataset) -> ByteStore:
    return dataset.store.origin if isinstance(dataset.store, CachedStore) else dataset.store


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
