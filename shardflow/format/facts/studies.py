"""Study facts table: one row per sample, with what its study is known by beside the samples table.

A sidecar beside the series table, written by packing and, for existing datasets, by ``shardflow attach
DATASET --facts``. It has only what ``study.json`` of the dataset says: ages in whole years, days whose origin
is the patient's own, surrogates. ``facts/study/<dataset_id>/studies.tbl`` has the order of the samples table;
``manifest.json`` beside it is written last. The layout is in docs/format.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import FormatError
from shardflow.format.dataset import Dataset
from shardflow.format.facts.series import FactsManifest, encode_names, merge_names
from shardflow.format.keys import SAMPLE_KEY_PATTERN, Json
from shardflow.format.table import Table, encode_table
from shardflow.format.tables import ColumnValues

STUDIES_NAME: Final = "studies.tbl"
_KIND: Final = "studies"
_FORMAT_VERSION: Final = 1

STUDY_STRINGS: Final = ("modalities", "body_part", "manufacturer", "sex")
"""Columns of names; an empty string is a missing value."""
STUDY_NUMBERS: Final = {"age_years": "<f4", "study_day": "<i4", "study_year": "<i4"}
"""Columns of numbers; NaN, or `NO_NUMBER` of integers, is a missing value."""
NO_NUMBER: Final = -(1 << 31)
NO_ROW: Final = -1
"""Entry of ``previous_row`` where the dataset has no earlier study of the person."""
MIXED: Final = "mixed"
_AUXILIARY: Final = ("localizer", "secondary")
"""Kinds of series that describe a study only where it has no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFacts:
    """Facts of one study: a row of the table, without ``previous_row``."""

    strings: Mapping[str, str] = field(default_factory=dict)
    """The columns of `STUDY_STRINGS` that have a value."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The columns of `STUDY_NUMBERS` that have a value."""
    patient_key: str = ""
    """Surrogate that all studies of a person share; empty if unknown."""


def facts_of_study(study: Mapping[str, Any]) -> StudyFacts:
    """Return the facts of a study.

    Args:
        study: Its ``study.json``; what is absent or of another type is a missing value.

    Raises:
        KeyError, TypeError, ValueError: It is no study of format 1.
    """
    patient, dates = study.get("patient") or {}, study.get("dates") or {}
    shown = [one for one in study["series"] if one.get("kind") not in _AUXILIARY] or study["series"]
    strings = {
        "modalities": "+".join(sorted({str(one["modality"]) for one in shown if one.get("modality")})),
        "body_part": _shared(one.get("body_part") for one in shown),
        "manufacturer": _shared(one.get("technical", {}).get("manufacturer") for one in shown),
        "sex": patient.get("sex"),
    }
    shifted = dates.get("study_date")
    day = date.fromisoformat(shifted) if shifted else None
    numbers = {
        "age_years": patient.get("age_years"),
        "study_day": dates.get("study_day") if day is None else day.toordinal(),
        "study_year": None if day is None else day.year,
    }
    key = patient.get("patient_key")
    return StudyFacts(
        strings={name: value for name, value in strings.items() if isinstance(value, str) and value},
        numbers={name: value for name, value in numbers.items() if isinstance(value, int | float)},
        patient_key=key if isinstance(key, str) and SAMPLE_KEY_PATTERN.fullmatch(key) else "",
    )


def _shared(values: Iterable[str | None]) -> str:
    """Return the value that all series with one share; `MIXED` if there are several."""
    known = {str(value) for value in values if value}
    return MIXED if len(known) > 1 else next(iter(known), "")


def encode_study_facts(studies: Iterable[StudyFacts]) -> bytes:
    """Encode the studies of one shard, whose rows know no earlier ones yet.

    Args:
        studies: In the order of the shard.
    """
    rows = list(studies)
    columns: dict[str, NDArray[Any]] = {}
    vocabularies: dict[str, Json] = {}
    for name in STUDY_STRINGS:
        columns[name], vocabularies[name] = encode_names(name, [row.strings.get(name, "") for row in rows])
    for name, dtype in STUDY_NUMBERS.items():
        missing = np.nan if dtype == "<f4" else NO_NUMBER
        columns[name] = np.array([row.numbers.get(name, missing) for row in rows], dtype)
    columns["patient_key"] = np.array([row.patient_key.encode("ascii") for row in rows], "S")
    columns["previous_row"] = np.full(len(rows), NO_ROW, "<i8")
    return _encode(columns, vocabularies)


def merge_study_facts(parts: Sequence[tuple[StudyTable, NDArray[np.int64]]], dataset: Dataset) -> bytes:
    """Encode the table of a version.

    Args:
        parts: Tables, and the chosen rows of each, in the order of the samples table.
        dataset: The version, whose rows decide ``previous_row``.
    """
    columns: dict[str, NDArray[Any]] = {}
    vocabularies: dict[str, Json] = {}
    for name in STUDY_STRINGS:
        codes, names = merge_names((table.vocabulary(name), table.array(name)[rows]) for table, rows in parts)
        columns[name], vocabularies[name] = codes, list(names)
    for name, dtype in STUDY_NUMBERS.items():
        columns[name] = np.concatenate(
            [np.zeros(0, dtype), *(table.array(name)[rows] for table, rows in parts)]
        )
    keys = np.concatenate([np.zeros(0, "S1"), *(table.array("patient_key")[rows] for table, rows in parts)])
    columns["patient_key"] = keys.astype(f"S{max(1, int(np.strings.str_len(keys).max(initial=0)))}")
    columns["previous_row"] = previous_rows(
        columns["patient_key"],
        columns["study_day"],
        dataset.studies.column("num_slices"),
        dataset.studies.splits.values(),
    )
    return _encode(columns, vocabularies)


def _encode(columns: Mapping[str, NDArray[Any]], vocabularies: Mapping[str, Json]) -> bytes:
    meta: dict[str, Json] = {
        "kind": _KIND,
        "format_version": _FORMAT_VERSION,
        "vocabularies": dict(vocabularies),
    }
    return encode_table(columns, meta)


def previous_rows(
    patient_key: NDArray[np.bytes_],
    study_day: NDArray[np.integer[Any]],
    num_slices: NDArray[np.integer[Any]],
    splits: Iterable[range],
) -> NDArray[np.int64]:
    """Return the row of each person's study of the latest earlier day in the same split; `NO_ROW` if none.

    Studies of one day have no known order: none precedes another. Of several on the earlier day the one
    with the most slices counts, then the first row.

    Args:
        patient_key: ``(n,)``, empty where unknown.
        study_day: ``(n,)``, `NO_NUMBER` where unknown.
        num_slices: ``(n,)``.
        splits: Rows of each split.
    """
    previous = np.full(len(patient_key), NO_ROW, "<i8")
    for span in splits:
        here = slice(span.start, span.stop)
        known = span.start + np.flatnonzero((study_day[here] != NO_NUMBER) & (patient_key[here] != b""))
        persons = np.unique(patient_key[known], return_inverse=True)[1]
        days = study_day[known]
        order = np.lexsort((-known, num_slices[known].astype(np.int64), days, persons))
        rows, persons, days = known[order], persons[order], days[order]
        is_first = np.ones(len(rows), bool)
        is_first[1:] = (persons[1:] != persons[:-1]) | (days[1:] != days[:-1])
        # The last study before the first one of the same person and day.
        before = np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0)) - 1
        has_one = (before >= 0) & (persons[before] == persons)
        previous[rows[has_one]] = rows[before[has_one]]
    return previous


class StudyTable:
    """Study facts table, open for reading; memory-mapped, each column checked when it is first used.

    Attributes:
        num_samples: Number of rows, as in the samples table.

    Raises:
        FormatError: The table is no study facts table of format 1.
        ChecksumError: It is damaged.
    """

    def __init__(self, table: Table) -> None:
        table.expect_kind(_KIND, _FORMAT_VERSION)
        self._table = table
        try:
            self._vocabularies = {name: tuple(names) for name, names in table.meta["vocabularies"].items()}
            self.num_samples = table.num_rows("previous_row")
            is_whole = set(STUDY_STRINGS) <= set(self._vocabularies) and {
                table.num_rows(name) for name in (*STUDY_STRINGS, *STUDY_NUMBERS, "patient_key")
            } == {self.num_samples}
        except (KeyError, TypeError, AttributeError):
            is_whole = False
        if not is_whole:
            raise FormatError(
                f"{table.name} is no whole study facts table; delete its folder and run: shardflow attach "
                "DATASET --facts"
            )

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names that an expression may use."""
        return (*STUDY_STRINGS, *STUDY_NUMBERS, "patient_key", "previous_row")

    def array(self, name: str) -> NDArray[Any]:
        """Return a stored column as a read-only view."""
        return self._table.column(name)

    def vocabulary(self, name: str) -> tuple[str, ...]:
        """Return the strings that a column of names indexes; the first one is empty, a missing value."""
        return self._vocabularies[name]

    def column(self, name: str, rows: slice | NDArray[np.int64] = slice(None)) -> ColumnValues:
        """Return some rows of a column of `column_names` for an expression; by default all."""
        values = self.array(name)[rows]
        if name in STUDY_STRINGS:
            return ColumnValues(values, values == 0, self._vocabularies[name])
        if name == "patient_key":
            return ColumnValues(values, values == b"")
        if name == "previous_row":
            return ColumnValues(values, values == NO_ROW)
        return ColumnValues(values, np.isnan(values) if values.dtype.kind == "f" else values == NO_NUMBER)

    def verify(self) -> None:
        """Check every column, whether or not it is used.

        Raises:
            FormatError: One is damaged.
        """
        self._table.verify()


@dataclass(frozen=True, kw_only=True)
class StudiesManifest(FactsManifest[StudyTable]):
    """Manifest that makes a study facts table valid for one version of a dataset."""

    name: ClassVar[str] = "study"
    table_name = STUDIES_NAME
    what = "the table of study facts"
    head: ClassVar[Mapping[str, Json]] = {
        "format": "shardflow-study-facts",
        "format_version": _FORMAT_VERSION,
    }

    @classmethod
    def wrap(cls, table: Table) -> StudyTable:
        """Return a table as one of study facts."""
        return StudyTable(table)


def open_studies(dataset: Dataset) -> tuple[StudyTable, str]:
    """Return the study facts table of a dataset, and its SHA-256; see `FactsManifest.open`."""
    return StudiesManifest.open(dataset)
