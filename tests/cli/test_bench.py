"""``shardflow bench``: rates of the same samples, with their spread."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from pipelines.bench_measure import BenchOptions, _joined, measure
from shardflow.shards import Dataset, decode_array
from tests.cli.conftest import Call
from tests.factories import make_dataset

pytestmark = pytest.mark.fast


def test_json_counts_what_the_split_holds(call: Call, dataset: Path) -> None:
    (facts,) = call("bench", dataset, "--repeats", 3, "--threads", 2, "--json").lines
    opened = Dataset.open(dataset)
    fields = [opened.read_fields(row) for row in opened.splits["train"]]
    used = {
        (row, name): data
        for row, each in enumerate(fields)
        for name, data in each.items()
        if name != "study.json"
    }
    slices = [decode_array("b2nd", data) for (_, name), data in used.items() if name.endswith("b2nd")]
    assert (facts["split"], facts["samples"], facts["slices"]) == ("train", 13, len(slices))
    assert facts["stored_bytes"] == sum(map(len, used.values()))
    assert facts["decoded_bytes"] == sum(array.nbytes for array in slices)
    assert set(facts["results"]) == {"cat", "read", "decode", "batches"}
    for one in facts["results"].values():
        assert len(one["seconds"]) == 3
        assert one["median_seconds"] == statistics.median(one["seconds"])
        low, high = one["samples_per_s_range"]
        assert low <= one["samples_per_s"] <= high
    assert facts["limit"] in {"cat", "decode"}
    assert facts["share_of_limit"] > 0


def test_text_shows_medians_and_the_limit(call: Call, dataset: Path) -> None:
    called = call("bench", dataset, "--repeats", 1)
    assert called.code == 0
    for part in ("cat", "read", "decode", "batches", "samples/s", "of the slower limit"):
        assert part in called.out


def test_samples_are_taken_up_to_the_bound(tmp_path: Path) -> None:
    opened = Dataset.open(make_dataset(tmp_path / "d", num_samples=8, slices=4))
    whole = BenchOptions(split="train", num_threads=1, num_repeats=1, max_bytes=1 << 30)
    content, _ = measure(opened, whole)
    assert content.num_samples == 8
    half = BenchOptions(split="train", num_threads=1, num_repeats=1, max_bytes=content.stored_bytes // 2)
    assert 3 <= measure(opened, half)[0].num_samples <= 4
    least = BenchOptions(split="train", num_threads=3, num_repeats=1, max_bytes=1)
    assert measure(opened, least)[0].num_samples == 1


def test_split_without_samples_or_slices_is_refused(call: Call, dataset: Path, tmp_path: Path) -> None:
    assert call("bench", dataset, "--split", "test").code == 2
    make_dataset(tmp_path / "text", num_samples=2, slices=0)
    called = call("bench", tmp_path / "text")
    assert called.code == 2
    assert "slices" in called.err


def test_damaged_dataset_is_not_measured(call: Call, dataset: Path) -> None:
    shard = dataset / "shards" / "train-000000.tar"
    shard.chmod(0o644)
    data = np.fromfile(shard, np.uint8)
    data[512] ^= 1
    data.tofile(shard)
    called = call("bench", dataset, "--repeats", 1)
    assert called.code == 1
    assert "shardflow verify" in called.err


def test_neighbouring_ranges_are_one_read() -> None:
    places = [("a", 512, 100), ("a", 1536, 100), ("a", 1 << 20, 7), ("b", 512, 1)]
    assert list(_joined(places)) == [("a", 512, 1636), ("a", 1 << 20, (1 << 20) + 7), ("b", 512, 513)]
