from __future__ import annotations

import errno
import gc
import mmap
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from shardflow.loading import engine
from shardflow.loading.engine import BufferPool

pytestmark = pytest.mark.fast
MIB = 1 << 20


def test_memory_comes_back_when_the_last_view_dies_and_not_before() -> None:
    pool = BufferPool(8 * MIB)
    buffer = pool.lend(MIB)
    address = buffer.ctypes.data
    view = buffer[10:20].view(np.int16)[1:]
    buffer[:] = 7
    del buffer
    assert pool.free_bytes == 0
    other = pool.lend(MIB)
    other[:] = 9
    assert other.ctypes.data != address
    assert (view == 7 * 257).all()
    del view
    assert pool.free_bytes == MIB
    assert pool.lend(MIB).ctypes.data == address


def test_a_memoryview_keeps_memory_too() -> None:
    pool = BufferPool(8 * MIB)
    view = pool.lend(100).data
    assert pool.free_bytes == 0
    view.release()
    del view
    assert pool.free_bytes > 0


def test_sizes_that_differ_a_little_share_buffers() -> None:
    pool = BufferPool(8 * MIB)
    for num_bytes in (1_000_000, 990_000, 1_010_000):
        assert pool.lend(num_bytes).nbytes == num_bytes
    assert pool.num_allocated == 1


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 65536, 65537, 100_000, 1 << 20, (1 << 20) + 1, 21_000_000])
def test_rounding_wastes_at_most_an_eighth_above_the_smallest_size(num_bytes: int) -> None:
    pool = BufferPool(1 << 30)
    assert pool.lend(num_bytes).nbytes == num_bytes
    assert num_bytes <= pool.free_bytes <= max(65536, num_bytes * 9 / 8 + 4096)


def test_idle_memory_is_bounded_and_the_oldest_size_goes_first() -> None:
    pool = BufferPool(3 * MIB)
    held = [pool.lend(MIB) for _ in range(9)]
    held.clear()
    assert pool.free_bytes == (3 + 2) * MIB
    large = [pool.lend(3 * MIB), pool.lend(3 * MIB)]
    large.clear()
    assert pool.free_bytes == 9 * MIB  # three of the small ones have gone, no large one
    before = pool.num_allocated
    large = [pool.lend(3 * MIB), pool.lend(3 * MIB)]
    assert pool.num_allocated == before


def test_one_buffer_larger_than_the_bound_is_recycled() -> None:
    pool = BufferPool(1)
    for _ in range(3):
        pool.lend(5 * MIB)
    assert pool.num_allocated == 1


def test_buffers_are_aligned_to_pages() -> None:
    assert BufferPool(MIB).lend(100).ctypes.data % 4096 == 0


def test_memory_that_dies_in_another_thread_or_in_the_collector_comes_back() -> None:
    pool = BufferPool(8 * MIB)
    box = [pool.lend(MIB)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert pool.free_bytes == MIB
    cycle: list[object] = [pool.lend(MIB)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.free_bytes == MIB


def test_a_buffer_that_is_freed_after_the_modules_says_nothing() -> None:
    """A function of a script that a library keeps holds the script's names until the very end."""
    code = (
        "from shardflow import errors; from shardflow.loading.engine import BufferPool\n"
        "held = BufferPool(1).lend(100); errors.keeps = lambda: held"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert ended.stderr == b""


def test_threads_that_lend_and_drop_never_share_memory() -> None:
    pool = BufferPool(MIB)
    wrong: list[int] = []
    deadline = time.monotonic() + 0.3

    def work(number: int) -> None:
        while time.monotonic() < deadline:
            buffer = pool.lend(70_000 + number)
            buffer[:64] = number
            if not (buffer[:64] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.num_allocated <= 8


def test_large_buffers_ask_for_huge_pages_and_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Refusing(engine.Memory):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            asked.append(option)
            raise OSError(errno.EINVAL, "no such pages")

    monkeypatch.setattr(engine, "Memory", Refusing)
    pool = BufferPool(64 * MIB)
    assert pool.lend(MIB).nbytes == MIB
    assert not asked
    buffer = pool.lend(8 * MIB)
    buffer[:] = 1
    assert asked == [mmap.MADV_HUGEPAGE]
