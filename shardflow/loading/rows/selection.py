"""Selection of the samples to iterate over: splits of a dataset, a part of them, or a blend of datasets.

``where`` is an expression over columns (`shardflow.fields.where`), ``keys`` a text file with one sample key
per line, or ``sha256:`` and the SHA-256 of a key. Only the resulting rows count: their digest is part of the
plan's identity, the words are not.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, ConfigError, os_reason
from shardflow.fields.field import by_rows
from shardflow.fields.units import DerivedDataset, open_unit, unit_of
from shardflow.fields.where import Where
from shardflow.format import Dataset
from shardflow.format.entities import EntityDataset, EntityPlace
from shardflow.format.keys import SAMPLE_KEY_PATTERN
from shardflow.format.tokens import COUNT_COLUMN, open_counts
from shardflow.sampling import BatchSpec, CostRule, EpochPlan, LoaderState, SampleLayout, choose_lanes
from shardflow.sampling.blend import BLEND_SPLIT, Blend, Mixture, blend_layout
from shardflow.sampling.layout import (
    EvenOffsets,
    ListedRows,
    Rows,
    chosen_layout,
    mask_of,
    rows_digest,
    select_rows,
)
from shardflow.sampling.spec import Sampling
from shardflow.storage import LocalStore

_LOGGER = logging.getLogger(__name__)
_DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SEPARATOR = "+"
FULL_STUDY = "full_study"
"""View whose samples are whole studies."""
Int64Array = NDArray[np.int64]
_MAX_ASCII = 127


def listed_rows(dataset: Dataset, spans: Sequence[range], path: Path) -> Rows:
    """Return the rows of the samples that a file lists.

    Args:
        dataset: The dataset.
        spans: Rows of the splits that contain the samples, ascending.
        path: File with one sample key per line, or ``sha256:`` and its SHA-256; blank lines are ignored.

    Raises:
        ConfigError: The file cannot be read, or a line is no key, is repeated, or names no sample.
    """
    keys, digests = _read_list(path)
    column = dataset.samples.column("sample_key")
    wanted = np.array(sorted(keys), "S") if keys else np.zeros(0, "S1")
    is_found = np.zeros(len(wanted), bool)
    seen: set[bytes] = set()

    def choose(start: int, stop: int) -> NDArray[np.bool_]:
        inside = np.zeros(stop - start, bool)
        for span in spans:
            inside[max(span.start - start, 0) : max(span.stop - start, 0)] = True
        block = column[start:stop]
        chosen = np.zeros(len(block), bool)
        if len(wanted):
            place = np.minimum(np.searchsorted(wanted, block), len(wanted) - 1)
            chosen = (wanted[place] == block) & inside
            is_found[place[chosen]] = True
        if digests:
            hits = [hashlib.sha256(key).digest() for key in block.tolist()]
            is_listed = np.array([hit in digests for hit in hits], bool) & inside
            seen.update(hits[number] for number in np.flatnonzero(is_listed).tolist())
            chosen |= is_listed
        return chosen

    rows = select_rows(range(spans[0].start, spans[-1].stop), choose)
    num_missing = len(wanted) - int(is_found.sum()) + len(digests) - len(seen)
    if num_missing:
        unknown = next(iter(wanted[~is_found].tolist()), b"")
        example = f"{unknown.decode('ascii')} the first" if unknown else "all of them as digests"
        raise ConfigError(
            f"every line of a key list must be a sample of the split, got {num_missing:,} that are not, "
            f"{example} ({path.name}); correct the list or the split."
        )
    return rows


def _read_list(path: Path) -> tuple[set[bytes], set[bytes]]:
    """Return the keys of a list, and the digests."""
    keys: set[bytes] = set()
    digests: set[bytes] = set()
    for number, line in _lines(path):
        if line.startswith(_DIGEST_PREFIX):
            digest = line.removeprefix(_DIGEST_PREFIX)
            if not _DIGEST.fullmatch(digest):
                raise ConfigError(
                    f"a digest in a key list must be 64 hexadecimal digits, got {len(digest)} characters "
                    f"(line {number} of {path.name}); correct it."
                )
            target, entry = digests, bytes.fromhex(digest)
        elif SAMPLE_KEY_PATTERN.fullmatch(line):
            target, entry = keys, line.encode("ascii")
        else:
            # The line is not quoted: a file that is no key list may contain anything.
            raise ConfigError(
                f"a line of a key list must be a sample key, got {len(line)} characters that are none (line "
                f"{number} of {path.name}); sample keys are 1 to 64 of a-z and 0-9."
            )
        if entry in target:
            raise ConfigError(
                f"a key list must name a sample once, got {line} a second time (line {number} of "
                f"{path.name}); remove the line."
            )
        target.add(entry)
    both = next((key for key in keys if digests and hashlib.sha256(key).digest() in digests), None)
    if both is not None:
        raise ConfigError(
            f"a key list must name a sample once, got {both.decode('ascii')} as key and as digest "
            f"({path.name}); remove one."
        )
    if not keys and not digests:
        raise ConfigError(f"a key list must hold at least one line, got none ({path.name}); correct it.")
    return keys, digests


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines with their numbers, from 1."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.strip()
    except FileNotFoundError:
        raise ConfigError(
            f"the key list must exist, got no file of the name {path.name!r}; correct the path."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the key list must be a text file that can be read, got {os_reason(error)} "
            f"({path.name}); check it."
        ) from None


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows of one or several splits, or a subset of them."""

    split: str
    """Name of the split; several are joined by ``+``, in the order of the table."""
    rows: Rows
    digest: str | None
    """Digest of the rows, if they are not all of the splits."""
    num_missing: int = 0
    """Rows of the splits that an expression leaves out because a value is missing."""
    tables: tuple[str, ...] = ()
    """Names of the attached tables that the expression reads."""


def choose_rows(
    dataset: Dataset, split: str, where: str | None = None, keys: str | os.PathLike[str] | None = None
) -> SplitRows:
    """Return the rows of a split, or of several such as ``train+val``, or a part of them.

    Args:
        dataset: The dataset.
        split: Names of splits, joined by ``+``.
        where: Expression that is true for the rows, see `shardflow.fields.where`; None for all. Rows that it
            leaves out because a value is missing are counted and logged.
        keys: File of sample keys, see `listed_rows`; None for all.

    Raises:
        ConfigError: There is no such split, column or key, the expression is malformed, or no sample is left.
    """
    names = split_names(dataset, split)
    spans = [dataset.splits[name] for name in names]
    joined, whole = _SEPARATOR.join(names), sum(len(span) for span in spans)
    hull = range(spans[0].start, spans[-1].stop)
    tables = dataset.where_tables if isinstance(dataset, DerivedDataset) else ()
    if where is None and keys is None and whole == len(hull):
        return SplitRows(joined, hull, None, tables=tables)
    condition = None if where is None else Where(dataset, where)
    tables = tables if condition is None else condition.tables
    listed = None if keys is None else listed_rows(dataset, spans, Path(keys).expanduser())
    num_missing = 0

    def choose(start: int, stop: int) -> NDArray[np.bool_]:
        nonlocal num_missing
        chosen = np.zeros(stop - start, bool)
        for span in spans:
            chosen[max(span.start - start, 0) : max(span.stop - start, 0)] = True
        if listed is not None:
            chosen &= mask_of(listed, start, stop)
        if condition is not None:
            selected = condition.select(start, stop)
            num_missing += int(np.count_nonzero(chosen & selected.is_missing))
            chosen &= selected.rows
        return chosen

    rows = select_rows(hull, choose)
    missing = f"; {num_missing:,} lack a value that it compares" if num_missing else ""
    if not rows:
        raise ConfigError(
            f"where= selects none of the {whole:,} samples of split {split!r}{missing}; loosen it. "
            "`shardflow columns DATASET NAME` lists the values of a column."
        )
    if condition is not None:
        _LOGGER.info("where= selects %d of %d samples of split %s%s", len(rows), whole, joined, missing)
    digest = None if len(rows) == whole else rows_digest(rows)
    return SplitRows(joined, rows, digest, num_missing, tables)


def split_names(dataset: Dataset, split: str) -> list[str]:
    """Return the splits that ``split`` names, in the order of the samples table.

    Raises:
        ConfigError: A split is unknown, empty or named twice.
    """
    given: object = split
    if not isinstance(given, str):
        raise ConfigError(f"split is a name such as 'train', or several as 'train+val', got {given!r}.")
    names = [name.strip() for name in split.split(_SEPARATOR)]
    known = dataset.splits
    for name in names:
        if not known.get(name):
            held = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"split must be one that holds samples ({held}), got {name!r}; correct it.")
    if len(set(names)) < len(names):
        raise ConfigError(f"split must name each split once, got {split!r}; remove the second one.")
    return sorted(names, key=lambda name: known[name].start)


def rows_layout(
    dataset: Dataset,
    rows: Rows | ListedRows,
    spec: BatchSpec,
    delivered: Mapping[str, NDArray[Any]] | None = None,
) -> SampleLayout:
    """Return the places of some samples, with the facts that a batch spec needs.

    Args:
        dataset: The dataset.
        rows: Rows of its own table.
        spec: How steps are formed.
        delivered: What fields deliver of each row, see `Selection.delivered`.

    Raises:
        ConfigError: The cost rule names a tokenizer whose token counts are not stored with the dataset.
        PlanError: The samples table is not ordered by shard and offset.
    """
    column = dataset.samples.column
    facts = {} if spec.budget is None else _facts(dataset, spec.budget.cost, delivered)
    shard, num_bytes = column("shard"), column("num_bytes")
    if not isinstance(rows, range):
        return chosen_layout(
            rows, dataset_id=dataset.dataset_id, shard=shard, num_bytes=num_bytes, facts=facts
        )
    layout = SampleLayout.of_columns(
        rows,
        dataset_id=dataset.dataset_id,
        shard=shard,
        offset_bytes=column("offset_bytes"),
        num_bytes=num_bytes,
        facts=facts,
    )
    if not isinstance(dataset, DerivedDataset):
        return layout
    # Where a series is stored is an estimate anyway; two numbers per shard are as good, and much faster.
    sizes = num_bytes[rows.start : rows.stop]
    shard_bytes = np.add.reduceat(sizes, layout.shard_rows[:-1] - rows.start)
    offsets = EvenOffsets(layout.shard_rows, shard_bytes)
    return replace(layout, offset_bytes=offsets, shard_end_bytes=shard_bytes)


class RowNumbers:
    """Row numbers as a column of the samples table, for choices of the plan that are keyed by row.

    Args:
        num_rows: Rows of the table.
    """

    __slots__ = ("dtype", "ndim", "shape")

    def __init__(self, num_rows: int) -> None:
        self.dtype, self.ndim, self.shape = np.dtype(np.int64), 1, (num_rows,)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return np.arange(*key.indices(len(self)), dtype=np.int64)
        return np.asarray(key, np.int64)


def text_lengths(dataset: Dataset, rule: CostRule) -> Any:
    """Return the column of text tokens or bytes that a cost rule charges for, by row of the dataset.

    Raises:
        ConfigError: The tokens of its tokenizer are not stored with the dataset.
    """
    if not rule.tokenizer:
        return dataset.samples.column("text_bytes")
    counts = open_counts(dataset, rule.tokenizer)
    return by_rows(dataset, counts) if isinstance(dataset, DerivedDataset) else counts


def _facts(
    dataset: Dataset, rule: CostRule, delivered: Mapping[str, NDArray[Any]] | None = None
) -> dict[str, Any]:
    if rule.counted or rule.counts_delivered:
        if delivered is None:
            raise ConfigError(
                "A cost rule of what is delivered needs the fields of a loader; pass its batch spec to a "
                "Loader, or leave it out."
            )
        texts = COUNT_COLUMN if rule.tokenizer else "text_bytes"
        return {name: delivered[name.replace(texts, "text")] for name in rule.used_facts()}
    facts: dict[str, Any] = {}
    for name in rule.used_facts():
        if name == COUNT_COLUMN:
            facts[name] = text_lengths(dataset, rule)
        elif name == "row":
            facts[name] = RowNumbers(dataset.samples.num_samples)
        else:
            facts[name] = dataset.samples.column(name)
    return facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Arguments of `select` that its datasets do not know."""

    split: str
    where: str | None
    """None where the dataset is one of series or images, which have it."""
    keys: str | None
    """Path of the file of keys."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selection:
    """Samples to iterate over, and their datasets. Crosses process boundaries.

    A *row* of a selection counts through the samples tables of its datasets; for a single dataset it is the
    row of its table.
    """

    datasets: tuple[Dataset, ...]
    """One dataset, or one per component of a blend; components may share one."""
    population: Rows | Mixture
    split: str
    subset: str | None = None
    """Digest of the rows, if they are not the whole split."""
    num_missing: int = 0
    """Samples that an expression leaves out because a value is missing; 0 for a blend, which logs them."""
    sampling: Sampling | None = None
    """How often each is drawn, where it is not once an epoch; of a blend, its file says it."""
    tables: tuple[str, ...] = ()
    """Names of the attached tables that the rows were chosen by, which a resume opens again."""
    delivered: tuple[Mapping[str, NDArray[Any]], ...] = ()
    """What fields deliver of each row of each dataset, where a token budget charges for that: see
    `FieldSet.costs`."""
    given: Any = None
    """The `Given` or `BlendFile` by which a data server selects the same samples; None if there is none."""

    @property
    def repeats(self) -> bool:
        """Whether an epoch may draw a sample more than once."""
        return isinstance(self.population, Mixture)

    @property
    def is_blend(self) -> bool:
        """Whether the samples are those of a blend."""
        return isinstance(self.population, Blend)

    @property
    def has_entities(self) -> bool:
        """Whether some of the samples are findings of reports."""
        return any(isinstance(dataset, EntityDataset) for dataset in self.datasets)

    @property
    def units(self) -> tuple[str, ...]:
        """Unit of the samples of each dataset, see `shardflow.fields.units.unit_of`."""
        return tuple(unit_of(dataset) for dataset in self.datasets)

    @property
    def has_derived_keys(self) -> bool:
        """Whether some of the samples are parts of studies, whose keys are not those of shards."""
        return any(isinstance(dataset, DerivedDataset) for dataset in self.datasets)

    @property
    def is_local(self) -> bool:
        """Whether all datasets are local folders, read without a cache."""
        return all(isinstance(dataset.store, LocalStore) for dataset in self.datasets)

    def population_of(self, component: int) -> NDArray[np.bool_]:
        """Return which rows of a component's own table are used, ``(num_rows,)``; may be read-only."""
        dataset, population = self.datasets[component], self.population
        rows = population.components[component].rows if isinstance(population, Mixture) else population
        num_rows = dataset.samples.num_samples
        if rows == range(num_rows):
            return np.broadcast_to(np.True_, num_rows)  # one byte, whatever the number of rows
        return mask_of(rows, 0, num_rows)

    # ---- plan and state --------------------------------------------------------------------------

    def layout(self, spec: BatchSpec) -> SampleLayout:
        """Return the places of the samples, with the facts that a batch spec needs.

        Raises:
            PlanError: A samples table is not ordered by shard and offset.
        """
        if not isinstance(self.population, Mixture):
            return rows_layout(self.datasets[0], self.population, spec, *self.delivered)
        parts = []
        every = self.delivered or [None] * len(self.datasets)
        for dataset, component, delivered in zip(
            self.datasets, self.population.components, every, strict=True
        ):
            if component.classes is None:
                parts.append(rows_layout(dataset, component.rows, spec, delivered))
            else:
                listed = component.classes.listed()
                parts += [rows_layout(dataset, listed[code], spec, delivered) for code in component.strata]
        return blend_layout(self.population, parts)

    def plan(self, spec: BatchSpec, *, seed: int, epoch: int, auto_lanes: bool = False) -> EpochPlan:
        """Plan an epoch.

        Args:
            spec: How steps are formed.
            seed: Run-level seed.
            epoch: The epoch.
            auto_lanes: Choose the number of lanes, see `choose_lanes`; it becomes part of the plan's spec.

        Raises:
            PlanError: No step can be formed.
        """
        if not spec.lanes and not auto_lanes:
            # Windows of a volume follow each other, so that few volumes are being stitched.
            is_shuffled = "window" not in self.units
            return EpochPlan(self.population, spec, seed=seed, epoch=epoch, is_shuffled=is_shuffled)
        layout = self.layout(spec)
        if auto_lanes:
            spec = replace(spec, lanes=choose_lanes(layout, spec))
        return EpochPlan(self.population, spec, seed=seed, epoch=epoch, layout=layout)

    def state(self, spec: BatchSpec, *, seed: int) -> LoaderState:
        """Return the state of a run over these samples at its start."""
        if isinstance(self.population, Blend):
            return LoaderState(
                dataset_id=self.population.digest,
                manifest_version=0,
                split=BLEND_SPLIT,
                components=self.population.states(),
                seed=seed,
                spec=spec,
            )
        view = self.datasets[0].unit if isinstance(self.datasets[0], DerivedDataset) else FULL_STUDY
        return LoaderState(
            dataset_id=self.datasets[0].dataset_id,
            manifest_version=self.datasets[0].manifest_version,
            split=self.split,
            subset=self.subset,
            seed=seed,
            spec=spec,
            view=view,
            sampling=self.population.digest if isinstance(self.population, Mixture) else None,
        )

    def reopened(self) -> Selection:
        """Return the same samples with memory maps and locks of this process."""
        again = {id(dataset): dataset.reopened() for dataset in self.datasets}
        return replace(self, datasets=tuple(again[id(dataset)] for dataset in self.datasets))

    # ---- rows ------------------------------------------------------------------------------------

    def components_of(self, rows: Int64Array) -> Int64Array:
        """Return the component of each row, from 0."""
        return np.searchsorted(self.row_bases(), rows, side="right") - 1

    def table_rows(self, rows: Int64Array) -> Int64Array:
        """Return the row of each sample in its own dataset's table."""
        return rows - self.row_bases()[self.components_of(rows)]

    def keys(self, rows: Int64Array) -> list[str]:
        """Return the keys of samples; raises what `key_bytes` raises."""
        found: list[str] = self.key_bytes(rows).astype("U").tolist()
        return found

    def study_rows(self, rows: Int64Array) -> Int64Array:
        """Return the row of each sample's study in its dataset's samples table, which caches count in."""
        if not self.is_blend:
            return self.datasets[0].study_rows(rows)
        found = np.zeros(len(rows), np.int64)
        components, inside = self.components_of(rows), self.table_rows(rows)
        for component, dataset in enumerate(self.datasets):
            here = components == component
            found[here] = dataset.study_rows(inside[here])
        return found

    def entity(self, row: int) -> EntityPlace | None:
        """Return the place of a finding in its study; None for a whole study.

        Raises:
            FormatError: The view was damaged after it was opened.
        """
        if not self.has_entities:
            return None
        at = np.array([row], np.int64)
        dataset = self.datasets[int(self.components_of(at)[0])]
        if not isinstance(dataset, EntityDataset):
            return None
        return dataset.samples.place(int(self.table_rows(at)[0]))

    def key_bytes(self, rows: Int64Array) -> NDArray[np.bytes_]:
        """Return the keys of samples as byte strings.

        Raises:
            ChecksumError: The table was damaged after it was opened.
        """
        if not self.is_blend:
            keys = self.datasets[0].samples.gather("sample_key", rows)
        else:
            found = [
                (here, dataset.samples.gather("sample_key", inside))
                for dataset, here, inside in self._by_dataset(rows)
            ]
            keys = np.zeros(len(rows), f"S{max((part.itemsize for _, part in found), default=1)}")
            for here, part in found:
                keys[here] = part
        if keys.view(np.uint8).max(initial=0) > _MAX_ASCII:
            raise ChecksumError(
                "a key of the samples table must be letters and digits, got other bytes: the table was "
                "changed after it had been opened; start again, and look at the disk of the dataset or its "
                "cache."
            )
        return keys

    def study_key_bytes(self, rows: Int64Array) -> NDArray[np.bytes_]:
        """Return the keys of samples' studies as byte strings; of a finding its own."""
        keys = self.key_bytes(rows)
        for dataset, here, inside in self._by_dataset(rows):
            if isinstance(dataset, DerivedDataset):
                keys[here] = dataset.studies.gather("sample_key", dataset.study_rows(inside))
        return keys

    def modalities(self, rows: Int64Array) -> list[str]:
        """Return the DICOM modality of samples' primary series, such as ``CT``; empty if unknown."""
        names = np.empty(len(rows), object)
        for dataset, here, inside in self._by_dataset(rows):
            known = np.array(dataset.samples.modalities, object)
            names[here] = known[dataset.samples.gather("modality", inside)]
        found: list[str] = names.tolist()
        return found

    def column(self, name: str, rows: Int64Array) -> Int64Array:
        """Return an integer column of the samples table; shards are numbered across all datasets."""
        if not self.is_blend:
            return self.datasets[0].samples.gather(name, rows).astype(np.int64)
        values = np.zeros(len(rows), np.int64)
        for dataset, here, inside in self._by_dataset(rows):
            values[here] = dataset.samples.gather(name, inside)
        if name == "shard":
            values += self._shard_bases()[self.components_of(rows)]
        return values

    def shard(self, number: int) -> tuple[int, int]:
        """Return the component of a shard of `column`, and its position in the manifest."""
        if not self.is_blend:
            return 0, number
        bases = self._shard_bases()
        component = int(np.searchsorted(bases, number, side="right")) - 1
        return component, number - int(bases[component])

    def _by_dataset(self, rows: Int64Array) -> list[tuple[Dataset, NDArray[np.bool_] | slice, Int64Array]]:
        if not self.is_blend:
            return [(self.datasets[0], slice(None), rows)]
        components, inside = self.components_of(rows), self.table_rows(rows)
        found = []
        for component in np.unique(components).tolist():
            here = components == component
            found.append((self.datasets[component], here, inside[here]))
        return found

    def row_bases(self) -> Int64Array:
        """Return the first row of each dataset, ``(num_datasets,)``."""
        if isinstance(self.population, Mixture):
            return self.population.bases
        return np.zeros(1, np.int64)

    def _shard_bases(self) -> Int64Array:
        return _bases([len(dataset.manifest.shards) for dataset in self.datasets])


def open_view(dataset: Dataset, view: str = FULL_STUDY) -> Dataset:
    """Return the dataset of a view: whole studies, or the findings of an entity view stored beside it.

    Args:
        dataset: The dataset.
        view: ``full_study``, or the name of an entity view.

    Raises:
        ConfigError: There is no view of this name beside this version of the dataset.
        FormatError: The view cannot be trusted.
    """
    return dataset if view == FULL_STUDY else EntityDataset.beside(dataset, view)


def select(
    source: Dataset | Selection,
    split: str = "",
    *,
    unit: str = "study",
    where: str | None = None,
    keys: str | os.PathLike[str] | None = None,
) -> Selection:
    """Return the samples of a split or a part of it; a selection, such as a blend, is returned as it is.

    Args:
        source: A dataset, or a selection.
        split: Of a dataset: its split, or several joined by ``+``.
        unit: Of a dataset: what a sample is, see `shardflow.fields.units.open_unit`.
        where: Of a dataset: expression that selects samples; of series and images see `open_unit`.
        keys: Of a dataset: file of the keys of the samples.

    Raises:
        ConfigError: There is no such split, the expression is malformed, no sample is left, the unit does not
            fit the dataset, or any of this is given for a selection.
    """
    if not isinstance(source, Dataset | Selection):
        raise ConfigError(f"A loader takes a dataset, such as sf.open(path), got {type(source).__name__}.")
    if isinstance(source, Selection):
        given = {
            "split=": split or None,
            "unit=": None if unit == "study" else unit,
            "where=": where,
            "keys=": keys,
        }
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name} must be left out where a blend is given; write it for each component of its "
                    "file."
                )
        return source
    is_derived = unit in ("series", "image")
    dataset = open_unit(source, unit, where if is_derived else None)
    asked = Given(
        split=split, where=None if is_derived else where, keys=None if keys is None else os.fspath(keys)
    )
    chosen = choose_rows(dataset, split, asked.where, keys)
    return Selection(
        datasets=(dataset,),
        population=chosen.rows,
        split=chosen.split,
        subset=chosen.digest,
        num_missing=chosen.num_missing,
        tables=chosen.tables,
        given=asked,
    )


def _bases(sizes: list[int]) -> Int64Array:
    """Return the sum of the sizes before each one."""
    return np.cumsum([0, *sizes[:-1]], dtype=np.int64)
