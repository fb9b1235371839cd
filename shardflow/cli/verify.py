"""The command ``shardflow verify``: checks every byte, and names the first damage of each file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shardflow.cli.common import (
    add_dataset,
    add_json,
    add_threads,
    counted,
    existing_dataset,
    human_bytes,
    step_progress,
    write_result,
)

if TYPE_CHECKING:
    from shardflow.format import Damage, VerifyReport

DESCRIPTION = """\
Reads the whole dataset: the manifest against its own digest, every file against the manifest, every field
against its index, and what lies between the fields; then the entity views, stored tokens and tables of facts
beside it, against their manifests and against the version that they belong to.

Exit code 0: all is as it was written. 1: something is damaged; each file's first damage is named with its
place.
"""
EXAMPLES = """\
examples:
  shardflow verify my-dataset
  shardflow verify my-dataset --threads 8 --json
"""
EXIT_DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow verify``."""
    add_dataset(parser)
    add_threads(parser, "shards read at once")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; 0 where nothing is damaged, else 1."""
    from shardflow.format import verify

    url = existing_dataset(arguments.dataset)
    with step_progress("verifying shards") as progress:
        report = verify(url, num_threads=arguments.threads, progress=progress)
    write_result(arguments, {"ok": report.is_whole, **report.to_json()}, _lines(report))
    return 0 if report.is_whole else EXIT_DAMAGED


def _lines(report: VerifyReport) -> list[str]:
    checked = (
        f"{human_bytes(report.num_bytes)} in {counted(report.num_files, 'file')}: "
        f"{counted(report.num_shards, 'shard')}, {counted(report.num_samples, 'sample')}, "
        f"{counted(report.num_fields, 'field')}"
    )
    for number, word in (
        (report.num_views, "entity view"),
        (report.num_tokenizations, "tokenization"),
        (report.num_series_tables + report.num_study_tables, "facts table"),
        (report.num_tables, "attached table"),
    ):
        checked += f", {counted(number, word)}" if number else ""
    lines = [f"note: {note}" for note in report.notes]
    if report.is_whole:
        return [*lines, f"whole: {report.dataset_id}", checked]
    return [
        *lines,
        *map(_describe, report.damages),
        f"damaged: {counted(len(report.damages), 'file')} of {checked}",
    ]


def _describe(damage: Damage) -> str:
    where = damage.place if damage.offset is None else f"{damage.place}, byte {damage.offset}"
    what = ".".join(part for part in (damage.sample_key, damage.field) if part)
    return f"{damage.path}: {damage.problem} ({where}{f'; {what}' if what else ''})"
