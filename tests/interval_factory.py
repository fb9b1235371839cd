"""Makes intervals by hand for tests of what reads them: a healthy run, and what is said to differ from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from shardflow.telemetry import GaugeNumbers, Interval, RankNumbers, StageNumbers

__all__ = ["make_interval", "make_run"]

_HEALTHY: Final = {
    "read": 0.10,
    "decode": 0.20,
    "transform": 0.05,
    "user_transform": 0.0,
    "collate": 0.02,
    "idle": 1.63,
    "tokenize": 0.01,
    "agree": 0.0,
}
SETTINGS: Final[Mapping[str, int | float | str]] = {
    "loader.execution": "threads",
    "loader.num_threads": 2,
    "loader.prefetch_bytes": 256 << 20,
}


def make_interval(
    *,
    number: int = 1,
    wait: float | Sequence[float] = 0.01,
    exchange: float | Sequence[float] = 0.02,
    optimizer: float = 0.02,
    slowest_wait: float | None = None,
    for_loader: float | None = None,
    stages: Mapping[str, float] | None = None,
    settings: Mapping[str, int | float | str] | None = None,
    gil_wait: float = 0.02,
    delayed: float = 0.0,
    cpu: float = 1.2,
    num_cpus: int = 16,
    tier: str = "local",
    free: float = 0.5,
    cache_disk_bytes: int = 0,
) -> Interval:
    """Make the interval ``number`` of a run, ten steps of a second; all shares are of the step.

    Args:
        number: From 0, which holds the run's first step.
        wait: For data; a number a rank makes more ranks.
        exchange: As ``wait``; the rest of the step is computed.
        optimizer: On each rank.
        slowest_wait: Of the rank that waits longest in each step; else of the one that waits longest in all.
        for_loader: Of ``wait``, what is a wait for the loader; not given: all of it.
        stages: Seconds of stages in a step of each rank, besides those of a healthy one.
        settings: Besides those of a healthy run.
        gil_wait: ``gil_wait_share`` of each rank.
        delayed: Share of the time of threads which could run that they have no processor.
        cpu: Processors that each rank uses.
        num_cpus: Of the node.
        tier: Of the dataset.
        free: Share of the memory.
        cache_disk_bytes: Of the node.
    """
    waits = list(wait) if isinstance(wait, Sequence) else [wait]
    exchanges = list(exchange) if isinstance(exchange, Sequence) else [exchange] * len(waits)
    size, step_s = len(waits), 10.0
    seconds = {**_HEALTHY, "wait": sum(waits) / size if for_loader is None else for_loader, **(stages or {})}
    seconds["data_wait"] = sum(waits) / size
    ranks = tuple(
        RankNumbers(
            rank=rank,
            host=f"node{rank // 8}",
            data_wait_s=step_s * waits[rank],
            compute_s=step_s * (1.0 - waits[rank] - exchanges[rank] - optimizer),
            exchange_s=step_s * exchanges[rank],
            optimizer_s=step_s * optimizer,
            cpu_s=step_s * cpu,
            runnable_s=step_s * cpu * delayed / (1.0 - delayed),
            gil_wait_share=gil_wait,
            cache_disk_bytes=cache_disk_bytes,
        )
        for rank in range(size)
    )
    return Interval(
        global_step=10 * number + 9,
        num_steps=10,
        wall_s=step_s + sum(seconds.get(name, 0.0) for name in ("checkpoint", "evaluate")) * 10,
        step_s=step_s,
        slowest_wait_s=step_s * (max(waits) if slowest_wait is None else slowest_wait),
        num_samples=320.0,
        world_size=size,
        ranks_per_node=min(8, size),
        stages={
            name: StageNumbers(
                seconds=one * 10 * size,
                num_bytes=40 << 20,
                num_items=10 * size,
                most_seconds=one * 10,
                least_seconds=one * 10,
            )
            for name, one in seconds.items()
        },
        gauges={"ready_batches": GaugeNumbers(mean=2.0, least=0.0, most=4.0)},
        ranks=ranks,
        settings={**SETTINGS, **(settings or {})},
        num_cpus=num_cpus,
        memory_bytes=100 << 30,
        available_bytes=int((100 << 30) * free),
        tier=tier,
    )


def make_run(interval: Interval, num_intervals: int = 4) -> list[Interval]:
    """Return the same interval again and again, as a run writes it: the first one warms up."""
    return [
        replace(interval, global_step=10 * number + interval.num_steps - 1, is_warm_up=number == 0)
        for number in range(num_intervals)
    ]
