"""The table of streaming's goals: every goal has its row, and one that cannot be told is not met."""

from __future__ import annotations

import pytest

from benchmarks.stream.contestants import CONTESTANTS, PEERS, RESUMED_PEERS
from benchmarks.stream.goals import goals

pytestmark = pytest.mark.fast
COUNTS = {"ratio": 1.0}


def _medians(ours: float) -> dict[str, dict[str, dict[str, float]]]:
    """Everyone at 1, ours at ``ours``."""
    return {
        workload: {
            name: {
                "samples_per_s": ours if name.startswith("shardflow") else 1.0,
                "first_batch_s": 1 / ours if name.startswith("shardflow") else 1.0,
                "peak_pss_mb": 1 / ours if name.startswith("shardflow") else 1.0,
            }
            for name in names
        }
        for workload, names in CONTESTANTS.items()
    }


def test_each_goal_is_met_by_a_loader_that_is_fast_and_by_no_slow_one() -> None:
    fast = {row["what"]: row["met"] for row in goals(_medians(1e6), COUNTS)}
    slow = {row["what"]: row["met"] for row in goals(_medians(0.1), {"ratio": 2.0})}
    assert all(fast.values()), fast
    assert not any(met for what, met in slow.items() if "half an epoch" not in what), slow
    assert len(fast) == 22
    for what in ("16-bit PNG", "loose DICOM", "typed columns", "decode limit", "peak memory", "10^8"):
        assert any(what in row for row in fast), what


def test_a_goal_whose_contestants_are_missing_is_not_met() -> None:
    medians = _medians(1e6)
    for name in ("limit", *PEERS, "webdataset_png", "dicom"):
        medians["ct"].pop(name)
    met = {row["what"]: row["met"] for row in goals(medians, COUNTS)}
    assert not any(is_met for what, is_met in met.items() if what.startswith("ct: ") and "half" not in what)


def test_a_resume_slower_than_a_fresh_start_is_not_met() -> None:
    medians = _medians(10.0)
    medians["ct"]["shardflow_resumed"]["first_batch_s"] = 0.2
    met = {row["what"]: row["met"] for row in goals(medians, COUNTS)}
    assert not met["ct: first batch at half an epoch, s"]
    assert met["cxr: first batch at half an epoch, s"]


def test_every_peer_shows_what_its_resume_needs() -> None:
    assert set(RESUMED_PEERS) == {f"{peer}_resumed" for peer in PEERS}
    assert set(RESUMED_PEERS) <= set(CONTESTANTS["ct"])
