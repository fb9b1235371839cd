"""What the tiers of a cache have in common: blocks are claimed, then kept, and read by pieces."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from shardflow.storage.cache.blocks import ObjectBlocks

__all__ = ["Claim", "Piece", "Tier", "copy_pieces", "read_pieces"]

# Above this many pieces of a block one read of all that lies between them is cheaper.
_MAX_PIECE_READS = 2


class Claim(Enum):
    """What became of the wish to fetch a block."""

    OURS = "ours"
    """Fetch it, then `Tier.keep` or `Tier.release` it."""
    KEPT = "kept"
    """It is there by now."""
    BUSY = "busy"
    """Another one fetches it; `Tier.wait`."""
    REFUSED = "refused"
    """There is no room that it is worth; read it from the origin."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a block that is wanted, and where its bytes go."""

    start: int
    """In the block."""
    buffer: memoryview
    """Writable, of as many bytes as are wanted."""


class Tier(Protocol):
    """Keeps blocks. Safe for many threads; no method raises because something is wrong with the tier."""

    def read(self, blocks: ObjectBlocks, number: int, pieces: Sequence[Piece]) -> bool:
        """Fill pieces of a block; False where it is not kept, and the pieces hold anything then."""

    def claim(self, blocks: ObjectBlocks, numbers: Sequence[int], *, is_ahead: bool) -> list[Claim]:
        """Ask for the right to fetch blocks, and for room for them.

        Args:
            blocks: The object.
            numbers: Its blocks.
            is_ahead: They are fetched before they are needed; otherwise for a read that is under way.
        """

    def keep(self, blocks: ObjectBlocks, payloads: Mapping[int, memoryview]) -> None:
        """Keep blocks that are `Claim.OURS` and have been checked."""

    def release(self, blocks: ObjectBlocks, numbers: Sequence[int]) -> None:
        """Give claims back."""

    def wait(self, blocks: ObjectBlocks, number: int, timeout_s: float) -> bool:
        """Wait until a busy block is no more; False where that takes too long."""

    def drop(self, blocks: ObjectBlocks, number: int) -> None:
        """Forget a block whose bytes are wrong."""

    def close(self) -> None:
        """Free what the tier holds."""


def copy_pieces(payload: memoryview, pieces: Sequence[Piece]) -> None:
    """Copy parts of a block into their buffers."""
    for piece in pieces:
        piece.buffer[:] = payload[piece.start : piece.start + piece.buffer.nbytes]


def read_pieces(descriptor: int, pieces: Sequence[Piece]) -> None:
    """Read parts of a block from its file.

    Raises:
        EOFError: The file ends before.
    """
    if len(pieces) <= _MAX_PIECE_READS:
        for piece in pieces:
            _read_exactly(descriptor, piece.start, piece.buffer)
        return
    start = min(piece.start for piece in pieces)
    stop = max(piece.start + piece.buffer.nbytes for piece in pieces)
    memory = memoryview(bytearray(stop - start))
    _read_exactly(descriptor, start, memory)
    copy_pieces(memory, [Piece(piece.start - start, piece.buffer) for piece in pieces])


def _read_exactly(descriptor: int, position: int, buffer: memoryview) -> None:
    while buffer.nbytes:
        num_bytes = os.preadv(descriptor, [buffer], position)
        if not num_bytes:
            raise EOFError
        buffer, position = buffer[num_bytes:], position + num_bytes
