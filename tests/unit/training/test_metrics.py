"""Metrics: a line a step, each step once after any number of restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_no_file_is_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
