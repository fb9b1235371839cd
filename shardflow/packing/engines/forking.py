"""Process server: a fork of a command, made before it has read an input, that forks its packing processes.

Most of what a new interpreter costs a packing process are imports, which the command has made for itself. A
fork shares them, in memory too. It is safe only in a process with one thread, because another thread may
hold a lock that nobody releases in the fork; and only in a process of a command's own, because another one
has memory, files and libraries that are no business of a packing process. So the command makes its server
right after its imports: later it has threads, and inputs in memory. Elsewhere packing processes are new
interpreters.

The server dies with the job, and packing processes die with the server. A socket pair for each of them tells
the job how it ended; the job closes its side to have it killed.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, NoReturn

from shardflow.packing.engines.base import PROCESS_ENVIRONMENT, end_with
from shardflow.packing.engines.worker import main
from shardflow.processes import group_signals_held_back, ignore_group_signals

_NUMBER: Final = struct.Struct("<i")
_CHANNEL: Final = 3
"""Descriptor of the channel in a packing process, behind the standard streams."""
_MALLOC_OPTIONS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "MALLOC_TRIM_THRESHOLD_": -1,
        "MALLOC_TOP_PAD_": -2,
        "MALLOC_MMAP_THRESHOLD_": -3,
        "MALLOC_ARENA_MAX": -8,
    }
)
"""What ``mallopt`` of glibc (malloc.h) calls the variables that it reads when a program starts."""


class ForkedProcess:
    """A packing process that the server forked; to its job what `subprocess.Popen` is.

    Attributes:
        pid: Its process id.
        returncode: Its exit code, below 0 for a signal; None while it runs, or if nobody knows.
    """

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._link = link
        self._has_ended = False

    def poll(self) -> int | None:
        """Return the exit code if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int | None:
        """Wait for its end and return its exit code.

        Args:
            timeout: In seconds.

        Raises:
            subprocess.TimeoutExpired: It takes longer.
        """
        if not self._has_ended:
            with selectors.DefaultSelector() as selector:
                selector.register(self._link, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("packing process", timeout)
            self.returncode = _receive_number(self._link)
            self._has_ended = True
            self._link.close()
        return self.returncode

    def kill(self) -> None:
        """Kill it; without effect once it has ended."""
        if not self._has_ended:
            with suppress(OSError):
                self._link.shutdown(socket.SHUT_WR)


class ProcessServer:
    """The job's end of a process server.

    Args:
        connection: Socket whose other end `serve` has.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def start(self, channel: int, log: int) -> ForkedProcess:
        """Start a packing process.

        Args:
            channel: Descriptor of its end of the channel.
            log: Descriptor for its standard output and errors until it runs.

        Raises:
            OSError: The server has ended, or cannot fork.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._connection, [b"\0"], [channel, log, theirs.fileno()])
        except OSError:
            ours.close()
            raise
        pid = _receive_number(ours)
        if pid is None or pid < 0:
            ours.close()
            code = errno.ECONNRESET if pid is None else -pid
            raise OSError(code, os.strerror(code))
        return ForkedProcess(pid, ours)


_current: ProcessServer | None = None
_former_environment: Mapping[str, str | None] | None = None
"""What `prepare_to_fork` has replaced, until `process_server` puts it back."""


def current_server() -> ProcessServer | None:
    """Return the server of this process, if it has one."""
    return _current


def prepare_to_fork() -> None:
    """Prepare a command for `process_server`; call it before its imports.

    It gets the environment of its packing processes, so that libraries start no threads. The garbage
    collector, which finds nothing among what is imported, waits for the end of the imports.
    """
    global _former_environment  # noqa: PLW0603 - a process is the command of one job
    if "numpy" not in sys.modules:
        _former_environment = {name: os.environ.get(name) for name in PROCESS_ENVIRONMENT}
        os.environ.update(PROCESS_ENVIRONMENT)
        gc.disable()


@contextmanager
def process_server() -> Iterator[None]:
    """Let packing processes be forks of this process as it is now, where that is safe.

    Without effect where `prepare_to_fork` came too late, this process has threads, or the system is not Linux
    5.3 or later.
    """
    global _current, _former_environment  # noqa: PLW0603 - a process is the command of one job
    former, _former_environment = _former_environment, None
    if former is None:
        yield
        return
    # What is imported stays: no collection shall look at it, and write to pages that all processes share.
    gc.freeze()
    gc.enable()
    _set_malloc_options()
    server = _fork_server() if _can_fork() else None
    # What else the job starts, such as Ray, has the environment of the job.
    for name, value in former.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    if server is None:
        yield
        return
    pid, connection = server
    _current = ProcessServer(connection)
    try:
        yield
    finally:
        _current = None
        connection.close()
        with suppress(ChildProcessError):  # where SIGCHLD is ignored, the kernel has reaped it
            os.waitpid(pid, 0)


def _can_fork() -> bool:
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        return len([*Path("/proc/self/task").iterdir()]) == 1
    except OSError:
        return False


def _fork_server() -> tuple[int, socket.socket]:
    """Fork the server; return its process id and the job's end of the connection."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    with group_signals_held_back():
        pid = os.fork()
        if pid == 0:
            ours.close()
            _be_server(theirs, parent)
    theirs.close()
    return pid, ours


def _be_server(connection: socket.socket, parent: int) -> NoReturn:
    """Serve in a fork, which never returns to its caller."""
    with suppress(BaseException):
        ignore_group_signals()
        serve(connection, parent)
    os._exit(1)


def serve(connection: socket.socket, parent: int) -> NoReturn:
    """Fork packing processes until the job closes the connection.

    Args:
        connection: The server's end.
        parent: Process id of the job.
    """
    end_with(parent)
    # A scheduler may leave it ignored, and nobody would learn how a process ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    running: set[_Running] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                one: _Running | None = key.data
                if one is None:
                    one = _fork_for(connection)
                    if one is not None:
                        running.add(one)
                        selector.register(one.ended, selectors.EVENT_READ, one)
                        selector.register(one.link, selectors.EVENT_READ, one)
                elif one not in running:
                    continue  # its end was the event before
                elif key.fileobj is one.link:  # the job has closed its side
                    selector.unregister(one.link)
                    os.kill(one.pid, signal.SIGKILL)
                else:
                    running.remove(one)
                    selector.unregister(one.ended)
                    with suppress(KeyError):  # the job had closed its side before
                        selector.unregister(one.link)
                    one.tell_end()


class _Running(NamedTuple):
    """A packing process in its server."""

    pid: int
    ended: int
    """Descriptor that can be read once it has ended."""
    link: socket.socket

    def tell_end(self) -> None:
        """Reap the process, and tell the job its exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.ended)
        with self.link:
            _send_number(self.link, code)


def _fork_for(connection: socket.socket) -> _Running | None:
    """Fork a packing process as the job asks for, None if that is impossible; end once the job is done."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    if not data:
        os._exit(0)
    channel, log, link_descriptor = descriptors
    link = socket.socket(fileno=link_descriptor)
    server = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _be_packing_process(channel, log, server)
        ended = _watch(pid)
    except OSError as error:
        with link:
            _send_number(link, -(error.errno or errno.EAGAIN))
        return None
    else:
        _send_number(link, pid)
        return _Running(pid, ended, link)
    finally:
        os.close(channel)
        os.close(log)


def _watch(pid: int) -> int:
    """Return a descriptor that can be read once a child has ended; without one it does not stay."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _be_packing_process(channel: int, log: int, server: int) -> NoReturn:
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        if channel != _CHANNEL:
            os.dup2(channel, _CHANNEL)
        for one in [*Path("/proc/self/fd").iterdir()]:
            if int(one.name) > _CHANNEL:
                with suppress(OSError):  # that of the listing
                    os.close(int(one.name))
        main(_CHANNEL, server)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as in an interpreter, which would end
        traceback.print_exc()
    os._exit(code)


def _set_malloc_options() -> None:
    """Set what glibc has read from the environment when the program started; elsewhere without effect.

    The job makes a page of slices in the same way.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, option in _MALLOC_OPTIONS.items():
            mallopt(option, int(PROCESS_ENVIRONMENT[name]))


def _send_number(link: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody waits
        link.sendall(_NUMBER.pack(number))


def _receive_number(link: socket.socket) -> int | None:
    """Receive a number; None if the other side has closed."""
    try:
        data = link.recv(_NUMBER.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else None
