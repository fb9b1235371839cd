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


def test_a_start_continues_the_count_of_the_epoch() -> None:
    """Each start masks a few, none of them too many; all of them together are."""
    masks: list[QuarantineRow] = []
    for start in range(3):
        quarantine = Quarantine(max_bad_samples=99, max_bad_share=0.1)
        quarantine.load([row.to_json() for row in masks])
        found = [_row(start * 30 + number) for number in range(30)]
        if start < 2:  # of two ranks of 300 samples each, of which 30 may be masked
            quarantine.record(found[:15], 300, num_ranks=2)
            masks = quarantine.rows + found[15:]  # what the other rank has masked
        else:
            with pytest.raises(SampleError, match=r"of the 300 of this rank in epoch 0 .* got 31"):
                quarantine.record(found, 300, num_ranks=2)
            assert len(quarantine) == 60


def test_masks_of_another_epoch_do_not_count_in_this_one() -> None:
    quarantine = Quarantine(max_bad_samples=99, max_bad_share=0.1)
    quarantine.load([{**_row(number).to_json(), "epoch": 7} for number in range(50)])
    quarantine.record([_row(number) for number in range(10)], 100)


def test_no_row_is_taken_over_where_one_is_malformed() -> None:
    quarantine = Quarantine(max_bad_samples=2)
    with pytest.raises(StateError):
        quarantine.load([_row(1).to_json(), {"epoch": 0}])
    assert quarantine.rows == []


def test_a_finding_says_where() -> None:
    bad = BadSample(BadSampleReason.DECODE_FAILED, "train-000003", "s000.i0001.b2nd", "no frame")
    assert str(bad) == "DECODE_FAILED (shard train-000003, field s000.i0001.b2nd): no frame"
