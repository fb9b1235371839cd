"""From headers to studies: patient > study > series > stack of slices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from shardflow.sources.dicom.geometry import StackGeometry
from shardflow.sources.dicom.headers import InstanceHeader
from shardflow.sources.reasons import Reason

__all__ = ["Copy", "Grouping", "Rejection", "SliceRef", "Stack", "StackKind", "Study", "build_studies"]


class StackKind(StrEnum):
    """What a stack is good for; the order is the order of preference for the primary series."""

    VOLUME = "volume"
    """Parallel slices at known positions."""
    IMAGES = "images"
    """Single images: projections, few slices, slices with no position."""
    FRAMES = "frames"
    """Frames of one or more multi-frame instances with no position, such as a cine loop."""
    SECONDARY = "secondary"
    """Secondary captures, screen saves, dose pages."""
    LOCALIZER = "localizer"
    """Scouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceRef:
    """One slice: a frame of an instance."""

    instance: InstanceHeader
    frame: int

    @property
    def number(self) -> int | None:
        """What a report calls the image: (0020,0013) *Instance Number*, or the 1-based frame of a multi-frame file."""
        return self.frame + 1 if self.instance.image.num_frames > 1 else self.instance.instance_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """Slices of one series with one shape, in geometric order: what becomes one series of a sample."""

    series_instance_uid: str
    stack_index: int
    """Counts the stacks of one series from 0; name a stack by (series_instance_uid, stack_index)."""
    kind: StackKind
    modality: str
    rows: int
    columns: int
    samples_per_pixel: int
    """1, or 3 once decoded (palette images are colour here)."""
    series_number: int | None
    slices: tuple[SliceRef, ...]
    geometry: StackGeometry
    flags: tuple[str, ...]
    """Sorted codes of what was odd: of the instances and of the geometry; docs/dicom.md lists them."""

    @property
    def primary_rank(self) -> tuple[int, int]:
        """Sort key for the primary series: kind, then most slices; the smallest wins."""
        return (list(StackKind).index(self.kind), -len(self.slices))


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A second file with the SOP Instance UID of a kept one; `pixels.check_copies` compares their pixels."""

    kept: InstanceHeader
    copy: InstanceHeader


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One study with all its stacks."""

    patient_id: str
    study_instance_uid: str
    stacks: tuple[Stack, ...]
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """An instance that grouping cannot place."""

    instance: InstanceHeader
    reason: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """All studies, sorted by patient and study identifier, and what was left out."""

    studies: tuple[Study, ...]
    rejections: tuple[Rejection, ...]


def build_studies(headers: Iterable[InstanceHeader]) -> Grouping:
    """Group instances; the result does not depend on the order of ``headers``."""
    raise NotImplementedError
