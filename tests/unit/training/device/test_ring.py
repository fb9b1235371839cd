"""Pinned memory is lent in a circle, never twice at once, and never beyond its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import ConfigError
from shardflow.loading.tensors import PinnedRing, Region

UNIT = 512


@dataclass
class Work:
    """A device that does its copies in order, when it is told to or waited for."""

    num_done: int = 0
    num_started: int = 0

    def start(self) -> Copy:
        self.num_started += 1
        return Copy(self, self.num_started)


@dataclass
class Copy:
    work: Work
    number: int

    def query(self) -> bool:
        return self.work.num_done >= self.number

    def synchronize(self) -> None:
        self.work.num_done = max(self.work.num_done, self.number)


@dataclass
class Allocator:
    sizes: list[int] = field(default_factory=list)

    def __call__(self, num_bytes: int) -> torch.Tensor:
        self.sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)


def lend(ring: PinnedRing, work: Work, num_bytes: int) -> Region:
    region = ring.lend(num_bytes)
    region.mark = work.start()
    return region


def test_memory_is_taken_once_and_with_the_first_region() -> None:
    allocate, work = Allocator(), Work()
    ring = PinnedRing(4 * UNIT, allocate)
    assert allocate.sizes == []
    for _ in range(20):
        lend(ring, work, UNIT)
    assert allocate.sizes == [4 * UNIT]


def test_a_region_waits_for_the_oldest_copy_and_for_no_younger_one() -> None:
    work = Work()
    ring = PinnedRing(4 * UNIT, Allocator())
    for _ in range(4):
        lend(ring, work, UNIT)
    assert (work.num_done, ring.num_waits) == (0, 0)
    lend(ring, work, UNIT)
    assert (work.num_done, ring.num_waits) == (1, 1)
    lend(ring, work, 2 * UNIT)
    assert (work.num_done, ring.num_waits) == (3, 3)


def test_a_copy_that_is_done_costs_no_wait() -> None:
    work = Work()
    ring = PinnedRing(2 * UNIT, Allocator())
    for _ in range(10):
        lend(ring, work, UNIT)
        work.num_done = work.num_started
    assert ring.num_waits == 0


def test_one_that_is_larger_than_the_ring_is_alone() -> None:
    allocate, work = Allocator(), Work()
    ring = PinnedRing(2 * UNIT, allocate)
    lend(ring, work, UNIT)
    region = lend(ring, work, 5 * UNIT)
    assert work.num_done == 1  # nothing lies beside it
    assert len(region.memory) == 5 * UNIT
    assert ring.num_lent == 0
    assert allocate.sizes == [2 * UNIT, 5 * UNIT]


def test_a_region_without_a_mark_is_refused_its_successor() -> None:
    ring = PinnedRing(2 * UNIT, Allocator())
    ring.lend(1)
    with pytest.raises(ConfigError, match="marked"):
        ring.lend(1)


def test_a_ring_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 byte"):
        PinnedRing(0, Allocator())


@given(st.lists(st.tuples(st.integers(0, 5 * UNIT), st.integers(0, 3)), max_size=60))
def test_regions_whose_copies_are_under_way_never_overlap(asked: list[tuple[int, int]]) -> None:
    """Each region is written when it is lent and must hold the same when its copy ends."""
    work = Work()
    ring = PinnedRing(4 * UNIT, Allocator())
    under_way: list[tuple[Region, int, Copy]] = []
    for number, (num_bytes, num_done) in enumerate(asked):
        region = ring.lend(num_bytes)
        for earlier, value, copy in under_way:
            # What the ring waited for while it lent has been read by the device already.
            assert copy.query() or bool((earlier.memory == value).all())
        assert len(region.memory) == num_bytes
        region.memory[:] = number % 251
        mark = work.start()
        region.mark = mark
        under_way.append((region, number % 251, mark))
        work.num_done = min(work.num_started, work.num_done + num_done)
        under_way = [entry for entry in under_way if not entry[2].query()]
        for earlier, value, _ in under_way:
            assert bool((earlier.memory == value).all())
