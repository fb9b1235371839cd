"""Regions in what a view made of a slice: masks and boxes carried through crop, resize and flip.

Pixel coordinates count edges, as in ``annotations.json``: a crop is a box of the stored slice; it is brought
to a size, and then reversed. Masks take the nearest pixel, at half-pixel centres as images do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.shards.codecs import decode_array
from shardflow.shards.keys import parse_mask_field


def region_masks(
    fields: Mapping[str, bytes], region: Mapping[str, Any], slices: Sequence[int], shape: tuple[int, int]
) -> NDArray[np.uint8]:
    """Decode the masks of a region in chosen slices.

    Args:
        fields: Fields of the sample by name; others than the region's masks are not looked at.
        region: Its entry in ``annotations.json``.
        slices: Indexes of the slices, in any order.
        shape: Rows and columns of the slices.

    Returns:
        ``(len(slices), rows, columns)``; zeros where the region is not.

    Raises:
        FormatError: A mask is of another shape, or cannot be decoded.
    """
    masks = np.zeros((len(slices), *shape), np.uint8)
    if region["mask"] is None:
        return masks
    found = {}
    for name in fields:
        part = parse_mask_field(name)
        if part is not None and (part.series, part.roi) == (region["series"], region["roi"]):
            found[part.index] = (part.codec, name)
    for place, index in enumerate(slices):
        if index in found:
            codec, name = found[index]
            mask = decode_array(codec, fields[name])
            if mask.shape != shape or mask.dtype != np.uint8:
                raise FormatError(
                    f"a mask must be uint8 of the shape {shape}, got {mask.dtype} of {mask.shape} "
                    f"(field {name}); verify the dataset."
                )
            masks[place] = mask
    return masks


def carry_mask(
    mask: NDArray[np.uint8],
    size: tuple[int, int],
    *,
    crop: Sequence[float] | None = None,
    flip_rows: bool = False,
    flip_columns: bool = False,
) -> NDArray[np.uint8]:
    """Carry a mask to where its slice went.

    Args:
        mask: ``(..., rows, columns)`` of the stored slice.
        size: Rows and columns of the result.
        crop: ``x0, y0, x1, y1`` of the stored slice, whole or not; all of it if not given. Outside of the
            slice there is nothing.
        flip_rows: Whether rows are reversed afterwards.
        flip_columns: Whether columns are reversed afterwards.

    Returns:
        ``(..., *size)``.
    """
    rows, columns = mask.shape[-2:]
    x0, y0, x1, y1 = crop or (0, 0, columns, rows)
    at_row, is_row = _sources(size[0], y0, y1, rows, is_flipped=flip_rows)
    at_column, is_column = _sources(size[1], x0, x1, columns, is_flipped=flip_columns)
    carried: NDArray[np.uint8] = mask[..., at_row[:, None], at_column[None, :]]
    return carried * (is_row[:, None] & is_column[None, :])


def carry_box(
    box: Sequence[float],
    shape: tuple[int, int],
    size: tuple[int, int],
    *,
    crop: Sequence[float] | None = None,
    flip_rows: bool = False,
    flip_columns: bool = False,
) -> tuple[float, float, float, float] | None:
    """Carry a box to where its slice went, see `carry_mask`.

    Args:
        box: ``x0, y0, x1, y1`` in the stored slice.
        shape: Rows and columns of the stored slice.
        size: As there; and so the others.
        crop: As there.
        flip_rows: As there.
        flip_columns: As there.

    Returns:
        The part of it that the result shows; None where it shows nothing of it.
    """
    left, top, right, bottom = crop or (0, 0, shape[1], shape[0])
    x0, x1 = _carried(box[0], box[2], left, right, size[1], is_flipped=flip_columns)
    y0, y1 = _carried(box[1], box[3], top, bottom, size[0], is_flipped=flip_rows)
    return (x0, y0, x1, y1) if x1 > x0 and y1 > y0 else None


def _sources(
    length: int, start: float, stop: float, limit: int, *, is_flipped: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Stored pixel under each pixel of the result, and whether there is one."""
    at = np.floor(start + (np.arange(length) + 0.5) * (stop - start) / length).astype(np.int64)
    at = at[::-1] if is_flipped else at
    return np.clip(at, 0, limit - 1), (at >= 0) & (at < limit)


def _carried(
    low: float, high: float, start: float, stop: float, length: int, *, is_flipped: bool
) -> tuple[float, float]:
    scale = length / (stop - start)
    first, last = ((min(max(edge, start), stop) - start) * scale for edge in (low, high))
    return (length - last, length - first) if is_flipped else (first, last)
