"""``shardflow verdict`` on what a run has measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.cli import main as cli
from shardflow.logs import EventLog
from tests.interval_factory import make_interval
from tests.run_factory import write_run

pytestmark = pytest.mark.fast


def _write(folder: Path, num_healthy: int, num_slow: int) -> Path:
    log = EventLog(folder / "metrics.jsonl")
    log.write("attempt", attempt=1, start=0)
    healthy = make_interval()
    slow = make_interval(wait=0.8, stages={"idle": 0.0, "decode": 1.7}, cpu=1.0, num_cpus=8)
    for number, interval in enumerate([healthy] * num_healthy + [slow] * num_slow):
        written = replace(interval, global_step=10 * number + 9, is_warm_up=number == 0)
        log.write("interval", attempt=1, **written.to_json())
    log.close()
    return folder


def test_a_verdict_in_words_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _write(tmp_path, 4, 8)
    assert cli.main(["verdict", str(run)]) == 0
    text = capsys.readouterr().out
    assert "Decode-bound: 6" in text
    assert "Processors are free: loader.num_threads 2 -> 4. (about 100% faster)" in text
    assert cli.main(["verdict", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdicts"][0]["code"] == "decode-bound"
    assert found["verdicts"][0]["advice"][0] == {
        "text": "Processors are free: loader.num_threads 2 -> 4.",
        "setting": "loader.num_threads",
        "old": "2",
        "new": "4",
        "gain": 1.0,
    }
    assert [(one["code"], one["first_step"]) for one in found["stretches"]] == [
        ("compute-bound", 0),
        ("decode-bound", 40),
    ]


@pytest.mark.parametrize(
    ("bound", "code"),
    [
        ("data", "storage-bound"),
        ("compute", "compute-bound"),
        ("exchange", "exchange-bound"),
        ("straggler", "straggler"),
    ],
)
def test_generated_runs(bound: str, code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", bound=bound)  # type: ignore[arg-type]
    assert cli.main(["verdict", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdicts"][0]["code"] == code


def test_too_little_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verdict", str(_write(tmp_path, 1, 0))]) == cli.EXIT_CONFIGURATION
    assert "the 1 intervals of this RUN are too few" in capsys.readouterr().err
