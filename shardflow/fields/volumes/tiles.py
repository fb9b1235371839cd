"""Tiles: regions of whole slides at a resolution, from tissue or from a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.decode import ThreadState
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    Field,
    FieldContext,
    NoContent,
    RegionContent,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
    check_count,
)
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Shard
from shardflow.fields.settings import check_series, checked_share
from shardflow.fields.types.members import present_beside
from shardflow.fields.volumes.crops import Turns, random_start, start_around
from shardflow.fields.volumes.delivery import BoundRegion
from shardflow.fields.volumes.windows import checked_overlap, step_of
from shardflow.format.contents.pictures import opencv
from shardflow.format.keys import level_field
from shardflow.format.volumes.bricks import BrickVolume, RegionPlan
from shardflow.format.volumes.tiles import COLORS, WHITE

TileCenter: TypeAlias = Literal["random", "tissue", "grid"]
DEFAULT_SLIDES: Final = "kind == 'slide'"
"""Series that tiles are cut from where a spec names none."""
_MAX_SIDE: Final = 2**12
_MAX_TILES: Final = 2**10
_MAX_STORED_PIXELS: Final = 2**26
"""Stored pixels of one region: 200 MB of memory."""
_MPP_TOLERANCE: Final = 1.02
"""A level of 0.51 microns counts as one of 0.5."""
_MPP_RANGE: Final = (0.01, 1000)
_EPSILON: Final = 1e-6
"""Delivered pixels by which a slide is taken to be whole numbers of them long."""
_HALF: Final = 128
_WORD_BITS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Tiles(Field):
    """Tile of a whole slide: a region at a chosen resolution.

    ``(B, 3, H, W)`` uint8, RGB. It is cut from the coarsest stored level that is at least as fine, and
    brought to ``mpp`` once, by area. What lies outside of the slide, or was not stored because it shows no
    tissue, is white (255). The first selected slide of a sample is delivered. Beside it: ``NAME_mask``
    ``(B,)`` uint8, 1 where there is a tile; ``NAME_start`` ``(B, 2)`` int64, row and column of its corner in
    the finest stored level, negative where it begins outside; ``NAME_shape`` ``(B, 2)`` int64, rows and
    columns of that level; ``NAME_mpp`` ``(B, 2)`` float32, microns per delivered pixel along rows and columns
    (NaN where the slide states none); ``NAME_tissue`` ``(B,)`` float32, the share of it that is tissue, by
    the map that packing made. With ``center="grid"`` ``NAME_index`` ``(B, 2)`` int64, the number of the tile
    and how many its slide has.

    Only the stored tiles that a region touches are read. Where it begins is an integer of the plan's keyed
    generator, so it is the same on any number of ranks and after a resume.

    Example::

        sf.Tiles(size=(256, 256), mpp=0.5, num_samples=8)

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "tiles"

    series: str | None = None
    """Expression over the series table, such as ``"kind == 'slide' and objective_power == 40"``. None selects
    all slides (`DEFAULT_SLIDES`)."""
    size: tuple[int, int] = (256, 256)
    """Rows and columns (H, W) of a tile, as delivered."""
    mpp: float | None = 0.5
    """Microns per delivered pixel; a slide that is stored coarser than that is refused. None takes the pixels
    of the finest stored level as they are."""
    center: TileCenter = "random"
    """Where tiles are. ``random``: drawn anew in each epoch, see `foreground`. ``tissue``: around the stored
    tile that has the most tissue, the first of several. ``grid``: with ``unit="window"`` a sample is one of
    the tiles that cover the slide, each pixel once without `overlap`; those without tissue read nothing."""
    num_samples: int = 1
    """Tiles of each sample, in neighboring slots of a micro-batch: B counts tiles, and ``micro_batch_size``
    must be a multiple of it."""
    foreground: float = 1.0
    """With ``center="random"``: share of the tiles of an epoch that are around a place with tissue, exactly:
    samples take turns. Every stored tile that is at least half tissue is as likely as the others; the rest
    are anywhere on the slide."""
    overlap: float = 0.0
    """With ``center="grid"``: part of a tile, from 0 and below 1, that the next one covers again."""

    def __post_init__(self) -> None:
        check_choice("center", self.center, ("random", "tissue", "grid"))
        check_choice("missing", self.missing, ("pad", "drop", "error"))
        size: Any = self.size
        if not isinstance(size, tuple | list) or len(size) != 2:
            raise ConfigError(f"size is rows and columns (H, W) of a tile, such as (256, 256), got {size!r}.")
        for side in size:
            check_count("each side of size", side, _MAX_SIDE)
        object.__setattr__(self, "size", (size[0], size[1]))
        least, most = _MPP_RANGE
        mpp: Any = self.mpp
        is_number = isinstance(mpp, int | float) and not isinstance(mpp, bool)
        if mpp is not None and not (is_number and least <= mpp <= most):
            raise ConfigError(
                f"mpp is microns per pixel, such as 0.5, or None for stored pixels, got {mpp!r}."
            )
        check_count("num_samples", self.num_samples, _MAX_TILES)
        checked_share("foreground", self.foreground)
        checked_overlap(self.overlap)
        if self.num_samples > 1 and self.center != "random":
            raise ConfigError(
                f"num_samples={self.num_samples} tiles of a sample are drawn, and center={self.center!r} "
                "draws none; write center='random', or leave num_samples out."
            )
        if self.foreground != 1 and self.center != "random":
            raise ConfigError(
                f"foreground={self.foreground!r} is of tiles that are drawn, and center={self.center!r} "
                "draws none; leave it out."
            )
        if self.overlap and self.center != "grid":
            raise ConfigError(
                f"overlap={self.overlap!r} is of a grid; write center='grid', or leave overlap out."
            )
        check_series(self.series, "kind == 'slide'", "all slides")

    @property
    def num_crops(self) -> int:
        """The tiles of each sample."""
        return self.num_samples

    @property
    def has_windows(self) -> bool:
        """Whether a sample is a tile of its slide."""
        return self.center == "grid"

    def for_evaluation(self) -> Tiles:
        """Return the field with the tile of most tissue in place of one that is drawn."""
        if self.center != "random":
            return self
        return replace(self, center="tissue", num_samples=1, foreground=1.0)

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundTiles(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the tiles, and what is beside them."""
        return present_beside(entry, arrays, BoundTiles.beside)


@dataclass(frozen=True, slots=True)
class _Slide:
    """A slide as the series table describes it."""

    series: int
    rows: int
    columns: int
    mpp: tuple[float, float]
    """Microns per pixel along rows and columns; NaN where it is unknown."""


@dataclass(frozen=True, slots=True)
class _Region:
    """Region of a level to deliver."""

    level: BrickVolume
    start: tuple[int, int]
    """In pixels of the level; may lie outside."""
    span: tuple[int, int]
    """Rows and columns of the level that become a tile."""
    scale: tuple[float, float]
    """Rows and columns of the finest stored level for one of this level."""

    @property
    def inside(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """First row and column inside of the level, and those after the last."""
        first = max(self.start[0], 0), max(self.start[1], 0)
        last = tuple(
            min(start + span, side)
            for start, span, side in zip(self.start, self.span, self.level.shape, strict=False)
        )
        return first, (last[0], last[1])

    def plan(self) -> RegionPlan:
        """Return what to read."""
        (top, left), (bottom, right) = self.inside
        return self.level.plan((top, left, 0), (bottom, right, COLORS))

    def tissue(self) -> float:
        """Return the share of the region that is tissue, by the shares of stored tiles."""
        (top, left), (bottom, right) = self.inside
        rows, columns, _ = self.level.brick_shape
        tiles = np.s_[top // rows : -(-bottom // rows), left // columns : -(-right // columns)]
        shares = self.level.columns["occupancy"].reshape(self.level.grid[:2])[tiles].astype(np.float64)
        weights = np.outer(_covered(top, bottom, rows), _covered(left, right, columns))
        return float((shares * weights).sum() / 255 / math.prod(self.span))


def _covered(first: int, last: int, side: int) -> NDArray[np.int64]:
    """Return how many pixels of each tile along an axis lie in a region."""
    starts = np.arange(first // side, -(-last // side)) * side
    return np.minimum(starts + side, last) - np.maximum(starts, first)


@dataclass(frozen=True, slots=True)
class GridAxis:
    """Tiles of a grid along one axis of a slide.

    A tile need not be a whole number of stored pixels long. Where one ends is rounded as where the next one
    begins, so that no pixel is between them, and the last one takes what is left.
    """

    length: float
    """Of the slide, in delivered pixels."""
    tile: int
    """Length of a tile."""
    step: int
    """Distance from one tile to the next."""

    @property
    def _whole(self) -> int:
        # A rest of less than a pixel is of the last tile.
        return max(int(self.length + _EPSILON), 1)

    @property
    def num(self) -> int:
        """Tiles along the axis."""
        return 1 + -(-max(self._whole - self.tile, 0) // self.step)

    def edges(self, number: int, side: int) -> tuple[int, int]:
        """Return the first pixel of a tile in a level of ``side`` pixels, and the one after its last.

        A slide that is shorter than a tile lies in the middle of it.
        """
        start = number * self.step - max(self.tile - self._whole, 0) // 2
        first, last = (math.floor(at * side / self.length + 0.5) for at in (start, start + self.tile))
        return first, max(last, side if number == self.num - 1 else first + 1)


class BoundTiles(BoundRegion):
    """Field of tiles, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        context: The samples and their tables.

    Attributes:
        selected: Slides that the field selects.

    Raises:
        ConfigError: The field selects nothing, what is no slide, or slides that are too coarse; or a sample
            has no slide and ``missing`` is ``error``.
    """

    beside = ("mask", "start", "shape", "mpp", "tissue", "index")
    spec: Tiles

    def __init__(self, name: str, spec: Tiles, context: FieldContext) -> None:
        selected = context.catalog.select(spec.series or DEFAULT_SLIDES, context.populations)
        selected.check(name, spec.series, pads=spec.missing == "pad", is_tiled=True)
        super().__init__(name, spec, selected, context)
        self._counters = context.counters
        self._check_resolution()
        self._count_missing(context, f"slide for the field {name!r}")
        self._turns: Turns | None = None
        if spec.center == "random":
            rows = [
                np.flatnonzero(population & has)
                for population, has in zip(context.populations, self.has_content, strict=True)
            ]
            share = Fraction(str(spec.foreground))
            self._turns = Turns("tile-foreground", rows, [share] * len(rows), spec.num_samples)

    def _check_resolution(self) -> None:
        if self.spec.mpp is None:
            return
        spacings = np.maximum(*(self.selected.column(f"{axis}_spacing_mm") for axis in ("row", "column")))
        num_unknown = int(np.count_nonzero(np.isnan(spacings)))
        if num_unknown:
            raise ConfigError(
                f"{num_unknown:,} slides of the field {self.name!r} state no scale, which "
                f"mpp={self.spec.mpp} needs; add 'and column_spacing_mm > 0' to its series, or write "
                "mpp=None for stored pixels."
            )
        is_coarse = 1000 * spacings > self.spec.mpp * _MPP_TOLERANCE
        if is_coarse.any():
            limit = self.spec.mpp * _MPP_TOLERANCE / 1000
            raise ConfigError(
                f"{np.count_nonzero(is_coarse):,} slides of the field {self.name!r} are stored coarser than "
                f"mpp={self.spec.mpp}, up to {1000 * float(spacings.max()):.3g}; write a larger mpp, or add "
                f"'and column_spacing_mm <= {limit:.6g}' to its series."
            )

    def num_windows(self, place: int) -> NDArray[np.int64] | None:
        """Return how many tiles cover the slide of each study of the population; None without a grid."""
        if not self.spec.has_windows:
            return None
        rows = self.selected.first_series(place)
        first = self.selected.catalog.tables[place].first_series()
        found = np.zeros(len(rows), np.int64)
        for study in np.flatnonzero((rows >= 0) & self._populations[place]).tolist():
            slide = self._slide(place, study, int(rows[study] - first[study]))
            found[study] = math.prod(axis.num for axis in self._grid(slide))
        return found

    # ---- arrays ----------------------------------------------------------------------------------

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        name, num_slots = self.name, len(slots)
        specs = [
            ArraySpec.of(name, np.uint8, num_slots, COLORS, *self.spec.size),
            ArraySpec.of(f"{name}_mask", np.uint8, num_slots),
            ArraySpec.of(f"{name}_start", np.int64, num_slots, 2),
            ArraySpec.of(f"{name}_shape", np.int64, num_slots, 2),
            ArraySpec.of(f"{name}_mpp", np.float32, num_slots, 2),
            ArraySpec.of(f"{name}_tissue", np.float32, num_slots),
        ]
        if self.spec.has_windows:
            specs.append(ArraySpec.of(f"{name}_index", np.int64, num_slots, 2))
        return specs

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without a slide."""
        arrays[self.name][slot] = WHITE
        self._blank_beside(arrays, slot)

    def example(self, arrays: Arrays) -> None:
        """Fill the only slot with a ramp of colors, and all that is beside it."""
        super().example(arrays)
        pixels = arrays[self.name]
        pixels[...] = (np.arange(pixels.size) % 251).astype(np.uint8).reshape(pixels.shape)
        arrays[f"{self.name}_shape"][...] = self.spec.size
        arrays[f"{self.name}_mpp"][...] = self.spec.mpp or math.nan
        arrays[f"{self.name}_tissue"][...] = 1

    # ---- slots -----------------------------------------------------------------------------------

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:  # noqa: ARG002
        """Return no stored fields: tiles are regions."""
        return ()

    def needed_regions(self, shard: Shard, request: SlotRequest) -> list[RegionPlan]:
        """Return the region of a level."""
        region = self._region(shard, request)
        return [] if region is None else [region.plan()]

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot."""
        region = self._region(shard, request)
        if region is None:
            self.blank(arrays, request.slot)
            return NoContent()
        name, slot, slide = self.name, request.slot, self._slide_of(request)
        assert slide is not None  # noqa: S101 - it has a region
        arrays[f"{name}_mask"][slot] = 1
        arrays[f"{name}_start"][slot] = [
            math.floor(at * scale + 0.5) for at, scale in zip(region.start, region.scale, strict=True)
        ]
        arrays[f"{name}_shape"][slot] = slide.rows, slide.columns
        arrays[f"{name}_mpp"][slot] = [
            mpp * scale * span / side
            for mpp, scale, span, side in zip(
                slide.mpp, region.scale, region.span, self.spec.size, strict=True
            )
        ]
        arrays[f"{name}_tissue"][slot] = region.tissue()
        if self.spec.has_windows:
            num = math.prod(axis.num for axis in self._grid(slide))
            arrays[f"{name}_index"][slot] = self._window(request), num
        return _SlotTile(self, region, arrays[name][slot], shard)

    def deliver(
        self, pixels: NDArray[np.uint8], target: NDArray[np.uint8], thread: ThreadState, place: str
    ) -> None:
        """Bring the pixels of a region, ``(rows, columns, 3)``, to the size of a tile, ``(3, H, W)``."""
        thread.enter("transform", place)
        with self._counters.timed("transform", target.nbytes):
            if pixels.shape[:2] != self.spec.size:
                cv2 = opencv()
                (rows, columns), (height, width) = pixels.shape[:2], self.spec.size
                shrinks = height <= rows and width <= columns
                mode = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
                pixels = np.asarray(cv2.resize(pixels, (width, height), interpolation=mode), np.uint8)
            target[...] = pixels.transpose(2, 0, 1)

    # ---- places ----------------------------------------------------------------------------------

    def _grid(self, slide: _Slide) -> tuple[GridAxis, GridAxis]:
        """Return the tiles of a slide along rows and columns."""
        overlap, mpp = float(self.spec.overlap), self.spec.mpp
        rows, columns = (
            GridAxis(float(side) if mpp is None else side * own / mpp, tile, step_of(tile, overlap))
            for side, own, tile in zip((slide.rows, slide.columns), slide.mpp, self.spec.size, strict=True)
        )
        return rows, columns

    def _slide(self, component: int, study: int, series: int) -> _Slide:
        table = self.selected.catalog.tables[component]
        row = int(table.array("first_series")[study]) + series
        rows, columns = (int(table.array(name)[row]) for name in ("rows", "columns"))
        down, across = (1000 * float(table.array(f"{name}_spacing_mm")[row]) for name in ("row", "column"))
        return _Slide(series, rows, columns, (down, across))

    def _slide_of(self, request: SlotRequest) -> _Slide | None:
        found = self.selected.of_row(request.component, request.table_row)
        return self._slide(request.component, request.study_row, found[0].series) if found else None

    def _region(self, shard: Shard, request: SlotRequest) -> _Region | None:
        """Return what to deliver of a sample; None where it has no slide.

        Raises:
            BadSample: Its levels are not stored, or the region takes too much memory.
        """
        slide = self._slide_of(request)
        if slide is None:
            return None
        bricks, levels = shard.index.bricks, shard.index.levels_of(request.row_in_shard, slide.series)
        if bricks is None or not levels:
            raise shard.bad(BadSampleReason.FIELD_MISSING, level_field(slide.series, 0))
        sizes = [bricks.shapes[bricks.row_of(level)].tolist() for level in levels]
        if sizes[0][:2] != [slide.rows, slide.columns]:
            raise shard.bad(
                BadSampleReason.SIZE_MISMATCH, levels[0], "another slide than in the series table"
            )
        spans = [self._span(slide, size) for size in sizes]
        # The coarsest level that need not be enlarged.
        fine = [at for at, span in enumerate(spans) if _is_fine(span, self.spec.size)]
        at = max(fine, default=0)
        if math.prod(spans[at]) > _MAX_STORED_PIXELS:
            detail = f"a tile of {spans[at][0]} x {spans[at][1]} stored pixels; pack a coarser level too"
            raise shard.bad(BadSampleReason.SIZE_MISMATCH, levels[at], detail)
        level = shard.index.volume(levels[at])
        scale = slide.rows / level.shape[0], slide.columns / level.shape[1]
        if not self.spec.has_windows:
            return _Region(level, self._start(request, level, spans[at]), spans[at], scale)
        axes = self._grid(slide)
        cell = divmod(self._window(request), axes[1].num)
        (top, bottom), (left, right) = (
            axis.edges(number, side) for axis, number, side in zip(axes, cell, level.shape, strict=False)
        )
        return _Region(level, (top, left), (bottom - top, right - left), scale)

    def _span(self, slide: _Slide, size: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of a level that become a tile."""
        mpp = self.spec.mpp
        if mpp is None:
            # Coarser levels are never taken.
            is_finest = size[0] == slide.rows
            return self.spec.size if is_finest else (0, 0)
        rows, columns = (
            max(1, round(side * mpp * own / (whole * each)))
            for side, own, whole, each in zip(
                self.spec.size, size, (slide.rows, slide.columns), slide.mpp, strict=False
            )
        )
        return rows, columns

    def _start(self, request: SlotRequest, level: BrickVolume, span: tuple[int, int]) -> tuple[int, int]:
        """Return the first row and column of a region in its level."""
        lengths, size = (1, *level.shape[:2]), (1, *span)
        place = None
        if self._turns is None or self._turns.is_turn(request.draw, request.component):
            place = self._place(request, level)
        if place is None:
            _, row, column = random_start(lengths, size, request.draw)
        else:
            _, row, column = start_around(lengths, size, (0.0, *place))
        return row, column

    def _place(self, request: SlotRequest, level: BrickVolume) -> tuple[float, float] | None:
        """Return a pixel of a stored tile with tissue; None where there is none."""
        shares, (height, width) = level.columns["occupancy"], level.brick_shape[:2]
        most = int(shares.max(initial=0))
        if not most:
            return None
        if self._turns is None:
            number = int(shares.argmax())
            inside = height // 2, width // 2
        else:
            tiles = np.flatnonzero(shares >= min(most, _HALF))
            number = int(tiles[len(tiles) * request.draw.derive("tile") >> _WORD_BITS])
            inside = (
                height * request.draw.derive("tile-row") >> _WORD_BITS,
                width * request.draw.derive("tile-column") >> _WORD_BITS,
            )
        row, column = divmod(number, level.grid[1])
        return float(row * height + inside[0]), float(column * width + inside[1])


def _is_fine(span: tuple[int, int], size: tuple[int, int]) -> bool:
    """Return whether a region of a level need not be enlarged, but for the tolerance."""
    return all(pixels * _MPP_TOLERANCE >= side for pixels, side in zip(span, size, strict=True))


class _SlotTile(RegionContent):
    """Tile of one slot."""

    __slots__ = ("_canvas", "_field", "_region", "_shard", "_target", "fields", "plans")

    def __init__(self, field: BoundTiles, region: _Region, target: NDArray[np.uint8], shard: Shard) -> None:
        self._field, self._region, self._target, self._shard = field, region, target, shard
        self.fields, self.plans = (), (region.plan(),)
        self._canvas: NDArray[np.uint8] | None = None

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Do nothing: no field is read."""

    def target(self, place: int, thread: ThreadState) -> NDArray[Any]:  # noqa: ARG002 - one plan
        """Return where to decode the region, ``(rows, columns, 3)``."""
        region, (first, last) = self._region, self._region.inside
        canvas = self._canvas = thread.scratch.lend((*region.span, COLORS), np.dtype(np.uint8))
        if (last[0] - first[0], last[1] - first[1]) != region.span:
            canvas[...] = WHITE
        rows, columns = (
            slice(low - start, high - start)
            for low, high, start in zip(first, last, region.start, strict=True)
        )
        return canvas[rows, columns]

    def put_region(self, place: int, thread: ThreadState) -> None:  # noqa: ARG002 - one plan
        """Deliver the tile."""
        assert self._canvas is not None  # noqa: S101 - it was decoded into
        self._field.deliver(self._canvas, self._target, thread, f"shard {self._shard.name}")
        thread.scratch.take_back(self._canvas)
        self._canvas = None

    def close(self) -> None:
        """Do nothing more."""
