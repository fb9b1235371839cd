"""Viewer behind ``shardflow view``: what it answers, read-only, without requests to other servers.

Requests address studies, slices and inputs by number; no part of an address becomes a path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from importlib import resources
from types import TracebackType
from typing import Any, Final, Self

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.sampling import BatchSpec
from shardflow.viewing.catalog import Catalog, Query
from shardflow.viewing.studies import Inputs, RawArray, Signals, StepReader, StepSamples, Studies
from shardflow.viewing.volumes import Volumes
from shardflow.viewing.web import Answer, NoSuchPage, Request, WebServer, is_loopback, new_token

_MAX_ROWS: Final = 500
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
_MAX_SAMPLES: Final = 1 << 40
_NUMBER: Final = r"(\d{1,12})"


class Routes:
    """Answers requests for one dataset; safe to share between threads."""

    def __init__(self, dataset: Dataset, steps: StepReader | None = None) -> None:
        self._dataset = dataset
        self._steps = steps or StepSamples(dataset)
        self._catalog = Catalog(dataset)
        self._studies = Studies(dataset, self._catalog)
        self._signals = Signals(dataset)
        self._inputs = Inputs(dataset)
        self._assets = {name: _asset(name) for name in _ASSETS}
        row, number = rf"/api/samples/{_NUMBER}", _NUMBER
        studies, volumes = self._studies, Volumes(dataset, self._studies)
        # Each takes the query parameters, which are named here, and the numbers in the path.
        routes: dict[str, tuple[Callable[..., Any], str]] = {
            "/api/dataset": (self._about, "inputs"),
            "/api/samples": (self._samples, "text split modality where concept assertion start count"),
            "/api/findings": (lambda _: self._catalog.findings(), ""),
            "/api/inputs": (self._rows_of_inputs, "outcome reason start count"),
            "/api/steps": (self._step, "split seed epoch step size count"),
            row: (lambda _, *at: studies.describe(*at), ""),
            f"{row}/slices/{number}/{number}": (lambda _, *at: volumes.plane(at[0], at[1], 0, at[2]), ""),
            f"{row}/planes/{number}/{number}/{number}": (lambda _, *at: volumes.plane(*at), ""),
            f"{row}/regions/{number}/{number}/{number}/{number}": (lambda _, *at: volumes.region(*at), ""),
            f"{row}/documents/{number}": (lambda _, *at: {"text": studies.document(*at)}, ""),
            f"{row}/waveforms/{number}/{number}": (self._waveform, "start count columns"),
        }
        self._routes = [
            (re.compile(pattern, re.ASCII), route, frozenset(names.split()))
            for pattern, (route, names) in routes.items()
        ]

    def close(self) -> None:
        """Stop the reader of reports."""
        self._catalog.close()

    def answer(self, request: Request) -> Answer:
        """Answer a request.

        Raises:
            NoSuchPage: No page has this path.
            ConfigError: A value is invalid, or a parameter unknown.
            ShardflowError: The data cannot be read.
        """
        name = "index.html" if request.path == "/" else request.path.removeprefix("/")
        if name in self._assets:
            return self._assets[name]
        for pattern, route, names in self._routes:
            match = pattern.fullmatch(request.path)
            if match:
                if not request.values.keys() <= names:
                    taken = ", ".join(sorted(names)) or "no parameters"
                    raise ConfigError(f"this address takes {taken}, got another parameter; leave it out.")
                found = route(request.values, *map(int, match.groups()))
                return _raw(found) if isinstance(found, RawArray) else _json(found)
        raise NoSuchPage

    def _about(self, values: Mapping[str, str]) -> dict[str, Any]:
        samples, manifest = self._dataset.samples, self._dataset.manifest
        return {
            "dataset_id": self._dataset.dataset_id,
            "version": self._dataset.manifest_version,
            "num_samples": samples.num_samples,
            "splits": [
                {"name": name, "num_samples": len(rows)} for name, rows in self._dataset.splits.items()
            ],
            "modalities": [name for name in samples.modalities if name],
            "num_shards": len(manifest.shards),
            "inputs": self._inputs.summary() if values.get("inputs") else None,
            "fields": list(self._steps.fields),
        }

    def _samples(self, values: Mapping[str, str]) -> dict[str, Any]:
        names = ("split", "modality", "where", "concept", "assertion")
        given = {name: values.get(name, "") for name in names}
        return self._catalog.find(Query(text=values.get("text", "")[:100], **given), *_page(values))

    def _rows_of_inputs(self, values: Mapping[str, str]) -> dict[str, Any]:
        return self._inputs.find(values.get("outcome", ""), values.get("reason", ""), *_page(values))

    def _step(self, values: Mapping[str, str]) -> dict[str, Any]:
        return self._steps(
            split=values.get("split", ""),
            seed=_natural(values, "seed", 0),
            epoch=_natural(values, "epoch", 0),
            step=_natural(values, "step", 0),
            batch=BatchSpec(
                micro_batch_size=min(_natural(values, "size", 2), _MAX_ROWS),
                micro_batches_per_step=min(_natural(values, "count", 4), _MAX_ROWS),
            ),
        )

    def _waveform(self, values: Mapping[str, str], row: int, recording: int, group: int) -> RawArray:
        self._studies.check_row(row)
        return self._signals.excerpt(
            row,
            recording,
            group,
            start=_natural(values, "start", 0),
            count=_natural(values, "count", _MAX_SAMPLES),
            columns=_natural(values, "columns", 1000),
        )


def _asset(name: str) -> Answer:
    data = resources.files("shardflow.viewing").joinpath("assets", name).read_bytes()
    return Answer(body=data, content_type=_TYPES[name.rpartition(".")[2]])


def _json(value: Any) -> Answer:
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return Answer(body=body, content_type="application/json; charset=utf-8")


def _raw(array: RawArray) -> Answer:
    headers = {f"X-{name}": str(value) for name, value in array.facts.items()}
    return Answer(body=array.data, content_type="application/octet-stream", headers=headers)


def _page(values: Mapping[str, str]) -> tuple[int, int]:
    return _natural(values, "start", 0), min(_natural(values, "count", 100), _MAX_ROWS)


def _natural(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, "")
    if not text:
        return default
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ConfigError(f"{name} must be a natural number.")
    return int(text)


class Viewer:
    """A server for one dataset, in a thread of its own.

    A loopback address serves this machine only, but all of its users: requests need a token there too, which
    is generated here and part of `url`.

    Args:
        dataset: The dataset to show.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        steps: Finds the samples of a step; `shardflow.loading.crops.StepCrops` also where their crops are.
        token: Whether requests need a token. Without one only a loopback address is served.

    Raises:
        ConfigError: The server cannot listen on the address or the port, or would show patients to
            everybody.

    Example:
        >>> import urllib.request
        >>> from shardflow.format import Dataset
        >>> with Viewer(Dataset.open("my-dataset")) as viewer:  # doctest: +SKIP
        ...     urllib.request.urlopen(viewer.url).status
        200
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        steps: StepReader | None = None,
        token: bool = True,
    ) -> None:
        if not token and not is_loopback(host):
            raise ConfigError(
                f"without a token everybody who reaches {host} would see patients; keep the token, or listen "
                "on 127.0.0.1 and use a tunnel."
            )
        self._routes = Routes(dataset, steps)
        try:
            self._server = WebServer(
                self._routes.answer,
                host=host,
                port=port,
                token=new_token() if token else "",
                name="shardflow-view",
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, port {port} ({error.strerror}): the address must be one of this "
                "machine, and the port free. Choose another address or port."
            ) from None

    @property
    def url(self) -> str:
        """Address of the page, with the token if one is required."""
        return f"{self._server.address}/{self._server.query}"

    def close(self) -> None:
        """Stop listening; wait up to 5 s for requests under way."""
        self._server.close()
        self._routes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
