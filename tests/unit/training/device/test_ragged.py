"""Samples of many sizes on the device: each brought to the model's size as it would be alone."""

from __future__ import annotations

import numpy as np
import torch

from shardflow.training.device.images import gather_slices, places_of, resized, slice_mask_of

STACKS = [
    np.arange(144, dtype=np.int16).reshape(3, 1, 8, 6),
    np.zeros((0, 1, 5, 5), np.int16),
    np.arange(150, 198, dtype=np.int16).reshape(1, 1, 4, 12),
]


def test_slices_are_resized_and_padded_as_if_alone() -> None:
    flat, places = places_of(STACKS)
    images = gather_slices(torch.from_numpy(flat), places, (4, 6))
    assert images.shape == (3, 3, 4, 6)
    assert images.dtype == torch.float32
    first = torch.from_numpy(STACKS[0][:, 0])[None].float()
    assert torch.equal(images[0], resized(first, (4, 6))[0])
    halved = torch.from_numpy(STACKS[2]).view(4, 6, 2).float().mean(-1)
    assert torch.equal(images[2, 0], halved)
    assert slice_mask_of(places).tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert not images[1].any()
    assert not images[2, 1:].any()


def test_a_micro_batch_without_slices_has_one_empty_place() -> None:
    flat, places = places_of([np.zeros((0, 0, 0, 0), np.float32)])
    assert slice_mask_of(places).tolist() == [[False]]
    assert torch.equal(gather_slices(torch.from_numpy(flat), places, (2, 2)), torch.zeros(1, 1, 2, 2))
