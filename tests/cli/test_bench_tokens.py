"""``shardflow bench`` on a dataset with stored tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.shards import Dataset
from shardflow.shards.tokens import open_counts, stored_tokenizers
from shardflow.training.text import train_tokenizer
from tests.cli.conftest import Call
from tests.factories import make_dataset


@pytest.mark.parametrize("slices", [0, (2, 4)])
def test_stored_tokens_are_measured(call: Call, tmp_path: Path, slices: int | tuple[int, int]) -> None:
    dataset = Dataset.open(make_dataset(tmp_path / "d", num_samples=9, slices=slices))
    train_tokenizer(dataset, "train", 300, tmp_path / "bpe")
    assert stored_tokenizers(dataset) == []
    assert call("tokenize", tmp_path / "d", "--tokenizer", tmp_path / "bpe", "--json").code == 0
    (tokenizer,) = stored_tokenizers(dataset)
    (facts,) = call("bench", tmp_path / "d", "--repeats", 1, "--json").lines
    assert facts["samples"] == 9
    assert facts["tokens"]["tokenizer"] == tokenizer
    assert facts["tokens"]["num_tokens"] == int(open_counts(dataset, tokenizer).sum())
    assert facts["tokens"]["tokens_per_s"] > 0
    assert facts["results"]["tokens"]["samples_per_s"] > 0
    assert "Stored tokens come at" in call("bench", tmp_path / "d", "--repeats", 1).out
