"""Weights of a folder on two real ranks: each reads its own rows, in the memory of its share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.training.start_up import make_folder
from tests.distributed.launcher import job

pytestmark = pytest.mark.distributed

LIMIT = 1.3
"""Of the peak over the share."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("weights")
    # Rows that two ranks cannot share evenly, and tied embeddings.
    config = LlamaConfig(
        vocab_size=43,
        hidden_size=20,
        intermediate_size=33,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=5,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(str(folder / "tiny"))
    make_folder(folder / "large", "70M")
    arguments = [str(folder), str(folder / "found.json")]
    with job(
        folder,
        "tests.distributed.weights_ranks",
        arguments,
        num_ranks=2,
        is_forked=True,
        warnings="default",
    ) as running:
        finished = running.wait(300)
    assert finished.exit_code == 0, finished.text
    found: list[dict[str, Any]] = json.loads(Path(folder / "found.json").read_text(encoding="utf-8"))
    return found


def test_each_rank_reads_its_rows_and_together_they_are_the_model(ranks: list[dict[str, Any]]) -> None:
    shares = [one["share"] for one in ranks]
    assert all(one["equal"] for one in shares)
    assert sum(one["bytes_read"] for one in shares) == shares[0]["bytes_stored"]
    assert shares[0]["logits"] == shares[1]["logits"]


def test_starting_takes_the_memory_of_the_shares(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        found = one["memory"]
        assert found["growth_bytes"] <= LIMIT * found["share_bytes"]
