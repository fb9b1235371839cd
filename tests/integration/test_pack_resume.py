"""The same bytes for any number of processes, and after kill -9 of everything at any named point."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardflow.format.checks.verification import verify
from tests.dicom_factory import make_study, truncate
from tests.pack_case import PATIENCE_S, REPOSITORY, PackCase, tree_digests
from tests.pack_faults import FAULTY_COMMAND
from tests.pack_faults import HANDLERS as FAULTY
from tests.sweeps import sampled

pytestmark = pytest.mark.usefixtures("packs_inline")

NUM_STUDIES = 7


def _make(folder: Path) -> PackCase:
    case = PackCase(folder)
    case.prepare(has_reports=True)
    studies = [
        make_study(case.dicom / f"p{number}", patient=f"P{number}", num_slices=2 + number, seed=number)
        for number in range(NUM_STUDIES)
    ]
    truncate(studies[3].files[0])
    (case.dicom / "note.txt").write_text("x", encoding="utf-8")
    case.write_reports({study.study_instance_uid: f"Report {n}." for n, study in enumerate(studies)})
    text = case.config_path.read_text(encoding="utf-8").replace("num_processes = 1", "num_processes = 2")
    case.config_path.write_text(text + "[policy]\nmax_quarantined_share = 0.5\n", encoding="utf-8")
    case.write_faults()
    return case


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Inputs, and the digests of the dataset that an undisturbed job makes of them."""
    case = _make(tmp_path_factory.mktemp("undisturbed"))
    summary = case.pack()
    assert summary.num_shards >= 4
    assert not verify(str(case.output)).damages
    digests = tree_digests(case.output)
    shutil.rmtree(case.output)
    return case.folder, digests


@pytest.fixture
def case(tmp_path: Path, expected: tuple[Path, dict[str, str]]) -> PackCase:
    """The same inputs in a folder of the test's own."""
    case = PackCase(tmp_path / "job")
    # Modification times too: they are what tells a resumed job that its fragments are still good.
    shutil.copytree(expected[0], case.folder, ignore=shutil.ignore_patterns("inputs-*"))
    return case


@pytest.fixture
def alone(case: PackCase) -> PackCase:
    """The same with one packing process, which needs none of its own."""
    return _alone(case)


def _alone(case: PackCase) -> PackCase:
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(text.replace("num_processes = 2", "num_processes = 1"), encoding="utf-8")
    return case


@pytest.mark.parametrize("num_processes", sampled([1, 3], {3}))
def test_the_number_of_processes_does_not_show(
    case: PackCase, expected: tuple[Path, dict[str, str]], num_processes: int
) -> None:
    case.pack(f"execution.num_processes={num_processes}")
    assert tree_digests(case.output) == expected[1]


def test_the_place_of_the_folders_does_not_show(
    alone: PackCase, expected: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    alone.folder.rename(tmp_path / "elsewhere")
    moved = PackCase(tmp_path / "elsewhere")
    moved.pack()
    assert tree_digests(moved.output) == expected[1]


POINTS = [
    "phase:headers",
    "advance:headers:1",
    "phase:reports",
    "phase:studies",
    "advance:studies:1",
    "advance:studies:4",
    f"advance:studies:{NUM_STUDIES - 1}",
    "phase:samples",
    "phase:ledger",
    "phase:page",
    "phase:facts",
    "phase:manifest",
    "cleaning",
    "half",
]


ALWAYS = {"advance:studies:4", "phase:manifest", "half"}  # tests below are killed at others


@pytest.mark.parametrize("point", sampled(POINTS, ALWAYS))
def test_a_killed_job_goes_on_to_the_same_bytes(
    case: PackCase, expected: tuple[Path, dict[str, str]], point: str
) -> None:
    # Packing processes are killed too, where they are at work then.
    done = (case if point.startswith("advance:") else _alone(case)).drive(point)
    assert done.returncode == -signal.SIGKILL, done.stderr
    is_published = point in {"cleaning", "half"}
    assert bool(list(case.output.glob("manifest*"))) is is_published
    if is_published:
        # Readers see a whole dataset, although the job did not come to its end.
        assert not verify(str(case.output)).damages
    summary = case.pack("execution.num_processes=1")
    assert summary.status == ("already_packed" if is_published else "packed")
    assert tree_digests(case.output) == expected[1]


@pytest.mark.parametrize(
    ("point", "number"),
    sampled(
        [
            ("fragment", 1),
            ("fragment", 3),
            ("tar", 1),
            ("tar", 2),
            ("index", 1),
            ("record", 1),
            ("record", 2),
        ],
        {("tar", 1), ("record", 1)},
    ),
)
def test_a_job_killed_at_a_write_of_a_process_goes_on(
    alone: PackCase, expected: tuple[Path, dict[str, str]], point: str, number: int
) -> None:
    alone.write_faults(kill_group=[point, number])
    done = alone.drive("none", FAULTY)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(alone.output.glob("manifest*"))
    alone.pack()
    assert tree_digests(alone.output) == expected[1]


def test_killed_again_and_again_it_still_comes_to_the_same_bytes(
    alone: PackCase, expected: tuple[Path, dict[str, str]]
) -> None:
    for point in ("advance:headers:1", "advance:studies:2", "advance:studies:3", "phase:ledger"):
        assert alone.drive(point).returncode == -signal.SIGKILL
    alone.pack()
    assert tree_digests(alone.output) == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2, 5])
def test_killed_twenty_times_at_random_it_is_the_same_dataset(
    case: PackCase, expected: tuple[Path, dict[str, str]], num_processes: int
) -> None:
    case.kill_at_random(20, num_processes=num_processes)
    case.pack(f"execution.num_processes={num_processes}")
    assert tree_digests(case.output) == expected[1]


def test_what_stands_is_not_packed_again(alone: PackCase) -> None:
    assert alone.drive("phase:samples").returncode == -signal.SIGKILL
    shards = {path.name: path.stat().st_mtime_ns for path in (alone.output / "shards").iterdir()}
    assert len(shards) >= 8
    alone.pack()
    assert {path.name: path.stat().st_mtime_ns for path in (alone.output / "shards").iterdir()} == shards


def test_a_fragment_that_rotted_is_packed_again(
    alone: PackCase, expected: tuple[Path, dict[str, str]]
) -> None:
    """Fragments are not forced to the disk: what a power cut leaves of them is checked."""
    alone.write_faults(kill_group=["fragment", 4])
    assert alone.drive("none", FAULTY).returncode == -signal.SIGKILL
    fragments = sorted((alone.output / ".work" / "fragments").rglob("*.fragment"))
    assert fragments
    for number, path in enumerate(fragments):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            data[600] ^= 1
        elif number % 3 == 1:
            data[-30] ^= 1
        else:
            data = data[: len(data) // 2]
        path.write_bytes(data)
    alone.pack()
    assert tree_digests(alone.output) == expected[1]


def test_a_shard_that_rotted_is_made_again(alone: PackCase, expected: tuple[Path, dict[str, str]]) -> None:
    assert alone.drive("phase:samples").returncode == -signal.SIGKILL
    tar, other, *_ = sorted((alone.output / "shards").glob("*.tar"))
    data = bytearray(tar.read_bytes())
    data[700] ^= 1
    tar.write_bytes(data)
    other.with_suffix(".idx").unlink()
    alone.pack()
    assert tree_digests(alone.output) == expected[1]


def test_what_killed_writers_leave_is_cleaned_up(
    alone: PackCase, expected: tuple[Path, dict[str, str]]
) -> None:
    """A temporary of every name that a writer may die with, before and after the dataset is published."""
    names = ["ledger.jsonl", "manifest-000001.json", "shards/train-000000.tar", "samples/samples-000001.tbl"]
    for _ in range(2):
        for name in names:
            path = alone.output / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.0123456789abcdef.tmp").write_bytes(b"torn")
        alone.pack()
        assert tree_digests(alone.output) == expected[1]


def test_an_input_that_changed_is_packed_anew(alone: PackCase) -> None:
    assert alone.drive("phase:samples").returncode == -signal.SIGKILL
    make_study(alone.dicom / "p0", patient="P0", num_slices=2, seed=99)
    changed = alone.pack().dataset_id
    shutil.rmtree(alone.output)
    assert alone.pack().dataset_id == changed


def test_another_plan_after_a_stop_leaves_nothing_of_the_old_one(alone: PackCase) -> None:
    assert alone.drive("phase:samples").returncode == -signal.SIGKILL
    num_files = len(list((alone.output / "shards").iterdir()))
    for number in (2, 4, 5, 6):
        shutil.rmtree(alone.dicom / f"p{number}")
    study = make_study(alone.dicom / "new", patient="P9", num_slices=9)
    summary = alone.pack()
    dataset = alone.open()
    assert dataset.samples.find(alone.sample_key(study.study_instance_uid)) >= 0
    assert len(list((alone.output / "shards").iterdir())) == 2 * summary.num_shards < num_files


def test_a_finished_dataset_is_left_alone(case: PackCase) -> None:
    first = case.pack()
    before = {path: path.stat().st_mtime_ns for path in case.output.rglob("*")}
    second = case.pack("execution.num_processes=1")
    assert (second.status, second.dataset_id) == ("already_packed", first.dataset_id)
    assert second.inputs == first.inputs
    assert {path: path.stat().st_mtime_ns for path in case.output.rglob("*")} == before


def test_a_killed_process_is_replaced_and_nothing_shows(
    case: PackCase, expected: tuple[Path, dict[str, str]]
) -> None:
    """kill -9 of a packing process, from outside, while it packs."""
    case.write_faults(study={"*": "hold_once"})
    with subprocess.Popen(
        [sys.executable, "-c", FAULTY_COMMAND, "--config", str(case.config_path), "--json"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        os.kill(case.wait_until_held(job), signal.SIGKILL)
        output, errors = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, output + errors
    assert tree_digests(case.output) == expected[1]
