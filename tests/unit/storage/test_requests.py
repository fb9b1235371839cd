"""Planning requests: every byte once to its place, no gap that costs more than a request, none too large."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.storage import ByteRange, RequestCost
from shardflow.storage.requests import plan_requests

pytestmark = pytest.mark.fast

CONTENT = bytes(number * 7 % 251 for number in range(4000))


@given(
    spans=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 900)), max_size=12),
    gap_bytes=st.integers(0, 500),
    request_bytes=st.integers(1, 1200),
)
def test_any_ranges_are_filled_by_requests_within_bounds(
    spans: list[tuple[int, int]], gap_bytes: int, request_bytes: int
) -> None:
    buffers = [bytearray(num_bytes) for _, num_bytes in spans]
    requests = plan_requests(
        [ByteRange(*span) for span in spans],
        [memoryview(buffer) for buffer in buffers],
        gap_bytes=gap_bytes,
        request_bytes=request_bytes,
    )
    wanted = {at for offset, num_bytes in spans for at in range(offset, offset + num_bytes)}
    for request in requests:
        assert 0 < request.num_bytes <= request_bytes
        # Its first and last byte are wanted, and what is not lies in gaps that are worth reading.
        assert {request.start, request.stop - 1} <= wanted
        run = 0
        for at in range(request.start, request.stop):
            run = 0 if at in wanted else run + 1
            assert run <= gap_bytes
        request.deliver(memoryview(CONTENT)[request.start : request.stop])
    assert buffers == [CONTENT[offset : offset + num_bytes] for offset, num_bytes in spans]
    starts = [request.start for request in requests]
    assert starts == sorted(starts)
    assert all(one.stop <= other.start for one, other in pairwise(requests))


def test_a_large_range_is_cut_into_equal_parts() -> None:
    buffer = memoryview(bytearray(3000))
    requests = plan_requests([ByteRange(0, 3000)], [buffer], gap_bytes=0, request_bytes=1400)
    assert [request.num_bytes for request in requests] == [1000, 1000, 1000]


def test_a_gap_is_read_where_it_comes_sooner_than_an_answer() -> None:
    cost = RequestCost(latency_s=0.02, place_bytes_per_s=10e6)
    assert cost.gap_bytes == 200_000
    assert RequestCost(latency_s=0.0).gap_bytes == 0
    assert cost.seconds(1_000_000) == pytest.approx(0.12, rel=1e-3)
