"""Entity views: tables to train on, built from the alignments of a dataset shard by shard in processes.

The rows of a view are the present entities of a report that have confident slices, read from what packing
wrote (``alignment.json``, ``report.json``, ``study.json``, ``report.txt``). The rows of a shard are a file of
their own until all shards are done, so a killed job resumes; then the columns of all parts are joined. The
table and then its manifest are written last, and no byte depends on which process wrote which part.
`shardflow.format.entities` opens the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
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
    LATERALITIES,
    MANIFEST_NAME,
    TABLE_KIND,
    TABLE_NAME,
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
from shardflow.reports.lexicon import tokenize
from shardflow.storage import LocalStore, write_atomic

ALIGNMENT_FIELD = "alignment.json"
CONTENT_FIELD = "report.json"
_FORMAT_VERSION = 1

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class EntityRow:
    """A row, but for the bytes it reads."""

    entity: int
    series: int
    slices: list[int]
    """Indices in the series, ascending; the context among them."""
    weights: list[float]
    """Of each slice; 0 in the context."""
    centre: int
    """Place of the weightiest slice; of several the middle one."""
    text: Span
    """Bytes of the report."""
    span: Span
    """Bytes of the report that name the entity, inside ``text``."""
    label: str
    anatomy: str
    assertion: str
    laterality: str
    confidence: float
    rows: int
    columns: int
    modality: str


def study_rows(fields: Mapping[str, bytes], rules: EntityRules) -> Iterator[EntityRow]:
    """Yield the rows of a study, by number of the entity and of the series.

    Args:
        fields: The four fields of the study; without an alignment or a report it has no rows.
        rules: Which entities count.

    Raises:
        FormatError: The fields do not fit each other; the message names the field, and none of its content.
    """
    if not {ALIGNMENT_FIELD, CONTENT_FIELD, REPORT_FIELD} <= fields.keys():
        return
    alignment, content = _parsed(fields, ALIGNMENT_FIELD), _parsed(fields, CONTENT_FIELD)
    study = json.loads(fields[STUDY_FIELD])
    try:
        text = fields[REPORT_FIELD].decode("utf-8")
        places = _TextPlaces(text, [_body(section) for section in content["sections"]], rules)
        for entry in _ordered(alignment["entities"]):
            if not float(entry["confidence"]) > rules.threshold:
                continue
            entity = _item(content["entities"], entry["entity"])
            if entity["assertion"] in ASSERTIONS:
                series = _item(study["series"], entry["series"])
                yield _row(entry, entity, series, places, rules)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(
            f"{ALIGNMENT_FIELD} must name entities of {CONTENT_FIELD} and slices of {STUDY_FIELD}, got "
            f"{type(error).__name__} on reading them; pack the study again."
        ) from None


def _row(
    entry: Mapping[str, Any],
    entity: Mapping[str, Any],
    series: Mapping[str, Any],
    places: _TextPlaces,
    rules: EntityRules,
) -> EntityRow:
    num_slices = int(series["num_slices"])
    weights: dict[int, float] = {}
    for index, weight in zip(entry["slices"], entry["weights"], strict=True):
        if not (0 <= index < num_slices and 0 <= weight <= 1) or index in weights:
            raise ValueError
        weights[int(index)] = float(weight)
    for index in sorted(weights):
        for near in range(index - rules.context_slices, index + rules.context_slices + 1):
            if 0 <= near < num_slices:
                weights.setdefault(near, 0.0)
    slices = sorted(weights)
    heaviest = [place for place, index in enumerate(slices) if weights[index] == max(weights.values())]
    anatomy = entity.get("anatomy")
    span = places.entity(entity["span"])
    if entity["laterality"] not in LATERALITIES or not 0 <= float(entry["confidence"]) <= 1:
        raise ValueError
    return EntityRow(
        entity=int(entry["entity"]),
        series=int(entry["series"]),
        slices=slices,
        weights=[weights[index] for index in slices],
        centre=heaviest[(len(heaviest) - 1) // 2],
        text=places.text(entity["span"]),
        span=span,
        label=str(entity["concept"]),
        anatomy=str(anatomy["name"]) if anatomy else "",
        assertion=str(entity["assertion"]),
        laterality=str(entity["laterality"]),
        confidence=float(entry["confidence"]),
        rows=int(series["rows"]),
        columns=int(series["columns"]),
        modality=str(series.get("modality") or ""),
    )


class _TextPlaces:
    """From characters of a report to the bytes that go with an entity."""

    def __init__(self, text: str, bodies: Sequence[Span], rules: EntityRules) -> None:
        self._text, self._bodies, self._kind = text, bodies, rules.text
        self._sentences: list[Span] | None = None

    def entity(self, span: Sequence[int]) -> Span:
        """Return the bytes of the entity's own words."""
        first, last = span
        if not 0 <= first < last <= len(self._text):
            raise ValueError
        return self._bytes(first, last)

    def text(self, span: Sequence[int]) -> Span:
        """Return the bytes of the text that the rules ask for."""
        first, last = span
        if self._kind == "report":
            return self._bytes(0, len(self._text))
        if self._kind == "sentence":
            # Of words that cross its end, the sentences that they touch.
            touched = [one for one in self._all_sentences() if one[0] < last and first < one[1]]
            first = min([first, *(start for start, _ in touched)])
            last = max([last, *(stop for _, stop in touched)])
        return self._bytes(first, last)

    def _all_sentences(self) -> list[Span]:
        """Return the sentences of all sections; a header is in none of them."""
        if self._sentences is None:
            self._sentences = []
            for start, stop in self._bodies:
                tokens = tokenize(self._text[start:stop])
                self._sentences += [
                    (start + tokens.starts[first], start + tokens.ends[last - 1])
                    for first, last in tokens.sentences
                ]
        return self._sentences

    def _bytes(self, first: int, last: int) -> Span:
        before = len(self._text[:first].encode())
        return before, before + len(self._text[first:last].encode())


def _ordered(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the alignments by entity and series; each pair stands once."""
    found = {(int(entry["entity"]), int(entry["series"])): entry for entry in entries}
    if len(found) != len(entries):
        raise ValueError
    return [found[place] for place in sorted(found)]


def _body(section: Mapping[str, Any]) -> Span:
    return int(section["header"][1]), int(section["span"][1])


def _item(items: Sequence[Any], number: int) -> Any:
    if not 0 <= number < len(items):  # a negative number would count from the end
        raise IndexError
    return items[number]


def _parsed(fields: Mapping[str, bytes], name: str) -> Any:
    try:
        value = json.loads(fields[name])
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{name} must be JSON, got {type(error).__name__} on reading it; pack the study again."
        ) from None
    if not isinstance(value, dict) or value.get("format_version") != _FORMAT_VERSION:
        raise FormatError(
            f"{name} must be of format {_FORMAT_VERSION}, got another; a newer one needs a newer shardflow."
        )
    return value


_PART_KIND = "entities-part"
_VERSION = 1
_CODED = {"label": "labels", "anatomy": "anatomies", "modality": "modalities"}
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


def encode_part(rows: Sequence[LocatedRow], *, num_aligned: int, job: Mapping[str, Json]) -> bytes:
    """Encode the rows of a shard.

    Args:
        rows: In the order of the samples table.
        num_aligned: Studies of the shard that have an alignment.
        job: What the part was made for: another job's is not taken.
    """
    found = [located.row for located in rows]
    names = {
        "labels": sorted({row.label for row in found}),
        "anatomies": sorted({row.anatomy for row in found}),
        "modalities": sorted({row.modality for row in found}),
    }
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
        "rules": {**asdict(rules), "threshold": repr(float(rules.threshold))},
        "splits": {split: span for split, span in bounds.items() if span[0] < span[1]},
        **{key: list(values) for key, values in names.items()},
    }
    return encode_table(columns, meta)


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
    is_new: bool
    """Whether this job made it; else it stood there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Job description that each process receives."""

    url: str
    version: int
    folder: Path
    rules: EntityRules

    def of(self, dataset: Dataset, rows: range) -> dict[str, Json]:
        """Return what the part of a shard was made for."""
        rules: dict[str, Json] = {**asdict(self.rules), "threshold": repr(float(self.rules.threshold))}
        return {"dataset_id": dataset.dataset_id, "rules": rules, "rows": [rows.start, rows.stop]}


def build_view(
    dataset: Dataset,
    rules: EntityRules,
    *,
    name: str = "entity",
    num_processes: int = 1,
    on_shard: Progress | None = None,
) -> BuiltView:
    """Make a view of a dataset's entities, beside the dataset.

    Args:
        dataset: A packed dataset in a folder.
        rules: Which entities count.
        name: Of the view; a dataset may have several.
        num_processes: How many read; the table does not depend on it.
        on_shard: Told how many shards are done, and of how many.

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
    folder = dataset.store.root / view_folder(name, dataset.dataset_id)
    if (folder / MANIFEST_NAME).is_file():
        return _standing(dataset, rules, name)
    job = _Job(url=str(dataset.store.root), version=dataset.manifest_version, folder=folder, rules=rules)
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
    )
    write_atomic(folder / TABLE_NAME, [table], replace=True)
    write_atomic(folder / MANIFEST_NAME, [manifest.encode()], replace=True)
    _clear(folder, len(shards))
    return _summary(manifest, name, is_new=True)


def _standing(dataset: Dataset, rules: EntityRules, name: str) -> BuiltView:
    """Return the view that is there."""
    manifest = load_entity_manifest(dataset.store, dataset.manifest, name)
    if manifest.rules != rules:
        raise ConfigError(
            f"a view must keep the rules it was made with, got others for {name!r} (threshold "
            f"{manifest.rules.threshold}, context_slices {manifest.rules.context_slices}, text "
            f"{manifest.rules.text}); give these another name."
        )
    return _summary(manifest, name, is_new=False)


def _summary(manifest: EntityManifest, name: str, *, is_new: bool) -> BuiltView:
    return BuiltView(
        name=name,
        view_id=manifest.digest,
        dataset_id=manifest.dataset_id,
        num_studies=manifest.num_studies,
        num_entities=manifest.num_entities,
        threshold=manifest.rules.threshold,
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
    num_aligned = 0
    for study in rows:
        _, locations = dataset.sample_fields(study)
        names = [location.name for location in locations if location.name in _FIELDS]
        if ALIGNMENT_FIELD not in names:
            continue
        num_aligned += 1
        key = dataset.studies.sample_key(study)
        sizes = _sizes(locations)
        try:
            for row in study_rows(dataset.read_fields(study, names), job.rules):
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
    return encode_part(found, num_aligned=num_aligned, job=job.of(dataset, rows))


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
