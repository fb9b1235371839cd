"""Web server of ``shardflow view``: local or behind a token, read-only, without requests to other servers.

Requests address studies, slices and inputs by number; no part of an address becomes a path. The number of
connections is bounded, since each has a thread.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import parse_qsl, urlsplit

from shardflow.errors import ConfigError, PlanError, ShardflowError
from shardflow.format import Dataset
from shardflow.processes import join_all, wait_for_at_exit
from shardflow.sampling import BatchSpec
from shardflow.viewing.catalog import Catalog, Query
from shardflow.viewing.studies import Inputs, RawArray, Signals, StepReader, StepSamples, Studies
from shardflow.viewing.volumes import Volumes

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


class NoSuchPage(Exception):  # noqa: N818 - an answer, not a fault
    """Signal that no page has this address; handled inside this package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Response to a request."""

    body: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


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
        # Each takes the query parameters and the numbers in the path.
        routes: dict[str, Callable[..., Any]] = {
            "/api/dataset": self._about,
            "/api/samples": self._samples,
            "/api/findings": lambda _: self._catalog.findings(),
            "/api/inputs": self._rows_of_inputs,
            "/api/steps": self._step,
            row: lambda _, *at: studies.describe(*at),
            f"{row}/slices/{number}/{number}": lambda _, *at: volumes.plane(at[0], at[1], 0, at[2]),
            f"{row}/planes/{number}/{number}/{number}": lambda _, *at: volumes.plane(*at),
            f"{row}/regions/{number}/{number}/{number}/{number}": lambda _, *at: volumes.region(*at),
            f"{row}/documents/{number}": lambda _, *at: {"text": studies.document(*at)},
            f"{row}/waveforms/{number}/{number}": self._waveform,
        }
        self._routes = [(re.compile(pattern, re.ASCII), route) for pattern, route in routes.items()]

    def close(self) -> None:
        """Stop the reader of reports."""
        self._catalog.close()

    def answer(self, path: str, values: Mapping[str, str]) -> Answer:
        """Answer a request.

        Args:
            path: Path of the address.
            values: Query parameters.

        Raises:
            NoSuchPage: No page has this path.
            ConfigError: A value is invalid.
            ShardflowError: The data cannot be read.
        """
        name = "index.html" if path == "/" else path.removeprefix("/")
        if name in self._assets:
            return self._assets[name]
        for pattern, route in self._routes:
            match = pattern.fullmatch(path)
            if match:
                found = route(values, *map(int, match.groups()))
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


_LOGGER = logging.getLogger(__name__)

_COOKIE: Final = "shardflow_view"
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_MAX_CONNECTIONS: Final = 64
_MAX_QUERY_FIELDS: Final = 20
_IDLE_S: Final = 60.0
_CLOSE_S: Final = 5.0


class Viewer:
    """A server for one dataset, in a thread of its own.

    A loopback address serves the processes of this machine only: a request whose ``Host`` is another name is
    refused, so that no web page can reach the server by a name of its own (DNS rebinding). Any other address
    requires a token, which is generated here and part of `url`.

    Args:
        dataset: The dataset to show.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        steps: Finds the samples of a step; `shardflow.loading.crops.StepCrops` also where their crops are.

    Raises:
        ConfigError: The server cannot listen on the address or the port.

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
    ) -> None:
        self._is_local = _is_loopback(host)
        self._token = "" if self._is_local else secrets.token_urlsafe(24)
        self._routes = Routes(dataset, steps)
        try:
            self._server = _Server(host, port, self._routes, self._token, is_local=self._is_local)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, port {port} ({error.strerror}): the address must be one of this "
                "machine, and the port free. Choose another address or port."
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="shardflow-view-server", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the page, with the token if one is required."""
        host, port = self._server.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}/" + (f"?token={self._token}" if self._token else "")

    def close(self) -> None:
        """Stop listening; wait up to 5 s for requests under way."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server.end_requests(_CLOSE_S)
        self._routes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    def __init__(self, host: str, port: int, routes: Routes, token: str, *, is_local: bool) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.routes, self.token, self.is_local = routes, token, is_local
        self._lock = threading.Lock()
        # Both in the order in which connections were accepted.
        self._waiting: dict[threading.Thread, socket.socket] = {}
        self._answering: dict[threading.Thread, socket.socket] = {}
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its own thread; close the oldest idle one if there are too many."""
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="shardflow-view-request",
            daemon=True,
        )
        with self._lock:
            if len(self._waiting) + len(self._answering) >= _MAX_CONNECTIONS:
                if not self._waiting:  # all of them are being answered
                    self.shutdown_request(request)
                    return
                # Browsers reopen closed connections; only clients that send a request slowly lose it.
                _shut_down(self._waiting.pop(next(iter(self._waiting))), socket.SHUT_RDWR)
            self._waiting[thread] = request
        wait_for_at_exit(thread).start()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection and close it."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._waiting.pop(threading.current_thread(), None)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Keep the connection of this thread open while its request is answered."""
        thread = threading.current_thread()
        with self._lock:
            if thread in self._waiting:
                self._answering[thread] = self._waiting.pop(thread)
        try:
            yield
        finally:
            with self._lock:
                if thread in self._answering:
                    self._waiting[thread] = self._answering.pop(thread)

    def end_requests(self, wait_s: float) -> None:
        """Close all connections, after waiting ``wait_s`` at most for current requests."""
        threads = self._shut_down_all(socket.SHUT_RD)  # no more requests
        if not join_all(threads, wait_s):
            self._shut_down_all(socket.SHUT_RDWR)

    def _shut_down_all(self, how: int) -> list[threading.Thread]:
        with self._lock:
            connections = {**self._waiting, **self._answering}
        for connection in connections.values():
            _shut_down(connection, how)
        return list(connections)


def _shut_down(connection: socket.socket, how: int) -> None:
    with suppress(OSError):  # closed in the meantime
        connection.shutdown(how)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server_version = "shardflow"
    sys_version = ""
    # Answers are written at once; small ones must not wait for an acknowledgement.
    disable_nagle_algorithm = True
    wbufsize = 1 << 16

    def do_GET(self) -> None:
        """Answer one request."""
        with self.server.answering():
            self._answer()

    def _answer(self) -> None:
        try:
            address = urlsplit(self.path)
            values = dict(parse_qsl(address.query, max_num_fields=_MAX_QUERY_FIELDS))
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "the address is malformed or has too many parameters")
            return
        if not self._may_ask(values):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that shardflow view printed")
            return
        try:
            answer = self.server.routes.answer(address.path, values)
        except NoSuchPage:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        except (ConfigError, PlanError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, error.message)
        except ShardflowError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, error.message)
        except Exception as error:
            _LOGGER.exception("a request of the page failed")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, type(error).__name__)
        else:
            self._send(HTTPStatus.OK, answer, with_cookie="token" in values)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: requests name studies."""

    def _may_ask(self, values: dict[str, str]) -> bool:
        if self.server.is_local:
            host = self.headers.get("Host", "").rsplit(":", 1)[0] if self.headers.get("Host") else ""
            return host in _LOCAL_NAMES or _is_loopback(host.strip("[]"))
        given = values.get("token", "") or self._cookie()
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return ""
        return found.value if found else ""

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, Answer(body=sentence.encode(), content_type="text/plain; charset=utf-8"))

    def _send(self, status: HTTPStatus, answer: Answer, *, with_cookie: bool = False) -> None:
        self.send_response(status)
        headers = {
            **_HEADERS,
            **answer.headers,
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
        }
        if with_cookie and self.server.token:
            headers["Set-Cookie"] = f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(answer.body)
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # a browser that scrolls fast cancels requests


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
