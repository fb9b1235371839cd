"""The order of an epoch: all rows of the population, once each, anew in every epoch."""

from __future__ import annotations

import numpy as np
import pytest

from shardflow.sampling.micro_batches import EpochOrder

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "population", [range(1), range(7, 8), range(100, 163), range(5, 50, 3), range(9, 2, -2)]
)
def test_every_row_of_the_population_once(population: range) -> None:
    order = EpochOrder(population, seed=1, epoch=0)
    rows = order.rows(np.arange(len(population)))
    assert rows.dtype == np.int64
    assert sorted(rows.tolist()) == sorted(population)


def test_order_belongs_to_seed_and_epoch() -> None:
    positions = np.arange(40)

    def rows(seed: int, epoch: int) -> list[int]:
        return list(EpochOrder(range(40), seed=seed, epoch=epoch).rows(positions).tolist())

    assert rows(1, 0) == rows(1, 0)
    orders = [rows(seed, epoch) for seed in range(6) for epoch in range(6)]
    # Seeds are not added: seed 1 of epoch 2 is not seed 2 of epoch 1.
    assert len({tuple(order) for order in orders}) == 36


def test_where_a_population_starts_does_not_change_its_order() -> None:
    positions = np.arange(40)
    near, far = EpochOrder(range(40), seed=1, epoch=3), EpochOrder(range(1000, 1040), seed=1, epoch=3)
    assert (far.rows(positions) - near.rows(positions) == 1000).all()
