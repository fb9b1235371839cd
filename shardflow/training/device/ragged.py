"""Samples of many sizes, flat on the device, become one tensor that a model takes."""

# ruff: noqa: N806
# Tensors carry their axes as a suffix: B slots, K slices, H rows, W columns.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from shardflow.training.device.images import resized

__all__ = ["Place", "gather_slices", "places_of", "slice_mask_of"]

Place: TypeAlias = tuple[int, int, int, int]
"""Where a sample's slices are in a flat array: first pixel, slices, rows, columns."""


def places_of(pixel_start: NDArray[Any], image_shape: NDArray[Any]) -> list[Place]:
    """Return where each slot's slices are, from a batch's arrays; on the host, without asking a device."""
    rows = np.column_stack([pixel_start, image_shape]).tolist()
    return [(start, num_slices, rows, columns) for start, num_slices, rows, columns in rows]


def slice_mask_of(places: Sequence[Place]) -> NDArray[np.bool_]:
    """Return which places of a padded batch hold a slice, ``(B, K)``, K the most of any slot, at least 1."""
    num_slices = np.array([place[1] for place in places], np.int64)
    mask: NDArray[np.bool_] = np.arange(max(1, int(num_slices.max(initial=1)))) < num_slices[:, None]
    return mask


def gather_slices(pixels: torch.Tensor, places: Sequence[Place], size: tuple[int, int]) -> torch.Tensor:
    """Bring the slices of all slots to one size and pad them to one number.

    Args:
        pixels: Flat, any type that travels, in stored units.
        places: Where each slot's slices are.
        size: Rows and columns of the result.

    Returns:
        ``(B, K, rows, columns)`` float32 in stored units; see `slice_mask_of` for what is there.
    """
    num_places = slice_mask_of(places).shape[1]
    result_BKHW = torch.zeros((len(places), num_places, *size), device=pixels.device)
    for slot, (start, num_slices, rows, columns) in enumerate(places):
        if num_slices:
            flat = pixels[start : start + num_slices * rows * columns]
            own = flat.view(1, num_slices, rows, columns).to(torch.float32)
            result_BKHW[slot, :num_slices] = resized(own, size)[0]
    return result_BKHW
