"""The header pass: the few facts of a DICOM file that packing plans with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["HeaderLimits", "InstanceHeader", "PlaneHeader", "read_header"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderLimits:
    """Bounds that are checked against what a file declares, before anything is allocated."""

    max_frame_pixels: int = 1 << 28
    """Rows times columns of one frame."""
    max_frames: int = 1 << 16
    """Frames of one instance."""
    max_pixel_bytes: int = 1 << 34
    """Decoded bytes of one instance."""
    max_header_bytes: int = 1 << 26
    """Bytes of one file before its pixel data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaneHeader:
    """What may differ from frame to frame: place, spacing, rescale, and what tells repeated positions apart."""

    position: tuple[float, float, float] | None = None
    """(0020,0032) *Image Position (Patient)*: centre of the first pixel, mm, LPS."""
    orientation: tuple[float, float, float, float, float, float] | None = None
    """(0020,0037) *Image Orientation (Patient)*: direction along a row, then down a column, LPS."""
    pixel_spacing: tuple[float, float] | None = None
    """(0028,0030) *Pixel Spacing*: between rows, then between columns, mm."""
    slice_thickness: float | None = None
    """(0018,0050) *Slice Thickness*, mm."""
    slope: float | None = None
    """(0028,1053) *Rescale Slope*."""
    intercept: float | None = None
    """(0028,1052) *Rescale Intercept*."""
    window: tuple[float, float] | None = None
    """(0028,1050), (0028,1051): first valid *Window Center* and *Window Width*, in modality units."""
    phase: tuple[float | str | None, ...] = ()
    """Values of `PHASE_KEYWORDS`, in that order: echo, time, diffusion and the like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceHeader:
    """One image instance, plain types only; small, because millions cross process boundaries.

    Holds identifiers: it never goes into a message, log or dataset as it is (its ``repr`` shows none of them).
    """

    file_index: int
    """The caller's number for the file, such as its position in the list of `discover`."""
    patient_id: str
    study_instance_uid: str
    series_instance_uid: str
    sop_instance_uid: str
    sop_class_uid: str
    transfer_syntax_uid: str
    modality: str
    image_type: tuple[str, ...]
    series_number: int | None
    instance_number: int | None
    rows: int
    columns: int
    samples_per_pixel: int
    num_frames: int
    bits_allocated: int
    bits_stored: int
    high_bit: int
    is_signed: bool
    planar_configuration: int
    photometric_interpretation: str
    planes: tuple[PlaneHeader, ...]
    """One for all frames, or one per frame."""
    frame_of_reference_uid: str | None = None
    slice_location: float | None = None
    spacing_between_slices: float | None = None
    detector_spacing: tuple[float, float] | None = None
    """(0018,1164) *Imager Pixel Spacing*, mm on the detector."""
    rescale_type: str | None = None
    padding: tuple[int, int] | None = None
    """Lowest and highest stored value that means "no data", inclusive."""
    has_modality_lut: bool = False
    is_localizer: bool = False
    is_native: bool
    """Pixels lie in the file uncompressed, little-endian, in whole bytes: pread and frombuffer read them."""
    pixel_offset: int
    """Where the value of the pixel data begins in the file (in the inflated stream for the deflated syntax)."""
    pixel_num_bytes: int | None
    """Length of that value; None where it is encapsulated."""
    num_bytes: int
    """Size of the file."""
    flags: tuple[str, ...] = ()
    """What was odd and could be put right."""

    def plane(self, frame: int) -> PlaneHeader:
        """Facts of one frame."""
        return self.planes[frame if len(self.planes) > 1 else 0]

    def __repr__(self) -> str:
        return f"InstanceHeader({self.modality}, {self.num_frames} x {self.rows} x {self.columns})"


def read_header(path: Path, *, file_index: int = 0, limits: HeaderLimits | None = None) -> InstanceHeader:
    """Read what packing needs of one file; pixels are not read.

    Raises:
        SourceError: The file cannot be packed; ``reason`` is a `Reason`.
    """
    raise NotImplementedError
