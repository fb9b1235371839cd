"""Check one shard, byte by byte, and name the first one that is wrong.

With its index every byte of a shard is known or checksummed: headers, padding and the end of the archive
are built anew and compared, payloads have a crc32c, and nothing lies between. Reads in order, in one window
of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import google_crc32c
import numpy as np

from shardflow.errors import FormatError
from shardflow.shards.index import ShardIndex
from shardflow.shards.stream import HashedStream
from shardflow.shards.tar import (
    BLOCK_NUM_BYTES,
    END_OF_ARCHIVE,
    member_header,
    padding,
    parse_member_header,
)
from shardflow.storage import ByteStore

__all__ = ["Finding", "find_shard_damage"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The first damage of a shard: byte, place in words, problem, and member where there is one."""

    offset: int
    place: str
    problem: str
    sample_key: str | None = None
    field: str | None = None


def find_shard_damage(
    store: ByteStore, path: str, index: ShardIndex | None, sha256: str | None
) -> Finding | None:
    """Find the first damage of a shard.

    Args:
        store: Where the shard lies.
        path: Its path.
        index: Its index; None where that is damaged itself, and payloads can only be judged by the digest.
        sha256: The digest in the manifest; None where that is damaged itself.

    Returns:
        The first damage in file order, or None.

    Raises:
        StorageError: The shard cannot be read.
    """
    stream = HashedStream(store, path)
    if index is not None and index.is_foreign:
        finding = _walk_foreign(stream, index)
        if finding is None and stream.hexdigest() != sha256 and sha256 is not None:
            finding = Finding(0, "a header, padding or what no sample has", "another sha256")
        return finding
    finding = _walk_headers(stream) if index is None else _walk_index(stream, index)
    if finding is None and stream.position < stream.num_bytes:
        extra = stream.num_bytes - stream.position
        finding = Finding(stream.position, "after the end of the archive", f"{extra} bytes too many")
    if finding is not None and index is not None:
        return finding
    if sha256 is None or stream.hexdigest() == sha256:
        # Without an index the tar of another writer may look wrong and still be what the manifest names.
        return finding if sha256 is None else None
    return finding or Finding(0, "a payload, which one only its index could tell", "another sha256")


def _walk_index(stream: HashedStream, index: ShardIndex) -> Finding | None:
    number = 0
    for row in range(index.num_samples):
        key = index.sample_key(row)
        for field in index.fields(row):
            damage = _check_member(stream, f"{key}.{field.name}", field.num_bytes, field.crc32c)
            if damage:
                offset, part, problem = damage
                place = f"{part} {key}.{field.name}, member {number}"
                return Finding(offset, place, problem, key, field.name)
            number += 1
    finding = _compare(stream, END_OF_ARCHIVE)
    return Finding(finding[0], "end of the archive", finding[1]) if finding else None


def _walk_foreign(stream: HashedStream, index: ShardIndex) -> Finding | None:
    """Check size and payloads; of what lies between them nothing is known but the digest of the whole tar."""
    if stream.num_bytes != index.shard_num_bytes:
        problem = f"{stream.num_bytes} bytes instead of {index.shard_num_bytes}"
        return Finding(min(stream.num_bytes, index.shard_num_bytes), "end of the file", problem)
    rows = np.repeat(np.arange(index.num_samples), np.diff(index.first_field).astype(np.int64))
    for number in np.argsort(index.field_offsets, kind="stable").tolist():
        offset, expected = int(index.field_offsets[number]), int(index.field_crc32c[number])
        for _ in stream.take(offset - stream.position):
            pass
        found = 0
        for piece in stream.take(int(index.field_num_bytes[number])):
            found = int(google_crc32c.extend(found, piece))
        if found != expected:
            key = index.sample_key(int(rows[number]))
            name = index.field_names[int(index.field_name_ids[number])]
            problem = f"crc32c {found:08x} instead of {expected:08x}"
            return Finding(offset, f"payload of {key}.{name}", problem, key, name)
    return None


def _walk_headers(stream: HashedStream) -> Finding | None:
    """Judge headers and padding by themselves, each header telling where the next one lies."""
    number = 0
    while True:
        start = stream.position
        header = stream.take_bytes(BLOCK_NUM_BYTES)
        if header == END_OF_ARCHIVE[:BLOCK_NUM_BYTES]:
            finding = _compare(stream, END_OF_ARCHIVE[BLOCK_NUM_BYTES:])
            return Finding(finding[0], "end of the archive", finding[1]) if finding else None
        if len(header) < BLOCK_NUM_BYTES:
            return Finding(start + len(header), f"header of member {number}", "the end of the file")
        try:
            _, num_bytes = parse_member_header(header)
        except FormatError:
            return Finding(start, f"header of member {number}", "no header of format 1")
        for _ in stream.take(num_bytes):
            pass
        finding = _compare(stream, padding(num_bytes))
        if finding:
            return Finding(finding[0], f"padding after member {number}", finding[1])
        number += 1


def _check_member(stream: HashedStream, name: str, num_bytes: int, crc: int) -> tuple[int, str, str] | None:
    finding = _compare(stream, member_header(name, num_bytes))
    if finding:
        return finding[0], "header of", finding[1]
    start = stream.position
    found = 0
    for piece in stream.take(num_bytes):
        found = int(google_crc32c.extend(found, piece))
    if stream.position < start + num_bytes:
        return stream.position, "payload of", "the end of the file"
    if found != crc:
        return start, "payload of", f"crc32c {found:08x} instead of {crc:08x}"
    finding = _compare(stream, padding(num_bytes))
    return (finding[0], "padding after", finding[1]) if finding else None


def _compare(stream: HashedStream, expected: bytes) -> tuple[int, str] | None:
    """Compare the next bytes with what they must be: offset and problem of the first difference."""
    start = stream.position
    found = stream.take_bytes(len(expected))
    if found == expected:
        return None
    for at, (byte, wanted) in enumerate(zip(found, expected, strict=False)):
        if byte != wanted:
            return start + at, f"byte {byte:#04x} instead of {wanted:#04x}"
    return start + len(found), "the end of the file"
