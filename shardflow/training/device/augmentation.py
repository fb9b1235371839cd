"""From the draws of a micro-batch to the small tensors that its device takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.augmentation import Draw, source_affine

__all__ = ["stack_draws"]


def stack_draws(
    draws: Sequence[Draw], *, rows: int, columns: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Turn draws into what the device takes.

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
