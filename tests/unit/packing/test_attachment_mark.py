"""The note of what is converted outlives its writer, and speaks of its own task alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.errors import StorageError
from shardflow.packing.studies.assembly import AttachmentMark

pytestmark = pytest.mark.fast


@pytest.fixture
def mark(tmp_path: Path) -> AttachmentMark:
    (tmp_path / "ab").mkdir()
    return AttachmentMark(tmp_path, "abcd", "digest")


def test_it_says_what_was_written_last_until_it_is_taken_back(mark: AttachmentMark) -> None:
    assert mark.read() is None
    mark.write(3)
    mark.write(5)
    assert mark.read() == 5
    assert [path.name for path in (mark.fragments / "ab").iterdir()] == ["abcd.attaching"]
    mark.clear()
    mark.clear()
    assert mark.read() is None


def test_a_note_of_another_task_says_nothing(mark: AttachmentMark) -> None:
    mark.write(3)
    assert replace(mark, task_digest="another").read() is None
    assert replace(mark, sample_key="abce").read() is None


@pytest.mark.parametrize("data", [b"", b'{"task_digest": "digest"', b"[]", b'{"task_digest": "digest"}'])
def test_a_note_that_cannot_be_read_says_nothing(mark: AttachmentMark, data: bytes) -> None:
    (mark.fragments / "ab" / "abcd.attaching").write_bytes(data)
    assert mark.read() is None


def test_a_full_disk_is_no_fault_of_the_attachment(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        AttachmentMark(tmp_path / "missing", "abcd", "digest").write(0)
