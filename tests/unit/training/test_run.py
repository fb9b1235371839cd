"""Whole runs on one rank, in this process: what they write, how they go on, and what they refuse."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from shardflow.errors import (
    CheckpointError,
    ConfigError,
    PlanError,
    ShardflowError,
    StateError,
    TrainingError,
)
from shardflow.format import Dataset, manifest
from shardflow.format.facts.making import attach_facts
from shardflow.storage import LocalStore
from shardflow.training import loop as evaluate_module
from shardflow.training import step as step_module
from shardflow.training.checkpoint import files as checkpoint_module
from shardflow.training.checkpoint import tensors as tensor_files
from shardflow.training.checkpoint.files import Checkpoint, read_checkpoint
from shardflow.training.checkpoint.tensors import PiecewiseTensors
from shardflow.training.distributed import StopRequest
from shardflow.training.interval import CacheUse
from shardflow.training.ledger import LedgerStep, read_ledger
from shardflow.training.metrics import StepMetrics, read_metrics
from shardflow.training.run import TrainSummary, check_bindings, open_task, train
from tests.factories import make_dataset
from tests.object_stores import WebServer
from tests.sweeps import sampled
from tests.tiny_runs import NUM_VAL, TinyInput, make_tiny_input, tiny_config


def run(
    tiny: TinyInput, output: Path, *overrides: str, on_step: Callable[[StepMetrics, int], None] | None = None
) -> TrainSummary:
    return train(tiny_config(tiny, output, *overrides), on_step=on_step)


def run_stopped(tiny: TinyInput, output: Path, after: int, *overrides: str) -> TrainSummary:
    """Run until SIGUSR1 arrives in the midst of step ``after - 1``."""
    stop = StopRequest()

    def send(metrics: StepMetrics, num_steps: int) -> None:
        if metrics.global_step == after - 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    with stop.listening():
        return train(tiny_config(tiny, output, *overrides), on_step=send, stop=stop)


def final_checkpoint(output: Path) -> Checkpoint:
    return read_checkpoint(output / "checkpoints" / (output / "checkpoints" / "latest").read_text().strip())


def final_model(output: Path) -> Mapping[str, torch.Tensor]:
    return final_checkpoint(output).model


def assert_equal_models(first: Path, second: Path) -> None:
    mine, other = final_model(first), final_model(second)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, other[name]), name


def test_average_of_weights_is_evaluated_and_resumes_exactly(tiny: TinyInput, tmp_path: Path) -> None:
    average = (
        "optimizer.ema_decay=0.5",
        "optimizer.schedule=wsd",
        "optimizer.layer_decay=0.8",
        "model.vision_layers=2",
        "model.language_layers=2",
    )
    settings = ("run.max_steps=6", "data.eval_split=val", "run.checkpoint_every_steps=3")
    weights = run(tiny, tmp_path / "weights", *settings, *average, "optimizer.evaluate_ema=false")
    whole = run(tiny, tmp_path / "whole", *settings, *average)
    run_stopped(tiny, tmp_path / "parts", 3, *settings, *average)
    again = run(tiny, tmp_path / "parts", *settings, *average)
    assert (again.resumed_from, again.loss) == ("step-00000003", whole.loss)
    assert again.evaluation_loss == whole.evaluation_loss != weights.evaluation_loss
    assert_equal_models(tmp_path / "whole", tmp_path / "parts")
    assert_equal_models(tmp_path / "whole", tmp_path / "weights")
    mine, other = (final_checkpoint(tmp_path / name).optimizer for name in ("whole", "parts"))
    assert {name.rpartition(".")[2] for name in mine} == {"step", "exp_avg", "exp_avg_sq", "ema"}
    assert all(torch.equal(mine[name], other[name]) for name in mine)

    # Without the setting it is dropped.
    run(tiny, tmp_path / "parts", "run.max_steps=7", *average[1:])
    assert not [name for name in final_checkpoint(tmp_path / "parts").optimizer if name.endswith(".ema")]


def test_a_refused_run_leaves_no_process_group(tiny: TinyInput, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        run(tiny, tmp_path, "data.train_split=nothing")
    assert not torch.distributed.is_initialized()


def test_the_length_of_many_epochs_is_known_at_once(tiny: TinyInput, tmp_path: Path) -> None:
    """Where they differ in length, as many as can be planned."""
    stop = StopRequest()
    lengths: list[int] = []

    def end(_: StepMetrics, num_steps: int) -> None:
        lengths.append(num_steps)
        os.kill(os.getpid(), signal.SIGUSR1)

    many = "run.num_epochs=10_000_000"
    with stop.listening():
        train(tiny_config(tiny, tmp_path / "run", many), on_step=end, stop=stop)
    assert {*lengths} == {60_000_000}
    budget = "batch={max_tokens = 200, micro_batches_per_step = 2}"
    with pytest.raises(ConfigError, match=r"num_epochs is 10,000,000.*set run\.max_steps"):
        run(tiny, tmp_path / "budget", many, budget)


def samples(steps: list[LedgerStep]) -> list[tuple[int, int, object]]:
    return [(step.epoch, step.step, step.micro_batches) for step in steps]


@pytest.fixture(scope="module")
def whole(tiny: TinyInput, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two epochs of 6 steps; other tests compare with it."""
    output = tmp_path_factory.mktemp("whole") / "run"
    summary = run(tiny, output, "run.num_epochs=2", "data.eval_split=val", "run.tensorboard=true")
    assert (summary.outcome, summary.global_step, summary.num_steps) == ("finished", 12, 12)
    return output


# ---- what a run writes ---------------------------------------------------------------------------


def test_run_folder_holds_what_the_docs_promise(whole: Path) -> None:
    names = sorted(path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file())
    events = [name for name in names if name.startswith("tensorboard/events")]
    assert len(events) == 1
    assert [name for name in names if name not in events] == [
        ".lock",
        "checkpoints/latest",
        *(
            f"checkpoints/step-{step:08d}/{file}"
            for step in (10, 12)
            for file in ("loader.lock.json", "model.safetensors", "optimizer.safetensors", "state.json")
        ),
        "ledger/attempt-0001/rank-00000.jsonl",
        "metrics.jsonl",
        "resolved_config.toml",
        "starts.jsonl",
    ]


def test_loss_falls_and_every_step_is_measured(whole: Path) -> None:
    lines = read_metrics(whole)
    assert [(line["global_step"], line["epoch"], line["step"]) for line in lines] == [
        (number, number // 6, number % 6) for number in range(12)
    ]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    for line in lines:
        assert line["num_samples"] == 4
        assert line["num_tokens"] > 0
        assert 0 <= line["mean_data_wait_s"] <= line["data_wait_s"] <= line["step_s"]


def test_a_cache_changes_nothing_that_is_trained(tiny: TinyInput, whole: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    settings = (
        "data.eval_split=val",
        f"cache.directory={cache}",
        "cache.max_bytes=1GB",
        "cache.min_free_bytes=0",
    )
    run_stopped(tiny, tmp_path / "run", 4, "run.num_epochs=2", *settings)
    run(tiny, tmp_path / "run", "run.num_epochs=2", *settings)
    assert_equal_models(tmp_path / "run", whole)
    assert (
        len([path for path in (cache / "blocks").rglob("*") if path.is_file()]) == 2 * 6 + 2
    )  # shards, indexes, table
    plain, lines = read_metrics(whole), read_metrics(tmp_path / "run")
    assert not any(key.startswith("cache") for line in plain for key in line)
    used = {key: sum(line[key] for line in lines) for key in CacheUse.names}
    # Each image was fetched once, or not at all by the second start, and found for each of its two reads.
    assert used["cache_origin_blocks"] > 0
    assert used["cache_disk_blocks"] + used["cache_origin_blocks"] >= 12
    assert used["cache_disk_bytes"] > 0
    assert used["cache_ram_blocks"] == used["cache_ram_bytes"] == 0
    assert sum(line["cache_origin_bytes"] for line in lines if line["epoch"] == 1) == 0


def test_evaluation_stands_at_each_epochs_end(whole: Path) -> None:
    lines = read_metrics(whole, "evaluation")
    assert [(line["global_step"], line["epoch"], line["num_samples"]) for line in lines] == [
        (6, 0, NUM_VAL),
        (12, 1, NUM_VAL),
    ]
    assert lines[1]["loss"] < lines[0]["loss"]


def test_ledger_holds_the_plan_and_no_more(whole: Path, tiny: TinyInput) -> None:
    steps = read_ledger(whole)
    assert [step.global_step for step in steps] == list(range(12))
    dataset = Dataset.open(tiny.dataset)
    known = {dataset.samples.sample_key(row) for row in dataset.splits["train"]}
    for epoch in (0, 1):
        keys = [
            key for step in steps if step.epoch == epoch for micro in step.micro_batches for key in micro.keys
        ]
        assert len(keys) == len(set(keys)) == 24  # tail drop leaves 2 of 26 out
        assert set(keys) <= known


def test_nothing_of_a_report_is_written(whole: Path, tiny: TinyInput) -> None:
    dataset = Dataset.open(tiny.dataset)
    reports = [dataset.read_fields(row, ["report.txt"])["report.txt"] for row in dataset.splits["train"]]
    for path in whole.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [report for report in reports if report in content], path.name


def test_checkpoint_state_is_small_and_plain(whole: Path) -> None:
    state = json.loads((whole / "checkpoints" / "step-00000012" / "state.json").read_text())["run"]
    assert len(json.dumps(state["loader"])) < 1024
    assert (state["loader"]["epoch"], state["loader"]["step"]) == (2, 0)
    assert state["masks"] == []


# ---- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_after", sampled([2, 3, 6, 8], {3, 6}))
def test_stopped_run_goes_on_bit_for_bit(
    tiny: TinyInput, whole: Path, tmp_path: Path, stop_after: int
) -> None:
    """Between checkpoints, at one, at an epoch's end (before its evaluation), behind it."""
    settings = ("run.num_epochs=2", "data.eval_split=val")
    stopped = run_stopped(tiny, tmp_path, stop_after, *settings)
    assert (stopped.outcome, stopped.stop_signal) == ("stopped", "SIGUSR1")
    assert stopped.global_step == stop_after
    resumed = run(tiny, tmp_path, *settings)
    assert resumed.resumed_from == f"step-{stop_after:08d}"
    assert (resumed.outcome, resumed.global_step, resumed.attempt) == ("finished", 12, 2)
    assert_equal_models(tmp_path, whole)
    assert samples(read_ledger(tmp_path)) == samples(read_ledger(whole))
    for event in ("step", "evaluation"):
        mine, theirs = read_metrics(tmp_path, event), read_metrics(whole, event)
        assert [(m["global_step"], m["loss"]) for m in mine] == [
            (t["global_step"], t["loss"]) for t in theirs
        ]


@pytest.mark.parametrize("num_seen", [1, 3])
def test_a_stop_cuts_an_evaluation_off_and_the_next_start_makes_up_for_it(
    tiny: TinyInput, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_seen: int
) -> None:
    seen = []
    measure = step_module.compute_loss

    def and_signal(*args: Any) -> torch.Tensor:
        seen.append(1)
        if len(seen) == num_seen:
            signal.raise_signal(signal.SIGTERM)
        return measure(*args)

    settings = ("run.num_epochs=2", "data.eval_split=val")
    stop = StopRequest()
    with monkeypatch.context() as patch, stop.listening():
        patch.setattr(evaluate_module, "compute_loss", and_signal)
        patch.setattr(evaluate_module, "_POLL_EVERY_S", 0.0)
        stopped = train(tiny_config(tiny, tmp_path, *settings), stop=stop)
    assert (stopped.outcome, stopped.stop_signal, stopped.global_step) == ("stopped", "SIGTERM", 6)
    assert len(seen) == num_seen
    assert read_metrics(tmp_path, "evaluation") == []
    assert run(tiny, tmp_path, *settings).outcome == "finished"
    assert_equal_models(tmp_path, whole)
    for event in ("step", "evaluation"):
        mine, theirs = read_metrics(tmp_path, event), read_metrics(whole, event)
        assert [(m["global_step"], m["loss"]) for m in mine] == [
            (t["global_step"], t["loss"]) for t in theirs
        ]


def test_killed_run_repeats_only_what_no_checkpoint_holds(
    tiny: TinyInput, whole: Path, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def kill(metrics: StepMetrics, num_steps: int) -> None:
        if metrics.global_step == 8:
            raise Killed

    settings = ("run.num_epochs=2", "data.eval_split=val", "run.checkpoint_every_steps=3")
    with pytest.raises(Killed):
        run(tiny, tmp_path, *settings, on_step=kill)
    resumed = run(tiny, tmp_path, *settings)
    assert resumed.resumed_from == "step-00000006"
    assert [step.attempt for step in read_ledger(tmp_path)] == [1] * 6 + [2] * 6
    assert samples(read_ledger(tmp_path)) == samples(read_ledger(whole))
    assert_equal_models(tmp_path, whole)


def test_damaged_newest_checkpoint_is_named_and_passed_over(
    tiny: TinyInput, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_stopped(tiny, tmp_path, 5, "run.num_epochs=2")
    path = tmp_path / "checkpoints" / "step-00000005" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    resumed = run(tiny, tmp_path, "run.num_epochs=2")
    assert (resumed.resumed_from, resumed.damaged_checkpoints) == ("step-00000004", 1)
    assert "step-00000005" in caplog.text
    assert "Falling back to step-00000004" in caplog.text
    assert_equal_models(tmp_path, whole)
    assert samples(read_ledger(tmp_path)) == samples(read_ledger(whole))


def test_checkpoint_written_after_a_fall_back_is_the_newest(
    tiny: TinyInput, whole: Path, tmp_path: Path
) -> None:
    """Its number is smaller than that of the damaged one, which must not push it out."""
    settings = ("run.num_epochs=2", "run.checkpoint_every_steps=3")
    run_stopped(tiny, tmp_path, 9, *settings)
    (tmp_path / "checkpoints" / "step-00000009" / "model.safetensors").write_bytes(b"")
    stopped = run_stopped(tiny, tmp_path, 8, *settings, "run.keep_last=1")
    assert stopped.resumed_from == "step-00000006"
    assert len(read_ledger(tmp_path)) == 8
    resumed = run(tiny, tmp_path, *settings)
    assert (resumed.resumed_from, resumed.damaged_checkpoints) == ("step-00000008", 0)
    assert_equal_models(tmp_path, whole)
    assert samples(read_ledger(tmp_path)) == samples(read_ledger(whole))


def test_missing_dataset_is_a_wrong_setting(tiny: TinyInput, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.dataset must be an existing folder, an address or a blend file"
    ) as caught:
        run(tiny, tmp_path / "run", f"data.dataset={tmp_path / 'nothing'}")
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.manifest_version=7", r"data\.manifest_version must be one of the dataset's \(1\), got 7"),
        ('image.standardize=["MT"]', r"image\.standardize must hold modalities of the data \(CT\), got 'MT'"),
        ("data.dataset={empty}", r"data\.dataset must be a packed dataset, got a folder without a manifest"),
        (
            "run.resume={empty}",
            r"run\.resume must be .* got a folder without a checkpoint of the name 'empty'",
        ),
    ],
)
def test_setting_that_does_not_fit_the_data_is_refused(
    tiny: TinyInput, tmp_path: Path, setting: str, message: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=message):
        train(tiny_config(tiny, tmp_path / "run", setting.format(empty=empty)))


def test_an_address_through_the_cache_trains_the_same(tiny: TinyInput, tmp_path: Path) -> None:
    steps = "run.max_steps=4"
    run(tiny, tmp_path / "local", steps)
    with WebServer(tiny.folder) as server:
        address = f"data.dataset={server.url}/dataset"
        cache = (f"cache.directory={tmp_path / 'cache'}", "cache.max_bytes=64MiB", "cache.min_free_bytes=0")
        run_stopped(tiny, tmp_path / "remote", 2, steps, address, *cache)
        run(tiny, tmp_path / "remote", steps, address, *cache)
    assert_equal_models(tmp_path / "remote", tmp_path / "local")
    assert samples(read_ledger(tmp_path / "remote")) == samples(read_ledger(tmp_path / "local"))
    assert any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def test_run_folder_that_cannot_be_written_is_refused(tiny: TinyInput, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.output cannot be written \(Not a directory"):
        run(tiny, tmp_path / "file" / "run", "run.max_steps=1")


def test_no_sound_checkpoint_is_an_error_and_not_a_fresh_start(tiny: TinyInput, tmp_path: Path) -> None:
    run(tiny, tmp_path, "run.max_steps=2")
    (tmp_path / "checkpoints" / "step-00000002" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="step-00000002"):
        run(tiny, tmp_path, "run.max_steps=4")


def test_finished_run_has_nothing_to_do(tiny: TinyInput, tmp_path: Path) -> None:
    run(tiny, tmp_path, "run.max_steps=2")
    before = (tmp_path / "checkpoints" / "step-00000002" / "state.json").stat().st_mtime_ns
    again = run(tiny, tmp_path, "run.max_steps=2")
    assert (again.outcome, again.global_step, again.loss) == ("finished", 2, None)
    assert (tmp_path / "checkpoints" / "step-00000002" / "state.json").stat().st_mtime_ns == before


def test_finished_run_can_be_made_longer(tiny: TinyInput, tmp_path: Path) -> None:
    run(tiny, tmp_path, "run.max_steps=2")
    assert run(tiny, tmp_path, "run.max_steps=3").global_step == 3


def test_run_can_start_from_another_runs_checkpoint(tiny: TinyInput, whole: Path, tmp_path: Path) -> None:
    other = whole / "checkpoints" / "step-00000010"
    settings = ("run.num_epochs=2", "data.eval_split=val", f"run.resume={other}")
    assert run(tiny, tmp_path, *settings).resumed_from == "step-00000010"
    assert [step.global_step for step in read_ledger(tmp_path)] == [10, 11]
    assert_equal_models(tmp_path, whole)
    # A restart with the same settings goes on from the run's own checkpoint.
    assert run(tiny, tmp_path, *settings).resumed_from == "step-00000012"


def test_run_stays_with_the_manifest_it_began_with(tiny: TinyInput, tmp_path: Path) -> None:
    growing = TinyInput(tmp_path / "input")
    shutil.copytree(tiny.folder, growing.folder)
    output = tmp_path / "run"
    run(growing, output, "run.max_steps=1")
    saved = output / "checkpoints" / "step-00000001"
    lock = (saved / "loader.lock.json").read_bytes()
    state = json.loads((saved / "state.json").read_text(encoding="utf-8"))["run"]["loader"]
    assert hashlib.sha256(lock).hexdigest().startswith(state["lock"])
    assert json.loads(lock)["datasets"][0]["dataset_id"] == state["dataset_id"]
    (saved / "loader.lock.json").write_bytes(lock.replace(b"1", b"2"))
    with pytest.raises(CheckpointError, match=r"loader\.lock\.json with the digest"):
        read_checkpoint(saved)
    (saved / "loader.lock.json").write_bytes(lock)
    store = LocalStore(growing.dataset)
    first = manifest.load(store)
    manifest.commit(store, replace(first, manifest_version=2, parent=first.dataset_id))
    attach_facts(Dataset.open(growing.dataset))
    assert run(growing, output, "run.max_steps=2").resumed_from == "step-00000001"
    with pytest.raises(StateError, match="dataset_id"):
        run(growing, output, "run.max_steps=3", "data.manifest_version=2")


def test_lower_precision_and_other_models_train_as_well(tiny: TinyInput, tmp_path: Path) -> None:
    for number, settings in enumerate(
        (
            ("run.precision=bf16", "fields.image.dtype=float32"),
            ("model.language=llama", "model.activation_checkpointing=true"),
            ("fields.image.sampling=random", "batch.tail=repeat"),
        )
    ):
        output = tmp_path / str(number)
        run(tiny, output, "run.num_epochs=2", *settings)
        lines = read_metrics(output)
        assert lines[-1]["loss"] < lines[0]["loss"], settings


# ---- refusals ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started(tiny: TinyInput, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that others try to go on with."""
    output = tmp_path_factory.mktemp("started") / "run"
    run(tiny, output, "run.max_steps=2")
    return output


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("run.seed=4", StateError, "seed"),
        ("batch.micro_batch_size=2", StateError, "micro_batch_size"),
        ("batch.micro_batches_per_step=2", StateError, "micro_batches_per_step"),
        ("batch.tail=mask", StateError, "tail"),
        ("data.train_split=val", StateError, "split"),
        ("model.language_width=64", StateError, r"model\.language_width"),
        ("fields.image.num_slices=2", StateError, r"fields\.image\.num_slices"),
        ("fields.image.resolution=small", StateError, r"fields\.image\.resolution"),
        ("text.max_tokens=25", StateError, r"text\.max_tokens"),
        ("run.resume=never", ConfigError, "'never'"),
        ("data.train_split=tarin", ConfigError, "split of the dataset"),
        ("data.eval_split=vall", ConfigError, r"data\.eval_split"),
        ("data.manifest_version=2", ShardflowError, "manifest"),
    ],
)
def test_resume_of_another_run_is_refused_and_loses_nothing(
    tiny: TinyInput, started: Path, override: str, error: type[ShardflowError], message: str
) -> None:
    before = (started / "checkpoints" / "latest").read_bytes()
    with pytest.raises(error, match=message):
        run(tiny, started, "run.max_steps=4", override)
    assert (started / "checkpoints" / "latest").read_bytes() == before
    assert [step.global_step for step in read_ledger(started)] == [0, 1]


def test_small_slices_are_asked_of_the_loader(tiny: TinyInput, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"variants\.small_px"):
        run(tiny, tmp_path, "run.max_steps=1", "fields.image.resolution=small")


def test_checkpoints_without_packing_are_of_padded_rows(tiny: TinyInput) -> None:
    bindings = open_task(tiny_config(tiny, tiny.folder / "run")).bindings()
    old = {name: value for name, value in bindings.items() if name != "batch.packed"}
    nothing = PiecewiseTensors([])
    checkpoint = Checkpoint(name="step-00000002", state={"bindings": old}, model=nothing, optimizer=nothing)
    check_bindings(checkpoint, bindings)
    with pytest.raises(StateError, match=r"batch\.packed"):
        check_bindings(checkpoint, bindings | {"batch.packed": True})


def test_resume_on_another_dataset_is_refused(tiny: TinyInput, started: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "other", num_samples=37, splits={"train": 26, "val": 11}, seed=9, facts=True)
    with pytest.raises(StateError, match="dataset_id"):
        run(tiny, started, "run.max_steps=4", f"data.dataset={tmp_path / 'other'}")


def test_resume_with_another_tokenizer_is_refused(tiny: TinyInput, started: Path, tmp_path: Path) -> None:
    other = make_tiny_input(tmp_path)
    path = other.tokenizer / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(StateError, match="tokenizer"):
        run(tiny, started, "run.max_steps=4", f"text.tokenizer={other.tokenizer}")


def test_second_job_in_the_same_run_folder_is_refused(tiny: TinyInput, tmp_path: Path) -> None:
    refused: list[str] = []

    def start_another(metrics: StepMetrics, num_steps: int) -> None:
        from shardflow.training.checkpoint.start import RunLock

        with pytest.raises(ConfigError) as error:
            RunLock(tmp_path)
        refused.append(error.value.message)

    run(tiny, tmp_path, "run.max_steps=1", on_step=start_another)
    assert "another job" in refused[0]
    run(tiny, tmp_path, "run.max_steps=1")


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ("drop", "samples left out of this epoch: 1"),
        ("repeat", "slots that repeat a sample, at full weight: 4"),
        ("mask", "padding slots of weight 0: 4"),
    ],
)
def test_what_the_tail_does_is_said_before_the_first_step(
    tiny: TinyInput, tmp_path: Path, caplog: pytest.LogCaptureFixture, tail: str, said: str
) -> None:
    caplog.set_level("INFO")
    seen: list[str] = []
    run(
        tiny,
        tmp_path,
        "batch.micro_batches_per_step=5",
        f"batch.tail={tail}",
        "run.max_steps=1",
        on_step=lambda *_: seen.append(caplog.text),
    )
    assert said in seen[0]


def test_epoch_without_a_step_is_an_error(tiny: TinyInput, tmp_path: Path) -> None:
    with pytest.raises(PlanError):
        run(tiny, tmp_path, "batch.micro_batch_size=100")


def test_gradient_that_is_not_finite_stops_the_run(tiny: TinyInput, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="finite"):
        run(tiny, tmp_path, "optimizer.learning_rate=1e30", "optimizer.max_gradient_norm=1e30")


def test_bad_sample_is_masked_and_stays_masked_after_a_restart(tiny: TinyInput, tmp_path: Path) -> None:
    """A run that finds the damage and one that replays its mask train the same model."""
    damaged = TinyInput(tmp_path / "input")
    shutil.copytree(tiny.folder, damaged.folder)
    dataset = Dataset.open(tiny.dataset)
    shard, fields = dataset.sample_fields(dataset.splits["train"][5])
    victim = next(field for field in fields if field.name == "report.txt")
    path = damaged.dataset / shard
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[victim.offset] ^= 0x20
    path.write_bytes(content)

    settings = ("run.max_steps=8",)
    whole = run(damaged, tmp_path / "whole", *settings)
    assert whole.num_masked_samples >= 1
    steps = read_ledger(tmp_path / "whole")
    masked = [
        (step.global_step, key)
        for step in steps
        for micro in step.micro_batches
        for key, weight in zip(micro.keys, micro.weights, strict=True)
        if weight == 0
    ]
    assert masked
    assert {key for _, key in masked} == {dataset.samples.sample_key(dataset.splits["train"][5])}
    stop_after = max(2, masked[0][0] + 1)
    run_stopped(damaged, tmp_path / "parts", stop_after, *settings)
    path.write_bytes(
        (tiny.dataset / shard).read_bytes()
    )  # the store recovers, and the mask must stay all the same
    run(damaged, tmp_path / "parts", *settings)
    replayed = read_ledger(tmp_path / "parts")
    assert [s.micro_batches for s in replayed[:stop_after]] == [s.micro_batches for s in steps[:stop_after]]
    state = json.loads((tmp_path / "parts" / "checkpoints" / "step-00000008" / "state.json").read_text())[
        "run"
    ]
    assert [row["key"] for row in state["masks"]] == [masked[0][1]]


# ---- precision, sharing, compiling ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "strategy"),
    sampled(product(["bf16", "fp16"], ["ddp", "fsdp2"]), {("bf16", "fsdp2"), ("fp16", "ddp")}),
)
def test_half_precision_trains_like_full_precision(
    tiny: TinyInput, tmp_path: Path, precision: str, strategy: str
) -> None:
    settings = (
        f"run.precision={precision}",
        f"parallel.strategy={strategy}",
        "optimizer.initial_loss_scale=64",
    )
    run(tiny, tmp_path / "half", "run.max_steps=4", *settings)
    run(tiny, tmp_path / "full", "run.max_steps=4")
    half, full = (read_metrics(tmp_path / name) for name in ("half", "full"))
    assert [line["loss"] for line in half] == pytest.approx([line["loss"] for line in full], abs=5e-3)
    assert {line["loss_scale"] for line in half} == {64.0 if precision == "fp16" else 1.0}
    for tensor in final_model(tmp_path / "half").values():
        assert tensor.dtype == torch.float32


def test_fp16_overflow_is_skipped_and_the_scale_goes_on_after_a_restart(
    tiny: TinyInput, tmp_path: Path
) -> None:
    settings = ("run.precision=fp16", "optimizer.initial_loss_scale=1e7", "run.max_steps=16")
    run(tiny, tmp_path / "whole", *settings)
    lines = read_metrics(tmp_path / "whole")
    assert lines[0]["gradient_norm"] is None
    assert lines[-1]["gradient_norm"] is not None
    assert lines[-1]["loss_scale"] == 1e7 / 2 ** lines[-1]["num_skipped"]
    run_stopped(tiny, tmp_path / "parts", 3, *settings)
    run(tiny, tmp_path / "parts", *settings)
    assert [line["loss_scale"] for line in read_metrics(tmp_path / "parts")] == [
        line["loss_scale"] for line in lines
    ]
    assert_equal_models(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
def test_compiled_blocks_train_the_same_under_the_same_names(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the backend that compiles nothing: what is tested is how blocks are wrapped, not the compiler."""
    real, compiled = torch.nn.Module.compile, []

    def compile_eagerly(module: torch.nn.Module, *args: object, **kwargs: object) -> None:
        compiled.append(type(module).__name__)
        real(module, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_eagerly)
    settings = ("run.max_steps=1", "model.language_layers=2")
    run(tiny, tmp_path / "compiled", *settings, "run.compile=true")
    run(tiny, tmp_path / "plain", *settings)
    assert compiled.count("GPT2Block") == 2
    mine, other = final_model(tmp_path / "compiled"), final_model(tmp_path / "plain")
    assert mine.keys() == other.keys()
    assert all(torch.allclose(tensor, other[name], atol=1e-6) for name, tensor in mine.items())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_compiler_trains_the_same(tiny: TinyInput, tmp_path: Path) -> None:
    run(tiny, tmp_path / "compiled", "run.max_steps=2", "run.compile=true", "model.dropout=0")
    run(tiny, tmp_path / "plain", "run.max_steps=2", "model.dropout=0")
    mine, other = final_model(tmp_path / "compiled"), final_model(tmp_path / "plain")
    assert all(torch.allclose(tensor, other[name], atol=1e-4) for name, tensor in mine.items())


def test_deterministic_kernels_are_asked_for_before_the_device(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        run(tiny, tmp_path, "run.max_steps=1", "run.deterministic=true")
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


# ---- checkpoints beside the steps ----------------------------------------------------------------


def test_every_checkpoint_is_measured(whole: Path) -> None:
    lines = read_metrics(whole, "checkpoint")
    assert [line["global_step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert all(line["num_bytes"] > 0 and line["stall_s"] > 0 and line["write_s"] > 0 for line in lines)


def test_a_disk_that_is_full_ends_the_run_at_a_later_step_and_the_older_checkpoint_stays(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tensor_files.write_tensors
    written: list[Path] = []

    def full_after_one(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
        written.append(path)
        if len(written) > 2:
            raise OSError(errno.ENOSPC, "full")
        return real(path, tensors)

    monkeypatch.setattr(checkpoint_module, "write_tensors", full_after_one)
    with pytest.raises(CheckpointError, match=r"step-00000004 could not be written: No space"):
        run(tiny, tmp_path)
    monkeypatch.undo()
    assert [entry.name for entry in sorted((tmp_path / "checkpoints").iterdir())] == [
        "latest",
        "step-00000002",
    ]
    assert run(tiny, tmp_path).resumed_from == "step-00000002"
