"""``shardflow tokenize --fields``: counts of the conversations and pairs that a template makes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format.counts import CountsManifest
from tests.cli.conftest import Call
from tests.conversation_case import make_folder
from tests.factories import make_dataset
from tests.integration.loader_support import open_loader
from tests.integration.test_counted_templates import PACKED, TEXT_TURNS, count, fields_of
from tests.integration.test_templates import NUM_SAMPLES, make


@pytest.fixture
def studies(tmp_path: Path) -> Path:
    made = make_dataset(tmp_path / "a", num_samples=NUM_SAMPLES, samples_per_shard=4, make=make, facts=True)
    return Path(made)


@pytest.fixture
def processor(tmp_path: Path) -> Path:
    make_folder("llama", tmp_path / "llama", with_model=False)
    return tmp_path / "llama"


def test_counts_of_another_template_or_of_changed_columns_are_refused(
    studies: Path, processor: Path, call: Call, tmp_path: Path
) -> None:
    def attach(words: str) -> None:
        keys = [key.decode() for key in sf.open(studies).studies.column("sample_key")]
        with (tmp_path / "drafts.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["sample_key", "text"])
            rows.writerows([key, f"{words} {place}"] for place, key in enumerate(keys))
        arguments = ("--name", "drafts", "--on", "sample_key", "--columns", "text", "--type", "text=string")
        assert call("attach", studies, tmp_path / "drafts.csv", *arguments).code == 0

    def opened(fields: Mapping[str, sf.Field]) -> None:
        open_loader(sf.open(studies), PACKED, fields).close()

    attach("A draft")
    turns = [TEXT_TURNS[0], {"role": "assistant", "chosen": "{impression}", "rejected": "{drafts.text}"}]
    fields = fields_of(processor, turns, packed=True, pairs=True)
    count(studies, fields)
    opened(fields)
    other = fields_of(processor, [{**turns[0], "text": "Seen?"}, turns[1]], packed=True, pairs=True)
    with pytest.raises(ConfigError, match="no counts of the tokens of this template"):
        opened(other)
    attach("Another draft")
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
    training.write_text(f'[data]\ndataset = "a"\n{file.read_text()}\n[task]\ntype = "dpo"\n', encoding="utf-8")
    counted = call("tokenize", studies, "--processor", processor, "--fields", training, "--threads", 1, "--json")
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
