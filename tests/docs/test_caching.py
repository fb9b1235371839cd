"""docs/caching.md says what the recorded counts say, and they say what the policies promise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.stream.cache_policies import (
    PAGE,
    POLICIES,
    RESULTS,
    node_reads,
    page_with_tables,
    plans,
    sample_bytes,
)

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def test_page_holds_the_tables_of_the_results(results: dict[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_tables(page, results), "run: python -m benchmarks.stream.cache_policies --page"


def test_with_equal_sizes_the_plan_wins_everywhere(results: dict[str, Any]) -> None:
    rows = [row for row in results["rows"] if row["sizes"] == "equal"]
    assert {row["cache_share"] for row in rows} >= {0.05, 0.8}
    assert {row["ranks_per_node"] for row in rows} == {1, 2, 4}
    for row in rows:
        assert row["hits"]["belady"] == max(row["hits"].values()), row
        assert row["fetched_bytes"]["belady"] == min(row["fetched_bytes"][policy] for policy in POLICIES), row


def test_the_reads_are_those_of_the_plans(results: dict[str, Any]) -> None:
    for kind, plan in plans(sample_bytes("unequal")).items():
        num_reads = sum(len(node_reads(plan.for_epoch(epoch), 4)) for epoch in range(results["epochs"]))
        (found,) = {
            row["reads"]
            for row in results["rows"]
            if (row["sizes"], row["plan"], row["ranks_per_node"]) == ("unequal", kind, 4)
        }
        assert found == num_reads
