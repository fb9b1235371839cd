"""Cache blocks: runs of whole pieces of an object, each piece with its own checksum.

A piece is what a reader requests and can check: a field of a shard with its crc32c, or a whole file with its
SHA-256. Blocks are cut between pieces, so a block can be checked before it is published and a reader of one
field fetches little else. Neighboring pieces share a block up to a size limit; large and small pieces never
do, so reading reports fetches no image slices.

`Tier` is the interface of the cache tiers: blocks are claimed, then kept, and read by pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardflow.storage.store import ByteRange

Int64Array = NDArray[np.int64]

# A piece of at least this fraction (one quarter) of a block is large.
_LARGE_SHARE = 4
_OBJECT_BYTES = 1024  # arrays without their content, and the object around them
_ALWAYS = (1, 0)  # the first unit after the last one: needed all the time


@dataclass(frozen=True, slots=True)
class Span:
    """A block of an object: ``[start, stop)`` of its bytes."""

    number: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObjectBlocks:
    """The blocks of one object: a pure function of its pieces and the block size.

    If units are given (rows of a samples table), they tell an eviction policy when a block is needed next.
    """

    name: str
    """Digest of the object's content, and how it is cut; equal content has equal names."""
    starts: Int64Array
    """``(n,)`` start of each block, ascending."""
    stops: Int64Array
    """``(n,)`` end of each block."""
    first_piece: Int64Array
    """``(n + 1,)`` first of the sorted pieces of each block."""
    piece_offsets: Int64Array
    piece_num_bytes: Int64Array
    piece_crc32c: NDArray[np.uint32]
    piece_sha256: NDArray[np.uint8] | None = None
    """``(p, 32)`` digests that someone vouches for, with which a read is proven; None for none."""
    sha256: str = ""
    """Digest of an object that is one block without pieces; empty otherwise."""
    space: str = ""
    """Name of the numbering of units, such as a dataset_id; empty for none."""
    unit_first: Int64Array
    unit_stop: Int64Array
    """``(n,)``: a block is needed when one of its units ``[unit_first, unit_stop)`` is read."""

    @classmethod
    def whole(
        cls, sha256: str, num_bytes: int, *, space: str = "", units: tuple[int, int] = (0, 0)
    ) -> ObjectBlocks:
        """Make an object one block, checked by its SHA-256.

        Args:
            sha256: Digest of the object, 64 hexadecimal digits.
            num_bytes: Size of the object.
            space: Name of the numbering of units.
            units: The range of units that need the object; if empty, it is evicted last.
        """
        none = np.zeros(0, np.int64)
        if units[0] >= units[1]:
            units = _ALWAYS
        return cls(
            name=f"{sha256}-whole",
            starts=np.zeros(1, np.int64),
            stops=np.array([num_bytes], np.int64),
            first_piece=np.zeros(2, np.int64),
            piece_offsets=none,
            piece_num_bytes=none,
            piece_crc32c=none.astype(np.uint32),
            sha256=sha256,
            space=space,
            unit_first=np.array([units[0]], np.int64),
            unit_stop=np.array([units[1]], np.int64),
        )

    @classmethod
    def of_pieces(
        cls,
        sha256: str,
        offsets: Int64Array,
        num_bytes: Int64Array,
        crc32c: NDArray[np.uint32],
        *,
        digests: NDArray[np.uint8] | None = None,
        block_bytes: int,
        space: str = "",
        units: Int64Array | None = None,
    ) -> ObjectBlocks | None:
        """Cut an object between its pieces.

        Args:
            sha256: Digest of the object.
            offsets: ``(p,)`` start of each piece, in any order.
            num_bytes: ``(p,)`` sizes of the pieces.
            crc32c: ``(p,)`` checksums of the pieces.
            digests: ``(p, 32)`` their SHA-256, to prove what is read.
            block_bytes: Largest block of more than one piece.
            space: Name of the numbering of units.
            units: ``(p,)`` the unit of each piece, negative for none.

        Returns:
            The blocks; None if pieces overlap or there are none: the object is not cached then.
        """
        order = np.argsort(offsets, kind="stable")
        starts, sizes = offsets[order], num_bytes[order]
        stops = starts + sizes
        if not len(starts) or (starts[1:] < stops[:-1]).any():
            return None
        first = _cut(starts, stops, sizes, block_bytes)
        last = np.append(first[1:], len(starts)) - 1
        unit_first = unit_stop = np.zeros(len(first), np.int64)
        if units is not None:
            used = units[order]
            unit_stop = np.maximum.reduceat(used, first) + 1
            unit_first = np.minimum.reduceat(np.where(used < 0, np.iinfo(np.int64).max, used), first)
            unit_first = np.minimum(unit_first, unit_stop)
        return cls(
            name=f"{sha256}-{block_bytes}",
            starts=starts[first],
            stops=stops[last],
            first_piece=np.append(first, len(starts)),
            piece_offsets=starts,
            piece_num_bytes=sizes,
            piece_crc32c=crc32c[order],
            piece_sha256=None if digests is None else digests[order],
            space=space if units is not None else "",
            unit_first=unit_first,
            unit_stop=unit_stop,
        )

    @property
    def held_bytes(self) -> int:
        """Approximate memory of this object, in bytes."""
        pieces = (self.piece_offsets, self.piece_num_bytes, self.piece_crc32c, self.piece_sha256)
        num_bytes = sum(array.nbytes for array in pieces if array is not None)
        return _OBJECT_BYTES + num_bytes + 5 * self.starts.nbytes

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.starts)

    def span(self, number: int) -> Span:
        """Return the position of a block."""
        return Span(number, int(self.starts[number]), int(self.stops[number]))

    def find(self, ranges: Sequence[ByteRange]) -> list[int]:
        """Return the block that contains each whole range; -1 if none does."""
        offsets = np.array([span.offset for span in ranges], np.int64)
        ends = offsets + np.array([span.num_bytes for span in ranges], np.int64)
        found = np.searchsorted(self.starts, offsets, side="right") - 1
        is_inside = (found >= 0) & (ends <= self.stops[found])
        return np.where(is_inside, found, -1).tolist()  # type: ignore[no-any-return]

    def pieces_in(self, ranges: Sequence[ByteRange]) -> list[range]:
        """Return the pieces that each range has bytes of; the headers between pieces belong to none."""
        offsets = np.array([span.offset for span in ranges], np.int64)
        ends = offsets + np.array([span.num_bytes for span in ranges], np.int64)
        first = np.maximum(np.searchsorted(self.piece_offsets, offsets, side="right") - 1, 0)
        first += self.piece_offsets[first] + self.piece_num_bytes[first] <= offsets
        stop = np.searchsorted(self.piece_offsets, ends, side="left")
        return list(map(range, first.tolist(), stop.tolist()))

    def piece(self, number: int) -> ByteRange:
        """Return the bytes of a piece."""
        return ByteRange(int(self.piece_offsets[number]), int(self.piece_num_bytes[number]))

    def is_proven(self, number: int, payload: memoryview) -> bool:
        """Return whether a piece has its digest; there must be digests."""
        assert self.piece_sha256 is not None  # noqa: S101
        return hashlib.sha256(payload).digest() == bytes(self.piece_sha256[number])

    def has_checksum(self, number: int, payload: memoryview) -> bool:
        """Return whether a piece has its crc32c."""
        return bool(google_crc32c.value(np.frombuffer(payload, np.uint8)) == self.piece_crc32c[number])

    def is_sound(self, number: int, payload: memoryview) -> bool:
        """Return whether every piece of a block has its checksum.

        The bytes between pieces (tar headers) are not covered, and are never read from the cache.
        """
        if payload.nbytes != int(self.stops[number]) - int(self.starts[number]):
            return False
        if self.sha256:
            return hashlib.sha256(payload).hexdigest() == self.sha256
        first, stop = self.first_piece[number : number + 2].tolist()
        base = int(self.starts[number])
        places = (self.piece_offsets[first:stop] - base).tolist()
        sizes = self.piece_num_bytes[first:stop].tolist()
        checksums = self.piece_crc32c[first:stop].tolist()
        flat = np.frombuffer(payload, np.uint8)
        return all(
            google_crc32c.value(flat[place : place + size]) == checksum
            for place, size, checksum in zip(places, sizes, checksums, strict=True)
        )


def _cut(starts: Int64Array, stops: Int64Array, sizes: Int64Array, block_bytes: int) -> Int64Array:
    """Return the first piece of each block."""
    is_large = sizes >= block_bytes // _LARGE_SHARE
    changes = np.append(np.flatnonzero(np.diff(is_large)) + 1, len(starts))
    places = np.arange(len(starts))
    within = np.searchsorted(stops, starts + block_bytes, side="right")
    change = changes[np.searchsorted(changes, places, side="right")]
    # Where a block that began with each piece would end, for all at once: walking them needs no search.
    following = np.minimum(np.maximum(within, places + 1), change).tolist()
    first, place = [], 0
    while place < len(following):
        first.append(place)
        place = following[place]
    return np.array(first, np.int64)


class Claim(Enum):
    """Result of claiming a block."""

    OURS = "ours"
    """The caller must fetch it, then `Tier.keep` or `Tier.release` it."""
    KEPT = "kept"
    """It is cached already."""
    BUSY = "busy"
    """Another thread or process fetches it; `Tier.wait`."""
    REFUSED = "refused"
    """Nothing less valuable can be evicted; read the block from the origin."""


class Piece(NamedTuple):
    """A requested part of a block, and its destination."""

    start: int
    """Offset in the block."""
    buffer: memoryview
    """Writable, of the size of the part."""


class Tier(Protocol):
    """Interface of a cache tier. Thread-safe; no method raises because of a fault of the tier."""

    def has(self, blocks: ObjectBlocks, numbers: Sequence[int] | Int64Array) -> NDArray[np.bool_]:
        """Return which blocks are kept, ``(n,)`` bool; a hint, since others may evict them."""

    def read(self, blocks: ObjectBlocks, wanted: Mapping[int, Sequence[Piece]]) -> list[int]:
        """Fill pieces of blocks; return the blocks that are kept, of others the pieces are undefined."""

    def claim(self, blocks: ObjectBlocks, numbers: Sequence[int], *, is_ahead: bool) -> list[Claim]:
        """Claim the right to fetch blocks, and reserve space for them.

        Args:
            blocks: The object.
            numbers: Its blocks.
            is_ahead: The blocks are prefetched; otherwise a read is waiting for them.
        """

    def keep(self, blocks: ObjectBlocks, payloads: Mapping[int, memoryview]) -> None:
        """Store checked blocks whose claim was `Claim.OURS`."""

    def release(self, blocks: ObjectBlocks, numbers: Sequence[int]) -> None:
        """Give up claims."""

    def wait(self, blocks: ObjectBlocks, number: int, timeout_s: float) -> bool:
        """Wait until a block is no longer busy; return False on a timeout."""

    def drop(self, blocks: ObjectBlocks, number: int) -> None:
        """Remove a block whose bytes are wrong."""

    def close(self) -> None:
        """Release the resources of the tier."""


def copy_pieces(payload: memoryview, pieces: Sequence[Piece]) -> None:
    """Copy parts of a block into their buffers."""
    for piece in pieces:
        piece.buffer[:] = payload[piece.start : piece.start + piece.buffer.nbytes]
