"""Node files where the folder for temporary files does less than a local disk."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from shardflow.format.keys import sha256_hex
from shardflow.storage import LocalStore, node_files

DATA = bytes(range(256)) * (5 << 12)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    monkeypatch.setattr(node_files, "node_folder", lambda: tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "table").write_bytes(DATA)
    return LocalStore(tmp_path / "data")


def _own(store: LocalStore) -> bytes:
    return bytes(node_files.own_bytes(store, "table", sha256=sha256_hex(DATA), num_bytes=len(DATA)))


def test_without_locks_the_first_file_stays(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert _own(store) == DATA
    (copy,) = tmp_path.glob("table-*")
    # Another process made it between the look and the lock.
    monkeypatch.setattr(node_files, "_touch", lambda _: False)
    assert _own(store) == DATA
    assert [*tmp_path.glob("table-*")] == [copy]


def test_a_full_quota_keeps_tables_in_memory(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def full(path: Any, *arguments: Any, **settings: Any) -> int:
        if str(path).endswith(".lock"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return real(path, *arguments, **settings)

    monkeypatch.setattr(os, "open", full)
    assert _own(store) == DATA
    assert "held in memory by each process" in caplog.text
