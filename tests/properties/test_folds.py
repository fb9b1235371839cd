"""Folds of random tables: no person in two, classes within bounds, any order, stable when they grow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardflow as sf
from shardflow.cli.main import main
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.facts.columns import open_columns
from shardflow.format.tables import StoredColumn, write_table
from shardflow.packing.tables.folds import deal, write_folds
from tests.factories import make_dataset

NONE = -1


@st.composite
def tables(draw: st.DrawFn) -> tuple[Any, Any, int, int]:
    """Persons, classes, number of folds and seed; few large persons and many small ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num = draw(st.integers(1, 300))
    numbers = (rng.random(num) ** draw(st.integers(1, 4)) * draw(st.integers(1, 200))).astype(int)
    classes = (rng.random(num) ** draw(st.integers(1, 3)) * draw(st.integers(1, 6))).astype(np.int64)
    persons = np.array([f"p{number}".encode() for number in numbers])
    return persons, classes, draw(st.integers(2, 7)), draw(st.integers(-5, 5))


def new(num: int) -> Any:
    return np.full(num, NONE)


def fold_counts(folds: Any, k: int) -> Any:
    return np.bincount(folds, minlength=k)


@settings(max_examples=150, deadline=None)
@given(tables())
def test_persons_are_in_one_fold_and_the_stated_bound_holds(table: tuple[Any, Any, int, int]) -> None:
    persons, classes, k, seed = table
    folds = deal(persons, classes, new(len(persons)), k=k, seed=seed)
    for person in np.unique(persons):
        assert len(set(folds[persons == person].tolist())) == 1
    assert (fold_counts(folds, k) > 0).sum() == min(k, len(np.unique(persons)))
    spread = allowed = 0.0
    for code in np.unique(classes):
        num = int((classes == code).sum())
        of_fold = fold_counts(folds[classes == code], k)
        spread += float(((of_fold - num / k) ** 2).sum()) / num
        of_person = np.unique(persons[classes == code], return_counts=True)[1]
        allowed += float((of_person.astype(float) ** 2).sum()) / num * (1 - 1 / k)
    assert spread <= allowed + 1e-6


@settings(max_examples=100, deadline=None)
@given(tables())
def test_classes_of_persons_of_one_class_differ_by_one_person(table: tuple[Any, Any, int, int]) -> None:
    persons, classes, k, seed = table
    classes = classes[np.unique(persons, return_index=True, return_inverse=True)[1]][
        np.unique(persons, return_inverse=True)[1]
    ]
    folds = deal(persons, classes, new(len(persons)), k=k, seed=seed)
    for code in np.unique(classes):
        largest = np.unique(persons[classes == code], return_counts=True)[1].max()
        counts = fold_counts(folds[classes == code], k)
        assert counts.max() - counts.min() <= largest


@settings(max_examples=100, deadline=None)
@given(tables(), st.randoms())
def test_the_order_of_studies_does_not_matter(table: tuple[Any, Any, int, int], random: Any) -> None:
    persons, classes, k, seed = table
    folds = deal(persons, classes, new(len(persons)), k=k, seed=seed)
    order = np.array(random.sample(range(len(persons)), len(persons)))
    assert (deal(persons[order], classes[order], new(len(persons)), k=k, seed=seed) == folds[order]).all()


@settings(max_examples=100, deadline=None)
@given(tables(), st.floats(0, 1))
def test_folds_stay_when_studies_are_added(table: tuple[Any, Any, int, int], share: float) -> None:
    persons, classes, k, seed = table
    num = int(share * len(persons))
    first = deal(persons[:num], classes[:num], new(num), k=k, seed=seed)
    known = np.concatenate([first, new(len(persons) - num)])
    second = deal(persons, classes, known, k=k, seed=seed + 1)
    assert (second[:num] == first).all()
    for person in np.unique(persons):
        assert len(set(second[persons == person].tolist())) == 1
    if not np.isin(persons[num:], persons[:num]).any() and len(np.unique(classes)) == 1:
        largest = np.unique(persons, return_counts=True)[1].max()
        counts = fold_counts(second, k)
        assert counts.max() - counts.min() <= largest


NUM = 24


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    made = Dataset.open(make_dataset(tmp_path / "dataset", splits={"train": 20, "val": 4}, facts=True))
    number, none = np.arange(NUM), np.zeros(NUM, bool)
    columns = [
        StoredColumn(
            name="finding",
            kind="category",
            values=np.where(number % 4 == 0, 1, 0),
            is_missing=number % 10 == 9,
            names=("common", "rare"),
        ),
        StoredColumn(name="score", kind="float", values=number / 7, is_missing=none),
    ]
    write_table(made.store, made.dataset_id, "labels", "study", columns)
    return Dataset.open(made.store.url)


def folds_of(dataset: Dataset) -> tuple[Any, Any]:
    found = open_columns(Dataset.open(dataset.store.url)).column("folds.fold")
    missing = np.zeros(NUM, bool) if found.is_missing is None else found.is_missing
    return np.asarray(found.values), missing


def test_the_command_writes_a_column_that_where_uses(
    dataset: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["folds", dataset.store.url, "--k", "4", "--stratify", "labels.finding", "--split", "train"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "20 studies of 20 persons in 4 folds" in text
    assert "2 studies have no value to stratify by" in text
    folds, missing = folds_of(dataset)
    assert (~missing).sum() == 20
    finding = open_columns(dataset).column("labels.finding")
    chosen = ~missing & (np.asarray(finding.values) == 1)
    assert finding.is_missing is not None
    assert sorted(np.bincount(folds[chosen & ~finding.is_missing], minlength=4).tolist()) == [1, 1, 1, 2]
    assert main(command) == 0
    assert "version 1, which has the same content" in capsys.readouterr().out
    keys: dict[str, set[str]] = {}
    for where in ("folds.fold == 0", "folds.fold != 0"):
        spec = sf.BatchSpec.simple(global_batch_size=1, micro_batch_size=1)
        with sf.Loader(
            Dataset.open(dataset.store.url), split="train", seed=1, batch=spec, fields={}, where=where
        ) as loader:
            keys[where] = {key for batch in loader for key in batch.sample_keys if key is not None}
    of_fold, others = keys.values()
    assert not of_fold & others
    assert len(of_fold | others) == 20
    assert len(of_fold) == 5
    # Those who were left out are dealt; the others stay.
    assert main(command[:-2]) == 0
    assert "20 studies keep their fold" in capsys.readouterr().out
    again, none = folds_of(dataset)
    assert not none.any()
    assert (again[~missing] == folds[~missing]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 1}, "--k must be at least 2, the number of folds, got 1."),
        ({"k": 25}, "25 folds need at least 25 persons, the chosen studies have 24; lower --k."),
        ({"stratify": "labels.findings"}, "did you mean labels.finding"),
        ({"stratify": "labels.score"}, "one class for each study: a bool, int or category; labels.score is"),
        ({"stratify": "series.role"}, "series.role is category of each series."),
        ({"name": "labels"}, "The table 'labels' is there and holds no folds"),
        ({"name": "Folds"}, "The name of a table is 1 to 64 of a-z"),
        ({"name": "three"}, "The table 'three' has 3 folds, not 2; keep --k 3"),
    ],
)
def test_slips_get_one_sentence(dataset: Dataset, options: dict[str, Any], message: str) -> None:
    rows = np.arange(NUM)
    settings = {"name": "folds", "k": 2, "stratify": "labels.finding", "seed": 0}
    write_folds(dataset, rows, name="three", k=3, stratify="labels.finding", seed=0)
    with pytest.raises(ConfigError, match=re.escape(message)):
        write_folds(Dataset.open(dataset.store.url), rows, **{**settings, **options})


def test_a_person_in_two_earlier_folds_is_refused() -> None:
    persons = np.array([b"a", b"a", b"b"])
    with pytest.raises(ConfigError, match="studies of one person in two folds"):
        deal(persons, np.zeros(3, np.int64), np.array([0, 1, NONE]), k=2, seed=0)
