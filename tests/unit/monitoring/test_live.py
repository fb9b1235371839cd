"""The live state of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardflow.logs import EventLog
from shardflow.monitoring import read_history
from shardflow.monitoring.goodput import measure_goodput
from shardflow.monitoring.history import METRICS_FILE
from shardflow.monitoring.live import Curve, LiveRun, LiveView
from tests.run_factory import write_run

pytestmark = pytest.mark.fast


def at_end(folder: Path, *, after_s: float = 0.4) -> LiveView:
    return LiveRun(folder).follow(read_history(folder).last_event_s + after_s)


def test_numbers_of_the_moment(tmp_path: Path) -> None:
    view = at_end(write_run(tmp_path / "run", bound="data", num_steps=110, planned_steps=500))
    assert (view.name, view.state, view.num_done, view.num_steps, view.epoch) == (
        "run",
        "running",
        110,
        500,
        3,
    )
    assert view.steps_per_s == pytest.approx(1 / 0.97, rel=0.03)
    assert view.tokens_per_s == pytest.approx(4096 / 0.97, rel=0.03)
    assert view.wait_share == pytest.approx(0.6 / 0.97)
    assert [verdict.code for verdict in view.verdicts] == ["storage-bound"]
    assert view.verdict_since == 9
    assert view.evaluation is not None
    assert view.evaluation["global_step"] == 90
    # A step takes 0.97 s; every 25th is followed by 0.2 s of checkpoint, every 30th by 1 s of evaluation.
    assert view.left_s == pytest.approx(390 * (0.97 + 0.2 / 25 + 1 / 30), rel=0.02)


def test_the_rest_of_a_run_is_not_what_its_steps_are_like(tmp_path: Path) -> None:
    """The last interval of a run may be a step whose data was ready: the picture is of the one before."""
    folder = write_run(tmp_path / "run", bound="data", num_steps=60)
    whole = read_history(folder).intervals[-1][1]
    rest = replace(whole, global_step=whole.global_step + 1, num_steps=1, step_s=0.1, stages={})
    with EventLog(folder / METRICS_FILE) as log:
        log.write("interval", attempt=1, **rest.to_json())
    assert at_end(folder).interval == whole
    long = replace(rest, step_s=whole.step_s)
    with EventLog(folder / METRICS_FILE) as log:
        log.write("interval", attempt=1, **long.to_json())
    assert at_end(folder).interval == long


def test_states(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert LiveRun(folder).follow(1e9).state == "waiting"
    folder.mkdir()
    (folder / METRICS_FILE).touch()
    run = LiveRun(folder)
    assert run.follow(1e9).state == "waiting"
    now_s = 1e9
    log = EventLog(folder / METRICS_FILE, clock=lambda: now_s)
    log.write("attempt", attempt=1, start=0)
    log.write("plan", attempt=1, num_steps=7)
    view = run.follow(now_s + 20)
    assert (view.state, view.age_s, view.num_steps, view.left_s) == ("starting", 20, 7, None)
    assert run.follow(now_s + 3600).state == "silent"
    log.close()
    write_run(tmp_path / "on")
    assert at_end(tmp_path / "on", after_s=8.0).state == "running"
    silent = at_end(tmp_path / "on", after_s=180.0)
    assert (silent.state, silent.age_s, silent.left_s) == ("silent", 180.0, None)
    for outcome in ("finished", "stopped"):
        done = at_end(write_run(tmp_path / outcome, outcome=outcome), after_s=9e6)
        assert done.state == outcome
        assert done.ended_s == read_history(tmp_path / outcome).last_event_s


def test_slow_steps_are_not_silence(tmp_path: Path) -> None:
    log = EventLog(tmp_path / METRICS_FILE, clock=iter([0.5, *range(100, 1000, 100)]).__next__)
    log.write("attempt", attempt=1, start=0)
    line = json.loads((write_run(tmp_path / "like") / METRICS_FILE).read_bytes().splitlines()[1])
    for step in range(4):
        log.write("step", **{**_plain(line), "global_step": step, "step_s": 100.0})
    log.close()
    assert LiveRun(tmp_path).follow(400.0 + 500.0).state == "running"
    assert LiveRun(tmp_path).follow(400.0 + 1500.0).state == "silent"


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in {"event", "time_s"}}


def test_a_restart_shows_what_counts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=60, restart_at=45)
    view = at_end(folder)
    assert view.num_starts == 2
    assert len(view.recent) == 25  # steps 35 to 59 are of this start
    assert view.goodput == measure_goodput(folder)
    assert view.goodput is not None
    assert view.goodput.num_lost_steps == 10
    assert len(view.losses) == 60


def test_what_is_done_again_is_forgotten(tmp_path: Path) -> None:
    log = EventLog(tmp_path / METRICS_FILE, clock=lambda: 1e9)
    line = _plain(json.loads((write_run(tmp_path / "like") / METRICS_FILE).read_bytes().splitlines()[1]))
    for attempt, first, loss in ((1, 0, 9.0), (2, 3, 1.0)):
        log.write("attempt", attempt=attempt, start=first)
        for step in range(first, 5):
            log.write("step", **{**line, "attempt": attempt, "global_step": step, "loss": loss})
    log.close()
    view = LiveRun(tmp_path).follow(1e9)
    assert view.losses == (9.0, 9.0, 9.0, 1.0, 1.0)


def test_a_torn_line_waits_for_its_rest(tmp_path: Path) -> None:
    whole = (write_run(tmp_path / "whole") / METRICS_FILE).read_bytes()
    ends = [at for at, byte in enumerate(whole) if byte == ord("\n")]
    folder = tmp_path / "run"
    folder.mkdir()
    run = LiveRun(folder)
    (folder / METRICS_FILE).write_bytes(whole[: ends[20] + 30])
    before = run.follow(2e9)
    assert before == run.follow(2e9)
    (folder / METRICS_FILE).write_bytes(whole[: ends[21] + 1])
    assert run.follow(2e9).num_done == before.num_done + 1


def test_another_run_in_the_folder_is_begun_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=60, restart_at=45)
    run = LiveRun(folder)
    assert run.follow(2e9).num_done == 60
    away = folder.rename(tmp_path / "away")
    assert run.follow(2e9).state == "waiting"
    away.rename(folder)
    assert run.follow(2e9).num_done == 60
    (folder / METRICS_FILE).unlink()
    assert run.follow(2e9).state == "waiting"
    write_run(folder, num_steps=20)
    view = run.follow(2e9)
    assert (view.num_done, view.num_starts, len(view.losses)) == (20, 1, 20)
    # One that is longer by the next look, too.
    (folder / METRICS_FILE).unlink()
    with EventLog(folder / METRICS_FILE) as log:
        log.write("attempt", attempt=1, start=0)
        for step in range(300):
            log.write("step", attempt=1, global_step=step, step_s=1.0, loss=1.0)
    view = run.follow(2e9)
    assert (view.num_done, view.num_starts, len(view.losses)) == (300, 1, 300)


def test_a_clock_that_is_wrong_is_no_silence(tmp_path: Path) -> None:
    """The viewer's machine is an hour ahead of the run's: lines come, so the run goes on."""
    whole = (write_run(tmp_path / "whole") / METRICS_FILE).read_bytes().splitlines(keepends=True)
    times = [json.loads(line)["time_s"] for line in whole]
    folder = tmp_path / "run"
    folder.mkdir()
    run, hour = LiveRun(folder), 3600.0
    for written in range(30, 36):
        (folder / METRICS_FILE).write_bytes(b"".join(whole[:written]))
        view = run.follow(times[written - 1] + hour)
    assert (view.state, view.age_s) == ("running", 0.0)
    assert run.follow(times[34] + hour + 120).age_s == pytest.approx(120)


def test_memory_is_bounded_for_a_long_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=1100)
    run = LiveRun(folder)
    view = run.follow(read_history(folder).last_event_s)
    assert view.num_done == 1100
    assert len(view.recent) == 512
    assert len(run._history.steps) < 1024
    assert 256 < len(view.losses) <= 512
    assert view.goodput is not None
    assert view.goodput.num_steps == 1100


def test_a_curve_holds_means_of_ever_longer_stretches() -> None:
    curve = Curve(most=4)
    for step in range(8):
        curve.add(step, float(step))
    assert curve.values() == (0.5, 2.5, 4.5, 6.5)
    curve.add(8, None)
    curve.go_back_to(5)
    assert curve.values() == (0.5, 2.5)
