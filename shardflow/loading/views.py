"""All views of slices together: what a loader may be asked to deliver of a study's primary series."""

from __future__ import annotations

from typing import TypeAlias

from shardflow.loading.sized_view import SizedView
from shardflow.loading.tile_view import TileView
from shardflow.loading.view import ImageView, NativeView

__all__ = ["View"]

View: TypeAlias = ImageView | NativeView | SizedView | TileView
