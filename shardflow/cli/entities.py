"""``shardflow entities``: a view of a dataset whose samples are findings with the slices that show them."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from shardflow.cli.common import (
    add_dataset,
    add_json,
    counted,
    natural_number,
    open_dataset,
    positive_number,
    step_progress,
    write_result,
)
from shardflow.format.entities import EntityRules, EntityText

DESCRIPTION = """\
Goes through what packing aligned (alignment.json of each study) and writes a row for each present or
uncertain finding whose probability times the confidence of its slices is above the threshold; one that only
equals it is left out. Usually these are findings of the sections findings and impression: --where selects by
kind (finding, symptom, history, device, procedure, recommendation), section, assertion, label, anatomy,
laterality, certainty, change, severity, size_mm, probability and confidence. What is left out is counted,
and so are the rows, by what they are and, where reports were read by several rules, by these. The rows are
stored in views/<name>/<dataset_id>/ of the dataset and point into its shards: no shard is touched and no byte
of an image copied.

Train on them with `data.view = "entity"`, alone or in a blend with whole studies (`view` of a component), or
open them in Python with shardflow.loading.selection.open_view. Start a stopped job again to resume it. Needs
the extra `pack`.
"""
_MOST_TOLD = 10
EXAMPLES = """\
examples:
  shardflow entities my-dataset
  shardflow entities my-dataset --threshold 0.9 --context 0 --name sure
  shardflow entities my-dataset --where "kind == 'device' and section != 'indication'" --name devices
  shardflow entities my-dataset --where "label == 'fracture' and change == 'new'" --name new-fractures
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow entities``."""
    usual = EntityRules()
    add_dataset(parser)
    add = parser.add_argument
    add("--name", default="entity", metavar="NAME", help="name of the view (entity)")
    add(
        "--threshold",
        type=float,
        default=usual.threshold,
        metavar="P",
        help="probability times confidence that must be exceeded, from 0 to 1 (0.7)",
    )
    add(
        "--where",
        default=usual.where,
        metavar="EXPRESSION",
        help="which findings; '' for all (findings of the sections findings and impression)",
    )
    add(
        "--corrections",
        metavar="FILE",
        type=Path,
        help="corrections of a person, written by `shardflow reports review` and filled in",
    )
    add(
        "--context",
        type=natural_number,
        default=usual.context_slices,
        metavar="N",
        help="neighbors on either side of each slice that belong to the row too (1)",
    )
    add(
        "--text",
        choices=get_args(EntityText),
        default=usual.text,
        help="what of the report goes with the slices (sentence)",
    )
    add(
        "--processes",
        metavar="N",
        type=positive_number,
        default=os.cpu_count() or 1,
        help="processes that read (one a core); the rows do not depend on it",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.reports.entity_views import build_view
    from shardflow.reports.review import read_corrections

    rules = EntityRules(
        threshold=arguments.threshold,
        context_slices=arguments.context,
        text=arguments.text,
        where=arguments.where,
    )
    corrections = None if arguments.corrections is None else read_corrections(arguments.corrections)
    dataset = open_dataset(arguments.dataset, with_studies=True)
    with step_progress("shards") as on_shard:
        built = build_view(
            dataset,
            rules,
            name=arguments.name,
            num_processes=arguments.processes,
            on_shard=on_shard,
            corrections=corrections,
        )
    amount = f"{counted(built.num_entities, 'row')} of {built.num_studies:,} studies"
    made = "" if built.is_new else ", made before"
    lines = [f"view {built.name}: {amount} above {built.threshold}{made}", f"view_id {built.view_id}"]
    for column, counts in built.composition.items():
        # One reader is what one expects; of labels there are hundreds.
        if len(counts) > (column == "reader"):
            told = ", ".join(f"{num:,} {value or 'unknown'}" for value, num in [*counts.items()][:_MOST_TOLD])
            more = len(counts) - _MOST_TOLD
            lines.append(f"by {column}: {told}{f', and {more:,} more' if more > 0 else ''}")
    left_out = sorted(built.left_out.items(), key=lambda one: (-one[1], one[0]))
    lines += [f"left out: {num:,} {reason}" for reason, num in left_out if num]
    write_result(arguments, asdict(built), lines)
    return 0
