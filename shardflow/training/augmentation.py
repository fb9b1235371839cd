"""Tables ``[augment]`` and ``[augment_volumes]``: augmentation on the device; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from shardflow.config import Bounds, check_fields
from shardflow.errors import ConfigError
from shardflow.fields.volumes.augmentation import VolumeAugmentSettings
from shardflow.fields.volumes.field import Volume

Share = Annotated[float, Bounds(0.0, 1.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig:
    """Augmentation of training images, within the limits of their modality; evaluations use none.

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
        return self != AugmentConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeAugmentConfig:
    """Augmentation of the volumes of ``segment`` on the device; evaluations use none.

    The loader then delivers stored voxels with a margin, and the device resamples them once, to
    ``fields.image.roi_size`` and its ``spacing_mm``.
    """

    preset: str = "none"
    """``nnunet``, ``geometry`` or ``strong``, see `shardflow.VolumeAugmentation`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of `shardflow.VolumeAugmentation` that differ from the preset's, such as ``flip_prob = [0.0,
    0.5, 0.5]``."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("roi_size", "spacing_mm", "interpolation"):
            if name in self.settings:
                raise ConfigError(f"settings.{name} follows fields.image.{name}; remove it.")
        VolumeAugmentSettings.preset(self.preset, roi_size=(1, 1, 1), **self.settings)

    @property
    def is_active(self) -> bool:
        """Whether anything is wanted."""
        return self.preset != "none" or bool(self.settings)

    def check(self, volume: Volume) -> None:
        """Refuse volumes that only the loader can resample.

        Raises:
            ConfigError: They are such.
        """
        for name, refused in (("center", "whole"), ("interpolation", "nearest"), ("antialias", True)):
            if self.is_active and getattr(volume, name) == refused:
                raise ConfigError(
                    f"fields.image.{name} = {refused!r} is resampled by the loader, and [augment_volumes] "
                    "resamples on the device; remove one of them."
                )
