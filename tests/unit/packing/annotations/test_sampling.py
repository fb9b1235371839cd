"""Planes of labels on any grid: what a slice takes from them is what another way of looking finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import SimpleITK
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardflow.packing.attachments.annotations.geometry import PlaneStack
from shardflow.packing.attachments.annotations.targets import Plane, Target
from tests.unit.packing.annotations.scene import affine_of, make_target

pytestmark = pytest.mark.fast

angle = st.floats(-3.1, 3.1)
SHAPE = (4, 7, 9)
"""Planes, rows, columns."""


def turned(a: float, b: float, c: float) -> NDArray[np.float64]:
    """Turn about the three axes, one after another."""
    turn = np.eye(3)
    for axis, by in enumerate((a, b, c)):
        first, second = (axis + 1) % 3, (axis + 2) % 3
        one = np.eye(3)
        one[first, first] = one[second, second] = np.cos(by)
        one[first, second], one[second, first] = -np.sin(by), np.sin(by)
        turn = turn @ one
    return turn


def labels() -> NDArray[np.uint8]:
    return np.random.default_rng(5).integers(0, 9, SHAPE).astype(np.uint8)


def planes_of(target: Target) -> list[Plane]:
    return [target.plane(index) for index in range(target.num_slices)]


def read_all(
    stack: PlaneStack, plates: dict[int, NDArray[np.uint8]], target: Target, reach: float
) -> NDArray[np.uint8]:
    found = np.zeros((target.num_slices, *target.shape), np.uint8)
    for index in range(target.num_slices):
        footprint = stack.footprint(target.plane(index), target.shape, reach)
        if footprint is not None:
            found[index] = footprint.read(plates.get)
    return found


@given(angle, angle, angle, st.permutations(range(SHAPE[0])), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_same_grid_in_any_order_and_turned_is_a_copy(
    a: float, b: float, c: float, order: list[int], flip_x: bool, flip_y: bool, swap: bool
) -> None:
    """The stored series has its columns, rows or both reversed or swapped; labels go with them."""
    drawn = make_target(*SHAPE, affine_lps=affine_of(turned(a, b, c)))
    values = labels()
    stack = PlaneStack([drawn.plane(index) for index in order], SHAPE[1:], 2.5)
    plates = {position: values[order[at]] for at, position in enumerate(stack.position_of.tolist())}
    expected = values[:, :: -1 if flip_y else 1, :: -1 if flip_x else 1]
    affine = np.array(drawn.affine_lps)
    for axis, flipped in ((0, flip_x), (1, flip_y)):
        if flipped:
            affine[:3, 3] += affine[:3, axis] * ((SHAPE[2], SHAPE[1])[axis] - 1)
            affine[:3, axis] *= -1
    if swap:
        affine[:, [0, 1]] = affine[:, [1, 0]]
        expected = expected.transpose(0, 2, 1)
    # The normal may point the other way; the slices stay where they are.
    target = make_target(*expected.shape, affine_lps=affine.tolist())
    reach = stack.reach_mm(target, is_source=True)
    assert reach == pytest.approx(0.05 * 2.5)
    np.testing.assert_array_equal(read_all(stack, plates, target, reach), expected)


@given(angle, angle, st.tuples(*[st.floats(0.4, 3.0)] * 3), st.tuples(*[st.floats(-3.0, 3.0)] * 3))
@settings(max_examples=25, deadline=None)
def test_other_grid_agrees_with_simpleitk(
    a: float, b: float, spacing: tuple[float, float, float], shift: tuple[float, float, float]
) -> None:
    """Nearest neighbour onto an oblique grid; pixels within a hair of a tie may differ."""
    drawn, values = make_target(*SHAPE), labels() + 1
    image = SimpleITK.GetImageFromArray(values)
    image.SetSpacing((0.8, 0.7, 2.5))
    image.SetOrigin((-20.0, -30.0, 5.0))
    origin = tuple(x + y for x, y in zip((-20.0, -30.0, 5.0), shift, strict=True))
    target = make_target(6, 8, 10, affine_lps=affine_of(turned(a, b, 0.3), spacing, origin))
    stack = PlaneStack(planes_of(drawn), SHAPE[1:], 2.5)
    found = read_all(stack, dict(enumerate(values)), target, stack.reach_mm(target, is_source=False))
    affine, inverse = np.array(target.affine_lps), np.linalg.inv(np.array(drawn.affine_lps))
    for index, row, column in itertools.product(range(6), range(8), range(10)):
        at = (inverse @ affine @ (column, row, index, 1))[:3]
        if np.abs(at - np.floor(at) - 0.5).min() < 1e-3:
            continue
        nearest = tuple(int(one) for one in np.round(at))
        inside = all(0 <= one < size for one, size in zip(nearest, SHAPE[::-1], strict=True))
        expected = image.GetPixel(nearest) if inside else 0
        assert found[index, row, column] == expected


def test_planes_that_were_left_out_stay_empty() -> None:
    """Two planes far apart are not stretched over the slices between them."""
    drawn, values = make_target(9, 7, 9), np.ones((7, 9), np.uint8)
    for pitch, is_source in ((2.5, True), (2.5, False), (5.0, True)):
        stack = PlaneStack([drawn.plane(1), drawn.plane(7)], (7, 9), pitch)
        reach = stack.reach_mm(drawn, is_source=is_source)
        found = read_all(stack, {0: values, 1: values}, drawn, reach)
        assert np.flatnonzero(found.any(axis=(1, 2))).tolist() == [1, 7]


def test_thick_plane_of_another_series_covers_the_thin_slices_under_it() -> None:
    thick = make_target(2, 7, 9, affine_lps=affine_of(spacing=(0.8, 0.7, 5.0), origin=(-20, -30, 6)))
    thin = make_target(10, 7, 9, affine_lps=affine_of(spacing=(0.8, 0.7, 1.0), origin=(-20, -30, 4)))
    stack = PlaneStack(planes_of(thick), (7, 9), 5.0)
    values = {0: np.full((7, 9), 3, np.uint8), 1: np.full((7, 9), 4, np.uint8)}
    found = read_all(stack, values, thin, stack.reach_mm(thin, is_source=False))
    assert found[:, 0, 0].tolist() == [3] * 5 + [4] * 5


def test_tilted_stack_shifts_each_plane() -> None:
    """A gantry tilt moves each plane along the rows; labels stay with their own plane."""
    affine = np.array(affine_of())
    affine[1, 2] = 0.7 * 2
    drawn, values = make_target(*SHAPE, affine_lps=affine.tolist()), labels()
    stack = PlaneStack(planes_of(drawn), SHAPE[1:], 2.5)
    found = read_all(stack, dict(enumerate(values)), drawn, stack.reach_mm(drawn, is_source=True))
    np.testing.assert_array_equal(found, values)


def test_irregular_slices_are_placed_by_their_offsets() -> None:
    drawn = make_target(4, 7, 9, slice_offsets_mm=(0.0, 2.5, 7.5, 8.5))
    assert [float(drawn.plane(index).origin[2]) for index in range(4)] == [5.0, 7.5, 12.5, 13.5]
    assert [drawn.slice_at(at) for at in (-2.0, 1.0, 2.6, 5.0, 8.1)] == [None, 0, 1, None, 3]
