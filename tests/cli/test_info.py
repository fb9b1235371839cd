"""``shardflow info``: numbers that another way of counting gives too."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from shardflow.shards import Dataset
from tests.cli.conftest import Call

pytestmark = pytest.mark.fast


def test_json_counts_what_lies_in_the_tars(call: Call, dataset: Path) -> None:
    (facts,) = call("info", dataset, "--json").lines
    members: list[str] = []
    for shard in sorted(dataset.glob("shards/*.tar")):
        with tarfile.open(shard) as tar:
            members += tar.getnames()
    assert facts["samples"] == len({name.split(".")[0] for name in members}) == 16
    assert facts["fields"]["total"] == len(members)
    assert facts["fields"]["kinds"]["report.txt"] == 16
    assert facts["fields"]["kinds"]["s*.i*.b2nd"] == sum(name.endswith(".b2nd") for name in members)
    assert facts["facts"]["num_slices"]["total"] == sum(name.endswith(".b2nd") for name in members)
    assert facts["shards"] == len(list(dataset.glob("shards/*.tar"))) == 4
    assert facts["bytes"] == sum(path.stat().st_size for path in dataset.rglob("*") if path.is_file())
    assert facts["files"] == sum(path.is_file() for path in dataset.rglob("*"))
    assert {split: part["samples"] for split, part in facts["splits"].items()} == {"train": 13, "val": 3}
    assert facts["facts"]["modality"] == {"CT": 16}
    assert facts["dataset_id"] == Dataset.open(dataset).dataset_id


def test_text_names_the_same_numbers_without_colours(call: Call, dataset: Path) -> None:
    called = call("info", dataset)
    assert called.code == 0
    assert "\x1b" not in called.out
    assert Dataset.open(dataset).dataset_id in called.out
    for part in ("16 in 4 shards", "train", "s*.i*.b2nd", "num_slices"):
        assert part in called.out


def test_only_some_indexes_are_read_of_a_wide_dataset(
    call: Call, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.info._MAX_INDEXES_READ", 2)
    (facts,) = call("info", dataset, "--json").lines
    assert facts["fields"]["shards_counted"] == 2
    assert facts["fields"]["kinds"]["report.txt"] < 16
    assert "kinds counted in 2 shards" in call("info", dataset).out
