"""``shardflow plan``: what each step of an epoch is made of, and which rank runs what.

The plan is pure integers, so this command reads the samples table and nothing else. Its lines can be compared
one by one with the ledger of a training run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from pipelines.plan_blend import show_components, title_of
from pipelines.plan_summary import add_batch_arguments, planned, show_summary
from pipelines.surface import (
    add_json,
    add_subset,
    natural_number,
    open_dataset,
    positive_number,
    show_lines,
    write_json,
)
from shardflow.epochs import EpochPlan, RankSchedule
from shardflow.errors import ConfigError
from shardflow.loading.blend_file import open_blend
from shardflow.loading.selection import FULL_STUDY, Selection, open_view, select

__all__ = ["SUMMARY", "add_arguments", "micro_batches", "run"]

SUMMARY = "show an epoch before its first step: steps, micro-batches, samples"
DESCRIPTION = """\
Plans one epoch of a split, a subset (--subset), or a blend of datasets (--blend). The samples of a step
depend on dataset, seed, epoch and batch spec only, never on the world size. A micro-batch has a fixed size
(--micro-batch-size), or is filled to a budget of tokens that are estimated from the bytes of the reports
(--max-tokens).

With --json, one line a micro-batch: step, rank, micro (its number within the step; from M on it is a filler
that holds no sample), keys and weights, and of a blend components, from 0. A padding slot has key null and
weight 0; a repeated sample weighs 1.
"""
EXAMPLES = """\
examples:
  shardflow plan my-dataset --split train --seed 7 --epoch 0 \\
      --micro-batch-size 2 --micro-batches-per-step 4 --world-size 2
  shardflow plan my-dataset --split train --seed 7 --epoch 0 --max-tokens 4096 \\
      --micro-batches-per-step 4 --world-size 2 --summary --compare "lanes=2"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow plan``."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument(
        "dataset", metavar="DATASET", nargs="?", help="folder or file:// address of a packed dataset"
    )
    number, count = natural_number, positive_number
    add = parser.add_argument
    add("--blend", metavar="FILE", help="plan a blend file instead of a dataset and its split")
    add("--view", metavar="NAME", help="plan an entity view of the dataset (full_study: its studies)")
    add("--split", metavar="S", help="split to plan, such as train, or several: train+val")
    add_subset(parser)
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
    selection = _selection(arguments)
    if arguments.compare and not arguments.summary:
        raise ConfigError("--compare must come with --summary, got it alone; add --summary.")
    if arguments.summary:
        show_summary(selection, arguments)
        return 0
    plan, schedule = planned(selection, arguments)
    steps = _steps(plan.num_steps, arguments.from_step, arguments.steps)
    if arguments.json:
        for line in micro_batches(selection, plan, schedule, steps):
            write_json(line)
    else:
        show_lines([title_of(selection), *plan.summary(schedule).lines()])
        show_components(selection, arguments.epoch)
    return 0


def _selection(arguments: argparse.Namespace) -> Selection:
    """Open what is to be planned.

    Raises:
        ConfigError: Neither or both of a dataset and a blend are given, or there is no such split.
    """
    named = {"DATASET": arguments.dataset, "--split": arguments.split}
    if arguments.blend is not None:
        alone = {**named, "--view": arguments.view, "--subset": arguments.subset or None}
        for name, value in alone.items():
            if value is not None:
                raise ConfigError(
                    f"{name} must be left out where --blend is given, got {value!r}; say it in the "
                    "blend file."
                )
        return open_blend(arguments.blend)
    for name, value in named.items():
        if value is None:
            raise ConfigError(f"{name} must be given, got none; name one, or a blend file with --blend.")
    if arguments.dataset.endswith(".toml"):
        raise ConfigError("DATASET must be a folder, got a .toml file; name a blend file with --blend.")
    dataset = open_view(open_dataset(arguments.dataset), arguments.view or FULL_STUDY)
    if not set(arguments.split.split("+")) <= set(dataset.samples.splits):
        known = ", ".join(sorted(dataset.samples.splits))
        raise ConfigError(f"--split must be one of {known}, got {arguments.split!r}.")
    return select(dataset, arguments.split, arguments.subset)


def micro_batches(
    selection: Selection, plan: EpochPlan, schedule: RankSchedule, steps: range
) -> Iterator[dict[str, Any]]:
    """Yield the micro-batches of some steps: by step, then in canonical order, the fillers last."""
    for step in steps:
        for slot in range(schedule.num_micro_batches_per_rank):
            for rank in range(schedule.world_size):
                micro = schedule.micro(rank, slot)
                batch = plan.micro_batch(step, micro)
                rows = batch.rows[batch.rows >= 0]
                found = iter(selection.keys(rows))
                line = {
                    "step": step,
                    "rank": rank,
                    "micro": micro,
                    "keys": [next(found) if row >= 0 else None for row in batch.rows.tolist()],
                    "weights": batch.weights.tolist(),
                }
                if selection.is_blend:
                    components = iter(selection.components_of(rows).tolist())
                    line["components"] = [next(components) if row >= 0 else -1 for row in batch.rows.tolist()]
                yield line


def _steps(num_steps: int, first: int, count: int | None) -> range:
    """Return the steps to show.

    Raises:
        ConfigError: The first one lies behind the end of the epoch.
    """
    if first > num_steps:
        raise ConfigError(f"--from-step must be at most {num_steps}, the steps of the epoch, got {first}.")
    return range(first, num_steps if count is None else min(num_steps, first + count))
