"""The command ``shardflow attach``: tables beside a dataset, joined to its samples."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from shardflow.cli.common import (
    add_dataset,
    add_json,
    add_threads,
    counted,
    open_dataset,
    show_lines,
    step_progress,
    write_json,
)
from shardflow.errors import ConfigError

DESCRIPTION = """\
Writes the tables of facts of DATASET from study.json: one row per series with its role, modality, shape,
dtype, unit, geometry, codec and flags (facts/series/<dataset_id>/), and one per study with age, sex, body
part, day and the row of the person's earlier study (facts/study/<dataset_id>/). Fields of images and
expressions need them. Packing writes both; this command is for datasets that lack one. No shard is touched,
and a job that was stopped resumes where it was.
"""
EXAMPLES = """\
example:
  shardflow attach my-dataset --facts
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow attach``."""
    add_dataset(parser)
    parser.add_argument("--facts", action="store_true", help="write the tables of facts from study.json")
    add_threads(parser, "shards read at once")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    if not arguments.facts:
        raise ConfigError("attach needs to know what to attach; write: shardflow attach DATASET --facts")
    from shardflow.format.facts import attach_facts

    dataset = open_dataset(arguments.dataset)
    with step_progress("shards") as on_shard:
        done = attach_facts(dataset, num_threads=arguments.threads, on_shard=on_shard)
    if arguments.json:
        write_json(asdict(done))
        return 0
    kept = f", {counted(done.num_shards_kept, 'shard')} known before" if done.num_shards_kept else ""
    roles = ", ".join(f"{count:,} {role}" for role, count in sorted(done.roles.items()))
    show_lines(
        [
            f"{done.num_series:,} series of {counted(done.num_samples, 'sample')}{kept}",
            f"roles of series: {roles or 'none'}",
        ]
    )
    return 0
