"""A run that fails at the same place again is not started for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardflow.errors import ConfigError, NoProgressError, StorageError
from shardflow.logs import EventLog
from shardflow.training.checkpoint.start import record_start, refuse_crash_loop
from shardflow.training.health.heartbeat import Beat, Fault

pytestmark = pytest.mark.fast


class KilledError(Exception):
    """Stands for a death in the middle of a start."""


def start(run: Path, step: int, *, ends: type[Exception] | None = None, limit: int = 3) -> None:
    """One start from the checkpoint of ``step``; it ends with an error, or well."""
    checkpoint = str(run / "checkpoints" / f"step-{step:08d}") if step else None
    refuse_crash_loop(run, checkpoint, max_failed_starts=limit)
    try:
        with record_start(run, checkpoint, attempt=1):
            if ends is not None:
                raise ends("why")
    except (KilledError, ConfigError):
        pass


@pytest.mark.parametrize("ends", [None, ConfigError])
def test_an_end_that_cannot_be_written_changes_nothing_of_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ends: type[Exception] | None,
) -> None:
    write = EventLog.write

    def full(self: EventLog, event: str, /, **fields: object) -> None:
        if event == "end":
            raise StorageError("an event file must be writable, got OSError.")
        write(self, event, **fields)

    monkeypatch.setattr(EventLog, "write", full)
    start(tmp_path, 40, ends=ends)
    assert [record.message for record in caplog.records] == [
        "starts.jsonl: an event file must be writable, got OSError."
    ]


def test_three_starts_from_one_checkpoint_without_a_next_one_are_enough(tmp_path: Path) -> None:
    for _ in range(3):
        start(tmp_path, 40, ends=KilledError)
    with pytest.raises(NoProgressError, match=r"started 3 times from step 40 .* monitor saw no fault"):
        start(tmp_path, 40)
    start(tmp_path, 40, ends=KilledError, limit=0)  # a person tries once more
    start(tmp_path, 40, limit=5)


def test_progress_an_orderly_end_and_a_refusal_begin_the_count_anew(tmp_path: Path) -> None:
    for step in (0, 0, 10, 10, 20, 20):
        start(tmp_path, step, ends=KilledError)
    for _ in range(10):
        start(tmp_path, 20)  # stopped by a signal at once
    start(tmp_path, 20, ends=KilledError)
    start(tmp_path, 20, ends=KilledError)
    for _ in range(10):
        start(tmp_path, 20, ends=ConfigError)
    start(tmp_path, 20, ends=KilledError)


def test_the_last_fault_is_in_the_message(tmp_path: Path) -> None:
    fault = Fault(kind="gone", rank=2, host="node-b", pid=7, beat=Beat(phase="epoch 0, step 3, computing"))
    (tmp_path / "health").mkdir()
    line = {"event": "fault", "time_s": 1.0, **fault.to_json()}
    (tmp_path / "health" / "faults.jsonl").write_text(json.dumps(line) + "\n")
    for _ in range(3):
        start(tmp_path, 0, ends=KilledError)
    with pytest.raises(NoProgressError, match=r"last fault: rank 2 .* node-b"):
        start(tmp_path, 0)
