"""Files of one version of a dataset: ledgers, samples table, page, tables of facts, and last the manifest.

Version 1 keeps plain names; later ones carry their number. There is no version before its manifest: whoever
opens the folder finds the previous one, however much of the next one is already written. The page is made
from the finished shards, table and ledger, in bounded work (`shardflow.viewing.dataset_facts.Bounds`).

The private ledger (private folder, mode 0600) maps surrogates back to inputs for the operator, and is what a
later version recognizes its inputs by (`shardflow.packing.versions.base`).
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardflow.errors import FormatError
from shardflow.format import Dataset
from shardflow.format.facts.columns import carry_tables
from shardflow.format.facts.making import write_facts
from shardflow.format.facts.series import SeriesManifest
from shardflow.format.facts.studies import StudiesManifest
from shardflow.format.facts.voxels import VoxelsManifest, write_voxels
from shardflow.format.ledger import LedgerChain, LedgerRow
from shardflow.format.manifest import LedgerEntry, Manifest, ShardEntry, commit, load, versions
from shardflow.format.reasons import Outcome, OutcomeCounts, outcome_of
from shardflow.format.samples import MAX_MODALITIES, KeySet, SamplesTable, repeated_key
from shardflow.format.shard_files import SamplesFiles, stream_samples, write_file
from shardflow.format.table import Table
from shardflow.format.tables import TableManifest
from shardflow.packing.deid.allowlist import KEYWORDS, MAX_AGE_YEARS
from shardflow.packing.inventory import (
    CARRIED,
    INPUT_KINDS,
    NO_STUDY,
    REPORT_KIND,
    UNDECIDED,
    StudyTable,
    count_outcomes,
    count_reasons,
    reason_name,
)
from shardflow.packing.people import write_evidence
from shardflow.packing.versions.base import Base, ShardRows, file_identity
from shardflow.packing.workspace import locked_workspace
from shardflow.storage import LocalStore
from shardflow.storage.local import write_atomic
from shardflow.viewing import Bounds, gather, render_page

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardflow.packing.config import InputsConfig, PageConfig
    from shardflow.packing.progress import Progress
    from shardflow.packing.upload import Uploader
    from shardflow.packing.versions.ingest import Ingested
    from shardflow.packing.workspace import Workspace

_ROWS_AT_ONCE: Final = 1024
"""Rows of a ledger that are written together."""
_MAX_THREADS: Final = 16
_FOLDERS: Final = ("shards", "samples")
_LEDGERS: Final = "ledger*.jsonl"


@dataclass(frozen=True, slots=True, eq=False)
class LedgerColumns:
    """The rows of a ledger as columns, in any order."""

    surrogate: NDArray[np.bytes_]
    """``(n,)`` S26."""
    kind: NDArray[np.uint8]
    """``(n,)`` into `shardflow.packing.inventory.INPUT_KINDS`."""
    reason: NDArray[np.uint8]
    """``(n,)``, decided."""
    study: NDArray[np.int32]
    """``(n,)`` into ``keys``, or `NO_STUDY`."""
    keys: Sequence[str]
    """Sample keys."""

    def rows(self) -> Iterator[LedgerRow]:
        """Yield the rows sorted by surrogate."""
        for at in np.argsort(self.surrogate, kind="stable").tolist():
            reason = reason_name(int(self.reason[at]))
            study = int(self.study[at])
            outcome = Outcome.PACKED if reason is None else outcome_of(reason)
            yield LedgerRow(
                input=self.surrogate[at].decode("ascii"),
                kind=INPUT_KINDS[int(self.kind[at])],
                outcome=outcome.value,
                reason=reason,
                sample_key=None if study == NO_STUDY else self.keys[study],
            )


def ledger_columns(ingested: Ingested, base: Base | None) -> LedgerColumns:
    """Merge the inputs that a job decided with those it took over.

    The studies of ``base`` have the same numbers in both.
    """
    report_kind = np.full(len(ingested.reports), REPORT_KIND, np.uint8)
    parts = [
        (
            table.surrogate[chosen],
            kind[chosen],
            table.reason[chosen],
            table.study[chosen],
        )
        for table, kind in ((ingested.files, ingested.files.kind), (ingested.reports, report_kind))
        for chosen in [table.reason != CARRIED]
    ]
    if base is not None and ingested.scope is not None:
        kept, known = ~ingested.scope.is_decided, base.known
        parts.append((known.surrogate[kept], known.kind[kept], known.reason[kept], known.study[kept]))
    surrogate, kind_, reason, study = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return LedgerColumns(surrogate, kind_, reason, study, ingested.files.studies.keys)


def is_unchanged(base: Base, ingested: Ingested) -> bool:
    """Return whether every input has the outcome of the previous version."""
    now, before = ledger_columns(ingested, base), base.known
    order, former = np.argsort(now.surrogate, kind="stable"), np.argsort(before.surrogate, kind="stable")
    return np.array_equal(now.surrogate[order], before.surrogate[former]) and np.array_equal(
        now.reason[order], before.reason[former]
    )


def write_ledger(output: Path, path: str, columns: LedgerColumns) -> LedgerEntry:
    """Write a ledger a few lines at a time, in constant memory.

    Raises:
        StorageError: It cannot be written.
    """
    chain = LedgerChain()

    def pieces() -> Iterator[bytes]:
        rows = columns.rows()
        while lines := [chain.append(row) for row in itertools.islice(rows, _ROWS_AT_ONCE)]:
            yield b"".join(lines)
        yield chain.close()

    return LedgerEntry(**asdict(write_file(output, path, pieces())), head=chain.head)


def write_private_ledger(
    workspace: Workspace,
    plan_digest: str,
    ingested: Ingested,
    inputs: InputsConfig,
    base: Base | None,
    notes: Mapping[int, Mapping[str, Any]],
) -> None:
    """Write one JSON line for each input: surrogate, path or place, sample key, outcome, notes, content.

    The file is named after the plan, so that it never replaces that of another run. The reason is
    ``"UNDECIDED"`` for inputs that an interrupted job did not reach. Inputs that the job took over keep their
    line of the previous version.

    Raises:
        StorageError: It cannot be written.
    """
    write_atomic(
        workspace.private_ledger(plan_digest), _lines(ingested, inputs, base, notes), replace=True, mode=0o600
    )
    if ingested.identities is not None:
        write_evidence(ingested.identities, workspace.people_ledger(plan_digest))


def encode_entry(entry: Mapping[str, Any]) -> bytes:
    """Encode the line of an input."""
    return json.dumps(entry, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def _lines(
    ingested: Ingested, inputs: InputsConfig, base: Base | None, notes: Mapping[int, Mapping[str, Any]]
) -> Iterator[bytes]:
    files, reports, studies = ingested.files, ingested.reports, ingested.files.studies
    if base is not None and ingested.scope is not None:
        for entry in base.known.entries(np.flatnonzero(~ingested.scope.is_decided).tolist()):
            yield encode_entry(entry)

    def line(
        surrogate: bytes,
        code: int,
        study: int,
        kind: str,
        where: Mapping[str, Any],
        identity: int,
        pixels: int = 0,
    ) -> bytes:
        return encode_entry(
            {
                "input": surrogate.decode("ascii"),
                "kind": kind,
                **where,
                "sample_key": None if study == NO_STUDY else studies.keys[study],
                "patient": None if study == NO_STUDY else studies.patients[study] or None,
                **_accession(studies, study),
                "reason": "UNDECIDED" if code == UNDECIDED else reason_name(code),
                "identity": f"{identity:016x}",
                **({"pixels": f"{pixels:016x}"} if pixels else {}),
            }
        )

    sizes = np.fromiter((file.num_bytes for file in ingested.discovered), np.int64, len(ingested.discovered))
    identities = file_identity(files.digest, sizes[files.source])
    for number, source_file in enumerate(files.source.tolist()):
        if files.reason[number] != CARRIED:
            where: dict[str, Any] = {
                "path": str(ingested.discovered[source_file].path(inputs.roots).absolute())
            }
            where.update(notes.get(number, {}))
            code, study = int(files.reason[number]), int(files.study[number])
            kind = INPUT_KINDS[int(files.kind[number])]
            yield line(
                files.surrogate[number],
                code,
                study,
                kind,
                where,
                int(identities[number]),
                int(files.pixels[number]),
            )
    source = str((inputs.reports or Path()).absolute())
    for number in range(len(reports)):
        if reports.reason[number] != CARRIED:
            where = {"path": source, "place": int(reports.place[number])}
            code, study = int(reports.reason[number]), int(reports.study[number])
            identity = int(reports.identity[number])
            yield line(reports.surrogate[number], code, study, "report", where, identity)


def _accession(studies: StudyTable, study: int) -> dict[str, str]:
    """Return the digest of a study's accession number, by which tables are joined later."""
    digest = 0 if study == NO_STUDY else studies.facts[study].accession
    return {"accession": f"{digest:016x}"} if digest else {}


def page_path(version: int) -> str:
    """Return the path of a version's page.

    Example:
        >>> page_path(1), page_path(2)
        ('report.html', 'report-000002.html')
    """
    return "report.html" if version == 1 else f"report-{version:06d}.html"


def _add_page(output: Path, new: NewVersion, manifest: Manifest, uploader: Uploader | None) -> Manifest:
    """Write the page of a version whose other files exist; return the manifest with the page."""
    dataset = Dataset(LocalStore(output) if uploader is None else uploader.store(manifest), manifest)
    facts = gather(
        dataset,
        num_thumbnails=new.page.num_thumbnails,
        bounds=Bounds(),
        num_threads=min(new.num_threads, _MAX_THREADS),
    )
    page = render_page(
        dataset, facts, kept_keywords=KEYWORDS, max_age_years=MAX_AGE_YEARS, is_inside=True
    ).encode("utf-8")
    path = page_path(manifest.manifest_version)
    return manifest.with_page(write_file(output, path, [page]))


def samples_path(version: int) -> str:
    """Return the path of a version's samples table."""
    return f"samples/samples-{version:06d}.tbl"


def ledger_path(version: int) -> str:
    """Return the path of a version's ledger."""
    return "ledger.jsonl" if version == 1 else f"ledger-{version:06d}.jsonl"


def shard_order(shard: ShardEntry) -> tuple[str, int, str]:
    """Sort key of a manifest's shards: split and number."""
    return shard.split, len(shard.name), shard.name


@dataclass(frozen=True, kw_only=True, slots=True)
class NewVersion:
    """A version to write; its shards already exist."""

    version: int
    parent: str | None
    shards: Sequence[ShardRows]
    """In any order; those without a sample are left out."""
    ledger: LedgerColumns
    created_with: Mapping[str, str]
    config_digest: str | None
    key_id: str | None
    extra: Mapping[str, Any]
    """Facts beside ``num_slices``, ``reasons`` and ``studies``, which are counted here."""
    page: PageConfig
    num_threads: int = 2
    """Number of threads that read for the page."""
    studies: Mapping[str, int] | None = None
    """Studies by outcome; counted from the ledger if not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestVersion:
    """The newest version of a dataset, opened for a removal or a compaction, which ingest nothing."""

    workspace: Workspace
    base: Base
    uploader: Uploader | None

    def replace(
        self,
        shards: Sequence[ShardRows],
        reason: NDArray[np.uint8],
        progress: Progress,
        **extra: Any,
    ) -> Manifest:
        """Write the next version, which takes over everything else.

        Args:
            shards: Shards of the next version; those without a sample are left out.
            reason: ``(num_known,)`` of every input.
            progress: Receives the phases.
            **extra: Changed facts of the manifest.
        """
        base, known, manifest = self.base, self.base.known, self.base.manifest
        new = NewVersion(
            version=base.next_version,
            parent=manifest.dataset_id,
            shards=shards,
            ledger=LedgerColumns(known.surrogate, known.kind, reason, known.study, known.keys),
            created_with=manifest.created_with,
            config_digest=manifest.config_digest,
            key_id=manifest.key_id,
            page=base.page,
            extra={**base.extra, "next_shards": base.next_shards, **extra},
        )
        return write_version(self.workspace, new, progress, self.uploader)


@contextmanager
def open_newest(output: Path, private: Path) -> Iterator[NewestVersion]:
    """Open the newest version for a change, together with its publish target, and clean up afterwards.

    Raises:
        ConfigError: The folders are no dataset and its private folder, or another job works there.
        StorageError: Something cannot be read or written.
    """
    with locked_workspace(output, private) as workspace:
        # It brings clients of object stores, which a job that publishes nowhere writes a version without.
        from shardflow.packing.upload import uploader_of

        base = Base.open(workspace, load(LocalStore(workspace.output)))
        with uploader_of(workspace) as uploader:
            yield NewestVersion(workspace=workspace, base=base, uploader=uploader)
        workspace.remove_work()


def write_version(
    workspace: Workspace,
    new: NewVersion,
    progress: Progress,
    uploader: Uploader | None = None,
    *,
    attach: Callable[[Dataset], object] | None = None,
) -> Manifest:
    """Write samples table, ledger, page, tables of facts and manifest.

    Args:
        workspace: The folders.
        new: The version.
        progress: Receives the phases.
        uploader: Locates shards that are not in the folder.
        attach: Writes tables for the version, which is not published yet.

    Raises:
        AlreadyExistsError: This version exists.
        FormatError: A shard is damaged.
        StorageError: A file cannot be written.
    """
    output = workspace.output
    progress.phase("samples", 0)
    shards = sorted((rows for rows in new.shards if len(rows)), key=lambda rows: shard_order(rows.shard))
    written = write_rows(output, samples_path(new.version), shards)
    entry = written.table
    samples = SamplesTable(Table(LocalStore(output).map(entry.path), name=entry.path))
    progress.phase("ledger", 0)
    ledger = write_ledger(output, ledger_path(new.version), new.ledger)
    manifest = Manifest(
        manifest_version=new.version,
        parent=new.parent,
        shards=tuple(rows.shard for rows in shards),
        samples=entry,
        ledger=ledger,
        counts=OutcomeCounts(**count_outcomes(new.ledger.reason)),
        created_with=new.created_with,
        config_digest=new.config_digest,
        key_id=new.key_id,
        extra={
            **new.extra,
            "num_slices": int(samples.column("num_slices").sum(dtype=np.int64)),
            "reasons": count_reasons(new.ledger.reason),
            "studies": dict(new.studies) if new.studies is not None else _count_studies(new.ledger, samples),
            **written.extra,
        },
    )
    if new.page.enabled:
        progress.phase("page", 0)
        manifest = _add_page(output, new, manifest, uploader)
    # Before the manifest: who sees the version sees its facts.
    progress.phase("facts", len(manifest.shards))
    store = LocalStore(output)
    write_facts(
        Dataset(store if uploader is None else uploader.store(manifest), manifest),
        output,
        parts=workspace.records,
        num_threads=min(new.num_threads, _MAX_THREADS),
        on_shard=lambda _done, _all: progress.advance(),
    )
    write_voxels(Dataset(store, manifest), output, parts=workspace.records)
    former = versions(store)
    if former:
        carry_tables(store, Dataset(store, load(store, former[-1])), Dataset(store, manifest))
    if attach is not None:
        attach(Dataset(store if uploader is None else uploader.store(manifest), manifest))
    remove_strangers(output, [*(load(store, number) for number in versions(store)), manifest])
    progress.phase("manifest", 0)
    commit(store, manifest)
    return manifest


def write_rows(output: Path, path: str, shards: Sequence[ShardRows]) -> SamplesFiles:
    """Write the samples table, a shard at a time.

    Args:
        output: Folder of the dataset.
        path: Of the table.
        shards: In the order of the manifest.

    Raises:
        FormatError: A sample key is doubled, or there are more than 255 modalities.
        StorageError: It cannot be written.
    """
    if repeated_key(lambda: (rows.column("sample_key") for rows in shards), sum(map(len, shards))):
        raise FormatError("sample keys must be unique in a dataset, got one twice.")
    key_num_bytes = 1
    found: set[str] = set()
    for rows in shards:
        key_num_bytes = max(key_num_bytes, int(np.strings.str_len(rows.column("sample_key")).max()))
        found.update(rows.source.modalities[code] for code in np.unique(rows.column("modality")).tolist())
    modalities = sorted(found)
    if len(modalities) > MAX_MODALITIES:
        raise FormatError(f"a dataset must have at most {MAX_MODALITIES} modalities, got {len(modalities)}.")
    codes = {name: code for code, name in enumerate(modalities)}

    def column(number: int, name: str) -> NDArray[Any]:
        rows = shards[number]
        if name != "modality":
            return rows.column(name)
        recoded = np.array([codes.get(one, 0) for one in rows.source.modalities], np.uint8)
        return np.asarray(recoded[rows.column(name)])

    counts = [(rows.shard.split, len(rows)) for rows in shards]
    table = stream_samples(counts, column, key_num_bytes=key_num_bytes, modalities=modalities)
    return SamplesFiles.write(output, path, table)


def remove_strangers(output: Path, manifests: Iterable[Manifest]) -> None:
    """Remove files of unpublished plans and killed writers, which no manifest names.

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
    kept = {manifest.dataset_id for manifest in manifests}
    facts = (kind.folder("*") for kind in (SeriesManifest, StudiesManifest, VoxelsManifest))
    folders = (*facts, f"{TableManifest.root}/*/*")
    for folder in [path for pattern in folders for path in output.glob(pattern)]:
        if folder.name not in kept:
            shutil.rmtree(folder)


def _count_studies(ledger: LedgerColumns, samples: SamplesTable) -> dict[str, int]:
    """Count studies by their worst input; the packed ones are the samples."""
    packed = KeySet(samples.sample_keys())
    left = np.array([key not in packed for key in ledger.keys], np.bool_)
    has_input, is_quarantined = np.zeros(len(left), np.bool_), np.zeros(len(left), np.bool_)
    of_study = ledger.study != NO_STUDY
    has_input[ledger.study[of_study]] = True
    for code in np.unique(ledger.reason).tolist():
        reason = reason_name(code)
        if reason is not None and outcome_of(reason) is Outcome.QUARANTINED:
            is_quarantined[ledger.study[of_study & (ledger.reason == code)]] = True
    return {
        "packed": samples.num_samples,
        "skipped": int((left & has_input & ~is_quarantined).sum()),
        "quarantined": int((left & is_quarantined).sum()),
    }
