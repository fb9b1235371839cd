"""Pages of text among images: dose reports, protocols and screen saves, recognized by their pixels.

A page is mostly of one value, and on it small connected shapes of one height follow each other in lines.
Nothing is read. Pictures with a few lines of text are no pages.
"""

from __future__ import annotations

from typing import Any, Final

import cv2
import numpy as np
from numpy.typing import NDArray

_SIDE: Final = 1024
_MIN_PAPER: Final = 0.6
"""Least share of the most frequent value."""
_NEAR: Final = 10
_INK: Final = 56
"""Differences in 8 bits from that value: of paper at most, of ink at least."""
_LETTER_PX: Final = (4, 40)
_MIN_LINES: Final = 5
_MIN_LETTERS: Final = 60
_PER_LINE: Final = 5


def is_page(pixels: NDArray[Any]) -> bool:
    """Return whether an image is a page of text.

    Args:
        pixels: ``(rows, columns)`` or ``(rows, columns, 3)``, of any dtype.
    """
    gray = _gray(pixels)
    if gray is None:
        return False
    paper = int(np.bincount(gray.ravel(), minlength=256).argmax())
    distance = np.abs(gray.astype(np.int16) - paper)
    if (distance <= _NEAR).mean() < _MIN_PAPER:
        return False
    letters = _letters((distance >= _INK).astype(np.uint8))
    lines = _lines(letters)
    return len(lines) >= _MIN_LINES and sum(lines) >= _MIN_LETTERS


def _gray(pixels: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return an image in 8 bits and at most `_SIDE` pixels; None for one of a single value."""
    plane = pixels.astype(np.float32)
    if plane.ndim == 3:
        plane = plane.mean(axis=2)
    low, high = float(plane.min()), float(plane.max())
    if not high > low:
        return None
    gray = ((plane - low) * (255 / (high - low))).astype(np.uint8)
    scale = _SIDE / max(gray.shape)
    if scale < 1:
        gray = cv2.resize(gray, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return np.asarray(gray, np.uint8)


def _letters(ink: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return what may be letters, ``(n, 4)``: left, top, width, height."""
    count, _, stats, _ = cv2.connectedComponentsWithStats(ink, connectivity=8)
    boxes = np.asarray(stats[1:count], np.int64)
    width, height, area = boxes[:, 2], boxes[:, 3], boxes[:, 4]
    low, high = _LETTER_PX
    is_letter = (height >= low) & (height <= high) & (width <= 2 * height) & (area >= 0.15 * width * height)
    is_letter &= (area >= 5) & (area < 0.95 * width * height + 3)
    letters: NDArray[np.int64] = boxes[is_letter][:, :4]
    return letters


def _lines(letters: NDArray[np.int64]) -> list[int]:
    """Return the numbers of letters of the lines: neighbors on one base line, of like height."""
    found: list[int] = []
    order = np.lexsort((letters[:, 0], letters[:, 1] + letters[:, 3]))
    letters = letters[order]
    bottoms = letters[:, 1] + letters[:, 3]
    taken = np.zeros(len(letters), bool)
    for first in range(len(letters)):
        if taken[first]:
            continue
        height = letters[first, 3]
        stop = np.searchsorted(bottoms, bottoms[first] + max(2, height // 4), side="right")
        row = np.arange(first, stop)
        like = (letters[row, 3] >= 0.6 * height) & (letters[row, 3] <= 1.7 * height) & ~taken[row]
        row = row[like]
        row = row[np.argsort(letters[row, 0], kind="stable")]
        ends = letters[row, 0] + letters[row, 2]
        gaps = letters[row[1:], 0] - ends[:-1]
        for word in np.split(row, np.flatnonzero(gaps > 4 * height) + 1):
            if len(word) >= _PER_LINE:
                taken[word] = True
                found.append(len(word))
    return found
