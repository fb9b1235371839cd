"""Where a dataset was sent, remembered in the private folder: later jobs must publish there too.

An address says where data of patients lie, and whoever reads the dataset has no use for it.

Puts a dataset into an object store while it is packed: nothing is overwritten, the manifest is last.

A shard goes as soon as it stands in the output folder, beside the packing of the next ones. Every put is
conditional. The first one is a claim, which holds the digest of the plan: of two jobs that pack different
datasets to one address the second is refused before it sends anything, and a killed one goes on.
What was put is marked in the work folder, so that a killed job does not send it again.

Where the output folder is to hold no shards, each one is read back from the store, marked, and only then
removed here; and a job that packs faster than it sends waits, so that few shards lie here at any moment
(docs/adr/0004-manifest-commit-point.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from shardflow.errors import AlreadyExistsError, ConfigError, FormatError, NotFoundError, StorageError
from shardflow.format.copying import copy_object, object_stands
from shardflow.format.entities import view_digests
from shardflow.format.foreign.places import RelocatedStore
from shardflow.format.keys import canonical_json
from shardflow.format.manifest import FileEntry, Manifest, load, manifest_path, versions
from shardflow.packing.workspace import storage_error, write_plainly
from shardflow.storage import LocalStore, open_store, write_atomic
from shardflow.storage.opening import erase

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from shardflow.format.manifest import ShardEntry
    from shardflow.packing.workspace import Workspace
    from shardflow.storage import ByteStore

_NAME: Final = "upload.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishTarget:
    """An address that holds the dataset."""

    url: str
    keeps_local: bool
    """Whether shards lie in the output folder too."""


def read_publish_target(workspace: Workspace) -> PublishTarget | None:
    """Return where the dataset was sent; None if it never was.

    Raises:
        FormatError: The note is damaged.
        StorageError: It cannot be read.
    """
    try:
        note = json.loads((workspace.private / _NAME).read_bytes())
        return PublishTarget(url=str(note["upload_to"]), keeps_local=bool(note["keep_local"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error("reading where the dataset was sent", error) from None
    except (ValueError, KeyError, TypeError):
        raise FormatError(
            f"{_NAME} of the private folder must say where the dataset was sent, got another text; "
            "restore it from a copy."
        ) from None


def write_publish_target(workspace: Workspace, publish_target: PublishTarget) -> None:
    """Remember where the dataset is sent, before anything leaves the output folder.

    Raises:
        StorageError: It cannot be written.
    """
    if read_publish_target(workspace) != publish_target:
        text = json.dumps({"keep_local": publish_target.keeps_local, "upload_to": publish_target.url}).encode(
            "ascii"
        )
        write_atomic(workspace.private / _NAME, [text], replace=True, mode=0o600)


def check_publish_target(workspace: Workspace, upload_to: str) -> None:
    """Refuse a job that would publish elsewhere, where the address holds the only copy of the shards.

    Raises:
        ConfigError: The settings name another address, or none.
    """
    publish_target = read_publish_target(workspace)
    if publish_target is None or publish_target.keeps_local:
        return
    if not upload_to or open_store(upload_to).url != publish_target.url:
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


_NUM_THREADS: Final = 4
"""Files sent at once; each takes up to 20 MiB."""

MAX_WAITING_SHARDS: Final = 4
"""Shards that may wait for their way, where the output folder is to hold none."""

_OWN_FOLDERS: Final = ("shards/", "samples/", "ledger", "report", "claim-")


class Uploader:
    """Sends the files of one output folder; a context manager, which forgets what has not begun.

    Args:
        place: The folders of the job.
        url: Where the dataset shall lie.
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
        """Return a store that finds the files of a version here or there."""
        return reading_store(self._workspace.output, self._publish_target.url, manifest)

    def check_target(self) -> None:
        """Refuse, before anything is packed, an address that holds what this output does not.

        Raises:
            ConfigError: It holds a version of another dataset.
            StorageError: It cannot be reached.
        """
        own = {number: load(self._source, number).dataset_id for number in versions(self._source)}
        there = versions(self._target)
        for number in there:
            # Versions that were deleted here and not there yet are older than all that are left.
            is_deleted = bool(own) and number < min(own) and max(there) in own
            if not is_deleted and own.get(number) != load(self._target, number).dataset_id:
                raise _taken(number)

    def claim(self, version: int, plan_digest: str) -> None:
        """Take the address for one version of one plan; whoever has the same plan may share it.

        Raises:
            ConfigError: Another plan has it.
            StorageError: It cannot be reached.
        """
        path = f"claim-{version:06d}.json"
        claim = canonical_json({"plan_digest": plan_digest})
        try:
            self._target.put_new(path, claim)
        except AlreadyExistsError:
            if self._target.read(path) != claim:
                raise ConfigError(
                    "upload_to must be claimed by no other job, got one with other inputs or settings; name "
                    f"another address, or remove its objects and {path} if it will not go on."
                ) from None
        write_publish_target(self._workspace, self._publish_target)

    def has_shard(self, record: Mapping[str, Any]) -> bool:
        """Tell whether a shard of a former run was sent, read back and marked, and is not needed here.

        Args:
            record: What `shardflow.packing.studies.assembly` wrote of it.
        """
        entries = _entries(record)
        return not self._publish_target.keeps_local and bool(entries) and all(map(self._is_marked, entries))

    def add_shard(self, record: Mapping[str, Any]) -> None:
        """Begin to send a shard that stands; a failure of an earlier one is raised here.

        Args:
            record: What `shardflow.packing.studies.assembly` wrote of it.

        Raises:
            StorageError: Something could not be sent.
            ChecksumError: Another object stands where a shard should go.
        """
        self._begin(str(record["name"]), _entries(record))
        self._raise_failures(only_done=True)
        while not self._publish_target.keeps_local and len(self._unfinished()) >= MAX_WAITING_SHARDS:
            wait(self._unfinished(), return_when=FIRST_COMPLETED)
            self._raise_failures(only_done=True)

    def fetch(self, shard: ShardEntry) -> None:
        """Bring the files of a shard into the output folder, checked, where they are not.

        Raises:
            ChecksumError: They are not what the manifest says.
            StorageError: They cannot be read or written.
        """
        for entry in (shard.index, shard.file):
            if not (self._workspace.output / entry.path).exists():
                copy_object(self._target, self._source, entry)

    def send(self, shard: ShardEntry) -> None:
        """Send a shard now, whole."""
        self._send_all((shard.file, shard.index))

    def release(self, shard: ShardEntry) -> None:
        """Remove the files of a shard that is there from the output folder, if it is to hold none.

        Raises:
            StorageError: They cannot be removed.
        """
        if not self._publish_target.keeps_local:
            self._unlink((shard.file, shard.index))

    def wait(self) -> None:
        """Wait for all that has begun.

        Raises:
            StorageError: Something could not be sent.
            ChecksumError: Another object stands where one of these should go.
        """
        self._raise_failures(only_done=False)

    def finish(self) -> None:
        """Send what is left of every version in the output folder, and then the manifests.

        Raises:
            ConfigError: Another dataset has come to stand there meanwhile.
            StorageError: Something could not be sent.
            ChecksumError: Another object stands where one of these should go.
        """
        write_publish_target(self._workspace, self._publish_target)
        manifests = {number: load(self._source, number) for number in versions(self._source)}
        sent = {number: load(self._target, number) for number in versions(self._target)}
        # What a manifest there names was there before the manifest was.
        stands = {entry for manifest in sent.values() for entry in manifest.files()}
        for number, manifest in manifests.items():
            if number in sent and sent[number].dataset_id == manifest.dataset_id:
                continue
            shards = {entry for shard in manifest.shards for entry in (shard.file, shard.index)}
            for shard in manifest.shards:
                if shard.file not in stands or shard.index not in stands:
                    self._begin(shard.name, (shard.file, shard.index))
            for entry in manifest.files():
                if entry not in shards and entry not in stands:
                    self._begin(entry.path, (entry,))
        self.wait()
        for number, manifest in sorted(manifests.items()):
            self._put_manifest(number, manifest)
        if not self._publish_target.keeps_local:
            self._release_all(manifests.values())

    def erase_unnamed(self) -> None:
        """Delete, at the address, versions that were deleted here, and all that no version here names.

        Among that may be what a job sent that was stopped and never published.

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
        # Counts and entities for readers of those versions, sample by sample.
        current = {manifest.dataset_id for manifest in manifests} | view_digests(self._target, manifests)
        for path in [*self._target.list("tokens/"), *self._target.list("views/")]:
            if path.split("/")[2:3] and path.split("/")[2] not in current:
                erase(self._target, path)

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
            raise StorageError(
                f"{entry.path} must stand where it was sent, found nothing; run the job again."
            )
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
        try:
            for entry in entries:
                (self._workspace.output / entry.path).unlink(missing_ok=True)
        except OSError as error:
            raise storage_error("removing a shard that was sent", error) from None

    def _release_all(self, manifests: Iterable[Manifest]) -> None:
        """Remove shards that lie here since shards were kept here; each is compared with what is there."""
        for manifest in manifests:
            for shard in manifest.shards:
                entries = (shard.file, shard.index)
                if any((self._workspace.output / entry.path).exists() for entry in entries):
                    for entry in entries:
                        if not object_stands(self._target, entry):
                            raise StorageError(f"{entry.path} must stand where it was sent, found nothing.")
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
    """Open the way to where a dataset was sent; None if it never was.

    Raises:
        ConfigError: Another dataset is there.
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
    """The files of a shard by its record; none where no study of it could be packed."""
    return tuple(
        FileEntry(path=f"shards/{record['name']}.{suffix}", **entry)
        for suffix, entry in (("tar", record["tar"]), ("idx", record["index"]))
        if entry is not None
    )


def _taken(number: int) -> ConfigError:
    return ConfigError(
        f"upload_to must hold nothing, or versions of the dataset in output, got another version {number}; "
        "name another address."
    )
