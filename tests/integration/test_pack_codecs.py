"""Packing with another codec: the same pixels come out of the loader, the exported decoder and study.json."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shardflow.fields.types.pictures import Slices
from shardflow.format import Dataset, webdataset_decoder
from shardflow.format.keys import parse_slice_field
from shardflow.loading import Loader
from shardflow.packing.studies import study
from shardflow.sampling import BatchSpec
from tests.dicom_factory import make_study, truncate
from tests.pack_case import PackCase, tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")

_ONE_SPLIT = ("splits.train=1", "splits.val=0", "shards.target_bytes=4MiB")


def _images(dataset: Dataset) -> dict[str, bytes]:
    fields = {"image": Slices(num_slices=4, size=(26, 34), dtype="float32")}
    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=1, tail="mask")
    with Loader(dataset, split="train", batch=spec, seed=1, fields=fields) as loader:
        found = {str(batch.sample_keys[0]): batch["image"].tobytes() for batch in loader}
        assert not loader.quarantined
    return found


@pytest.mark.parametrize("codec", ["htj2k", "png16"])
def test_the_same_pixels_by_another_codec(tmp_path: Path, codec: str) -> None:
    images = {}
    for name in ("b2nd", codec):
        (tmp_path / name).mkdir()
        case = PackCase(tmp_path / name)
        case.prepare()
        make_study(case.dicom / "ct", patient="ct", num_slices=4, size=(26, 34))
        make_study(case.dicom / "mr", patient="mr", modality="MR", num_slices=3, size=(20, 24))
        case.pack(f"shards.codec={name}", *_ONE_SPLIT)
        dataset = case.open()
        images[name] = _images(dataset)
        for row in range(dataset.samples.num_samples):
            fields = dataset.read_fields(row)
            series = json.loads(fields["study.json"])["series"][0]
            slices = {field: data for field, data in fields.items() if parse_slice_field(field)}
            assert {field.rpartition(".")[2] for field in slices} == {series["codec"]} == {name}
            for field, data in slices.items():
                decoded = webdataset_decoder(f".{field}", data)
                assert decoded.dtype == np.dtype(series["dtype"])
    assert len(images["b2nd"]) == 2
    assert images[codec] == images["b2nd"]


@pytest.mark.parametrize("storage", ["slices", "bricks"])
def test_how_many_slices_are_decoded_at_once_does_not_show(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for num_slices in (1, 3, 1000):
        monkeypatch.setattr(study, "_BATCH_BYTES", num_slices * 24 * 20 * 2)
        folder = tmp_path / str(num_slices)
        folder.mkdir()
        case = PackCase(folder)
        case.prepare()
        made = make_study(case.dicom / "a", patient="a", num_slices=20, size=(24, 20))
        truncate(made.files[7])
        make_study(case.dicom / "b", patient="b", num_slices=7, size=(24, 20))
        settings = ("policy.drop_reasons=PIXEL_DATA_TRUNCATED", f"volumes.storage={storage}")
        assert case.pack(*settings, *_ONE_SPLIT).inputs["packed"] == 26
        found.append(tree_digests(case.output))
    assert found[0] == found[1] == found[2]
