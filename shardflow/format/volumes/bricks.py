"""Volumes in bricks: encoding, the brick table of a shard, and reading any region.

A volume is one member of a sample, a Blosc2 NDArray frame that plain blosc2 reads; each of its chunks is one
*brick*, a box of about 16 x 64 x 64 voxels. Bricks are stored in Morton order (G. M. Morton, 1966: the bits
of their coordinates interleaved), so that neighbors in space are neighbors in the file. The index
of a shard repeats where each brick lies, with its crc32c and the bounds of its values: a region is read by
ranges of bytes, and bricks of one value are not read at all. docs/format.md, section 20, has the layout.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, FormatError
from shardflow.format.slice_codecs import b2nd
from shardflow.format.table import Table, crc32c
from shardflow.format.volumes.tiles import decode_tile, has_tiles
from shardflow.storage import ByteRange, ByteStore
from shardflow.storage.cache.store import CachedStore, read_afresh

BRICKS_CODEC: Final = "bricks"
"""Codec of a series in bricks, in ``study.json`` and the series table."""
# Chunks of one value, which are never read, are the usual gaps between the bricks of a region.
_MAX_GAP_NUM_BYTES: Final = 4096
BRICK_COLUMNS: Final = {
    "num_bytes": "<u4",
    "crc32c": "<u4",
    "low": "<f4",
    "high": "<f4",
    "occupancy": "|u1",
}
"""Columns of a brick and their dtypes."""
_MIN_BLOCK_NUM_BYTES: Final = 20 << 10
_SCRATCH: Final = threading.local()

Extents = tuple[int, int, int]
Box = tuple[slice, slice, slice]


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
class StoredVolume:
    """A volume as the index of its shard describes it."""

    shape: Extents
    brick_shape: Extents
    dtype: np.dtype[Any]
    first_chunk: int
    """Where the first brick begins in the frame, in bytes."""
    columns: Mapping[str, NDArray[Any]]
    """Columns of the bricks, in the order of storage."""


@dataclass(frozen=True, slots=True)
class EncodedVolume:
    """A volume as it is stored: its description, and the bytes of its member."""

    stored: StoredVolume
    num_bytes: int
    """Size of the frame."""
    pieces: Iterable[bytes]
    """The frame, in pieces that follow one another; read once."""

    def read_frame(self) -> bytes:
        """Return the whole frame; its pieces can be read once."""
        return b"".join(self.pieces)


def frame_around(
    shape: Extents, dtype: np.dtype[Any], brick_shape: Extents, num_bytes: NDArray[Any], *, is_fast: bool
) -> tuple[bytes, bytes]:
    """Return what precedes and what follows the bricks of a volume in its frame.

    Args:
        shape: Of the volume.
        dtype: Of the volume.
        brick_shape: Of the bricks.
        num_bytes: ``(n,)`` sizes of the bricks, in the order of storage.
        is_fast: How they are compressed.
    """
    offsets = _chunk_offsets(shape, brick_shape, num_bytes)
    total, blocks = int(num_bytes.sum(dtype=np.int64)), block_shape(brick_shape, dtype.itemsize)
    return b2nd.frame_around(shape, dtype, brick_shape, blocks, offsets, total, is_fast=is_fast)


def block_shape(brick_shape: Extents, itemsize: int) -> Extents:
    """Return the shape of the parts of a brick that are compressed alone, and decoded where they are needed.

    A brick is in four where its rows and columns can be halved and a quarter has 20 KiB: a region of 96
    voxels a side then decodes a third less, and the brick takes no more room than in one piece.

    Example:
        >>> block_shape((16, 64, 64), 2)
        (16, 32, 32)
    """
    depth, rows, columns = brick_shape
    quarter = depth * (rows // 2) * (columns // 2) * itemsize
    is_in_four = not rows % 2 and not columns % 2 and quarter >= _MIN_BLOCK_NUM_BYTES
    return (depth, rows // 2, columns // 2) if is_in_four else brick_shape


def _chunk_offsets(shape: Extents, brick_shape: Extents, num_bytes: NDArray[Any]) -> NDArray[np.int64]:
    """Return where each brick begins behind the header of its frame, in C order."""
    sizes = num_bytes.astype(np.int64)
    offsets = np.empty(len(sizes), "<i8")
    places = np.where(sizes > 0, np.cumsum(sizes) - sizes, b2nd.ZEROS_OFFSET)
    offsets[morton_order(grid_of(shape, brick_shape), brick_shape)] = places
    return offsets


def brick_columns(volumes: Sequence[tuple[int, StoredVolume]]) -> dict[str, NDArray[Any]]:
    """Return the columns that describe the volumes of a shard in its index, by name.

    Args:
        volumes: Number of the field in the index, ascending, and the volume that it holds.
    """
    each = [volume for _, volume in volumes]
    first_brick = np.zeros(len(each) + 1, "<u8")
    np.cumsum([len(volume.columns["num_bytes"]) for volume in each], out=first_brick[1:])
    columns: dict[str, NDArray[Any]] = {
        "volume_field": np.array([number for number, _ in volumes], "<u4"),
        "volume_shape": np.array([volume.shape for volume in each], "<u4").reshape(-1, 3),
        "volume_brick_shape": np.array([volume.brick_shape for volume in each], "<u2").reshape(-1, 3),
        "volume_dtype": np.array([volume.dtype.str.encode("ascii") for volume in each], "S3"),
        "volume_first_chunk": np.array([volume.first_chunk for volume in each], "<u4"),
        "volume_first_brick": first_brick,
    }
    for name, dtype in BRICK_COLUMNS.items():
        parts = [volume.columns[name] for volume in each]
        columns[f"brick_{name}"] = np.concatenate([np.zeros(0, dtype), *parts])
    return columns


class BrickTable:
    """The volumes of a shard and their bricks, as its index has them. No object per brick.

    Args:
        table: The index of the shard.

    Attributes:
        fields: ``(num_volumes,)`` numbers of their fields in the index, ascending.
        shapes: ``(num_volumes, 3)`` slices, rows, columns.

    Raises:
        FormatError: The columns disagree with each other.
        ChecksumError: The table is damaged.
    """

    def __init__(self, table: Table) -> None:
        self.name = table.name
        self.fields: NDArray[np.int64] = table.column("volume_field").astype(np.int64)
        self.shapes: NDArray[np.int64] = table.column("volume_shape").astype(np.int64)
        self._brick_shapes: NDArray[np.int64] = table.column("volume_brick_shape").astype(np.int64)
        self._dtypes: list[bytes] = table.column("volume_dtype").tolist()
        self._first_chunk: NDArray[np.int64] = table.column("volume_first_chunk").astype(np.int64)
        self._first_brick: NDArray[np.int64] = table.column("volume_first_brick").astype(np.int64)
        self._columns = {name: table.column(f"brick_{name}") for name in BRICK_COLUMNS}
        if not self._is_consistent():
            raise FormatError(
                f"{table.name} must agree with itself, got columns that do not; verify the dataset."
            )

    @staticmethod
    def is_in(table: Table) -> bool:
        """Return whether the index of a shard has volumes."""
        return "volume_field" in table.column_names

    def row_of(self, field: int) -> int | None:
        """Return the row of the volume that a field of the index holds; None if it holds none."""
        row = int(np.searchsorted(self.fields, field))
        return row if row < len(self.fields) and self.fields[row] == field else None

    def volume(
        self, row: int, *, place: str, offset: int, num_bytes: int, is_tiled: bool = False
    ) -> BrickVolume:
        """Return the bricks of a volume.

        Args:
            row: Of the volume in the table.
            place: Shard and field, for messages.
            offset: Where the field begins in the shard, in bytes.
            num_bytes: Size of the field.
            is_tiled: Whether it is a level of a slide, whose bricks are tiles.

        Raises:
            FormatError: The field is smaller than its bricks.
        """
        columns = self._bricks(row)
        sizes = columns["num_bytes"].astype(np.int64)
        stops = np.cumsum(sizes) + int(self._first_chunk[row])
        if stops[-1] > num_bytes:
            raise FormatError(f"{self.name} has bricks that their field does not hold; verify the dataset.")
        return BrickVolume(
            place=place,
            shape=_extents(self.shapes[row]),
            brick_shape=_extents(self._brick_shapes[row]),
            dtype=self._dtype(row),
            starts=stops - sizes + offset,
            columns=columns,
            is_tiled=is_tiled,
        )

    def stored(self, row: int) -> StoredVolume:
        """Return what the table says of a volume, to be written again."""
        return StoredVolume(
            _extents(self.shapes[row]),
            _extents(self._brick_shapes[row]),
            self._dtype(row),
            int(self._first_chunk[row]),
            self._bricks(row),
        )

    def _bricks(self, row: int) -> dict[str, NDArray[Any]]:
        first, stop = self._first_brick[row : row + 2].tolist()
        return {name: column[first:stop] for name, column in self._columns.items()}

    def _dtype(self, row: int) -> np.dtype[Any]:
        return np.dtype(self._dtypes[row].decode("ascii"))

    def _is_consistent(self) -> bool:
        """Tell whether lookups stay inside the columns."""
        num_volumes = len(self.fields)
        lengths = {len(column) for column in self._columns.values()}
        each = (self.shapes, self._brick_shapes, self._dtypes, self._first_chunk, self._first_brick[1:])
        if len(lengths) != 1 or any(len(column) != num_volumes for column in each):
            return False
        if self.shapes.shape[1:] != (3,) or self._brick_shapes.shape[1:] != (3,):
            return False
        if (self._brick_shapes < 1).any() or (self.shapes < 1).any():
            return False
        grids = -(-self.shapes // self._brick_shapes)
        return bool(
            len(self._first_brick) == num_volumes + 1
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
    """``(n,)`` columns of the bricks, in the order of storage."""
    is_tiled: bool = False
    """Whether it is a level of a slide: ``(rows, columns, 3)``, its bricks are tiles that are stored row by
    row."""

    @property
    def grid(self) -> Extents:
        """Number of bricks along slices, rows and columns."""
        return grid_of(self.shape, self.brick_shape)

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

    @property
    def slice_num_bytes(self) -> NDArray[np.int64]:
        """Stored bytes of each slice, ``(D,)``: an equal share of the bricks that it lies in, rounded up."""
        layers = self._on_grid("num_bytes").sum(axis=(1, 2), dtype=np.int64)
        return np.repeat(-(-layers // self.brick_shape[0]), self.brick_shape[0])[: self.shape[0]]

    def _on_grid(self, name: str) -> NDArray[Any]:
        found: NDArray[Any] = self.columns[name][self._places()]
        return found

    def _places(self) -> NDArray[np.int64]:
        """Return the place of each brick in the order of storage, ``grid``."""
        if self.is_tiled:
            return np.arange(math.prod(self.grid)).reshape(self.grid)
        return _stored_places(self.grid, self.brick_shape)

    def positions(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of bricks in the grid, in C order, by their places in the order of storage."""
        return places if self.is_tiled else morton_order(self.grid, self.brick_shape)[places]

    def is_in(self, header: bytes, ending: bytes) -> bool:
        """Return whether a frame has these bricks, of any writer, by what precedes and what follows them."""
        if self.is_tiled:
            return not ending and has_tiles(header, self.shape, self.brick_shape, self.columns["num_bytes"])
        found = b2nd.read_frame_around(header, ending)
        blocks = (block_shape(self.brick_shape, self.dtype.itemsize), self.brick_shape)
        offsets = _chunk_offsets(self.shape, self.brick_shape, self.columns["num_bytes"])
        return (
            found is not None
            and any(found[0] == (self.shape, self.brick_shape, each, self.dtype) for each in blocks)
            and np.array_equal(found[1], offsets)
        )

    def plan(self, start: Sequence[int], stop: Sequence[int]) -> RegionPlan:
        """Plan the reading of a region; ranges are joined over small gaps.

        Args:
            start: First slice, row and column.
            stop: Those after the last.

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
        places = np.sort(self._places()[box], axis=None)
        low, high = self.columns["low"][places], self.columns["high"][places]
        is_constant = (low == high) | (np.isnan(low) & np.isnan(high))
        stored = places[~is_constant]
        offsets, sizes = self.starts[stored], self.columns["num_bytes"][stored].astype(np.int64)
        stops = offsets + sizes
        begins_range = np.append(True, offsets[1:] - stops[:-1] > _MAX_GAP_NUM_BYTES)[: len(stored)]
        range_first = np.flatnonzero(begins_range)
        range_offsets = offsets[range_first]
        range_sizes = (
            stops[np.append(range_first[1:], len(stored)) - 1] - range_offsets if len(stored) else sizes
        )
        which = np.cumsum(begins_range) - 1
        range_places = b2nd.HEAD_NUM_BYTES + np.cumsum(range_sizes) - range_sizes
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
    """``(num_stored,)`` where each lies in the buffer that `read` returns."""
    offsets: NDArray[np.int64]
    """``(r,)`` ranges to read: where they begin in the shard, ascending."""
    num_bytes: NDArray[np.int64]
    """``(r,)`` sizes of the ranges."""

    @property
    def buffer_num_bytes(self) -> int:
        """Size of a buffer for all ranges, with room for what makes a frame of them."""
        return b2nd.HEAD_NUM_BYTES + self.read_num_bytes + b2nd.tail_num_bytes(math.prod(self._grid))

    @property
    def read_num_bytes(self) -> int:
        """Size of all ranges."""
        return int(self.num_bytes.sum())

    @property
    def shape(self) -> Extents:
        """Size of the region."""
        return _extents(self.stop - self.start)

    def brick_ranges(self) -> list[ByteRange]:
        """Return the bytes of each brick to read, ascending."""
        stored, volume = self.bricks[: self.num_stored], self.volume
        both = zip(volume.starts[stored].tolist(), volume.columns["num_bytes"][stored].tolist(), strict=True)
        return [ByteRange(*each) for each in both]

    def read(
        self, store: ByteStore, path: str, buffer: NDArray[np.uint8] | None = None, *, afresh: bool = False
    ) -> NDArray[np.uint8]:
        """Read the ranges, one after another, to where `places` has the bricks.

        Args:
            store: Of the shard.
            path: Of the shard.
            buffer: ``(buffer_num_bytes,)`` to read into; a new one by default.
            afresh: Read from the origin again, since what a cache or the transfer gave was wrong.

        Returns:
            The buffer.

        Raises:
            ShortReadError: The shard ends early.
            StorageError: It cannot be read.
        """
        found = np.empty(self.buffer_num_bytes, np.uint8) if buffer is None else buffer
        if isinstance(store, CachedStore):
            # A cache has blocks of whole bricks, which a joined range may straddle.
            ranges, places = self.brick_ranges(), self.places.tolist()
        else:
            both = zip(self.offsets.tolist(), self.num_bytes.tolist(), strict=True)
            ranges = [ByteRange(*each) for each in both]
            places = (b2nd.HEAD_NUM_BYTES + np.cumsum(self.num_bytes) - self.num_bytes).tolist()
        buffers = [
            found[place : place + span.num_bytes].data for place, span in zip(places, ranges, strict=True)
        ]
        if afresh:
            read_afresh(store, path, ranges, buffers)
        elif ranges:
            store.read_ranges(path, ranges, buffers)
        return found

    def decode(self, buffer: NDArray[np.uint8], out: NDArray[Any]) -> None:
        """Decode the region into an array, without the GIL but for some microseconds a layer of bricks.

        Args:
            buffer: ``(buffer_num_bytes,)``, as `read` returned it; what is around the ranges is overwritten.
            out: ``stop - start``, of any strides and any dtype that the volume's casts to without loss.

        Raises:
            ChecksumError: A brick has other bytes than the table says; the array is as it was.
            FormatError: A brick cannot be decoded, or buffer or array do not fit.
        """
        volume = self.volume
        if out.shape != self.shape or not np.can_cast(volume.dtype, out.dtype):
            raise FormatError(
                f"an array for a region must be {volume.dtype} {self.shape}, got {out.dtype} {out.shape} "
                f"({volume.place})."
            )
        if len(buffer) != self.buffer_num_bytes:
            raise FormatError(
                f"the buffer of a region must have {self.buffer_num_bytes} bytes, got {len(buffer)} "
                f"({volume.place})."
            )
        blocks = self._blocks(buffer)
        self._check(buffer, blocks)
        try:
            if self.num_stored and not volume.is_tiled and b2nd.OpenFrame.is_possible():
                self._decode_layers(buffer, out, blocks)
            else:
                self._decode_each(buffer, out, blocks)
        except FormatError as error:
            raise FormatError(f"{error.message} ({volume.place})") from None
        of_one_value = self.bricks[self.num_stored :]
        values = volume.columns["low"][of_one_value].astype(volume.dtype)
        for value, (target, _) in zip(values, self._boxes(slice(self.num_stored, None)), strict=True):
            out[target] = value

    def _blocks(self, buffer: NDArray[np.uint8]) -> Extents:
        """Return the shape of the parts that bricks are compressed in, as the first one says."""
        volume = self.volume
        if volume.is_tiled or not self.num_stored:
            return volume.brick_shape
        parts = block_shape(volume.brick_shape, volume.dtype.itemsize)
        is_in_parts = b2nd.block_num_bytes(buffer, int(self.places[0])) == _num_bytes(parts, volume.dtype)
        return parts if is_in_parts else volume.brick_shape

    def _check(self, buffer: NDArray[np.uint8], blocks: Extents) -> None:
        """Compare each brick with its checksum, and make sure that it decodes to one brick."""
        volume, stored = self.volume, self.bricks[: self.num_stored]
        sizes, expected = volume.columns["num_bytes"][stored], volume.columns["crc32c"][stored].tolist()
        data = buffer.data
        for number, (first, size) in enumerate(zip(self.places.tolist(), sizes.tolist(), strict=True)):
            found = crc32c(data[first : first + size])
            if found != expected[number]:
                place = f"{volume.place}, offset {int(volume.starts[stored[number]])}"
                raise ChecksumError(
                    f"a brick must have crc32c {expected[number]:08x}, got {found:08x} ({place}); run "
                    "`shardflow verify` and fetch the shard again."
                )
        if volume.is_tiled:  # a tile says its own size, which is checked when it is decoded
            return
        try:
            b2nd.check_chunks(
                buffer,
                self.places,
                sizes.astype(np.int64),
                num_bytes=_num_bytes(volume.brick_shape, volume.dtype),
                block_num_bytes=_num_bytes(blocks, volume.dtype),
            )
        except FormatError as error:
            raise FormatError(f"{error.message} ({volume.place})") from None

    def _decode_layers(self, buffer: NDArray[np.uint8], out: NDArray[Any], blocks: Extents) -> None:
        """Decode all stored bricks by calls for whole layers of them; those of one value become 0."""
        volume, (depth, rows, columns) = self.volume, self.shape
        with b2nd.OpenFrame(self._frame(buffer, blocks)) as frame:
            z0, y0, x0 = (self.start - self._first).tolist()
            if out.dtype == volume.dtype and out.flags.c_contiguous:
                frame.read((z0, y0, x0), out)
                return
            step = volume.brick_shape[0]
            for low in range(-z0, depth, step):
                begin, end = max(low, 0), min(low + step, depth)
                layer = _scratch((end - begin, rows, columns), volume.dtype)
                frame.read((z0 + begin, y0, x0), layer)
                out[begin:end] = layer

    def _frame(self, buffer: NDArray[np.uint8], blocks: Extents) -> NDArray[np.uint8]:
        """Make a frame of the box of bricks: put a header before the ranges, and an ending behind them."""
        volume, stop = self.volume, b2nd.HEAD_NUM_BYTES + self.read_num_bytes
        offsets = np.full(math.prod(self._grid), b2nd.ZEROS_OFFSET, "<i8")
        offsets[self._chunks[: self.num_stored]] = self.places - b2nd.HEAD_NUM_BYTES
        shape = _extents(np.multiply(self._grid, volume.brick_shape))
        header, ending = b2nd.frame_around(
            shape, volume.dtype, volume.brick_shape, blocks, offsets, self.read_num_bytes, is_fast=False
        )
        start = b2nd.HEAD_NUM_BYTES - len(header)
        buffer[start : b2nd.HEAD_NUM_BYTES] = np.frombuffer(header, np.uint8)
        buffer[stop : stop + len(ending)] = np.frombuffer(ending, np.uint8)
        return buffer[start : stop + len(ending)]

    def _decode_each(self, buffer: NDArray[np.uint8], out: NDArray[Any], blocks: Extents) -> None:
        """Decode the stored bricks one by one: tiles, and others where the C library is not at hand."""
        volume, data = self.volume, buffer.data
        sizes = volume.columns["num_bytes"][self.bricks[: self.num_stored]].tolist()
        brick = _scratch(volume.brick_shape, volume.dtype)
        for first, size, (target, source) in zip(
            self.places.tolist(), sizes, self._boxes(slice(self.num_stored)), strict=True
        ):
            if volume.is_tiled:
                decode_tile(data[first : first + size], brick)
            else:
                b2nd.decode_chunk(data[first : first + size], brick, blocks)
            out[target] = brick[source]

    def decoded_num_bytes(self, buffer: NDArray[np.uint8]) -> int:
        """Return the size of what `decode` decodes, from a buffer that `read` returned."""
        volume, blocks = self.volume, self._blocks(buffer)
        corners, low, high = self._overlaps(slice(self.num_stored))
        num_blocks = -(-(high - corners) // blocks) - (low - corners) // blocks
        return int(num_blocks.prod(axis=1).sum()) * _num_bytes(blocks, volume.dtype)

    def _overlaps(self, part: slice) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the first voxels of bricks, and the first and end of those that the region has of them."""
        size = np.array(self.volume.brick_shape)
        corners = self._first + np.stack(np.unravel_index(self._chunks[part], self._grid), axis=1) * size
        return corners, np.maximum(corners, self.start), np.minimum(corners + size, self.stop)

    def _boxes(self, part: slice) -> Iterator[tuple[Box, Box]]:
        """Yield where bricks lie in the region, and which of their voxels these are."""
        corners, low, high = self._overlaps(part)
        both = zip((low - self.start).tolist(), (high - low).tolist(), (low - corners).tolist(), strict=True)
        for target, extent, source in both:
            yield _box(target, extent), _box(source, extent)

    @property
    def _chunks(self) -> NDArray[np.int64]:
        """Positions of the bricks, in C order, in the box of bricks that the region touches."""
        volume = self.volume
        order = volume.positions(self.bricks)
        places = np.stack(np.unravel_index(order, volume.grid)) - (self._first // volume.brick_shape)[:, None]
        found: NDArray[np.int64] = np.ravel_multi_index(tuple(places), self._grid)
        return found

    @property
    def _first(self) -> NDArray[np.int64]:
        """First voxel of the first brick of the box of bricks that the region touches."""
        return self.start // self.volume.brick_shape * self.volume.brick_shape

    @property
    def _grid(self) -> Extents:
        """Number of bricks along the axes of that box."""
        return _extents(-(-(self.stop - self._first) // self.volume.brick_shape))


def _scratch(shape: Extents, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return memory of the thread's own: small, so that it stays in the second-level cache."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = getattr(_SCRATCH, "memory", None)
    if memory is None or memory.nbytes < num_bytes:
        memory = _SCRATCH.memory = np.empty(num_bytes, np.uint8)
    found: NDArray[Any] = memory[:num_bytes].view(dtype).reshape(shape)
    return found


def _num_bytes(shape: Extents, dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def _box(start: Sequence[int], extent: Sequence[int]) -> Box:
    z, y, x = (slice(low, low + size) for low, size in zip(start, extent, strict=True))
    return z, y, x


def _extents(sizes: NDArray[np.int64]) -> Extents:
    z, y, x = sizes.tolist()
    return z, y, x


def grid_of(shape: Extents, brick_shape: Extents) -> Extents:
    """Return the number of bricks along slices, rows and columns."""
    z, y, x = (-(-size // brick) for size, brick in zip(shape, brick_shape, strict=True))
    return z, y, x
