"""Subsets by rule: which samples of a split belong to the epoch, said in a few terms and never in code.

A subset is a list of terms, and a sample belongs to it where all of them hold::

    modality=CT,MR      one of these; modality!=... none of these; of an entity view label, anatomy, assertion
                        and laterality too
    num_slices>=16      a column of integers of the samples table: = != < <= > >=
    keys=wanted.txt     a text file, one sample key a line, or ``sha256:`` and the SHA-256 of one

The same terms are written in a training configuration, in a blend file and behind ``--subset``. What counts
afterwards is which rows they give: the rows' digest is part of the plan's identity, the terms are not.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.epochs.rows import Rows, mask_of, rows_digest, select_rows
from shardflow.errors import ConfigError
from shardflow.loading.key_list import listed_rows
from shardflow.shards import Dataset

__all__ = ["SplitRows", "choose_rows", "resolve_terms", "split_names"]

_TERM = re.compile(r"([a-z_]+)\s*(<=|>=|!=|=|<|>)\s*(\S.*)")
_NUMBER = re.compile(r"\d{1,18}")
_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# Where a sample lies says nothing about it, and modality and keys have terms of their own.
_NOT_FACTS = frozenset({"sample_key", "shard", "row_in_shard", "offset_bytes", "modality"})
_SEPARATOR = "+"

Choice = Callable[[int, int], NDArray[np.bool_]]
"""Says which of the rows ``[start, stop)`` of the samples table are chosen."""


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The rows of one split or several, or a subset of them."""

    split: str
    """Name of the split; several are joined by ``+``, in the order of the table."""
    rows: Rows
    digest: str | None
    """Digest of the rows where they are a subset; None for whole splits."""


def choose_rows(dataset: Dataset, split: str, terms: Sequence[str] = ()) -> SplitRows:
    """Return the rows of a split, or of several such as ``train+val``, that a subset consists of.

    Args:
        dataset: The dataset.
        split: Names of splits, joined by ``+``.
        terms: All must hold; none chooses whole splits.

    Raises:
        ConfigError: There is no such split, column, modality or key, a term cannot be read, or no sample is
            left.
    """
    names = split_names(dataset, split)
    spans = [dataset.splits[name] for name in names]
    choices = [_choice(dataset, spans, term) for term in terms]
    hull = range(spans[0].start, spans[-1].stop)

    def choose(start: int, stop: int) -> NDArray[np.bool_]:
        chosen = np.zeros(stop - start, bool)
        for span in spans:
            chosen[max(span.start - start, 0) : max(span.stop - start, 0)] = True
        for choice in choices:
            chosen &= choice(start, stop)
        return chosen

    whole = sum(len(span) for span in spans)
    if not terms and whole == len(hull):
        return SplitRows(_SEPARATOR.join(names), hull, None)
    rows = select_rows(hull, choose)
    if not rows:
        raise ConfigError(
            f"a subset must hold at least one sample, got none of {whole:,} of split {split!r} "
            f"({_quoted(terms)}); loosen a term."
        )
    if len(rows) == whole:
        return SplitRows(_SEPARATOR.join(names), rows, None)
    return SplitRows(_SEPARATOR.join(names), rows, rows_digest(rows))


def split_names(dataset: Dataset, split: str) -> list[str]:
    """Return the splits that ``split`` names, in the order of the table.

    Raises:
        ConfigError: One is unknown, empty or named twice.
    """
    names = [name.strip() for name in split.split(_SEPARATOR)]
    known = dataset.splits
    for name in names:
        if not known.get(name):
            held = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"split must be one that holds samples ({held}), got {name!r}; correct it.")
    if len(set(names)) < len(names):
        raise ConfigError(f"split must name each split once, got {split!r}; remove the second one.")
    return sorted(names, key=lambda name: known[name].start)


def resolve_terms(terms: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return terms whose files lie where the file that names them lies."""
    resolved = []
    for term in terms:
        name, sign, value = _parse(term)
        path = folder / Path(value).expanduser() if name == "keys" else value
        resolved.append(f"{name}{sign}{path}")
    return tuple(resolved)


def _parse(term: str) -> tuple[str, str, str]:
    match = _TERM.fullmatch(term.strip())
    if match is None:
        raise ConfigError(
            f"a term of a subset must be a name, a sign of {' '.join(_COMPARISONS)} and a value, such as "
            f'"num_slices>=16" or "modality=CT", got {term!r}; correct it.'
        )
    return match[1], match[2], match[3].strip()


def _choice(dataset: Dataset, spans: Sequence[range], term: str) -> Choice:
    name, sign, value = _parse(term)
    vocabularies = dataset.samples.vocabularies
    if name == "keys" or name in vocabularies:
        allowed = ("=", "!=") if name in vocabularies else ("=",)
        if sign not in allowed:
            raise ConfigError(
                f"{name} of a subset must come with {' or '.join(allowed)}, got {sign!r} ({term!r})."
            )
        if name in vocabularies:
            return _named(dataset, name, value, is_wanted=sign == "=")
        listed = listed_rows(dataset, spans, Path(value))
        return lambda start, stop: mask_of(listed, start, stop)
    facts = sorted(
        column
        for column in dataset.samples.column_names
        if column not in _NOT_FACTS
        and column not in vocabularies
        and dataset.samples.gather(column, np.zeros(0, np.int64)).dtype.kind in "iu"
    )
    if name not in facts:
        raise ConfigError(
            f"a term of a subset must begin with modality, keys or one of {', '.join(facts)}, got {name!r}; "
            f"correct it."
        )
    if not _NUMBER.fullmatch(value):
        raise ConfigError(
            f"{name} of a subset must be compared with an integer of at least 0, got {value!r}; correct it."
        )
    compare, bound = _COMPARISONS[sign], np.int64(value)
    column = dataset.samples.column(name)
    return lambda start, stop: np.asarray(compare(column[start:stop].astype(np.int64), bound))


def _named(dataset: Dataset, column_name: str, value: str, *, is_wanted: bool) -> Choice:
    known = dataset.samples.vocabularies[column_name]
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in known:
            held = ", ".join(name or "(none)" for name in known)
            raise ConfigError(
                f"{column_name} of a subset must be one of the dataset ({held}), got {name!r}; correct it."
            )
    column = dataset.samples.column(column_name)
    table = np.full(max(len(known), 1 << 8), not is_wanted)
    table[[known.index(name) for name in names]] = is_wanted
    return lambda start, stop: table[column[start:stop]]


def _quoted(terms: Sequence[str]) -> str:
    return ", ".join(repr(term) for term in terms if not term.startswith("keys")) or "a key list"
