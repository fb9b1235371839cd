"""A study before a pixel is made: every series, slice, number and oddity, as plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardflow.synthetic.anatomy import Anatomy
from shardflow.synthetic.lesions import Lesion
from shardflow.synthetic.noise import Kernel
from shardflow.synthetic.patients import Patient, Region, Visit
from shardflow.synthetic.planes import Plane
from shardflow.synthetic.vectors import Vector

__all__ = ["Encoding", "SeriesKind", "SeriesPlan", "SlicePlan", "StudyPlan", "Syntax"]

SeriesKind = Literal["volume", "reformat", "localizer", "projection"]
Syntax = Literal["explicit-little", "implicit-little", "explicit-big", "deflated", "rle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How values become stored integers: ``value = stored * slope + intercept``."""

    bits_stored: int
    """Of 16 allocated."""
    is_signed: bool = False
    slope: str | None = "1"
    """As written; None leaves the attributes out (values are stored as they are)."""
    intercept: str = "0"
    photometric: Literal["MONOCHROME1", "MONOCHROME2"] = "MONOCHROME2"
    padding: int | None = None
    """Stored value outside a reconstructed circle."""
    has_padding_attribute: bool = True
    has_high_bits: bool = False
    """Whether unused bits are set."""

    @property
    def lowest(self) -> int:
        """Lowest stored value."""
        return -(1 << (self.bits_stored - 1)) if self.is_signed else 0

    @property
    def highest(self) -> int:
        """Highest stored value."""
        return (1 << (self.bits_stored - self.is_signed)) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePlan:
    """One instance."""

    plane: Plane
    stack: int
    """Which stack of its series it belongs to, from 0."""
    grid_index: int
    """Place in its stack, from 0, counting lost slices."""
    contrast: str
    """Phase or weighting (a column of `tissues`)."""
    instance_number: int
    acquisition_number: int
    sop_instance_uid: str
    view: str = ""
    """Of a projection: PA, AP or LL."""
    is_truncated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesPlan:
    """One series; its slices in geometric order, stack after stack."""

    index: int
    """Within the study, from 0; keys the noise."""
    uid: str
    number: int
    modality: str
    kind: SeriesKind
    name: str
    """Short words for the series: ``axial 1.25 mm lung``."""
    image_type: tuple[str, ...]
    frame_of_reference_uid: str
    kernel: Kernel
    thickness_mm: float | None
    spacing_mm: float | None
    """Between neighbouring planes of a stack."""
    noise: float
    """Standard deviation, in the unit of the values."""
    gain: float
    """Values of `tissues` are multiplied by this (MR)."""
    encoding: Encoding
    syntax: Syntax
    slices: tuple[SlicePlan, ...]
    lost_grid_indexes: tuple[int, ...] = ()
    pathologies: tuple[str, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict)
    """DICOM keyword to text: technical attributes of this series."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPlan:
    """One study with everything that its pixels, report and truth are made from."""

    number: int
    patient: Patient
    visit: Visit
    uid: str
    region: Region
    anatomy: Anatomy
    origin: Vector
    """Where the body's own origin lies in this study's frame of reference, mm."""
    lesions: tuple[Lesion, ...]
    resolved: tuple[Lesion, ...]
    """There in the patient's study before, and gone now."""
    series: tuple[SeriesPlan, ...]
    files: Mapping[str, str]
    """SOP Instance UID to path below the output folder."""
    copies: tuple[tuple[str, str], ...]
    """(SOP Instance UID, path) of second files of an instance."""
    stray_files: tuple[str, ...]
