"""Expressions over a dataset: studies against a slow model of their series and images, and tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardflow.errors import ConfigError
from shardflow.fields.units import UnitDataset
from shardflow.fields.where import Where
from shardflow.format import Dataset
from shardflow.format.facts.columns import num_unit_rows
from shardflow.format.facts.series import open_series
from shardflow.format.tables import StoredColumn, TableUnit, write_table
from shardflow.storage import LocalStore
from tests.field_cases import make_case_dataset

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    dataset = make_case_dataset(tmp_path_factory.mktemp("where") / "a")
    attach(dataset, "labels", "study", every=3)
    attach(dataset, "quality", "series", every=2)
    attach(dataset, "pixels", "image", every=5)
    return Dataset.open(dataset.store.url)


def attach(dataset: Dataset, name: str, unit: TableUnit, *, every: int) -> None:
    """Attach a table with its row numbers, of which every so manyth is missing."""
    rows = np.arange(num_unit_rows(dataset, unit))
    column = StoredColumn(name="number", kind="int", values=rows, is_missing=rows % every == every - 1)
    write_table(LocalStore(dataset.store.url), dataset.dataset_id, name, unit, [column])


def members(dataset: Dataset, row: int) -> list[dict[str, Any]]:
    """Return the facts of a study's series; of a series of several roles those of each image."""
    table, _ = open_series(dataset)
    found = []
    for place, facts in enumerate(table.facts_of(row)):
        series = int(table.first_series()[row]) + place
        quality = None if series % 2 else series
        found += [
            {**facts, "role": role, "quality": quality} for role in facts.get("image_roles", [facts["role"]])
        ]
    return found


def any_of(known: list[bool | None]) -> bool | None:
    return True if True in known else None if None in known else False


def all_of(known: list[bool | None]) -> bool | None:
    return False if False in known else None if None in known else True


CASES: dict[str, Callable[[list[dict[str, Any]]], bool | None]] = {
    "any(series.role == 'frontal')": lambda each: any_of([one["role"] == "frontal" for one in each]),
    "all(series.role in ('frontal', 'lateral'))": lambda each: all_of(
        [one["role"] in ("frontal", "lateral") for one in each]
    ),
    "any(series.role == 'mixed')": lambda each: False,
    "any(series.rows > 5 and series.num_slices < 3)": lambda each: any_of(
        [one["rows"] > 5 and one["num_slices"] < 3 for one in each]
    ),
    "any(series.rows > 5) and any(series.num_slices < 3)": lambda each: (
        any(one["rows"] > 5 for one in each) and any(one["num_slices"] < 3 for one in each)
    ),
    "any(quality.number >= 4)": lambda each: any_of(
        [None if one["quality"] is None else one["quality"] >= 4 for one in each]
    ),
    "not all(quality.number >= 4)": lambda each: {True: False, False: True, None: None}[
        all_of([None if one["quality"] is None else one["quality"] >= 4 for one in each])
    ],
    "any(series.slice_thickness_mm is missing)": lambda each: any(
        "slice_thickness_mm" not in one for one in each
    ),
}


@pytest.mark.parametrize("text", CASES)
def test_any_and_all_run_over_series_and_the_images_of_mixed_ones(dataset: Dataset, text: str) -> None:
    num = dataset.samples.num_samples
    found = Where(dataset, text).select(0, num)
    expected = [CASES[text](members(dataset, row)) for row in range(num)]
    assert found.rows.tolist() == [value is True for value in expected]
    assert found.is_missing.tolist() == [value is None for value in expected]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_blocks_of_rows_give_what_all_give(dataset: Dataset, size: int) -> None:
    num = dataset.samples.num_samples
    text = "labels.number >= 2 and (any(series.role == 'lateral') or facts.modality == 'CT')"
    where = Where(dataset, text)
    parts = [where.select(start, min(start + size, num)) for start in range(0, num, size)]
    whole = where.select(0, num)
    assert np.concatenate([part.rows for part in parts]).tolist() == whole.rows.tolist()
    assert sum(part.num_missing for part in parts) == whole.num_missing > 0
    assert 0 < whole.rows.sum() < num


def test_rows_of_series_name_facts_of_their_study_and_tables(dataset: Dataset) -> None:
    table, _ = open_series(dataset)
    owners = np.repeat(np.arange(table.num_samples), np.diff(table.first_series()))
    text = "labels.number >= 2 and quality.number < 20 and facts.num_series > 1 and num_slices >= 1"
    found = UnitDataset.beside(dataset, "series", text)
    expected = [
        series
        for series, study in enumerate(owners.tolist())
        if study % 3 != 2
        and study >= 2
        and series % 2 == 0
        and series < 20
        and int(dataset.studies.column("num_series")[study]) > 1
    ]
    assert found.samples.series_rows(np.arange(found.samples.num_samples)).tolist() == expected
    assert len(expected) > 1
    # Other words for the same series are the same rows.
    again = UnitDataset.beside(dataset, "series", f"({text}) and (rows > 0 or rows is missing)")
    assert again.dataset_id == found.dataset_id


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("any(role == 'frontal')", "did you mean series.role"),
        ("any(facts.num_slices > 1)", "facts.num_slices is not of series; write it outside of any"),
        ("any(any(series.rows > 1))", "do not nest"),
        ("any(series.rows > 1, series.columns > 1)", "Expected comparisons"),
        ("quality.number > 1", r"write any\(quality.number ...\) or all"),
        ("pixels.number > 1", r"write any\(pixels.number ...\) or all"),
        ("labels.nmber > 1", "did you mean labels.number"),
        ("labels.number == 'a'", "compared with a number"),
        ("facts.has_report == 1", "compared with True or False"),
    ],
)
def test_a_slip_is_one_sentence(dataset: Dataset, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Where(dataset, text).select(0, 1)


def test_rows_of_series_have_no_series_below_them(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"rows is not of images.*outside of any"):
        UnitDataset.beside(dataset, "series", "any(series.rows > 1)")


def test_series_without_a_table_name_the_command(tmp_path: Path) -> None:
    from tests.factories import make_dataset

    dataset = Dataset.open(make_dataset(tmp_path / "a"))
    with pytest.raises(ConfigError, match="shardflow attach DATASET --facts"):
        Where(dataset, "any(series.rows > 1)").select(0, 1)
