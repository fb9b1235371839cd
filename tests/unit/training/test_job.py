"""The training job in this process: exit codes, the summary line, progress."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardflow as sf
from shardflow.training.__main__ import EXIT_STOPPED, main
from shardflow.training.metrics import read_metrics
from tests.conftest import REPOSITORY
from tests.tiny_runs import TinyInput, tiny_fields, write_config


@pytest.fixture(autouse=True)
def goodbye() -> Iterator[None]:
    """A job sets up logging, because its process ends; this one lives on."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    root.handlers[:] = before


def run(tiny: TinyInput, folder: Path, *overrides: str, **settings: object) -> int:
    config = write_config(tiny, folder / "train.toml", folder / "run", settings)
    return main([f"--config={config}", *(f"--set={override}" for override in overrides)])


def test_summary_is_the_last_line_and_progress_goes_to_standard_error(
    tiny: TinyInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny, tmp_path, "run.max_steps=2") == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert (summary["outcome"], summary["global_step"], summary["num_steps"]) == ("finished", 2, 2)
    assert "step 2 of 2: loss" in captured.err
    assert re.search(r"[\d,.]+ tokens/s, \d+% waiting for data", captured.err)


def test_the_first_micro_batch_is_shown_once_without_its_text(
    tiny: TinyInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny, tmp_path, "run.num_epochs=2", "run.seed=5") == 0
    lines = capsys.readouterr().err
    shown = re.findall(r"first micro-batch: (.*)\n.*the model gets (.*)\n", lines)
    assert len(shown) == 1
    fields, tensors = shown[0]
    assert re.search(r"image \(1, 3, 1, 16, 16\) float32 from -?[\d.]+ to [\d.]+;", fields)
    assert re.search(r"report 1 text of \d+ characters", fields)
    assert re.search(r"token_ids_BT \(1, \d+\) int64; .*[1-9]\d* weighted targets of 1 samples$", tensors)
    spec = sf.BatchSpec.simple(global_batch_size=1, micro_batch_size=1)
    dataset = sf.open(tiny.dataset)
    with sf.Loader(dataset, split="train", seed=5, batch=spec, fields=tiny_fields()) as loader:
        for batch in loader:
            key, words = batch.sample_keys[0], batch["report"][0].split()
            assert str(key) not in lines
            assert not [word for word in words if len(word) > 12 and word in lines]


def test_a_run_that_masks_a_large_part_of_its_data_fails(
    tiny: TinyInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(tiny.dataset, tmp_path / "data")
    for index in (tmp_path / "data" / "shards").glob("train-*.idx"):
        if not index.name.startswith("train-000000"):
            with index.open("r+b") as file:
                file.truncate(index.stat().st_size // 2)
    damaged = {"data.dataset": tmp_path / "data", "loader.max_bad_samples": 100}
    assert run(tiny, tmp_path, **damaged) == 3
    said = capsys.readouterr().err
    assert "max_bad_share" in said
    assert "Traceback" not in said


def test_resume_under_another_seed_exits_with_two_and_one_sentence(
    tiny: TinyInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny, tmp_path, "run.max_steps=1") == 0
    capsys.readouterr()
    assert run(tiny, tmp_path, "run.max_steps=2", "run.seed=9") == 2
    captured = capsys.readouterr()
    assert "seed of the loader state" in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_unknown_setting_exits_with_two(
    tiny: TinyInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny, tmp_path, "run.sede=9") == 2
    assert "nearest known key is 'seed'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_wrong_arguments_are_one_line_and_exit_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config"]) == 2
    captured = capsys.readouterr().err
    assert captured.count("\n") == 1
    assert captured.endswith("see: python -m shardflow.training --help\n")


def test_failure_exits_with_one(tiny: TinyInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(tiny, tmp_path, "optimizer.learning_rate=1e30", "optimizer.max_gradient_norm=1e30")
    assert code == 1
    assert "gradient is not finite" in capsys.readouterr().err


def test_stop_signal_exits_with_its_own_code(
    tiny: TinyInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def send() -> None:
        deadline = time.monotonic() + 300
        while not read_metrics(tmp_path / "run") and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    sender.start()
    code = run(tiny, tmp_path, "run.num_epochs=100")
    sender.join()
    assert code == EXIT_STOPPED == 75
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stop_signal"] == "SIGUSR1"


def test_settings_can_be_shown(tiny: TinyInput, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tiny, tmp_path / "train.toml", tmp_path / "run", {})
    assert main([f"--config={config}", "--print-config", "--set=run.seed=5"]) == 0
    assert "seed = 5" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_the_entry_of_a_checkout_is_the_same_job(tmp_path: Path) -> None:
    """``torchrun -m pipelines.train`` of earlier scripts."""
    command = [sys.executable, "-m", "pipelines.train", "--config", str(tmp_path / "none.toml")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "ERROR shardflow.training: " in done.stderr
