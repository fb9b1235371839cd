"""Integrity checks of sidecars: views, tokens, facts, digests and attached tables beside a dataset.

Each table is read whole and compared with its manifest, and with the samples table of the version that it
belongs to where that is sound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
from shardflow.format.facts.series import SeriesManifest, SeriesTable
from shardflow.format.facts.studies import StudiesManifest, StudyTable, previous_rows
from shardflow.format.facts.voxels import VoxelsManifest, VoxelTable
from shardflow.format.field_digests import FieldDigestsManifest, digests_of
from shardflow.format.manifest import Manifest
from shardflow.format.samples import SamplesTable
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.table import Table
from shardflow.format.tables import TableManifest, open_columns_table
from shardflow.format.token_manifest import TokensManifest
from shardflow.format.tokens import counts_column, ids_table
from shardflow.storage import ByteStore


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
        if isinstance(manifest, EntityManifest):
            with Collecting(damages):
                _check_view(store, sidecar, manifest, samples.get(manifest.dataset_id))
            num_rows[manifest.digest] = manifest.num_entities
        elif isinstance(manifest, TokensManifest):
            _check_tokens(store, sidecar, manifest, num_rows.get(manifest.dataset_id), damages)
        elif isinstance(manifest, CountsManifest):
            with Collecting(damages):
                _check_counts(store, sidecar, manifest, samples.get(manifest.dataset_id))
        elif isinstance(manifest, SeriesManifest):
            with Collecting(damages):
                _check_series(store, sidecar, manifest, samples.get(manifest.dataset_id))
        elif isinstance(manifest, StudiesManifest):
            with Collecting(damages):
                _check_studies(store, sidecar, manifest, samples.get(manifest.dataset_id))
        elif isinstance(manifest, VoxelsManifest):
            with Collecting(damages):
                _check_voxels(store, sidecar, manifest, samples.get(manifest.dataset_id))
        elif isinstance(manifest, TableManifest):
            with Collecting(damages):
                _check_table(store, sidecar, manifest, samples.get(manifest.dataset_id))
        elif isinstance(manifest, FieldDigestsManifest):
            for number, expected in enumerate(_expected_tables(sidecar, manifest)):
                with Collecting(damages):
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
    _expect_samples(sidecar, series.num_samples, studies)
    numbers = np.flatnonzero(np.diff(series.first_series()) != studies.column("num_series"))
    if len(numbers):
        problem = f"another number of series than the samples table has (row {numbers[0]})"
        raise DamageError(Damage(expected.path, "column first_series", problem))


def _expect_samples(sidecar: Sidecar, num_samples: int, studies: SamplesTable) -> None:
    """Check that a table has a row for each sample of the version."""
    if num_samples != studies.num_samples:
        counts = f"{num_samples} samples instead of the version's {studies.num_samples}"
        raise DamageError(Damage(sidecar.manifest_path, "num_samples", counts))


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
    _expect_samples(sidecar, found.num_samples, studies)
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
    for found in (tokens.num_samples, int(tokens.files.num_rows.sum())):
        if found != expected:
            numbers = f"{found} samples instead of {expected}"
            damages.append(Damage(sidecar.manifest_path, "num_samples", numbers))
            return
    owner = {"tokenizer": tokens.tokenizer, "dataset_id": tokens.dataset_id}
    expected_counts, *expected_ids = _expected_tables(sidecar, tokens)
    counts = None
    with Collecting(damages):
        table = open_table(store, expected_counts)
        with checking(expected_counts.path):
            counts = counts_column(table, num_samples=tokens.num_samples, **owner)
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
