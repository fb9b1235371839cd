"""Layouts: from folders and tables as people have them to images, reports, links and splits.

A layout says whose an image is (`Placement`), reads the reports so that each names its study, and knows the
official splits. It decides nothing about pixels, and nothing is packed differently because of it.
"""

from __future__ import annotations

from shardflow.sources.layouts.base import Layout, LayoutInputs
from shardflow.sources.layouts.config import LayoutConfig
from shardflow.sources.layouts.opening import open_layout
from shardflow.sources.layouts.placement import Placement

__all__ = ["Layout", "LayoutConfig", "LayoutInputs", "Placement", "open_layout"]
