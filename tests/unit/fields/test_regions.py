"""Masks and boxes go where the picture goes."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardflow.errors import FormatError
from shardflow.fields.findings import carry_box, carry_mask, region_masks
from shardflow.format.codecs import encode_array

pytestmark = pytest.mark.fast

side = st.integers(1, 14)


@given(side, side, side, side, st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_resized_and_flipped_as_opencv_does(
    rows: int, columns: int, new_rows: int, new_columns: int, flip_rows: bool, flip_columns: bool
) -> None:
    for old, new in ((rows, new_rows), (columns, new_columns)):
        # Centres on the border of two stored pixels: OpenCV's fixed point takes the one, we the other.
        assume(all(((2 * at + 1) * old) % (2 * new) for at in range(new)))
    mask = np.random.default_rng(rows).integers(0, 256, (rows, columns)).astype(np.uint8)
    carried = carry_mask(mask, (new_rows, new_columns), flip_rows=flip_rows, flip_columns=flip_columns)
    expected = cv2.resize(mask, (new_columns, new_rows), interpolation=cv2.INTER_NEAREST_EXACT)
    expected = expected.reshape(new_rows, new_columns)[
        :: -1 if flip_rows else 1, :: -1 if flip_columns else 1
    ]
    np.testing.assert_array_equal(carried, expected)


@given(
    st.integers(0, 6), st.integers(0, 6), st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans(),
    st.tuples(st.integers(-2, 5), st.integers(-2, 5), st.integers(1, 9), st.integers(1, 9)),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_box_stays_around_its_mask(
    x: int,
    y: int,
    width: int,
    height: int,
    flip_rows: bool,
    flip_columns: bool,
    window: tuple[int, int, int, int],
) -> None:
    """Enlarged by a whole number, the box of the carried mask is the carried box."""
    mask = np.zeros((12, 12), np.uint8)
    mask[y : y + height, x : x + width] = 1
    crop = (window[0], window[1], window[0] + window[2], window[1] + window[3])
    size = (window[3] * 3, window[2] * 3)
    carried = carry_mask(mask, size, crop=crop, flip_rows=flip_rows, flip_columns=flip_columns)
    box = carry_box(
        (x, y, x + width, y + height),
        (12, 12),
        size,
        crop=crop,
        flip_rows=flip_rows,
        flip_columns=flip_columns,
    )
    rows, columns = np.flatnonzero(carried.any(axis=1)), np.flatnonzero(carried.any(axis=0))
    if box is None:
        assert not len(rows)
    else:
        assert box == pytest.approx((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))


def test_masks_of_chosen_slices() -> None:
    mask = np.eye(4, dtype=np.uint8)
    fields = {
        "s001.m002.i0003.b2nd": encode_array("b2nd", mask),
        "s001.m003.i0001.b2nd": b"another region",
        "s001.i0001.b2nd": b"a slice",
    }
    region = {"roi": 2, "series": 1, "mask": "s001.m002"}
    masks = region_masks(fields, region, [1, 3], (4, 4))
    assert not masks[0].any()
    np.testing.assert_array_equal(masks[1], mask)
    with pytest.raises(FormatError, match="shape"):
        region_masks(fields, region, [3], (5, 4))
    assert not region_masks(fields, {**region, "mask": None}, [3], (4, 4)).any()
