"""``shardflow bench``: rates of the same samples, with their spread."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import numpy as np
import pytest

from shardflow.cli.bench_measure import BenchOptions, _joined, measure
from shardflow.format import Dataset, decode_array
from shardflow.format.facts.making import attach_facts
from tests.cli.conftest import Call
from tests.factories import make_dataset, make_sample
from tests.field_cases import make_case_dataset, pixels_of
from tests.forks import SYNC

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def real_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the disk again: what is not there yet cannot be dropped from memory."""
    monkeypatch.setattr(os, "fsync", SYNC)


@pytest.fixture
def dataset(dataset: Path) -> Path:
    """The dataset of the commands, with its series table."""
    attach_facts(Dataset.open(str(dataset)))
    return dataset


def test_json_counts_what_the_split_holds(call: Call, dataset: Path) -> None:
    (facts,) = call("bench", dataset, "--repeats", 3, "--threads", 2, "--json").lines
    opened = Dataset.open(dataset)
    fields = [opened.read_fields(row) for row in opened.splits["train"]]
    used = {(row, name): data for row, each in enumerate(fields) for name, data in each.items()}
    slices = [decode_array("b2nd", data) for (_, name), data in used.items() if name.endswith("b2nd")]
    assert (facts["fields"], facts["unit"], facts["where"]) == ("default", "study", None)
    assert (facts["split"], facts["samples"], facts["slices"]) == ("train", 13, len(slices))
    assert facts["stored_bytes"] == sum(map(len, used.values()))
    assert facts["decoded_bytes"] == sum(array.nbytes for array in slices)
    assert {"cat", "decode", "batches"} <= set(facts["results"]) <= {"cat", "decode", "batches", "disk"}
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


def test_a_part_of_a_split_is_measured(call: Call, dataset: Path) -> None:
    samples = Dataset.open(dataset).samples
    rows = [row for row in samples.splits["train"] if samples.column("num_slices")[row] >= 3]
    (facts,) = call("bench", dataset, "--repeats", 1, "--where", "facts.num_slices >= 3", "--json").lines
    assert (facts["samples"], facts["where"]) == (len(rows), "facts.num_slices >= 3")
    assert facts["slices"] == sum(int(samples.column("num_slices")[row]) for row in rows)


def test_text_shows_medians_and_the_limit(call: Call, dataset: Path) -> None:
    called = call("bench", dataset, "--repeats", 1)
    assert called.code == 0
    for part in ("cat", "decode", "batches", "samples/s", "of the slower limit"):
        assert part in called.out


def test_samples_are_taken_up_to_the_bound(tmp_path: Path) -> None:
    opened = Dataset.open(make_dataset(tmp_path / "d", num_samples=8, slices=4, facts=True))
    whole = BenchOptions(split="train", num_threads=1, num_repeats=1, max_bytes=1 << 30)
    found = measure(opened, whole)
    assert found.num_samples == 8
    half = BenchOptions(split="train", num_threads=1, num_repeats=1, max_bytes=found.stored_bytes // 2)
    assert 3 <= measure(opened, half).num_samples <= 4
    least = BenchOptions(split="train", num_threads=3, num_repeats=1, max_bytes=1)
    assert measure(opened, least).num_samples == 1


def test_a_split_without_samples_is_refused_and_one_without_slices_measured_by_its_texts(
    call: Call, dataset: Path, tmp_path: Path
) -> None:
    assert call("bench", dataset, "--split", "test").code == 2
    kept = iter([2, 0, 0])
    made = make_dataset(
        tmp_path / "some",
        splits={"train": 1, "val": 2},
        make=lambda number, **options: make_sample(number, **{**options, "slices": next(kept)}),
        facts=True,
    )
    (facts,) = call("bench", made, "--split", "val", "--repeats", 1, "--json").lines
    assert (facts["samples"], facts["slices"], facts["micro_batch_size"]) == (2, 0, 64)


def test_without_a_series_table_the_command_is_named(call: Call, tmp_path: Path) -> None:
    called = call("bench", make_dataset(tmp_path / "bare"), "--repeats", 1)
    assert called.code == 2
    assert "shardflow attach DATASET --facts" in called.err


def test_series_and_images_are_measured(call: Call, tmp_path: Path) -> None:
    url = make_case_dataset(tmp_path / "cases", num_samples=8).store.url
    fields = tmp_path / "fields.toml"
    fields.write_text('[fields.image]\ntype = "image"\nsize = [8, 8]\n')
    some = ["--fields", fields, "--repeats", 1, "--threads", 1, "--json"]
    (series,) = call("bench", url, *some, "--unit", "series", "--where", "kind == 'volume'").lines
    # Two studies of CT with two volumes each, of which the field delivers the first slice.
    assert (series["unit"], series["where"]) == ("series", "kind == 'volume'")
    assert (series["samples"], series["slices"]) == (4, 4)
    (images,) = call("bench", url, *some, "--unit", "image", "--where", "role == 'lateral'").lines
    assert (images["samples"], images["slices"]) == (4, 4)
    assert call("bench", url, *some, "--where", "kind == 'volume'").code == 2


def test_texts_alone_are_measured_many_at_once(call: Call, tmp_path: Path) -> None:
    url = make_dataset(tmp_path / "text", num_samples=70, slices=0)
    (facts,) = call("bench", url, "--repeats", 1, "--threads", 1, "--json").lines
    opened = Dataset.open(url)
    stored = sum(len(opened.read_fields(row)["report.txt"]) for row in opened.splits["train"])
    assert (facts["samples"], facts["slices"], facts["stored_bytes"]) == (70, 0, stored)
    assert facts["micro_batch_size"] == 64
    assert {"cat", "batches"} <= set(facts["results"]) <= {"cat", "batches", "disk"}
    assert facts["limit"] == "cat"
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
    places = [("a", 512, 612), ("a", 1536, 1636), ("a", 1 << 20, (1 << 20) + 7), ("b", 512, 513)]
    assert list(_joined(places)) == [("a", 512, 1636), ("a", 1 << 20, (1 << 20) + 7), ("b", 512, 513)]


def test_fields_are_measured_on_what_they_read(call: Call, tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "cases", num_samples=8)
    fields = tmp_path / "fields.toml"
    fields.write_text(
        '[fields.frontal]\ntype = "image"\nseries = "role == \'frontal\'"\nsize = [8, 8]\nmissing = "drop"\n'
    )
    url = dataset.store.url
    (facts,) = call("bench", url, "--fields", fields, "--repeats", 1, "--threads", 1, "--json").lines
    # By number % 4: frontal and lateral, CT, frontal, both in one series.
    kept = [number for number in range(8) if number % 4 != 1]
    assert facts["fields"] == ["frontal"]
    assert (facts["samples"], facts["slices"]) == (len(kept), len(kept))
    place = {0: (1, 0), 2: (0, 0), 3: (0, 0)}
    pixels = [pixels_of(number, place[number % 4][0])[place[number % 4][1]] for number in kept]
    assert facts["decoded_bytes"] == sum(each.nbytes for each in pixels)
    assert call("bench", url, "--fields", fields, "--repeats", 1, "--threads", 1).code == 0
    (whole,) = call("bench", url, "--fields", "default", "--repeats", 1, "--threads", 1, "--json").lines
    assert (whole["fields"], whole["samples"]) == ("default", 8)
    fields.write_text('[fields.a]\ntype = "imge"\n')
    assert call("bench", url, "--fields", fields).code == 2


def test_fields_of_texts_alone_are_measured_in_large_micro_batches(call: Call, tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "cases", num_samples=8)
    fields = tmp_path / "fields.toml"
    fields.write_text('[fields.report]\ntype = "text"\nmissing = "pad"\n')
    (facts,) = call("bench", dataset.store.url, "--fields", fields, "--repeats", 1, "--json").lines
    assert (facts["slices"], facts["micro_batch_size"]) == (0, 64)
