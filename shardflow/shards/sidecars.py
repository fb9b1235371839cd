"""What lies beside a dataset and belongs to it: entity views and stored tokens, found by their folders.

No manifest of the dataset names them. ``views/<name>/<dataset_id>/`` and ``tokens/<tokenizer>/<dataset_id>/``
hold a manifest of their own, written last, which names their tables; tokens may be of a view, whose digest
then stands for the ``dataset_id``. Layouts: docs/format.md, sections 13 and 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from shardflow.errors import ConfigError, FormatError
from shardflow.shards.canonical import sha256_hex
from shardflow.shards.entity_manifest import MANIFEST_NAME, TABLE_NAME, EntityManifest, check_view_name
from shardflow.shards.manifest import FileEntry, Manifest
from shardflow.shards.tokens import COUNTS_NAME, DIGEST_PATTERN, TokensManifest, ids_name
from shardflow.storage import ByteStore

__all__ = [
    "SIDECAR_FOLDERS",
    "Sidecar",
    "SidecarFolder",
    "SidecarKind",
    "find_sidecars",
    "open_sidecar",
    "owned_sidecars",
]

SidecarKind: TypeAlias = Literal["view", "tokens"]
SIDECAR_FOLDERS: Final[dict[str, SidecarKind]] = {"views": "view", "tokens": "tokens"}
_MANIFESTS: Final[dict[SidecarKind, str]] = {"view": MANIFEST_NAME, "tokens": "manifest.json"}
_NUM_PARTS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class SidecarFolder:
    """A folder whose name says that it is a sidecar."""

    kind: SidecarKind
    name: str
    """Of the view, or digest of the tokenizer."""
    owner: str
    """What its name says that it belongs to: a ``dataset_id``, or the digest of a view."""
    path: str
    is_finished: bool
    """Whether it has a manifest; else it belongs to a job that is not done."""

    @property
    def manifest_path(self) -> str:
        """Where its manifest lies."""
        return f"{self.path}/{_MANIFESTS[self.kind]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """A sidecar whose manifest can be trusted; its tables were not read."""

    folder: SidecarFolder
    version: int
    """Of the dataset."""
    view: str | None
    """Name of the view that tokens are of; None for those of the samples, and for a view itself."""
    manifest: EntityManifest | TokensManifest
    data: bytes
    """Of the manifest's file."""

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each of its tables, by path."""
        path, manifest = self.folder.path, self.manifest
        if isinstance(manifest, EntityManifest):
            return {f"{path}/{TABLE_NAME}": manifest.sha256}
        ids = {f"{path}/{ids_name(number)}": file.sha256 for number, file in enumerate(manifest.files)}
        return {f"{path}/{COUNTS_NAME}": manifest.counts_sha256, **ids}

    def tables(self, store: ByteStore) -> list[FileEntry]:
        """Return its tables with their sizes.

        Args:
            store: Of the dataset; tells the size of the table of counts, which no manifest says.

        Raises:
            NotFoundError: The table of counts is missing.
        """
        manifest = self.manifest
        if isinstance(manifest, EntityManifest):
            sizes = [manifest.num_bytes]
        else:
            sizes = [store.size(f"{self.folder.path}/{COUNTS_NAME}")]
            sizes += [file.num_bytes for file in manifest.files]
        return [
            FileEntry(path=path, num_bytes=num_bytes, sha256=sha256)
            for (path, sha256), num_bytes in zip(self.digests.items(), sizes, strict=True)
        ]

    @property
    def manifest_entry(self) -> FileEntry:
        """The file of its manifest."""
        return FileEntry(
            path=self.folder.manifest_path, num_bytes=len(self.data), sha256=sha256_hex(self.data)
        )


def find_sidecars(store: ByteStore) -> list[SidecarFolder]:
    """Return the folders of all sidecars, views first, each kind by name; only names are read.

    Raises:
        NoListingError: The store cannot list.
    """
    found: dict[str, set[str]] = {}
    for root in SIDECAR_FOLDERS:
        for path in store.list(f"{root}/"):
            parts = path.split("/")
            if len(parts) == _NUM_PARTS and _is_sidecar(*parts[:3]):
                found.setdefault("/".join(parts[:3]), set()).add(parts[3])
    folders = []
    for path, names in found.items():
        root, name, owner = path.split("/")
        kind = SIDECAR_FOLDERS[root]
        is_finished = _MANIFESTS[kind] in names
        folders.append(SidecarFolder(kind=kind, name=name, owner=owner, path=path, is_finished=is_finished))
    return folders


def open_sidecar(
    store: ByteStore, folder: SidecarFolder, *, version: int, view: str | None = None
) -> Sidecar:
    """Read and check the manifest of a sidecar.

    Args:
        store: Of the dataset.
        folder: A finished one.
        version: Of the dataset that the folder's name says, directly or by a view's digest.
        view: Name of the view where it is said by one.

    Raises:
        FormatError: The manifest is damaged, or names another owner or tokenizer than its folder does.
        StorageError: Reading failed.
    """
    path = folder.manifest_path
    data = store.read(path)
    again = "make the view again" if folder.kind == "view" else "tokenize again"
    manifest: EntityManifest | TokensManifest
    try:
        if folder.kind == "view":
            manifest = EntityManifest.decode(data, name=path)
        else:
            manifest = TokensManifest.decode(data, name=path)
    except FormatError:
        raise FormatError(
            f"{path} must be a whole manifest of its kind, got a damaged one or another file; delete its "
            f"folder and {again}."
        ) from None
    name = folder.name if isinstance(manifest, EntityManifest) else manifest.tokenizer
    if (name, manifest.dataset_id) != (folder.name, folder.owner):
        raise FormatError(
            f"{path} must name the version and tokenizer that its folder is named after, got another's; "
            f"delete the folder and {again}."
        )
    return Sidecar(folder=folder, version=version, view=view, manifest=manifest, data=data)


def owned_sidecars(
    store: ByteStore, folders: Iterable[SidecarFolder], manifests: Iterable[Manifest]
) -> list[Sidecar]:
    """Return the finished sidecars of some versions, views first.

    Args:
        store: Of the dataset.
        folders: What was found there.
        manifests: The versions.

    Raises:
        FormatError: The manifest of one of them cannot be trusted.
        StorageError: Reading failed.
    """
    finished = [folder for folder in folders if folder.is_finished]
    owners: dict[str, tuple[int, str | None]] = {
        manifest.dataset_id: (manifest.manifest_version, None) for manifest in manifests
    }
    found: list[Sidecar] = []
    for folder in _of_kind(finished, "view"):
        if folder.owner in owners:
            version, _ = owners[folder.owner]
            found.append(open_sidecar(store, folder, version=version))
    for sidecar in found:
        if isinstance(sidecar.manifest, EntityManifest):
            owners[sidecar.manifest.digest] = (sidecar.version, sidecar.folder.name)
    for folder in _of_kind(finished, "tokens"):
        if folder.owner in owners:
            version, view = owners[folder.owner]
            found.append(open_sidecar(store, folder, version=version, view=view))
    return found


def _of_kind(folders: Sequence[SidecarFolder], kind: SidecarKind) -> list[SidecarFolder]:
    return [folder for folder in folders if folder.kind == kind]


def _is_sidecar(root: str, name: str, owner: str) -> bool:
    if not DIGEST_PATTERN.fullmatch(owner):
        return False
    if SIDECAR_FOLDERS[root] == "tokens":
        return DIGEST_PATTERN.fullmatch(name) is not None
    try:
        check_view_name(name)
    except ConfigError:
        return False
    return True
