"""Weights become integers: which values are told apart, how large the error is, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest

from shardflow.errors import ConfigError
from shardflow.sampling.weights import MAX_CLASSES, find_levels

pytestmark = pytest.mark.fast


def test_integers_of_few_values_are_exact() -> None:
    for values in (np.array([0, 3, 3, 7]), np.array([3, 0, 7], np.uint8), np.array([False, True])):
        levels = find_levels(iter([values]), name="w")
        assert levels.weights[levels.codes(values)].tolist() == values.astype(int).tolist()
        assert levels.error == 0
    large = np.array([1, 2**31 - 1])
    assert find_levels(iter([large]), name="w").weights.tolist() == large.tolist()


def test_floats_are_scaled_by_a_power_of_two() -> None:
    values = np.array([0.0, -0.0, 0.25, 0.1, 3.0])
    levels = find_levels(iter([values[:2], values[2:]]), name="w")
    weights = levels.weights[levels.codes(values)]
    assert weights[:2].tolist() == [0, 0]
    assert weights[4] == 12 * weights[2]
    assert weights[3] / weights[4] == pytest.approx(0.1 / 3, rel=levels.error * 2)
    assert levels.error < 1e-8


def test_many_values_are_cut_and_the_error_is_stated() -> None:
    values = np.random.default_rng(0).lognormal(size=20_000)
    blocks = np.split(values, 10)
    levels = find_levels(iter(blocks), name="w")
    assert 100 < len(levels.weights) <= MAX_CLASSES
    weights = levels.weights[levels.codes(values)]
    ratio = weights / values
    assert ratio.max() / ratio.min() - 1 < 4 * levels.error
    assert 0 < levels.error < 0.02
    again = find_levels(iter([values[::-1]]), name="w")
    assert (again.weights[again.codes(values)] == weights).all()


@pytest.mark.parametrize(("value", "sentence"), [(-1.0, "negative"), (np.nan, "NaN"), (np.inf, "infinity")])
def test_weights_that_are_none_are_refused(value: float, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^weights='t.w' must be .*{sentence}"):
        find_levels(iter([np.array([1.0, value])]), name="t.w")
