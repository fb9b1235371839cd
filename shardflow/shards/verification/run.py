"""Check every byte of a dataset, and name the first wrong one of each file.

The manifest vouches for itself and for the size and SHA-256 of each file; the files vouch for their parts,
which is how a damage gets its place. Nothing stops the check: not a damaged manifest, a missing shard or an
unreadable index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from shardflow.errors import FormatError, StorageError
from shardflow.shards.foreign.places import located
from shardflow.shards.manifest import Manifest, latest_version, versions
from shardflow.shards.samples import SamplesTable
from shardflow.shards.verification.beside import find_beside
from shardflow.shards.verification.files import (
    ShardResult,
    check_ledger,
    check_lines,
    check_page,
    check_shard,
    load_manifests,
    open_table,
)
from shardflow.shards.verification.plan import ExpectedFile, plan_files
from shardflow.shards.verification.report import WHOLE_FILE, Damage, VerifyReport
from shardflow.shards.verification.samples import SamplesChecker, SamplesFinding
from shardflow.storage import ByteStore, open_store

__all__ = ["verify"]


def verify(
    url: str | os.PathLike[str],
    *,
    num_threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check every byte of a dataset, in all of its versions, and of the views and tokens beside it.

    Args:
        url: The dataset.
        num_threads: Shards that are checked at once; each holds 4 MiB and an index.
        progress: Called with the numbers of shards checked and of all shards.

    Returns:
        The report; damage is reported, never raised.

    Raises:
        ManifestError: There is no manifest at all, so this is no dataset.
        StorageError: The store cannot be opened.
    """
    store = open_store(url)
    newest = latest_version(store)
    all_versions = versions(store)
    manifests, damages = load_manifests(store, all_versions)
    store = located(store, manifests.values())
    beside = find_beside(store, manifests)
    plan = plan_files(store, manifests, all_versions, beside.without)
    damages += plan.damages

    checkers: dict[str, list[SamplesChecker]] = {}
    table_damages = {
        table.path: _check_samples_table(store, table, manifests, checkers) for table in plan.samples
    }
    results: list[ShardResult] = []
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        for result in pool.map(lambda shard: check_shard(store, shard, checkers), plan.shards):
            results.append(result)
            damages += result.damages
            if progress:
                progress(len(results), len(plan.shards))
    for path, damage in table_damages.items():
        rows = [finding for result in results for table, finding in result.samples_findings if table == path]
        found = damage or (_describe(path, min(rows)) if rows else None)
        damages += [found] if found else []
    for ledger, entry in plan.ledgers:
        found = check_ledger(store, ledger, entry, list(manifests.values()))
        damages += [found] if found else []

    for lines in plan.lines:
        found = check_lines(store, lines, list(manifests.values()))
        damages += [found] if found else []
    for page in plan.pages:
        found = check_page(store, page)
        damages += [found] if found else []
    tables = {
        checker.manifest.dataset_id: checker.samples for group in checkers.values() for checker in group
    }
    damages += beside.check(store, tables)

    files = [*plan.files(), *beside.files()]
    manifest = manifests.get(newest)
    return VerifyReport(
        dataset_id=manifest.dataset_id if manifest else None,
        manifest_version=newest,
        damages=tuple(damages),
        notes=(*plan.notes, *beside.notes),
        num_files=len(files),
        num_bytes=sum(_size_or_zero(store, path) for path in files),
        num_shards=len(plan.shards),
        num_samples=sum(result.num_samples for result in results),
        num_fields=sum(result.num_fields for result in results),
        num_views=beside.count("view"),
        num_tokenizations=beside.count("tokens"),
    )


def _check_samples_table(
    store: ByteStore,
    expected: ExpectedFile,
    manifests: Mapping[int, Manifest],
    checkers: dict[str, list[SamplesChecker]],
) -> Damage | None:
    """Check the table by itself; leave its checkers for the shards to be compared with where it is whole."""
    path = expected.path
    table = open_table(store, expected)
    if isinstance(table, Damage):
        return table
    try:
        samples = SamplesTable(table)
        group = [
            SamplesChecker(manifest, samples)
            for manifest in manifests.values()
            if manifest.samples.path == path
        ]
    except FormatError as error:
        return Damage(path, WHOLE_FILE, error.message)
    for checker in group:
        finding = checker.find_own_damage()
        if finding:
            return _describe(path, finding)
    checkers[path] = group
    return None


def _describe(path: str, finding: SamplesFinding) -> Damage:
    row = f"row {finding.row}, " if finding.row >= 0 else ""
    return Damage(path, f"{row}column {finding.column}", finding.problem)


def _size_or_zero(store: ByteStore, path: str) -> int:
    try:
        return store.size(path)
    except StorageError:
        return 0
