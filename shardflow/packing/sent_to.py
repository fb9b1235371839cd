"""Where a dataset was sent, remembered in the private folder: later jobs must publish there too.

An address says where data of patients lie, and whoever reads the dataset has no use for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardflow.errors import ConfigError, FormatError
from shardflow.packing.workplace import storage_error
from shardflow.shards.foreign.places import RelocatedStore
from shardflow.storage import LocalStore, open_store, write_atomic

if TYPE_CHECKING:
    from shardflow.packing.workplace import Workplace
    from shardflow.shards.manifest import Manifest
    from shardflow.storage import ByteStore

__all__ = ["SentTo", "check_sent_to", "read_sent_to", "reading_store", "write_sent_to"]

_NAME: Final = "upload.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SentTo:
    """An address that holds the dataset."""

    url: str
    keeps_local: bool
    """Whether shards lie in the output folder too."""


def read_sent_to(place: Workplace) -> SentTo | None:
    """Return where the dataset was sent; None if it never was.

    Raises:
        FormatError: The note is damaged.
        StorageError: It cannot be read.
    """
    try:
        note = json.loads((place.private / _NAME).read_bytes())
        return SentTo(url=str(note["upload_to"]), keeps_local=bool(note["keep_local"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error("reading where the dataset was sent", error) from None
    except (ValueError, KeyError, TypeError):
        raise FormatError(
            f"{_NAME} of the private folder must say where the dataset was sent, got another text; "
            "restore it from a copy."
        ) from None


def write_sent_to(place: Workplace, sent_to: SentTo) -> None:
    """Remember where the dataset is sent, before anything leaves the output folder.

    Raises:
        StorageError: It cannot be written.
    """
    if read_sent_to(place) != sent_to:
        text = json.dumps({"keep_local": sent_to.keeps_local, "upload_to": sent_to.url}).encode("ascii")
        write_atomic(place.private / _NAME, [text], replace=True, mode=0o600)


def check_sent_to(place: Workplace, upload_to: str) -> None:
    """Refuse a job that would publish elsewhere, where the address holds the only copy of the shards.

    Raises:
        ConfigError: The settings name another address, or none.
    """
    sent_to = read_sent_to(place)
    if sent_to is None or sent_to.keeps_local:
        return
    if not upload_to or open_store(upload_to).url != sent_to.url:
        raise ConfigError(
            "upload_to must be the address that holds the shards of this dataset, got another or none; name "
            "it, or bring the shards back with `shardflow copy` and remove upload.json of the private folder."
        )


def reading_store(output: Path, url: str, manifest: Manifest) -> ByteStore:
    """Return a store that finds the files of a version in the output folder, else at an address.

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
