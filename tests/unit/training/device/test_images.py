"""The device's image operators: each against a plain reference, all of them in one graph."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

from shardflow.fields.augmentation import Draw
from shardflow.training.device.images import ImageParameters, ImagePipeline, stack_draws

SIZE = (12, 10)


def images(size: tuple[int, int] = SIZE, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 200, (2, 3, *size), generator=generator).to(dtype)


MASK = torch.tensor([[True, True, True], [True, False, False]])
RANGES = torch.tensor([[0.0, 200.0], [50.0, 100.0]])


def run(source: torch.Tensor, draws: list[Draw] | None = None, **more: torch.Tensor) -> torch.Tensor:
    if draws is not None:
        affine, intensity = stack_draws(draws, rows=SIZE[0], columns=SIZE[1])
        more |= {"affine_B23": torch.from_numpy(affine), "intensity_B3": torch.from_numpy(intensity)}
    result: torch.Tensor = ImagePipeline(*SIZE)(source, MASK, ImageParameters(display_range=RANGES, **more))
    return result


def plain() -> torch.Tensor:
    return run(images())


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.uint16, torch.float32])
def test_the_window_is_the_same_for_every_type_that_travels(dtype: torch.dtype) -> None:
    result = run(images(dtype=dtype))
    expected = ((images().float() - 50) / 50).clamp(0, 1) * 2 - 1
    assert torch.allclose(result[1, 0], expected[1, 0])
    assert torch.equal(result[1, 1:], torch.zeros(2, *SIZE))


def test_unsigned_values_above_the_signed_range_stay_what_they_are() -> None:
    source = torch.full((1, 1, *SIZE), 60000, dtype=torch.int32).to(torch.uint16)
    result = ImagePipeline(*SIZE)(
        source,
        torch.ones(1, 1, dtype=torch.bool),
        ImageParameters(display_range=torch.tensor([[0.0, 60000.0]])),
    )
    assert torch.equal(result, torch.ones_like(result))


@pytest.mark.parametrize("size", [(36, 20), (37, 23), (12, 40)])
def test_what_shrinks_is_averaged_by_area_as_the_loader_does(size: tuple[int, int]) -> None:
    source = images(size, torch.float32)
    shrunk = np.stack(
        [
            cv2.resize(((piece - 50) / 50).clamp(0, 1).numpy(), SIZE[::-1], interpolation=cv2.INTER_AREA)
            for piece in source[1:, 0]
        ]
    )
    assert float((run(source)[1, 0] - torch.from_numpy(shrunk[0]) * 2 + 1).abs().max()) < 1e-5


def test_what_grows_is_interpolated() -> None:
    source = torch.zeros(2, 3, 6, 5)
    source[:, :, :, 2:] = 200
    row = run(source)[0, 0, 4]
    assert row[0] == -1
    assert row[-1] == 1
    assert bool((row.diff() >= 0).all())


def test_nothing_drawn_changes_nothing() -> None:
    assert float((run(images(), [Draw(), Draw()]) - plain()).abs().max()) < 1e-5


def test_mirror_and_flip_and_half_a_turn() -> None:
    result = run(images(), [Draw(mirror=True), Draw(flip=True)])
    assert torch.allclose(result[0], plain()[0].flip(-1), atol=1e-5)
    assert torch.allclose(result[1, 0], plain()[1, 0].flip(-2), atol=1e-5)
    turned = run(images(), [Draw(rotate_deg=180), Draw()])
    assert torch.allclose(turned[0], plain()[0].flip(-1).flip(-2), atol=1e-4)


def test_a_quarter_turn_is_against_the_clock_and_keeps_the_shape_of_things() -> None:
    """On the screen, in an image that is not square: right goes to the top."""
    source = torch.zeros(2, 3, *SIZE)
    source[:, :, 5:7, 8] = 200  # right of the centre (5.5, 4.5) by 3.5
    turned = run(source, [Draw(rotate_deg=90), Draw()])[0, 0]
    peak = torch.nonzero(turned > 0.5)
    assert peak[:, 0].tolist() == [2, 2]  # above the centre by 3.5
    assert peak[:, 1].tolist() == [4, 5]


def test_shift_and_zoom() -> None:
    moved = run(images(), [Draw(shift_x=0.2, shift_y=-0.25), Draw()])[0]
    assert torch.allclose(moved[:, :-3, 2:], plain()[0][:, 3:, :-2], atol=1e-4)
    assert torch.equal(moved[:, :, 0], torch.full((3, 12), -1.0))  # dark, not a copy of the rim
    source = torch.zeros(2, 3, *SIZE)
    source[:, :, 3:9, 3:7] = 200
    area = [(run(source, [Draw(zoom=zoom), Draw()])[0, 0] > 0).sum().item() for zoom in (1.0, 1.5)]
    assert area[0] == 24
    assert 48 <= area[1] <= 60


def test_intensity_is_gain_and_offset_and_gamma_of_the_windowed_value() -> None:
    result = run(images(), [Draw(gain=0.5, offset=0.25, gamma=2.0), Draw()])
    share = (plain()[0] + 1) / 2
    assert torch.allclose(result[0], (share**2 * 0.5 + 0.25) * 2 - 1, atol=1e-4)
    assert torch.allclose(result[1], plain()[1], atol=1e-5)


def test_a_standardised_sample_has_mean_0_and_deviation_1_over_its_own_slices() -> None:
    result = run(images(), is_standardized_B=torch.tensor([True, True]))
    for sample, num_slices in ((0, 3), (1, 1)):
        own = result[sample, :num_slices]
        assert abs(float(own.mean())) < 1e-5
        assert abs(float(own.std(unbiased=False)) - 1) < 1e-4
    one = run(images(), is_standardized_B=torch.tensor([True, False]))
    assert torch.equal(one[1], plain()[1])


def test_outside_its_box_an_image_is_dark() -> None:
    result = run(images(), content_box_BK4=torch.tensor([[[0, 2, 12, 5]] * 3, [[0, 0, 12, 10]] * 3]))
    assert torch.equal(result[0, :, :, :2], torch.full((3, 12, 2), -1.0))
    assert torch.equal(result[0, :, :, 7:], torch.full((3, 12, 3), -1.0))
    assert torch.equal(result[0, :, :, 2:7], plain()[0, :, :, 2:7])
    assert torch.equal(result[1], plain()[1])


def test_all_of_it_is_one_graph() -> None:
    """Without a break, so that `torch.compile` makes one kernel sequence of it, and with the same result."""
    torch._dynamo.reset()
    pipeline = ImagePipeline(*SIZE)
    compiled = torch.compile(pipeline, fullgraph=True, backend="aot_eager")
    affine, intensity = stack_draws(
        [Draw(rotate_deg=20, zoom=1.1), Draw(gain=1.2)], rows=SIZE[0], columns=SIZE[1]
    )
    parameters = ImageParameters(
        display_range=RANGES,
        is_standardized_B=torch.tensor([True, False]),
        intensity_B3=torch.from_numpy(intensity),
        affine_B23=torch.from_numpy(affine),
        content_box_BK4=torch.tensor([[[1, 1, 30, 15]] * 3, [[0, 0, 36, 20]] * 3]),
    )
    source = images((36, 20))
    assert torch.allclose(compiled(source, MASK, parameters), pipeline(source, MASK, parameters), atol=1e-6)


def test_garbage_in_padding_goes_nowhere() -> None:
    source = images(dtype=torch.float32)
    source[1, 1:] = float("nan")
    result = run(source, [Draw(rotate_deg=3, gain=1.1), Draw()], is_standardized_B=torch.tensor([True, True]))
    assert bool(torch.isfinite(result).all())
