from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from shardflow.loading.ipc import SharedPool, SharedSegment

pytestmark = pytest.mark.fast
KIB, MIB = 1 << 10, 1 << 20


def _mapped(pool: SharedPool, segments: dict[int, SharedSegment]) -> dict[int, SharedSegment]:
    """Do with the pool's change what the other process does."""
    for change in pool.take_changes():
        if change.fileno < 0:
            del segments[change.number]
        else:
            segments[change.number] = SharedSegment(
                change.number,
                change.fileno,
                buffer_num_bytes=change.buffer_num_bytes,
                num_buffers=change.num_buffers,
            )
            os.close(change.fileno)
    return segments


def test_a_buffer_is_not_used_again_while_either_side_looks_at_it() -> None:
    pool = SharedPool(64 * MIB)
    buffer = pool.lend(3 * MIB)
    address = buffer.ctypes.data
    buffer[:] = 7
    segment, index = pool.hand_over(buffer)
    theirs = _mapped(pool, {})[segment].lend(index)[: 3 * MIB]
    assert (theirs == 7).all()
    view = theirs[10:20].view(np.int16)
    del theirs
    del buffer
    gc.collect()
    assert pool.lend(3 * MIB).ctypes.data != address  # theirs still
    assert (view == 7 * 257).all()
    del view
    held = [pool.lend(3 * MIB) for _ in range(5)]
    assert address in [other.ctypes.data for other in held]


def test_a_buffer_that_they_let_go_first_waits_for_our_own_views() -> None:
    pool = SharedPool(64 * MIB)
    buffer = pool.lend(20 * MIB)
    address = buffer.ctypes.data
    segment, index = pool.hand_over(buffer)
    segments = _mapped(pool, {})
    segments[segment].lend(index)  # and at once let go
    held = pool.lend(20 * MIB)
    assert held.ctypes.data != address
    del buffer
    assert pool.lend(20 * MIB).ctypes.data == address


def test_buffers_that_never_left_come_back_at_once() -> None:
    pool = SharedPool(64 * MIB)
    addresses = {pool.lend(20 * MIB).ctypes.data for _ in range(10)}
    assert len(addresses) == 1
    assert pool.num_segments == 1


def test_small_buffers_share_a_descriptor_and_overlap_nowhere() -> None:
    pool = SharedPool(64 * MIB)
    buffers = [pool.lend(64 * KIB) for _ in range(300)]
    for number, buffer in enumerate(buffers):
        buffer[:] = number % 251
    assert all((buffer == number % 251).all() for number, buffer in enumerate(buffers))
    assert pool.num_segments == 2


def test_slabs_of_sizes_that_are_no_longer_asked_for_go_back() -> None:
    pool = SharedPool(32 * MIB)
    segments: dict[int, SharedSegment] = {}
    for size in range(20, 60):
        pool.lend(size * MIB)
        assert set(_mapped(pool, segments)) == set(pool._segments)
    # What may lie idle, two of the newest size, and the newest itself.
    assert (
        sum(segment.buffer_num_bytes * segment.num_buffers for segment in segments.values())
        <= 32 * MIB + 4 * 64 * MIB
    )


def test_a_forked_child_does_not_give_its_parents_buffer_back() -> None:
    pool = SharedPool(64 * MIB)
    buffer = pool.lend(20 * MIB)
    segment, index = pool.hand_over(buffer)
    mapped = _mapped(pool, {})[segment]
    theirs = mapped.lend(index)
    pid = os.fork()
    if not pid:
        del theirs
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert mapped.is_held(index)
    del theirs
    assert not mapped.is_held(index)
