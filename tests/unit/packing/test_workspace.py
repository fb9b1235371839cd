"""The right to write into a folder, and its end."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import ConfigError, StorageError
from shardflow.packing.workspace import Workspace, locked_workspace
from tests.pack_case import PackCase

pytestmark = pytest.mark.fast


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    return case


def _locked(case: PackCase) -> AbstractContextManager[Workspace]:
    return locked_workspace(case.output, case.private, (case.dicom,))


def test_one_job_at_a_time(case: PackCase) -> None:
    with (
        _locked(case),
        pytest.raises(ConfigError, match="another job is using private_dir"),
        _locked(case),
    ):
        pass
    with _locked(case):
        pass


def test_another_job_that_takes_over_while_the_work_folder_goes_keeps_it(
    case: PackCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job may take its lock as soon as the last one's is gone: its folder is not torn away."""
    unlink = Path.unlink

    def unlink_and_lose(path: Path, *args: Any, **kwargs: Any) -> None:
        unlink(path, *args, **kwargs)
        if path.name == "lock":
            path.write_text("of another job")

    with _locked(case) as place:
        (place.fragments / "ab").mkdir()
        (place.fragments / "ab" / "left.fragment").touch()
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink_and_lose)
            place.remove_work()
        assert [path.name for path in place.work.iterdir()] == ["lock"]
        place.remove_work()
        assert not place.work.exists()


def test_a_work_folder_that_cannot_be_made_is_a_storage_error(case: PackCase) -> None:
    case.output.mkdir()
    (case.output / ".work").touch()
    with pytest.raises(StorageError, match="locking output must succeed"), _locked(case):
        pass


def test_a_lock_that_leads_nowhere_is_no_endless_loop(case: PackCase) -> None:
    (case.private / "lock").symlink_to(case.folder / "none" / "lock")
    with pytest.raises(ConfigError, match="private_dir"), _locked(case):
        pass


def test_a_file_system_without_locks_is_not_taken_for_a_running_job(
    case: PackCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StorageError, match="No locks available"), _locked(case):
        pass


def test_what_killed_writers_left_goes_from_the_private_folder_too(case: PackCase) -> None:
    """Half a way back to the inputs names paths: it must not outlive the job."""
    left = case.private / ".inputs-0123456789abcdef.jsonl.0123456789abcdef.tmp"
    left.write_text("path")
    with _locked(case) as place:
        place.remove_work()
    assert not left.exists()
    assert case.key.key_id
