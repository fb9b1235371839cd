"""From ranges to requests: join what lies close together, cut what is large.

What a request costs is declared (`RequestCost`): the time before its first byte, during which its place among
the concurrent requests carries nothing. A gap between two ranges that costs less is read and dropped. What is
larger than one request should be is cut into equal parts, because several connections carry more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from shardflow.configs import Bounds, check_fields
from shardflow.storage.store import ByteRange

__all__ = ["RangeRequest", "RequestCost", "plan_requests"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestCost:
    """What a request costs: a wait, and then its bytes at the rate of one place."""

    latency_s: Annotated[float, Bounds(0.0, 60.0)] = 0.02
    """From a request to its first byte."""
    place_bytes_per_s: Annotated[float, Bounds(1.0)] = 12.5e6
    """Rate of one connection while all of them are busy: the link by the number of concurrent requests."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def gap_bytes(self) -> int:
        """Bytes that come in the time that a request of its own would wait."""
        return int(self.latency_s * self.place_bytes_per_s)

    def seconds(self, num_bytes: int) -> float:
        """Return how long a request of so many bytes should take."""
        return self.latency_s + num_bytes / self.place_bytes_per_s + 1e-6


@dataclass(slots=True)
class RangeRequest:
    """One ranged request, ``[start, stop)``, and which parts of its body go where."""

    start: int
    stop: int
    pieces: list[tuple[int, memoryview]] = field(default_factory=list)
    """Offset in the object, and the bytes to fill from there."""

    @property
    def num_bytes(self) -> int:
        """Bytes asked for, those of gaps with them."""
        return self.stop - self.start

    def deliver(self, body: memoryview) -> None:
        """Copy the body to where it belongs; it must have ``stop - start`` bytes."""
        for offset, target in self.pieces:
            at = offset - self.start
            target[:] = body[at : at + target.nbytes]


def plan_requests(
    ranges: Sequence[ByteRange], buffers: Sequence[memoryview], *, gap_bytes: int, request_bytes: int
) -> list[RangeRequest]:
    """Plan the requests that fill buffers with ranges, in any order and overlapping.

    Args:
        ranges: What is asked for.
        buffers: One writable buffer per range, of its size.
        gap_bytes: Largest gap that is read rather than left out.
        request_bytes: Largest request.
    """
    spans = sorted(
        (
            (span.offset, buffer.cast("B"))
            for span, buffer in zip(ranges, buffers, strict=True)
            if span.num_bytes
        ),
        key=lambda pair: pair[0],
    )
    requests: list[RangeRequest] = []
    stretch: list[tuple[int, memoryview]] = []
    stop = 0
    for offset, buffer in spans:
        if stretch and offset > stop + gap_bytes:
            requests += _cut(stretch, stop, request_bytes)
            stretch = []
        stop = max(stop, offset + buffer.nbytes) if stretch else offset + buffer.nbytes
        stretch.append((offset, buffer))
    return requests + _cut(stretch, stop, request_bytes) if stretch else requests


def _cut(stretch: list[tuple[int, memoryview]], stop: int, request_bytes: int) -> list[RangeRequest]:
    """Make as few requests as may be of one stretch, of equal size; a gap at an edge is left out."""
    start = stretch[0][0]
    part_bytes = -(-(stop - start) // -(-(stop - start) // request_bytes))
    parts: list[RangeRequest] = []
    by_number: dict[int, RangeRequest] = {}
    for offset, buffer in stretch:
        position, left = offset, buffer
        while left.nbytes:
            number = (position - start) // part_bytes
            num_bytes = min(left.nbytes, start + (number + 1) * part_bytes - position)
            part = by_number.get(number)
            if part is None:
                part = by_number[number] = RangeRequest(position, position)
                parts.append(part)
            part.pieces.append((position, left[:num_bytes]))
            part.stop = max(part.stop, position + num_bytes)
            left, position = left[num_bytes:], position + num_bytes
    return parts
