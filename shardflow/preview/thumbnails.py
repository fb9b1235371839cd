"""A slice as a small JPEG: for the page, and as a field of a dataset (docs/adr/0076).

The encoder's parameters are all given: the same slice and version of OpenCV give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.preview.planes import Window, to_grey, to_size

__all__ = ["Picture", "encode_thumbnail"]

_PARAMETERS: Final = (
    *(cv2.IMWRITE_JPEG_QUALITY, 85),
    *(cv2.IMWRITE_JPEG_PROGRESSIVE, 0),
    *(cv2.IMWRITE_JPEG_OPTIMIZE, 0),
    *(cv2.IMWRITE_JPEG_RST_INTERVAL, 0),
    *(cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444),
)
# Pixels of one side may be so much longer than those of the other.
_MOST_STRETCH: Final = 50.0
_LEAST_SIDE: Final = 8


class Picture(NamedTuple):
    """An encoded picture and its size in pixels, which are squares."""

    jpeg: bytes
    width: int
    height: int


def encode_thumbnail(
    pixels: NDArray[Any],
    spacing_mm: Sequence[float] | None,
    display_range: Sequence[float] | None,
    *,
    max_side: int,
    may_grow: bool = False,
) -> Picture:
    """Show a slice as it lies in the body: in its display range, with square pixels.

    Args:
        pixels: ``(rows, columns)`` of any number type, or ``(rows, columns, 1 or 3)``, RGB of 8 bits.
        spacing_mm: Between rows and between columns; None or absurd ones are taken for equal.
        display_range: What is black and white; None takes the slice's extremes.
        max_side: Longer side in pixels, at most.
        may_grow: Whether a smaller slice is enlarged to it.

    Raises:
        FormatError: It is no picture.
    """
    pixels = pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    between_rows, between_columns = spacing_mm or (1.0, 1.0)
    if not 1 / _MOST_STRETCH < between_rows / between_columns < _MOST_STRETCH:
        between_rows = between_columns = 1.0
    finest = min(between_rows, between_columns)
    height, width = pixels.shape[0] * between_rows / finest, pixels.shape[1] * between_columns / finest
    scale = max_side / max(height, width)
    scale = scale if may_grow else min(scale, 1.0)
    height, width = (max(round(side * scale), min(_LEAST_SIDE, max_side)) for side in (height, width))
    window = Window(float(display_range[0]), float(display_range[1])) if display_range else None
    grey = to_size(to_grey(pixels, window), height, width)
    # OpenCV writes colours as blue, green, red.
    plain = np.ascontiguousarray(grey[..., ::-1] if grey.ndim == 3 else grey)
    ok, encoded = cv2.imencode(".jpg", plain, _PARAMETERS)
    if not ok:
        raise FormatError("a slice must be a picture of one or three samples a pixel, got another.")
    return Picture(encoded.tobytes(), width, height)
