"""``shardflow columns``: names, types and missing shares, and the values of a column, by direct counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shardflow.format.facts.columns import num_unit_rows
from shardflow.format.facts.series import open_series
from shardflow.format.tables import StoredColumn, write_table
from shardflow.storage import LocalStore
from tests.cli.conftest import Call
from tests.field_cases import make_case_dataset

pytestmark = pytest.mark.fast


def test_columns_of_facts_and_tables_are_listed(call: Call, tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a")
    rows = np.arange(num_unit_rows(dataset, "study"))
    columns = [
        StoredColumn(name="score", kind="float", values=rows * 0.5, is_missing=rows % 2 == 1),
        StoredColumn(name="word", kind="string", values=rows % 2, is_missing=rows < 0, names=("a b", "c d")),
    ]
    write_table(LocalStore(dataset.store.url), dataset.dataset_id, "labels", "study", columns)
    (found,) = call("columns", dataset.store.url, "--json").lines
    by_name = {one["name"]: one for one in found["columns"]}
    assert found["notes"] == []
    assert by_name["labels.score"] == {
        "name": "labels.score",
        "type": "float",
        "unit": "study",
        "rows": len(rows),
        "missing": len(rows) // 2,
        "missing_share": len(rows) // 2 / len(rows),
    }
    assert (by_name["series.role"]["type"], by_name["series.role"]["unit"]) == ("category", "series")
    assert by_name["facts.age_years"]["type"] == "float"
    shown = call("columns", dataset.store.url).out
    assert all(name in shown for name in by_name)

    table, _ = open_series(dataset)
    names = table.vocabulary("role")
    roles = Counter(names[code] for code in table.array("role").tolist())
    (values,) = call("columns", dataset.store.url, "series.role", "--json").lines
    assert values["counts"] == {name: count for name, count in roles.items() if name}
    assert values["missing"] == roles[""]
    assert "values" in call("columns", dataset.store.url, "series.role").out
    (numbers,) = call("columns", dataset.store.url, "facts.num_slices", "--json").lines
    expected = Counter(map(str, dataset.studies.column("num_slices").tolist()))
    assert numbers["counts"] == expected
    # Texts are no values to list.
    (words,) = call("columns", dataset.store.url, "labels.word", "--json").lines
    assert "counts" not in words


def test_what_lacks_its_table_is_noted_and_an_unknown_name_refused(call: Call, dataset: Path) -> None:
    (found,) = call("columns", dataset, "--json").lines
    assert {one["name"] for one in found["columns"]} >= {"facts.modality", "facts.num_slices"}
    assert all("shardflow attach DATASET --facts" in note for note in found["notes"])
    assert found["notes"]
    refused = call("columns", dataset, "facts.modalty")
    assert refused.code == 2
    assert "did you mean facts.modality" in refused.err
