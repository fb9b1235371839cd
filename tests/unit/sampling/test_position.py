"""Positions count consumed steps."""

from __future__ import annotations

from typing import Any

import pytest

from shardflow.errors import StateError
from shardflow.sampling import Position

pytestmark = pytest.mark.fast


# micro-batches consumed of an epoch of 3 steps with 2 micro-batches a rank: position
TABLE = [
    (0, Position(4, 0)),
    (1, Position(4, 0)),  # inside step 0: it is run again
    (2, Position(4, 1)),  # the last micro-batch of step 0 is consumed
    (3, Position(4, 1)),
    (4, Position(4, 2)),
    (5, Position(4, 2)),
    (6, Position(5, 0)),  # the epoch is consumed
]


@pytest.mark.parametrize(("num_consumed", "position"), TABLE)
def test_position_after(num_consumed: int, position: Position) -> None:
    after = Position.after(epoch=4, num_consumed=num_consumed, num_micro_batches_per_rank=2, num_steps=3)
    assert after == position


@pytest.mark.parametrize("num_consumed", [-1, 7, 1.0, True])
def test_more_than_an_epoch_cannot_be_consumed(num_consumed: Any) -> None:
    with pytest.raises(StateError, match="num_consumed"):
        Position.after(epoch=4, num_consumed=num_consumed, num_micro_batches_per_rank=2, num_steps=3)


def test_positions_are_ordered() -> None:
    assert Position(0, 9) < Position(1, 0) < Position(1, 1)


@pytest.mark.parametrize(("epoch", "step"), [(-1, 0), (0, -1), (0.0, 0), (0, "0"), (0, None), (0, 2**63)])
def test_numbers_out_of_range_are_refused(epoch: Any, step: Any) -> None:
    with pytest.raises(StateError):
        Position(epoch, step)
