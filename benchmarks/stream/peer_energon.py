"""Megatron-Energon: our tars, indexed with its own command and cooked."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    get_savable_loader,
    get_train_dataset,
    stateless,
)

from benchmarks.stream.records import BATCH, Loop, collate, decode, records, size, tars


def prepare(workload: str, folder: Path) -> None:
    target = folder / "energon"
    target.mkdir()
    for path in tars(workload, folder):
        (target / path.name).symlink_to(path)
    tool = Path(sys.executable).with_name("energon")
    command = [tool, "prepare", target, "--non-interactive", "--split-parts", "train:.*"]
    command += ["--sample-type", "CrudeWebdataset", "--num-workers", "1"]
    subprocess.run([*map(str, command)], check=True, stdout=sys.stderr)


@dataclass
class _Cooked(Sample):  # type: ignore[misc]
    value: Any


def _loader(workload: str, folder: Path, num_workers: int) -> Any:
    @stateless
    def cook(sample: dict[str, Any]) -> Any:
        fields = {name: data for name, data in sample.items() if not name.startswith("__")}
        return _Cooked(**basic_sample_keys(sample), value=decode(workload, fields))

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None
        cookers = (Cooker(cook),)

        def batch(self, samples: list[Any]) -> Any:
            return collate(workload, [sample.value for sample in samples])

    workers = WorkerConfig(rank=0, world_size=1, num_workers=num_workers, seed_offset=1)
    dataset = get_train_dataset(
        folder / "energon",
        worker_config=workers,
        batch_size=BATCH[workload],
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        repeat=False,
        task_encoder=Encoder(),
    )
    return get_savable_loader(dataset)


def loop(workload: str, folder: Path, num_workers: int) -> Loop:
    loader = _loader(workload, folder, num_workers)
    yield None
    for batch in loader:
        yield size(workload, batch)


def resumed(workload: str, folder: Path, num_workers: int) -> Loop:
    loader = _loader(workload, folder, num_workers)
    half = sum(1 for _ in records(workload, folder)) // BATCH[workload] // 2
    for number, _ in enumerate(loader, start=1):
        if number == half:
            break
    state = loader.save_state_rank()
    del loader
    loader = _loader(workload, folder, num_workers)
    loader.restore_state_rank(state)
    yield None
    for batch in loader:
        yield size(workload, batch)
