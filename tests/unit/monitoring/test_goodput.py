"""Where a run's time went, from what its starts have measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.errors import ConfigError
from shardflow.logs import EventLog
from shardflow.monitoring.goodput import Goodput, measure_goodput
from shardflow.monitoring.history import METRICS_FILE

pytestmark = pytest.mark.fast


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Run:
    """Writes what a run would have measured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.log = EventLog(folder / METRICS_FILE, clock=self.clock)

    def start(self, at_step: int, *, after_s: float = 0.0) -> None:
        self.clock.now += after_s
        self.log.write("attempt", attempt=1, start=at_step)

    def step(self, number: int, seconds: float, wait: float = 0.0) -> None:
        self.clock.now += seconds
        self.log.write("step", attempt=1, global_step=number, step_s=seconds, data_wait_s=wait)

    def checkpoint(self, number: int, seconds: float) -> None:
        self.clock.now += seconds
        self.log.write("checkpoint", attempt=1, global_step=number, stall_s=seconds)

    def evaluation(self, number: int, seconds: float) -> None:
        self.clock.now += seconds
        self.log.write("evaluation", attempt=1, global_step=number, evaluation_s=seconds)

    def measured(self) -> Goodput:
        self.log.close()
        return measure_goodput(self.folder)


def test_a_run_without_a_stop_is_steps_and_waits(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start(0)
    run.clock.now += 2.0  # the first batch, the model
    for number in range(4):
        run.step(number, 3.0, wait=1.0)
    run.checkpoint(4, 0.5)
    run.evaluation(4, 1.5)
    found = run.measured()
    assert found == Goodput(
        wall_s=16.0,
        useful_s=8.0,
        data_wait_s=4.0,
        checkpoint_s=0.5,
        evaluation_s=1.5,
        restart_s=2.0,
        lost_s=0.0,
        other_s=0.0,
        num_starts=1,
        num_steps=4,
        num_lost_steps=0,
    )
    assert found.useful_share == 0.5


def test_work_behind_the_checkpoint_is_lost_and_the_pause_is_a_restart(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.start(0)
    run.step(0, 1.0)
    run.step(1, 1.0)
    run.checkpoint(2, 0.25)  # counts two steps
    run.step(2, 1.0)
    run.step(3, 1.0)
    run.evaluation(4, 0.5)
    run.start(2, after_s=30.0)  # killed, and started from the checkpoint
    run.clock.now += 5.0
    run.step(2, 1.0)
    found = run.measured()
    assert (found.num_starts, found.num_steps, found.num_lost_steps) == (2, 3, 2)
    assert found.lost_s == 2.5
    assert found.restart_s == 35.0
    assert found.checkpoint_s == 0.25
    assert found.useful_s == 3.0
    assert found.wall_s == pytest.approx(found.useful_s + found.lost_s + found.restart_s + found.checkpoint_s)


@given(st.lists(st.tuples(st.floats(0.01, 9.0), st.floats(0.0, 1.0), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=50)
def test_the_parts_add_up(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, float, bool]]
) -> None:
    run = Run(tmp_path_factory.mktemp("run"))
    run.start(0)
    number = saved = 0
    for seconds, share, is_killed in steps:
        run.step(number, seconds, wait=share * seconds)
        number += 1
        if number % 3 == 0:
            run.checkpoint(number, 0.1)
            saved = number
        if is_killed:
            run.start(saved, after_s=2.0)
            number = saved
    found = run.measured()
    parts = (
        found.useful_s
        + found.data_wait_s
        + found.checkpoint_s
        + found.evaluation_s
        + found.restart_s
        + found.lost_s
    )
    assert parts + found.other_s == pytest.approx(found.wall_s, abs=1e-3)
    assert 0.0 <= found.useful_share <= 1.0
    assert found.num_steps == number or not found.num_steps


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        measure_goodput(tmp_path)
