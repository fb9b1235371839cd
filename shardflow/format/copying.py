"""Copying a dataset between stores, with the sidecars beside it.

Every byte is checked, nothing is overwritten, and the manifest is written last: until then the target is no
dataset. A killed copy is started again; what is already there and correct is checked and not copied again.
Only files named by a manifest are copied, so nothing private is.

Sidecars are entity views and stored tokens. No manifest of the dataset names them:
``views/<name>/<dataset_id>/`` and ``tokens/<tokenizer>/<dataset_id>/`` hold a manifest of their own, written
last, which names their tables. Tokens may belong to a view, whose digest then takes the place of the
``dataset_id``. Layouts: docs/format.md, sections 13 and 16.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from shardflow.errors import (
    AlreadyExistsError,
    ChecksumError,
    ConfigError,
    FormatError,
    NoListingError,
    NotFoundError,
    StorageError,
)
from shardflow.format.entities import MANIFEST_NAME, TABLE_NAME, EntityManifest, check_view_name
from shardflow.format.foreign.places import located
from shardflow.format.keys import sha256_hex
from shardflow.format.manifest import FileEntry, Manifest, load, manifest_path, versions
from shardflow.format.tar import HashedStream
from shardflow.format.tokens import COUNTS_NAME, DIGEST_PATTERN, TokensManifest, ids_name
from shardflow.storage import ByteStore

SidecarKind: TypeAlias = Literal["view", "tokens"]
SIDECAR_FOLDERS: Final[dict[str, SidecarKind]] = {"views": "view", "tokens": "tokens"}
_MANIFESTS: Final[dict[SidecarKind, str]] = {"view": MANIFEST_NAME, "tokens": "manifest.json"}
_NUM_PARTS: Final = 4
Progress = Callable[[int, int], None]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedSidecar:
    """An entity view or stored tokens that came along."""

    name: str
    """Of the view, or digest of the tokenizer."""
    version: int
    """Of the dataset that it belongs to."""
    view: str | None
    """Name of the view whose texts were tokenized; None for those of whole reports, and for a view."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyReport:
    """What was copied."""

    dataset_id: str
    """Of the newest version."""
    versions: tuple[int, ...]
    num_files: int
    num_bytes: int
    num_copied_files: int
    """Files that were not there before; the others were, and were checked."""
    num_copied_bytes: int
    views: tuple[CopiedSidecar, ...]
    """Entity views that are in the target now."""
    tokens: tuple[CopiedSidecar, ...]
    """Stored tokens that are in the target now."""
    notes: tuple[str, ...]
    """What lay beside the source and was not copied, and why."""


def copy_dataset(
    source: ByteStore,
    target: ByteStore,
    *,
    newest_only: bool = False,
    with_sidecars: bool = True,
    num_threads: int = 2,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy a dataset, or go on with a copy.

    Args:
        source: Where it lies; shards that others wrote are brought along from where they lie.
        target: Where it shall lie; may hold a part of it.
        newest_only: Copy the newest version alone; by default all.
        with_sidecars: Copy the entity views and stored tokens of these versions too.
        num_threads: Files copied at once; each holds 4 MiB, and up to 16 MiB more for an object store.
        progress: Called with the bytes that are done and those of all files.

    Raises:
        ManifestError: The source holds no dataset, or one that cannot be trusted.
        ConfigError: The target holds another dataset, versions that the source does not have, or another
            view of the same name.
        FormatError: The manifest of a view or of tokens cannot be trusted.
        ChecksumError: A file of the source, or one that stands in the target, is not what the manifest says.
        StorageError: Reading or writing failed.
    """
    numbers = versions(source)[-1:] if newest_only else versions(source)
    manifests = {number: load(source, number) for number in numbers or [1]}
    _check_target(manifests, target)
    beside = _find_beside(source, target, list(manifests.values())) if with_sidecars else _Sidecars()
    source = located(source, manifests.values())
    files = {entry.path: entry for manifest in manifests.values() for entry in manifest.files()}
    files |= {entry.path: entry for entries in beside.tables for entry in entries}
    said = [sidecar.manifest_entry for sidecar in beside.sidecars]
    tally = _Tally(sum(entry.num_bytes for entry in (*files.values(), *said)), progress)

    def copy(entry: FileEntry) -> bool:
        is_new = copy_object(source, target, entry)
        tally.add(entry.num_bytes)
        return is_new

    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        copies = {path: pool.submit(copy, entry) for path, entry in files.items()}
        try:
            is_new = {path: running.result() for path, running in copies.items()}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    # A table counts once its manifest stands, and all of them before the dataset's: a reader that sees the
    # dataset sees what lies beside it.
    is_new |= {entry.path: copy(entry) for entry in said}
    files |= {entry.path: entry for entry in said}
    for number, manifest in sorted(manifests.items()):
        _put_manifest(target, number, manifest)
    copied = [files[path].num_bytes for path, value in is_new.items() if value]
    return CopyReport(
        dataset_id=manifests[max(manifests)].dataset_id,
        versions=tuple(sorted(manifests)),
        num_files=len(files) + len(manifests),
        num_bytes=tally.total,
        num_copied_files=len(copied),
        num_copied_bytes=sum(copied),
        views=beside.described("view"),
        tokens=beside.described("tokens"),
        notes=tuple(beside.notes),
    )


def copy_object(source: ByteStore, target: ByteStore, entry: FileEntry) -> bool:
    """Copy one file, unless it is there already; its size and digest are checked either way.

    Also how a local file becomes an object: the source is then a store of its folder.

    Returns:
        Whether it was copied.

    Raises:
        ChecksumError: The source's file, or the one that stands in the target, is not the entry's.
        StorageError: Reading or writing failed; nothing is left behind.
    """
    if object_stands(target, entry):
        return False
    try:
        target.put_stream(entry.path, _checked(source, entry, "the source"), entry.num_bytes)
    except AlreadyExistsError:
        # Another copy was faster.
        if not object_stands(target, entry):
            raise
        return False
    return True


def object_stands(target: ByteStore, entry: FileEntry) -> bool:
    """Tell whether a file is in a store, whole: it is read.

    Raises:
        ChecksumError: Another one is there.
        StorageError: Reading failed.
    """
    try:
        for _ in _checked(target, entry, "the target"):
            pass
    except NotFoundError:
        return False
    return True


def _checked(store: ByteStore, entry: FileEntry, where: str) -> Iterator[memoryview]:
    """Yield the bytes of a file; each piece is valid until the next one.

    Raises:
        ChecksumError: At the end, if they are not the entry's.
    """
    stream = HashedStream(store, entry.path)
    remedy = "run `shardflow verify` there" if where == "the source" else "remove it there and copy again"
    if stream.num_bytes != entry.num_bytes:
        raise ChecksumError(
            f"{entry.path} must have the manifest's {entry.num_bytes} bytes, got {stream.num_bytes} "
            f"({where}); {remedy}."
        )
    for piece in stream.take(entry.num_bytes):
        yield piece.data
    if stream.hexdigest() != entry.sha256:
        raise ChecksumError(f"{entry.path} must have the manifest's sha256, got another ({where}); {remedy}.")


@dataclass(slots=True)
class _Sidecars:
    """What lies beside the source: sidecars to copy, the tables of each, and what is left behind."""

    sidecars: list[Sidecar] = field(default_factory=list)
    tables: list[list[FileEntry]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def described(self, kind: SidecarKind) -> tuple[CopiedSidecar, ...]:
        return tuple(
            CopiedSidecar(
                name=sidecar.folder.name,
                version=sidecar.version,
                view=sidecar.view,
                num_bytes=sum(entry.num_bytes for entry in (*entries, sidecar.manifest_entry)),
            )
            for sidecar, entries in zip(self.sidecars, self.tables, strict=True)
            if sidecar.folder.kind == kind
        )


def _find_beside(source: ByteStore, target: ByteStore, manifests: Sequence[Manifest]) -> _Sidecars:
    """Find the sidecars of some versions, before the first byte is copied."""
    try:
        folders = find_sidecars(source)
    except NoListingError:
        note = "entity views and stored tokens were not looked for: SRC cannot list its files"
        return _Sidecars(notes=[note])
    sidecars = owned_sidecars(source, folders, manifests)
    owners = {sidecar.folder.owner for sidecar in sidecars} | {manifest.dataset_id for manifest in manifests}
    for sidecar in sidecars:
        _check_sidecar_of_target(target, sidecar)
    return _Sidecars(
        sidecars=sidecars,
        tables=[sidecar.tables(source) for sidecar in sidecars],
        notes=[
            f"{folder.path} was left behind: it is of a job that is not done"
            for folder in folders
            if not folder.is_finished and folder.owner in owners
        ],
    )


def _check_sidecar_of_target(target: ByteStore, sidecar: Sidecar) -> None:
    path = sidecar.folder.manifest_path
    try:
        found = target.read(path)
    except NotFoundError:
        return
    if found != sidecar.data:
        raise ConfigError(
            f"DST must hold no other {path} than SRC, got one, perhaps of other rules; delete its folder in "
            "DST, or copy without views and tokens (--no-sidecars)."
        )


def _check_target(manifests: Mapping[int, Manifest], target: ByteStore) -> None:
    for number in versions(target):
        manifest = manifests.get(number)
        if manifest is not None and load(target, number).dataset_id == manifest.dataset_id:
            continue
        if manifest is None and number < min(manifests):
            # The newest version alone is added to older ones.
            continue
        raise ConfigError(
            f"DST must hold nothing or a part of this dataset, got another version {number}; name another "
            "place."
        )


def _put_manifest(target: ByteStore, number: int, manifest: Manifest) -> None:
    try:
        target.put_new(manifest_path(number), manifest.encode())
    except AlreadyExistsError:
        if load(target, number).dataset_id != manifest.dataset_id:
            raise StorageError(
                f"{manifest_path(number)} must be this dataset's, got another, written meanwhile; name "
                "another place."
            ) from None


class _Tally:
    """Counts bytes for the progress, from many threads."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._done += num_bytes
            self._progress(self._done, self.total)
