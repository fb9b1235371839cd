"""Fields of a sample: what a batch contains of it, and how that is read and decoded.

A `Field` is bound to samples as a `BoundField` (`field`); field types of other packages implement both
(docs/extending.md). Images and slices are in `pictures`, on what they share (`pixels`, `layout`); masks and
boxes in `regions`; texts, other members and stored tokens in modules of their names. `registry` knows all
types. The reader finds and checks bytes (`reader`), which `slots` distributes to the arrays of a micro-batch.
Which samples form a micro-batch is decided elsewhere. Names are imported on first use, because packing and
training use parts of this package that need no decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

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
_SOURCES: Final = {
    "ALLOWED": ".augmentation:ALLOWED",
    "Allowance": ".augmentation:Allowance",
    "ArraySpec": ".field:ArraySpec",
    "BadSampleReason": ".quarantine:BadSampleReason",
    "BoundField": ".field:BoundField",
    "Coverage": ".field:Coverage",
    "Draw": ".augmentation:Draw",
    "EntityNames": ".types.findings:EntityNames",
    "Field": ".field:Field",
    "FieldContext": ".field:FieldContext",
    "QuarantineRow": ".quarantine:QuarantineRow",
    "SlotRequest": ".field:SlotRequest",
    "Slots": ".field:Slots",
    "Wanted": ".augmentation:Wanted",
    "Warp": ".augmentation:Warp",
    "change_intensity": ".augmentation:change_intensity",
    "draw_sample": ".augmentation:draw_sample",
    "names_a_side": ".augmentation:names_a_side",
    "source_affine": ".augmentation:source_affine",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
