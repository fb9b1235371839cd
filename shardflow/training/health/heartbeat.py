"""Heartbeat page, fault records and connections: what a rank and its monitor process share.

The page has two slots: the main thread writes the phase, the pulse thread what a wait for data is for. Each
slot is guarded by a counter that is odd during a write, so a rank that is stopped amid a write leaves the
last whole text to its reader, without locks. The page is anonymous and inherited by descriptor: nothing is
left behind, however the processes end.

Beats and faults are plain values that cross between processes as JSON, one object a line, over connections
that never block the sender. What is not JSON, or longer than a line may be, ends the connection: the port is
open to whoever reaches it.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self

HEALTH_FOLDER: Final = "health"
"""In the run folder: faults, and the stacks of the ranks when one came."""
FAULTS_FILE: Final = "faults.jsonl"
"""One line for each fault."""
MAIN_STACK_SIGNAL: Final = signal.SIGUSR2
"""May be sent to a rank at any time: the stack of the main thread is written."""
LAST_STACKS_SIGNAL: Final = signal.SIGRTMIN + 3
"""Sent to a rank that does not answer: the stacks of all threads are written, at a risk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideConfig:
    """Arguments of a monitor process, as JSON."""

    rank: int
    pid: int
    host: str
    page: int
    """Descriptor of the rank's page."""
    hang_s: float
    lost_s: float
    tick_s: float
    folder: str
    """The run's folder ``health``."""
    listen: str
    """Address that the hub listens on; empty in the others."""
    token: str
    """Known to this run's processes only."""
    kill_after_s: float
    """A rank that does not end by itself after a fault is killed then; it tries to end sooner."""


_SLOT_BYTES: Final = 4096
_MAX_LETTERS: Final = 1800
_HEAD: Final = struct.Struct("<QI")  # count, length of the JSON behind it
_PULSE: Final = struct.Struct("<Q")
_PULSE_AT: Final = 2 * _SLOT_BYTES
_SIZE: Final = _PULSE_AT + _PULSE.size


@dataclass(slots=True)
class HeartbeatView:
    """Content of the page at one read; counts only serve to tell two reads apart."""

    phase: dict[str, Any]
    waits_for: str
    phase_count: int
    pulse_count: int


class HeartbeatPage:
    """The page of memory.

    Args:
        descriptor: Of the page that another process created; without one a new page is made.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("shardflow-heartbeat")
            os.ftruncate(descriptor, _SIZE)
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _SIZE)
        self._seen: list[tuple[int, Any]] = [(0, {}), (0, "")]

    def write_phase(self, phase: str, *, limit_s: float | None, is_together: bool) -> None:
        """Write what begins now; called by the main thread.

        Args:
            phase: A few words.
            limit_s: How long it may take on this rank; None for no limit.
            is_together: It ends when other ranks have done their part, so they are to blame if it does not.
        """
        self._write(0, {"phase": _fitting(phase), "limit_s": limit_s, "together": is_together})

    def write_wait(self, text: str) -> None:
        """Write what the wait for data is for; called by the pulse thread."""
        self._write(1, _fitting(text))

    def beat(self) -> None:
        """Show that the interpreter runs; called by the pulse thread."""
        (count,) = _PULSE.unpack_from(self._page, _PULSE_AT)
        _PULSE.pack_into(self._page, _PULSE_AT, count + 1)

    def read(self) -> HeartbeatView:
        """Read the page; a slot during a write shows its content before."""
        for slot in (0, 1):
            self._read(slot)
        (pulse_count,) = _PULSE.unpack_from(self._page, _PULSE_AT)
        (phase_count, phase), (_, waits_for) = self._seen
        return HeartbeatView(phase, waits_for, phase_count, pulse_count)

    def close(self) -> None:
        """Release the page."""
        self._page.close()
        os.close(self.descriptor)

    def _write(self, slot: int, value: Any) -> None:
        start = slot * _SLOT_BYTES
        data = json.dumps(value).encode()
        count, _ = _HEAD.unpack_from(self._page, start)
        _HEAD.pack_into(self._page, start, count + 1, 0)
        self._page[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._page, start, count + 2, len(data))

    def _read(self, slot: int) -> None:
        start = slot * _SLOT_BYTES
        count, num_bytes = _HEAD.unpack_from(self._page, start)
        if count % 2 or count == self._seen[slot][0]:
            return
        data = self._page[start + _HEAD.size : start + _HEAD.size + num_bytes]
        if _HEAD.unpack_from(self._page, start)[0] != count:
            return  # it changed during the read; the next one returns the new text
        self._seen[slot] = (count, json.loads(data))


def _fitting(text: str) -> str:
    """Cut a text so that its JSON, where a letter may become two, fits a slot beside other values."""
    return text[:_MAX_LETTERS].encode("ascii", "replace").decode()


FaultKind = Literal["gone", "failed", "stopped", "held", "stuck", "silent"]
"""``gone``: the process ended without a word. ``failed``: it ended with an error. ``stopped``: a signal
stopped it. ``held``: it runs no Python, as where an extension keeps the interpreter's lock. ``stuck``: its
main thread does not get on. ``silent``: nothing comes from its machine."""

_FOUND = {
    "gone": "ended without an error, as after SIGKILL or when memory runs out",
    "failed": "failed",
    "stopped": "has been stopped by a signal",
    "held": "has shown no sign of its interpreter",
    "stuck": "has made no progress",
    "silent": "is unreachable: nothing has arrived from its machine",
}
_REMEDIES = {
    "gone": "check the kernel log of that machine, and start again to resume",
    "failed": "check the log of that rank",
    "stopped": "find the sender of SIGSTOP, and start again to resume",
    "held": "check its stacks in the folder health of the run, and start again to resume",
    "stuck": "check its stacks in the folder health of the run, and start again to resume",
    "silent": "check that machine and its network, and start again to resume",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """Last known phase of a rank."""

    phase: str = "starting"
    """Such as ``"step 17, waiting for data"``."""
    phase_s: float = 0.0
    """For how long."""
    waits_for: str = ""
    """Where it waits for data: shard, tier and stage of each busy loader thread."""

    def describe(self) -> str:
        """Describe the beat for a message."""
        text = f"{self.phase} for {self.phase_s:.0f} s"
        return f"{text}: {self.waits_for}" if self.waits_for else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The first thing that went wrong in a run."""

    kind: FaultKind
    rank: int
    host: str
    pid: int
    beat: Beat
    after_s: float = 0.0
    """Length of the silence, if that is the fault."""
    text: str = ""
    """Of ``failed``: the error, in text without identifiers."""
    exit_code: int = 1
    """Of ``failed``: what the rank leaves with, and all others with it."""

    def sentence(self) -> str:
        """Return what happened, where, and what to do."""
        found = _FOUND[self.kind]
        if self.kind == "failed" and self.text:
            found = f"{found}: {self.text}"
        if self.after_s:
            found = f"{found} for {self.after_s:.0f} s"
        return (
            f"rank {self.rank} {found} (host {self.host}, process {self.pid}, {self.beat.describe()}); "
            f"{_REMEDIES[self.kind]}."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fault as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote."""
        known = {name: found for name, found in value.items() if name in cls.__slots__}
        return cls(**{**known, "beat": Beat(**value["beat"])})


_MAX_BYTES: Final = 64 * 1024


class JsonConnection:
    """Connection that carries JSON objects, one a line.

    Args:
        stream: A connected socket; it is made non-blocking.

    Attributes:
        is_open: False once the peer is gone, reads nothing, or sends what it must not; then `close` it.
    """

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.stream = stream
        self.is_open = True
        self._incoming = b""
        self._outgoing = b""

    def send(self, value: Mapping[str, Any]) -> None:
        """Send an object, or as much of it as fits; the rest follows with the next one."""
        self._outgoing += json.dumps(value).encode() + b"\n"
        try:
            while self.is_open and self._outgoing:
                self._outgoing = self._outgoing[self.stream.send(self._outgoing) :]
        except BlockingIOError:
            self.is_open = len(self._outgoing) <= _MAX_BYTES
        except OSError:
            self.is_open = False

    def receive(self) -> list[dict[str, Any]]:
        """Return the objects that have arrived completely."""
        try:
            data = self.stream.recv(_MAX_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        objects, self._incoming, is_sound = split_lines(self._incoming + data)
        self.is_open = self.is_open and is_sound and bool(data)
        return objects

    def close(self) -> None:
        """End the connection; closing twice is harmless."""
        self.is_open = False
        self.stream.close()


def split_lines(data: bytes) -> tuple[list[dict[str, Any]], bytes, bool]:
    """Split bytes into objects.

    Returns:
        The objects, the bytes of a line that is not whole yet, and whether all of it was sound.
    """
    *lines, rest = data.split(b"\n")
    objects: list[dict[str, Any]] = []
    try:
        for line in lines:
            value = json.loads(line)
            if not isinstance(value, dict):
                return objects, b"", False
            objects.append(value)
    except (ValueError, RecursionError):
        return objects, b"", False
    return objects, rest, len(rest) <= _MAX_BYTES
