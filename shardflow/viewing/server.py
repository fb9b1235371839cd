"""Viewer behind ``shardflow view``: read-only answers, without requests to other servers.

Requests address studies, slices and inputs by number; no part of an address becomes a path. `Volumes`
cuts volumes along each axis. Of a series in bricks it reads only the layer that a plane crosses; a plane
across the slices of any other series needs all of them, which are read once. The latest data stays in
memory, so scrolling reads nothing again.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from importlib import resources
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError
from shardflow.format import Dataset
from shardflow.format.contents.regions import Region, read_regions
from shardflow.sampling import BatchSpec
from shardflow.viewing.catalog import Catalog, Query
from shardflow.viewing.studies import (
    MAX_BYTES,
    Inputs,
    RawArray,
    Signals,
    StepReader,
    StepSamples,
    Studies,
    raw_pixels,
)
from shardflow.viewing.web import Answer, NoSuchPage, Request, WebServer, is_loopback, new_token

_AXES: Final = ("slices", "rows", "columns")


class Volumes:
    """Reads planes of volumes; safe to share between threads.

    Args:
        dataset: The dataset.
        studies: Its slices and masks.
    """

    def __init__(self, dataset: Dataset, studies: Studies) -> None:
        self._dataset = dataset
        self._studies = studies
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, NDArray[Any]] = OrderedDict()

    def plane(self, row: int, series: int, axis: int, index: int) -> RawArray:
        """Return a plane of a volume in the unit of its series.

        Args:
            row: Of the sample.
            series: Number of the series.
            axis: 0 for a slice; 1 for all slices at one row, ``(slices, columns)``; 2 for all slices at one
                column, ``(slices, rows)``.
            index: Of the slice, row or column.

        Raises:
            ConfigError: There is no such plane, or the volume is too large to be drawn.
            ShardflowError: It is damaged.
        """
        self._studies.check_row(row)
        volume = self._dataset.volume(row, series)
        if volume is None:
            if axis == 0:
                return self._studies.slice(row, series, index)
            _check_index(axis, index, self._studies.shape(row, series))
            stack = self._hold((row, series), lambda: self._stack(row, series))
            return raw_pixels(stack.take(index, axis=axis))
        _check_index(axis, index, volume.shape)
        side = volume.brick_shape[axis]
        first = index // side * side
        start, stop = [0, 0, 0], [*volume.shape]
        start[axis], stop[axis] = first, min(first + side, volume.shape[axis])
        sides = [last - begin for begin, last in zip(start, stop, strict=True)]
        _check_size(sides, volume.dtype)
        slab = self._hold(
            (row, series, axis, first), lambda: self._dataset.read_volume(row, series, start, stop)
        )
        return raw_pixels(slab.take(index - first, axis=axis))

    def region(self, row: int, series: int, number: int, axis: int, index: int) -> RawArray:
        """Return where a region covers a plane: uint8, 0 and 1, of stored fractions up to 255.

        Stored masks, in slices or bricks, else filled outlines or boxes.

        Args:
            row: Of the sample.
            series: Number of the series.
            number: Of the region in ``annotations.json``.
            axis: As of `plane`.
            index: Likewise.

        Raises:
            ConfigError: There is no such region or plane.
            ShardflowError: It is damaged.
        """
        shape = self._studies.shape(row, series)
        _check_index(axis, index, shape)
        found = read_regions(self._studies.annotations(row))
        regions = [one for one in found if (one.number, one.series) == (number, series) and one.places]
        if not regions:
            raise ConfigError("the series has no such region.")
        region = regions[0]
        first, last = min(region.places), max(region.places)
        if not 0 <= first <= last < shape[0]:
            raise FormatError("annotations.json names slices that the series does not have.")
        if axis == 0 and region.volume is None:
            return raw_pixels(self._slice_of(row, region, index, shape))
        covered = self._hold(
            (row, series, "region", number), lambda: self._covered(row, region, slice(first, last + 1), shape)
        )
        plane = np.zeros([side for k, side in enumerate(shape) if k != axis], np.uint8)
        if axis:
            plane[first : last + 1] = covered.take(index, axis=axis)
        elif first <= index <= last:
            plane = covered[index - first]
        return raw_pixels(plane)

    def _stack(self, row: int, series: int) -> NDArray[Any]:
        shape = self._studies.shape(row, series)
        planes: NDArray[Any] | None = None
        for index in range(shape[0]):
            plane = self._studies.pixels(row, series, index)
            if planes is None:
                _check_size(shape, plane.dtype)
                planes = np.empty((shape[0], *plane.shape), plane.dtype)
            if plane.shape != planes.shape[1:] or plane.ndim != 2:
                raise ConfigError("planes across slices need slices of one size, without color.")
            planes[index] = plane
        assert planes is not None  # noqa: S101 - a series has slices
        return planes

    def _covered(
        self, row: int, region: Region, slices: slice, shape: tuple[int, int, int]
    ) -> NDArray[np.uint8]:
        """Return what a region covers of some slices, ``(slices, rows, columns)``."""
        _check_size((slices.stop - slices.start, *shape[1:]), np.dtype(np.uint8))
        if region.volume is not None:
            values = self._dataset.read_masks(row, region.series, region.volume, slices)
            is_parts = region.is_fractional
            return np.asarray(values if is_parts else region.table(values.dtype)[values], np.uint8)
        planes = [self._slice_of(row, region, index, shape) for index in range(slices.start, slices.stop)]
        return np.stack(planes)

    def _slice_of(
        self, row: int, region: Region, index: int, shape: tuple[int, int, int]
    ) -> NDArray[np.uint8]:
        mask = self._studies.mask(row, region.series, region.number, index)
        mask = region.fill(index, shape[1:]) if mask is None else mask
        return np.zeros(shape[1:], np.uint8) if mask is None else mask

    def _hold(self, key: Hashable, read: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        # Serialized: concurrent requests mostly want the same volume.
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            found = self._held[key] = read()
            num_bytes = sum(one.nbytes for one in self._held.values())
            while num_bytes > MAX_BYTES and len(self._held) > 1:
                num_bytes -= self._held.popitem(last=False)[1].nbytes
            return found


def _check_index(axis: int, index: int, shape: tuple[int, ...]) -> None:
    if axis >= len(_AXES) or index >= shape[axis]:
        sides = ", ".join(f"{side} {name}" for side, name in zip(shape, _AXES, strict=False))
        raise ConfigError(f"the volume has {sides}; there is no plane {index} of axis {axis}.")


def _check_size(shape: Any, dtype: np.dtype[Any]) -> None:
    num_bytes = int(np.prod([*shape], dtype=np.int64)) * dtype.itemsize
    if num_bytes > MAX_BYTES:
        raise ConfigError(
            f"volumes of at most {MAX_BYTES >> 20} MiB can be drawn across their slices; this one has "
            f"{num_bytes >> 20} MiB. Read a region of it from Python."
        )


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
