from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.table import Table, encode_table

pytestmark = pytest.mark.fast

A = [FieldLocation("report.txt", 512, 3, 7), FieldLocation("s000.i0000.b2nd", 1536, 600, 8)]
B = [FieldLocation("study.json", 3072, 1, 2**32 - 1)]
SAMPLES = [("aa", A), ("bcd", B)]
END = 3072 + 512 + 1024


def _open(data: bytes) -> ShardIndex:
    return ShardIndex.decode(Table(memoryview(data), name="train-000000.idx"))


def test_samples_and_fields_come_back() -> None:
    index = _open(ShardIndex.encode("train-000000", END, SAMPLES))
    assert (index.shard, index.shard_num_bytes, index.num_samples, index.num_fields) == (
        "train-000000",
        END,
        2,
        3,
    )
    assert [index.sample_key(row) for row in range(2)] == ["aa", "bcd"]
    assert [index.fields(row) for row in range(2)] == [A, B]
    assert index.field(0, "s000.i0000.b2nd") == A[1]
    assert index.field_names == ("report.txt", "s000.i0000.b2nd", "study.json")


def test_a_shard_without_samples_has_an_index() -> None:
    index = _open(ShardIndex.encode("train-000000", 1024, []))
    assert (index.num_samples, index.num_fields, index.field_names) == (0, 0, ())


def test_what_is_not_there_is_refused() -> None:
    index = _open(ShardIndex.encode("train-000000", END, SAMPLES))
    with pytest.raises(FormatError, match=r"sample aa must have a field 'study\.json', got none"):
        index.field(0, "study.json")
    for row in (-1, 2):
        with pytest.raises(IndexError, match=r"\[0, 2\)"):
            index.fields(row)


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        ([("aa", A[::-1])], "ascend by name"),
        ([("aa", [A[0], A[0]])], "ascend by name"),
        ([("aa", [])], "ascend by name"),
        ([("aa", B)], "must begin at 512, got 3072"),
        ([("aa", A), ("bb", A)], "must begin at 3072, got 512"),
        ([("a.a", A)], "a sample key must match"),
        ([("aa", [FieldLocation("Report.txt", 512, 3, 7)])], "a field name must be"),
    ],
)
def test_what_no_tar_of_format_1_holds_is_refused(
    samples: list[tuple[str, list[FieldLocation]]], match: str
) -> None:
    with pytest.raises(FormatError, match=match):
        ShardIndex.encode("train-000000", END, samples)


def _columns() -> dict[str, NDArray[Any]]:
    table = Table(memoryview(ShardIndex.encode("train-000000", END, SAMPLES)), name="t")
    return {name: table.column(name).copy() for name in table.column_names}


@pytest.mark.parametrize(
    ("column", "at", "value"),
    [
        ("sample_first_field", 0, 1),
        ("sample_first_field", 1, 0),
        ("sample_first_field", 2, 2),
        ("field_name", 0, 3),
        ("field_offset", 2, END),
        ("field_num_bytes", 0, 2**40),
    ],
)
def test_an_index_that_leads_outside_is_refused_even_if_its_checksums_fit(
    column: str, at: int, value: int
) -> None:
    columns = _columns()
    columns[column][at] = value
    meta = Table(memoryview(ShardIndex.encode("train-000000", END, SAMPLES)), name="t").meta
    with pytest.raises(FormatError, match="must agree with itself"):
        _open(encode_table(columns, meta))


@pytest.mark.parametrize(
    "column", ["sample_key", "field_name", "field_offset", "field_num_bytes", "field_crc32c"]
)
def test_columns_of_unequal_length_are_refused(column: str) -> None:
    columns = _columns()
    columns[column] = columns[column][:-1]
    meta = Table(memoryview(ShardIndex.encode("train-000000", END, SAMPLES)), name="t").meta
    with pytest.raises(FormatError, match="must agree with itself"):
        _open(encode_table(columns, meta))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "samples"}, "must be a shard-index table of format 1"),
        ({"format_version": 2}, "newer shardflow"),
        ({"field_names": None}, "must name its shard"),
        ({"shard": 3}, "must name its shard"),
    ],
)
def test_other_tables_are_refused(change: dict[str, Any], match: str) -> None:
    meta = Table(memoryview(ShardIndex.encode("train-000000", END, SAMPLES)), name="t").meta
    with pytest.raises(FormatError, match=match):
        _open(encode_table(_columns(), {**meta, **change}))


def test_a_missing_column_is_refused() -> None:
    meta = Table(memoryview(ShardIndex.encode("train-000000", END, SAMPLES)), name="t").meta
    columns = {name: values for name, values in _columns().items() if name != "field_crc32c"}
    with pytest.raises(FormatError, match="no column field_crc32c"):
        _open(encode_table(columns, meta))


def test_lookups_make_no_objects_for_other_samples() -> None:
    """S7: what stays in memory of an index is its columns."""
    index = _open(ShardIndex.encode("train-000000", END, SAMPLES))
    for values in (index.sample_keys, index.first_field, index.field_name_ids, index.field_offsets):
        assert isinstance(values, np.ndarray)
        assert not values.flags.owndata
