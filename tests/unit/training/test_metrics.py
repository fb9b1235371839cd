"""Metrics: a line a step, each step once after any number of restarts."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.logs import read_events
from shardflow.monitoring.run_page.reading import read_run
from shardflow.telemetry import Interval, Move, StageCounters, Verdict
from shardflow.training.interval import CacheUse
from shardflow.training.metrics import EvaluationMetrics, MetricsWriter, StepMetrics, read_metrics

pytestmark = pytest.mark.fast


def step(number: int, loss: float) -> StepMetrics:
    return StepMetrics(
        global_step=number,
        epoch=0,
        step=number,
        loss=loss,
        num_tokens=10.0,
        num_samples=2.0,
        learning_rate=0.1,
        gradient_norm=1.0,
        num_skipped=0,
        loss_scale=1.0,
        step_s=0.5,
        data_wait_s=0.1,
        mean_data_wait_s=0.05,
    )


def evaluation(number: int, loss: float) -> EvaluationMetrics:
    return EvaluationMetrics(
        global_step=number, epoch=0, loss=loss, num_tokens=1.0, num_samples=1.0, evaluation_s=0.1
    )


def test_restart_supersedes_what_it_does_again(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path, attempt=1, start=0, tensorboard=False)
    for number in range(4):
        first.write_step(step(number, 1.0))
    first.write_evaluation(evaluation(2, 1.0))
    first.write_evaluation(evaluation(4, 1.0))
    first.close()
    second = MetricsWriter(tmp_path, attempt=2, start=2, tensorboard=False)
    second.write_step(step(2, 2.0))
    second.close()
    # Step 3 of the first attempt is not part of the run any more; the evaluation after two steps is.
    assert [(line["global_step"], line["loss"]) for line in read_metrics(tmp_path)] == [
        (0, 1.0),
        (1, 1.0),
        (2, 2.0),
    ]
    assert [line["global_step"] for line in read_metrics(tmp_path, "evaluation")] == [2]


def test_line_has_what_issue_and_docs_promise(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, attempt=1, start=0, tensorboard=False)
    writer.write_step(step(0, float("nan")))
    writer.close()
    (line,) = read_metrics(tmp_path)
    assert line["loss"] is None  # JSON has no nan, and a log must not stop a run
    assert {
        "loss",
        "num_tokens",
        "data_wait_s",
        "step_s",
        "learning_rate",
        "gradient_norm",
        "epoch",
        "step",
    } <= set(line)


def test_length_and_end_of_a_run_are_lines(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, attempt=3, start=0, tensorboard=False)
    writer.write_plan(70)
    writer.write_end("stopped", global_step=12)
    writer.close()
    _, plan, end = read_events(tmp_path / "metrics.jsonl")
    assert (plan["event"], plan["attempt"], plan["num_steps"]) == ("plan", 3, 70)
    assert (end["event"], end["outcome"], end["global_step"]) == ("end", "stopped", 12)


def test_a_start_says_what_it_ran_with(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, attempt=1, start=0, tensorboard=False, device="cpu").close()
    (line,) = read_events(tmp_path / "metrics.jsonl")
    assert line["device"] == "cpu"
    assert set(line["versions"]) == {"shardflow", "torch"}
    surroundings = read_run(tmp_path).environment
    assert surroundings == line["versions"] | {"device": "cpu"}


def test_numbers_of_a_cache_are_keys_of_the_line(tmp_path: Path) -> None:
    counters = StageCounters()
    counters.add("cache_disk", 0.1, num_bytes=5, num_items=1)
    use = CacheUse(counters)
    counters.add("cache_disk", 0.5, num_bytes=700, num_items=2)
    counters.add("cache_wait", 0.25, num_items=3)
    writer = MetricsWriter(tmp_path, attempt=1, start=0, tensorboard=False)
    writer.write_step(replace(step(0, 1.0), cache=use.since()))
    writer.write_step(replace(step(1, 1.0), cache=use.since()))
    writer.write_step(step(2, 1.0))
    writer.close()
    first, second, third = read_metrics(tmp_path)
    names = ("cache_disk_blocks", "cache_disk_bytes", "cache_waits", "cache_wait_s", "cache_origin_bytes")
    assert [first[name] for name in names] == [2, 700, 3, 0.25, 0]
    assert [second[name] for name in names] == [0] * 5
    assert not [name for name in third if name.startswith("cache")]


class _Broken:
    """A writer of TensorBoard whose disk is full, or hangs."""

    def __init__(self, fails_at: str, release: threading.Event) -> None:
        self._fails_at, self._release = fails_at, release

    def add_scalar(self, *_: object) -> None:
        if self._fails_at == "add":
            raise OSError("/secret/place is full")

    def close(self) -> None:
        if self._fails_at == "close":
            raise OSError("/secret/place is full")
        if self._fails_at == "hang":
            self._release.wait()


@pytest.mark.parametrize(
    ("fails_at", "said"),
    [
        ("add", "TensorBoard failed (OSError) and gets no more numbers"),
        ("close", "TensorBoard failed (OSError) and gets no more numbers"),
        ("hang", "TensorBoard did not take the last numbers within 0 s"),
    ],
)
def test_a_tensorboard_that_fails_or_hangs_costs_a_warning(
    fails_at: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", lambda *_, **__: _Broken(fails_at, release))
    monkeypatch.setattr("shardflow.training.metrics.CLOSE_S", 0.1)
    writer = MetricsWriter(tmp_path, attempt=1, start=0, tensorboard=True)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            writer.write_step(step(number, 1.0))
        writer.close()
    release.set()
    assert [record.getMessage() for record in caplog.records] == [said]
    assert len(read_metrics(tmp_path)) == 3


@contextmanager
def full_disk(writer: MetricsWriter) -> Iterator[None]:
    """Let what is written meet a full disk, the kernel's own."""
    descriptor = writer._log._descriptor
    kept, full = os.dup(descriptor), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(full)


def test_lines_that_find_a_full_disk_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path, attempt=1, start=0, tensorboard=False)
    writer.write_step(step(0, 1.0))
    with full_disk(writer):
        writer.write_step(step(1, 1.0))
        writer.write_interval(Interval(global_step=1, num_steps=1))
        writer.write_move(Move(global_step=1, kind="settle", text="settled"))
        writer.write_verdict(Verdict(global_step=1, code="idle", text="nothing"))
        writer.write_evaluation(evaluation(2, 1.0))
        writer.write_plan(9)
        writer.write_end("stopped", global_step=2)
    assert writer.num_lost == 7
    writer.write_step(step(2, 1.0))
    writer.close()
    assert [line["global_step"] for line in read_metrics(tmp_path)] == [0, 2]
    first, second = (record.message for record in caplog.records)
    assert "No space left on device" in first
    assert "7 lines of it are lost" in second


def test_no_file_is_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
