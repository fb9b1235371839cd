"""``shardflow bench --with-model``: the ceilings of a real job, with a loader or a model made slow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardflow.training.inputs import DeviceFeed, FedMicroBatch, MicroInputs
from shardflow.training.jobs import headroom
from shardflow.training.ledger import read_ledger
from shardflow.training.loop import TrainingLoop
from shardflow.training.models.building import build_report_model
from shardflow.training.run import train
from shardflow.training.tasks import report
from tests.cli.conftest import Call
from tests.tiny_runs import TinyInput, make_tiny_input, tiny_config

REPOSITORY = Path(__file__).resolve().parents[2]
SLOW_S = 0.4  # more than a step of the small model takes on a busy machine
# A step of one sample; three of each contestant's rounds of one step go by before one is measured.
QUICK = ("--steps", 1, "--repeats", 2, "--set", "batch.micro_batches_per_step=1")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyInput:
    return make_tiny_input(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, so that what is left of them is seen."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    # Where torch is first used here, its compiler would make its folder among them.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return folder


def sleep(sample: dict[str, Any]) -> dict[str, Any]:
    """Be a slow transform."""
    time.sleep(SLOW_S)
    return sample


def _slow_model(*arguments: Any, **named: Any) -> tuple[nn.Module, Any]:
    model, tokenizer = build_report_model(*arguments, **named)
    model.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))
    return model, tokenizer


def _files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_a_slow_transform_makes_data_the_lower_ceiling(call: Call, tiny: TinyInput, scratch: Path) -> None:
    before = _files(tiny.folder)
    (facts,) = call(
        "bench",
        *("--with-model", tiny.folder / "train.toml", *QUICK, "--json"),
        *("--set", "data.transform=tests.cli.test_bench_model:sleep"),
    ).lines
    results = facts["results"]
    assert facts["lower_ceiling"] == "loader"
    # A sample may be nearly done when the clock starts.
    assert min(results["loader"]["step_seconds"]) > SLOW_S / 2
    assert min(results["together"]["step_seconds"]) > SLOW_S / 2
    assert facts["data_wait_share"] > 0.0
    assert facts["headspace"]["with_free_data"] > 1.0
    assert any(line.startswith("Data limits this job") for line in facts["advice"])
    assert _files(tiny.folder) == before
    assert not _files(scratch)


def test_a_slow_model_makes_compute_the_lower_ceiling(
    call: Call, tiny: TinyInput, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "build_report_model", _slow_model)
    called = call("bench", tiny.dataset, "--with-model", tiny.folder / "train.toml", *QUICK, "--json")
    (facts,) = called.lines
    results = facts["results"]
    assert facts["lower_ceiling"] == "compute"
    assert min(results["compute"]["step_seconds"]) >= SLOW_S
    assert min(results["together"]["step_seconds"]) >= SLOW_S
    assert facts["headspace"]["with_free_compute"] > 1.0
    assert any(line.startswith("The model limits this job") for line in facts["advice"])
    assert not _files(scratch)


def test_the_numbers_hang_together(call: Call, tiny: TinyInput) -> None:
    called = call("bench", "--with-model", tiny.folder / "train.toml", "--steps", 3, "--repeats", 3, "--json")
    (facts,) = called.lines
    results = facts["results"]
    assert set(results) == {"loader", "compute", "together"}
    for one in results.values():
        assert one["steps"] == [3, 3, 3]
        assert one["samples_per_step"] == 4.0  # four micro-batches of one sample, none of them padding
        assert one["median_step_seconds"] == sorted(one["step_seconds"])[1]
        assert one["samples_per_s"] == pytest.approx(4.0 * one["steps_per_s"], rel=1e-3)
        low, high = one["steps_per_s_range"]
        assert low <= one["steps_per_s"] <= high
    together = results["together"]["steps_per_s"]
    lower = min(results["loader"]["steps_per_s"], results["compute"]["steps_per_s"])
    assert facts["share_of_lower"] == pytest.approx(together / lower, abs=1e-3)
    assert 0.0 <= facts["data_wait_share"] <= 1.0
    assert facts["stages"]["decode"] > 0
    assert facts["tiers"] == {}
    assert (facts["device"], facts["ranks"], facts["replayed_micro_batches"]) == ("cpu", 1, 16)


def test_replayed_micro_batches_are_the_jobs_first_ones(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny, tmp_path / "run", "run.max_steps=2")
    train(config)
    first = [micro for step in read_ledger(config.run.output) for micro in step.micro_batches]
    taken: list[FedMicroBatch] = []
    fed_by: list[type[object]] = []
    real_take = headroom.ReplayFeed.take

    def take(feed: headroom.ReplayFeed) -> FedMicroBatch | None:
        fed = real_take(feed)
        assert fed is not None
        taken.append(fed)
        return fed

    real_step = TrainingLoop.run_step

    def run_step(loop: TrainingLoop, feed: Any, epoch: int, step: int) -> None:
        fed_by.append(type(feed))
        real_step(loop, feed, epoch, step)

    monkeypatch.setattr(headroom.ReplayFeed, "take", take)
    monkeypatch.setattr(TrainingLoop, "run_step", run_step)
    before = _files(config.run.output)
    found = headroom.measure_headroom(config, headroom.HeadroomOptions(num_rounds=1, num_steps=2))
    assert found is not None
    assert [fed.entry for fed in taken[:8]] == first
    assert taken[16] is taken[0], "the held ones come again, and are copied once"
    assert len({fed.entry.keys for fed in taken}) > 4
    images = [fed.inputs.images_BKHW for fed in taken[:16] if isinstance(fed.inputs, MicroInputs)]
    assert not torch.equal(images[0], images[1])
    assert len({image.data_ptr() for image in images}) == 16
    assert set(fed_by) == {DeviceFeed, headroom.ReplayFeed}, "real steps, by the loop of training"
    assert _files(config.run.output) == before


def test_epochs_that_end_within_a_round_go_on(tiny: TinyInput, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run", "batch.micro_batches_per_step=13")
    found = headroom.measure_headroom(config, headroom.HeadroomOptions(num_rounds=1, num_steps=5))
    assert found is not None
    assert all(rounds[0].num_samples == 65 for rounds in found.rounds.values())
    assert not (tmp_path / "run").exists()


def test_text_names_both_ceilings(call: Call, tiny: TinyInput) -> None:
    cache = ("--set", "cache.ram_bytes=8MiB", "--set", "cache.read_ahead_bytes=1MiB")
    called = call("bench", "--with-model", tiny.folder / "train.toml", *QUICK, *cache)
    assert called.code == 0
    assert re.search(r"Data alone read its bytes from: .*%", called.out)
    for part in ("data alone", "model alone", "together", "steps/s", "limits this job", "lower ceiling"):
        assert part in called.out


def test_settings_that_do_not_belong_together_are_refused(call: Call, tiny: TinyInput, dataset: Path) -> None:
    with_model = ("--with-model", tiny.folder / "train.toml")
    for arguments, name in (
        ((dataset, *with_model), "DATASET"),
        ((*with_model, "--split", "train"), "--split"),
        ((*with_model, "--need", 3), "--need"),
        ((dataset, "--steps", 3), "--with-model"),
        ((), "DATASET"),
    ):
        called = call("bench", *arguments)
        assert called.code == 2
        assert name in called.err


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_measure_together_and_the_first_one_speaks(tiny: TinyInput, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "shardflow.cli.main", "bench", "--with-model", str(tiny.folder / "train.toml")]
    done = subprocess.run(
        [*command, "--steps", "2", "--repeats", "1", "--json"],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (facts,) = (json.loads(line) for line in done.stdout.splitlines())
    assert facts["ranks"] == 2
    assert facts["replayed_micro_batches"] == 8
    assert {one["samples_per_step"] for one in facts["results"].values()} == {4.0}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("shardflow-bench-")]
