"""``shardflow copy``: a dataset from any store to any other, every byte checked on its way."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

from shardflow.cli.common import (
    add_json,
    add_threads,
    existing_dataset,
    human_bytes,
    step_progress,
    write_result,
)
from shardflow.errors import ConfigError, StorageError
from shardflow.format.copying import CopyReport, copy_dataset
from shardflow.storage import open_store

DESCRIPTION = """\
Copies what the manifests of SRC name, and nothing else. Each file is compared with its SHA-256 while it is
copied; nothing is overwritten; manifests come last, so that a reader of DST sees none of it or all. A copy
that was killed is started again: what is there and right is checked, and not copied.

Entity views, stored tokens and tables of facts of the copied versions come along, with the same checks;
--no-sidecars leaves them behind. A source that cannot list its files (plain HTTP) keeps them, and the
summary says so.

Shards that others wrote (shardflow index) are brought along, and DST needs nothing else.

Exit code 1: a file of SRC or DST is not what the manifest says.
"""
EXAMPLES = """\
examples:
  shardflow copy my-dataset s3://bucket/my-dataset
  shardflow copy s3://bucket/my-dataset /scratch/my-dataset --newest --threads 8
"""
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow copy``."""
    add = parser.add_argument
    add(
        "source",
        metavar="SRC",
        help="folder or address of a dataset: s3:// gs:// az:// http(s)://",
    )
    add("target", metavar="DST", help="folder or address to copy it to")
    add("--newest", action="store_true", help="the newest version alone (all of them)")
    add(
        "--no-sidecars",
        action="store_true",
        help="leave entity views, stored tokens and tables of facts behind",
    )
    add_threads(parser, "files at once")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    source = open_store(existing_dataset(arguments.source))
    try:
        target = open_store(arguments.target)
    except StorageError as error:
        raise ConfigError(f"DST: {error.message}") from None
    if not arguments.target or source.url == target.url:
        raise ConfigError("DST must be another place than SRC, got the same or none; name one.")
    start = time.perf_counter()
    with step_progress("copying MiB") as advance:
        report = copy_dataset(
            source,
            target,
            newest_only=arguments.newest,
            with_sidecars=not arguments.no_sidecars,
            num_threads=arguments.threads,
            progress=lambda done, total: advance(done // _MIB, -(-total // _MIB)),
        )
    seconds = time.perf_counter() - start
    rate = human_bytes(round(report.num_copied_bytes / max(seconds, 1e-9)))
    copied = f"{human_bytes(report.num_copied_bytes)} in {report.num_copied_files:,} files ({rate}/s)"
    checked = f"{human_bytes(report.num_bytes)} in {report.num_files:,} files"
    lines = [f"whole: {report.dataset_id}", f"copied {copied}, of {checked}"]
    if not arguments.no_sidecars:
        lines += _beside(report)
    write_result(arguments, {**asdict(report), "seconds": round(seconds, 3)}, lines)
    return 0


def _beside(report: CopyReport) -> list[str]:
    lines = [f"note: {note}" for note in report.notes]
    kinds = (
        ("view", report.views),
        ("tokens of", report.tokens),
        ("facts of", report.facts),
        ("table", report.tables),
    )
    for what, sidecars in kinds:
        for sidecar in sidecars:
            view = f" for view {sidecar.view}" if sidecar.view else ""
            size = human_bytes(sidecar.num_bytes)
            lines.append(f"with {what} {sidecar.name}{view}, version {sidecar.version} ({size})")
    return lines or ["it has no entity views, stored tokens, tables of facts or attached tables"]
