"""Outlines: filled by another method to the same pixels, clipped without a change inside, measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.path import Path as Outline

from shardflow.format.contents.regions import fill_outlines
from shardflow.packing.attachments.annotations.region_writer import (
    clip_outline,
    ellipse_outline,
    largest_extent,
)
from shardflow.packing.attachments.annotations.targets import Floats

pytestmark = pytest.mark.fast

ROWS, COLUMNS = 11, 13
# Off the centres of pixels, where the two methods may break ties differently.
edge = st.integers(-40, 160).map(lambda tenth: tenth / 10 + 0.03)
outline = st.lists(st.tuples(edge, edge), min_size=3, max_size=9).map(lambda points: np.array(points, float))


def crossings(outlines: list[Floats]) -> np.ma.MaskedArray[Any, np.dtype[np.uint8]]:
    """Even-odd by walking along each row of pixels and each edge: slow and plain.

    Centres that lie on an edge, but for rounding errors, are masked.
    """
    filled = np.ma.zeros((ROWS, COLUMNS), np.uint8)
    for row in range(ROWS):
        for column in range(COLUMNS):
            x, y, odd, on_edge = column + 0.5, row + 0.5, False, False
            for points in outlines:
                for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
                    if (y0 > y) != (y1 > y):
                        crossing = x0 + (y - y0) / (y1 - y0) * (x1 - x0)
                        odd ^= bool(x < crossing)
                        on_edge |= abs(x - crossing) < 1e-6
            filled[row, column] = np.ma.masked if on_edge else odd
    return filled


@given(st.lists(outline, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_fill_is_even_odd(outlines: list[Floats]) -> None:
    assert (fill_outlines(outlines, ROWS, COLUMNS) == crossings(outlines)).all()


@given(outline)
@settings(max_examples=60, deadline=None)
def test_clipping_changes_nothing_inside(points: Floats) -> None:
    clipped = clip_outline(points, ROWS, COLUMNS)
    assert ((clipped >= -1e-9) & (clipped <= np.array([COLUMNS, ROWS]) + 1e-9)).all()
    assert (fill_outlines([clipped], ROWS, COLUMNS) == crossings([points])).all()


def test_fill_agrees_with_matplotlib_on_a_convex_outline() -> None:
    ellipse = ellipse_outline(np.array([6.2, 5.1]), np.array([4.0, 1.0]), np.array([-0.8, 3.0]))
    x, y = np.meshgrid(np.arange(COLUMNS) + 0.5, np.arange(ROWS) + 0.5)
    inside = Outline(ellipse).contains_points(np.stack([x.ravel(), y.ravel()], axis=1)).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(fill_outlines([ellipse], ROWS, COLUMNS), inside)


def test_ring_in_a_ring_and_keyhole_are_holes() -> None:
    outer = np.array([[1, 1], [9, 1], [9, 9], [1, 9]], float)
    inner = np.array([[3, 3], [6, 3], [6, 6], [3, 6]], float)
    keyhole = np.concatenate([outer, outer[:1], inner, inner[:1]])
    expected = np.zeros((ROWS, COLUMNS), np.uint8)
    expected[1:9, 1:9] = 1
    expected[3:6, 3:6] = 0
    np.testing.assert_array_equal(fill_outlines([outer, inner], ROWS, COLUMNS), expected)
    np.testing.assert_array_equal(fill_outlines([keyhole], ROWS, COLUMNS), expected)


def test_pixel_belongs_by_its_centre() -> None:
    half = np.array([[2.5, 2.5], [4.5, 2.5], [4.5, 3.5], [2.5, 3.5]], float)
    filled = fill_outlines([half], ROWS, COLUMNS)
    assert np.argwhere(filled).tolist() == [[2, 2], [2, 3]], (
        "left and upper edges belong, right and lower do not"
    )


def test_nothing_to_fill() -> None:
    assert not fill_outlines([], ROWS, COLUMNS).any()
    assert not fill_outlines([np.array([[1.0, 1.0], [5.0, 5.0]])], ROWS, COLUMNS).any()
    assert len(clip_outline(np.array([[-5, -5], [-1, -5], [-1, -1]], float), ROWS, COLUMNS)) == 0


@given(st.lists(st.tuples(edge, edge), min_size=2, max_size=30))
@settings(max_examples=40, deadline=None)
def test_largest_extent_is_that_of_all_pairs(points: list[tuple[float, float]]) -> None:
    all_points = np.array(points, float)
    gaps = np.linalg.norm(all_points[:, None] - all_points[None, :], axis=2)
    assert largest_extent(all_points) == pytest.approx(gaps.max(), abs=1e-9)
