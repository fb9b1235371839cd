"""The pool survives everything a packing process can do, and its processes carry their limits."""

from __future__ import annotations

import errno
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import ShardflowError, StorageError
from shardflow.packing.engines import forking
from shardflow.packing.engines import local as pool_module
from shardflow.packing.engines.base import (
    PROCESS_ENVIRONMENT,
    Task,
    TaskDone,
    WorkerLimits,
    WorkerSetup,
)
from shardflow.packing.engines.forking import ForkedProcess, ProcessServer
from shardflow.packing.engines.local import LocalEngine
from tests.forks import SERVERS, ForkedChildren

REPOSITORY = Path(__file__).resolve().parents[3]
MIB = 1 << 20
LIMITS = WorkerLimits(memory_bytes=600 * MIB, task_s=30.0, file_bytes=10 * MIB, open_files=64)

MakePool = Callable[..., LocalEngine]


SERVE = """
import signal, socket, sys
from shardflow.packing.engines.forking import serve
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some schedulers leave it
serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ProcessServer]:
    """A process server that is an interpreter of its own: this process has threads."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", SERVE, str(theirs.fileno()), str(os.getpid())]
        environment = {**os.environ, **PROCESS_ENVIRONMENT}
        with subprocess.Popen(
            command, pass_fds=[theirs.fileno()], cwd=REPOSITORY, env=environment
        ) as process:
            theirs.close()
            SERVERS.add(process.pid)
            yield ProcessServer(ours)
            ours.close()
        assert process.returncode == 0


@pytest.fixture(autouse=True, params=["interpreter", "fork"])
def starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start processes as jobs do: limits and failures of a start are among what is tested."""
    monkeypatch.setattr(ForkedChildren, "are_forked", False)
    if request.param == "fork":
        monkeypatch.setattr(forking, "_current", request.getfixturevalue("server"))
    return str(request.param)


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[MakePool]:
    with ExitStack() as stack:

        def make(num_processes: int = 1, limits: WorkerLimits = LIMITS, **setup: bool) -> LocalEngine:
            worker = WorkerSetup(
                limits=limits,
                handlers="tests.unit.packing.pool_handlers:make_handler",
                setup=setup,
                log_path=tmp_path / "processes.log",
            )
            return stack.enter_context(LocalEngine(num_processes, worker))

        yield make


def _task(kind: str, *, timeout_s: float = 300.0, handle: Any = None, **payload: Any) -> Task:
    return Task(kind=kind, payload=payload, timeout_s=timeout_s, handle=handle)


def _do(pool: LocalEngine, kind: str, **arguments: Any) -> TaskDone:
    pool.submit(_task(kind, **arguments))
    return pool.wait()


def test_tasks_come_back_with_their_handles(make_pool: MakePool) -> None:
    pool = make_pool(2)
    waiting, seen, pids = list(range(20)), {}, set()
    while waiting or pool.num_running:
        while waiting and pool.has_idle:
            number = waiting.pop()
            pool.submit(_task("echo", handle=number, number=number))
        done = pool.wait()
        assert done.result is not None
        seen[done.task.handle] = done.result["payload"]["number"]
        pids.add(done.result["pid"])
    assert seen == {number: number for number in range(20)}
    # Long-lived: two processes did all the work, and none was replaced.
    assert len(pids) == 2
    assert pool.num_replaced == 0
    assert pool.peak_memory_bytes > MIB


def test_processes_carry_their_limits(make_pool: MakePool) -> None:
    """Read from the process's own /proc entry, and from outside."""
    pool = make_pool()
    done = _do(pool, "limits")
    assert done.result is not None
    inside = done.result["limits"]
    outside = Path(f"/proc/{done.result['pid']}/limits").read_text(encoding="ascii")
    assert inside == outside
    limits = {
        match[1]: match[2].split()[:2]
        for match in re.finditer(r"^(Max [a-z ]+?)  +(.+)$", inside, re.MULTILINE)
    }
    assert limits["Max address space"] == [str(600 * MIB)] * 2
    assert limits["Max file size"] == [str(10 * MIB)] * 2
    assert limits["Max open files"] == ["64", "64"]
    assert limits["Max core file size"] == ["0", "0"]
    assert 30 <= int(limits["Max cpu time"][0]) <= 40


def test_limits_are_taken_before_a_decoder_is_imported(make_pool: MakePool) -> None:
    done = _do(make_pool(), "modules")
    assert done.result is not None
    heavy = {"numpy", "pydicom", "imagecodecs", "blosc2", "PIL", "cv2", "torch"}
    assert not heavy & set(done.result["modules"])


@pytest.mark.parametrize(
    ("kind", "failure", "detail"),
    [
        ("segfault", "killed", "ended by SIGSEGV"),
        ("kill", "killed", "ended by SIGKILL"),
        ("eat", "out_of_memory", "MemoryError"),
        ("raise", "failed", "ValueError at tests/unit/packing/pool_handlers.py"),
    ],
)
def test_a_failing_task_fails_alone(make_pool: MakePool, kind: str, failure: str, detail: str) -> None:
    pool = make_pool()
    done = _do(pool, kind, handle="mine")
    assert (done.failure, done.result, done.task.handle) == (failure, None, "mine")
    assert detail in done.detail
    assert "DOE" not in done.detail
    # The next task finds a process that works.
    assert _do(pool, "echo", number=1).result is not None


def test_a_task_without_storage_ends_the_job(make_pool: MakePool) -> None:
    pool = make_pool()
    with pytest.raises(StorageError, match="no space"):
        _do(pool, "storage")
    assert _do(pool, "echo", number=1).result is not None


def test_an_exit_is_a_failure(make_pool: MakePool) -> None:
    done = _do(make_pool(), "exit", code=3)
    assert (done.failure, done.detail) == ("killed", "exit code 3")


def test_a_hanging_task_is_killed_at_its_deadline(make_pool: MakePool) -> None:
    pool = make_pool(2)
    _do(pool, "echo")
    pool.submit(_task("hang", timeout_s=0.5, handle="hang"))
    pool.submit(_task("echo", handle="echo"))
    started = time.monotonic()
    done = {result.task.handle: result for result in (pool.wait(), pool.wait())}
    assert time.monotonic() - started < 300
    assert done["hang"].failure == "timeout"
    assert done["echo"].result is not None
    assert pool.num_replaced == 1


@pytest.mark.parametrize("hangs", [False, True])
def test_each_step_of_a_task_has_a_deadline_and_processor_time_of_its_own(
    make_pool: MakePool, hangs: bool
) -> None:
    limits = WorkerLimits(memory_bytes=600 * MIB, task_s=3.0, file_bytes=MIB)
    number = 1 if hangs else 21  # more than a task has, even where its seconds are rounded up
    done = _do(make_pool(1, limits), "steps", timeout_s=3.0, number=number, seconds=0.25, hangs=hangs)
    assert (done.failure, done.result) == (("timeout", None) if hangs else (None, {}))


def test_processor_time_ends_a_task_that_never_returns(make_pool: MakePool) -> None:
    """Also without the job's help: RLIMIT_CPU, moved on for each task."""
    limits = WorkerLimits(memory_bytes=600 * MIB, task_s=0.2, file_bytes=MIB)
    done = _do(make_pool(1, limits), "burn", timeout_s=300.0)
    assert (done.failure, done.detail) == ("timeout", "ended by SIGXCPU")


def test_processor_time_is_for_one_task(make_pool: MakePool) -> None:
    limits = WorkerLimits(memory_bytes=600 * MIB, task_s=1.0, file_bytes=MIB)
    pool = make_pool(1, limits)
    first = _do(pool, "limits").result
    second = _do(pool, "limits").result
    assert first is not None
    assert second is not None
    assert first["pid"] == second["pid"]


def test_a_file_over_its_limit_is_an_error(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool()
    done = _do(pool, "write", path=str(tmp_path / "large"), num_bytes=11 * MIB)
    assert done.failure == "failed"
    assert "OSError" in done.detail


def test_junk_on_the_channel_is_a_dead_process(make_pool: MakePool) -> None:
    pool = make_pool()
    assert _do(pool, "junk").failure == "killed"
    assert _do(pool, "echo").result is not None


def test_what_libraries_print_goes_nowhere(make_pool: MakePool, tmp_path: Path, capfd: Any) -> None:
    assert _do(make_pool(), "print").result == {}
    captured = capfd.readouterr()
    assert "DOE" not in captured.out + captured.err
    assert "DOE" not in (tmp_path / "processes.log").read_text(encoding="utf-8")


def test_stacks_of_crashes_go_to_the_private_log(make_pool: MakePool, tmp_path: Path) -> None:
    _do(make_pool(), "segfault")
    assert "Segmentation fault" in (tmp_path / "processes.log").read_text(encoding="utf-8")


def test_signals_to_the_group_are_left_to_the_job(make_pool: MakePool) -> None:
    done = _do(make_pool(), "ignore")
    assert done.result == {"ignored": [True, True, True]}


def test_an_idle_process_that_dies_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool()
    first = _do(pool, "echo").result
    assert first is not None
    os.kill(first["pid"], signal.SIGKILL)
    second = _do(pool, "echo")
    # The death may be seen before the next task is given, or take that task with it.
    if second.failure is not None:
        second = _do(pool, "echo")
    assert second.result is not None
    assert second.result["pid"] != first["pid"]


def test_restart_gives_fresh_processes(make_pool: MakePool) -> None:
    pool = make_pool(2)
    first = _do(pool, "echo").result
    pool.restart(1)
    second = _do(pool, "echo").result
    assert first is not None
    assert second is not None
    assert first["pid"] != second["pid"]
    has_idle = []
    for _ in range(2):
        pool.submit(_task("echo"))
        has_idle.append(pool.has_idle)
        pool.wait()
        pool.restart()
    assert has_idle == [False, True]


def test_closing_ends_running_tasks(make_pool: MakePool) -> None:
    pool = make_pool(2)
    _do(pool, "echo")
    pool.submit(_task("hang"))
    pids = pool.pids
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("setup", "expected"), [({"broken": True}, "ConfigError"), ({"dies": True}, "exit code 7")]
)
def test_processes_that_cannot_start_stop_the_job(
    make_pool: MakePool, setup: dict[str, bool], expected: str
) -> None:
    pool = make_pool(1, LIMITS, **setup)
    pool.submit(_task("echo"))
    with pytest.raises(ShardflowError, match=f"a packing process could not start: .*{expected}"):
        pool.wait()


def test_a_process_killed_while_it_starts_costs_nothing(make_pool: MakePool) -> None:
    """Its task was not begun, so it is given to the next process and not blamed."""
    pool = make_pool()
    for number in range(2):
        pool.submit(_task("echo", number=number))
        os.kill(pool.pids[0], signal.SIGKILL)
        done = pool.wait()
        assert done.result is not None
        assert done.result["payload"] == {"number": number}
        pool.restart()


def test_a_process_that_hangs_while_it_starts_is_replaced(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_START_TIMEOUT_S", 2.0)
    pool = make_pool()
    pool.submit(_task("echo"))
    os.kill(pool.pids[0], signal.SIGSTOP)
    assert pool.wait().result is not None


def test_a_process_that_cannot_be_killed_does_not_hold_the_job(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that hangs in the kernel; a wait without a deadline would hang with it."""
    pool = make_pool()
    _do(pool, "echo")
    (child,) = pool._children
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "_KILL_S", 0.2)
        for kind in (subprocess.Popen, ForkedProcess):
            patch.setattr(kind, "kill", lambda process: None)
        pool.submit(_task("hang", timeout_s=0.2))
        assert pool.wait().failure == "timeout"
    child.process.kill()
    child.process.wait(300)
    assert "giving up on it" in caplog.text


def test_too_little_memory_to_start_is_said(make_pool: MakePool) -> None:
    pool = make_pool(1, WorkerLimits(memory_bytes=60 * MIB, task_s=30.0, file_bytes=MIB), imports=True)
    pool.submit(_task("echo"))
    with pytest.raises(ShardflowError, match="a packing process could not start"):
        pool.wait()


def test_waiting_for_nothing_is_refused(make_pool: MakePool) -> None:
    with pytest.raises(ValueError, match="nothing was submitted"):
        make_pool().wait()


def test_processes_end_with_a_killed_job(starts: str, tmp_path: Path) -> None:
    """kill -9 of the job leaves no packing process behind, not even a busy one."""
    prepare = "with process_server():" if starts == "fork" else "if True:"
    log = str(tmp_path / "log")
    script = f"""
import sys
from pathlib import Path
from shardflow.packing.engines.base import WorkerLimits
from shardflow.packing.engines.base import Task, WorkerSetup
from shardflow.packing.engines.forking import ForkedProcess, prepare_to_fork, process_server
from shardflow.packing.engines.local import LocalEngine
worker = WorkerSetup(limits=WorkerLimits(memory_bytes={600 * MIB}, task_s=60.0, file_bytes={MIB}),
                     handlers="tests.unit.packing.pool_handlers:make_handler", setup={{}},
                     log_path=Path({log!r}))
prepare_to_fork()
{prepare}
    pool = LocalEngine(2, worker)
    pool.submit(Task(kind="echo", payload={{}}, timeout_s=60)); pool.wait()
    pool.submit(Task(kind="hang", payload={{}}, timeout_s=600))
    pool.submit(Task(kind="burn", payload={{}}, timeout_s=600))
    assert all(isinstance(one.process, ForkedProcess) == {starts == "fork"} for one in pool._children)
    print(*pool.pids, flush=True)
    pool.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as job:
        assert job.stdout is not None
        pids = [int(pid) for pid in job.stdout.readline().split()]
        time.sleep(0.2)
        job.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 300
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False


def test_a_process_has_its_environment_and_no_descriptor_of_the_job(
    make_pool: MakePool, tmp_path: Path
) -> None:
    with (tmp_path / "of the job").open("wb"):
        done = _do(make_pool(), "surroundings")
    assert done.result is not None
    assert PROCESS_ENVIRONMENT.items() <= done.result["environment"].items()
    descriptors = done.result["descriptors"]
    assert [descriptors[stream] for stream in ("0", "1", "2")] == ["/dev/null"] * 3
    assert [target.partition(":")[0] for target in descriptors.values()].count("socket") == 1
    assert not any("of the job" in target for target in descriptors.values())


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="other libraries have no such options")
def test_memory_of_a_slice_is_kept_for_the_next_one(make_pool: MakePool, starts: str) -> None:
    """A block that is mapped by itself goes back to the kernel when it is freed."""
    assert _do(make_pool(), "large block").result == {"is_mapped": False}
    script = """
from shardflow.packing.engines.forking import prepare_to_fork, process_server
from tests.unit.packing.pool_handlers import is_large_block_mapped
prepare_to_fork()
assert is_large_block_mapped()
with process_server():
    assert not is_large_block_mapped()
"""
    if starts == "fork":  # what the command does for itself, and so for its forks
        subprocess.run([sys.executable, "-c", script], check=True, cwd=REPOSITORY)


def test_a_lost_server_costs_its_processes_and_no_job(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        monkeypatch.setattr(forking, "_current", ProcessServer(ours))
        assert _do(make_pool(), "echo", number=1).result is not None
    assert "cannot be forked any more" in caplog.text


def test_a_server_says_why_it_cannot_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "")

    monkeypatch.setattr(os, "fork", refuse)
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as threads:
        answered = threads.submit(forking._fork_for, theirs)
        with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)):
            ProcessServer(ours).start(ours.fileno(), ours.fileno())
        assert answered.result() is None


def test_a_command_can_be_forked_after_its_imports(starts: str) -> None:
    """A library that starts threads when it is imported would cost each packing process its imports."""
    early, late = ("", "prepare_to_fork()") if starts == "interpreter" else ("prepare_to_fork()", "")
    script = f"""
import os, signal
from shardflow.packing.engines.base import PROCESS_ENVIRONMENT
from shardflow.packing.engines.forking import current_server, prepare_to_fork, process_server
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
former = {{name: os.environ.get(name) for name in PROCESS_ENVIRONMENT}}
{early}
import shardflow.packing.corpora.job, shardflow.packing.handlers, shardflow.packing.job
{late}
with process_server():
    assert (current_server() is not None) == {starts == "fork"}
    assert {{name: os.environ.get(name) for name in PROCESS_ENVIRONMENT}} == former, "Ray starts with it"
assert current_server() is None
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=REPOSITORY)
