"""Which bytes of an encapsulated file make up which frame.

Reads item headers only; every fragment is checked against the size of the file, so a truncated file is found
here and not by a codec that returns half an image.

Source: DICOM PS3.5, A.4 (encapsulation), and PS3.3, C.7.6.3.1.8 (extended offset table: one fragment a frame,
which the one-to-one rule below covers).
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardflow.sources.reasons import Reason, source_error

__all__ = ["MAX_FRAGMENTS", "Fragment", "find_frames", "read_frame"]

MAX_FRAGMENTS = 1 << 18
"""Most fragments that one file may have."""

_ITEM, _SEQUENCE_END = b"\xfe\xff\x00\xe0", b"\xfe\xff\xdd\xe0"
_END_OF_IMAGE = b"\xff\xd9"
_TAIL_BYTES = 10


class Fragment(NamedTuple):
    """Where one fragment's bytes lie in the file."""

    offset: int
    num_bytes: int


def find_frames(descriptor: int, offset: int, file_num_bytes: int, num_frames: int) -> list[list[Fragment]]:
    """Find the fragments of every frame.

    Args:
        descriptor: Open file.
        offset: Where the value of the pixel data begins: at its offset table.
        file_num_bytes: Size of the file.
        num_frames: What the header says.

    Returns:
        ``num_frames`` lists of fragments.

    Raises:
        SourceError: PIXEL_DATA_TRUNCATED, LIMIT_EXCEEDED, or DECODE_FAILED where fragments and frames do not
            fit.
    """
    items = list(_items(descriptor, offset, file_num_bytes))
    if not items:
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, "no fragments")
    table, fragments = items[0], items[1:]
    if len(fragments) == num_frames:
        return [[fragment] for fragment in fragments]
    if len(fragments) < num_frames:
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, f"{len(fragments)} fragments for {num_frames} frames")
    if num_frames == 1:
        return [fragments]
    return (
        _split_by_table(descriptor, table, fragments, num_frames)
        or _split_by_marker(descriptor, fragments, num_frames)
        or _no_split(len(fragments), num_frames)
    )


def read_frame(descriptor: int, fragments: Sequence[Fragment]) -> bytes:
    """Read one encoded frame.

    Raises:
        SourceError: PIXEL_DATA_TRUNCATED where the file became shorter.
    """
    parts = [os.pread(descriptor, fragment.num_bytes, fragment.offset) for fragment in fragments]
    if sum(map(len, parts)) != sum(fragment.num_bytes for fragment in fragments):
        raise source_error(Reason.PIXEL_DATA_TRUNCATED, "the file became shorter while it was read")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _items(descriptor: int, offset: int, file_num_bytes: int) -> Iterator[Fragment]:
    for _ in range(MAX_FRAGMENTS):
        head = os.pread(descriptor, 8, offset)
        # A file that ends right after its last fragment lacks only the delimiter; nothing is lost.
        if head[:4] == _SEQUENCE_END or len(head) == 0:
            return
        if len(head) < 8 or head[:4] != _ITEM:
            raise source_error(Reason.PIXEL_DATA_TRUNCATED, "a fragment is expected where other bytes stand")
        (num_bytes,) = struct.unpack_from("<I", head, 4)
        offset += 8
        if offset + num_bytes > file_num_bytes:
            missing = offset + num_bytes - file_num_bytes
            raise source_error(Reason.PIXEL_DATA_TRUNCATED, f"{missing} bytes of a fragment are missing")
        yield Fragment(offset, num_bytes)
        offset += num_bytes
    raise source_error(Reason.LIMIT_EXCEEDED, f"more than {MAX_FRAGMENTS} fragments")


def _split_by_table(
    descriptor: int, table: Fragment, fragments: Sequence[Fragment], num_frames: int
) -> list[list[Fragment]] | None:
    """Split by the basic offset table, if it has one entry a frame, each at the start of a fragment."""
    if table.num_bytes != 4 * num_frames:
        return None
    offsets = struct.unpack(f"<{num_frames}I", os.pread(descriptor, table.num_bytes, table.offset))
    first = fragments[0].offset
    place = {fragment.offset - first: number for number, fragment in enumerate(fragments)}
    starts = [place.get(offset, -1) for offset in offsets]
    if starts[0] != 0 or any(after <= before for before, after in itertools.pairwise(starts)):
        return None
    return [list(fragments[start:stop]) for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def _split_by_marker(
    descriptor: int, fragments: Sequence[Fragment], num_frames: int
) -> list[list[Fragment]] | None:
    """Split after each fragment that ends with the end-of-image marker of JPEG, JPEG-LS and JPEG 2000."""
    frames: list[list[Fragment]] = [[]]
    for fragment in fragments:
        frames[-1].append(fragment)
        tail = min(_TAIL_BYTES, fragment.num_bytes)
        if _END_OF_IMAGE in os.pread(descriptor, tail, fragment.offset + fragment.num_bytes - tail):
            frames.append([])
    if not frames[-1]:
        frames.pop()
    return frames if len(frames) == num_frames else None


def _no_split(num_fragments: int, num_frames: int) -> list[list[Fragment]]:
    raise source_error(
        Reason.DECODE_FAILED, f"{num_fragments} fragments cannot be dealt to {num_frames} frames"
    )
