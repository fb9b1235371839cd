"""Python commands in processes forked from one that has imported what they need: 0.1 s a start, not seconds.

``run(["-m", "shardflow.cli.main", "info", folder])`` is ``subprocess.run([sys.executable, "-m", ...])`` where
the start of the interpreter is not what is tested: a process of its own session, with its own environment,
folder and standard streams, that ends, fails and is killed like any other. A shell's stand-in for ``python``
is ``python -I -S tests/forks.py SOCKET ARGUMENT...``.

`ForkedChildren` does the same for the packing and loader processes that the library starts in a test: they
are children of the test's process, as the library expects.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NoReturn

__all__ = [
    "PATIENCE_S",
    "REPOSITORY",
    "SERVERS",
    "SYNC",
    "Forked",
    "ForkedChildren",
    "command_server",
    "leave_syncs_out",
    "rank_server",
    "run",
]

REPOSITORY = Path(__file__).resolve().parent.parent
PATIENCE_S = 600.0
"""Deadline of what a test waits for: long, because a loaded machine is no failure."""
SERVERS: set[int] = set()
"""Process ids of the servers, which end with this process."""
SYNC = os.fsync
"""The real one."""
_NUM_STREAMS = 3
_MAX_DESCRIPTORS = 16
_FREE_DESCRIPTOR = 512
"""Above those that a process of these tests has open."""
_OURS = {"benchmarks", "examples", "pipelines", "shardflow", "tests"}


def leave_syncs_out() -> None:
    """Let `os.fsync` of this process wait for no disk: no test cuts the power, and jobs sync often.

    Calls and their order are as they were. New interpreters have the real one, and tests that need it.
    """

    def sync(file: int) -> None:
        os.fstat(file)  # an error, as there, of what is not open

    os.fsync = sync  # type: ignore[assignment]


class Forked:
    """A running command.

    Args:
        place: Socket of the server.
        arguments: As behind ``python``: options ``-W ACTION``, then ``-m MODULE``, ``-c CODE`` or a script.
        streams: Descriptors of standard input, output and errors.
        cwd: Where it runs.
        environment: Of it; that of this process by default.
        is_fresh: Import modules of this repository anew, so that it has those alone that it imports itself.
    """

    def __init__(
        self,
        place: str,
        arguments: Sequence[str],
        streams: Sequence[int],
        *,
        cwd: str | Path = ".",
        environment: Mapping[str, str] | None = None,
        is_fresh: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(place)
        request = {
            "arguments": list(arguments),
            "cwd": str(Path(cwd).absolute()),
            "environment": dict(os.environ if environment is None else environment),
            "is_fresh": is_fresh,
        }
        data = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._socket, [data], list(streams))
        self._socket.sendall(data[sent:])
        self._answers = self._socket.makefile("r", encoding="ascii")
        self.pid = self._answer()

    def _answer(self) -> int:
        line = self._answers.readline()
        if not line:
            self._close()
            raise AssertionError("a forked command must have a process beside it, got one that has ended")
        return int(line)

    def _close(self) -> None:
        self._answers.close()
        self._socket.close()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code, below 0 for a signal.

        Raises:
            subprocess.TimeoutExpired: It takes longer.
        """
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = self._answer()
            self._close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def command_server() -> str:
    """Return the socket of a server that has imported the commands, packing and its drivers."""
    return _serve(
        "default",
        [
            "shardflow.cli.main:command_parsers",
            "shardflow.packing.handlers",
            "tests.corpora_case",
            "tests.inline_engine",
            "tests.pack_driver",
        ],
    )


@functools.cache
def rank_server() -> str:
    """Return the socket of a server that has imported what ranks of training need."""
    return _serve("error", ["tests.distributed.forked:import_ahead", "shardflow.training.run"])


def run(
    arguments: Iterable[object],
    *,
    cwd: str | Path = REPOSITORY,
    env: Mapping[str, str] | None = None,
    input: str = "",  # noqa: A002 - the name that `subprocess.run` has
    timeout: float = PATIENCE_S,
    is_fresh: bool = False,
    server: Callable[[], str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python command, and return what `subprocess.run` does with ``capture_output`` and ``text``.

    Modules of this repository that the server has imported are there without an import of the command's own,
    unless it ``is_fresh``. ``server`` is `command_server` or, for one that needs torch, `rank_server`.

    Raises:
        subprocess.TimeoutExpired: It took longer, and was killed.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        source.write(input.encode())
        source.seek(0)
        words = [str(one) for one in arguments]
        streams = [source.fileno(), out.fileno(), err.fileno()]
        place = (server or command_server)()
        process = Forked(place, words, streams, cwd=cwd, environment=env, is_fresh=is_fresh)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(words, code, _text(out), _text(err))


class ForkedChildren(subprocess.Popen[bytes]):
    """`subprocess.Popen` whose packing and loader processes are forks of one that has imported what they do.

    It is for a process that adopts orphans (``PR_SET_CHILD_SUBREAPER``): the fork of a server's fork that has
    ended is a child of this process, with the parent, the exit code and the end of any other. It is in a
    session of its own. Another environment for what reads it when it is loaded has another server.
    """

    are_forked = True
    """Whether it forks; False where the start of the interpreter is what is tested."""

    def _execute_child(self, *values: Any) -> None:
        real = super()._execute_child  # type: ignore[misc]
        call = inspect.signature(real).bind(*values).arguments
        place = _server_of_child(call["args"], call["env"]) if self.are_forked else None
        if place is None:
            real(*values)
            return
        ends = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        streams = [stream if end == -1 else end for stream, end in enumerate(ends)]
        request = {
            "arguments": call["args"][1:],
            "cwd": str(Path(call["cwd"] or ".").absolute()),
            "environment": call["env"],
            "is_fresh": False,
            "parent": os.getpid(),
            "descriptors": [*range(_NUM_STREAMS), *call["pass_fds"]],
        }
        data = json.dumps(request).encode() + b"\n"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(place)
            sent = socket.send_fds(connection, [data], [*streams, *call["pass_fds"]])
            connection.sendall(data[sent:])
            answer = connection.makefile("r", encoding="ascii").readline()
        if not answer:
            raise AssertionError("a forked child must say its process id, got one that has ended")
        self.pid = int(answer)
        self._child_created = True
        self._close_pipe_fds(*(call[name] for name in _ENDS))  # type: ignore[attr-defined]


_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_READ_AT_START = ("BLOSC_", "LD_", "MALLOC_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "OPENCV_", "PYTHON")
_CHILDREN = MappingProxyType(
    {
        "from shardflow.packing.engines.worker import main": (
            "shardflow.packing.engines.worker",
            "shardflow.packing.handlers",
            # What the first task imports.
            "shardflow.format.slice_codecs.b2nd:load",
            "shardflow.packing.attachments.annotations.kinds",
            "shardflow.packing.attachments.records.kinds",
            "shardflow.packing.attachments.waveforms",
        ),
        "from shardflow.loading.process_main import main": ("shardflow.loading.process_main",),
    }
)
"""What the server of a child has imported, by a text of the child's program."""


def _server_of_child(command: object, environment: Mapping[str, str] | None) -> str | None:
    """Return the socket of a server for a child of the library; None for all other commands."""
    if environment is None or not isinstance(command, list) or command[:3] != [sys.executable, "-P", "-c"]:
        return None
    ahead = next((ahead for start, ahead in _CHILDREN.items() if start in command[3]), None)
    if ahead is None:
        return None
    read = ((name, value) for name, value in environment.items() if name.startswith(_READ_AT_START))
    return _child_server(ahead, tuple(sorted(read)))


@functools.cache
def _child_server(ahead: tuple[str, ...], read_at_start: tuple[tuple[str, str], ...]) -> str:
    others = {name: value for name, value in os.environ.items() if not name.startswith(_READ_AT_START)}
    return _serve("default", ahead, {**others, **dict(read_at_start)})


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _serve(action: str, ahead: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Start a server, which ends with this process, and return its socket once it has imported everything."""
    place = Path(tempfile.mkdtemp(prefix="forks-"), "socket")
    command = [sys.executable, "-W", action, "-m", "tests.forks", "serve", str(place), *ahead]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if environment is None else environment
    server = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which ends the commands
    )
    SERVERS.add(server.pid)
    atexit.register(_end, server, place)
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise AssertionError(f"the server of forked commands did not start, code {server.wait()}")
    return str(place)


def _end(server: subprocess.Popen[bytes], place: Path) -> None:
    server.kill()
    server.communicate()
    place.unlink(missing_ok=True)
    place.parent.rmdir()


# ---- the server --------------------------------------------------------------------------------------


def serve(place: str, ahead: Sequence[str]) -> None:
    """Fork a process for each request until standard input ends; it returns in the forks alone."""
    from importlib import import_module

    leave_syncs_out()
    for name in ahead:
        module, _, function = name.partition(":")
        found = import_module(module)
        if function:
            getattr(found, function)()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    os.write(1, b"ready\n")
    while True:
        readable, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in readable:  # whoever started it is gone
            Path(place).unlink()
            Path(place).parent.rmdir()
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _be_forked(connection)
        connection.close()
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _be_forked(connection: socket.socket) -> None:
    """Read a request, fork once more, and be the command; the process between tells how it ended."""
    data, received, _, _ = socket.recv_fds(connection, 1 << 16, _MAX_DESCRIPTORS)
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:  # whoever asked is gone
            os._exit(1)
        data += more
    request = json.loads(data)
    parent = request.get("parent")
    between = os.getpid()
    pid = os.fork()
    if pid:
        if parent is not None:
            os._exit(0)
        for stream in (*received, *range(_NUM_STREAMS)):
            os.close(stream)
        _tell(connection, pid)
    os.setsid()
    if parent is not None:
        while os.getppid() == between:
            time.sleep(0.0005)
        if os.getppid() != parent:  # whoever asked is gone
            os._exit(1)
        connection.sendall(f"{os.getpid()}\n".encode())
    connection.close()
    _place(received, request.get("descriptors", range(_NUM_STREAMS)))
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["is_fresh"]:
        for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
            del sys.modules[name]
    _run(request["arguments"])


def _place(received: Sequence[int], numbers: Iterable[int]) -> None:
    """Give descriptors the numbers that they have for whoever asked."""
    apart = [fcntl.fcntl(one, fcntl.F_DUPFD, _FREE_DESCRIPTOR) for one in received]
    for one in received:
        os.close(one)
    for one, number in zip(apart, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)


def _tell(connection: socket.socket, pid: int) -> NoReturn:
    """Say the process id and, once it has ended, the exit code; kill it when nobody waits any more."""
    has_ended = os.pidfd_open(pid)
    with contextlib.suppress(OSError):  # nobody is there: the next line sees it
        connection.sendall(f"{pid}\n".encode())
    if has_ended not in select.select([connection.fileno(), has_ended], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _run(arguments: list[str]) -> None:
    """Run what would follow ``python``."""
    import runpy

    actions = [os.environ[name] for name in ("PYTHONWARNINGS",) if os.environ.get(name)]
    while arguments[0] == "-W":
        actions.append(arguments[1])
        arguments = arguments[2:]
    is_safe = arguments[0] == "-P"
    arguments = arguments[is_safe:]
    sys.warnoptions[:] = actions or sys.warnoptions  # of processes that this one starts
    for action in actions:
        warnings.simplefilter(action)  # type: ignore[arg-type]
    match arguments:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.modules.pop(module, None)  # as there, it is a module beside ``__main__``, if it is one
            sys.path[0] = str(Path.cwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            sys.path[:1] = [] if is_safe else [""]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [script, *rest]:
            sys.argv = [script, *rest]
            sys.path[0] = str(Path(script).parent.absolute())
            runpy.run_path(script, run_name="__main__")


def _main() -> None:
    first, *rest = sys.argv[1:]
    if first == "serve":
        serve(rest[0], rest[1:])
        return
    code = Forked(first, rest, range(_NUM_STREAMS)).wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    _main()
