"""Letterboxes: where a picture lies in its frame. Places of pictures in the arrays of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.fields.layout import PictureLayout, content_boxes

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


def test_adjacent_places_of_one_size_are_one_array_without_a_copy() -> None:
    sizes = [(4, 6), (4, 6), (4, 6), (2, 3)]
    one_size, several = (PictureLayout("image", np.int16, channels=1, size=size) for size in ((4, 6), None))
    arrays = {
        "image": np.zeros((2, 4, 1, 4, 6), np.int16),
        "image.data": np.zeros(80, np.int16),
        "image.start": np.array([[0, 24, 48, 72]]),
        "image_shape": np.array([[(1, *size) for size in sizes]]),
    }
    for layout, slot in ((one_size, 1), (several, 0)):
        found = layout.places(arrays, slot, slice(1, 3))
        assert found is not None
        assert found.shape == (2, 1, 4, 6)
        found[:] = [[[[5]]], [[[6]]]]
        assert [int(layout.place(arrays, slot, place).mean()) for place in range(4)] == [0, 5, 6, 0]
    assert several.places(arrays, 0, slice(1, 4)) is None
