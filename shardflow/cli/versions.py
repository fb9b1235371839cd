"""``shardflow remove`` and ``shardflow compact``: the next version of a dataset."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardflow.cli.common import add_dataset, add_json, existing_dataset, write_result
from shardflow.errors import ConfigError, os_reason
from shardflow.logs import counted
from shardflow.storage import LocalStore, open_store

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
