"""A disk that is full or broken at any write: the job stops, and the same command ends in the same bytes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import ConfigError, ShardflowError, StorageError
from shardflow.format.checks.verification import verify
from shardflow.format.manifest import versions
from shardflow.packing.versions.removal import Withdrawn, compact, remove
from shardflow.packing.workspace import locked_workspace
from shardflow.storage import LocalStore
from tests.dicom_factory import make_study
from tests.pack_case import PackCase, tree_digests
from tests.pack_faults import HANDLERS as FAULTY

CALLS = ("write", "fsync", "link", "replace")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A first version, and one more study among the inputs."""
    case = PackCase(tmp_path_factory.mktemp("before"))
    case.prepare()
    case.write_faults()
    for number in range(3):
        make_study(case.dicom / f"p{number}", patient=f"P{number}", num_slices=2)
    case.pack("page.enabled=false", "shards.target_bytes=64KiB")
    make_study(case.dicom / "new", patient="N", num_slices=2)
    return case.folder


def _copy(before: Path, folder: Path) -> PackCase:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(before, folder)
    return PackCase(folder)


def _append(case: PackCase, handlers: str = FAULTY) -> None:
    case.pack("page.enabled=false", "shards.target_bytes=64KiB", mode="append", handlers=handlers)


def _remove_and_compact(case: PackCase) -> None:
    remove(case.output, case.private, Withdrawn(patients=["P1"]))
    compact(case.output, case.private, deletes_old=True)


def _break(patch: pytest.MonkeyPatch, name: str, number: int, code: int) -> list[int]:
    """Let the n-th call of a function of ``os`` fail, and count the calls."""
    real, count = getattr(os, name), [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    patch.setattr(os, name, fail)
    return count


def _sweep(
    before: Path, folder: Path, job: Callable[[PackCase], None], name: str, code: int, numbers: range
) -> int:
    """Run a job with one failing call after another; return how many there were."""
    whole = _copy(before, folder / "whole")
    job(whole)
    expected = tree_digests(whole.output)
    for number in numbers:
        case = _copy(before, folder / "case")
        with pytest.MonkeyPatch.context() as patch:
            count = _break(patch, name, number, code)
            try:
                job(case)
            except StorageError:
                pass
            else:
                # What cleans up may go on without.
                assert tree_digests(case.output) == expected
            if count[0] < number:
                return number
        assert not verify(str(case.output)).damages
        job(case)
        assert tree_digests(case.output) == expected
    return numbers.stop


@pytest.mark.parametrize(
    ("name", "code", "numbers"),
    [
        ("write", errno.ENOSPC, range(1, 1000, 4)),
        ("fsync", errno.ENOSPC, range(2, 1000, 4)),
        ("link", errno.ENOSPC, range(1, 1000)),
        ("replace", errno.ENOSPC, range(1, 1000)),
        *(
            pytest.param(name, code, range(1, 1000), marks=pytest.mark.slow)
            for name in CALLS
            for code in (errno.ENOSPC, errno.EIO)
        ),
    ],
)
def test_remove_and_compact_with_a_failing_disk(
    tmp_path: Path, before: Path, name: str, code: int, numbers: range
) -> None:
    assert _sweep(before, tmp_path, _remove_and_compact, name, code, numbers) > 2


@pytest.mark.parametrize(
    ("name", "code", "numbers"),
    [
        pytest.param("write", errno.ENOSPC, range(4, 5), id="sample"),
        *(
            pytest.param(name, code, range(1, 1000), marks=pytest.mark.slow)
            for name in CALLS
            for code in (errno.ENOSPC, errno.EIO)
        ),
    ],
)
def test_an_append_with_a_failing_disk(
    tmp_path: Path, before: Path, name: str, code: int, numbers: range
) -> None:
    """The writes of the job itself; those of its processes come next."""
    # The job itself links one file, the manifest.
    assert _sweep(before, tmp_path, _append, name, code, numbers) > (1 if name == "link" else 3)


@pytest.mark.parametrize(
    ("code", "number"),
    [
        pytest.param(errno.EIO, 2, id="sample"),
        *(
            pytest.param(code, number, marks=pytest.mark.slow)
            for code in (errno.ENOSPC, errno.EIO)
            for number in range(1, 12)
        ),
    ],
)
def test_an_append_whose_processes_meet_a_failing_disk(
    tmp_path: Path, before: Path, code: int, number: int
) -> None:
    whole = _copy(before, tmp_path / "whole")
    _append(whole)
    case = _copy(before, tmp_path / "case")
    case.write_faults(os_error=[code, number])
    try:
        _append(case)
    except ShardflowError as error:
        assert os.strerror(code) in str(error)  # noqa: PT017 - a fault after the last write is none
        assert versions(LocalStore(case.output)) == [1]
    assert not verify(str(case.output)).damages
    assert not (case.private / "resource_outcomes.jsonl").exists()
    case.write_faults()
    _append(case)
    assert tree_digests(case.output) == tree_digests(whole.output)


@pytest.mark.parametrize("pages", [pytest.param([3]), pytest.param(range(0, 40, 2), marks=pytest.mark.slow)])
def test_an_append_to_a_full_small_file_system(tmp_path: Path, before: Path, pages: list[int]) -> None:
    """A real one, with room for so many more pages; each number fails at another write."""
    whole = _copy(before, tmp_path / "whole")
    _append(whole)
    expected = tree_digests(whole.output)
    for number in pages:
        case = _copy(before, tmp_path / "case")
        shutil.move(case.output, case.folder / "first")
        case.output.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(case.output)],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip("mounting a small file system is not allowed")
        try:
            shutil.copytree(case.folder / "first", case.output, dirs_exist_ok=True)
            usage = os.statvfs(case.output)
            used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
            size = used + number * usage.f_frsize
            subprocess.run(["mount", "-o", f"remount,size={size}", str(case.output)], check=True)
            try:
                _append(case)
            except ShardflowError as error:
                assert "No space left on device" in str(error)  # noqa: PT017 - with much room it ends well
            subprocess.run(["mount", "-o", "remount,size=8m", str(case.output)], check=True)
            assert not verify(str(case.output)).damages
            _append(case)
            assert tree_digests(case.output) == expected
        finally:
            subprocess.run(["umount", str(case.output)], check=True)


def test_two_jobs_on_one_dataset_are_refused(tmp_path: Path, before: Path) -> None:
    case = _copy(before, tmp_path / "case")
    with locked_workspace(case.output, tmp_path / "another"):
        for job in (_append, _remove_and_compact):
            with pytest.raises(ConfigError, match="another job is using output"):
                job(case)
    with locked_workspace(tmp_path / "another-output", case.private):
        for job in (_append, _remove_and_compact):
            with pytest.raises(ConfigError, match="another job is using private_dir"):
                job(case)
