"""The permutation: a bijection of every size, fair over the keys, without memory of its size."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import permutations
from math import exp, factorial, sqrt
from typing import Any

import numpy as np
import pytest

from shardflow.errors import PlanError
from shardflow.sampling import Permutation
from shardflow.sampling.permutation import MAX_SIZE, MixedRadixNetwork, _walk_array, _walk_int
from shardflow.seeds import derive

pytestmark = pytest.mark.fast

TABLE = 4096
SIZES = [1, 2, 3, 4, 5, 16, 17, 1000, TABLE - 1, TABLE, TABLE + 1, TABLE + 2, 5000, 10_007, 65_536, 300_000]


@pytest.mark.parametrize("size", SIZES)
def test_every_value_once(size: int) -> None:
    permutation = Permutation(size, key=size)
    positions = np.arange(size)
    values = permutation(positions)
    assert values.dtype == np.int64
    assert np.array_equal(np.sort(values), positions)


@pytest.mark.parametrize("size", [1, 2, 3, TABLE, TABLE + 1, 2**31 + 1, 2**40, 2**40 - 1, MAX_SIZE])
def test_few_and_many_positions_agree(size: int) -> None:
    permutation = Permutation(size, key=9)
    many = np.linspace(0, size - 1, 40, dtype=np.int64)
    values = permutation(many)
    assert values.tolist() == [int(permutation(position)[0]) for position in many.reshape(-1, 1)]
    assert np.array_equal(permutation(many[:5]), values[:5])


def test_walks_stay_inside_where_they_start_again_most_often() -> None:
    """In small rectangles up to a third of the numbers lie outside, and walks take several turns."""
    for size in range(1, 60):
        for key in range(8):
            network = MixedRadixNetwork(size, key)
            words = np.arange(size, dtype=np.uint64)
            _walk_array(network, words, size)
            assert sorted(words.tolist()) == list(range(size))
            assert words.tolist() == [_walk_int(network, i, size) for i in range(size)]


def test_shapes_and_other_integer_types_are_kept() -> None:
    for size in (100, 100_000):
        permutation = Permutation(size, key=1)
        grid = np.arange(60).reshape(3, 4, 5)
        values = permutation(grid)
        assert values.shape == (3, 4, 5)
        assert values.dtype == np.int64
        for dtype in (np.uint8, np.int32, np.uint64, ">i8"):
            assert np.array_equal(permutation(grid.astype(dtype)), values)
        assert permutation(grid[:, ::2]).tolist() == values[:, ::2].tolist()
        assert permutation(np.array(7)).shape == ()
        assert permutation(np.arange(0)).shape == (0,)


def test_result_is_the_callers_own() -> None:
    for size in (50, 50_000):
        permutation = Permutation(size, key=1)
        positions = np.arange(40)
        first = permutation(positions)
        first[:] = -7
        assert np.array_equal(positions, np.arange(40))
        assert permutation(positions).min() >= 0


@pytest.mark.parametrize("size", [10, 10_000])
@pytest.mark.parametrize("positions", [[-1, 0], [0, 10_000], [0.0, 1.0], [True]])
def test_arrays_outside_are_refused(size: int, positions: list[Any]) -> None:
    with pytest.raises(PlanError):
        Permutation(size, key=1)(np.array(positions))


@pytest.mark.parametrize(
    ("size", "key"), [(0, 1), (-1, 1), (MAX_SIZE + 1, 1), (True, 1), (2.0, 1), (5, -1), (5, 2**64), (5, "k")]
)
def test_sizes_and_keys_outside_are_refused(size: Any, key: Any) -> None:
    with pytest.raises(PlanError):
        Permutation(size, key)


def test_memory_does_not_grow_with_the_size() -> None:
    Permutation(TABLE + 1, key=1)(np.arange(4))
    tracemalloc.start()
    try:
        permutation = Permutation(2**40, key=1)
        permutation(np.arange(64))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("size", "num_keys"), [(2, 2000), (3, 4000), (4, 6000), (5, 12_000)])
def test_every_permutation_of_few_is_equally_likely(size: int, num_keys: int) -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    positions = np.arange(size)
    for i in range(num_keys):
        counts[tuple(Permutation(size, derive(1, "test", i))(positions).tolist())] += 1
    expected = num_keys / factorial(size)
    chi_square = sum((counts[p] - expected) ** 2 / expected for p in permutations(range(size)))
    freedom = factorial(size) - 1
    assert abs(chi_square - freedom) < 4 * sqrt(2 * freedom)


@pytest.mark.parametrize("size", [9, 25])
def test_both_parities_occur(size: int) -> None:
    """A network over odd radices reaches even permutations only: half of them. The table does not."""
    odd = 0
    for i in range(400):
        order = Permutation(size, derive(2, "test", i))(np.arange(size))
        odd += int((order[:, None] > order)[np.triu_indices(size, 1)].sum()) % 2
    assert abs(odd - 200) < 40


@pytest.mark.parametrize("size", [TABLE, 5000, 1_000_000])
def test_neighbours_end_far_from_each_other(size: int) -> None:
    permutation = Permutation(size, key=derive(3, "test"))
    values = permutation(np.arange(size))
    root = int(sqrt(size))
    for lag in (1, 2, root - 1, root, root + 1):
        correlation = float(np.corrcoef(values[:-lag], values[lag:])[0, 1])
        assert abs(correlation) < 4.5 / sqrt(size)
    # Pairs of neighbours over a grid of places: no place is fuller than chance makes it.
    cells = 16
    bins = values * cells // size
    counts = np.bincount(bins[:-1] * cells + bins[1:], minlength=cells**2)
    expected = (size - 1) / cells**2
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - cells**2) < 4.5 * sqrt(2 * cells**2)


@pytest.mark.parametrize("size", [TABLE, 5000])
def test_as_many_samples_stay_in_place_as_chance_leaves(size: int) -> None:
    """The number of fixed points is Poisson of mean 1, against the identity and between two keys."""
    num_keys = 500
    positions = np.arange(size)
    orders = [Permutation(size, derive(4, "test", i))(positions) for i in range(num_keys)]
    for fixed in (
        [int((order == positions).sum()) for order in orders],
        [int((order == orders[i - 1]).sum()) for i, order in enumerate(orders)],
    ):
        counts = np.bincount(np.minimum(fixed, 4), minlength=5)
        chances = [exp(-1) / factorial(k) for k in range(4)]
        expected = num_keys * np.array([*chances, 1 - sum(chances)])
        assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # 0.1 % for 4 degrees of freedom


@pytest.mark.parametrize("size", [100, TABLE, 5000])
def test_every_place_is_equally_likely_for_the_first_sample(size: int) -> None:
    """No position is favoured, also not where the walk starts again outside the size."""
    num_keys = 1500
    positions = np.array([0, size // 2, size - 1])
    values = np.array([Permutation(size, derive(5, "test", i))(positions) for i in range(num_keys)])
    for bins in (values * 20 // size).T:
        counts = np.bincount(bins, minlength=20)
        expected = num_keys / 20
        assert float(((counts - expected) ** 2 / expected).sum()) < 45.3  # 0.1 % for 19 degrees of freedom


def test_keys_and_sizes_give_unrelated_orders() -> None:
    for size in (50, 5000):
        orders = {
            tuple(Permutation(size, key)(np.arange(50)).tolist()) for key in (0, 1, 2, 2**63, 2**64 - 1)
        }
        assert len(orders) == 5
    larger = Permutation(51, key=1)(np.arange(51))
    assert larger[larger < 50].tolist() != Permutation(50, key=1)(np.arange(50)).tolist()
