"""Settings of what is packed beside the slices: smaller versions, and augmented variants."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from shardflow.configs import Bounds, check_fields

__all__ = ["PoolConfig", "VariantsConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Augmented variants of every slice, within what their modality allows; none by default.

    Numbers are drawn for each study and variant, keyed by the study's key.
    """

    num_variants: Annotated[int, Bounds(0, 99)] = 0
    """Variants of each study, all slices of one alike. Each takes the bytes of the slices once more."""
    rotate_deg: Annotated[float, Bounds(0.0, 180.0)] = 10.0
    """Turned by up to this, either way."""
    zoom: Annotated[float, Bounds(0.0, 1.0)] = 0.1
    """Enlarged by up to this share, so that a crop fills the frame."""
    shift: Annotated[float, Bounds(0.0, 1.0)] = 0.05
    """Moved by up to this share of width and height."""
    intensity: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Gain, offset and gamma changed by up to this share inside the display range, which cuts the rest; never
    where intensities are measurements."""
    elastic: Annotated[float, Bounds(0.0, 0.05)] = 0.01
    """Bent by up to this share of width and height."""
    mirror: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Probability of left and right exchanged; never where report or annotations name a side."""
    flip: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Probability of top and bottom exchanged, where a modality has no top."""
    seed: int = 0
    """Another seed draws other variants."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantsConfig:
    """What is packed beside the slices; nothing by default."""

    thumbnail_px: Annotated[int, Bounds(0, 1024)] = 0
    """Longer side of a JPEG of the middle slice of every series, in its display range; 0 for none."""
    small_px: Annotated[int, Bounds(0, 4096)] = 0
    """Longer side of a small version of every slice, in its unit, averaged by area; 0 for none."""
    augment: PoolConfig = field(default_factory=PoolConfig)

    def __post_init__(self) -> None:
        check_fields(self)

    def content(self) -> dict[str, Any]:
        """Return the settings as JSON without fractions; those of a pool only where there is one."""
        said: dict[str, Any] = {"thumbnail_px": self.thumbnail_px, "small_px": self.small_px}
        if self.augment.num_variants:
            pool = asdict(self.augment)
            said["augment"] = {
                name: repr(value) if isinstance(value, float) else value for name, value in pool.items()
            }
        return said
