"""``shardflow compact``: write shards again without removed samples, and delete the versions before."""

from __future__ import annotations

import argparse

from pipelines.remove import add_private_dir, local_dataset
from pipelines.surface import add_dataset, add_json, show_lines, write_json

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "write shards again without removed samples"
DESCRIPTION = """\
Writes the next version of the dataset, in which every shard that held a removed sample is replaced by a new
one without it. Every field is checked on the way.

With --delete-old all earlier versions go, and every file that only they named: after that no byte of a
removed study is left in the dataset. Training runs that were begun with an earlier version cannot go on.
"""
EXAMPLES = """\
examples:
  shardflow compact my-dataset --private-dir private
  shardflow compact my-dataset --private-dir private --delete-old
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow compact``."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_dataset(parser)
    add_private_dir(parser)
    parser.add_argument("--delete-old", action="store_true", help="delete all earlier versions")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    # Packing needs pydicom, which the training image does not carry.
    from shardflow.packing.compaction import compact

    summary = compact(
        local_dataset(arguments.dataset), arguments.private_dir, deletes_old=arguments.delete_old
    )
    if arguments.json:
        write_json(summary.to_json())
        return 0
    lines = [f"version {summary.manifest_version}: {summary.dataset_id}"]
    if summary.status == "nothing_new":
        lines.append("nothing to do: no shard holds a removed sample")
    if summary.num_shards:
        lines.append(f"shards written again: {summary.num_shards}")
    if summary.deleted_versions:
        lines.append(f"deleted versions: {', '.join(map(str, summary.deleted_versions))}")
    show_lines(lines)
    return 0
