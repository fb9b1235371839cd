"""Search over the studies of a dataset: by split, modality, key, expression, and the findings of reports."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, ShardflowError
from shardflow.fields.where import Where
from shardflow.format import Dataset
from shardflow.processes import join_all, wait_for_at_exit
from shardflow.viewing.study import find_row, place_of

_ROWS_AT_ONCE: Final = 1 << 20
CONTENT_FIELD: Final = "report.json"
_CLOSE_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Search terms; empty strings match everything."""

    split: str = ""
    modality: str = ""
    text: str = ""
    """A sample key or its beginning, or a row such as ``train:12``."""
    where: str = ""
    """An expression over columns, see `shardflow.fields.where`."""
    concept: str = ""
    """A finding that the report names."""
    assertion: str = ""
    """Assertion of that finding, such as ``present``."""


class Catalog:
    """The studies of a dataset, searchable; findings as far as reports were read.

    A thread reads the reports, from the first query for findings on; until it is done, answers report its
    progress.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._keys: NDArray[np.bytes_] = np.asarray(dataset.samples.column("sample_key"))
        self._lock = threading.Lock()
        self._findings: dict[tuple[str, str], list[int]] = {}
        self._num_read = 0
        self._is_closed = threading.Event()
        self._reader: threading.Thread | None = None
        # The thread keeps this object alive, so this runs at the exit of the process.
        weakref.finalize(self, self._is_closed.set)

    def close(self) -> None:
        """Stop reading reports; wait for a store that hangs for 5 s at most."""
        self._is_closed.set()
        if self._reader is not None:
            join_all([self._reader], _CLOSE_S)

    def describe(self, row: int) -> dict[str, Any]:
        """Return the entry of a sample in a list."""
        samples = self._dataset.samples
        numbers = {
            name: int(samples.gather(name, row))
            for name in ("num_series", "num_slices", "rows", "columns", "text_bytes")
        }
        return {
            "row": row,
            "key": samples.sample_key(row),
            "place": place_of(self._dataset, row),
            "modality": samples.modality(row),
            **numbers,
        }

    def find(self, query: Query, start: int, count: int) -> dict[str, Any]:
        """Return ``total``, the samples from ``start``, and how many reports were searched (``num_read``).

        Raises:
            ConfigError: There is no such split.
        """
        rows = self._matching(query)
        return {
            "total": len(rows),
            "num_read": self._num_read,
            "samples": [self.describe(int(row)) for row in rows[start : start + count]],
        }

    def findings(self) -> dict[str, Any]:
        """Return the number of samples of each finding by assertion, as far as reports were read."""
        self._begin_reading()
        with self._lock:
            counts = {names: len(rows) for names, rows in self._findings.items()}
            num_read = self._num_read
        return {
            "num_read": num_read,
            "num_samples": self._dataset.samples.num_samples,
            "findings": [
                {"concept": concept, "assertion": assertion, "num_samples": number}
                for (concept, assertion), number in sorted(
                    counts.items(), key=lambda item: (-item[1], item[0])
                )
            ],
        }

    def _matching(self, query: Query) -> NDArray[np.int64]:
        samples = self._dataset.samples
        rows = np.arange(samples.num_samples)
        if query.split:
            wanted = self._dataset.splits.get(query.split)
            if wanted is None:
                raise ConfigError("the dataset has no such split.")
            rows = np.arange(wanted.start, wanted.stop)
        if query.modality:
            known = samples.modalities
            number = known.index(query.modality) if query.modality in known else -1
            rows = rows[np.asarray(samples.column("modality"))[rows] == number]
        if query.concept or query.assertion:
            rows = np.intersect1d(rows, self._rows_of(query.concept, query.assertion))
        if query.text:
            rows = rows[self._has_text(query.text, rows)]
        if query.where:
            rows = rows[self._selected(query.where)[rows]]
        return rows.astype(np.int64)

    def _selected(self, where: str) -> NDArray[np.bool_]:
        condition, num_rows = Where(self._dataset, where), self._dataset.samples.num_samples
        parts = [
            condition.select(start, min(start + _ROWS_AT_ONCE, num_rows)).rows
            for start in range(0, num_rows, _ROWS_AT_ONCE)
        ]
        return np.concatenate([np.zeros(0, bool), *parts])

    def _has_text(self, text: str, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        if ":" in text:
            try:
                return np.asarray(rows == find_row(self._dataset, text))
            except ConfigError:
                return np.zeros(len(rows), np.bool_)
        begins = np.char.startswith(self._keys[rows], text.lower().encode("utf-8", "replace"))
        return np.asarray(begins, np.bool_)

    def _rows_of(self, concept: str, assertion: str) -> NDArray[np.int64]:
        self._begin_reading()
        with self._lock:
            found = {
                row
                for (name, how), rows in self._findings.items()
                if concept in ("", name) and assertion in ("", how)
                for row in rows
            }
        return np.array(sorted(found), np.int64)

    def _begin_reading(self) -> None:
        with self._lock:
            if self._reader is None:
                self._reader = threading.Thread(target=self._read_all, name="shardflow-view", daemon=True)
                wait_for_at_exit(self._reader).start()

    def _read_all(self) -> None:
        for row in range(self._dataset.samples.num_samples):
            if self._is_closed.is_set():
                return
            names = set(self._findings_of(row))
            with self._lock:
                for name in names:
                    self._findings.setdefault(name, []).append(row)
                self._num_read = row + 1

    def _findings_of(self, row: int) -> Iterator[tuple[str, str]]:
        try:
            _, fields = self._dataset.sample_fields(row)
            if any(field.name == CONTENT_FIELD for field in fields):
                content = json.loads(self._dataset.read_fields(row, [CONTENT_FIELD])[CONTENT_FIELD])
                for entity in content["entities"]:
                    yield str(entity["concept"]), str(entity["assertion"])
        except (ShardflowError, ValueError, KeyError, TypeError):
            return  # a damaged field is reported when the study is displayed
