"""A run with stored tokens is the run that tokenizes: same samples, same losses, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.entities import EntityDataset, EntityRules
from shardflow.format.facts.making import attach_facts
from shardflow.reports.entity_views import build_view
from shardflow.training.metrics import read_metrics
from shardflow.training.run import train
from shardflow.training.text import ReportTokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset, tokenizer_digest
from tests.distributed.runs import committed_samples, differing_weights
from tests.entity_datasets import make_entity_dataset
from tests.tiny_runs import TinyInput, make_tiny_input, tiny_config

SHORT = ("run.max_steps=3", "data.eval_split=val", "run.checkpoint_every_steps=2", "text.max_tokens=8")


@pytest.fixture
def tiny(tmp_path: Path) -> TinyInput:
    return make_tiny_input(tmp_path)


def stored(tiny: TinyInput) -> str:
    """Return the setting that takes stored tokens."""
    digest = tokenizer_digest(tiny.tokenizer)
    return f"fields.report={{type='tokens',tokenizer='{digest}',flat=true,missing='pad'}}"


def losses(run: Path) -> list[float]:
    return [line["loss"] for event in ("step", "evaluation") for line in read_metrics(run, event)]


@pytest.mark.parametrize(
    "more",
    [(), ("augment.mirror=0.5", "fields.words={type='text',missing='pad'}"), ("batch.packed=true",)],
)
def test_stored_tokens_give_the_same_run(tiny: TinyInput, more: tuple[str, ...]) -> None:
    tokenize_dataset(Dataset.open(tiny.dataset), TextTokenizer(tiny.tokenizer))
    online, kept = tiny.folder / "online", tiny.folder / "kept"
    train(tiny_config(tiny, online, *SHORT, *more))
    train(tiny_config(tiny, kept, *SHORT, stored(tiny), *more))
    assert committed_samples(kept) == committed_samples(online)
    assert len(losses(kept)) == 4
    assert losses(kept) == losses(online)
    assert differing_weights(kept, online) == []


def test_a_dataset_without_tokens_is_refused(tiny: TinyInput) -> None:
    with pytest.raises(ConfigError, match=r"must be tokenized with tokenizer .*run: shardflow tokenize"):
        train(tiny_config(tiny, tiny.folder / "none", *SHORT, stored(tiny)))


def test_tokens_of_an_earlier_tokenizer_are_not_taken(tiny: TinyInput) -> None:
    tokenize_dataset(Dataset.open(tiny.dataset), TextTokenizer(tiny.tokenizer))
    file = tiny.tokenizer / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="must be tokenized with tokenizer"):
        train(tiny_config(tiny, tiny.folder / "other", *SHORT, stored(tiny)))


def test_rows_of_ids_are_those_of_the_texts(tiny: TinyInput) -> None:
    texts = ["", "no effusion </s> <pad> left", "a " * 40]
    tokenizer = ReportTokenizer.load(tiny.tokenizer)
    ids = TextTokenizer(tiny.tokenizer).encode(texts)
    for max_tokens in (2, 9, 300):
        online, stored = tokenizer.encode(texts, max_tokens), tokenizer.rows(ids, max_tokens)
        assert online.token_ids.tolist() == stored.token_ids.tolist()
        assert online.token_mask.tolist() == stored.token_mask.tolist()


def test_a_run_over_an_entity_view_trains_on_its_rows_and_resumes(tiny: TinyInput) -> None:
    dataset = make_entity_dataset(tiny.folder / "studies", without=())
    attach_facts(dataset)
    build_view(dataset, EntityRules())
    entities = EntityDataset.beside(dataset)
    tokenize_dataset(entities, TextTokenizer(tiny.tokenizer))
    settings = (
        f"data.dataset={tiny.folder / 'studies'}",
        'data.view="entity"',
        "data.eval_split=val",
        'batch.tail="mask"',
        "run.num_epochs=1",
    )
    online, kept, parts = (tiny.folder / name for name in ("online", "kept", "parts"))
    train(tiny_config(tiny, online, *settings))
    train(tiny_config(tiny, kept, *settings, stored(tiny)))
    train(tiny_config(tiny, parts, *settings, "run.max_steps=2"))
    assert train(tiny_config(tiny, parts, *settings)).resumed_from is not None
    assert committed_samples(online) == committed_samples(kept) == committed_samples(parts)
    keys = {entities.samples.sample_key(row) for row in entities.splits["train"]}
    trained = str(committed_samples(online))
    assert all(key in trained for key in keys)
    assert losses(kept) == losses(online)
    assert differing_weights(parts, online) == []
