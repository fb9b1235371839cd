"""An HTTP proxy on 127.0.0.1 that is slow, narrow and faulty on request, before any server.

Faults come from a list (the next request gets the first one), or from a seeded schedule: what happens to a
request then follows from the seed, what it asks for and how often that was asked before. So a run meets the
same faults whatever the order and number of its threads.

    python -m tests.fault_proxy --target 8080 --latency-ms 20 --mb-per-s 100
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

__all__ = ["KINDS", "FaultProxy", "Schedule"]

KINDS = {
    "status": "an answer of that status, with Retry-After: 1 for 429 and 503",
    "reset": "the connection is reset after that many bytes of the answer",
    "cut": "the connection is closed in the middle of the body",
    "short": "half of the body, with a length that says so",
    "long": "three bytes more than asked for, with a length that says so",
    "range": "a Content-Range that names other bytes",
    "whole": "200 and all of the object; not for signed requests",
    "html": "200 and a page of HTML",
    "gzip": "a body that says that it is compressed",
    "etag": "another ETag",
    "flip": "one wrong byte",
    "stall": "half of the body, and then nothing",
    "hold": "no answer at all",
    "lost": "the request is done, and its answer is lost",
}
"""What can happen to a request; written ``kind`` or ``kind:number``."""

_CHUNK_BYTES = 64 << 10
_PAGE = b"<html><body>Please log in</body></html>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Faults drawn for ranged reads from a seed."""

    seed: int
    shares: Mapping[str, float]
    """Of the requests, by fault; the rest goes well."""
    most_in_a_row: int = 2
    """The same request goes well after so many faults."""

    def fault(self, what: str, turn: int) -> str:
        """Return what happens to a request that was made ``turn`` times before."""
        if turn >= self.most_in_a_row:
            return ""
        digest = hashlib.sha256(f"{self.seed} {turn} {what}".encode()).digest()
        drawn = int.from_bytes(digest[:6], "big") / (1 << 48)
        for fault, share in self.shares.items():
            drawn -= share
            if drawn < 0:
                return fault
        return ""


class _Link:
    """A link that all connections share: each byte takes its time."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        # A narrow link drips, rather than letting nothing through for long and then much.
        self.chunk_bytes = (
            _CHUNK_BYTES if bytes_per_s is None else max(1, min(_CHUNK_BYTES, int(bytes_per_s / 20)))
        )

    async def carry(self, num_bytes: int) -> None:
        if self._bytes_per_s is None:
            return
        now = time.monotonic()
        # What was not used some milliseconds ago is lost, but a late timer is none of the link's doing.
        self._free_at = max(self._free_at, now - 0.02) + num_bytes / self._bytes_per_s
        if self._free_at > now + 0.002:
            await asyncio.sleep(self._free_at - now)


@dataclass(slots=True)
class _Message:
    """The head of a request or answer."""

    first: str
    headers: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> _Message:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.split("\r\n")
        pairs = (line.partition(":") for line in lines if line)
        return cls(first, [(name, value.strip()) for name, _, value in pairs])

    def get(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    def set(self, name: str, value: str | None) -> None:
        self.headers = [pair for pair in self.headers if pair[0].lower() != name.lower()]
        if value is not None:
            self.headers.append((name, value))

    def encode(self) -> bytes:
        lines = [self.first, *(f"{name}: {value}" for name, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class FaultProxy:
    """Stands before a server; a context manager that runs it in a thread.

    Args:
        target_port: Of the server on 127.0.0.1.
        latency_s: Before each answer.
        bytes_per_s: Of all answers together.
        schedule: Faults of ranged reads.

    Attributes:
        faults: What happens to the next requests, first in, first out; empty strings are good ones.
        before_answer: Called in a thread of its own before each answer.
        num_requests: Requests so far.
        met: How many requests met which fault.
    """

    def __init__(
        self,
        target_port: int,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.faults: list[str] = []
        self.before_answer: Callable[[], object] | None = None
        self.num_requests = 0
        self.met: Counter[str] = Counter()
        self._target_port = target_port
        self._latency_s = latency_s
        self._link = _Link(bytes_per_s)
        self._schedule = schedule
        self._turns: Counter[str] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listener.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.serve(ready)), daemon=True)
        self._thread.start()
        self._loop, self._end = ready.result(timeout=300)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def serve(
        self, ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] | None = None
    ) -> None:
        """Serve until told to end."""
        end = asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._converse(reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(accept, sock=self._listener, limit=1 << 20)
        if ready is not None:
            ready.set_result((asyncio.get_running_loop(), end))
        await end.wait()
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # asyncio does it only for sockets that name their protocol, which accepted ones do not.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the two went away
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request and its answer on; whether the connection may carry another."""
        request = await _Message.read(reader)
        body = await reader.readexactly(int(request.get("content-length") or 0))
        self.num_requests += 1
        kind, _, number = self._draw(request).partition(":")
        if kind:
            self.met[kind] += 1
        if kind == "hold":
            await reader.read()
            return False
        if kind == "status":
            await asyncio.sleep(self._latency_s)
            writer.write(_refusal(int(number)))
            await writer.drain()
            return True
        if kind == "html":
            head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(_PAGE)}\r\n\r\n"
            writer.write(head.encode() + _PAGE)
            return True
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port, limit=1 << 20)
        try:
            request.set("Connection", "close")
            if kind == "whole":
                request.set("Range", None)
            up_writer.write(request.encode() + body)
            answer = await _Message.read(up_reader)
            if self.before_answer is not None:
                await asyncio.to_thread(self.before_answer)
            await asyncio.sleep(self._latency_s)
            if kind == "lost":
                _reset(writer)
                return False
            return await self._relay(request, answer, up_reader, writer, kind, int(number or 0), reader)
        finally:
            up_writer.close()

    def _draw(self, request: _Message) -> str:
        if self.faults:
            return self.faults.pop(0)
        span = request.get("range")
        if self._schedule is None or span is None:
            return ""
        what = f"{request.first} {span}"
        self._turns[what] += 1
        return self._schedule.fault(what, self._turns[what] - 1)

    async def _relay(
        self,
        request: _Message,
        answer: _Message,
        upstream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kind: str,
        number: int,
        reader: asyncio.StreamReader,
    ) -> bool:
        length = answer.get("content-length")
        has_body = not request.first.startswith("HEAD") and " 304 " not in answer.first
        left = (int(length) if length is not None else None) if has_body else 0
        answer.set("Connection", None if left is not None else "close")
        half = None if left is None else left // 2
        if left is not None and kind in {"short", "long"}:
            left = left // 2 if kind == "short" else left
            answer.set("Content-Length", str(left + (3 if kind == "long" else 0)))
        if kind == "etag":
            answer.set("ETag", '"another"')
        if kind == "range":
            answer.set("Content-Range", _shifted(answer.get("content-range")))
        if kind == "gzip":
            answer.set("Content-Encoding", "gzip")
        head = answer.encode()
        if kind == "reset" and number < len(head):
            writer.write(head[:number])
            _reset(writer)
            return False
        writer.write(head)
        num_sent = 0
        while left is None or num_sent < left:
            most = self._link.chunk_bytes
            chunk = await upstream.read(most if left is None else min(most, left - num_sent))
            if not chunk:
                break
            if kind == "flip" and not num_sent:
                chunk = bytes([chunk[0] ^ 4]) + chunk[1:]
            if kind == "reset" and len(head) + num_sent + len(chunk) > number:
                writer.write(chunk[: number - len(head) - num_sent])
                await writer.drain()
                _reset(writer)
                return False
            if kind in {"cut", "stall"} and half is not None and num_sent + len(chunk) > half:
                writer.write(chunk[: half - num_sent])
                await writer.drain()
                if kind == "stall":
                    await reader.read()  # until the client gives up
                return False
            await self._link.carry(len(chunk))
            writer.write(chunk)
            await writer.drain()
            num_sent += len(chunk)
        if kind == "long":
            writer.write(b"???")
        return left is not None


def _refusal(status: int) -> bytes:
    body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    retry = "Retry-After: 1\r\n" if status in {429, 503} else ""
    return f"HTTP/1.1 {status} Fault\r\n{retry}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _shifted(span: str | None) -> str | None:
    if span is None:
        return None
    numbers, _, size = span.removeprefix("bytes ").partition("/")
    first, _, last = numbers.partition("-")
    return f"bytes {int(first) + 1}-{int(last) + 1}/{size}"


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset instead of an orderly end."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def main() -> None:
    """Run a proxy until it is killed; its first line is its port."""
    parser = argparse.ArgumentParser(description="a slow and narrow way to a server on this machine")
    parser.add_argument("--target", type=int, required=True, metavar="PORT")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--mb-per-s", type=float, default=0.0, help="of all answers together (no bound)")
    arguments = parser.parse_args()
    proxy = FaultProxy(
        arguments.target,
        latency_s=arguments.latency_ms / 1e3,
        bytes_per_s=arguments.mb_per_s * 1e6 or None,
    )
    sys.stdout.write(f"{proxy.port}\n")
    sys.stdout.flush()
    asyncio.run(proxy.serve())


if __name__ == "__main__":
    main()
