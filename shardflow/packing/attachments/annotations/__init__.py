"""Annotations: regions that somebody drew, in the slices and pixels of the stored images.

A reader for each source (`dicom_seg`, `rtstruct`, `structured_report`, ...) finds in which slices of which
series a region lies (`targets`, `sampling`, `placing`) and puts it into a `book`, which makes the entries of
``annotations.json`` and the masks. `kinds` offers the readers to packing. See docs/annotations.md.
"""

from __future__ import annotations

from shardflow.packing.attachments.annotations.kinds import KINDS, AnnotationKind
from shardflow.packing.attachments.annotations.targets import AnnotationLimits

__all__ = [
    "KINDS",
    "AnnotationKind",
    "AnnotationLimits",
]
