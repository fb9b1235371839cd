"""Client of data servers: asks them for the micro-batches of a stream, and makes what none of them delivers.

A micro-batch is a pure function of the run and of (epoch, step, micro-batch), so any server can make it and a
server that dies loses nothing but time: its requests go to others. Order, bounds in bytes and deadlines are
those of the engine of `shardflow.loading.engine`, whose threads wait for answers instead of decoding.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, SampleError, ShardflowError, os_reason
from shardflow.fields.decode import ThreadState
from shardflow.loading.assembly import MicroBatchTask
from shardflow.loading.batch import Batch
from shardflow.loading.config import LoaderConfig, parse_server
from shardflow.loading.service_memory import SharedBuffers, is_of_this_host
from shardflow.loading.service_wire import (
    OPEN_RUN,
    UNKNOWN_RUN,
    RunMessage,
    check_piece,
    decode_error,
    encode_ticket,
)
from shardflow.processes import wait_for_at_exit
from shardflow.telemetry import StageCounters
from shardflow.viewing.web import read_token

try:
    from pyarrow import flight
except ImportError:
    raise ConfigError("Data servers need pyarrow; install shardflow[service].") from None

_LOGGER = logging.getLogger(__name__)
_RESOLVE_S: Final = 5.0
"""Time between two looks at names and files of addresses."""
_PING_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 15.0
_REFUSED_PAUSE_S: Final = 60.0
_LEAST_PATIENCE_S: Final = 2.0
_PATIENCE: Final = 8.0
"""A server that takes so many times as long as any lately is slow, and another one is asked."""
_FORGETS: Final = 0.95
_JOIN_S: Final = 7.0
_CHANNEL: Final = [
    ("grpc.enable_http_proxy", 0),  # only configured hosts are connected to
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
]


class _Server:
    """Data server as seen from here. Its numbers belong to the lock of `DataServers`."""

    def __init__(self, host: str, address: str, port: int) -> None:
        self.host, self.address, self.port = host, address, port
        self.name = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self.client: Any = None
        self.shares_memory = is_of_this_host(address)
        self.opening = threading.Lock()
        self.has_run = False
        self.num_requests = 0
        self.has_bad_samples = False
        self.is_up = True
        self.pause_s = 0.0
        self.ask_again_at = 0.0


class _RefusedError(Exception):
    """Signal that a server will not serve this run; internal to this module."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class DataServers:
    """Data servers of one loader. Safe for many threads; a thread of its own watches servers that are down.

    Args:
        config: Of the loader.
        run: What the servers are to make.
        counters: Gets the stage ``service``, of it ``service_queue``, and the events ``service_resent`` and
            ``service_local``.
        changed: Weakly refers to a function that is called when there are other servers than before.

    Attributes:
        buffers: Memory of batches that servers of this host make.

    Raises:
        ConfigError: The token or the certificate cannot be read.
    """

    def __init__(
        self,
        config: LoaderConfig,
        run: RunMessage,
        counters: StageCounters,
        changed: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._config, self._run, self.counters, self._changed = config, run, counters, changed
        self._headers: list[tuple[bytes, bytes]] = []
        if config.server_token_file:
            token = read_token(config.server_token_file, "loader.server_token_file")
            self._headers = [(b"authorization", f"Bearer {token}".encode())]
        self._authority = _read_authority(config.server_tls_ca)
        self._starting, self._lock = threading.Lock(), threading.Lock()
        self._servers: dict[tuple[str, int], _Server] = {}
        self.buffers = SharedBuffers(config.prefetch_bytes)
        self._slowest_s = 0.0
        self._was_accepted = False
        self._is_alone = False
        self._wrong_lines: set[str] = set()
        self._next = 0
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def num_servers(self) -> int:
        """Servers that are known, up or down; at least 1."""
        return max(1, len(self._servers))

    def requests(self) -> Requests:
        """Return the requests of a new stream."""
        with self._starting:
            if self._watcher is None:
                self._find_servers()
                self._watcher = threading.Thread(target=self._watch, name="shardflow-servers", daemon=True)
                wait_for_at_exit(self._watcher).start()
        return Requests(self)

    def close(self) -> None:
        """End the thread; nothing may be asked for afterwards."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join(_JOIN_S)

    # ---- one request -----------------------------------------------------------------------------

    def fetch(self, task: MicroBatchTask, requests: Requests, thread: ThreadState) -> Batch | None:
        """Return a micro-batch that a server made; None if none delivers it, or one found a sample bad.

        Raises:
            ConfigError: A server refuses the run, and none has accepted it yet.
            ShardflowError: The stream was closed.
        """
        tried: list[_Server] = []
        # Half of the deadline of the consumer is left for this process.
        until = time.monotonic() + self._config.wait_timeout_s / 2
        while time.monotonic() < until and (server := self._choose(tried)) is not None:
            tried.append(server)
            thread.enter("service", f"data server {server.name}")
            start = time.monotonic()
            patience_s = min(self._patience_s(len(tried)), until - start)
            try:
                batch = self._ask(server, task, requests, patience_s)
            except SampleError:
                self._note_bad_sample(server)
                return None
            except _RefusedError as refused:
                self._refused(server, refused.error)
            except Exception as error:  # noqa: BLE001 - whatever a server or a network does, others are asked
                requests.check_open()
                self._set_aside(server, error)
            else:
                self._answered(server, time.monotonic() - start)
                if batch.descriptor.get("quarantined") == task.request()["masks"]:
                    return batch
                self._note_bad_sample(server)
                return None
            finally:
                with self._lock:
                    server.num_requests -= 1
            self.counters.add("service", time.monotonic() - start)
            self.counters.add("service_resent", num_items=1)
        requests.check_open()
        self._note_alone(is_alone=True)
        return None

    def _ask(self, server: _Server, task: MicroBatchTask, requests: Requests, patience_s: float) -> Batch:
        start = time.monotonic()
        for is_second in (False, True):
            self._open_run(server, start + patience_s)
            options = self._options(start + patience_s - time.monotonic())
            client = self._connected(server)  # kept to the end of the answer, whoever sets the server aside
            try:
                with self._shared(server, task) as buffer:
                    request = task.request()
                    if buffer is not None:
                        request["memory"] = self.buffers.place_of(buffer)
                    reader = client.do_get(flight.Ticket(encode_ticket(self._run.name, request)), options)
                    with requests.under_way(reader):
                        return self._receive(server, reader, task, start, buffer)
            except flight.FlightError as error:
                known = decode_error(error.extra_info, server.name)
                if known is None:
                    raise
                name, found = known
                if name == UNKNOWN_RUN and not is_second:  # it was started again, or forgot an idle run
                    server.has_run = False
                    continue
                raise found from None
        raise FormatError("a data server must know a run that it was told, got none.")

    @contextmanager
    def _shared(self, server: _Server, task: MicroBatchTask) -> Iterator[NDArray[np.uint8] | None]:
        """Lend memory that a server of this host may write to; None for others, or if the size is unknown."""
        num_bytes = task.known_num_bytes if server.shares_memory else None
        buffer = None
        if num_bytes is not None:
            try:
                buffer = self.buffers.lend(num_bytes)
            except OSError as error:  # no more descriptors, or a sandbox without such files
                server.shares_memory = False
                _LOGGER.info("memory cannot be shared with data servers of this host: %s", os_reason(error))
        if buffer is None:
            yield None
            return
        try:
            yield buffer
        except BaseException:
            self.buffers.forget(buffer)
            raise

    def _receive(
        self,
        server: _Server,
        reader: Any,
        task: MicroBatchTask,
        start: float,
        buffer: NDArray[np.uint8] | None,
    ) -> Batch:
        piece = reader.read_chunk()
        head = json.loads(piece.app_metadata.to_pybytes())
        num_bytes = check_piece(head["num_bytes"])
        is_there = buffer is not None and head["crc32c"] is None
        if buffer is None:
            buffer = task.received(num_bytes)[:num_bytes]
        elif num_bytes != len(buffer):
            raise FormatError(f"{task.describe()} must have {len(buffer)} bytes, got {num_bytes}.")
        else:
            server.shares_memory = is_there  # a server of another user or container is not asked again
        end = checksum = 0
        while True:
            data = np.asarray(piece.data.column(0))
            if end + len(data) > num_bytes or data.dtype != np.uint8:
                raise FormatError(
                    f"{task.describe()} must have {num_bytes} bytes, got more from a data server."
                )
            buffer[end : end + len(data)] = data
            end += len(data)
            if len(data):
                checksum = google_crc32c.extend(checksum, data)  # while it is in the processor's cache
            try:
                piece = reader.read_chunk()
            except StopIteration:
                break
        if not is_there and (end != num_bytes or checksum != head["crc32c"]):
            raise FormatError(f"{task.describe()} must come as a data server sent it, got other bytes.")
        batch = task.batch_of(buffer, head["batch"])
        self.counters.add("service_queue", float(head["queued_s"]), 0, 1)
        self.counters.add("service", time.monotonic() - start, num_bytes, 1)
        return batch

    def _open_run(self, server: _Server, deadline: float) -> None:
        """Describe the run to a server that does not know it."""
        if not server.has_run:
            with server.opening:
                if not server.has_run:
                    self._describe_run(server, deadline)
                    server.has_run = self._was_accepted = True

    def _describe_run(self, server: _Server, deadline: float) -> None:
        action = flight.Action(OPEN_RUN, self._run.body)
        try:
            list(self._connected(server).do_action(action, self._options(deadline - time.monotonic())))
        except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError):
            raise _RefusedError(
                ConfigError("it asks for another token; set server_token_file to the one it was given.")
            ) from None
        except flight.FlightServerError as error:
            known = decode_error(error.extra_info, server.name)
            if known is None:
                raise
            raise _RefusedError(known[1]) from None

    def _options(self, timeout_s: float) -> Any:
        return flight.FlightCallOptions(timeout=max(0.001, timeout_s), headers=self._headers)

    def _connected(self, server: _Server) -> Any:
        """Return the one connection to a server; it is made without waiting for anything."""
        with self._lock:
            if server.client is None:
                scheme = "grpc+tls" if self._authority else "grpc"
                settings: dict[str, Any] = {}
                if self._authority:
                    settings = {"tls_root_certs": self._authority, "override_hostname": server.host}
                place = f"{scheme}://{server.name}"
                server.client = flight.FlightClient(place, generic_options=_CHANNEL, **settings)
            return server.client

    # ---- which server ----------------------------------------------------------------------------

    def _choose(self, tried: list[_Server]) -> _Server | None:
        """Return the server with the fewest requests under way; None if there is none left to ask."""
        with self._lock:
            every = list(self._servers.values())
            if not every:
                return None
            self._next += 1
            turn = self._next % len(every)
            free = [one for one in every[turn:] + every[:turn] if one.is_up and one not in tried]
            if not free:
                return None
            server = min(free, key=lambda one: one.num_requests)
            server.num_requests += 1
            return server

    def _patience_s(self, attempt: int) -> float:
        """Return how long to wait for a server, longer for each further one that is asked."""
        most = self._config.server_timeout_s
        if not self._slowest_s:
            return most
        return min(most, max(_LEAST_PATIENCE_S, _PATIENCE * self._slowest_s) * 2.0 ** (attempt - 1))

    def _answered(self, server: _Server, seconds: float) -> None:
        with self._lock:
            self._slowest_s = max(seconds, _FORGETS * self._slowest_s)
            server.pause_s = 0.0
        self._note_alone(is_alone=False)

    def _set_aside(self, server: _Server, error: Exception) -> None:
        """Ask a server again only after a pause, in which the watcher looks whether it answers."""
        with self._lock:
            was_up, server.is_up, server.client, server.has_run = server.is_up, False, None, False
            server.pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * server.pause_s))
            server.ask_again_at = time.monotonic() + server.pause_s
        if was_up:
            _LOGGER.info(
                "data server %s is set aside (%s); its requests go to others", server.name, _described(error)
            )

    def _refused(self, server: _Server, error: Exception) -> None:
        """Leave out a server for a while; if none has accepted the run, its settings are wrong."""
        sentence = error.message if isinstance(error, ShardflowError) else type(error).__name__
        with self._lock:
            server.ask_again_at = time.monotonic() + _REFUSED_PAUSE_S
            server.is_up = not self._was_accepted
        if not self._was_accepted:
            raise ConfigError(f"The data server {server.name} does not serve this run: {sentence}")
        _LOGGER.warning("data server %s does not serve this run: %s", server.name, sentence)

    def _note_bad_sample(self, server: _Server) -> None:
        """Say once that samples are bad for a server: its disk may be at fault, so this process looks."""
        with self._lock:
            is_known, server.has_bad_samples = server.has_bad_samples, True
        if not is_known:
            _LOGGER.warning(
                "a sample is bad for data server %s; micro-batches with such samples are made here, where "
                "they are masked only if they are bad here too",
                server.name,
            )

    def _note_alone(self, *, is_alone: bool) -> None:
        with self._lock:
            if is_alone == self._is_alone:
                return
            self._is_alone = is_alone
        if is_alone:
            _LOGGER.warning("no data server answers; micro-batches are made here until one does")
        else:
            _LOGGER.info("data servers answer again")

    # ---- servers that come and go ----------------------------------------------------------------

    def _watch(self) -> None:
        resolve_at = time.monotonic() + _RESOLVE_S
        while not self._closing.wait(_FIRST_PAUSE_S):
            if time.monotonic() >= resolve_at:
                has_changed, changed = self._find_servers(), self._changed()
                if has_changed and changed is not None:
                    changed()
                del changed  # no thread of ours keeps a loader alive
                resolve_at = time.monotonic() + _RESOLVE_S
            for server in list(self._servers.values()):
                if not server.is_up and time.monotonic() >= server.ask_again_at:
                    self._ping(server)

    def _ping(self, server: _Server) -> None:
        """Take a server back if it answers, and knows the run."""
        try:
            list(self._connected(server).list_actions(self._options(_PING_S)))
            self._open_run(server, time.monotonic() + self._config.server_timeout_s)
        except _RefusedError as refused:
            with suppress(ConfigError):  # of a run that no server has accepted yet: told to who asks next
                self._refused(server, refused.error)
            return
        except Exception as error:  # noqa: BLE001 - as in `fetch`
            self._set_aside(server, error)
            return
        with self._lock:
            server.is_up = True
        _LOGGER.info("data server %s answers again", server.name)

    def _find_servers(self) -> bool:
        """Look up the addresses of the servers; returns whether they are others."""
        found: dict[tuple[str, int], str] = {}
        for host, port in self._entries():
            try:
                infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, ValueError):  # ValueError: no name that can be asked for
                # A name that cannot be looked up now keeps the addresses that it had.
                infos = []
                found |= {key: one.host for key, one in self._servers.items() if one.host == host}
            found |= {(str(info[4][0]), port): host for info in infos}
        with self._lock:
            before = self._servers
            self._servers = {
                (address, port): before.get((address, port)) or _Server(host, address, port)
                for (address, port), host in found.items()
            }
        return before.keys() != found.keys()

    def _entries(self) -> Iterator[tuple[str, int]]:
        """Yield host and port of each entry, of files too; a file that cannot be read now has none."""
        for one in self._config.servers:
            if not one.startswith("@"):
                yield parse_server(one)
                continue
            lines: list[str] = []
            with suppress(OSError, UnicodeDecodeError):
                lines = Path(one[1:]).expanduser().read_text("utf-8").split()
            for line in lines:
                try:
                    yield parse_server(line)
                except ConfigError as error:  # the others are asked
                    if line not in self._wrong_lines:
                        self._wrong_lines.add(line)
                        _LOGGER.warning("a line of a file of data servers is left out: %s", error.message)


class Requests:
    """Requests of one stream, which end with it.

    Args:
        servers: The data servers.
    """

    def __init__(self, servers: DataServers) -> None:
        self.servers = servers
        self._readers: set[Any] = set()
        self._is_closed = False

    @property
    def num_servers(self) -> int:
        """Servers that are known; the stream has a number of threads for each."""
        return self.servers.num_servers

    def task(self, local: MicroBatchTask) -> ServedTask:
        """Return the task that asks a server to do another task."""
        return ServedTask(local, self)

    @contextmanager
    def under_way(self, reader: Any) -> Iterator[None]:
        """Have an answer cancelled if the stream is closed meanwhile."""
        self._readers.add(reader)
        try:
            self.check_open()
            yield
        except BaseException:
            with suppress(Exception):  # else the server goes on making it
                reader.cancel()
            raise
        finally:
            self._readers.discard(reader)

    def check_open(self) -> None:
        """Stop working for a stream that was closed.

        Raises:
            ShardflowError: It was closed.
        """
        if self._is_closed:
            raise ShardflowError("the iteration was closed.")

    def close(self) -> None:
        """Cancel what is under way."""
        self._is_closed = True
        for reader in list(self._readers):
            with suppress(Exception):
                reader.cancel()


class ServedTask:
    """Micro-batch that a data server makes, or this process if none does; see `engine.Task`.

    Args:
        local: The task of this process: it knows the sizes from tables, and what comes must fit.
        requests: Of the stream.
    """

    num_parts = 1

    def __init__(self, local: MicroBatchTask, requests: Requests) -> None:
        self._local, self._requests = local, requests
        self._batch: Batch | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the batch, reserved before it is asked for."""
        return self._local.num_bytes

    def begin(self) -> None:
        """Do nothing: memory is taken when the answer begins."""

    def run(self, _part: int, thread: ThreadState) -> None:
        """Ask for the micro-batch, or make it; errors as of `MicroBatchTask.run` and `DataServers.fetch`.

        Whether a sample is bad is found out here alone: a server's broken disk masks nothing.
        """
        if not self._local.is_padding:
            self._batch = self._requests.servers.fetch(self._local, self._requests, thread)
            if self._batch is not None:
                return
            self._requests.servers.counters.add("service_local", num_items=1)
        self._local.begin()
        for part in range(self._local.num_parts):
            self._requests.check_open()
            self._local.run(part, thread)

    def finish(self) -> Batch:
        """Return the batch."""
        return self._local.finish() if self._batch is None else self._batch

    def describe(self) -> str:
        """Name the micro-batch for a message."""
        return self._local.describe()


def _read_authority(path: str) -> bytes:
    if not path:
        return b""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"loader.server_tls_ca must be a PEM file of certificates ({os_reason(error)}); correct the path."
        ) from None


def _described(error: Exception) -> str:
    """Return an error in a few words, without what a library says."""
    if isinstance(error, ShardflowError):
        return error.message.rstrip(".")
    kinds: Mapping[type[Exception], str] = {
        flight.FlightTimedOutError: "it did not answer in time",
        flight.FlightUnavailableError: "it cannot be reached, or is full",
        flight.FlightCancelledError: "the request was cancelled",
    }
    return next((text for kind, text in kinds.items() if isinstance(error, kind)), type(error).__name__)
