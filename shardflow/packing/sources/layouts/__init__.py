"""Layouts: from folders and tables as people have them to images, reports, links and splits.

A layout says whose an image is (`Placement`), reads the reports so that each names its study, and knows the
official splits. It decides nothing about pixels, and nothing is packed differently because of it.
"""

from __future__ import annotations

from shardflow.packing.sources.layouts.base import Layout, LayoutConfig, LayoutInputs
from shardflow.packing.sources.layouts.opening import open_layout
from shardflow.packing.sources.placement import Placement

__all__ = [
    "Layout",
    "LayoutConfig",
    "LayoutInputs",
    "Placement",
    "open_layout",
]
