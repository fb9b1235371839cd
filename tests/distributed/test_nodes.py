"""What torchrun itself does: it is killed, or a machine of several is lost and comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardflow.config import load_config
from shardflow.logs import read_events
from shardflow.training.config import TrainConfig
from shardflow.training.ledger import compare_ledgers, read_records
from shardflow.training.metrics import read_metrics
from shardflow.training.run import TrainSummary, train
from tests.distributed.launcher import Job, is_gone, job
from tests.tiny_runs import CLASSIFY, TinyInput, make_tiny_input, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(2400)]

DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyInput:
    return make_tiny_input(tmp_path_factory.mktemp("tiny"))


def wait_until(what: str, holds: Callable[[], bool], *jobs: Job) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come\n" + "\n".join(each.wait(1).text for each in jobs))
        time.sleep(0.02)


def train_alone(config: Path, *overrides: str) -> TrainSummary:
    """Run the job on one rank, in this process."""
    return train(load_config(TrainConfig, config, overrides))


def test_ranks_of_a_killed_launcher_stop_with_a_checkpoint_and_free_the_run(
    tiny: TinyInput, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = {"run.num_epochs": 4000, "run.checkpoint_every_steps": 1000}
    config = write_config(tiny, tmp_path / "train.toml", run, settings, file=CLASSIFY)
    with job(tmp_path, "shardflow.training", [f"--config={config}"], num_ranks=2) as running:
        wait_until("step 3", lambda: len(read_metrics(run)) >= 3, running)
        pids = list(running.rank_pids().values())
        try:
            running.process.kill()
            wait_until("the end of the ranks", lambda: all(map(is_gone, pids)))
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    done = len(read_records(run))
    assert done >= 3
    again = train_alone(config, f"run.max_steps={done + 4}")
    assert (again.resumed_from, again.global_step) == (f"step-{done:08d}", done + 4)
    train_alone(config, f"run.max_steps={done + 4}", f"run.output={tmp_path / 'whole'}")
    assert list(compare_ledgers(read_records(run), read_records(tmp_path / "whole"))) == []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def world_sizes(run: Path) -> list[int]:
    """World size of each attempt that wrote something."""
    files = sorted(run.glob("ledger/attempt-*/rank-00000.jsonl"))
    headers = (next(read_events(path), None) for path in files)
    return [header["world_size"] for header in headers if header is not None]


@pytest.mark.slow
def test_job_goes_on_without_a_node_that_dies_and_with_it_once_it_is_back(
    tiny: TinyInput, tmp_path: Path
) -> None:
    """Two torchrun agents on the loopback as two nodes; one is killed with all its processes."""
    run = tmp_path / "run"
    settings = {
        "run.num_epochs": 100_000,
        "run.checkpoint_every_steps": 20,
        "timeouts.lost_s": 5,
        "run.tensorboard": "false",
    }
    config = write_config(tiny, tmp_path / "train.toml", run, settings)
    options = [
        "--nnodes=1:2",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--local-addr=127.0.0.1",
        "--rdzv-id=two-nodes",
        "--rdzv-conf=last_call_timeout=3",
        "--max-restarts=10",
        "--monitor-interval=0.2",
    ]

    def node(name: str) -> contextlib.AbstractContextManager[Job]:
        return job(
            tmp_path / name,
            "shardflow.training",
            [f"--config={config}"],
            num_ranks=1,
            options=options,
            standalone=False,
            passes_codes=True,
        )

    def grows(sizes: list[int]) -> Callable[[], bool]:
        def holds() -> bool:
            return world_sizes(run)[-1:] == sizes and len(read_metrics(run)) >= seen + 10

        seen = len(read_metrics(run))
        return holds

    with node("first") as first:
        with node("second") as second:
            wait_until("both nodes", grows([2]), first, second)
            second.kill()
        wait_until("the first node alone", grows([1]), first)
        with node("third") as third:
            wait_until("both nodes again", grows([2]), first, third)
            first.process.send_signal(signal.SIGTERM)
            finished = first.wait(DEADLINE_S)
    assert finished.exit_code == 75, finished.text
    done = len(read_records(run))
    train_alone(config, f"run.max_steps={done}", f"run.output={tmp_path / 'whole'}")
    assert list(compare_ledgers(read_records(run), read_records(tmp_path / "whole"))) == []
