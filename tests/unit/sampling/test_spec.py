"""The batch spec: what it takes, what it refuses, and its JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shardflow.errors import ConfigError
from shardflow.sampling import BatchSpec

pytestmark = pytest.mark.fast

SPEC = BatchSpec(micro_batch_size=4, micro_batches_per_step=8, tail="mask")
JSON = {"kind": "fixed", "micro_batch_size": 4, "micro_batches_per_step": 8, "tail": "mask"}


def test_json_there_and_back() -> None:
    assert SPEC.to_json() == JSON
    assert BatchSpec.from_json(json.loads(json.dumps(SPEC.to_json()))) == SPEC
    assert SPEC.samples_per_step == 32


def test_simple_counts_the_micro_batches_of_a_step() -> None:
    assert BatchSpec.simple(global_batch_size=32, micro_batch_size=4, tail="mask") == SPEC
    assert BatchSpec.simple(global_batch_size=3, micro_batch_size=3).micro_batches_per_step == 1


@pytest.mark.parametrize(
    ("total", "size", "message"),
    [
        (30, 4, r"^global_batch_size must be a multiple of micro_batch_size \(4\), got 30 .*take 28 or 32\."),
        (3, 4, r"^global_batch_size must be an integer of at least 4, got 3 "),
        (4, 0, r"^micro_batch_size must be an integer in \[1, "),
        (4.0, 4, r"^global_batch_size must be an integer"),
    ],
)
def test_simple_refuses_sizes_that_do_not_divide(total: Any, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchSpec.simple(global_batch_size=total, micro_batch_size=size)


def test_numpy_integers_become_json() -> None:
    spec = BatchSpec(micro_batch_size=np.int64(4), micro_batches_per_step=np.uint8(8), tail="mask")  # type: ignore[arg-type]
    assert json.dumps(spec.to_json()) == json.dumps(SPEC.to_json())


def test_samples_that_fill_no_step_are_dropped_unless_said_otherwise() -> None:
    assert BatchSpec(micro_batch_size=1, micro_batches_per_step=1).tail == "drop"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("micro_batch_size", 0),
        ("micro_batch_size", -4),
        ("micro_batch_size", 4.0),
        ("micro_batch_size", True),
        ("micro_batches_per_step", 0),
        ("micro_batches_per_step", "8"),
        ("micro_batches_per_step", 2**24 + 1),
        ("tail", "wrap"),
        ("tail", None),
        ("tail", ["mask"]),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    fields: dict[str, Any] = {
        "micro_batch_size": 4,
        "micro_batches_per_step": 8,
        "tail": "mask",
        field: value,
    }
    with pytest.raises(ConfigError, match=f"^{field} must be"):
        BatchSpec(**fields)
    with pytest.raises(ConfigError, match=f"^{field} must be"):
        BatchSpec.from_json({"kind": "fixed", **fields})


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "JSON object, got NoneType"),
        ([], "JSON object, got list"),
        ({}, "kind must be one of 'fixed', 'budget', got None"),
        ({**JSON, "kind": "token_budget"}, "kind must be one of 'fixed', 'budget', got 'token_budget'"),
        ({"kind": "fixed", "tail": "mask", "micro_batch_size": 4}, "['micro_batches_per_step'] missing"),
        ({**JSON, "max_tokens": 4096}, "['max_tokens'] unknown"),
    ],
)
def test_other_objects_are_refused(value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BatchSpec.from_json(value)
    assert sentence in caught.value.message
