"""Verification of a dataset: checks every byte of every file and locates the first damage of each.

The manifest protects itself and the size and SHA-256 of each file; the checksums inside a file locate its
damage. Nothing stops the check: not a damaged manifest, a missing shard or an unreadable index. If a
manifest is damaged, files that only it named are found by their names and judged by their contents, so that
a flipped bit in a manifest cannot hide another one in a shard.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, ManifestError, NoListingError, StorageError
from shardflow.format.copies.copying import Sidecar, find_sidecars
from shardflow.format.counts import ConversationCounts, CountsManifest
from shardflow.format.entities import EntityManifest, EntityTable
from shardflow.format.facts.series import SeriesManifest, SeriesTable
from shardflow.format.facts.studies import StudiesManifest, StudyTable, previous_rows
from shardflow.format.facts.voxels import VoxelsManifest, VoxelTable
from shardflow.format.field_digests import FieldDigestsManifest, digests_of
from shardflow.format.file_blocks import BlockDigests
from shardflow.format.foreign.places import located
from shardflow.format.index import ShardIndex
from shardflow.format.ledger import LineOutcomes, verify_ledger
from shardflow.format.manifest import (
    FileEntry,
    Manifest,
    ShardEntry,
    latest_version,
    load,
    manifest_path,
    versions,
)
from shardflow.format.samples import SamplesTable
from shardflow.format.shard_checks import (
    WHOLE_FILE,
    Damage,
    DamageError,
    ExpectedFile,
    RowDamage,
    SamplesChecker,
    check_tar,
    checking,
    open_table,
)
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.table import Table
from shardflow.format.tables import TableManifest, open_columns_table
from shardflow.format.tokens import TokensManifest, counts_column, ids_table
from shardflow.storage import ByteStore, open_store
from shardflow.storage.node_files import object_pieces

# Names outside this are not repeated: what lies in the folder by mistake may be named after a patient.
_PLAIN_PATH: Final = re.compile(r"[a-z0-9._/-]+", re.ASCII)
_MAX_NAMED_EXTRAS: Final = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was checked, and what is wrong."""

    dataset_id: str | None
    """Of the newest manifest; None if that is damaged."""
    manifest_version: int
    damages: tuple[Damage, ...]
    """The first damage of each file: manifests, then shards with their indexes, samples tables, ledgers,
    pages, and entity views, stored tokens, tables of facts and attached tables with their manifests."""
    notes: tuple[str, ...]
    """What is no damage, but worth knowing, such as files that no manifest names."""
    reads_shards: bool
    """Whether the bytes of shards were read; else only their sizes were compared."""
    num_files: int
    num_bytes: int
    num_shards: int
    num_samples: int
    num_fields: int
    num_views: int
    """Entity views of the dataset's versions that were checked."""
    num_tokenizations: int
    """Sets of stored tokens of the versions, or of their views, that were checked."""
    num_series_tables: int
    """Series tables of the versions that were checked."""
    num_study_tables: int
    """Tables of facts of studies of the versions that were checked."""
    num_tables: int
    """Attached tables of the versions that were checked."""

    @property
    def is_whole(self) -> bool:
        """Whether every byte that was read is as it was written."""
        return not self.damages

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)


def verify(
    url: str | os.PathLike[str],
    *,
    num_threads: int = 2,
    reads_shards: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check every byte of a dataset, in all of its versions, and of the views, tokens and facts beside it.

    Args:
        url: The dataset.
        num_threads: Shards that are checked at once; each holds 4 MiB and an index.
        reads_shards: Read the shards; else compare their sizes, and read all other files.
        progress: Called with the numbers of shards checked and of all shards.

    Returns:
        The report; damage is reported, never raised.

    Raises:
        ManifestError: There is no manifest at all, so this is no dataset.
        StorageError: The store cannot be opened.
    """
    store = open_store(url)
    newest, all_versions = latest_version(store), versions(store)
    damages: list[Damage] = []
    manifests = _load_manifests(store, all_versions, damages)
    store = located(store, manifests.values())
    beside_damages: list[Damage] = []
    notes: list[str] = []
    sidecars = _find_beside(store, manifests.values(), beside_damages, notes)
    plan = _plan_files(store, manifests, all_versions, sidecars)
    damages += plan.damages

    checkers: dict[str, list[SamplesChecker]] = {}
    table_damages: dict[str, list[Damage]] = {}
    for table in plan.samples:
        with _Collecting(table_damages.setdefault(table.path, [])):
            checkers[table.path] = _check_samples_table(store, table, manifests)
    results: list[_ShardResult] = []
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        check_bytes = check_tar if reads_shards else _check_size
        for result in pool.map(lambda shard: _check_shard(store, shard, checkers, check_bytes), plan.shards):
            results.append(result)
            damages += result.damages
            if progress:
                progress(len(results), len(plan.shards))
    for path, found in table_damages.items():
        rows = [row for result in results for table_path, row in result.rows if table_path == path]
        damages += found or ([min(rows).describe(path)] if rows else [])
    for check, files in (
        (_check_blocks, plan.blocks),
        (_check_ledger, plan.ledgers),
        (_check_lines, plan.lines),
        (_check_page, plan.pages),
    ):
        for file in files:
            with _Collecting(damages):
                check(store, file, manifests.values())
    tables = {
        checker.manifest.dataset_id: checker.samples for group in checkers.values() for checker in group
    }
    _check_beside(store, sidecars, tables, beside_damages)
    damages += beside_damages

    paths = [*plan.paths(), *_sidecar_paths(sidecars)]
    manifest = manifests.get(newest)
    return VerifyReport(
        dataset_id=manifest.dataset_id if manifest else None,
        manifest_version=newest,
        damages=tuple(damages),
        notes=(*plan.notes, *notes),
        reads_shards=reads_shards,
        num_files=len(paths),
        num_bytes=sum(_size_or_zero(store, path) for path in paths),
        num_shards=len(plan.shards),
        num_samples=sum(result.num_samples for result in results),
        num_fields=sum(result.num_fields for result in results),
        num_views=sum(isinstance(sidecar.manifest, EntityManifest) for sidecar in sidecars),
        num_tokenizations=sum(isinstance(sidecar.manifest, TokensManifest) for sidecar in sidecars),
        num_series_tables=sum(isinstance(sidecar.manifest, SeriesManifest) for sidecar in sidecars),
        num_study_tables=sum(isinstance(sidecar.manifest, StudiesManifest) for sidecar in sidecars),
        num_tables=sum(isinstance(sidecar.manifest, TableManifest) for sidecar in sidecars),
    )


class _Collecting:
    """Context that appends the damage which a check finds to a list, and continues."""

    def __init__(self, damages: list[Damage]) -> None:
        self._damages = damages

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, DamageError):
            self._damages.append(error.damage)
        return isinstance(error, DamageError)


def _size_or_zero(store: ByteStore, path: str) -> int:
    try:
        return store.size(path)
    except StorageError:
        return 0


def _load_manifests(
    store: ByteStore, all_versions: Sequence[int], damages: list[Damage]
) -> dict[int, Manifest]:
    """Load every version of the manifest; return the good ones."""
    manifests: dict[int, Manifest] = {}
    for version in all_versions:
        path = manifest_path(version)
        try:
            manifest = manifests[version] = load(store, version)
        except (ManifestError, StorageError) as error:
            damages.append(Damage(path, WHOLE_FILE, error.message.removeprefix(f"{path}: ")))
            continue
        before = manifests.get(version - 1)
        if before is not None and manifest.parent != before.dataset_id:
            damages.append(Damage(path, "parent", "another digest than the version before has"))
    return manifests


@dataclass(frozen=True, slots=True)
class _Shard:
    """A tar with its index, and the manifest's entry where there is one."""

    tar: ExpectedFile
    index: ExpectedFile
    entry: ShardEntry | None = None


@dataclass(slots=True)
class _Plan:
    """The files of a dataset, as they are reported, and the damage that the manifests alone show."""

    manifests: list[str]
    shards: list[_Shard] = field(default_factory=list)
    samples: list[ExpectedFile] = field(default_factory=list)
    blocks: list[ExpectedFile] = field(default_factory=list)
    ledgers: list[ExpectedFile] = field(default_factory=list)
    lines: list[ExpectedFile] = field(default_factory=list)
    pages: list[ExpectedFile] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def paths(self) -> list[str]:
        shards = [file for shard in self.shards for file in (shard.tar, shard.index)]
        files = [*shards, *self.samples, *self.blocks, *self.ledgers, *self.lines, *self.pages]
        return [*self.manifests, *(file.path for file in files)]


def _plan_files(
    store: ByteStore, manifests: Mapping[int, Manifest], all_versions: list[int], sidecars: Sequence[Sidecar]
) -> _Plan:
    """List what to check, from the good manifests and, where one is damaged, from the names of files."""
    plan = _Plan([manifest_path(version) for version in all_versions])
    known: dict[str, FileEntry] = {}
    for version, manifest in sorted(manifests.items()):
        before = {*known}
        for entry in manifest.files():
            if known.setdefault(entry.path, entry) != entry and not plan.damages:
                problem = f"{entry.path} with another digest than in an earlier version"
                plan.damages.append(Damage(manifest_path(version), WHOLE_FILE, problem))
        for shard in manifest.shards:
            if shard.path not in before:
                tar, index = ExpectedFile.of(shard.file), ExpectedFile.of(shard.index)
                plan.shards.append(_Shard(tar, index, shard))
        for files, named in (
            (plan.samples, manifest.samples),
            (plan.blocks, manifest.samples_blocks),
            (plan.ledgers, manifest.ledger),
            (plan.lines, manifest.line_outcomes),
            (plan.pages, manifest.page),
        ):
            if named and named.path not in before:
                files.append(ExpectedFile.of(named))
    try:
        own = {*plan.manifests, *known, *_sidecar_paths(sidecars)}
        unread = {sidecar.path for sidecar in sidecars if sidecar.manifest is None}
        others = [
            path for path in store.list("") if path not in own and path.rpartition("/")[0] not in unread
        ]
    except NoListingError:
        others = []
        plan.notes.append("files that no manifest names were not looked for: the store cannot list")
    if len(manifests) < len(all_versions):
        others = _plan_by_name(plan, others)
    plain = [path for path in others if _PLAIN_PATH.fullmatch(path)][:_MAX_NAMED_EXTRAS]
    plan.notes += [f"{path} is named by no manifest" for path in plain]
    if len(others) > len(plain):
        plan.notes.append(f"{len(others) - len(plain)} more files are named by no manifest")
    return plan


def _sidecar_paths(sidecars: Iterable[Sidecar]) -> list[str]:
    """Return the files of the sidecars whose manifests can be trusted."""
    return [
        f"{sidecar.path}/{name}"
        for sidecar in sidecars
        if sidecar.manifest is not None
        for name in (*sidecar.manifest.tables(), sidecar.kind.file_name)
    ]


def _plan_by_name(plan: _Plan, paths: list[str]) -> list[str]:
    """Add the files whose names say what they are; return the others."""
    shards = {path.rpartition(".")[0] for path in paths if path.endswith((".tar", ".idx"))}
    plan.shards += [
        _Shard(ExpectedFile(f"{name}.tar"), ExpectedFile(f"{name}.idx")) for name in sorted(shards)
    ]
    plan.samples += [ExpectedFile(path) for path in paths if path.endswith(".tbl")]
    plan.ledgers += [ExpectedFile(path) for path in paths if path.endswith(".jsonl")]
    return [path for path in paths if not path.endswith((".tar", ".idx", ".tbl", ".jsonl"))]


@dataclass(slots=True)
class _ShardResult:
    """What was found in a tar, its index, and its rows of the samples tables (by the path of the table)."""

    damages: list[Damage] = field(default_factory=list)
    rows: list[tuple[str, RowDamage]] = field(default_factory=list)
    num_samples: int = 0
    num_fields: int = 0


def _check_shard(
    store: ByteStore,
    shard: _Shard,
    checkers: Mapping[str, Sequence[SamplesChecker]],
    check_bytes: Callable[[ByteStore, ExpectedFile, ShardIndex | None], None],
) -> _ShardResult:
    """Check an index, its tar against it, and the rows of the samples tables against it."""
    result = _ShardResult()
    index: ShardIndex | None = None
    of_index: list[Damage] = []
    with _Collecting(of_index):
        index = _open_index(store, shard)
    with _Collecting(result.damages):
        check_bytes(store, shard.tar, index)
    result.damages += of_index
    if index is not None:
        result.num_samples, result.num_fields = index.num_samples, index.num_fields
        for path, group in checkers.items():
            rows = [checker.check_shard(shard.tar.path, index) for checker in group]
            result.rows += [(path, row) for row in rows if row]
    return result


def _check_size(store: ByteStore, tar: ExpectedFile, index: ShardIndex | None) -> None:
    """Compare the size of a shard with what its manifest, or else its index, says."""
    with checking(tar.path):
        found = store.size(tar.path)
    expected = tar.num_bytes if index is None or tar.num_bytes is not None else index.shard_num_bytes
    if expected not in (None, found):
        raise DamageError(Damage(tar.path, WHOLE_FILE, f"{found} bytes instead of {expected}"))


def _open_index(store: ByteStore, shard: _Shard) -> ShardIndex:
    path, entry = shard.index.path, shard.entry
    table = open_table(store, shard.index)
    with checking(path):
        index = ShardIndex.decode(table)
    found = (index.shard, index.shard_num_bytes, index.num_samples, index.num_fields)
    if entry and found != (entry.name, entry.num_bytes, entry.num_samples, entry.num_fields):
        problem = f"the index of {index.shard}, not the one of {entry.name} in the manifest"
        raise DamageError(Damage(path, "header", problem))
    return index


def _check_samples_table(
    store: ByteStore, expected: ExpectedFile, manifests: Mapping[int, Manifest]
) -> list[SamplesChecker]:
    """Check the table by itself; return what compares it with shards."""
    path = expected.path
    table = open_table(store, expected)
    with checking(path):
        samples = SamplesTable(table)
        group = [
            SamplesChecker(manifest, samples)
            for manifest in manifests.values()
            if manifest.samples.path == path
        ]
    for checker in group:
        found = checker.check_table()
        if found:
            raise DamageError(found.describe(path))
    return group


def _check_blocks(store: ByteStore, expected: ExpectedFile, manifests: Iterable[Manifest]) -> None:
    """Compare the digests of a samples table's blocks with the table."""
    path = expected.path
    with checking(path):
        data = store.read(path)
    expected.compare(data)
    for manifest in manifests:
        entry, blocks = manifest.samples, manifest.samples_blocks
        if blocks and blocks.path == path:
            digests = BlockDigests()
            with checking(entry.path):
                for piece in object_pieces(store, entry.path, entry.num_bytes):
                    digests.add(piece)
            if digests.encode(entry) != data:
                raise DamageError(Damage(path, WHOLE_FILE, f"other digests than those of {entry.path}"))


def _check_ledger(store: ByteStore, expected: ExpectedFile, manifests: Iterable[Manifest]) -> None:
    """Check a ledger's chain, its head and digest in the manifest, and its counts there."""
    path = expected.path
    with checking(path):
        data = store.read(path)
    owners = [manifest for manifest in manifests if manifest.ledger and manifest.ledger.path == path]
    report = verify_ledger(data, head=next((owner.ledger.head for owner in owners if owner.ledger), None))
    if report.problems:
        first = report.problems[0]
        raise DamageError(Damage(path, f"line {first.line}", first.problem, first.offset))
    if any(owner.counts != report.counts for owner in owners):
        raise DamageError(Damage(path, "closing line", "other counts than the manifest's"))
    expected.compare(data)


def _check_lines(store: ByteStore, expected: ExpectedFile, manifests: Iterable[Manifest]) -> None:
    """Check the outcomes of a corpus' lines: every byte, and their counts against the manifest."""
    path = expected.path
    table = open_table(store, expected)
    with checking(path):
        counts = LineOutcomes(table).counts()
    for manifest in manifests:
        entry = manifest.line_outcomes
        if entry and entry.path == path and manifest.counts != counts:
            raise DamageError(Damage(path, "column outcome", "other counts than the manifest's"))


def _check_page(store: ByteStore, expected: ExpectedFile, _: Iterable[Manifest]) -> None:
    """Compare a page for people with its size and digest in the manifest; what it says is nobody's input."""
    with checking(expected.path):
        data = store.read(expected.path)
    expected.compare(data)


def _find_beside(
    store: ByteStore, manifests: Iterable[Manifest], damages: list[Damage], notes: list[str]
) -> list[Sidecar]:
    """Find the sidecars of a dataset, and check their manifests; no table is read.

    A sidecar is damage where it would be read and is wrong. One that no version here would read, or that no
    job finished, is only worth a note.
    """

    @contextmanager
    def guard(path: str) -> Iterator[None]:
        with _Collecting(damages), checking(path):
            yield

    try:
        sidecars = find_sidecars(store, manifests, guard=guard)
    except NoListingError:
        notes.append("what else is beside the shards was not looked for: the store cannot list")
        return []
    for sidecar in sidecars:
        if not sidecar.is_finished:
            notes.append(f"{sidecar.path} is of a job that is not done; start it again, or delete it")
        elif sidecar.version is None:
            notes.append(
                f"{sidecar.path} belongs to no version of this dataset that can be read, and was not "
                "checked; delete it if it is of none"
            )
    return sidecars


def _check_beside(
    store: ByteStore, sidecars: Iterable[Sidecar], samples: Mapping[str, SamplesTable], damages: list[Damage]
) -> None:
    """Read every table of the sidecars whose manifests can be trusted.

    Args:
        store: Of the dataset.
        sidecars: Views before tokens.
        samples: The samples tables that are whole, by ``dataset_id``.
        damages: Receives the first damage of each file.
    """
    num_rows = {owner: table.num_samples for owner, table in samples.items()}
    for sidecar in sidecars:
        manifest = sidecar.manifest
        if isinstance(manifest, EntityManifest):
            with _Collecting(damages):
                _check_view(store, sidecar, manifest, samples.get(manifest.dataset_id))
            num_rows[manifest.digest] = manifest.num_entities
        elif isinstance(manifest, TokensManifest):
            _check_tokens(store, sidecar, manifest, num_rows.get(manifest.dataset_id), damages)
        elif isinstance(manifest, CountsManifest):
            with _Collecting(damages):
                _check_counts(store, sidecar, manifest, samples.get(manifest.dataset_id))
        elif isinstance(manifest, SeriesManifest):
            with _Collecting(damages):
                _check_series(store, sidecar, manifest, samples.get(manifest.dataset_id))
        elif isinstance(manifest, StudiesManifest):
            with _Collecting(damages):
                _check_studies(store, sidecar, manifest, samples.get(manifest.dataset_id))
        elif isinstance(manifest, VoxelsManifest):
            with _Collecting(damages):
                _check_voxels(store, sidecar, manifest, samples.get(manifest.dataset_id))
        elif isinstance(manifest, TableManifest):
            with _Collecting(damages):
                _check_table(store, sidecar, manifest, samples.get(manifest.dataset_id))
        elif isinstance(manifest, FieldDigestsManifest):
            for number, expected in enumerate(_expected_tables(sidecar, manifest)):
                with _Collecting(damages):
                    table = open_table(store, expected)
                    with checking(expected.path):
                        digests_of(table, manifest.dataset_id, number)


def _expected_tables(sidecar: Sidecar, manifest: SidecarManifest) -> list[ExpectedFile]:
    return [ExpectedFile(f"{sidecar.path}/{name}", *facts) for name, facts in manifest.tables().items()]


def _check_view(
    store: ByteStore, sidecar: Sidecar, view: EntityManifest, studies: SamplesTable | None
) -> None:
    (expected,) = _expected_tables(sidecar, view)
    path = expected.path
    table = open_table(store, expected)
    with checking(path):
        entities = EntityTable(table)
    if (table.meta.get("dataset_id"), entities.num_samples) != (view.dataset_id, view.num_entities):
        problem = "the table of another view or version than its manifest names"
        raise DamageError(Damage(path, WHOLE_FILE, problem))
    if studies is None:
        return
    if view.num_studies != studies.num_samples:
        counts = f"{view.num_studies} studies instead of the version's {studies.num_samples}"
        raise DamageError(Damage(sidecar.manifest_path, "num_studies", counts))
    rows = entities.column("study").astype(np.int64)
    wrong = rows >= studies.num_samples
    for column in ("shard", "row_in_shard"):
        places = studies.column(column)[np.where(wrong, 0, rows)] if studies.num_samples else rows
        wrong |= entities.column(column) != places
    numbers = np.flatnonzero(wrong)
    if len(numbers):
        problem = f"a row that lies elsewhere than its study (row {numbers[0]})"
        raise DamageError(Damage(path, "column study", problem))


def _check_series(
    store: ByteStore, sidecar: Sidecar, facts: SeriesManifest, studies: SamplesTable | None
) -> None:
    """Check a series table, and its numbers of series against those of the samples table."""
    (expected,) = _expected_tables(sidecar, facts)
    table = open_table(store, expected)
    with checking(expected.path):
        series = SeriesTable(table)
    if (series.num_samples, series.num_series) != (facts.num_samples, facts.num_series):
        raise DamageError(Damage(expected.path, WHOLE_FILE, "another table than its manifest names"))
    if studies is None:
        return
    if series.num_samples != studies.num_samples:
        counts = f"{series.num_samples} samples instead of the version's {studies.num_samples}"
        raise DamageError(Damage(sidecar.manifest_path, "num_samples", counts))
    numbers = np.flatnonzero(np.diff(series.first_series()) != studies.column("num_series"))
    if len(numbers):
        problem = f"another number of series than the samples table has (row {numbers[0]})"
        raise DamageError(Damage(expected.path, "column first_series", problem))


def _check_voxels(
    store: ByteStore, sidecar: Sidecar, facts: VoxelsManifest, studies: SamplesTable | None
) -> None:
    """Check a voxel table, and that its entries are of series that there are."""
    (expected,) = _expected_tables(sidecar, facts)
    table = open_table(store, expected)
    with checking(expected.path):
        voxels = VoxelTable(table)
    if studies is None:
        return
    if not voxels.num_samples == facts.num_samples == studies.num_samples:
        counts = f"{voxels.num_samples} samples instead of the version's {studies.num_samples}"
        raise DamageError(Damage(sidecar.manifest_path, "num_samples", counts))
    owners = np.repeat(np.arange(voxels.num_samples), np.diff(voxels.first_entry))
    if (voxels.series >= studies.column("num_series")[owners]).any():
        raise DamageError(
            Damage(expected.path, "column series", "an entry of a series that its sample lacks")
        )


def _check_studies(
    store: ByteStore, sidecar: Sidecar, facts: StudiesManifest, studies: SamplesTable | None
) -> None:
    """Check a study facts table, and that each earlier study is one of the same person and split."""
    (expected,) = _expected_tables(sidecar, facts)
    table = open_table(store, expected)
    with checking(expected.path):
        found = StudyTable(table)
    if found.num_samples != facts.num_samples:
        raise DamageError(Damage(expected.path, WHOLE_FILE, "another table than its manifest names"))
    if studies is None:
        return
    if found.num_samples != studies.num_samples:
        counts = f"{found.num_samples} samples instead of the version's {studies.num_samples}"
        raise DamageError(Damage(sidecar.manifest_path, "num_samples", counts))
    known = (found.array("patient_key"), found.array("study_day"), studies.column("num_slices"))
    numbers = np.flatnonzero(previous_rows(*known, studies.splits.values()) != found.array("previous_row"))
    if len(numbers):
        problem = f"another earlier study than days and persons give (row {numbers[0]})"
        raise DamageError(Damage(expected.path, "column previous_row", problem))


def _check_table(
    store: ByteStore, sidecar: Sidecar, manifest: TableManifest, studies: SamplesTable | None
) -> None:
    """Check an attached table, and its number of rows where they are samples."""
    (expected,) = _expected_tables(sidecar, manifest)
    table = open_table(store, expected)
    with checking(expected.path):
        open_columns_table(table, manifest).verify()
    if studies is not None and manifest.unit == "study" and manifest.num_rows != studies.num_samples:
        counts = f"{manifest.num_rows} samples instead of the version's {studies.num_samples}"
        raise DamageError(Damage(sidecar.manifest_path, "num_rows", counts))


def _check_tokens(
    store: ByteStore, sidecar: Sidecar, tokens: TokensManifest, num_rows: int | None, damages: list[Damage]
) -> None:
    expected = tokens.num_samples if num_rows is None else num_rows
    for found in (tokens.num_samples, sum(file.num_rows for file in tokens.files)):
        if found != expected:
            numbers = f"{found} samples instead of {expected}"
            damages.append(Damage(sidecar.manifest_path, "num_samples", numbers))
            return
    owner = {"tokenizer": tokens.tokenizer, "dataset_id": tokens.dataset_id}
    expected_counts, *expected_ids = _expected_tables(sidecar, tokens)
    counts = None
    with _Collecting(damages):
        table = open_table(store, expected_counts)
        with checking(expected_counts.path):
            counts = counts_column(table, num_samples=tokens.num_samples, **owner)
    first_row = 0
    for expected_table, file in zip(expected_ids, tokens.files, strict=True):
        rows = range(first_row, first_row + file.num_rows)
        with _Collecting(damages):
            table = open_table(store, expected_table)
            with checking(expected_table.path):
                ids_table(table, first_row=rows.start, num_rows=len(rows), **owner)
                _check_ids(table, None if counts is None else counts[rows.start : rows.stop])
        first_row = rows.stop


def _check_counts(
    store: ByteStore, sidecar: Sidecar, manifest: CountsManifest, studies: SamplesTable | None
) -> None:
    (expected,) = _expected_tables(sidecar, manifest)
    table = open_table(store, expected)
    num_rows = manifest.num_samples
    with checking(expected.path):
        found = ConversationCounts.decode(
            table, processor=manifest.processor, dataset_id=manifest.dataset_id, num_rows=num_rows
        )
        table.verify()
    # A template makes conversations of series and images too.
    is_of_studies = studies is not None and manifest.template is None
    if studies is not None and is_of_studies and found.num_samples != studies.num_samples:
        counts = f"{found.num_samples} samples instead of the version's {studies.num_samples}"
        raise DamageError(Damage(sidecar.manifest_path, "num_samples", counts))


def _check_ids(table: Table, counts: NDArray[Any] | None) -> None:
    """Compare the places of tokens with the ids and with the table of counts.

    Raises:
        FormatError: They disagree.
    """
    starts = table.column("first_token").astype(np.int64)
    if starts[0] or starts[-1] != table.num_rows("token_ids"):
        raise FormatError("places of tokens that are not those of its ids")
    if counts is not None and (np.diff(starts) != counts).any():
        raise FormatError("other numbers of tokens than the table of counts")
