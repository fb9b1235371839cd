"""Entity views: tables to train on, built from the alignments of a dataset shard by shard in processes.

The rows of a shard are a file of their own until all shards are done, so a killed job resumes. The table and
then its manifest are written last; no byte depends on which process wrote which part. `entity_rows` reads one
study, and `shardflow.format.entities` opens the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from shardflow.errors import ConfigError, FormatError, ShardflowError
from shardflow.format import Dataset
from shardflow.format.codecs import CODECS
from shardflow.format.entities import (
    MANIFEST_NAME,
    TABLE_NAME,
    EntityManifest,
    EntityRules,
    load_entity_manifest,
    view_folder,
)
from shardflow.format.index import FieldLocation
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD, Json, parse_slice_field, sha256_hex
from shardflow.format.table import Table
from shardflow.reports.entity_rows import (
    ALIGNMENT_FIELD,
    CONTENT_FIELD,
    LocatedRow,
    encode_part,
    encode_view,
    open_part,
    study_rows,
)
from shardflow.storage import LocalStore, write_atomic

_FIELDS = (ALIGNMENT_FIELD, CONTENT_FIELD, REPORT_FIELD, STUDY_FIELD)
_TASKS_PER_PROCESS = 8
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltView:
    """Result of a job."""

    name: str
    view_id: str
    """Digest of the view; part of the identity of every plan over it."""
    dataset_id: str
    num_studies: int
    num_entities: int
    threshold: float
    is_new: bool
    """Whether this job made it; else it stood there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Job description that each process receives."""

    url: str
    version: int
    folder: Path
    rules: EntityRules

    def of(self, dataset: Dataset, rows: range) -> dict[str, Json]:
        """Return what the part of a shard was made for."""
        rules: dict[str, Json] = {**asdict(self.rules), "threshold": repr(float(self.rules.threshold))}
        return {"dataset_id": dataset.dataset_id, "rules": rules, "rows": [rows.start, rows.stop]}


def build_view(
    dataset: Dataset,
    rules: EntityRules,
    *,
    name: str = "entity",
    num_processes: int = 1,
    on_shard: Progress | None = None,
) -> BuiltView:
    """Make a view of a dataset's entities, beside the dataset.

    Args:
        dataset: A packed dataset in a folder.
        rules: Which entities count.
        name: Of the view; a dataset may have several.
        num_processes: How many read; the table does not depend on it.
        on_shard: Told how many shards are done, and of how many.

    Raises:
        ConfigError: The dataset lies in no folder, holds no alignments, or has a view of this name with other
            rules.
        ShardflowError: A study cannot be read or trusted.
    """
    if not isinstance(dataset.store, LocalStore) or dataset.is_foreign:
        raise ConfigError(
            "DATASET must be a folder with packed studies, got a remote store or shards that others wrote; "
            "make the view where the shards were packed."
        )
    folder = dataset.store.root / view_folder(name, dataset.dataset_id)
    if (folder / MANIFEST_NAME).is_file():
        return _standing(dataset, rules, name)
    job = _Job(url=str(dataset.store.root), version=dataset.manifest_version, folder=folder, rules=rules)
    shards = list(_shard_rows(dataset))
    for done in _run(dataset, job, len(shards), num_processes):
        if on_shard is not None:
            on_shard(done, len(shards))
    parts = [_part(dataset, job, number, rows) for number, rows in enumerate(shards)]
    if not sum(int(part.meta["num_aligned"]) for part in parts):
        _clear(folder, len(shards))
        raise ConfigError(
            f"DATASET must hold studies with {ALIGNMENT_FIELD}, got none in {dataset.studies.num_samples:,}; "
            "pack them with their reports by this version."
        )
    table = encode_view(parts, dataset_id=dataset.dataset_id, rules=rules, splits=dataset.studies.splits)
    num_entities = sum(part.num_rows("study") for part in parts)
    manifest = EntityManifest(
        dataset_id=dataset.dataset_id,
        rules=rules,
        num_studies=dataset.studies.num_samples,
        num_entities=num_entities,
        num_bytes=len(table),
        sha256=sha256_hex(table),
    )
    write_atomic(folder / TABLE_NAME, [table], replace=True)
    write_atomic(folder / MANIFEST_NAME, [manifest.encode()], replace=True)
    _clear(folder, len(shards))
    return _summary(manifest, name, is_new=True)


def _standing(dataset: Dataset, rules: EntityRules, name: str) -> BuiltView:
    """Return the view that is there."""
    manifest = load_entity_manifest(dataset.store, dataset.manifest, name)
    if manifest.rules != rules:
        raise ConfigError(
            f"a view must keep the rules it was made with, got others for {name!r} (threshold "
            f"{manifest.rules.threshold}, context_slices {manifest.rules.context_slices}, text "
            f"{manifest.rules.text}); give these another name."
        )
    return _summary(manifest, name, is_new=False)


def _summary(manifest: EntityManifest, name: str, *, is_new: bool) -> BuiltView:
    return BuiltView(
        name=name,
        view_id=manifest.digest,
        dataset_id=manifest.dataset_id,
        num_studies=manifest.num_studies,
        num_entities=manifest.num_entities,
        threshold=manifest.rules.threshold,
        is_new=is_new,
    )


def _run(dataset: Dataset, job: _Job, num_shards: int, num_processes: int) -> Iterator[int]:
    """Make all parts; yields how many are done."""
    num_tasks = min(num_shards, num_processes * _TASKS_PER_PROCESS)
    bounds = np.linspace(0, num_shards, num_tasks + 1).astype(int).tolist()
    tasks = [range(start, stop) for start, stop in pairwise(bounds)]
    if num_processes == 1:
        for task in tasks:
            _make_parts(job, task, dataset)
            yield task.stop
        return
    # Started anew: a process that was forked while other threads ran may wait for ever.
    with ProcessPoolExecutor(min(num_processes, num_tasks or 1), mp_context=get_context("spawn")) as pool:
        running = [pool.submit(_make_parts, job, task) for task in tasks]
        try:
            for task, made in zip(tasks, running, strict=True):
                made.result()
                yield task.stop
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make_parts(job: _Job, numbers: range, dataset: Dataset | None = None) -> None:
    """Write the parts of some shards that are not there yet."""
    dataset = dataset or Dataset.open(job.url, version=job.version)
    for number, rows in enumerate(_shard_rows(dataset)):
        if number in numbers:
            try:
                _part(dataset, job, number, rows)
            except (OSError, ShardflowError):
                write_atomic(_part_path(job.folder, number), [_encode(dataset, job, rows)], replace=True)


def _part(dataset: Dataset, job: _Job, number: int, rows: range) -> Table:
    """Open the part of a shard.

    Raises:
        OSError: There is none.
        ShardflowError: It is another one, or damaged.
    """
    path = _part_path(job.folder, number)
    table = open_part(path.read_bytes(), name=path.name, job=job.of(dataset, rows))
    if table is None:
        raise FormatError(f"{path.name} must be a part of this job, got another's; start again.")
    return table


def _clear(folder: Path, num_shards: int) -> None:
    """Remove the parts, and the folders of the view that are empty then."""
    for number in range(num_shards):
        _part_path(folder, number).unlink(missing_ok=True)
    for empty in (folder, folder.parent, folder.parent.parent):
        if not empty.is_dir() or any(empty.iterdir()):
            return
        empty.rmdir()


def _part_path(folder: Path, number: int) -> Path:
    return folder / f".part-{number:06d}.tbl"


def _encode(dataset: Dataset, job: _Job, rows: range) -> bytes:
    """Read the studies of a shard and encode their entities."""
    found: list[LocatedRow] = []
    num_aligned = 0
    for study in rows:
        _, locations = dataset.sample_fields(study)
        names = [location.name for location in locations if location.name in _FIELDS]
        if ALIGNMENT_FIELD not in names:
            continue
        num_aligned += 1
        key = dataset.studies.sample_key(study)
        sizes = _sizes(locations)
        try:
            for row in study_rows(dataset.read_fields(study, names), job.rules):
                wanted = [(row.series, index) for index in row.slices]
                found.append(
                    LocatedRow(
                        row=row,
                        study=study,
                        study_key=key,
                        shard=int(dataset.studies.gather("shard", study)),
                        row_in_shard=int(dataset.studies.gather("row_in_shard", study)),
                        num_bytes=sum(sizes[place] for place in wanted) + sizes[-1, 0],
                    )
                )
        except KeyError:
            raise FormatError(
                f"{ALIGNMENT_FIELD} must name slices that are stored, got others (sample {key}); pack the "
                "study again."
            ) from None
        except FormatError as error:
            raise FormatError(f"{error.message} (sample {key})") from None
    return encode_part(found, num_aligned=num_aligned, job=job.of(dataset, rows))


def _sizes(locations: list[FieldLocation]) -> dict[tuple[int, int], int]:
    """Return the bytes of each slice by series and index; under (-1, 0) those that every row reads."""
    sizes = {(-1, 0): 0}
    ranks: dict[tuple[int, int], int] = {}
    codecs = list(CODECS)
    for location in locations:
        if location.name in (REPORT_FIELD, STUDY_FIELD):
            sizes[-1, 0] += location.num_bytes
            continue
        parsed = parse_slice_field(location.name)
        if parsed is None or parsed.codec not in codecs:
            continue
        place, rank = (parsed.series, parsed.index), codecs.index(parsed.codec)
        if rank <= ranks.get(place, rank):  # of several codecs the one that a loader takes
            ranks[place], sizes[place] = rank, location.num_bytes
    return sizes


def _shard_rows(dataset: Dataset) -> Iterator[range]:
    """Yield the rows of each shard: the samples table is ordered by split and shard."""
    shard = dataset.studies.column("shard")
    starts = np.append(0, np.flatnonzero(np.diff(shard)) + 1).tolist() if len(shard) else []
    for start, stop in zip(starts, [*starts[1:], len(shard)], strict=False):
        yield range(start, stop)
