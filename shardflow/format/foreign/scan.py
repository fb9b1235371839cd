"""Scan of foreign tars: member names, places and crc32c in one pass, and image sizes from their first bytes.

Python's ``tarfile`` ends silently at a damaged header; here anything that is no header, no padding and no
end of archive is an error with its offset. Supported: USTAR, GNU (long names, base-256 sizes) and pax (path
and size).

Names are cut as webdataset 1.0 was measured to do: the key is the path up to the first dot of its last part,
folders included; the rest, in lower case, is the field. Members without a dot, and ``__names__`` at the top
level, belong to no sample.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import google_crc32c

from shardflow.errors import ConfigError, FormatError
from shardflow.format.tar import BLOCK_NUM_BYTES, HashedStream

FOREIGN_KEY_NUM_BYTES: Final = 32
FOREIGN_FIELD_PATTERN: Final = re.compile(r"[a-z0-9_@+-]+(\.[a-z0-9_@+-]+)*", re.ASCII)
MAX_PATTERN_NAMES: Final = 1_000_000
_MEMBER: Final = re.compile(rb"((?:.*/)?[^.]+)\.([^/]*)", re.DOTALL)
_META: Final = re.compile(rb"__[^/]*__(/|\Z)")
_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_RANGE: Final = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)
_ZERO_BLOCK: Final = bytes(BLOCK_NUM_BYTES)
_REGULAR: Final = frozenset({0, ord("0"), ord("7")})
_MAX_EXTENSION_BYTES: Final = 1 << 20
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_REFUSED: Final = {ord("1"): "a hard link", ord("2"): "a symbolic link", ord("S"): "a sparse file"}


def split_member(name: bytes) -> tuple[bytes, str] | None:
    """Cut a member's name into key and field; None where webdataset skips the member.

    Example:
        >>> split_member(b"images/0001.seg.PNG")
        (b'images/0001', 'seg.png')
    """
    found = _MEMBER.fullmatch(name)
    if found is None:
        return None
    return found[1], found[2].decode("utf-8", "replace").lower()


def is_meta(name: bytes) -> bool:
    """Tell whether webdataset takes a member for a note about the shard: ``__name__`` at the top."""
    return _META.match(name) is not None


def foreign_sample_key(key: bytes, *, shard: str = "", occurrence: int = 0) -> str:
    """Derive the sample key of a foreign key: 32 hexadecimal digits, always of the same key the same.

    Foreign keys have any characters and may be names of people, and sample keys stand in logs and masks; so
    none is taken over, not even one that would be allowed.

    Args:
        key: The key as the tar has it.
        shard: For a key that was taken before: the shard that has it again.
        occurrence: For such a key: its number in that shard.
    """
    text = b"\0".join(
        [b"foreign sample key 1", key, *([shard.encode(), b"%d" % occurrence] if shard else [])]
    )
    return hashlib.sha256(text).hexdigest()[:FOREIGN_KEY_NUM_BYTES]


def expand_braces(pattern: str) -> Iterator[str]:
    """Expand ``{000000..000123}`` and ``{a,b}``; several in one pattern, the last one fastest.

    Raises:
        ConfigError: A brace has no partner or no list in it, or there are too many names.
    """
    found = _BRACES.search(pattern)
    if found is None:
        if "{" in pattern or "}" in pattern:
            raise ConfigError("a pattern's braces must be closed and not nested, got others; correct it.")
        yield pattern
        return
    head, tail = pattern[: found.start()], pattern[found.end() :]
    tails = list(expand_braces(tail))
    items = _items(found[1])
    if len(items) * len(tails) > MAX_PATTERN_NAMES:
        raise ConfigError(
            f"a pattern must name at most {MAX_PATTERN_NAMES} files, got {len(items) * len(tails)}."
        )
    for item in items:
        for rest in tails:
            yield f"{head}{item}{rest}"


def _items(text: str) -> list[str]:
    found = _RANGE.fullmatch(text)
    if found is None:
        if "," not in text:
            raise ConfigError(
                "a pattern's brace must be {first..last} or {one,other}, got another; correct it."
            )
        return text.split(",")
    first, last = int(found[1]), int(found[2])
    if abs(last - first) >= MAX_PATTERN_NAMES:
        raise ConfigError(f"a pattern must name at most {MAX_PATTERN_NAMES} files, got more; correct it.")
    numbers = range(first, last + 1) if first <= last else range(first, last - 1, -1)
    is_padded = any(len(part) > 1 and part.startswith("0") for part in found.groups())
    width = max(map(len, found.groups())) if is_padded else 0
    return [str(number).zfill(width) for number in numbers]


@dataclass(frozen=True, slots=True)
class TarMember:
    """A regular file of a tar."""

    number: int
    """Among all members that have a header of their own, from 0."""
    name: bytes
    header_offset: int
    """Where the first header of it begins, extensions included."""
    offset: int
    num_bytes: int
    crc32c: int
    head: bytes
    """Its first bytes, as many as were asked for."""


@dataclass(slots=True)
class _Extensions:
    """Values of a member from the extension headers before it."""

    name: bytes | None = None
    num_bytes: int | None = None
    is_sparse: bool = False


def scan_tar(stream: HashedStream, *, shard: str, head_bytes: int = 0) -> Iterator[TarMember]:
    """Yield the regular members of a tar.

    Args:
        stream: The tar, at its beginning.
        shard: What errors call it.
        head_bytes: How much of each member to keep.

    Raises:
        FormatError: The tar is compressed, cut, damaged, holds links, devices or sparse files, or goes on
            after its end; the message names shard and member, never a name in it.
    """
    return _Scan(stream, shard).members(head_bytes)


class _Scan:
    def __init__(self, stream: HashedStream, shard: str) -> None:
        self._stream = stream
        self._shard = shard
        self._number = 0

    def members(self, head_bytes: int) -> Iterator[TarMember]:
        extensions = _Extensions()
        start = 0
        while (header := self._next_header()) is not None:
            kind = header[156]
            num_bytes = self._number_of(header[124:136])
            if kind in b"LKxg":
                self._extend(extensions, kind, num_bytes)
                continue
            if extensions.num_bytes is not None:
                num_bytes = extensions.num_bytes
            if extensions.is_sparse:
                kind = ord("S")
            if kind in _REGULAR and not (kind == 0 and self._name(header).endswith(b"/")):
                offset = self._stream.position
                name = extensions.name if extensions.name is not None else self._name(header)
                crc, head = self._read_payload(num_bytes, head_bytes)
                yield TarMember(self._number, name, start, offset, num_bytes, crc, head)
            elif kind == ord("5") or kind == 0:
                self._skip(num_bytes + -num_bytes % BLOCK_NUM_BYTES)
            else:
                what = _REFUSED.get(kind, "a special file")
                raise self._error("a regular file or a folder", what, "pack it again with: tar --dereference")
            self._number += 1
            extensions = _Extensions()
            start = self._stream.position

    def _next_header(self) -> bytes | None:
        """Return the next header, or None after the end of the archive, whose rest must be zeros."""
        offset = self._stream.position
        header = self._stream.take_bytes(BLOCK_NUM_BYTES)
        if not offset:
            self._refuse_compressed(header)
        if len(header) < BLOCK_NUM_BYTES:
            raise self._error("a header or the end of the archive", "the end of the file", "fetch it again")
        if header == _ZERO_BLOCK:
            for piece in self._stream.take(self._stream.num_bytes):
                if piece.any():
                    raise self._error(
                        "nothing but zeros after its end", "other bytes", "is it several tars in one file?"
                    )
            return None
        unsigned = sum(header) - sum(header[148:156]) + 8 * 32
        signed = unsigned - 256 * sum(byte > 127 for byte in header[:148] + header[156:])
        if self._number_of(header[148:156]) not in (unsigned, signed):
            raise self._error("a header with its checksum", "other bytes", "fetch the tar again")
        return header

    def _refuse_compressed(self, start: bytes) -> None:
        for magic, name in _COMPRESSED.items():
            if start.startswith(magic):
                raise FormatError(
                    f"{self._shard} must be a plain tar, whose members can be read alone, got one compressed "
                    f"with {name}; decompress it first."
                )
        if not start:
            raise FormatError(f"{self._shard} must be a tar, got an empty file; fetch it again.")

    def _extend(self, extensions: _Extensions, kind: int, num_bytes: int) -> None:
        if num_bytes > _MAX_EXTENSION_BYTES:
            raise self._error("a header extension of at most 1 MiB", "a larger one", "fetch the tar again")
        data = self._stream.take_bytes(num_bytes)
        self._skip(-num_bytes % BLOCK_NUM_BYTES)
        if len(data) < num_bytes:
            raise self._error("a whole header extension", "the end of the file", "fetch the tar again")
        if kind == ord("L"):
            extensions.name = data.rstrip(b"\0")
        elif kind == ord("x"):
            for key, value in self._records(data):
                if key == b"path":
                    extensions.name = value
                elif key == b"size":
                    extensions.num_bytes = self._decimal(value)
                elif key.startswith(b"GNU.sparse"):
                    extensions.is_sparse = True

    def _records(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the records of a pax header: ``length key=value`` and a line end each."""
        while data.strip(b"\0"):
            length = self._decimal(data.partition(b" ")[0])
            record, data = data[:length], data[length:]
            key, separator, value = record.partition(b" ")[2].partition(b"=")
            if not separator or not value.endswith(b"\n"):
                raise self._error("a pax header of whole records", "another one", "fetch the tar again")
            yield key, value[:-1]

    def _read_payload(self, num_bytes: int, head_bytes: int) -> tuple[int, bytes]:
        crc, head = 0, b""
        stop = self._stream.position + num_bytes
        for piece in self._stream.take(num_bytes):
            crc = int(google_crc32c.extend(crc, piece))
            if len(head) < head_bytes:
                head += piece[: head_bytes - len(head)].tobytes()
        if self._stream.position < stop:
            raise self._error(f"a payload of {num_bytes} bytes", "the end of the file", "fetch the tar again")
        self._skip(-num_bytes % BLOCK_NUM_BYTES)
        return crc, head

    def _skip(self, num_bytes: int) -> None:
        for _ in self._stream.take(num_bytes):
            pass

    def _name(self, header: bytes) -> bytes:
        name = header[:100].partition(b"\0")[0]
        # The old GNU format has times where USTAR has the front part of the name.
        if header[257:263] == b"ustar\0" and header[345]:
            return header[345:500].partition(b"\0")[0] + b"/" + name
        return name

    def _number_of(self, field: bytes) -> int:
        """Read octal digits, or the base-256 number of GNU tar."""
        if field[0] in (0x80, 0xFF):
            value = int.from_bytes(field[1:], "big") if field[0] == 0x80 else -1
            if value < 0 or value > 1 << 62:
                raise self._error("a size from 0", "another number", "fetch the tar again")
            return value
        digits = field.replace(b"\0", b" ").strip()
        if not all(byte in b"01234567" for byte in digits):
            raise self._error("octal numbers in its header", "other characters", "fetch the tar again")
        return int(digits, 8) if digits else 0

    def _decimal(self, digits: bytes) -> int:
        if not digits.isdigit() or len(digits) > 18 or not int(digits):
            if digits == b"0":
                return 0
            raise self._error("a pax header with decimal numbers", "others", "fetch the tar again")
        return int(digits)

    def _error(self, expected: str, found: str, remedy: str) -> FormatError:
        return FormatError(
            f"{self._shard} must have {expected}, got {found} (member {self._number}, offset "
            f"{self._stream.position}); {remedy}."
        )
