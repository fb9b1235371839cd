"""Reader of NIfTI volumes in the form of instance headers: one frame per slice.

The third axis of the file is the slice axis. Rows and columns are turned as radiologists look at them and as
DICOM stores them: columns run to the left (or, in a sagittal plane, to the back), rows to the back (or down).
No sample moves between voxels; the affine gives their places in LPS.

Slope and intercept are applied once: those of the file, or those that the layout gives for files without any.
A file and a layout that both state them are refused.

Source: nifti1.h and nifti2.h of the NIfTI data format working group.
"""

from __future__ import annotations

import gzip
import itertools
import math
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from shardflow.errors import SourceError, os_reason
from shardflow.format.reasons import PHASE_NAMES, Reason, reading_source, source_error
from shardflow.packing.sources.dicom.description import ImageDescription
from shardflow.packing.sources.dicom.elements import HeaderLimits, check_limits
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.dicom.planes import PlaneHeader
from shardflow.packing.sources.placement import make_header

if TYPE_CHECKING:
    from shardflow.packing.sources.placement import Placement

NIFTI: Final = "nifti"

Array = np.ndarray[Any, np.dtype[Any]]
Vector = tuple[float, float, float]

_HEADER_BYTES: Final = {348: "n+1", 540: "n+2"}
_UNITS_MM: Final = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}
"""Millimeters of one unit, by the low three bits of ``xyzt_units``; unknown ones are millimeters."""
_MAX_SPACING_MM: Final = 1000.0
_LPS_OF_RAS: Final = np.diag([-1.0, -1.0, 1.0, 1.0])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Volume:
    """Facts of the header."""

    shape: tuple[int, int, int, int]
    """i, j, k, time."""
    dtype: np.dtype[Any]
    data_offset: int
    affine_lps: Array | None
    """4 x 4, from voxel (i, j, k, 1); None where the header states none."""
    zooms_mm: Vector | None
    rescale: tuple[float, float] | None
    """Slope and intercept; None where there are none, or where they change nothing."""

    @property
    def turn(self) -> tuple[bool, bool, bool]:
        """Whether j is the column axis instead of i; whether rows, then columns are to be reversed."""
        if self.affine_lps is None:
            return False, False, False
        axes = [int(np.argmax(np.abs(self.affine_lps[:3, axis]))) for axis in (0, 1)]
        if axes[0] == axes[1]:
            return False, False, False
        is_swapped = axes[1] < axes[0]
        column_axis, row_axis = (1, 0) if is_swapped else (0, 1)
        along_row = self.affine_lps[axes[column_axis], column_axis]
        down_column = self.affine_lps[axes[row_axis], row_axis]
        # Rows run to the back, or, where the plane is upright, down: against the third axis.
        is_row_reversed = down_column > 0 if axes[row_axis] == 2 else down_column < 0
        return is_swapped, bool(is_row_reversed), bool(along_row < 0)


def read_nifti(path: Path, placement: Placement, *, limits: HeaderLimits) -> InstanceHeader:
    """Read what packing needs of a volume; no voxel is read.

    Args:
        path: ``.nii`` or ``.nii.gz``.
        placement: Whose it is; ``patient``, ``study``, ``series`` and ``instance`` must be set. Values are
            in HU only where its ``modality`` is CT.
        limits: Bounds on what the file declares.

    Raises:
        SourceError: FILE_UNREADABLE, NOT_IMAGE, HEADER_UNREADABLE, INVALID_IMAGE_DESCRIPTION,
            PIXEL_DATA_TRUNCATED or LIMIT_EXCEEDED.
    """
    volume = _read_volume(path)
    _check_size(volume, limits)
    num_bytes = _num_bytes(path)
    needed = volume.data_offset + math.prod(volume.shape) * volume.dtype.itemsize
    if not _is_gzip(path) and num_bytes < needed:
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, f"{num_bytes} of {needed} bytes")
    if placement.rescale is not None and volume.rescale is not None:
        raise source_error(
            Reason.INVALID_IMAGE_DESCRIPTION, "the file and the table both state slope and intercept"
        )
    if placement.channels and len(placement.channels) != volume.shape[3]:
        raise source_error(
            Reason.INVALID_IMAGE_DESCRIPTION,
            f"{volume.shape[3]} volumes in the file, {len(placement.channels)} names of channels",
        )
    if placement.b_values and len(placement.b_values) != volume.shape[3]:
        raise source_error(
            Reason.INVALID_IMAGE_DESCRIPTION,
            f"{volume.shape[3]} volumes in the file, {len(placement.b_values)} b-values",
        )
    affine, rescale = volume.affine_lps, volume.rescale or placement.rescale
    is_swapped, _, _ = volume.turn
    if affine is not None and placement.spacing_mm is not None:
        between_rows, between_columns, between_slices = placement.spacing_mm
        in_plane = (between_rows, between_columns) if is_swapped else (between_columns, between_rows)
        affine = _with_spacing(affine, (*in_plane, between_slices))
    is_ct = placement.modality == "CT"
    rows, columns = volume.shape[1::-1] if not is_swapped else volume.shape[:2]
    bits = volume.dtype.itemsize * 8
    slope, intercept = rescale or ((1.0, 0.0) if is_ct else (None, None))
    image = ImageDescription(
        rows=rows,
        columns=columns,
        samples_per_pixel=1,
        num_frames=volume.shape[2] * volume.shape[3],
        bits_allocated=bits,
        bits_stored=bits,
        high_bit=bits - 1,
        is_signed=volume.dtype.kind != "u",
        planar_configuration=0,
        photometric_interpretation="MONOCHROME2",
    )
    return make_header(
        placement,
        image,
        _planes(volume, affine, placement, slope, intercept),
        syntax=NIFTI,
        num_bytes=num_bytes,
        unit="HU" if is_ct else "",
        is_float=volume.dtype.kind == "f",
        pixel_offset=volume.data_offset,
        pixel_num_bytes=needed - volume.data_offset,
    )


def iter_nifti(
    path: Path, header: InstanceHeader, frames: Sequence[int], limits: HeaderLimits
) -> Iterator[tuple[Array, str]]:
    """Read slices as stored; as `shardflow.packing.sources.dicom.stored.iter_stored`.

    One slice is in memory at a time; of a compressed volume whose slices are asked for backwards, all of them
    are, in the dtype of the file.

    Raises:
        SourceError: FILE_UNREADABLE, PIXEL_DATA_TRUNCATED, DECODE_FAILED, HEADER_UNREADABLE or
            LIMIT_EXCEEDED.
    """
    volume = _read_volume(path)
    _check_size(volume, limits)
    num_i, num_j, num_k, num_times = volume.shape
    is_swapped, is_row_reversed, is_column_reversed = volume.turn
    frame_bytes = num_i * num_j * volume.dtype.itemsize
    if header.image.num_frames != num_k * num_times or header.pixel_offset != volume.data_offset:
        raise source_error(Reason.DECODE_FAILED, "another volume than its header was read from")
    for data in _iter_frames(path, volume.data_offset, frame_bytes, frames, num_k * num_times):
        stored = np.frombuffer(data, volume.dtype).reshape(num_j, num_i)
        stored = stored.T if is_swapped else stored
        stored = stored[:: -1 if is_row_reversed else 1, :: -1 if is_column_reversed else 1]
        yield np.ascontiguousarray(stored, dtype=volume.dtype.newbyteorder("=")), "native"


def _iter_frames(
    path: Path, data_offset: int, frame_bytes: int, frames: Sequence[int], num_frames: int
) -> Iterator[bytes]:
    is_forward = all(before <= after for before, after in itertools.pairwise(frames))
    try:
        with _open(path) as file:
            if _is_gzip(path) and not is_forward:
                file.seek(data_offset)
                everything = memoryview(_exactly(file, frame_bytes * num_frames))
                for frame in frames:
                    yield bytes(everything[frame * frame_bytes : (frame + 1) * frame_bytes])
                return
            for frame in frames:
                file.seek(data_offset + frame * frame_bytes)
                yield _exactly(file, frame_bytes)
    except (gzip.BadGzipFile, zlib.error):
        raise source_error(Reason.DECODE_FAILED, "the gzip stream is damaged") from None
    except EOFError:
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, "the gzip stream ends early") from None
    except OSError as error:
        raise source_error(Reason.FILE_UNREADABLE, os_reason(error)) from None


def _exactly(file: BinaryIO, num_bytes: int) -> bytes:
    data = file.read(num_bytes)
    if len(data) != num_bytes:
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, f"{len(data)} of {num_bytes} bytes of a slice")
    return data


def _planes(
    volume: _Volume,
    affine: Array | None,
    placement: Placement,
    slope: float | None,
    intercept: float | None,
) -> tuple[PlaneHeader, ...]:
    """One plane a frame: slices of one time or channel follow each other, then come those of the next."""
    num_i, num_j, num_k, num_times = volume.shape
    if affine is None:
        zooms = placement.spacing_mm or (volume.zooms_mm and (volume.zooms_mm[1], volume.zooms_mm[0], 0.0))
        return (PlaneHeader(pixel_spacing=zooms and zooms[:2], slope=slope, intercept=intercept),)
    is_swapped, is_row_reversed, is_column_reversed = volume.turn
    row_axis, column_axis = (0, 1) if is_swapped else (1, 0)
    first = [0, 0]
    first[row_axis] = (num_i, num_j)[row_axis] - 1 if is_row_reversed else 0
    first[column_axis] = (num_i, num_j)[column_axis] - 1 if is_column_reversed else 0
    along_row = affine[:3, column_axis] * (-1 if is_column_reversed else 1)
    down_column = affine[:3, row_axis] * (-1 if is_row_reversed else 1)
    between_columns, between_rows = (float(np.linalg.norm(each)) for each in (along_row, down_column))
    a, b, c = (float(value) for value in along_row / between_columns)
    d, e, f = (float(value) for value in down_column / between_rows)
    planes = []
    for time in range(num_times):
        for k in range(num_k):
            x, y, z, _ = (float(value) for value in affine @ (first[0], first[1], k, 1))
            planes.append(
                PlaneHeader(
                    position=(x, y, z),
                    orientation=(a, b, c, d, e, f),
                    pixel_spacing=(between_rows, between_columns),
                    slice_thickness=float(np.linalg.norm(affine[:3, 2])),
                    slope=slope,
                    intercept=intercept,
                    # Channels form no axis: each is a volume of another kind.
                    phase=_phase("stack_id" if placement.channels else "temporal_position", time),
                )
            )
    return tuple(planes)


def _phase(phase: str, number: int) -> tuple[str, ...]:
    return tuple(str(number) if name == phase else "" for name in PHASE_NAMES)


def _with_spacing(affine: Array, spacing_mm: Vector) -> Array:
    """Keep directions and origin; the steps along i, j, k get other lengths."""
    scaled = affine.copy()
    for axis, length in enumerate(spacing_mm):
        scaled[:3, axis] *= length / np.linalg.norm(affine[:3, axis])
    return scaled


def _read_volume(path: Path) -> _Volume:
    try:
        with _open(path) as file:
            head = file.read(max(_HEADER_BYTES))
    except OSError as error:
        is_damaged = isinstance(error, gzip.BadGzipFile)
        reason = Reason.HEADER_UNREADABLE if is_damaged else Reason.FILE_UNREADABLE
        raise source_error(reason, os_reason(error)) from None
    except (EOFError, zlib.error) as error:
        raise source_error(Reason.HEADER_UNREADABLE, type(error).__name__) from None
    sizes = {int.from_bytes(head[:4], "little"), int.from_bytes(head[:4], "big")} & set(_HEADER_BYTES)
    if not sizes or len(head) < (size := sizes.pop()):
        raise source_error(Reason.NOT_IMAGE)
    # Here, not above: it brings pydicom with it, and most jobs hold no volume of this format.
    import nibabel

    header_class = nibabel.Nifti1Header if size == 348 else nibabel.Nifti2Header
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            header = header_class(head[:size], check=False)  # type: ignore[no-untyped-call]
            return _describe(header, _HEADER_BYTES[size])
    except (MemoryError, SourceError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever the bytes break is the file's fault
        raise source_error(Reason.HEADER_UNREADABLE, type(error).__name__) from None


def _describe(header: Any, magic: str) -> _Volume:
    if bytes(header["magic"].item())[:3] != magic.encode():
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, "voxels in another file")
    shape = tuple(int(each) for each in header.get_data_shape())
    dtype = header.get_data_dtype()
    while len(shape) > 3 and shape[-1] == 1:
        shape = shape[:-1]
    if not 2 <= len(shape) <= 4 or min(shape) < 1 or dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, f"{len(shape)} axes, dtype kind {dtype.kind}")
    full = (*shape, 1, 1)[:4]
    factor = _UNITS_MM.get(int(header["xyzt_units"]) & 7, 1.0)
    slope, intercept = header.get_slope_inter()
    rescale = None if slope is None else (float(slope), float(intercept))
    zooms = [float(each) * factor for each in header["pixdim"][1:4]]
    return _Volume(
        shape=(full[0], full[1], full[2], full[3]),
        dtype=dtype,
        data_offset=int(header["vox_offset"]),
        affine_lps=_affine(header, factor),
        zooms_mm=(zooms[0], zooms[1], zooms[2]) if all(map(_is_spacing, zooms[:2])) else None,
        rescale=None if rescale == (1.0, 0.0) else rescale,
    )


def _affine(header: Any, factor: float) -> Array | None:
    """Affine in LPS and mm, where the header states one that places voxels."""
    if not int(header["sform_code"]) and not int(header["qform_code"]):
        return None
    affine: Array = _LPS_OF_RAS @ np.asarray(header.get_best_affine(), np.float64)
    affine[:3] *= factor
    steps = [float(np.linalg.norm(affine[:3, axis])) for axis in range(3)]
    is_sound = np.isfinite(affine).all() and all(map(_is_spacing, steps))
    if not is_sound or abs(np.linalg.det(affine[:3, :3] / steps)) < 1e-3:
        return None
    return affine


def _is_spacing(value: float) -> bool:
    return 0 < value <= _MAX_SPACING_MM


def _check_size(volume: _Volume, limits: HeaderLimits) -> None:
    num_i, num_j, num_k, num_times = volume.shape
    check_limits(
        ("pixels a slice", num_i * num_j, limits.max_frame_pixels),
        ("slices", num_k * num_times, limits.max_frames),
        ("bytes of voxels", math.prod(volume.shape) * volume.dtype.itemsize, limits.max_pixel_bytes),
        ("bytes before the voxels", volume.data_offset, limits.max_header_bytes),
    )


def _is_gzip(path: Path) -> bool:
    return path.name.lower().endswith(".gz")


def _num_bytes(path: Path) -> int:
    with reading_source():
        return path.stat().st_size


def _open(path: Path) -> BinaryIO:
    if _is_gzip(path):
        return gzip.open(path, "rb")  # type: ignore[return-value] # a GzipFile reads and seeks as one
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb")
