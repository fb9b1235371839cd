"""Data of the viewer: studies as JSON, pixels, masks, waveforms; inputs of the ledger; samples of a step."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, ShardflowError
from shardflow.format import Dataset, FieldLocation, decode_array
from shardflow.format.keys import CONVERSATION_FIELD, REPORT_FIELD, STUDY_FIELD
from shardflow.format.ledger import LineOutcomes
from shardflow.format.table import Table
from shardflow.sampling import BatchSpec, EpochPlan
from shardflow.viewing.catalog import CONTENT_FIELD, Catalog
from shardflow.viewing.study import generated_mark, made_by_synth

_FIELD: Final = "waveforms.json"
_MAX_COLUMNS: Final = 8192
MAX_BYTES: Final = 512 << 20
"""Largest array that is drawn: it is one field, which is read whole."""


@dataclass(frozen=True, slots=True)
class RawArray:
    """An array for the browser: little-endian, row by row."""

    data: bytes
    facts: Mapping[str, int | str]
    """Shape and dtype, by names of HTTP headers."""


@dataclass(frozen=True, slots=True)
class _Held:
    row: int
    name: str
    samples: NDArray[np.integer[Any]]
    channels: Sequence[Mapping[str, Any]]


class Signals:
    """Reads recordings; keeps the last one, so that scrolling through it costs no read."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._lock = threading.Lock()
        self._held: _Held | None = None

    def excerpt(
        self, row: int, recording: int, group: int, *, start: int, count: int, columns: int
    ) -> RawArray:
        """Return the lowest and highest values of a recording, condensed to columns.

        The data are ``(channels, columns, 2)`` float32 in the channel's unit (as stored where it is not
        calibrated), NaN where there is no sample.

        Args:
            row: Of the sample.
            recording: Its number in ``waveforms.json``.
            group: The array of the recording.
            start: First sample.
            count: Samples; fewer where the array ends.
            columns: Columns at most.

        Raises:
            ConfigError: There is no such array, or it is too large to be drawn.
            ShardflowError: It is damaged.
        """
        held = self._read(row, f"w{recording:03d}.g{group:02d}.npy")
        part = held.samples[:, start : start + count]
        if not part.shape[1]:
            raise ConfigError(
                f"start must be below {held.samples.shape[1]}, the number of samples, got {start}."
            )
        per_column = -(-part.shape[1] // max(1, min(columns, _MAX_COLUMNS)))
        starts = np.arange(0, part.shape[1], per_column)
        reached = [_reached(one, channel, starts) for one, channel in zip(part, held.channels, strict=True)]
        data = np.stack(reached).astype("<f4")
        facts = {"Channels": len(reached), "Columns": len(starts), "Per-Column": per_column}
        return RawArray(data.tobytes(), facts)

    def _read(self, row: int, name: str) -> _Held:
        # Serialized: concurrent requests mostly want the same recording.
        with self._lock:
            held = self._held
            if held is not None and (held.row, held.name) == (row, name):
                return held
            _, fields = self._dataset.sample_fields(row)
            sizes = {field.name: field.num_bytes for field in fields}
            if name not in sizes or _FIELD not in sizes:
                raise ConfigError("the study has no such recording.")
            if sizes[name] > MAX_BYTES:
                raise ConfigError(
                    f"recordings of at most {MAX_BYTES >> 20} MiB can be drawn; this one has "
                    f"{sizes[name] >> 20} MiB. Read it from Python."
                )
            read = self._dataset.read_fields(row, [name, _FIELD])
            samples = decode_array("npy", read[name])
            channels = _channels(read[_FIELD], name)
            if samples.ndim != 2 or len(channels) != len(samples):
                raise FormatError(f"waveforms.json does not describe each channel of {name}.")
            self._held = held = _Held(row, name, samples, channels)
            return held


def _channels(description: bytes, name: str) -> Sequence[Mapping[str, Any]]:
    try:
        arrays = [one for each in json.loads(description)["recordings"] for one in each["arrays"]]
        return [dict(channel) for one in arrays if one["field"] == name for channel in one["channels"]]
    except (ValueError, KeyError, TypeError):
        raise FormatError("waveforms.json describes no recordings.") from None


def _reached(
    stored: NDArray[np.integer[Any]], channel: Mapping[str, Any], starts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the lowest and highest value of each column, ``(columns, 2)``."""
    invalid = channel.get("invalid_value")
    missing = None if invalid is None else stored == invalid
    if missing is None or not missing.any():
        least, most = np.minimum.reduceat(stored, starts), np.maximum.reduceat(stored, starts)
        ends = np.stack([least, most], axis=1).astype(np.float64)
    else:
        values = np.where(missing, np.nan, stored)
        ends = np.stack([np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)], axis=1)
    gain = channel.get("gain")
    if gain is not None:
        ends = ends * float(gain) + float(channel.get("offset") or 0.0)
    return np.sort(ends, axis=1)  # a negative gain swaps them; NaN come in pairs


_JSON_FIELDS: Final = {
    "study": STUDY_FIELD,
    "content": CONTENT_FIELD,
    "alignment": "alignment.json",
    "annotations": "annotations.json",
    "records": "records.json",
    "waveforms": "waveforms.json",
    "conversation": CONVERSATION_FIELD,
}
_MASK: Final = re.compile(r"s(\d{3,})\.m(\d{3,})\.i(\d{4,})\.[a-z0-9]+")
_MAX_OPEN: Final = 8


@dataclass(frozen=True, slots=True)
class _Open:
    slices: dict[int, list[str]]
    """Field of each slice, by series."""
    masks: dict[tuple[int, int, int], str]
    """Field of each mask, by series, number and slice."""
    names: frozenset[str]
    """All fields."""
    shapes: dict[int, tuple[int, int, int]]
    """Of each series whose was asked for."""


class Studies:
    """Reads studies; keeps the field locations of the last few, so that a slice is one small read."""

    def __init__(self, dataset: Dataset, catalog: Catalog) -> None:
        self._dataset = dataset
        self._catalog = catalog
        self._lock = threading.Lock()
        self._open: OrderedDict[int, _Open] = OrderedDict()

    def describe(self, row: int) -> dict[str, Any]:
        """Return everything about a sample except its pixels.

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
            "slice_counts": [len(names) for _, names in sorted(_slices(self._dataset, row).items())],
            "fields": [{"name": field.name, "num_bytes": field.num_bytes} for field in fields],
            "problems": problems,
        }

    def slice(self, row: int, series: int, index: int) -> RawArray:
        """Return one slice in the unit of its series.

        Raises:
            ConfigError: There is no such slice.
            ShardflowError: It is damaged.
        """
        return raw_pixels(self.pixels(row, series, index))

    def pixels(self, row: int, series: int, index: int) -> NDArray[Any]:
        """Return one slice as it is stored, see `slice`."""
        names = self._opened(row).slices.get(series, [])
        if not 0 <= index < len(names):
            raise ConfigError(f"the series has {len(names)} slices; there is no slice {index}.")
        return self._decoded(row, names[index])

    def shape(self, row: int, series: int) -> tuple[int, int, int]:
        """Return slices, rows and columns of a series.

        Raises:
            ConfigError: There is no such series.
        """
        opened = self._opened(row)
        if series not in opened.shapes:
            volume = self._dataset.volume(row, series) if opened.slices.get(series) else None
            if volume is None:
                rows, columns = self.pixels(row, series, 0).shape[:2]
                opened.shapes[series] = len(opened.slices[series]), rows, columns
            else:
                slices, rows, columns = volume.shape
                opened.shapes[series] = slices, rows, columns
        return opened.shapes[series]

    def mask(self, row: int, series: int, number: int, index: int) -> NDArray[np.uint8] | None:
        """Return the stored mask of a region on one slice: 0 to 255 for fractions, or 0 and 1; None for none.

        Raises:
            ShardflowError: It is damaged.
        """
        name = self._opened(row).masks.get((series, number, index))
        return None if name is None else self._decoded(row, name)

    def annotations(self, row: int) -> bytes:
        """Return ``annotations.json``.

        Raises:
            ConfigError: The study has none.
            ShardflowError: It is damaged.
        """
        name = _JSON_FIELDS["annotations"]
        if name not in self._opened(row).names:
            raise ConfigError("the study has no regions.")
        return self._dataset.read_fields(row, [name])[name]

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
            raise ConfigError("the study has no such document.")
        return self._dataset.read_fields(row, [name])[name].decode("utf-8", errors="replace")

    def check_row(self, row: int) -> None:
        """Raise ConfigError if there is no such row."""
        if not 0 <= row < self._dataset.samples.num_samples:
            raise ConfigError(
                f"the dataset has {self._dataset.samples.num_samples} rows; there is no row {row}."
            )

    def _opened(self, row: int) -> _Open:
        self.check_row(row)
        with self._lock:
            known = self._open.get(row)
            if known is not None:
                self._open.move_to_end(row)
                return known
        _, fields = self._dataset.sample_fields(row)
        made = _Open(
            _slices(self._dataset, row), _masks(fields), frozenset(field.name for field in fields), {}
        )
        with self._lock:
            self._open[row] = made
            while len(self._open) > _MAX_OPEN:
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


def _slices(dataset: Dataset, row: int) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    series = 0
    while names := dataset.slice_names(row, series):
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


def raw_pixels(array: NDArray[Any]) -> RawArray:
    """Return a picture for the browser, ``(rows, columns)`` or ``(rows, columns, channels)``."""
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype.name not in ("uint8", "int16", "uint16"):
        array = array.astype(np.int16 if array.dtype == np.int8 else np.float32)
    data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    rows, columns = array.shape[:2]
    return RawArray(data, {"Rows": rows, "Columns": columns, "Channels": channels, "Dtype": array.dtype.name})


_MAX_BYTES: Final = 1 << 28
"""A ledger of a million inputs."""


class Inputs:
    """Outcomes of all inputs, read once on first use."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def summary(self) -> list[dict[str, Any]]:
        """Return counts by kind, outcome and reason, the most frequent first."""
        if self._corpus is not None:
            lines = self._corpus
            classes = dict(zip(lines.names, lines.outcomes, strict=True))
            return _summary(
                {
                    ("line", classes[name], _reason(classes[name], name)): n
                    for name, n in lines.reasons().items()
                }
            )
        counts = Counter((line["kind"], line["outcome"], line["reason"]) for line in self._lines)
        return _summary(counts)

    def find(self, outcome: str, reason: str, start: int, count: int) -> dict[str, Any]:
        """Return inputs with an outcome and a reason, empty strings for any, by the ledger's order."""
        if self._corpus is not None:
            return _lines_of_corpus(self._corpus, outcome, reason, start, count)
        rows = [
            line
            for line in self._lines
            if outcome in ("", line["outcome"]) and reason in ("", line["reason"])
        ]
        shown = [
            {name: line[name] for name in ("input", "kind", "outcome", "reason", "sample_key")}
            for line in rows[start : start + count]
        ]
        return {"total": len(rows), "inputs": shown}

    @cached_property
    def _corpus(self) -> LineOutcomes | None:
        """Outcomes of the lines of a text corpus, which has no ledger; None of any other dataset."""
        entry = self._dataset.manifest.line_outcomes
        if entry is None:
            return None
        return LineOutcomes(Table(self._dataset.store.map(entry.path), name=entry.path))

    @cached_property
    def _lines(self) -> list[dict[str, Any]]:
        entry = self._dataset.manifest.ledger
        if entry is None:
            return []
        if entry.num_bytes > _MAX_BYTES:
            raise ConfigError(
                f"ledgers of at most {_MAX_BYTES} bytes can be shown; this one has {entry.num_bytes}. Read "
                "ledger.jsonl with a tool for tables."
            )
        data = self._dataset.store.read(entry.path)
        return [line for line in map(json.loads, data.splitlines()) if "input" in line]


def _summary(counts: Mapping[tuple[str, str, str | None], int]) -> list[dict[str, Any]]:
    """Return counts by kind, outcome and reason as JSON, the most frequent first."""
    return [
        {"kind": kind, "outcome": outcome, "reason": reason, "num_inputs": number}
        for (kind, outcome, reason), number in sorted(
            counts.items(), key=lambda item: (-item[1], str(item[0]))
        )
    ]


def _reason(outcome: str, name: str) -> str | None:
    return None if outcome == "packed" else name


def _lines_of_corpus(
    lines: LineOutcomes, outcome: str, reason: str, start: int, count: int
) -> dict[str, Any]:
    """Return lines with an outcome and a reason; an input is its file's surrogate and its number, from 1."""
    wanted = [
        code
        for code, (name, kind) in enumerate(zip(lines.names, lines.outcomes, strict=True))
        if outcome in ("", kind) and reason in ("", name)
    ]
    counts = lines.reasons()
    total = sum(counts.get(lines.names[code], 0) for code in wanted)
    shown: list[dict[str, Any]] = []
    passed = 0
    for file in lines.files:
        if passed >= min(start + count, total):
            break
        codes = lines.of_file(file)
        found = np.flatnonzero(np.isin(codes, wanted))
        for place in found[max(start - passed, 0) : max(start + count - passed, 0)].tolist():
            name, kind = lines.names[codes[place]], lines.outcomes[codes[place]]
            shown.append(
                {
                    "input": f"{file}:{place + 1}",
                    "kind": "line",
                    "outcome": kind,
                    "reason": _reason(kind, name),
                    "sample_key": None,
                }
            )
        passed += len(found)
    return {"total": total, "inputs": shown}


class StepReader(Protocol):
    """Source of the samples of a step."""

    @property
    def fields(self) -> Sequence[str]:
        """Names of the fields whose crops it finds."""

    def __call__(self, *, split: str, seed: int, epoch: int, step: int, batch: BatchSpec) -> dict[str, Any]:
        """Return ``num_steps`` and ``micro_batches``: of each slot None for padding, or the sample's.

        That is ``row``, ``key``, ``weight`` and ``crops``, each with ``field``, ``series`` and ``corners``.

        Raises:
            ConfigError: There is no such split.
            PlanError: The settings make no plan, or it has no such step.
        """


class StepSamples:
    """Samples of any step of a dataset; the same for any number of GPUs. Without crops."""

    fields: Sequence[str] = ()

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __call__(self, *, split: str, seed: int, epoch: int, step: int, batch: BatchSpec) -> dict[str, Any]:
        """Return the samples, see `StepReader`."""
        rows = self._dataset.splits.get(split)
        if rows is None:
            raise ConfigError("the dataset has no such split.")
        plan = EpochPlan(rows, batch, seed=seed, epoch=epoch)
        found, weights = plan.step(step)
        samples = self._dataset.samples
        return {
            "num_steps": plan.num_steps,
            "micro_batches": [
                [
                    {
                        "row": int(row),
                        "key": samples.sample_key(int(row)),
                        "weight": int(weight),
                        "crops": [],
                    }
                    if row >= 0
                    else None
                    for row, weight in zip(micro, row_weights, strict=True)
                ]
                for micro, row_weights in zip(found, weights, strict=True)
            ],
        }
