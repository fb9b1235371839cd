"""The inventory: who belongs to which study, and one outcome for every input."""

from __future__ import annotations

import pytest

from shardflow.errors import ShardflowError
from shardflow.format.reasons import Reason
from shardflow.packing.inventory import (
    NO_STUDY,
    PACKED,
    UNDECIDED,
    FileTable,
    ScannedFile,
    StudyTable,
    count_outcomes,
    count_reasons,
    reason_code,
    reason_name,
)

pytestmark = pytest.mark.fast


def _row(
    number: int, study: str = "", patient: str = "p", reason: str | None = None, size: int = 10
) -> ScannedFile:
    return ScannedFile(
        surrogate=f"s{number:025d}",
        reason=reason,
        study=study,
        patient=patient,
        bucket=7,
        decoded_bytes=size,
        num_slices=1,
        instance=number,
        series=0,
        digest=number,
        modified_ns=1000 + number,
        row_offset=100 * number,
        row_num_bytes=50,
    )


def test_files_are_found_by_study_in_ascending_order() -> None:
    table = FileTable(5)
    # Batches arrive in any order.
    table.add(3, [_row(3, "b"), _row(4, "a")])
    table.add(0, [_row(0, "a"), _row(1, "b"), _row(2, "", reason="NOT_DICOM")])
    a, b = table.studies.find("a"), table.studies.find("b")
    assert table.files_of(a).tolist() == [0, 4]
    assert table.files_of(b).tolist() == [1, 3]
    assert table.studies.find("c") == NO_STUDY
    assert table.study[2] == NO_STUDY
    assert table.sum_by_study(table.decoded_bytes).tolist() == [20, 20]


def test_a_study_of_two_patients_is_marked() -> None:
    studies = StudyTable()
    assert studies.add("a", "p1", 3) == studies.add("a", "p1", 3) == 0
    assert studies.add("b", "", 0) == 1
    # A file without a patient names none; the first that does decides.
    assert studies.add("b", "p2", 9) == 1
    assert studies.add("a", "", 0) == 0
    assert studies.is_conflicting == [False, False]
    assert (studies.patients, studies.buckets) == (["p1", "p2"], [3, 9])
    studies.add("a", "p9", 4)
    assert studies.is_conflicting == [True, False]


def test_reasons_have_numbers_and_names() -> None:
    codes = {reason_code(reason) for reason in Reason}
    assert len(codes) == len(Reason)
    assert PACKED not in codes
    assert UNDECIDED not in codes
    assert all(reason_name(reason_code(reason)) == reason for reason in Reason)
    assert reason_code(None) == PACKED
    assert reason_name(PACKED) is None


def test_deciding_leaves_what_is_decided() -> None:
    table = FileTable(3)
    table.add(0, [_row(0, "a"), _row(1, "a", reason="PIXEL_DATA_TRUNCATED"), _row(2, "a")])
    table.decide(0, "STUDY_QUARANTINED", {2: "DECODE_FAILED"})
    assert [reason_name(code) for code in table.reason.tolist()] == [
        "STUDY_QUARANTINED",
        "PIXEL_DATA_TRUNCATED",
        "DECODE_FAILED",
    ]


def test_a_position_outside_the_study_is_an_internal_error() -> None:
    table = FileTable(1)
    table.add(0, [_row(0, "a")])
    with pytest.raises(ShardflowError, match="internal error"):
        table.decide(0, None, {1: "DECODE_FAILED"})


def test_outcomes_add_up_and_nothing_is_left_out() -> None:
    table = FileTable(4)
    table.add(
        0, [_row(0, "a"), _row(1, "a"), _row(2, reason="NOT_DICOM"), _row(3, reason="HEADER_UNREADABLE")]
    )
    with pytest.raises(ShardflowError, match="2 inputs have no outcome"):
        count_outcomes(table.reason)
    table.decide(0, None, {})
    assert count_outcomes(table.reason) == {"packed": 2, "skipped": 1, "quarantined": 1}
    assert count_reasons(table.reason, table.reason) == {"HEADER_UNREADABLE": 2, "NOT_DICOM": 2}
