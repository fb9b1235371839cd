"""Which turns, crops and intensities a sample gets: keyed numbers, within what its modality allows.

Every number follows from a seed and a place: online the plan's own place of the sample (epoch, step,
micro-batch, slot), offline its key and the number of the variant. So a sample is turned alike on any number
of ranks or processes and after any resume. Settings say how much is wanted, the table of `allowance` how much
of it a modality may get.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardflow.augmentation.allowance import ALLOWED, NOTHING
from shardflow.errors import FormatError
from shardflow.seeds import derive

__all__ = ["Draw", "Wanted", "draw_sample", "source_affine"]

_WORD = 2.0**64
# A key that is kept in JSON, whose numbers are doubles to many readers.
_KEY_BITS = 53


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
