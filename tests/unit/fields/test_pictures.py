from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.fields.field import DrawKey
from shardflow.fields.types.pictures import Sampling, choose_slices, choose_variant
from shardflow.fields.types.pixels import ORIGINAL
from shardflow.format.keys import parse_slice_field, parse_small_field, parse_variant_field, variant_field

pytestmark = pytest.mark.fast


def test_even_slices_are_the_middles_of_equal_parts() -> None:
    assert choose_slices(40, 4, "even", DrawKey(1, 0, 0)).tolist() == [5, 15, 25, 35]
    assert choose_slices(9, 1, "even", DrawKey(1, 0, 0)).tolist() == [4]
    assert choose_slices(4, 3, "even", DrawKey(1, 0, 0)).tolist() == [0, 2, 3]


@given(
    st.integers(0, 400), st.integers(1, 64), st.sampled_from(["even", "random", "slab"]), st.integers(0, 99)
)
def test_chosen_slices_are_different_ascending_and_there(
    num_slices: int, num_wanted: int, sampling: Sampling, row: int
) -> None:
    chosen = choose_slices(num_slices, num_wanted, sampling, DrawKey(3, 1, row))
    assert len(chosen) == min(num_slices, num_wanted)
    assert (np.diff(chosen) > 0).all()
    assert not len(chosen) or (chosen[0] >= 0 and chosen[-1] < num_slices)


def test_random_slices_depend_on_seed_epoch_and_row_only(golden: Callable[[str, object], None]) -> None:
    choices = {
        f"seed {seed}, epoch {epoch}, row {row}": choose_slices(
            120, 4, "random", DrawKey(seed, epoch, row)
        ).tolist()
        for seed, epoch, row in [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]
    }
    assert len({tuple(choice) for choice in choices.values()}) == 4
    golden("slice-choice", choices)


def test_random_slices_reach_every_slice_about_equally_often() -> None:
    counts = np.zeros(10, int)
    for row in range(500):
        counts[choose_slices(10, 3, "random", DrawKey(1, 0, row))] += 1
    assert counts.sum() == 1500
    assert (abs(counts - 150) < 60).all()  # six sigma


# ---- augmented variants ---------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("kind", "stated", "plain"),
    [
        (
            sf.Slices,
            {"num_slices": np.int64(4), "size": (np.int32(64), np.uint16(48))},
            {"num_slices": 4, "size": (64, 48)},
        ),
        (sf.Image, {"num_images": np.int64(2)}, {"num_images": 2}),
        (
            sf.Volume,
            {"roi_size": (np.int64(4), 8, 8), "spacing_mm": (np.float64(1.5), 1, 1)},
            {"roi_size": (4, 8, 8), "spacing_mm": (1.5, 1, 1)},
        ),
        (sf.Text, {"max_bytes": np.int64(9)}, {"max_bytes": 9}),
    ],
    ids=["slices", "image", "volume", "text"],
)
def test_numbers_of_numpy_are_plain_numbers(
    kind: Callable[..., object], stated: dict[str, object], plain: dict[str, object]
) -> None:
    """They come from a loop over an array, and end in content_id, which is of JSON."""
    assert repr(kind(**stated)) == repr(kind(**plain))


@pytest.mark.parametrize("value", [np.float64(4.5), np.bool_(True), np.int64(0)], ids=str)
def test_a_number_of_numpy_that_is_no_count_is_refused_like_pythons(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"max_bytes is a number from 1 to [\d,]+, got {value.item()}"):
        sf.Text(max_bytes=value)
