"""Augmentation of images: what a modality allows, keyed draws, and NumPy operators that apply them.

A body is not a photograph: a mirrored chest is another patient (the heart is on the right), a mirrored report
is wrong ("left effusion"), and the intensities of CT and PET are measurements. One table of allowances serves
packing, which stores variants, and training, which draws for the device. Every number follows from a seed and
a place: online the plan's own place of the sample (epoch, step, micro-batch, slot), offline its key and the
number of the variant. So a sample is turned alike on any number of ranks or processes and after any resume.

`Warp` gives the same bytes on every machine, with the mathematics of the device's operators
(`shardflow.training.device.images`): positions are rounded to 1/128 of a pixel, weights are integers, and
integers of up to 16 bits are summed exactly and rounded once, half up, so that no vector code of a library
decides a bit. Bending moves control points of uniform cubic B-splines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.seeds import derive

# Words that a mirrored image would make wrong, and the usual short forms of lobes and sides.
_SIDE = re.compile(
    r"\b(left|right|leftward|rightward|lt|rt|bilateral|bilaterally|unilateral|contralateral|ipsilateral"
    r"|dextro\w*|levo\w*|situs|[rl][uml]l|rml|lingula)\b",
    re.IGNORECASE | re.ASCII,
)
_WORD = 2.0**64
# A key that is kept in JSON, whose numbers are doubles to many readers.
_KEY_BITS = 53
_FRACTION_BITS: Final = 7
_ONE: Final = 1 << _FRACTION_BITS
# Bands bound the memory of radiographs; the places of smaller images are kept for the next slice.
_BAND_PIXELS: Final = 1 << 18
_KEPT_PIXELS: Final = 1 << 20
_NUM_CELLS: Final = 4
"""Of the elastic grid along each side. Control points move by 0.05 of a side at most, which is 0.2 of a cell:
below 0.48 no point of a plane is reached twice (Choi and Lee, Injectivity conditions of 2D and 3D uniform
cubic B-spline functions, 2000)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """What images of a modality may get at most."""

    rotate_deg: float = 0.0
    zoom: float = 0.0
    shift: float = 0.0
    intensity: float = 0.0
    elastic: float = 0.0
    """How far a point may be bent away, as a share of width and height."""
    mirror: bool = False
    """Left and right exchanged; never where the report names a side."""
    flip: bool = False
    """Top and bottom exchanged."""


NOTHING: Final = Allowance()
"""For a modality that is not in the table."""
_VOLUME: Final = Allowance(rotate_deg=15.0, zoom=0.2, shift=0.1, elastic=0.02)
# The width of a heart against that of a chest is a finding: bent by little.
_RADIOGRAPH: Final = Allowance(rotate_deg=10.0, zoom=0.2, shift=0.1, intensity=0.3, elastic=0.01)
_SURFACE: Final = Allowance(
    rotate_deg=180.0, zoom=0.3, shift=0.2, intensity=0.3, elastic=0.05, mirror=True, flip=True
)

ALLOWED: Final[dict[str, Allowance]] = {
    # Hounsfield units and standardised uptake are measurements: geometry only.
    "CT": _VOLUME,
    "PT": _VOLUME,
    "NM": _VOLUME,
    # MR has no unit; a scanner's gain is an accident.
    "MR": Allowance(rotate_deg=15.0, zoom=0.2, shift=0.1, intensity=0.3, elastic=0.02),
    "CR": _RADIOGRAPH,
    "DX": _RADIOGRAPH,
    "RF": _RADIOGRAPH,
    "XA": _RADIOGRAPH,
    # A breast looks like the other one; its report says which it is.
    "MG": Allowance(rotate_deg=10.0, zoom=0.2, shift=0.1, intensity=0.2, elastic=0.02, mirror=True),
    # The probe is at the top.
    "US": Allowance(rotate_deg=10.0, zoom=0.2, shift=0.1, intensity=0.3, elastic=0.02, mirror=True),
    "OP": Allowance(rotate_deg=15.0, zoom=0.2, shift=0.1, intensity=0.2, elastic=0.01, mirror=True),
    # Tissue under a microscope and photographs of skin have no up.
    "SM": _SURFACE,
    "GM": _SURFACE,
    "XC": _SURFACE,
    "ES": Allowance(rotate_deg=180.0, zoom=0.2, shift=0.1, intensity=0.2, elastic=0.03),
}
"""By DICOM modality; one that is not here gets nothing."""


def names_a_side(report: str) -> bool:
    """Whether a text says something that a mirrored image would make wrong."""
    return _SIDE.search(report) is not None


class Wanted(Protocol):
    """Settings that say how much is wanted."""

    @property
    def rotate_deg(self) -> float:
        """Turned by up to this, either way."""

    @property
    def zoom(self) -> float:
        """Enlarged by up to this share."""

    @property
    def shift(self) -> float:
        """Moved by up to this share of width and height."""

    @property
    def intensity(self) -> float:
        """Gain, offset and gamma changed by up to this share."""

    @property
    def mirror(self) -> float:
        """Probability of left and right exchanged."""

    @property
    def flip(self) -> float:
        """Probability of top and bottom exchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """What one sample gets."""

    rotate_deg: float = 0.0
    """Against the clock, as the viewer sees it."""
    zoom: float = 1.0
    """Above 1 a part of the image fills the frame: a crop."""
    shift_x: float = 0.0
    """Of the image, as a share of its width; to the right."""
    shift_y: float = 0.0
    mirror: bool = False
    flip: bool = False
    gain: float = 1.0
    offset: float = 0.0
    gamma: float = 1.0
    elastic: float = 0.0
    """How far a point is bent away at most, as a share of width and height; offline alone."""
    elastic_key: int = 0
    """Which way points are bent follows from it."""

    @property
    def changes_intensity(self) -> bool:
        """Whether values change, not only places."""
        return (self.gain, self.offset, self.gamma) != (1.0, 0.0, 1.0)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``study.json`` says it."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Draw:
        """Read what ``study.json`` says of a variant; keys that are not known are ignored.

        Raises:
            FormatError: A number is missing, or is none.
        """
        try:
            values = {name: type(default)(said[name]) for name, default in asdict(cls()).items()}
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                "a variant must say every number of its draw (docs/format.md, section 4), got a "
                f"{type(error).__name__}; verify the dataset."
            ) from None
        return cls(**values)


def draw_sample(
    wanted: Wanted,
    *,
    modality: str,
    report_names_a_side: bool,
    seed: int,
    place: tuple[int, ...],
    elastic: float = 0.0,
) -> Draw:
    """Draw what a sample gets.

    Args:
        wanted: How much is wanted.
        modality: Of the sample's images, such as ``"CT"``; empty if unknown.
        report_names_a_side: Whether its text does.
        seed: Run-level seed.
        place: Online epoch, step, micro-batch and slot; offline the sample's key as a number, and the number
            of the variant.
        elastic: How far points are bent away at most, as a share; wanted, as the rest.
    """
    allowed = ALLOWED.get(modality, NOTHING)

    # A number of its own for each use, so that another setting does not change what the others draw.
    def uniform(name: str) -> float:
        return derive(seed, f"augment-{name}", *place) / _WORD

    def either_way(name: str, wanted: float, most: float) -> float:
        return (2 * uniform(name) - 1) * min(wanted, most)

    most = min(wanted.intensity, allowed.intensity)
    may_mirror = allowed.mirror and not report_names_a_side
    bent = min(elastic, allowed.elastic)
    return Draw(
        rotate_deg=either_way("rotate", wanted.rotate_deg, allowed.rotate_deg),
        zoom=1 + uniform("zoom") * min(wanted.zoom, allowed.zoom),
        shift_x=either_way("shift-x", wanted.shift, allowed.shift),
        shift_y=either_way("shift-y", wanted.shift, allowed.shift),
        mirror=may_mirror and uniform("mirror") < wanted.mirror,
        flip=allowed.flip and uniform("flip") < wanted.flip,
        gain=1 + either_way("gain", most, most),
        offset=either_way("offset", most, most) / 2,
        gamma=2.0 ** either_way("gamma", most, most),
        elastic=bent,
        elastic_key=derive(seed, "augment-elastic", *place) >> (64 - _KEY_BITS) if bent else 0,
    )


def source_affine(draw: Draw, *, aspect: float) -> NDArray[np.float64]:
    """Return where each place of the result lies in the source.

    Args:
        draw: What the sample gets.
        aspect: Height of the image by its width, on the screen.

    Returns:
        ``(2, 3)``, x before y, both from -1 to 1 over the image.
    """
    # From the result to the source: shift back, turn back, zoom back, mirror back. On the screen y points
    # down, so a turn against the clock is one with it in these coordinates, and its inverse the other.
    angle = math.radians(draw.rotate_deg)
    cosine, sine = math.cos(angle) / draw.zoom, math.sin(angle) / draw.zoom
    mirror, flip = (-1.0 if draw.mirror else 1.0), (-1.0 if draw.flip else 1.0)
    linear = np.array(
        [[mirror * cosine, -mirror * sine * aspect], [flip * sine / aspect, flip * cosine]], np.float64
    )
    moved = linear @ np.array([2 * draw.shift_x, 2 * draw.shift_y])
    return np.concatenate((linear, -moved[:, None]), axis=1)


class Warp:
    """Brings slices of one shape to where a draw takes them.

    Args:
        draw: What the sample gets.
        rows: Of the slices.
        columns: Likewise.
        pixel_aspect: Height of a pixel by its width.
    """

    def __init__(self, draw: Draw, rows: int, columns: int, *, pixel_aspect: float = 1.0) -> None:
        self._shape = (rows, columns)
        self._affine = source_affine(draw, aspect=rows * pixel_aspect / columns)
        self._bending = _bending(draw) if draw.elastic else None
        self._kept: list[tuple[slice, NDArray[np.int32], NDArray[np.int32]]] = []

    def image(self, pixels: NDArray[Any], *, fill: float = 0) -> NDArray[Any]:
        """Turn and bend a slice, linearly between pixels.

        Args:
            pixels: ``(rows, columns)`` or ``(rows, columns, samples)``.
            fill: What lies outside of the slice.

        Returns:
            The same shape and dtype.
        """
        rows, columns = self._shape
        # One pixel of fill before, and two behind, so that each place has four neighbours.
        framed = np.full((rows + 3, columns + 3, *pixels.shape[2:]), fill, pixels.dtype)
        framed[1 : rows + 1, 1 : columns + 1] = pixels
        flat = framed.reshape(-1, *pixels.shape[2:])
        is_exact = pixels.dtype.kind in "iu" and pixels.dtype.itemsize <= 2
        result = np.empty_like(pixels, order="C")
        for band, at_row, at_column in self._places():
            first_row, first_column = at_row >> _FRACTION_BITS, at_column >> _FRACTION_BITS
            below, right = at_row & (_ONE - 1), at_column & (_ONE - 1)
            corner = (first_row.astype(np.intp) + 1) * (columns + 3) + first_column + 1
            weights = (
                (0, (_ONE - below) * (_ONE - right)),
                (1, (_ONE - below) * right),
                (columns + 3, below * (_ONE - right)),
                (columns + 4, below * right),
            )
            dtype = np.dtype(np.int32 if is_exact else np.float64)
            total: Any = np.zeros((*corner.shape, *pixels.shape[2:]), dtype)
            for step, weight in weights:
                shaped = weight.reshape(*weight.shape, *(1,) * (pixels.ndim - 2))
                total += flat.take(corner + step, axis=0).astype(dtype) * shaped
            if is_exact:
                result[band] = (total + (_ONE * _ONE >> 1)) >> (2 * _FRACTION_BITS)
            elif pixels.dtype.kind == "f":
                result[band] = total / (_ONE * _ONE)
            else:
                result[band] = np.rint(total / (_ONE * _ONE))
        return result

    def mask(self, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Carry a mask along, ``(rows, columns)``: the nearest pixel, 0 outside."""
        rows, columns = self._shape
        result = np.zeros_like(mask)
        for band, at_row, at_column in self._places():
            row, column = (at_row + _ONE // 2) >> _FRACTION_BITS, (at_column + _ONE // 2) >> _FRACTION_BITS
            is_inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
            found = mask[np.clip(row, 0, rows - 1), np.clip(column, 0, columns - 1)]
            result[band] = np.where(is_inside, found, 0)
        return result

    def _places(self) -> Iterator[tuple[slice, NDArray[np.int32], NDArray[np.int32]]]:
        """Yield bands of the result, and for each pixel its row and column in the source, times 128."""
        rows, columns = self._shape
        if self._kept:
            yield from self._kept
            return
        height = max(_BAND_PIXELS // columns, 1)
        bands = [slice(start, min(start + height, rows)) for start in range(0, rows, height)]
        if rows * columns <= _KEPT_PIXELS:
            self._kept = [(band, *self._measure(band)) for band in bands]
            yield from self._kept
            return
        for band in bands:
            yield (band, *self._measure(band))

    def _measure(self, band: slice) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        rows, columns = self._shape
        y = (2 * np.arange(band.start, band.stop) + 1)[:, None] / rows - 1
        x = ((2 * np.arange(columns) + 1) / columns - 1)[None, :]
        if self._bending is not None:
            x, y = x + _spline(self._bending[0], x, y), y + _spline(self._bending[1], x, y)
        found = []
        for (along, across, moved), length in zip(self._affine[::-1], (rows, columns), strict=True):
            place = ((along * x + across * y + moved) + 1) * (length / 2) - 0.5
            # Far outside is as good as one pixel outside, where all that is seen is fill.
            found.append(np.rint(np.clip(place, -1.0, length) * _ONE).astype(np.int32))
        return found[0], found[1]


def change_intensity(pixels: NDArray[Any], draw: Draw, display_range: tuple[float, float]) -> NDArray[Any]:
    """Change gain, offset and gamma inside a display range; what lies outside of it is cut.

    Windowed afterwards, the result is what the device makes of the slice with the same draw.

    Args:
        pixels: Any shape.
        draw: What the sample gets.
        display_range: Low and high; an empty range is taken as one unit wide.

    Returns:
        The same shape and dtype.
    """
    low, width = display_range[0], display_range[1] - display_range[0]
    width = width if width > 0 else 1.0

    def changed(values: NDArray[Any]) -> NDArray[np.float64]:
        share = np.clip((values.astype(np.float64) - low) / width, 1e-6, 1)
        return np.clip(share**draw.gamma * draw.gain + draw.offset, 0, 1) * width + low

    if pixels.dtype.kind not in "iu":
        return changed(pixels).astype(pixels.dtype)
    info = np.iinfo(pixels.dtype)
    if pixels.dtype.itemsize > 2:
        return np.clip(np.rint(changed(pixels)), info.min, info.max).astype(pixels.dtype)
    every = np.arange(info.min, info.max + 1)
    table = np.clip(np.rint(changed(every)), info.min, info.max).astype(pixels.dtype)
    return table[pixels.astype(np.intp) - info.min]


def _bending(draw: Draw) -> NDArray[np.float64]:
    """Return how far control points move, ``(2, points, points)``: x and y, of -1 to 1 over the image."""
    points = range(_NUM_CELLS + 3)
    words = [
        [[derive(draw.elastic_key, "elastic-point", axis, i, j) for j in points] for i in points]
        for axis in (0, 1)
    ]
    return (np.array(words, np.float64) / 2.0**64 * 2 - 1) * (2 * draw.elastic)


def _spline(
    control: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Evaluate a cubic B-spline on a grid, ``(rows, columns)``; plain sums, the same on every machine."""
    along, across = _basis(y[:, 0]), _basis(x[0])
    total = np.zeros((len(y), x.shape[1]))
    for i in range(_NUM_CELLS + 3):
        line = np.zeros(x.shape[1])
        for j in range(_NUM_CELLS + 3):
            line += control[i, j] * across[j]
        total += along[i][:, None] * line[None, :]
    return total


def _basis(place: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weight of each control point at places of -1 to 1, ``(points, places)``."""
    at = (place + 1) * (_NUM_CELLS / 2)
    cell = np.clip(np.floor(at), 0, _NUM_CELLS - 1).astype(np.int64)
    t = at - cell
    weights = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3)
    result = np.zeros((_NUM_CELLS + 3, len(place)))
    for step, weight in enumerate(weights):
        result[cell + step, np.arange(len(place))] = weight / 6
    return result
