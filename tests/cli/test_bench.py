"""``shardflow bench``: rates of the same samples, with their spread."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from pipelines.bench_cache import measure_cache
from pipelines.bench_measure import BenchOptions, _joined, measure
from shardflow.shards import Dataset, decode_array
from shardflow.storage import CacheConfig
from tests.cli.conftest import Call
from tests.factories import make_dataset, make_sample

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
    assert set(facts["results"]) == {"cat", "read", "check", "decode", "batches"} | (
        {"disk"} & set(facts["results"])
    )
    for one in facts["results"].values():
        assert len(one["seconds"]) == 3
        assert one["median_seconds"] == statistics.median(one["seconds"])
        low, high = one["samples_per_s_range"]
        assert low <= one["samples_per_s"] <= high
    assert [one["threads"] for one in facts["scaling"]] == [1, 2]
    assert facts["tier"] == "local"
    assert facts["codecs"] == ["b2nd"]
    assert set(facts["stages"]) == {"index", "read", "check", "decode", "transform"}
    assert facts["advice"]
    assert facts["limit"] in {"cat", "decode"}
    assert facts["share_of_limit"] > 0


def test_a_subset_is_measured(call: Call, dataset: Path) -> None:
    samples = Dataset.open(dataset).samples
    rows = [row for row in samples.splits["train"] if samples.column("num_slices")[row] >= 3]
    (facts,) = call("bench", dataset, "--repeats", 1, "--subset", "num_slices>=3", "--json").lines
    assert (facts["samples"], facts["subset"]) == (len(rows), ["num_slices>=3"])
    assert facts["slices"] == sum(int(samples.column("num_slices")[row]) for row in rows)


def test_text_shows_medians_and_the_limit(call: Call, dataset: Path) -> None:
    called = call("bench", dataset, "--repeats", 1)
    assert called.code == 0
    for part in ("cat", "read", "decode", "batches", "samples/s", "of the slower limit"):
        assert part in called.out


def test_samples_are_taken_up_to_the_bound(tmp_path: Path) -> None:
    opened = Dataset.open(make_dataset(tmp_path / "d", num_samples=8, slices=4))
    whole = BenchOptions(split="train", num_threads=1, num_repeats=1, max_bytes=1 << 30)
    content = measure(opened, whole).content
    assert content.num_samples == 8
    half = BenchOptions(split="train", num_threads=1, num_repeats=1, max_bytes=content.stored_bytes // 2)
    assert 3 <= measure(opened, half).content.num_samples <= 4
    least = BenchOptions(split="train", num_threads=3, num_repeats=1, max_bytes=1)
    assert measure(opened, least).content.num_samples == 1


def test_split_without_samples_or_slices_is_refused(call: Call, dataset: Path, tmp_path: Path) -> None:
    assert call("bench", dataset, "--split", "test").code == 2
    kept = iter([2, 0, 0])
    made = make_dataset(
        tmp_path / "some",
        splits={"train": 1, "val": 2},
        make=lambda number, **options: make_sample(number, **{**options, "slices": next(kept)}),
    )
    called = call("bench", made, "--split", "val")
    assert called.code == 2
    assert "slices" in called.err


def test_texts_alone_are_measured_many_at_once(call: Call, tmp_path: Path) -> None:
    url = make_dataset(tmp_path / "text", num_samples=70, slices=0)
    (facts,) = call("bench", url, "--repeats", 1, "--threads", 1, "--json").lines
    opened = Dataset.open(url)
    stored = sum(len(opened.read_fields(row)["report.txt"]) for row in opened.splits["train"])
    assert (facts["samples"], facts["slices"], facts["stored_bytes"]) == (70, 0, stored)
    assert facts["micro_batch_size"] == 64
    assert {"cat", "check", "batches"} <= set(facts["results"]) <= {"cat", "check", "batches", "disk"}
    assert facts["limit"] == "cat"
    assert facts["tokens"] is None
    assert any("shardflow tokenize" in line for line in facts["advice"])


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


def test_two_epochs_go_through_a_cache_that_is_removed(call: Call, dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    arguments = ("--repeats", 2, "--cache-dir", folder, "--cache-mib", 64)
    (facts,) = call("bench", dataset, *arguments, "--json").lines
    first, second = facts["cache"]["epochs"]
    assert facts["cache"]["share_of_split"] == 1.0
    assert first["tiers"]["origin"] == 1.0
    assert second["tiers"] == {"ram": 0.0, "disk": 1.0, "origin": 0.0}
    assert len(first["seconds"]) == len(second["seconds"]) == 2
    assert not list(folder.iterdir())
    called = call("bench", dataset, "--repeats", 1, "--cache-ram-mib", 64)
    assert "epochs through the cache" in called.out
    assert "100% of its bytes come from the cache" in called.out


def test_a_cache_for_a_part_of_the_split_is_made_smaller(tmp_path: Path) -> None:
    opened = Dataset.open(make_dataset(tmp_path / "d", num_samples=16, slices=4, size=(128, 128)))
    options = BenchOptions(split="train", num_threads=1, num_repeats=1, max_bytes=600_000)
    measured = measure(opened, options)
    share = measured.content.num_samples / 16
    assert 0.2 < share < 0.8
    size = sum(shard.num_bytes for shard in opened.manifest.shards)
    cache = CacheConfig(ram_bytes=size // 2, block_bytes=4096, read_ahead_bytes=0)
    found = measure_cache(opened, options, measured, cache)
    assert found.share_of_split == share
    assert found.used.ram_bytes == int(size // 2 * share)
    (second,) = found.second
    assert 0.2 < second.tiers["origin"] < 0.9, "half of the part fits, as half of the split would"
    assert second.tiers["disk"] == 0.0


def test_a_cache_needs_a_folder_and_a_size(call: Call, dataset: Path, tmp_path: Path) -> None:
    for arguments in (("--cache-dir", tmp_path), ("--cache-mib", 3), ("--cache-dir", "no", "--cache-mib", 3)):
        called = call("bench", dataset, *arguments)
        assert called.code == 2
        assert "--cache-dir" in called.err
