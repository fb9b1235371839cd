"""Removing, compacting and appending, killed after any write: run again, they end in the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dicom_factory import make_study
from tests.kill_driver import PATIENT, SETTINGS
from tests.pack_case import REPOSITORY, PackCase

pytestmark = pytest.mark.usefixtures("packs_inline")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A first version with a patient to remove, and a study that is not in it yet."""
    case = PackCase(tmp_path_factory.mktemp("before") / "case")
    case.folder.mkdir()
    case.prepare(has_reports=True)
    first = [make_study(case.dicom / f"p{n}", patient=f"P{n}", num_slices=2, seed=n) for n in range(4)]
    assert PATIENT in {f"P{n}" for n in range(4)}
    case.write_reports({study.study_instance_uid: "Clear." for study in first})
    case.pack(*SETTINGS)
    make_study(case.dicom / "new", patient="N", num_slices=2)
    return case.folder


def _sweep(before: Path, folder: Path, job: str, numbers: list[int] | None) -> int:
    done = subprocess.run(
        [
            sys.executable,
            str(REPOSITORY / "tests" / "kill_driver.py"),
            str(before),
            str(folder),
            job,
            json.dumps(numbers),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    killed: int = json.loads(done.stdout.splitlines()[-1])["killed"]
    return killed


def test_a_removal_killed_after_some_of_its_writes(before: Path, tmp_path: Path) -> None:
    numbers = [*range(2, 60, 4), 122]
    assert _sweep(before, tmp_path, "withdraw", numbers) > 8


def test_an_append_killed_after_some_of_its_writes(before: Path, tmp_path: Path) -> None:
    # A shard, a ledger of the private folder, a table of facts, the manifest, the removal of the work folder.
    assert _sweep(before, tmp_path, "append", [9, 50, 77, 96, 104]) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("job", "least"), [("withdraw", 40), ("append", 80)])
def test_killed_after_every_write(before: Path, tmp_path: Path, job: str, least: int) -> None:
    assert _sweep(before, tmp_path, job, None) >= least
