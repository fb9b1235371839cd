"""Decoding of whole stacks, as packing decodes them slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.pixels import DecodedSlice, SliceForm, form_of, iter_slices
from shardflow.packing.sources.dicom.stacks import Stack


def iter_stack(
    stack: Stack,
    locate: Callable[[InstanceHeader], Path],
    *,
    form: SliceForm | None = None,
) -> Iterator[DecodedSlice]:
    """Decode a stack in geometric order, all slices in one form. Raises as `iter_slices`.

    Args:
        stack: What to decode.
        locate: Path of an instance's file.
        form: The form of the whole stack, where the caller has it already.
    """
    form = form or form_of([one.instance for one in stack.slices])
    position = 0
    while position < len(stack.slices):
        # Neighbors out of one multi-frame file are read in one go.
        instance = stack.slices[position].instance
        stop = position + 1
        while stop < len(stack.slices) and stack.slices[stop].instance is instance:
            stop += 1
        frames = [one.frame for one in stack.slices[position:stop]]
        yield from iter_slices(locate(instance), instance, form=form, frames=frames)
        position = stop
