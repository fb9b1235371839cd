from __future__ import annotations

import json

import pytest

from shardflow.errors import SampleError, StateError
from shardflow.fields.quarantine import BadSample, BadSampleReason, Quarantine, QuarantineRow

pytestmark = pytest.mark.fast


def _row(step: int, slot: int = 0) -> QuarantineRow:
    return QuarantineRow(
        epoch=0, step=step, micro=0, slot_in_batch=slot, row=5, key="abc", shard="train-000000",
        field="report.txt", reason=BadSampleReason.CHECKSUM_MISMATCH.value,
    )  # fmt: skip


def test_a_row_crosses_json() -> None:
    row = _row(3)
    assert QuarantineRow.from_json(json.loads(json.dumps(row.to_json()))) == row


@pytest.mark.parametrize(
    ("change", "named"), [({"step": "3"}, "step"), ({"key": None}, "key"), ({"extra": 1}, "keys")]
)
def test_a_malformed_row_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(StateError, match=named):
        QuarantineRow.from_json({**_row(3).to_json(), **change})


def test_the_bound_counts_what_was_found_once_and_not_what_was_loaded() -> None:
    quarantine = Quarantine(max_bad_samples=2)
    quarantine.load([_row(9).to_json(), _row(8).to_json()])
    quarantine.record([_row(9), _row(1)], 100)
    quarantine.record([_row(1), _row(2)], 100)
    assert [row.step for row in quarantine.rows] == [1, 2, 8, 9]
    with pytest.raises(SampleError, match=r"at most 2, got 3 .*train-000000.*CHECKSUM_MISMATCH"):
        quarantine.record([_row(3)], 100)


def test_no_row_is_taken_over_where_one_is_malformed() -> None:
    quarantine = Quarantine(max_bad_samples=2)
    with pytest.raises(StateError):
        quarantine.load([_row(1).to_json(), {"epoch": 0}])
    assert quarantine.rows == []


def test_a_finding_says_where() -> None:
    bad = BadSample(BadSampleReason.DECODE_FAILED, "train-000003", "s000.i0001.b2nd", "no frame")
    assert str(bad) == "DECODE_FAILED (shard train-000003, field s000.i0001.b2nd): no frame"
