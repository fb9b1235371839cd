"""Targets of annotations: the stored series of one study with their planes in space, and limits on input.

Limits are counts, never times, so the same file has the same outcome on every machine.

Pixel coordinates are those of the stored slice, ``(x, y)`` = (along the columns, along the rows), and count
*edges*: the pixel of column c and row r covers ``[c, c + 1) x [r, r + 1)``, its center is
``(c + 0.5, r + 0.5)``. That is DICOM's own convention for image coordinates (PS3.3, C.10.5.1.2 and
C.18.6.1.1). Affines map pixel *centers*, as those of ``study.json`` do: column c there is ``x = c + 0.5``
here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.format.reasons import Reason, source_error


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotationLimits:
    """Limits on the annotations of one file; above them its outcome is LIMIT_EXCEEDED."""

    max_file_bytes: int = 1 << 28
    """Bytes of a file that is parsed whole: structure sets, reports, tables; of a segmentation before its
    pixels."""
    max_inflated_bytes: int = 1 << 29
    """Bytes that a deflated file inflates to."""
    max_frames: int = 1 << 16
    """Frames of one segmentation."""
    max_frame_pixels: int = 1 << 26
    """Rows times columns of one frame."""
    max_voxels: int = 1 << 30
    """Voxels of a mask volume, of which each takes one or two bytes in memory."""
    max_rois: int = 4096
    """Regions of one file, per series in which they lie."""
    max_slices: int = 1 << 17
    """Slices of all regions of one file, added up: each may become a field."""
    max_points: int = 1 << 22
    """Points of all outlines of one file."""
    max_items: int = 1 << 18
    """Items of a tree or rows of a table."""
    max_depth: int = 64
    """Levels of a tree."""

    def check_file(self, path: Path) -> None:
        """Refuse a file that is too large to be parsed whole.

        Raises:
            SourceError: LIMIT_EXCEEDED.
            OSError: The file cannot be read.
        """
        num_bytes = path.stat().st_size
        if num_bytes > self.max_file_bytes:
            raise source_error(
                Reason.LIMIT_EXCEEDED, f"{num_bytes} bytes, at most {self.max_file_bytes} allowed"
            )


Floats: TypeAlias = NDArray[np.float64]
Affine: TypeAlias = Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """One plane of pixels in space; all vectors are ``(3,)``, LPS, mm."""

    origin: Floats
    """Center of the pixel of row 0 and column 0."""
    per_column: Floats
    """From one column to the next."""
    per_row: Floats
    """From one row to the next."""

    @property
    def normal(self) -> Floats:
        """Unit normal: row direction x column direction."""
        cross = np.cross(self.per_column, self.per_row)
        return np.asarray(cross / np.linalg.norm(cross), np.float64)

    @property
    def spacing_mm(self) -> tuple[float, float]:
        """Between rows, between columns."""
        return float(np.linalg.norm(self.per_row)), float(np.linalg.norm(self.per_column))

    def to_pixels(self, points_mm: Floats) -> tuple[Floats, Floats]:
        """Find points in the plane.

        Args:
            points_mm: ``(n, 3)``.

        Returns:
            ``(n, 2)`` pixel coordinates ``(x, y)`` of the feet of the points, and ``(n,)`` their signed
            distances from the plane, mm.
        """
        basis = np.stack([self.per_column, self.per_row, self.normal], axis=1)
        found: Floats = np.asarray(np.linalg.solve(basis, (points_mm - self.origin).T).T, np.float64)
        return found[:, :2] + 0.5, found[:, 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One stored series."""

    number: int
    """Of the series in its sample."""
    rows: int
    columns: int
    instances: Sequence[tuple[str, int]]
    """SOP Instance UID and frame, from 1, that each slice came from, in the order of the slices."""
    series_uid: str = ""
    frame_of_reference_uid: str = ""
    affine_lps: Affine | None = None
    """As in ``study.json``."""
    slice_offsets_mm: Sequence[float] | None = None
    """As in ``study.json``."""
    pixel_spacing_mm: Sequence[float] | None = None
    slice_spacing_mm: float | None = None
    codec: str = "b2nd"
    """Of the slices; masks are stored with it where it can hold them."""

    @property
    def num_slices(self) -> int:
        """Slices of the series."""
        return len(self.instances)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a slice."""
        return self.rows, self.columns

    @property
    def grid(self) -> tuple[int, int, int]:
        """Columns, rows and slices."""
        return self.columns, self.rows, self.num_slices

    @property
    def pixel_mm(self) -> tuple[float, float] | None:
        """Millimeters between rows and between columns; None if unknown."""
        if self.pixel_spacing_mm is not None:
            between_rows, between_columns = self.pixel_spacing_mm
            return float(between_rows), float(between_columns)
        return None if self.affine_lps is None else self.plane(0).spacing_mm

    @property
    def thickness_mm(self) -> float:
        """Thickness of one slice, half to each side; 1 mm where it is not stated."""
        if self.slice_spacing_mm:
            return float(self.slice_spacing_mm)
        return float(np.linalg.norm(self._affine()[:3, 2])) if self.affine_lps is not None else 1.0

    def plane(self, index: int) -> Plane:
        """Place a slice in space.

        Raises:
            ValueError: The series has no affine.
        """
        affine = self._affine()
        per_column, per_row, step, origin = affine[:3, 0], affine[:3, 1], affine[:3, 2], affine[:3, 3]
        first = Plane(origin=origin, per_column=per_column, per_row=per_row)
        steps = float(index)
        if self.slice_offsets_mm is not None:
            steps = float(self.slice_offsets_mm[index]) / float(step @ first.normal)
        return Plane(origin=origin + steps * step, per_column=per_column, per_row=per_row)

    def distances_mm(self) -> Floats:
        """Return the distance of each slice from the first along the normal, ``(num_slices,)``, ascending.

        Raises:
            ValueError: The series has no affine.
        """
        if self.slice_offsets_mm is not None:
            return np.asarray(self.slice_offsets_mm, np.float64)
        step = float(self._affine()[:3, 2] @ self.plane(0).normal)
        return np.arange(self.num_slices, dtype=np.float64) * step

    def slice_at(self, distance_mm: float) -> int | None:
        """Find the slice that a place along the normal belongs to.

        Args:
            distance_mm: From the first slice.

        Returns:
            The nearest slice, None where it is more than half a slice away.
        """
        gaps = np.abs(self.distances_mm() - distance_mm)
        nearest = int(np.argmin(gaps))
        return nearest if gaps[nearest] <= self.thickness_mm / 2 * (1 + 1e-6) else None

    def _affine(self) -> Floats:
        if self.affine_lps is None:
            raise ValueError("a series without an affine has no place in space")
        return np.asarray(self.affine_lps, np.float64)


class Targets:
    """The stored series of a study, found by what annotations refer to."""

    def __init__(self, series: Sequence[Target]) -> None:
        self._series = tuple(series)
        self._by_instance: dict[str, list[tuple[Target, int, int]]] = defaultdict(list)
        for target in self._series:
            for index, (uid, frame) in enumerate(target.instances):
                self._by_instance[uid].append((target, index, frame))

    def __iter__(self) -> Iterator[Target]:
        return iter(self._series)

    def find(self, sop_uid: str, frames: Sequence[int] = ()) -> list[tuple[Target, int]]:
        """Find the slices that came from an instance.

        Args:
            sop_uid: SOP Instance UID.
            frames: From 1; none means all.
        """
        found = self._by_instance.get(sop_uid, [])
        return [(target, index) for target, index, frame in found if not frames or frame in frames]

    def find_all(self, references: Iterable[tuple[str, Sequence[int]]]) -> list[tuple[Target, int]]:
        """Find the slices that came from several instances, each with its frames."""
        return [place for sop_uid, frames in references for place in self.find(sop_uid, frames)]

    def of_series(self, series_uids: set[str]) -> list[Target]:
        """Return the series that came from one of several source series."""
        return [target for target in self._series if target.series_uid in series_uids]

    def of_frame(self, frame_of_reference_uid: str) -> list[Target]:
        """Return the series with an affine that share a frame of reference; none for an empty one."""
        return [
            target
            for target in self._series
            if frame_of_reference_uid
            and target.frame_of_reference_uid == frame_of_reference_uid
            and target.affine_lps is not None
        ]
