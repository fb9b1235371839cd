"""Rotations, planes and slices through solids, against arithmetic on every pixel."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.synthetic.geometry import (
    AXIAL,
    CORONAL,
    IDENTITY,
    SAGITTAL,
    Grid,
    Plane,
    Quadric,
    Solid,
    Vector,
    cross,
    dot,
    ellipsoid,
    move,
    pillar,
    rotation,
    slab,
    stack_of_planes,
)
from shardflow.synthetic.scene import (
    TISSUES,
    Conic,
    Rectangle,
    Scene,
    attenuation,
    coverage,
    cut,
    inside_mask,
    project,
    rectangle_of,
    silhouette,
)

pytestmark = pytest.mark.fast

SMALL = st.integers(-4, 4)
QUATERNIONS = st.tuples(st.integers(5, 20), SMALL, SMALL, SMALL)
GRID = Grid(rows=48, columns=40, row_spacing_mm=1.5, column_spacing_mm=2.0)
WHOLE = Rectangle(0, 48, 0, 40)


def pixel(plane: Plane, row: int, column: int) -> Vector:
    down = move(plane.position, plane.column_direction, row * plane.grid.row_spacing_mm)
    return move(down, plane.row_direction, column * plane.grid.column_spacing_mm)


def brute_force(quadric: Quadric, plane: Plane) -> np.ndarray:
    return np.array(
        [
            [quadric.value(pixel(plane, row, column)) for column in range(plane.grid.columns)]
            for row in range(plane.grid.rows)
        ]
    )


@given(QUATERNIONS)
def test_rotations_are_rotations(quaternion: tuple[int, int, int, int]) -> None:
    x, y, z = rotation(*quaternion)
    for a, b in ((x, y), (y, z), (x, z)):
        assert abs(dot(a, b)) < 1e-9
    assert all(abs(dot(a, a) - 1) < 1e-9 for a in (x, y, z))
    assert max(abs(a - b) for a, b in zip(cross(x, y), z, strict=True)) < 1e-9


def test_a_quarter_turn_goes_the_right_way() -> None:
    assert rotation(1, 0, 0, 1) == ((0.0, 1.0, 0.0), (-1.0, 0.0, 0.0), (0.0, 0.0, 1.0))


@pytest.mark.parametrize("orientation", [AXIAL, CORONAL, SAGITTAL])
def test_stacks_lie_around_their_centre(orientation: tuple[Vector, Vector]) -> None:
    planes = stack_of_planes(GRID, (5.0, -3.0, 11.0), orientation, [-2.0, 0.0, 2.0])
    middle = move(
        pixel(planes[1], 0, 0),
        move((0.0, 0.0, 0.0), orientation[1], 1.5 * 47 / 2),
    )
    middle = move(middle, orientation[0], 2.0 * 39 / 2)
    assert middle == pytest.approx((5.0, -3.0, 11.0), abs=1e-5)
    steps = [dot(plane.position, plane.normal) for plane in planes]
    assert np.diff(steps) == pytest.approx([2.0, 2.0], abs=1e-5)


def test_a_tilted_gantry_shears_the_stack() -> None:
    planes = stack_of_planes(
        GRID, (0.0, 0.0, 0.0), AXIAL, [0.0, 5.0], turn=rotation(20, 3, 0, 0), advance=(0.0, 0.0, 1.0)
    )
    step = move(planes[1].position, planes[0].position, -1.0)
    assert step == pytest.approx((0.0, 0.0, 5.0), abs=1e-5)
    assert abs(dot(step, planes[0].normal)) / 5 == pytest.approx(math.cos(2 * math.atan(3 / 20)), abs=1e-6)


@given(
    QUATERNIONS,
    QUATERNIONS,
    st.tuples(SMALL, SMALL, SMALL),
    st.tuples(st.integers(3, 30), st.integers(3, 30), st.integers(3, 30)),
)
def test_a_slice_of_an_ellipsoid_holds_the_pixels_inside_it(
    plane_turn: tuple[int, int, int, int],
    body_turn: tuple[int, int, int, int],
    center: tuple[int, int, int],
    axes: tuple[int, int, int],
) -> None:
    plane = stack_of_planes(GRID, (0.0, 0.0, 0.0), AXIAL, [1.0], turn=rotation(*plane_turn))[0]
    quadric = ellipsoid(
        (4.0 * center[0], 4.0 * center[1], 2.0 * center[2]),
        (float(axes[0]), float(axes[1]), float(axes[2])),
        rotation(*body_turn),
    )
    expected = brute_force(quadric, plane)
    conic = cut(quadric, plane)
    rectangle = rectangle_of(conic, 1e-3, WHOLE)
    found = np.zeros((48, 40), dtype=bool)
    if not rectangle.is_empty:
        found[rectangle.top : rectangle.bottom, rectangle.left : rectangle.right] = inside_mask(
            conic, rectangle
        )
    unsure = np.abs(expected - 1) < 1e-6
    assert np.array_equal(found | unsure, (expected <= 1) | unsure)


def test_coverage_is_one_inside_and_fades_over_the_edge() -> None:
    conic = Conic(1 / 100, 0.0, 1 / 100, -20 / 100, -20 / 100, 800 / 100)  # radius 10 about (20, 20)
    share = coverage(conic, Rectangle(0, 41, 0, 41), 4.0)[20]
    assert share.dtype == np.float32
    assert share[20] == 1
    assert share[5] == 0
    assert share[30] == pytest.approx(0.5, abs=1e-6)
    assert 0 < share[31] < 0.5 < share[29] < 1


@given(
    QUATERNIONS,
    st.tuples(st.integers(-30, 30), st.integers(-30, 30), st.integers(-14, 14)),
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 12)),
    st.sampled_from([0.85, 1.7]),
)
def test_what_a_scene_leaves_out_covers_nothing(
    turn: tuple[int, int, int, int],
    center: tuple[int, int, int],
    axes: tuple[int, int, int],
    edge: float,
) -> None:
    plane = stack_of_planes(GRID, (0.0, 0.0, 0.0), AXIAL, [0.0], turn=rotation(*turn))[0]
    body = ellipsoid(
        (float(center[0]), float(center[1]), float(center[2])),
        (float(axes[0]), float(axes[1]), float(axes[2])),
    )
    found = np.zeros((48, 40), dtype=np.float32)
    for _, box, alpha in Scene([Solid(tissue="fat", parts=(body,), parent="air")]).coverages(plane, edge):
        found[box.top : box.bottom, box.left : box.right] = alpha
    assert np.allclose(found, coverage(cut(body, plane), WHOLE, edge), atol=2e-3)


def test_later_solids_cover_earlier_ones_and_hollows_stay_free() -> None:
    ball = ellipsoid((0.0, 0.0, 0.0), (30.0, 30.0, 30.0))
    hole = ellipsoid((0.0, 0.0, 0.0), (12.0, 12.0, 12.0))
    plane = stack_of_planes(
        Grid(rows=81, columns=81, row_spacing_mm=1.0, column_spacing_mm=1.0), (0.0, 0.0, 0.0), AXIAL, [0.0]
    )[0]
    canvas = np.full((81, 81), -1000, dtype=np.float32)
    solids = [
        Solid(tissue="muscle", parts=(ball,), parent="air"),
        Solid(
            tissue="fat", parts=(ball, slab((0.0, 20.0, 0.0), IDENTITY[1], 5.0)), parent="muscle", hollow=hole
        ),
        Solid(tissue="blood", parts=pillar((20.0, 0.0, 0.0), 4.0, 4.0, 3.0), parent="muscle"),
        Solid(tissue="lung", parts=pillar((-20.0, 0.0, 40.0), 4.0, 4.0, 3.0), parent="muscle"),
    ]
    Scene(solids).paint(canvas, plane, [50.0, -100.0, 300.0, -850.0], 1.0)
    assert canvas[40, 40] == 50
    assert canvas[60, 40] == -100
    assert canvas[40, 60] == 300
    assert canvas[40, 20] == 50  # the pillar that the plane misses
    assert canvas[2, 2] == -1000


@pytest.mark.parametrize("orientation", [CORONAL, SAGITTAL])
def test_projections_add_up_lengths(orientation: tuple[Vector, Vector]) -> None:
    grid = Grid(rows=41, columns=41, row_spacing_mm=2.0, column_spacing_mm=2.0)
    plane = stack_of_planes(grid, (0.0, 0.0, 0.0), orientation, [0.0])[0]
    outer = Solid(tissue="muscle", parts=(ellipsoid((0.0, 0.0, 0.0), (30.0, 25.0, 35.0)),), parent="air")
    inner = Solid(
        tissue="lung",
        parts=(ellipsoid((2.0, 0.0, 0.0), (14.0, 15.0, 16.0)),),
        parent="muscle",
        hollow=ellipsoid((2.0, 0.0, 0.0), (5.0, 6.0, 7.0)),
    )
    table = Solid(tissue="table", parts=(ellipsoid((0.0, 0.0, 0.0), (90.0, 90.0, 90.0)),), parent="air")
    found = project([outer, inner, table], plane)
    muscle, lung = attenuation(TISSUES["muscle"][0]), attenuation(TISSUES["lung"][0])
    depths = np.arange(-60, 60, 0.05)
    for row, column in ((20, 20), (20, 21), (24, 20), (10, 20), (0, 0)):
        start = pixel(plane, row, column)
        expected = 0.0
        for depth in depths:
            point = move(start, plane.normal, float(depth))
            expected += (lung if inner.contains(point) else muscle if outer.contains(point) else 0) * 0.05
        assert found[row, column] == pytest.approx(expected, abs=0.5)


def test_a_silhouette_is_the_shadow() -> None:
    plane = stack_of_planes(GRID, (0.0, 0.0, 0.0), CORONAL, [90.0])[0]
    quadric = ellipsoid((3.0, -50.0, 6.0), (12.0, 9.0, 20.0), rotation(10, 2, 1, -3))
    conic = silhouette(quadric, plane)
    mask = inside_mask(conic, WHOLE)
    for row in range(0, 48, 3):
        for column in range(0, 40, 3):
            start = pixel(plane, row, column)
            values = [quadric.value(move(start, plane.normal, depth / 4)) for depth in range(-1000, 1000)]
            if abs(min(values) - 1) > 0.01:
                assert mask[row, column] == (min(values) <= 1)
