"""The job itself, killed or stopped: nothing is lost or doubled.

Under torchrun, where that is what answers; a classifier's ranks start without transformers.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from shardflow.cli.main import main
from shardflow.config import load_config
from shardflow.training.config import TrainConfig
from shardflow.training.ledger import read_ledger
from shardflow.training.metrics import read_metrics
from shardflow.training.run import TrainSummary, train
from tests.distributed.launcher import Finished, Job, job
from tests.distributed.runs import committed_samples, differing_weights, newest_checkpoint
from tests.tiny_runs import CLASSIFY, TinyInput, make_tiny_input, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(2400)]

START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 600.0
NUM_STEPS = 15 * 7


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyInput:
    return make_tiny_input(tmp_path_factory.mktemp("tiny"))


def wait_for_step(running: Job, run: Path, number: int) -> None:
    """Wait until the run has done ``number`` steps."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(read_metrics(run)) < number:
        if running.process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"no step {number} of the run\n{running.wait(1).text}")
        time.sleep(0.005)


def train_alone(config: Path, *overrides: str) -> TrainSummary:
    """Run the job on one rank, in this process."""
    return train(load_config(TrainConfig, config, overrides))


def test_killed_rank_costs_nothing(tiny: TinyInput, tmp_path: Path) -> None:
    """Two ranks, SIGKILL amid an epoch, a restart by torchrun: equal to a run that nobody touched."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = {"run.num_epochs": 15, "batch.tail": "mask"}
    config = write_config(tiny, tmp_path / "train.toml", run, settings, file=CLASSIFY)
    module, arguments = "shardflow.training", [f"--config={config}"]
    untouched = [*arguments, f"--set=run.output={whole}"]
    with job(tmp_path, module, untouched, num_ranks=2, is_forked=True) as running:
        finished = running.wait(RUN_TIMEOUT_S)
    assert finished.exit_code == 0, finished.text
    options = ["--max-restarts=1", "--monitor-interval=0.1"]
    with job(tmp_path, module, arguments, num_ranks=2, options=options) as running:
        wait_for_step(running, run, 7)
        os.kill(running.rank_pids()[1], signal.SIGKILL)
        finished = running.wait(RUN_TIMEOUT_S)
    assert finished.exit_code == 0, finished.text
    summary = json.loads(finished.stdout.splitlines()[-1])
    assert (summary["outcome"], summary["attempt"], summary["global_step"]) == ("finished", 2, NUM_STEPS)
    # The checkpoint of step 6 may still be being written then; the one before it stands for certain.
    assert summary["resumed_from"] in {f"step-{step:08d}" for step in range(4, NUM_STEPS, 2)}
    assert {step.attempt for step in read_ledger(run)} == {1, 2}
    assert committed_samples(run) == committed_samples(whole)
    assert differing_weights(run, whole) == []


def test_stop_signal_leaves_a_checkpoint_and_one_rank_goes_on(tiny: TinyInput, tmp_path: Path) -> None:
    """A signal to the launcher reaches both ranks; what they did is kept, and one rank alone ends the run."""
    run = tmp_path / "run"
    # 4000 epochs would take minutes; the signal comes after a few steps, and the second start is told to end
    # soon.
    settings = {"run.num_epochs": 4000, "run.checkpoint_every_steps": 1000}
    config = write_config(tiny, tmp_path / "train.toml", run, settings, file=CLASSIFY)
    arguments = [f"--config={config}"]
    with job(tmp_path, "shardflow.training", arguments, num_ranks=2, passes_codes=True) as running:
        wait_for_step(running, run, 3)
        # SLURM and srun may each send one; torchrun itself gives its ranks up at the third.
        for _ in range(4):
            running.process.send_signal(signal.SIGUSR1)
            time.sleep(0.02)
        finished = running.wait(RUN_TIMEOUT_S)
    assert finished.exit_code == 75, finished.text
    done = check_stopped(finished, run, "SIGUSR1")
    again = train_alone(config, f"run.max_steps={done + 3}")
    assert (again.outcome, again.world_size, again.attempt) == ("finished", 1, 2)
    assert again.resumed_from == f"step-{done:08d}"
    assert again.global_step == done + 3
    assert [step.global_step for step in read_ledger(run)] == list(range(done + 3))


def check_stopped(finished: Finished, run: Path, signal_name: str) -> int:
    """Check what a run of two ranks left that was asked to stop; return the number of its steps."""
    summary = json.loads(finished.stdout.splitlines()[-1])
    stopped = (summary["outcome"], summary["stop_signal"], summary["world_size"])
    assert stopped == ("stopped", signal_name, 2), finished.text
    done: int = summary["global_step"]
    assert newest_checkpoint(run) == f"step-{done:08d}"
    assert len(committed_samples(run)) == done
    return done


def test_budget_run_goes_on_alone_as_if_nobody_had_stopped_it(
    tiny: TinyInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lanes and a token budget: two ranks are stopped, one goes on; their ledger is what ``plan`` says."""
    run, config = tmp_path / "run", tiny.folder / "budget.toml"
    sizes = "max_tokens = 34\nmax_samples = 4\nlanes = 2\nwindow_bytes = 40000\ntail = 'mask'\n"
    text = (tiny.folder / "train.toml").read_text(encoding="utf-8")
    config.write_text(text.replace("micro_batch_size = 1\n", sizes), encoding="utf-8")
    arguments = [f"--config={config}", f"--set=run.output={run}", "--set=run.num_epochs=100"]
    with job(tmp_path, "shardflow.training", arguments, num_ranks=2, is_forked=True) as running:
        wait_for_step(running, run, 3)
        running.process.send_signal(signal.SIGTERM)
        finished = running.wait(RUN_TIMEOUT_S)
    assert finished.exit_code == 1, finished.text
    done = check_stopped(finished, run, "SIGTERM")
    again, whole = (
        train_alone(config, f"run.output={output}", f"run.max_steps={done + 6}")
        for output in (run, tmp_path / "whole")
    )
    assert (again.world_size, again.attempt, again.global_step) == (1, 2, done + 6)
    assert (whole.world_size, whole.attempt, whole.global_step) == (1, 1, done + 6)
    assert [step.attempt for step in read_ledger(run)] == [1] * done + [2] * 6
    assert committed_samples(run) == committed_samples(tmp_path / "whole")

    options = "--split train --seed 3 --micro-batches-per-step 4 --world-size 2 --tail mask --json"
    options += " --max-tokens 34 --max-samples 4 --max-text-tokens 24 --lanes 2 --window 40000"
    ledger = read_ledger(run)
    for epoch in range(ledger[-1].epoch + 1):
        capsys.readouterr()
        assert main(["plan", str(tiny.dataset), f"--epoch={epoch}", *options.split()]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        ran = [(s.step, m.micro, list(m.keys)) for s in ledger if s.epoch == epoch for m in s.micro_batches]
        planned = [(line["step"], line["micro"], line["keys"]) for line in lines]
        assert ran == (planned if epoch < ledger[-1].epoch else planned[: len(ran)])
    assert len({len(micro.keys) for step in ledger for micro in step.micro_batches}) > 1


def test_wrong_setting_is_reported_before_anything_is_imported(tiny: TinyInput, tmp_path: Path) -> None:
    config = write_config(tiny, tmp_path / "train.toml", tmp_path / "run", {})
    config.write_text(config.read_text().replace("seed =", "sede ="))
    with job(tmp_path, "shardflow.training", [f"--config={config}"], num_ranks=None) as running:
        finished = running.wait(RUN_TIMEOUT_S)
    assert finished.exit_code == 2
    assert "nearest known key is 'seed'" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "run").exists()
