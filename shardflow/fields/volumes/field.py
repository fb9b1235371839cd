"""Volume: a region of one series of a sample, in its own grid or in another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    Field,
    FieldContext,
    NoContent,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
    check_count,
)
from shardflow.fields.layout import PixelDtype
from shardflow.fields.reader import Shard
from shardflow.fields.settings import (
    check_foreground,
    check_like,
    check_series,
    check_within,
    checked_center,
    checked_labels,
    checked_margin,
    checked_shape,
    checked_spacing,
    checked_windows,
    margins,
    window_ends,
)
from shardflow.fields.types.masks import Mask
from shardflow.fields.types.members import present_beside
from shardflow.fields.types.pixels import fill_value
from shardflow.fields.types.regions import Boxes
from shardflow.fields.volumes.crops import (
    Body,
    ColumnPlaces,
    Findings,
    Foreground,
    random_start,
    start_around,
    start_at_box,
)
from shardflow.fields.volumes.delivery import BoundRegion, Delivery, SlotVolume
from shardflow.fields.volumes.geometry import (
    Grid,
    Placement,
    Shape,
    Vector,
    alongside,
    check_orientation,
    finest_spacing,
    middle_start,
    oriented,
    spaced,
    stretched,
)
from shardflow.fields.volumes.regions import BoundVolumeBoxes, BoundVolumeMask
from shardflow.fields.volumes.resampling import Interpolation, source_region
from shardflow.fields.volumes.stored import (
    Crop,
    StoredVolume,
    VolumeTable,
    brick_plan,
    slice_fields,
    slice_knots,
)
from shardflow.fields.volumes.windows import (
    check_covers,
    checked_overlap,
    count_windows,
    num_windows,
    window_start,
)
from shardflow.format.volumes.bricks import RegionPlan

Center: TypeAlias = Literal["random", "foreground", "body", "finding", "middle", "whole", "grid"]
_DRAWN: Final = ("random", "foreground", "body")
DEFAULT_VOLUMES: Final = "kind is missing or kind == 'volume'"
"""Series that a volume selects where its spec names none."""
_MAX_CROPS: Final = 2**10
_MILLIMETERS: Final = ("orientation", "spacing_mm", "like")
"""Settings that need the place of a series in the patient."""


@dataclass(frozen=True, kw_only=True)
class Volume(Field):
    """Region of one series of a sample: a crop in voxels or millimeters, or the whole volume.

    ``(B, C, D, H, W)``. The axes D, H and W are slice, row and column of the stored series; with
    ``orientation`` they run in the directions that it names. The first selected series by acquisition is
    delivered. What lies outside of the volume is `fill`. Beside it: ``NAME_mask`` ``(B,)`` uint8, 1 where
    there is a volume; ``NAME_affine`` ``(B, 4, 4)`` float64, which maps the indices ``(d, h, w, 1)`` of the
    delivered array to LPS millimeters at voxel centers (NaN where the geometry of a series is unknown, the
    identity for an empty slot); ``NAME_range`` ``(B, 2)`` float32, the display range of the series; with
    ``valid_mask`` ``NAME_valid`` ``(B, 1, D, H, W)`` uint8, 1 for voxels inside of the stored volume. With
    ``center="grid"``, int64 each: ``NAME_index`` ``(B, 2)``, the number of the window and how many its
    volume has; ``NAME_start`` ``(B, 3)``, where it begins in the volume as delivered, negative where that is
    shorter; ``NAME_shape`` ``(B, 3)``, the voxels of that volume; all 0 for an empty slot.

    Only the slices (or bricks) that a region needs are read. Where it begins is an integer of the plan's
    keyed generator, so it is the same on any number of ranks and after a resume.

    Example::

        sf.Volume(series="modality == 'CT'", roi_size=(96, 96, 96), center="random")

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "volume"
    reads_previous: ClassVar[bool] = True

    series: str | None = None
    """Expression over the series table, such as ``"modality == 'CT' and slice_spacing_mm <= 2"``. None
    selects all volumes (`DEFAULT_VOLUMES`)."""
    roi_size: tuple[int, int, int] = (0, 0, 0)
    """Voxels (D, H, W) of the region, as delivered."""
    like: str | None = None
    """Name of another volume field, whose region is delivered of this series too, at the same places in
    millimeters: sequences of an MR study, PET on the grid of its CT. Where voxels do not coincide they are
    interpolated once. What says where regions are is left out, ``roi_size`` too; with ``missing="pad"`` a
    study may lack the series."""
    center: Center | str = "random"
    """Where the region is. ``random``: anywhere inside of the volume, drawn anew in each epoch; along an axis
    that is shorter than the region it is centered. ``foreground``: `pos` of `pos + neg` regions are around a
    voxel of `labels`, the others anywhere. ``body``: around a voxel of the body, so not in air. ``finding``:
    with ``unit="entity"``, around the slice that shows the finding best, and in it around annotated regions
    with the finding's label, if there are any and the dataset has a voxel table, else around the middle.
    ``middle``: around the middle. ``whole``: the region is the whole volume, brought to ``roi_size``
    along each axis, as for a classifier. ``grid``: with ``unit="window"`` a sample is one of the windows that
    cover the volume, see `overlap` and `Stitcher`. ``TABLE.COLUMN``: at a place of an attached table, in LPS
    millimeters: lists of 3 numbers (around the point) or of 6 (two corners of a box, which the region holds,
    or in which it lies where the box is longer); without a value the region is anywhere."""
    within: Literal["body", "foreground"] | None = None
    """With ``center`` ``random``, ``middle`` or ``whole``: the volume is first cut to the box around its
    body, or around the regions of `labels`, as by MONAI's ``CropForeground``; one without it stays whole."""
    overlap: float | tuple[float, float, float] = 0.25
    """With ``center="grid"``: part of a window, from 0 and below 1, that the next one along D, H and W covers
    again. Windows begin where those of MONAI's ``sliding_window_inference`` do, whose default this is;
    nnU-Net takes 0.5."""
    num_samples: int = 1
    """Regions of each sample, in neighboring slots of a micro-batch, from one read: B counts regions, and
    ``micro_batch_size`` must be a multiple of it. All fields of the loader fill these slots, and a bad sample
    masks all of its slots."""
    labels: Sequence[str] | None = None
    """With ``center="foreground"``: labels of regions, or values of codes; None for all. Each of them that a
    series has is as likely as the others, whatever its size, and so is each of at most 256 sampled voxels of
    it. Packing makes the table that has them, ``shardflow attach DATASET --voxels`` for older datasets.
    Regions are moved to be inside of the volume. With ``within="foreground"``: labels of the box."""
    pos: float = 1.0
    """With ``center="foreground"``: weight of regions around a voxel of `labels`. Its share of the regions
    of an epoch is exact: samples that have one take turns. As of MONAI's ``RandCropByPosNegLabel``."""
    neg: float = 1.0
    """With ``center="foreground"``: weight of regions anywhere."""
    spacing_mm: tuple[float, float, float] | None = None
    """Distance of voxels along D, H and W to resample to; None keeps the stored grid. The grid keeps the
    series' own directions, oblique ones too, and is centered in its box; of a tilted series (sheared slices)
    it is made perpendicular."""
    placement: Placement = "centered"
    """Where the points of ``spacing_mm`` are. ``centered``: as many as come closest to the length of the
    volume, centered in it. ``monai``: from the first voxel on, as by MONAI's ``Spacing``. ``torch``: as many
    as fit, spread over the volume, so their distances are a little longer, as by torch's ``interpolate`` in
    the code of CT-CLIP. With these two ``center="middle"`` cuts and pads an odd number of voxels as MONAI and
    CT-CLIP do. Points of a tilted series are centered."""
    orientation: str | None = None
    """Directions in which D, H and W run, as axis codes: ``"RAS"`` as in MONAI and nibabel, ``"SPL"`` for
    axial slices seen as radiologists see them. Axes are swapped and reversed, and nothing is interpolated.
    ``roi_size``, ``spacing_mm`` and ``margin`` count along the axes of the result. None keeps slice, row,
    column."""
    interpolation: Interpolation = "linear"
    """Between voxels where ``spacing_mm`` or ``center="whole"`` need it: ``linear`` of the 8 neighbors,
    ``cubic`` by a B-spline of order 3, ``nearest``; as ITK's interpolators of these names, once, from the
    stored voxels."""
    antialias: bool = False
    """Whether to smooth before a coarser grid is sampled, by a Gaussian of (r - 1) / 2 voxels for a step of
    r. False takes single points, as ITK, MONAI and most published preprocessing do."""
    windows: Sequence[tuple[float, float] | str] = ()
    """Windows as channels: ``(center, width)`` in the unit of the series, or a name such as ``"lung"``. Each
    channel (C) is cut to its window and scaled to 0 to 1 (uint8: 0 to 255)."""
    margin: int | tuple[int, int, int] = 0
    """Voxels around the region on each side that are delivered too, for an augmentation on the device that
    turns or bends: the shape is ``roi_size + 2 * margin``. The affine is that of the delivered array."""
    dtype: PixelDtype | None = None
    """None is the smallest dtype that holds every selected series of the population without loss;
    interpolated values are then rounded. A smaller one saturates, is logged once, and counted as
    ``saturated``. With ``windows`` None is float32."""
    fill: float | None = None
    """Value outside of the volume. None is air (-1024) where every selected series of the population is in
    HU, otherwise 0."""
    irregular: Literal["error", "resample"] = "error"
    """Series with missing slices or slices at irregular distances, as packing flags them: an error before
    step 0, or ``resample`` at their true places, linearly between the slices that there are, to the median
    distance or ``spacing_mm``."""
    valid_mask: bool = False
    """Whether ``NAME_valid`` is delivered."""

    def __post_init__(self) -> None:
        check_like(self.like, [one.name for one in fields(self) if getattr(self, one.name) != one.default])
        if self.like is None:
            object.__setattr__(self, "roi_size", checked_shape("roi_size", self.roi_size))
        checked_center(self.center, get_args(Center))
        check_choice("dtype", self.dtype, (None, "uint8", "int16", "uint16", "float32"))
        check_choice("missing", self.missing, ("pad", "drop", "error"))
        check_choice("interpolation", self.interpolation, ("linear", "nearest", "cubic"))
        check_choice("irregular", self.irregular, ("error", "resample"))
        if self.irregular == "resample" and self.interpolation == "cubic":
            raise ConfigError(
                "irregular='resample' is linear between slices; write interpolation='linear', or leave these "
                "series out."
            )
        object.__setattr__(self, "labels", checked_labels(self.labels))
        check_count("num_samples", self.num_samples, _MAX_CROPS)
        if self.num_samples > 1 and not (self.center in _DRAWN or self.has_column):
            raise ConfigError(
                f"num_samples={self.num_samples} regions of a sample are drawn, and center={self.center!r} "
                "draws none; write center='random', or leave num_samples out."
            )
        is_labeled = self.within == "foreground" and (self.pos, self.neg) == (1, 1)
        check_foreground(self.labels, self.pos, self.neg, is_used=self.center == "foreground" or is_labeled)
        check_within(self.within, self.center, self.labels)
        self._check_grid()
        self._check_windows()
        object.__setattr__(self, "windows", checked_windows(self.windows))
        if self.windows and self.dtype not in (None, "uint8", "float32"):
            raise ConfigError(
                "windows are delivered as float32 from 0 to 1, or with dtype='uint8' from 0 to 255, got "
                f"dtype={self.dtype!r}; leave one of them out."
            )
        check_series(self.series, "modality == 'CT'", "all volumes")
        for name in ("valid_mask", "antialias"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is True or False, got {getattr(self, name)!r}.")

    @property
    def depends_on(self) -> Sequence[str]:
        """The field whose region is delivered."""
        return () if self.like is None else (self.like,)

    def _check_grid(self) -> None:
        if self.orientation is not None:
            check_orientation(self.orientation)
        object.__setattr__(self, "margin", checked_margin(self.margin))
        check_choice("placement", self.placement, get_args(Placement))
        if self.spacing_mm is None:
            if self.placement != "centered":
                raise ConfigError(
                    f"placement={self.placement!r} is of points in millimeters; write spacing_mm, or leave "
                    "it out."
                )
            return
        object.__setattr__(self, "spacing_mm", checked_spacing(self.spacing_mm))
        if self.center == "whole":
            raise ConfigError(
                "center='whole' brings every volume to roi_size, so spacing_mm cannot be kept; leave "
                "spacing_mm out, or write center='middle' to cut or pad around the middle."
            )

    def _check_windows(self) -> None:
        overlap = checked_overlap(self.overlap)
        if self.center != "grid":
            if self.overlap != 0.25:
                raise ConfigError(
                    f"overlap={self.overlap!r} is of windows, and center={self.center!r} makes none; write "
                    "center='grid', or leave overlap out."
                )
            return
        check_covers(self.roi_size, overlap)
        object.__setattr__(self, "overlap", overlap if len({*overlap}) > 1 else overlap[0])
        if self.irregular == "resample" or margins(self.margin) != (0, 0, 0):
            raise ConfigError(
                "center='grid' takes neither irregular='resample', whose windows no table counts, nor "
                "margin; leave them out."
            )

    @property
    def has_windows(self) -> bool:
        """Whether a sample is a window of its volume."""
        return self.center == "grid"

    @property
    def num_crops(self) -> int:
        """The regions of each sample."""
        return self.num_samples

    @property
    def has_column(self) -> bool:
        """Whether regions are at places of an attached table."""
        return "." in self.center

    def for_evaluation(self) -> Volume:
        """Return the field with a region around the middle in place of one that is drawn."""
        if self.like is not None or (self.center not in _DRAWN and not self.has_column):
            return self
        labels = self.labels if self.within == "foreground" else None
        return replace(self, center="middle", labels=labels, pos=1.0, neg=1.0, num_samples=1)

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundVolume(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the regions, and what is beside them."""
        return present_beside(entry, arrays, BoundVolume.beside)


class BoundVolume(BoundRegion):
    """Field of volumes, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        context: The samples and their tables.

    Attributes:
        selected: Series that the field selects.
        shape: Voxels (D, H, W) of a delivered region.

    Raises:
        ConfigError: The field selects nothing, or series that it cannot deliver; or a sample has nothing for
            it and ``missing`` is ``error``.
    """

    beside = ("mask", "affine", "range", "valid", "index", "start", "shape")
    spec: Volume

    def __init__(self, name: str, spec: Volume, context: FieldContext) -> None:
        series = DEFAULT_VOLUMES if spec.series is None else spec.series
        selected = context.catalog.select(series, context.populations)
        selected.check(name, spec.series, pads=spec.missing == "pad", default=DEFAULT_VOLUMES)
        super().__init__(name, spec, selected, context)
        self.leader = None if spec.like is None else self._leader(spec.like, context)
        self._check_series()
        where = "" if spec.series is None else f" (series={spec.series!r})"
        self._count_missing(context, f"series for the field {name!r}{where}")
        stored = np.result_type(*(np.dtype(each) for each in self.selected.values("dtype") or ["uint8"]))
        windows = [window_ends(window) for window in spec.windows]
        plain = np.dtype(np.float32) if windows else stored
        self.dtype = plain if spec.dtype is None else np.dtype(spec.dtype)
        self.delivery = Delivery(
            name,
            dtype=self.dtype,
            fill=fill_value(name, spec.fill, self.selected, plain if windows else self.dtype),
            windows=windows,
            interpolation=spec.interpolation,
            antialias=spec.antialias,
            counters=context.counters,
        )
        self.margin = margins(spec.margin)
        depth, rows, columns = (
            size + 2 * more for size, more in zip(spec.roi_size, self.margin, strict=True)
        )
        self.shape: Shape = (depth, rows, columns) if self.leader is None else self.leader.shape
        self._tables = [VolumeTable(table) for table in self.selected.catalog.tables]
        self._foreground: Foreground | None = None
        if spec.center == "foreground":
            self._foreground = Foreground(
                name,
                spec.labels,
                pos=spec.pos,
                neg=spec.neg,
                num_crops=spec.num_samples,
                selected=self.selected,
                context=context,
            )
        self._body: Body | None = None
        if spec.center == "body" or spec.within is not None:
            self._body = Body(name, spec.labels, context)
        self._places = ColumnPlaces(name, spec.center, context) if spec.has_column else None
        self._findings = Findings(name, context) if spec.center == "finding" else None

    def _check_series(self) -> None:
        if max(self.selected.values("channels"), default=1) > 1:
            raise ConfigError(
                f"The field {self.name!r} selects color images, which are no volumes; add 'and "
                "channels == 1' to its series."
            )
        flags = {
            "irregular_spacing": "slices at irregular distances",
            "missing_slices": "missing slices",
        }
        for flag, what in flags.items() if self.spec.irregular == "error" else ():
            num_series = self.selected.num_flagged(flag)
            if num_series:
                raise ConfigError(
                    f"{num_series:,} series of the field {self.name!r} have {what}, so no affine maps them "
                    f"to millimeters; add 'and not flags.{flag}' to its series, or irregular='resample'."
                )
        needing = [name for name in _MILLIMETERS if getattr(self.spec, name) is not None]
        for one in (self, self.leader) if self.leader is not None else (self,):
            num_unknown = one.selected.num_without_affine()
            if num_unknown and needing:
                raise ConfigError(
                    f"{num_unknown:,} series of the field {one.name!r} have no known place in millimeters, "
                    f"which {' and '.join(needing)} of {self.name!r} need; add 'and slice_spacing_mm > 0' to "
                    "its series, or leave them out."
                )
        named = [window for window in self.spec.windows if isinstance(window, str)]
        if named and self.selected.values("unit") != ["HU"]:
            raise ConfigError(
                f"The window {named[0]!r} of the field {self.name!r} is in HU, and some of its series are "
                "not; add \"and unit == 'HU'\" to its series, or write windows as (center, width)."
            )

    def _leader(self, like: str, context: FieldContext) -> BoundVolume:
        """Return the field whose region is delivered."""
        found = context.bound.get(like)
        if not isinstance(found, BoundVolume) or found.leader is not None or found.spec.study != "own":
            volumes = [one for one in context.bound.values() if isinstance(one, BoundVolume)]
            names = [one.name for one in volumes if one.leader is None and one.spec.study == "own"]
            raise ConfigError(
                f"The field {self.name!r} is like {like!r}, which must be a volume of the sample's own study "
                f"with a region of its own; name one of: {', '.join(names) or 'none'}."
            )
        return found

    @property
    def has_content(self) -> list[NDArray[np.bool_]]:
        """Rows of each dataset's own table that have a series, ``(num_rows,)``, and one to be like."""
        found = super().has_content
        if self.leader is None:
            return found
        return [own & other for own, other in zip(found, self.leader.has_content, strict=True)]

    def finest_spacing_mm(self) -> Vector | None:
        """Return the least distance of stored voxels along D, H and W; None where no geometry is known."""
        affines = []
        for place, (table, population) in enumerate(
            zip(self.selected.catalog.tables, self._populations, strict=True)
        ):
            rows = self.selected.first_series(place)[population]
            affines.append(np.asarray(table.array("affine_lps"))[rows[rows >= 0]])
        return finest_spacing(np.concatenate(affines), self.spec.orientation)

    def num_windows(self, place: int) -> NDArray[np.int64] | None:
        """Return how many windows each study of the population has; None where samples are no windows."""
        if not self.spec.has_windows:
            return None
        rows = self.selected.first_series(place)
        studies = np.flatnonzero((rows >= 0) & self._populations[place])
        table, overlap = self._tables[place], checked_overlap(self.spec.overlap)
        first = self.selected.catalog.tables[place].first_series()
        found = np.zeros(len(rows), np.int64)
        found[studies] = count_windows(
            table,
            studies,
            rows[studies] - first[studies],
            lambda stored: self._grid(stored).shape,
            self.spec.roi_size,
            overlap,
        )
        return found

    def follow(self, name: str, spec: Field, context: FieldContext) -> BoundField | None:
        """Bind a field of masks or boxes in the regions of this one."""
        if isinstance(spec, Mask):
            return BoundVolumeMask(name, spec, context, self.shape, self.crop)
        if isinstance(spec, Boxes):
            return BoundVolumeBoxes(name, spec, context, self.shape, self.crop)
        return None

    @property
    def digests(self) -> Sequence[str]:
        """Digests of the tables of places."""
        found = (self._foreground, self._body, self._places, self._findings)
        return [digest for one in found if one is not None for digest in one.digests]

    @property
    def tables(self) -> Sequence[str]:
        """The attached table of places."""
        return () if self._places is None else (self._places.table,)

    # ---- arrays ----------------------------------------------------------------------------------

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        name, num_slots = self.name, len(slots)
        specs = [
            ArraySpec.of(name, self.dtype, num_slots, len(self.delivery.blank), *self.shape),
            ArraySpec.of(f"{name}_mask", np.uint8, num_slots),
            ArraySpec.of(f"{name}_affine", np.float64, num_slots, 4, 4),
            ArraySpec.of(f"{name}_range", np.float32, num_slots, 2),
        ]
        if self.spec.valid_mask:
            specs.append(ArraySpec.of(f"{name}_valid", np.uint8, num_slots, 1, *self.shape))
        if self.spec.has_windows:
            sides = (("index", 2), ("start", 3), ("shape", 3))
            specs += [ArraySpec.of(f"{name}_{one}", np.int64, num_slots, num) for one, num in sides]
        return specs

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without a volume."""
        arrays[self.name][slot] = self.delivery.blank
        self._blank_beside(arrays, slot)

    def example(self, arrays: Arrays) -> None:
        """Fill the only slot with a ramp of small values, and all that is beside it."""
        super().example(arrays)
        voxels = arrays[self.name]
        voxels[...] = (np.arange(voxels.size) % 100).astype(voxels.dtype).reshape(voxels.shape)
        arrays[f"{self.name}_range"][...] = 0, 99
        if f"{self.name}_valid" in arrays:
            arrays[f"{self.name}_valid"][...] = 1

    # ---- slots -----------------------------------------------------------------------------------

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the numbers of the slices of the region, and of the study's description."""
        return slice_fields(shard, request.row_in_shard, self.crop(shard, request))

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        crop = self.crop(shard, request)
        if crop is None:
            self.blank(arrays, request.slot)
            return NoContent()
        row = request.row_in_shard
        fields, plan = slice_fields(shard, row, crop), brick_plan(shard, row, crop)
        if self.spec.has_windows:
            self._put_window(request, crop.stored, arrays)
        return SlotVolume(self.delivery, shard, request.slot, arrays, crop, fields, plan)

    def needed_regions(self, shard: Shard, request: SlotRequest) -> list[RegionPlan]:
        """Return the region of a volume in bricks."""
        plan = brick_plan(shard, request.row_in_shard, self.crop(shard, request))
        return [] if plan is None else [plan]

    def crop(self, shard: Shard, request: SlotRequest) -> Crop | None:
        """Return what to deliver of a sample; None where it has no series."""
        found = self.selected.of_row(request.component, request.table_row)
        if not found:
            return None
        stored = self._tables[request.component].volume(request.study_row, found[0].series)
        knots = slice_knots(shard, request.row_in_shard, stored) if stored.is_irregular else None
        if self.leader is not None:
            return self._alongside(self.leader.crop(shard, request), stored, knots)
        box = None
        if self._body is not None and self.spec.within is not None:
            box = self._body.box(request.component, request.study_row, stored.series)
        grid = self._grid(stored, knots, box)
        start = self._start(grid, stored, request, found[0].center)
        depth, rows, columns = (at - more for at, more in zip(start, self.margin, strict=True))
        grid = grid.cropped((depth, rows, columns), self.shape)
        mode: Interpolation = "nearest" if grid.is_copy else self.spec.interpolation
        return Crop(stored, grid, source_region(grid, stored.shape, mode, self.delivery.sigmas(grid)))

    def _alongside(
        self, lead: Crop | None, stored: StoredVolume, knots: tuple[float, ...] | None
    ) -> Crop | None:
        """Return the region of another field in a series."""
        if lead is None:
            return None
        grid, own, other = lead.grid, lead.stored.affine, stored.affine
        if stored.series != lead.stored.series:
            assert own is not None and other is not None  # noqa: S101, PT018 - checked when they were bound
            grid = alongside(grid, own, other, knots)
        mode: Interpolation = "nearest" if grid.is_copy else self.spec.interpolation
        region = source_region(grid, stored.shape, mode, self.delivery.sigmas(grid))
        return Crop(stored, grid, region, like=lead.stored.series)

    def _grid(
        self,
        stored: StoredVolume,
        knots: tuple[float, ...] | None = None,
        box: Sequence[int] | None = None,
    ) -> Grid:
        """Return the grid of the whole volume, or of the box in it, as regions are cut from it."""
        spec, grid = self.spec, Grid(stored.shape)
        if knots is not None:
            grid = Grid((round(knots[-1]) + 1, *stored.shape[1:]), knots=knots)
        if stored.affine is not None and spec.orientation is not None:
            grid = oriented(grid, stored.affine, spec.orientation)
        grid = grid if box is None else grid.boxed(box)
        if stored.affine is not None and spec.spacing_mm is not None:
            grid = spaced(grid, stored.affine, spec.spacing_mm, spec.placement)
        return stretched(grid, spec.roi_size) if spec.center == "whole" else grid

    def _start(self, grid: Grid, stored: StoredVolume, request: SlotRequest, finding: int | None) -> Shape:
        """Return the first point of the region, without its margin; negative where it begins outside."""
        size, place = self.spec.roi_size, None
        if self.spec.has_windows:
            overlap = checked_overlap(self.spec.overlap)
            return window_start(grid.shape, size, overlap, self._window(request))
        if self._foreground is not None:
            place = self._foreground.place(request.draw, request.component, request.study_row, stored.series)
        elif self._places is not None:
            corners = self._places.corners(request.component, request.table_row, grid, stored.affine)
            if corners is not None:
                return start_at_box(grid.shape, size, *corners, request.draw)
        elif self._body is not None and self.spec.center == "body":
            place = self._body.place(request.draw, request.component, request.study_row, stored)
        elif self._findings is not None and finding is not None:
            place = self._findings.place(
                request.component, request.table_row, request.study_row, stored, finding
            )
        if place is not None:
            return start_around(grid.shape, size, grid.point(place))
        if self.spec.center in _DRAWN or self.spec.has_column:
            return random_start(grid.shape, size, request.draw)
        return middle_start(grid.shape, size, self.spec.placement)

    def _put_window(self, request: SlotRequest, stored: StoredVolume, arrays: Arrays) -> None:
        """Note which window of which volume a slot is."""
        name, slot, size = self.name, request.slot, self.spec.roi_size
        overlap, number = checked_overlap(self.spec.overlap), self._window(request)
        shape = self._grid(stored).shape
        arrays[f"{name}_index"][slot] = number, num_windows(shape, size, overlap)
        arrays[f"{name}_start"][slot] = window_start(shape, size, overlap, number)
        arrays[f"{name}_shape"][slot] = shape
