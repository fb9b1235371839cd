"""The identity of a plan changes with everything that changes its steps."""

from __future__ import annotations

from typing import Any

import pytest

from shardflow.sampling import BatchSpec, plan_id
from shardflow.sampling import plan as identity

pytestmark = pytest.mark.fast

SPEC = BatchSpec(micro_batch_size=4, micro_batches_per_step=8, tail="mask")
FACTS: dict[str, Any] = {"dataset_id": "d" * 64, "split": "train", "spec": SPEC, "view": "full_study"}


def test_equal_facts_equal_identity() -> None:
    first = plan_id(**FACTS)
    assert len(first) == 64
    assert int(first, 16) >= 0
    assert plan_id(**FACTS) == first
    assert plan_id(dataset_id="d" * 64, split="train", spec=SPEC) == first


@pytest.mark.parametrize(
    "change",
    [
        {"dataset_id": "e" * 64},
        {"split": "val"},
        {"view": "entity"},
        {"subset": "5" * 64},
        {"spec": BatchSpec(micro_batch_size=5, micro_batches_per_step=8, tail="mask")},
        {"spec": BatchSpec(micro_batch_size=4, micro_batches_per_step=9, tail="mask")},
        {"spec": BatchSpec(micro_batch_size=4, micro_batches_per_step=8, tail="drop")},
    ],
)
def test_any_other_fact_another_identity(change: dict[str, Any]) -> None:
    assert plan_id(**{**FACTS, **change}) != plan_id(**FACTS)


def test_another_plan_version_another_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan_id(**FACTS)
    monkeypatch.setattr(identity, "PLAN_VERSION", identity.PLAN_VERSION + 1)
    assert plan_id(**FACTS) != before
