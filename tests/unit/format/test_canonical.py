from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import FormatError
from shardflow.format.keys import Json, canonical_json, parse_json, sha256_hex

pytestmark = pytest.mark.fast

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_values_come_back(value: Json) -> None:
    data = canonical_json(value)
    assert data.isascii()
    assert parse_json(data, what="a value") == value == json.loads(data)


def test_keys_are_sorted_and_nothing_is_spaced() -> None:
    assert canonical_json({"b": [1, {"z": None, "a": True}], "a": "\u00e4\n"}) == (
        b'{"a":"\\u00e4\\n","b":[1,{"a":true,"z":null}]}'
    )


@pytest.mark.parametrize(
    "value", [0.5, float("nan"), [1, 2.0], {"a": {"b": 1e9}}, {1: 2}, {"a": b"x"}, (1, {2})]
)
def test_what_has_no_canonical_bytes_is_refused(value: Json) -> None:
    with pytest.raises(FormatError):
        canonical_json(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"b":1,"a":2}',
        b'{"a": 1}',
        b'{"a":1}\n',
        b'{"a":1,"a":1}',
        b"[1.0]",
        b"[1e3]",
        b'"\\u0041"',
        b"\xff",
    ],
)
def test_other_bytes_of_a_value_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="a thing must be canonical JSON"):
        parse_json(data, what="a thing")


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(FormatError):
        parse_json(b"[" * 100_000 + b"]" * 100_000, what="a thing")


def test_the_digest_is_sha256() -> None:
    assert sha256_hex(memoryview(b"abc")) == hashlib.sha256(b"abc").hexdigest()
