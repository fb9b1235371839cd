"""The list of reasons is closed, whole and explained."""

from __future__ import annotations

import pickle

import pytest

from shardflow.errors import SourceError
from shardflow.format.reasons import REASONS, Outcome, Reason, outcome_of, remedy_of, source_error

pytestmark = pytest.mark.fast


def test_every_reason_is_explained_and_is_never_packed() -> None:
    assert set(REASONS) == set(Reason)
    for reason, info in REASONS.items():
        assert info.outcome in (Outcome.SKIPPED, Outcome.QUARANTINED)
        assert info.sentence.endswith(".")
        assert reason.value == reason.name


def test_reasons_are_listed_in_alphabetical_order() -> None:
    assert [reason.name for reason in Reason] == sorted(reason.name for reason in Reason)


def test_outcome_takes_a_code_or_its_text_and_refuses_others() -> None:
    assert outcome_of(Reason.NOT_DICOM) is Outcome.SKIPPED
    assert outcome_of("DECODE_FAILED") is Outcome.QUARANTINED
    with pytest.raises(ValueError, match="is not a valid Reason"):
        outcome_of("BORED")


def test_source_error_carries_its_code_across_processes() -> None:
    error = source_error(Reason.LIMIT_EXCEEDED, "7 frames declared, at most 3 allowed")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, SourceError)
    assert copy.reason == "LIMIT_EXCEEDED"
    assert str(copy) == str(error)
    assert str(error).endswith("(7 frames declared, at most 3 allowed)")


def test_what_came_too_late_is_told_the_way_that_works() -> None:
    """Neither a retry nor a removal brings it in: a removed study never comes back."""
    advice = remedy_of(Reason.STUDY_ALREADY_PACKED)
    assert "new output" in advice
    assert "identity.key_file" in advice
