"""The same steps of the same micro-batches from real processes: any world, any workers, and after two stops.

Ranks with gloo in worlds of 1, 2 and 4; what each received is compared with what ``shardflow plan`` says, key
by key. The script of the ranks is ``sequences.py``.
"""

from __future__ import annotations

import fcntl
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardflow.cli.main import main
from shardflow.sampling import BatchSpec, TokenBudget
from shardflow.sampling.spec import TAILS
from shardflow.seeds import derive
from tests.distributed.launcher import job
from tests.distributed.sequences import (
    DATASET,
    DELIVERIES,
    EPOCH,
    SEED,
    Task,
    read_part,
    read_state,
    write_tasks,
)
from tests.factories import make_dataset

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(2400)]

LAUNCH_TIMEOUT_S = 1800
SLOW_LAUNCH_TIMEOUT_S = 3300
NUM_SAMPLES = 150
M = 8


def fixed(**settings: Any) -> BatchSpec:
    return BatchSpec(micro_batch_size=2, micro_batches_per_step=M, **settings)


def filled(max_tokens: int, *, lanes: int, tail: Any, **policy: Any) -> BatchSpec:
    """Fill micro-batches with reports of 8 to 21 tokens."""
    return BatchSpec(
        budget=TokenBudget(max_tokens=max_tokens, max_samples=4, **policy),
        micro_batches_per_step=M,
        lanes=lanes,
        tail=tail,
        window_bytes=40_000,
    )


SPECS = {
    "mixed-mask": fixed(tail="mask"),
    "lanes-drop": fixed(tail="drop", lanes=4, window_bytes=20_000),
    "budget-mask": filled(34, lanes=2, tail="mask"),
    "budget-drop": filled(16, lanes=4, tail="drop", over_budget="skip"),
    "packed-repeat": filled(34, lanes=4, tail="repeat", padded=False),
}
ALL_SPECS = {
    f"fixed-{lanes}-{tail}": fixed(tail=tail, lanes=lanes, window_bytes=20_000)
    for tail, lanes in itertools.product(TAILS, (0, 4))
} | {
    f"budget-{tail}-{name}": filled(max_tokens, lanes=3, tail=tail, **policy)
    for tail in TAILS
    for name, max_tokens, policy in (
        ("alone", 16, {}),
        ("skip", 16, {"over_budget": "skip"}),
        ("packed", 34, {"padded": False}),
    )
}
ANY_SPEC = SPECS | ALL_SPECS
PAIRS = list(zip(SPECS, DELIVERIES, strict=True))
"""Specs and deliveries, each in one pair; the parts of the chains have others, and the slow tests run all."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A run that is stopped within its epoch and goes on in another world, and again."""

    name: str
    spec: str
    worlds: tuple[int, ...]

    def part(self, number: int) -> Task:
        """Return a part; each has another delivery, and all but the last are stopped."""
        is_last = number == len(self.worlds) - 1
        draw = derive(SEED, "test-sequences", *map(ord, self.name), number)
        return Task(
            run=self.name,
            part=number,
            spec=ANY_SPEC[self.spec].to_json(),
            delivery=DELIVERIES[(draw >> 8) % len(DELIVERIES)],
            num_steps=None if is_last else 1 + draw % 3,
        )


@dataclass(frozen=True, slots=True)
class Runs:
    """What the ranks left behind."""

    folder: Path
    wholes: dict[str, tuple[str, int]]
    """Spec and world size of the undisturbed runs, by name."""

    def committed(self, run: str, num_parts: int) -> Iterator[dict[str, Any]]:
        """Yield the micro-batches that count: of each part, the steps before the state it left."""
        for part in range(num_parts):
            state = read_state(self.folder, run, part)
            assert state is not None
            for rank in range(read_part(self.folder, run, part, 0).world_size):
                for entry in read_part(self.folder, run, part, rank).micro_batches:
                    if (entry["epoch"], entry["step"]) < (state["epoch"], state["step"]):
                        yield entry


def launches(worlds: Iterable[int], wholes: dict[str, Task], chains: list[Chain]) -> list[list[Task]]:
    """Deal tasks to launches of these world sizes: undisturbed runs to the first of a size, parts in order.

    ``wholes`` are run in every world; their run's name gets the world size.
    """
    order = list(worlds)
    dealt: list[list[Task]] = [[] for _ in order]
    for world in set(order):
        dealt[order.index(world)] += [
            Task(run=f"{name}.{world}", spec=task.spec, delivery=task.delivery)
            for name, task in wholes.items()
        ]
    for chain in chains:
        at = -1
        for number, world in enumerate(chain.worlds):
            at = order.index(world, at + 1)
            dealt[at].append(chain.part(number))
    return dealt


def run_all(
    folder: Path,
    worlds: list[int],
    pairs: Iterable[tuple[str, str]],
    chains: list[Chain],
    timeout_s: float,
) -> Runs:
    """Run everything, once a session; another pytest worker waits for it."""
    folder.mkdir(exist_ok=True)
    wholes = {
        f"{spec}.{delivery}": Task(run="", spec=ANY_SPEC[spec].to_json(), delivery=delivery)
        for spec, delivery in pairs
    }
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            make_dataset(folder / DATASET, num_samples=NUM_SAMPLES, samples_per_shard=6, facts=True)
            for number, tasks in enumerate(launches(worlds, wholes, chains)):
                write_tasks(folder, number, tasks)
            # A last world of one stands for the user who goes on without torchrun.
            sizes = [*worlds[:-1], 0 if worlds[-1] == 1 else worlds[-1]]
            arguments = [str(folder), *map(str, sizes)]
            module = "tests.distributed.sequences"
            with job(folder, module, arguments, num_ranks=None, is_forked=True) as running:
                finished = running.wait(timeout_s)
            assert finished.exit_code == 0, finished.text
            (folder / "done").touch()
    names = {f"{name}.{world}": (name.split(".")[0], world) for name in wholes for world in set(worlds)}
    return Runs(folder, names)


CHAINS = [
    Chain(f"{spec}.{'-'.join(map(str, worlds))}", spec, worlds)
    for spec in SPECS
    for worlds in ((4, 2, 1), (1, 4, 2))
]


@pytest.fixture(scope="session")
def runs(shared_folder: Path) -> Runs:
    return run_all(shared_folder / "sequences", [1, 4, 2, 1], PAIRS, CHAINS, LAUNCH_TIMEOUT_S)


def planned(
    capsys: pytest.CaptureFixture[str], folder: Path, spec: BatchSpec, world_size: int
) -> list[dict[str, Any]]:
    """Ask ``shardflow plan`` what each rank runs."""
    options = {
        "split": "train",
        "seed": SEED,
        "epoch": EPOCH,
        "micro-batches-per-step": spec.micro_batches_per_step,
        "world-size": world_size,
        "tail": spec.tail,
        "lanes": spec.lanes,
    }
    if spec.lanes:
        options["window"] = spec.window_bytes
    flags = ["--json"]
    if spec.budget is None:
        options["micro-batch-size"] = spec.micro_batch_size
    else:
        options["max-tokens"] = spec.budget.max_tokens
        options["max-samples"] = spec.budget.max_samples
        options["over-budget"] = spec.budget.over_budget
        flags += [] if spec.budget.padded else ["--packed"]
    pairs = itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in options.items())
    capsys.readouterr()
    assert main(["plan", str(folder / DATASET), *pairs, *flags]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def of_rank(lines: list[dict[str, Any]], rank: int) -> list[tuple[Any, ...]]:
    """What the plan says that a rank receives, in order."""
    return [
        (EPOCH, line["step"], line["micro"], line["keys"], [float(weight) for weight in line["weights"]])
        for line in lines
        if line["rank"] == rank
    ]


def steps_of(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The micro-batches of each step without who runs them and without fillers."""
    return sorted(
        (line["step"], line["micro"], line["keys"], [float(weight) for weight in line["weights"]])
        for line in lines
        if line["micro"] < M
    )


def check_whole(runs: Runs, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An undisturbed epoch: every rank runs its part of the plan, and all the same number."""
    spec_name, world_size = runs.wholes[name]
    lines = planned(capsys, runs.folder, ANY_SPEC[spec_name], world_size)
    alone = planned(capsys, runs.folder, ANY_SPEC[spec_name], 1)
    assert steps_of(lines) == steps_of(alone)
    for rank in range(world_size):
        part = read_part(runs.folder, name, 0, rank)
        assert [(*entry.values(),) for entry in part.micro_batches] == of_rank(lines, rank)
        assert (part.world_size, part.length) == (world_size, len(part.micro_batches))
    state = read_state(runs.folder, name, 0)
    assert state is not None
    assert (state["epoch"], state["step"]) == (EPOCH + 1, 0)


def check_chain(runs: Runs, chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that went from world to world: each step once, of the same micro-batches as if nothing was."""
    spec = ANY_SPEC[chain.spec]
    place = 0
    for number, world_size in enumerate(chain.worlds):
        lines = planned(capsys, runs.folder, spec, world_size)
        state = read_state(runs.folder, chain.name, number)
        assert state is not None
        num_steps = chain.part(number).num_steps
        for rank in range(world_size):
            part = read_part(runs.folder, chain.name, number, rank)
            assert part.world_size == world_size
            received = [(*entry.values(),) for entry in part.micro_batches]
            expected = [entry for entry in of_rank(lines, rank) if entry[1] >= place]
            assert received == expected[: len(received)]
            assert part.length == len(of_rank(lines, rank))
        if num_steps is None:
            assert (state["epoch"], state["step"]) == (EPOCH + 1, 0)
        else:
            place += num_steps
            assert (state["epoch"], state["step"]) == (EPOCH, place), "it counts what was consumed"
    # What was committed, over all parts and ranks: the undisturbed epoch.
    committed = sorted(
        (entry["step"], entry["micro"], entry["keys"], entry["weights"])
        for entry in runs.committed(chain.name, len(chain.worlds))
        if entry["micro"] < M
    )
    assert committed == steps_of(planned(capsys, runs.folder, spec, 1))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("spec", "delivery"), PAIRS)
def test_every_rank_receives_its_part_of_the_plan(
    runs: Runs, spec: str, delivery: str, world_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    check_whole(runs, f"{spec}.{delivery}.{world_size}", capsys)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_two_stops_and_two_other_worlds_change_no_step(
    runs: Runs, chain: Chain, capsys: pytest.CaptureFixture[str]
) -> None:
    check_chain(runs, chain, capsys)


SLOW_CHAINS = [
    Chain(f"{spec}.{'-'.join(map(str, worlds))}", spec, worlds)
    for spec in ALL_SPECS
    for worlds in itertools.permutations((1, 2, 3, 4), 3)
]


@pytest.fixture(scope="session")
def all_runs(shared_folder: Path) -> Runs:
    return run_all(
        shared_folder / "all-sequences",
        [1, 2, 3, 4] * 3,
        itertools.product(ANY_SPEC, DELIVERIES),
        SLOW_CHAINS,
        SLOW_LAUNCH_TIMEOUT_S,
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kind_of_plan_in_every_world(all_runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Every tail, with and without lanes, all policies of a budget; three ranks have fillers."""
    for name in all_runs.wholes:
        check_whole(all_runs, name, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_way_through_three_worlds(all_runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    for chain in SLOW_CHAINS:
        check_chain(all_runs, chain, capsys)
