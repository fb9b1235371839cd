"""Parts of a micro-batch: every slot in one, in the order of the shards, and work for every thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.fields.registry import FieldSet
from shardflow.loading import LoaderConfig
from shardflow.loading.assembly import PartSize
from shardflow.loading.rows.selection import Selection

pytestmark = pytest.mark.fast
KIB, MIB = 1 << 10, 1 << 20


def cut(
    sizes: list[int], shards: list[int], *, is_local: bool = True, num_threads: int = 2, images: bool = True
) -> list[list[int]]:
    selection = cast("Selection", SimpleNamespace(is_local=is_local))
    report = None if images else "the only field"
    fields = cast("FieldSet", SimpleNamespace(reads_members=images, reads_shards=True, report=report))
    parts = PartSize(selection, LoaderConfig(num_threads=num_threads), fields).cut(
        np.arange(len(sizes)),
        shards=np.array(shards, np.int64),
        offsets=np.arange(len(sizes), dtype=np.int64)[::-1].copy(),
        num_bytes=np.array(sizes, np.int64),
    )
    return [part.tolist() for part in parts]


def test_small_samples_share_a_part_and_large_ones_have_their_own() -> None:
    assert cut([10 * KIB] * 16, [0] * 16) == [[15, 14, 13, 12], [11, 10, 9, 8], [7, 6, 5, 4], [3, 2, 1, 0]]
    assert [len(part) for part in cut([400 * KIB] * 16, [0] * 16)] == [2] * 8
    assert [len(part) for part in cut([6 * MIB] * 4, [0] * 4, num_threads=1)] == [1] * 4


def test_samples_that_wait_for_a_network_share_a_part_whatever_their_size() -> None:
    assert [len(part) for part in cut([6 * MIB] * 16, [0] * 16, is_local=False)] == [4] * 4


def test_texts_stay_together_over_shards() -> None:
    assert [len(part) for part in cut([0] * 1500, [0, 1, 2] * 500, images=False)] == [1024, 476]


def test_no_slots_make_no_parts() -> None:
    assert cut([], []) == cut([], [], images=False) == []


@given(data=st.data(), num_threads=st.integers(1, 9), is_local=st.booleans())
def test_every_slot_is_in_one_part_of_one_shard(data: Any, num_threads: int, is_local: bool) -> None:
    sizes = data.draw(st.lists(st.integers(0, 3 * MIB), max_size=40))
    shards = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    parts = cut(sizes, shards, is_local=is_local, num_threads=num_threads)
    flat = [slot for part in parts for slot in part]
    assert sorted(flat) == list(range(len(sizes)))
    assert flat == sorted(flat, key=lambda slot: (shards[slot], -slot))
    for part in parts:
        assert len({shards[slot] for slot in part}) == 1
        assert len(part) <= max(1, len(sizes) // (2 * num_threads))
        assert not is_local or len(part) == 1 or sum(sizes[slot] for slot in part) <= MIB
