"""Verification of a dataset: checks every byte of every file and locates the first damage of each.

The manifest protects itself and the size and SHA-256 of each file; the checksums inside a file locate its
damage. Nothing stops the check: not a damaged manifest, a missing shard or an unreadable index. If a
manifest is damaged, files that only it named are found by their names and judged by their contents, so that
a flipped bit in a manifest cannot hide another one in a shard.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from shardflow.errors import ManifestError, NoListingError, NotFoundError, StorageError
from shardflow.format.checks.shards import (
    WHOLE_FILE,
    Collecting,
    Damage,
    DamageError,
    ExpectedFile,
    RowDamage,
    SamplesChecker,
    check_tar,
    checking,
    open_table,
)
from shardflow.format.checks.sidecars import check_sidecars, find_sidecars_to_check, sidecar_paths
from shardflow.format.copies.copying import Sidecar
from shardflow.format.entities import EntityManifest
from shardflow.format.facts.series import SeriesManifest
from shardflow.format.facts.studies import StudiesManifest
from shardflow.format.file_blocks import (
    BlockDigests,
    StaleDigestsError,
    describe_slower,
    missing_digests,
    parse_digests,
)
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
from shardflow.format.signatures import list_path, signature_numbers
from shardflow.format.tables import TableManifest
from shardflow.format.tar import HashedStream
from shardflow.format.token_manifest import TokensManifest
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
    sidecars = find_sidecars_to_check(store, manifests.values(), beside_damages, notes)
    plan = _plan_files(store, manifests, all_versions, sidecars)
    damages += plan.damages

    checkers: dict[str, list[SamplesChecker]] = {}
    table_damages: dict[str, list[Damage]] = {}
    for table in plan.samples:
        with Collecting(table_damages.setdefault(table.path, [])):
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
    for file in plan.blocks:
        with Collecting(damages):
            _check_blocks(store, file, manifests.values(), notes)
    for check, files in (
        (_check_ledger, plan.ledgers),
        (_check_lines, plan.lines),
        (_check_page, plan.pages),
    ):
        for file in files:
            with Collecting(damages):
                check(store, file, manifests.values())
    tables = {
        checker.manifest.dataset_id: checker.samples for group in checkers.values() for checker in group
    }
    check_sidecars(store, sidecars, tables, beside_damages)
    damages += beside_damages

    paths = [*plan.paths(), *sidecar_paths(sidecars)]
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
        found = list(store.list(""))
    except NoListingError:  # nor are signatures asked for one by one
        others = []
        plan.notes.append("files that no manifest names were not looked for: the store cannot list")
    else:
        signed = {list_path(one, number) for one in all_versions for number in signature_numbers(store, one)}
        own = {*plan.manifests, *known, *sidecar_paths(sidecars), *signed, *(f"{one}.sig" for one in signed)}
        unread = {sidecar.path for sidecar in sidecars if sidecar.manifest is None}
        others = [path for path in found if path not in own and path.rpartition("/")[0] not in unread]
    if len(manifests) < len(all_versions):
        others = _plan_by_name(plan, others)
    plain = [path for path in others if _PLAIN_PATH.fullmatch(path)][:_MAX_NAMED_EXTRAS]
    plan.notes += [f"{path} is named by no manifest" for path in plain]
    if len(others) > len(plain):
        plan.notes.append(f"{len(others) - len(plain)} more files are named by no manifest")
    return plan


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
    with Collecting(of_index):
        index = _open_index(store, shard)
    with Collecting(result.damages):
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


def _check_blocks(
    store: ByteStore, expected: ExpectedFile, manifests: Collection[Manifest], notes: list[str]
) -> None:
    """Compare the digests of a samples table's blocks with the table.

    Those that are missing, or of an earlier table, are no damage: the table's own digest proves it. They are
    noted of the newest version, whose readers warn of them.
    """
    path = expected.path
    newest = max(manifest.manifest_version for manifest in manifests)
    for manifest in manifests:
        if manifest.samples_blocks is None or manifest.samples_blocks.path != path:
            continue
        entry = manifest.samples
        with checking(path):
            try:
                data = _read_digests(store, expected, entry)
            except StaleDigestsError as error:
                if manifest.manifest_version == newest:
                    notes.append(describe_slower(entry, error))
                continue
        digests = BlockDigests()
        with checking(entry.path):
            for piece in object_pieces(store, entry.path, entry.num_bytes):
                digests.add(piece)
        if digests.encode(entry) != data:
            raise DamageError(Damage(path, WHOLE_FILE, f"other digests than those of {entry.path}"))


def _read_digests(store: ByteStore, expected: ExpectedFile, entry: FileEntry) -> bytes:
    """Return a file of digests that holds those of a samples table.

    Raises:
        StaleDigestsError: It does not exist, or holds those of another table.
        FormatError: It holds no digests.
        StorageError: It cannot be read.
    """
    try:
        data = store.read(expected.path)
    except NotFoundError:
        raise missing_digests(expected.path) from None
    expected.compare(data)
    parse_digests(memoryview(data), entry, expected.path)
    return data


def _check_ledger(store: ByteStore, expected: ExpectedFile, manifests: Iterable[Manifest]) -> None:
    """Check a ledger's chain, its head and digest in the manifest, and its counts there."""
    path = expected.path
    owners = [manifest for manifest in manifests if manifest.ledger and manifest.ledger.path == path]
    head = next((owner.ledger.head for owner in owners if owner.ledger), None)
    with checking(path):
        stream = HashedStream(store, path)
        report = verify_ledger(stream.take(stream.num_bytes), head=head)
    if report.problems:
        first = report.problems[0]
        raise DamageError(Damage(path, f"line {first.line}", first.problem, first.offset))
    if any(owner.counts != report.counts for owner in owners):
        raise DamageError(Damage(path, "closing line", "other counts than the manifest's"))
    with checking(path):
        expected.compare_stream(stream)


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
