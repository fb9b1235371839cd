"""How long 1,920 processes pack, and how long the last ones work alone: ``-m benchmarks.schedule.simulate``.

Nothing is packed: studies with a long tail of sizes are dealt by the library's own orders, and a heap of
clocks says when each process is free. Times are proportional to sizes; shared disks and networks do not show.
"""

from __future__ import annotations

import heapq
import sys
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardflow.packing.plan import PackPlan, PlannedShard
from shardflow.packing.scheduling import assign_shards, opening_order
from shardflow.seeds import derive

__all__ = ["Schedule", "Workload", "dealt", "main", "makespan", "workload"]

_SHARD_S: Final = 40.0
"""Seconds of work in a shard of 512 MiB: about 13 MiB/s of compressed slices for each process."""
_NUM_WORKERS: Final = 1920


@dataclass(frozen=True, slots=True)
class Workload:
    """Studies in planned order, cut into shards."""

    seconds: NDArray[np.float64]
    """``(num_studies,)``: work of each study."""
    starts: NDArray[np.int64]
    """``(num_shards + 1,)``: first study of each shard."""

    def shard(self, number: int) -> list[float]:
        """The studies of a shard, largest first: the order in which they are given to processes."""
        found: list[float] = self.seconds[self.starts[number] : self.starts[number + 1]].tolist()
        return sorted(found, reverse=True)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.starts) - 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the job ends, and how it comes to its end."""

    end_s: float
    tail_s: float
    """From the moment when the first process has nothing left to do to the end."""
    busy: float
    """Share of all processes' time that is work."""


def workload(num_studies: int, *, seed: int) -> Workload:
    """Draw studies: mostly single X-rays, some CTs of hundreds of slices, a few of thousands."""
    draws = np.array([derive(seed, "schedule", number) for number in range(num_studies)], np.uint64)
    uniform = (draws >> np.uint64(11)).astype(np.float64) / (1 << 53)
    seconds = np.minimum(0.3 * (1.0 - uniform) ** -0.9, 600.0)
    ends = np.floor(np.cumsum(seconds) / _SHARD_S)
    cuts = np.flatnonzero(np.diff(ends) > 0) + 1
    return Workload(seconds=seconds, starts=np.array([0, *cuts, num_studies], np.int64))


def makespan(load: Workload, num_workers: int, *, is_planned_order: bool) -> Schedule:
    """One job with so many processes, as with Ray: shards as they are planned, or as they are opened."""
    shards = range(load.num_shards)
    largest = {number: int(1000 * load.shard(number)[0]) for number in shards}
    order = list(shards) if is_planned_order else opening_order(largest)
    return _run([second for number in order for second in load.shard(number)], [0.0] * num_workers)


def dealt(load: Workload, *, num_tasks: int, num_slots: int, num_processes: int) -> Schedule:
    """Tasks of so many processes each; as many at once as there are slots, the next when one ends."""
    sums = np.add.reduceat(load.seconds, load.starts[:-1])
    planned = tuple(
        PlannedShard(f"train-{number:06d}", "train", (), int(1000 * total))
        for number, total in enumerate(sums)
    )
    plan = PackPlan(shards=planned, study_reason=np.zeros(0, np.uint8), empty_splits=(), digest="")
    owners = np.array(assign_shards(plan, num_tasks))
    slots = [0.0] * num_slots
    busy = 0.0
    for task in range(num_tasks):
        own = np.flatnonzero(owners == task).tolist()
        order = opening_order({number: int(1000 * load.shard(number)[0]) for number in own})
        seconds = [second for number in order for second in load.shard(number)]
        start = heapq.heappop(slots)
        end = start + _run(seconds, [0.0] * num_processes).end_s
        busy += sum(seconds)
        heapq.heappush(slots, end)
    first_idle = min(slots)
    end_s = max(slots)
    return Schedule(end_s, end_s - first_idle, busy / (end_s * num_slots * num_processes))


def _run(seconds: list[float], clocks: list[float]) -> Schedule:
    for second in seconds:
        heapq.heapreplace(clocks, clocks[0] + second)
    end_s = max(clocks)
    return Schedule(end_s, end_s - min(clocks), sum(seconds) / (end_s * len(clocks)) if end_s else 1.0)


def main() -> None:
    """Print the table."""
    load = workload(2_000_000, seed=1)
    total, longest = float(load.seconds.sum()), float(load.seconds.max())
    best = max(total / _NUM_WORKERS, longest)
    lines = [
        f"{len(load.seconds)} studies in {load.num_shards} shards; median {np.median(load.seconds):.2f} s",
        f"longest {longest:.0f} s, all {total / 3600:.0f} h; at best {best:.0f} s on {_NUM_WORKERS}",
        f"{'':34}{'end':>8}{'at best':>9}{'tail':>8}{'busy':>8}",
    ]
    for name, found in (
        ("one job, shards as planned", makespan(load, _NUM_WORKERS, is_planned_order=True)),
        ("one job, largest first (ours)", makespan(load, _NUM_WORKERS, is_planned_order=False)),
        ("240 tasks of 8", dealt(load, num_tasks=240, num_slots=240, num_processes=8)),
        ("960 tasks of 8, 240 at once", dealt(load, num_tasks=960, num_slots=240, num_processes=8)),
    ):
        lines.append(
            f"{name:34}{found.end_s:6.0f} s{100 * best / found.end_s:7.1f} %{found.tail_s:6.0f} s"
            f"{100 * found.busy:6.1f} %"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
