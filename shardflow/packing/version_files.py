"""Write the files of one version of a dataset, its manifest last; and clear away what no version names.

Version 1 keeps plain names; later ones carry their number. Before the manifest there is no version: whoever
opens the folder finds the one before, however much of the next one stands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardflow.packing.base import Base
from shardflow.packing.dataset_page import add_page, page_path
from shardflow.packing.inventory import count_outcomes, count_reasons
from shardflow.packing.ledger_file import columns_of_known, write_ledger
from shardflow.packing.upload import uploader_of
from shardflow.packing.workplace import locked_workplace
from shardflow.shards.manifest import FileEntry, Manifest, ShardEntry, commit, load, versions
from shardflow.shards.outcomes import OutcomeCounts
from shardflow.shards.samples import SampleEntry, SamplesTable
from shardflow.storage import LocalStore
from shardflow.storage.atomic import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from shardflow.packing.config import PageConfig
    from shardflow.packing.ledger_file import LedgerColumns
    from shardflow.packing.progress import Progress
    from shardflow.packing.upload import Uploader
    from shardflow.packing.workplace import Workplace

__all__ = [
    "NewVersion",
    "NewestVersion",
    "ledger_path",
    "merge_samples",
    "open_newest",
    "remove_strangers",
    "samples_path",
    "shard_order",
    "write_version",
]

_FOLDERS: Final = ("shards", "samples")
_LEDGERS: Final = "ledger*.jsonl"


def samples_path(version: int) -> str:
    """Path of a version's samples table in the dataset."""
    return f"samples/samples-{version:06d}.tbl"


def ledger_path(version: int) -> str:
    """Path of a version's ledger in the dataset."""
    return "ledger.jsonl" if version == 1 else f"ledger-{version:06d}.jsonl"


def shard_order(shard: ShardEntry) -> tuple[str, int, str]:
    """Order of a manifest's shards: by split and number."""
    return shard.split, len(shard.name), shard.name


@dataclass(frozen=True, kw_only=True, slots=True)
class NewVersion:
    """A version to write; its shards stand."""

    version: int
    parent: str | None
    shards: tuple[ShardEntry, ...]
    samples: Sequence[SampleEntry]
    ledger: LedgerColumns
    created_with: Mapping[str, str]
    config_digest: str | None
    key_id: str | None
    extra: Mapping[str, Any]
    """Facts beside those that are counted here: ``num_slices``, ``reasons`` and ``studies``."""
    page: PageConfig
    num_threads: int = 2
    """Threads that read for the page."""
    studies: Mapping[str, int] | None = None
    """Studies by outcome; counted from the ledger if not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestVersion:
    """The newest version of a dataset, open for a change that takes in no input: removal or compaction."""

    place: Workplace
    base: Base
    uploader: Uploader | None

    def replace(
        self,
        shards: Sequence[ShardEntry],
        samples: Iterable[SampleEntry],
        reason: NDArray[np.uint8],
        progress: Progress,
        **extra: Any,
    ) -> Manifest:
        """Write the next version, which takes everything else over.

        Args:
            shards: Those of the next version; ones without a sample are left out.
            samples: Those of the next version, naming their shard by position in ``shards``.
            reason: ``(num_known,)`` of every input.
            progress: Hears of the phases.
            **extra: Facts of the manifest that change.
        """
        base, manifest = self.base, self.base.manifest
        ordered, placed = merge_samples([(shards, samples)])
        new = NewVersion(
            version=base.next_version,
            parent=manifest.dataset_id,
            shards=ordered,
            samples=placed,
            ledger=columns_of_known(base.known, reason),
            created_with=manifest.created_with,
            config_digest=manifest.config_digest,
            key_id=manifest.key_id,
            page=base.page,
            extra={**base.extra, "next_shards": base.next_shards, **extra},
        )
        return write_version(self.place.output, new, progress, self.uploader)


@contextmanager
def open_newest(output: Path, private: Path) -> Iterator[NewestVersion]:
    """Open the newest version for a change, at the address too that it was sent to; clean up behind it.

    Raises:
        ConfigError: The folders are no dataset and its private folder, or another job works there.
        StorageError: Something cannot be read or written.
    """
    with locked_workplace(output, private) as place:
        base = Base.open(place, load(LocalStore(place.output)))
        with uploader_of(place) as uploader:
            yield NewestVersion(place=place, base=base, uploader=uploader)
        place.remove_work()


def write_version(
    output: Path, new: NewVersion, progress: Progress, uploader: Uploader | None = None
) -> Manifest:
    """Write samples table, ledger, page and manifest.

    Args:
        output: Folder of the dataset.
        new: The version.
        progress: Hears of the phases.
        uploader: Knows where shards lie that are not in the folder.

    Raises:
        AlreadyExistsError: This version exists.
        StorageError: A file cannot be written.
    """
    progress.phase("samples", 0)
    table = SamplesTable.encode(new.samples, shard_splits=[shard.split for shard in new.shards])
    path = samples_path(new.version)
    write_atomic(output / path, [table], replace=True)
    progress.phase("ledger", 0)
    ledger = write_ledger(output, ledger_path(new.version), new.ledger)
    manifest = Manifest(
        manifest_version=new.version,
        parent=new.parent,
        shards=new.shards,
        samples=FileEntry(path=path, num_bytes=len(table), sha256=hashlib.sha256(table).hexdigest()),
        ledger=ledger,
        counts=OutcomeCounts(**count_outcomes(new.ledger.reason)),
        created_with=new.created_with,
        config_digest=new.config_digest,
        key_id=new.key_id,
        extra={
            **new.extra,
            "num_slices": sum(entry.facts.num_slices for entry in new.samples),
            "reasons": count_reasons(new.ledger.reason),
            "studies": dict(new.studies) if new.studies is not None else _count_studies(new),
        },
    )
    store = LocalStore(output)
    manifest = add_page(
        output,
        new.page,
        manifest,
        progress,
        num_threads=new.num_threads,
        store=None if uploader is None else uploader.store(manifest),
    )
    remove_strangers(output, [*(load(store, number) for number in versions(store)), manifest])
    progress.phase("manifest", 0)
    commit(store, manifest)
    return manifest


def merge_samples(
    parts: Iterable[tuple[Sequence[ShardEntry], Iterable[SampleEntry]]],
) -> tuple[tuple[ShardEntry, ...], list[SampleEntry]]:
    """Put shards and samples of several lists together, in the order of a manifest.

    Args:
        parts: Shards, and samples that name them by position in the same list; shards without a sample of
            the list are left out.
    """
    samples: list[tuple[str, SampleEntry]] = []
    by_name: dict[str, ShardEntry] = {}
    for shards, entries in parts:
        for entry in entries:
            shard = shards[entry.shard]
            by_name[shard.name] = shard
            samples.append((shard.name, entry))
    ordered = sorted(by_name.values(), key=shard_order)
    numbers = {shard.name: number for number, shard in enumerate(ordered)}
    return tuple(ordered), [_moved(entry, numbers[name]) for name, entry in samples]


def remove_strangers(output: Path, manifests: Iterable[Manifest]) -> None:
    """Remove what unpublished plans and killed writers left: no manifest ever named it.

    Args:
        output: Folder of the dataset.
        manifests: All versions; the last one is the newest.
    """
    manifests = list(manifests)
    named = {entry.path for manifest in manifests for entry in manifest.files()}
    paths = [path for folder in _FOLDERS for path in (output / folder).glob("*")]
    page = output / page_path(manifests[-1].manifest_version)
    for path in [*paths, *output.glob(_LEDGERS), *([page] if page.exists() else [])]:
        if path.relative_to(output).as_posix() not in named:
            path.unlink()


def _moved(entry: SampleEntry, shard: int) -> SampleEntry:
    return SampleEntry(
        sample_key=entry.sample_key,
        shard=shard,
        row_in_shard=entry.row_in_shard,
        offset_bytes=entry.offset_bytes,
        num_bytes=entry.num_bytes,
        facts=entry.facts,
    )


def _count_studies(new: NewVersion) -> dict[str, int]:
    """Count studies by their worst input: packed ones are the samples."""
    packed = {entry.sample_key for entry in new.samples}
    outcomes: dict[str, str] = {}
    for row in new.ledger.rows():
        key = row.sample_key
        if key is not None and key not in packed and outcomes.get(key) != "quarantined":
            outcomes[key] = row.outcome if row.outcome == "quarantined" else "skipped"
    found = list(outcomes.values())
    return {
        "packed": len(packed),
        "skipped": found.count("skipped"),
        "quarantined": found.count("quarantined"),
    }
