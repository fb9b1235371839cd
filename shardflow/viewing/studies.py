"""One study as the page needs it: its description as JSON, its slices and masks as plain pixels."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, ShardflowError
from shardflow.preview.study import generated_mark, made_by_synth, slice_names
from shardflow.shards import Dataset, FieldLocation, decode_array
from shardflow.shards.keys import REPORT_FIELD, STUDY_FIELD
from shardflow.viewing.catalog import CONTENT_FIELD, Catalog

__all__ = ["Pixels", "Studies"]

_JSON_FIELDS: Final = {
    "study": STUDY_FIELD,
    "content": CONTENT_FIELD,
    "alignment": "alignment.json",
    "annotations": "annotations.json",
    "records": "records.json",
    "waveforms": "waveforms.json",
}
_MASK: Final = re.compile(r"s(\d{3,})\.m(\d{3,})\.i(\d{4,})\.[a-z0-9]+")
_MOST_OPEN: Final = 8


@dataclass(frozen=True, slots=True)
class Pixels:
    """Pixels as the browser takes them: little-endian, row by row."""

    rows: int
    columns: int
    channels: int
    dtype: str
    """``uint8``, ``int16``, ``uint16`` or ``float32``."""
    data: bytes


@dataclass(frozen=True, slots=True)
class _Open:
    slices: dict[int, list[str]]
    """Field of each slice, by series."""
    masks: dict[tuple[int, int, int], str]
    """Field of each mask, by series, number and slice."""


class Studies:
    """Reads studies; keeps where the fields of the last few lie, so that a slice is one small read."""

    def __init__(self, dataset: Dataset, catalog: Catalog) -> None:
        self._dataset = dataset
        self._catalog = catalog
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Open] = OrderedDict()

    def describe(self, row: int) -> dict[str, Any]:
        """Return all that is known of a sample but its pixels.

        Raises:
            ConfigError: There is no such row.
        """
        self.check_row(row)
        _, fields = self._dataset.sample_fields(row)
        names = {field.name for field in fields}
        problems: list[str] = []
        texts = {
            name: self._read(row, name, problems)
            for name in sorted(names & {*_JSON_FIELDS.values(), REPORT_FIELD})
        }
        parts = {part: _parsed(texts.get(name), name, problems) for part, name in _JSON_FIELDS.items()}
        report = texts.get(REPORT_FIELD)
        text = None if report is None else report.decode("utf-8", errors="replace")
        series = (parts["study"] or {}).get("series") or []
        return {
            **self._catalog.describe(row),
            **parts,
            "report": text,
            "generated": made_by_synth(series) or generated_mark(text),
            "slice_counts": [len(names) for _, names in sorted(_slices(fields).items())],
            "fields": [{"name": field.name, "num_bytes": field.num_bytes} for field in fields],
            "problems": problems,
        }

    def slice(self, row: int, series: int, index: int) -> Pixels:
        """Return one slice in the unit of its series.

        Raises:
            ConfigError: There is no such slice.
            ShardflowError: It is damaged.
        """
        names = self._opened(row).slices.get(series, [])
        if not 0 <= index < len(names):
            raise ConfigError(f"a slice must be one of {len(names)} of the series, got number {index}.")
        return _pixels(self._decoded(row, names[index]))

    def mask(self, row: int, series: int, number: int, index: int) -> Pixels:
        """Return what a region covers of one slice: uint8, 0 to 255 of it, or 0 and 1.

        Raises:
            ConfigError: The region has nothing on that slice.
            ShardflowError: It is damaged.
        """
        name = self._opened(row).masks.get((series, number, index))
        if name is None:
            raise ConfigError("a mask must be one of the study, got another one.")
        return _pixels(self._decoded(row, name))

    def document(self, row: int, number: int) -> str:
        """Return the text of a clinical document.

        Raises:
            ConfigError: There is no such document.
            ShardflowError: It is damaged.
        """
        self.check_row(row)
        name = f"document.{number:03d}.txt"
        _, fields = self._dataset.sample_fields(row)
        if all(field.name != name for field in fields):
            raise ConfigError("a document must be one of the study, got another one.")
        return self._dataset.read_fields(row, [name])[name].decode("utf-8", errors="replace")

    def check_row(self, row: int) -> None:
        """Raise ConfigError where there is no such row."""
        if not 0 <= row < self._dataset.samples.num_samples:
            raise ConfigError(f"a row must be below {self._dataset.samples.num_samples}, got {row}.")

    def _opened(self, row: int) -> _Open:
        self.check_row(row)
        with self._lock:
            known = self._open.get(row)
            if known is not None:
                self._open.move_to_end(row)
                return known
        _, fields = self._dataset.sample_fields(row)
        made = _Open(_slices(fields), _masks(fields))
        with self._lock:
            self._open[row] = made
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        return made

    def _decoded(self, row: int, name: str) -> NDArray[Any]:
        payload = self._dataset.read_fields(row, [name])[name]
        return np.asarray(decode_array(name.rpartition(".")[2], payload))

    def _read(self, row: int, name: str, problems: list[str]) -> bytes | None:
        try:
            return self._dataset.read_fields(row, [name])[name]
        except ShardflowError as error:
            problems.append(f"{name}: {error.message}")
            return None


def _slices(fields: list[FieldLocation]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    series = 0
    while names := slice_names(fields, series):
        found[series] = names
        series += 1
    return found


def _masks(fields: list[FieldLocation]) -> dict[tuple[int, int, int], str]:
    matches = ((field.name, _MASK.fullmatch(field.name)) for field in fields)
    return {(int(match[1]), int(match[2]), int(match[3])): name for name, match in matches if match}


def _parsed(data: bytes | None, name: str, problems: list[str]) -> dict[str, Any] | None:
    if data is None:
        return None
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        problems.append(f"{name}: no JSON object")
        return None
    return value


def _pixels(array: NDArray[Any]) -> Pixels:
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype.name not in ("uint8", "int16", "uint16"):
        array = array.astype(np.int16 if array.dtype == np.int8 else np.float32)
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return Pixels(array.shape[0], array.shape[1], channels, array.dtype.name, data)
