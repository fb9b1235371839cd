"""Integrity checks of sidecars: views, tokens, facts, digests and attached tables beside a dataset.

Each table is read whole and compared with its manifest, and with the samples table of the version that it
belongs to where that is sound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, NoListingError
from shardflow.format.checks.shards import (
    WHOLE_FILE,
    Collecting,
    Damage,
    DamageError,
    ExpectedFile,
    checking,
    open_table,
)
from shardflow.format.copies.copying import Sidecar, find_sidecars
from shardflow.format.counts import ConversationCounts, CountsManifest
from shardflow.format.entities import EntityManifest, EntityTable
from shardflow.format.facts.series import FactsManifest, SeriesManifest, TableT
from shardflow.format.facts.studies import StudiesManifest, previous_rows
from shardflow.format.facts.voxels import VoxelsManifest
from shardflow.format.field_digests import FieldDigestsManifest, digests_of
from shardflow.format.manifest import Manifest
from shardflow.format.samples import SamplesTable
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.table import Table
from shardflow.format.tables import TableManifest, open_columns_table
from shardflow.format.token_manifest import TokensManifest
from shardflow.format.tokens import counts_column, ids_table
from shardflow.storage import ByteStore

T = TypeVar("T")


def find_sidecars_to_check(
    store: ByteStore, manifests: Iterable[Manifest], damages: list[Damage], notes: list[str]
) -> list[Sidecar]:
    """Find the sidecars of a dataset, and check their manifests; no table is read.

    A sidecar is damage where it would be read and is wrong. One that no version here would read, or that no
    job finished, is only worth a note.
    """

    @contextmanager
    def guard(path: str) -> Iterator[None]:
        with Collecting(damages), checking(path):
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


def sidecar_paths(sidecars: Iterable[Sidecar]) -> list[str]:
    """Return the files of the sidecars whose manifests can be trusted."""
    return [
        f"{sidecar.path}/{name}"
        for sidecar in sidecars
        if sidecar.manifest is not None
        for name in (*sidecar.manifest.tables(), sidecar.kind.file_name)
    ]


def check_sidecars(
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
        if manifest is None:
            continue
        studies = samples.get(manifest.dataset_id)
        with Collecting(damages):
            if isinstance(manifest, EntityManifest):
                num_rows[manifest.digest] = manifest.num_entities
                _check_view(store, sidecar, manifest, studies)
            elif isinstance(manifest, TokensManifest):
                _check_tokens(store, sidecar, manifest, num_rows.get(manifest.dataset_id), damages)
            elif isinstance(manifest, CountsManifest):
                _check_counts(store, sidecar, manifest, studies)
            elif isinstance(manifest, SeriesManifest):
                _check_series(store, sidecar, manifest, studies)
            elif isinstance(manifest, StudiesManifest):
                _check_studies(store, sidecar, manifest, studies)
            elif isinstance(manifest, VoxelsManifest):
                _check_voxels(store, sidecar, manifest, studies)
            elif isinstance(manifest, TableManifest):
                _check_table(store, sidecar, manifest, studies)
            elif isinstance(manifest, FieldDigestsManifest):
                for number, expected in enumerate(_expected_tables(sidecar, manifest)):
                    with Collecting(damages):
                        _open(
                            store,
                            expected,
                            partial(digests_of, dataset_id=manifest.dataset_id, number=number),
                        )


def _expected_tables(sidecar: Sidecar, manifest: SidecarManifest) -> list[ExpectedFile]:
    return [ExpectedFile(f"{sidecar.path}/{name}", *facts) for name, facts in manifest.tables().items()]


def _open(store: ByteStore, expected: ExpectedFile, wrap: Callable[[Table], T]) -> T:
    """Check all of a table, and return what ``wrap`` makes of it; its errors are damage of the file."""
    table = open_table(store, expected)
    with checking(expected.path):
        return wrap(table)


def _open_facts(
    store: ByteStore, sidecar: Sidecar, facts: FactsManifest[TableT], studies: SamplesTable | None
) -> tuple[str, TableT]:
    """Return path and table of facts, which has a row for each sample of the version."""
    (expected,) = _expected_tables(sidecar, facts)
    table = _open(store, expected, facts.opened)
    _expect(sidecar, "num_samples", facts.num_samples, studies)
    return expected.path, table


def _expect(
    sidecar: Sidecar, entry: str, found: int, studies: SamplesTable | None, what: str = "samples"
) -> None:
    """Check an entry of a manifest that counts the samples of the version, where these are known."""
    if studies is not None and found != studies.num_samples:
        counts = f"{found} {what} instead of the version's {studies.num_samples}"
        raise DamageError(Damage(sidecar.manifest_path, entry, counts))


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
    _expect(sidecar, "num_studies", view.num_studies, studies, "studies")
    if studies is None:
        return
    rows = entities.column("study").astype(np.int64)
    wrong = rows >= studies.num_samples
    for column in ("shard", "row_in_shard"):
        places = studies.column(column)[np.where(wrong, 0, rows)] if studies.num_samples else rows
        wrong |= entities.column(column) != places
    _expect_none(wrong, path, "study", "a row that lies elsewhere than its study")


def _expect_none(wrong: NDArray[np.bool_], path: str, column: str, problem: str) -> None:
    """Check that no row of a table is wrong."""
    if wrong.any():
        raise DamageError(Damage(path, f"column {column}", f"{problem} (row {wrong.argmax()})"))


def _check_series(
    store: ByteStore, sidecar: Sidecar, facts: SeriesManifest, studies: SamplesTable | None
) -> None:
    """Check a series table, and its numbers of series against those of the samples table."""
    path, series = _open_facts(store, sidecar, facts, studies)
    if studies is not None:
        wrong = np.diff(series.first_series()) != studies.column("num_series")
        _expect_none(wrong, path, "first_series", "another number of series than the samples table has")


def _check_voxels(
    store: ByteStore, sidecar: Sidecar, facts: VoxelsManifest, studies: SamplesTable | None
) -> None:
    """Check a voxel table, and that its entries are of series that there are."""
    path, voxels = _open_facts(store, sidecar, facts, studies)
    if studies is not None:
        owners = np.repeat(np.arange(voxels.num_samples), np.diff(voxels.first_entry))
        wrong = voxels.series >= studies.column("num_series")[owners]
        _expect_none(wrong, path, "series", "an entry of a series that its sample lacks")


def _check_studies(
    store: ByteStore, sidecar: Sidecar, facts: StudiesManifest, studies: SamplesTable | None
) -> None:
    """Check a study facts table, and that each earlier study is one of the same person and split."""
    path, found = _open_facts(store, sidecar, facts, studies)
    if studies is not None:
        known = (found.array("patient_key"), found.array("study_day"), studies.column("num_slices"))
        wrong = previous_rows(*known, studies.splits.values()) != found.array("previous_row")
        _expect_none(wrong, path, "previous_row", "another earlier study than days and persons give")


def _check_table(
    store: ByteStore, sidecar: Sidecar, manifest: TableManifest, studies: SamplesTable | None
) -> None:
    """Check an attached table, and its number of rows where they are samples."""
    (expected,) = _expected_tables(sidecar, manifest)
    _open(store, expected, lambda table: open_columns_table(table, manifest).verify())
    if manifest.unit == "study":
        _expect(sidecar, "num_rows", manifest.num_rows, studies)


def _check_tokens(
    store: ByteStore, sidecar: Sidecar, tokens: TokensManifest, num_rows: int | None, damages: list[Damage]
) -> None:
    expected = tokens.num_samples if num_rows is None else num_rows
    for found in (tokens.num_samples, int(tokens.files.num_rows.sum())):
        if found != expected:
            numbers = f"{found} samples instead of {expected}"
            damages.append(Damage(sidecar.manifest_path, "num_samples", numbers))
            return
    owner = {"tokenizer": tokens.tokenizer, "dataset_id": tokens.dataset_id}
    expected_counts, *expected_ids = _expected_tables(sidecar, tokens)
    counts = None
    with Collecting(damages):
        counts = _open(
            store,
            expected_counts,
            lambda table: counts_column(table, num_samples=tokens.num_samples, **owner),
        )
    first_row = 0
    for expected_table, file in zip(expected_ids, tokens.files, strict=True):
        rows = range(first_row, first_row + file.num_rows)
        with Collecting(damages):
            table = open_table(store, expected_table)
            with checking(expected_table.path):
                ids_table(table, first_row=rows.start, num_rows=len(rows), **owner)
                _check_ids(table, None if counts is None else counts[rows.start : rows.stop])
        first_row = rows.stop


def _check_counts(
    store: ByteStore, sidecar: Sidecar, manifest: CountsManifest, studies: SamplesTable | None
) -> None:
    (expected,) = _expected_tables(sidecar, manifest)

    def decoded(table: Table) -> ConversationCounts:
        return ConversationCounts.decode(
            table,
            processor=manifest.processor,
            dataset_id=manifest.dataset_id,
            num_rows=manifest.num_samples,
        )

    found = _open(store, expected, decoded)
    # A template makes conversations of series and images too.
    if manifest.template is None:
        _expect(sidecar, "num_samples", found.num_samples, studies)


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
