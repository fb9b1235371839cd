"""Encoders of volumes in bricks, a slab of slices at a time, and of levels of slides, a tile at a time.

`shardflow.format.volumes.bricks` reads them. The bytes depend on values, dtype and brick size alone.
"""

from __future__ import annotations

import io
import itertools
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, naming_os_errors
from shardflow.format.slice_codecs import b2nd
from shardflow.format.table import crc32c
from shardflow.format.volumes.bricks import (
    BRICK_COLUMNS,
    EncodedVolume,
    Extents,
    StoredVolume,
    block_shape,
    frame_around,
    grid_of,
    morton_order,
)
from shardflow.format.volumes.tiles import COLORS, WHITE, TileForm, tiff_header

BRICK_SHAPE: Final = (16, 64, 64)
"""Default size of a brick: slices, rows, columns."""
MAX_EXTENT: Final = 65535
"""Largest size of a volume along an axis."""
_SPOOL_BYTES: Final = 64 << 20
_WHAT: Final = "writing bricks to a temporary file"
_FULL: Final = 255
_COPY_BYTES: Final = 1 << 20


def suits_bricks(*, kind: Any, num_slices: int, num_samples: Any) -> bool:
    """Return whether a series is one that bricks are for.

    Args:
        kind: ``volume`` or another kind of series.
        num_slices: Of the series.
        num_samples: Values a pixel.
    """
    return bool(kind == "volume" and num_slices > 1 and num_samples == 1)


def fitting_brick_shape(shape: Sequence[int], wanted: Sequence[int] = BRICK_SHAPE) -> Extents:
    """Return the brick size for a volume: at most the wanted one, and as even as the shape allows.

    Where there are several along rows or columns, their sizes are even numbers, see `block_shape`.

    Args:
        shape: ``(D, H, W)`` of the volume.
        wanted: Largest size of a brick, in voxels.

    Example:
        >>> fitting_brick_shape((20, 512, 500))
        (10, 64, 64)
    """
    z, y, x = (-(-size // -(-size // min(most, size))) for size, most in zip(shape, wanted, strict=True))
    rows, columns = (
        min(size + size % 2, most) if size < whole else size
        for size, whole, most in zip((y, x), shape[1:], wanted[1:], strict=True)
    )
    return z, rows, columns


class VolumeEncoder:
    """Encoder of a volume that arrives slab by slab, in the memory of one brick beside the slab.

    Args:
        shape: ``(D, H, W)``.
        dtype: Integers or floats.
        brick_shape: Largest size of a brick, see `fitting_brick_shape`.
        is_fast: Compressed to be decoded fast, see `shardflow.format.codecs.FAST`.
        spool: Empty file for the encoded bricks, which are stored in another order than they come; in
            memory by default.

    Attributes:
        slab_num_slices: Slices of each slab but the last, which has what is left.

    Raises:
        FormatError: The shape or dtype is none of a volume.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        *,
        brick_shape: Sequence[int] = BRICK_SHAPE,
        is_fast: bool = False,
        spool: IO[bytes] | None = None,
    ) -> None:
        if len(shape) != 3 or not all(1 <= size <= MAX_EXTENT for size in shape) or dtype.kind not in "iuf":
            raise FormatError(
                f"a volume must be (slices, rows, columns) numbers, each size at most {MAX_EXTENT}, "
                f"got {dtype} {tuple(shape)}."
            )
        if len(brick_shape) != 3 or min(brick_shape) < 1:
            raise FormatError(f"a brick must have three sizes from 1, got {tuple(brick_shape)}.")
        self._shape: Extents = (int(shape[0]), int(shape[1]), int(shape[2]))
        self._dtype = dtype.newbyteorder("<")
        self._brick_shape = fitting_brick_shape(self._shape, brick_shape)
        self._grid = grid_of(self._shape, self._brick_shape)
        self.slab_num_slices = self._brick_shape[0]
        self._is_fast = is_fast
        self._spool: IO[bytes] = io.BytesIO() if spool is None else spool
        num_bricks = math.prod(self._grid)
        self._num_bricks = 0
        self._columns = {name: np.zeros(num_bricks, dtype) for name, dtype in BRICK_COLUMNS.items()}
        self._lowest = np.zeros(num_bricks, self._dtype)
        self._num_at_lowest = np.zeros(num_bricks, np.int64)

    def add(self, slab: NDArray[Any]) -> None:
        """Encode the next slices.

        Args:
            slab: ``(slab_num_slices, H, W)`` of the dtype; the last one ``(the rest, H, W)``.

        Raises:
            FormatError: The slab has another shape or dtype.
        """
        depth, rows, columns = self._brick_shape
        first = self._num_bricks // (self._grid[1] * self._grid[2]) * depth
        expected = (min(depth, self._shape[0] - first), *self._shape[1:])
        if slab.shape != expected or slab.dtype.newbyteorder("<") != self._dtype:
            raise FormatError(f"a slab must be {self._dtype} {expected}, got {slab.dtype} {slab.shape}.")
        for top in range(0, self._shape[1], rows):
            for left in range(0, self._shape[2], columns):
                box = slab[:, top : top + rows, left : left + columns]
                missing = [(0, size - has) for size, has in zip(self._brick_shape, box.shape, strict=True)]
                # Repeated edges keep the bounds of the values and compress better than zeros.
                whole = np.pad(box, missing, mode="edge") if any(add for _, add in missing) else box
                self._add_brick(np.ascontiguousarray(whole, self._dtype))

    def finish(self) -> EncodedVolume:
        """Return the volume.

        Raises:
            FormatError: Slices are missing.
        """
        num_bricks = len(self._lowest)
        if self._num_bricks != num_bricks:
            raise FormatError(
                f"a volume must have all its slices, got {self._num_bricks} of {num_bricks} bricks."
            )
        num_voxels = math.prod(self._brick_shape)
        num_low = np.where(self._lowest == np.fmin.reduce(self._lowest), self._num_at_lowest, 0)
        self._columns["occupancy"][:] = -(-(num_voxels - num_low) * _FULL // num_voxels)
        order = morton_order(self._grid, self._brick_shape)
        arrived = self._columns["num_bytes"].astype(np.int64)
        sizes = arrived[order]
        header, ending = frame_around(
            self._shape, self._dtype, self._brick_shape, sizes, is_fast=self._is_fast
        )
        columns = {name: column[order] for name, column in self._columns.items()}
        stored = StoredVolume(self._shape, self._brick_shape, self._dtype, len(header), columns)
        places = (np.cumsum(arrived) - arrived)[order]
        chunks = self._chunks(places.tolist(), sizes.tolist())
        num_bytes = len(header) + int(sizes.sum()) + len(ending)
        return EncodedVolume(stored, num_bytes, itertools.chain([header], chunks, [ending]))

    def _chunks(self, places: list[int], sizes: list[int]) -> Iterator[bytes]:
        for place, size in zip(places, sizes, strict=True):
            self._spool.seek(place)
            yield self._spool.read(size)

    def _add_brick(self, brick: NDArray[Any]) -> None:
        number = self._num_bricks
        blocks = block_shape(self._brick_shape, self._dtype.itemsize)
        chunk = b2nd.encode_chunk(brick, blocks, is_fast=self._is_fast)
        self._spool.write(chunk)
        self._lowest[number] = np.fmin.reduce(brick, axis=None)  # NaN is above everything
        self._num_at_lowest[number] = np.count_nonzero(brick == self._lowest[number])
        low, high = _bounds(brick)
        facts = {"num_bytes": len(chunk), "crc32c": crc32c(chunk), "low": low, "high": high}
        for name, value in facts.items():
            self._columns[name][number] = value
        self._num_bricks += 1


class _Spooled:
    """Writer through an unnamed file, in memory up to 64 MiB, which is closed with its block."""

    def __init__(self, folder: Path) -> None:
        with naming_os_errors(_WHAT):
            self._spool = tempfile.SpooledTemporaryFile(  # noqa: SIM115 - closed by __exit__
                max_size=_SPOOL_BYTES, dir=str(folder)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spool.close()


class VolumeWriter(_Spooled):
    """Encoder of a series that arrives slice by slice; a context manager.

    Memory is that of one layer of bricks (16 slices by default) and of a spool of 64 MiB, whatever the size
    of the series: encoded bricks wait in the spool, above its bound in an unnamed file, since they are stored
    in another order than they come.

    Args:
        shape: ``(D, H, W)``.
        dtype: Integers or floats.
        folder: For the unnamed file.
        brick_shape: Largest size of a brick, see `fitting_brick_shape`.
        is_fast: Compressed to be decoded fast, see `shardflow.format.codecs.FAST`.

    Attributes:
        num_slices_at_once: Slices of a layer of bricks.

    Raises:
        FormatError: The shape or dtype is none of a volume.
        StorageError: The spool cannot be made.
    """

    def __init__(
        self,
        shape: Extents,
        dtype: np.dtype[Any],
        *,
        folder: Path,
        brick_shape: Sequence[int] = BRICK_SHAPE,
        is_fast: bool = False,
    ) -> None:
        super().__init__(folder)
        self._encoder = VolumeEncoder(
            shape, dtype, brick_shape=brick_shape, is_fast=is_fast, spool=self._spool
        )
        self.num_slices_at_once = self._encoder.slab_num_slices
        self._slab = np.empty((self.num_slices_at_once, *shape[1:]), dtype)
        self._num_slices, self._num_left = 0, shape[0]

    def add(self, pixels: NDArray[Any]) -> None:
        """Take the next slice, ``(rows, columns)`` or ``(rows, columns, 1)``.

        Raises:
            StorageError: The spool cannot be written.
        """
        self._slab[self._num_slices] = pixels.reshape(self._slab.shape[1:])
        self._num_slices += 1
        self._num_left -= 1
        if self._num_slices == len(self._slab) or not self._num_left:
            with naming_os_errors(_WHAT):
                self._encoder.add(self._slab[: self._num_slices])
            self._num_slices = 0

    def finish(self) -> EncodedVolume:
        """Return the volume, whose pieces are read before the spool is closed.

        Raises:
            FormatError: Slices are missing.
        """
        return self._encoder.finish()


class LevelWriter(_Spooled):
    """Writer of a level of a slide, whose tiles arrive row by row; a context manager.

    Args:
        shape: Rows and columns of the level.
        tile_shape: Rows and columns of a tile.
        folder: For the unnamed file that tiles wait in above 64 MiB: the header in front of them has their
        sizes.

    Raises:
        StorageError: The file cannot be made.
    """

    def __init__(self, shape: tuple[int, int], tile_shape: tuple[int, int], *, folder: Path) -> None:
        super().__init__(folder)
        self._shape, self._tile_shape = (*shape, COLORS), (*tile_shape, COLORS)
        num_tiles = math.prod(grid_of(self._shape, self._tile_shape))
        self._columns = {name: np.zeros(num_tiles, dtype) for name, dtype in BRICK_COLUMNS.items()}
        # Equal bounds mean one value: what is not stored is white, and is never read.
        self._columns["low"][:] = self._columns["high"][:] = WHITE
        self._num_tiles = 0

    def add(self, payload: bytes | None, tissue: int) -> None:
        """Take the next tile.

        Args:
            payload: Its bytes; None for a tile that is not stored.
            tissue: Share of it that is tissue, in 1/255.

        Raises:
            StorageError: It cannot be written.
        """
        number = self._num_tiles
        self._num_tiles += 1
        if payload is None:
            return
        with naming_os_errors(_WHAT):
            self._spool.write(payload)
        facts = {"num_bytes": len(payload), "crc32c": crc32c(payload), "low": 0, "occupancy": tissue}
        for name, value in facts.items():
            self._columns[name][number] = value

    def finish(self, form: TileForm) -> EncodedVolume:
        """Return the level, whose pieces are read before the file is closed.

        Args:
            form: Of the tiles.

        Raises:
            FormatError: Tiles are missing.
        """
        sizes = self._columns["num_bytes"]
        if self._num_tiles != len(sizes):
            raise FormatError(f"a level must have all its tiles, got {self._num_tiles} of {len(sizes)}.")
        header = tiff_header(self._shape, self._tile_shape, sizes, form)
        stored = StoredVolume(
            self._shape, self._tile_shape, np.dtype(np.uint8), len(header), dict(self._columns)
        )
        num_bytes = len(header) + int(sizes.sum(dtype=np.int64))
        self._spool.seek(0)
        tiles = iter(lambda: self._spool.read(_COPY_BYTES), b"")
        return EncodedVolume(stored, num_bytes, itertools.chain([header], tiles))


def _bounds(brick: NDArray[Any]) -> tuple[np.float32, np.float32]:
    """Return bounds of a brick's values; equal ones (or two NaN) only where all voxels are that value."""
    first, lowest, highest = brick.flat[0], brick.min(), brick.max()
    with np.errstate(over="ignore"):
        low, high = np.float32(lowest), np.float32(highest)
    # Equal means equal in every bit: -0.0 is not 0.0, and a NaN has a payload.
    bits = brick.view(f"<u{brick.itemsize}")
    if (bits == bits.flat[0]).all() and _is_exact(low, first):
        return low, low
    if np.isnan(low):
        return np.float32(-np.inf), np.float32(np.inf)
    if low.item() > lowest.item():
        low = np.nextafter(low, np.float32(-np.inf))
    if high.item() < highest.item() or high == low:
        high = np.nextafter(high, np.float32(np.inf))
    return low, high


def _is_exact(value: np.float32, original: Any) -> bool:
    """Return whether a value is that of the dtype, and comes back from float32 with all its bits."""
    if original.dtype.kind == "f":
        return bool(value.astype(original.dtype).tobytes() == original.tobytes())
    return bool(value.item() == original.item())
