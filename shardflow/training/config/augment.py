"""Settings of the device's side of images: how they are normalised, and how far they are turned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shardflow.configs import Bounds, check_fields
from shardflow.training.config.ranges import Share

__all__ = ["AugmentSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentSettings:
    """What training images get, within what their modality allows; evaluation images get none of it.

    Each number is drawn anew for each sample of each epoch, keyed by seed, epoch, step, micro-batch and slot.
    """

    rotate_deg: Annotated[float, Bounds(0.0, 180.0)] = 0.0
    """Turned by up to this, either way."""
    zoom: Share = 0.0
    """Enlarged by up to this share, so that a crop fills the frame."""
    shift: Share = 0.0
    """Moved by up to this share of width and height."""
    intensity: Share = 0.0
    """Gain, offset and gamma changed by up to this share; never where intensities are measurements."""
    mirror: Share = 0.0
    """Probability of left and right exchanged; never where the report names a side."""
    flip: Share = 0.0
    """Probability of top and bottom exchanged, where a modality has no top."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_active(self) -> bool:
        """Whether anything is wanted."""
        return any(
            (self.rotate_deg, self.zoom, self.shift, self.intensity, self.mirror, self.flip),
        )
