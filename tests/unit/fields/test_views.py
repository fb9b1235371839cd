from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import FormatError
from shardflow.fields.views import DrawKey, SliceFacts, content_boxes
from shardflow.loading import ImageView, NativeView
from shardflow.loading.layout import BatchLayout

pytestmark = pytest.mark.fast


def _view(num_slices: int, slice_choice: str = "even") -> ImageView:
    return ImageView(num_slices=num_slices, rows=4, columns=4, slice_choice=slice_choice)  # type: ignore[arg-type]


def test_even_slices_are_the_middles_of_equal_parts() -> None:
    assert _view(4).choose(40, DrawKey(1, 0, 0)).tolist() == [5, 15, 25, 35]
    assert _view(1).choose(9, DrawKey(1, 0, 0)).tolist() == [4]
    assert _view(3).choose(4, DrawKey(1, 0, 0)).tolist() == [0, 2, 3]


@given(st.integers(0, 400), st.integers(1, 64), st.sampled_from(["even", "random"]), st.integers(0, 99))
def test_chosen_slices_are_different_ascending_and_there(
    num_slices: int, num_wanted: int, slice_choice: str, row: int
) -> None:
    chosen = _view(num_wanted, slice_choice).choose(num_slices, DrawKey(3, 1, row))
    assert len(chosen) == min(num_slices, num_wanted)
    assert (np.diff(chosen) > 0).all()
    assert not len(chosen) or (chosen[0] >= 0 and chosen[-1] < num_slices)


def test_random_slices_depend_on_seed_epoch_and_row_only(golden: Callable[[str, object], None]) -> None:
    view = _view(4, "random")
    choices = {
        f"seed {seed}, epoch {epoch}, row {row}": view.choose(120, DrawKey(seed, epoch, row)).tolist()
        for seed, epoch, row in [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]
    }
    assert len({tuple(choice) for choice in choices.values()}) == 4
    golden("slice-choice", choices)


def test_random_slices_reach_every_slice_about_equally_often() -> None:
    counts = np.zeros(10, int)
    for row in range(500):
        counts[_view(3, "random").choose(10, DrawKey(1, 0, row))] += 1
    assert counts.sum() == 1500
    assert (abs(counts - 150) < 60).all()  # six sigma


def _facts(*shapes: tuple[int, int, int]) -> SliceFacts:
    columns = [np.array(column, np.int64) for column in zip(*shapes, strict=True)]
    return SliceFacts(columns[0], columns[1], columns[2], np.zeros(len(shapes), np.int64))


def test_a_short_series_fills_the_first_places() -> None:
    view = _view(3)
    layout = BatchLayout.of(view.array_specs(_facts((2, 9, 9), (5, 9, 9))))
    arrays = layout.views(np.full(layout.num_bytes, 255, np.uint8))
    assert view.target(arrays, 0, 2).shape == (2, 4, 4)
    assert arrays["slice_mask"].tolist()[0] == [1, 1, 0]
    assert (arrays["image"][0, 2] == 0).all()
    view.blank(arrays, 1)
    assert arrays["slice_mask"].tolist()[1] == [0, 0, 0]
    assert (arrays["image"][1] == 0).all()


def test_a_native_view_makes_room_by_the_facts() -> None:
    view, facts = NativeView(dtype="float32"), _facts((2, 3, 4), (0, 0, 0), (3, 5, 2))
    layout = BatchLayout.of(view.array_specs(facts))
    arrays = layout.views(np.zeros(layout.num_bytes, np.uint8))
    view.prepare(arrays, facts)
    assert arrays["pixels"].shape == (24 + 30,)
    assert arrays["pixels"].dtype == np.float32
    assert arrays["pixel_start"].tolist() == [0, 24, 24]
    view.target(arrays, 2, 2)[:] = 5
    assert arrays["image_shape"].tolist() == [[0, 3, 4], [0, 0, 0], [2, 5, 2]]
    assert (arrays["pixels"][24:44] == 5).all()
    with pytest.raises(FormatError, match="at most"):
        view.target(arrays, 0, 3)
    view.blank(arrays, 2)
    assert arrays["image_shape"][2].tolist() == [0, 5, 2]


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
