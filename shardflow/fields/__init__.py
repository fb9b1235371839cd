"""Fields of a sample: what a batch contains of it, and how that is read and decoded.

A `Field` is bound to samples as a `BoundField` (`field`); field types of other packages implement both
(docs/extending.md). Views define which slices of the images to deliver (`views`), or which stored fields
(`raw`). The reader finds
and checks bytes (`reader`); `slots` assembles `images`, `text` and raw fields into the arrays of a
micro-batch; `tokens` and `findings` add what is stored beside the shards. Which samples form a micro-batch is
decided elsewhere. Names are imported on first use, because packing and training use parts of this package
that need no decoder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardflow.fields.augmentation import (
        ALLOWED,
        Allowance,
        Draw,
        Wanted,
        Warp,
        change_intensity,
        draw_sample,
        names_a_side,
        source_affine,
    )
    from shardflow.fields.field import (
        ArraySpec,
        BoundField,
        Coverage,
        Field,
        FieldContext,
        SlotRequest,
        Slots,
    )
    from shardflow.fields.findings import EntityNames
    from shardflow.fields.quarantine import BadSampleReason, QuarantineRow
    from shardflow.fields.raw import FieldsView
    from shardflow.fields.tokens import StoredTokens
    from shardflow.fields.views import ImageView, NativeView, SizedView, SliceSize, TileView, View

__all__ = [
    "ALLOWED",
    "Allowance",
    "ArraySpec",
    "BadSampleReason",
    "BoundField",
    "Coverage",
    "Draw",
    "EntityNames",
    "Field",
    "FieldContext",
    "FieldsView",
    "ImageView",
    "NativeView",
    "QuarantineRow",
    "SizedView",
    "SliceSize",
    "SlotRequest",
    "Slots",
    "StoredTokens",
    "TileView",
    "View",
    "Wanted",
    "Warp",
    "change_intensity",
    "draw_sample",
    "names_a_side",
    "source_affine",
]
_MODULES: Final = {
    "ALLOWED": "augmentation",
    "Allowance": "augmentation",
    "ArraySpec": "views",
    "BadSampleReason": "quarantine",
    "BoundField": "field",
    "Coverage": "field",
    "Draw": "augmentation",
    "EntityNames": "findings",
    "Field": "field",
    "FieldContext": "field",
    "FieldsView": "raw",
    "ImageView": "views",
    "NativeView": "views",
    "QuarantineRow": "quarantine",
    "SizedView": "views",
    "SliceSize": "views",
    "SlotRequest": "field",
    "Slots": "field",
    "StoredTokens": "tokens",
    "TileView": "views",
    "View": "views",
    "Wanted": "augmentation",
    "Warp": "augmentation",
    "change_intensity": "augmentation",
    "draw_sample": "augmentation",
    "names_a_side": "augmentation",
    "source_affine": "augmentation",
}


def __getattr__(name: str) -> Any:
    if name == "adapters":  # a module, which the front door offers as it is
        return importlib.import_module(f"{__name__}.adapters")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
