"""``shardflow verify``: checks every byte, and names the first damage in each file."""

from __future__ import annotations

import argparse
from dataclasses import asdict
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
from shardflow.errors import ConfigError, NoListingError

if TYPE_CHECKING:
    from shardflow.format import Damage, VerifyReport
    from shardflow.format.signatures import Signature

DESCRIPTION = """\
Reads the whole dataset: the manifest against its own digest, every file against the manifest, every field
against its index, and what lies between the fields; then the entity views, stored tokens and tables of facts
beside it, against their manifests and against the version that they belong to.

With --signature the newest version must be signed (shardflow sign) by a key of --keys, with every table
beside it; this is checked first.

With --fast the shards are not read: their sizes are compared, and everything else is checked as above. It
finds shards that are missing or of another size, not flipped bits in them.

Exit code 0: all is as it was written, and signed if that was asked. 1: something is damaged; each file's
first damage is named with its place. 2: not signed by a trusted key.
"""
EXAMPLES = """\
examples:
  shardflow verify my-dataset
  shardflow verify my-dataset --threads 8 --json
  shardflow verify s3://bucket/dataset --fast
  shardflow verify my-dataset --signature --keys allowed_signers
"""
EXIT_DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow verify``."""
    add_dataset(parser)
    parser.add_argument(
        "--signature", action="store_true", help="check who signed the dataset too, by the keys of --keys"
    )
    parser.add_argument(
        "--keys", metavar="FILE", help="trusted public keys: OpenSSH's allowed signers, or a .pub file"
    )
    parser.add_argument(
        "--fast", action="store_true", help="compare the sizes of shards in place of reading them"
    )
    add_threads(parser, "shards read at once")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0 if nothing is damaged, else 1."""
    from shardflow.format import verify

    if arguments.signature != (arguments.keys is not None):
        raise ConfigError(
            "--signature and --keys require each other: --keys names the file of trusted public keys."
        )
    url = existing_dataset(arguments.dataset)
    signature = _check_signature(url, arguments.keys) if arguments.signature else None
    with step_progress("verifying shards") as progress:
        report = verify(
            url, num_threads=arguments.threads, reads_shards=not arguments.fast, progress=progress
        )
    facts: dict[str, object] = {"ok": report.is_whole, **report.to_json()}
    lines = _lines(report)
    if signature is not None:
        facts["signature"] = asdict(signature)
        lines = [f"signed by {signature.signer}: {signature.path}", *lines]
    write_result(arguments, facts, lines)
    return 0 if report.is_whole else EXIT_DAMAGED


def _check_signature(url: str, keys: str) -> Signature:
    """Check the signature of the newest version, and that it covers every sidecar."""
    from shardflow.format.copies.copying import find_sidecars
    from shardflow.format.manifest import load, manifest_path
    from shardflow.format.signatures import trust_only
    from shardflow.storage import open_store

    store, trust = trust_only(open_store(url), keys)
    manifest = load(store)
    signature = trust.admit(store, manifest)
    try:
        find_sidecars(store, [manifest])  # each is compared with the signed list
    except NoListingError:  # what the list names is there, see `Trust.admit`
        for path in signature.files.keys() - {manifest_path(manifest.manifest_version)}:
            trust.check(path, store.read(path))
    return signature


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
        whole = "whole" if report.reads_shards else "whole but for the bytes of shards, which were not read"
        return [*lines, f"{whole}: {report.dataset_id}", checked]
    return [
        *lines,
        *map(_describe, report.damages),
        f"damaged: {counted(len(report.damages), 'file')} of {checked}",
    ]


def _describe(damage: Damage) -> str:
    where = damage.place if damage.offset is None else f"{damage.place}, byte {damage.offset}"
    what = ".".join(part for part in (damage.sample_key, damage.field) if part)
    return f"{damage.path}: {damage.problem} ({where}{f'; {what}' if what else ''})"
