"""Plain webdataset reads the shards: no shardflow in its loop but the exported decoder."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from shardflow.format import Dataset, decode_array, webdataset_decoder
from tests.factories import make_dataset, make_sample

# webdataset leaves its shards to the garbage collector; pytest would report the open files as errors.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(
        tmp_path_factory.mktemp("webdataset") / "data", splits={"train": 7, "val": 2}, samples_per_shard=3
    )


def _tars(url: str, split: str) -> list[str]:
    return [str(path) for path in sorted((Path(url) / "shards").glob(f"{split}-*.tar"))]


def test_this_is_the_version_that_is_promised() -> None:
    assert version("webdataset") == "1.0.2"


def test_raw_samples_are_grouped_by_key_with_equal_bytes(url: str) -> None:
    dataset = Dataset.open(url)
    for split, rows in dataset.splits.items():
        samples = list(webdataset.WebDataset(_tars(url, split), shardshuffle=False))
        assert [sample["__key__"] for sample in samples] == [dataset.samples.sample_key(row) for row in rows]
        for row, sample in zip(rows, samples, strict=True):
            fields = {name: data for name, data in sample.items() if not name.startswith("__")}
            assert fields == dataset.read_fields(row)


def test_the_exported_decoder_gives_arrays_dicts_and_text(url: str) -> None:
    loader = webdataset.WebDataset(_tars(url, "train"), shardshuffle=False).decode(
        webdataset_decoder, post=[]
    )
    samples: list[dict[str, Any]] = list(loader)
    assert len(samples) == 7
    for number, sample in enumerate(samples):
        made = make_sample(number)
        assert sample["report.txt"] == made.fields["report.txt"].decode()
        assert sample["study.json"] == json.loads(made.fields["study.json"])
        assert sample["study.json"]["sample_key"] == sample["__key__"]
        slices = [name for name in sample if name.endswith(".b2nd")]
        assert len(slices) == made.facts.num_slices
        for name in slices:
            assert np.array_equal(sample[name], decode_array("b2nd", made.fields[name]))


def test_its_default_handlers_do_not_get_in_the_way(url: str) -> None:
    loader = webdataset.WebDataset(_tars(url, "val"), shardshuffle=False).decode(webdataset_decoder)
    for sample in loader:
        assert isinstance(sample["report.txt"], str)
        assert isinstance(sample["s000.i0000.b2nd"], np.ndarray)


def test_fields_can_be_picked_as_tuples(url: str) -> None:
    loader = (
        webdataset.WebDataset(_tars(url, "val"), shardshuffle=False)
        .decode(webdataset_decoder, post=[])
        .to_tuple("s000.i0000.b2nd", "report.txt")
    )
    pairs = list(loader)
    assert [pixels[0, 0] for pixels, _ in pairs] == [7 * 16, 8 * 16]
    assert all(isinstance(text, str) for _, text in pairs)
