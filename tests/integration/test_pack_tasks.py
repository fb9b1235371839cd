"""Packing in tasks: in any order, beside each other, killed and run again; then the merge."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardflow.cli.main import main
from shardflow.errors import ConfigError
from shardflow.format.checks.verification import verify
from shardflow.packing.workspace import ArrayTask, locked_workspace
from tests.dicom_factory import make_study, truncate
from tests.pack_case import PATIENCE_S, REPOSITORY, PackCase, tree_digests
from tests.pack_faults import FAULTY_COMMAND
from tests.pack_faults import HANDLERS as FAULTY
from tests.sweeps import sampled

pytestmark = pytest.mark.usefixtures("packs_inline")

Expected = tuple[Path, dict[str, str]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Inputs, and the digests of the dataset that one job makes of them."""
    case = PackCase(tmp_path_factory.mktemp("alone"))
    case.prepare(has_reports=True)
    studies = [
        make_study(case.dicom / f"p{number}", patient=f"P{number}", num_slices=2 + number, seed=number)
        for number in range(7)
    ]
    truncate(studies[3].files[0])
    case.write_reports({study.study_instance_uid: f"Report {n}." for n, study in enumerate(studies)})
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(text + "[policy]\nmax_quarantined_share = 0.5\n", encoding="utf-8")
    case.write_faults()
    assert case.pack().num_shards >= 4
    digests = tree_digests(case.output)
    shutil.rmtree(case.output)
    return case.folder, digests


@pytest.fixture
def case(tmp_path: Path, expected: Expected) -> PackCase:
    case = PackCase(tmp_path / "job")
    shutil.copytree(expected[0], case.folder, ignore=shutil.ignore_patterns("inputs-*"))
    return case


@pytest.mark.parametrize("count", sampled([1, 3, 9], {3}))
def test_tasks_and_their_merge_are_one_job(case: PackCase, expected: Expected, count: int) -> None:
    shards = 0
    for index in reversed(range(count)):
        summary = case.pack(array_task=ArrayTask(index, count))
        assert (summary.status, summary.exit_code) == ("task_done", 0)
        assert not list(case.output.glob("manifest*"))
        shards += summary.num_shards
    merged = case.pack(is_merge=True)
    assert merged.status == "packed"
    assert shards >= merged.num_shards
    assert tree_digests(case.output) == expected[1]
    assert not verify(str(case.output)).damages
    assert case.pack(is_merge=True).status == "already_packed"
    assert not list(case.private.glob("reports*"))


def test_the_merge_names_the_tasks_that_are_missing(
    case: PackCase, expected: Expected, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", str(case.config_path)]
    assert main(["pack", *arguments, "--merge"]) == 2
    for index in (0, 2):
        assert main(["pack", *arguments, "--task", f"{index}/4"]) == 0
    capsys.readouterr()
    assert main(["pack", *arguments, "--merge"]) == 4
    said = capsys.readouterr().out.splitlines()
    assert said[-2] == "Nothing is published: these tasks have to run before, with --task I/N: 1, 3."
    assert json.loads(said[-1])["missing_tasks"] == [1, 3]
    for index in (1, 3):
        assert main(["pack", *arguments, "--task", f"{index}/4"]) == 0
    assert main(["pack", *arguments, "--merge"]) == 0
    assert tree_digests(case.output) == expected[1]


def test_a_shard_that_is_cut_is_missed(case: PackCase) -> None:
    for index in range(2):
        case.pack(array_task=ArrayTask(index, 2))
    shard = next((case.output / "shards").glob("*.tar"))
    shard.write_bytes(shard.read_bytes()[:-512])
    assert len(case.pack(is_merge=True).missing_tasks) == 1


def test_tasks_beside_each_other_killed_and_run_again(case: PackCase, expected: Expected) -> None:
    case.write_faults(study={"*": "hold"})

    def run(index: int) -> int:
        command = ["-c", FAULTY_COMMAND] if index == 0 else ["-m", "pipelines.pack"]
        arguments = [*command, "--config", str(case.config_path), "--task", f"{index}/3"]
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as task:
            if index == 0:
                case.wait_until_held(task)
                os.killpg(task.pid, signal.SIGKILL)
            return task.wait(PATIENCE_S)

    with ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(run, range(3)))
    assert codes == [-signal.SIGKILL, 0, 0]
    assert case.pack(array_task=ArrayTask(0, 3)).status == "task_done"
    assert case.pack(is_merge=True).status == "packed"
    assert tree_digests(case.output) == expected[1]


@pytest.mark.slow
def test_a_death_in_a_task_is_known_to_the_merge(case: PackCase) -> None:
    key = case.sample_key(_first_study(case))
    case.write_faults(study={key: "kill"})
    for index in range(2):
        case.pack(array_task=ArrayTask(index, 2), handlers=FAULTY)
    assert len(list(case.private.glob("resource_outcomes-task-*"))) == 1
    assert case.pack(is_merge=True, handlers=FAULTY).reasons["WORKER_KILLED"] == 2


def _first_study(case: PackCase) -> str:
    return (case.folder / "reports.csv").read_text(encoding="utf-8").splitlines()[1].split(",")[0]


def test_who_may_work_beside_whom(case: PackCase) -> None:
    output, private = case.output, case.private
    with locked_workspace(output, private, array_task=ArrayTask(0, 2)):
        with locked_workspace(output, private, array_task=ArrayTask(1, 2)):
            pass
        for array_task, what in (
            (ArrayTask(0, 2), "another job is using task 0/2"),
            (ArrayTask(2, 3), "all tasks of a job must have the same count, got 2/3 after tasks of 2"),
            (None, "another job is using"),
        ):
            with (
                pytest.raises(ConfigError, match=what),
                locked_workspace(output, private, array_task=array_task),
            ):
                pass
    with (
        locked_workspace(output, private),
        pytest.raises(ConfigError, match="another job is using"),
        locked_workspace(output, private, array_task=ArrayTask(0, 2)),
    ):
        pass


@pytest.mark.slow
def test_a_plain_job_takes_over_what_tasks_have_packed(case: PackCase, expected: Expected) -> None:
    case.pack(array_task=ArrayTask(1, 3))
    assert case.pack().status == "packed"
    assert tree_digests(case.output) == expected[1]
    with pytest.raises(ConfigError, match="output holds a finished dataset"):
        case.pack(array_task=ArrayTask(0, 3))
