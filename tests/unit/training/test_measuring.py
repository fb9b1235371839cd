"""A run in this process that measures itself: what its intervals say, and what they must not say."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from shardflow.format import Dataset
from shardflow.monitoring import read_history
from shardflow.telemetry import Interval, StageCounters
from shardflow.training.checkpoint.files import read_checkpoint
from shardflow.training.interval import HostClock, LastGradient
from shardflow.training.ledger import read_ledger
from shardflow.training.metrics import MetricsWriter, StepMetrics, read_metrics
from shardflow.training.run import train
from tests.distributed.runs import committed_samples, differing_weights
from tests.tiny_runs import TinyInput, tiny_config

SETTINGS = (
    "run.num_epochs=1",
    "data.eval_split=val",
    "run.checkpoint_every_steps=3",
    "run.evaluate_every_steps=3",
)


@pytest.fixture(scope="module")
def measured(tiny: TinyInput, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with an interval for each step or two, and a loader process beside it."""
    output = tmp_path_factory.mktemp("measured") / "run"
    train(tiny_config(tiny, output, *SETTINGS, "monitor.interval_s=0.01", "loader.execution=process"))
    return output


def test_intervals_cover_all_steps_once(measured: Path) -> None:
    intervals = [interval for _, interval in read_history(measured).intervals]
    assert sum(one.num_steps for one in intervals) == 6
    assert [one.is_warm_up for one in intervals] == [True] + [False] * (len(intervals) - 1)
    assert (intervals[0].global_step, intervals[-1].global_step) == (0, 5)
    steps = read_metrics(measured)
    assert sum(one.num_samples for one in intervals) == sum(line["num_samples"] for line in steps)
    assert sum(one.step_s for one in intervals) == pytest.approx(sum(line["step_s"] for line in steps))
    waits = sum(line["data_wait_s"] for line in steps)
    assert sum(one.slowest_wait_s for one in intervals) == pytest.approx(waits)
    assert all(one.total_steps == 6 for one in intervals)


def test_the_parts_of_steps_add_up_to_them(measured: Path) -> None:
    intervals = [interval for _, interval in read_history(measured).intervals]
    parts = ("data_wait", "forward", "backward", "exchange", "optimizer", "agree")
    inside = sum(one.stage(name).seconds for one in intervals for name in parts)
    step_s = sum(one.step_s for one in intervals)
    # What is missing is the ledger's and the bookkeeping's, which a busy machine may stretch.
    assert 0.5 * step_s < inside <= step_s
    assert sum(one.stage("exchange").num_items for one in intervals) == 0  # one rank exchanges nothing
    assert sum(one.stage("forward").num_items for one in intervals) == 24
    assert sum(one.stage("optimizer").num_items for one in intervals) == 6
    # Those after the last step are in no interval.
    assert sum(one.stage("checkpoint").num_items for one in intervals) == 1
    assert sum(one.stage("evaluate").num_items for one in intervals) == 1
    outside = sum(one.stage(name).seconds for one in intervals for name in ("checkpoint", "evaluate"))
    assert step_s + outside <= sum(one.wall_s for one in intervals) * 1.01


def test_the_loader_beside_the_run_is_measured_too(measured: Path) -> None:
    intervals = [interval for _, interval in read_history(measured).intervals]
    for name in ("read", "decode", "collate", "tokenize", "data_wait"):
        assert sum(one.stage(name).num_items for one in intervals) >= 24, name
    last = intervals[-1]
    assert last.ranks[0].pss_bytes > 0
    assert last.settings["loader.execution"] == "process"
    assert last.settings["loader.num_threads"] == 1
    assert (last.tier, last.world_size) == ("local", 1)
    assert any("threads_busy" in one.gauges for one in intervals)


def test_measuring_changes_nothing_that_is_trained_and_can_be_left_out(
    measured: Path, tiny: TinyInput, tmp_path: Path
) -> None:
    train(tiny_config(tiny, tmp_path, *SETTINGS, "monitor.interval_s=0"))
    assert read_metrics(tmp_path, "interval") == []
    mine, other = (
        read_checkpoint(run / "checkpoints" / "step-00000006").model for run in (measured, tmp_path)
    )
    assert mine.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())


def test_a_run_that_can_write_no_measurement_trains_the_same(
    measured: Path, tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan = MetricsWriter.write_plan

    def fill_the_disk(self: MetricsWriter, num_steps: int) -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, self._log._descriptor)
        os.close(full)
        write_plan(self, num_steps)

    def remove_the_cache(metrics: StepMetrics, num_steps: int) -> None:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    monkeypatch.setattr(MetricsWriter, "write_plan", fill_the_disk)
    config = tiny_config(
        tiny,
        tmp_path / "run",
        *SETTINGS,
        "monitor.interval_s=0.01",
        f"cache.directory={tmp_path / 'cache'}",
        "cache.max_bytes=10MiB",
        "cache.min_free_bytes=0",
    )
    summary = train(config, on_step=remove_the_cache)
    assert (summary.outcome, summary.global_step) == ("finished", 6)
    assert not read_metrics(tmp_path / "run")
    assert committed_samples(tmp_path / "run") == committed_samples(measured)
    assert differing_weights(tmp_path / "run", measured) == []


def test_no_line_names_a_patient_a_sample_or_a_path(measured: Path, tiny: TinyInput) -> None:
    dataset = Dataset.open(tiny.dataset)
    text = "\n".join(
        line for line in (measured / "metrics.jsonl").read_text().splitlines() if '"interval"' in line
    )
    assert json.loads(text.splitlines()[0])["event"] == "interval"
    keys = {key for one in read_ledger(measured) for micro in one.micro_batches for key in micro.keys if key}
    assert len(keys) == 24
    assert not [key for key in keys if key in text]
    for path in (tiny.dataset, measured):
        assert str(path) not in text
    for shard in dataset.manifest.shards:
        assert shard.name not in text


def step(number: int) -> StepMetrics:
    return StepMetrics(
        global_step=number,
        epoch=0,
        step=number,
        loss=1.0,
        num_tokens=1.0,
        num_samples=1.0,
        learning_rate=0.1,
        gradient_norm=1.0,
        num_skipped=0,
        loss_scale=1.0,
        step_s=1.0,
        data_wait_s=0.0,
        mean_data_wait_s=0.0,
    )


def test_a_restart_supersedes_the_intervals_of_steps_that_it_does_again(tmp_path: Path) -> None:
    def write(attempt: int, start: int, last_steps: list[int]) -> None:
        writer = MetricsWriter(tmp_path, attempt=attempt, start=start, tensorboard=False)
        for last in last_steps:
            writer.write_step(step(last))
            writer.write_interval(Interval(global_step=last, num_steps=1, wall_s=float(attempt)))
        writer.close()

    write(1, 0, [0, 1, 2, 3])
    write(2, 2, [2, 3, 4])
    expected = [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]
    lines = read_metrics(tmp_path, "interval")
    assert [(line["global_step"], line["wall_s"]) for line in lines] == expected
    intervals = [one for _, one in read_history(tmp_path).intervals]
    assert [(one.global_step, one.wall_s) for one in intervals] == expected


# ---- the clock of a step -------------------------------------------------------------------------


class Noting(HostClock):
    """A clock that notes how often a gradient came."""

    def __init__(self, counters: StageCounters) -> None:
        super().__init__(counters)
        self.num_gradients = 0

    def on_last_gradient(self) -> None:
        super().on_last_gradient()
        self.num_gradients += 1


@pytest.fixture
def chain() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5))), torch.ones(2, 4)


def test_the_gradient_that_comes_last_is_found_and_then_asked_alone(
    chain: tuple[nn.Module, torch.Tensor],
) -> None:
    model, inputs = chain
    counters = StageCounters()
    clock = Noting(counters)
    last = LastGradient(model, clock)
    for expected in (5, 1, 1):
        clock.num_gradients = 0
        clock.on_forward()
        loss = model(inputs).sum()
        clock.on_backward(is_exchanged=True)
        last.on_backward(is_exchanged=True)
        loss.backward()
        last.on_backward_end()
        clock.on_backward_end()
        assert clock.num_gradients == expected
    # The first layer's weight is the last that a backward reaches.
    assert last._last is next(model.parameters())
    last.search_again()
    clock.num_gradients = 0
    last.on_backward(is_exchanged=True)
    model(inputs).sum().backward()
    last.on_backward_end()
    assert clock.num_gradients == 5
    assert [counters.totals(name).num_items for name in ("forward", "backward", "exchange")] == [3, 3, 3]
    # Nothing stays behind on the parameters.
    clock.num_gradients = 0
    model(inputs).sum().backward()
    assert clock.num_gradients == 0


def test_a_backward_that_nobody_watches_has_no_exchange(chain: tuple[nn.Module, torch.Tensor]) -> None:
    model, inputs = chain
    counters = StageCounters()
    clock = HostClock(counters)
    clock.on_forward()
    loss = model(inputs).sum()
    clock.on_backward(is_exchanged=True)
    loss.backward()
    clock.on_backward_end()
    assert [counters.totals(name).num_items for name in ("forward", "backward", "exchange")] == [1, 1, 0]
