from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, FormatError
from shardflow.format.keys import Json
from shardflow.format.table import BLOCK_NUM_BYTES, Table, TableDamageError, encode_table

pytestmark = pytest.mark.fast

COLUMNS: dict[str, NDArray[Any]] = {
    "key": np.array([b"a", b"bcd", b""], "S5"),
    "small": np.array([1, 2, 3], "u1"),
    "wide": np.arange(6, dtype="<f8").reshape(3, 2),
    "none": np.zeros(0, "<u4"),
    "minus": np.array([-1, 0, 7], "<i2"),
}
META: dict[str, Json] = {"kind": "test", "format_version": 1, "names": ["x", "y"]}


def _table(columns: dict[str, NDArray[Any]] = COLUMNS) -> Table:
    return Table(memoryview(encode_table(columns, META)), name="t.tbl")


def test_columns_and_meta_come_back() -> None:
    table = _table()
    table.verify()
    assert table.meta == META
    assert table.column_names == tuple(COLUMNS)
    for name, values in COLUMNS.items():
        assert table.column(name).dtype == values.dtype
        assert np.array_equal(table.column(name), values)


@given(
    st.dictionaries(
        st.text("abc_", min_size=1, max_size=5),
        st.sampled_from(["<u1", "<u4", "<i8", "<f4", "S3", ">u2", ">f8"]).flatmap(
            lambda dtype: hnp.arrays(dtype, hnp.array_shapes(max_dims=3, max_side=5, min_side=0))
        ),
        max_size=4,
    )
)
def test_any_columns_come_back(columns: dict[str, NDArray[Any]]) -> None:
    table = Table(memoryview(encode_table(columns, {})), name="t")
    table.verify()
    for name, values in columns.items():
        found = table.column(name)
        assert found.shape == values.shape
        assert found.dtype.byteorder in "<|="
        assert found.tobytes() == values.astype(found.dtype).tobytes()


def test_columns_are_aligned_views_that_cannot_be_written_to() -> None:
    data = encode_table(COLUMNS, META)
    base = np.frombuffer(data, np.uint8)
    table = Table(memoryview(data), name="t")
    for name in COLUMNS:
        column = table.column(name)
        assert not column.flags.writeable
        assert np.shares_memory(column, base) or column.nbytes == 0
        assert (column.ctypes.data - base.ctypes.data) % 64 == 0 or column.nbytes == 0
    with pytest.raises(ValueError, match="read-only"):
        table.column("small")[0] = 9
    with pytest.raises(ValueError, match="WRITEABLE"):
        table.column("small").flags.writeable = True


def test_every_flipped_bit_is_found() -> None:
    """Exhaustive: prefix, header, spaces, columns, padding, checksums, trailer."""
    data = bytearray(encode_table(COLUMNS, META))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TableDamageError):
            Table(memoryview(bytes(data)), name="t").verify()
        data[bit // 8] ^= 1 << bit % 8
    Table(memoryview(bytes(data)), name="t").verify()


def test_every_cut_and_every_added_byte_is_found() -> None:
    data = encode_table(COLUMNS, META)
    for stop in range(len(data)):
        with pytest.raises(TableDamageError):
            Table(memoryview(data[:stop]), name="t")
    for extra in (b"\0", data[-12:], data):
        with pytest.raises(TableDamageError, match="bytes instead of"):
            Table(memoryview(data + extra), name="t")


def test_a_damage_names_its_column() -> None:
    columns: dict[str, NDArray[Any]] = {"a": np.zeros(5, "<u4"), "b": np.arange(40_000, dtype="<u8")}
    data = bytearray(encode_table(columns, {}))
    table = Table(memoryview(data), name="t.tbl")
    place = (
        table.column("b").ctypes.data - np.frombuffer(data, np.uint8).ctypes.data + 2 * BLOCK_NUM_BYTES + 5
    )
    data[place] ^= 1
    damaged = Table(memoryview(bytes(data)), name="t.tbl")
    assert damaged.column("a").sum() == 0
    with pytest.raises(TableDamageError, match=r"t\.tbl must be whole, .* \(column b, bytes") as caught:
        damaged.column("b")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, TableDamageError)
    assert (again.offset, again.place, str(again)) == (place - 5, caught.value.place, str(caught.value))


def test_a_block_is_checked_when_it_is_touched_and_only_then() -> None:
    data = bytearray(encode_table({"a": np.arange(60_000, dtype="<u8")}, {}))
    start = len(data) - 12 - 4 * 8 - 60_000 * 8
    data[start + 3 * BLOCK_NUM_BYTES + 1] ^= 4
    table = Table(memoryview(bytes(data)), name="t")
    rows_per_block = BLOCK_NUM_BYTES // 8
    good = np.array([0, 3 * rows_per_block - 1, 4 * rows_per_block, 59_999])
    assert table.gather("a", good).tolist() == good.tolist()
    before = np.arange(7, 3 * rows_per_block)
    assert table.gather("a", before).tolist() == before.tolist()
    for around in (np.arange(7, 3 * rows_per_block + 1), np.arange(2 * rows_per_block, 5 * rows_per_block)):
        with pytest.raises(ChecksumError):
            table.gather("a", around)
    for bad in (3 * rows_per_block, 4 * rows_per_block - 1):
        with pytest.raises(ChecksumError):
            table.gather("a", bad)
        with pytest.raises(ChecksumError):
            table.gather("a", np.array([0, bad]))


def test_a_row_that_straddles_blocks_is_checked_in_all_of_them() -> None:
    data = bytearray(encode_table({"a": np.arange(60_000, dtype="<u4").reshape(2, 30_000)}, {}))
    start = len(data) - 12 - 4 * 4 - 240_000
    for block in range(4):
        data[start + block * BLOCK_NUM_BYTES] ^= 1
        table = Table(memoryview(bytes(data)), name="t")
        rows = {0: [0], 1: [0, 1], 2: [1], 3: [1]}[block]
        for row in (0, 1):
            if row in rows:
                with pytest.raises(ChecksumError):
                    table.gather("a", row)
            else:
                assert table.gather("a", row)[0] == row * 30_000
        data[start + block * BLOCK_NUM_BYTES] ^= 1


def test_rows_outside_are_refused() -> None:
    table = _table()
    for rows in (-1, 3, np.array([0, 3])):
        with pytest.raises(IndexError, match=r"\[0, 3\)"):
            table.gather("small", rows)
    assert table.gather("small", np.array([], np.int64)).size == 0
    assert table.gather("none", np.array([], np.int64)).size == 0
    assert table.gather("wide", np.array([2, 0])).tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert table.gather("key", 1) == b"bcd"


def test_a_missing_column_is_named_beside_those_there_are() -> None:
    with pytest.raises(FormatError, match="has no column nothing, only key, small"):
        _table().column("nothing")


@pytest.mark.parametrize(
    "values",
    [
        np.array([None]),
        np.array(["text"]),
        np.array([True]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.array([1j]),
        np.array(3),
    ],
)
def test_columns_without_defined_bytes_are_refused(values: NDArray[Any]) -> None:
    with pytest.raises(FormatError, match="a table stores columns"):
        encode_table({"a": values}, {})


def test_another_kind_or_a_newer_format_is_refused() -> None:
    table = _table()
    table.expect_kind("test", 1)
    for kind, version in (("other", 1), ("test", 2)):
        with pytest.raises(FormatError, match="newer"):
            table.expect_kind(kind, version)


def test_equal_columns_give_equal_bytes_whatever_their_layout() -> None:
    values = np.arange(12, dtype="<u4").reshape(3, 4)
    plain = encode_table({"a": values}, {})
    assert encode_table({"a": np.asfortranarray(values)}, {}) == plain
    assert encode_table({"a": values.astype(">u4")}, {}) == plain
    assert encode_table({"a": np.repeat(values, 2, axis=1)[:, ::2]}, {}) == plain


def test_threads_touch_a_table_at_once() -> None:
    table = Table(memoryview(encode_table({"a": np.arange(400_000, dtype="<u8")}, {})), name="t")
    sums: list[int] = []
    threads = [threading.Thread(target=lambda: sums.append(int(table.column("a").sum()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(sums) == {400_000 * 399_999 // 2}
