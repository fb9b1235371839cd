"""Check what lies beside a dataset: entity views and stored tokens, against their manifests and its versions.

A sidecar is damage where it would be read and is wrong: a table of other bytes, or one of another version in
the folder of this one. One that no version here would read, or that no job finished, is worth a note alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError, NoListingError, StorageError
from shardflow.shards.entity_dataset import EntityTable
from shardflow.shards.entity_manifest import EntityManifest
from shardflow.shards.manifest import Manifest
from shardflow.shards.samples import SamplesTable
from shardflow.shards.sidecars import Sidecar, SidecarKind, find_sidecars, open_sidecar
from shardflow.shards.table import Table
from shardflow.shards.tokens import TokensManifest, counts_column, ids_table
from shardflow.shards.verification.files import open_table
from shardflow.shards.verification.plan import ExpectedFile
from shardflow.shards.verification.report import WHOLE_FILE, Damage
from shardflow.storage import ByteStore

__all__ = ["Beside", "find_beside"]


@dataclass(slots=True)
class Beside:
    """The sidecars of a dataset whose manifests can be trusted, and what is to say of the others."""

    sidecars: list[Sidecar] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    """Folders that were not opened, or could not be."""

    def files(self) -> list[str]:
        """The files of the sidecars that are checked."""
        return [
            path for sidecar in self.sidecars for path in (*sidecar.digests, sidecar.folder.manifest_path)
        ]

    def without(self, paths: Sequence[str]) -> list[str]:
        """Return the paths that are no file of a sidecar, nor lie in a folder that was named already."""
        own = {*self.files()}
        return [path for path in paths if path not in own and path.rpartition("/")[0] not in self.unread]

    def count(self, kind: SidecarKind) -> int:
        """Return how many of a kind are checked."""
        return sum(sidecar.folder.kind == kind for sidecar in self.sidecars)

    def check(self, store: ByteStore, samples: Mapping[str, SamplesTable]) -> list[Damage]:
        """Read every table; return the first damage of each file.

        Args:
            store: Of the dataset.
            samples: The samples tables that are whole, by ``dataset_id``.
        """
        found = list(self.damages)
        num_rows = {owner: table.num_samples for owner, table in samples.items()}
        for sidecar in self.sidecars:
            owner = sidecar.folder.owner
            if isinstance(sidecar.manifest, EntityManifest):
                found += _check_view(store, sidecar, sidecar.manifest, samples.get(owner))
                num_rows[sidecar.manifest.digest] = sidecar.manifest.num_entities
            else:
                found += _check_tokens(store, sidecar, sidecar.manifest, num_rows.get(owner))
        return found


def find_beside(store: ByteStore, manifests: Mapping[int, Manifest]) -> Beside:
    """Find what lies beside a dataset, and check the manifests of it; no table is read.

    Args:
        store: The dataset.
        manifests: Its good manifests by version.
    """
    beside = Beside()
    try:
        folders = find_sidecars(store)
    except NoListingError:
        beside.notes.append("entity views and stored tokens were not looked for: the store cannot list")
        return beside
    owners: dict[str, tuple[int, str | None]] = {
        manifest.dataset_id: (version, None) for version, manifest in manifests.items()
    }
    # Views come first: tokens may belong to one.
    for folder in folders:
        if not folder.is_finished:
            beside.notes.append(f"{folder.path} is of a job that is not done; start it again, or delete it")
        elif folder.owner not in owners:
            beside.notes.append(
                f"{folder.path} belongs to no version of this dataset that can be read, and was not checked; "
                "delete it if it is of none"
            )
        else:
            version, view = owners[folder.owner]
            try:
                sidecar = open_sidecar(store, folder, version=version, view=view)
            except (FormatError, StorageError) as error:
                beside.damages.append(Damage(folder.manifest_path, WHOLE_FILE, error.message))
            else:
                beside.sidecars.append(sidecar)
                if isinstance(sidecar.manifest, EntityManifest):
                    owners[sidecar.manifest.digest] = (version, folder.name)
                continue
        beside.unread.add(folder.path)
    return beside


def _check_view(
    store: ByteStore, sidecar: Sidecar, view: EntityManifest, studies: SamplesTable | None
) -> Iterator[Damage]:
    ((path, sha256),) = sidecar.digests.items()
    table = open_table(store, ExpectedFile(path, view.num_bytes, sha256))
    if isinstance(table, Damage):
        yield table
        return
    try:
        entities = EntityTable(table)
    except FormatError as error:
        yield Damage(path, WHOLE_FILE, error.message)
        return
    if (table.meta.get("dataset_id"), entities.num_samples) != (view.dataset_id, view.num_entities):
        yield Damage(path, WHOLE_FILE, "the table of another view or version than its manifest names")
    elif studies is not None and view.num_studies != studies.num_samples:
        counts = f"{view.num_studies} studies instead of the version's {studies.num_samples}"
        yield Damage(sidecar.folder.manifest_path, "num_studies", counts)
    elif studies is not None and (problem := _row_problem(entities, studies)):
        yield Damage(path, "column study", problem)


def _row_problem(entities: EntityTable, studies: SamplesTable) -> str | None:
    """Return what is wrong with the first row that does not lie where its study does."""
    rows = entities.column("study").astype(np.int64)
    wrong = rows >= studies.num_samples
    for column in ("shard", "row_in_shard"):
        places = studies.column(column)[np.where(wrong, 0, rows)] if studies.num_samples else rows
        wrong |= entities.column(column) != places
    numbers = np.flatnonzero(wrong)
    return f"a row that lies elsewhere than its study (row {numbers[0]})" if len(numbers) else None


def _check_tokens(
    store: ByteStore, sidecar: Sidecar, tokens: TokensManifest, num_rows: int | None
) -> Iterator[Damage]:
    expected = tokens.num_samples if num_rows is None else num_rows
    for found in (tokens.num_samples, sum(file.num_rows for file in tokens.files)):
        if found != expected:
            numbers = f"{found} samples instead of {expected}"
            yield Damage(sidecar.folder.manifest_path, "num_samples", numbers)
            return
    (counts_path, counts_sha256), *ids = sidecar.digests.items()
    table = open_table(store, ExpectedFile(counts_path, None, counts_sha256))
    counts = None
    if isinstance(table, Damage):
        yield table
    else:
        try:
            counts = counts_column(
                table,
                tokenizer=tokens.tokenizer,
                dataset_id=tokens.dataset_id,
                num_samples=tokens.num_samples,
            )
        except FormatError as error:
            yield Damage(counts_path, WHOLE_FILE, error.message)
    first_row = 0
    for (path, sha256), file in zip(ids, tokens.files, strict=True):
        table = open_table(store, ExpectedFile(path, file.num_bytes, sha256))
        if isinstance(table, Damage):
            yield table
        else:
            problem = _ids_problem(table, tokens, range(first_row, first_row + file.num_rows), counts)
            if problem:
                yield Damage(path, WHOLE_FILE, problem)
        first_row += file.num_rows


def _ids_problem(
    table: Table, tokens: TokensManifest, rows: range, counts: NDArray[Any] | None
) -> str | None:
    """Return what is wrong with a table of ids whose bytes are right: whose it is, and how many it has."""
    try:
        ids_table(
            table,
            first_row=rows.start,
            num_rows=len(rows),
            tokenizer=tokens.tokenizer,
            dataset_id=tokens.dataset_id,
        )
        starts = table.column("first_token").astype(np.int64)
        num_ids = table.num_rows("token_ids")
    except FormatError as error:
        return error.message
    if starts[0] or starts[-1] != num_ids:
        return "places of tokens that are not those of its ids"
    if counts is not None and (np.diff(starts) != counts[rows.start : rows.stop]).any():
        return "other numbers of tokens than the table of counts"
    return None
