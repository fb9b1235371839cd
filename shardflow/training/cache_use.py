"""What the caches of a run's data did in a step: hits by tier, what was fetched, waits for other ranks."""

from __future__ import annotations

from shardflow.telemetry import StageCounters
from shardflow.training.hooks import LoopHook, StepReport

_TIERS = ("cache_ram", "cache_disk", "cache_origin")


class CacheUse(LoopHook):
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

    def since(self) -> dict[str, float]:
        """Return this rank's numbers since the last call."""
        before, self._seen = self._seen, self._totals()
        return {name: self._seen[name] - before[name] for name in self.names}

    def fill(self, report: StepReport) -> None:
        """Set the fields of the same names."""
        for name, number in self.since().items():
            setattr(report, name, number)

    @classmethod
    def of(cls, report: StepReport) -> dict[str, float]:
        """Return the numbers of a report."""
        return {name: getattr(report, name) for name in cls.names}

    def _totals(self) -> dict[str, float]:
        tiers = [self._counters.totals(tier) for tier in _TIERS]
        found = [float(number) for tier in tiers for number in (tier.num_items, tier.num_bytes)]
        waits = self._counters.totals("cache_wait")
        return dict(zip(self.names, [*found, float(waits.num_items), waits.seconds], strict=True))
