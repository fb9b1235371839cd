"""The batch scripts of docs/deploy on a real SLURM of two virtual nodes: warned, preempted, cancelled."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardflow.training.metrics import read_metrics
from tests.conftest import REPOSITORY
from tests.deploy.slurm_cluster import Cluster, free_port, running_cluster
from tests.distributed.launcher import job
from tests.distributed.runs import committed_samples, differing_weights
from tests.tiny_runs import make_tiny_input, write_config

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1800)]

SCRIPTS = REPOSITORY / "docs" / "deploy" / "slurm"
WAIT_S = 400.0
NUM_EPOCHS = 40
# Virtual nodes are small, and both are this machine: ranks find each other on its loopback.
PACK_OPTIONS = ("--cpus-per-task=2", "--mem=100")
TRAIN_OPTIONS = ("--cpus-per-task=4", "--mem=100")
VARIABLES = {
    "SHARDFLOW_VENV": str(REPOSITORY / ".venv"),
    "RANKS_PER_NODE": "1",
    "RDZV_HOST": "127.0.0.1",
    "PET_LOCAL_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster; the folder lies directly below /tmp because a socket's path may have 108 characters."""
    with (
        tempfile.TemporaryDirectory(prefix="shardflow-slurm-") as folder,
        running_cluster(Path(folder)) as running,
    ):
        yield running


class Submitted:
    """A job, and what it writes."""

    def __init__(
        self, cluster: Cluster, folder: Path, script: str, options: tuple[str, ...], arguments: list[str]
    ) -> None:
        self.cluster = cluster
        self.log = folder / f"{script}.log"
        self._num_hurried = 0
        self.number = cluster.submit(
            SCRIPTS / script,
            [*options, f"--chdir={REPOSITORY}", f"--output={self.log}"],
            arguments,
            **VARIABLES,
            RDZV_PORT=str(free_port()),
        )

    @property
    def restarts(self) -> int:
        return int(self.cluster.facts(self.number)["Restarts"])

    @property
    def state(self) -> str:
        return self.cluster.facts(self.number)["JobState"]

    def wait_for(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait, and do not let the job wait long when it has been put back into the queue."""
        deadline = time.monotonic() + WAIT_S
        while True:
            state = self.state  # before the question, whose answer may be that the job has ended
            if holds():
                return
            assert state in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}, self.describe(what, state)
            assert time.monotonic() < deadline, self.describe(what, state)
            if state == "PENDING" and self.restarts > self._num_hurried:
                self.cluster.start_soon(self.number)
                self._num_hurried = self.restarts
            time.sleep(0.1)

    def finish(self, state: str) -> None:
        self.wait_for(state, lambda: self.state == state)

    def describe(self, what: str, state: str) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else "(no output)"
        return f"the job is {state} and not yet: {what}\n{text[-4000:]}\n{self.cluster.log()}"

    def summaries(self) -> list[dict[str, object]]:
        """What the job said at its ends."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def test_packing_goes_on_after_the_warning_of_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    from shardflow.cli import main as cli

    source = tmp_path / "input"
    arguments = ["--studies=30", "--seed=3", "--modality=CT", "--size=96", "--slices=8:16", "--processes=2"]
    assert cli.main(["synth", str(source), *arguments]) == 0
    key = tmp_path / "secret.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)

    def recipe(name: str) -> str:
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f'output = "{name}"\nprivate_dir = "{name}-private"\n[inputs]\ndicom = ["input/dicom"]\n'
            f'reports = "input/reports.csv"\nreports_format = "csv"\n[identity]\nkey_file = "secret.key"\n'
            "[splits]\ntrain = 90\nval = 10\n[execution]\nnum_processes = 1\n",
            encoding="utf-8",
        )
        return f"--config={path}"

    assert cli.main(["pack", recipe("undisturbed")]) == 0

    submitted = Submitted(cluster, tmp_path, "pack.sbatch", PACK_OPTIONS, [recipe("disturbed")])
    fragments = tmp_path / "disturbed" / ".work" / "fragments"
    submitted.wait_for("a study is packed", lambda: any(fragments.glob("**/*.*")))
    cluster.run("scancel", "--batch", "--signal=USR1", submitted.number)
    submitted.wait_for("back in the queue", lambda: submitted.restarts == 1)
    assert not list((tmp_path / "disturbed").glob("manifest-*")), "a stopped job must publish nothing"
    submitted.finish("COMPLETED")

    assert [line["status"] for line in submitted.summaries()] == ["interrupted", "packed"]
    whole, resumed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for name in ("manifest-000001.json", "ledger.jsonl"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_training_goes_on_after_a_warning_and_a_preemption(cluster: Cluster, tmp_path: Path) -> None:
    tiny = make_tiny_input(tmp_path)
    settings = {"run.num_epochs": NUM_EPOCHS, "run.checkpoint_every_steps": 1000}
    whole, run = tmp_path / "whole", tmp_path / "run"
    config = write_config(tiny, tmp_path / "whole.toml", whole, settings)
    with job(tmp_path, "shardflow.training", [f"--config={config}"], num_ranks=2) as running:
        finished = running.wait(WAIT_S)
    assert finished.exit_code == 0, finished.text

    config = write_config(tiny, tmp_path / "run.toml", run, settings)
    submitted = Submitted(cluster, tmp_path, "train.sbatch", TRAIN_OPTIONS, [f"--config={config}"])
    submitted.wait_for("a few steps", lambda: len(read_metrics(run)) >= 3)
    cluster.run("scancel", "--batch", "--signal=USR1", submitted.number)  # as --signal=B:USR1@120 does
    submitted.wait_for("back in the queue", lambda: submitted.restarts == 1)

    done = len(read_metrics(run))
    submitted.wait_for("more steps", lambda: len(read_metrics(run)) >= done + 3)
    options = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null")
    urgent = cluster.run("sbatch", "--parsable", *options, "--wrap=true")
    submitted.wait_for("preempted", lambda: submitted.restarts == 2)
    submitted.finish("COMPLETED")
    assert cluster.facts(urgent.strip())["JobState"] == "COMPLETED"

    ends = [(line["outcome"], line["stop_signal"]) for line in submitted.summaries()]
    assert ends == [("stopped", "SIGUSR1"), ("stopped", "SIGTERM"), ("finished", None)]
    assert committed_samples(run) == committed_samples(whole)
    assert differing_weights(run, whole) == []


def test_a_cancelled_training_job_writes_a_checkpoint_and_stays_away(
    cluster: Cluster, tmp_path: Path
) -> None:
    tiny, run = make_tiny_input(tmp_path), tmp_path / "run"
    settings = {"run.num_epochs": 10_000, "run.checkpoint_every_steps": 100_000}
    config = write_config(tiny, tmp_path / "run.toml", run, settings)
    submitted = Submitted(cluster, tmp_path, "train.sbatch", TRAIN_OPTIONS, [f"--config={config}"])
    submitted.wait_for("a few steps", lambda: len(read_metrics(run)) >= 3)
    cluster.run("scancel", submitted.number)
    deadline = time.monotonic() + WAIT_S
    while submitted.state in {"RUNNING", "COMPLETING"} or not submitted.summaries():
        assert time.monotonic() < deadline, submitted.describe("cancelled", submitted.state)
        time.sleep(0.05)
    assert (submitted.state, submitted.restarts) == ("CANCELLED", 0)
    assert [line["outcome"] for line in submitted.summaries()] == ["stopped"]
    assert len(committed_samples(run)) == submitted.summaries()[0]["global_step"]
