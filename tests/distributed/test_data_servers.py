"""A training job whose data servers are killed and added all the time trains the same weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shardflow.monitoring.history import read_history
from shardflow.training.metrics import read_metrics
from tests.distributed.data_servers import Chaos, server_processes
from tests.distributed.launcher import job
from tests.distributed.runs import committed_samples, differing_weights
from tests.tiny_runs import make_tiny_input, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]
RUN_TIMEOUT_S = 900.0
NUM_EPOCHS = 8


def test_two_ranks_train_the_same_weights_while_servers_die(tmp_path: Path) -> None:
    tiny = make_tiny_input(tmp_path / "tiny")
    file = tmp_path / "servers"
    served = {
        "loader.execution": "service",
        "loader.servers": [f"@{file}"],
        "loader.server_timeout_s": 5.0,
    }
    runs: dict[str, dict[str, Any]] = {"threads": {}, "service": served}
    with server_processes(str(tiny.dataset)) as processes:
        chaos = Chaos(processes, file, num_kills=100, seed=1)
        for name, settings in runs.items():
            config = write_config(
                tiny, tmp_path / f"{name}.toml", tmp_path / name, {"run.num_epochs": NUM_EPOCHS, **settings}
            )
            with job(tmp_path, "shardflow.training", [f"--config={config}"], num_ranks=2) as running:
                while settings and not chaos.is_alive() and running.process.poll() is None:
                    if read_metrics(tmp_path / name):  # not before there is anything to disturb
                        chaos.start()
                    time.sleep(0.05)
                finished = running.wait(RUN_TIMEOUT_S)
            assert finished.exit_code == 0, finished.text
        num_killed = chaos.num_killed  # while it trained
        chaos.is_over.set()
        chaos.join()
    assert committed_samples(tmp_path / "service") == committed_samples(tmp_path / "threads")
    assert differing_weights(tmp_path / "service", tmp_path / "threads") == []
    assert num_killed
    asked = [one.stages.get("service") for _, one in read_history(tmp_path / "service").intervals]
    assert sum(one.num_items for one in asked if one is not None) > 0
