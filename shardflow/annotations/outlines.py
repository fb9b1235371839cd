"""Outlines in the pixels of a slice: filled, clipped, measured.

An outline is an ``(n, 2)`` array of ``(x, y)`` pixel coordinates, see `shardflow.annotations.targets`. A
pixel belongs to a closed outline where its centre lies inside by the even-odd rule, over all outlines of the
region at once: a ring inside a ring is a hole, and a keyhole works as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.annotations.targets import Floats

__all__ = [
    "Bits",
    "clip_outline",
    "ellipse_outline",
    "fill_outlines",
    "largest_extent",
    "outline_box",
    "unite_outlines",
]

Bits: TypeAlias = NDArray[np.uint8]

_ELLIPSE_POINTS = 72
_MAX_CROSSINGS = 1 << 21
"""Edge and row pairs that are looked at together: bounds the memory of an outline with long edges."""


def fill_outlines(outlines: Sequence[Floats], rows: int, columns: int) -> Bits:
    """Fill closed outlines by the even-odd rule.

    Args:
        outlines: Each closed by itself: the last point is joined to the first.
        rows: Of the slice.
        columns: Of the slice.

    Returns:
        ``(rows, columns)`` of 0 and 1. What lies outside of the slice is not there.
    """
    starts = [outline for outline in outlines if len(outline) >= 3]
    turns = np.zeros((rows, columns + 1), np.int32)
    if starts:
        a = np.concatenate(starts)
        b = np.concatenate([np.roll(outline, -1, axis=0) for outline in starts])
        _count_turns(a, b, turns)
    filled: Bits = (np.cumsum(turns[:, :columns], axis=1, dtype=np.int32) & 1).astype(np.uint8)
    return filled


def unite_outlines(
    outlines: Sequence[Floats], rows: int, columns: int, *, is_border_outside: bool = False
) -> Bits:
    """Fill closed outlines each by itself; a pixel in any of them is set.

    Args:
        outlines: As for `fill_outlines`.
        rows: Of the slice.
        columns: Of the slice.
        is_border_outside: Whether pixels whose centres lie on an outline are outside of it. Else those of
            its upper and left borders are inside, as for `fill_outlines`.
    """
    united: Bits = np.zeros((rows, columns), np.uint8)
    for outline in outlines:
        filled = fill_outlines([outline], rows, columns)
        if is_border_outside:
            # From the other corner, lower and right borders are inside instead; corners may be both times.
            filled &= fill_outlines([np.array([columns, rows]) - outline], rows, columns)[::-1, ::-1]
            column, row = np.floor(outline).astype(np.int64).T
            is_inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
            filled[row[is_inside], column[is_inside]] = 0
        united |= filled
    return united


def _count_turns(a: Floats, b: Floats, turns: NDArray[np.int32]) -> None:
    """Count, for each row of pixel centres, the edges that begin left of each centre."""
    rows, columns = turns.shape[0], turns.shape[1] - 1
    upper = np.where((a[:, 1] <= b[:, 1])[:, None], a, b)
    lower = np.where((a[:, 1] <= b[:, 1])[:, None], b, a)
    # Centres with upper y <= centre < lower y: a vertex on a row of centres counts once.
    first = np.clip(np.ceil(upper[:, 1] - 0.5), 0, rows).astype(np.int64)
    stop = np.clip(np.ceil(lower[:, 1] - 0.5), 0, rows).astype(np.int64)
    spans = stop - first
    crossed = np.flatnonzero(spans > 0)
    batches = np.cumsum(spans[crossed]) // _MAX_CROSSINGS
    for part in np.split(crossed, np.flatnonzero(np.diff(batches)) + 1):
        counts = spans[part]
        edge = np.repeat(part, counts)
        row = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
        share = (row + 0.5 - upper[edge, 1]) / (lower[edge, 1] - upper[edge, 1])
        x = upper[edge, 0] + share * (lower[edge, 0] - upper[edge, 0])
        column = np.clip(np.ceil(x - 0.5), 0, columns).astype(np.int64)
        np.add.at(turns, (row, column), 1)


def clip_outline(outline: Floats, rows: int, columns: int) -> Floats:
    """Cut a closed outline at the edges of the slice.

    Returns:
        The outline of the part inside, which may run along the edges; ``(0, 2)`` where there is none. Of an
        outline that lies inside, the outline itself.

    Source: Sutherland and Hodgman, Reentrant polygon clipping, CACM 17 (1974).
    """
    inside = (outline >= 0).all() and (outline[:, 0] <= columns).all() and (outline[:, 1] <= rows).all()
    if inside:
        return outline
    for axis, bound, sign in ((0, 0, 1), (0, columns, -1), (1, 0, 1), (1, rows, -1)):
        if not len(outline):
            break
        depth = sign * (outline[:, axis] - bound)
        following, depth_after = np.roll(outline, -1, axis=0), np.roll(depth, -1)
        crosses = (depth >= 0) != (depth_after >= 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(crosses, depth / (depth - depth_after), 0.0)[:, None]
        cuts = outline + share * (following - outline)
        pairs = np.stack([outline, cuts], axis=1).reshape(-1, 2)
        outline = pairs[np.stack([depth >= 0, crosses], axis=1).reshape(-1)]
    return outline


def ellipse_outline(centre: Floats, first: Floats, second: Floats) -> Floats:
    """Make an outline of an ellipse.

    Args:
        centre: ``(d,)``.
        first: From the centre to the end of one axis, ``(d,)``.
        second: To the end of the other.

    Returns:
        ``(n, d)`` points on the ellipse.
    """
    angle = np.linspace(0, 2 * np.pi, _ELLIPSE_POINTS, endpoint=False)[:, None]
    return np.asarray(centre + np.cos(angle) * first + np.sin(angle) * second, np.float64)


def outline_box(points: Floats) -> tuple[float, float, float, float]:
    """Smallest box around points: x0, y0, x1, y1."""
    (x0, y0), (x1, y1) = points.min(axis=0), points.max(axis=0)
    return float(x0), float(y0), float(x1), float(y1)


def largest_extent(points: Floats) -> float:
    """Largest distance between two of ``(n, 2)`` points, in their unit; 0 for fewer than two."""
    if len(points) < 2:
        return 0.0
    hull = _hull(points)
    gaps = hull[:, None, :] - hull[None, :, :]
    return float(np.sqrt((gaps**2).sum(axis=2).max()))


def _hull(points: Floats) -> Floats:
    """Corners of the convex hull (Andrew's monotone chain), thinned where an outline has very many."""
    ordered = np.unique(points, axis=0).tolist()
    if len(ordered) < 3:
        return np.asarray(ordered, np.float64)
    chain: list[list[float]] = []
    for half in (ordered, ordered[::-1]):
        start = len(chain)
        for point in half:
            while len(chain) - start >= 2 and _turn(chain[-2], chain[-1], point) <= 0:
                chain.pop()
            chain.append(point)
        chain.pop()
    return np.asarray(chain[:: max(1, len(chain) // 2048)], np.float64)


def _turn(a: list[float], b: list[float], c: list[float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
