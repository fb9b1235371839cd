"""Prefetcher: it keeps the store busy however long publishing takes, within a bound of bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from shardflow.errors import StorageError
from shardflow.fields.decode import ThreadState
from shardflow.loading.prefetch import PlannedRead, Prefetcher, ShardRead, StreamReads
from shardflow.telemetry import StageCounters

pytestmark = pytest.mark.fast

READ_BYTES = 100


class Plan:
    """Planned reads of one shard each, and a record of what becomes of them."""

    def __init__(self, num_reads: int) -> None:
        self._lock = threading.Lock()
        self._left = list(range(num_reads))
        self.begun: list[int] = []
        self.published: list[int] = []
        self.may_publish = threading.Event()
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_broken = False

    def take(self, next_number: int) -> PlannedRead | None:
        with self._lock:
            while self._left:
                place = self._left.pop(0)
                if place >= next_number:
                    return PlannedRead(place, 0, place, np.array([place]))
            return None

    def locate(self, planned: PlannedRead, thread: ThreadState) -> list[ShardRead]:
        return [cast(ShardRead, _Read(self, planned.number))]


class _Read:
    num_bytes = READ_BYTES

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan, self._number = plan, number

    def run(self) -> Callable[[], None]:
        self._plan.begun.append(self._number)
        assert self._plan.may_read.wait(300)

        def publish() -> None:
            assert self._plan.may_publish.wait(300)
            self._plan.published.append(self._number)
            if self._plan.is_broken:
                raise StorageError("a block must be read again, got nothing; look at the store.")

        return publish


def fetching(plan: Plan, max_bytes: int, counters: StageCounters | None = None) -> Prefetcher:
    found = Prefetcher(
        cast(StreamReads, plan),
        next_number=0,
        num_threads=2,
        max_bytes=max_bytes,
        counters=counters or StageCounters(),
    )
    found.start()
    return found


def _num_alive(ahead: Prefetcher) -> int:
    return sum(thread.is_alive() for thread in ahead._threads)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_reading_goes_on_while_nothing_can_be_published() -> None:
    plan, counters = Plan(40), StageCounters()
    ahead = fetching(plan, 20 * READ_BYTES, counters)
    eventually(lambda: len(plan.begun) == 20)
    assert plan.published == []
    plan.may_publish.set()
    eventually(lambda: len(plan.published) == 20)
    assert counters.snapshot()["fetching_bytes"]["most"] == 20 * READ_BYTES
    ahead.close()


def test_bytes_are_bounded_until_the_loader_comes_to_them() -> None:
    plan = Plan(40)
    plan.may_publish.set()
    ahead = fetching(plan, 5 * READ_BYTES)
    for done in range(0, 20, 5):
        eventually(lambda done=done: len(plan.published) == done + 5)  # type: ignore[misc]
        assert sorted(plan.begun) == list(range(done + 5))
        ahead.passed(done + 4)
    ahead.close()


def test_how_many_micro_batches_are_fetched_ahead_is_seen_as_the_loader_comes_to_one() -> None:
    plan, counters = Plan(40), StageCounters()
    plan.may_publish.set()
    ahead = fetching(plan, 5 * READ_BYTES, counters)
    eventually(lambda: ahead._ahead.total() == 5 * READ_BYTES)
    ahead.passed(1)
    assert counters.snapshot()["ahead_batches"]["last"] == 3
    ahead.close()


def test_one_read_larger_than_the_bound_runs_alone() -> None:
    plan = Plan(3)
    plan.may_publish.set()
    ahead = fetching(plan, READ_BYTES // 2)
    for number in range(3):
        eventually(lambda number=number: plan.published == list(range(number + 1)))  # type: ignore[misc]
        ahead.passed(number)
    ahead.close()


def test_what_was_passed_counts_until_it_is_published() -> None:
    plan = Plan(40)
    ahead = fetching(plan, 4 * READ_BYTES)
    eventually(lambda: len(plan.begun) == 4)
    ahead.passed(3)
    time.sleep(0.1)  # a chance for what must not happen; the right answer does not depend on it
    assert len(plan.begun) == 4
    plan.may_publish.set()
    eventually(lambda: len(plan.published) == 8)
    ahead.close()


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_is_under_way_at_the_end_is_published(is_broken: bool) -> None:
    plan = Plan(40)
    plan.is_broken = is_broken
    plan.may_read.clear()
    ahead = fetching(plan, 40 * READ_BYTES)
    eventually(lambda: len(plan.begun) == 2)
    ahead.close()
    plan.may_read.set()
    plan.may_publish.set()
    eventually(lambda: sorted(plan.published) == [0, 1])
    for thread in ahead._threads:
        thread.join(300)
        assert not thread.is_alive()
    assert sorted(plan.begun) == [0, 1]


def test_readers_and_the_bound_change_while_it_runs() -> None:
    plan = Plan(40)
    plan.may_publish.set()
    plan.may_read.clear()
    ahead = fetching(plan, 3 * READ_BYTES)
    eventually(lambda: len(plan.begun) == 2)
    ahead.resize(num_threads=5, max_bytes=10 * READ_BYTES)
    eventually(lambda: len(plan.begun) == 5)
    assert _num_alive(ahead) == 5 + 2
    ahead.resize(num_threads=1, max_bytes=6 * READ_BYTES)
    plan.may_read.set()
    eventually(lambda: _num_alive(ahead) == 1 + 2)  # those that are too many end with their reads
    eventually(lambda: len(plan.published) == 6)
    assert sorted(plan.begun) == list(range(6))
    ahead.passed(5)
    eventually(lambda: sorted(plan.published) == list(range(12)))
    ahead.close()
    eventually(lambda: not _num_alive(ahead))
    ahead.resize(num_threads=4, max_bytes=READ_BYTES)
    assert not _num_alive(ahead)
