"""Upload of a dataset into an object store while it is packed; nothing is overwritten, manifests come last.

A shard is sent as soon as it is in the output folder, while the next ones are packed. Every put is
conditional. The first one is a claim with the digest of the plan: of two jobs that pack different datasets to
one address, the second is refused before it sends anything, and a killed job resumes. Uploaded files are
marked in the work folder, so that they are not sent again.

If the output folder is to hold no shards, each one is read back from the store, marked, and only then removed
locally; a job that packs faster than it sends waits, so that only few shards are stored locally at any moment
(docs/adr/0004). The address is remembered in the private folder, because later jobs must publish there too;
readers of the dataset have no use for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from shardflow.errors import (
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    StorageError,
    naming_os_errors,
)
from shardflow.format.copies.copying import FACTS_KINDS, SIDECAR_KINDS, copy_object, object_stands
from shardflow.format.entities import view_digests
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.format.manifest import FileEntry, Manifest, load, manifest_path, versions
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.tables import TableManifest, table_versions
from shardflow.packing.publish_target import (
    PublishTarget,
    read_publish_target,
    reading_store,
    write_publish_target,
)
from shardflow.packing.workspace import write_plainly
from shardflow.storage import LocalStore, open_store
from shardflow.storage.remote import erase

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from shardflow.format.manifest import ShardEntry
    from shardflow.packing.workspace import Workspace
    from shardflow.storage import ByteStore

_NUM_THREADS: Final = 4
"""Concurrent uploads; each takes up to 20 MiB."""
_OWN_FOLDERS: Final = ("shards/", "samples/", "ledger", "report", "claim-")
MAX_WAITING_SHARDS: Final = 4
"""Shards that may wait for their upload if the output folder is to hold none."""


class Uploader:
    """Uploader of one output folder; a context manager, which drops uploads that have not started.

    Args:
        workspace: The folders of the job.
        url: Address to publish to.
        keeps_local: Whether shards stay in the output folder.
    """

    def __init__(self, workspace: Workspace, url: str, *, keeps_local: bool = True) -> None:
        self._workspace = workspace
        self._source = LocalStore(workspace.output)
        self._target = open_store(url)
        self._publish_target = PublishTarget(url=self._target.url, keeps_local=keeps_local)
        self._address = hashlib.sha256(url.encode()).hexdigest()
        self._pool = ThreadPoolExecutor(_NUM_THREADS)
        self._running: dict[str, Future[None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def store(self, manifest: Manifest) -> ByteStore:
        """Return a store that reads a version from the output folder and the address."""
        return reading_store(self._workspace.output, self._publish_target.url, manifest)

    def check_target(self) -> None:
        """Refuse, before anything is packed, an address with versions that this output does not have.

        Raises:
            ConfigError: It has a version of another dataset.
            StorageError: It cannot be reached.
        """
        own = {number: load(self._source, number).dataset_id for number in versions(self._source)}
        there = versions(self._target)
        for number in there:
            # Versions that were deleted locally but not remotely yet are older than all remaining ones.
            is_deleted = bool(own) and number < min(own) and max(there) in own
            if not is_deleted and own.get(number) != load(self._target, number).dataset_id:
                raise _taken(number)

    def claim(self, version: int, plan_digest: str) -> None:
        """Claim the address for one version of one plan; jobs with the same plan may share it.

        Raises:
            ConfigError: Another plan has claimed it.
            StorageError: It cannot be reached.
        """
        path = f"claim-{version:06d}.json"
        claim = canonical_json({"plan_digest": plan_digest})
        try:
            self._target.put_new(path, claim)
        except AlreadyExistsError:
            if self._target.read(path) != claim:
                raise ConfigError(
                    "upload_to is claimed by a job with other inputs or settings; name another address, or "
                    f"remove its objects and {path} if it will not be resumed."
                ) from None
        write_publish_target(self._workspace, self._publish_target)

    def has_shard(self, record: Mapping[str, Any]) -> bool:
        """Return whether a shard of an earlier run was uploaded and read back, and is not needed locally.

        Args:
            record: Record of the shard, see `shardflow.packing.studies.assembly`.
        """
        entries = _entries(record)
        return not self._publish_target.keeps_local and bool(entries) and all(map(self._is_marked, entries))

    def add_shard(self, record: Mapping[str, Any]) -> None:
        """Start to upload a finished shard, and raise failures of earlier uploads.

        Args:
            record: Record of the shard, see `shardflow.packing.studies.assembly`.

        Raises:
            StorageError: An upload failed.
            ChecksumError: Another object exists under the name of a shard.
        """
        self._begin(str(record["name"]), _entries(record))
        self._raise_failures(only_done=True)
        while not self._publish_target.keeps_local and len(self._unfinished()) >= MAX_WAITING_SHARDS:
            wait(self._unfinished(), return_when=FIRST_COMPLETED)
            self._raise_failures(only_done=True)

    def fetch(self, shard: ShardEntry) -> None:
        """Download the files of a shard that are missing in the output folder, and verify them.

        Raises:
            ChecksumError: They differ from the manifest.
            StorageError: They cannot be read or written.
        """
        for entry in (shard.index, shard.file):
            if not (self._workspace.output / entry.path).exists():
                copy_object(self._target, self._source, entry)

    def send(self, shard: ShardEntry) -> None:
        """Upload a shard, and wait for it."""
        self._send_all((shard.file, shard.index))

    def release(self, shard: ShardEntry) -> None:
        """Remove the files of an uploaded shard from the output folder, if it is to hold none.

        Raises:
            StorageError: They cannot be removed.
        """
        if not self._publish_target.keeps_local:
            self._unlink((shard.file, shard.index))

    def wait(self) -> None:
        """Wait for all started uploads.

        Raises:
            StorageError: An upload failed.
            ChecksumError: Another object exists under the name of a file.
        """
        self._raise_failures(only_done=False)

    def finish(self) -> None:
        """Upload the rest of every version in the output folder, and then the manifests.

        Raises:
            ConfigError: Another dataset has been published there meanwhile.
            StorageError: An upload failed.
            ChecksumError: Another object exists under the name of a file.
        """
        write_publish_target(self._workspace, self._publish_target)
        manifests = {number: load(self._source, number) for number in versions(self._source)}
        sent = {number: load(self._target, number) for number in versions(self._target)}
        # Files of a published manifest were uploaded before it.
        uploaded = {entry for manifest in sent.values() for entry in manifest.files()}
        for number, manifest in manifests.items():
            if number in sent and sent[number].dataset_id == manifest.dataset_id:
                continue
            shards = {entry for shard in manifest.shards for entry in (shard.file, shard.index)}
            for shard in manifest.shards:
                if shard.file not in uploaded or shard.index not in uploaded:
                    self._begin(shard.name, (shard.file, shard.index))
            for entry in manifest.files():
                if entry not in shards and entry not in uploaded:
                    self._begin(entry.path, (entry,))
        for manifest in manifests.values():
            self._send_beside(manifest.dataset_id)
        self.wait()
        for number, manifest in sorted(manifests.items()):
            self._put_manifest(number, manifest)
        if not self._publish_target.keeps_local:
            self._release_all(manifests.values())

    def erase_unnamed(self) -> None:
        """Delete, at the address, versions that were deleted locally, and files that no local version names.

        This includes uploads of a job that was interrupted and never published.

        Raises:
            StorageError: Something cannot be deleted.
        """
        manifests = [load(self._source, number) for number in versions(self._source)]
        own = {manifest.manifest_version for manifest in manifests}
        for number in versions(self._target):
            if number not in own:
                erase(self._target, manifest_path(number))
        named = {entry.path for manifest in manifests for entry in manifest.files()}
        named |= {f"claim-{number:06d}.json" for number in own}
        for path in self._target.list(""):
            if path.startswith(_OWN_FOLDERS) and path not in named:
                erase(self._target, path)
        # Token counts, entity views and facts belong to single versions.
        current = {manifest.dataset_id for manifest in manifests} | view_digests(self._target, manifests)
        for path in [path for kind in SIDECAR_KINDS for path in self._target.list(f"{kind.root}/")]:
            if path.split("/")[2:3] and path.split("/")[2] not in current:
                erase(self._target, path)

    def _send_beside(self, dataset_id: str) -> None:
        """Start to upload the facts and the attached tables of a version."""
        for kind in FACTS_KINDS:
            self._send_sidecar(kind, kind.name, dataset_id)
        for name, numbers in table_versions(self._source, dataset_id).items():
            for number in numbers:
                self._send_sidecar(TableManifest, f"{name}-{number:06d}", dataset_id)

    def _send_sidecar(self, kind: type[SidecarManifest], name: str, dataset_id: str) -> None:
        """Start to upload the tables of a sidecar, and then its manifest, if there is one."""
        folder = f"{kind.root}/{name}/{dataset_id}"
        with suppress(NotFoundError):
            facts = kind.load(self._source, name, dataset_id)
            path, data = f"{folder}/{kind.file_name}", facts.encode()
            tables = [
                FileEntry(path=f"{folder}/{name}", num_bytes=num_bytes or 0, sha256=sha256)
                for name, (num_bytes, sha256) in facts.tables().items()
            ]
            own = FileEntry(path=path, num_bytes=len(data), sha256=sha256_hex(data))
            if not object_stands(self._target, own):
                self._begin(path, (*tables, own))

    def _begin(self, name: str, entries: tuple[FileEntry, ...]) -> None:
        if entries and name not in self._running:
            self._running[name] = self._pool.submit(self._send_all, entries)

    def _send_all(self, entries: tuple[FileEntry, ...]) -> None:
        for entry in entries:
            self._send(entry)
        if not self._publish_target.keeps_local:
            self._unlink(entry for entry in entries if entry.path.startswith("shards/"))

    def _send(self, entry: FileEntry) -> None:
        if self._is_marked(entry):
            return
        is_new = copy_object(self._source, self._target, entry)
        if is_new and not self._publish_target.keeps_local and not object_stands(self._target, entry):
            raise StorageError(f"{entry.path} is missing at its address after the upload; run the job again.")
        mark = self._mark(entry)
        mark.parent.mkdir(parents=True, exist_ok=True)
        write_plainly(mark, self._facts(entry), mode=0o644)

    def _mark(self, entry: FileEntry) -> Path:
        return self._workspace.uploaded / entry.path.replace("/", "-")

    def _facts(self, entry: FileEntry) -> bytes:
        return f"{self._address} {entry.sha256} {entry.num_bytes}".encode("ascii")

    def _is_marked(self, entry: FileEntry) -> bool:
        mark = self._mark(entry)
        if not mark.exists() or mark.read_bytes() != self._facts(entry):
            return False
        try:
            return self._target.size(entry.path) == entry.num_bytes
        except NotFoundError:
            return False

    def _unlink(self, entries: Iterable[FileEntry]) -> None:
        with naming_os_errors("removing an uploaded shard"):
            for entry in entries:
                (self._workspace.output / entry.path).unlink(missing_ok=True)

    def _release_all(self, manifests: Iterable[Manifest]) -> None:
        """Remove local shards from before `keep_local` was turned off, after checking their uploads."""
        for manifest in manifests:
            for shard in manifest.shards:
                entries = (shard.file, shard.index)
                if any((self._workspace.output / entry.path).exists() for entry in entries):
                    for entry in entries:
                        if not object_stands(self._target, entry):
                            raise StorageError(f"{entry.path} is missing at its address.")
                    self._unlink(entries)

    def _unfinished(self) -> list[Future[None]]:
        return [running for running in self._running.values() if not running.done()]

    def _raise_failures(self, *, only_done: bool) -> None:
        for running in list(self._running.values()):
            if not only_done or running.done():
                running.result()

    def _put_manifest(self, number: int, manifest: Manifest) -> None:
        try:
            self._target.put_new(manifest_path(number), manifest.encode())
        except AlreadyExistsError:
            if load(self._target, number).dataset_id != manifest.dataset_id:
                raise _taken(number) from None


@contextmanager
def uploader_of(workspace: Workspace) -> Iterator[Uploader | None]:
    """Open the uploader of a published dataset; None if it has no publish target.

    Raises:
        ConfigError: The address holds another dataset.
        StorageError: It cannot be reached.
    """
    publish_target = read_publish_target(workspace)
    if publish_target is None:
        yield None
        return
    with Uploader(workspace, publish_target.url, keeps_local=publish_target.keeps_local) as uploader:
        uploader.check_target()
        yield uploader


def _entries(record: Mapping[str, Any]) -> tuple[FileEntry, ...]:
    """Return the files of a shard; none if none of its studies could be packed."""
    return tuple(
        FileEntry(path=f"shards/{record['name']}.{suffix}", **entry)
        for suffix, entry in (("tar", record["tar"]), ("idx", record["index"]))
        if entry is not None
    )


def _taken(number: int) -> ConfigError:
    return ConfigError(
        f"upload_to must be empty or hold versions of the dataset in output, got another version {number}; "
        "name another address."
    )
