"""Sizes that cannot be are refused in words, before an allocator is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading import ImageView, Loader, LoaderConfig
from shardflow.loading.config import check_fits
from shardflow.sampling import BatchSpec
from tests.factories import make_dataset

pytestmark = pytest.mark.fast


def test_a_micro_batch_larger_than_the_machine_is_an_error_of_configuration(tmp_path: Path) -> None:
    url = make_dataset(tmp_path / "a", num_samples=2)
    view = ImageView(num_slices=10**6, rows=10**4, columns=10**4)
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=1)
    loader = Loader(Dataset.open(url), split="train", batch=spec, seed=1, config=LoaderConfig(view=view))
    with pytest.raises(
        ConfigError, match=r"image int16 \[2, 1000000, 10000, 10000\] must fit into the .* GB"
    ):
        next(iter(loader))


def test_what_fits_passes() -> None:
    check_fits(1 << 20, "a thing", "make it smaller")
    with pytest.raises(
        ConfigError, match=r"a thing must fit .* got 1000000000000000000\.0 GB; make it smaller"
    ):
        check_fits(10**27, "a thing", "make it smaller")
