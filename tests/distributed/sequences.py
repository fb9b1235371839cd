"""What each rank receives: the script of the ranks, and the words in which the tests speak of it.

``python -m tests.distributed.sequences FOLDER WORLD...`` forks the ranks of one world after another, where 0
is one process that nobody made a rank. In world number N every rank runs every task of
``FOLDER/tasks-N.json``, one after the other in one process group, and writes what it received to
``FOLDER/<run>.<part>.rank-<rank>.json``. A task is an epoch, or a part of one: where an earlier part of the
run left a state, the task begins there, whatever world left it. After each step the ranks tell each other
where they are, as they would exchange gradients: were one to run short of steps, the job would fail.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from shardflow.format import Dataset
from shardflow.loading import Batch, Loader, LoaderConfig, World
from shardflow.loading.torch_dataset import ShardIterableDataset
from shardflow.sampling import BatchSpec, RankSchedule
from shardflow.training.config import TimeoutConfig
from shardflow.training.distributed import Ranks, join_ranks
from tests.distributed.forked import run_ranks

__all__ = ["DATASET", "DELIVERIES", "EPOCH", "SEED", "Part", "Task", "read_part", "read_state", "write_tasks"]

SEED = 11
EPOCH = 1
DATASET = "dataset"
DELIVERIES = ("threads-1", "threads-3", "workers-0", "workers-2", "workers-3")
"""Loader threads, or workers of torch's DataLoader."""
WAIT = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """An epoch that nobody stops, or a part of one that is stopped and goes on elsewhere."""

    run: str
    part: int = 0
    spec: dict[str, Any]
    """The batch spec as JSON."""
    delivery: str
    num_steps: int | None = None
    """Stop after this many steps, amid the next one where a rank runs several micro-batches of it; None goes
    on to the end of the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one rank received in one task."""

    world_size: int
    length: int
    """``len(loader)``, asked before the first step."""
    micro_batches: list[dict[str, Any]]
    """In order: ``epoch``, ``step``, ``micro``, ``keys`` and ``weights`` of each."""


def write_tasks(folder: Path, number: int, tasks: list[Task]) -> None:
    """Write the tasks of a world."""
    _tasks_path(folder, number).write_text(json.dumps([asdict(task) for task in tasks]), encoding="utf-8")


def _tasks_path(folder: Path, number: int) -> Path:
    return folder / f"tasks-{number}.json"


def read_part(folder: Path, run: str, part: int, rank: int) -> Part:
    """Read what a rank received."""
    return Part(**json.loads((folder / f"{run}.{part}.rank-{rank}.json").read_text(encoding="utf-8")))


def read_state(folder: Path, run: str, part: int) -> dict[str, Any] | None:
    """Read the state that a part of a run left; None where there was no such part."""
    path = folder / f"{run}.{part}.state.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


class Source:
    """A loader with threads, or torch's DataLoader with workers: what both can do."""

    def __init__(self, dataset: Dataset, spec: BatchSpec, delivery: str) -> None:
        kind, number = delivery.split("-")
        world = World.from_environment()
        config = LoaderConfig(num_threads=int(number) if kind == "threads" else 1, wait_timeout_s=WAIT)
        self.position: Loader | ShardIterableDataset
        self._batches: DataLoader[Batch] | None = None
        if kind == "threads":
            self.position = Loader(dataset, split="train", batch=spec, seed=SEED, world=world, config=config)
        else:
            self.position = ShardIterableDataset(
                dataset, split="train", batch=spec, seed=SEED, world=world, config=config
            )
            context = "fork" if int(number) else None
            self._batches = DataLoader(
                self.position, batch_size=None, num_workers=int(number), multiprocessing_context=context
            )

    def deliver(self) -> Any:
        """Begin to deliver; the iterator can be closed."""
        if isinstance(self.position, Loader):
            return iter(self.position)
        assert self._batches is not None
        return (batch for batch in self._batches)


def run_task(ranks: Ranks, folder: Path, task: Task) -> None:
    """Run one task; rank 0 leaves the state, which all ranks agree on."""
    spec = BatchSpec.from_json(task.spec)
    source = Source(Dataset.open(folder / DATASET), spec, task.delivery)
    state = read_state(folder, task.run, task.part - 1)
    if state is None:
        source.position.set_epoch(EPOCH)
    else:
        source.position.load_state_dict(state)
    length = len(source.position)
    per_rank = RankSchedule(spec.micro_batches_per_step, ranks.world_size).num_micro_batches_per_rank
    stop = None if task.num_steps is None else task.num_steps * per_rank + (per_rank > 1)
    received = []
    with closing(source.deliver()) as batches:
        for batch in islice(batches, stop):
            received.append(
                {
                    "epoch": batch.epoch,
                    "step": batch.step,
                    "micro": batch.micro,
                    "keys": batch.sample_keys,
                    "weights": batch.arrays["weight"].tolist(),
                }
            )
            if batch.slot == per_rank - 1:
                agree(ranks, task, [batch.epoch, batch.step])
    left = source.position.state_dict()
    assert ranks.all_gather_json(left) == [left] * ranks.world_size, f"states of {task.run} differ"
    part = Part(world_size=ranks.world_size, length=length, micro_batches=received)
    name = f"{task.run}.{task.part}"
    (folder / f"{name}.rank-{ranks.rank}.json").write_text(json.dumps(asdict(part)), encoding="utf-8")
    if ranks.rank == 0:
        (folder / f"{name}.state.json").write_text(json.dumps(left), encoding="utf-8")


def agree(ranks: Ranks, task: Task, place: list[float]) -> None:
    """Wait for all ranks at the end of a step, which must be the same one everywhere."""
    places = ranks.all_gather_numbers(place, WAIT).tolist()
    assert places == [place] * ranks.world_size, f"ranks of {task.run} are at {places}"


def run_tasks(folder: Path, number: int) -> None:
    """Run the tasks of a world, as one of its ranks."""
    tasks = [Task(**task) for task in json.loads(_tasks_path(folder, number).read_text(encoding="utf-8"))]
    # torch warns of more workers than processors.
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    with join_ranks("cpu", TimeoutConfig(startup_s=WAIT, steady_s=WAIT, control_s=WAIT, hang_s=0)) as ranks:
        for task in tasks:
            run_task(ranks, folder, task)
            ranks.barrier(f"end of {task.run}", WAIT)


def main() -> None:
    folder = Path(sys.argv[1])
    for number, world_size in enumerate(map(int, sys.argv[2:])):
        if not world_size:
            run_tasks(folder, number)
        elif code := run_ranks(world_size, partial(run_tasks, folder, number)):
            sys.exit(code)


if __name__ == "__main__":
    main()
