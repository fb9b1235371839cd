"""Sliding windows over a volume: where they begin, how many there are, and how much each voxel of one counts.

Grids and weights are those of MONAI's ``dense_patch_slices`` and ``compute_importance_map``, so that a model
is evaluated as it would be there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.field import check_choice
from shardflow.fields.volumes.geometry import Shape, Vector, is_perpendicular
from shardflow.fields.volumes.stored import StoredVolume, VolumeTable

Mode: TypeAlias = Literal["gaussian", "constant"]
_LEAST_WEIGHT: Final = 1e-3
MAX_COVERS: Final = 2**10
"""Most windows that a voxel may be in."""


def checked_overlap(value: Any) -> Vector:
    """Return the part of a window that the next one covers again, along each axis.

    Raises:
        ConfigError: It is none.
    """
    sides = (
        [value] * 3
        if isinstance(value, int | float)
        else list(value)
        if isinstance(value, tuple | list)
        else []
    )
    if len(sides) != 3 or not all(
        isinstance(side, int | float) and not isinstance(side, bool) and 0 <= side < 1 for side in sides
    ):
        raise ConfigError(
            "overlap is a number from 0 and below 1, or one for each of D, H and W, such as 0.5, got "
            f"{value!r}."
        )
    return float(sides[0]), float(sides[1]), float(sides[2])


def check_covers(size: Shape, overlap: Vector) -> None:
    """Refuse an overlap with which a voxel is in too many windows.

    Raises:
        ConfigError: It is such.
    """
    covers = math.prod(-(-side // step_of(side, part)) for side, part in zip(size, overlap, strict=True))
    if covers > MAX_COVERS:
        raise ConfigError(
            f"With overlap={overlap} a voxel is in up to {covers:,} windows, and {MAX_COVERS:,} are allowed; "
            "write a smaller one, such as 0.5."
        )


def step_of(side: int, overlap: float) -> int:
    """Return how far a window begins after the one before it."""
    return max(int(side * (1 - overlap)), 1)  # as MONAI rounds it


def scan_starts(lengths: Shape, size: Shape, overlap: Vector) -> tuple[list[int], list[int], list[int]]:
    """Return where windows begin along each axis, ascending.

    The last one ends where the volume does. A volume that is shorter than a window has one, which begins half
    of what is missing before it (rounded down), as MONAI pads.

    Args:
        lengths: Voxels of the volume along each axis.
        size: Voxels of a window.
        overlap: Part of a window that the next one covers again.
    """
    found = []
    for length, side, part in zip(lengths, size, overlap, strict=True):
        room = max(length - side, 0)
        interval = step_of(side, part)
        before = max(side - length, 0) // 2
        found.append([min(at * interval, room) - before for at in range(1 + -(-room // interval))])
    return found[0], found[1], found[2]


def window_start(lengths: Shape, size: Shape, overlap: Vector, number: int) -> Shape:
    """Return where a window begins, numbered with the last axis running fastest."""
    depths, rows, columns = scan_starts(lengths, size, overlap)
    rest, column = divmod(number, len(columns))
    depth, row = divmod(rest, len(rows))
    return depths[depth], rows[row], columns[column]


def num_windows(lengths: Shape, size: Shape, overlap: Vector) -> int:
    """Return the number of windows of a volume."""
    return math.prod(len(starts) for starts in scan_starts(lengths, size, overlap))


def count_windows(
    table: VolumeTable,
    studies: NDArray[np.int64],
    series: NDArray[np.int64],
    shape_of: Callable[[StoredVolume], Shape],
    size: Shape,
    overlap: Vector,
) -> NDArray[np.int64]:
    """Return the number of windows of volumes, from tables alone.

    Volumes of equal shape and axes are counted once: unless axes are tilted, their place in the room does not
    decide how many voxels a grid has.

    Args:
        table: The volumes.
        studies: ``(n,)`` row of each volume's study.
        series: ``(n,)`` number of its series in the study.
        shape_of: Returns the voxels of the grid that windows are cut from.
        size: Voxels of a window.
        overlap: Part of a window that the next one covers again.
    """
    found = np.zeros(len(studies), np.int64)
    if not len(studies):
        return found
    geometry = table.geometry(studies, series)
    keys = np.ascontiguousarray(geometry).view(
        np.dtype((np.void, geometry.dtype.itemsize * geometry.shape[1]))
    )
    _, first, of = np.unique(keys[:, 0], return_index=True, return_inverse=True)
    counts = np.zeros(len(first), np.int64)
    is_tilted = np.zeros(len(first), bool)
    for place, at in enumerate(first.tolist()):
        stored = table.volume(int(studies[at]), int(series[at]))
        counts[place] = num_windows(shape_of(stored), size, overlap)
        is_tilted[place] = stored.affine is not None and not is_perpendicular(stored.affine.columns)
    found[:] = counts[of]
    for at in np.flatnonzero(is_tilted[of]).tolist():
        found[at] = num_windows(shape_of(table.volume(int(studies[at]), int(series[at]))), size, overlap)
    return found


def importance_map(
    size: Sequence[int], mode: Mode = "gaussian", sigma_scale: float = 0.125
) -> NDArray[np.float32]:
    """Return the weight of each voxel of a window, above 0 and up to 1.

    Args:
        size: Voxels of a window.
        mode: ``gaussian`` falls from the middle to the sides; ``constant`` is 1 everywhere.
        sigma_scale: Standard deviation along each axis, in sides of the window.

    Raises:
        ConfigError: A setting is out of range.

    Source:
        ``compute_importance_map`` of MONAI 1.6.
    """
    check_choice("mode", mode, ("gaussian", "constant"))
    scale: object = sigma_scale
    if not isinstance(scale, int | float) or scale is True or not 0 < scale < math.inf:
        raise ConfigError(f"sigma_scale is a number above 0, such as 0.125, got {sigma_scale!r}.")
    found = np.ones(tuple(size), np.float32)
    for axis, side in enumerate(size if mode == "gaussian" else ()):
        places = np.arange(side, dtype=np.float32) - np.float32((side - 1) / 2)
        along = np.exp(places**2 / np.float32(-2 * (sigma_scale * side) ** 2))
        found *= along.reshape([-1 if one == axis else 1 for one in range(len(size))])
    return np.maximum(found, max(float(found.min()), _LEAST_WEIGHT), out=found)
