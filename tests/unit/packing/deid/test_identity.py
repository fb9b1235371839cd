"""Evidence of identity: spellings of one identifier agree, people who differ do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardflow.packing.deid.identity import (
    MAX_SHARED,
    PatientEvidence,
    StatedPerson,
    evidence_of,
    judge,
    normalize_name,
    pairs_of_equal,
    split_id,
)
from shardflow.packing.deid.pseudonyms import SecretKey

pytestmark = pytest.mark.fast

KEY = SecretKey(bytes(range(32)))
BORN, NAME = "19701231", "Lovelace^Ada^K"


def _judge(one: StatedPerson, other: StatedPerson, *, same_pixels: bool = False) -> str | None:
    found = [
        judge(evidence_of(KEY, a), evidence_of(KEY, b), same_pixels=same_pixels)[0]
        for a, b in ((one, other), (other, one))
    ]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("other", ["0012-34a", "1234A", " 1234a ", "1234a^WEST", "1234a@west", "00001234a"])
def test_spellings_of_an_identifier_agree(other: str) -> None:
    assert split_id(other)[0] == split_id("1234a")[0]


def test_digits_inside_an_identifier_keep_their_zeros() -> None:
    assert split_id("A100")[0] != split_id("A1")[0]
    assert split_id("10-02")[0] != split_id("10-2")[0]
    assert split_id("0")[0] == "0"


@pytest.mark.parametrize(
    "other", ["LOVELACE^ADA", "Ada Lovelace", "Lovelace, Ada", "lovelace^ada^king=\N{KATAKANA LETTER A}"]
)
def test_spellings_of_a_name_agree(other: str) -> None:
    assert normalize_name(other) == normalize_name(NAME) != ""


@pytest.mark.parametrize("name", ["", "Anonymous^Patient", "P0012", "Test^P1", "NoName^X", "Smith", "^^"])
def test_placeholders_are_no_names(name: str) -> None:
    assert normalize_name(name) == ""


def test_umlauts_and_ideographs_are_names() -> None:
    assert normalize_name("M\xfcller^J\xfcrgen") == normalize_name("MUELLER^JUERGEN") == "jurgen muller"
    assert normalize_name("\u738b\u5c0f\u660e") == "\u738b\u5c0f\u660e"


def test_what_is_certain() -> None:
    full: dict[str, Any] = {"name": NAME, "birth_date": BORN, "sex": "F"}
    one = StatedPerson(patient_id="0042", **full)
    assert _judge(one, StatedPerson(patient_id="42^EAST", **full)) == "certain"
    assert _judge(one, StatedPerson(patient_id="X9", **full)) == "certain"
    assert _judge(one, StatedPerson(patient_id="42", birth_date=BORN)) == "certain"
    named = StatedPerson(patient_id="X9", other_ids=("42",), birth_date=BORN)
    assert _judge(one, named) == "certain"
    third = StatedPerson(patient_id="Y1", other_ids=("N77",), birth_date=BORN)
    assert _judge(StatedPerson(patient_id="Z1", other_ids=("n-77",), birth_date=BORN), third) == "certain"
    assert _judge(StatedPerson(patient_id="a"), StatedPerson(patient_id="b"), same_pixels=True) == "certain"


def test_what_is_uncertain() -> None:
    bare = StatedPerson(patient_id="42")
    assert _judge(StatedPerson(patient_id="0042"), bare) == "uncertain"
    assert _judge(StatedPerson(patient_id="X9", other_ids=("42",)), bare) == "uncertain"
    unknown_day: dict[str, Any] = {"name": NAME, "birth_date": "19700101", "sex": "F"}
    pair = [StatedPerson(patient_id=one, **unknown_day) for one in ("A", "B")]
    assert _judge(*pair) == "uncertain"
    assert (
        _judge(
            StatedPerson(patient_id="A", name=NAME, birth_date=BORN),
            StatedPerson(patient_id="B", name=NAME, birth_date=BORN, sex="F"),
        )
        == "uncertain"
    )


def test_who_differs_is_not_linked() -> None:
    assert _judge(StatedPerson(patient_id="42^EAST"), StatedPerson(patient_id="42^WEST")) is None
    assert _judge(StatedPerson(patient_id="1"), StatedPerson(patient_id="2")) is None
    born = [StatedPerson(patient_id=one, birth_date=day) for one, day in (("01", BORN), ("1", "19801231"))]
    assert _judge(*born) is None
    twins = [StatedPerson(patient_id=one, name=f"Lovelace^{one}", birth_date=BORN) for one in ("Ada", "Ben")]
    assert _judge(*twins) is None


def test_a_value_of_many_is_a_placeholder() -> None:
    values = np.zeros(MAX_SHARED, np.uint64)
    owners = np.arange(MAX_SHARED)
    assert len(pairs_of_equal(values, owners)) == MAX_SHARED * (MAX_SHARED - 1) // 2
    assert len(pairs_of_equal(np.zeros(MAX_SHARED + 1, np.uint64), np.arange(MAX_SHARED + 1))) == 0


def test_evidence_of_other_patients_stays_apart() -> None:
    evidence = PatientEvidence()
    tokens = [evidence_of(KEY, StatedPerson(patient_id=one, birth_date=BORN)) for one in ("7", "007", "8")]
    for name, own in zip(("p", "q", "r"), tokens, strict=True):
        for _ in range(3):
            evidence.add(name, own)
    ordered = evidence.sorted()
    assert [ordered.of(number) for number in range(3)] == [sorted(own) for own in tokens]
    assert ordered.pairs().tolist() == [[0, 1]]


def test_digests_need_the_key() -> None:
    person = StatedPerson(patient_id="42", name=NAME, birth_date=BORN, sex="F")
    other = SecretKey(bytes(range(1, 33)))
    assert not set(evidence_of(KEY, person)) & set(evidence_of(other, person))
    assert repr(person) == "StatedPerson()"
