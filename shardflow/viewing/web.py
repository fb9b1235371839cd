"""HTTP server of pages and numbers: read-only, bounded, for this machine or behind a token.

The number of connections is bounded, since each has a thread. Every answer carries the same strict headers;
whatever a request holds, its answer is a status and a sentence.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import re
import secrets
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlsplit

from shardflow.errors import (
    AlreadyExistsError,
    ConfigError,
    PlanError,
    ShardflowError,
    StorageError,
    os_reason,
)
from shardflow.processes import join_all, wait_for_at_exit
from shardflow.storage import write_atomic

_LOGGER = logging.getLogger(__name__)

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{16,4096}")
_MAX_CONNECTIONS: Final = 64
_MAX_QUERY_FIELDS: Final = 20
_IDLE_S: Final = 60.0
_CLOSE_S: Final = 5.0


class NoSuchPage(Exception):  # noqa: N818 - an answer, not a fault
    """Signal that no page has this address; handled inside this module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a client asks for."""

    path: str
    values: Mapping[str, str]
    """Query parameters, without the token."""
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Response to a request."""

    body: bytes
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


def new_token() -> str:
    """Return a token that nobody can guess: 192 random bits in 32 characters."""
    return secrets.token_urlsafe(24)


def read_token(path: str | Path, name: str) -> str:
    """Read a token from a file.

    Args:
        path: A text file that holds nothing else.
        name: The setting or option that names it, for the error.

    Raises:
        ConfigError: The file cannot be read, or holds no token of at least 16 characters of A-Z, a-z, 0-9 and
            ``._~+/=-``.
    """
    try:
        text = Path(path).read_text("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise ConfigError(
            f"{name} must be a file that holds a token ({os_reason(error)}); correct the path."
        ) from None
    if not _TOKEN.fullmatch(text):
        raise ConfigError(
            f"{name} must be a file with one token of 16 or more letters, digits or . _ ~ + / = -, and "
            "nothing else; write one with `openssl rand -hex 24`."
        )
    return text


def kept_token(path: Path, name: str) -> str:
    """Return the token in a file of this user; a new one, which only this user reads, if there is no file.

    Args:
        path: The file; its folder exists.
        name: What errors call it.

    Raises:
        ConfigError: It cannot be read or written, holds no token, or others may have written it.
    """
    try:
        with suppress(AlreadyExistsError):
            write_atomic(path, [f"{new_token()}\n".encode("ascii")], mode=0o600)
        found, folder = path.lstat(), path.parent.stat()
    except StorageError as error:
        raise ConfigError(f"{name} must be written for scrapers, and could not be: {error.message}") from None
    except OSError as error:
        raise ConfigError(
            f"{name} must be read for scrapers ({os_reason(error)}); correct the folder."
        ) from None
    # A file system without owners or modes says the same of the folder.
    is_own = not hasattr(os, "geteuid") or found.st_uid in (os.geteuid(), folder.st_uid)
    is_open = found.st_mode & ~folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_open or not is_own or not stat.S_ISREG(found.st_mode):
        raise ConfigError(
            f"{name} must be a file of this user that nobody else can write, got a link or one that others "
            "may have written: they would know the token. Delete it for a new one."
        )
    return read_token(path, name)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class WebServer:
    """A server of one thing to read, in threads of its own until it is closed.

    On a loopback address a request whose ``Host`` is another name is refused, so that no web page can reach
    the server by a name of its own (DNS rebinding).

    Args:
        answer: Makes the answer of a request, in any thread. It may raise `NoSuchPage` (404), `ConfigError`
            and `PlanError` (400), and any other `ShardflowError` (500, with its sentence).
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        token: What clients must send: as parameter ``token``, as bearer token, or as the cookie that the
            first of these sets. Empty asks for none.
        name: Names the threads: ``NAME-server``, ``NAME-request``.

    Raises:
        OSError: The server cannot listen on the address or the port.
    """

    def __init__(
        self, answer: Callable[[Request], Answer], *, host: str, port: int, token: str, name: str
    ) -> None:
        self._token = token
        self._server = _Server(answer, host, port, token, name)
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"{name}-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """``http://HOST:PORT`` with the port that was chosen, without the token."""
        host, port = self._server.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}"

    @property
    def query(self) -> str:
        """What follows the path of an address: the token, if one is required."""
        return f"?token={quote(self._token, safe='')}" if self._token else ""

    @property
    def is_listening(self) -> bool:
        """Whether new connections are accepted."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop listening; wait up to 5 s for requests under way. Closing twice is harmless."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server.end_requests(_CLOSE_S)


class _Server(ThreadingHTTPServer):
    request_queue_size = _MAX_CONNECTIONS

    def __init__(
        self, answer: Callable[[Request], Answer], host: str, port: int, token: str, name: str
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answer, self.token, self.is_local, self.thread_name = answer, token, is_loopback(host), name
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
            name=f"{self.thread_name}-request",
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

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log nothing of a client that went away; the class of any other fault, without what was sent."""
        error = sys.exception()
        if not isinstance(error, OSError):
            _LOGGER.error("a connection failed (%s)", type(error).__name__)

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
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # what follows is no request
        try:
            address = urlsplit(self.path)
            pairs = parse_qsl(address.query, max_num_fields=_MAX_QUERY_FIELDS, keep_blank_values=True)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "the address is malformed or has too many parameters")
            return
        values = dict(pairs)
        given = values.pop("token", "")
        if not self._may_ask(given):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that was printed: it holds the token")
            return
        if len(values) + ("token" in dict(pairs)) < len(pairs):
            self._refuse(HTTPStatus.BAD_REQUEST, "the address has a parameter twice")
            return
        try:
            answer = self.server.answer(
                Request(path=address.path, values=values, headers=dict(self.headers.items()))
            )
        except NoSuchPage:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        except (ConfigError, PlanError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, error.message)
        except ShardflowError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, error.message)
        except Exception as error:
            _LOGGER.exception("a request failed")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, type(error).__name__)
        else:
            self._send(HTTPStatus.OK, answer, with_cookie=bool(given))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer a malformed request with the status and its standard phrase, without echoing it."""
        self.close_connection = True
        status = HTTPStatus(code)
        self._refuse(status, status.phrase)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing: requests name studies."""

    def _may_ask(self, given: str) -> bool:
        if self.server.is_local:
            # Without a host there is no browser: HTTP/1.0 asks for none.
            host = self.headers.get("Host")
            name = "" if host is None else re.sub(r":\d*$", "", host)
            if host is not None and name not in _LOCAL_NAMES and not is_loopback(name.strip("[]")):
                return False
        if not self.server.token:
            return True
        scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
        offered = given or (bearer.strip() if scheme.lower() == "bearer" else "") or self._cookie()
        return hmac.compare_digest(offered.encode("utf-8", "replace"), self.server.token.encode())

    @property
    def _cookie_name(self) -> str:
        # Browsers send a host's cookies to all of its ports.
        return f"shardflow_{self.server.server_address[1]}"

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie_name)
        except CookieError:
            return ""
        return found.value if found else ""

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        body = sentence.encode("utf-8", "replace")
        self._send(status, Answer(body=body, content_type="text/plain; charset=utf-8"))

    def _send(self, status: HTTPStatus, answer: Answer, *, with_cookie: bool = False) -> None:
        self.send_response(status)
        headers = {
            **_HEADERS,
            **answer.headers,
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
        }
        if with_cookie and self.server.token:
            cookie = f"{self._cookie_name}={self.server.token}"
            headers["Set-Cookie"] = f"{cookie}; HttpOnly; SameSite=Strict; Path=/"
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        try:
            self.end_headers()
            self.wfile.write(answer.body)
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # a browser that scrolls fast cancels requests
