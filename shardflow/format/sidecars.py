"""Sidecars: tables beside a dataset, added later without touching a shard, under a manifest of their own.

A sidecar is a folder ``<root>/<name>/<owner>/``: its manifest is written last, names its tables, and binds
them to an owner, which is a version of the dataset or an entity view of one. Kinds of sidecars derive from
`SidecarManifest`; `shardflow.format.copies.copying` lists them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Self

from shardflow.errors import FormatError, ShardflowError
from shardflow.format.keys import DIGEST_PATTERN, Json, canonical_json, parse_json, sha256_hex
from shardflow.format.signatures import trust_of
from shardflow.storage import ByteStore


class SidecarManifest(ABC):
    """Manifest of a sidecar: canonical JSON with its own digest."""

    root: ClassVar[str]
    """Folder of all sidecars of the kind."""
    file_name: ClassVar[str]
    """Name of the manifest in the folder of the sidecar."""
    head: ClassVar[Mapping[str, Json]]
    """Entries that are the same in all manifests of the kind, such as the format and its version."""
    remedy: ClassVar[str]
    """Instruction for making such a sidecar again."""

    dataset_id: str
    """Digest of the owner: rows of a different version or view are different rows."""

    @abstractmethod
    def body(self) -> dict[str, Json]:
        """Return the entries beside `head` and the digest."""

    @classmethod
    @abstractmethod
    def from_body(cls, body: dict[str, Any]) -> Self:
        """Make a manifest of the entries that `body` returns; any error means that they are not."""

    @abstractmethod
    def tables(self) -> dict[str, tuple[int | None, str]]:
        """Return size (None if not recorded) and SHA-256 of each table by its name in the folder."""

    @cached_property
    def digest(self) -> str:
        """Identity of the sidecar, 64 hexadecimal digits."""
        return sha256_hex(canonical_json({**self.head, **self.body()}))

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return canonical_json({**self.head, **self.body(), "digest": self.digest}) + b"\n"

    @classmethod
    def decode(cls, data: bytes, *, name: str) -> Self:
        """Parse and check a manifest.

        Args:
            data: Bytes of the file.
            name: What errors call the file.

        Raises:
            FormatError: It is no manifest of this kind, or carries a different digest.
        """
        try:
            entries = parse_json(data.removesuffix(b"\n"), what=name)
            own = {key: value for key, value in entries.items() if key not in {*cls.head, "digest"}}
            manifest = cls.from_body(own)
            is_whole = manifest.encode() == data
        except (KeyError, TypeError, ValueError, AttributeError, ShardflowError):
            is_whole = False
        if not is_whole:
            raise FormatError(
                f"{name} is damaged, or is no manifest of {cls.head['format']} {cls.head['format_version']}; "
                f"delete its folder and {cls.remedy}."
            )
        return manifest

    @classmethod
    def load(cls, store: ByteStore, name: str, owner: str) -> Self:
        """Read the manifest of a sidecar.

        Args:
            store: Of the dataset.
            name: Name of the sidecar among those of its kind.
            owner: Digest of the version or view that it belongs to.

        Raises:
            NotFoundError: There is no such sidecar.
            FormatError: The manifest is damaged, or belongs to a different folder; or the store trusts signed
                ones only, see `shardflow.format.signatures`, and it is none.
            StorageError: Reading failed.
        """
        path = f"{cls.root}/{name}/{owner}/{cls.file_name}"
        data = store.read(path)
        trust = trust_of(store)
        if trust is not None:
            trust.check(path, data)
        manifest = cls.decode(data, name=path)
        if not manifest.belongs_in(name, owner):
            raise FormatError(
                f"{path} must name the version and tokenizer that its folder is named after, got another's; "
                f"delete the folder and {cls.remedy}."
            )
        return manifest

    def belongs_in(self, name: str, owner: str) -> bool:  # noqa: ARG002 - the name is recorded by some kinds
        """Return whether this is a manifest of the sidecar of a name and an owner."""
        return self.dataset_id == owner

    @classmethod
    def is_name(cls, name: str) -> bool:
        """Return whether a sidecar of this kind may have a name; by default a digest."""
        return DIGEST_PATTERN.fullmatch(name) is not None
