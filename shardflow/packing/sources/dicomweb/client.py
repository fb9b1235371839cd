"""HTTP client of one DICOMweb archive: TLS, credentials, rate limits, retries, and answers of bounded size.

Built on ``http.client``, because a file must arrive as the archive stores it and in bounded memory, and
because nothing but the configured host may ever be contacted: proxies of the environment are not used, and
a redirect elsewhere is an error. Messages hold numbers and names of settings, never an address below the
archive's own, an identifier, or text of the server.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, quote, urlencode, urljoin, urlsplit

from shardflow.errors import ConfigError, StorageError, os_reason
from shardflow.packing.sources.dicomweb.config import PASSWORD, TOKEN, USER, ArchiveConfig, check_address
from shardflow.storage.requests import PassingFaultError, Retrying

_JSON: Final = "application/dicom+json"
_MAX_ANSWER_BYTES: Final = 64 << 20
_MAX_REDIRECTS: Final = 3
_MAX_WAIT_S: Final = 120.0
_PASSING: Final = {408, 425, 429, 500, 502, 503, 504}
_REFUSALS: Final = {429, 503}
_NO_CONTENT: Final = 204
_LAST_BYTES: Final = 1 << 12
"""Bytes behind a multipart body that are read rather than ending the connection."""
_LEAST_BYTES: Final = 1 << 10
"""Bytes that must arrive within each `ArchiveConfig.timeout_s`."""


class RefusedError(Exception):
    """The archive answers a request with a final status, such as 404."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class DeliveryError(PassingFaultError):
    """A fault of one answer, rather than of the way to the archive: a 500, a cut or unusable body."""


def authorization(environment: Mapping[str, str]) -> str | None:
    """Return the ``Authorization`` that the environment asks for; None for none.

    Raises:
        ConfigError: It asks for two kinds, or names half of one.
    """
    token, user, password = (environment.get(name, "") for name in (TOKEN, USER, PASSWORD))
    if token and (user or password):
        raise ConfigError(
            f"the environment must have {TOKEN}, or {USER} and {PASSWORD}, got both; unset one."
        )
    if bool(user) != bool(password):
        raise ConfigError(f"the environment must have both {USER} and {PASSWORD}, got one; set the other.")
    if not (token or user):
        return None
    text = f"Bearer {token}" if token else "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    if not text.isprintable() or not text.isascii():
        raise ConfigError("the credentials of the archive must be printable ASCII in one line; correct them.")
    return text


class Pace:
    """Rate limits of requests and bytes, shared by all threads.

    Args:
        requests_per_s: 0 for no limit.
        bytes_per_s: Likewise.
        wait: Waits for so many seconds.
        clock: Returns seconds.
    """

    def __init__(
        self,
        requests_per_s: float,
        bytes_per_s: float,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rates = (requests_per_s, bytes_per_s)
        self._next_s = [0.0, 0.0]
        self._wait, self._clock = wait, clock
        self._lock = threading.Lock()

    def request(self) -> None:
        """Wait until another request may begin."""
        self._take(0, 1)

    def received(self, num_bytes: int) -> None:
        """Wait as long as so many bytes may take."""
        self._take(1, num_bytes)

    def pause(self, seconds: float) -> None:
        """Let no request begin before so many seconds have passed."""
        with self._lock:
            self._next_s[0] = max(self._next_s[0], self._clock() + seconds)

    def _take(self, kind: int, amount: float) -> None:
        rate = self._rates[kind]
        with self._lock:
            now = self._clock()
            at = max(now, self._next_s[kind])
            if rate:
                self._next_s[kind] = at + amount / rate
        if at > now:
            self._wait(at - now)


class Answer:
    """A response with status 200 or 204, whose body is read in pieces."""

    def __init__(self, response: http.client.HTTPResponse, client: ArchiveClient) -> None:
        self._response, self._client = response, client
        self._since, self._num_bytes = time.monotonic(), 0
        self.content_type = response.getheader("Content-Type", "")
        if response.getheader("Content-Encoding", "identity") != "identity":
            raise DeliveryError("a body in an encoding that was not asked for")
        self.is_partial = (response.getheader("Warning") or "").lstrip().startswith("299")
        """Whether the archive says that there is more than it returns."""

    @property
    def is_empty(self) -> bool:
        """Whether the status says that there is no content."""
        return self._response.status == _NO_CONTENT

    def drain(self) -> bool:
        """Read what little is left, so that the connection serves the next request; whether it can."""
        left = _LAST_BYTES
        while left > 0 and self._response.length != 0 and not self._response.isclosed():
            data = self.read(left)
            if not data:
                break
            left -= len(data)
        if self._response.length == 0:
            self._response.close()
        return self._response.isclosed()

    def read(self, num_bytes: int) -> bytes:
        """Read at most so many bytes, fewer as they arrive; ``b""`` at the end.

        Raises:
            DeliveryError: The connection broke, or hardly anything arrives.
            StorageError: The job ends.
        """
        self._client.check_open()
        try:
            data = self._response.read1(num_bytes)
        except (OSError, http.client.HTTPException) as error:
            raise DeliveryError(f"a body that breaks off ({os_reason(error)})") from None
        self._num_bytes += len(data)
        now = time.monotonic()
        if now - self._since > self._client.timeout_s:
            if self._num_bytes < _LEAST_BYTES and data:
                raise DeliveryError("a body that hardly arrives")
            self._since, self._num_bytes = now, 0
        self._client.pace.received(len(data))
        return data


class ArchiveClient:
    """Requests to one archive. Thread-safe: each thread has a connection of its own.

    Args:
        url: Root of the DICOMweb service, such as ``https://archive:8042/dicom-web``.
        settings: Limits.
        credentials: As `authorization` returns them.

    Raises:
        ConfigError: The address or the file of authorities cannot be used.
    """

    def __init__(self, url: str, settings: ArchiveConfig, credentials: str | None) -> None:
        self._base = check_address(url, settings)
        self._origin = _origin(self._base)
        self._settings, self._credentials = settings, credentials
        self._context = _tls(settings.ca_file) if self._base.scheme == "https" else None
        self._connections = threading.local()
        self._all: list[http.client.HTTPConnection] = []
        self._closed = threading.Event()
        self.timeout_s = settings.timeout_s
        self.pace = Pace(settings.max_requests_per_s, settings.max_bytes_per_s, self._closed.wait)
        self.retrying = Retrying(settings.retry, self._closed.wait)

    def close(self) -> None:
        """End all requests, also those of other threads."""
        self._closed.set()
        for connection in [*self._all]:
            with suppress(OSError, AttributeError):
                # Unlike closing alone, this ends a read of another thread.
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def check_open(self) -> None:
        """Raise StorageError once the client is closed."""
        if self._closed.is_set():
            raise StorageError("fetching from the archive was stopped; run the job again to resume.")

    def search(
        self, parts: Sequence[str], query: Sequence[tuple[str, str]]
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return the results of one QIDO-RS request, and whether the archive says that there are more.

        Args:
            parts: Path below the root, such as ``["studies", uid, "instances"]``.
            query: Names and values.

        Raises:
            RefusedError: A final status.
            StorageError: The request fails again and again, or the answer is no DICOM JSON.
            ConfigError: The archive refuses the credentials, or cannot be trusted.
        """

        def attempt(_number: int) -> tuple[list[dict[str, Any]], bool]:
            with self.get(parts, _JSON, query) as answer:
                if answer.is_empty:
                    return [], False
                data = bytearray()
                while piece := answer.read(1 << 16):
                    data += piece
                    if len(data) > _MAX_ANSWER_BYTES:
                        raise StorageError(
                            f"a result of the archive must have at most {_MAX_ANSWER_BYTES} bytes, got more; "
                            "lower inputs.archive.page_size."
                        )
                try:
                    rows = json.loads(data)
                except ValueError:
                    raise DeliveryError("a result that is no JSON") from None
                if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                    raise DeliveryError("a result that is no list of objects")
                return rows, answer.is_partial

        return self.retrying("asking the archive what it holds", attempt)

    @contextmanager
    def get(
        self, parts: Sequence[str], accept: str, query: Sequence[tuple[str, str]] = ()
    ) -> Iterator[Answer]:
        """Send one request; leave the body unread to end it.

        Raises:
            PassingFaultError: The archive cannot be reached; a `DeliveryError` if it answers with a fault.
            RefusedError: A final status.
            ConfigError: The archive refuses the credentials, redirects elsewhere, or cannot be trusted.
        """
        path = "/".join([self._base.path.rstrip("/"), *(quote(part, safe="") for part in parts)])
        # Archives are known that take an escaped wildcard for a letter, and a plus sign for itself.
        target = f"{path}?{urlencode(query, safe='*?,', quote_via=quote)}" if query else path
        answer = Answer(self._respond(target, accept), self)
        try:
            yield answer
            is_drained = answer.drain()
        except BaseException:
            self._drop()
            raise
        if not is_drained:
            self._drop()

    def _respond(self, target: str, accept: str) -> http.client.HTTPResponse:
        for _ in range(1 + _MAX_REDIRECTS):
            response = self._send(target, accept)
            status = response.status
            if status in {200, _NO_CONTENT}:
                return response
            location = response.getheader("Location") if status in {301, 302, 303, 307, 308} else None
            wait_s = _seconds(response.getheader("Retry-After"))
            self._drop()
            if location is not None:
                target = self._redirected(target, location)
                continue
            if status in {401, 403}:
                raise ConfigError(
                    f"the archive refuses the credentials (status {status}); set {TOKEN}, or {USER} and "
                    f"{PASSWORD}, in the environment, and run the job again."
                )
            if status not in _PASSING:
                raise RefusedError(status)
            if status in _REFUSALS:
                self.pace.pause(wait_s)
            raise DeliveryError(f"status {status}", is_refusal=status in _REFUSALS)
        raise ConfigError("inputs.dicomweb must not redirect in a circle; name the archive's own address.")

    def _redirected(self, target: str, location: str) -> str:
        found = urlsplit(urljoin(f"{self._base.scheme}://{self._base.netloc}{target}", location))
        if _origin(found) != self._origin:
            raise ConfigError(
                "inputs.dicomweb must not redirect to another host, which is never contacted; name the "
                "address that answers itself."
            )
        return found.path + (f"?{found.query}" if found.query else "")

    def _send(self, target: str, accept: str) -> http.client.HTTPResponse:
        headers = {"Accept": accept, "Accept-Encoding": "identity", "User-Agent": "shardflow"}
        if self._credentials is not None:
            headers["Authorization"] = self._credentials
        self.pace.request()
        while True:
            self.check_open()
            connection, is_new = self._connection()
            try:
                connection.request("GET", target, headers=headers)
                return connection.getresponse()
            except ssl.SSLCertVerificationError:
                raise ConfigError(
                    "the archive's certificate must be valid and of a known authority; name the file of its "
                    "authority in inputs.archive.ca_file."
                ) from None
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                self.check_open()
                if is_new or isinstance(error, TimeoutError):
                    raise PassingFaultError(f"no answer ({os_reason(error)})") from None
                # The server has closed a connection that was idle.

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        connection = getattr(self._connections, "open", None)
        if connection is not None:
            return connection, False
        host, port = self._base.hostname or "", self._base.port
        if self._context is not None:
            connection = http.client.HTTPSConnection(
                host, port, timeout=self.timeout_s, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self.timeout_s)
        self._connections.open = connection
        self._all.append(connection)
        return connection, True

    def _drop(self) -> None:
        connection = getattr(self._connections, "open", None)
        if connection is not None:
            self._connections.open = None
            self._all.remove(connection)
            connection.close()


def _origin(url: SplitResult) -> tuple[str, str | None, int | None]:
    try:
        port = url.port
    except ValueError:
        port = -1
    return url.scheme, url.hostname, port or {"http": 80, "https": 443}.get(url.scheme)


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError):
        raise ConfigError(
            "inputs.archive.ca_file must be a readable PEM file of certificates; correct it."
        ) from None


def _seconds(text: str | None) -> float:
    """Return the seconds of a ``Retry-After``; 0 for a date, which backoff covers."""
    return min(float(text), _MAX_WAIT_S) if text is not None and text.strip().isdecimal() else 0.0
