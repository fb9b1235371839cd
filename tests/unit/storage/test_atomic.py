from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardflow.errors import AlreadyExistsError, NotFoundError, StorageError
from shardflow.storage import fsync_directory, is_temporary_name, write_atomic
from tests.forks import SYNC

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def real_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have those that all other tests leave out."""
    monkeypatch.setattr(os, "fsync", SYNC)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_chunks_become_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "a.bin"
    write_atomic(path, (part for part in (b"one", memoryview(b"-two"), b"", memoryview(b"abcd").cast("H"))))
    assert path.read_bytes() == b"one-twoabcd"
    assert _files(tmp_path) == ["deep/er/a.bin"]


def test_the_mode_follows_the_umask(tmp_path: Path) -> None:
    """Other users of a dataset read it; tempfile's 0600 would lock them out."""
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "a", [b""])
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_private_file_is_private_from_its_first_byte_on(tmp_path: Path) -> None:
    path = tmp_path / "a"
    modes: list[int] = []

    def chunks() -> Iterator[bytes]:
        modes.extend(entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir())
        yield b"secret"

    write_atomic(path, chunks(), mode=0o600)
    assert [*modes, path.stat().st_mode & 0o777] == [0o600, 0o600]


def test_an_existing_file_is_refused_and_kept(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", [b"old"])
    with pytest.raises(AlreadyExistsError):
        write_atomic(tmp_path / "a", [b"new"])
    assert (tmp_path / "a").read_bytes() == b"old"
    write_atomic(tmp_path / "a", [b"new"], replace=True)
    assert (tmp_path / "a").read_bytes() == b"new"
    assert _files(tmp_path) == ["a"]


def test_a_file_that_appears_while_writing_is_kept(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"mine"
        (tmp_path / "a").write_bytes(b"theirs")

    with pytest.raises(AlreadyExistsError):
        write_atomic(tmp_path / "a", chunks())
    assert (tmp_path / "a").read_bytes() == b"theirs"
    assert _files(tmp_path) == ["a"]


@pytest.mark.parametrize(
    "error", [NotFoundError("a fragment is gone"), RuntimeError("x"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("replace", [False, True])
def test_an_error_of_the_chunks_passes_and_leaves_nothing(
    tmp_path: Path, error: BaseException, *, replace: bool
) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise error

    with pytest.raises(type(error)) as caught:
        write_atomic(tmp_path / "a", chunks(), replace=replace)
    assert caught.value is error
    assert _files(tmp_path) == []


def _fail_with(number: int, *, when: Callable[[int], bool] = lambda call: True) -> Callable[..., int]:
    calls = iter(range(1000))

    def fail(*arguments: object) -> int:
        if when(next(calls)):
            raise OSError(number, os.strerror(number))
        return len(arguments[1]) if len(arguments) > 1 and isinstance(arguments[1], memoryview) else 0

    return fail


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    ("call", "number", "code"),
    [
        ("write", 28, "ENOSPC"),
        ("write", 122, "EDQUOT"),
        ("fsync", 5, "EIO"),
        ("fsync", 28, "ENOSPC"),
        ("open", 13, "EACCES"),
    ],
)
def test_a_failed_call_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: str, *, replace: bool
) -> None:
    (tmp_path / "kept").write_bytes(b"old")
    monkeypatch.setattr(os, call, _fail_with(number))
    with pytest.raises(StorageError, match=rf"{code} "):
        write_atomic(tmp_path / "kept" if replace else tmp_path / "a", [b"data"], replace=replace)
    monkeypatch.undo()
    assert _files(tmp_path) == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"old"


def test_no_space_after_some_chunks_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", _fail_with(28, when=lambda call: call == 2))
    with pytest.raises(StorageError, match="ENOSPC"):
        write_atomic(tmp_path / "a", [b"data"] * 5)
    monkeypatch.undo()
    assert _files(tmp_path) == []


def test_a_failed_fsync_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may have dropped the pages: a second fsync would report success for data that are gone."""
    calls: list[int] = []

    def fail(fileno: int) -> None:
        calls.append(fileno)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError):
        write_atomic(tmp_path / "a", [b"data"])
    assert len(calls) == 1


def test_a_folder_that_cannot_be_synced_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10))

    def fail_second(fileno: int) -> None:
        if next(calls) == 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail_second)
    with pytest.raises(StorageError, match="syncing the folder"):
        write_atomic(tmp_path / "a", [b"data"])
    assert (tmp_path / "a").read_bytes() == b"data"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def write_little(fileno: int, data: memoryview) -> int:
        return real(fileno, data[:3])

    monkeypatch.setattr(os, "write", write_little)
    write_atomic(tmp_path / "a", [b"0123456789", b"ab"])
    assert (tmp_path / "a").read_bytes() == b"0123456789ab"


@pytest.mark.parametrize("replace", [False, True])
def test_the_name_is_given_between_the_two_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, replace: bool
) -> None:
    """write, fsync the file, name it, fsync the folder: any other order can lose or tear it in a power
    cut.
    """
    trace: list[str] = []
    write, fsync, link, rename = os.write, os.fsync, os.link, Path.replace

    def traced_write(fileno: int, data: memoryview) -> int:
        trace.append("write")
        return write(fileno, data)

    def traced_fsync(fileno: int) -> None:
        trace.append("fsync folder" if Path(f"/proc/self/fd/{fileno}").is_dir() else "fsync file")
        fsync(fileno)

    def traced_link(source: Path, target: Path) -> None:
        trace.append("name")
        link(source, target)

    def traced_replace(self: Path, target: Path) -> Path:
        trace.append("name")
        return rename(self, target)

    monkeypatch.setattr(os, "write", traced_write)
    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "link", traced_link)
    monkeypatch.setattr(Path, "replace", traced_replace)
    write_atomic(tmp_path / "a", [b"x", b"y"], replace=replace)
    assert trace == ["write", "write", "fsync file", "name", "fsync folder"]


def test_new_folders_are_synced_into_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def traced(fileno: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fileno}").readlink().name)
        real(fileno)

    monkeypatch.setattr(os, "fsync", traced)
    write_atomic(tmp_path / "outer" / "inner" / "a", [b""])
    assert synced[:2] == [tmp_path.name, "outer"]
    assert synced[-1] == "inner"


def test_a_file_where_a_folder_must_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(StorageError):
        write_atomic(tmp_path / "a" / "b", [b""])
    with pytest.raises(StorageError, match="syncing the folder"):
        fsync_directory(tmp_path / "a")


CHILD = """
import resource, sys
from pathlib import Path
from shardflow.errors import StorageError
from shardflow.storage import write_atomic
folder = Path(sys.argv[1])
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        write_atomic(folder / "a", [bytes(1000)] * 10)
    except StorageError as error:
        sys.exit(0 if "EFBIG" in error.message else 4)
    sys.exit(3)
def chunks():
    yield bytes(100000)
    print("half", flush=True)
    sys.stdin.read()
write_atomic(folder / "a", chunks())
"""


def test_a_real_limit_on_file_size_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path), "limit"], check=False, timeout=300)
    assert done.returncode == 0
    assert _files(tmp_path) == []


def test_a_killed_writer_leaves_no_file_of_the_name(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), "wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        if child.stdout is None:
            pytest.fail("the child has no output")
        assert child.stdout.readline() == b"half\n"
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=300)
    (left,) = _files(tmp_path)
    assert is_temporary_name(left)
    write_atomic(tmp_path / "a", [b"whole"])
    assert (tmp_path / "a").read_bytes() == b"whole"


@pytest.mark.parametrize("name", ["a.tmp", ".a", "train-000000.tar", ".a.0123456789abcde.tmp", ".lock"])
def test_only_names_of_ours_are_temporary(name: str) -> None:
    assert not is_temporary_name(name)
