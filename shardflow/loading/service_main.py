"""Data server: makes micro-batches of any run over its datasets, for loaders on other machines.

A server keeps no position and no order: a ticket names run, epoch, step and micro-batch, and a loader made
from the run's description makes exactly that. What it holds is bounded: runs by number and idle time, batches
under way by bytes, calls by number. It imports code for a run only where it was told to.
"""

from __future__ import annotations

import hmac
import json
import logging
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, ShardflowError, os_reason
from shardflow.fields.decode import ThreadState
from shardflow.fields.quarantine import Quarantine
from shardflow.format import Dataset
from shardflow.format.keys import sha256_hex
from shardflow.format.table import crc32c
from shardflow.loading.assembly import BatchSource, MicroBatchTask
from shardflow.loading.batch import Batch
from shardflow.loading.engine import BufferPool, Pool
from shardflow.loading.loader import Loader
from shardflow.loading.service_memory import ClientMemory
from shardflow.loading.service_wire import (
    MAX_RUN_BYTES,
    OPEN_RUN,
    PIECE_BYTES,
    UNKNOWN_RUN,
    decode_ticket,
    encode_error,
    loader_arguments,
    package_digest,
)
from shardflow.storage import CacheConfig
from shardflow.storage.cache.store import Cache
from shardflow.viewing.web import is_loopback, new_token, read_token

try:
    import pyarrow as pa
    from pyarrow import flight
except ImportError:
    raise ConfigError("Data servers need pyarrow; install shardflow[service].") from None

_LOGGER = logging.getLogger(__name__)
_SCHEMA: Final = pa.schema([pa.field("data", pa.uint8(), nullable=False)])
_MAX_CALLS: Final = 512
"""Calls that wait or are answered at once; each has a thread of the network library."""
_MAX_RUNS: Final = 16
_NUM_EPOCHS: Final = 2
"""Epochs of a run that are kept planned: ranks are at the end of one and in the next at the same time."""
_LOOK_S: Final = 0.2
_HOUSEKEEPING_S: Final = 5.0
_SHOWN: Final = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Options of a data server, as the command line has them."""

    datasets: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 0
    token_file: str = ""
    has_token: bool = True
    """Whether there is a token without a file of one: a new one, where only this machine is served."""
    tls_cert: str = ""
    tls_key: str = ""
    num_threads: int = 2
    max_bytes: int = 1 << 30
    allowed: tuple[str, ...] = ()
    idle_s: float = 600.0
    cache_directory: str = ""
    cache_bytes: int = 0

    def open(self) -> DataServer:
        """Start the server.

        Raises:
            ConfigError: A dataset, the token, the certificate or the address cannot be used.
        """
        cache = None
        if self.cache_directory:
            cache = Cache(CacheConfig(directory=Path(self.cache_directory), max_bytes=self.cache_bytes))
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key go together; give both, or neither.")
        try:
            pair = [Path(name).read_bytes() for name in (self.tls_cert, self.tls_key) if name]
        except OSError as error:
            raise ConfigError(
                f"--tls-cert and --tls-key must be PEM files ({os_reason(error)}); correct the path."
            ) from None
        if self.token_file:
            token = read_token(self.token_file, "--token-file")
        else:
            token = new_token() if self.has_token and is_loopback(self.host) else ""
        return DataServer(
            [Dataset.open(url, cache=cache) for url in self.datasets],
            host=self.host,
            port=self.port,
            token=token,
            certificate=(pair[0], pair[1]) if pair else None,
            num_threads=self.num_threads,
            max_bytes=self.max_bytes,
            allowed=self.allowed,
            idle_s=self.idle_s,
        )


class _Run:
    """A run that loaders have described."""

    def __init__(self, loader: Loader, pool: BufferPool) -> None:
        self._loader, self._pool = loader, pool
        self._lock = threading.Lock()
        self._sources: dict[int, BatchSource] = {}
        self.num_calls = 0
        self.used_at = time.monotonic()

    def task(
        self,
        epoch: int,
        step: int,
        micro: int,
        masks: list[dict[str, Any]],
        memory: NDArray[np.uint8] | None = None,
    ) -> MicroBatchTask:
        """Return the task of a micro-batch, to be made in some memory if it has the size for it.

        Raises:
            PlanError: The run has no such place.
            StateError: A mask is malformed.
        """
        with self._lock:
            source = self._sources.pop(epoch, None) or self._loader.source(epoch, self._pool)
            self._sources[epoch] = source  # the last used one last
            while len(self._sources) > _NUM_EPOCHS:
                del self._sources[next(iter(self._sources))]
        known = Quarantine(0)
        known.load(masks)
        pool: Pool = self._pool if memory is None else _Given(memory, self._pool)
        return MicroBatchTask(replace(source, known_masks=known, pool=pool), step, micro)

    def close(self) -> None:
        """End the loader."""
        self._loader.close()


class _Given:
    """Pool that first lends the memory of a client, for the batch, and then that of another pool."""

    def __init__(self, memory: NDArray[np.uint8], pool: BufferPool) -> None:
        self._memory: NDArray[np.uint8] | None = memory
        self._pool = pool

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Return how much memory a buffer takes; see `Pool`."""
        return BufferPool.size_of(num_bytes)

    def bound(self, max_free_bytes: int) -> None:
        """Change how much memory of the other pool may be idle; see `Pool`."""
        self._pool.bound(max_free_bytes)

    def lend(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a buffer; see `Pool`."""
        memory, self._memory = self._memory, None
        if memory is not None and num_bytes <= len(memory):
            return memory[:num_bytes]
        return self._pool.lend(num_bytes)


class _Room:
    """Bound on the bytes of batches that are being made or sent; one batch may exceed it alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def reserved(self, num_bytes: int, call: Any) -> Iterator[None]:
        """Wait for room, and hold it until the block ends."""
        with self._changed:
            while self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
                _check_wanted(call)
                self._changed.wait(_LOOK_S)
            self._num_bytes += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._num_bytes -= num_bytes
                self._changed.notify_all()


class DataServer(flight.FlightServerBase):  # type: ignore[misc]
    """Arrow Flight server of micro-batches; it answers from its creation until `close`.

    Args:
        datasets: What runs may read, in any version.
        host: Address to listen on; other than loopback addresses need a token.
        port: Port to listen on; 0 for any free one, see the attribute ``port``.
        token: What clients must send; empty asks for none.
        certificate: Certificate chain and private key in PEM, for TLS; None for none.
        num_threads: Threads that read and decode.
        max_bytes: Bound on the batches that are being made or sent; a single one may exceed it.
        allowed: Packages and modules that runs may name transforms and field types of.
        idle_s: Runs that nobody asks for this long are forgotten; their loaders describe them again.

    Attributes:
        token: What clients must send; empty if anybody may ask.

    Raises:
        ConfigError: The address cannot be used, or needs a token.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        certificate: tuple[bytes, bytes] | None = None,
        num_threads: int = 2,
        max_bytes: int = 1 << 30,
        allowed: Collection[str] = (),
        idle_s: float = 600.0,
    ) -> None:
        if not token and not is_loopback(host):
            raise ConfigError(
                "A data server beyond this machine needs a token: write one with "
                "`openssl rand -hex 24 > FILE` and give --token-file FILE, or listen on 127.0.0.1."
            )
        if not is_loopback(host) and certificate is None:
            _LOGGER.warning("batches and the token cross the network in clear; give --tls-cert and --tls-key")
        package_digest()  # of the code that runs here, whatever is installed later
        self._served = tuple(datasets)
        self.token, self._allowed, self._idle_s = token, tuple(allowed), idle_s
        self._pool, self._room = BufferPool(max_bytes), _Room(max_bytes)
        self._memory = ClientMemory()
        self._threads = ThreadPoolExecutor(num_threads, "shardflow-serving")
        self._local = threading.local()
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}
        self._opening: dict[str, Future[None]] = {}
        self._num_calls = 0
        self._closing = threading.Event()
        scheme = "grpc" if certificate is None else "grpc+tls"
        shown = f"[{host}]" if ":" in host else host
        try:
            super().__init__(
                f"{scheme}://{shown}:{port}",
                tls_certificates=None if certificate is None else [certificate],
                middleware={"token": _TokenCheck(token)},
            )
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"The data server cannot listen on {shown}:{port} ({os_reason(error)}); is the port "
                "taken, and are certificate and key in PEM?"
            ) from None
        self._keeper = threading.Thread(target=self._keep_house, name="shardflow-runs", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """Answer what is under way, and end."""
        self._closing.set()
        self.shutdown()
        self._keeper.join()
        self._threads.shutdown(cancel_futures=True)
        for run in self._runs.values():
            run.close()

    @property
    def num_runs(self) -> int:
        """Runs that are open."""
        return len(self._runs)

    # ---- calls -----------------------------------------------------------------------------------

    def list_actions(self, context: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the actions; clients see by it that the server is there."""
        return [(OPEN_RUN, "describe a run")]

    def do_action(self, context: Any, action: Any) -> list[bytes]:  # noqa: ARG002
        """Open a run, see `service_wire.describe_run`."""
        if action.type != OPEN_RUN:
            raise flight.FlightServerError("there is no such action")
        with self._call(), _told():
            self._open(action.body)
        return []

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Return the stream of a micro-batch."""
        with _told():
            asked = decode_ticket(ticket.ticket)
        return flight.GeneratorStream(_SCHEMA, self._answer(context, *asked))

    def _answer(
        self, context: Any, name: str, place: tuple[int, int, int], masks: list[dict[str, Any]], memory: Any
    ) -> Iterator[Any]:
        """Yield a micro-batch in pieces; its room is held until the last is sent or the client is gone.

        One that was made in the client's memory is not sent.
        """
        with self._call(), _told(), self._used(name) as run:
            asked_at = time.monotonic()
            given = None if memory is None else self._memory.find(memory)
            task = run.task(*place, masks, given)
            with self._room.reserved(task.num_bytes, context):
                batch, queued_s = self._made(task, context, asked_at)
                is_there = given is not None and np.may_share_memory(given, batch.buffer)
                head = {
                    "num_bytes": len(batch.buffer),
                    "crc32c": None if is_there else crc32c(batch.buffer),
                    "queued_s": queued_s,
                    "batch": batch.descriptor,
                }
                metadata: bytes | None = json.dumps(head, separators=(",", ":")).encode()
                data = pa.py_buffer(b"" if is_there else batch.buffer)
                for start in range(0, max(1, data.size), PIECE_BYTES):
                    piece = data.slice(start, min(PIECE_BYTES, data.size - start))
                    array = pa.Array.from_buffers(pa.uint8(), piece.size, [None, piece])
                    yield pa.RecordBatch.from_arrays([array], schema=_SCHEMA), metadata
                    metadata = None

    def _made(self, task: MicroBatchTask, call: Any, asked_at: float) -> tuple[Batch, float]:
        """Return a micro-batch, and how long it waited for room and a thread."""
        began_at = asked_at
        is_unwanted = False

        def make() -> Batch:
            nonlocal began_at
            began_at = time.monotonic()
            thread: ThreadState | None = getattr(self._local, "thread", None)
            if thread is None:
                thread = self._local.thread = ThreadState()
            task.begin()
            for part in range(task.num_parts):
                if is_unwanted:
                    raise ShardflowError("nobody waits for this micro-batch any more.")
                task.run(part, thread)
            return task.finish()

        future = self._threads.submit(make)
        try:
            while not future.done():
                _check_wanted(call)
                wait([future], _LOOK_S)
            return future.result(), began_at - asked_at
        except BaseException:
            is_unwanted = True
            if not future.cancel():
                wait([future])  # the part that is being done holds its memory
            raise

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Count a call; beyond a bound clients go elsewhere."""
        with self._lock:
            if self._num_calls >= _MAX_CALLS:
                raise flight.FlightUnavailableError("the server has as many calls as it answers at once")
            self._num_calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1

    # ---- runs ------------------------------------------------------------------------------------

    def _open(self, body: bytes) -> None:
        if len(body) > MAX_RUN_BYTES:
            raise ConfigError(f"the description of a run may have {MAX_RUN_BYTES} bytes, got {len(body)}.")
        name = sha256_hex(body)
        with self._lock:
            if name in self._runs:
                return
            others = self._opening.get(name)
            opening = others or self._opening.setdefault(name, Future())
        if others is not None:  # one call opens a run, and the others get what becomes of it
            others.result()
            return
        try:
            with tempfile.TemporaryDirectory(prefix="shardflow-run-") as folder:
                loader = Loader(**loader_arguments(bytes(body), self._served, self._allowed, Path(folder)))
            self._publish(name, loader)
        except BaseException as error:
            with self._lock:
                del self._opening[name]
            opening.set_exception(error)
            raise
        opening.set_result(None)
        _LOGGER.info("opened run %s (%s)", loader.run_id[:_SHOWN], name[:_SHOWN])

    def _publish(self, name: str, loader: Loader) -> None:
        """Make a run known, in the same moment in which it is no longer being opened."""
        try:
            with self._lock:
                self._make_room()
                self._runs[name] = _Run(loader, self._pool)
                del self._opening[name]
        except BaseException:
            loader.close()
            raise

    def _make_room(self) -> None:
        """Forget the run that was used longest ago; needs the lock."""
        if len(self._runs) < _MAX_RUNS:
            return
        idle = [name for name, run in self._runs.items() if not run.num_calls]
        if not idle:
            raise flight.FlightUnavailableError("the server has as many runs as it holds, all of them in use")
        self._runs.pop(min(idle, key=lambda name: self._runs[name].used_at)).close()

    @contextmanager
    def _used(self, name: str) -> Iterator[_Run]:
        with self._lock:
            run = self._runs.get(name)
            if run is None:
                raise flight.FlightServerError(
                    "the run is not known here", json.dumps({"class": UNKNOWN_RUN, "message": ""})
                )
            run.num_calls += 1
        try:
            yield run
        finally:
            with self._lock:
                run.num_calls -= 1
                run.used_at = time.monotonic()

    def _keep_house(self) -> None:
        while not self._closing.wait(min(_HOUSEKEEPING_S, self._idle_s)):
            until = time.monotonic() - self._idle_s
            self._memory.collect()
            with self._lock:
                idle = [name for name, run in self._runs.items() if not run.num_calls and run.used_at < until]
                gone = [self._runs.pop(name) for name in idle]
            for run in gone:
                run.close()
                _LOGGER.info("forgot a run that nobody asked for")


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Check of every call for the token, before anything else is looked at."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode() if token else b""

    def start_call(self, info: Any, headers: Any) -> None:  # noqa: ARG002
        """Refuse a call without the token."""
        if not self._expected:
            return
        given = headers.get("authorization") or [""]
        offered = given[0] if isinstance(given[0], bytes) else str(given[0]).encode("utf-8", "replace")
        if not hmac.compare_digest(offered, self._expected):
            raise flight.FlightUnauthenticatedError("the token is missing or another one")


@contextmanager
def _told() -> Iterator[None]:
    """Send errors by class and sentence; of those of others the text stays here, which may quote data."""
    try:
        yield
    except flight.FlightError:
        raise
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the loader raises it, or asks another server
        if not isinstance(error, ShardflowError):
            _LOGGER.warning("a call failed: %s", type(error).__name__)
        raise flight.FlightServerError(type(error).__name__, encode_error(error)) from None


def _check_wanted(call: Any) -> None:
    if call.is_cancelled():
        raise flight.FlightCancelledError("nobody waits for this micro-batch any more")
