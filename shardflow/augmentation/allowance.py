"""What images of a modality may get at most, because a body is not a photograph.

A mirrored chest is another patient (the heart is on the right), a mirrored report is wrong ("left effusion"),
and the intensities of CT and PET are measurements. One table for what is packed and for what a device does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["ALLOWED", "NOTHING", "Allowance", "names_a_side"]

# Words that a mirrored image would make wrong, and the usual short forms of lobes and sides.
_SIDE = re.compile(
    r"\b(left|right|leftward|rightward|lt|rt|bilateral|bilaterally|unilateral|contralateral|ipsilateral"
    r"|dextro\w*|levo\w*|situs|[rl][uml]l|rml|lingula)\b",
    re.IGNORECASE | re.ASCII,
)


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
