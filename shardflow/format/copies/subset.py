"""Copy of a part of a dataset: chosen samples in shards of their own, with their facts and attached tables.

Every field is checked while it is copied. The result is another dataset, version 1 of its own, with the same
sample keys and splits; the manifest comes last. The same samples give the same bytes, and a copy that was
killed is started again. Volumes may change their storage on the way (`shardflow.format.copies.conversion`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, NoListingError, naming_os_errors
from shardflow.format.codecs import SLICE_CODEC
from shardflow.format.copies.conversion import SampleMembers, VolumeStorage
from shardflow.format.copies.copying import find_sidecars
from shardflow.format.dataset import Dataset
from shardflow.format.entities import EntityManifest
from shardflow.format.facts.columns import carry_tables
from shardflow.format.facts.series import FactsManifest, SeriesManifest, merge_series, open_series
from shardflow.format.facts.studies import StudiesManifest, merge_study_facts, open_studies
from shardflow.format.facts.voxels import attach_voxels, copy_voxels
from shardflow.format.manifest import SAMPLES_BLOCKS, Manifest, ShardEntry, commit, versions
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.shard_files import SplitFiles, write_samples
from shardflow.format.token_manifest import TokensManifest
from shardflow.storage import LocalStore, write_atomic

_SHARD_BYTES: Final = 512 << 20
_SHARD_SAMPLES: Final = 10_000
_MARK: Final = "copying.json"
_SAMPLES_PATH: Final = "samples/samples-000001.tbl"
_OF_WHOLE: Final = frozenset(
    {
        *("foreign", "line_outcomes", "next_shards", "num_slices", "page", "reasons", "removed", "studies"),
        SAMPLES_BLOCKS,
    }
)
"""Entries of a manifest's ``extra`` that hold of all samples and inputs together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubsetReport:
    """Result of a copy of a part."""

    dataset_id: str
    """Of the new dataset."""
    num_samples: int
    num_shards: int
    num_bytes: int
    """Bytes of the shards."""
    splits: dict[str, int]
    """Samples by split."""
    tables: tuple[str, ...]
    """Names of the attached tables that came along, with the values of the samples."""
    has_facts: bool
    """Whether the tables of facts came along."""
    num_volumes: int
    """Series whose storage changed."""
    left_behind: tuple[str, ...]
    """What of ``tokens`` and ``views`` the source has: they are of its rows alone."""


def copy_subset(
    source: Dataset,
    rows: NDArray[np.int64],
    target: Path,
    *,
    shard_bytes: int = _SHARD_BYTES,
    volumes: VolumeStorage | None = None,
    codec: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SubsetReport:
    """Write a dataset of some samples of another one.

    Args:
        source: A dataset in any store; its rows are studies or texts.
        rows: ``(n,)`` int64, ascending rows of its samples table.
        target: Folder of the new dataset: new, empty, or of the same copy that was killed.
        shard_bytes: A shard is closed before it passes this size; it counts as in the source. Shards stay
            as they are where all samples are copied and volumes change.
        volumes: How series that are volumes are stored, see `SampleMembers`; as they are by default.
        codec: Of those that change their storage, ``b2nd`` or ``fast``; that of the source by default.
        progress: Called with the samples done, and all of them.

    Raises:
        ConfigError: The shards are others', no sample is chosen, or the folder holds something else.
        FormatError: A field of the source is damaged, or slices of a volume are missing.
        StorageError: Reading or writing failed; the same call starts again.
    """
    if source.is_foreign:
        raise ConfigError(
            "A part of a dataset is copied from shards that shardflow wrote, these are others'; copy all of "
            "it without --where and --volumes, and select when you load: sf.Loader(..., where=...)."
        )
    if not len(rows):
        raise ConfigError("A copy needs at least one sample, none is chosen; loosen --where.")
    _begin(target, source, rows, volumes, codec)
    members = SampleMembers(source, volumes, target, codec)
    shards = _copy_shards(members, rows, target, shard_bytes, progress)
    samples = source.studies
    modality = samples.gather("modality", rows)
    used, codes = np.unique(modality, return_inverse=True)
    written = write_samples(
        target,
        _SAMPLES_PATH,
        shards,
        key_num_bytes=max(1, int(np.strings.str_len(samples.gather("sample_key", rows)).max())),
        modalities=[samples.modalities[code] for code in used.tolist()],
        given={
            "rows": samples.gather("rows", rows),
            "columns": samples.gather("columns", rows),
            "modality": codes.astype("u1"),
        },
    )
    former = source.manifest
    manifest = Manifest(
        manifest_version=1,
        shards=tuple(shards),
        samples=written.table,
        counts=OutcomeCounts(packed=len(rows), skipped=0, quarantined=0),
        created_with=former.created_with,
        config_digest=former.config_digest,
        key_id=former.key_id,
        extra={
            **{name: value for name, value in former.extra.items() if name not in _OF_WHOLE},
            "copied_from": former.dataset_id,
            "num_slices": int(samples.gather("num_slices", rows).sum(dtype=np.int64)),
            **_deidentification(former),
            **({} if volumes is None else {SLICE_CODEC: members.slice_codec}),
            **written.extra,
        },
    )
    store = LocalStore(target)
    new = Dataset(store, manifest)
    has_facts = _copy_facts(source, rows, new, members.changed)
    if not copy_voxels(source, rows, new, target) and has_facts and volumes is not None:
        attach_voxels(new)
    carry_tables(store, source, new)
    if not versions(store):  # else it was killed after this
        commit(store, manifest)
    with naming_os_errors("ending a copy"):
        (target / _MARK).unlink()
    return SubsetReport(
        dataset_id=manifest.dataset_id,
        num_samples=len(rows),
        num_shards=len(shards),
        num_bytes=sum(shard.num_bytes for shard in shards),
        splits={name: numbers["num_samples"] for name, numbers in manifest.splits.items()},
        tables=tuple(source.tables),
        has_facts=has_facts,
        num_volumes=len(members.changed),
        left_behind=_left_behind(source),
    )


def _deidentification(former: Manifest) -> dict[str, Any]:
    """Return how the samples were de-identified, without the counts over all of them."""
    done: Any = former.extra.get("deidentification")
    return {"deidentification": {**done, "counts": {}}} if isinstance(done, dict) else {}


def _left_behind(source: Dataset) -> tuple[str, ...]:
    try:
        found = find_sidecars(source.store, [source.manifest])
    except NoListingError:
        return ()
    kinds = {one.kind for one in found if one.version is not None}
    return tuple(kind.root for kind in (TokensManifest, EntityManifest) if kind in kinds)


def _begin(
    target: Path,
    source: Dataset,
    rows: NDArray[np.int64],
    volumes: VolumeStorage | None,
    codec: str | None,
) -> None:
    """Mark a folder as that of this copy.

    Raises:
        ConfigError: It holds something else.
    """
    digest = hashlib.sha256(np.ascontiguousarray(rows, "<i8").tobytes()).hexdigest()
    said = {"dataset_id": source.manifest.dataset_id, "rows": digest, "volumes": volumes, "codec": codec}
    mark = json.dumps(said).encode() + b"\n"
    with naming_os_errors("beginning a copy"):
        target.mkdir(parents=True, exist_ok=True)
        path = target / _MARK
        is_begun = path.is_file() and path.read_bytes() == mark
        if not is_begun and any(target.iterdir()):
            raise ConfigError("DST must be a new or empty folder, it holds something; name another one.")
        for torn in (target / "shards").glob(".*.tmp"):
            torn.unlink()
    write_atomic(path, [mark], replace=True)


def _copy_shards(
    members: SampleMembers,
    rows: NDArray[np.int64],
    target: Path,
    shard_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> list[ShardEntry]:
    """Write the samples into shards; return them in the order of a manifest."""
    source = members.source
    shards: list[ShardEntry] = []
    done = 0
    # Volumes there and back give the same shards.
    keeps_shards = members.volumes is not None and len(rows) == source.studies.num_samples
    limits = (sys.maxsize, None) if keeps_shards else (shard_bytes, _SHARD_SAMPLES)
    for split, span in sorted(source.splits.items()):
        chosen = rows[(rows >= span.start) & (rows < span.stop)]
        files = SplitFiles(target, split, *limits)
        former = source.studies.gather("shard", chosen)
        begins = np.append(True, former[1:] != former[:-1])[: len(chosen)]
        sizes = source.studies.gather("num_bytes", chosen)
        try:
            for row, is_first, num_bytes in zip(
                chosen.tolist(), begins.tolist(), sizes.tolist(), strict=True
            ):
                if keeps_shards and is_first:
                    files.cut()
                files.stream(source.studies.sample_key(row), members.of(row, done), num_bytes)
                done += 1
                if progress is not None:
                    progress(done, len(rows))
            shards += files.close()
        except BaseException:
            files.abandon()
            raise
    return shards


def _copy_facts(
    source: Dataset, rows: NDArray[np.int64], new: Dataset, changed: Mapping[tuple[int, int], str]
) -> bool:
    """Write the facts of the samples; return whether the source has any.

    Args:
        source: The former dataset.
        rows: Of the samples there.
        new: The new dataset.
        changed: Codec of series that are stored in another way, by sample and number of the series.
    """
    try:
        series, studies = open_series(source)[0], open_studies(source)[0]
    except ConfigError:  # a dataset of texts, or one of a former version
        return False
    codecs: list[str] | None = None
    if changed:
        first, known, codes = series.first_series(), series.vocabulary("codec"), series.array("codec")
        starts, stops = first[rows], first[rows + 1]
        codecs = [known[code] for at, to in zip(starts, stops, strict=True) for code in codes[at:to].tolist()]
        begins = np.cumsum(stops - starts) - (stops - starts)
        for (sample, number), codec in changed.items():
            codecs[int(begins[sample]) + number] = codec
    tables: Iterable[tuple[type[FactsManifest[Any]], bytes]] = (
        (StudiesManifest, merge_study_facts([(studies, rows)], new)),
        (SeriesManifest, merge_series([(series, rows)], codecs=codecs)),
    )
    root = LocalStore(new.store.url).root
    for kind, data in tables:
        manifest, folder = kind.of(new.dataset_id, data), root / kind.folder(new.dataset_id)
        (name,) = manifest.tables()
        write_atomic(folder / name, [data], replace=True)
        write_atomic(folder / manifest.file_name, [manifest.encode()], replace=True)
    return True
