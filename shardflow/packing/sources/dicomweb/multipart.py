"""Streaming reader of ``multipart/related`` bodies (RFC 2046, RFC 2387; DICOM PS3.18 section 8.6).

A body is read in pieces of bounded size, and a delimiter is found wherever the pieces are cut. A part counts
only once the delimiter behind it has been read, so a connection that breaks never yields a short file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from email.message import Message
from typing import Final

_PIECE_BYTES: Final = 1 << 16
_MAX_HEADER_BYTES: Final = 1 << 14
_MAX_BOUNDARY: Final = 70  # RFC 2046, 5.1.1
_PADDING: Final = b" \t"
_MAX_PADDING: Final = 256


class MultipartError(Exception):
    """The body breaks the rules of multipart, or ends early; the message holds nothing of it."""


def media_type(content_type: str) -> str:
    """Return the media type of a ``Content-Type``, in lower case and without parameters."""
    return _parsed(content_type).get_content_type()


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a ``multipart/related`` content type.

    Raises:
        MultipartError: It is another type, or has no usable boundary.
    """
    message = _parsed(content_type)
    boundary = message.get_boundary() or ""
    if message.get_content_type() != "multipart/related":
        raise MultipartError("another content type than multipart/related")
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise MultipartError("a content type without a usable boundary")
    return boundary.encode("ascii")


def _parsed(content_type: str) -> Message:
    message = Message()
    message["content-type"] = content_type
    return message


class PartReader:
    """The parts of one body, one after the other.

    Args:
        read: Reads at most so many bytes of the body; ``b""`` at its end.
        boundary: As `boundary_of` returns it.
    """

    def __init__(self, read: Callable[[int], bytes], boundary: bytes) -> None:
        self._read = read
        self._delimiter = b"\r\n--" + boundary
        # The first delimiter needs no line break before it.
        self._buffer = bytearray(b"\r\n")
        self._is_closed = False
        self._is_in_body = True

    def next_part(self) -> dict[str, str] | None:
        """Skip to the next part and return its header fields, names in lower case; None after the last one.

        Raises:
            MultipartError: The body is malformed or ends early.
        """
        for _ in self.body():
            pass
        if self._is_closed:
            return None
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _MAX_HEADER_BYTES:
                raise MultipartError("a part with too large a header")
            self._fill()
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        self._is_in_body = True
        fields = (line.partition(":") for line in lines if ":" in line)
        return {name.strip().lower(): value.strip() for name, _, value in fields}

    def body(self) -> Iterator[bytes]:
        """Yield the bytes of the current part in pieces; ends when its closing delimiter was read.

        Raises:
            MultipartError: The body ends before that.
        """
        tail = len(self._delimiter) - 1
        while self._is_in_body:
            at = self._buffer.find(self._delimiter)
            if at < 0:
                ready = len(self._buffer) - tail
                if ready > 0:
                    yield bytes(self._buffer[:ready])
                    del self._buffer[:ready]
                self._fill()
                continue
            if at:
                yield bytes(self._buffer[:at])
                del self._buffer[:at]
            if not self._take_delimiter():
                # The same bytes inside the content: a delimiter is followed by the end of its line.
                yield bytes(self._buffer[:1])
                del self._buffer[:1]

    def _take_delimiter(self) -> bool:
        """Remove the delimiter at the beginning of the buffer; whether it is one."""
        start = len(self._delimiter)
        while len(self._buffer) < start + 2:
            self._fill()
        if self._buffer[start : start + 2] == b"--":
            self._is_closed, self._is_in_body = True, False
            return True
        end = start
        while end - start <= _MAX_PADDING:
            while len(self._buffer) < end + 2:
                self._fill()
            if self._buffer[end] not in _PADDING:
                break
            end += 1
        if self._buffer[end : end + 2] != b"\r\n":
            return False
        # The line break stays: a part without header fields begins with an empty line.
        del self._buffer[:end]
        self._is_in_body = False
        return True

    def _fill(self) -> None:
        piece = self._read(_PIECE_BYTES)
        if not piece:
            raise MultipartError("a body that ends within a part")
        self._buffer += piece
