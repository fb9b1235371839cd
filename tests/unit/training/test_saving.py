"""Checkpoints beside the steps, on one rank: what is written is what stood when they were begun."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardflow.errors import CheckpointError, WaitTimeoutError
from shardflow.training.checkpoint.files import CheckpointFolder, read_checkpoint
from shardflow.training.checkpoint.saving import CheckpointSaver, SavingStage
from shardflow.training.checkpoint.tensors import load_model, load_optimizer
from shardflow.training.config import TimeoutConfig
from shardflow.training.distributed import Ranks, join_ranks
from shardflow.training.metrics import CheckpointMetrics
from shardflow.training.rates import OptimizerConfig
from shardflow.training.step import build_optimizer
from tests.tiny_models import model_tensors, optimizer_tensors

WAIT = 60.0


class HeldFolder(CheckpointFolder):
    """A folder on a disk that takes its time: nothing is written before ``released``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, keep_last=2)
        self.released = threading.Event()
        self.full_disk = False

    def write_part(self, unfinished: Path, global_step: int, **parts: Any) -> dict[str, Any]:
        assert self.released.wait(300)
        if self.full_disk:
            raise CheckpointError(f"checkpoint step-{global_step:08d} could not be written: a full disk.")
        return super().write_part(unfinished, global_step, **parts)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with join_ranks("cpu", TimeoutConfig(startup_s=WAIT, steady_s=WAIT, control_s=WAIT, hang_s=0)) as joined:
        yield joined


@pytest.fixture
def folder(tmp_path: Path) -> HeldFolder:
    return HeldFolder(tmp_path / "checkpoints")


class Run:
    """A model that trains, and its saver."""

    def __init__(self, ranks: Ranks, folder: CheckpointFolder, *, is_sharded: bool = False) -> None:
        torch.manual_seed(1)
        self.ranks, self.folder = ranks, folder
        self.model = nn.Linear(3, 4)
        self.optimizer = build_optimizer(self.model, OptimizerConfig(learning_rate=0.1))
        self.saver = CheckpointSaver(folder, ranks, self.model, self.optimizer, is_sharded=is_sharded)
        self.num_steps = 0

    def step(self) -> CheckpointMetrics | None:
        torch.autograd.backward(self.model(torch.ones(2, 3)).square().sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        stages = self.ranks.all_gather_numbers([self.saver.stage], WAIT)[:, 0]
        return self.saver.advance(stages.tolist())

    def begin(self) -> CheckpointMetrics | None:
        return self.saver.begin(
            self.num_steps, facts=[1], state=lambda facts: {"global_step": self.num_steps, "facts": facts}
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        both = model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer)
        return {name: tensor.clone() for name, tensor in both.items()}


def saved(folder: CheckpointFolder, name: str) -> dict[str, torch.Tensor]:
    checkpoint = read_checkpoint(folder.path / name)
    return {**checkpoint.model, **checkpoint.optimizer}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("is_sharded", [False, True])
def test_steps_go_on_and_what_stood_at_the_beginning_is_written(
    ranks: Ranks, folder: HeldFolder, is_sharded: bool
) -> None:
    run = Run(ranks, folder, is_sharded=is_sharded)
    run.step()
    stood = run.tensors()
    assert run.begin() is None
    for _ in range(3):
        assert run.step() is None  # the disk has taken nothing yet
    assert folder.names() == []
    assert run.saver.stage is SavingStage.BUSY
    folder.released.set()
    metrics = run.saver.finish()
    assert metrics is not None
    assert (metrics.global_step, run.saver.stage) == (1, SavingStage.IDLE)
    assert metrics.num_bytes == sum(tensor.nbytes for tensor in stood.values())
    assert_equal(saved(folder, "step-00000001"), stood)
    assert read_checkpoint(folder.path / "step-00000001").state == {"global_step": 1, "facts": [[1]]}


def test_the_end_is_noticed_at_a_step(ranks: Ranks, folder: HeldFolder) -> None:
    run = Run(ranks, folder)
    run.begin()
    assert run.step() is None
    folder.released.set()
    run.saver.close()
    metrics = run.step()
    assert metrics is not None
    assert metrics.global_step == 0
    assert run.step() is None


def test_the_next_checkpoint_waits_for_the_one_before(ranks: Ranks, folder: HeldFolder) -> None:
    run = Run(ranks, folder)
    run.step()
    run.begin()
    run.step()
    threading.Timer(0.2, folder.released.set).start()
    former = run.begin()
    assert former is not None
    assert former.global_step == 1
    stood = run.tensors()
    run.saver.finish()
    assert folder.names() == ["step-00000002", "step-00000001"]
    assert_equal(saved(folder, "step-00000002"), stood)


def test_a_write_that_fails_ends_the_run_at_the_next_step_and_older_ones_stay(
    ranks: Ranks, folder: HeldFolder
) -> None:
    run = Run(ranks, folder)
    folder.released.set()
    run.begin()
    run.saver.finish()
    folder.full_disk = True
    run.step()
    run.begin()
    run.saver.close()
    with pytest.raises(CheckpointError, match="step-00000001 could not be written: a full disk"):
        run.step()
    sound, problems = folder.newest_sound()
    assert sound is not None
    assert (sound.name, problems) == ("step-00000000", [])


def test_a_folder_that_cannot_be_made_is_said_at_once(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    run = Run(ranks, CheckpointFolder(tmp_path / "file", keep_last=2))
    with pytest.raises(CheckpointError, match="could not be written: File exists"):
        run.begin()


def test_a_disk_that_never_answers_is_an_error_after_the_timeout(folder: HeldFolder) -> None:
    short = 0.2
    with join_ranks("cpu", TimeoutConfig(startup_s=WAIT, steady_s=WAIT, control_s=short, hang_s=0)) as ranks:
        run = Run(ranks, folder)
        run.begin()
        with pytest.raises(WaitTimeoutError, match=r"step-00000000 was not written within 0\.2 s"):
            run.saver.finish()
        folder.released.set()
        run.saver.close()


def test_host_buffers_are_used_again(ranks: Ranks, folder: HeldFolder) -> None:
    folder.released.set()
    run = Run(ranks, folder)
    places = []
    for _ in range(3):
        run.step()
        run.begin()
        run.saver.finish()
        places.append({name: t.data_ptr() for name, t in run.saver._snapshot.optimizer.items()})
    assert places[1] == places[2]


def test_a_sharded_checkpoint_of_one_rank_loads_into_a_whole_model(ranks: Ranks, folder: HeldFolder) -> None:
    folder.released.set()
    run = Run(ranks, folder, is_sharded=True)
    run.step()
    run.begin()
    run.saver.finish()
    path = folder.path / "step-00000001"
    assert sorted(entry.name for entry in path.iterdir()) == [
        "model-00000.safetensors",
        "optimizer-00000.safetensors",
        "state.json",
    ]
    other = Run(ranks, folder)
    checkpoint = read_checkpoint(path)
    load_model(other.model, checkpoint.model)
    load_optimizer(other.model, other.optimizer, checkpoint.optimizer)
    assert_equal(other.tensors(), run.tensors())
