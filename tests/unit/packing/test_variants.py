"""Averaging by area: what a ruler and fractions give too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardflow.packing.studies.variants import fit_within, scale_affine, shrink

pytestmark = pytest.mark.fast


def _by_hand(pixels: NDArray[np.int64], rows: int, columns: int) -> NDArray[np.int64]:
    """Cut every pixel into so many parts that each pixel of the result has whole ones, and count."""
    large = np.kron(pixels, np.ones((rows, columns), np.int64))
    parts = large.reshape(rows, pixels.shape[0], columns, pixels.shape[1])
    sums, area = parts.sum(axis=(1, 3)), pixels.size
    return np.asarray((2 * sums + area) // (2 * area))


@given(
    st.integers(1, 23),
    st.integers(1, 23),
    st.integers(1, 23),
    st.integers(1, 23),
    st.sampled_from(["i2", "u1", "u2"]),
)
def test_means_are_exact(height: int, width: int, rows: int, columns: int, dtype: str) -> None:
    rows, columns = min(rows, height), min(columns, width)
    limits = np.iinfo(dtype)
    values = np.random.default_rng([height, width]).integers(limits.min, limits.max + 1, (height, width))
    small = shrink(values.astype(dtype), rows, columns)
    assert small.dtype == np.dtype(dtype)
    assert (small == _by_hand(values, rows, columns)).all()


def test_padding_takes_no_part() -> None:
    pixels = np.array([[10, 20, -1000, -1000], [30, 40, -1000, -1000], [50, -1000, -1000, -1000]], np.int16)
    small = shrink(pixels, 3, 2, valid=pixels > -1000, fill=-7)
    assert small.tolist() == [[15, -7], [35, -7], [50, -7]]
    # With padding in the mean a body's edge would look like lung.
    assert shrink(pixels, 3, 2)[2, 0] == -475


def test_colours_and_fractions() -> None:
    colour = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    small = shrink(colour, 2, 3)
    assert small.shape == (2, 3, 3)
    for sample in range(3):
        assert (small[..., sample] == shrink(np.ascontiguousarray(colour[..., sample]), 2, 3)).all()
    fractions = np.linspace(0, 1, 35).astype(np.float32).reshape(5, 7)
    assert shrink(fractions, 2, 3).mean() == pytest.approx(fractions.mean(), abs=1e-6)
    assert shrink(np.full((5, 7), 2**30, np.int32), 2, 3).tolist() == [[2**30] * 3] * 2


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 600))
def test_the_shape_stays(rows: int, columns: int, max_side: int) -> None:
    small = fit_within(rows, columns, max_side)
    assert max(small) == min(max(rows, columns), max_side)
    assert min(small) >= 1
    assert small[0] * columns == pytest.approx(small[1] * rows, abs=max(rows, columns))


def test_the_corners_stay_where_they_are() -> None:
    affine = [[0.5, 0.1, 0.0, -100.0], [0.0, 0.7, 0.2, 30.0], [0.1, 0.0, 2.0, 5.0], [0.0, 0.0, 0.0, 1.0]]
    rows, columns, small_rows, small_columns = 30, 20, 12, 7
    small = np.array(scale_affine(affine, rows / small_rows, columns / small_columns))
    for column, row in ((0, 0), (0, 1), (1, 0), (1, 1)):
        here = np.array(affine) @ [column * columns - 0.5, row * rows - 0.5, 3, 1]
        there = small @ [column * small_columns - 0.5, row * small_rows - 0.5, 3, 1]
        assert there == pytest.approx(here, abs=1e-9)
