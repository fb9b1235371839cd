"""From settings to the batch spec; from a mesh to a data-parallel rank; a run under a token budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.config import load_config
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading import Loader, Selection, World, select
from shardflow.sampling import BatchSpec
from shardflow.sampling.spec import Tail
from shardflow.training.config import TrainConfig
from shardflow.training.data import batch_spec
from shardflow.training.ledger import read_ledger
from shardflow.training.run import train
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.tiny_runs import TinyInput, make_tiny_input, tiny_config

BUDGET = ("batch.max_tokens=60", "batch.max_samples=4", "batch.window_bytes=64KiB")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyInput:
    made = make_tiny_input(tmp_path_factory.mktemp("tiny"))
    path = made.folder / "train.toml"
    path.write_text(path.read_text(encoding="utf-8").replace("micro_batch_size = 1\n", ""), encoding="utf-8")
    return made


def config_of(tiny: TinyInput, *overrides: str) -> TrainConfig:
    return load_config(TrainConfig, tiny.folder / "train.toml", overrides)


def spec_of(config: TrainConfig, selection: Selection, tail: Tail | None = None) -> BatchSpec:
    return batch_spec(config.batch, config.image_field, config.text, selection, config.fields, tail=tail)


def test_settings_become_a_batch_spec(tiny: TinyInput) -> None:
    dataset = Dataset.open(tiny.dataset)
    plain = spec_of(config_of(tiny, "batch.micro_batch_size=2"), select(dataset, "train"))
    assert plain.to_json() == {
        "kind": "fixed",
        "micro_batch_size": 2,
        "micro_batches_per_step": 4,
        "tail": "drop",
    }
    spec = spec_of(config_of(tiny, *BUDGET), select(dataset, "train"), tail="mask")
    assert spec.budget is not None
    assert (spec.budget.max_tokens, spec.budget.cost.max_text_tokens, spec.tail) == (60, 24, "mask")
    assert spec.lanes >= 1
    assert spec_of(config_of(tiny, *BUDGET, "batch.lanes=3"), select(dataset, "train")).lanes == 3
    loader = Loader(dataset, split="train", batch=spec, seed=3, world=World())
    assert loader.num_steps >= 1


def test_budgets_are_filled_by_counts_of_the_runs_tokenizer(tiny: TinyInput) -> None:
    config, dataset = config_of(tiny, *BUDGET, "batch.text_tokens=counted"), Dataset.open(tiny.dataset)
    with pytest.raises(ConfigError, match="run: shardflow tokenize"):
        spec_of(config, select(dataset, "train"))
    counter = TextTokenizer(tiny.tokenizer)
    tokenize_dataset(dataset, counter)
    spec = spec_of(config, select(dataset, "train"))
    assert spec.budget is not None
    assert spec.budget.cost.tokenizer == counter.digest
    assert Loader(dataset, split="train", batch=spec, seed=3).summary().num_dropped >= 0


def test_a_budget_charges_for_what_the_fields_of_the_run_deliver(tiny: TinyInput) -> None:
    tokens = (*BUDGET, "batch.max_tokens=200", "batch.image_tokens_per_slice=30")
    config = config_of(tiny, *tokens, "batch.counts_delivered=true", "fields.image.num_slices=2")
    selection = select(Dataset.open(tiny.dataset), "train")
    spec, stored = spec_of(config, selection), spec_of(config_of(tiny, *tokens), selection)
    assert spec.budget is not None
    assert stored.budget is not None
    assert stored.budget.cost.max_slices > 0
    assert spec.budget.cost == replace(stored.budget.cost, max_slices=0, counts_delivered=True)
    with Loader(selection, batch=spec, seed=3, fields=config.fields) as loader:
        # The lanes are those that are chosen for what is delivered, as the plan chooses them.
        charged = loader.selection.plan(loader.plan.spec, seed=3, epoch=0, auto_lanes=True)
        assert charged.spec == loader.plan.spec
        text = config.text.max_tokens
        for batch in loader:
            reports = [min(text, -(-len(one.encode()) // 4)) for one in batch["report"]]
            pictures = batch["image_mask"].sum(axis=1).tolist()
            lengths = [2 + 30 * num + report for num, report in zip(pictures, reports, strict=True)]
            assert len(lengths) < 2 or max(lengths) * len(lengths) <= 200


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "one of micro_batch_size and max_tokens, got neither"),
        ((*BUDGET, "batch.micro_batch_size=1"), "got both"),
        ((*BUDGET, "batch.lanes=0"), "batch.lanes must be at least 1"),
        (("batch.micro_batch_size=1", "batch.counts_delivered=true"), "counts_delivered needs batch.max_tok"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    tiny: TinyInput, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(tiny, *overrides)


def test_a_run_under_a_budget_is_as_long_as_its_epochs_and_goes_on_after_a_stop(
    tiny: TinyInput, tmp_path: Path
) -> None:
    settings = (*BUDGET, "batch.lanes=2", "run.num_epochs=3")
    dataset = Dataset.open(tiny.dataset)
    spec = spec_of(tiny_config(tiny, tmp_path, *settings), select(dataset, "train"))
    loader = Loader(dataset, split="train", batch=spec, seed=3)
    lengths = [loader.num_steps_in(epoch) for epoch in range(3)]
    whole = train(tiny_config(tiny, tmp_path / "whole", *settings, "data.eval_split=val"))
    assert whole.global_step == whole.num_steps == sum(lengths)
    train(tiny_config(tiny, tmp_path / "cut", *settings, f"run.max_steps={lengths[0] + 1}"))
    again = train(tiny_config(tiny, tmp_path / "cut", *settings))
    assert again.global_step == sum(lengths)
    # The learning rate's cosine of a shorter run is another one, so only the samples are compared.
    one, other = (read_ledger(tmp_path / name) for name in ("whole", "cut"))
    assert [step.micro_batches for step in one] == [step.micro_batches for step in other]
