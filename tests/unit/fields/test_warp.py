"""NumPy turns, bends and brightens as the device does, exactly where it must, and folds nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.fields.augmentation import ALLOWED, Draw, Warp, _bending, _spline, change_intensity
from shardflow.training.device.images import ImageParameters, ImagePipeline, stack_draws, windowed_share

pytestmark = pytest.mark.fast

TURNED = Draw(rotate_deg=11.0, zoom=1.15, shift_x=0.06, shift_y=-0.04)


def smooth(rows: int, columns: int) -> NDArray[np.uint16]:
    y, x = np.mgrid[:rows, :columns]
    values: NDArray[np.uint16] = (20000 + 9000 * np.sin(x / 5) + 8000 * np.cos(y / 7)).astype(np.uint16)
    return values


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint8", "int32", "float32"])
def test_what_changes_no_place_changes_no_bit(dtype: str) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (19, 23)).astype(dtype)
    assert (Warp(Draw(), 19, 23).image(pixels, fill=7) == pixels).all()
    assert (Warp(Draw(mirror=True), 19, 23).image(pixels) == pixels[:, ::-1]).all()
    assert (Warp(Draw(flip=True), 19, 23).image(pixels) == pixels[::-1]).all()
    assert Warp(TURNED, 19, 23).image(pixels).dtype == pixels.dtype


def test_halves_are_rounded_up_and_outside_is_fill_alone() -> None:
    pixels = np.array([[-3, -2, 5, 8]] * 4, np.int16)
    # Half a pixel to the right: means of neighbours, -2.5, 1.5 and 6.5 among them.
    assert Warp(Draw(shift_x=0.125), 4, 4).image(pixels, fill=-9)[1].tolist() == [-6, -2, 2, 7]
    # A pixel and a half: of what lies farther outside than one pixel, nothing is mixed in.
    assert Warp(Draw(shift_x=0.375), 4, 4).image(pixels, fill=-9)[1].tolist() == [-9, -6, -2, 2]
    assert Warp(Draw(shift_y=-0.75), 4, 4).image(pixels, fill=-9)[:, 2].tolist() == [5, -9, -9, -9]


@pytest.mark.parametrize("draw", [TURNED, Draw(rotate_deg=-20.0, mirror=True), Draw(zoom=1.2, flip=True)])
def test_places_are_those_of_the_device(draw: Draw) -> None:
    pixels = smooth(48, 64)
    affine, _ = stack_draws([draw], rows=48, columns=64)
    pipeline = ImagePipeline(48, 64)
    on_device = (
        pipeline(
            torch.from_numpy(pixels.astype(np.float32))[None, None],
            torch.ones((1, 1), dtype=torch.bool),
            ImageParameters(
                display_range=torch.tensor([[0.0, 65535.0]]), affine_B23=torch.from_numpy(affine)
            ),
        )[0, 0].numpy()
        * 0.5
        + 0.5
    )
    here = Warp(draw, 48, 64).image(pixels) / 65535
    # Places are rounded to 1/128 of a pixel; at the rim that is a step from fill to image.
    assert np.abs(here - on_device)[2:-2, 2:-2].mean() < 0.001
    assert np.quantile(np.abs(here - on_device), 0.98) < 0.004


def test_intensities_are_those_of_the_device() -> None:
    pixels, draw = smooth(16, 16), Draw(gain=1.2, offset=-0.1, gamma=1.3)
    window = torch.tensor([[12000.0, 30000.0]])
    changed = change_intensity(pixels, draw, (12000.0, 30000.0))
    share = windowed_share(torch.from_numpy(pixels.astype(np.float32))[None, None], window, torch.float32)
    expected = (share.clamp(min=1e-6) ** 1.3 * 1.2 - 0.1).clamp(0, 1)
    seen = windowed_share(torch.from_numpy(changed.astype(np.float32))[None, None], window, torch.float32)
    assert torch.allclose(seen, expected, atol=1e-4)
    as_float = change_intensity(pixels.astype(np.float32), draw, (12000.0, 30000.0))
    assert np.abs(as_float - changed).max() <= 0.51


def test_colours_are_turned_alike_and_bands_have_no_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(2).integers(0, 255, (40, 30, 3)).astype(np.uint8)
    draw = Draw(rotate_deg=9.0, elastic=0.03, elastic_key=5)
    whole = Warp(draw, 40, 30).image(pixels, fill=3)
    for channel in range(3):
        assert (Warp(draw, 40, 30).image(pixels[:, :, channel], fill=3) == whole[:, :, channel]).all()
    monkeypatch.setattr("shardflow.fields.augmentation._BAND_PIXELS", 100)
    monkeypatch.setattr("shardflow.fields.augmentation._KEPT_PIXELS", 0)
    assert (Warp(draw, 40, 30).image(pixels, fill=3) == whole).all()


def test_masks_go_where_their_pixels_go() -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[20:34, 12:40] = 255
    draw = Draw(rotate_deg=13.0, shift_x=0.1, elastic=0.02, elastic_key=9)
    warp = Warp(draw, 64, 64)
    carried, image = warp.mask(mask), warp.image(mask)
    assert set(np.unique(carried)) == {0, 255}
    # Nearest and linear agree but at the edge, where linear is between.
    assert ((carried == image) | ((image > 0) & (image < 255))).all()
    for shift_px, moved_px in ((0.4, 0), (0.6, 1), (-0.4, 0), (-0.6, -1)):
        shifted = Warp(Draw(shift_x=shift_px / 64, shift_y=shift_px / 64), 64, 64).mask(mask)
        assert (shifted == np.roll(mask, (moved_px, moved_px), (0, 1))).all()


@settings(max_examples=10, deadline=None)
@given(key=st.integers(0, 2**53 - 1))
def test_bending_folds_nothing_and_stays_within_its_share(key: int) -> None:
    most = max(allowed.elastic for allowed in ALLOWED.values())
    assert most <= 0.05
    bending = _bending(Draw(elastic=most, elastic_key=key))
    side = np.linspace(-1, 1, 65)
    x, y = side[None, :], side[:, None]
    at_x, at_y = x + _spline(bending[0], x, y), y + _spline(bending[1], x, y)
    assert max(np.abs(at_x - x).max(), np.abs(at_y - y).max()) <= 2 * most
    area = np.diff(at_x, axis=1)[:-1] * np.diff(at_y, axis=0)[:, :-1]
    area -= np.diff(at_x, axis=0)[:, :-1] * np.diff(at_y, axis=1)[:-1]
    assert (area > 0).all()


def test_a_draw_goes_through_json() -> None:
    draw = Draw(rotate_deg=1.25, mirror=True, elastic=0.01, elastic_key=2**53 - 1)
    assert Draw.from_json({**draw.to_json(), "variant": 1}) == draw
    with pytest.raises(FormatError, match="KeyError"):
        Draw.from_json({"zoom": 1.0})


def test_the_bytes_are_frozen() -> None:
    """Change class DATASET BYTES: a dataset that is packed again must hold the same variants."""
    draw = Draw(rotate_deg=7.0, zoom=1.1, elastic=0.02, elastic_key=1234, gain=1.1, gamma=0.9)
    pixels = change_intensity(smooth(12, 9), draw, (11000.0, 36000.0))
    turned = Warp(draw, 12, 9, pixel_aspect=1.5).image(pixels)
    assert turned[3].tolist() == FROZEN


FROZEN = [31127, 32676, 34130, 35349, 35970, 36000, 36000, 36000, 36000]
