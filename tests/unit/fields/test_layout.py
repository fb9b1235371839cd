"""Letterboxes: where a picture lies in its frame."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.fields.layout import content_boxes

pytestmark = pytest.mark.fast


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 600), st.integers(1, 600))
def test_a_letterbox_is_as_large_as_it_fits_and_centred(
    rows: int, columns: int, high: int, wide: int
) -> None:
    top, left, height, width = content_boxes(np.array([rows]), np.array([columns]), (high, wide))[0].tolist()
    assert 1 <= height <= high
    assert 1 <= width <= wide
    assert height == high or width == wide
    # The other side is the one of the same shape, to the nearest pixel.
    if height == high:
        assert abs(width - columns * high / rows) <= 0.5 or width in {1, wide}
    else:
        assert abs(height - rows * wide / columns) <= 0.5 or height in {1, high}
    assert (top, left) == ((high - height) // 2, (wide - width) // 2)


def test_what_has_no_image_has_no_box() -> None:
    boxes = content_boxes(np.array([0, 7, 0]), np.array([5, 0, 0]), (4, 4))
    assert boxes.tolist() == [[0, 0, 0, 0]] * 3
