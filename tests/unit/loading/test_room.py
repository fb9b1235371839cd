"""Sizes that cannot be are refused in words, before an allocator is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading import Loader
from shardflow.loading.config import check_fits
from shardflow.sampling import BatchSpec
from tests.factories import make_dataset

pytestmark = pytest.mark.fast


def test_a_micro_batch_larger_than_the_machine_is_an_error_of_configuration(tmp_path: Path) -> None:
    url = make_dataset(tmp_path / "a", num_samples=2, facts=True)
    fields = {"image": sf.Slices(num_slices=2**16, size=(2**16, 2**16))}
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=1)
    loader = Loader(Dataset.open(url), split="train", batch=spec, seed=1, fields=fields)
    with pytest.raises(
        ConfigError, match=r"image int16 \[2, 65536, 1, 65536, 65536\] must fit into the .* GB"
    ):
        next(iter(loader))


def test_what_fits_passes() -> None:
    check_fits(1 << 20, "a thing", "make it smaller")
    with pytest.raises(
        ConfigError, match=r"a thing must fit .* got 1000000000000000000\.0 GB; make it smaller"
    ):
        check_fits(10**27, "a thing", "make it smaller")
