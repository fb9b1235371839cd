"""Publish target: the address that a dataset is published to, remembered in the private folder.

Most jobs have none and never import what uploads (`shardflow.packing.upload`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardflow.errors import ConfigError, FormatError, naming_os_errors
from shardflow.format.foreign.places import RelocatedStore
from shardflow.storage import LocalStore, open_store, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.format.manifest import Manifest
    from shardflow.packing.workspace import Workspace
    from shardflow.storage import ByteStore

_NAME: Final = "upload.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishTarget:
    """Address that a dataset is published to."""

    url: str
    keeps_local: bool
    """Whether shards stay in the output folder too."""


def read_publish_target(workspace: Workspace) -> PublishTarget | None:
    """Return the address that the dataset is published to; None if there is none.

    Raises:
        FormatError: The note is damaged.
        StorageError: It cannot be read.
    """
    path = workspace.private / _NAME
    try:
        with naming_os_errors("reading the publish target"):
            note = json.loads(path.read_bytes()) if path.exists() else None
        return note and PublishTarget(url=str(note["upload_to"]), keeps_local=bool(note["keep_local"]))
    except (ValueError, KeyError, TypeError):
        raise FormatError(f"{_NAME} of the private folder is damaged; restore it from a copy.") from None


def write_publish_target(workspace: Workspace, publish_target: PublishTarget) -> None:
    """Store the publish target, before anything is uploaded.

    Raises:
        StorageError: It cannot be written.
    """
    if read_publish_target(workspace) != publish_target:
        text = json.dumps({"keep_local": publish_target.keeps_local, "upload_to": publish_target.url}).encode(
            "ascii"
        )
        write_atomic(workspace.private / _NAME, [text], replace=True, mode=0o600)


def check_publish_target(workspace: Workspace, upload_to: str) -> None:
    """Refuse a job that would publish elsewhere if the publish target holds the only copy of the shards.

    Raises:
        ConfigError: The settings name another address, or none.
    """
    publish_target = read_publish_target(workspace)
    if publish_target is None or publish_target.keeps_local:
        return
    if not upload_to or open_store(upload_to).url != publish_target.url:
        raise ConfigError(
            "upload_to must be the address that holds the shards of this dataset, got another or none; name "
            "it, or copy the shards back with `shardflow copy` and remove upload.json of the private folder."
        )


def reading_store(output: Path, url: str, manifest: Manifest) -> ByteStore:
    """Return a store that reads shards of a version at an address, and all else in the output folder.

    Args:
        output: Folder of the dataset.
        url: The address; empty for none.
        manifest: The version.
    """
    store = LocalStore(output)
    if not url:
        return store
    base = open_store(url).url
    paths = [entry.path for shard in manifest.shards for entry in (shard.file, shard.index)]
    return RelocatedStore(store, {path: f"{base}/{path}" for path in paths})
