"""Entity views: tables to train on, built from the alignments of a dataset shard by shard in processes.

The rows of a view are the present entities of a report that have confident slices, read from what packing
wrote (``alignment.json``, ``report.json``, ``study.json``, ``report.txt``). The rows of a shard are a file of
their own until all shards are done, so a killed job resumes; then the columns of all parts are joined. The
table and then its manifest are written last, and no byte depends on which process wrote which part.
`shardflow.format.entities` opens the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, ShardflowError
from shardflow.format import Dataset
from shardflow.format.codecs import CODECS
from shardflow.format.entities import (
    ASSERTIONS,
    LATER_COLUMNS,
    LATERALITIES,
    MANIFEST_NAME,
    TABLE_KIND,
    TABLE_NAME,
    EntityDataset,
    EntityManifest,
    EntityRules,
    entity_key,
    load_entity_manifest,
    view_folder,
)
from shardflow.format.index import FieldLocation
from shardflow.format.keys import (
    REPORT_FIELD,
    STUDY_FIELD,
    Json,
    check_sample_key,
    parse_slice_field,
    sha256_hex,
)
from shardflow.format.table import Table, encode_table
from shardflow.format.tables import ColumnValues
from shardflow.reports.entity_rows import (
    ALIGNMENT_FIELD,
    CONTENT_FIELD,
    Correction,
    Corrections,
    EntityRow,
    finding_key,
    study_rows,
)
from shardflow.reports.lexicon import CLASSES, IDS, load_lexicon
from shardflow.reports.reader import rules_digest
from shardflow.sampling.expressions import Expression, ExpressionColumn, parse_expression
from shardflow.storage import LocalStore, write_atomic

_PART_KIND = "entities-part"
_VERSION = 1
_CODED = {"label": "labels", "anatomy": "anatomies", "modality": "modalities", **LATER_COLUMNS}
"""Columns whose names are known when all parts are there, and where the table lists them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocatedRow:
    """A row, and the study that it points into."""

    row: EntityRow
    study: int
    """Row of the samples table."""
    study_key: str
    shard: int
    row_in_shard: int
    num_bytes: int
    """Of the fields that are read for it."""


def encode_part(
    rows: Sequence[LocatedRow],
    *,
    num_aligned: int,
    job: Mapping[str, Json],
    left_out: Mapping[str, int] | None = None,
) -> bytes:
    """Encode the rows of a shard.

    Args:
        rows: In the order of the samples table.
        num_aligned: Studies of the shard that have an alignment.
        job: What the part was made for: another job's is not taken.
        left_out: Findings of the shard that are no rows, by reason.
    """
    found = [located.row for located in rows]
    names = {several: sorted({str(getattr(row, one)) for row in found}) for one, several in _CODED.items()}
    keys = [entity_key(one.study_key, one.row.entity, one.row.series) for one in rows]
    sizes = np.array([one.num_bytes for one in rows], "<u8")
    lengths = np.array([len(row.slices) for row in found], "<u8")
    columns: dict[str, NDArray[Any]] = {
        "sample_key": np.array([check_sample_key(key).encode("ascii") for key in keys], "S"),
        "shard": np.array([one.shard for one in rows], "<u4"),
        "row_in_shard": np.array([one.row_in_shard for one in rows], "<u4"),
        # Not where the study begins: what the rows of the shard read, one behind another.
        "offset_bytes": np.cumsum(sizes, dtype="<u8") - sizes,
        "num_bytes": sizes,
        "text_bytes": _numbers([row.text[1] - row.text[0] for row in found]),
        "num_series": _numbers([1] * len(found)),
        "num_slices": lengths.astype("<u4"),
        "rows": _numbers([row.rows for row in found]),
        "columns": _numbers([row.columns for row in found]),
        "modality": _codes([row.modality for row in found], names["modalities"]).astype("u1"),
        **{
            one: _codes([str(getattr(row, one)) for row in found], names[_CODED[one]]).astype("u1")
            for one in ("kind", "section", "certainty", "change", "severity", "reader")
        },
        "probability": np.array([row.probability for row in found], "<f8"),
        "size_mm": np.array([row.size_mm for row in found], "<f4"),
        "study": _numbers([one.study for one in rows]),
        "entity": _numbers([row.entity for row in found]),
        "series": _numbers([row.series for row in found]),
        "centre": _numbers([row.centre for row in found]),
        "text_start": _numbers([row.text[0] for row in found]),
        "span_start": _numbers([row.span[0] for row in found]),
        "span_bytes": _numbers([row.span[1] - row.span[0] for row in found]),
        "label": _codes([row.label for row in found], names["labels"]),
        "anatomy": _codes([row.anatomy for row in found], names["anatomies"]),
        "assertion": _codes([row.assertion for row in found], ASSERTIONS).astype("u1"),
        "laterality": _codes([row.laterality for row in found], LATERALITIES).astype("u1"),
        "confidence": np.array([row.confidence for row in found], "<f8"),
        "first_slice": np.concatenate(([0], np.cumsum(lengths))).astype("<u8"),
        "slices": _numbers([index for row in found for index in row.slices]),
        "slice_weights": np.array([weight for row in found for weight in row.weights], "<f4"),
    }
    meta: dict[str, Json] = {"kind": _PART_KIND, "format_version": _VERSION, "num_aligned": num_aligned}
    meta["left_out"] = dict(sorted((left_out or {}).items()))
    return encode_table(columns, {**meta, "job": dict(job), **{name: list(of) for name, of in names.items()}})


def open_part(data: bytes, *, name: str, job: Mapping[str, Json]) -> Table | None:
    """Return a part with all of its bytes checked; None for that of another job.

    Raises:
        FormatError: It is no part.
        ChecksumError: It is damaged.
    """
    table = Table(memoryview(data), name=name)
    table.expect_kind(_PART_KIND, _VERSION)
    table.verify()
    return table if table.meta.get("job") == dict(job) else None


def encode_view(
    parts: Sequence[Table], *, dataset_id: str, rules: EntityRules, splits: Mapping[str, range]
) -> bytes:
    """Encode the table of a view.

    Args:
        parts: Of all shards, in the order of the samples table; one at least.
        dataset_id: Of the dataset.
        rules: Of the view.
        splits: The rows of each split in the samples table.
    """
    names: dict[str, list[str]] = {
        key: sorted({name for part in parts for name in part.meta[key]}) for key in _CODED.values()
    }
    # A finding without a place has number 0.
    names["anatomies"] = ["", *(name for name in names["anatomies"] if name)]
    columns = {name: _joined(parts, name, names) for name in parts[0].column_names}
    study = columns["study"]
    bounds = {
        split: np.searchsorted(study, [rows.start, rows.stop]).tolist()
        for split, rows in sorted(splits.items())
    }
    meta: dict[str, Json] = {
        "kind": TABLE_KIND,
        "format_version": _VERSION,
        "dataset_id": dataset_id,
        "rules": rules.to_json(),
        "splits": {split: span for split, span in bounds.items() if span[0] < span[1]},
        **{key: list(values) for key, values in names.items()},
        "label_facts": label_facts(names["labels"]),
    }
    return encode_table(columns, meta)


def label_facts(labels: Sequence[str]) -> dict[str, Json]:
    """Return what an expression finds each label by beside its name, and its codes and classes."""
    lexicon = load_lexicon()
    names = {label: label_names(label) for label in labels}
    facts: dict[str, Json] = {"also": [sorted(names[label] - {label}) for label in labels]}
    for scheme in (*IDS, *CLASSES):
        facts[scheme] = [lexicon.codes(label)[scheme] for label in labels]
    return facts


def label_names(label: str) -> set[str]:
    """Return all that finds a label: its own names and its ancestors', in the singular and the plural."""
    lexicon = load_lexicon()
    concept = lexicon.concepts.get(label)
    if concept is None:
        return {label}
    return {label, *lexicon.ancestors(concept), *_names_of().get(label, ())}


@cache
def _names_of() -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for phrase, concept in load_lexicon().phrases.items():
        names.setdefault(concept.name, []).append(phrase)
    return names


def _joined(parts: Sequence[Table], name: str, names: Mapping[str, list[str]]) -> NDArray[Any]:
    """Return a column of all parts."""
    found = [part.column(name) for part in parts]
    if name == "first_slice":
        before = np.cumsum([0, *(int(column[-1]) for column in found)])
        shifted = [column[:-1] + first for column, first in zip(found, before.tolist(), strict=False)]
        return np.concatenate([*shifted, before[-1:]]).astype("<u8")
    if name in _CODED:
        known = {value: number for number, value in enumerate(names[_CODED[name]])}
        found = [
            np.array([known[value] for value in part.meta[_CODED[name]]] or [0], column.dtype)[column]
            for part, column in zip(parts, found, strict=True)
        ]
    return np.concatenate(found)


def _numbers(values: Sequence[int]) -> NDArray[np.uint32]:
    return np.array(values, "<u4")


def _codes(values: Sequence[str], names: Sequence[str]) -> NDArray[np.uint32]:
    numbers = {name: number for number, name in enumerate(names)}
    return _numbers([numbers[value] for value in values])


_COMPOSITION = ("kind", "section", "assertion", "label", "reader")
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
    left_out: Mapping[str, int]
    """Findings with slices that are no rows, by reason."""
    composition: Mapping[str, Mapping[str, int]]
    """Rows by kind, section, assertion, label and reader, the most frequent first."""
    is_new: bool
    """Whether this job made it; else it stood there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Job description that each process receives."""

    url: str
    version: int
    folder: Path
    rules: EntityRules
    corrections: Mapping[str, Correction]

    def of(self, dataset: Dataset, rows: range) -> dict[str, Json]:
        """Return what the part of a shard was made for."""
        return {
            "dataset_id": dataset.dataset_id,
            "rules": self.rules.to_json(),
            "reader": rules_digest(),
            "rows": [rows.start, rows.stop],
        }


def build_view(
    dataset: Dataset,
    rules: EntityRules,
    *,
    name: str = "entity",
    num_processes: int = 1,
    on_shard: Progress | None = None,
    corrections: Corrections | None = None,
) -> BuiltView:
    """Make a view of a dataset's entities, beside the dataset.

    Args:
        dataset: A packed dataset in a folder.
        rules: Which entities count.
        name: Of the view; a dataset may have several.
        num_processes: How many read; the table does not depend on it.
        on_shard: Told how many shards are done, and of how many.
        corrections: What a person says of findings (`shardflow.reports.review`); part of the rules.

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
    _condition(rules)
    if corrections is not None:
        rules = replace(rules, corrections=corrections.digest)
    folder = dataset.store.root / view_folder(name, dataset.dataset_id)
    if (folder / MANIFEST_NAME).is_file():
        return _standing(dataset, rules, name)
    job = _Job(
        url=str(dataset.store.root),
        version=dataset.manifest_version,
        folder=folder,
        rules=rules,
        corrections={} if corrections is None else corrections.of,
    )
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
        left_out=dict(sorted(sum((Counter(part.meta["left_out"]) for part in parts), Counter()).items())),
    )
    write_atomic(folder / TABLE_NAME, [table], replace=True)
    write_atomic(folder / MANIFEST_NAME, [manifest.encode()], replace=True)
    _clear(folder, len(shards))
    return _summary(dataset, manifest, name, is_new=True)


def _standing(dataset: Dataset, rules: EntityRules, name: str) -> BuiltView:
    """Return the view that is there."""
    manifest = load_entity_manifest(dataset.store, dataset.manifest, name)
    if manifest.rules != rules:
        raise ConfigError(
            f"a view must keep the rules it was made with, got others for {name!r} (threshold "
            f"{manifest.rules.threshold}, context_slices {manifest.rules.context_slices}, text "
            f"{manifest.rules.text}, where {manifest.rules.where or 'left out'}); give these another name."
        )
    return _summary(dataset, manifest, name, is_new=False)


def _summary(dataset: Dataset, manifest: EntityManifest, name: str, *, is_new: bool) -> BuiltView:
    rows = EntityDataset.beside(dataset, name).samples
    named = {column: rows.vocabularies.get(column, ()) for column in _COMPOSITION}
    return BuiltView(
        name=name,
        view_id=manifest.digest,
        dataset_id=manifest.dataset_id,
        num_studies=manifest.num_studies,
        num_entities=manifest.num_entities,
        threshold=manifest.rules.threshold,
        left_out=manifest.left_out,
        composition={
            column: dict(Counter(names[code] for code in rows.column(column).tolist()).most_common())
            for column, names in named.items()
            if names
        },
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
    num_aligned, left_out = 0, Counter[str]()
    for study in rows:
        _, locations = dataset.sample_fields(study)
        names = [location.name for location in locations if location.name in _FIELDS]
        if ALIGNMENT_FIELD not in names:
            continue
        num_aligned += 1
        key = dataset.studies.sample_key(study)
        sizes = _sizes(locations)
        for series, volume in dataset.volumes(study).items():
            each = volume.slice_num_bytes.tolist()
            sizes |= {(series, place): num_bytes for place, num_bytes in enumerate(each)}
        try:
            here = list(study_rows(dataset.read_fields(study, names), job.rules))
            corrected = {
                row.entity: job.corrections[finding_key(key, row.entity)]
                for row in here
                if finding_key(key, row.entity) in job.corrections
            }
            for row in choose(here, job.rules, left_out, corrected):
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
    return encode_part(found, num_aligned=num_aligned, job=job.of(dataset, rows), left_out=left_out)


_WORDS = (
    "label",
    "anatomy",
    "assertion",
    "laterality",
    "kind",
    "section",
    "certainty",
    "change",
    "severity",
    "reader",
)
_NUMBERS = ("confidence", "probability", "size_mm")


def _condition(rules: EntityRules) -> Expression | None:
    """Return the condition of a view.

    Raises:
        ConfigError: It is no expression of these columns.
    """
    return parse_expression(rules.where, (*_WORDS, *_NUMBERS, "modality")) if rules.where else None


def choose(
    rows: Sequence[EntityRow],
    rules: EntityRules,
    left_out: Counter[str],
    corrected: Mapping[int, Correction] | None = None,
) -> list[EntityRow]:
    """Return the findings that become rows.

    Args:
        rows: Of a study.
        rules: Of the view.
        left_out: Is told how many do not, by reason: a person, the condition, by what it was about, or the
            threshold.
        corrected: What a person says, by number of the entity.
    """
    if corrected:
        rows = [_corrected(row, corrected.get(row.entity)) for row in rows]
        left_out["corrected"] += sum(row.assertion not in ASSERTIONS for row in rows)
        rows = [row for row in rows if row.assertion in ASSERTIONS]
    kept = chosen(rows, rules, left_out)
    above = [row for row in kept if row.is_above(rules.threshold)]
    left_out["below the threshold"] += len(kept) - len(above)
    return above


def _corrected(row: EntityRow, correction: Correction | None) -> EntityRow:
    """Return a row as a person corrected it; what a person has seen is there, if it is present."""
    if correction is None:
        return row
    assertion = correction.assertion or row.assertion
    is_sure = assertion == "present"
    return replace(
        row,
        label=correction.label or row.label,
        assertion=assertion,
        probability=1.0 if is_sure else row.probability,
        certainty="" if is_sure else row.certainty,
    )


def chosen(rows: Sequence[EntityRow], rules: EntityRules, left_out: Counter[str]) -> list[EntityRow]:
    """Return the findings for which the condition is true, and count the others."""
    condition = _condition(rules)
    if condition is None or not rows:
        return list(rows)
    columns: dict[str, ExpressionColumn] = {name: _column(rows, name) for name in condition.names}
    is_chosen = condition.select(columns, len(rows)).rows.tolist()
    for row, is_kept in zip(rows, is_chosen, strict=True):
        if not is_kept:
            left_out[f"{row.kind}, {row.assertion}, in {row.section}"] += 1
    return [row for row, is_kept in zip(rows, is_chosen, strict=True) if is_kept]


def _column(rows: Sequence[EntityRow], name: str) -> ColumnValues:
    values = [getattr(row, name) for row in rows]
    if name in _NUMBERS:
        numbers = np.array(values, float)
        return ColumnValues(numbers, np.isnan(numbers))
    names = tuple(sorted({str(value) for value in values}))
    also = tuple(frozenset(label_names(one)) for one in names) if name == "label" else None
    codes = _codes([str(value) for value in values], names)
    return ColumnValues(codes, np.array([not value for value in values], bool), names, also)


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
