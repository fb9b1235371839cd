"""Joins of random tables against pandas: missing values, keys that are missing, doubled or of no sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.facts.columns import open_columns
from shardflow.packing.tables.joining import TableSettings, attach_table
from tests.field_cases import make_case_dataset

_NUMBER = 14
_VALUES = {
    "flag": st.sampled_from(["true", "false", ""]),
    "count": st.one_of(st.integers(-(10**6), 10**6).map(str), st.just("NA"), st.just("3.0")),
    "score": st.one_of(st.floats(-1e6, 1e6).map(repr), st.just(""), st.just("0.5")),
    "label": st.sampled_from(["left", "right", "größer", "", "n/a"]),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_case_dataset(tmp_path_factory.mktemp("joins") / "data", num_samples=_NUMBER)


@st.composite
def tables(draw: st.DrawFn) -> list[dict[str, str]]:
    """Rows of samples that exist (0 to 13) or do not, without doubled keys of other values."""
    numbers = draw(st.lists(st.integers(-1, _NUMBER + 3), min_size=1, max_size=24))
    numbers.append(draw(st.integers(0, _NUMBER - 1)))
    seen: dict[int, dict[str, str]] = {}
    rows = []
    for number in numbers:
        values = seen.setdefault(number, {name: draw(each) for name, each in _VALUES.items()})
        rows.append({"number": str(number), **values})
    return rows


def write(path: Path, frame: pd.DataFrame, form: str) -> Path:
    """Write a table of texts as a file of a form."""
    file = path / f"table.{form}"
    if form.startswith("csv"):
        frame.to_csv(file, index=False)
    elif form.startswith("jsonl"):
        frame.to_json(file, orient="records", lines=True)
    else:
        frame.to_parquet(file)
    return file


@settings(max_examples=40)
@given(rows=tables(), form=st.sampled_from(["csv", "csv.gz", "jsonl", "jsonl.gz", "parquet"]))
def test_a_join_is_that_of_pandas(
    rows: list[dict[str, str]], form: str, dataset: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("join")
    keys = [key.decode() for key in dataset.studies.column("sample_key").tolist()]
    names = {str(number): key for number, key in enumerate(keys)} | {"-1": ""}
    frame = pd.DataFrame(rows)
    frame["sample_key"] = [names.get(number, f"unknown{number}") for number in frame.pop("number")]
    file = write(folder, frame, form)
    types = {"flag": "bool", "count": "int", "score": "float", "label": "category"}
    how = TableSettings(
        name="labels",
        on="sample_key",
        columns=list(_VALUES),
        types=types,  # type: ignore[arg-type]
    )
    kept = {name for name in _VALUES if (~frame[name].isin(["", "NA", "n/a"])).any()}
    if not kept:
        with pytest.raises(ConfigError, match="No column"):
            attach_table(dataset, file, how, to=folder)
        return
    done = attach_table(dataset, file, how, to=folder)
    expected = (
        frame[frame["sample_key"] != ""].drop_duplicates("sample_key").set_index("sample_key").reindex(keys)
    )
    columns = open_columns(Dataset.open(dataset.store.url, tables=[folder]))
    assert {name for name in columns if name.startswith("labels.")} == {f"labels.{name}" for name in kept}
    for name in kept:
        found = columns.column(f"labels.{name}")
        missing = np.zeros(len(keys), bool) if found.is_missing is None else found.is_missing
        texts = expected[name]
        np.testing.assert_array_equal(missing, texts.isna() | texts.isin(["", "NA", "n/a"]))
        there = np.flatnonzero(~missing)
        values = found.values[there].tolist()
        wanted = texts.iloc[there]
        if found.names is not None:
            assert [found.names[code] for code in values] == wanted.tolist()
            assert set(found.names) == set(wanted)  # nothing of rows without a sample
        elif name == "flag":
            assert values == [text == "true" for text in wanted]
        else:
            assert values == pd.to_numeric(wanted).tolist()
    is_known = frame["sample_key"].isin(keys)
    assert done.num_file_rows == len(frame)
    assert done.num_without_key == (frame["sample_key"] == "").sum()
    assert done.num_unmatched == (~is_known & (frame["sample_key"] != "")).sum()
    assert done.num_duplicates == frame[is_known].duplicated("sample_key").sum()
    assert done.num_without_row == len(keys) - frame[is_known]["sample_key"].nunique()
