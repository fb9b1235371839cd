"""Attached tables as columns: aligned with studies, series and images, pinned once, refused when damaged."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.units import UnitDataset
from shardflow.format import Dataset
from shardflow.format.facts.columns import image_starts, num_unit_rows, open_columns
from shardflow.format.facts.series import open_series
from shardflow.format.tables import StoredColumn, TableUnit, write_table
from shardflow.storage import LocalStore
from tests.field_cases import make_case_dataset


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return make_case_dataset(tmp_path / "data")


def columns_of(num_rows: int) -> list[StoredColumn]:
    """One column of each kind; every third row has no value."""
    rows = np.arange(num_rows)
    missing = rows % 3 == 2
    names = ("ct", "größer", "mr")
    lists = np.stack([rows, -rows], axis=1).astype("f4")
    return [
        StoredColumn(name="flag", kind="bool", values=rows % 2 == 0, is_missing=missing),
        StoredColumn(name="count", kind="int", values=rows * 1000 - 5, is_missing=missing),
        StoredColumn(name="score", kind="float", values=rows * 0.1, is_missing=missing),
        StoredColumn(name="label", kind="category", values=rows % 3, is_missing=missing, names=names),
        StoredColumn(name="word", kind="string", values=rows % 3, is_missing=missing, names=names),
        StoredColumn(name="vector", kind="floats", values=lists, is_missing=missing),
    ]


def attach(dataset: Dataset, name: str, unit: TableUnit = "study") -> None:
    num_rows = num_unit_rows(dataset, unit)
    write_table(LocalStore(dataset.store.url), dataset.dataset_id, name, unit, columns_of(num_rows))


def test_every_kind_comes_back(dataset: Dataset) -> None:
    attach(dataset, "labels")
    columns = open_columns(Dataset.open(dataset.store.url))
    num = dataset.studies.num_samples
    assert {name: info.kind for name, info in columns.items() if name.startswith("labels.")} == {
        f"labels.{one.name}": one.kind for one in columns_of(num)
    }
    assert columns["labels.label"].names == ("ct", "größer", "mr")
    for expected in columns_of(num):
        found = columns.column(f"labels.{expected.name}")
        assert found.is_missing is not None
        np.testing.assert_array_equal(found.is_missing, expected.is_missing)
        there = ~expected.is_missing
        np.testing.assert_array_equal(found.values[there], expected.values[there])
        assert found.names == (expected.names or None)
        some = columns.gather(f"labels.{expected.name}", np.array([4, 0]))
        np.testing.assert_array_equal(some.values, found.values[[4, 0]])


def test_values_repeat_for_smaller_units(dataset: Dataset) -> None:
    for unit in ("study", "series", "image"):
        attach(dataset, f"of_{unit}", unit)
    opened = Dataset.open(dataset.store.url)
    images = UnitDataset.beside(opened, "image")
    columns = open_columns(images)
    rows = np.arange(images.samples.num_samples)
    series = images.samples.series_rows(rows)
    for name, expected in (
        ("of_study", images.study_rows(rows)),
        ("of_series", series),
        ("of_image", image_starts(opened)[series] + images.samples.images(rows)),
    ):
        there = expected % 3 != 2
        np.testing.assert_array_equal(
            columns.column(f"{name}.count").values[there], expected[there] * 1000 - 5
        )
    with pytest.raises(ConfigError, match="a value for each image, and samples are of unit 'series'"):
        open_columns(UnitDataset.beside(opened, "series")).column("of_image.count")
    with pytest.raises(ConfigError, match="unit='series'"):
        open_columns(opened).column("of_series.count")


def test_chosen_versions_stay(dataset: Dataset) -> None:
    attach(dataset, "labels")
    opened = Dataset.open(dataset.store.url)
    first = dict(opened.tables)
    write_table(LocalStore(dataset.store.url), dataset.dataset_id, "labels", "study", columns_of(14)[:2])
    for same in (opened, pickle.loads(pickle.dumps(opened)), opened.reopened()):
        assert dict(same.tables) == first
        assert len(names_of(same)) == 6
    newest = Dataset.open(dataset.store.url)
    assert len(names_of(newest)) == 2
    pinned = newest.tables.pinned(newest.store, newest.dataset_id, first)
    assert dict(pinned) == first
    with pytest.raises(ConfigError, match="no longer has"):
        newest.tables.pinned(newest.store, newest.dataset_id, {"labels": "0" * 64})


def test_equal_content_is_no_new_version(dataset: Dataset) -> None:
    store = LocalStore(dataset.store.url)
    written = [write_table(store, dataset.dataset_id, "labels", "study", columns_of(14)) for _ in range(2)]
    assert [is_new for _, is_new in written] == [True, False]
    assert written[0][0] == written[1][0]


def test_damage_is_seen(dataset: Dataset) -> None:
    attach(dataset, "labels")
    (path,) = Path(dataset.store.url).glob("tables/*/*/rows.tbl")
    data = bytearray(path.read_bytes())
    data[-200] ^= 1  # in a block or in the checksums; the header is whole
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(FormatError):
        read_all(Dataset.open(dataset.store.url))


def read_all(dataset: Dataset) -> None:
    columns = open_columns(dataset)
    for name in names_of(dataset):
        columns.column(name)


def names_of(dataset: Dataset) -> list[str]:
    return [name for name in open_columns(dataset) if name.startswith("labels.")]


def test_names_of_facts_are_positions_in_categories(dataset: Dataset) -> None:
    columns, table = open_columns(dataset), open_series(dataset)[0]
    for name, of_table in (
        ("facts.modality", dataset.studies.modalities),
        ("series.role", table.vocabulary("role")),
    ):
        found = columns.stored(name)
        assert found.names == columns[name].names == tuple(one for one in of_table if one)
        codes = dataset.studies.column("modality") if name == "facts.modality" else table.array("role")
        for value, code in zip(found.values.tolist(), codes.tolist(), strict=True):
            assert (found.names[value] if value < len(found.names) else "") == of_table[code]
