"""``shardflow sign``: a signature of a version of a dataset with an SSH key."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from shardflow.cli.common import (
    add_dataset,
    add_json,
    counted,
    existing_dataset,
    positive_number,
    write_result,
)

DESCRIPTION = """\
Signs the newest version of a dataset, and every table, view and token file beside it that exists now, with an
Ed25519 key of OpenSSH. Writes signatures/VERSION-NUMBER.sha256, a list of manifests in the form of sha256sum,
and its signature beside it; plain ssh-keygen and sha256sum check both.

A next version (append, remove, compact) is not signed, and a table that is attached later is not covered:
sign again after that. Readers that trust keys (signed_by=, data.trusted_keys, verify --signature) refuse what
no trusted key has signed.

A signature covers shards as a whole, and training reads fields of them. With --fields the SHA-256 of each
field is signed too: readers that trust keys and have a cache compare it, so that a block that somebody forged
in a cache, its crc32c included, is found. Every shard is read once for that.
"""
EXAMPLES = """\
examples:
  shardflow sign my-dataset --key release-key
  shardflow sign my-dataset --key release-key --fields
  shardflow sign s3://bucket/my-dataset --key ~/.ssh/id_ed25519.pub

A key is made by ssh-keygen -t ed25519 -f release-key. Plain tools check a signature in the dataset's folder:
ssh-keygen -Y verify -n shardflow -I alice -f allowed_signers -s signatures/000001-001.sha256.sig
< signatures/000001-001.sha256, and then sha256sum -c signatures/000001-001.sha256.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow sign``."""
    add_dataset(parser)
    parser.add_argument(
        "--key",
        required=True,
        metavar="FILE",
        help="private Ed25519 key of OpenSSH, or the .pub file of one in ssh-agent",
    )
    parser.add_argument("--version", type=positive_number, metavar="N", help="version to sign (the newest)")
    parser.add_argument("--fields", action="store_true", help="sign a digest of each field too")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.format.copies.signing import sign_dataset
    from shardflow.storage import open_store

    store = open_store(existing_dataset(arguments.dataset))
    report = sign_dataset(store, arguments.key, version=arguments.version, with_digests=arguments.fields)
    lines = [
        f"version {report.manifest_version}: {report.dataset_id}",
        f"signed: {counted(report.num_files, 'manifest')} with {report.signer}",
        f"digests of fields: {'signed' if report.has_digests else 'none (--fields)'}",
        report.path if report.is_new else f"nothing to do: {report.path} says the same",
    ]
    write_result(arguments, asdict(report), lines)
    return 0
