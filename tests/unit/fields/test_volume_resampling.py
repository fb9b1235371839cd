"""Resampling equals ITK for any affine; grids are those that axis codes, spacings and sizes ask for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import SimpleITK as sitk  # noqa: N813 - as everyone does
from numpy.typing import NDArray

from shardflow.fields.volumes.geometry import (
    Affine,
    Grid,
    finest_spacing,
    oriented,
    spaced,
    stretched,
)
from shardflow.fields.volumes.resampling import Interpolation, inside, resample, smoothing, source_region
from tests.volume_cases import affine_of

pytestmark = pytest.mark.fast
nibabel: Any = pytest.importorskip("nibabel")

FILL = -1024
MODES: dict[Interpolation, int] = {
    "linear": sitk.sitkLinear,
    "nearest": sitk.sitkNearestNeighbor,
    "cubic": sitk.sitkBSpline,
}


def sampled(
    volume: NDArray[Any], grid: Grid, mode: Interpolation, *, antialias: bool = False
) -> NDArray[Any]:
    """Sample a volume from the region that a grid needs of it."""
    sigmas = smoothing(grid) if antialias else (0.0, 0.0, 0.0)
    found = np.full(grid.shape, FILL, np.float32)
    region = source_region(grid, volume.shape, mode, sigmas)
    if region is not None:
        resample(volume[region.slices], region, volume.shape, grid, found, mode=mode, sigmas=sigmas)
    return found


def by_itk(volume: NDArray[Any], grid: Grid, mode: Interpolation) -> NDArray[Any]:
    """Sample it with ITK, in stored coordinates."""
    steps = np.array(grid.steps)[::-1, ::-1]  # ITK's order is x, y, z
    transform = sitk.AffineTransform(steps.ravel().tolist(), grid.origin[::-1])
    image = sitk.GetImageFromArray(volume.astype(np.float32))
    size = [int(side) for side in grid.shape[::-1]]
    plain = (size, transform, MODES[mode], (0.0,) * 3, (1.0,) * 3, np.eye(3).ravel().tolist(), float(FILL))
    return np.asarray(sitk.GetArrayFromImage(sitk.Resample(image, *plain)))


def random_volume(random: np.random.Generator) -> NDArray[np.int16]:
    shape = tuple(random.integers(3, 24, 3).tolist())
    return random.integers(-1024, 3072, shape).astype(np.int16)


def random_grid(random: np.random.Generator, shape: tuple[int, ...], *, is_askew: bool) -> Grid:
    scale = random.uniform(0.3, 2.5, 3) * random.choice([-1, 1], 3)
    steps = np.diag(scale)[random.permutation(3)]
    if is_askew:
        steps = steps @ np.linalg.qr(random.normal(size=(3, 3)))[0] + random.normal(0, 0.1, (3, 3))
    size: Any = tuple(random.integers(1, 18, 3).tolist())
    middle = (np.array(shape) - 1) / 2 + random.uniform(-4, 4, 3)
    origin = middle - steps @ ((np.array(size) - 1) / 2)
    rows: Any = [tuple(map(float, row)) for row in steps]
    return Grid(size, tuple(rows), tuple(origin.tolist()))


@pytest.mark.parametrize("is_askew", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_samples_equal_those_of_itk(mode: Interpolation, is_askew: bool) -> None:
    num_inside = 0
    for seed in range(40):
        random = np.random.default_rng([seed, is_askew])
        volume = random_volume(random)
        grid = random_grid(random, volume.shape, is_askew=is_askew)
        assert (grid.axes is None) == is_askew
        is_inside = np.zeros(grid.shape, np.uint8)
        inside(grid, volume.shape, is_inside)
        found, wanted = sampled(volume, grid, mode), by_itk(volume, grid, mode)
        assert (found[is_inside == 0] == FILL).all()
        difference = np.abs(found - wanted)[is_inside == 1]
        assert difference.size == 0 or difference.max() < 1, (seed, difference.max())
        num_inside += difference.size
    assert num_inside > 5_000


def test_masks_of_any_dtype_are_sampled_without_a_change() -> None:
    random = np.random.default_rng(3)
    labels = random.integers(0, 250, (9, 11, 8)).astype(np.uint8)
    grid = random_grid(random, labels.shape, is_askew=True)
    found = np.zeros(grid.shape, np.uint8)
    region = source_region(grid, labels.shape, "nearest")
    assert region is not None
    resample(labels[region.slices], region, labels.shape, grid, found, mode="nearest")
    wanted = by_itk(labels, grid, "nearest")
    assert (found == np.where(wanted == FILL, 0, wanted)).all()


def test_smoothing_is_that_of_a_gaussian() -> None:
    random = np.random.default_rng(5)
    volume = random_volume(random)
    grid = stretched(Grid(volume.shape), (3, 4, 2))
    ratios = [length / size for length, size in zip(volume.shape, grid.shape, strict=True)]
    sigmas = [max(ratio - 1, 0) / 2 for ratio in ratios]
    smooth = scipy.ndimage.gaussian_filter(volume.astype(np.float32), sigmas, mode="nearest", truncate=4.2)
    assert smoothing(grid) == pytest.approx(sigmas)
    found = sampled(volume, grid, "linear", antialias=True)
    assert np.abs(found - sampled(smooth, grid, "linear")).max() < 1
    assert np.abs(found - sampled(volume, grid, "linear")).max() > 100


def test_axes_are_those_of_nibabel() -> None:
    letters = (one for each in itertools.product("LR", "AP", "SI") for one in itertools.permutations(each))
    for seed, codes in enumerate(map("".join, letters)):
        random = np.random.default_rng(seed)
        affine = affine_of(
            random.uniform(0.5, 4, 3),
            turn=random.uniform(-0.3, 0.3),
            tilt=0.3 * (seed % 2),
            flip=seed % 3 == 0,
        )
        stored = Affine.of_series(affine[:, [2, 1, 0, 3]])
        assert stored is not None
        shape = tuple(random.integers(2, 6, 3).tolist())
        grid = oriented(Grid(shape), stored, codes)
        image = nibabel.Nifti1Image(
            np.arange(np.prod(shape)).reshape(shape).astype(np.int16), np.diag([-1, -1, 1, 1]) @ affine
        )
        wanted = nibabel.orientations.ornt_transform(
            nibabel.io_orientation(image.affine),
            nibabel.orientations.axcodes2ornt(codes),
        )
        turned = image.as_reoriented(wanted)
        found = sampled(np.asarray(image.dataobj), grid, "nearest")
        assert (found == np.asarray(turned.dataobj)).all()
        own = grid.affine(stored)
        assert own.to_array() == pytest.approx(np.diag([-1, -1, 1, 1]) @ turned.affine, abs=1e-9)
        assert "".join(nibabel.aff2axcodes(turned.affine)) == codes


@pytest.mark.parametrize("tilt", [0.0, 0.004, 0.3])
def test_a_spacing_covers_the_same_box_in_millimeters(tilt: float) -> None:
    """A volume whose value is its place in millimeters has the right value at each place of the grid."""
    affine = affine_of((3.1, 0.7, 0.8), turn=0.4, tilt=tilt)
    stored = Affine.of_series(affine[:, [2, 1, 0, 3]])
    assert stored is not None
    shape = (12, 30, 40)
    indices = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
    ramp = (indices @ affine[:3, :3].T + affine[:3, 3]) @ [1.0, -2.0, 3.0]
    for codes in (None, "RAS", "SPL"):
        grid = Grid(shape) if codes is None else oriented(Grid(shape), stored, codes)
        grid = spaced(grid, stored, (1.5, 0.75, 0.5))
        own = grid.affine(stored)
        assert own.spacing_mm == pytest.approx((1.5, 0.75, 0.5))
        ras = np.diag([-1, -1, 1, 1]) @ own.to_array()
        assert codes is None or "".join(nibabel.aff2axcodes(ras)) == codes
        directions = np.array(own.columns) / np.array(own.spacing_mm)[:, None]
        assert np.abs(directions @ directions.T - np.eye(3)).max() < (0.009 if tilt < 0.005 else 1e-9)
        is_inside = np.zeros(grid.shape, np.uint8)
        inside(grid, shape, is_inside)
        assert is_inside.mean() > (0.99 if tilt < 0.005 else 0.6)
        places = np.stack(np.meshgrid(*map(np.arange, grid.shape), indexing="ij"), axis=-1)
        wanted = (places @ own.to_array()[:3, :3].T + own.to_array()[:3, 3]) @ [1.0, -2.0, 3.0]
        found = np.full(grid.shape, np.nan)
        region = source_region(grid, shape, "linear")
        assert region is not None
        resample(ramp, region, shape, grid, found, mode="linear")
        away = scipy.ndimage.binary_erosion(is_inside, iterations=5)  # edges repeat the outermost voxels
        assert away.any()
        assert np.abs(found - wanted)[away].max() < 1e-6


def test_a_whole_volume_is_stretched_as_scipy_does() -> None:
    volume = random_volume(np.random.default_rng(11)).astype(np.float32)
    for size in ((8, 8, 8), (30, 5, 17)):
        found = sampled(volume, stretched(Grid(volume.shape), size), "linear")
        factors = [new / old for new, old in zip(size, volume.shape, strict=True)]
        wanted = scipy.ndimage.zoom(volume, factors, order=1, mode="nearest", grid_mode=True)
        assert np.abs(found - wanted).max() < 0.01


@pytest.mark.parametrize("codes", [None, "RAS", "SPL", "LSA"])
def test_the_finest_spacing_is_that_of_grids_in_their_orientation(codes: str | None) -> None:
    random = np.random.default_rng(5)
    affines = [
        affine_of(random.uniform(0.5, 6, 3), turn=0.4 * number, flip=number % 2 == 1) for number in range(12)
    ]
    table = np.stack([one[:3, [2, 1, 0, 3]] for one in affines])
    table[4] = np.nan
    spacings = []
    for number, one in enumerate(table):
        stored = Affine.of_series(one)
        if number != 4:
            assert stored is not None
            grid = Grid((3, 4, 5)) if codes is None else oriented(Grid((3, 4, 5)), stored, codes)
            spacings.append(grid.affine(stored).spacing_mm)
    assert finest_spacing(table, codes) == pytest.approx(np.min(spacings, axis=0))
    assert finest_spacing(table[4:5], codes) is None
