"""Bounds on annotations: counts, never clocks, so the same file has the same outcome on every machine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AnnotationLimits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotationLimits:
    """What the annotations of one file may ask for; above it the file's outcome is LIMIT_EXCEEDED."""

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
