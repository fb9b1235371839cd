"""Copy a dataset between two stores: every byte checked, nothing overwritten, the manifest last.

Until the manifest stands the target is no dataset, and a killed copy is started again: what is there and
right is checked and not copied again. Only files that a manifest names are copied, so nothing private is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardflow.errors import AlreadyExistsError, ChecksumError, ConfigError, NotFoundError, StorageError
from shardflow.shards.foreign.places import located
from shardflow.shards.manifest import FileEntry, Manifest, load, manifest_path, versions
from shardflow.shards.stream import HashedStream
from shardflow.storage import ByteStore

__all__ = ["CopyReport", "copy_dataset", "copy_object", "object_stands"]

Progress = Callable[[int, int], None]


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


def copy_dataset(
    source: ByteStore,
    target: ByteStore,
    *,
    newest_only: bool = False,
    num_threads: int = 2,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy a dataset, or go on with a copy.

    Args:
        source: Where it lies; shards that others wrote are brought along from where they lie.
        target: Where it shall lie; may hold a part of it.
        newest_only: Copy the newest version alone; by default all.
        num_threads: Files copied at once; each holds 4 MiB, and up to 16 MiB more for an object store.
        progress: Called with the bytes that are done and those of all files.

    Raises:
        ManifestError: The source holds no dataset, or one that cannot be trusted.
        ConfigError: The target holds another dataset, or versions that the source does not have.
        ChecksumError: A file of the source, or one that stands in the target, is not what the manifest says.
        StorageError: Reading or writing failed.
    """
    numbers = versions(source)[-1:] if newest_only else versions(source)
    manifests = {number: load(source, number) for number in numbers or [1]}
    _check_target(manifests, target)
    source = located(source, manifests.values())
    files = {entry.path: entry for manifest in manifests.values() for entry in manifest.files()}
    tally = _Tally(sum(entry.num_bytes for entry in files.values()), progress)

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
