"""A streamed table is the table that is encoded at once, byte for byte."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.keys import Json
from shardflow.format.ledger import LineOutcomes, stream_outcomes
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.table import StreamedColumn, Table, encode_table, stream_table

pytestmark = pytest.mark.fast

REASONS = (("PACKED", "packed"), ("EMPTY_LINE", "skipped"), ("INVALID_JSON", "quarantined"))


def _cut(values: NDArray[Any], bounds: list[int]) -> list[NDArray[Any]]:
    return [values[start:stop] for start, stop in itertools.pairwise(bounds)]


@given(
    num_rows=st.sampled_from([0, 1, 7, 8191, 8192, 8193, 20_000, 65_536, 70_001]),
    cuts=st.lists(st.integers(0, 70_001), max_size=5),
    dtypes=st.lists(st.sampled_from(["<u4", "<u8", "u1", "S26", "<i2"]), min_size=1, max_size=3),
)
def test_any_cut_gives_the_bytes_of_the_whole(num_rows: int, cuts: list[int], dtypes: list[str]) -> None:
    rng = np.random.default_rng(3)
    columns = {
        f"c{number}": rng.integers(0, 256, (num_rows, np.dtype(dtype).itemsize), np.uint8).view(dtype).ravel()
        if num_rows
        else np.zeros(0, dtype)
        for number, dtype in enumerate(dtypes)
    }
    bounds = [0, *sorted(cut for cut in cuts if cut < num_rows), num_rows]
    streamed = [
        StreamedColumn(
            name=name,
            dtype=values.dtype,
            shape=(num_rows,),
            pieces=_cut(values, bounds),
        )
        for name, values in columns.items()
    ]
    meta: dict[str, Json] = {"kind": "example", "n": 3}
    assert b"".join(stream_table(streamed, meta)) == encode_table(columns, meta)


@pytest.mark.parametrize("num_rows", [2, 4])
def test_another_number_of_rows_than_announced_is_refused(num_rows: int) -> None:
    column = StreamedColumn(name="c", dtype=np.dtype("u1"), shape=(num_rows,), pieces=[np.zeros(3, np.uint8)])
    with pytest.raises(FormatError, match=f"announced with {num_rows} rows"):
        b"".join(stream_table([column], {}))


def _outcomes(lines: list[int], files: list[tuple[str, int]]) -> LineOutcomes:
    pieces = [np.array(lines[:2], np.uint8), np.array(lines[2:], np.uint8)]
    data = b"".join(stream_outcomes(files, pieces, REASONS))
    return LineOutcomes(Table(memoryview(data), name="lines"))


def test_outcomes_are_found_by_file_and_counted() -> None:
    outcomes = _outcomes([0, 2, 0, 1, 0], [("aa", 3), ("bb", 0), ("cc", 2)])
    assert outcomes.num_lines == 5
    assert [outcomes.of_file(file).tolist() for file in outcomes.files] == [[0, 2, 0], [], [1, 0]]
    assert outcomes.reasons() == {"PACKED": 3, "EMPTY_LINE": 1, "INVALID_JSON": 1}
    assert outcomes.counts() == OutcomeCounts(packed=3, skipped=1, quarantined=1)
    with pytest.raises(FormatError, match="must be one of the corpus"):
        outcomes.of_file("dd")


def test_a_number_that_stands_for_nothing_is_refused() -> None:
    with pytest.raises(FormatError, match="numbers of its reasons"):
        _outcomes([0, 3], [("aa", 2)]).counts()


def test_files_must_cover_the_lines() -> None:
    with pytest.raises(FormatError, match="announced with 3 rows"):
        _outcomes([0, 0], [("aa", 3)])
