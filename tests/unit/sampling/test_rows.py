"""Chosen rows: the n-th one, those before a row, neighbours; all against a plain list."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.sampling import BatchSpec, EpochPlan, SampleLayout
from shardflow.sampling.lanes import LaneMap
from shardflow.sampling.layout import RowSet, chosen_layout, mask_of, nth_rows, rows_digest, select_rows

pytestmark = pytest.mark.fast


@st.composite
def chosen_rows(draw: st.DrawFn) -> tuple[range, list[int]]:
    start = draw(st.sampled_from([0, 1, 63, 64, 1000]))
    size = draw(st.integers(1, 700))
    share = draw(st.sampled_from([0.01, 0.5, 0.9, 1.0]))
    keep = np.random.default_rng(draw(st.integers(0, 999))).random(size) < share
    return range(start, start + size), (np.flatnonzero(keep) + start).tolist()


@settings(max_examples=60, deadline=None)
@given(chosen_rows(), st.data())
def test_rows_are_those_of_a_list(case: tuple[range, list[int]], data: st.DataObject) -> None:
    span, wanted = case
    found = select_rows(span, lambda start, stop: np.isin(np.arange(start, stop), wanted))
    assert list(found) == wanted
    if not wanted:
        assert found == range(0)
        return
    is_whole = wanted == list(range(wanted[0], wanted[-1] + 1))
    assert isinstance(found, range) == is_whole
    numbers = np.array(data.draw(st.lists(st.integers(0, len(wanted) - 1), max_size=20)), np.int64)
    assert nth_rows(found, numbers).tolist() == [wanted[number] for number in numbers]
    bits = sum(1 << (row - wanted[0]) for row in wanted)
    spanned = wanted[-1] - wanted[0] + 1
    packed = struct.pack("<QQ", wanted[0], spanned) + bits.to_bytes(-(-spanned // 8), "little")
    assert rows_digest(found) == hashlib.sha256(b"shardflow-rows-1" + packed).hexdigest()
    low, high = sorted(data.draw(st.tuples(*[st.integers(span.start, span.stop)] * 2)))
    assert mask_of(found, low, high).tolist() == [row in set(wanted) for row in range(low, high)]
    if isinstance(found, RowSet):
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(wanted))] * 2)))
        assert found.span(first, last).tolist() == wanted[first:last]
        rows = np.array([low, high, span.stop + 5])
        assert found.rank(rows).tolist() == [sum(row < at for row in wanted) for at in rows.tolist()]


def test_many_rows_take_little_memory_in_blocks() -> None:
    """Half of 3 million rows, over several blocks: 0.2 bytes a row of the table."""
    size = 3_000_001
    found = select_rows(range(7, 7 + size), lambda start, stop: np.arange(start, stop) % 2 == 1)
    assert isinstance(found, RowSet)
    assert len(found) == size // 2 + 1
    assert found.num_bytes < 0.2 * size
    numbers = np.arange(0, len(found), 997)
    assert (found.take(numbers) == 7 + 2 * numbers).all()
    assert sum(len(block) for block in found.blocks()) == len(found)


def layout_of_every(step: int, num_rows: int = 600, num_shards: int = 6) -> tuple[RowSet, SampleLayout]:
    rows = select_rows(range(num_rows), lambda start, stop: np.arange(start, stop) % step == 1)
    assert isinstance(rows, RowSet)
    layout = chosen_layout(
        rows,
        dataset_id="d" * 64,
        shard=np.arange(num_rows) * num_shards // num_rows,
        num_bytes=np.arange(num_rows) % 7 + 1,
        facts={"text_bytes": np.arange(num_rows)},
    )
    return rows, layout


def test_the_layout_of_a_subset_has_its_shards_and_bytes() -> None:
    rows, layout = layout_of_every(3)
    assert layout.num_shards == 6
    chosen = np.array(list(rows))
    shards = chosen * 6 // 600
    assert np.diff(layout.shard_rows).tolist() == np.bincount(shards).tolist()
    assert layout.shard_end_bytes.tolist() == np.bincount(shards, chosen % 7 + 1).tolist()
    numbers = np.arange(len(rows))
    assert layout.facts["text_bytes"][numbers].tolist() == chosen.tolist()
    assert layout.facts["text_bytes"][10:20].tolist() == chosen[10:20].tolist()
    offsets = layout.offset_bytes[numbers]
    for shard in range(6):
        inside = offsets[layout.shard_rows[shard] : layout.shard_rows[shard + 1]]
        assert inside[0] == 0
        assert (np.diff(inside) >= 0).all()
        assert inside[-1] <= layout.shard_end_bytes[shard]
    assert layout.sample_bytes(numbers).sum() == (chosen % 7 + 1).sum()


@pytest.mark.parametrize("lanes", [0, 4])
def test_a_plan_of_a_subset_holds_its_rows_and_no_others(lanes: int) -> None:
    rows, layout = layout_of_every(3)
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask", lanes=lanes, window_bytes=60)
    plan = EpochPlan(rows, spec, seed=7, epoch=1, layout=layout)
    steps = [plan.step(step) for step in range(plan.num_steps)]
    found = np.concatenate([held[weights == 1] for held, weights in steps])
    assert sorted(found.tolist()) == list(rows)
    for number, (held, _) in enumerate(steps):
        for micro in range(4):
            assert plan.micro_batch(number, micro).rows.tolist() == held[micro].tolist()


def test_lanes_of_a_subset_are_made_of_few_shards() -> None:
    """A lane's windows stay inside its own chunks, so a subset reads as locally as the whole."""
    rows, layout = layout_of_every(3)
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, lanes=4, window_bytes=60)
    plan = EpochPlan(rows, spec, seed=7, epoch=0, layout=layout)
    assert plan.lane_plan is not None
    lanes = plan.lane_plan.lanes
    assert isinstance(lanes, LaneMap)
    for lane in range(4):
        assert len(set(lanes.shard[lanes.chunks(lane)].tolist())) <= 3
