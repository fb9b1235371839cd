"""``shardflow tokenize --fields``: counts of the conversations and pairs that a template makes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.fields.conversations.rendering import Renderer
from shardflow.format.counts import CountsManifest
from tests.cli.conftest import Call
from tests.conversation_case import make_folder
from tests.factories import make_dataset
from tests.integration.loader_support import number_of, open_loader
from tests.integration.test_counted_templates import ALONE, PACKED, TEXT_TURNS, count, fields_of
from tests.integration.test_templates import NUM_SAMPLES, impression_of, make


@pytest.fixture
def studies(tmp_path: Path) -> Path:
    made = make_dataset(tmp_path / "a", num_samples=NUM_SAMPLES, samples_per_shard=4, make=make, facts=True)
    return Path(made)


@pytest.fixture
def processor(tmp_path: Path) -> Path:
    make_folder("llama", tmp_path / "llama", with_model=False)
    return tmp_path / "llama"


def attach(call: Call, studies: Path, name: str, column: str, values: Mapping[str, str]) -> None:
    """Attach a column of texts by sample key."""
    path = studies.parent / f"{name}.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sample_key", column])
        rows.writerows(values.items())
    arguments = ("--name", name, "--on", "sample_key", "--columns", column, "--type", f"{column}=string")
    called = call("attach", studies, path, *arguments)
    assert called.code == 0, called.err


def keys_of(studies: Path) -> list[str]:
    return [key.decode() for key in sf.open(studies).studies.column("sample_key")]


def test_a_rejected_answer_is_that_of_a_study_that_a_column_names(
    studies: Path, processor: Path, call: Call
) -> None:
    keys = keys_of(studies)
    named = {key: other for key, other in zip(keys, [*keys[3:], *keys[:3]], strict=True) if key != keys[0]}
    attach(call, studies, "negatives", "study", named)
    turns = [
        {"role": "user", "text": "What is seen?"},
        {"role": "assistant", "chosen": "{impression}", "rejected": "{other}"},
    ]
    other = sf.Text(section="impression", study="negatives.study", missing="pad")
    fields = {"other": other, **fields_of(processor, turns, pairs=True)}
    packed = {**fields, **fields_of(processor, turns, pairs=True, packed=True)}
    assert count(studies, packed).num_empty == NUM_SAMPLES - len(
        [key for key in named if impression_of(number_of(key)) and impression_of(number_of(named[key]))]
    )
    words = Renderer.load(processor).tokenizer
    seen = 0
    with open_loader(sf.open(studies), PACKED, packed) as loader:
        for batch in loader:
            cuts, learned = batch["talk_cu_seqlens"], batch["talk_weights"][0] > 0
            for slot, key in enumerate(filter(None, batch.info.sample_keys)):
                ends = [slice(*cuts[2 * slot + end : 2 * slot + end + 2]) for end in range(2)]
                said = [words.decode(batch["talk"][0, end][learned[end]]) for end in ends]
                wanted = [impression_of(number_of(one)) for one in (key, named[key])]
                assert said == [f"{one}<|eot_id|>" for one in wanted]
                seen += 1
        assert not any(batch.quarantined for batch in loader)
        assert loader.lock()["datasets"][0]["tables"].keys() == {"negatives"}
    assert seen > 4
    attach(call, studies, "negatives", "study", {**named, keys[1]: "z" * 26, keys[2]: keys[1]})
    with pytest.raises(ConfigError, match=r"Of 15 values of negatives.study, 1 are no sample keys"):
        open_loader(sf.open(studies), ALONE, fields)
    for study, match in (("negative.study", "attach its table"), ("facts.age_years", "has no texts")):
        with pytest.raises(ConfigError, match=match):
            open_loader(sf.open(studies), ALONE, {"other": replace(other, study=study)})
    previous = sf.Text(study="previous", missing="pad")
    with pytest.raises(ConfigError, match="reads one other study of each sample"):
        open_loader(sf.open(studies), ALONE, {**fields, "prior": previous})


def test_a_study_of_another_split_is_none_to_learn_from(tmp_path: Path, call: Call) -> None:
    studies = Path(make_dataset(tmp_path / "a", splits={"train": 3, "val": 2}, make=make, facts=True))
    keys = keys_of(studies)
    attach(call, studies, "negatives", "study", {keys[0]: keys[1], keys[1]: keys[-1]})
    with pytest.raises(ConfigError, match="and 1 name a study of another split"):
        open_loader(sf.open(studies), ALONE, {"other": sf.Text(study="negatives.study", missing="pad")})


def test_counts_of_another_template_or_of_changed_columns_are_refused(
    studies: Path, processor: Path, call: Call, tmp_path: Path
) -> None:
    def write(words: str) -> None:
        attach(
            call, studies, "drafts", "text", {key: f"{words} {n}" for n, key in enumerate(keys_of(studies))}
        )

    def opened(fields: Mapping[str, sf.Field]) -> None:
        open_loader(sf.open(studies), PACKED, fields).close()

    write("A draft")
    turns = [TEXT_TURNS[0], {"role": "assistant", "chosen": "{impression}", "rejected": "{drafts.text}"}]
    fields = fields_of(processor, turns, packed=True, pairs=True)
    count(studies, fields)
    opened(fields)
    other = fields_of(processor, [{**turns[0], "text": "Seen?"}, turns[1]], packed=True, pairs=True)
    with pytest.raises(ConfigError, match="no counts of the tokens of this template"):
        opened(other)
    write("Another draft")
    with pytest.raises(ConfigError, match="a token budget needs anew where a column has changed"):
        opened(fields)
    assert count(studies, fields).num_shards_kept == 0
    opened(fields)


FIELDS_FILE: Final = """
[fields.impression]
type = "text"
section = "impression"
missing = "pad"

[fields.talk]
type = "conversation"
processor = "PROCESSOR"
max_tokens = 400
missing = "pad"
pairs = true

[[fields.talk.template.turns]]
role = "user"
text = "What is seen?"

[[fields.talk.template.turns]]
role = "assistant"
chosen = "{impression}"
rejected = "It is quite something."
"""


def test_commands_count_and_draw_the_pairs_of_a_file_of_fields_or_of_training(
    studies: Path, processor: Path, call: Call, tmp_path: Path
) -> None:
    file, training = tmp_path / "fields.toml", tmp_path / "dpo.toml"
    file.write_text(FIELDS_FILE.replace("PROCESSOR", str(processor)), encoding="utf-8")
    training.write_text(
        f'[data]\ndataset = "a"\n{file.read_text()}\n[task]\ntype = "dpo"\n', encoding="utf-8"
    )
    counted = call(
        "tokenize", studies, "--processor", processor, "--fields", training, "--threads", 1, "--json"
    )
    assert counted.code == 0, counted.err
    assert (counted.last_line["num_samples"], counted.last_line["num_empty"]) == (NUM_SAMPLES, 4)
    again = call("tokenize", studies, "--processor", processor, "--fields", file, "--threads", 1)
    assert "4 of 4 shards done before" in again.out
    (path,) = studies.glob("conversations/*/*/manifest.json")
    assert CountsManifest.decode(path.read_bytes(), name="x").template is not None
    drawn = call("preview", studies, "train:1", "--fields", file, "-o", tmp_path / "a.png", "--json")
    assert drawn.code == 0, drawn.err
    assert drawn.last_line["learned_tokens"] > 4
    for extra, said in (
        (("--max-tokens", 9), "splits stored conversations"),
        (("--unit", "window"), "unit='window'"),
    ):
        refused = call("tokenize", studies, "--processor", processor, "--fields", file, *extra)
        assert (refused.code, said in refused.err) == (2, True), refused.err
    refused = call("tokenize", studies, "--processor", processor, "--unit", "series")
    assert (refused.code, "those of studies" in refused.err) == (2, True)
