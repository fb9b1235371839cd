"""Tiny training runs for tests: 37 generated studies, a tokenizer, two small models of one layer.

A classifier of the same studies stands in where any run will do: its ranks start without transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardflow.config import dump_config, load_config
from shardflow.fields.field import Field
from shardflow.fields.types.pictures import Slices
from shardflow.fields.types.text import Text
from shardflow.format import Dataset
from shardflow.training.config import TrainConfig
from shardflow.training.text import train_tokenizer
from tests.factories import make_dataset

__all__ = [
    "CLASSIFY",
    "NUM_TRAIN",
    "NUM_VAL",
    "TinyInput",
    "make_tiny_input",
    "tiny_config",
    "tiny_fields",
    "write_config",
]

NUM_TRAIN, NUM_VAL = 26, 11
CLASSIFY = "classify.toml"
"""Settings of the classifier, in the folder of the input."""

_TEMPLATE = """
[data]
dataset = "dataset"
[batch]
micro_batch_size = 1
micro_batches_per_step = 4
[fields.image]
type = "slices"
series = "series == 0"
num_slices = 3
size = [16, 16]
dtype = "float32"
missing = "pad"
[fields.report]
type = "text"
missing = "pad"
[image]
rows = 16
columns = 16
[text]
tokenizer = "tokenizer"
max_tokens = 24
[model]
patch_size = 8
vision_width = 32
vision_layers = 1
vision_heads = 2
language_width = 32
language_layers = 1
language_heads = 2
"""
_CLASSIFY = """
[data]
dataset = "dataset"
[task]
type = "classify"
labels = "multi_class"
[batch]
micro_batch_size = 1
micro_batches_per_step = 4
[fields.image]
type = "slices"
num_slices = 2
size = [16, 16]
missing = "pad"
[fields.label]
type = "column"
column = "facts.num_slices"
[image]
rows = 16
columns = 16
"""
_RUN = """
[optimizer]
learning_rate = 3e-3
warmup_steps = 2
[loader]
num_threads = 1
prefetch_bytes = "1MiB"
wait_timeout_s = 50
[run]
output = "run"
seed = 3
checkpoint_every_steps = 2
device = "cpu"
tensorboard = false
"""


@dataclass(frozen=True, slots=True)
class TinyInput:
    """Folder of a generated dataset (26 training and 11 validation samples) and its tokenizer."""

    folder: Path

    @property
    def dataset(self) -> Path:
        return self.folder / "dataset"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"


def make_tiny_input(folder: Path) -> TinyInput:
    """Generate the input; half a second."""
    tiny = TinyInput(folder)
    make_dataset(
        tiny.dataset,
        num_samples=NUM_TRAIN + NUM_VAL,
        samples_per_shard=8,
        slices=(1, 5),
        splits={"train": NUM_TRAIN, "val": NUM_VAL},
        facts=True,
    )
    train_tokenizer(Dataset.open(tiny.dataset), "train", 320, tiny.tokenizer)
    (folder / "train.toml").write_text(_TEMPLATE + _RUN, encoding="utf-8")
    (folder / CLASSIFY).write_text(_CLASSIFY + _RUN, encoding="utf-8")
    return tiny


def tiny_config(tiny: TinyInput, output: Path, *overrides: str, file: str = "train.toml") -> TrainConfig:
    """Settings of a run: 6 steps an epoch of 4 micro-batches of 1 sample, a checkpoint every 2 steps."""
    return load_config(TrainConfig, tiny.folder / file, [f"run.output={output}", *overrides])


def tiny_fields(**image: Any) -> dict[str, Field]:
    """Fields of the settings, for a loader of its own; with other settings of the images."""
    settings: dict[str, Any] = {
        "series": "series == 0",
        "num_slices": 3,
        "size": (16, 16),
        "dtype": "float32",
    }
    return {"image": Slices(missing="pad", **settings | image), "report": Text(missing="pad")}


def write_config(
    tiny: TinyInput, path: Path, output: Path, settings: Mapping[str, object], *, file: str = "train.toml"
) -> Path:
    """Write the settings to a file, for a job in another process."""
    overrides = [f"{key}={value}" for key, value in settings.items()]
    path.write_text(dump_config(tiny_config(tiny, output, *overrides, file=file)), encoding="utf-8")
    return path
