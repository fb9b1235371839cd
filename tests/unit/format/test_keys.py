from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import FormatError
from shardflow.format.keys import (
    check_field,
    check_sample_key,
    parse_slice_field,
    parse_small_field,
    shard_name,
    slice_field,
    small_field,
    thumbnail_field,
)

pytestmark = pytest.mark.fast


@given(st.integers(0, 999_999), st.integers(0, 99_999_999), st.from_regex(r"[a-z0-9]+", fullmatch=True))
def test_slice_fields_come_back_as_they_were_named(series: int, index: int, codec: str) -> None:
    field = slice_field(series, index, codec)
    parsed = parse_slice_field(field)
    assert parsed is not None
    assert (parsed.series, parsed.index, parsed.codec) == (series, index, codec)
    assert check_field(field) == field


@given(st.integers(0, 999_999), st.integers(0, 99_999_999), st.from_regex(r"[a-z0-9]+", fullmatch=True))
def test_small_slices_are_no_slices_and_sort_behind_them(series: int, index: int, codec: str) -> None:
    field = small_field(series, index, codec)
    assert parse_slice_field(field) is None
    assert parse_small_field(field) == parse_slice_field(slice_field(series, index, codec))
    assert parse_small_field(slice_field(series, index, codec)) is None
    assert check_field(field) == field
    others = [field, slice_field(series, 99_999_999, "zz"), thumbnail_field(series)]
    assert sorted(others) == [others[1], others[0], others[2]]


@pytest.mark.parametrize(
    "field",
    [
        "report.txt",
        "s003.i0045",
        "s3.i0045.b2nd",
        "s003.i45.b2nd",
        "s0003.i0045.b2nd",  # a second name of s003
        "s003.i00045.b2nd",
        "s003.i0045.B2ND",
        "s003.i0045.b2nd.x",
        "s003.i0045.b2nd\n",
        "s\u0663\u0663\u0663.i0045.b2nd",  # digits, but not ASCII ones
        "",
    ],
)
def test_other_fields_are_no_slices(field: str) -> None:
    assert parse_slice_field(field) is None


@pytest.mark.parametrize(
    ("series", "index", "codec"), [(-1, 0, "a"), (0, -1, "a"), (0, 0, "A"), (0, 0, ""), (10**6, 0, "a")]
)
def test_a_slice_that_cannot_be_named_is_refused(series: int, index: int, codec: str) -> None:
    with pytest.raises(FormatError):
        slice_field(series, index, codec)


@pytest.mark.parametrize("key", ["", "a" * 65, "A", "1.2.840", "a_b", "a-b", "a\n", "\u00e4", "\u0661"])
def test_what_is_no_sample_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(FormatError) as caught:
        check_sample_key(key)
    assert len(key) < 3 or key not in str(caught.value)


@pytest.mark.parametrize("field", ["", ".", "a.", ".a", "a..b", "A.txt", "a b", "a/b", "a\n"])
def test_what_is_no_field_is_refused(field: str) -> None:
    with pytest.raises(FormatError):
        check_field(field)


def test_shards_are_named_by_split_and_number() -> None:
    assert shard_name("train", 42) == "train-000042"
    for split, number in (("", 0), ("Train", 0), ("a-b", 0), ("a", -1)):
        with pytest.raises(FormatError):
            shard_name(split, number)
