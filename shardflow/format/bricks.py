"""Volumes in bricks: encoding, the brick table of a shard, and reading any region.

A volume is one member of a sample, a Blosc2 NDArray frame that plain blosc2 reads; each of its chunks is one
*brick*, a box of about 16 x 64 x 64 voxels. Bricks are stored in Morton order (G. M. Morton, 1966: the bits
of their coordinates interleaved), so that neighbors in space are neighbors in the file. The *brick table*
beside a shard repeats where each brick lies, with its crc32c and the bounds of its values: a region is read
by ranges of bytes, and bricks of one value are not read at all. docs/format.md, section 20, has the layout.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, FormatError
from shardflow.format.index import ShardIndex
from shardflow.format.keys import Json
from shardflow.format.slice_codecs import b2nd
from shardflow.format.table import Table, crc32c, encode_table

KIND: Final = "bricks"
FORMAT_VERSION: Final = 1
BRICK_SHAPE: Final = (16, 64, 64)
"""Default size of a brick: slices, rows, columns."""
_MAX_EXTENT: Final = 65535
# Chunks of one value, which are never read, are the usual gaps between the bricks of a region.
_MAX_GAP_NUM_BYTES: Final = 4096
_FULL: Final = 255
_COLUMNS: Final = {
    "num_bytes": "<u4",
    "crc32c": "<u4",
    "low": "<f4",
    "high": "<f4",
    "occupancy": "|u1",
}
_SCRATCH: Final = threading.local()

Extents = tuple[int, int, int]


def fitting_brick_shape(shape: Sequence[int], wanted: Sequence[int] = BRICK_SHAPE) -> Extents:
    """Return the brick size for a volume: at most the wanted one, and as even as the shape allows.

    Args:
        shape: ``(D, H, W)`` of the volume.
        wanted: Largest size of a brick, in voxels.

    Example:
        >>> fitting_brick_shape((20, 512, 500))
        (10, 64, 63)
    """
    z, y, x = (-(-size // -(-size // min(most, size))) for size, most in zip(shape, wanted, strict=True))
    return z, y, x


@functools.lru_cache(maxsize=256)
def morton_order(grid: Extents, brick_shape: Extents) -> NDArray[np.int64]:
    """Return the bricks of a grid, as positions in C order, in the order in which they are stored.

    Coordinates are first brought to about equal lengths: those along the longer sides of a brick are
    multiplied by a power of two. Of bits of equal rank the column's is the lowest, then the row's.

    Example:
        >>> morton_order((2, 1, 3), (64, 64, 64)).tolist()
        [0, 1, 3, 4, 2, 5]
        >>> morton_order((4, 1, 2), (16, 64, 64)).tolist()
        [0, 2, 4, 6, 1, 3, 5, 7]
    """
    coordinates = np.indices(grid).reshape(3, -1)
    codes = np.zeros(coordinates.shape[1], np.uint64)
    # Whole numbers: logarithms are rounded differently from computer to computer.
    shifts = [(size // min(brick_shape)).bit_length() - 1 for size in brick_shape]
    bits = [
        (bit + shift, place, axis >> bit & 1)
        for place, (axis, shift, size) in enumerate(
            zip(coordinates[::-1], shifts[::-1], grid[::-1], strict=True)
        )
        for bit in range(size.bit_length())
    ]
    for rank, (_, _, values) in enumerate(sorted(bits, key=lambda entry: entry[:2])):
        codes |= values.astype(np.uint64) << np.uint64(rank)
    order = np.argsort(codes, kind="stable")
    order.flags.writeable = False
    return order


@functools.lru_cache(maxsize=256)
def _stored_places(grid: Extents, brick_shape: Extents) -> NDArray[np.int64]:
    """Return the place of each brick in the order of storage, ``grid``."""
    order = morton_order(grid, brick_shape)
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    places.flags.writeable = False
    return places.reshape(grid)


@dataclass(frozen=True, slots=True)
class EncodedVolume:
    """A volume as it is stored: the member's bytes, and its rows of the brick table."""

    shape: Extents
    brick_shape: Extents
    dtype: np.dtype[Any]
    pieces: Sequence[bytes]
    """The frame, in pieces that follow one another."""
    first_chunk: int
    """Where the first brick begins in the frame, in bytes."""
    columns: Mapping[str, NDArray[Any]]
    """Columns of the bricks, in the order of storage."""

    @property
    def frame(self) -> bytes:
        """The whole frame."""
        return b"".join(self.pieces)


class VolumeEncoder:
    """Encoder of a volume that arrives slab by slab, in the memory of its compressed bricks and one slab.

    Args:
        shape: ``(D, H, W)``.
        dtype: Integers or floats.
        brick_shape: Largest size of a brick, see `fitting_brick_shape`.

    Attributes:
        slab_num_slices: Slices of each slab but the last, which has what is left.

    Raises:
        FormatError: The shape or dtype is none of a volume.
    """

    def __init__(
        self, shape: Sequence[int], dtype: np.dtype[Any], *, brick_shape: Sequence[int] = BRICK_SHAPE
    ) -> None:
        if len(shape) != 3 or not all(1 <= size <= _MAX_EXTENT for size in shape) or dtype.kind not in "iuf":
            raise FormatError(
                f"a volume must be (slices, rows, columns) numbers, each size at most {_MAX_EXTENT}, "
                f"got {dtype} {tuple(shape)}."
            )
        if len(brick_shape) != 3 or min(brick_shape) < 1:
            raise FormatError(f"a brick must have three sizes from 1, got {tuple(brick_shape)}.")
        self._shape: Extents = (int(shape[0]), int(shape[1]), int(shape[2]))
        self._dtype = dtype.newbyteorder("<")
        self._brick_shape = fitting_brick_shape(self._shape, brick_shape)
        self._grid = _grid(self._shape, self._brick_shape)
        self.slab_num_slices = self._brick_shape[0]
        self._chunks: list[bytes] = []
        self._bounds: list[tuple[np.float32, np.float32]] = []
        self._lowest: list[Any] = []
        self._num_at_lowest: list[int] = []

    def add(self, slab: NDArray[Any]) -> None:
        """Encode the next slices.

        Args:
            slab: ``(slab_num_slices, H, W)`` of the dtype; the last one ``(the rest, H, W)``.

        Raises:
            FormatError: The slab has another shape or dtype.
        """
        depth, rows, columns = self._brick_shape
        first = len(self._chunks) // (self._grid[1] * self._grid[2]) * depth
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
        num_bricks = math.prod(self._grid)
        if len(self._chunks) != num_bricks:
            raise FormatError(
                f"a volume must have all its slices, got {len(self._chunks)} of {num_bricks} bricks."
            )
        order = morton_order(self._grid, self._brick_shape)
        chunks = [self._chunks[place] for place in order.tolist()]
        sizes = np.array([len(chunk) for chunk in chunks], np.int64)
        offsets = np.empty(num_bricks, "<i8")
        offsets[order] = np.where(sizes > 0, np.cumsum(sizes) - sizes, b2nd.ZEROS_OFFSET)
        header, ending = b2nd.frame_around(
            self._shape, self._dtype, self._brick_shape, offsets, int(sizes.sum())
        )
        bounds = np.array(self._bounds, "<f4")[order]
        columns = {
            "num_bytes": sizes.astype("<u4"),
            "crc32c": np.array([crc32c(chunk) for chunk in chunks], "<u4"),
            "low": np.ascontiguousarray(bounds[:, 0]),
            "high": np.ascontiguousarray(bounds[:, 1]),
            "occupancy": self._occupancy()[order],
        }
        return EncodedVolume(
            self._shape, self._brick_shape, self._dtype, [header, *chunks, ending], len(header), columns
        )

    def _add_brick(self, brick: NDArray[Any]) -> None:
        lowest = brick.min()
        self._chunks.append(b2nd.encode_chunk(brick))
        self._bounds.append(_bounds(brick))
        self._lowest.append(lowest)
        self._num_at_lowest.append(int(np.count_nonzero(brick == lowest)))

    def _occupancy(self) -> NDArray[np.uint8]:
        """Return the share of the voxels of each brick above the lowest value of the volume, in C order."""
        lowest = np.array(self._lowest, self._dtype)
        num_voxels = math.prod(self._brick_shape)
        num_low = np.where(lowest == np.fmin.reduce(lowest), self._num_at_lowest, 0)
        return (-(-(num_voxels - num_low) * _FULL // num_voxels)).astype("|u1")


def encode_volume(array: NDArray[Any], *, brick_shape: Sequence[int] = BRICK_SHAPE) -> EncodedVolume:
    """Encode a volume that is in memory; the same bytes as slab by slab.

    Args:
        array: ``(D, H, W)``, integers or floats; any strides and byte order.
        brick_shape: Largest size of a brick, see `fitting_brick_shape`.

    Raises:
        FormatError: The shape or dtype is none of a volume.
    """
    encoder = VolumeEncoder(array.shape, array.dtype, brick_shape=brick_shape)
    for first in range(0, array.shape[0], encoder.slab_num_slices):
        encoder.add(array[first : first + encoder.slab_num_slices])
    return encoder.finish()


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


def encode_brick_table(shard: str, volumes: Iterable[tuple[int, EncodedVolume]]) -> bytes:
    """Encode the brick table of a shard.

    Args:
        shard: Name of the shard.
        volumes: Number of the field in the shard's index, and the volume that it holds, by number.

    Raises:
        FormatError: The numbers do not ascend.
    """
    chosen = list(volumes)
    fields = np.array([number for number, _ in chosen], "<u4")
    if (np.diff(fields.astype(np.int64)) <= 0).any():
        raise FormatError(f"volumes must ascend by field, got another order ({shard}).")
    each = [volume for _, volume in chosen]
    first_brick = np.zeros(len(each) + 1, "<u8")
    np.cumsum([len(volume.columns["num_bytes"]) for volume in each], out=first_brick[1:])
    columns: dict[str, NDArray[Any]] = {
        "field": fields,
        "shape": np.array([volume.shape for volume in each], "<u4").reshape(-1, 3),
        "brick_shape": np.array([volume.brick_shape for volume in each], "<u2").reshape(-1, 3),
        "dtype": np.array([volume.dtype.str.encode("ascii") for volume in each], "S3"),
        "first_chunk": np.array([volume.first_chunk for volume in each], "<u4"),
        "first_brick": first_brick,
    }
    for name, dtype in _COLUMNS.items():
        parts = [volume.columns[name] for volume in each]
        columns[name] = np.concatenate([np.zeros(0, dtype), *parts])
    meta: dict[str, Json] = {"kind": KIND, "format_version": FORMAT_VERSION, "shard": shard}
    return encode_table(columns, meta)


class BrickTable:
    """Brick table of a shard, open for reading. Safe for many threads; no object per brick.

    Attributes:
        shard: Name of the shard.
        num_volumes: Number of volumes.
        fields: ``(num_volumes,)`` numbers of their fields in the shard's index, ascending.

    Raises:
        FormatError: The table is no brick table of format 1.
        ChecksumError: The table is damaged.
    """

    def __init__(self, table: Table) -> None:
        table.expect_kind(KIND, FORMAT_VERSION)
        self.name = table.name
        self.shard: str = table.meta.get("shard", "")
        self.fields: NDArray[np.int64] = table.column("field").astype(np.int64)
        self.num_volumes = len(self.fields)
        self._shapes: NDArray[np.int64] = table.column("shape").astype(np.int64)
        self._brick_shapes: NDArray[np.int64] = table.column("brick_shape").astype(np.int64)
        self._dtypes: list[bytes] = table.column("dtype").tolist()
        self._first_chunk: NDArray[np.int64] = table.column("first_chunk").astype(np.int64)
        self._first_brick: NDArray[np.int64] = table.column("first_brick").astype(np.int64)
        self._columns = {name: table.column(name) for name in _COLUMNS}
        if not self._is_consistent():
            raise FormatError(
                f"{table.name} must agree with itself, got columns that do not; verify the dataset."
            )

    def volume(self, index: ShardIndex, field: int) -> BrickVolume:
        """Return the bricks of a volume.

        Args:
            index: Index of the shard.
            field: Number of the volume's field in the index.

        Raises:
            FormatError: The field holds no volume, or lies elsewhere than the table says.
        """
        row = int(np.searchsorted(self.fields, field))
        if row == self.num_volumes or self.fields[row] != field:
            raise FormatError(f"a field must be a volume of {self.name}, got another one (field {field}).")
        first, stop = self._first_brick[row : row + 2].tolist()
        sizes = self._columns["num_bytes"][first:stop].astype(np.int64)
        stops = np.cumsum(sizes) + int(self._first_chunk[row])
        if index.shard != self.shard or field >= index.num_fields or stops[-1] > index.field_num_bytes[field]:
            raise FormatError(
                f"{self.name} must describe the shard {index.shard}, got bricks that its fields do not hold; "
                "run `shardflow verify`."
            )
        shape, brick_shape = self._shapes[row].tolist(), self._brick_shapes[row].tolist()
        return BrickVolume(
            place=f"{self.shard}, {index.field_names[int(index.field_name_ids[field])]}",
            shape=(shape[0], shape[1], shape[2]),
            brick_shape=(brick_shape[0], brick_shape[1], brick_shape[2]),
            dtype=np.dtype(self._dtypes[row].decode("ascii")),
            starts=stops - sizes + int(index.field_offsets[field]),
            columns={name: column[first:stop] for name, column in self._columns.items()},
        )

    def _is_consistent(self) -> bool:
        """Tell whether lookups stay inside the columns."""
        lengths = {len(column) for column in self._columns.values()}
        each = (self._shapes, self._brick_shapes, self._dtypes, self._first_chunk, self._first_brick[1:])
        if len(lengths) != 1 or any(len(column) != self.num_volumes for column in each):
            return False
        if self._shapes.shape[1:] != (3,) or self._brick_shapes.shape[1:] != (3,):
            return False
        if (self._brick_shapes < 1).any() or (self._shapes < 1).any():
            return False
        grids = -(-self._shapes // self._brick_shapes)
        return bool(
            len(self._first_brick) == self.num_volumes + 1
            and self._first_brick[0] == 0
            and self._first_brick[-1] in lengths
            and (np.diff(self._first_brick) == grids.prod(axis=1)).all()
            and (np.diff(self.fields) > 0).all()
            and all(b2nd.DTYPE.fullmatch(dtype) for dtype in self._dtypes)
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BrickVolume:
    """The bricks of one volume: where they lie in the shard, and what is known of their values."""

    place: str
    """Shard and field, for messages."""
    shape: Extents
    """``(D, H, W)``: slices, rows, columns."""
    brick_shape: Extents
    dtype: np.dtype[Any]
    starts: NDArray[np.int64]
    """``(n,)`` where each brick begins in the shard, in bytes, in the order of storage."""
    columns: Mapping[str, NDArray[Any]]
    """``(n,)`` columns of the brick table, in the order of storage."""

    @property
    def grid(self) -> Extents:
        """Number of bricks along slices, rows and columns."""
        return _grid(self.shape, self.brick_shape)

    @property
    def low(self) -> NDArray[np.float32]:
        """Lower bounds of the values of the bricks, ``grid``; one of NaN and -inf where there are NaN."""
        return self._on_grid("low")

    @property
    def high(self) -> NDArray[np.float32]:
        """Upper bounds, ``grid``. Where both bounds are equal (or NaN), all voxels have that value."""
        return self._on_grid("high")

    @property
    def occupancy(self) -> NDArray[np.uint8]:
        """Share of the voxels above the lowest value of the volume, ``grid``, in 1/255, rounded up."""
        return self._on_grid("occupancy")

    def _on_grid(self, name: str) -> NDArray[Any]:
        found: NDArray[Any] = self.columns[name][_stored_places(self.grid, self.brick_shape)]
        return found

    def plan(
        self, start: Sequence[int], stop: Sequence[int], *, max_gap_num_bytes: int = _MAX_GAP_NUM_BYTES
    ) -> RegionPlan:
        """Plan the reading of a region.

        Args:
            start: First slice, row and column.
            stop: Those after the last.
            max_gap_num_bytes: Ranges are joined over gaps of at most this size.

        Raises:
            IndexError: The region is empty or leaves the volume.
        """
        begin, end = np.asarray(start, np.int64), np.asarray(stop, np.int64)
        if (
            begin.shape != (3,)
            or end.shape != (3,)
            or not ((begin >= 0) & (begin < end) & (end <= self.shape)).all()
        ):
            raise IndexError(
                f"a region must lie in {self.shape}, got {begin.tolist()} to {end.tolist()} ({self.place})."
            )
        first, last = begin // self.brick_shape, -(-end // self.brick_shape)
        box = tuple(slice(low, high) for low, high in zip(first.tolist(), last.tolist(), strict=True))
        places = np.sort(_stored_places(self.grid, self.brick_shape)[box], axis=None)
        low, high = self.columns["low"][places], self.columns["high"][places]
        is_constant = (low == high) | (np.isnan(low) & np.isnan(high))
        stored = places[~is_constant]
        offsets, sizes = self.starts[stored], self.columns["num_bytes"][stored].astype(np.int64)
        stops = offsets + sizes
        begins_range = np.append(True, offsets[1:] - stops[:-1] > max_gap_num_bytes)[: len(stored)]
        range_first = np.flatnonzero(begins_range)
        range_offsets = offsets[range_first]
        range_sizes = (
            stops[np.append(range_first[1:], len(stored)) - 1] - range_offsets if len(stored) else sizes
        )
        which = np.cumsum(begins_range) - 1
        range_places = np.cumsum(range_sizes) - range_sizes
        return RegionPlan(
            volume=self,
            start=begin,
            stop=end,
            bricks=np.concatenate([stored, places[is_constant]]),
            num_stored=len(stored),
            places=range_places[which] + offsets - range_offsets[which],
            offsets=range_offsets,
            num_bytes=range_sizes,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RegionPlan:
    """What to read for a region of a volume, and how to decode it."""

    volume: BrickVolume
    start: NDArray[np.int64]
    """``(3,)`` first slice, row and column."""
    stop: NDArray[np.int64]
    """``(3,)`` those after the last."""
    bricks: NDArray[np.int64]
    """``(num_bricks,)`` places in the order of storage: those to read, ascending, then those of one value."""
    num_stored: int
    """Number of bricks to read."""
    places: NDArray[np.int64]
    """``(num_stored,)`` where each lies in the buffer."""
    offsets: NDArray[np.int64]
    """``(r,)`` ranges to read: where they begin in the shard, ascending."""
    num_bytes: NDArray[np.int64]
    """``(r,)`` sizes of the ranges."""

    @property
    def num_bricks(self) -> int:
        """Number of bricks that the region touches."""
        return len(self.bricks)

    @property
    def buffer_num_bytes(self) -> int:
        """Size of all ranges: of a buffer that holds them one after another."""
        return int(self.num_bytes.sum())

    @property
    def stored_num_bytes(self) -> int:
        """Size of the bricks to read, without gaps."""
        return int(self.volume.columns["num_bytes"][self.bricks[: self.num_stored]].sum())

    @property
    def decoded_num_bytes(self) -> int:
        """Size of the bricks to read, decoded."""
        return self.num_stored * math.prod(self.volume.brick_shape) * self.volume.dtype.itemsize

    def decode(self, buffer: Any, out: NDArray[Any], part: slice = slice(None)) -> None:
        """Decode the region into an array; without the GIL but for some microseconds a brick.

        Args:
            buffer: The ranges, one after another: ``buffer_num_bytes`` bytes.
            out: ``stop - start``, of any strides and any dtype that the volume's casts to without loss.
            part: Some of ``range(num_bricks)``: several threads may each decode a part of the region.

        Raises:
            ChecksumError: A brick has other bytes than the table says; the array is partly written.
            FormatError: A brick cannot be decoded, or buffer or array do not fit.
        """
        volume = self.volume
        if out.shape != tuple((self.stop - self.start).tolist()) or not np.can_cast(volume.dtype, out.dtype):
            raise FormatError(
                f"an array for a region must be {volume.dtype} {tuple((self.stop - self.start).tolist())}, "
                f"got {out.dtype} {out.shape} ({volume.place})."
            )
        data = memoryview(buffer).cast("B")
        if data.nbytes != self.buffer_num_bytes:
            raise FormatError(
                f"the ranges of a region must have {self.buffer_num_bytes} bytes, got {data.nbytes} "
                f"({volume.place})."
            )
        numbers = range(self.num_bricks)[part]
        chosen = self.bricks[part]
        shape = np.array(volume.brick_shape)
        corners = (
            np.stack(
                np.unravel_index(morton_order(volume.grid, volume.brick_shape)[chosen], volume.grid), axis=1
            )
            * shape
        )
        from_, to = np.maximum(corners, self.start), np.minimum(corners + shape, self.stop)
        brick = _scratch(volume)
        low = volume.columns["low"]
        for number, place, (z, y, x), (z0, y0, x0), (z1, y1, x1) in zip(
            numbers,
            chosen.tolist(),
            (from_ - corners).tolist(),
            (from_ - self.start).tolist(),
            (to - self.start).tolist(),
            strict=True,
        ):
            target = out[z0:z1, y0:y1, x0:x1]
            if number >= self.num_stored:
                target[...] = low[place].astype(volume.dtype)
                continue
            self._decode_brick(data, number, place, brick)
            target[...] = brick[z : z + z1 - z0, y : y + y1 - y0, x : x + x1 - x0]

    def _decode_brick(self, data: memoryview, number: int, place: int, brick: NDArray[Any]) -> None:
        """Check a brick and decode it."""
        volume = self.volume
        first, size = int(self.places[number]), int(volume.columns["num_bytes"][place])
        chunk = data[first : first + size]
        found, expected = crc32c(chunk), int(volume.columns["crc32c"][place])
        if found != expected:
            raise ChecksumError(
                f"a brick must have crc32c {expected:08x}, got {found:08x} ({volume.place}, offset "
                f"{int(volume.starts[place])}); run `shardflow verify` and fetch the shard again."
            )
        try:
            b2nd.decode_chunk(chunk, brick)
        except FormatError as error:
            raise FormatError(
                f"{error.message} ({volume.place}, offset {int(volume.starts[place])})"
            ) from None


def _scratch(volume: BrickVolume) -> NDArray[Any]:
    """Return the thread's own memory for one brick: it stays in the second-level cache between bricks."""
    num_bytes = math.prod(volume.brick_shape) * volume.dtype.itemsize
    memory = getattr(_SCRATCH, "memory", None)
    if memory is None or memory.nbytes < num_bytes:
        memory = _SCRATCH.memory = np.empty(num_bytes, np.uint8)
    brick: NDArray[Any] = memory[:num_bytes].view(volume.dtype).reshape(volume.brick_shape)
    return brick


def _grid(shape: Extents, brick_shape: Extents) -> Extents:
    z, y, x = (-(-size // brick) for size, brick in zip(shape, brick_shape, strict=True))
    return z, y, x
