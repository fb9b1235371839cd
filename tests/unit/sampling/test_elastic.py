"""Who runs which micro-batch of a step."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from shardflow.errors import PlanError
from shardflow.sampling import RankSchedule
from shardflow.sampling.plan import data_parallel_rank

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("num_micros", [1, 2, 3, 7, 12, 64])
def test_every_world_size_up_to_m_runs_every_micro_batch_once(num_micros: int) -> None:
    for world_size in range(1, num_micros + 1):
        schedule = RankSchedule(num_micros, world_size)
        dealt = [list(schedule.micros(rank)) for rank in range(world_size)]
        assert {len(micros) for micros in dealt} == {schedule.num_micro_batches_per_rank}
        assert sorted(micro for micros in dealt for micro in micros) == list(
            range(num_micros + schedule.num_padding_micro_batches)
        )
        for rank, micros in enumerate(dealt):
            assert micros == [schedule.micro(rank, slot) for slot in range(len(micros))]
            # Padding is always the last thing that a rank runs in a step.
            assert not any(schedule.is_padding(micro) for micro in micros[:-1])
            assert schedule.is_padding(micros[-1]) == (micros[-1] >= num_micros)


# M, W: micro-batches per rank, padding, efficiency
TABLE = [
    (8, 8, 1, 0, 1.0),
    (8, 1, 8, 0, 1.0),
    (8, 4, 2, 0, 1.0),
    (8, 3, 3, 1, 8 / 9),
    (8, 5, 2, 2, 0.8),  # worse than 4 ranks
    (64, 56, 2, 48, 64 / 112),  # the usual case of a node lost, and why M should be several times W
    (512, 56, 10, 48, 512 / 560),
    (1, 1, 1, 0, 1.0),
]


@pytest.mark.parametrize(("num_micros", "world_size", "per_rank", "padding", "efficiency"), TABLE)
def test_numbers(num_micros: int, world_size: int, per_rank: int, padding: int, efficiency: float) -> None:
    schedule = RankSchedule(num_micros, world_size)
    assert schedule.num_micro_batches_per_rank == per_rank
    assert schedule.num_padding_micro_batches == padding
    assert schedule.efficiency == pytest.approx(efficiency)


def test_more_ranks_than_micro_batches_are_refused_with_a_remedy() -> None:
    with pytest.raises(PlanError) as caught:
        RankSchedule(8, 12)
    assert caught.value.message.startswith("world_size must be at most micro_batches_per_step (8), got 12")
    assert "at most 8 ranks" in caught.value.message
    assert "multiple of 12" in caught.value.message


def test_padding_can_be_refused() -> None:
    assert RankSchedule(8, 4, allow_padding=False).num_padding_micro_batches == 0
    with pytest.raises(PlanError) as caught:
        RankSchedule(8, 7, allow_padding=False)
    assert "start 4 ranks" in caught.value.message
    assert "57.1%" in caught.value.message


@pytest.mark.parametrize(
    ("num_micros", "world_size"), [(0, 1), (8, 0), (8, -1), (8, True), (8.0, 2), (8, "2")]
)
def test_numbers_out_of_range_are_refused(num_micros: Any, world_size: Any) -> None:
    with pytest.raises(PlanError):
        RankSchedule(num_micros, world_size)


@pytest.mark.parametrize(("rank", "slot"), [(-1, 0), (3, 0), (0, -1), (0, 3), (True, 0)])
def test_ranks_and_slots_outside_are_refused(rank: Any, slot: Any) -> None:
    with pytest.raises(PlanError):
        RankSchedule(8, 3).micro(rank, slot)


def test_numbers_can_be_written_as_json() -> None:
    schedule = RankSchedule(8, 3)
    json.dumps([schedule.efficiency, schedule.num_padding_micro_batches, schedule.micro(2, 1)])


# ---- lanes and nodes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lanes", "ranks_per_node", "world_size"), [(64, 8, 64), (8, 2, 6), (12, 4, 8), (64, 8, 56)]
)
def test_nodes_that_divide_the_lanes_run_their_own(lanes: int, ranks_per_node: int, world_size: int) -> None:
    schedule = RankSchedule(64, world_size, lanes=lanes, ranks_per_node=ranks_per_node)
    num_nodes = world_size // ranks_per_node
    local = math.gcd(64, lanes) % num_nodes == 0
    assert schedule.num_nodes == (num_nodes if local else 0)
    dealt = [micro for rank in range(world_size) for micro in schedule.micros(rank)]
    assert sorted(dealt) == list(range(64 + schedule.num_padding_micro_batches))
    assert all(
        len(schedule.micros(rank)) == schedule.num_micro_batches_per_rank for rank in range(world_size)
    )
    if not local:
        assert schedule.micros(1) == RankSchedule(64, world_size).micros(1)
        return
    for rank in range(world_size):
        for micro in schedule.micros(rank):
            if not schedule.is_padding(micro):
                assert schedule.node_of_lane(micro % lanes) == rank // ranks_per_node


def test_losing_a_node_costs_what_the_efficiency_says() -> None:
    schedule = RankSchedule(512, 56, lanes=64, ranks_per_node=8)
    assert (schedule.num_nodes, schedule.num_micro_batches_per_rank, schedule.num_padding_micro_batches) == (
        0,
        10,
        48,
    )
    assert round(schedule.efficiency, 3) == 0.914


# ---- a mesh of processes -------------------------------------------------------------------------


def test_ranks_of_one_tensor_parallel_group_are_one_data_parallel_rank() -> None:
    found = [data_parallel_rank(rank, (2, 3, 2), (0, 1)) for rank in range(12)]
    assert found == [(rank // 2, 6) for rank in range(12)]
    outer = [data_parallel_rank(rank, (2, 3, 2), (0,)) for rank in range(12)]
    assert outer == [(rank // 6, 2) for rank in range(12)]
    inner = [data_parallel_rank(rank, (2, 3, 2), (2,)) for rank in range(12)]
    assert inner == [(rank % 2, 2) for rank in range(12)]
    assert data_parallel_rank(3, (4,), (0,)) == (3, 4)
    assert data_parallel_rank(3, (4,), ()) == (0, 1)


@pytest.mark.parametrize(
    ("rank", "dimensions", "said"),
    [
        (12, (0,), "rank must be"),
        (-1, (0,), "rank must be"),
        (0, (3,), "dimension must be"),
        (0, (1, 1), "must differ"),
    ],
)
def test_other_meshes_are_refused(rank: int, dimensions: tuple[int, ...], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        data_parallel_rank(rank, (2, 3, 2), dimensions)
