"""A stored series to annotate, and the way from a reader to what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.format.codecs import decode_array
from shardflow.format.keys import parse_mask_field
from shardflow.packing.attachments.annotations.region_writer import RegionWriter
from shardflow.packing.attachments.annotations.targets import AnnotationLimits, Target, Targets
from shardflow.packing.attachments.annotations.vocabulary import Vocabulary

__all__ = ["FRAME", "SERIES", "Result", "affine_of", "make_target", "new_writer", "read", "sop_uid"]

SERIES = "1.2.826.0.1.3680043.8.498.77"
FRAME = "1.2.826.0.1.3680043.8.498.88"


def sop_uid(index: int, series: str = SERIES) -> str:
    """SOP Instance UID of a slice."""
    return f"{series}.{index + 1}"


def affine_of(
    turn: NDArray[np.float64] | None = None,
    spacing: tuple[float, float, float] = (0.8, 0.7, 2.5),
    origin: Sequence[float] = (-20.0, -30.0, 5.0),
) -> list[list[float]]:
    """Affine of columns, rows and slices with these steps, turned."""
    affine = np.eye(4)
    affine[:3, :3] = (np.eye(3) if turn is None else turn) @ np.diag(spacing)
    affine[:3, 3] = origin
    return [[float(cell) for cell in row] for row in affine]


def make_target(
    num_slices: int = 5, rows: int = 24, columns: int = 32, *, number: int = 0, **facts: Any
) -> Target:
    """One stored series; with an affine, unless ``affine_lps`` is given."""
    affine = facts.pop("affine_lps", affine_of())
    series = facts.pop("series_uid", SERIES)
    frame = facts.pop("frame_of_reference_uid", FRAME)
    return Target(
        number=number,
        rows=rows,
        columns=columns,
        instances=facts.pop("instances", [(sop_uid(index, series), 1) for index in range(num_slices)]),
        series_uid=series,
        frame_of_reference_uid=frame,
        affine_lps=affine,
        **facts,
    )


def new_writer(limits: AnnotationLimits | None = None) -> RegionWriter:
    """Make a writer whose surrogates can be told from what they stand for."""
    return RegionWriter(
        vocabulary=Vocabulary(),
        surrogate=lambda kind, value: f"{kind}{len(value)}",
        limits=limits or AnnotationLimits(),
    )


class Result:
    """What a reader said."""

    def __init__(self, writer: RegionWriter, targets: Sequence[Target]) -> None:
        part, self.fields = writer.finish()
        self.rois: list[dict[str, Any]] = part["rois"]
        self.dangling = {one["reason"]: one["count"] for one in part["dangling"]}
        self._targets = {target.number: target for target in targets}

    def masks(self, roi: int = 0) -> NDArray[np.uint8]:
        """Masks of a region in all slices of its series, ``(num_slices, rows, columns)``."""
        target = self._targets[self.rois[roi]["series"]]
        volume = np.zeros((target.num_slices, *target.shape), np.uint8)
        for name, payload in self.fields.items():
            field = parse_mask_field(name)
            assert field is not None
            if field.roi == self.rois[roi]["roi"]:
                assert field.series == target.number
                volume[field.index] = decode_array(field.codec, payload)
        return volume


def read(
    reader: Callable[[Targets, RegionWriter], None],
    *targets: Target,
    limits: AnnotationLimits | None = None,
) -> Result:
    """Run a reader over series."""
    writer = new_writer(limits)
    reader(Targets(targets), writer)
    return Result(writer, targets)
