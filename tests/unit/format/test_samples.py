from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from shardflow.errors import FormatError
from shardflow.format.samples import (
    COLUMNS,
    KeySet,
    SampleEntry,
    SampleFacts,
    SamplesTable,
    key_hashes,
    repeated_hashes,
    repeated_key,
)
from shardflow.format.table import Table, encode_table

pytestmark = pytest.mark.fast


def _facts(modality: str = "CT", **changes: int) -> SampleFacts:
    return SampleFacts(
        **{"text_bytes": 5, "num_series": 1, "num_slices": 3, "rows": 16, "columns": 8, **changes},
        modality=modality,
    )


def _entry(key: str, shard: int, offset: int, modality: str = "CT") -> SampleEntry:
    return SampleEntry(
        sample_key=key,
        shard=shard,
        row_in_shard=offset // 1024,
        offset_bytes=offset,
        num_bytes=1024,
        facts=_facts(modality),
    )


SPLITS = ["train", "test", "train"]
ENTRIES = [
    _entry("d", 2, 0, "MR"),
    _entry("b", 1, 0),
    _entry("c", 0, 1024),
    _entry("a", 0, 0),
    _entry("long" * 5, 2, 1024, "CR"),
]


def _open(data: bytes) -> SamplesTable:
    return SamplesTable(Table(memoryview(data), name="samples.tbl"))


def test_rows_are_ordered_by_split_shard_and_offset() -> None:
    table = _open(SamplesTable.encode(ENTRIES, shard_splits=SPLITS))
    assert [table.sample_key(row) for row in range(5)] == ["b", "a", "c", "d", "long" * 5]
    assert table.splits == {"test": range(1), "train": range(1, 5)}
    assert table.num_samples == 5
    assert table.column("shard").tolist() == [1, 0, 0, 2, 2]
    assert table.gather("offset_bytes", np.array([4, 2])).tolist() == [1024, 1024]
    assert [table.modality(row) for row in range(5)] == ["CT", "CT", "CT", "MR", "CR"]
    assert table.column_names == COLUMNS


def test_the_order_of_the_entries_changes_nothing() -> None:
    assert SamplesTable.encode(ENTRIES[::-1], shard_splits=SPLITS) == SamplesTable.encode(
        ENTRIES, shard_splits=SPLITS
    )


def test_a_split_without_samples_is_no_split_of_the_table() -> None:
    table = _open(SamplesTable.encode(ENTRIES[:1], shard_splits=SPLITS))
    assert table.splits == {"train": range(1)}
    empty = _open(SamplesTable.encode([], shard_splits=[]))
    assert (empty.num_samples, empty.splits) == (0, {})


def test_samples_are_found_by_their_key() -> None:
    table = _open(SamplesTable.encode(ENTRIES, shard_splits=SPLITS))
    assert [table.find(table.sample_key(row)) for row in range(5)] == list(range(5))
    for key in ("", "nothing", "long" * 5 + "er", "lon"):
        with pytest.raises(FormatError, match="a sample key must be one of the dataset"):
            table.find(key)


def test_a_key_twice_is_refused() -> None:
    with pytest.raises(FormatError, match="unique"):
        SamplesTable.encode([_entry("a", 0, 0), _entry("a", 0, 1024)], shard_splits=["train"])
    with pytest.raises(FormatError, match="a sample key must match"):
        SamplesTable.encode([_entry("1.2.3", 0, 0)], shard_splits=["train"])


def test_more_modalities_than_a_byte_counts_are_refused() -> None:
    entries = [_entry(f"k{number}", 0, 1024 * number, f"M{number}") for number in range(256)]
    with pytest.raises(FormatError, match="255 modalities, got 256"):
        SamplesTable.encode(entries, shard_splits=["train"])
    _open(SamplesTable.encode(entries[:255], shard_splits=["train"]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "shard-index"}, "must be a samples table of format 1"),
        ({"format_version": 2}, "newer shardflow"),
        ({"splits": {"train": [0, 4]}}, "columns of 4 rows, got"),
        ({"splits": [1]}, "must name splits"),
        ({"splits": {"train": [0]}}, "must name splits"),
        ({"modalities": None}, "must name splits"),
    ],
)
def test_other_tables_are_refused(change: dict[str, Any], match: str) -> None:
    table = Table(memoryview(SamplesTable.encode(ENTRIES, shard_splits=SPLITS)), name="samples.tbl")
    columns = {name: table.column(name) for name in table.column_names}
    with pytest.raises(FormatError, match=match):
        _open(encode_table(columns, {**table.meta, **change}))


def test_a_set_of_keys_knows_them_in_few_bytes() -> None:
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    keys = KeySet(f"key{number}" for number in range(30_000))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(keys) == 30_000
    assert all(f"key{number}" in keys for number in range(30_000))
    assert not any(f"key{number}" in keys for number in range(30_000, 60_000))
    keys.add("key7")
    assert len(keys) == 30_000
    assert 20 < taken / len(keys) < 34


def test_a_key_that_comes_twice_is_found_in_columns_of_any_width() -> None:
    short, wide = np.array([b"a", b"bc", b"d"]), np.array([b"x" * 40, b"bc" + b"y" * 9, b"e", b"d"])
    assert key_hashes(short)[2] == key_hashes(wide)[3]
    assert repeated_key(lambda: [short, wide], 7) == "d"
    assert repeated_key(lambda: [short, wide[:3]], 6) is None
    assert repeated_key(lambda: [short, short], 6) == "a"
    assert repeated_key(list, 0) is None
    numbered = np.array([f"{number:026d}".encode() for number in range(50_000)])
    assert not len(repeated_hashes([numbered], len(numbered)))
