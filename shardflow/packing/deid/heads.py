"""Heads in volumes: found by their surface and bone, whatever a series is called, and freed of the face.

A few slices of a volume, reduced to some 3 mm a pixel, are resampled to axial planes of the patient
(`HeadFinder`). A plane shows a head if its outline is closed by air, as large and as long as a head's, and
convex; in CT also if a closed ring of bone lies right below the skin around brain. Enough such planes on top
of each other that end in a vertex, or in bone, are a head; limbs go on through the volume, bellies are wider
than deep.

The face is cut off below a plane from the brows to the brain stem, in proportions of the head (Quickshear
does so with a brain mask: Schimke and Hale, 2011), with the skin of the brows: in the front half of the head
all of it becomes the darkest value, down to the throat. The brain stays; what is cut is in no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

MODALITIES: Final = frozenset({"CT", "MR", "PT"})
"""Modalities whose volumes may show a face."""
MIN_SLICES: Final = 12
"""Number of slices from which a surface can be rendered."""

_GRID_MM: Final = 4.0
_PIXEL_MM: Final = 2.5
_MAX_PLANES: Final = 320
_MIN_SIDE: Final = 8
_MAX_SIDE: Final = 224
MAX_SAMPLED: Final = 64
"""Slices of a volume that are looked at."""
_SKIN_HU: Final = -300.0
_BONE_HU: Final = 180.0
_BRAIN_HU: Final = (-30.0, 110.0)
_WIDTH_MM: Final = (95.0, 190.0)
_LENGTH_MM: Final = (120.0, 250.0)
_RATIO: Final = (1.04, 1.65)
_MIN_SOLIDITY: Final = 0.88
_MIN_SHARE: Final = 0.8
_MAX_BORDER: Final = 0.12
_MIN_HEIGHT_MM: Final = 40.0
_MIN_RING_MM: Final = 16.0
_FIRST_STEP: Final = 3
"""Every so many planes are looked at first; the others only if one of them may be of a head."""
_SLACK: Final = 0.15
"""Share by which limits are wider for planes beside which a head may be."""
_NUM_RAYS: Final = 72
_ANGLES: Final = np.linspace(0, 2 * math.pi, _NUM_RAYS, endpoint=False)[:, None]
_MAX_SKIN_MM: Final = 24.0
_MIN_RING: Final = 0.8
_MAX_RING: Final = 1.5
"""Width from which an outline is no skull's, as a share of the widest head."""
_SMALL: Final = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (3, 3))
_LARGE: Final = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (9, 9))
_CLOSING: Final = 0.75
"""Share of the largest plane below which the last one shows that a head ends."""
_CAP: Final = 0.35
"""Likewise, below which the vertex can be told."""
_CURVATURE: Final = 0.36
"""Radius of curvature at the vertex as a share of the length of the head."""
_PET_SHARE: Final = 0.035
_BROWS: Final = 0.40
"""Height of the cut at the forehead below the vertex, as all shares of the length of the head."""
_SLOPE: Final = 0.68
_CUT_DEPTH: Final = 0.45
_THROAT: Final = 1.35
_BROW_BAND: Final = (0.26, 0.48)
_BROW_DEPTH: Final = 0.035

_NOTHING: Final = np.float32(-1e9)
"""Value where a plane is not known."""

Plane = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """A head in a volume, in LPS millimeters."""

    vertex_mm: float | None
    """Height of its top; None if the volume ends below it."""
    front_mm: float
    """Foremost skin at the height of the forehead."""
    center_mm: tuple[float, float]
    """From right to left, and from front to back."""
    width_mm: float
    length_mm: float
    """From the forehead to the back of the head."""

    def face_mask(
        self, affine_lps: Sequence[Sequence[float]], index: int, shape: tuple[int, int]
    ) -> NDArray[np.bool_]:
        """Return the pixels of one slice that are cut off, ``(rows, columns)``.

        Args:
            affine_lps: Maps (column, row, slice) to LPS millimeters.
            index: Of the slice.
            shape: Rows and columns.

        Raises:
            ValueError: The vertex is unknown: nobody can say where the brain ends.
        """
        if self.vertex_mm is None:
            raise ValueError("a head without its vertex cannot be freed of its face")
        columns, rows = np.arange(shape[1])[None, :], np.arange(shape[0])[:, None]
        x, y, z = (
            row[0] * columns + row[1] * rows + (row[2] * index + row[3]) for row in np.asarray(affine_lps)[:3]
        )
        length = self.length_mm
        below, behind = (self.vertex_mm - z) / length, (y - self.front_mm) / length
        face = (below >= _BROWS + _SLOPE * behind) & (behind < _CUT_DEPTH) & (below <= _THROAT)
        # The skin of the brows: outside an ellipse that is smaller than the head by the depth of the cut.
        half = np.array([self.width_mm, length]) / 2 - _BROW_DEPTH * length
        outside = ((x - self.center_mm[0]) / half[0]) ** 2 + ((y - self.center_mm[1]) / half[1]) ** 2 > 1
        brows = outside & (below >= _BROW_BAND[0]) & (below <= _BROW_BAND[1]) & (y < self.center_mm[1])
        cut: NDArray[np.bool_] = face | (brows & (behind < _CUT_DEPTH))
        return cut


@dataclass(frozen=True, slots=True)
class _Outline:
    """The largest closed outline of an axial plane."""

    z_mm: float
    center: tuple[float, float]
    width_mm: float
    length_mm: float
    area_mm2: float
    front_mm: float
    may_be_head: bool
    """Whether a head may be near, by wider limits."""
    is_head_like: bool
    has_ring: bool


class _Shape(NamedTuple):
    """Measures of an outline."""

    width_mm: float
    length_mm: float
    ratio: float
    solidity: float
    share: float
    """Of all that is in the plane."""
    border: float
    """Share of the outline where the image ends instead of the body."""

    def is_head(self, slack: float) -> bool:
        """Return whether the measures are a head's, with limits that are wider by a share."""
        less, more = 1 - slack, 1 + slack
        return (
            less * _WIDTH_MM[0] <= self.width_mm <= more * _WIDTH_MM[1]
            and less * _LENGTH_MM[0] <= self.length_mm <= more * _LENGTH_MM[1]
            and less * _RATIO[0] <= self.ratio <= more * _RATIO[1]
            and self.solidity >= less * _MIN_SOLIDITY
            and self.share > less * _MIN_SHARE
            and self.border <= _MAX_BORDER + slack
        )


class HeadFinder:
    """Finds the head in one volume.

    Args:
        affine_lps: Maps (column, row, slice) to LPS millimeters.
        num_slices: Of the volume.
        shape: Rows and columns.
        modality: ``CT``, in HU, or another.
    """

    def __init__(
        self, affine_lps: Sequence[Sequence[float]], num_slices: int, shape: tuple[int, int], modality: str
    ) -> None:
        self._affine = np.array(affine_lps, np.float64)
        self._modality = modality
        rows, columns = shape
        spacing = np.linalg.norm(self._affine[:3, :2], axis=0)
        self._halvings = _halvings(shape, float(spacing.mean()))
        if self._halvings:
            self._size = (columns >> self._halvings, rows >> self._halvings)
        else:
            scale = [
                min(1.0, max(_MIN_SIDE, math.ceil(size * mm / _PIXEL_MM)) / size, _MAX_SIDE / size)
                for size, mm in ((columns, spacing[0]), (rows, spacing[1]))
            ]
            self._size = (max(1, round(columns * scale[0])), max(1, round(rows * scale[1])))
        self._scale = [self._size[0] / columns, self._size[1] / rows]
        # Slices closer than the planes of the grid show nothing more.
        depth = float(np.linalg.norm(self._affine[:3, 2])) * (num_slices - 1)
        count = min(num_slices, MAX_SAMPLED, max(MIN_SLICES, math.ceil(depth / _GRID_MM) + 1))
        self.indices: list[int] = sorted({round(one) for one in np.linspace(0, num_slices - 1, count)})
        """Slices that may be looked at."""
        self._added: dict[int, Plane] = {}

    @cached_property
    def _grid(self) -> _Grid:
        return _Grid.of(self._affine, self._size, self._scale, np.array(self.indices))

    @property
    def first(self) -> frozenset[int]:
        """The slices of `indices` that are looked at in any case; of axial CT about every third."""
        if self._modality != "CT" or len(self.indices) < 2:
            return frozenset(self.indices)
        return frozenset(self.indices[place] for place in self._grid.slices(_FIRST_STEP))

    def add(self, index: int, pixels: NDArray[Any]) -> None:
        """Add a slice of `indices` that `find` need not read, ``(rows, columns)`` in modality units."""
        self._added[index] = self._reduced(pixels)

    def find(self, read: Callable[[int], NDArray[Any] | None]) -> Head | None:
        """Return the head; None if there is none.

        Args:
            read: Returns a slice of `indices` that was not added, ``(rows, columns)`` in modality units, or
                None if it cannot be decoded: the nearest that can stands for it. None is asked for twice;
                without anything like a head, only those of `first` are, and what stands for them.
        """
        outlines = self._outlines(read)
        return _judge(outlines) if outlines else None

    def _reduced(self, pixels: NDArray[Any]) -> Plane:
        # Rounded in between, HU stay what they are; other units may be small numbers.
        is_whole = self._modality == "CT" and pixels.dtype in (np.int16, np.uint16)
        small = pixels if is_whole else pixels.astype(np.float32)
        for _ in range(self._halvings):
            halves = small.shape[1] // 2, small.shape[0] // 2
            small = cv2.resize(small, halves, interpolation=cv2.INTER_AREA)
        small = small.astype(np.float32, copy=False)
        if not self._halvings:
            small = cv2.resize(small, self._size, interpolation=cv2.INTER_AREA)
        return np.nan_to_num(small) if pixels.dtype.kind == "f" else small

    def _outlines(self, read: Callable[[int], NDArray[Any] | None]) -> list[_Outline]:
        def read_reduced(place: int) -> Plane | None:
            index = self.indices[place]
            if index in self._added:
                return self._added[index]
            pixels = read(index)
            return None if pixels is None else self._reduced(pixels)

        if len(self.indices) < 2:
            return []
        volume = _Volume((len(self.indices), self._size[1], self._size[0]), read_reduced)
        grid = self._grid
        is_ct = self._modality == "CT"
        skin = _SKIN_HU if is_ct else _surface_level(volume.whole(), self._modality)
        heights = grid.heights()
        found: dict[int, _Outline | None] = {}
        for step in (_FIRST_STEP, 1):
            for number in range(0, len(heights), step):
                if number not in found:
                    z = float(heights[number])
                    found[number] = _outline(*grid.sample(volume, z), skin, grid, z, is_ct=is_ct)
            if not any(one is not None and one.may_be_head for one in found.values()):
                return []  # no run of planes is a head
        return [one for _, one in sorted(found.items()) if one is not None]


class _Volume:
    """Reduced slices, each read when a plane first needs it.

    The nearest that can be decoded stands for one that cannot: a gap would part a head.

    Args:
        shape: Slices, rows, columns.
        read: Returns one slice; None if it cannot be decoded.
    """

    def __init__(self, shape: tuple[int, int, int], read: Callable[[int], Plane | None]) -> None:
        self._pixels = np.full(shape, _NOTHING, np.float32)
        self._is_known = np.zeros(shape[0], np.bool_)
        self._is_decoded: dict[int, bool] = {}
        self._read = read

    def whole(self) -> NDArray[np.float32]:
        """Return all slices, ``(slices, rows, columns)``; none if no slice can be decoded."""
        self._require(np.arange(len(self._pixels)))
        return self._pixels if any(self._is_decoded.values()) else self._pixels[:0]

    def take(
        self, slices: NDArray[np.intp], rows: NDArray[np.intp], columns: NDArray[np.intp]
    ) -> NDArray[np.float32]:
        """Return the pixels at indices that broadcast to a plane."""
        self._require(slices)
        _, num_rows, num_columns = self._pixels.shape
        return self._pixels.take((slices * num_rows + rows) * num_columns + columns)

    def _require(self, slices: NDArray[np.intp]) -> None:
        for place in np.unique(slices[~self._is_known[slices]]).tolist():
            near = sorted(range(len(self._pixels)), key=lambda other: abs(other - place))
            found = next(filter(self._decodes, near), None)
            if found is not None:
                self._pixels[place] = self._pixels[found]
            self._is_known[place] = True

    def _decodes(self, place: int) -> bool:
        """Read a slice, if that was not tried; return whether it can be decoded."""
        if place not in self._is_decoded:
            pixels = self._read(place)
            self._is_decoded[place] = pixels is not None
            if pixels is not None:
                self._pixels[place] = pixels
        return self._is_decoded[place]


def _halvings(shape: tuple[int, int], spacing_mm: float) -> int:
    """Return how often a slice is halved for pixels of about `_PIXEL_MM`; 0 if that comes out uneven.

    Means of four pixels cost a tenth of what other means do.
    """
    halvings = math.log2(_PIXEL_MM / max(spacing_mm, 1e-3))
    # Finer rather than coarser, for half a head in a small field of view, unless too many pixels remain.
    wanted = max(0, math.floor(halvings))
    if max(shape) >> wanted > _MAX_SIDE:
        wanted = max(0, round(halvings))
    smallest, largest = (side >> wanted for side in (min(shape), max(shape)))
    is_even = not any(side % (1 << wanted) for side in shape)
    return wanted if is_even and smallest >= _MIN_SIDE and largest <= _MAX_SIDE else 0


@dataclass(frozen=True)
class _Grid:
    """Axial planes of a volume on a grid of `_GRID_MM`."""

    inverse: NDArray[np.float64]
    """LPS to (column, row, position among the slices), of the reduced volume."""
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    shape: tuple[int, int, int]

    @classmethod
    def of(
        cls,
        affine: NDArray[np.float64],
        size: tuple[int, int],
        scale: Sequence[float],
        indices: NDArray[np.int64],
    ) -> _Grid:
        # Reduced pixel i covers the pixels around (i + 0.5) / scale - 0.5.
        step = (indices[-1] - indices[0]) / (len(indices) - 1)
        to_full = np.diag([1 / scale[0], 1 / scale[1], step, 1.0])
        to_full[:2, 3] = [0.5 / one - 0.5 for one in scale]
        to_full[2, 3] = indices[0]
        reduced = affine @ to_full
        ends = [size[0] - 1, size[1] - 1, len(indices) - 1]
        corners = np.array([[x, y, z, 1] for x in (0, ends[0]) for y in (0, ends[1]) for z in (0, ends[2])])
        lps = corners @ reduced.T
        low, high = lps[:, :3].min(axis=0), lps[:, :3].max(axis=0)
        inverse = np.asarray(np.linalg.inv(reduced), np.float64)
        return cls(inverse, low, high, (ends[0] + 1, ends[1] + 1, ends[2] + 1))

    def heights(self) -> NDArray[np.float64]:
        """Return the heights of the planes, from below, mm."""
        step = max(_GRID_MM, (self.high[2] - self.low[2]) / _MAX_PLANES)
        return np.arange(self.low[2], self.high[2] + step / 2, step)

    def slices(self, step: int) -> list[int]:
        """Return the places of the slices that every so many planes are made of, ascending."""
        heights = self.heights()[::step, None, None]
        at = self._flat[2] + self.inverse[2, 2] * heights + self.inverse[2, 3]
        places = np.clip(np.rint(at).astype(np.intp), 0, self.shape[2] - 1)
        found: list[int] = np.unique(places).tolist()
        return found

    @cached_property
    def _flat(self) -> list[NDArray[np.float64]]:
        """What the columns and rows of a plane add to each index, at any height; they broadcast to a plane.

        Along the axes of most volumes an index depends on the column or on the row alone.
        """
        x = np.arange(self.low[0], self.high[0] + _GRID_MM / 2, _GRID_MM)
        y = np.arange(self.low[1], self.high[1] + _GRID_MM / 2, _GRID_MM)
        return [
            (row[0] * x[None, :] if row[0] else np.zeros((1, 1)))
            + (row[1] * y[:, None] if row[1] else np.zeros((1, 1)))
            for row in self.inverse[:3]
        ]

    def sample(self, volume: _Volume, z: float) -> tuple[Plane, NDArray[np.uint8]]:
        """Return one axial plane, rows from front to back, and where it is known."""
        m, known, at = self.inverse, np.ones((1, 1), bool), []
        for k, size in enumerate(self.shape):
            one = np.rint(self._flat[k] + m[k, 2] * z + m[k, 3]).astype(np.intp)
            known = known & (one >= 0) & (one < size)
            at.append(np.minimum(np.maximum(one, 0), size - 1))
        plane = volume.take(at[2], at[1], at[0])
        shape = np.broadcast_shapes(*(one.shape for one in self._flat))
        plane, known = np.broadcast_to(plane, shape), np.broadcast_to(known, shape)
        if not known.all():
            plane = np.where(known, plane, _NOTHING)
        return plane, known.astype(np.uint8)


def _surface_level(volume: NDArray[np.float32], modality: str) -> float:
    """Return the level between air and tissue of a volume that is not CT."""
    if not volume.size:
        return 0.0
    top, bottom = map(float, np.percentile(volume, (99.5, 0.5)))
    if modality == "PT":  # skin takes up a twentieth of what the brain does
        return bottom + _PET_SHARE * (top - bottom)
    scaled = np.clip((volume - bottom) / max(top - bottom, 1e-6), 0, 1)
    eighth = np.sqrt(scaled) * 255
    level, _ = cv2.threshold(eighth.astype(np.uint8).reshape(1, -1), 0, 255, cv2.THRESH_OTSU)
    share = float(min((level / 255) ** 2, 0.15))
    return bottom + max(share, 0.04) * (top - bottom)


def _outline(
    plane: Plane, known: NDArray[np.uint8], skin: float, grid: _Grid, z: float, *, is_ct: bool
) -> _Outline | None:
    mask = ((plane > skin) & (known > 0)).astype(np.uint8)
    mask = cv2.morphologyEx(mask, cv2.MORPH_CLOSE, _SMALL, iterations=2)
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    if not contours:
        return None
    filled = np.zeros_like(mask)
    cv2.drawContours(filled, contours, -1, 1, cv2.FILLED)
    # Thin things, such as a head rest, come off.
    filled = cv2.morphologyEx(filled, cv2.MORPH_OPEN, _LARGE)
    contours, _ = cv2.findContours(filled, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    if not contours:
        return None
    contour = max(contours, key=cv2.contourArea)
    area = float(cv2.contourArea(contour)) * _GRID_MM**2
    if area < 1500.0:
        return None
    total = sum(float(cv2.contourArea(one)) for one in contours) * _GRID_MM**2
    hull = float(cv2.contourArea(cv2.convexHull(contour))) * _GRID_MM**2
    points = contour[:, 0, :].astype(np.float64)
    width, length, is_long = _extents(points)
    # The share of the outline where the image ends instead of the body.
    padded = cv2.erode(known, np.ones((3, 3), np.uint8), borderType=cv2.BORDER_CONSTANT, borderValue=0)
    at = contour[:, 0, :]
    border = float((padded[at[:, 1], at[:, 0]] == 0).mean())
    shape = _Shape(width, length, length / max(width, 1.0), area / max(hull, 1.0), area / total, border)
    is_head_like = is_long and shape.is_head(0.0)
    is_small = width <= _MAX_RING * _WIDTH_MM[1]
    has_ring = is_ct and is_small and border <= 0.5 and _has_ring(plane, contour)
    rows, columns = points[:, 1], points[:, 0]
    center = (
        float(grid.low[0] + _GRID_MM * (columns.min() + columns.max()) / 2),
        float(grid.low[1] + _GRID_MM * (rows.min() + rows.max()) / 2),
    )
    return _Outline(
        z_mm=float(z),
        center=center,
        width_mm=width,
        length_mm=length,
        area_mm2=area,
        front_mm=float(grid.low[1] + _GRID_MM * rows.min()),
        may_be_head=has_ring or shape.is_head(_SLACK),
        is_head_like=is_head_like,
        has_ring=has_ring,
    )


def _extents(points: NDArray[np.float64]) -> tuple[float, float, bool]:
    """Return width and length of an outline, mm, and whether it is longest from front to back.

    A head may be turned by some degrees: the extents are those of the smallest rectangle around it.
    """
    (_, (first, second), angle) = cv2.minAreaRect(points.astype(np.float32))
    first, second = (first + 1) * _GRID_MM, (second + 1) * _GRID_MM
    # `angle` turns the first extent away from the columns' axis.
    turned = abs(math.sin(math.radians(angle)))
    if second >= first:
        is_long = turned <= math.sin(math.radians(50))
        return first, second, is_long
    return second, first, turned >= math.cos(math.radians(50))


def _has_ring(plane: Plane, contour: NDArray[np.int32]) -> bool:
    """Return whether bone lies right below the skin nearly all around soft tissue."""
    blob = np.zeros(plane.shape, np.uint8)
    cv2.drawContours(blob, [contour], -1, 1, cv2.FILLED)
    if np.count_nonzero((plane > _BONE_HU) & (blob > 0)) < _MIN_RING * _NUM_RAYS / 8:
        return False  # a pixel of the grid is on few rays, near the skin of a head
    moments = cv2.moments(blob, binaryImage=True)
    center = moments["m01"] / moments["m00"], moments["m10"] / moments["m00"]
    farthest = float(np.hypot(contour[:, 0, 1] - center[0], contour[:, 0, 0] - center[1]).max())
    reach = np.arange(0, farthest + 1, 0.5)
    at_rows = np.rint(center[0] + np.sin(_ANGLES) * reach).astype(np.intp)
    at_columns = np.rint(center[1] + np.cos(_ANGLES) * reach).astype(np.intp)
    height, width = plane.shape
    valid = (at_rows >= 0) & (at_rows < height) & (at_columns >= 0) & (at_columns < width)
    places = at_rows * width + at_columns
    places[~valid] = 0
    inside = blob.take(places).view(bool) & valid
    values = plane.take(places)
    bone = inside & (values > _BONE_HU)
    last_inside = np.where(inside.any(1), inside.shape[1] - 1 - inside[:, ::-1].argmax(1), 0)
    last_bone = np.where(bone.any(1), bone.shape[1] - 1 - bone[:, ::-1].argmax(1), -1000)
    is_near = (last_inside - last_bone) * 0.5 * _GRID_MM <= _MAX_SKIN_MM
    if is_near.mean() < _MIN_RING:
        return False
    inner = reach[None, :] < (last_bone[:, None] * 0.5 - 4.0)
    values = values[inner & inside]
    if values.size < 200:
        return False
    is_brain = (values >= _BRAIN_HU[0]) & (values <= _BRAIN_HU[1])
    radius = np.median(last_bone[is_near]) * 0.5 * _GRID_MM
    return bool(is_brain.mean() >= 0.6 and radius >= 40.0)


def _judge(outlines: Sequence[_Outline]) -> Head | None:
    """Find a run of planes that is a head, from the top."""
    spacing = _GRID_MM if len(outlines) < 2 else outlines[1].z_mm - outlines[0].z_mm
    runs: list[list[_Outline]] = [[]]
    last = None
    for one in outlines:
        is_next = last is not None and one.z_mm - last.z_mm <= 3.1 * spacing
        if one.is_head_like or one.has_ring:
            if not is_next and runs[-1]:
                runs.append([])
            runs[-1].append(one)
            last = one
    for run in reversed(runs):
        head = _of_run(run, outlines, spacing) if run else None
        if head is not None:
            return head
    return None


def _of_run(run: Sequence[_Outline], outlines: Sequence[_Outline], spacing: float) -> Head | None:
    height = len(run) * spacing
    ring = sum(one.has_ring for one in run) * spacing
    largest = max(run, key=lambda one: one.length_mm if one.is_head_like or one.has_ring else 0.0)
    above = [one for one in outlines if one.z_mm > run[-1].z_mm - spacing / 2]
    # The vertex: planes get smaller and then end, within the volume.
    end = [one for one in above if _near(one, largest)]
    closes = bool(end) and end[-1].area_mm2 < _CLOSING * largest.area_mm2
    vertex = None
    if end and end[-1].area_mm2 < _CAP * largest.area_mm2:
        # The cap above the last plane, of a sphere with the curvature of a skull.
        vertex = end[-1].z_mm + end[-1].area_mm2 / math.pi / (2 * _CURVATURE * largest.length_mm)
    is_bone = ring >= _MIN_RING_MM
    is_shape = height >= _MIN_HEIGHT_MM and (closes or _is_slab(run))
    if not (is_bone or is_shape):
        return None
    crown = vertex if vertex is not None else run[-1].z_mm
    forehead = [one for one in run if one.z_mm >= crown - 0.5 * largest.length_mm] or list(run)
    best = max(forehead, key=lambda one: one.length_mm)
    return Head(
        vertex_mm=vertex,
        front_mm=best.front_mm,
        center_mm=best.center,
        width_mm=best.width_mm,
        length_mm=best.length_mm,
    )


def _near(one: _Outline, other: _Outline) -> bool:
    return math.dist(one.center, other.center) < 60.0


def _is_slab(run: Sequence[_Outline]) -> bool:
    """Return whether a run without a vertex is long and narrow as only heads are."""
    ratios = [one.length_mm / one.width_mm for one in run]
    return bool(np.median(ratios) >= 1.12 and np.median([one.length_mm for one in run]) >= 150.0)
