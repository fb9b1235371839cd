"""Image description of one instance: shape, bits and color, validated before anything else uses it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.sources.dicom import values
from shardflow.packing.sources.dicom.elements import Elements, HeaderLimits, check_limits

_SAMPLES, _PHOTOMETRIC, _PLANAR, _NUM_FRAMES = 0x00280002, 0x00280004, 0x00280006, 0x00280008
_ROWS, _COLUMNS, _ALLOCATED, _STORED = 0x00280010, 0x00280011, 0x00280100, 0x00280101
_HIGH_BIT, _SIGNED = 0x00280102, 0x00280103

DESCRIPTION_TAGS = frozenset(
    {_SAMPLES, _PHOTOMETRIC, _PLANAR, _NUM_FRAMES, _ROWS, _COLUMNS, _ALLOCATED, _STORED, _HIGH_BIT, _SIGNED}
)

_SAMPLES_OF = {
    "MONOCHROME1": 1,
    "MONOCHROME2": 1,
    "PALETTE COLOR": 1,
    "RGB": 3,
    "YBR_FULL": 3,
    "YBR_FULL_422": 3,
    "YBR_ICT": 3,
    "YBR_RCT": 3,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageDescription:
    """Shape and sample format of one instance, as stored."""

    rows: int
    columns: int
    samples_per_pixel: int
    """Stored samples: 1 or 3; a palette image has 1 and becomes 3."""
    num_frames: int
    bits_allocated: int
    """1, 8, 16 or 32; 64 for double float pixel data."""
    bits_stored: int
    high_bit: int
    is_signed: bool
    planar_configuration: int
    """0: samples of a pixel lie together; 1: plane after plane."""
    photometric_interpretation: str

    @property
    def is_color(self) -> bool:
        """Whether a decoded frame has three samples a pixel."""
        return not self.photometric_interpretation.startswith("MONOCHROME")

    @property
    def frame_num_bits(self) -> int:
        """Bits of one uncompressed frame as it lies in a file."""
        samples = 2 if self.photometric_interpretation == "YBR_FULL_422" else self.samples_per_pixel
        return self.rows * self.columns * samples * self.bits_allocated

    @property
    def native_num_bytes(self) -> int:
        """Bytes of all frames, uncompressed, without padding."""
        return (self.frame_num_bits * self.num_frames + 7) // 8

    @property
    def stored_range(self) -> tuple[int, int]:
        """Lowest and highest value that ``bits_stored`` can hold."""
        if self.is_signed:
            return -(1 << (self.bits_stored - 1)), (1 << (self.bits_stored - 1)) - 1
        return 0, (1 << self.bits_stored) - 1


def describe_image(elements: Elements, limits: HeaderLimits) -> tuple[ImageDescription, tuple[str, ...]]:
    """Read and check the description; return it with flags for what was put right.

    Raises:
        SourceError: INVALID_IMAGE_DESCRIPTION or LIMIT_EXCEEDED.
    """
    image, flags = _read_description(elements)
    _check_size(image, limits)
    return image, flags


@values.shared(*DESCRIPTION_TAGS)
def _read_description(elements: Elements) -> tuple[ImageDescription, tuple[str, ...]]:
    photometric = values.code(elements, _PHOTOMETRIC).upper()
    samples = values.short(elements, _SAMPLES) or 1
    if _SAMPLES_OF.get(photometric) != samples:
        raise _invalid(
            f"{samples} samples per pixel do not fit the photometric interpretation, or it is unknown"
        )
    bits_allocated = values.short(elements, _ALLOCATED) or 0
    bits_stored = values.short(elements, _STORED) or bits_allocated
    if bits_allocated not in (1, 8, 16, 32, 64) or not 1 <= bits_stored <= bits_allocated:
        raise _invalid(f"{bits_stored} of {bits_allocated} bits")
    flags: tuple[str, ...] = ()
    high_bit = values.short(elements, _HIGH_BIT)
    if high_bit is None or not bits_stored - 1 <= high_bit < bits_allocated:
        flags = () if high_bit is None else ("high_bit_corrected",)
        high_bit = bits_stored - 1
    image = _shared(
        rows=values.short(elements, _ROWS) or 0,
        columns=values.short(elements, _COLUMNS) or 0,
        samples_per_pixel=samples,
        num_frames=_num_frames(elements),
        bits_allocated=bits_allocated,
        bits_stored=bits_stored,
        high_bit=high_bit,
        is_signed=values.short(elements, _SIGNED) == 1,
        planar_configuration=(values.short(elements, _PLANAR) or 0) if samples > 1 else 0,
        photometric_interpretation=photometric,
    )
    return image, flags


def _num_frames(elements: Elements) -> int:
    """(0028,0008) *Number of Frames*; absent, empty and 0 mean 1."""
    if not elements.values.get(_NUM_FRAMES, b"").strip(b"\0 "):
        return 1
    number = values.integer(elements, _NUM_FRAMES)
    if number is None or number < 0:
        raise _invalid("the number of frames is not a number")
    return number or 1


def _check_size(image: ImageDescription, limits: HeaderLimits) -> None:
    if image.rows == 0 or image.columns == 0:
        raise _invalid(f"{image.rows} rows and {image.columns} columns")
    if image.planar_configuration > 1:
        raise _invalid(f"planar configuration {image.planar_configuration}")
    pixels = image.rows * image.columns
    num_bytes = pixels * image.num_frames * (3 if image.is_color else 1) * ((image.bits_allocated + 7) // 8)
    check_limits(
        ("pixels a frame", pixels, limits.max_frame_pixels),
        ("frames", image.num_frames, limits.max_frames),
        ("bytes of pixels", num_bytes, limits.max_pixel_bytes),
    )


@lru_cache(maxsize=4096)
def _shared(**fields: int | str | bool) -> ImageDescription:
    """One object for all equal descriptions: a series of 300 slices holds and sends one."""
    return ImageDescription(**fields)  # type: ignore[arg-type]


def _invalid(detail: str) -> Exception:
    return source_error(Reason.INVALID_IMAGE_DESCRIPTION, detail)
