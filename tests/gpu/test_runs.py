"""Whole runs on a GPU, with NCCL: every precision, whole and sharded, stopped and gone on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardflow.training.checkpoint.files import read_checkpoint
from shardflow.training.metrics import read_metrics
from shardflow.training.run import train
from tests.tiny_runs import TinyInput, make_tiny_input, tiny_config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyInput:
    return make_tiny_input(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_trains_and_goes_on(tiny: TinyInput, tmp_path: Path, precision: str, strategy: str) -> None:
    settings = ("run.device=cuda", f"run.precision={precision}", f"parallel.strategy={strategy}")
    train(tiny_config(tiny, tmp_path, *settings, "run.max_steps=4"))
    summary = train(tiny_config(tiny, tmp_path, *settings, "run.max_steps=8"))
    assert (summary.resumed_from, summary.global_step) == ("step-00000004", 8)
    losses = [line["loss"] for line in read_metrics(tmp_path)]
    assert losses[-1] < losses[0]
    checkpoint = read_checkpoint(tmp_path / "checkpoints" / "step-00000008")
    assert all(tensor.dtype == torch.float32 for tensor in checkpoint.model.values())
    assert all(line["stall_s"] < 0.6 for line in read_metrics(tmp_path, "checkpoint")[1:])


def test_a_checkpoint_of_a_gpu_goes_on_on_the_cpu(tiny: TinyInput, tmp_path: Path) -> None:
    train(tiny_config(tiny, tmp_path, "run.device=cuda", "run.max_steps=4"))
    assert train(tiny_config(tiny, tmp_path, "run.device=cpu", "run.max_steps=6")).global_step == 6
