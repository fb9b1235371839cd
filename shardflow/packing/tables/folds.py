"""Folds of cross-validation: a table with a fold for each study, no person in two of them.

Persons are dealt by size, the largest first, each to the fold that has the least of its classes. A person
keeps the fold of an earlier deal, so folds are stable when a dataset grows.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.format.dataset import Dataset
from shardflow.format.facts.columns import Columns, open_columns
from shardflow.format.foreign.places import local_folder
from shardflow.format.tables import StoredColumn, check_table_name, write_table
from shardflow.packing.people import join
from shardflow.seeds import derive

COLUMN: Final = "fold"
_PERSON: Final = "facts.patient_key"
_MAX_CLASSES: Final = 1000
_SCALE: Final = 1 << 40
_NO_FOLD: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Folds:
    """Result of a deal; counts alone."""

    name: str
    """Of the table; its column is ``NAME.fold``."""
    number: int
    """Of the version of the table."""
    digest: str
    is_new: bool
    """Whether the content differs from the newest version."""
    num_studies: int
    num_persons: int
    num_kept: int
    """Studies that have the fold of an earlier deal."""
    num_without_person: int
    """Studies whose person is unknown; each counts as a person of its own."""
    num_without_class: int
    """Studies without a value to stratify by; they are one class."""
    studies: tuple[int, ...]
    """Of each fold."""
    classes: Mapping[str, tuple[int, ...]]
    """Studies of each class, of each fold."""


def write_folds(
    dataset: Dataset,
    rows: NDArray[np.int64],
    *,
    name: str,
    k: int,
    stratify: str,
    seed: int,
    same_persons: Sequence[tuple[str, str]] = (),
) -> Folds:
    """Deal studies into folds, and write them as a table beside the dataset.

    Args:
        dataset: A dataset of studies in a local folder.
        rows: ``(n,)`` ascending rows of the studies; others have no fold.
        name: Of the table. If it is there, persons keep their folds of it.
        k: Number of folds.
        stratify: Column of classes, whose shares are kept alike: bool, int or category.
        seed: Decides among equal choices.
        same_persons: Pairs of patient keys that are of one person (`PrivateFolder.same_persons`).

    Raises:
        ConfigError: An option or the earlier table cannot be used; the message says what to write instead.
        FormatError: A table cannot be trusted.
        StorageError: It cannot be read or written.
    """
    check_table_name(name)
    if k < 2:
        raise ConfigError(f"--k must be at least 2, the number of folds, got {k}.")
    store = local_folder(dataset.store)
    if store is None:
        raise ConfigError(
            "Folds are written beside a dataset in a local folder, this one is remote; copy it with "
            "`shardflow copy` first."
        )
    columns = open_columns(dataset)
    classes, labels, num_without_class = _classes(columns, stratify, rows)
    keys = np.asarray(dataset.studies.column("sample_key"))
    persons, is_unknown = _persons(columns, keys, same_persons)
    known = _earlier(dataset, columns, name, k)
    # Earlier folds of studies that are not chosen now still say where their person is.
    taken = np.union1d(rows, np.flatnonzero(known >= 0))
    is_chosen = np.isin(taken, rows, assume_unique=True)
    of_taken = np.full(len(taken), len(labels))
    of_taken[is_chosen] = classes
    num_persons = len(np.unique(persons[rows]))
    if num_persons < k:
        raise ConfigError(
            f"{k} folds need at least {k} persons, the chosen studies have {num_persons:,}; lower --k."
        )
    found = deal(persons[taken], of_taken, known[taken], k=k, seed=seed, is_counted=is_chosen)[is_chosen]
    values = np.zeros(len(keys), np.int64)
    is_missing = np.ones(len(keys), bool)
    values[rows], is_missing[rows] = found, False
    column = StoredColumn(name=COLUMN, kind="int", values=values, is_missing=is_missing)
    manifest, is_new = write_table(store, dataset.manifest.dataset_id, name, "study", [column])
    return Folds(
        name=name,
        number=manifest.number,
        digest=manifest.digest,
        is_new=is_new,
        num_studies=len(rows),
        num_persons=num_persons,
        num_kept=int(np.count_nonzero(known[rows] >= 0)),
        num_without_person=int(np.count_nonzero(is_unknown[rows])),
        num_without_class=num_without_class,
        studies=tuple(np.bincount(found, minlength=k).tolist()),
        classes={
            label: tuple(np.bincount(found[classes == code], minlength=k).tolist())
            for code, label in enumerate(labels)
        },
    )


def deal(
    persons: NDArray[Any],
    classes: NDArray[np.int64],
    known: NDArray[np.int64],
    *,
    k: int,
    seed: int,
    is_counted: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Deal studies into folds; equal for any order of the studies.

    With N_c studies of class c, of them n_fc in fold f, and p_gc of person g, a deal without earlier folds
    keeps the sum over f and c of (n_fc - N_c / k)² / N_c at most (1 - 1/k) times the sum over g and c of
    p_gc² / N_c. If all studies of each person have one class, counts of a class in two folds differ by at
    most the studies of one person.

    Args:
        persons: ``(n,)`` bytes.
        classes: ``(n,)`` from 0.
        known: ``(n,)`` earlier folds; -1 where there is none.
        k: Number of folds.
        seed: Decides among equal choices.
        is_counted: ``(n,)`` whether a study counts; by default all do.

    Returns:
        ``(n,)`` folds of ``[0, k)``.

    Raises:
        ConfigError: Earlier folds put a person into two.
    """
    names, group = np.unique(persons, return_inverse=True)
    fold_of = np.full(len(names), _NO_FOLD)
    is_known = known >= 0
    fold_of[group[is_known]] = known[is_known]
    if (fold_of[group[is_known]] != known[is_known]).any():
        raise ConfigError(
            "The earlier table has studies of one person in two folds; write new folds under another --name."
        )
    counted = slice(None) if is_counted is None else is_counted
    num_classes = int(classes.max(initial=0)) + 1
    cells, counts = np.unique(group[counted] * num_classes + classes[counted], return_counts=True)
    owners, codes = np.divmod(cells, num_classes)
    of_class = np.bincount(codes, counts, num_classes).astype(np.int64)
    weights = _SCALE // np.maximum(of_class, 1)  # integers: the same choice on every machine
    loads = np.zeros((num_classes, k), np.int64)
    totals = np.zeros(k, np.int64)
    settled = fold_of[owners] >= 0
    np.add.at(loads, (codes[settled], fold_of[owners[settled]]), (counts * weights[codes])[settled])
    np.add.at(totals, fold_of[owners[settled]], counts[settled])

    load, total, weight = loads.tolist(), totals.tolist(), weights.tolist()
    first = np.searchsorted(owners, np.arange(len(names) + 1)).tolist()
    code_list, count_list = codes.tolist(), counts.tolist()
    open_groups = np.flatnonzero(fold_of < 0)
    secret = derive(seed, "folds").to_bytes(8, "little")
    draws = np.array([_draw(names[one], secret) for one in open_groups.tolist()], np.uint64)
    sizes = np.bincount(owners, counts, len(names))[open_groups]
    for place in np.lexsort((draws, -sizes)).tolist():
        one, draw = int(open_groups[place]), int(draws[place])
        parts = range(first[one], first[one + 1])
        scores = [sum(count_list[part] * load[code_list[part]][fold] for part in parts) for fold in range(k)]
        _, _, turn = min((scores[fold], total[fold], (fold + draw) % k) for fold in range(k))
        fold = (turn - draw) % k
        fold_of[one] = fold
        for part in parts:
            load[code_list[part]][fold] += count_list[part] * weight[code_list[part]]
            total[fold] += count_list[part]
    return fold_of[group]


def _draw(name: bytes, secret: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8, key=secret).digest(), "little")


def _persons(
    columns: Columns, keys: NDArray[Any], same_persons: Sequence[tuple[str, str]]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the person of every study, and where it is unknown: there the study's own key stands for it."""
    if _PERSON not in columns:
        return keys, np.ones(len(keys), bool)
    found = columns.stored(_PERSON)
    is_unknown = np.zeros(len(keys), bool) if found.is_missing is None else np.asarray(found.is_missing)
    of_studies = np.strings.add(b"study:", keys)
    persons = np.asarray(found.values)
    if same_persons:
        names = sorted({key for pair in same_persons for key in pair})
        number = {name: place for place, name in enumerate(names)}
        first = join(len(names), [(number[one], number[other]) for one, other in same_persons])
        linked = np.array([name.encode("ascii") for name in names], "S")
        places = np.minimum(np.searchsorted(linked, persons), len(linked) - 1)
        persons = np.where(linked[places] == persons, linked[first[places]], persons)
    return np.where(is_unknown, of_studies, np.strings.add(b"person:", persons)), is_unknown


def _classes(
    columns: Columns, name: str, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[str], int]:
    """Return the class of each study, the labels of the classes, and how many studies have no value."""
    if name not in columns:
        near = difflib.get_close_matches(name, columns, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`shardflow columns DATASET` lists them."
        raise ConfigError(f"There is no column {name!r} to stratify by; {hint}")
    info = columns[name]
    if info.unit != "study" or info.kind not in ("bool", "int", "category"):
        raise ConfigError(
            f"--stratify needs one class for each study: a bool, int or category; {name} is {info.kind} of "
            f"each {info.unit}."
        )
    found = columns.stored(name, rows)
    missing = np.zeros(len(rows), bool) if found.is_missing is None else np.asarray(found.is_missing)
    values, places = np.unique(found.values[~missing], return_inverse=True)
    if len(values) > _MAX_CLASSES:
        raise ConfigError(
            f"{name} has {len(values):,} values, too many for classes (at most {_MAX_CLASSES:,}); "
            "stratify by a column of fewer."
        )
    classes = np.full(len(rows), len(values))
    classes[~missing] = places
    labels = [found.names[value] if found.names else str(value) for value in values.tolist()]
    num_missing = int(np.count_nonzero(missing))
    return classes, labels + ["(missing)"] * bool(num_missing), num_missing


def _earlier(dataset: Dataset, columns: Columns, name: str, k: int) -> NDArray[np.int64]:
    """Return the folds of an earlier table, ``(num_studies,)``; -1 where there is none."""
    full = f"{name}.{COLUMN}"
    if name not in dataset.tables:
        return np.full(dataset.studies.num_samples, _NO_FOLD)
    if full not in columns or (columns[full].unit, columns[full].kind) != ("study", "int"):
        raise ConfigError(f"The table {name!r} is there and holds no folds; write them under another --name.")
    found = columns.stored(full)
    known = np.asarray(found.values, np.int64).copy()
    if found.is_missing is not None:
        known[np.asarray(found.is_missing)] = _NO_FOLD
    num_folds = int(known.max(initial=_NO_FOLD)) + 1
    if num_folds not in (0, k) or known.min(initial=0) < _NO_FOLD:
        raise ConfigError(
            f"The table {name!r} has {num_folds} folds, not {k}; keep --k {num_folds}, or write others under "
            "another --name."
        )
    return known
