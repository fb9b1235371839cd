"""Recorded outcomes: durable, private, and forgiving about lines that a kill cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.errors import StorageError
from shardflow.format.reasons import Outcome, outcome_of
from shardflow.packing.engines.base import Failure
from shardflow.packing.workspace import CrashLog, reason_of_failure

pytestmark = pytest.mark.fast


def test_what_is_recorded_is_found_by_name_and_size(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    recorded = CrashLog(path)
    assert len(recorded) == 0
    recorded.add("abc", 10, "WORKER_KILLED")
    recorded.add("def", 20, "WORKER_TIMEOUT")
    for known in (recorded, CrashLog(path)):
        assert len(known) == 2
        assert known.find("abc", 10) == "WORKER_KILLED"
        # Another size is another input: a repaired file is tried again.
        assert known.find("abc", 11) is None
        assert known.find("xyz", 10) is None
    assert path.stat().st_mode & 0o777 == 0o600


def test_torn_and_strange_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    CrashLog(path).add("abc", 10, "WORKER_KILLED")
    with path.open("a", encoding="utf-8") as file:
        file.write(
            '{"event":"resource_outcome","input":"x","num_bytes":1,"reason":"NONSENSE"}\n{"event":"reso'
        )
    assert len(CrashLog(path)) == 1


def test_a_record_that_cannot_be_written_stops_the_job(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write an event file"):
        CrashLog(tmp_path / "none" / "outcomes.jsonl").add("abc", 10, "WORKER_KILLED")


def test_failures_are_quarantined() -> None:
    failures: tuple[Failure, ...] = ("timeout", "killed", "out_of_memory", "failed")
    for failure in failures:
        assert outcome_of(reason_of_failure(failure)) is Outcome.QUARANTINED
