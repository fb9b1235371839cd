"""Verdicts beside a run that goes on: what is written, what is said, and how often."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.monitoring.history import read_settings
from shardflow.monitoring.verdict.judging import VerdictReporter
from shardflow.telemetry import Interval, Verdict
from tests.interval_factory import make_interval

pytestmark = pytest.mark.fast

_HEALTHY = make_interval()
_STORAGE = make_interval(wait=0.6, stages={"idle": 0.0, "read": 1.7})


class _Run:
    """A watch, its clock, and what it wrote."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.written: list[Verdict] = []
        self.watch = VerdictReporter(self.written.append, clock=lambda: self.now_s)
        self._number = 0

    def goes_on(self, *intervals: Interval) -> None:
        for interval in intervals:
            is_first = self._number == 0
            self.watch.measured(replace(interval, global_step=10 * self._number + 9, is_warm_up=is_first))
            self._number += 1
            self.now_s += 5.0

    @property
    def codes(self) -> list[str]:
        return [one.code for one in self.written]


def test_the_first_verdict_comes_within_a_minute_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardflow")
    run = _Run()
    run.goes_on(_STORAGE)
    assert run.codes == []
    run.goes_on(_STORAGE)
    assert run.codes == ["storage-bound"]
    run.goes_on(*[_STORAGE] * 9)
    assert run.codes == ["storage-bound"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Storage-bound: 5")
    assert "loader.num_threads 2 -> 4" in line
    run.goes_on(*[_STORAGE] * 3)
    assert run.codes == ["storage-bound", "storage-bound"]
    assert len(caplog.records) == 1


def test_one_odd_interval_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardflow")
    odd = make_interval(wait=0.9, stages={"idle": 0.0, "read": 1.7})
    run = _Run()
    run.goes_on(*[_HEALTHY] * 4, odd)
    assert run.codes == ["compute-bound"]
    run.goes_on(odd)
    assert run.codes[:2] == ["compute-bound", "storage-bound"]


def test_a_change_is_written_at_once_and_said_when_it_was_quiet_long_enough(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "shardflow")
    run = _Run()
    run.goes_on(*[_HEALTHY] * 4)
    run.goes_on(*[_STORAGE] * 4)
    assert run.watch.verdicts[0].code == "storage-bound"
    assert len(caplog.records) == 1
    run.goes_on(*[_STORAGE] * 6)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "Compute-bound",
        "Storage-bound",
    ]


def test_settings_of_a_run_folder(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == {}
    (tmp_path / "resolved_config.toml").write_text('[loader]\nnum_threads = 2\n[run]\ndevice = "cpu"\n')
    assert read_settings(tmp_path) == {"loader.num_threads": 2, "run.device": "cpu"}
