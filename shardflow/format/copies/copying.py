"""Copying a dataset between stores, with the sidecars beside it.

Every byte is checked, nothing is overwritten, and the manifest is written last: until then the target is no
dataset. A killed copy is started again; what is already there and correct is checked and not copied again.
Only files named by a manifest are copied, so nothing private is.

Sidecars are entity views (``views/<name>/<dataset_id>/``), stored tokens
(``tokens/<tokenizer>/<dataset_id>/``), tables of facts (``facts/series/<dataset_id>/`` and
``facts/study/<dataset_id>/``), attached tables (``tables/<name>-<number>/<dataset_id>/``) and digests of
fields (``digests/fields/<dataset_id>/``), which no manifest of the dataset names. Tokens may belong to a
view, whose digest then takes the place of the ``dataset_id``. Layouts: docs/format.md, sections 13, 16 to 19
and 24.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Final

from shardflow.errors import (
    AlreadyExistsError,
    ChecksumError,
    ConfigError,
    NoListingError,
    NotFoundError,
    SignatureError,
    StorageError,
)
from shardflow.format.counts import CountsManifest
from shardflow.format.entities import EntityManifest
from shardflow.format.facts.series import SeriesManifest
from shardflow.format.facts.studies import StudiesManifest
from shardflow.format.facts.voxels import VoxelsManifest
from shardflow.format.field_digests import FieldDigestsManifest
from shardflow.format.foreign.places import located
from shardflow.format.keys import DIGEST_PATTERN, sha256_hex
from shardflow.format.manifest import FileEntry, Manifest, load, manifest_path, versions
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.signatures import SignedList, list_path, signature_numbers, stored_signature
from shardflow.format.tables import TableManifest
from shardflow.format.tar import HashedStream
from shardflow.format.token_manifest import TokensManifest
from shardflow.storage import ByteStore

FACTS_KINDS: Final[tuple[type[SeriesManifest | StudiesManifest | VoxelsManifest], ...]] = (
    SeriesManifest,
    StudiesManifest,
    VoxelsManifest,
)
"""Tables of facts, of which a version has one each."""
SIDECAR_KINDS: Final[tuple[type[SidecarManifest], ...]] = (
    EntityManifest,
    TokensManifest,
    CountsManifest,
    *FACTS_KINDS,
    TableManifest,
    FieldDigestsManifest,
)
"""Views come first: tokens may belong to one."""
_NUM_PARTS: Final = 4
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sidecar:
    """A sidecar found by its name; its tables were not read."""

    kind: type[SidecarManifest]
    name: str
    """Of the view, digest of the tokenizer or processor, ``series``, ``study``, or name and number of a
    table."""
    path: str
    """Its folder, which is named after the owner."""
    version: int | None
    """Of the dataset; None where the owner is none of the known versions and their views."""
    view: str | None
    """Name of the view that tokens are of; None for those of the samples, and for a view itself."""
    is_finished: bool
    """Whether it has a manifest; otherwise it belongs to an unfinished job."""
    manifest: SidecarManifest | None
    """None unless it is finished, of a known version, and can be trusted."""

    @property
    def manifest_path(self) -> str:
        """Path of its manifest."""
        return f"{self.path}/{self.kind.file_name}"


def find_sidecars(
    store: ByteStore,
    manifests: Iterable[Manifest],
    *,
    guard: Callable[[str], AbstractContextManager[object, bool | None]] = nullcontext,
) -> list[Sidecar]:
    """Return all sidecars, views first, each kind by name.

    Args:
        store: Of the dataset.
        manifests: The versions whose sidecars are opened.
        guard: Makes a context, from the path of a manifest, in which the manifest is read; it may suppress
            errors.

    Raises:
        NoListingError: The store cannot list.
        FormatError: A manifest cannot be trusted.
        StorageError: Reading failed.
    """
    files: dict[tuple[type[SidecarManifest], str, str], set[str]] = {}
    for kind in SIDECAR_KINDS:
        for path in store.list(f"{kind.root}/"):
            parts = path.split("/")
            if len(parts) == _NUM_PARTS and kind.is_name(parts[1]) and DIGEST_PATTERN.fullmatch(parts[2]):
                files.setdefault((kind, parts[1], parts[2]), set()).add(parts[3])
    owners: dict[str, tuple[int | None, str | None]] = {
        manifest.dataset_id: (manifest.manifest_version, None) for manifest in manifests
    }
    found = []
    for (kind, name, owner), names in files.items():
        folder = f"{kind.root}/{name}/{owner}"
        version, view = owners.get(owner, (None, None))
        is_finished = kind.file_name in names
        manifest: SidecarManifest | None = None
        if is_finished and version is not None:
            with guard(f"{folder}/{kind.file_name}"):
                manifest = kind.load(store, name, owner)
        if isinstance(manifest, EntityManifest):
            owners[manifest.digest] = (version, name)
        found.append(
            Sidecar(
                kind=kind,
                name=name,
                path=folder,
                version=version,
                view=view,
                is_finished=is_finished,
                manifest=manifest,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedSidecar:
    """An entity view, stored tokens, a table of facts or an attached table that was copied."""

    name: str
    """Of the view, digest of the tokenizer or processor, ``series``, ``study``, or name and number of a
    table."""
    version: int
    """Of the dataset that it belongs to."""
    view: str | None
    """Name of the view whose texts were tokenized; None for those of whole reports, and for a view."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyReport:
    """Result of a copy."""

    dataset_id: str
    """Of the newest version."""
    versions: tuple[int, ...]
    num_files: int
    num_bytes: int
    num_copied_files: int
    """Files that were not in the target before; the others were only checked."""
    num_copied_bytes: int
    views: tuple[CopiedSidecar, ...]
    """Entity views that are in the target now."""
    tokens: tuple[CopiedSidecar, ...]
    """Stored tokens that are in the target now."""
    facts: tuple[CopiedSidecar, ...]
    """Tables of facts of series and studies that are in the target now."""
    tables: tuple[CopiedSidecar, ...]
    """Attached tables that are in the target now."""
    signatures: tuple[str, ...]
    """Signed lists that are in the target now, with their signatures."""
    notes: tuple[str, ...]
    """Sidecars and signatures of the source that were not copied, and why."""


def copy_dataset(
    source: ByteStore,
    target: ByteStore,
    *,
    newest_only: bool = False,
    with_sidecars: bool = True,
    num_threads: int = 2,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy a dataset, or resume a copy.

    Args:
        source: Where the dataset is stored; foreign shards are copied from their own locations.
        target: Where to copy it; may hold a part of it.
        newest_only: Copy the newest version alone; by default all.
        with_sidecars: Copy the entity views, stored tokens, tables of facts and attached tables too.
        num_threads: Files copied at once; each holds 4 MiB, and up to 16 MiB more for an object store.
        progress: Called with the bytes done and the bytes of all files.

    Raises:
        ManifestError: The source holds no dataset, or one that cannot be trusted.
        ConfigError: The target holds another dataset, versions that the source does not have, or another
            view of the same name.
        FormatError: The manifest of a view or of tokens cannot be trusted.
        ChecksumError: A file of the source, or an existing one of the target, differs from the manifest.
        StorageError: Reading or writing failed.
    """
    numbers = versions(source)[-1:] if newest_only else versions(source)
    manifests = {number: load(source, number) for number in numbers or [1]}
    _check_target(manifests, target)
    sidecars: list[_SidecarFiles] = []
    notes: list[str] = []
    if with_sidecars:
        sidecars, notes = _sidecars_to_copy(source, target, list(manifests.values()))
    source = located(source, manifests.values())
    files = {entry.path: entry for manifest in manifests.values() for entry in manifest.files()}
    for blocks in filter(None, (manifest.samples_blocks for manifest in manifests.values())):
        # A copy by a shardflow that knows no such digests has none, and is read without them.
        if blocks.path in files and not _is_there(source, blocks.path):
            del files[blocks.path]
            notes.append(f"{blocks.path} was left behind: SRC has none")
    files |= {entry.path: entry for sidecar in sidecars for entry in sidecar.tables}
    sidecar_manifests = [sidecar.manifest for sidecar in sidecars]
    total = sum(entry.num_bytes for entry in (*files.values(), *sidecar_manifests))
    is_new: dict[str, bool] = {}
    done = 0

    def finish(entry: FileEntry, *, is_copied: bool) -> None:
        nonlocal done
        is_new[entry.path] = is_copied
        done += entry.num_bytes
        if progress is not None:
            progress(done, total)

    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        copies = {pool.submit(copy_object, source, target, entry): entry for entry in files.values()}
        try:
            for copied in as_completed(copies):
                finish(copies[copied], is_copied=copied.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    # A sidecar's manifest follows its tables, and the dataset's manifest comes last: a reader that sees the
    # dataset also sees its sidecars.
    for entry in sidecar_manifests:
        finish(entry, is_copied=copy_object(source, target, entry))
    files |= {entry.path: entry for entry in sidecar_manifests}
    signatures: list[str] = []
    if with_sidecars:
        copied_manifests = {*map(manifest_path, manifests), *(entry.path for entry in sidecar_manifests)}
        for number in manifests:
            signed, left = _copy_signatures(source, target, number, copied_manifests)
            signatures += signed
            notes += left
    for number, manifest in sorted(manifests.items()):
        _put_manifest(target, number, manifest)
    new_sizes = [files[path].num_bytes for path, is_copied in is_new.items() if is_copied]
    return CopyReport(
        dataset_id=manifests[max(manifests)].dataset_id,
        versions=tuple(sorted(manifests)),
        num_files=len(files) + len(manifests),
        num_bytes=total,
        num_copied_files=len(new_sizes),
        num_copied_bytes=sum(new_sizes),
        views=tuple(sidecar.report() for sidecar in sidecars if sidecar.kind is EntityManifest),
        tokens=tuple(sidecar.report() for sidecar in sidecars if sidecar.kind is TokensManifest),
        facts=tuple(sidecar.report() for sidecar in sidecars if sidecar.kind in FACTS_KINDS),
        tables=tuple(sidecar.report() for sidecar in sidecars if sidecar.kind is TableManifest),
        signatures=tuple(signatures),
        notes=tuple(notes),
    )


def copy_object(source: ByteStore, target: ByteStore, entry: FileEntry) -> bool:
    """Copy one file, unless it is there already; its size and digest are checked either way.

    A local file is uploaded in the same way, from a store of its folder.

    Returns:
        Whether it was copied.

    Raises:
        ChecksumError: The file of the source, or an existing one of the target, differs from the entry.
        StorageError: Reading or writing failed; nothing is left behind.
    """
    if object_stands(target, entry):
        return False
    try:
        target.put_stream(entry.path, _checked(source, entry, "the source"), entry.num_bytes)
    except AlreadyExistsError:
        # A concurrent copy finished first.
        if not object_stands(target, entry):
            raise
        return False
    return True


def object_stands(target: ByteStore, entry: FileEntry) -> bool:
    """Return whether a store holds a file with the right bytes, by reading it.

    Raises:
        ChecksumError: A different file is there.
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


@dataclass(frozen=True, slots=True)
class _SidecarFiles:
    """A sidecar to copy, with its tables and its manifest as files."""

    sidecar: Sidecar
    tables: list[FileEntry]
    manifest: FileEntry

    @property
    def kind(self) -> type[SidecarManifest]:
        return self.sidecar.kind

    def report(self) -> CopiedSidecar:
        return CopiedSidecar(
            name=self.sidecar.name,
            version=self.sidecar.version or 0,
            view=self.sidecar.view,
            num_bytes=sum(entry.num_bytes for entry in (*self.tables, self.manifest)),
        )


def _is_there(store: ByteStore, path: str) -> bool:
    try:
        store.size(path)
    except NotFoundError:
        return False
    return True


def _sidecars_to_copy(
    source: ByteStore, target: ByteStore, manifests: Sequence[Manifest]
) -> tuple[list[_SidecarFiles], list[str]]:
    """Find the sidecars of some versions before the first byte is copied; return notes on the others."""
    try:
        found = find_sidecars(source, manifests)
    except NoListingError:
        return [], ["what else is beside the shards was not looked for: SRC cannot list its files"]
    wanted = []
    for sidecar in found:
        if sidecar.manifest is None:
            continue
        path, data = sidecar.manifest_path, sidecar.manifest.encode()
        with suppress(NotFoundError):
            if target.read(path) != data:
                raise ConfigError(
                    f"DST must hold no other {path} than SRC, got one, perhaps of other rules; delete its "
                    "folder in DST, or copy without what lies beside the shards (--no-sidecars)."
                )
        tables = [
            FileEntry(
                path=f"{sidecar.path}/{name}",
                # The size of the counts of tokens is not recorded.
                num_bytes=source.size(f"{sidecar.path}/{name}") if num_bytes is None else num_bytes,
                sha256=sha256,
            )
            for name, (num_bytes, sha256) in sidecar.manifest.tables().items()
        ]
        entry = FileEntry(path=path, num_bytes=len(data), sha256=sha256_hex(data))
        wanted.append(_SidecarFiles(sidecar, tables, entry))
    notes = [
        f"{sidecar.path} was left behind: it is of a job that is not done"
        for sidecar in found
        if not sidecar.is_finished and sidecar.version is not None
    ]
    return wanted, notes


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


def _copy_signatures(
    source: ByteStore, target: ByteStore, version: int, copied: Collection[str]
) -> tuple[list[str], list[str]]:
    """Copy the signatures of a version.

    Args:
        source: Where the dataset is stored.
        target: Where its files and sidecars were copied to.
        version: The version.
        copied: Paths of the manifests that the target has.

    Returns:
        The lists that are in the target now, and notes on the others.
    """
    done, notes = [], []
    for number in signature_numbers(source, version):
        path, stored = list_path(version, number), stored_signature(source, version, number)
        if stored is None:
            continue
        try:
            covers = SignedList.decode(stored[0]).files
        except SignatureError:
            covers = {}
        if not covers or not set(covers) <= set(copied):
            notes.append(f"{path} was left behind: it covers what was not copied; sign the copy")
        elif _put_same(target, f"{path}.sig", stored[1]) and _put_same(target, path, stored[0]):
            done.append(path)
        else:
            notes.append(f"{path} was left behind: DST has another one")
    return done, notes


def _put_same(target: ByteStore, path: str, data: bytes) -> bool:
    try:
        target.put_new(path, data)
    except AlreadyExistsError:
        return target.read(path) == data
    return True
