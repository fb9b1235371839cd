"""Who runs which micro-batch of a step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardflow.epochs import RankSchedule
from shardflow.errors import PlanError

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("num_micros", [1, 2, 3, 7, 12, 64])
def test_every_world_size_up_to_m_runs_every_micro_batch_once(num_micros: int) -> None:
    for world_size in range(1, num_micros + 1):
        schedule = RankSchedule(num_micros, world_size)
        dealt = [list(schedule.micros(rank)) for rank in range(world_size)]
        assert {len(micros) for micros in dealt} == {schedule.num_micro_batches_per_rank}
        assert sorted(micro for micros in dealt for micro in micros) == list(
            range(num_micros + schedule.num_fillers)
        )
        for rank, micros in enumerate(dealt):
            assert micros == [schedule.micro(rank, slot) for slot in range(len(micros))]
            # A filler is always the last thing that a rank runs in a step.
            assert not any(schedule.is_filler(micro) for micro in micros[:-1])
            assert schedule.is_filler(micros[-1]) == (micros[-1] >= num_micros)


# M, W: micro-batches per rank, fillers, efficiency
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


@pytest.mark.parametrize(("num_micros", "world_size", "per_rank", "fillers", "efficiency"), TABLE)
def test_numbers(num_micros: int, world_size: int, per_rank: int, fillers: int, efficiency: float) -> None:
    schedule = RankSchedule(num_micros, world_size)
    assert schedule.num_micro_batches_per_rank == per_rank
    assert schedule.num_fillers == fillers
    assert schedule.efficiency == pytest.approx(efficiency)


def test_more_ranks_than_micro_batches_are_refused_with_a_remedy() -> None:
    with pytest.raises(PlanError) as caught:
        RankSchedule(8, 12)
    assert caught.value.message.startswith("world_size must be at most micro_batches_per_step (8), got 12")
    assert "at most 8 ranks" in caught.value.message
    assert "multiple of 12" in caught.value.message


def test_fillers_can_be_refused() -> None:
    assert RankSchedule(8, 4, allow_fillers=False).num_fillers == 0
    with pytest.raises(PlanError) as caught:
        RankSchedule(8, 7, allow_fillers=False)
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
    json.dumps([schedule.efficiency, schedule.num_fillers, schedule.micro(2, 1)])
