"""A run's measurements, read back."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.monitoring import RunHistory, read_history
from shardflow.monitoring.history import METRICS_FILE
from shardflow.telemetry import Interval
from tests.run_factory import write_run

pytestmark = pytest.mark.fast


def test_every_step_once_and_in_order(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "run", num_steps=60, restart_at=45))
    assert [line["global_step"] for line in history.steps] == list(range(60))
    assert [interval.global_step for _, interval in history.intervals] == [9, 19, 29, 39, 49, 59]
    assert [line["global_step"] for line in history.checkpoints] == [25, 50]
    assert len(history.attempts) == 2


def test_an_interval_is_read_back_as_it_was(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "run"))
    _, interval = history.intervals[0]
    assert Interval.from_json(interval.to_json()) == interval
    assert interval.stage("decode").num_items > 0
    assert interval.stage("never").seconds == 0.0


def test_keys_of_another_version_are_left_alone() -> None:
    read = Interval.from_json(
        {"global_step": 3, "num_steps": 1, "new": 1, "stages": {"read": {"seconds": 2.0, "x": 1}}}
    )
    assert read.stage("read").seconds == 2.0
    assert read.ranks == ()


def test_reading_on_is_reading_anew(tmp_path: Path) -> None:
    """At any place that a writer may have come to, also in the middle of a line."""
    whole = (write_run(tmp_path / "whole", restart_at=45) / METRICS_FILE).read_bytes()
    growing = tmp_path / "growing"
    growing.mkdir()
    history = RunHistory(growing)
    (growing / METRICS_FILE).write_bytes(b"")
    for end in [*range(0, len(whole), 997), len(whole)]:
        (growing / METRICS_FILE).write_bytes(whole[:end])
        history.follow()
    assert not history.follow()
    anew = read_history(growing)
    assert (history.steps, history.intervals, history.verdicts) == (anew.steps, anew.intervals, anew.verdicts)


def test_a_folder_without_metrics(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        read_history(tmp_path)


def test_a_run_says_how_long_it_is_and_how_it_ended(tmp_path: Path) -> None:
    history = read_history(write_run(tmp_path / "on", planned_steps=90))
    assert (history.num_planned_steps, history.end) == (90, None)
    history = read_history(write_run(tmp_path / "done", planned_steps=60, outcome="finished"))
    assert history.end is not None
    assert (history.end["outcome"], history.end["global_step"]) == ("finished", 60)
    with (tmp_path / "done" / METRICS_FILE).open("ab") as file:
        file.write(b'{"event":"attempt","time_s":1800000000,"attempt":2,"start":50}\n')
    again = read_history(tmp_path / "done")
    assert again.end is None
    assert again.last_event_s == 1_800_000_000


def test_only_the_newest_records_are_held_where_wanted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=600)
    seen = []
    history = RunHistory(folder, keep=50, on_line=lambda line: seen.append(line.event))
    history.follow()
    assert 50 <= len(history.steps) < 100
    assert history.steps[-50:] == read_history(folder).steps[-50:]
    assert seen.count("step") == 600


def test_lines_with_other_fields_than_theirs_are_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    whole = RunHistory(run)
    whole.follow()
    metrics = run / METRICS_FILE
    odd = [
        '{"event":"interval"}',
        '{"event":"interval","ranks":5}',
        '{"event":"verdict"}',
        '{"event":"step"}',
    ]
    first, *others = metrics.read_text(encoding="utf-8").splitlines()
    metrics.write_text("\n".join([first, *odd, *others, ""]), encoding="utf-8")
    damaged = RunHistory(run)
    damaged.follow()
    assert damaged.intervals == whole.intervals
    assert damaged.verdicts == whole.verdicts
