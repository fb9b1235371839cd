"""Commands that make a dataset of stored bytes: ``copy`` of another one, ``index`` of tars that others wrote.

A copy goes from any store to any other, and every byte is checked on the way; an index leaves tars in place.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from shardflow.cli.common import (
    add_json,
    add_threads,
    add_where,
    choose_samples,
    existing_dataset,
    open_dataset,
    show_facts,
    show_table,
    step_progress,
    write_json,
    write_result,
)
from shardflow.errors import ConfigError, StorageError
from shardflow.format.copies.copying import CopyReport, copy_dataset
from shardflow.format.foreign.build import ForeignSource, IndexOptions, index_tars
from shardflow.format.foreign.places import expand_places
from shardflow.logs import counted, human_bytes
from shardflow.storage import open_store

if TYPE_CHECKING:
    from shardflow.storage import ByteStore


DESCRIPTION = """\
Copies what the manifests of SRC name, and nothing else. Each file is compared with its SHA-256 while it is
copied; nothing is overwritten; manifests come last, so that a reader of DST sees none of it or all. A copy
that was killed is started again: what is there and right is checked, and not copied.

Entity views, stored tokens and tables of facts of the copied versions come along, with the same checks;
--no-sidecars leaves them behind. A source that cannot list its files (plain HTTP) keeps them, and the
summary says so.

Shards that others wrote (shardflow index) are brought along, and DST needs nothing else.

With --volumes, DST becomes a dataset of its own in which each series that is a volume is stored in bricks,
for crops, or in slices again; --where, --keys and --split choose its samples. No voxel changes. With --codec
fast they decode about twice as fast and are larger; volumes that are stored so already keep their codec.

With --where, --keys or --split, DST becomes a dataset of its own of these samples alone: shards of their
own, the same sample keys and splits, and with them their facts and the values of attached tables. Token ids
and entity views are left behind. DST is a new local folder.

Exit code 1: a file of SRC or DST is not what the manifest says.
"""
EXAMPLES = """\
examples:
  shardflow copy my-dataset s3://bucket/my-dataset
  shardflow copy s3://bucket/my-dataset /scratch/my-dataset --newest --threads 8
  shardflow copy my-dataset /scratch/ct --where "facts.modality == 'CT' and labels.nodule == 1"
  shardflow copy my-dataset /scratch/in-bricks --volumes bricks
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
    add_where(parser)
    add("--split", metavar="SPLIT", help="only samples of these splits, such as train+val (all)")
    add(
        "--volumes",
        choices=("bricks", "slices"),
        help="store volumes in bricks or in slices (as they are); docs/packing.md says which",
    )
    add("--codec", choices=("b2nd", "fast"), help="codec of volumes that change by --volumes (as before)")
    add_threads(parser, "files at once")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    if arguments.codec and not arguments.volumes:
        raise ConfigError("--codec applies to volumes whose storage changes; add --volumes bricks or slices.")
    source = open_store(existing_dataset(arguments.source))
    try:
        target = open_store(arguments.target)
    except StorageError as error:
        raise ConfigError(f"DST: {error.message}") from None
    if not arguments.target or source.url == target.url:
        raise ConfigError("DST is empty or the same as SRC; name another place.")
    if arguments.where or arguments.keys or arguments.split or arguments.volumes:
        _copy_part(arguments, target)
        return 0
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


def _copy_part(arguments: argparse.Namespace, target: ByteStore) -> None:
    from shardflow.format.copies.subset import copy_subset
    from shardflow.storage import LocalStore

    if not isinstance(target, LocalStore):
        raise ConfigError(
            "--where and --volumes copy to a local folder, but DST is a URL; copy to a folder first, and "
            "then that folder to the URL."
        )
    if arguments.newest or arguments.no_sidecars:
        raise ConfigError(
            "--newest and --no-sidecars apply to whole copies; leave them out: --where and --volumes always "
            "copy the newest version, with facts and tables."
        )
    dataset = open_dataset(arguments.source)
    rows, num_missing = choose_samples(dataset, arguments.split, arguments.where, arguments.keys)
    with step_progress("copying samples") as advance:
        report = copy_subset(
            dataset,
            rows,
            target.root,
            volumes=arguments.volumes,
            codec=arguments.codec,
            progress=advance,
        )
    splits = ", ".join(f"{count:,} {name}" for name, count in report.splits.items())
    missing = f"; {num_missing:,} others lack a value that --where compares" if num_missing else ""
    copied = f"{counted(report.num_samples, 'sample')} of {dataset.studies.num_samples:,} ({splits})"
    lines = [
        f"copied {copied}{missing}",
        f"{human_bytes(report.num_bytes)} in {counted(report.num_shards, 'shard')}: {report.dataset_id}",
    ]
    if arguments.volumes:
        changed = f"{counted(report.num_volumes, 'volume')} stored in {arguments.volumes}"
        lines.append(f"{changed}; other members are as they were")
        if not report.num_volumes:
            so = f", so none is in {arguments.codec}" if arguments.codec else ""
            what = "; a volume is a series of kind 'volume' with several slices of one value a pixel"
            is_lacking = arguments.volumes == "bricks" and dataset.manifest.format_version == 1
            lines.append(
                f"note: no volume of SRC changes to {arguments.volumes}{so}{what if is_lacking else ''}"
            )
    if report.tables:
        lines.append(f"with the values of {', '.join(report.tables)}")
    if not report.has_facts:
        lines.append("note: SRC has no tables of facts (shardflow attach SRC --facts), so DST has none")
    if report.left_behind:
        remedies = {"tokens": "shardflow tokenize", "views": "shardflow entities"}
        commands = " and ".join(remedies[name] for name in report.left_behind)
        lines.append(f"note: {' and '.join(report.left_behind)} are of SRC alone; run {commands} on DST")
    write_result(arguments, {**asdict(report), "num_missing": num_missing}, lines)


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


INDEX_DESCRIPTION = """\
Reads each tar once and writes a dataset that points at it: manifest, indexes, samples table. The dataset then
streams, verifies and resumes like one that shardflow packed; the tars stay where and what they are.

TARS are paths or addresses; {000000..000123}, {a,b} and * are expanded (quote them from the shell).
SPLIT=TARS puts them into a split of that name; without it they are of split train. Integers of .cls become
the columns members.cls and so on. Samples are grouped as webdataset does: the key is a member's path up to
the first dot of its last part.

Exit code 1: a tar is damaged, or does not fit; the message says where, and what option would take it.
"""
INDEX_EXAMPLES = """\
examples:
  shardflow index 'cxr-{000000..000123}.tar' -o cxr-index
  shardflow index 'train=tars/*.tar' -o index
  shardflow index 'train=s3://bucket/a-{000..499}.tar' 'val=s3://bucket/b-{00..09}.tar' -o index
"""
_SPLIT = re.compile(r"([a-z0-9]{1,32})=(.+)", re.ASCII | re.DOTALL)


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_index(arguments: argparse.Namespace) -> int:
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
