"""Masks and boxes go where the picture goes."""

from __future__ import annotations

import json
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardflow.errors import FormatError
from shardflow.fields.layout import Picture, Window
from shardflow.fields.types.regions import Shown
from shardflow.format.contents.regions import read_regions

pytestmark = pytest.mark.fast

side = st.integers(1, 14)


@given(side, side, side, side)
@settings(max_examples=60, deadline=None)
def test_a_mask_is_resized_as_opencv_does(rows: int, columns: int, new_rows: int, new_columns: int) -> None:
    for old, new in ((rows, new_rows), (columns, new_columns)):
        # Centers on the border of two stored pixels: OpenCV's fixed point takes the one, we the other.
        assume(all(((2 * at + 1) * old) % (2 * new) for at in range(new)))
    mask = np.random.default_rng(rows).integers(0, 256, (rows, columns)).astype(np.uint8)
    window = Window((new_rows, new_columns), (0, 0), (0, 0, new_rows, new_columns))
    expected = cv2.resize(mask, (new_columns, new_rows), interpolation=cv2.INTER_NEAREST_EXACT)
    picked = Shown(0, Picture(0, 0, mask.shape), window).pick(mask)
    np.testing.assert_array_equal(picked, expected.reshape(new_rows, new_columns))


@given(
    *[st.integers(0, 6)] * 2, *[st.integers(1, 6)] * 2,
    st.tuples(st.integers(0, 24), st.integers(0, 24), st.integers(1, 12), st.integers(1, 12)),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_box_stays_around_its_mask(
    x: int, y: int, width: int, height: int, part: tuple[int, int, int, int]
) -> None:
    """Enlarged by a whole number, the box of the shown mask is the shown box."""
    mask = np.zeros((12, 12), np.uint8)
    mask[y : y + height, x : x + width] = 1
    window = Window((36, 36), part[:2], (5, 7, *part[2:]))
    shown = Shown(0, Picture(0, 0, (12, 12)), window)
    carried = shown.pick(mask)
    box = shown.carry((x, y, x + width, y + height))
    rows, columns = np.flatnonzero(carried.any(axis=1)), np.flatnonzero(carried.any(axis=0))
    if box is None:
        assert not len(rows)
    else:
        assert box == (7 + columns[0], 5 + rows[0], 8 + columns[-1], 6 + rows[-1])


def _region(**changes: Any) -> bytes:
    place = {"slice": 2, "box_px": [1, 1, 3.5, 2.5], "fraction": 0.1}
    place |= changes.pop("place", {})
    entry = {"roi": 4, "series": 1, "label": "nodule", "slices": [place], **changes}
    return json.dumps({"rois": [entry]}).encode()


def test_a_region_without_a_mask_is_filled_from_its_outlines_or_else_its_box() -> None:
    (region,) = read_regions(_region())
    filled = region.fill(2, (4, 4))
    assert filled is not None
    assert filled.tolist() == [[0] * 4, [0, 1, 1, 0], [0] * 4, [0] * 4]
    assert region.fill(3, (4, 4)) is None
    triangle = [[0, 0, 4, 0, 0, 4]]
    (region,) = read_regions(_region(polygons=[triangle]))
    filled = region.fill(2, (4, 4))
    assert filled is not None
    assert filled.tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0] * 4]
    for closed in ({"fraction": 0.0}, {"fraction": None}):
        (region,) = read_regions(_region(polygons=[triangle], kind="measurement", place=closed))
        assert region.fill(2, (4, 4)) is None
    (region,) = read_regions(_region(kind="key_image", place={"box_px": None, "fraction": None}))
    assert region.fill(2, (4, 4)) is None


def test_a_fractional_mask_has_a_level() -> None:
    (region,) = read_regions(_region(flags=["fractional"]))
    assert [region.mask_level(one) for one in (0.001, 0.5, 1)] == [1, 128, 255]
    (region,) = read_regions(_region(code={"scheme": "SCT", "value": "4711"}))
    assert region.mask_level(0.5) == 1
    assert region.names == {"nodule", "4711"}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b'{"rois": 3}',
        _region(place={"box_px": [1, 2, 3]}),
        _region(label=["nodule"]),
        b"[" * 10**5,
    ],
)
def test_what_is_no_list_of_regions_is_refused(payload: bytes) -> None:
    with pytest.raises(FormatError, match=r"annotations\.json must list"):
        read_regions(payload)
