"""What the caches of a run's data did in a step: hits by tier, what was fetched, waits for other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from shardflow.telemetry import StageCounters

__all__ = ["CacheUse"]

_TIERS = ("cache_ram", "cache_disk", "cache_origin")


class CacheUse:
    """Turns the growing totals of the cache stages into numbers of a step.

    Args:
        counters: Of the loader.

    Attributes:
        names: What `since` counts, in its order: blocks and bytes that readers found in memory, in the
            folder, and that were fetched, ahead or not; waits for blocks that others fetched, and their
            seconds over all threads.
    """

    names = (
        *(f"{tier}_{what}" for tier in _TIERS for what in ("blocks", "bytes")),
        "cache_waits",
        "cache_wait_s",
    )

    def __init__(self, counters: StageCounters) -> None:
        self._counters = counters
        self._seen = self._totals()

    def since(self) -> list[float]:
        """Return this rank's numbers since the last call."""
        before, self._seen = self._seen, self._totals()
        return [now - past for now, past in zip(self._seen, before, strict=True)]

    @classmethod
    def named(cls, numbers: Sequence[float]) -> dict[str, float]:
        """Name numbers, or sums of them over ranks."""
        return dict(zip(cls.names, numbers, strict=True))

    def _totals(self) -> list[float]:
        tiers = [self._counters.totals(tier) for tier in _TIERS]
        found = [float(number) for tier in tiers for number in (tier.num_items, tier.num_bytes)]
        waits = self._counters.totals("cache_wait")
        return [*found, float(waits.num_items), waits.seconds]
