"""Settings of a training run: what is refused, and in which words."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from shardflow.configs import dump_config, load_config
from shardflow.errors import ConfigError
from shardflow.training import TrainConfig

pytestmark = pytest.mark.fast

REPOSITORY = Path(__file__).resolve().parents[3]
RECIPES = sorted((REPOSITORY / "pipelines" / "recipes").glob("train_*.toml"))

MINIMAL = """
[data]
dataset = "dataset"
[batch]
micro_batch_size = 2
micro_batches_per_step = 4
[text]
tokenizer = "tokenizer"
[run]
output = "run"
"""


def load(tmp_path: Path, *overrides: str) -> TrainConfig:
    path = tmp_path / "train.toml"
    path.write_text(MINIMAL, encoding="utf-8")
    return load_config(TrainConfig, path, overrides)


def test_four_tables_are_enough_and_paths_are_taken_from_the_file(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.data.dataset == tmp_path / "dataset"
    assert config.run.output == tmp_path / "run"
    assert config.timeouts.startup_s > config.timeouts.steady_s > config.loader.wait_timeout_s


def test_settings_survive_being_written_and_read(tmp_path: Path) -> None:
    config = load(tmp_path, "run.max_steps=5", "optimizer.learning_rate=1e-5", "loader.prefetch_bytes=1MiB")
    written = tmp_path / "resolved.toml"
    written.write_text(dump_config(config), encoding="utf-8")
    assert load_config(TrainConfig, written) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.sede=1", "'seed'"),
        ("optimiser.learning_rate=1", "'optimizer'"),
        ("batch.micro_batch_size=0", "at least 1"),
        ("batch.tail=keep", "one of 'drop', 'repeat', 'mask'"),
        ("image.rows=60", "multiple of model.patch_size"),
        ("model.vision_width=130", "even multiple of vision_heads"),
        ("model.dropout=1.0", "from 0 to 0.9"),
        ("optimizer.max_gradient_norm=0", "above 0"),
        ("loader.wait_timeout_s=100", "less than timeouts.steady_s"),
        ("run.evaluate_every_steps=2", "data.eval_split must name a split"),
        ("run.resume=", "'auto', 'never' or a checkpoint folder"),
        ("run.keep_last=0", "at least 1"),
        ("text.max_tokens=1", "at least 2"),
    ],
)
def test_wrong_setting_is_refused_by_name(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, override)


def test_docs_name_every_setting() -> None:
    page = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    for table in fields(TrainConfig):
        heading = page.index(f"| `[{table.name}]` |")
        section = page[heading : page.index("\n\n", heading)]
        settings = get_type_hints(TrainConfig)[table.name]
        for setting in fields(settings):
            assert f"`{setting.name}`" in section, f"{table.name}.{setting.name}"


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_is_valid_and_names_every_table(recipe: Path) -> None:
    config = load_config(TrainConfig, recipe)
    text = recipe.read_text(encoding="utf-8")
    for table in dump_config(config).splitlines():
        if table.startswith("["):
            assert table in text, f"{recipe.name} must show {table}"
