"""Training on conversations and pairs that templates make of studies, packed, stopped and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from shardflow.fields.registry import read_fields
from shardflow.format.keys import STUDY_FIELD
from shardflow.loading.sample import open_dataset
from shardflow.training.run import train
from shardflow.training.tokenizing import count_dataset
from tests.conversation_case import make_folder
from tests.distributed.runs import committed_samples, differing_weights
from tests.factories import MadeSample, make_dataset, sample_key
from tests.integration.test_templates import make
from tests.sweeps import sampled
from tests.unit.training.test_conversations import TEMPLATE, leave, settings
from tests.unit.training.test_packed_conversations import PACKED, SINGLE, losses_of

FIELDS: Final = """
template = "turns.toml"
missing = "pad"
[fields.frontal]
type = "image"
series = "role == 'frontal'"
size = [28, 28]
missing = "pad"
[fields.impression]
type = "text"
section = "impression"
missing = "pad"
[model]
"""
ASKED: Final = """
draws = "sample"
[[turns]]
role = "user"
text = ["IMAGEWhat is seen?", "IMAGEReport of a {facts.sex} of {facts.age_years:.0f} years."]
[[turns]]
role = "assistant"
"""
ANSWERS: Final = {
    "sft": 'text = "{impression}"\n',
    "dpo": 'chosen = "{impression}"\nrejected = ["It is quite something.", "{facts.modality}"]\n',
}
ANSWERS["reward"] = ANSWERS["dpo"]


def made(number: int, **_: Any) -> MadeSample:
    """Study ``number``, of the content of one of sixteen."""
    one = make(number % 16)
    study = one.fields[STUDY_FIELD].replace(one.key.encode(), sample_key(number).encode())
    return replace(one, key=sample_key(number), fields={**one.fields, STUDY_FIELD: study})


def template_run(folder: Path, family: str, task: str) -> Path:
    """A model, studies, and the settings of a run on counted conversations of a template."""
    make_folder(family, folder / "model")
    make_dataset(
        folder / "dataset",
        splits={"train": 24, "val": 4},
        samples_per_shard=8,
        make=made,
        facts=True,
    )
    text = TEMPLATE.format(task=task, pairs=str(task != "sft").lower()).replace("\n[model]\n", FIELDS)
    (folder / "train.toml").write_text(text, encoding="utf-8")
    image = "" if family == "llama" else "<image:frontal>"
    turns = ASKED.replace("IMAGE", image) + ANSWERS[task]
    (folder / "turns.toml").write_text(turns, encoding="utf-8")
    dataset, fields = open_dataset(folder / "dataset"), read_fields(folder / "train.toml")
    assert count_dataset(dataset, folder / "model", fields=fields, name="conversation").num_empty > 4
    return folder / "train.toml"


@pytest.mark.parametrize(
    ("family", "task"),
    sampled(
        [
            ("qwen2_5_vl", "sft"),
            ("gemma3", "sft"),
            ("llama", "dpo"),
            ("qwen2_5_vl", "dpo"),
            ("llama", "reward"),
        ],
        {("qwen2_5_vl", "sft"), ("llama", "dpo")},
    ),
)
def test_packed_templates_have_the_losses_of_single_ones(family: str, task: str, tmp_path: Path) -> None:
    config = template_run(tmp_path, family, task)
    packed, num_packed = losses_of(config, PACKED)
    single, num_single = losses_of(config, SINGLE)
    assert num_packed < num_single
    assert packed.keys() == {key for key, (_, count) in single.items() if count}
    for key, (loss, count) in packed.items():
        assert single[key][1] == count
        assert abs(single[key][0] - loss) <= 1e-6, key
    assert sum(loss for loss, _ in packed.values()) > 0


def test_a_stopped_run_on_packed_templates_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    config = template_run(tmp_path, "llama", "dpo")
    whole = train(settings(config, PACKED))
    assert whole.outcome == "finished"
    assert whole.evaluation_scores.keys() == {"pair_accuracy"}
    leave()
    other = tmp_path / "other"
    train(settings(config, PACKED, f"run.output={other}", "run.max_steps=2"))
    leave()
    again = train(settings(config, PACKED, f"run.output={other}"))
    assert again.resumed_from == "step-00000002"
    assert committed_samples(other) == committed_samples(tmp_path / "run")
    assert differing_weights(other, tmp_path / "run") == []
