"""The layout: what it takes from the columns of a samples table, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardflow.errors import PlanError
from shardflow.sampling import SampleLayout

pytestmark = pytest.mark.fast

SHARD = np.array([0, 0, 0, 2, 2, 5, 5, 5, 5, 6], np.uint32)
OFFSET = np.array([0, 10, 30, 0, 5, 0, 7, 9, 20, 0], np.uint64)
SIZE = np.array([10, 20, 1, 5, 6, 7, 2, 11, 3, 4], np.uint64)


def layout(population: range = range(10), **changes: Any) -> SampleLayout:
    columns: dict[str, Any] = {"shard": SHARD, "offset_bytes": OFFSET, "num_bytes": SIZE, **changes}
    return SampleLayout.of_columns(population, dataset_id="ab" * 32, **columns)


def test_shards_and_their_ends_are_taken_from_the_table() -> None:
    whole = layout()
    assert whole.shard_rows.tolist() == [0, 3, 5, 9, 10]
    assert whole.shard_end_bytes.tolist() == [31, 11, 23, 4]
    assert (whole.num_samples, whole.num_shards) == (10, 4)
    assert whole.shards_of(np.arange(10)).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert whole.sample_bytes(np.arange(10)).tolist() == SIZE.tolist()


def test_a_split_may_begin_and_end_inside_the_table() -> None:
    part = layout(range(1, 8))
    assert part.shard_rows.tolist() == [1, 3, 5, 8]
    assert part.shard_end_bytes.tolist() == [31, 11, 20]


@pytest.mark.parametrize(
    ("population", "changes", "said"),
    [
        (range(0), {}, "rows of the table"),
        (range(0, 10, 2), {}, "without gaps"),
        (range(11), {}, "rows of the table"),
        (range(10), {"shard": SHARD[::-1].copy()}, "shard must ascend"),
        (range(10), {"offset_bytes": OFFSET.astype(np.float64)}, "offset_bytes must be integers"),
        (range(10), {"facts": {"text_bytes": OFFSET[:9]}}, "text_bytes must be integers for 10 rows"),
    ],
)
def test_tables_that_do_not_fit_are_refused(population: range, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        layout(population, **changes)


def test_an_index_that_does_not_fit_its_table_is_refused() -> None:
    whole = layout()
    for rows in ([0, 3, 3, 9, 10], [0, 3, 5, 9], [1, 3, 5, 9, 10], [0, 3, 5, 9, 11]):
        with pytest.raises(PlanError, match="shard_rows must ascend"):
            replace(whole, shard_rows=np.array(rows, np.int64))
