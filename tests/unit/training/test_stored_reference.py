"""The reference of preferences, stored as columns: the loss of the live one, and refusals of any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardflow.cli.main import main
from shardflow.errors import ConfigError, TrainingError
from shardflow.format.facts.columns import open_columns
from shardflow.loading.sample import open_dataset
from shardflow.training.jobs.reference_columns import store_reference
from shardflow.training.run import train
from shardflow.training.tokenizing import count_dataset
from tests.conversation_case import generate, write_conversations
from tests.sweeps import sampled
from tests.unit.training.test_conversations import first_inputs, leave, make_run, settings

STORED = "task.reference=stored"
PACKED = 'batch={max_tokens = 800, packed = true, micro_batches_per_step = 2, tail = "mask", lanes = 1}'


def store(config: Path, *changes: str) -> dict[str, Any]:
    written = store_reference(settings(config, *changes))
    leave()
    return written


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return make_run(tmp_path, "qwen2", "dpo")


@pytest.mark.parametrize(
    ("family", "change"),
    sampled(
        [("qwen2", ""), ("qwen2", PACKED), ("qwen2_5_vl", ""), ("gemma3", PACKED), ("llama", "lora.rank=2")],
        {("qwen2", PACKED), ("qwen2_5_vl", "")},
    ),
)
def test_the_loss_is_that_of_the_live_reference(family: str, change: str, tmp_path: Path) -> None:
    config = make_run(tmp_path, family, "dpo")
    changes = (change,) if change else ()
    if change == PACKED:
        count_dataset(open_dataset(tmp_path / "dataset"), tmp_path / "model")
    written = store(config, *changes)
    assert (written["num_pairs"], written["num_without"]) == (16, 0)
    _, live, batch, of_live = first_inputs(settings(config, *changes))
    task, stored, other, of_stored = first_inputs(settings(config, STORED, *changes))
    assert batch.info.sample_keys == other.info.sample_keys
    assert task.references == ()
    with torch.no_grad():
        for mine, own in zip(live.parameters(), stored.parameters(), strict=True):
            if own.requires_grad:
                change_of_one = torch.randn_like(mine) * 0.05
                mine.add_(change_of_one)
                own.add_(change_of_one)
        wanted = of_live.loss(of_live.forward(live))
        found = of_stored.loss(of_stored.forward(stored))
    assert not torch.allclose(wanted, of_live.num_tokens * torch.tensor(2.0).log())  # it has moved
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_run_with_columns_trains_as_one_with_a_model(pairs: Path, tmp_path: Path) -> None:
    live = train(settings(pairs))
    leave()
    store(pairs)
    other = tmp_path / "other"
    stored = train(settings(pairs, STORED, f"run.output={other}"))
    leave()
    assert stored.loss == pytest.approx(live.loss, abs=1e-6)
    assert stored.evaluation_loss == pytest.approx(live.evaluation_loss, abs=1e-6)
    assert stored.evaluation_scores == live.evaluation_scores


def test_the_command_writes_the_table(pairs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"--config={pairs}", "--store-reference"]) == 0
    leave()
    written = json.loads(capfd.readouterr().out.splitlines()[-1])
    columns = open_columns(open_dataset(tmp_path / "dataset"))
    values = columns.column(f"{written['table']}.chosen").values
    assert np.isfinite(values).all()
    assert (values <= 0).all()
    assert (values < -1).sum() > 10  # answers of weight 0 have the probability 1
    assert store(pairs)["version"] == written["version"], "the same content"


def test_a_reference_of_something_else_is_refused(pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no log-probabilities of the reference .*--store-reference"):
        first_inputs(settings(pairs, STORED))
    table = store(pairs)["table"]
    first_inputs(settings(pairs, STORED))
    with pytest.raises(ConfigError, match="train_on and precision"):
        first_inputs(settings(pairs, STORED, "run.precision=bf16"))
    with pytest.raises(ConfigError, match=f"those of other settings are there .{table}"):
        first_inputs(settings(pairs, STORED, 'fields.conversation.train_on=["assistant", "user"]'))
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match="those of other settings"):
        first_inputs(settings(pairs, STORED))
    content[-1] ^= 1
    weights.write_bytes(content)
    first_inputs(settings(pairs, STORED))
    words = tmp_path / "model" / "tokenizer_config.json"
    words.write_text(words.read_text(encoding="utf-8") + " ", encoding="utf-8")
    with pytest.raises(ConfigError, match="those of other settings"):
        first_inputs(settings(pairs, STORED))


def test_pairs_without_a_value_are_refused_unless_they_cannot_be_trained_on(tmp_path: Path) -> None:
    """Such as pairs that came later; those that are bad or too long have no value, and need none."""
    config = make_run(tmp_path, "qwen2", "dpo")
    found = generate(16, 21, max_images=0, pairs=True)
    long = {**found[3][0], "messages": [*found[3][0]["messages"]]}
    long["messages"][-1] = {"role": "user", "content": [{"type": "text", "text": "Seen? " * 500}]}
    found[3] = (long, [])
    found[5] = ({**found[5][0], "kind": "no such kind"}, [])
    shutil.rmtree(tmp_path / "dataset")
    write_conversations(tmp_path / "dataset", found, splits={"train": 1})
    changes = ("fields.conversation.long=skip", "data.eval_split=", "run.max_steps=2")
    keys = tmp_path / "keys.txt"
    keys.write_text("".join(f"talk{number:04d}\n" for number in range(8)), encoding="utf-8")
    assert store(config, *changes, f"data.keys={keys}")["num_without"] == 2
    whole = settings(config, STORED, *changes)
    with pytest.raises(ConfigError, match="10 of 16 samples have no log-probabilities"):
        train(whole)
    leave()
    assert train(settings(config, STORED, *changes, f"data.keys={keys}")).outcome == "finished"
    leave()
    written = store(config, *changes)
    assert (written["num_pairs"], written["num_without"]) == (14, 2)
    other = f"run.output={tmp_path / 'other'}"
    assert train(settings(config, STORED, *changes, other)).outcome == "finished"
    leave()


def test_a_pair_that_is_learned_without_a_value_ends_the_run(pairs: Path) -> None:
    store(pairs)
    task, _, batch, _ = first_inputs(settings(pairs, STORED))
    mask = batch["reference_log_probabilities_mask"].copy()
    mask[0, 1] = 0
    changed = {**batch, "reference_log_probabilities_mask": mask}
    with pytest.raises(TrainingError, match="1 pairs of a micro-batch have no stored"):
        task.arrays(_Changed(changed, batch), is_evaluation=False)


class _Changed(dict[str, Any]):
    """A batch with other entries."""

    def __init__(self, entries: dict[str, Any], batch: Any) -> None:
        super().__init__(entries)
        self.arrays, self.info = batch.arrays, batch.info


def test_settings_that_a_stored_reference_does_not_fit_are_refused(pairs: Path, tmp_path: Path) -> None:
    template = tmp_path / "pairs.toml"
    turns = '[[turns]]\nrole = "user"\ntext = "Who?"\n[[turns]]\nrole = "assistant"\n'
    template.write_text(f'{turns}chosen = "One."\nrejected = "Two."\n', encoding="utf-8")
    for change, said in (
        ("task.type=sft", r"task\.reference needs task\.type = 'dpo'"),
        ('data.transform=["tests.sample_transforms:nothing"]', "conversations as they are stored"),
        ('model={target = "tests.tiny_talker:Talker"}', "bound to the files of model.path"),
        ("fields.conversation.member=other.json", "leave out template and member"),
        (f"fields.conversation.template={template}", "leave out template and member"),
        ("data.adopt_new_versions=epoch", "no values for pairs of a newer version"),
    ):
        with pytest.raises(ConfigError, match=said):
            settings(pairs, STORED, change)
    blend = tmp_path / "blend.toml"
    blend.write_text('[component.a]\ndataset = "dataset"\nsplit = "train"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="run it for each of its datasets"):
        store(pairs, f"data={{dataset = {str(blend)!r}}}")
