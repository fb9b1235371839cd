"""Micro-batches of a fixed size: the same one by one, in spans, and across the blocks that are kept."""

from __future__ import annotations

import numpy as np
import pytest

from shardflow.sampling import BatchSpec
from shardflow.sampling.micro_batches import PADDING_ROW, EpochOrder, EpochSlots, FixedMicroBatches
from shardflow.sampling.spec import TAILS, Tail

pytestmark = pytest.mark.fast


def micros_of(num_samples: int, size: int, tail: Tail = "mask") -> tuple[FixedMicroBatches, EpochSlots]:
    spec = BatchSpec(micro_batch_size=size, micro_batches_per_step=3, tail=tail)
    slots = EpochSlots.of(num_samples, spec)
    order = EpochOrder(range(50, 50 + num_samples), seed=1, epoch=0)
    return FixedMicroBatches(order, slots, size=size), slots


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("num_samples", "size"), [(40_000, 7), (40_000, 3000), (40_000, 9000), (29, 4)])
def test_spans_are_the_micro_batches_one_after_the_other(num_samples: int, size: int, tail: Tail) -> None:
    micros, slots = micros_of(num_samples, size, tail)
    num_micros = slots.num_slots // size
    for start, stop in ((0, 3), (num_micros - 3, num_micros), (num_micros // 2, num_micros // 2 + 2)):
        rows, weights = micros_of(num_samples, size, tail)[0].span(start, stop)
        assert rows.shape == weights.shape == (stop - start, size)
        for i in range(stop - start):
            batch = micros.micro_batch(start + i)
            assert np.array_equal(batch.rows, rows[i])
            assert np.array_equal(batch.weights, weights[i])


def test_a_span_over_the_edge_of_a_block() -> None:
    """A block is 8192 rows: micro-batch 8191 of one row is its last, 8192 the first of the next."""
    micros, _ = micros_of(20_000, 1)
    rows, _ = micros.span(8190, 8194)
    assert rows.ravel().tolist() == [micros.micro_batch(i).rows[0] for i in range(8190, 8194)]


def test_all_micro_batches_hold_all_samples() -> None:
    micros, slots = micros_of(29, 4)
    rows = [row for i in range(slots.num_slots // 4) for row in micros.micro_batch(i).rows.tolist()]
    assert sorted(rows[:29]) == list(range(50, 79))
    assert rows[29:] == [PADDING_ROW] * 7


def test_filler_and_padding_weigh_nothing() -> None:
    micros, _ = micros_of(29, 4)
    assert micros.padding_micro_batch().rows.tolist() == [PADDING_ROW] * 4
    assert micros.padding_micro_batch().num_samples == 0
    last = micros.micro_batch(7)
    assert last.weights.tolist() == [1, 0, 0, 0]
    assert last.num_samples == 1


def test_arrays_cannot_be_changed() -> None:
    micros, _ = micros_of(29, 4)
    batch, filler = micros.micro_batch(0), micros.padding_micro_batch()
    for array in (batch.rows, batch.weights, filler.rows, filler.weights, *micros.span(0, 2)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5
