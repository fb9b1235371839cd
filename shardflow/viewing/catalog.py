"""Search over the studies of a dataset: by split, modality, key, expression, and the findings of reports."""

from __future__ import annotations

import json
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
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
        self._lock = threading.Lock()
        self._findings: dict[tuple[str, str], array[int]] = {}
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
        total, shown = 0, list[int]()
        for rows in self._matching(query):
            shown += rows[max(start - total, 0) : max(start + count - total, 0)].tolist()
            total += len(rows)
        return {
            "total": total,
            "num_read": self._num_read,
            "samples": [self.describe(row) for row in shown],
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

    def _matching(self, query: Query) -> Iterator[NDArray[np.int64]]:
        """Yield the rows that match, ascending, of one block of rows after another."""
        samples = self._dataset.samples
        within = range(samples.num_samples)
        if query.split:
            if query.split not in self._dataset.splits:
                raise ConfigError("the dataset has no such split.")
            within = self._dataset.splits[query.split]
        modality = samples.modalities.index(query.modality) if query.modality in samples.modalities else -1
        is_finding = bool(query.concept or query.assertion)
        found = self._rows_of(query.concept, query.assertion) if is_finding else np.empty(0, np.int64)
        condition = Where(self._dataset, query.where) if query.where else None
        has_text = self._text_condition(query.text) if query.text else None
        for start in range(within.start, within.stop, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, within.stop)
            rows = np.arange(start, stop)
            if is_finding:
                rows = found[np.searchsorted(found, start) : np.searchsorted(found, stop)]
            if query.modality:
                rows = rows[samples.gather("modality", rows) == modality]
            if has_text is not None:
                rows = rows[has_text(rows)]
            if condition is not None:
                rows = rows[condition.select(start, stop).rows[rows - start]]
            yield rows

    def _text_condition(self, text: str) -> Callable[[NDArray[np.int64]], NDArray[np.bool_]]:
        """Return which rows have a key that begins with a text, or are the one that it names."""
        if ":" not in text:
            beginning = text.lower().encode("utf-8", "replace")
            gather = self._dataset.samples.gather
            return lambda rows: np.char.startswith(gather("sample_key", rows), beginning)
        try:
            wanted = find_row(self._dataset, text)
        except ConfigError:
            wanted = -1
        return lambda rows: rows == wanted

    def _rows_of(self, concept: str, assertion: str) -> NDArray[np.int64]:
        self._begin_reading()
        with self._lock:
            parts = [
                np.array(rows, np.int64)
                for (name, how), rows in self._findings.items()
                if concept in ("", name) and assertion in ("", how)
            ]
        return np.unique(np.concatenate([np.empty(0, np.int64), *parts]))

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
                    self._findings.setdefault(name, array("q")).append(row)
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
