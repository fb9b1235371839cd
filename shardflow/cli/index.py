"""``shardflow index``: a dataset of existing WebDataset tars, without copying them."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import asdict

from shardflow.cli.common import add_json, add_threads, show_facts, show_table, step_progress, write_json
from shardflow.errors import ConfigError, StorageError
from shardflow.format.foreign.build import ForeignSource, IndexOptions, index_tars
from shardflow.format.foreign.places import expand_places
from shardflow.logs import counted, human_bytes
from shardflow.storage import open_store

DESCRIPTION = """\
Reads each tar once and writes a dataset that points at it: manifest, indexes, samples table. The dataset then
streams, verifies and resumes like one that shardflow packed; the tars stay where and what they are.

TARS are paths or addresses; {000000..000123}, {a,b} and * are expanded (quote them from the shell).
SPLIT=TARS puts them into a split of that name; without it they are of split train. Integers of .cls become
the columns members.cls and so on. Samples are grouped as webdataset does: the key is a member's path up to
the first dot of its last part.

Exit code 1: a tar is damaged, or does not fit; the message says where, and what option would take it.
"""
EXAMPLES = """\
examples:
  shardflow index 'cxr-{000000..000123}.tar' -o cxr-index
  shardflow index 'train=tars/*.tar' -o index
  shardflow index 'train=s3://bucket/a-{000..499}.tar' 'val=s3://bucket/b-{00..09}.tar' -o index
"""
_SPLIT = re.compile(r"([a-z0-9]{1,32})=(.+)", re.ASCII | re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow index``."""
    add = parser.add_argument
    add(
        "tars",
        metavar="TARS",
        nargs="+",
        help="tars, with braces or *; SPLIT=TARS for another split than train",
    )
    add("-o", "--output", metavar="OUT", required=True, help="folder or address to write the dataset to")
    add("--text-field", metavar="F", default="txt", help="field that is the sample's text (txt)")
    add(
        "--interleaved",
        choices=("refuse", "repair"),
        default="refuse",
        help="a sample whose members do not follow each other (refuse)",
    )
    add(
        "--duplicate-keys",
        choices=("refuse", "rename"),
        default="refuse",
        help="a key that a second sample has (refuse)",
    )
    add(
        "--other-members",
        choices=("refuse", "skip"),
        default="refuse",
        help="members whose field is not of [a-z0-9_@+-] and dots (refuse)",
    )
    add_threads(parser, "tars read at once")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    sources = [source for text in arguments.tars for source in _sources(text)]
    options = IndexOptions(
        interleaved=arguments.interleaved,
        duplicate_keys=arguments.duplicate_keys,
        other_members=arguments.other_members,
        text_field=arguments.text_field,
    )
    try:
        open_store(arguments.output)
    except StorageError as error:
        raise ConfigError(f"--output: {error.message}") from None
    start = time.perf_counter()
    with step_progress("indexing tars") as progress:
        report = index_tars(
            sources, arguments.output, options, num_threads=arguments.threads, progress=progress
        )
    seconds = time.perf_counter() - start
    if arguments.json:
        write_json({**asdict(report), "seconds": round(seconds, 3)})
        return 0
    rate = human_bytes(round(report.num_bytes / max(seconds, 1e-9)))
    show_facts(
        [
            ("dataset_id", report.dataset_id),
            ("samples", f"{report.num_samples:,} in {counted(report.num_shards, 'shard')}"),
            ("read", f"{human_bytes(report.num_bytes)}, {rate}/s"),
            ("members", f"{report.num_fields:,} fields, {report.num_skipped:,} skipped"),
            ("columns", ", ".join(report.columns) or "none"),
            ("mended", f"{report.num_repaired:,} members joined, {report.num_renamed:,} samples renamed"),
        ]
    )
    show_table("fields", ("", "samples"), [(name, f"{count:,}") for name, count in report.fields.items()])
    return 0


def _sources(text: str) -> list[ForeignSource]:
    found = _SPLIT.fullmatch(text)
    split, pattern = (found[1], found[2]) if found else ("train", text)
    return [ForeignSource(place=place, split=split) for place in expand_places(pattern)]
