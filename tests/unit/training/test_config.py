"""Settings of a training run: what is refused, and in which words."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError
from shardflow.training.config import TrainConfig

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
    assert config.data.dataset == str(tmp_path / "dataset")
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
        ("batch.over_budget=skip", r"batch\.over_budget needs batch\.max_tokens"),
        ("batch.text_tokens=counted", r"batch\.text_tokens needs batch\.max_tokens"),
        ('data.subset=["modality=CT"]', "'subset'"),
        ("batch.tail=keep", "one of 'drop', 'repeat', 'mask'"),
        ("image.rows=60", "multiple of model.patch_size"),
        ("model.vision_width=130", "even multiple of vision_heads"),
        ("model.weights=random", r"model\.weights needs model\.path"),
        ("parallel.accumulation=sharded", "must be left out under ddp"),
        ("model.dropout=1.0", "from 0 to 0.9"),
        ("optimizer.max_gradient_norm=0", "above 0"),
        ("loader.wait_timeout_s=100", "less than timeouts.steady_s"),
        ("run.evaluate_every_steps=2", "needs data.eval_split"),
        ("run.resume=", "'auto', 'never' or a checkpoint folder"),
        ("run.keep_last=0", "at least 1"),
        ("cache.ram_bytes=-1", "ram_bytes must be a size"),
        ("cache.max_bytes=1000000", "directory must be given"),
        ("cache.directory=nvme", "max_bytes must be at least block_bytes"),
        ("cache.policy=fifo", "one of 'belady', 'lru', 'lfu-decay'"),
        ("text.max_tokens=1", "at least 2"),
        ("timeouts.startup_s=1e22", r"timeouts\.startup_s must be from 0\.1 to 10000000"),
        ("optimizer.epsilon=0", "epsilon must be above 0"),
        ('lora.targets=["q_proj"]', r"lora\.targets needs lora\.rank"),
    ],
)
def test_wrong_setting_is_refused_by_name(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, override)


def test_hung_rank_is_named_before_the_others_give_up(tmp_path: Path) -> None:
    times = ("timeouts.steady_s=5", "loader.wait_timeout_s=4")
    assert load(tmp_path, "timeouts.hang_s=0", *times).timeouts.hang_s == 0.0
    with pytest.raises(ConfigError, match=r"hang_s must be less than timeouts.steady_s \(5\), got 5"):
        load(tmp_path, "timeouts.hang_s=5", *times)


@pytest.mark.parametrize(
    ("output", "cache", "message"),
    [
        ("dataset", None, r"run\.output must lie outside data\.dataset"),
        ("dataset/run", None, r"run\.output must lie outside data\.dataset"),
        ("run", "dataset/cache", r"cache\.directory must lie outside data\.dataset"),
        ("nvme", "nvme", r"run\.output must lie outside cache\.directory"),
        ("nvme/run", "nvme", r"run\.output must lie outside cache\.directory"),
    ],
)
def test_run_and_cache_keep_to_folders_of_their_own(
    tmp_path: Path, output: str, cache: str | None, message: str
) -> None:
    settings = [f"run.output={tmp_path / output}"]
    if cache is not None:
        settings += [f"cache.directory={tmp_path / cache}", "cache.max_bytes=1MiB"]
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, *settings)


def test_docs_name_every_setting() -> None:
    """The page of settings is made of the docstrings of each table."""
    named = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    page = (REPOSITORY / "docs" / "settings.md").read_text(encoding="utf-8")
    for table in fields(TrainConfig):
        assert f"`[{table.name}]`" in named
        settings = get_type_hints(TrainConfig)[table.name]
        if table.name not in {"cache", "fields", "sampling"}:  # on pages of their own
            assert f'.{settings.__name__}\n    options: {{ heading: "[{table.name}]"' in page


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_is_valid_and_names_every_table(recipe: Path) -> None:
    config = load_config(TrainConfig, recipe)
    text = recipe.read_text(encoding="utf-8")
    for table in dump_config(config).splitlines():
        if table.startswith("["):
            assert table in text, f"{recipe.name} must show {table}"
