"""Image operators on the device: resize, window, rotate and normalize, compiled into one graph.

The parameters of each sample are rows of small tensors that the host computes from keyed draws; nothing here
draws a random number, reads a value back or branches on data, so the same graph serves every micro-batch.
Slices of a sample are rotated alike: the grid is the sample's, its slices are channels. Samples of many sizes
arrive flat and become one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from shardflow.fields.augmentation import Draw, source_affine

# ruff: noqa: N803, N806, N815
# Tensors carry their axes as a suffix: B slots, K slices, H rows, W columns.


_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageParameters:
    """Transform parameters of each sample of a micro-batch."""

    display_range: torch.Tensor
    """``(B, 2)``, or ``(B, K, 2)`` where images of a sample differ, float32: the intensities that become 0
    and 1; an empty range is taken as one unit wide."""
    is_standardized_B: torch.Tensor | None = None
    """bool: these samples get their own mean 0 and deviation 1 in place of a window (MR, which has no unit).
    None: no sample."""
    intensity_B3: torch.Tensor | None = None
    """float32, gain, offset and gamma: a windowed value v becomes ``(v ** gamma) * gain + offset``. None
    leaves them."""
    affine_B23: torch.Tensor | None = None
    """float32, source position of each place of the result, both from -1 to 1 over the image, x before y;
    positions outside give the window's lowest value. None leaves images where they are."""
    content_box_BK4: torch.Tensor | None = None
    """int64, first row, first column, rows and columns that hold each image in its frame; the rest is as dark
    as the window goes. None: all of it does."""


class ImagePipeline(nn.Module):
    """Pipeline from stored units to the input of a vision model. Holds no weights.

    Args:
        rows: Rows of the result.
        columns: Its columns.
    """

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.size = (rows, columns)

    def forward(
        self, images_BKHW: torch.Tensor, slice_mask_BK: torch.Tensor, parameters: ImageParameters
    ) -> torch.Tensor:
        """Return ``(B, K, rows, columns)`` float32; padded slices are 0 whatever their bytes are.

        Args:
            images_BKHW: ``(B, K, H, W)`` int16, uint8, uint16 or float32, in stored units.
            slice_mask_BK: ``(B, K)`` bool.
            parameters: A row a sample.
        """
        is_there = slice_mask_BK[:, :, None, None]
        values = windowed_share(images_BKHW, parameters.display_range, torch.float32)
        values = torch.where(is_there, values, torch.zeros_like(values))
        if parameters.content_box_BK4 is not None:
            values = _darken_frame(values, parameters.content_box_BK4)
        values = resized(values, self.size)
        if parameters.intensity_B3 is not None:
            gain, offset, gamma = parameters.intensity_B3.to(values.dtype)[:, :, None, None, None].unbind(1)
            values = (values.clamp(min=_EPSILON) ** gamma * gain + offset).clamp(0, 1)
        if parameters.affine_B23 is not None:
            grid = functional.affine_grid(
                parameters.affine_B23.to(values.dtype),
                [values.shape[0], 1, self.size[0], self.size[1]],
                align_corners=False,
            )
            values = functional.grid_sample(values, grid, align_corners=False, padding_mode="zeros")
        normal = (values - 0.5) / 0.5
        if parameters.is_standardized_B is not None:
            own = _standardized(values, slice_mask_BK)
            normal = torch.where(parameters.is_standardized_B[:, None, None, None], own, normal)
        return torch.where(is_there, normal, torch.zeros_like(normal))


def window_images(
    images_BKHW: torch.Tensor, slice_mask_BK: torch.Tensor, display_range: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Map each sample's display range to [-1, 1] and clip what is outside.

    Padded slices become 0 whatever their bytes are, so that nothing of a recycled buffer reaches the model.

    Args:
        images_BKHW: ``(B, K, H, W)`` int16, uint8, uint16 or float32.
        slice_mask_BK: ``(B, K)`` bool.
        display_range: ``(B, 2)`` or ``(B, K, 2)`` float32, low and high; an empty range is taken as one unit
            wide.
        dtype: Floating type of the result.
    """
    scaled = windowed_share(images_BKHW, display_range, dtype) * 2 - 1
    return torch.where(slice_mask_BK[:, :, None, None], scaled, torch.zeros_like(scaled))


def windowed_share(
    images_BKHW: torch.Tensor, display_range: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return intensities as a share of their display range, clipped to 0 and 1."""
    ranges = display_range if display_range.ndim == 3 else display_range[:, None]
    low, high = (ranges[:, :, end].to(dtype)[:, :, None, None] for end in (0, 1))
    width = high - low
    width = torch.where(width > 0, width, torch.ones_like(width))
    return ((images_BKHW.to(dtype) - low) / width).clamp(0, 1)


def resized(values_BKHW: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize images: first the axes that shrink, by area, so that nothing aliases; then those that grow."""
    common = (min(values_BKHW.shape[2], size[0]), min(values_BKHW.shape[3], size[1]))
    if common != tuple(values_BKHW.shape[2:]):
        rows = _area_weights(values_BKHW.shape[2], common[0], values_BKHW)
        columns = _area_weights(values_BKHW.shape[3], common[1], values_BKHW)
        values_BKHW = rows @ values_BKHW @ columns.T
    if common != size:
        values_BKHW = functional.interpolate(values_BKHW, size=size, mode="bilinear", align_corners=False)
    return values_BKHW


def _area_weights(num_old: int, num_new: int, like: torch.Tensor) -> torch.Tensor:
    """Return the share that each old pixel has in each new one, ``(num_new, num_old)``; rows add up to 1."""
    ratio = num_old / num_new
    new = torch.arange(num_new, dtype=torch.float64, device=like.device)[:, None]
    old = torch.arange(num_old, dtype=torch.float64, device=like.device)[None, :]
    overlap = torch.minimum((new + 1) * ratio, old + 1) - torch.maximum(new * ratio, old)
    return (overlap.clamp(min=0) / ratio).to(like.dtype)


def _darken_frame(values_BKHW: torch.Tensor, box_BK4: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(values_BKHW.shape[2], device=values_BKHW.device)
    columns = torch.arange(values_BKHW.shape[3], device=values_BKHW.device)
    top, left, height, width = box_BK4[..., None].unbind(2)
    in_rows = (rows >= top) & (rows < top + height)
    in_columns = (columns >= left) & (columns < left + width)
    inside = in_rows[..., :, None] & in_columns[..., None, :]
    return torch.where(inside, values_BKHW, torch.zeros_like(values_BKHW))


def _standardized(values_BKHW: torch.Tensor, slice_mask_BK: torch.Tensor) -> torch.Tensor:
    """Subtract each sample's mean and divide by its deviation, over its present slices."""
    mask = slice_mask_BK[:, :, None, None].to(values_BKHW.dtype)
    num_pixels = (mask.sum(dim=(1, 2, 3), keepdim=True) * values_BKHW.shape[2] * values_BKHW.shape[3]).clamp(
        min=1
    )
    mean = (values_BKHW * mask).sum(dim=(1, 2, 3), keepdim=True) / num_pixels
    centered = (values_BKHW - mean) * mask
    deviation = ((centered * centered).sum(dim=(1, 2, 3), keepdim=True) / num_pixels).sqrt()
    return centered / deviation.clamp(min=_EPSILON)


def stack_draws(
    draws: Sequence[Draw], *, rows: int, columns: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Convert draws to the arrays that the device takes.

    Args:
        draws: One a slot.
        rows: Of the images, whose pixels are taken for square.
        columns: Likewise.

    Returns:
        ``affine`` ``(B, 2, 3)`` and ``intensity`` ``(B, 3)``, see `ImageParameters`.
    """
    affine = np.zeros((len(draws), 2, 3), np.float32)
    intensity = np.zeros((len(draws), 3), np.float32)
    for slot, draw in enumerate(draws):
        affine[slot] = source_affine(draw, aspect=rows / columns)
        intensity[slot] = draw.gain, draw.offset, draw.gamma
    return affine, intensity


Place: TypeAlias = tuple[int, int, int, int]
"""Where a sample's slices are in a flat array: first pixel, slices, rows, columns."""


def places_of(stacks: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], list[Place]]:
    """Put the slices of all slots one after another.

    Args:
        stacks: The slices of each slot, ``(K, 1, rows, columns)``; K is 0 where there is none.

    Returns:
        The pixels, flat, and where each slot's slices are.
    """
    stops = np.cumsum([stack.size for stack in stacks]).tolist()
    starts = [0, *stops[:-1]]
    shapes = [(len(stack), *stack.shape[-2:]) for stack in stacks]
    places = [(start, *shape) for start, shape in zip(starts, shapes, strict=True)]
    return np.concatenate([stack.reshape(-1) for stack in stacks]), places


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
