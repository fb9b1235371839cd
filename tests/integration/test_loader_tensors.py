"""batch.torch: tensors equal the arrays, share their memory on the CPU, and keep it as long as they live."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading import Loader
from shardflow.loading.tensors import to_tensors
from shardflow.sampling import BatchSpec
from tests.field_cases import make_case_dataset
from tests.integration.loader_support import open_loader

pytestmark = pytest.mark.fast

SPEC = BatchSpec(micro_batch_size=3, micro_batches_per_step=2, tail="mask")
FIELDS = {
    "frontal": sf.Image(series="role == 'frontal'", size=(10, 8), missing="pad"),
    "views": sf.Image(series="modality in ('CR', 'DX')", num_images="all", missing="pad"),
    "ct": sf.Slices(series="kind == 'volume'", num_slices=4, size=(9, 12), missing="pad"),
    "report": sf.Text(missing="pad"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_case_dataset(tmp_path_factory.mktemp("tensors") / "a")


def _loader(dataset: Dataset, **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, FIELDS, **settings)


def _assert_equal(found: Any, wanted: Any) -> None:
    if isinstance(wanted, np.ndarray):
        assert isinstance(found, torch.Tensor)
        assert found.shape == wanted.shape
        assert found.numpy().dtype == wanted.dtype
        assert np.array_equal(found.numpy(), wanted)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            _assert_equal(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize("execution", ["threads", "process", "workers"])
def test_tensors_are_the_entries_and_the_weight(dataset: Dataset, execution: Any) -> None:
    with _loader(dataset, execution=execution) as loader:
        for batch in loader:
            tensors = batch.torch()
            assert list(tensors) == [*batch, "weight"]
            for name, value in batch.items():
                _assert_equal(tensors[name], value)
            assert torch.equal(tensors["weight"], torch.from_numpy(batch.info.weight))
            assert isinstance(tensors["report"][0], str)


def test_tensors_share_memory_and_sixteen_bits_stay(dataset: Dataset) -> None:
    with _loader(dataset) as loader:
        batch = next(iter(loader))
        tensors = batch.torch()
        assert tensors["frontal"].dtype == torch.uint16
        batch["frontal"][:] = 60_000
        assert tensors["frontal"].float().min() == 60_000
        assert tensors["views"][0][0].data_ptr() == batch["views"][0][0].ctypes.data


def test_memory_is_the_loaders_again_only_when_the_last_tensor_is_gone(dataset: Dataset) -> None:
    with _loader(dataset, prefetch_bytes=1 << 16) as loader:
        iterator = iter(loader)
        kept = next(iterator).torch()["frontal"]
        before = kept.clone()
        for _ in iterator:
            gc.collect()
        assert torch.equal(kept.int(), before.int())


def test_what_torch_cannot_share_is_copied_and_what_it_lacks_stays() -> None:
    frozen = np.arange(3, dtype=np.uint32)
    frozen.flags.writeable = False
    entries = {
        "frozen": frozen,
        "flipped": np.arange(6).reshape(2, 3)[::-1],
        "big": np.arange(3, dtype=">i4"),
        "column": np.arange(6).reshape(3, 2)[:, 1],
        "names": np.array(["a", "b"]),
        "wide": np.zeros(2, np.longdouble),
        "nested": [[np.zeros(2)], None, {"finding": 1}, b"x"],
        "scalar": np.array(7),
        "none": np.zeros((0, 4), np.float16),
    }
    tensors = to_tensors(entries)
    assert tensors["frozen"].dtype == torch.uint32
    tensors["frozen"].numpy()[0] = 9
    assert frozen[0] == 0
    assert tensors["flipped"].tolist() == [[3, 4, 5], [0, 1, 2]]
    assert tensors["big"].tolist() == [0, 1, 2]
    assert tensors["column"].tolist() == [1, 3, 5]
    assert tensors["names"] is entries["names"]
    assert tensors["wide"] is entries["wide"]
    assert tensors["nested"][0][0].tolist() == [0.0, 0.0]
    assert tensors["nested"][1:] == [None, {"finding": 1}, b"x"]
    assert tensors["scalar"].item() == 7
    assert tensors["none"].shape == (0, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU answers")
def test_a_device_that_is_not_there_is_one_sentence() -> None:
    for device in ("cuda", "cuda:3", "gpu"):
        with pytest.raises(ConfigError, match=device):
            to_tensors({}, device)
    with pytest.raises(ConfigError, match="pin_memory=True needs a GPU"):
        to_tensors({}, pin_memory=True)
