"""Fine-tuning on conversations with images: a rank is killed, and one rank trains the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardflow.cli import generate
from shardflow.format.facts.columns import open_columns
from shardflow.loading.sample import open_dataset
from shardflow.training.tokenizing import count_dataset
from tests.conversation_case import make_folder
from tests.distributed.launcher import job
from tests.distributed.runs import committed_samples, newest_weights
from tests.distributed.test_kill_and_resume import RUN_TIMEOUT_S, train_alone, wait_for_step
from tests.sweeps import sampled
from tests.unit.training.test_conversations import leave, make_run
from tests.unit.training.test_pretraining import pack_texts
from tests.unit.training.test_stored_reference import store

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("is_packed", sampled([False, True], {False}))
def test_a_killed_run_costs_nothing_and_one_rank_trains_the_same(is_packed: bool, tmp_path: Path) -> None:
    config = make_run(tmp_path, "qwen2_5_vl", num=64 if is_packed else 32)
    text = config.read_text(encoding="utf-8")
    if is_packed:
        text = text.replace("micro_batch_size = 2", "max_tokens = 400\npacked = true\nlanes = 1")
        count_dataset(open_dataset(tmp_path / "dataset"), tmp_path / "model")
    config.write_text(text.replace("max_steps = 4", "max_steps = 8\nnum_epochs = 9"), encoding="utf-8")
    run, module, arguments = tmp_path / "run", "shardflow.training", [f"--config={config}"]
    with job(tmp_path, module, arguments, num_ranks=2, is_forked=True) as running:
        wait_for_step(running, run, 3)
        running.kill()
    with job(tmp_path, module, arguments, num_ranks=2, is_forked=True) as running:
        finished = running.wait(RUN_TIMEOUT_S)
    assert finished.exit_code == 0, finished.text
    summary = json.loads(finished.stdout.splitlines()[-1])
    assert (summary["outcome"], summary["attempt"], summary["global_step"]) == ("finished", 2, 8)
    alone = tmp_path / "alone"
    train_alone(config, f"run.output={alone}")
    assert committed_samples(run) == committed_samples(alone)
    texts = [tmp_path / f"answers{num}.jsonl" for num in (1, 2)]
    options = ["--max-new-tokens=4", str(run)]
    assert generate.main([f"--out={texts[0]}", *options]) == 0
    options = [f"--out={texts[1]}", *options]
    with job(tmp_path, "shardflow.cli.generate", options, num_ranks=2, is_forked=True) as running:
        written = running.wait(RUN_TIMEOUT_S)
    assert written.exit_code == 0, written.text
    assert json.loads(written.stdout.splitlines()[-1])["num_texts"] > 0
    assert texts[0].read_bytes() == texts[1].read_bytes(), "the same on any number of ranks"
    mine, other = newest_weights(run), newest_weights(alone)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=2e-5, msg=name)


def test_preferences_are_trained_in_shares_and_a_kill_amid_a_checkpoint_costs_nothing(tmp_path: Path) -> None:
    """The model and its frozen reference are shared; the checkpoint before the one that is cut is resumed."""
    config = make_run(tmp_path, "qwen2", "dpo")
    arguments = [str(tmp_path / "mark"), f"--config={config}", "--set", "parallel.strategy=fsdp2"]
    module, run = "tests.distributed.killed_writer", tmp_path / "run"
    for code in (1, 0):
        with job(tmp_path, module, arguments, num_ranks=2, is_forked=True) as running:
            finished = running.wait(RUN_TIMEOUT_S)
        assert finished.exit_code == code, finished.text
        assert (tmp_path / "mark").exists()
    summary = json.loads(finished.stdout.splitlines()[-1])
    assert (summary["outcome"], summary["attempt"], summary["global_step"]) == ("finished", 2, 4)
    assert summary["resumed_from"] == "step-00000002"
    alone = tmp_path / "alone"
    train_alone(config, f"run.output={alone}")
    assert committed_samples(run) == committed_samples(alone)
    mine, other = newest_weights(run), newest_weights(alone)
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=2e-5, msg=name)


@pytest.mark.slow
def test_pretraining_on_packed_texts_survives_a_kill(tmp_path: Path) -> None:
    """From lines of a corpus to a run of two ranks that is killed, and resumed by one."""
    make_folder("llama", tmp_path / "model")
    config = pack_texts(tmp_path, num=64)
    count_dataset(open_dataset(tmp_path / "dataset"), tmp_path / "model")
    text = config.read_text(encoding="utf-8")
    text = text.replace("micro_batch_size = 2", "max_tokens = 400\npacked = true\nlanes = 1")
    config.write_text(text.replace("max_steps = 4", "max_steps = 8\nnum_epochs = 9"), encoding="utf-8")
    run, alone = tmp_path / "run", tmp_path / "alone"
    with job(tmp_path, "shardflow.training", [f"--config={config}"], num_ranks=2, is_forked=True) as running:
        wait_for_step(running, run, 3)
        running.kill()
    summary = train_alone(config, f"run.output={run}")
    assert (summary.attempt, summary.global_step) == (2, 8)
    assert summary.resumed_from is not None
    leave()
    train_alone(config, f"run.output={alone}")
    assert committed_samples(run) == committed_samples(alone)
    mine, other = newest_weights(run), newest_weights(alone)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=2e-5, msg=name)


@pytest.mark.slow
def test_shares_of_a_reference_store_what_a_whole_one_says(tmp_path: Path) -> None:
    """The loss that a run with the columns has is in tests/unit/training/test_stored_reference.py."""
    config = make_run(tmp_path, "qwen2", "dpo")
    arguments = [f"--config={config}", "--store-reference", "--set", "parallel.strategy=fsdp2"]
    with job(tmp_path, "shardflow.training", arguments, num_ranks=2, is_forked=True) as running:
        finished = running.wait(RUN_TIMEOUT_S)
    assert finished.exit_code == 0, finished.text
    written = json.loads(finished.stdout.splitlines()[-1])
    assert (written["num_pairs"], written["num_without"]) == (16, 0)
    values = {}
    for name in ("shares", "whole"):
        columns = open_columns(open_dataset(tmp_path / "dataset"))
        ends = ("chosen", "rejected")
        values[name] = [columns.column(f"{written['table']}.{end}").values.copy() for end in ends]
        if name == "shares":
            assert store(config)["table"] == written["table"]
    for mine, other in zip(values["shares"], values["whole"], strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(other), rtol=1e-6, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_adapters_beside_weights_of_4_bits_are_trained_by_ranks_as_by_one(
    strategy: str, tmp_path: Path
) -> None:
    """Each rank has all quantized weights; two ranks stop, and one goes on."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    config = make_run(tmp_path, "qwen2")
    qlora = ("lora.rank=2", "model.quantize=nf4")
    run, alone = tmp_path / "run", tmp_path / "alone"
    settings = [*qlora, f"parallel.strategy={strategy}", "run.max_steps=2"]
    arguments = [f"--config={config}", *(f"--set={one}" for one in settings)]
    with job(tmp_path, "shardflow.training", arguments, num_ranks=2, is_forked=True) as running:
        finished = running.wait(RUN_TIMEOUT_S)
    assert finished.exit_code == 0, finished.text
    assert train_alone(config, f"run.output={run}", *qlora).resumed_from == "step-00000002"
    leave()
    train_alone(config, f"run.output={alone}", *qlora)
    assert committed_samples(run) == committed_samples(alone)
    mine, other = newest_weights(run), newest_weights(alone)
    assert mine.keys() == other.keys()
    assert all("lora_" in name for name in mine)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=2e-5, msg=name)
