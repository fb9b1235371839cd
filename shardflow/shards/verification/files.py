"""Check single files: manifests, tables, shards with their indexes, ledgers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardflow.errors import FormatError, ManifestError, NotFoundError, StorageError
from shardflow.shards.canonical import sha256_hex
from shardflow.shards.index import ShardIndex
from shardflow.shards.ledger import verify_ledger
from shardflow.shards.line_outcomes import LineOutcomes
from shardflow.shards.manifest import LedgerEntry, Manifest, load, manifest_path
from shardflow.shards.table import Table
from shardflow.shards.table_layout import TableDamageError
from shardflow.shards.verification.plan import ExpectedFile, ExpectedShard
from shardflow.shards.verification.report import WHOLE_FILE, Damage
from shardflow.shards.verification.samples import SamplesChecker, SamplesFinding
from shardflow.shards.verification.shard import find_shard_damage
from shardflow.storage import ByteStore

__all__ = [
    "ShardResult",
    "check_ledger",
    "check_lines",
    "check_page",
    "check_shard",
    "load_manifests",
    "open_table",
]


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What was found in a tar, its index, and its rows of the samples tables (by the path of the table)."""

    damages: list[Damage]
    samples_findings: list[tuple[str, SamplesFinding]]
    num_samples: int
    num_fields: int


def load_manifests(store: ByteStore, all_versions: Sequence[int]) -> tuple[dict[int, Manifest], list[Damage]]:
    """Load every version of the manifest; return the good ones, and the damage of the others."""
    manifests: dict[int, Manifest] = {}
    damages: list[Damage] = []
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
    return manifests, damages


def open_table(store: ByteStore, expected: ExpectedFile) -> Table | Damage:
    """Open a table and check all of it; the place of a damage is the column where there is one."""
    try:
        buffer = store.map(expected.path)
    except StorageError as error:
        return _unreadable(expected.path, error)
    try:
        table = Table(buffer, name=expected.path)
        table.verify()
    except TableDamageError as damage:
        return Damage(expected.path, damage.place, damage.problem, damage.offset)
    except FormatError as error:
        return Damage(expected.path, WHOLE_FILE, error.message)
    return _compare(expected, buffer) or table


def check_shard(
    store: ByteStore, shard: ExpectedShard, checkers: Mapping[str, Sequence[SamplesChecker]]
) -> ShardResult:
    """Check an index, its tar against it, and the rows of the samples tables against it."""
    index = _open_index(store, shard)
    if isinstance(index, Damage):
        damages = [_check_tar(store, shard, None), index]
        return ShardResult([damage for damage in damages if damage], [], 0, 0)
    damage = _check_tar(store, shard, index)
    findings = []
    for path, group in checkers.items():
        for checker in group:
            number = checker.shard_numbers.get(shard.tar.path)
            finding = None if number is None else checker.find_shard_damage(number, index)
            if finding:
                findings.append((path, finding))
    return ShardResult([damage] if damage else [], findings, index.num_samples, index.num_fields)


def check_ledger(
    store: ByteStore, expected: ExpectedFile, entry: LedgerEntry | None, manifests: Sequence[Manifest]
) -> Damage | None:
    """Check a ledger's chain, its head and digest in the manifest, and its counts there."""
    try:
        data = store.read(expected.path)
    except StorageError as error:
        return _unreadable(expected.path, error)
    report = verify_ledger(data, head=entry.head if entry else None)
    if report.problems:
        first = report.problems[0]
        return Damage(expected.path, f"line {first.line}", first.problem, first.offset)
    for manifest in manifests:
        if entry and manifest.ledger == entry and manifest.counts != report.counts:
            return Damage(expected.path, "closing line", "other counts than the manifest's")
    return _compare(expected, memoryview(data))


def check_lines(store: ByteStore, expected: ExpectedFile, manifests: Sequence[Manifest]) -> Damage | None:
    """Check the outcomes of a corpus' lines: every byte, and their counts against the manifest."""
    table = open_table(store, expected)
    if isinstance(table, Damage):
        return table
    try:
        counts = LineOutcomes(table).counts()
    except FormatError as error:
        return Damage(expected.path, WHOLE_FILE, error.message)
    for manifest in manifests:
        entry = manifest.line_outcomes
        if entry and entry.path == expected.path and manifest.counts != counts:
            return Damage(expected.path, "column outcome", "other counts than the manifest's")
    return None


def check_page(store: ByteStore, expected: ExpectedFile) -> Damage | None:
    """Compare a page for people with its size and digest in the manifest; what it says is nobody's input."""
    try:
        return _compare(expected, memoryview(store.read(expected.path)))
    except StorageError as error:
        return _unreadable(expected.path, error)


def _open_index(store: ByteStore, shard: ExpectedShard) -> ShardIndex | Damage:
    path = shard.index.path
    table = open_table(store, shard.index)
    if isinstance(table, Damage):
        return table
    try:
        index = ShardIndex.from_table(table)
    except FormatError as error:
        return Damage(path, WHOLE_FILE, error.message)
    entry = shard.entry
    found = (index.shard, index.shard_num_bytes, index.num_samples, index.num_fields)
    if entry and found != (entry.name, entry.num_bytes, entry.num_samples, entry.num_fields):
        return Damage(
            path, "header", f"the index of {index.shard}, not the one of {entry.name} in the manifest"
        )
    return index


def _check_tar(store: ByteStore, shard: ExpectedShard, index: ShardIndex | None) -> Damage | None:
    path = shard.tar.path
    try:
        finding = find_shard_damage(store, path, index, shard.tar.sha256)
    except StorageError as error:
        return _unreadable(path, error)
    if finding is None:
        return None
    return Damage(path, finding.place, finding.problem, finding.offset, finding.sample_key, finding.field)


def _compare(expected: ExpectedFile, data: memoryview) -> Damage | None:
    """Compare a file that is whole in itself with the manifest: another whole file may lie there."""
    if expected.num_bytes is not None and data.nbytes != expected.num_bytes:
        return Damage(expected.path, WHOLE_FILE, f"{data.nbytes} bytes instead of {expected.num_bytes}")
    if expected.sha256 is not None and sha256_hex(data) != expected.sha256:
        return Damage(expected.path, WHOLE_FILE, "another sha256 than in the manifest")
    return None


def _unreadable(path: str, error: StorageError) -> Damage:
    problem = "missing" if isinstance(error, NotFoundError) else f"unreadable: {error.message}"
    return Damage(path, WHOLE_FILE, problem)
