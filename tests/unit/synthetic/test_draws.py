"""Draws are keyed, even, and independent of each other's order."""

from __future__ import annotations

from collections import Counter

import pytest

from shardflow.synthetic.draws import Draws

pytestmark = pytest.mark.fast


def test_equal_keys_draw_equal_values() -> None:
    first, second = Draws(7, "a", 1), Draws(7, "a", 1)
    assert [first.key() for _ in range(5)] == [second.key() for _ in range(5)]
    others = [Draws(8, "a", 1), Draws(7, "b", 1), Draws(7, "a", 2), Draws(7, "a").at("a")]
    assert Draws(7, "a", 1).key() not in {other.key() for other in others}


def test_a_stream_below_does_not_depend_on_what_was_drawn_above() -> None:
    used = Draws(1, "x")
    for _ in range(10):
        used.key()
    assert used.at("part", 3).key() == Draws(1, "x").at("part", 3).key()


def test_values_stay_in_their_range_and_reach_its_ends() -> None:
    draws = Draws(3, "range")
    assert {draws.integer(-2, 2) for _ in range(300)} == {-2, -1, 0, 1, 2}
    numbers = [draws.real(0.5, 0.6) for _ in range(300)]
    assert min(numbers) >= 0.5
    assert max(numbers) <= 0.6
    assert all(round(number, 3) == number for number in numbers)


def test_chances_hold() -> None:
    draws = Draws(4, "chance")
    assert not any(draws.chance(0) for _ in range(200))
    assert all(draws.chance(100) for _ in range(200))
    assert 210 < sum(draws.chance(25) for _ in range(1000)) < 290
    counts = Counter(draws.weighted((("a", 1), ("b", 3), ("c", 0))) for _ in range(1000))
    assert counts["c"] == 0
    assert 2 < counts["b"] / counts["a"] < 4.5


def test_shuffling_keeps_every_item() -> None:
    draws = Draws(5, "shuffle")
    orders = {tuple(draws.shuffled("abcd")) for _ in range(400)}
    assert len(orders) == 24
    assert draws.some([1, 2], 5) in ([1, 2], [2, 1])
