"""Fields of a sample: what a batch contains of it, and how that is read and decoded.

A `Field` is bound to samples as a `BoundField` (`field`); field types of other packages implement both
(docs/extending.md). Images and slices are in `pictures`, on what they share (`pixels`, `layout`); masks and
boxes in `regions`; texts, other members and stored tokens in modules of their names. `registry` knows all
types. The reader finds and checks bytes (`reader`), which `slots` distributes to the arrays of a micro-batch.
Which samples form a micro-batch is decided elsewhere. Names are imported on first use, because packing and
training use parts of this package that need no decoder.
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
    from shardflow.fields.quarantine import BadSampleReason, QuarantineRow
    from shardflow.fields.types.findings import EntityNames

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
    "QuarantineRow",
    "SlotRequest",
    "Slots",
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
    "ArraySpec": "field",
    "BadSampleReason": "quarantine",
    "BoundField": "field",
    "Coverage": "field",
    "Draw": "augmentation",
    "EntityNames": "findings",
    "Field": "field",
    "FieldContext": "field",
    "QuarantineRow": "quarantine",
    "SlotRequest": "field",
    "Slots": "field",
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
