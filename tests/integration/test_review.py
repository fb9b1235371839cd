"""Review of tables: what a person corrects, and nothing else, is in the next version."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardflow.cli import main as cli
from shardflow.errors import ConfigError
from shardflow.format import Dataset, manifest, verify
from shardflow.format.facts.columns import carry_tables, num_unit_rows, open_columns
from shardflow.format.facts.making import attach_facts
from shardflow.format.tables import StoredColumn, TableUnit, remove_table, write_table
from shardflow.packing.tables.review import read_review, write_review
from shardflow.storage import LocalStore
from tests.field_cases import make_case_dataset

NUM = 14
Row = dict[str, str]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    made = make_case_dataset(tmp_path / "data", num_samples=NUM)
    add_tables(made)
    return Dataset.open(made.store.url)


def add_tables(made: Dataset) -> None:
    for name, unit in (("labels", "study"), ("of_series", "series"), ("of_image", "image")):
        rows = np.arange(num_unit_rows(made, unit))  # type: ignore[arg-type]
        missing, none = rows % 5 == 4, rows < 0
        columns = [
            StoredColumn(name="edema", kind="bool", values=rows % 2 == 0, is_missing=missing),
            StoredColumn(
                name="grade", kind="category", values=rows % 3, is_missing=missing, names=("A", "b c", "ü")
            ),
            StoredColumn(name="count", kind="int", values=rows * 10, is_missing=none),
            StoredColumn(name="score", kind="float", values=rows / 7, is_missing=missing),
            StoredColumn(
                name="vector", kind="floats", values=np.stack([rows, rows], 1).astype("f4"), is_missing=none
            ),
        ]
        write_table(made.store, made.dataset_id, name, unit, columns)  # type: ignore[arg-type]


def edit(file: Path, change: Callable[[list[Row]], list[Row] | None]) -> None:
    with file.open(newline="", encoding="utf-8") as source:
        rows = list(csv.DictReader(source))
    rows = change(rows) or rows
    with file.open("w", newline="", encoding="utf-8") as target:
        writer = csv.DictWriter(target, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def values(dataset: Dataset, name: str) -> list[Any]:
    found = open_columns(Dataset.open(dataset.store.url)).stored(name)
    missing = np.zeros(len(found.values), bool) if found.is_missing is None else found.is_missing
    plain = (
        [found.names[code] if code < len(found.names) else "" for code in found.values]
        if found.names
        else (found.values.tolist())
    )
    return [None if gone else value for value, gone in zip(plain, missing.tolist(), strict=True)]


def everything(dataset: Dataset, table: str) -> dict[str, list[Any]]:
    names = ("edema", "grade", "count", "score", "vector")
    return {name: values(dataset, f"{table}.{name}") for name in names}


@pytest.mark.parametrize("unit", ["study", "series", "image"])
def test_corrections_and_nothing_else_are_in_the_next_version(
    dataset: Dataset, unit: TableUnit, tmp_path: Path
) -> None:
    table = "labels" if unit == "study" else f"of_{unit}"
    expected, file = everything(dataset, table), tmp_path / "review.csv"
    done = write_review(dataset, np.arange(NUM), file, table=table, show=["facts.num_slices"])
    assert done.columns == ("edema", "grade", "count", "score")
    assert done.num_rows == len(expected["count"])
    unchanged = read_review(dataset, file)
    assert (unchanged.is_new, unchanged.number, unchanged.changed) == (False, 1, {})
    draws = random.Random(7)
    count = {"changed": 0, "filled": 0, "cleared": 0}

    def correct(rows: list[Row]) -> list[Row]:
        for place, row in enumerate(rows):
            for name, texts in _WRITTEN.items():
                if draws.random() < 0.4:
                    value, text = draws.choice([*texts.items(), (None, "")])
                    was = expected[name][place]
                    expected[name][place], row[f"{table}.{name}"] = value, text
                    if was != value:
                        kind = "filled" if was is None else "cleared" if value is None else "changed"
                        count[kind] += 1
            row["facts.num_slices"] = "99999"
        draws.shuffle(rows)
        return rows

    edit(file, correct)
    read = read_review(dataset, file)
    assert (read.number, read.is_new) == (2, True)
    assert everything(dataset, table) == expected
    assert {name: sum(getattr(read, name).values()) for name in count} == count
    assert read_review(Dataset.open(dataset.store.url), file).number == 2  # read again: all of it is there
    assert verify(dataset.store.url).is_whole


_WRITTEN: Mapping[str, dict[Any, str]] = {
    "edema": {True: "TRUE", False: "false"},
    "grade": {one: one for one in ("A", "b c", "ü")},
    "count": {7: "7", 8: "8.0"},
    "score": {0.25: " 0.25 ", -1e9: "-1000000000"},
}
"""Values, and how a person or a spreadsheet writes them."""


def test_the_command_writes_chosen_rows_and_reads_them_back(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "review.csv"
    where = "labels.edema == True and labels.grade == 'A'"
    arguments = ["review", dataset.store.url, "--table", "labels", "--columns", "grade", "--where", where]
    assert cli.main([*arguments, "--show", "labels.score,facts.age_years", "-o", str(file)]) == 0
    assert "to correct: grade" in capsys.readouterr().out
    chosen = [row for row in range(NUM) if row % 6 == 0 and row % 5 != 4]
    with file.open(encoding="utf-8") as source:
        rows = list(csv.DictReader(source))
    assert [row["sample_key"] for row in rows] == [dataset.studies.sample_key(row) for row in chosen]
    assert list(rows[0]) == ["sample_key", "labels.score", "facts.age_years", "labels.grade", "table"]

    def correct(rows: list[Row]) -> list[Row]:
        rows[1]["labels.grade"] = "ü"
        return [{**row, "remark": "free text of a person"} for row in rows[1:]]

    edit(file, correct)
    assert cli.main(["review", dataset.store.url, "--read", str(file), "--mark", "seen", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == {"grade": 1}
    grades = values(dataset, "labels.grade")
    assert grades[chosen[1]] == "ü"
    assert grades[chosen[0]] == "A"
    assert [row for row, seen in enumerate(values(dataset, "labels.seen")) if seen] == chosen[1:]
    held = b"".join(path.read_bytes() for path in Path(dataset.store.url).rglob("*") if path.is_file())
    assert b"free text of a person" not in held
    assert cli.main([*arguments, "-o", str(file)]) == 2
    assert "exists, and may hold corrections" in capsys.readouterr().err
    assert cli.main(["review", dataset.store.url, "--read", str(file), "--table", "labels"]) == 2
    assert "leave out --table" in capsys.readouterr().err
    assert cli.main(["review", dataset.store.url]) == 2
    assert "needs either -o FILE" in capsys.readouterr().err


def test_a_new_table_is_made_of_what_was_filled_in(dataset: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "new.csv"
    done = write_review(
        dataset, np.arange(NUM), file, table="quality", add=["usable", "why"], limit=6, seed=3
    )
    assert done.num_rows == 6

    def fill(rows: list[Row]) -> None:
        for place, row in enumerate(rows[:4]):
            row["quality.usable"] = "yes" if place % 2 else "no"
            row["quality.stars"] = str(place)

    edit(file, fill)
    read = read_review(dataset, file)
    assert (read.table, read.number, read.filled) == ("quality", 1, {"usable": 4, "stars": 4})
    opened = open_columns(Dataset.open(dataset.store.url))
    assert {name: one.kind for name, one in opened.items() if name.startswith("quality.")} == {
        "quality.usable": "category",
        "quality.stars": "int",
    }
    assert sorted(filter(None, values(dataset, "quality.usable"))) == ["no", "no", "yes", "yes"]
    again = tmp_path / "again.csv"
    write_review(dataset, np.arange(NUM), again, table="quality", add=["usable"], limit=6, seed=3)
    with file.open() as first, again.open() as second:
        keys = [[row["sample_key"] for row in csv.DictReader(one)] for one in (first, second)]
    assert keys[0] == keys[1]
    with pytest.raises(ConfigError, match="'quality' was made after the file was written"):
        read_review(Dataset.open(dataset.store.url), again)


def test_corrections_of_two_people_are_merged_and_conflicts_refused(dataset: Dataset, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.csv" for name in "abc"]
    for file in files:
        write_review(dataset, np.arange(NUM), file, table="labels", columns=["count", "edema"])

    def setter(place: int, value: str) -> Callable[[list[Row]], None]:
        def change(rows: list[Row]) -> None:
            rows[place]["labels.count"] = value

        return change

    for file, place, value in zip(files, (1, 2, 1), ("111", "222", "333"), strict=True):
        edit(file, setter(place, value))
    url = dataset.store.url
    read_review(Dataset.open(url), files[0])
    read_review(Dataset.open(url), files[1])
    assert values(dataset, "labels.count")[:4] == [0, 111, 222, 30]
    with pytest.raises(ConfigError, match=r"1 rows of c\.csv correct a value of labels\.count that a newer"):
        read_review(Dataset.open(url), files[2])
    assert values(dataset, "labels.count")[:4] == [0, 111, 222, 30]
    # The dataset grows meanwhile: keys and the version that was written out are found again.
    old = Dataset.open(url)
    newer = dataclasses.replace(
        old.manifest, manifest_version=2, parent=old.dataset_id, extra={"note": "two"}
    )
    manifest.commit(old.store, newer)
    attach_facts(Dataset.open(url))
    carry_tables(LocalStore(url), old, Dataset.open(url))
    edit(files[2], setter(1, "10"))  # as it was
    edit(files[2], setter(5, "555"))
    assert read_review(Dataset.open(url), files[2]).changed == {"count": 1}
    assert values(dataset, "labels.count")[:6] == [0, 111, 222, 30, 40, 555]


_SLIPS: Mapping[str, Callable[[list[Row]], list[Row] | None]] = {
    r"2 rows of a\.csv hold a value in labels\.count that is no int \(lines 2, 4\)": lambda rows: [
        {**row, "labels.count": "many"} if place in (0, 2) else row for place, row in enumerate(rows)
    ],
    r"hold a value in labels\.edema that is no bool": lambda rows: [{**rows[0], "labels.edema": "2"}],
    r"hold a class that labels\.grade does not have; --new-classes adds it": lambda rows: [
        {**rows[0], "labels.grade": "D"}
    ],
    r"write a class of labels\.grade in another case": lambda rows: [{**rows[0], "labels.grade": "a"}],
    r"name no row of this version": lambda rows: [{**rows[0], "sample_key": "unknown"}],
    r"repeat the key of an earlier row; keep one \(lines 3\)": lambda rows: [rows[0], rows[0]],
    r"lacks the columns sample_key and table": lambda rows: [{**rows[0], "table": "labels"}],
    r"looks like DICOM UIDs": lambda rows: [
        {**rows[0], "labels.uid": "1.2.840.113619.2.55.3"},
        {**rows[1], "labels.uid": ""},
    ],
    r"labels\.No Way of a\.csv is no name of a column": lambda rows: [{**rows[0], "labels.No Way": "1"}],
}


@pytest.mark.parametrize("sentence", list(_SLIPS))
def test_a_slip_is_one_sentence_and_changes_nothing(dataset: Dataset, sentence: str, tmp_path: Path) -> None:
    write_review(dataset, np.arange(NUM), tmp_path / "a.csv", table="labels")
    edit(tmp_path / "a.csv", _SLIPS[sentence])
    before = everything(dataset, "labels")
    with pytest.raises(ConfigError, match=sentence):
        read_review(dataset, tmp_path / "a.csv")
    assert everything(dataset, "labels") == before
    assert Dataset.open(dataset.store.url).tables.places["labels"].manifest.number == 1


def test_new_classes_are_taken_where_they_are_asked_for(dataset: Dataset, tmp_path: Path) -> None:
    write_review(dataset, np.arange(NUM), tmp_path / "a.csv", table="labels", columns=["grade"])
    edit(tmp_path / "a.csv", lambda rows: [{**rows[0], "labels.grade": "B"}, *rows[1:]])
    before = values(dataset, "labels.grade")
    read_review(dataset, tmp_path / "a.csv", allows_new_classes=True)
    assert values(dataset, "labels.grade") == ["B", *before[1:]]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"table": "labels", "columns": ["vector"]}, r"labels\.vector is of the kind floats"),
        ({"table": "labels", "columns": ["edem"]}, "has no column 'edem'; it has edema"),
        ({"table": "other"}, "'other' has no column to correct; name new ones with --add"),
        ({"table": "labels", "show": ["of_image.count"]}, "of each image, and the rows are of each study"),
        ({"table": "labels", "show": ["facts.agee"]}, r"no column 'facts\.agee' to show"),
        ({"table": "labels", "add": ["edema"]}, "--add names a new column"),
        ({"table": "No"}, "name of a table is 1 to 64"),
    ],
)
def test_slips_of_writing_get_a_sentence(
    dataset: Dataset, settings: Any, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        write_review(dataset, np.arange(NUM), tmp_path / "a.csv", **settings)
    assert not (tmp_path / "a.csv").exists()


def test_a_removed_table_takes_no_corrections(dataset: Dataset, tmp_path: Path) -> None:
    write_review(dataset, np.arange(NUM), tmp_path / "a.csv", table="labels")
    remove_table(dataset.store, dataset.dataset_id, "labels")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'labels' was removed after the file was written"):
        read_review(Dataset.open(dataset.store.url), tmp_path / "a.csv")
