"""Reader of DICOM segmentations: binary, fractional and label maps, on any grid, with frames in any order.

highdicom reads the stored frames one by one (bit-packed, compressed, or not); this module matches frames with
slices by their positions. Where frames have no position (radiographs) or another frame of reference, the
images that they reference decide.

Source: DICOM PS3.3, C.8.20 (Segmentation) and C.7.6.16 (Multi-frame Functional Groups).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.format.reasons import Reason, source_error
from shardflow.packing.attachments.annotations.dicom_objects import (
    check_inflated,
    code_of,
    items_of,
    number_of,
    numbers_of,
    object_item,
    open_object,
    parsing,
    references_of,
    text_of,
)
from shardflow.packing.attachments.annotations.geometry import PlaneStack
from shardflow.packing.attachments.annotations.region_writer import OpenRegion, RegionFacts, RegionWriter
from shardflow.packing.attachments.annotations.targets import AnnotationLimits, Floats, Plane, Target, Targets
from shardflow.packing.attachments.annotations.vocabulary import side_of_code
from shardflow.packing.sources.attachments import AttachmentItem

Frames = Callable[[int], NDArray[Any]]
"""Pixels of a stored frame, by its index from 0."""

_FRAMES_HELD: Final = 4
"""Decoded frames in memory: a slice that cuts the planes of the segmentation needs several."""
_ROUND: Final = 4
_ROUND_MM: Final = 2
_SHIFTED: Final = 0.05
"""Share of a pixel by which planes at one height may be shifted and be of one grid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """One frame as the headers describe it."""

    index: int
    segment: int | None
    """None where the pixels are the numbers of segments."""
    plane: Plane | None
    pitch_mm: float | None
    references: tuple[tuple[str, tuple[int, ...]], ...]


Planes = dict[int, dict[int | None, _Frame]]
"""Frames by position of their plane, then by segment."""


def describe_segmentation(path: Path, limits: AnnotationLimits) -> AttachmentItem:
    """Identify the patient and study of a segmentation.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE or LIMIT_EXCEEDED.
    """
    with parsing():
        dataset = open_object(path, limits, with_pixels=False)
        return object_item(
            dataset, items_of(dataset, "ReferencedSeriesSequence"), "ReferencedInstanceSequence"
        )


def read_segmentation(path: Path, targets: Targets, writer: RegionWriter) -> None:
    """Read a segmentation into regions, one a segment.

    Args:
        path: The file.
        targets: The stored series of its study.
        writer: Receives the regions.

    Raises:
        SourceError: FILE_UNREADABLE, HEADER_UNREADABLE, LIMIT_EXCEEDED, DECODE_FAILED or
            UNSUPPORTED_TRANSFER_SYNTAX.
    """
    with parsing():
        _check_size(path, writer.limits)
        import highdicom

        try:
            dataset = highdicom.seg.segread(path, lazy_frame_retrieval=True)
        except ValueError:
            # highdicom reads little-endian syntaxes only; its other refusals are of broken objects.
            raise source_error(Reason.UNSUPPORTED_TRANSFER_SYNTAX, "ValueError") from None
        frames = _frames(dataset)

        @lru_cache(maxsize=_FRAMES_HELD)
        def stored(index: int) -> NDArray[Any]:
            pixels: NDArray[Any] = dataset.get_stored_frame(index + 1)
            return pixels

        # Frames without a functional group: tiles of slides, which are placed by their order.
        writer.dangling("UNSUPPORTED_SHAPE", max(0, int(dataset.number_of_frames) - len(frames)))
        _Segmentation(dataset, writer, stored).read(frames, targets)


def _check_size(path: Path, limits: AnnotationLimits) -> None:
    """Check the sizes that the file declares before anything is allocated."""
    import pydicom

    names = ["NumberOfFrames", "Rows", "Columns", "SegmentSequence"]
    check_inflated(path, limits)
    header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=names)
    pixels = (number_of(header, "Rows") or 0) * (number_of(header, "Columns") or 0)
    for what, got, limit in (
        ("frames", number_of(header, "NumberOfFrames") or 1, limits.max_frames),
        ("pixels a frame", pixels, limits.max_frame_pixels),
        ("segments", len(items_of(header, "SegmentSequence")), limits.max_rois),
    ):
        if got > limit:
            raise source_error(Reason.LIMIT_EXCEEDED, f"{got:.0f} {what} declared, at most {limit} allowed")


def _frames(dataset: Any) -> list[_Frame]:
    shared = next(iter(items_of(dataset, "SharedFunctionalGroupsSequence")), None)
    is_label_map = text_of(dataset, "SegmentationType") == "LABELMAP"
    found = []
    groups = items_of(dataset, "PerFrameFunctionalGroupsSequence")[: int(dataset.number_of_frames)]
    for index, own in enumerate(groups):
        measures = _group(own, shared, "PixelMeasuresSequence")
        named = _group(own, shared, "SegmentIdentificationSequence")
        segment = None if is_label_map else number_of(named, "ReferencedSegmentNumber")
        if segment is None and not is_label_map:
            continue
        sources = [
            reference
            for derivation in items_of(own, "DerivationImageSequence")
            for reference in references_of(items_of(derivation, "SourceImageSequence"))
        ]
        found.append(
            _Frame(
                index=index,
                segment=None if segment is None else int(segment),
                plane=_plane(own, shared, measures),
                pitch_mm=number_of(measures, "SpacingBetweenSlices") or number_of(measures, "SliceThickness"),
                references=tuple(sources),
            )
        )
    return found


def _group(own: Any, shared: Any, keyword: str) -> Any:
    """Return the first item of a functional group: the frame's own, else that of all frames."""
    return next(iter(items_of(own, keyword)), next(iter(items_of(shared, keyword)), None))


def _plane(own: Any, shared: Any, measures: Any) -> Plane | None:
    position = numbers_of(_group(own, shared, "PlanePositionSequence"), "ImagePositionPatient", 3)
    turn = numbers_of(_group(own, shared, "PlaneOrientationSequence"), "ImageOrientationPatient", 6)
    spacing = numbers_of(measures, "PixelSpacing", 2)
    if position is None or turn is None or spacing is None or (spacing <= 0).any():
        return None
    lengths = np.linalg.norm(turn.reshape(2, 3), axis=1)
    if np.abs(lengths - 1).max() > 1e-2 or abs(turn[:3] @ turn[3:]) > 1e-2:
        return None
    return Plane(origin=position, per_column=turn[:3] * spacing[1], per_row=turn[3:] * spacing[0])


class _Segmentation:
    """One segmentation on its way into the regions of its segments."""

    def __init__(self, dataset: Any, writer: RegionWriter, stored: Frames) -> None:
        self._writer = writer
        self._stored = stored
        self._shape = (int(dataset.Rows), int(dataset.Columns))
        self._full = int(number_of(dataset, "MaximumFractionalValue") or 255)
        self._is_fractional = text_of(dataset, "SegmentationType") == "FRACTIONAL"
        self._frame_of_reference = text_of(dataset, "FrameOfReferenceUID")
        self._series = {
            text_of(one, "SeriesInstanceUID") for one in items_of(dataset, "ReferencedSeriesSequence")
        }
        self._regions: dict[int, OpenRegion] = {}
        self._background = int(number_of(dataset, "PixelPaddingValue") or 0)
        for segment in items_of(dataset, "SegmentSequence"):
            number = number_of(segment, "SegmentNumber")
            if number is not None and not (
                text_of(dataset, "SegmentationType") == "LABELMAP" and number == 0
            ):
                self._regions[int(number)] = writer.open(_facts(segment, is_fractional=self._is_fractional))

    def read(self, frames: Sequence[_Frame], targets: Targets) -> None:
        """Place every frame; count those without a place."""
        placed: set[int] = set()
        named = {uid for frame in frames for uid, _ in frame.references}
        sources = {target.number for uid in named for target, _ in targets.find(uid)}
        sources |= {target.number for target in targets.of_series(self._series)}
        in_space = targets.of_frame(self._frame_of_reference)
        # The images of a series that it names share its space, whatever frames of reference they name.
        spaces = ("", self._frame_of_reference)
        drawn_on = [
            target
            for target in targets
            if target.number in sources
            and target.affine_lps is not None
            and target.frame_of_reference_uid in spaces
        ]
        # Frames drawn on a series without a place in space belong to its images and to no other series.
        for target in drawn_on or (() if sources else in_space):
            placed |= self._read_in_space(frames, target, is_source=bool(drawn_on))
        rest = [frame for frame in frames if frame.index not in placed]
        for frame in rest:
            self._read_by_reference(frame, targets, is_in_space=bool(in_space))

    def _read_in_space(self, frames: Sequence[_Frame], target: Target, *, is_source: bool) -> set[int]:
        """Read the slices of a series from the planes of the frames; return the frames that met one."""
        stacks: dict[tuple[float, ...], list[tuple[_Frame, Plane]]] = defaultdict(list)
        for frame in frames:
            if frame.plane is not None:
                axes = np.concatenate([frame.plane.per_column, frame.plane.per_row])
                stacks[tuple(np.round(axes, _ROUND).tolist())].append((frame, frame.plane))
        met: set[int] = set()
        for members in (group for same_axes in stacks.values() for group in _side_by_side(same_axes)):
            pitch = members[0][0].pitch_mm
            stack = PlaneStack([plane for _, plane in members], self._shape, pitch)
            at: Planes = defaultdict(dict)
            for (frame, _), position in zip(members, stack.position_of.tolist(), strict=True):
                at[position][frame.segment] = frame
            reach = stack.reach_mm(target, is_source=is_source)
            for index in range(target.num_slices):
                footprint = stack.footprint(target.plane(index), target.shape, reach)
                if footprint is None:
                    continue
                planes = [at[position] for position in footprint.planes()]
                met.update(frame.index for plane in planes for frame in plane.values())
                for segment in sorted({one for plane in planes for one in plane}, key=lambda one: one or 0):
                    pixels = footprint.read(partial(self._plate, at, segment))
                    self._add(segment, target, index, pixels)
        return met

    def _plate(self, at: Planes, segment: int | None, position: int) -> NDArray[Any] | None:
        frame = at[position].get(segment)
        return None if frame is None else self._stored(frame.index)

    def _read_by_reference(self, frame: _Frame, targets: Targets, *, is_in_space: bool) -> None:
        """Copy a frame onto the images that it names, where their grid is its own."""
        places = targets.find_all(frame.references)
        if not places:
            if frame.references:
                self._writer.dangling("IMAGE_NOT_PACKED")
            elif frame.plane is None:
                self._writer.dangling("NO_REFERENCE")
            else:
                self._writer.dangling("OUTSIDE" if is_in_space else "FRAME_OF_REFERENCE_UNKNOWN")
            return
        for target, index in places:
            if target.shape != self._shape:
                self._writer.dangling("GRID_MISMATCH")
            else:
                self._add(frame.segment, target, index, self._stored(frame.index))

    def _add(self, segment: int | None, target: Target, index: int, pixels: NDArray[Any]) -> None:
        if segment is not None:
            region = self._regions.get(segment)
            if region is not None:
                region.add_mask(target, index, self._mask(pixels))
            return
        for number in np.unique(pixels).tolist():
            region = self._regions.get(number)
            if region is not None and number != self._background:
                region.add_mask(target, index, (pixels == number).astype(np.uint8))

    def _mask(self, pixels: NDArray[Any]) -> NDArray[np.uint8]:
        if not self._is_fractional:
            binary: NDArray[np.uint8] = (pixels != 0).astype(np.uint8)
            return binary
        scaled = np.minimum(pixels.astype(np.uint32) * 255 + self._full // 2, self._full * 255)
        whole: NDArray[np.uint8] = (scaled // self._full).astype(np.uint8)
        return whole


def _side_by_side(members: Sequence[tuple[_Frame, Plane]]) -> list[Sequence[tuple[_Frame, Plane]]]:
    """Split frames by segment where planes at one height lie side by side: segments have a grid each."""
    normal, spacing = members[0][1].normal, min(members[0][1].spacing_mm)
    first: dict[float, Floats] = {}
    for _, plane in members:
        height = round(float(plane.origin @ normal), _ROUND_MM)
        if np.abs(plane.origin - first.setdefault(height, plane.origin)).max() > _SHIFTED * spacing:
            by_segment: dict[int | None, list[tuple[_Frame, Plane]]] = defaultdict(list)
            for frame, own in members:
                by_segment[frame.segment].append((frame, own))
            return list(by_segment.values())
    return [members]


def _facts(segment: Any, *, is_fractional: bool) -> RegionFacts:
    anatomy = next(iter(items_of(segment, "AnatomicRegionSequence")), None)
    kind = next(iter(items_of(segment, "SegmentedPropertyTypeCodeSequence")), None)
    sides = [
        side_of_code(code_of(kind, "SegmentedPropertyTypeModifierCodeSequence")),
        side_of_code(code_of(anatomy, "AnatomicRegionModifierSequence")),
    ]
    return RegionFacts(
        kind="segmentation",
        source="dicom-seg",
        label=text_of(segment, "SegmentLabel"),
        code=code_of(segment, "SegmentedPropertyTypeCodeSequence"),
        anatomy=code_of(segment, "AnatomicRegionSequence"),
        side=next((side for side in sides if side), None),
        tracking=text_of(segment, "TrackingUID"),
        is_fractional=is_fractional,
    )
