"""Tables of layouts: CSV, compressed or not, and Parquet, read alike."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardflow.errors import ConfigError
from shardflow.packing.sources.layouts.base import read_table

pytestmark = pytest.mark.fast

COLUMNS = {"patient": "Subject ID", "study": "study"}


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.parquet"])
def test_all_forms_are_read_alike(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = '\ufeffsubject id,other,STUDY\n 17 ,x,"s,1"\n,y,s2\n'
    if name.endswith(".parquet"):
        table = pa.table({"Subject ID": [17.0, None], "other": ["x", "y"], "study": ["s,1", "s2"]})
        pq.write_table(table, path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode("utf-8")))
    else:
        path.write_text(text, encoding="utf-8")
    rows = list(read_table(path, "the table", {**COLUMNS, "age": "age"}, ("patient",)))
    assert [row.values for row in rows] == [
        {"patient": "17", "study": "s,1", "age": ""},
        {"patient": "", "study": "s2", "age": ""},
    ]
    assert "17" not in repr(rows[0])


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.csv", b"study\n1\n", "must have one column 'Subject ID'"),
        ("a.csv", b"subject id,Subject ID\n1,2\n", "got 2"),
        ("a.csv", b'subject id\n"1\n', "well-formed CSV"),
        ("a.csv.gz", b"no gzip", "readable table, got BadGzipFile"),
        ("a.csv.gz", gzip.compress(b"subject id\n" * 99, mtime=0)[:-9], "readable table, got EOFError"),
        ("a.parquet", b"PAR1", "readable Parquet table"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=expected):
        list(read_table(tmp_path / name, "the table", COLUMNS, ("patient",)))


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got No such file or directory"):
        list(read_table(tmp_path / "none.csv", "the table", COLUMNS))


def test_a_short_row_comes_without_values(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("subject id,study\n1,2\n3\n", encoding="utf-8")
    rows = list(read_table(tmp_path / "a.csv", "the table", COLUMNS))
    assert [(row.place, row.values is None) for row in rows] == [(2, False), (3, True)]
