"""Blocks hold whole pieces and know a wrong bit; the table of uses says the next use of each unit."""

from __future__ import annotations

import hashlib

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.storage import ByteRange
from shardflow.storage.cache.blocks import ObjectBlocks
from shardflow.storage.cache.forecast import NEVER, NextUseTable, block_distances, uses_name

pytestmark = pytest.mark.fast

BLOCK_BYTES = 1000
pieces_of = st.lists(
    st.tuples(st.integers(0, 60), st.one_of(st.integers(0, 40), st.integers(200, 3000))),
    min_size=1,
    max_size=30,
)


def cut(pieces: list[tuple[int, int]], content: bytes, units: list[int]) -> ObjectBlocks:
    gaps, sizes = np.array(pieces, np.int64).T
    offsets = np.cumsum(gaps + sizes) - sizes
    order = np.random.default_rng(1).permutation(len(pieces))  # an index may name them in any order
    checksums = [google_crc32c.value(content[o : o + n]) for o, n in zip(offsets, sizes, strict=True)]
    found = ObjectBlocks.of_pieces(
        "0" * 64,
        offsets[order],
        sizes[order],
        np.array(checksums, np.uint32)[order],
        block_bytes=BLOCK_BYTES,
        space="s",
        units=np.array(units, np.int64)[order],
    )
    assert found is not None
    return found


@given(pieces=pieces_of, data=st.data())
def test_blocks_are_runs_of_whole_pieces(pieces: list[tuple[int, int]], data: st.DataObject) -> None:
    units = data.draw(st.lists(st.integers(-1, 50), min_size=len(pieces), max_size=len(pieces)))
    total = sum(gap + size for gap, size in pieces)
    content = np.random.default_rng(0).bytes(total)
    blocks = cut(pieces, content, units)
    stops = np.cumsum([gap + size for gap, size in pieces])
    ranges = [ByteRange(int(stop) - size, size) for stop, (_, size) in zip(stops, pieces, strict=True)]
    numbers = blocks.find(ranges)
    # Every piece of some bytes lies in one block; blocks do not overlap.
    assert all(number >= 0 for number, span in zip(numbers, ranges, strict=True) if span.num_bytes)
    assert (blocks.starts[1:] >= blocks.stops[:-1]).all()
    for number in range(blocks.num_blocks):
        first, stop = blocks.first_piece[number : number + 2].tolist()
        sizes = blocks.piece_num_bytes[first:stop]
        is_large = sizes >= BLOCK_BYTES // 4
        assert is_large.all() or not is_large.any()
        assert stop - first == 1 or blocks.span(number).num_bytes <= BLOCK_BYTES
    for (_, size), number, unit in zip(pieces, numbers, units, strict=True):
        if unit >= 0 and size:
            assert blocks.unit_first[number] <= unit < blocks.unit_stop[number]


@given(pieces=pieces_of, data=st.data())
def test_any_wrong_bit_of_a_piece_is_found(pieces: list[tuple[int, int]], data: st.DataObject) -> None:
    content = bytearray(np.random.default_rng(0).bytes(sum(gap + size for gap, size in pieces)))
    blocks = cut(pieces, bytes(content), [0] * len(pieces))
    number = data.draw(st.integers(0, blocks.num_blocks - 1))
    span = blocks.span(number)
    payload = memoryview(content)[span.start : span.stop]
    assert blocks.is_sound(number, payload)
    assert not blocks.is_sound(number, memoryview(bytes(payload) + b"x"))
    first, stop = blocks.first_piece[number : number + 2].tolist()
    piece = data.draw(st.integers(first, stop - 1))
    size = int(blocks.piece_num_bytes[piece])
    if size:
        place = int(blocks.piece_offsets[piece]) + data.draw(st.integers(0, size - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        assert not blocks.is_sound(number, payload)


def test_pieces_that_overlap_make_no_blocks() -> None:
    offsets, sizes = np.array([0, 50]), np.array([60, 10])
    crc = np.zeros(2, np.uint32)
    assert ObjectBlocks.of_pieces("0" * 64, offsets, sizes, crc, block_bytes=4096) is None


def test_a_whole_object_is_checked_by_its_digest() -> None:
    data = b"table" * 100
    blocks = ObjectBlocks.whole(hashlib.sha256(data).hexdigest(), 500)
    assert blocks.is_sound(0, memoryview(data))
    assert not blocks.is_sound(0, memoryview(b"Table" + data[5:]))


@given(
    epochs=st.lists(
        st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=12), min_size=2, max_size=2
    ),
    data=st.data(),
)
def test_the_next_use_is_that_of_the_plan(epochs: list[list[list[int]]], data: st.DataObject) -> None:
    """Exact up to two uses of a unit in an epoch; of more, never too early."""
    table = NextUseTable(10)
    for epoch, steps in enumerate(epochs):
        table.begin_epoch(epoch, len(steps))
        for step, units in enumerate(steps):
            table.put(epoch, np.array(units, np.int64), np.full(len(units), step, np.int64))
        assert not table.has_epoch(epoch)
        table.end_epoch(epoch)
        assert table.has_epoch(epoch)
    now = data.draw(st.integers(0, len(epochs[0])))
    found = table.distances(0, now)
    for unit in range(10):
        first = [step for step, units in enumerate(epochs[0]) if unit in units]
        second = [len(epochs[0]) + step for step, units in enumerate(epochs[1]) if unit in units]
        exact = min((use - now for use in first + second if use >= now), default=NEVER)
        if len(first) <= 2:
            assert found[unit] == exact
        else:
            assert (
                exact
                <= found[unit]
                <= min((use - now for use in (first[-1], *second) if use >= now), default=NEVER)
            )
    # The third epoch takes the place of the first, and leaves the second alone.
    table.begin_epoch(2, 3)
    assert (table.distances(2, 0) == NEVER).all()
    assert [place for place in range(10) if table.distances(1, 0)[place] < NEVER] == sorted(
        {unit for units in epochs[1] for unit in units}
    )


def test_a_block_is_as_near_as_its_nearest_unit() -> None:
    distance = np.array([5.0, 2.0, NEVER, 7.0])
    first, stop = np.array([0, 2, 3, 0, 1, 9]), np.array([2, 4, 4, 0, 0, 12])
    assert block_distances(distance, first, stop).tolist() == [2.0, 7.0, 7.0, NEVER, 0.0, NEVER]


def test_names_of_tables_are_hexadecimal() -> None:
    assert uses_name("a" * 64, "b" * 16) == "a" * 64 + "-" + "b" * 16
    assert uses_name("../" + "a" * 61, "b" * 16) is None
