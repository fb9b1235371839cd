"""``shardflow info``: numbers that another way of counting gives too."""

from __future__ import annotations

import dataclasses
import tarfile
from pathlib import Path

import numpy as np
import pytest

from shardflow.cli import info
from shardflow.format import Dataset
from tests.cli.conftest import Call
from tests.factories import MadeSample, make_dataset, make_sample
from tests.field_cases import case_series, make_case_dataset

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


def test_selected_samples_are_counted_and_its_facts_are_shown(call: Call, dataset: Path) -> None:
    samples = Dataset.open(dataset).samples
    rows = [row for row in range(16) if samples.column("num_slices")[row] >= 3]
    assert 0 < len(rows) < 16
    (facts,) = call("info", dataset, "--where", "facts.num_slices >= 3", "--json").lines
    assert facts["selected"] == {
        "samples": len(rows),
        "left_out_for_missing_values": 0,
        "bytes": sum(int(samples.column("num_bytes")[row]) for row in rows),
        "splits": {split: len(set(rows) & set(span)) for split, span in Dataset.open(dataset).splits.items()},
    }
    assert facts["facts"]["num_slices"]["min"] == 3
    assert facts["facts"]["modality"] == {"CT": len(rows)}
    assert facts["samples"] == 16
    shown = call("info", dataset, "--where", "facts.num_slices >= 3").out
    assert f"{len(rows)} samples (" in shown
    assert "facts of a sample, of those selected" in shown
    assert call("info", dataset, "--where", "facts.num_slices >= 99").code == 2


def test_images_are_counted_by_role(call: Call, dataset: Path, tmp_path: Path) -> None:
    assert call("info", dataset, "--json").lines[0]["images_by_role"] is None
    cases = make_case_dataset(tmp_path / "cases", num_samples=8)
    (facts,) = call("info", cases.store.url, "--json").lines
    # By number % 4: two views, CT of two volumes and a localizer, a frontal view, two views in one series.
    num_unknown = sum(case_series(number)[0].shape[0] for number in (1, 5))
    assert facts["images_by_role"] == {
        "unknown": num_unknown,
        "contrast": 10,
        "frontal": 6,
        "lateral": 4,
        "localizer": 2,
    }
    (facts,) = call("info", cases.store.url, "--where", "facts.modality == 'CR'", "--json").lines
    assert facts["images_by_role"] == {"frontal": 4, "lateral": 2}
    shown = call("info", cases.store.url).out
    assert "images by role" in shown
    assert "localizer" in shown


def test_a_version_is_shown_and_a_missing_one_names_those_that_exist(call: Call, dataset: Path) -> None:
    assert call("info", dataset, "--version", 1, "--json").lines[0]["manifest_version"] == 1
    called = call("info", dataset, "--version", 9)
    assert called.code == 2
    assert called.err == "shardflow: DATASET has no version 9; it has: 1.\n"


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
    monkeypatch.setattr("shardflow.cli.info._MAX_INDEXES_READ", 2)
    (facts,) = call("info", dataset, "--json").lines
    assert facts["fields"]["shards_counted"] == 2
    assert facts["fields"]["kinds"]["report.txt"] < 16
    assert "kinds counted in 2 shards" in call("info", dataset).out


def test_fields_that_differ_in_numbers_alone_are_one_kind(call: Call, tmp_path: Path) -> None:
    others = [f"s{one:03d}.m{one:03d}.i{one:04d}.b2nd" for one in range(3)]
    others += [
        "s000.small.i0000.b2nd",
        "s000.v01.i0000.b2nd",
        "s012.thumb.jpg",
        "w000.g00.npy",
        "w001.g01.npy",
    ]
    others += ["document.000.txt", "document.001.txt", "v2.json"]

    def make(number: int, **settings: object) -> MadeSample:
        del settings
        made = make_sample(number)
        return dataclasses.replace(
            made, fields=dict(sorted((made.fields | dict.fromkeys(others, b"1")).items()))
        )

    make_dataset(tmp_path / "dataset", splits={"train": 1}, make=make)
    kinds = call("info", tmp_path / "dataset", "--json").last_line["fields"]["kinds"]
    for name in ("s*.small.i*.b2nd", "s*.v*.i*.b2nd", "s*.thumb.jpg", "v2.json"):
        assert kinds.pop(name) == 1
    assert (kinds.pop("s*.m*.i*.b2nd"), kinds.pop("w*.g*.npy"), kinds.pop("document.*.txt")) == (3, 2, 2)
    assert set(kinds) == {"s*.i*.b2nd", "study.json", "report.txt"}


@pytest.mark.parametrize("high", [0, 1, 200, 70_000, 4_000_000_000])
def test_medians_of_many_rows_are_numpy_s(high: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted in bounded memory, over parts of a column and by parts of a number."""
    monkeypatch.setattr(info, "_ROWS_AT_ONCE", 7)
    for length in (1, 2, 19, 20):
        values = np.random.default_rng(length).integers(0, high, length, dtype=np.uint32, endpoint=True)
        expected = {"min": values.min(), "median": int(np.median(values)), "max": values.max()}
        assert info._spread(values) == expected
