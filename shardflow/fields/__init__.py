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
    from shardflow.fields.field import (
        ArraySpec,
        BoundField,
        Field,
    )
    from shardflow.fields.quarantine import BadSampleReason
    from shardflow.fields.types.findings import EntityNames

__all__ = [
    "ArraySpec",
    "BadSampleReason",
    "BoundField",
    "EntityNames",
    "Field",
]
_SOURCES: Final = {
    "ArraySpec": ".field:ArraySpec",
    "BadSampleReason": ".quarantine:BadSampleReason",
    "BoundField": ".field:BoundField",
    "EntityNames": ".types.findings:EntityNames",
    "Field": ".field:Field",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
