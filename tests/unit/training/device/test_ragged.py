"""Samples of many sizes on the device: each brought to the model's size as it would be alone."""

from __future__ import annotations

import numpy as np
import torch

from shardflow.training.device.images import gather_slices, places_of, resized, slice_mask_of

SHAPES = np.array([[3, 8, 6], [0, 5, 5], [1, 4, 12]])
STARTS = np.array([0, 150, 150])


def test_slices_are_resized_and_padded_as_if_alone() -> None:
    pixels = torch.arange(0, 250, dtype=torch.int16)
    places = places_of(STARTS, SHAPES)
    images = gather_slices(pixels, places, (4, 6))
    assert images.shape == (3, 3, 4, 6)
    assert images.dtype == torch.float32
    first = pixels[:144].view(1, 3, 8, 6).float()
    assert torch.equal(images[0], resized(first, (4, 6))[0])
    halved = pixels[150:198].view(4, 6, 2).float().mean(-1)
    assert torch.equal(images[2, 0], halved)
    assert slice_mask_of(places).tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert not images[1].any()
    assert not images[2, 1:].any()


def test_a_micro_batch_without_slices_has_one_empty_place() -> None:
    places = places_of(np.array([0]), np.array([[0, 8, 6]]))
    assert slice_mask_of(places).tolist() == [[False]]
    assert torch.equal(gather_slices(torch.zeros(0), places, (2, 2)), torch.zeros(1, 1, 2, 2))
