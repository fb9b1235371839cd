"""Reader of NIfTI label volumes: each number above 0 is a region, placed in space by the affine.

The reader of NIfTI images handles the file's axes and signs (RAS) and returns planes in LPS. The bytes do not
tell labels from an image: the file name does, and it names the image as well, by what remains without the
word for a mask, or by the name of its folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.attachments.annotations.box_files import image_names
from shardflow.packing.attachments.annotations.geometry import PlaneStack
from shardflow.packing.attachments.annotations.region_writer import OpenRegion, RegionFacts, RegionWriter
from shardflow.packing.attachments.annotations.targets import AnnotationLimits, Plane, Target, Targets
from shardflow.packing.sources.attachments import AttachmentItem
from shardflow.packing.sources.dicom.elements import HeaderLimits
from shardflow.packing.sources.dicom.headers import InstanceHeader
from shardflow.packing.sources.nifti import iter_nifti, read_nifti
from shardflow.packing.sources.placement import Placement

_NAME: Final = re.compile(
    r"(?:^|[-_. ])(?:mask|seg|segmentation|label|labels|labelmap|roi|lesion)s?(?:[-_.]|$)", re.IGNORECASE
)
_SUFFIX: Final = re.compile(r"\.nii(?:\.gz)?$", re.IGNORECASE)
_MAX_LABELS: Final = 1024
_PLACEMENT: Final = Placement(form="nifti", patient="-", study="-", series="-", instance="-", attributes={})


def is_label_volume(path: Path, head: bytes) -> bool:
    """Tell whether a file is a NIfTI volume of labels: ``..._seg.nii.gz``, ``lesion-mask.nii``."""
    is_volume = head[:2] == b"\x1f\x8b" or head[344:347] in (b"n+1", b"ni1") or head[4:7] == b"n+2"
    name = _SUFFIX.sub("", path.name)
    return is_volume and name != path.name and bool(_NAME.search(name))


def describe_label_volume(path: Path, limits: AnnotationLimits) -> AttachmentItem:
    """Identify the study of a volume of labels, by its name and that of its folder.

    Raises:
        SourceError: As `read_label_volume`.
    """
    read_nifti(path, _PLACEMENT, limits=_header_limits(limits))
    name = _SUFFIX.sub("", path.name)
    match = _NAME.search(name)
    stem = name if match is None else (name[: match.start()] or name[match.end() :])
    names = tuple(dict.fromkeys(one for one in (stem, path.parent.name) if one))
    return AttachmentItem(
        study_uids=names, series_uids=names, sop_uids=(*image_names(stem), f"{stem}.nii.gz")
    )


def read_label_volume(path: Path, targets: Targets, writer: RegionWriter) -> None:
    """Read a volume of labels into regions, one a label.

    Args:
        path: ``.nii`` or ``.nii.gz``.
        targets: The stored series of its study.
        writer: Receives the regions. A volume of fractions (not whole numbers, at most 1) is one region.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE, INVALID_IMAGE_DESCRIPTION, PIXEL_DATA_TRUNCATED,
            DECODE_FAILED or LIMIT_EXCEEDED.
    """
    limits = _header_limits(writer.limits)
    header = read_nifti(path, _PLACEMENT, limits=limits)
    planes = _planes(header)
    num_voxels = header.image.num_frames * header.image.rows * header.image.columns
    if num_voxels > writer.limits.max_voxels:
        raise source_error(Reason.LIMIT_EXCEEDED, f"{num_voxels} voxels declared")
    volume, is_fractional = _labels(path, header, limits)
    in_space = [target for target in targets if target.affine_lps is not None]
    if planes is None or len(planes) != len(volume) or not in_space:
        _copy(volume, targets, writer, is_fractional=is_fractional)
        return
    stack = PlaneStack(planes, (header.image.rows, header.image.columns), header.planes[0].slice_thickness)
    regions: dict[int, OpenRegion] = {}
    plates = dict(zip(stack.position_of.tolist(), volume, strict=True))
    is_met = False
    for target in in_space:
        reach = stack.reach_mm(target, is_source=stack.num_positions == target.num_slices)
        for index in range(target.num_slices):
            footprint = stack.footprint(target.plane(index), target.shape, reach)
            if footprint is not None:
                is_met = True
                _add(footprint.read(plates.get), target, index, regions, writer, is_fractional=is_fractional)
    if not is_met:
        writer.dangling("OUTSIDE", len(volume))


def _header_limits(limits: AnnotationLimits) -> HeaderLimits:
    return HeaderLimits(max_frame_pixels=limits.max_frame_pixels, max_frames=limits.max_frames)


def _planes(header: InstanceHeader) -> list[Plane] | None:
    """Return the planes of the volume; None if it has no place in space."""
    found = []
    for plane in header.planes:
        if plane.position is None or plane.orientation is None or plane.pixel_spacing is None:
            return None
        turn = np.asarray(plane.orientation, np.float64)
        between_rows, between_columns = plane.pixel_spacing
        found.append(
            Plane(
                origin=np.asarray(plane.position, np.float64),
                per_column=turn[:3] * between_columns,
                per_row=turn[3:] * between_rows,
            )
        )
    return found


def _labels(path: Path, header: InstanceHeader, limits: HeaderLimits) -> tuple[list[NDArray[Any]], bool]:
    """Read the volume, one or two bytes a voxel, and whether it holds fractions.

    Raises:
        SourceError: INVALID_IMAGE_DESCRIPTION where numbers are neither labels nor fractions.
    """
    plane = header.planes[0]
    slope, intercept = plane.slope, plane.intercept
    if slope is None or intercept is None:
        slope, intercept = 1.0, 0.0
    whole: list[NDArray[Any]] = []
    is_fractional = False
    for stored, _ in iter_nifti(path, header, range(header.image.num_frames), limits):
        values = stored if (slope, intercept) == (1.0, 0.0) else stored * slope + intercept
        if values.dtype.kind == "f" and not is_fractional and (values != np.round(values)).any():
            is_fractional = True
            whole = [np.minimum(before, 1) * np.uint8(255) for before in whole]
        low, high = values.min(), values.max()
        if not (low >= 0 and high <= (1 if is_fractional else 0xFFFF)):
            raise source_error(Reason.INVALID_IMAGE_DESCRIPTION, "values are neither labels nor fractions")
        if is_fractional:
            whole.append(np.round(values * 255).astype(np.uint8))
        else:
            whole.append(values.astype(np.uint8 if high <= 0xFF else np.uint16))
    return whole, is_fractional


def _copy(
    volume: Sequence[NDArray[Any]], targets: Targets, writer: RegionWriter, *, is_fractional: bool
) -> None:
    """Copy a volume without a place to the only series that has its shape."""
    same = [
        target
        for target in targets
        if target.num_slices == len(volume) and target.shape == volume[0].shape and target.affine_lps is None
    ]
    if len(same) != 1:
        writer.dangling("GRID_MISMATCH", len(volume))
        return
    regions: dict[int, OpenRegion] = {}
    for index, labels in enumerate(volume):
        _add(labels, same[0], index, regions, writer, is_fractional=is_fractional)


def _add(
    labels: NDArray[Any],
    target: Target,
    index: int,
    regions: dict[int, OpenRegion],
    writer: RegionWriter,
    *,
    is_fractional: bool,
) -> None:
    numbers = [1] if is_fractional else [one for one in np.unique(labels).tolist() if one]
    for number in numbers:
        if number not in regions:
            if len(regions) >= _MAX_LABELS:
                raise source_error(Reason.LIMIT_EXCEEDED, f"more than {_MAX_LABELS} labels")
            regions[number] = writer.open(
                RegionFacts(kind="segmentation", source="nifti", value=number, is_fractional=is_fractional)
            )
        mask = labels if is_fractional else (labels == number).astype(np.uint8)
        regions[number].add_mask(target, index, mask)
