"""What a manifest says of each file: where it lies, its size, its digest.

Entries check themselves, so that a manifest of others can neither lead out of its folder nor count backwards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardflow.errors import ManifestError, StorageError
from shardflow.shards.keys import SHARD_NAME_PATTERN, SPLIT_PATTERN
from shardflow.storage import check_object_path

__all__ = ["FileEntry", "LedgerEntry", "ShardEntry", "check_count", "check_digest"]

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A file of the dataset: its path inside it, its size, its SHA-256.

    Raises:
        ManifestError: The path leaves the dataset, the size is no count, or the digest is none.
    """

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        try:
            check_object_path(self.path)
        except (StorageError, AttributeError, TypeError):
            raise ManifestError("a file's path must stay inside the dataset, got another one.") from None
        check_count(self.num_bytes, "num_bytes")
        check_digest(self.sha256, "sha256")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """A shard: tar, index, and what they hold; known elsewhere by its position in the list.

    Raises:
        ManifestError: A name, count or file is none.
    """

    name: str
    split: str
    path: str
    num_bytes: int
    sha256: str
    index: FileEntry
    num_samples: int
    """Samples that the files hold."""
    num_fields: int
    num_removed: int = 0
    """Samples of them that this version does not have any more."""

    def __post_init__(self) -> None:
        names = ((self.name, SHARD_NAME_PATTERN), (self.split, SPLIT_PATTERN))
        if not all(pattern.fullmatch(name) for name, pattern in names):
            raise ManifestError("a shard must have a name and a split of format 1, got another name.")
        check_count(self.num_samples, "num_samples")
        check_count(self.num_fields, "num_fields")
        check_count(self.num_removed, "num_removed")
        if self.num_removed and self.num_removed >= self.num_samples:
            raise ManifestError("a shard without any sample of a version must not be named by it, got one.")
        # Checks path, size and digest.
        _ = self.file

    @property
    def file(self) -> FileEntry:
        """The tar as a file."""
        return FileEntry(path=self.path, num_bytes=self.num_bytes, sha256=self.sha256)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """The ledger: a file, and the head of its hash chain.

    Raises:
        ManifestError: The file or the head is none.
    """

    path: str
    num_bytes: int
    sha256: str
    head: str

    def __post_init__(self) -> None:
        check_digest(self.head, "head")
        # Checks path, size and digest.
        _ = self.file

    @property
    def file(self) -> FileEntry:
        """The ledger as a file."""
        return FileEntry(path=self.path, num_bytes=self.num_bytes, sha256=self.sha256)


def check_count(value: object, name: str) -> None:
    """Refuse what is no count.

    Raises:
        ManifestError: ``value`` is no integer, or negative.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ManifestError(f"{name} must be an integer from 0, got a {type(value).__name__} {value!a:.20}.")


def check_digest(value: object, name: str) -> None:
    """Refuse what is no SHA-256.

    Raises:
        ManifestError: ``value`` is not 64 lower-case hexadecimal digits.
    """
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ManifestError(f"{name} must be 64 hexadecimal digits, got another value.")
