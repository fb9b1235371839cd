"""Augmentation of volumes: operators against SciPy or plain NumPy, numbers against their keys."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import ndimage
from scipy.interpolate import BSpline
from scipy.spatial.transform import Rotation

from shardflow.errors import ConfigError
from shardflow.fields.volumes.augmentation import (
    BIAS_POWERS,
    IndexMap,
    IntensityDraw,
    SlotDraw,
    VolumeAugmentSettings,
)
from shardflow.training.device.volumes import Places, VolumeAugmentation, changed, normal_noise
from tests.volume_cases import affine_of

pytestmark = pytest.mark.fast

SOURCE = (19, 24, 21)
ROI = (11, 14, 13)
CPU = torch.device("cpu")
RANDOM = np.random.default_rng(3)
VOXELS = RANDOM.normal(size=SOURCE).astype(np.float32)
BEND = RANDOM.uniform(-0.4, 0.4, (3, 6, 6, 6))
ANISOTROPIC = affine_of((2.5, 0.8, 0.9), turn=0.4)
TILTED = affine_of((2.0, 0.8, 0.8), tilt=0.3)
DRAWS = {
    "nothing": SlotDraw(),
    "flips": SlotDraw(flip=(True, False, True)),
    "zoom": SlotDraw(zoom=1.3),
    "rotation": SlotDraw(rotate_deg=(25.0, -17.0, 8.0)),
    "bending": SlotDraw(bend=BEND),
    "all": SlotDraw(rotate_deg=(-12.0, 30.0, 21.0), zoom=0.8, flip=(False, True, False), bend=BEND),
}
GRIDS: dict[str, tuple[NDArray[np.float64], tuple[float, float, float] | None]] = {
    "cubes": (np.eye(4), None),
    "anisotropic": (ANISOTROPIC, None),
    "spaced": (ANISOTROPIC, (1.5, 1.1, 0.7)),
    "tilted": (TILTED, (1.2, 0.8, 0.8)),
    "unknown": (np.full((4, 4), np.nan), None),
}


def settings(**changes: Any) -> VolumeAugmentSettings:
    return VolumeAugmentSettings(**{"roi_size": ROI, **changes})


def reference_places(
    draw: SlotDraw, affine: NDArray[np.float64], spacing: tuple[float, float, float] | None
) -> NDArray[np.float64]:
    """Return the stored index of each voxel of the result, ``(3, D, H, W)``, by way of millimeters."""
    axes = affine[:3, :3] if np.isfinite(affine).all() else np.eye(3)
    lengths = np.linalg.norm(axes, axis=0)
    frame = axes / lengths
    if abs(frame[:, 0] @ frame[:, 1]) > 0.01:  # tilted: the closest perpendicular axes
        frame = _closest(frame)
    points = np.stack(np.meshgrid(*map(np.arange, ROI), indexing="ij")).astype(float)
    if draw.bend is not None:
        points = points + _reference_bending(draw.bend)
    out = np.array(spacing if spacing is not None else lengths)
    middle = (np.array(ROI) - 1) / 2
    offsets = (points.reshape(3, -1).T - middle) * out * [-1 if one else 1 for one in draw.flip] * draw.zoom
    about_d, about_h, about_w = (
        Rotation.from_rotvec(math.radians(angle) * direction * sign).as_matrix()
        for angle, direction, sign in zip(draw.rotate_deg, np.eye(3), (1, -1, 1), strict=True)
    )
    in_frame = offsets @ (about_d @ about_h @ about_w).T
    indices = np.linalg.solve(axes, frame @ in_frame.T)
    return (indices + ((np.array(SOURCE) - 1) / 2)[:, None]).reshape(3, *ROI)


def _closest(frame: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the orthogonal matrix closest to axes, by iteration (Higham 1986)."""
    found = frame
    for _ in range(60):
        found = (found + np.linalg.inv(found).T) / 2
    return found


def _reference_bending(bend: NDArray[np.float64]) -> NDArray[np.float64]:
    num_cells = bend.shape[1] - 3
    knots = np.arange(-3, num_cells + 4, dtype=float)
    designs = [
        BSpline.design_matrix((np.arange(side) + 0.5) * num_cells / side, knots, 3).toarray() for side in ROI
    ]
    moved = np.einsum("kabc,da,hb,wc->kdhw", bend, *designs)
    found: NDArray[np.float64] = moved * (np.array(ROI) / num_cells)[:, None, None, None]
    return found


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("draw", DRAWS)
def test_one_resampling_is_that_of_scipy(draw: str, grid: str) -> None:
    affine, spacing = GRIDS[grid]
    index_map = IndexMap.of(DRAWS[draw], affine, SOURCE, settings(spacing_mm=spacing))
    places = Places(index_map, SOURCE, CPU)
    expected_at = reference_places(DRAWS[draw], affine, spacing)
    is_inside = ((expected_at >= -0.5) & (expected_at < np.array(SOURCE).reshape(3, 1, 1, 1) - 0.5)).all(0)
    # Half-way between two voxels either one is the nearest.
    is_sure = (np.abs(expected_at % 1 - 0.5) > 1e-6).all(0)
    for order, mode, edge in ((1, "linear", "nearest"), (3, "cubic", "mirror"), (0, "nearest", "nearest")):
        expected = ndimage.map_coordinates(VOXELS.astype(float), expected_at, order=order, mode=edge)
        found = places.sample(torch.from_numpy(VOXELS[None]), mode, -7.0)[0].numpy()  # type: ignore[arg-type]
        kept = is_inside & is_sure
        np.testing.assert_allclose(found[kept], expected[kept], atol=1e-4)
        assert (found[~is_inside & is_sure] == -7).all()
    assert (is_inside & is_sure).mean() > 0.2


def test_without_a_draw_the_middle_is_copied_and_flips_reverse_it() -> None:
    middle = VOXELS[4:15, 5:19, 4:17]
    region = torch.from_numpy(VOXELS[None])
    for draw, expected in ((SlotDraw(), middle), (DRAWS["flips"], middle[::-1, :, ::-1])):
        index_map = IndexMap.of(draw, ANISOTROPIC, region.shape[1:], settings())
        for mode in ("linear", "nearest"):
            found = Places(index_map, region.shape[1:], CPU).sample(region, mode, 0)
            assert (found[0].numpy() == expected).all()


@pytest.mark.parametrize("grid", ["anisotropic", "spaced", "tilted"])
def test_the_affine_of_the_result_says_where_its_voxels_were(grid: str) -> None:
    """A ramp in millimeters is a ramp in the result, along the directions of its affine."""
    affine, spacing = GRIDS[grid]
    slope = np.array([0.3, -1.1, 0.7])
    indices = np.stack(np.meshgrid(*map(np.arange, SOURCE), indexing="ij"), axis=-1)
    ramp = (indices @ affine[:3, :3].T + affine[:3, 3]) @ slope
    draw = SlotDraw(rotate_deg=(12.0, -5.0, 9.0), zoom=0.6, flip=(True, False, False))
    index_map = IndexMap.of(draw, affine, SOURCE, settings(spacing_mm=spacing))
    found = Places(index_map, SOURCE, CPU).sample(
        torch.from_numpy(ramp[None].astype(np.float32)), "linear", np.nan
    )
    own = index_map.affine(affine)
    where = np.stack(np.meshgrid(*map(np.arange, ROI), indexing="ij"), axis=-1)
    expected = (where @ own[:3, :3].T + own[:3, 3]) @ slope
    at = index_map.source(where.reshape(-1, 3).astype(float)).reshape(*ROI, 3)
    is_between = ((at >= 0) & (at <= np.array(SOURCE) - 1)).all(-1)
    assert is_between.mean() > 0.3
    np.testing.assert_allclose(found[0].numpy()[is_between], expected[is_between], atol=1e-3)
    lengths = np.linalg.norm(own[:3, :3], axis=0)
    np.testing.assert_allclose(
        lengths, 0.6 * np.array(spacing or np.linalg.norm(affine[:3, :3], axis=0)), rtol=1e-9
    )
    assert np.linalg.det(own[:3, :3]) * np.linalg.det(affine[:3, :3]) < 0  # one flip


@pytest.mark.parametrize("draw", ["flips", "rotation", "bending", "all"])
def test_boxes_hold_what_masks_show(draw: str) -> None:
    mask = np.zeros((1, *SOURCE), np.uint8)
    boxes = np.array([[6, 7, 8, 12, 15, 13], [0, 0, 0, 1, 1, 1], [2, 2, 2, 4, 4, 4]], np.float32)
    mask[0, 6:12, 7:15, 8:13] = 1
    index_map = IndexMap.of(DRAWS[draw], np.eye(4), SOURCE, settings())
    found = Places(index_map, SOURCE, CPU).sample(torch.from_numpy(mask), "nearest", 0)[0].numpy()
    moved, is_left = index_map.boxes(boxes, np.array([1, 1, 0]))
    assert is_left[0]
    assert not is_left[2]  # none before, none after
    shown = np.argwhere(found)
    low, high = shown.min(axis=0), shown.max(axis=0) + 1
    slack = 0.0 if draw == "flips" else 0.5
    assert (moved[0, :3] <= low + slack).all()
    assert (moved[0, 3:] >= high - slack).all()
    if draw == "flips":
        assert moved[0].tolist() == [*low, *high]
        assert not is_left[1]  # outside of the result
        assert moved[1].tolist() == [0.0] * 6


def test_bending_never_folds_and_is_inverted() -> None:
    corners = np.array([*itertools.product((-1.0, 1.0), repeat=3)])
    bend = 0.4 * corners[RANDOM.integers(0, 8, (8, 8, 8))].transpose(3, 0, 1, 2)
    size = (40, 40, 40)
    index_map = IndexMap.of(SlotDraw(bend=bend), np.eye(4), size, settings(roi_size=size))
    points = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"), axis=-1).astype(float)
    moved = index_map.source(points.reshape(-1, 3)).reshape(points.shape)
    jacobian = np.stack(np.gradient(moved, axis=(0, 1, 2)), axis=-1)
    assert np.linalg.det(jacobian).min() > 0
    inner = points[8:-8, 8:-8, 8:-8].reshape(-1, 3)[::97]
    gentle = IndexMap.of(SlotDraw(bend=bend / 4), np.eye(4), size, settings(roi_size=size))
    np.testing.assert_allclose(gentle.result(gentle.source(inner)), inner, atol=1e-3)


# ---- intensities --------------------------------------------------------------------------------------


def run(values: NDArray[np.float32], **drawn: Any) -> NDArray[np.float32]:
    unit = {name: drawn.pop(name) for name in ("mean", "deviation") if name in drawn}
    found: NDArray[np.float32] = changed(torch.from_numpy(values), IntensityDraw(**drawn), **unit).numpy()
    return found


CHANNELS = np.stack([VOXELS, 2 * VOXELS + 5])


def test_blur_is_that_of_scipy() -> None:
    sigma = (0.5, 0.9, 1.7)
    expected = [ndimage.gaussian_filter(one.astype(float), sigma, mode="nearest") for one in CHANNELS]
    np.testing.assert_allclose(run(CHANNELS, blur=sigma), expected, atol=1e-4)


def test_gamma_is_a_power_of_the_range_that_keeps_mean_and_deviation() -> None:
    for values, sign in ((CHANNELS, 1), (CHANNELS, -1)):
        source = sign * values.astype(float)
        expected = []
        for one in source:
            low, width = one.min(), np.ptp(one)
            raised = ((one - low) / width) ** 1.4 * width + low
            expected.append((raised - raised.mean()) / raised.std() * one.std() + one.mean())
        name = "gamma" if sign > 0 else "inverted_gamma"
        np.testing.assert_allclose(run(values, **{name: 1.4}), sign * np.array(expected), atol=1e-4)


def test_brightness_and_contrast_are_factors_about_a_mean() -> None:
    means = CHANNELS.mean(axis=(1, 2, 3), keepdims=True, dtype=float)
    np.testing.assert_allclose(run(CHANNELS, brightness=1.2), (CHANNELS - means) * 1.2 + means, atol=1e-4)
    np.testing.assert_allclose(run(CHANNELS, brightness=1.2, mean=3.0), CHANNELS * 1.2 - 0.6, atol=1e-4)
    limits = [CHANNELS.min(axis=(1, 2, 3), keepdims=True), CHANNELS.max(axis=(1, 2, 3), keepdims=True)]
    expected = np.clip((CHANNELS - means) * 1.3 + means, *limits)
    np.testing.assert_allclose(run(CHANNELS, contrast=1.3), expected, atol=1e-4)


def test_a_bias_field_multiplies_by_the_exponential_of_a_polynomial() -> None:
    coefficients = RANDOM.uniform(-0.5, 0.5, len(BIAS_POWERS))
    grid = np.zeros((4, 4, 4))
    for powers, one in zip(BIAS_POWERS, coefficients, strict=True):
        grid[powers] = one
    z, y, x = ((2 * np.arange(side) + 1) / side - 1 for side in SOURCE)
    field = np.exp(np.polynomial.polynomial.polygrid3d(z, y, x, grid))
    least = CHANNELS.min(axis=(1, 2, 3), keepdims=True)
    found = run(CHANNELS, bias=tuple(coefficients.tolist()))
    np.testing.assert_allclose(found, (CHANNELS - least) * field + least, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [0.5, 0.73, 1.0])
def test_low_resolution_interpolates_the_nearest_of_fewer_voxels(share: float) -> None:
    counts = [round(side * share) for side in SOURCE]
    kept = np.ix_(
        *(
            np.floor((np.arange(count) + 0.5) * side / count).astype(int)
            for count, side in zip(counts, SOURCE, strict=True)
        )
    )
    places = np.meshgrid(
        *((np.arange(side) + 0.5) * count / side - 0.5 for count, side in zip(counts, SOURCE, strict=True)),
        indexing="ij",
    )
    expected = [
        ndimage.map_coordinates(one[kept].astype(float), places, order=1, mode="nearest") for one in CHANNELS
    ]
    np.testing.assert_allclose(run(CHANNELS, low_resolution=share), expected, atol=1e-4)


def test_noise_is_normal_and_a_function_of_key_and_voxel() -> None:
    key = 0xF123456789ABCDEF
    found = normal_noise((30, 30, 30), key, CPU).numpy()
    with np.errstate(over="ignore"):
        word = np.arange(1, found.size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
    first = (word >> np.uint64(32)).astype(float) + 0.5
    second = (word & np.uint64(0xFFFFFFFF)).astype(float) + 0.5
    expected = np.sqrt(-2 * np.log(first / 2**32)) * np.cos(2 * np.pi * second / 2**32)
    np.testing.assert_allclose(found.ravel(), expected, atol=1e-6)
    assert abs(found.mean()) < 0.03
    assert abs(found.std() - 1) < 0.03
    assert abs((found**4).mean() - 3) < 0.2
    other = normal_noise((30, 30, 30), key + 1, CPU).numpy()
    assert abs(np.corrcoef(found.ravel(), other.ravel())[0, 1]) < 0.03
    assert abs(np.corrcoef(found[:-1].ravel(), found[1:].ravel())[0, 1]) < 0.03
    changed_by = run(CHANNELS, noise=0.1, noise_key=key, deviation=4.0) - CHANNELS
    np.testing.assert_allclose(changed_by[0], changed_by[1], atol=1e-4)  # windows of one image
    np.testing.assert_allclose(changed_by[0], 0.4 * normal_noise(SOURCE, key, CPU).numpy(), atol=1e-4)


def test_a_constant_region_stays_finite() -> None:
    flat = np.full((1, *SOURCE), 3.0, np.float32)
    found = run(flat, gamma=0.7, inverted_gamma=1.4, contrast=0.8, brightness=1.2, bias=(0.1,) * 19)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, 3.0, atol=1e-4)


# ---- settings and draws -------------------------------------------------------------------------------


def test_draws_happen_as_often_as_their_probability_and_in_their_range() -> None:
    preset = VolumeAugmentation.preset("strong", roi_size=ROI)
    num_places = 2000
    places = [(0, number // 8, number // 4 % 2, number % 4) for number in range(num_places)]
    moves = [preset.draw(5, place) for place in places]
    tones = [preset.draw_intensity(5, "ct", place) for place in places]
    counts = {
        "rotate": sum(any(one.rotate_deg) for one in moves),
        "zoom": sum(one.zoom != 1 for one in moves),
        "flip": sum(sum(one.flip) for one in moves) / 3,
        "elastic": sum(one.bend is not None for one in moves),
        **{
            name: sum(getattr(one, name) is not None for one in tones)
            for name in ("noise", "blur", "brightness", "contrast", "low_resolution", "gamma")
        },
        "inverted_gamma": sum(one.inverted_gamma is not None for one in tones),
        "bias_field": sum(one.bias is not None for one in tones),
    }
    for name, count in counts.items():
        prob = getattr(preset, f"{name}_prob")
        expected = prob[0] if isinstance(prob, tuple) else prob
        assert abs(count / num_places - expected) < 0.05, name
    assert max(abs(angle) for one in moves for angle in one.rotate_deg) <= 30
    assert all(0.7 <= one.zoom <= 1.4 for one in moves)
    assert all(np.abs(one.bend).max() <= 0.3 for one in moves if one.bend is not None)
    exponents = [one.gamma for one in tones if one.gamma is not None]
    assert min(exponents) >= 0.7
    assert max(exponents) <= 1.5
    assert 0.4 < np.mean([one < 1 for one in exponents]) < 0.6
    assert len({str(one) for one in tones}) > num_places / 2


def test_each_number_has_a_key_of_its_own() -> None:
    place = (1, 2, 3, 4)
    few = settings(rotate_prob=1.0)
    more = settings(rotate_prob=1.0, zoom_prob=1.0, flip_prob=(1, 1, 1), noise_prob=1.0)
    assert few.draw(7, place).rotate_deg == more.draw(7, place).rotate_deg
    assert few.draw(8, place).rotate_deg != few.draw(7, place).rotate_deg
    for at in range(4):
        other = tuple(one + (at == k) for k, one in enumerate(place))
        assert few.draw(7, other).rotate_deg != few.draw(7, place).rotate_deg  # type: ignore[arg-type]
    assert more.draw_intensity(7, "t1", place) != more.draw_intensity(7, "t2", place)


def test_numbers_are_frozen() -> None:
    """A resume with another version must turn the volumes of the epoch alike."""
    drawn = VolumeAugmentSettings(
        roi_size=ROI, rotate_prob=1.0, zoom_prob=1.0, elastic_prob=1.0, noise_prob=1.0
    )
    place = (1, 2, 3, 4)
    moved, tone = drawn.draw(7, place), drawn.draw_intensity(7, "ct", place)
    assert moved.bend is not None
    found = (*moved.rotate_deg, moved.zoom, float(moved.bend[2, 1, 5, 3]), tone.noise)
    assert tuple(round(one, 9) for one in found if one is not None) == FROZEN
    assert tone.noise_key == FROZEN_KEY


FROZEN = (-5.514503763, 2.678852897, -18.780388195, 0.935643726, -0.165201669, 0.046618237)
FROZEN_KEY = 1686975433259945841


def test_presets_are_those_that_are_published_and_can_be_changed() -> None:
    preset = VolumeAugmentation.preset("nnunet", roi_size=ROI, flip_prob=(0, 0, 0), seed=3)
    assert (preset.rotate_deg, preset.rotate_prob) == ((30.0, 30.0, 30.0), 0.2)
    assert (preset.zoom, preset.zoom_prob, preset.elastic_prob) == ((0.7, 1.4), 0.2, 0.0)
    assert (preset.gamma, preset.gamma_prob, preset.inverted_gamma_prob) == ((0.7, 1.5), 0.3, 0.1)
    assert (preset.flip_prob, preset.seed) == ((0.0, 0.0, 0.0), 3)
    quiet = VolumeAugmentation.preset("strong", roi_size=ROI, spacing_mm=(1, 1, 2)).for_evaluation()
    assert quiet.spacing_mm == (1.0, 1.0, 2.0)
    places = [(0, 0, 0, slot) for slot in range(50)]
    assert {str(quiet.draw(1, place)) for place in places} == {str(SlotDraw())}
    assert {quiet.draw_intensity(1, "ct", place) for place in places} == {IntensityDraw()}


def test_the_margin_covers_what_is_turned() -> None:
    for name in ("geometry", "nnunet", "strong"):
        preset = VolumeAugmentation.preset(name, roi_size=(96, 64, 32), zoom=(0.7, 1.1))
        size = [side + 2 * more for side, more in zip(preset.roi_size, preset.margin(), strict=True)]
        for axis, angle in itertools.product(range(3), (-30.0, -11.0, 30.0)):
            turned = tuple(angle if k == axis else 0.0 for k in range(3))
            draw = SlotDraw(rotate_deg=turned, zoom=1.1)  # type: ignore[arg-type]
            index_map = IndexMap.of(draw, np.eye(4), size, preset)
            corners = np.array([*itertools.product(*((0.0, side - 1.0) for side in preset.roi_size))])
            shown = index_map.source(corners)
            assert (shown >= -0.5).all()
            assert (shown <= np.array(size) - 0.5).all()
    assert VolumeAugmentation.preset("none", roi_size=ROI).margin() == (0, 0, 0)
    spaced = VolumeAugmentation.preset("none", roi_size=(10, 10, 10), spacing_mm=(3, 1, 1))
    assert spaced.margin((1.0, 1.0, 2.0)) == (10, 0, 0)
    with pytest.raises(ConfigError, match="stored_spacing_mm"):
        spaced.margin()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"roi_size": (0, 4, 4)}, "each side of roi_size is a number from 1"),
        ({"rotate_deg": 30}, "rotate_deg is three angles"),
        ({"rotate_prob": 1.5}, "rotate_prob is a probability from 0 to 1, got 1.5"),
        ({"flip_prob": 0.5}, "flip_prob is three probabilities"),
        ({"zoom": (1.4, 0.7)}, "zoom is .least, greatest., got .1.4, 0.7.; exchange them"),
        ({"elastic": (0, 0.6)}, "elastic is .least, greatest. from 0 to 0.4"),
        ({"gamma": 1.2}, "gamma is .least, greatest."),
        ({"deviation": 0}, "deviation is a number above 0"),
        ({"mean": "0"}, "mean is a number or None"),
        ({"interpolation": "nearest"}, "interpolation is one of 'linear', 'cubic'"),
        ({"spacing_mm": (1, 1)}, "spacing_mm is three numbers"),
    ],
)
def test_a_slip_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        settings(**given)


@pytest.mark.parametrize("seed", ["7", 1.5, -1, True])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed must be an integer of at least 0"):
        VolumeAugmentation(roi_size=ROI, seed=seed)


def test_tensors_in_place_of_a_batch_are_refused() -> None:
    tensors: Any = {"ct": torch.zeros(1, 1, 4, 4, 4)}
    with pytest.raises(ConfigError, match="takes a batch of a loader, got a dict"):
        VolumeAugmentation(roi_size=ROI)(tensors)


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'nnunet'"):
        VolumeAugmentSettings.preset("nnUNet", roi_size=ROI)
    with pytest.raises(ConfigError, match="preset is one of"):
        VolumeAugmentSettings.preset(["nnunet"], roi_size=ROI)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no setting 'flip'; did you mean 'flip_prob'"):
        VolumeAugmentSettings.preset("nnunet", roi_size=ROI, flip=(0, 0, 0))
