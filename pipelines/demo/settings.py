"""The two configuration files of the demo; they lie in its output, to be read and changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = [
    "MICRO_BATCHES_PER_STEP",
    "MICRO_BATCH_SIZE",
    "SEED",
    "TAIL",
    "write_key",
    "write_pack_config",
    "write_train_config",
]

SEED = 7
MICRO_BATCH_SIZE = 1
MICRO_BATCHES_PER_STEP = 4
TAIL = "mask"

_PACK = """\
# Written by the demo. Pack again with: shardflow pack --config {name}
output = "dataset"
private_dir = "private"

[inputs]
dicom = [
{folders}]
reports = "reports.csv"
reports_format = "csv"

[splits]
train = 80
val = 20

[shards]
target_bytes = "16MiB"

[policy]
require_report = true
# The bundled files are test files: many are broken on purpose.
on_bad_instance = "drop_instance"
max_quarantined_share = 0.5

[execution]
num_processes = 2
memory_bytes = "4GiB"
"""

_TRAIN = """\
# Written by the demo. Train with: shardflow train --config {name} --nproc-per-node 2
[data]
dataset = "dataset"
train_split = "train"
eval_split = "val"

[batch]
micro_batch_size = {micro_batch_size}
micro_batches_per_step = {micro_batches_per_step}
tail = "{tail}"

[image]
num_slices = 4
rows = 64
columns = 64
slice_choice = "even"

[text]
tokenizer = "tokenizer"
max_tokens = 128

[model]
patch_size = 16
vision_width = 96
vision_layers = 2
vision_heads = 4
language_width = 96
language_layers = 2
language_heads = 4

[optimizer]
learning_rate = 2e-3
warmup_steps = 8

[run]
output = "run"
seed = {seed}
num_epochs = {epochs}
checkpoint_every_steps = {checkpoint_every_steps}
device = "cpu"

[timeouts]
startup_s = 120.0
steady_s = 30.0
hang_s = 25.0
control_s = 120.0

[loader]
wait_timeout_s = 20.0
"""


def write_key(path: Path) -> None:
    """Write the key that the surrogates are made with.

    A real key is random and secret (packing makes one). The demo's data are public, and with a fixed key
    everybody gets the same dataset from the same files.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(hashlib.sha256(b"shardflow demo: public data, nothing to hide").digest())


def write_pack_config(path: Path, folders: list[Path]) -> None:
    """Write the recipe of the packing job."""
    lines = "".join(f'    "{folder}",\n' for folder in folders)
    path.write_text(_PACK.format(name=path.name, folders=lines), encoding="utf-8")


def write_train_config(path: Path, *, num_epochs: int, checkpoint_every_steps: int) -> None:
    """Write the settings of the training job."""
    text = _TRAIN.format(
        name=path.name,
        micro_batch_size=MICRO_BATCH_SIZE,
        micro_batches_per_step=MICRO_BATCHES_PER_STEP,
        tail=TAIL,
        seed=SEED,
        epochs=num_epochs,
        checkpoint_every_steps=checkpoint_every_steps,
    )
    path.write_text(text, encoding="utf-8")
