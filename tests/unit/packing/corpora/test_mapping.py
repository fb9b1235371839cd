"""Fields of a line become a record, or exactly one reason; what is packed can be cut out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import ConfigError
from shardflow.format.keys import FIELD_PATTERN, SAMPLE_KEY_PATTERN
from shardflow.packing.corpora.config import (
    REASON_TABLE,
    REASONS,
    CorpusConfig,
    CorpusDeidConfig,
    CorpusInputsConfig,
    CorpusLimitsConfig,
    CorpusSplitsConfig,
    FieldsConfig,
    LineError,
    LineReason,
    number_of,
)
from shardflow.packing.corpora.content import ContentMaker
from shardflow.packing.corpora.conversations import value_at
from shardflow.packing.corpora.lines import parse_line
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.plan import split_of_bucket
from shardflow.packing.scan import NUM_BUCKETS

pytestmark = pytest.mark.fast

KEY = SecretKey(b"k" * 32)


def make_config(**tables: Any) -> CorpusConfig:
    tables.setdefault("deid", CorpusDeidConfig(text="keep"))
    return CorpusConfig(
        output=Path("o"), private_dir=Path("p"), inputs=CorpusInputsConfig(files=(Path("i"),)), **tables
    )


def make(line: dict[str, Any], /, **tables: Any) -> dict[str, bytes]:
    maker = ContentMaker(make_config(**tables), KEY)
    return dict(maker.fields(line, maker.read(line)))


def reason(line: dict[str, Any], /, **tables: Any) -> LineReason:
    maker = ContentMaker(make_config(**tables), KEY)
    with pytest.raises(LineError) as caught:
        maker.identify(line, maker.read(line), "file", 0)
    return caught.value.reason


HOSTILE = {
    b"": LineReason.EMPTY_LINE,
    b" \t\r": LineReason.EMPTY_LINE,
    b"\xff\xfe": LineReason.INVALID_UTF8,
    b'{"text": "\xed\xa0\x80"}': LineReason.INVALID_UTF8,
    b'{"text": "a"': LineReason.INVALID_JSON,
    b'{"text": "a"} {}': LineReason.INVALID_JSON,
    b'{"text": "a", "n": NaN}': LineReason.INVALID_JSON,
    b'{"text": "a", "n": -Infinity}': LineReason.INVALID_JSON,
    b'{"text": "a", "text": "b"}': LineReason.INVALID_JSON,
    b'{"text": "a", "x": {"y": 1, "y": 1}}': LineReason.INVALID_JSON,
    b"[" * 200_000: LineReason.INVALID_JSON,
    b'{"a":' * 200_000: LineReason.INVALID_JSON,
    b"1" * 10_000: LineReason.INVALID_JSON,
    b'["text"]': LineReason.INVALID_JSON,
    b"null": LineReason.INVALID_JSON,
    b"{'text': 'a'}": LineReason.INVALID_JSON,
    b'{"text": "a\x01"}': LineReason.INVALID_JSON,
}


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: repr(line[:24]))
def test_hostile_lines_have_their_reason(line: bytes) -> None:
    with pytest.raises(LineError) as caught:
        parse_line(line)
    assert caught.value.reason is HOSTILE[line]
    assert line.decode("latin-1")[:5] not in str(caught.value) or not line.strip()


@pytest.mark.parametrize("line", [b'\xef\xbb\xbf{"text": "a"}', b'{"text": "a"}\r', b'  {"text":"\\u0061"} '])
def test_lines_of_other_habits_are_read(line: bytes) -> None:
    assert parse_line(line) == {"text": "a"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, LineReason.MISSING_FIELD),
        ({"text": None}, LineReason.MISSING_FIELD),
        ({"text": 5}, LineReason.WRONG_TYPE),
        ({"text": ["a"]}, LineReason.WRONG_TYPE),
        ({"text": " \n"}, LineReason.EMPTY_TEXT),
        ({"text": "\ud800"}, LineReason.INVALID_UTF8),
        ({"text": "e" * 11}, LineReason.TEXT_TOO_LONG),
        ({"text": "\N{EURO SIGN}" * 4}, LineReason.TEXT_TOO_LONG),
    ],
)
def test_texts_that_do_not_fit(fields: dict[str, Any], expected: LineReason) -> None:
    assert reason(fields, limits=CorpusLimitsConfig(max_text_bytes=10)) is expected


def test_a_text_alone_is_one_field() -> None:
    assert make({"note": {"text": "No effusion."}}, fields=FieldsConfig(text="note.text")) == {
        "report.txt": b"No effusion."
    }


def test_kept_fields_stand_beside_the_text_and_are_scrubbed() -> None:
    fields = {"text": "Clear.", "source": "Seen by Dr. Okafor.", "n": {"year": 3}, "tags": ["a", 1.5, None]}
    made = make(
        fields, fields=FieldsConfig(keep=("source", "n.year", "tags", "gone")), deid=CorpusDeidConfig()
    )
    assert json.loads(made["corpus.json"])["fields"] == {
        "source": "Seen by Dr. [NAME].",
        "n.year": 3,
        "tags": ["a", 1.5, None],
        "gone": None,
    }


@pytest.mark.parametrize("value", [b"bytes", float("nan"), {"a": float("inf")}, [{1, 2}]])
def test_what_json_does_not_hold_is_not_kept(value: Any) -> None:
    fields = {"text": "a", "x": value}
    assert reason(fields, fields=FieldsConfig(keep=("x",))) is LineReason.WRONG_TYPE


def test_texts_are_scrubbed_unless_they_are_to_be_kept() -> None:
    fields = {"text": "Mrs. Okonkwo, MRN 4711-0815, seen 2019-03-14.", "name": "Bright^Ada", "id": "ZX55501"}
    assert b"4711" in make(fields)["report.txt"]
    scrubbed = make(fields, deid=CorpusDeidConfig())["report.txt"]
    assert not any(word in scrubbed for word in (b"Okonkwo", b"4711", b"2019"))
    fields["text"] = "Bright came; ada bright, zx55501."
    known = make(fields, deid=CorpusDeidConfig(names=("name",), identifiers=("id",)))["report.txt"].decode()
    assert "ada" not in known.lower()
    assert "zx55501" not in known


def _split(line: dict[str, Any], place: int = 0, /, **tables: Any) -> str:
    maker = ContentMaker(make_config(**tables), KEY)
    return maker.identify(line, maker.read(line), "file", place).split


def test_a_group_stays_together_and_where_images_of_the_patient_are() -> None:
    parts = {"train": 1, "val": 1, "test": 1}
    splits = CorpusSplitsConfig(parts=parts, group="patient")
    seen = set()
    for patient in range(40):
        found = {_split({"text": f"{n}", "patient": f"P{patient}"}, n, splits=splits) for n in range(5)}
        # What packing does with PatientID (packing/scan.py, packing/plan.py).
        assert found == {split_of_bucket(parts, KEY.bucket("split", f"P{patient}", NUM_BUCKETS))}
        seen |= found
    assert seen == set(parts)


def test_without_a_group_equal_texts_stay_together_and_the_seed_deals_anew() -> None:
    parts = {"train": 1, "val": 1}
    first = [_split({"text": f"{n}"}, n, splits=CorpusSplitsConfig(parts=parts)) for n in range(60)]
    again = [_split({"text": f"{n}"}, 99, splits=CorpusSplitsConfig(parts=parts)) for n in range(60)]
    other = [_split({"text": f"{n}"}, n, splits=CorpusSplitsConfig(parts=parts, seed=1)) for n in range(60)]
    assert first == again
    assert first != other
    assert 15 < first.count("val") < 45


def test_keys_are_surrogates_of_places_or_of_the_lines_own_keys() -> None:
    maker = ContentMaker(make_config(), KEY)
    fields = {"text": "a", "id": "PATIENT-17"}
    record = maker.read(fields)
    by_place = {maker.identify(fields, record, file, n).sample_key for file in ("a", "b") for n in range(3)}
    assert len(by_place) == 6
    owner = ContentMaker(make_config(fields=FieldsConfig(key="id")), KEY)
    keys = {owner.identify(fields, record, file, 0).sample_key for file in ("a", "b")}
    assert len(keys) == 1
    assert all(SAMPLE_KEY_PATTERN.fullmatch(key) for key in keys | by_place)
    assert reason({"text": "a"}, fields=FieldsConfig(key="id")) is LineReason.MISSING_FIELD
    assert reason({"text": "a", "id": True}, fields=FieldsConfig(key="id")) is LineReason.WRONG_TYPE


def test_a_dot_leads_into_objects_unless_a_field_has_that_name() -> None:
    assert value_at({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert value_at({"a": {"b": {"c": 2}}}, "a.b.c") == 2
    assert value_at({"a": [1]}, "a.b") is None


@pytest.mark.parametrize("form", ["{role}", "{content}", "{content}{role}", "{role}{role}{content}", ""])
def test_a_form_of_turns_must_place_role_and_content(form: str) -> None:
    with pytest.raises(ConfigError, match="turn_format"):
        FieldsConfig(turn_format=form)


def test_numbers_of_reasons_are_frozen() -> None:
    """The byte of a line in the table of outcomes; add reasons at the end."""
    assert [name for name, _ in REASON_TABLE] == [
        "PACKED", "EMPTY_LINE", "EMPTY_TEXT", "NOT_A_CORPUS_FILE", "DUPLICATE_TEXT", "LINE_TOO_LONG",
        "TEXT_TOO_LONG", "INVALID_UTF8", "INVALID_JSON", "MISSING_FIELD", "WRONG_TYPE", "UNKNOWN_ROLE",
        "DUPLICATE_KEY", "FILE_DAMAGED", "WORKER_FAILED", "WORKER_KILLED", "WORKER_OUT_OF_MEMORY",
        "WORKER_TIMEOUT", "UNKNOWN_FORM", "TURN_ORDER", "EMPTY_TURN", "UNSUPPORTED_CONTENT", "SAME_ANSWERS",
        "IMAGE_COUNT", "IMAGE_MISSING", "IMAGE_ELSEWHERE", "NOT_AN_IMAGE", "UNKNOWN_STUDY", "SPLITS_DIFFER",
        "IMAGES_TOO_LARGE",
    ]  # fmt: skip
    assert {number_of(reason) for reason in LineReason} == set(range(1, len(REASON_TABLE)))
    assert set(REASONS) == set(LineReason)


def test_field_names_are_of_the_format() -> None:
    assert all(FIELD_PATTERN.fullmatch(name) for name in ("corpus.json", "conversation.json"))


def test_the_settings_of_texts_keep_their_digest() -> None:
    """An append compares it: settings that only conversations have must not change it."""
    assert "conversations" not in make_config().content()
    assert "conversations" in make_config(fields=FieldsConfig(kind="conversations")).content()


@pytest.mark.parametrize("kind", ["pair", "dialogue", "preference"])
def test_former_kinds_say_what_to_write(kind: Any) -> None:
    with pytest.raises(ConfigError, match='write kind = "conversations"'):
        FieldsConfig(kind=kind)
