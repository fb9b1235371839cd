from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import StorageError
from shardflow.storage import ByteRange, LocalStore, local, open_store
from tests.conformance.stores import CONTENT, StoreConformance

pytestmark = pytest.mark.fast


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "dataset")


class TestLocalStore(StoreConformance):
    """The contract of all stores."""


def _open_descriptors(root: Path) -> int:
    links = list(Path("/proc/self/fd").iterdir())
    return sum(str(root) in str(link.readlink()) for link in links if link.is_symlink())


def test_all_stores_together_keep_no_more_descriptors_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = [LocalStore(tmp_path / name) for name in ("a", "b")]
    monkeypatch.setattr(local, "_OPEN_FILES", local._OpenFiles(max_files=3))
    for number in range(10):
        for store in stores:
            store.put_new(f"o{number}", b"x")
            store.read(f"o{number}")
    assert _open_descriptors(tmp_path) == 3
    stores[0].close()
    assert _open_descriptors(tmp_path / "a") == 0
    assert _open_descriptors(tmp_path / "b") == 2
    stores[1].close()
    assert _open_descriptors(tmp_path) == 0
    assert stores[0].read("o1") == b"x"
    stores[0].close()


def test_another_store_of_a_folder_that_was_made_again_reads_the_new_files(tmp_path: Path) -> None:
    first = LocalStore(tmp_path)
    first.put_new("a", b"old")
    assert first.read("a") == b"old"
    (tmp_path / "a").unlink()
    second = LocalStore(tmp_path)
    second.put_new("a", b"new")
    assert (first.read("a"), second.read("a")) == (b"old", b"new")


def test_a_store_out_of_use_leaves_no_descriptor_open(tmp_path: Path) -> None:
    for _ in range(20):
        store = LocalStore(tmp_path)
        if not store.list("a"):
            store.put_new("a", CONTENT)
        view = store.map("a")
        assert store.read("a") == CONTENT
        del store
    assert view == CONTENT
    del view
    gc.collect()
    assert _open_descriptors(tmp_path) == 0


def test_a_store_may_be_collected_while_another_one_opens_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs on the thread that holds the lock of all descriptors, and must not wait for it."""
    unused = [LocalStore(tmp_path / "unused")]
    unused[0].put_new("a", CONTENT)
    assert unused[0].read("a") == CONTENT
    store = LocalStore(tmp_path / "used")
    store.put_new("b", CONTENT)
    files = local._OPEN_FILES
    real = files._used

    def collect_then_use(key: tuple[int, str]) -> Any:
        assert files.lock.locked()
        unused.clear()
        return real(key)

    monkeypatch.setattr(files, "_used", collect_then_use)
    assert store.read("b") == CONTENT
    store.put_new("c", CONTENT)
    assert store.read("c") == CONTENT
    assert _open_descriptors(tmp_path / "unused") == 0


def test_a_descriptor_in_use_survives_its_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    monkeypatch.setattr(local, "_OPEN_FILES", local._OpenFiles(max_files=1))
    store.put_new("a", CONTENT)
    store.put_new("b", b"b")
    real = os.preadv

    def evict_then_read(fileno: int, pieces: Sequence[memoryview], offset: int) -> int:
        monkeypatch.setattr(os, "preadv", real)
        assert store.read("b") == b"b"
        return real(fileno, pieces, offset)

    monkeypatch.setattr(os, "preadv", evict_then_read)
    assert store.read("a") == CONTENT
    assert _open_descriptors(tmp_path) == 1
    store.close()


@pytest.mark.parametrize("most", [1, 7, 4096])
def test_short_reads_of_the_kernel_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """preadv may deliver less than asked: in the middle of a buffer, or between two."""
    store = LocalStore(tmp_path)
    store.put_new("a", CONTENT)

    def read_little(fileno: int, pieces: Sequence[memoryview], offset: int) -> int:
        left = most
        cut: list[memoryview] = []
        for piece in pieces:
            cut.append(piece[: min(left, piece.nbytes)])
            left -= cut[-1].nbytes
            if not left:
                break
        return real(fileno, cut, offset)

    real = os.preadv
    monkeypatch.setattr(os, "preadv", read_little)
    spans = [(3, 10), (13, 90), (600, 33), (9000, 11)]
    buffers = [bytearray(num_bytes) for _, num_bytes in spans]
    store.read_ranges("a", [ByteRange(*span) for span in spans], [memoryview(b) for b in buffers])
    assert buffers == [CONTENT[offset : offset + num_bytes] for offset, num_bytes in spans]


def test_close_ranges_cost_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields of a sample, with tar headers and padding between them."""
    store = LocalStore(tmp_path)
    store.put_new("a", CONTENT)
    calls: list[int] = []
    real = os.preadv

    def counted(fileno: int, pieces: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        return real(fileno, pieces, offset)

    monkeypatch.setattr(os, "preadv", counted)
    ranges = [ByteRange(512 + 1024 * number, 100) for number in range(8)]
    store.read_ranges("a", ranges, [memoryview(bytearray(100)) for _ in ranges])
    assert calls == [512]


def test_a_failing_disk_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put_new("a", CONTENT)

    def fail(fileno: int, pieces: Sequence[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match="a cannot be read: Input/output error"):
        store.read("a")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(StorageError, match=f"{name} must be a regular file"):
            LocalStore(tmp_path).read(name)


def test_a_child_process_reads_through_a_store_of_its_parent(tmp_path: Path) -> None:
    """Even if a thread of the parent held the lock at the moment of the fork."""
    store = LocalStore(tmp_path)
    store.put_new("a", CONTENT)
    store.read("a")
    with local._OPEN_FILES.lock:
        pid = os.fork()
        if pid == 0:
            status = 1
            signal.alarm(20)  # a lock that nobody will ever release
            try:
                status = int(store.read("a") != CONTENT)
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_unfinished_files_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_new("a", b"")
    (tmp_path / ".b.0123456789abcdef.tmp").write_bytes(b"half")
    assert store.list("") == ["a"]


def test_a_listing_looks_only_where_the_prefix_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    for path in ("manifest-1", "manifest-old/a", "shards/a/b", "shards/c"):
        store.put_new(path, b"")
    walked: list[str] = []
    real = os.scandir

    def scan(path: str) -> Any:
        walked.append(Path(path).relative_to(tmp_path).as_posix())
        return real(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert store.list("manifest-") == ["manifest-1", "manifest-old/a"]
    assert walked == [".", "manifest-old"]
    walked.clear()
    assert store.list("shards/a") == ["shards/a/b"]
    assert walked == ["shards", "shards/a"]


def test_a_url_opens_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "data set"
    LocalStore(folder).put_new("a", b"x")
    for url in (str(folder), folder, f"file://{str(folder).replace(' ', '%20')}"):
        assert open_store(url).read("a") == b"x"


@pytest.mark.parametrize(
    ("url", "match"), [("ftp://bucket/data", "s3://"), ("file://host/data", "not name a host")]
)
def test_an_unknown_url_is_refused(url: str, match: str) -> None:
    with pytest.raises(StorageError, match=match):
        open_store(url)


def test_a_slow_open_holds_up_no_other_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100,000 shards each sample is another file, and on a network an open takes milliseconds."""
    store = LocalStore(tmp_path)
    store.put_new("slow", CONTENT)
    store.put_new("quick", b"b")
    has_begun, may_go_on = threading.Event(), threading.Event()
    real = store._open

    def wait_then_open(path: str) -> int:
        if path == "slow":
            has_begun.set()
            assert may_go_on.wait(300)
        return real(path)

    monkeypatch.setattr(store, "_open", wait_then_open)
    read: list[bytes] = []

    def read_one(path: str) -> None:
        read.append(store.read(path))

    threads = [threading.Thread(target=read_one, args=(path,)) for path in ("slow", "quick")]
    threads[0].start()
    assert has_begun.wait(300)
    threads[1].start()
    threads[1].join(300)
    assert read == [b"b"]
    may_go_on.set()
    threads[0].join()
    assert read == [b"b", CONTENT]
    store.close()


def test_of_two_opens_at_once_one_descriptor_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put_new("a", CONTENT)
    both_have_begun = threading.Barrier(2)
    real = store._open

    def open_together(path: str) -> int:
        both_have_begun.wait(300)
        return real(path)

    monkeypatch.setattr(store, "_open", open_together)
    read: list[bytes] = []
    threads = [threading.Thread(target=lambda: read.append(store.read("a"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [CONTENT, CONTENT]
    assert _open_descriptors(tmp_path) == 1
    store.close()
    assert _open_descriptors(tmp_path) == 0


def test_threads_that_start_together_open_one_descriptor(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_new("a", CONTENT)
    barrier = threading.Barrier(8)

    def read() -> None:
        barrier.wait()
        store.size("a")

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _open_descriptors(tmp_path) == 1
    store.close()
