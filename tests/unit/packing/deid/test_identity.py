"""Evidence of identity: spellings of one identifier agree, people who differ do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardflow.packing.deid.identity import (
    MAX_SHARED,
    PatientEvidence,
    StatedPerson,
    Verdict,
    evidence_of,
    is_number,
    judge,
    listed_together,
    normalize_name,
    normalize_names,
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


def test_a_name_is_known_in_each_of_its_writings() -> None:
    kanji = "\u5c71\u7530^\u592a\u90ce"
    whole, written = normalize_names(f"Yamada^Tarou={kanji}"), normalize_names(f"={kanji}")
    assert written == whole[1:]
    pair = [
        StatedPerson(patient_id=one, name=name, birth_date=BORN, sex="M")
        for one, name in (("A", f"Yamada^Tarou={kanji}"), ("B", f"={kanji}"))
    ]
    assert _judge(*pair) == "certain"
    assert normalize_names("Lovelace^Ada^K2") == (normalize_name(NAME),)
    assert normalize_names("=Anonymous^X=") == ()


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


def test_a_list_of_one_patients_numbers_is_certain_unless_headers_contradict() -> None:
    def judged(one: dict[str, Any], other: dict[str, Any]) -> list[str | None]:
        a, b = (
            evidence_of(KEY, StatedPerson(patient_id=number, **stated))
            for number, stated in (("A1", one), ("B2", other))
        )
        verdicts: tuple[Verdict, ...] = ("certain", "uncertain")
        return [judge(a, b, same_pixels=False, listed=verdict)[0] for verdict in verdicts]

    assert judged({}, {}) == ["certain", "uncertain"]
    assert judged({"sex": "F"}, {"sex": "F"}) == ["certain", "uncertain"]
    # Who married has another name; a date or a name that agrees decides whatever the issuers are called.
    assert judged({"birth_date": BORN, "name": NAME}, {"birth_date": BORN, "name": "Byron^Ada"}) == [
        "certain",
        "certain",
    ]
    for one, other in (
        ({"birth_date": BORN}, {"birth_date": "19701230"}),
        ({"name": NAME}, {"name": "Byron^Ada"}),
        ({"sex": "F"}, {"sex": "M"}),
    ):
        assert judged(one, other) == ["uncertain", "uncertain"]


def test_a_list_holds_numbers_and_no_placeholders() -> None:
    listed = listed_together(KEY, (("0041", "EAST"), ("B-2", "")))
    assert {number for number, _ in listed} == {
        token >> 3
        for one in ("41", "b2")
        for token in evidence_of(KEY, StatedPerson(patient_id=one))
        if token & 7 == 0
    }
    for placeholder in ("NONE", "0", "UNKNOWN", "UNKNOWN1", "N/A", "99999", "", "0-0"):
        assert not is_number(placeholder)
        assert listed_together(KEY, (("41", ""), (placeholder, ""))) == ()
    # Two spellings of one number are one, and a list of half a hospital is no patient's.
    assert listed_together(KEY, (("41", "EAST"), ("0041", "WEST"))) == ()
    assert listed_together(KEY, tuple((f"P{number}7", "") for number in range(MAX_SHARED + 1))) == ()


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


@pytest.mark.parametrize(
    "stated",
    [
        {"age": "055Y", "study_date": "20260301"},
        {"age": "55", "study_date": "20260301"},
        {"age": "660M", "study_date": "20260301"},
        {"birth_date": "1970"},
        {"birth_date": "197012"},
        {"birth_date": "19700101"},
    ],
)
def test_a_name_with_a_year_of_birth_is_uncertain(stated: dict[str, Any]) -> None:
    """An age stands for two years, whatever the day of the study."""
    one = StatedPerson(patient_id="A", name=NAME, birth_date=BORN, sex="F")
    assert _judge(one, StatedPerson(patient_id="B", name=NAME, sex="F", **stated)) == "uncertain"
    assert _judge(one, StatedPerson(patient_id="B", name="Byron^Ada", sex="F", **stated)) is None


def test_a_year_apart_is_somebody_else() -> None:
    one = StatedPerson(patient_id="A", name=NAME, birth_date=BORN, sex="F")
    others: tuple[dict[str, Any], ...] = (
        {"age": "053Y", "study_date": "20260301"},
        {"age": "055Y"},
        {"age": "1970", "study_date": "20260301"},
        {"birth_date": "19700102"},
        {"birth_date": "19710101"},
    )
    for stated in others:
        assert _judge(one, StatedPerson(patient_id="B", name=NAME, sex="F", **stated)) is None, stated


def test_a_suffix_of_an_identifier_is_uncertain_with_one_birth_date() -> None:
    """A visit of the same person, or a twin under the mother's number."""
    one = StatedPerson(patient_id="0012345", birth_date=BORN)
    for other in ("12345-01", "12345.2", "12345_12", "12345/1 "):
        assert _judge(one, StatedPerson(patient_id=other, birth_date=BORN)) == "uncertain"
    twin = StatedPerson(patient_id="12345-02", birth_date=BORN, name="Doe^Twin", sex="M")
    assert (
        _judge(StatedPerson(patient_id="12345-01", birth_date=BORN, name=NAME, sex="M"), twin) == "uncertain"
    )
    for apart in (
        StatedPerson(patient_id="12345-01"),
        StatedPerson(patient_id="12345-01", birth_date="19800202"),
        StatedPerson(patient_id="12345-123", birth_date=BORN),
        StatedPerson(patient_id="1234501", birth_date=BORN),
    ):
        assert _judge(one, apart) is None
    for many in ("S-017-{}", "2019-{}", "CT 2019/{}"):
        pair = [StatedPerson(patient_id=many.format(one), birth_date=BORN) for one in ("01", "02")]
        assert _judge(*pair) is None, many
    for two in (("12345^EAST", "12345^WEST"), ("12345-01^EAST", "12345-02^WEST")):
        assert _judge(*(StatedPerson(patient_id=one, birth_date=BORN) for one in two)) is None


def test_half_a_name_in_one_writing_is_none_in_another() -> None:
    """A family name in Hangul, or one word beside a family name alone, may be that of many."""
    kim, yamada, taro = "\uae40", "\u5c71\u7530", "\u592a\u90ce"
    for half in (f"{kim}^", f"Kim^={chr(0x91D1)}^={kim}^", f"Yamada={yamada}", f"Yamada^={yamada}^"):
        assert normalize_names(half) == (), half
        pair = [StatedPerson(patient_id=one, name=half, birth_date=BORN, sex="F") for one in ("A", "B")]
        assert _judge(*pair) is None
    whole = normalize_names(f"={yamada}^{taro}")
    assert len(whole) == 1
    assert normalize_names(f"Yamada={yamada}^{taro}") == whole
    assert normalize_names(f"={yamada}{taro}") != ()


def test_a_year_that_agrees_is_not_listed_as_a_date() -> None:
    one, other = (
        StatedPerson(patient_id=number, name=NAME, birth_date=day)
        for number, day in (("A", BORN), ("B", "1970"))
    )
    found = [
        judge(evidence_of(KEY, one), evidence_of(KEY, two), same_pixels=False)[1]
        for two in (other, StatedPerson(patient_id="B", name=NAME, birth_date=BORN))
    ]
    assert found == [["name_and_birth_year", "name"], ["name_and_birth_date", "birth_date", "name"]]


def test_the_assigning_authority_of_hl7_is_a_site() -> None:
    pair = [StatedPerson(patient_id=one, birth_date=BORN) for one in ("42^^^WEST&1.2.3&ISO", "0042^west")]
    assert _judge(*pair) == "certain"


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
