"""The gate that every number of a plan passes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shardflow.errors import PlanError
from shardflow.sampling.permutation import MAX_COUNTER, checked_int

pytestmark = pytest.mark.fast


def check(value: object, low: int = 0, high: int = 9) -> int:
    return checked_int("width", value, low=low, high=high, where="here", error=PlanError)


@pytest.mark.parametrize("value", [0, 9, np.int64(3), np.uint8(7), np.int32(0)])
def test_integers_of_python_and_numpy_pass_as_python_integers(value: object) -> None:
    number = check(value)
    assert type(number) is int
    assert json.dumps(number) == str(value)


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, np.float32(1), np.array([1]), [1]])
def test_what_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(PlanError, match=r"width must be an integer in \[0, 9\], got .* \(here\)"):
        check(value)


@pytest.mark.parametrize(
    ("value", "low", "high", "sentence"),
    [
        (-1, 0, 9, "in [0, 9], got -1"),
        (10, 0, 9, "of at most 9, got 10"),
        (0, 1, MAX_COUNTER, "of at least 1, got 0"),
        (2**63, 0, MAX_COUNTER, f"of at most {2**63 - 1}, got {2**63}"),
    ],
)
def test_bounds_are_named_with_what_was_found(value: int, low: int, high: int, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        check(value, low, high)
    assert caught.value.message == f"width must be an integer {sentence} (here)."


def test_text_where_a_number_should_be_is_not_repeated() -> None:
    with pytest.raises(PlanError) as caught:
        check("Mustermann^Erika")
    assert "Mustermann" not in caught.value.message
    assert "got str" in caught.value.message
