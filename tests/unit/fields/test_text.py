from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.fields.types.text import _are_utf8

pytestmark = pytest.mark.fast


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _found(texts: list[bytes]) -> list[bool]:
    flat = np.frombuffer(b"".join(texts), np.uint8)
    ends = np.cumsum([len(text) for text in texts])
    starts = ends - [len(text) for text in texts]
    pieces = [flat[start:end] for start, end in zip(starts, ends, strict=True)]
    found: list[bool] = _are_utf8(flat, starts, pieces).tolist()
    return found


@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=4), st.text(min_size=1).map(str.encode)), min_size=1)
)
def test_each_text_is_judged_by_itself(texts: list[bytes]) -> None:
    assert _found(texts) == [_is_text(text) for text in texts]


def test_two_texts_that_are_one_character_only_together_are_none() -> None:
    assert _found([b"a\xc3", b"\xa9b", "é".encode()]) == [False, False, True]
