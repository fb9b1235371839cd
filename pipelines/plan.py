"""``shardflow plan``: what each step of an epoch is made of, and which rank runs what.

The plan is pure integers, so this command reads the samples table and nothing else. Its lines can be compared
one by one with the ledger of a training run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from pipelines.plan_summary import add_batch_arguments, planned, show_summary
from pipelines.surface import (
    add_dataset,
    add_json,
    natural_number,
    open_dataset,
    positive_number,
    show_lines,
    write_json,
)
from shardflow.epochs import EpochPlan, RankSchedule
from shardflow.errors import ConfigError
from shardflow.shards import Dataset

__all__ = ["SUMMARY", "add_arguments", "micro_batches", "run"]

SUMMARY = "show an epoch before its first step: steps, micro-batches, samples"
DESCRIPTION = """\
Plans one epoch of a split. The samples of a step depend on dataset, seed, epoch and batch spec only, never on
the world size. A micro-batch has a fixed size (--micro-batch-size), or is filled to a budget of tokens that
are estimated from the bytes of the reports (--max-tokens).

With --json, one line a micro-batch: step, rank, micro (its number within the step; from M on it is a filler
that holds no sample), keys and weights. A padding slot has key null and weight 0; a repeated sample weighs 1.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow plan``."""
    parser.description = DESCRIPTION
    add_dataset(parser)
    number, count = natural_number, positive_number
    add = parser.add_argument
    add("--split", required=True, metavar="S", help="split to plan, such as train")
    add("--seed", required=True, type=number, metavar="N", help="run-level seed")
    add("--epoch", required=True, type=number, metavar="E", help="epoch, counted from 0")
    add_batch_arguments(parser)
    add("--world-size", required=True, type=count, metavar="W", help="data-parallel ranks, at most M")
    add("--ranks-per-node", type=count, metavar="R", help="ranks of a node (8, or all of fewer)")
    add("--from-step", type=number, default=0, metavar="K", help="first step of the lines (0)")
    add("--steps", type=number, metavar="N", help="number of steps of the lines (all that follow)")
    add("--summary", action="store_true", help="what the plan does to ranks, nodes and caches, in numbers")
    add(
        "--compare",
        metavar="SETTINGS",
        help='with --summary: other settings beside these, such as "lanes=8 window=64MiB world-size=56"',
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    dataset = open_dataset(arguments.dataset)
    if arguments.split not in dataset.samples.splits:
        known = ", ".join(sorted(dataset.samples.splits))
        raise ConfigError(f"--split must be one of {known}, got {arguments.split!r}.")
    if arguments.compare and not arguments.summary:
        raise ConfigError("--compare must come with --summary, got it alone; add --summary.")
    if arguments.summary:
        show_summary(dataset, arguments)
        return 0
    plan, schedule = planned(dataset, arguments)
    steps = _steps(plan.num_steps, arguments.from_step, arguments.steps)
    if arguments.json:
        for line in micro_batches(dataset, plan, schedule, steps):
            write_json(line)
    else:
        show_lines([f"split {arguments.split} of {dataset.dataset_id}", *plan.summary(schedule).lines()])
    return 0


def micro_batches(
    dataset: Dataset, plan: EpochPlan, schedule: RankSchedule, steps: range
) -> Iterator[dict[str, Any]]:
    """Yield the micro-batches of some steps: by step, then in canonical order, the fillers last."""
    for step in steps:
        for slot in range(schedule.num_micro_batches_per_rank):
            for rank in range(schedule.world_size):
                micro = schedule.micro(rank, slot)
                batch = plan.micro_batch(step, micro)
                rows = batch.rows.tolist()
                yield {
                    "step": step,
                    "rank": rank,
                    "micro": micro,
                    "keys": [dataset.samples.sample_key(row) if row >= 0 else None for row in rows],
                    "weights": batch.weights.tolist(),
                }


def _steps(num_steps: int, first: int, count: int | None) -> range:
    """Return the steps to show.

    Raises:
        ConfigError: The first one lies behind the end of the epoch.
    """
    if first > num_steps:
        raise ConfigError(f"--from-step must be at most {num_steps}, the steps of the epoch, got {first}.")
    return range(first, num_steps if count is None else min(num_steps, first + count))
