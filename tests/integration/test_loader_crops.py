"""Several crops of each sample: neighboring slots from one read, equal everywhere, masked together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.keys import slice_field
from shardflow.loading import Loader
from shardflow.sampling import BatchSpec
from shardflow.storage import ByteRange
from tests.integration.loader_support import check_everywhere, flip_bit, hooked, locate, open_loader, slots_of
from tests.integration.test_loader_volume_regions import NUM_SAMPLES, extra_of, series_of
from tests.volume_cases import make_volumes

pytestmark = pytest.mark.fast

SPEC = BatchSpec(micro_batch_size=6, micro_batches_per_step=2, tail="mask")
NUM_CROPS = 3
ROI = (4, 5, 6)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("crops") / "data"
    return make_volumes(folder, series_of, num_samples=NUM_SAMPLES, extra_of=extra_of)


def open_crops(source: Dataset, *, num_samples: int = NUM_CROPS, **settings: Any) -> Loader:
    fields = {"ct": sf.Volume(roi_size=ROI, num_samples=num_samples), "mask": sf.Mask(like="ct")}
    return open_loader(source, settings.pop("batch", SPEC), fields, **settings)


def test_a_sample_fills_neighboring_slots_with_different_crops(dataset: Dataset) -> None:
    starts: dict[int, list[bytes]] = {}
    with open_crops(dataset) as loader:
        assert len(loader) == 4  # 8 samples, two of them in a micro-batch of 6 crops, to whole steps
        for batch in loader:
            assert batch["ct"].shape == (6, 1, *ROI)
            assert batch["mask"].shape == (6, 1, *ROI)
            keys = batch.info.sample_keys
            assert keys[:3] == [keys[0]] * 3
            assert keys[3:] == [keys[3]] * 3
            for slot, number in slots_of(batch):
                starts.setdefault(number, []).append(batch["ct_affine"][slot].tobytes())
    assert {len(found) for found in starts.values()} == {NUM_CROPS}
    assert sum(len({*found}) for found in starts.values()) > 2 * NUM_SAMPLES


def test_the_first_crop_is_that_of_a_loader_of_single_crops(dataset: Dataset) -> None:
    first: dict[int, bytes] = {}
    for num_samples in (1, NUM_CROPS):
        spec = BatchSpec(micro_batch_size=2 * num_samples, micro_batches_per_step=2, tail="mask")
        with open_crops(dataset, num_samples=num_samples, batch=spec) as loader:
            for batch in loader:
                for slot, number in slots_of(batch)[::num_samples]:
                    assert (
                        first.setdefault(number, batch["ct"][slot].tobytes()) == batch["ct"][slot].tobytes()
                    )


def test_crops_are_equal_everywhere(dataset: Dataset) -> None:
    check_everywhere(lambda **settings: open_crops(dataset, **settings), world_sizes=(2,))


def test_slices_that_crops_share_are_read_once(dataset: Dataset) -> None:
    read: list[tuple[str, ByteRange]] = []

    def note(path: str, ranges: Any) -> None:
        read.extend((path, one) for one in ranges if path.endswith(".tar"))

    opened, _ = hooked(dataset.store.url, note)
    with open_crops(opened, num_threads=4) as loader:
        for _ in loader:
            pass
    assert len(read) == len({*read})


def test_a_bad_sample_masks_all_of_its_slots(tmp_path: Path) -> None:
    made = make_volumes(tmp_path / "data", series_of, num_samples=NUM_SAMPLES, extra_of=extra_of)
    path, offset, num_bytes = locate(made, 2, slice_field(0, 5, "b2nd"))
    flip_bit(path, offset + num_bytes // 2)
    num_masked = 0
    with open_crops(made) as loader:
        for epoch in range(4):
            loader.set_epoch(epoch)
            for batch in loader:
                slots = [slot for slot, number in slots_of(batch) if number == 2]
                masked = batch.info.weight[slots] == 0
                assert masked.all() or not masked.any()
                num_masked += int(masked.sum())
                assert (batch["ct"][slots][masked] == -1024).all()
                assert (batch.info.weight[np.setdiff1d(np.arange(6), slots)] == 1).all()
    assert num_masked >= NUM_CROPS


def test_crops_must_fill_a_micro_batch(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_size=6 counts crops .* write micro_batch_size=8"):
        open_crops(dataset, num_samples=4)
    with pytest.raises(ConfigError, match="write center='random', or leave num_samples out"):
        sf.Volume(roi_size=ROI, num_samples=2, center="middle")
    fields = {"a": sf.Volume(roi_size=ROI, num_samples=2), "b": sf.Volume(roi_size=ROI, num_samples=3)}
    with pytest.raises(ConfigError, match="'a' and 'b' take 2 and 3 crops of a sample"):
        open_loader(dataset, SPEC, fields)
