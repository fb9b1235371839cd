"""Writes run folders with generated measurements, for what reads runs: no model, no data, no time.

The numbers follow from the arguments alone. What they are bound by is plain to see: the loop waits in
``"data"``, gradients wait in ``"exchange"``, one rank is slow in ``"straggler"``, and nothing waits in
``"compute"``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from shardflow.logs import EventLog
from shardflow.monitoring.history import METRICS_FILE
from shardflow.telemetry import Advice, GaugeNumbers, Interval, Move, RankNumbers, StageNumbers, Verdict

__all__ = ["Bound", "write_run"]

Bound = Literal["data", "compute", "exchange", "straggler"]
_START_S = 1_700_000_000.0
_STEPS_PER_INTERVAL = 10
# Seconds of a step by bound: data wait, compute, exchange.
_STEP_S: dict[Bound, tuple[float, float, float]] = {
    "data": (0.6, 0.3, 0.05),
    "compute": (0.0, 0.9, 0.05),
    "exchange": (0.01, 0.3, 0.6),
    "straggler": (0.01, 0.4, 0.4),
}


class _Clock:
    def __init__(self) -> None:
        self.now_s = _START_S

    def __call__(self) -> float:
        return self.now_s


def write_run(
    folder: Path,
    *,
    bound: Bound = "data",
    num_steps: int = 60,
    world_size: int = 2,
    restart_at: int = 0,
    planned_steps: int = 0,
    outcome: str = "",
) -> Path:
    """Write a run folder; returns it.

    Args:
        folder: Made if it is missing.
        bound: What its steps are bound by.
        num_steps: Steps of the run.
        world_size: Ranks, eight a host.
        restart_at: Global step after which a start ends, ten steps past its newest checkpoint; 0 for none.
        planned_steps: Of the whole run, where it is to be known.
        outcome: How the last start ended, ``finished`` or ``stopped``; empty while it goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    clock = _Clock()
    with EventLog(folder / METRICS_FILE, clock=clock) as log:
        log.write("attempt", attempt=1, start=0)
        if planned_steps:
            log.write("plan", attempt=1, num_steps=planned_steps)
        first, attempt = 0, 1
        if restart_at:
            _write_steps(log, clock, bound, range(restart_at), world_size, attempt)
            first, attempt = max(0, restart_at - 10), 2
            clock.now_s += 20.0
            log.write("attempt", attempt=attempt, start=first)
        _write_steps(log, clock, bound, range(first, num_steps), world_size, attempt)
        if outcome:
            clock.now_s += 0.5
            log.write("end", attempt=attempt, outcome=outcome, global_step=num_steps)
    return folder


def _write_steps(
    log: EventLog, clock: _Clock, bound: Bound, steps: range, world_size: int, attempt: int
) -> None:
    wait_s, compute_s, exchange_s = _STEP_S[bound]
    step_s = wait_s + compute_s + exchange_s + 0.02
    for step in steps:
        clock.now_s += step_s
        log.write(
            "step",
            attempt=attempt,
            global_step=step,
            epoch=step // 30,
            step=step % 30,
            loss=2.0 + 3.0 * math.exp(-step / 20.0),
            num_tokens=4096.0,
            num_samples=32.0,
            learning_rate=3e-4,
            gradient_norm=1.0,
            num_skipped=0,
            loss_scale=1.0,
            step_s=step_s,
            data_wait_s=wait_s,
            mean_data_wait_s=wait_s,
        )
        if (step + 1) % _STEPS_PER_INTERVAL == 0:
            _write_interval(log, bound, step, world_size, attempt, step_s)
        if (step + 1) % 25 == 0:
            clock.now_s += 0.2
            log.write(
                "checkpoint", attempt=attempt, global_step=step + 1, stall_s=0.2, write_s=1.5, num_bytes=10**8
            )
        if (step + 1) % 30 == 0:
            clock.now_s += 1.0
            log.write(
                "evaluation",
                attempt=attempt,
                global_step=step + 1,
                epoch=step // 30,
                loss=2.1 + 3.0 * math.exp(-step / 20.0),
                num_tokens=1000.0,
                num_samples=8.0,
                evaluation_s=1.0,
            )


def _write_interval(
    log: EventLog, bound: Bound, step: int, world_size: int, attempt: int, step_s: float
) -> None:
    wait_s, compute_s, exchange_s = _STEP_S[bound]
    count = _STEPS_PER_INTERVAL
    slow = world_size - 1
    ranks = [
        RankNumbers(
            rank=rank,
            host=f"node-{rank // 8}",
            data_wait_s=wait_s * count,
            compute_s=count * (compute_s + (exchange_s if bound == "straggler" and rank == slow else 0.0)),
            exchange_s=count * (0.0 if bound == "straggler" and rank == slow else exchange_s),
            optimizer_s=0.01 * count,
            cpu_s=1.6 * count,
            runnable_s=0.01 * count,
            gil_wait_share=0.02,
            pss_bytes=900 << 20,
            cache_ram_bytes=64 << 20,
            cache_disk_bytes=2 << 30,
        )
        for rank in range(world_size)
    ]
    per_rank = {
        "read": (0.5 if bound == "data" else 0.1, 40 << 20, 64),
        "cache_origin": (0.4 if bound == "data" else 0.05, 30 << 20, 40),
        "cache_disk": (0.02, 8 << 20, 20),
        "check": (0.01, 40 << 20, 64),
        "decode": (0.2, 160 << 20, 64),
        "transform": (0.05, 80 << 20, 64),
        "collate": (0.01, 80 << 20, 4),
        "data_wait": (wait_s, 0, 4),
        "forward": (compute_s / 3, 0, 4),
        "backward": (compute_s * 2 / 3, 0, 4),
        "exchange": (exchange_s, 0, 1),
        "optimizer": (0.01, 0, 1),
        "agree": (0.005, 0, 1),
        "starved": (wait_s, 0, 4 if wait_s > 0.1 else 0),
        "idle": (0.1, 0, 4),
    }
    interval = Interval(
        global_step=step,
        num_steps=count,
        epoch=step // 30,
        wall_s=step_s * count,
        step_s=step_s * count,
        num_samples=32.0 * count,
        num_tokens=4096.0 * count,
        world_size=world_size,
        ranks_per_node=min(8, world_size),
        stages={
            name: StageNumbers(
                seconds=seconds * count * world_size,
                num_bytes=num_bytes * count * world_size,
                num_items=num_items * count * world_size,
                most_seconds=seconds * count,
                most_rank=0,
                least_seconds=seconds * count,
            )
            for name, (seconds, num_bytes, num_items) in per_rank.items()
        },
        gauges={
            "ready_batches": GaugeNumbers(mean=0.2 if bound == "data" else 3.0, least=0.0, most=4.0),
            "buffered_bytes": GaugeNumbers(mean=64e6, least=0.0, most=128e6),
            "threads_busy": GaugeNumbers(mean=1.9, least=0.0, most=2.0),
        },
        ranks=tuple(ranks),
        settings={
            "loader.execution": "threads",
            "loader.num_threads": 2,
            "loader.prefetch_bytes": 256 << 20,
            "cache.read_ahead_bytes": 256 << 20,
        },
        num_cpus=16,
        memory_bytes=64 << 30,
        available_bytes=40 << 30,
        tier="s3",
        events={"cache_disk_evicted": 2 * count},
        cache_free_bytes=500 << 30,
    )
    log.write("interval", attempt=attempt, **interval.to_json())
    log.write("verdict", attempt=attempt, **_verdict(bound, step).to_json())
    if bound == "data" and step < 30:
        move = Move(
            global_step=step,
            kind="try",
            setting="loader.num_threads",
            old="2",
            new="4",
            rate_before=33.0,
            text="more threads: decoding takes what reading leaves",
        )
        log.write("tune", attempt=attempt, **move.to_json())


def _verdict(bound: Bound, step: int) -> Verdict:
    wait_s, compute_s, exchange_s = _STEP_S[bound]
    total = wait_s + compute_s + exchange_s + 0.02
    if bound == "data":
        return Verdict(
            global_step=step,
            code="storage-bound",
            text=f"Storage-bound: {wait_s / total:.0%} of the step waits for reads from s3.",
            share=wait_s / total,
            evidence={"data_wait_share": wait_s / total, "read_threads": 1.0},
            advice=(
                Advice(
                    text="Raise cache.read_ahead_bytes from 256 MiB to 512 MiB.",
                    setting="cache.read_ahead_bytes",
                    old="256 MiB",
                    new="512 MiB",
                    gain=0.4,
                ),
            ),
        )
    code = {"compute": "compute-bound", "exchange": "exchange-bound", "straggler": "straggler"}[bound]
    share = (compute_s if bound == "compute" else exchange_s) / total
    return Verdict(global_step=step, code=code, text=f"{code.capitalize()}: {share:.0%}.", share=share)
