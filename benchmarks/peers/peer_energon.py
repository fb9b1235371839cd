"""Megatron-Energon 7.4.1: plain tars with an index; a state of each rank, and a tool that deals it anew."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.energon import WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset

from benchmarks.peers.tars import write_tars
from benchmarks.peers.task import GLOBAL_BATCH, NUM_SAMPLES, SEED, Task

SETTINGS: dict[str, dict[str, Any]] = {
    "train, virtual epoch": {"epoch": "virtual"},
    "train, virtual epoch, 4 workers in all": {"epoch": "virtual", "total_workers": 4, "micro_batch": 4},
    "train, repeat=False": {"epoch": "once"},
    "train, repeat=False, 4 workers in all": {"epoch": "once", "total_workers": 4, "micro_batch": 4},
    "train, repeat=False, batch_drop_last": {"epoch": "once", "batch_drop_last": True},
    "validation": {"epoch": "validation"},
}
TOOL = Path(sys.executable).with_name("energon")


def prepare(folder: Path) -> None:
    """Write plain tars and index them with Energon's own command."""
    write_tars(folder)
    command = [
        TOOL,
        "prepare",
        folder,
        "--non-interactive",
        "--split-parts",
        "train:shard-.*",
        "--split-parts",
    ]
    command += ["val:shard-.*", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
    subprocess.run([*map(str, command), "--num-workers", "1"], check=True)


class EnergonStream:
    """A training or validation dataset in a savable loader."""

    def __init__(self, folder: Path, task: Task, rank: int) -> None:
        workers = WorkerConfig(
            rank=rank, world_size=task.world_size, num_workers=task.num_workers, seed_offset=SEED
        )
        self._task = task
        # The tool asks for the same number of workers over all ranks.
        self._is_dealt_anew = "total_workers" in task.options
        # Its page on reproducible scaling asks for the same micro-batch in every world.
        micro_batch = task.options.get("micro_batch", task.batch_size)
        self._per_step = task.batch_size // micro_batch
        common = {"worker_config": workers, "batch_size": micro_batch}
        common["batch_drop_last"] = task.options.get("batch_drop_last", False)
        if task.options["epoch"] == "validation":
            dataset = get_val_dataset(folder, **common)
        else:
            is_virtual = task.options["epoch"] == "virtual"
            dataset = get_train_dataset(
                folder,
                shuffle_buffer_size=20,
                max_samples_per_sequence=5,
                virtual_epoch_length=-(-NUM_SAMPLES // GLOBAL_BATCH) * self._per_step if is_virtual else 0,
                repeat=is_virtual,
                **common,
            )
        self._loader = get_savable_loader(dataset)

    def length(self) -> int | None:
        return -(-len(self._loader) // self._per_step)

    def batches(self) -> Iterator[list[str]]:
        keys: list[str] = []
        for number, batch in enumerate(self._loader, start=1):
            keys += [text.decode() if isinstance(text, bytes) else str(text) for text in batch.text]
            if number % self._per_step == 0:
                yield keys
                keys = []
        if keys:
            yield keys

    def save(self, folder: Path, rank: int) -> None:
        if self._is_dealt_anew:
            torch.save(self._loader.save_state_rank(), folder / f"rank-{rank}.pt")
        elif (state := self._loader.save_state_global(0)) is not None and rank == 0:
            torch.save(state, folder / "global.pt")

    def load(self, folder: Path, rank: int) -> None:
        if not self._is_dealt_anew:
            self._loader.restore_state_global(torch.load(folder / "global.pt", weights_only=False))
            return
        if self._task.world_size != len(list(folder.glob("*.pt"))):
            folder = _redistributed(folder, self._task.world_size, rank)
        self._loader.restore_state_rank(torch.load(sorted(folder.glob("*.pt"))[rank], weights_only=False))


def _redistributed(folder: Path, world_size: int, rank: int) -> Path:
    """Deal the states to another number of ranks with Energon's own command."""
    output = folder / f"world-{world_size}-{rank}"
    output.mkdir()
    inputs = sorted(map(str, folder.glob("*.pt")))
    command = [str(TOOL), "checkpoint", "redist", *inputs, str(output), f"--new-world-size={world_size}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"energon checkpoint redist: {done.stderr.splitlines()[-1]}")
    return output


def open_stream(folder: Path, task: Task, rank: int) -> EnergonStream:
    """Open the loader."""
    return EnergonStream(folder, task, rank)
