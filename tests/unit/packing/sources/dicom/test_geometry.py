"""Geometry: spacing is where slices are, and what is odd about them has a name."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.packing.sources.dicom.geometry import (
    StackGeometry,
    describe_geometry,
    distance_along,
    normal_of,
)
from shardflow.packing.sources.dicom.planes import PlaneHeader
from tests.unit.packing.sources.dicom.factory import AXIAL

pytestmark = pytest.mark.fast

SAGITTAL = (0.0, 1.0, 0.0, 0.0, 0.0, -1.0)


def _planes(*positions: tuple[float, float, float]) -> list[PlaneHeader]:
    return [PlaneHeader(position=position, pixel_spacing=(0.5, 0.75)) for position in positions]


def _along_z(*distances: float) -> StackGeometry:
    return describe_geometry(_planes(*((1.0, 2.0, z) for z in distances)), AXIAL, stated_spacing_mm=99.0)


@pytest.mark.parametrize(
    ("distances", "spacing", "num_missing", "flags"),
    [
        ((0, 2, 4, 6), 2.0, 0, ()),
        ((0, 2, 4.019, 6), 2.0, 0, ()),  # within 1 %
        ((0, 2, 4.05, 6), 2.0, 0, ("irregular_spacing",)),
        ((0, 2, 6, 8), 2.0, 1, ("missing_slices",)),
        ((0, 2, 10, 12), 2.0, 3, ("missing_slices",)),
        ((0, 5, 15), 5.0, 1, ("missing_slices",)),  # the lower median of two gaps is a gap that exists
        ((0, 2, 4, 7, 9, 13), 2.0, 1, ("irregular_spacing", "missing_slices")),
        ((0, 2), 2.0, 0, ()),
    ],
)
def test_gaps_are_told_apart(
    distances: tuple[float, ...], spacing: float, num_missing: int, flags: tuple[str, ...]
) -> None:
    geometry = _along_z(*distances)
    assert geometry.slice_spacing_mm == pytest.approx(spacing)
    assert (geometry.num_missing, geometry.flags) == (num_missing, flags)


def test_where_the_affine_does_not_tell_slices_say_where_they_lie() -> None:
    assert _along_z(0, 2, 4, 6).slice_offsets_mm is None
    assert _along_z(-7.5, -5.5, 0.5, 2.5).slice_offsets_mm == (0, 2, 8, 10)
    assert _along_z(0, 2, 4, 7, 9).slice_offsets_mm == (0, 2, 4, 7, 9)


def test_a_single_slice_has_its_stated_thickness_or_none() -> None:
    one = describe_geometry(_planes((1, 2, 3)), AXIAL, stated_spacing_mm=5.0)
    assert (one.slice_spacing_mm, one.flags) == (5.0, ("single_slice",))
    unstated = describe_geometry(_planes((1, 2, 3)), AXIAL, stated_spacing_mm=None)
    assert unstated.slice_spacing_mm is None
    assert unstated.affine_lps == ((0.75, 0, 0, 1), (0, 0.5, 0, 2), (0, 0, 1, 3), (0, 0, 0, 1))


def test_without_pixel_spacing_there_is_no_affine() -> None:
    planes = [PlaneHeader(position=(0, 0, float(z))) for z in range(3)]
    geometry = describe_geometry(planes, AXIAL, stated_spacing_mm=None)
    assert geometry.affine_lps is None
    assert geometry.slice_spacing_mm == 1.0


@pytest.mark.parametrize(("degrees", "flags"), [(0.4, ()), (0.6, ("gantry_tilt",)), (20.0, ("gantry_tilt",))])
def test_a_tilted_gantry_is_named_and_stays_in_the_affine(degrees: float, flags: tuple[str, ...]) -> None:
    shift = math.tan(math.radians(degrees))
    planes = _planes(*((0.0, shift * z, float(z)) for z in range(5)))
    geometry = describe_geometry(planes, AXIAL, stated_spacing_mm=None)
    assert geometry.flags == flags
    assert geometry.slice_spacing_mm == 1.0
    affine = np.array(geometry.affine_lps)
    np.testing.assert_allclose(affine @ [0, 0, 4, 1], [0, 4 * shift, 4, 1], atol=1e-9)


def test_slices_beside_the_line_are_named() -> None:
    planes = _planes((0, 0, 0), (0.2, 0, 1), (0, 0, 2), (0, 0, 3))
    assert describe_geometry(planes, AXIAL, stated_spacing_mm=None).flags == ()
    planes = _planes((0, 0, 0), (0.3, 0, 1), (0, 0, 2), (0, 0, 3))
    assert describe_geometry(planes, AXIAL, stated_spacing_mm=None).flags == ("slices_not_aligned",)


_ANGLES = st.floats(-math.pi, math.pi)


@given(_ANGLES, _ANGLES, _ANGLES, st.integers(2, 9), st.floats(0.3, 9.0))
def test_the_affine_maps_indexes_to_positions(
    a: float, b: float, c: float, count: int, spacing: float
) -> None:
    """In any orientation: (column, row, slice) 0, 0, k lies at the position of slice k, a column step
    lies along a row.
    """
    turn = _rotation(a, b, c)
    orientation = (*turn[:, 0], *turn[:, 1])
    normal = np.array(normal_of(orientation))
    np.testing.assert_allclose(normal, turn[:, 2], atol=1e-9)
    origin = np.array([10.0, -20.0, 30.0])
    positions = [tuple(float(x) for x in origin + normal * spacing * k) for k in range(count)]
    distances = [distance_along(normal_of(orientation), (x, y, z)) for x, y, z in positions]
    assert all(before < after for before, after in pairwise(distances))
    geometry = describe_geometry(
        _planes(*((x, y, z) for x, y, z in positions)), orientation, stated_spacing_mm=None
    )
    assert geometry.flags == ()
    assert geometry.slice_spacing_mm == pytest.approx(spacing)
    affine = np.array(geometry.affine_lps)
    for k, position in enumerate(positions):
        np.testing.assert_allclose((affine @ [0, 0, k, 1])[:3], position, atol=1e-6)
    np.testing.assert_allclose(affine[:3, 0], turn[:, 0] * 0.75, atol=1e-9)  # between columns
    np.testing.assert_allclose(affine[:3, 1], turn[:, 1] * 0.5, atol=1e-9)  # between rows
    assert np.linalg.det(affine[:3, :3]) > 0  # right-handed


def _rotation(a: float, b: float, c: float) -> np.ndarray:
    def about(axis: int, angle: float) -> np.ndarray:
        matrix = np.eye(3)
        i, j = [(1, 2), (2, 0), (0, 1)][axis]
        matrix[i, i] = matrix[j, j] = math.cos(angle)
        matrix[i, j], matrix[j, i] = -math.sin(angle), math.sin(angle)
        return matrix

    turned: np.ndarray = about(0, a) @ about(1, b) @ about(2, c)
    return turned
