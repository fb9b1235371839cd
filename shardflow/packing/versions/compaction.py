"""Compaction: rewrites shards that hold removed samples, and deletes the versions that still name them.

A shard is never changed: its remaining samples become a new shard with the next number of the split. The next
version names the new shards. On request, earlier manifests are deleted after that, and then every file that
only they named.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from shardflow.format.dataset import Dataset, check_field_bytes
from shardflow.format.entities import view_digests
from shardflow.format.index import FieldLocation, ShardIndex
from shardflow.format.keys import shard_name
from shardflow.format.manifest import Manifest, ShardEntry, manifest_path, versions
from shardflow.format.samples import SampleEntry
from shardflow.format.tar import BLOCK_NUM_BYTES, END_OF_ARCHIVE, encode_member
from shardflow.format.writer import write_file
from shardflow.packing.progress import SilentProgress
from shardflow.packing.versions.base import sample_entries
from shardflow.packing.versions.files import open_newest, remove_strangers
from shardflow.storage import LocalStore
from shardflow.storage.local import fsync_directory

if TYPE_CHECKING:
    from pathlib import Path

    from shardflow.packing.progress import Progress
    from shardflow.packing.versions.files import NewestVersion
    from shardflow.packing.workspace import Workspace

_Status: TypeAlias = Literal["compacted", "nothing_new"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactionSummary:
    """Result of a compaction."""

    status: _Status
    """``compacted``, or ``nothing_new``: no shard holds a removed sample, and no version was deleted."""
    dataset_id: str
    manifest_version: int
    num_shards: int
    """Rewritten shards."""
    deleted_versions: tuple[int, ...]
    """Deleted versions."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        return {**asdict(self), "deleted_versions": list(self.deleted_versions)}


def compact(
    output: Path, private: Path, *, deletes_old: bool = False, progress: Progress | None = None
) -> CompactionSummary:
    """Write a version whose shards hold no removed sample.

    A published dataset is updated at its address too, and versions are deleted in both places.

    Args:
        output: The dataset.
        private: Its private folder.
        deletes_old: Delete all earlier versions, so that nothing of a removed study is left in the dataset,
            and earlier ledgers of the private folder.
        progress: Receives the progress of the job.

    Raises:
        ChecksumError: A shard is damaged; nothing is published.
        ConfigError: The folders are no dataset and its private folder, or another job works there.
        StorageError: Something cannot be written; the same call resumes.
    """
    shown = progress or SilentProgress()
    with open_newest(output, private) as newest:
        store, manifest, uploader = LocalStore(newest.workspace.output), newest.base.manifest, newest.uploader
        holed = [shard for shard in manifest.shards if shard.num_removed]
        if holed:
            manifest = _write(newest, shown)
        if uploader is not None:
            uploader.finish()
        deleted = tuple(number for number in versions(store) if number != manifest.manifest_version)
        if deletes_old:
            _delete_old(newest.workspace, manifest, deleted)
            if uploader is not None:
                uploader.erase_unnamed()
    shown.phase("done", 0)
    return CompactionSummary(
        status="compacted" if holed or (deletes_old and deleted) else "nothing_new",
        dataset_id=manifest.dataset_id,
        manifest_version=manifest.manifest_version,
        num_shards=len(holed),
        deleted_versions=deleted if deletes_old else (),
    )


def _write(newest: NewestVersion, progress: Progress) -> Manifest:
    base, uploader = newest.base, newest.uploader
    dataset = Dataset(LocalStore(newest.workspace.output), base.manifest)
    entries: dict[int, list[SampleEntry]] = {}
    numbers = {number: number for number in range(len(base.manifest.shards))}
    for entry in sample_entries(base.samples, numbers):
        entries.setdefault(entry.shard, []).append(entry)
    next_shards = base.next_shards
    progress.phase("shards", sum(bool(shard.num_removed) for shard in base.manifest.shards))
    shards: list[ShardEntry] = []
    samples: list[SampleEntry] = []
    for number, shard in enumerate(base.manifest.shards):
        kept = entries[number]
        if not shard.num_removed:
            shards.append(shard)
            samples += kept
            continue
        name = shard_name(shard.split, next_shards[shard.split])
        next_shards[shard.split] += 1
        if uploader is not None:
            uploader.fetch(shard)
        written, moved = _rewrite(dataset, number, kept, name)
        if uploader is not None:
            uploader.send(written)
            uploader.release(shard)
        shards.append(written)
        samples += moved
        progress.advance()
    return newest.replace(shards, samples, base.known.reason, progress, next_shards=next_shards)


def _rewrite(
    dataset: Dataset, number: int, kept: Sequence[SampleEntry], name: str
) -> tuple[ShardEntry, list[SampleEntry]]:
    """Write the remaining samples of a shard, verifying every field."""
    old, index = dataset.manifest.shards[number], dataset.shard_index(number)
    source = dataset.store.map(old.path)
    located: list[tuple[str, list[FieldLocation]]] = []
    samples: list[SampleEntry] = []
    offset = 0

    def pieces() -> Iterator[bytes]:
        nonlocal offset
        for row, entry in enumerate(kept):
            start, fields = offset, []
            for field in index.fields(entry.row_in_shard):
                payload = source[field.offset : field.offset + field.num_bytes]
                check_field_bytes(field, payload, path=old.path, sample_key=entry.sample_key)
                fields.append(replace(field, offset=offset + BLOCK_NUM_BYTES))
                member = encode_member(f"{entry.sample_key}.{field.name}", payload)
                offset += len(member)
                yield member
            located.append((entry.sample_key, fields))
            samples.append(replace(entry, row_in_shard=row, offset_bytes=start, num_bytes=offset - start))
        offset += len(END_OF_ARCHIVE)
        yield END_OF_ARCHIVE

    root = LocalStore(dataset.store.url).root
    tar = write_file(root, f"shards/{name}.tar", pieces())
    shard = ShardEntry(
        name=name,
        split=old.split,
        path=tar.path,
        num_bytes=tar.num_bytes,
        sha256=tar.sha256,
        index=write_file(root, f"shards/{name}.idx", [ShardIndex.encode(name, tar.num_bytes, located)]),
        num_samples=len(samples),
        num_fields=sum(len(fields) for _, fields in located),
    )
    return shard, samples


def _delete_old(workspace: Workspace, manifest: Manifest, numbers: Sequence[int]) -> None:
    """Delete earlier versions, oldest first, so that the remaining ones are always complete."""
    for number in numbers:
        (workspace.output / manifest_path(number)).unlink(missing_ok=True)
    fsync_directory(workspace.output)
    remove_strangers(workspace.output, [manifest])
    for page in workspace.output.glob("report*.html"):
        if manifest.page is None or page.name != manifest.page.path:
            page.unlink()
    # Token counts and entity views belong to single versions.
    kept = {manifest.dataset_id, *view_digests(LocalStore(workspace.output), [manifest])}
    for folder in [*workspace.output.glob("tokens/*/*"), *workspace.output.glob("views/*/*")]:
        if folder.is_dir() and folder.name not in kept:
            shutil.rmtree(folder)
    current = workspace.private_ledger(str(manifest.extra["plan_digest"]))
    for ledger in workspace.private.glob("inputs-*.jsonl"):
        if ledger != current:
            ledger.unlink()
