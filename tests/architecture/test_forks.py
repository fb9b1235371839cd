"""A forked command is to its caller what the same command of a new interpreter is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forks
from tests.distributed.launcher import is_gone


@pytest.fixture(scope="module")
def server() -> str:
    """A server that has imported next to nothing ahead."""
    return forks._serve("default", ["shardflow.errors"])


@pytest.fixture(autouse=True)
def by_that_server(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "command_server", lambda: server)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-c", "pass"], 0),
        (["-c", "import sys; sys.exit(3)"], 3),
        (["-c", "raise KeyError"], 1),
        (["-c", "import warnings; warnings.warn('old')"], 0),
        (["-W", "error", "-c", "import warnings; warnings.warn('old')"], 1),
        (["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"], -signal.SIGTERM),
        (["-c", "import os, signal; os.killpg(0, signal.SIGKILL)"], -signal.SIGKILL),
    ],
)
def test_it_ends_as_a_new_interpreter_does(arguments: list[str], code: int) -> None:
    done = forks.run(arguments)
    expected = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, start_new_session=True
    )
    assert done.returncode == expected.returncode == code
    assert done.stdout == expected.stdout
    assert done.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


def test_it_has_its_own_folder_environment_and_streams(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(os.getcwd(), dict(os.environ), sys.argv, sys.stdin.read(), sys.path[0] == '')"
    )
    done = forks.run(["-c", code, "a"], cwd=tmp_path, env={"ONLY": "this"}, input="said")
    assert done.stdout == f"{tmp_path} {{'ONLY': 'this'}} ['-c', 'a'] said True\n"


@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_fresh_one_has_only_what_it_imports(is_fresh: bool) -> None:
    done = forks.run(["-c", "import shardflow; print(hasattr(shardflow, 'errors'))"], is_fresh=is_fresh)
    assert done.stdout == f"{not is_fresh}\n"


def test_one_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    code = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run(["-c", code], cwd=tmp_path, timeout=1)
    assert is_gone(int((tmp_path / "pid").read_text(encoding="ascii")))


def test_the_stand_in_ends_as_the_command_and_the_command_with_it(server: str, tmp_path: Path) -> None:
    python = [sys.executable, "-I", "-S", forks.__file__, server]
    assert subprocess.run([*python, "-c", "import sys; sys.exit(7)"], check=False).returncode == 7
    code = "import os; os.kill(os.getpid(), 15)"
    assert subprocess.run([*python, "-c", code], check=False).returncode == -signal.SIGTERM
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([*python, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    _wait_for_end(pid)


def test_a_caller_that_goes_away_before_it_asks_leaves_nothing(server: str) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(forks.PATIENCE_S / 2)
        caller.connect(server)
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(1) == b""  # the process beside the command, which there is none of, has ended


def test_a_server_leaves_nothing_when_who_started_it_is_gone(tmp_path: Path) -> None:
    place = tmp_path / "of_server" / "socket"
    place.parent.mkdir()
    command = [sys.executable, "-m", "tests.forks", "serve", str(place)]
    with subprocess.Popen(
        command, cwd=forks.REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert place.is_socket()
    assert process.returncode == 0
    assert not place.parent.exists()


CHILD = """
import json, os, signal, sys
with open(int(sys.argv[1]), "rb") as passed:
    said = passed.read().decode()
facts = [said, sys.argv, os.getcwd(), os.environ["ONLY"], os.getppid(), sys.stdin.read()]
with open(1, "w") as out:
    out.write(json.dumps(facts))
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7)
"""


@pytest.mark.parametrize(("end", "code"), [("exits", 7), ("killed", -signal.SIGKILL)])
@pytest.mark.parametrize("is_forked", [False, True])
def test_a_forked_child_is_a_child(
    is_forked: bool, end: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_CHILDREN", {"import json": ("shardflow.errors",)} if is_forked else {})
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as writing:
        writing.write(b"passed on")
    command = [sys.executable, "-P", "-c", CHILD, str(read_end), end]
    environment = {**os.environ, "ONLY": "this"}
    with forks.ForkedChildren(
        command,
        cwd=tmp_path,
        env=environment,
        pass_fds=[read_end],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as child:
        os.close(read_end)
        out, _ = child.communicate()
    facts = ["passed on", ["-c", str(read_end), end], str(tmp_path), "this", os.getpid(), ""]
    assert json.loads(out) == facts
    assert child.returncode == code


def test_a_child_of_another_environment_has_another_server() -> None:
    command = [sys.executable, "-P", "-c", next(iter(forks._CHILDREN))]
    forks._child_server.cache_clear()
    found = [
        forks._server_of_child(command, {**os.environ, **more})
        for more in ({}, {"ANY": "1"}, {"MALLOC_ARENA_MAX": "7"})
    ]
    assert found[0] == found[1] != found[2]


def _wait_for_end(pid: int) -> None:
    until = time.monotonic() + forks.PATIENCE_S / 2
    while not is_gone(pid):
        assert time.monotonic() < until
        time.sleep(0.01)
