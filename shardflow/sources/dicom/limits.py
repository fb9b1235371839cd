"""Bounds on one input, checked against what it declares, before anything is allocated.

They are counts, never clocks, so the same file has the same outcome on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HeaderLimits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderLimits:
    """What one file may ask for; above it the outcome is LIMIT_EXCEEDED."""

    max_frame_pixels: int = 1 << 28
    """Rows times columns of one frame."""
    max_frames: int = 1 << 16
    """Frames of one instance."""
    max_pixel_bytes: int = 1 << 34
    """Decoded bytes of all frames of one instance."""
    max_header_bytes: int = 1 << 26
    """Bytes of one file before its pixel data."""
    max_inflated_bytes: int = 1 << 29
    """Bytes that a file in the deflated transfer syntax inflates to."""
