"""Which version of a sample an epoch gets: a pure function of seed, epoch and row."""

from __future__ import annotations

from collections import Counter

import pytest

from shardflow.fields.field import DrawKey
from shardflow.fields.pictures import choose_variant
from shardflow.fields.pixels import ORIGINAL
from shardflow.format.keys import parse_slice_field, parse_small_field, parse_variant_field, variant_field

pytestmark = pytest.mark.fast


def choices(share: float, *, num_variants: int = 3, seed: int = 5, epoch: int = 0) -> list[int]:
    return [choose_variant(num_variants, share, DrawKey(seed, epoch, row)) for row in range(3000)]


def test_the_share_is_that_of_the_settings_and_variants_are_as_likely() -> None:
    counts = Counter(choices(0.75))
    assert set(counts) == {0, 1, 2, 3}
    assert all(650 < count < 850 for count in counts.values())
    assert set(choices(1.0)) == {1, 2, 3}
    assert set(choices(0.0)) == {ORIGINAL}
    assert set(choices(1.0, num_variants=0)) == {ORIGINAL}


def test_epochs_and_seeds_choose_anew_and_a_larger_share_keeps_what_was_chosen() -> None:
    first = choices(0.5)
    assert choices(0.5) == first
    assert choices(0.5, epoch=1) != first != choices(0.5, seed=6)
    assert all(more == few for few, more in zip(first, choices(0.9), strict=True) if few)
    twice = {choose_variant(9, 1.0, DrawKey(1, 0, 4, (0, 0, slot))) for slot in range(40)}
    assert len(twice) > 5


def test_names_of_variants_are_no_slices() -> None:
    name = variant_field(2, 7, 12, "b2nd")
    assert parse_slice_field(name) is parse_small_field(name) is None
    for other in ("s002.v00.i0012.b2nd", "s002.v007.i0012.b2nd", "s002.i0012.b2nd", "s002.v07.i00012.b2nd"):
        assert parse_variant_field(other) is None
