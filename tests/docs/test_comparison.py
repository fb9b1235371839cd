"""docs/comparison.md says what the recorded numbers say, and shardflow keeps in them what it promises."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.peers.table import PAGE, RESULTS, page_with_tables

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def test_page_holds_the_tables_of_the_results(results: dict[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_tables(page, results), "run: python -m benchmarks.peers.table"


def test_every_peer_was_run_in_every_world(results: dict[str, Any]) -> None:
    for peer in results["peers"].values():
        assert len(peer["settings"]) >= 3, "the best of at least three settings"
        for setting in peer["settings"].values():
            assert {epoch["world_size"] for epoch in setting["epochs"]} == {1, 2, 4}
            assert {resume["world_size"] for resume in setting["resumes"]} == {1, 2, 4}


def test_recorded_shardflow_epochs_are_equal_and_resume_exactly(results: dict[str, Any]) -> None:
    for setting in results["peers"]["shardflow"]["settings"].values():
        assert all(epoch["is_equal"] and epoch["end"] == "end" for epoch in setting["epochs"])
        assert all(epoch["num_same_steps"] == epoch["num_steps"] for epoch in setting["epochs"])
        assert all(resume["is_exact"] for resume in setting["resumes"])
        told = [epoch["lengths_told"] for epoch in setting["epochs"]]
        assert told == [epoch["batches_per_rank"] for epoch in setting["epochs"]]
