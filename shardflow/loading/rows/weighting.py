"""Sampling of a selection: the first samples, and weights and classes from columns of the dataset.

Columns are read twice when a run opens, in blocks, and never copied: once for the values that they hold, once
to count them. What is kept is a small code of each value; see `shardflow.sampling.weights`.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.facts.columns import open_columns
from shardflow.format.tables import ColumnValues
from shardflow.loading.rows.selection import Selection
from shardflow.sampling.blend import BlendComponent, Mixture
from shardflow.sampling.layout import Rows, mask_of, rows_digest, select_rows
from shardflow.sampling.spec import Sampling
from shardflow.sampling.weights import MAX_CLASSES, CodeArray, Levels, WeightClasses, find_levels

_READ_ROWS: Final = 2**20
_MAX_JOINT: Final = 4 * MAX_CLASSES
_MANY_CLASSES: Final = 20
"""Numbers of which more in more than half of the samples are measurements, such as ages, and no classes."""
_MISSING: Final = "missing"
_EXACT: Final = 1e-6
_LOGGER = logging.getLogger(__name__)


def sampled(selection: Selection, sampling: Sampling | None) -> Selection:
    """Return the samples of a selection, drawn as a sampling says.

    Args:
        selection: Samples of one dataset that are drawn once an epoch.
        sampling: How to draw them; None returns the selection as it is.

    Raises:
        ConfigError: The selection is a blend, a column cannot be used, or no sample can be drawn.
    """
    if sampling is not None and not isinstance(sampling, Sampling):
        raise ConfigError(
            f"sampling= takes sf.Sampling(balance='TABLE.COLUMN') and its like, "
            f"got {type(sampling).__name__}."
        )
    if sampling is None or not sampling.is_used:
        return selection
    if isinstance(selection.population, Mixture):
        raise ConfigError(
            "sampling= is for one dataset; in a blend file write a table [component.sampling] for each "
            "component instead."
        )
    dataset = selection.datasets[0]
    rows, classes = sampled_rows(dataset, selection.population, sampling)
    subset = selection.subset if rows is selection.population else rows_digest(rows)
    tables = tuple(sorted({*selection.tables, *sampling.tables}))
    found = replace(selection, population=rows, subset=subset, sampling=sampling, tables=tables)
    count = sampling.epoch_samples or len(rows)
    if classes is None and count == len(rows):
        return found
    component = BlendComponent(
        dataset_id=dataset.dataset_id,
        manifest_version=dataset.manifest_version,
        split=selection.split,
        rows=rows,
        subset=subset,
        count=count,
        num_table_rows=dataset.samples.num_samples,
        classes=classes,
    )
    return replace(found, population=Mixture([component]))


def sampled_rows(dataset: Dataset, rows: Rows, sampling: Sampling) -> tuple[Rows, WeightClasses | None]:
    """Return the rows that may be drawn, and their weights if there are any.

    Raises:
        ConfigError: A column cannot be used, or no sample can be drawn.
    """
    if sampling.limit is not None:
        rows = first_rows(dataset, rows, sampling.limit)
    if sampling.balance is not None:
        return _balanced(dataset, rows, sampling.balance, sampling.missing_class)
    if not sampling.segments:
        return rows, None
    return rows, _weighted(dataset, rows, sampling.segments)


def first_rows(dataset: Dataset, rows: Rows, limit: int) -> Rows:
    """Return the rows of the samples whose keys come first in alphabetical order.

    Args:
        dataset: The dataset.
        rows: The rows to choose from.
        limit: How many; all if there are fewer.
    """
    if len(rows) <= limit:
        return rows
    first, last = _hull(rows)
    best_keys = dataset.samples.gather("sample_key", np.zeros(0, np.int64))
    best = np.zeros(0, np.int64)
    for start in range(first, last, _READ_ROWS):
        stop = min(start + _READ_ROWS, last)
        inside = np.flatnonzero(mask_of(rows, start, stop)) + start
        keys = np.concatenate([best_keys, dataset.samples.gather("sample_key", inside)])
        numbers = np.concatenate([best, inside])
        order = np.argsort(keys, kind="stable")[:limit]
        best_keys, best = keys[order], numbers[order]
    chosen = np.sort(best)
    return select_rows(range(first, last), lambda start, stop: np.isin(np.arange(start, stop), chosen))


def _hull(rows: Rows) -> tuple[int, int]:
    if isinstance(rows, range):
        return rows.start, rows.stop
    first, last = (int(rows.span(at, at + 1)[0]) for at in (0, len(rows) - 1))
    return first, last + 1


@dataclass(frozen=True, slots=True, eq=False)
class _Coder:
    """Codes of the values of one column."""

    name: str
    """Empty for a column of ones."""
    encode: Levels | Values | None
    missing: int
    """Code of rows without a value."""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Values of a column of classes that are told apart, in ascending order; None: they are codes."""

    known: NDArray[Any] | None

    def codes(self, values: NDArray[Any]) -> CodeArray:
        """Return the code of each value, ``(n,)`` uint16; of values that were not there, any."""
        if self.known is None:
            return values.astype(np.uint16, copy=False)
        return np.searchsorted(self.known, values).astype(np.uint16)


class ColumnCodes:
    """Classes of the rows of a dataset, from one column or several; opens them again in another process.

    Args:
        dataset: The dataset.
        coders: A coder for each column.
        sizes: How many codes each has; codes of several columns are numbered together.
        table: Class by joint code; None if they are the same.
    """

    def __init__(
        self, dataset: Dataset, coders: tuple[_Coder, ...], sizes: tuple[int, ...], table: CodeArray | None
    ) -> None:
        self._place = dataset, coders, sizes, table
        self._columns: list[ColumnValues | None] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._place

    def __call__(self, start: int, stop: int) -> CodeArray:
        """Return the classes of rows."""
        dataset, coders, sizes, table = self._place
        if self._columns is None:
            columns = open_columns(dataset)
            self._columns = [columns.column(one.name) if one.name else None for one in coders]
        joint: NDArray[Any] | None = None
        for coder, size, column in zip(coders, sizes, self._columns, strict=True):
            codes = _codes(coder, column, start, stop)
            joint = codes if joint is None else joint.astype(np.int64) * size + codes
        if joint is None:
            raise ConfigError("Classes need at least one column.")
        found: CodeArray = joint if table is None else table.take(joint, mode="clip")
        return found


def _codes(coder: _Coder, column: ColumnValues | None, start: int, stop: int) -> CodeArray:
    if column is None or coder.encode is None:
        return np.zeros(stop - start, np.uint16)
    codes = coder.encode.codes(np.asarray(column.values[start:stop]))
    if column.is_missing is not None:
        codes = np.where(column.is_missing[start:stop], np.uint16(coder.missing), codes)
    return codes


def _column(dataset: Dataset, name: str, setting: str) -> tuple[ColumnValues, str]:
    """Return a column, and its kind.

    Raises:
        ConfigError: There is none of the name, or it holds lists.
    """
    columns = open_columns(dataset)
    if name not in columns:
        near = difflib.get_close_matches(name, list(columns), n=1)
        known = (
            f"did you mean {near[0]!r}?" if near else f"columns are {', '.join(sorted(columns)) or 'none'}."
        )
        raise ConfigError(f"{setting}={name!r} must be a column of the dataset; {known}")
    kind = columns[name].kind
    if kind == "floats":
        raise ConfigError(f"{setting}={name!r} must have one value per sample, got lists of floats.")
    return columns.column(name), kind


def _blocks(rows: Rows, *columns: NDArray[Any]) -> Iterator[list[NDArray[Any]]]:
    """Yield the values of the rows of a population, in blocks."""
    first, last = _hull(rows)
    for start in range(first, last, _READ_ROWS):
        stop = min(start + _READ_ROWS, last)
        if isinstance(rows, range):
            yield [np.asarray(column[start:stop]) for column in columns]
        else:
            inside = mask_of(rows, start, stop)
            yield [np.asarray(column[start:stop])[inside] for column in columns]


def _num_missing(column: ColumnValues, rows: Rows) -> int:
    if column.is_missing is None:
        return 0
    return sum(int(np.count_nonzero(block)) for (block,) in _blocks(rows, column.is_missing))


def _weighted(dataset: Dataset, rows: Rows, segments: tuple[tuple[int, str], ...]) -> WeightClasses:
    names = tuple(dict.fromkeys(name for _, name in segments))
    coders, weights, errors = [], [], []
    for name in names:
        if not name:
            coders.append(_Coder("", None, 0))
            weights.append(np.ones(1, np.int64))
            continue
        column, kind = _column(dataset, name, "weights")
        if kind not in ("bool", "int", "float"):
            raise ConfigError(f"weights={name!r} must be numbers, got a column of kind {kind}; use balance=.")
        missing = _num_missing(column, rows)
        if missing:
            raise ConfigError(
                f"weights={name!r} must be known for every sample, got {missing:,} of {len(rows):,} without; "
                "write 0 for samples that must not be drawn, or leave them out with where=."
            )
        levels = find_levels((block for (block,) in _blocks(rows, column.values)), name=name)
        if not levels.weights.any():
            raise ConfigError(f"weights={name!r} must be above 0 for some sample, got 0 for all.")
        coders.append(_Coder(name, levels, 0))
        weights.append(levels.weights)
        errors.append(levels.error)
        if levels.error > _EXACT:
            _LOGGER.info(
                "weights=%r are rounded to %d values: at most %.2g %% off",
                name,
                len(levels.weights),
                100 * levels.error,
            )
    sizes = tuple(len(one) for one in weights)
    table, used = None, np.arange(sizes[0])
    if len(names) > 1:
        used = _joint(ColumnCodes(dataset, tuple(coders), sizes, None), rows, names)
        table = np.zeros(int(np.prod(sizes)), np.uint16)
        table[used] = np.arange(len(used))
    at = dict(zip(names, np.unravel_index(used, sizes), strict=True))
    by_name = dict(zip(names, weights, strict=True))
    return WeightClasses(
        rows,
        ColumnCodes(dataset, tuple(coders), sizes, table),
        np.array([by_name[name][at[name]] for _, name in segments], np.int64),
        len(used),
        tuple(epoch for epoch, _ in segments),
        names=tuple(
            "weight " + ", ".join(f"{int(by_name[name][at[name][code]]):,}" for name in names)
            for code in range(len(used))
        ),
        error=max(errors, default=0.0),
    )


def _joint(
    codes: Callable[[int, int], NDArray[Any]], rows: Rows, names: tuple[str, ...]
) -> NDArray[np.int64]:
    """Return the joint codes that occur, ascending.

    Raises:
        ConfigError: They are too many.
    """
    first, last = _hull(rows)
    used = np.zeros(0, np.int64)
    for start in range(first, last, _READ_ROWS):
        stop = min(start + _READ_ROWS, last)
        used = np.union1d(used, codes(start, stop)[mask_of(rows, start, stop)].astype(np.int64))
    if len(used) > _MAX_JOINT:
        raise ConfigError(
            f"weights of a curriculum ({', '.join(names)}) must have at most {_MAX_JOINT:,} combinations, "
            f"got {len(used):,}; round them to fewer values."
        )
    return used


def _balanced(dataset: Dataset, rows: Rows, name: str, missing_class: str) -> tuple[Rows, WeightClasses]:
    column, kind = _column(dataset, name, "balance")
    num_missing = _num_missing(column, rows)
    if num_missing and missing_class == "error":
        raise ConfigError(
            f"balance={name!r} must be known for every sample, got {num_missing:,} of {len(rows):,} without; "
            'write missing_class="drop" to leave them out, or "own" to make them a class.'
        )
    if num_missing and missing_class == "drop" and column.is_missing is not None:
        is_missing = column.is_missing
        first, last = _hull(rows)
        whole = rows
        rows = select_rows(
            range(first, last),
            lambda start, stop: mask_of(whole, start, stop) & ~np.asarray(is_missing[start:stop]),
        )
        if not rows:
            raise ConfigError(f"balance={name!r} must be known for some sample, got none.")
        num_missing = 0
    if column.names is not None:
        values, names = Values(None), list(column.names)
    else:
        known = np.zeros(0, column.values.dtype)
        for block, missing in _blocks(rows, column.values, _or_none_missing(column)):
            known = np.union1d(known, block[~missing])
            if len(known) > MAX_CLASSES:
                raise ConfigError(
                    f"balance={name!r} must be a column of classes, got more than {MAX_CLASSES:,} values of "
                    f"kind {kind}; attach one that groups them."
                )
        is_fraction = kind == "float" and bool((known % 1 != 0).any())
        if is_fraction or (len(known) > _MANY_CLASSES and 2 * len(known) > len(rows) - num_missing):
            what = "fractions" if is_fraction else f"{len(known):,} numbers for {len(rows):,} samples"
            raise ConfigError(
                f"balance={name!r} must be a column of classes, got {what}; "
                "attach one that groups them, or write weights=."
            )
        values, names = Values(known), [f"{name} {value}" for value in known.tolist()]
    missing_code = len(names)
    names.append(_MISSING)
    if len(names) > np.iinfo(np.uint16).max:
        raise ConfigError(f"balance={name!r} must have fewer than 65,535 classes, got {len(names):,}.")
    codes = ColumnCodes(dataset, (_Coder(name, values, missing_code),), (len(names),), None)
    return rows, WeightClasses(rows, codes, None, len(names), names=tuple(names))


class _NoneMissing:
    def __getitem__(self, key: slice) -> NDArray[np.bool_]:
        return np.zeros(key.stop - key.start, bool)


def _or_none_missing(column: ColumnValues) -> Any:
    return _NoneMissing() if column.is_missing is None else column.is_missing
