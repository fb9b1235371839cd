"""A training run on GPUs: NCCL, the pinned ring, the look-ahead; judged by the same run on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardflow.training.ledger import read_ledger
from shardflow.training.metrics import read_metrics
from tests.distributed.launcher import job
from tests.tiny_runs import TinyInput, make_tiny_input, write_config

pytestmark = pytest.mark.gpu

WAIT_S = 300
SETTINGS: dict[str, object] = {"run.max_steps": 6, "batch.micro_batch_size": 2, "model.dropout": 0.0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyInput:
    return make_tiny_input(tmp_path_factory.mktemp("tiny"))


def train(tiny: TinyInput, folder: Path, name: str, num_ranks: int, **settings: object) -> Path:
    given = {key.replace("__", "."): value for key, value in settings.items()}
    config = write_config(tiny, folder / f"{name}.toml", folder / name, {**SETTINGS, **given})
    (folder / "logs" / name).mkdir(parents=True)
    arguments = ["--config", str(config)]
    with job(
        folder / "logs" / name, "shardflow.training", arguments, num_ranks=num_ranks, warnings="default"
    ) as running:
        finished = running.wait(WAIT_S)
    assert finished.exit_code == 0, finished.text
    return folder / name


@pytest.mark.parametrize("packed", ["false", "true"])
def test_a_run_on_gpus_is_that_of_a_cpu_to_rounding(tiny: TinyInput, tmp_path: Path, packed: str) -> None:
    num_ranks = min(2, torch.cuda.device_count())
    cpu = train(tiny, tmp_path, "cpu", 1, run__device="cpu", batch__packed=packed)
    gpu = train(tiny, tmp_path, "gpu", num_ranks, run__device="cuda", batch__packed=packed)
    for one, other in zip(read_metrics(cpu), read_metrics(gpu), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-2)
        assert other["num_tokens"] == one["num_tokens"]
        assert 0 <= other["data_wait_s"] <= other["step_s"] * 1.5
    samples = [[(step.global_step, step.micro_batches) for step in read_ledger(run)] for run in (cpu, gpu)]
    assert samples[0] == samples[1]


def test_a_stop_between_steps_loses_nothing_that_was_sent_ahead(tiny: TinyInput, tmp_path: Path) -> None:
    whole = train(tiny, tmp_path, "whole", 1, run__device="cuda")
    train(tiny, tmp_path, "parts", 1, run__device="cuda", run__max_steps=3)
    parts = tmp_path / "parts"
    config = write_config(
        tiny, tmp_path / "again.toml", parts, {**SETTINGS, "run.device": "cuda", "run.max_steps": 6}
    )
    (tmp_path / "logs" / "again").mkdir()
    with job(
        tmp_path / "logs" / "again", "shardflow.training", ["--config", str(config)], num_ranks=1
    ) as running:
        assert running.wait(WAIT_S).exit_code == 0
    assert [step.micro_batches for step in read_ledger(parts)] == [
        step.micro_batches for step in read_ledger(whole)
    ]
