"""The tail rules, as a table."""

from __future__ import annotations

import pytest

from shardflow.errors import PlanError
from shardflow.sampling import BatchSpec
from shardflow.sampling.micro_batches import EpochSlots
from shardflow.sampling.spec import Tail

pytestmark = pytest.mark.fast


def slots_of(num_samples: int, size: int, per_step: int, tail: Tail) -> EpochSlots:
    spec = BatchSpec(micro_batch_size=size, micro_batches_per_step=per_step, tail=tail)
    return EpochSlots.of(num_samples, spec)


# samples, B, M, tail: steps, dropped, repeated, padding
TABLE: list[tuple[int, int, int, Tail, tuple[int, int, int, int]]] = [
    (24, 2, 3, "drop", (4, 0, 0, 0)),  # fills every step
    (24, 2, 3, "repeat", (4, 0, 0, 0)),
    (24, 2, 3, "mask", (4, 0, 0, 0)),
    (25, 2, 3, "drop", (4, 1, 0, 0)),  # one too many
    (25, 2, 3, "repeat", (5, 0, 5, 0)),
    (25, 2, 3, "mask", (5, 0, 0, 5)),
    (29, 2, 3, "drop", (4, 5, 0, 0)),  # one too few
    (29, 2, 3, "repeat", (5, 0, 1, 0)),
    (29, 2, 3, "mask", (5, 0, 0, 1)),
    (1, 4, 4, "repeat", (1, 0, 15, 0)),  # fewer than a step
    (1, 4, 4, "mask", (1, 0, 0, 15)),
    (1, 1, 1, "drop", (1, 0, 0, 0)),
]


@pytest.mark.parametrize(("num_samples", "size", "per_step", "tail", "expected"), TABLE)
def test_numbers(
    num_samples: int, size: int, per_step: int, tail: Tail, expected: tuple[int, int, int, int]
) -> None:
    slots = slots_of(num_samples, size, per_step, tail)
    assert (slots.num_steps, slots.num_dropped, slots.num_repeated, slots.num_padding_slots) == expected
    assert slots.num_slots == slots.num_steps * size * per_step
    assert num_samples - slots.num_dropped + slots.num_repeated + slots.num_padding_slots == slots.num_slots


def test_padding_lies_last_and_holds_no_position() -> None:
    slots = slots_of(8, 2, 3, "mask")
    assert slots.positions(0, 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert slots.positions(6, 12).tolist() == [6, 7]
    assert slots.positions(8, 10).tolist() == []
    assert slots.positions(10, 12).tolist() == []


def test_repeat_goes_on_with_the_order_from_its_start() -> None:
    slots = slots_of(8, 2, 3, "repeat")
    assert slots.positions(6, 12).tolist() == [6, 7, 0, 1, 2, 3]
    assert slots.positions(10, 12).tolist() == [2, 3]


def test_repeat_cycles_where_the_population_is_shorter_than_what_is_missing() -> None:
    assert slots_of(3, 2, 4, "repeat").positions(0, 8).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert slots_of(1, 1, 5, "repeat").positions(0, 5).tolist() == [0] * 5


def test_drop_ends_with_the_last_full_step() -> None:
    assert slots_of(8, 2, 3, "drop").positions(0, 12).tolist() == [0, 1, 2, 3, 4, 5]


def test_no_step_is_an_error_that_names_the_numbers_and_the_remedies() -> None:
    with pytest.raises(PlanError) as caught:
        slots_of(127, 8, 16, "drop")
    for part in ("num_steps", "127", "8", "16", "128", "'repeat'", "'mask'", "at most 127"):
        assert part in caught.value.message
