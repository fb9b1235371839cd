"""``shardflow goodput`` on what a run has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardflow.cli import main as cli
from shardflow.logs import EventLog

pytestmark = pytest.mark.fast


def test_goodput_in_words_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([100.0, 104.0, 107.0])
    log = EventLog(tmp_path / "metrics.jsonl", clock=lambda: next(times))
    log.write("attempt", attempt=1, start=0)
    log.write("step", attempt=1, global_step=0, step_s=3.0, data_wait_s=1.0)
    log.write("step", attempt=1, global_step=1, step_s=3.0, data_wait_s=0.5)
    log.close()
    assert cli.main(["goodput", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "64.3% useful of 7.0 s in 1 start; 2 steps that count, 0 done again." in text
    assert "waiting for data in them" in text
    assert cli.main(["goodput", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["useful_s"] == 4.5


def test_goodput_of_no_run_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["goodput", str(tmp_path)]) == cli.EXIT_CONFIGURATION
    assert "must be the folder of a training run" in capsys.readouterr().err
