"""The JSON fields of a sample: how they are written, and what ``study.json`` says of a series."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardflow.deid.allowlist import allow_ordinal, allow_technical
from shardflow.shards.codecs import codec_for
from shardflow.sources.dicom import AttributeValue, Stack, form_of

if TYPE_CHECKING:
    from shardflow.packing.privacy import StudyPrivacy

__all__ = ["STUDY_JSON_VERSION", "describe_series", "encode_json"]

STUDY_JSON_VERSION: Final = 1


def describe_series(
    stack: Stack, attributes: Mapping[str, AttributeValue], privacy: StudyPrivacy, codec: str
) -> dict[str, Any]:
    """Return what ``study.json`` says of a series before a pixel is read.

    Args:
        stack: The series.
        attributes: Of its first file; they have not passed the allowlist.
        privacy: Of the study.
        codec: That the settings ask for.
    """
    form = form_of([part.instance for part in stack.slices])
    technical = allow_technical(attributes)
    geometry, first = stack.geometry, stack.slices[0].instance
    frame_of_reference = first.frame_of_reference_uid
    return {
        "affine_lps": geometry.affine_lps,
        "body_part": technical.get("body_part_examined"),
        "codec": codec_for(codec, (stack.rows, stack.columns), np.dtype(form.dtype)),
        "columns": stack.columns,
        "dtype": form.dtype,
        "deidentification": privacy.series_facts(first),
        "flags": list(stack.flags),
        "frame_of_reference_key": privacy.surrogate("frame-of-reference", frame_of_reference)
        if frame_of_reference
        else None,
        "instance_keys": [
            privacy.surrogate("instance", part.instance.sop_instance_uid) for part in stack.slices
        ],
        "instance_numbers": [allow_ordinal(part.number) for part in stack.slices],
        "kind": stack.kind,
        # Not the header's word, which may be anything.
        "modality": technical.get("modality"),
        "num_missing": geometry.num_missing,
        "num_slices": len(stack.slices),
        "pixel_spacing_mm": geometry.pixel_spacing_mm,
        "rows": stack.rows,
        "samples_per_pixel": stack.samples_per_pixel,
        "series_key": privacy.surrogate("series", stack.series_instance_uid),
        "series_number": allow_ordinal(stack.series_number),
        "slice_offsets_mm": geometry.slice_offsets_mm,
        "slice_spacing_mm": geometry.slice_spacing_mm,
        "stack_index": stack.stack_index,
        "technical": technical,
        "unit": form.unit,
    }


def encode_json(value: Mapping[str, Any]) -> bytes:
    """Write an object in the one way in which it is written: keys sorted, ASCII, no blanks."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()
