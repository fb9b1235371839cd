"""Reader of NIfTI label volumes: each number above 0 is a region, placed in space by the affine.

The reader of NIfTI images handles the file's axes and signs (RAS) and returns planes in LPS. The bytes do not
tell labels from an image: a layout does, with the study and the names of the classes; else the file name
does, and it names the image as well, by what remains without the word for a mask, or by the name of its
folder.
"""

from __future__ import annotations

import itertools
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
from shardflow.packing.sources.placement import ClassNames, Placement

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
            DECODE_FAILED or LIMIT_EXCEEDED; of a volume whose image and classes a layout names, also
            LABELS_OFF_GRID and UNKNOWN_LABEL.
    """
    limits = _header_limits(writer.limits)
    header = read_nifti(path, _PLACEMENT, limits=limits)
    planes = _planes(header)
    num_voxels = header.image.num_frames * header.image.rows * header.image.columns
    if num_voxels > writer.limits.max_voxels:
        raise source_error(Reason.LIMIT_EXCEEDED, f"{num_voxels} voxels declared")
    volume, is_fractional = _labels(path, header, limits)
    if writer.classes is not None:
        _check_classes(volume, writer.classes, is_fractional=is_fractional)
        if not any(_has_grid(target, planes, header) for target in targets):
            raise source_error(Reason.LABELS_OFF_GRID)
        writer.is_placed = True
    in_space = [target for target in targets if target.affine_lps is not None]
    if planes is None or len(planes) != len(volume) or not in_space:
        _copy(volume, targets, writer, is_fractional=is_fractional)
        return
    stack = PlaneStack(planes, (header.image.rows, header.image.columns), header.planes[0].slice_thickness)
    regions: dict[int | str, OpenRegion] = {}
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


_ON_VOXEL: Final = 0.45
"""Voxels that a label may lie beside its voxel of the image: the nearest one is still its own."""


def _has_grid(target: Target, planes: list[Plane] | None, header: InstanceHeader) -> bool:
    """Whether every voxel of labels lies on one of a series, and none of the series is without one.

    Axes may be stored in another order or direction: only places count.
    """
    labels, image = (header.image.columns, header.image.rows, header.image.num_frames), target.grid
    if planes is None or target.affine_lps is None:
        return planes is None and target.affine_lps is None and labels == image
    if len(planes) != labels[2]:
        return False
    corners = _corners(labels)
    places = np.stack(
        [planes[k].origin + i * planes[k].per_column + j * planes[k].per_row for i, j, k in corners.tolist()]
    )
    affine = np.asarray(target.affine_lps, np.float64)
    found = np.linalg.solve(affine[:3, :3], (places - affine[:3, 3]).T).T
    nearest = np.rint(found).astype(np.int64)
    is_near = bool((np.abs(found - nearest) <= _ON_VOXEL).all())
    return is_near and np.array_equal(np.unique(nearest, axis=0), np.unique(_corners(image), axis=0))


def _corners(size: tuple[int, int, int]) -> NDArray[np.int64]:
    """Return the outermost voxels of a grid, ``(8, 3)``."""
    return np.array(list(itertools.product(*((0, number - 1) for number in size))), np.int64)


def _check_classes(volume: Sequence[NDArray[Any]], classes: ClassNames, *, is_fractional: bool) -> None:
    """Refuse numbers that are of no class.

    Raises:
        SourceError: UNKNOWN_LABEL.
    """
    if is_fractional:
        raise source_error(Reason.UNKNOWN_LABEL, "fractions")
    known = {0}.union(*classes.values())
    if classes and any(not known.issuperset(np.unique(labels).tolist()) for labels in volume):
        raise source_error(Reason.UNKNOWN_LABEL, f"{len(classes)} classes")


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
    regions: dict[int | str, OpenRegion] = {}
    for index, labels in enumerate(volume):
        _add(labels, same[0], index, regions, writer, is_fractional=is_fractional)


def _add(
    labels: NDArray[Any],
    target: Target,
    index: int,
    regions: dict[int | str, OpenRegion],
    writer: RegionWriter,
    *,
    is_fractional: bool,
) -> None:
    found = [1] if is_fractional else [one for one in np.unique(labels).tolist() if one]
    classes: Sequence[tuple[str, tuple[int, ...]]] = [("", (number,)) for number in found]
    if writer.classes:
        classes = [one for one in writer.classes.items() if not set(found).isdisjoint(one[1])]
    for name, values in classes:
        key = name or values[0]
        if key not in regions:
            if len(regions) >= _MAX_LABELS:
                raise source_error(Reason.LIMIT_EXCEEDED, f"more than {_MAX_LABELS} labels")
            regions[key] = writer.open(
                RegionFacts(
                    kind="segmentation",
                    source="nifti",
                    # A class of several numbers is their union.
                    value=values[0] if len(values) == 1 else None,
                    class_name=name,
                    is_fractional=is_fractional,
                )
            )
        mask = labels if is_fractional else np.isin(labels, values).astype(np.uint8)
        regions[key].add_mask(target, index, mask)
