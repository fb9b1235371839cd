"""Commands on versions of a dataset: ``verify`` and ``sign`` one; ``remove`` and ``compact`` make one."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shardflow.cli.common import (
    add_dataset,
    add_json,
    add_threads,
    existing_dataset,
    positive_number,
    step_progress,
    write_result,
)
from shardflow.errors import ConfigError, NoListingError, os_reason
from shardflow.logs import counted, human_bytes

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
    """Run ``shardflow verify``; the exit code is 0 if nothing is damaged, else 1."""
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


SIGN_DESCRIPTION = """\
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
SIGN_EXAMPLES = """\
examples:
  shardflow sign my-dataset --key release-key
  shardflow sign my-dataset --key release-key --fields
  shardflow sign s3://bucket/my-dataset --key ~/.ssh/id_ed25519.pub

A key is made by ssh-keygen -t ed25519 -f release-key. Plain tools check a signature in the dataset's folder:
ssh-keygen -Y verify -n shardflow -I alice -f allowed_signers -s signatures/000001-001.sha256.sig
< signatures/000001-001.sha256, and then sha256sum -c signatures/000001-001.sha256.
"""


def add_sign_arguments(parser: argparse.ArgumentParser) -> None:
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


def run_sign(arguments: argparse.Namespace) -> int:
    """Run ``shardflow sign``; the exit code is 0, or an error is raised."""
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


REMOVE_DESCRIPTION = """\
Writes the next version of the dataset: without the samples, with the reason CONSENT_WITHDRAWN for their
inputs, and with a mark by which no later append or retry takes them in again. Identifiers are read from a
file or from standard input, one a line, because others can see the arguments of a process.

The bytes stay in the shards and in earlier versions; `shardflow compact --delete-old` takes them out.
A dataset that packing has sent to an object store gets the version there, too.
"""
_BYTE_ORDER_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
REMOVE_EXAMPLES = """\
examples:
  shardflow remove my-dataset --private-dir private --patients withdrawn.txt
  shardflow remove my-dataset --private-dir private --studies -
  shardflow remove my-dataset --private-dir private --sample-key 5jicxviub5i5kpsyutetodb5d4
"""


def add_remove_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow remove``."""
    _add_folders(parser)
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="the secret key, if it is elsewhere")
    parser.add_argument("--patients", metavar="FILE", help="patient IDs, one a line; - for standard input")
    parser.add_argument("--studies", metavar="FILE", help="study instance UIDs, likewise")
    parser.add_argument(
        "--sample-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a sample; may be given several times",
    )
    add_json(parser)


def _add_folders(parser: argparse.ArgumentParser) -> None:
    """Add the dataset, and the private folder that changing it requires."""
    add_dataset(parser)
    parser.add_argument(
        "--private-dir", type=Path, required=True, metavar="DIR", help="private folder of the dataset"
    )


def _local_dataset(url: str) -> Path:
    """Return the folder of a dataset that a command may change.

    Raises:
        ConfigError: There is none, or it is the URL of a store.
    """
    from shardflow.storage import LocalStore, open_store

    store = open_store(existing_dataset(url))
    if not isinstance(store, LocalStore):
        raise ConfigError("DATASET must be a local folder for this command, got an address; copy it first.")
    return store.root


def run_remove(arguments: argparse.Namespace) -> int:
    """Run ``shardflow remove``."""
    # Packing needs pydicom, which the training image does not carry.
    from shardflow.packing.versions.removal import Withdrawn, remove

    if arguments.patients == arguments.studies == "-":
        raise ConfigError("Standard input holds patients or studies, not both; put one of them into a file.")
    withdrawn = Withdrawn(
        patients=_read(arguments.patients, "--patients"),
        studies=_read(arguments.studies, "--studies"),
        sample_keys=arguments.sample_key,
    )
    summary = remove(
        _local_dataset(arguments.dataset),
        arguments.private_dir,
        withdrawn,
        key_file=arguments.key_file,
    )
    lines = [f"version {summary.manifest_version}: {summary.dataset_id}"]
    if summary.status == "nothing_new":
        lines.append("nothing to do: all of it was removed before")
    else:
        lines.append(
            f"removed: {counted(summary.num_samples, 'sample')}, {summary.num_studies} studies in all"
        )
        lines.append("their bytes remain in the shards; to delete them: shardflow compact --delete-old")
    if summary.num_unknown:
        lines.append(
            f"{summary.num_unknown} of those given are unknown here; they will not be packed later either"
        )
    if summary.num_linked:
        lines.append(
            f"{summary.num_linked} further patient IDs are of the removed persons, and their studies stay; "
            "identities.csv in the private folder lists them: remove them too"
        )
    write_result(arguments, summary.to_json(), lines)
    return 0


def _read(name: str | None, option: str) -> tuple[str, ...]:
    if name is None:
        return ()
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option} must name a readable text file, got {os_reason(error)}; correct it."
        ) from None
    # A byte order mark before the first line would hide the identifier on it.
    lines = text.removeprefix(_BYTE_ORDER_MARK).splitlines()
    return tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))


COMPACT_DESCRIPTION = """\
Writes the next version of the dataset, in which every shard that held a removed sample is replaced by a new
one without it. Every field is checked on the way. Digests of the samples table that an older shardflow left
behind, which `shardflow verify` notes, are renewed too.

With --delete-old all earlier versions go, and every file that only they named: after that no byte of a
removed study is left in the dataset. Training runs that began with an earlier version cannot resume.
"""
COMPACT_EXAMPLES = """\
examples:
  shardflow compact my-dataset --private-dir private
  shardflow compact my-dataset --private-dir private --delete-old
"""


def add_compact_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow compact``."""
    _add_folders(parser)
    parser.add_argument("--delete-old", action="store_true", help="delete all earlier versions")
    add_json(parser)


def run_compact(arguments: argparse.Namespace) -> int:
    """Run ``shardflow compact``."""
    # Packing needs pydicom, which the training image does not carry.
    from shardflow.packing.versions.removal import compact

    summary = compact(
        _local_dataset(arguments.dataset), arguments.private_dir, deletes_old=arguments.delete_old
    )
    lines = [f"version {summary.manifest_version}: {summary.dataset_id}"]
    if summary.status == "nothing_new":
        lines.append("nothing to do: no shard holds a removed sample")
    elif not summary.num_shards and not summary.deleted_versions:
        lines.append("digests of the samples table renewed; no shard was written again")
    if summary.num_shards:
        lines.append(f"shards written again: {summary.num_shards}")
    if summary.deleted_versions:
        lines.append(f"deleted versions: {', '.join(map(str, summary.deleted_versions))}")
    write_result(arguments, summary.to_json(), lines)
    return 0
