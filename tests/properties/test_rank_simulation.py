"""A small run of the simulator of many ranks (`benchmarks.plan.ranks`): it holds, and sees what would not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.plan.ranks import Cluster, layout_of, plan_cost, reading, simulate
from shardflow.sampling import BatchSpec, EpochPlan, Position, RankSchedule
from tests.sweeps import sampled

CLUSTER = Cluster(num_ranks=64, num_threads=16, num_kills=20)
LAYOUT = layout_of(50_000, 300)
FULL = BatchSpec(micro_batch_size=4, micro_batches_per_step=128, tail="mask")
SPECS = {
    "full shuffle": FULL,
    "lanes": replace(FULL, lanes=128, window_bytes=1 << 28),
    "drop": replace(FULL, tail="drop"),
}


@pytest.mark.parametrize("order", SPECS)
@pytest.mark.parametrize("seed", sampled([0, 1], {0}))
def test_no_sample_is_lost_or_doubled_over_20_kills_and_resizes(order: str, seed: int) -> None:
    cluster = Cluster(num_ranks=64, num_kills=20, seed=seed)
    found = simulate(LAYOUT, SPECS[order], cluster)
    assert (found.num_lost, found.num_doubled) == (0, 0)
    assert found.num_steps == (50_000 // 512 if order == "drop" else -(-50_000 // 512))
    assert len(found.world_sizes) == 21
    assert len(set(found.world_sizes)) > 5
    assert any(64 % size for size in found.world_sizes)  # padding micro-batches
    assert found.num_repeated_steps
    assert 0 < found.state_bytes < 1024


@pytest.mark.parametrize("order", ["full shuffle", "lanes"])
def test_what_nodes_and_ranks_pay_is_counted(order: str) -> None:
    found = reading(LAYOUT, SPECS[order], CLUSTER, num_moments=3)
    assert found["shards_of_a_node_a_step"]["max"] <= 16 * 4
    assert 1 <= found["readers_of_a_shard"]["mean"] <= found["readers_of_a_shard"]["max"]
    # Lanes belong to nodes, so hardly any two nodes read one shard.
    assert (found["nodes_of_a_shard_at_all_moments"]["mean"] < 1.2) == (order == "lanes")
    cost = plan_cost(LAYOUT, SPECS[order], CLUSTER, [0, 63])
    assert len(cost["plan_processor_s"]) == len(cost["allocated_mb"]) == 2


def test_a_lost_and_a_doubled_sample_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EpochPlan.step

    def twice(plan: EpochPlan, step: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        rows, weights = whole(plan, step)
        if step == 7:
            rows = rows.copy()
            rows[0, 0] = rows[0, 1]
        return rows, weights

    monkeypatch.setattr("benchmarks.plan.ranks._check_step", lambda *_: None)
    monkeypatch.setattr(EpochPlan, "step", twice)
    found = simulate(LAYOUT, SPECS["full shuffle"], CLUSTER)
    assert (found.num_lost, found.num_doubled) == (1, 1)


def test_ranks_that_disagree_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankSchedule, "micros", lambda schedule, _: range(schedule.micro_batches_per_step))
    with pytest.raises(RuntimeError, match="different numbers of micro-batches"):
        simulate(LAYOUT, SPECS["full shuffle"], CLUSTER)
    monkeypatch.undo()

    def unrounded(*, epoch: int, num_consumed: int, **_: int) -> Position:
        return Position(epoch, num_consumed)

    monkeypatch.setattr(Position, "after", unrounded)
    with pytest.raises(RuntimeError, match=r"ranks have \d+ states"):
        simulate(LAYOUT, SPECS["full shuffle"], CLUSTER)
