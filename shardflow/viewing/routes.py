"""What the page may ask for: addresses are matched whole, and give numbers and plain words only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

from shardflow.errors import ConfigError
from shardflow.shards import Dataset
from shardflow.viewing.catalog import Catalog, Query
from shardflow.viewing.signals import Signals
from shardflow.viewing.steps import Inputs, step_samples
from shardflow.viewing.studies import Pixels, Studies

__all__ = ["Answer", "NoSuchPage", "Routes"]

_MOST_ROWS: Final = 500
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
}
_ASSETS: Final = (
    "index.html",
    "app.js",
    "canvas.js",
    "documents.js",
    "report.js",
    "signals.js",
    "tables.js",
    "style.css",
)
_MOST_SAMPLES: Final = 1 << 40
_NUMBER: Final = r"(\d{1,12})"


class NoSuchPage(Exception):  # noqa: N818 - what the reader of a page is told
    """There is nothing at an address; stays inside this package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What goes back."""

    body: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


class Routes:
    """Answers requests for one dataset; safe to share between threads."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._catalog = Catalog(dataset)
        self._studies = Studies(dataset, self._catalog)
        self._signals = Signals(dataset)
        self._inputs = Inputs(dataset)
        self._assets = {name: _asset(name) for name in _ASSETS}
        routes: dict[str, Callable[..., Answer]] = {
            "/api/dataset": self._about,
            "/api/samples": self._samples,
            "/api/findings": self._findings,
            "/api/inputs": self._rows_of_inputs,
            "/api/steps": self._step,
            f"/api/samples/{_NUMBER}": self._study,
            f"/api/samples/{_NUMBER}/slices/{_NUMBER}/{_NUMBER}": self._slice,
            f"/api/samples/{_NUMBER}/documents/{_NUMBER}": self._document,
            f"/api/samples/{_NUMBER}/waveforms/{_NUMBER}/{_NUMBER}": self._waveform,
            f"/api/samples/{_NUMBER}/masks/{_NUMBER}/{_NUMBER}/{_NUMBER}": self._mask,
        }
        self._routes = [(re.compile(pattern, re.ASCII), answer) for pattern, answer in routes.items()]

    def close(self) -> None:
        """Stop what runs beside."""
        self._catalog.close()

    def answer(self, path: str, values: Mapping[str, str]) -> Answer:
        """Answer a request.

        Args:
            path: Without the question mark and what follows it.
            values: What follows it.

        Raises:
            NoSuchPage: There is nothing there.
            ConfigError: A value cannot be used.
            ShardflowError: What is there cannot be read.
        """
        name = "index.html" if path == "/" else path.removeprefix("/")
        if name in self._assets:
            return self._assets[name]
        for pattern, answer in self._routes:
            match = pattern.fullmatch(path)
            if match:
                return answer(values, *map(int, match.groups()))
        raise NoSuchPage

    def _about(self, values: Mapping[str, str]) -> Answer:
        samples, manifest = self._dataset.samples, self._dataset.manifest
        return _json(
            {
                "dataset_id": self._dataset.dataset_id,
                "version": self._dataset.manifest_version,
                "num_samples": samples.num_samples,
                "splits": [
                    {"name": name, "num_samples": len(rows)} for name, rows in self._dataset.splits.items()
                ],
                "modalities": [name for name in samples.modalities if name],
                "num_shards": len(manifest.shards),
                "inputs": self._inputs.summary() if values.get("inputs") else None,
            }
        )

    def _samples(self, values: Mapping[str, str]) -> Answer:
        query = Query(
            split=values.get("split", ""),
            modality=values.get("modality", ""),
            text=values.get("text", "")[:100],
            concept=values.get("concept", ""),
            assertion=values.get("assertion", ""),
        )
        return _json(self._catalog.find(query, *_page(values)))

    def _findings(self, values: Mapping[str, str]) -> Answer:  # noqa: ARG002
        return _json(self._catalog.findings())

    def _rows_of_inputs(self, values: Mapping[str, str]) -> Answer:
        return _json(self._inputs.find(values.get("outcome", ""), values.get("reason", ""), *_page(values)))

    def _step(self, values: Mapping[str, str]) -> Answer:
        return _json(
            step_samples(
                self._dataset,
                split=values.get("split", ""),
                seed=_natural(values, "seed", 0),
                epoch=_natural(values, "epoch", 0),
                step=_natural(values, "step", 0),
                micro_batch_size=min(_natural(values, "size", 2), _MOST_ROWS),
                micro_batches_per_step=min(_natural(values, "count", 4), _MOST_ROWS),
            )
        )

    def _study(self, values: Mapping[str, str], row: int) -> Answer:  # noqa: ARG002
        return _json(self._studies.describe(row))

    def _slice(self, values: Mapping[str, str], row: int, series: int, index: int) -> Answer:  # noqa: ARG002
        return _pixels(self._studies.slice(row, series, index))

    def _mask(self, values: Mapping[str, str], row: int, series: int, number: int, index: int) -> Answer:  # noqa: ARG002
        return _pixels(self._studies.mask(row, series, number, index))

    def _document(self, values: Mapping[str, str], row: int, number: int) -> Answer:  # noqa: ARG002
        return _json({"text": self._studies.document(row, number)})

    def _waveform(self, values: Mapping[str, str], row: int, recording: int, group: int) -> Answer:
        self._studies.check_row(row)
        found = self._signals.stretch(
            row,
            recording,
            group,
            start=_natural(values, "start", 0),
            count=_natural(values, "count", _MOST_SAMPLES),
            columns=_natural(values, "columns", 1000),
        )
        headers = {
            "X-Channels": str(found.num_channels),
            "X-Columns": str(found.num_columns),
            "X-Per-Column": str(found.per_column),
        }
        return Answer(body=found.data, content_type="application/octet-stream", headers=headers)


def _asset(name: str) -> Answer:
    data = resources.files("shardflow.viewing").joinpath("assets", name).read_bytes()
    return Answer(body=data, content_type=_TYPES[name.rpartition(".")[2]])


def _json(value: Any) -> Answer:
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return Answer(body=body, content_type="application/json; charset=utf-8")


def _pixels(pixels: Pixels) -> Answer:
    headers = {
        "X-Rows": str(pixels.rows),
        "X-Columns": str(pixels.columns),
        "X-Channels": str(pixels.channels),
        "X-Dtype": pixels.dtype,
    }
    return Answer(body=pixels.data, content_type="application/octet-stream", headers=headers)


def _page(values: Mapping[str, str]) -> tuple[int, int]:
    return _natural(values, "start", 0), min(_natural(values, "count", 100), _MOST_ROWS)


def _natural(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ConfigError(f"{name} must be a natural number, got another value.")
    return int(text)
