"""Packing processes that hang, eat memory or crash: one study is lost, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import StorageError
from tests.dicom_factory import MadeStudy, make_study
from tests.pack_case import PATIENCE_S, REPOSITORY, PackCase, read_ledger, tree_digests
from tests.pack_faults import HANDLERS
from tests.sweeps import sampled

QUICK = (
    "execution.num_processes=2",
    "execution.memory_bytes=700MiB",
    "policy.max_quarantined_share=0.5",
)
_HANGS_S = {"hang": 8, "hang_once": 60}
"""Deadlines of tasks where one hangs, which is waited for; all other tasks have minutes, on any machine."""


def _settings(fault: str) -> tuple[str, ...]:
    return (*QUICK, *([f"execution.task_timeout_s={_HANGS_S[fault]}"] if fault in _HANGS_S else []))


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    return case


@pytest.fixture
def studies(case: PackCase) -> list[MadeStudy]:
    return [make_study(case.dicom / f"p{n}", patient=f"P{n}", num_slices=3, seed=n) for n in range(4)]


def _packed_keys(case: PackCase) -> set[str]:
    samples = case.open().samples
    return {samples.sample_key(row) for row in range(samples.num_samples)}


@pytest.mark.parametrize(
    ("fault", "reason"),
    sampled(
        [
            ("hang", "WORKER_TIMEOUT"),
            ("eat", "WORKER_OUT_OF_MEMORY"),
            ("segfault", "WORKER_KILLED"),
            ("kill", "WORKER_KILLED"),
            ("raise", "WORKER_FAILED"),
        ],
        {("eat", "WORKER_OUT_OF_MEMORY"), ("raise", "WORKER_FAILED")},
    ),
)
def test_a_study_that_ends_its_process_is_quarantined_alone(
    case: PackCase, studies: list[MadeStudy], fault: str, reason: str
) -> None:
    keys = [case.sample_key(study.study_instance_uid) for study in studies]
    case.write_faults(study={keys[1]: fault})
    summary = case.pack(*_settings(fault), handlers=HANDLERS)
    assert summary.status == "packed"
    assert summary.reasons == {reason: 3}
    assert summary.studies == {"packed": 3, "skipped": 0, "quarantined": 1}
    assert _packed_keys(case) == {keys[0], keys[2], keys[3]}
    ledger = [row for row in read_ledger(case.output) if row["outcome"] == "quarantined"]
    assert {(row["reason"], row["sample_key"]) for row in ledger} == {(reason, keys[1])}


def test_the_outcome_is_an_input_of_every_rerun(case: PackCase, studies: list[MadeStudy]) -> None:
    """Without the fault too: what was recorded is what is known, and the bytes are the same."""
    key = case.sample_key(studies[2].study_instance_uid)
    case.write_faults(study={key: "segfault"})
    case.pack(*QUICK, handlers=HANDLERS)
    first = tree_digests(case.output)
    (record,) = _records(case)
    assert (record["input"], record["reason"]) == (key, "WORKER_KILLED")
    recorded = case.private / "resource_outcomes.jsonl"
    assert recorded.stat().st_mode & 0o777 == 0o600
    shutil.rmtree(case.output)
    assert case.pack(*QUICK).reasons == {"WORKER_KILLED": 3}
    assert tree_digests(case.output) == first
    # An operator who wants it tried again removes the line.
    recorded.unlink()
    shutil.rmtree(case.output)
    assert case.pack(*QUICK).reasons == {}


def _records(case: PackCase) -> list[dict[str, Any]]:
    lines = (case.private / "resource_outcomes.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("fault", sampled(["hang_once", "kill_once", "eat_once"], {"kill_once"}))
def test_a_failure_that_does_not_come_again_leaves_no_trace(
    case: PackCase, studies: list[MadeStudy], fault: str
) -> None:
    expected = case.pack(*QUICK)
    shutil.rmtree(case.output)
    case.write_faults(study={case.sample_key(studies[0].study_instance_uid): fault})
    summary = case.pack(*_settings(fault), handlers=HANDLERS)
    assert summary.dataset_id == expected.dataset_id
    assert not (case.private / "resource_outcomes.jsonl").exists()


@pytest.mark.parametrize(
    ("fault", "reason"),
    sampled(
        [("hang", "WORKER_TIMEOUT"), ("segfault", "WORKER_KILLED"), ("eat", "WORKER_OUT_OF_MEMORY")],
        {("segfault", "WORKER_KILLED")},
    ),
)
def test_a_header_that_ends_its_process_is_quarantined_alone(
    case: PackCase, studies: list[MadeStudy], fault: str, reason: str
) -> None:
    bad = studies[1].files[2].relative_to(case.dicom).as_posix()
    case.write_faults(header={bad: fault})
    summary = case.pack(*_settings(fault), handlers=HANDLERS)
    # Nobody knows whose file it is, so its study is packed without it.
    assert summary.reasons == {reason: 1}
    assert summary.inputs["packed"] == 11
    shutil.rmtree(case.output)
    again = case.pack(*QUICK)
    assert again.dataset_id == summary.dataset_id


def test_a_header_failure_that_does_not_come_again_leaves_no_trace(
    case: PackCase, studies: list[MadeStudy]
) -> None:
    expected = case.pack(*QUICK)
    shutil.rmtree(case.output)
    case.write_faults(header={studies[1].files[2].relative_to(case.dicom).as_posix(): "kill_once"})
    assert case.pack(*QUICK, handlers=HANDLERS).dataset_id == expected.dataset_id


def test_too_many_quarantined_inputs_stop_the_job_and_lose_nothing(
    case: PackCase, studies: list[MadeStudy]
) -> None:
    expected = case.pack(*QUICK)
    shutil.rmtree(case.output)
    case.write_faults(study={case.sample_key(studies[0].study_instance_uid): "raise"})
    stopped = case.pack("policy.max_quarantined_share=0.2", "execution.num_processes=1", handlers=HANDLERS)
    assert (stopped.status, stopped.exit_code, stopped.dataset_id) == ("quarantine_limit", 3, None)
    assert stopped.reasons == {"WORKER_FAILED": 3}
    assert not list(case.output.glob("manifest*"))
    (ledger,) = case.private.glob("inputs-*.jsonl")
    rows = [json.loads(line) for line in ledger.read_text(encoding="ascii").splitlines()]
    assert sum(row["reason"] == "WORKER_FAILED" for row in rows) == 3
    # The three good studies stand; the next run, with the fault repaired, packs one.
    (case.private / "resource_outcomes.jsonl").unlink()
    assert case.pack("policy.max_quarantined_share=0.2").dataset_id == expected.dataset_id


def test_a_disk_that_is_full_stops_the_job_and_quarantines_nothing(
    case: PackCase, studies: list[MadeStudy]
) -> None:
    """On a file system of a few hundred kilobytes of its own."""
    small = case.output
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system is not allowed")
    try:
        big = make_study(case.dicom / "big", patient="BIG", num_slices=40, size=(64, 64))
        with pytest.raises(StorageError, match="No space left on device"):
            case.pack("shards.target_bytes=1MiB")
        assert not list(small.glob("manifest*"))
        assert not (case.private / "resource_outcomes.jsonl").exists()
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        summary = case.pack("shards.target_bytes=1MiB")
        assert summary.reasons == {}
        assert case.sample_key(big.study_instance_uid) in _packed_keys(case)
        digests = tree_digests(small)
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert PackCase(case.folder).pack("shards.target_bytes=1MiB").dataset_id == summary.dataset_id
    assert tree_digests(case.output) == digests


def test_processes_carry_their_limits_while_they_pack(case: PackCase, studies: list[MadeStudy]) -> None:
    """Seen from outside, in /proc/<pid>/limits, on the real command."""
    case.write_faults(study={case.sample_key(study.study_instance_uid): "hang" for study in studies})
    script = """
import sys
from shardflow.config import load_config
from shardflow.packing import PackConfig, pack
overrides = ["execution.num_processes=2", "execution.task_timeout_s=30"]
pack(load_config(PackConfig, sys.argv[1], overrides), handlers=sys.argv[2])
"""
    with (
        # A file: the null device would make processes look ready before they have their limits.
        (case.folder / "job.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-c", script, str(case.config_path), HANDLERS], cwd=REPOSITORY, stderr=log
        ) as job,
    ):
        try:
            children = _wait_for_children(job.pid, 2)
            limits = [Path(f"/proc/{pid}/limits").read_text(encoding="ascii") for pid in children]
            modules = [Path(f"/proc/{pid}/maps").read_text(encoding="ascii") for pid in children]
            commands = [Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8") for pid in children]
        finally:
            job.kill()
    for text in limits:
        values = {line[:25].strip(): line[25:].split()[0] for line in text.splitlines()[1:]}
        assert values["Max address space"] == str(1 << 30)
        assert values["Max core file size"] == "0"
        assert int(values["Max file size"]) < 1 << 40
        assert int(values["Max cpu time"]) < 60
        assert int(values["Max open files"]) <= 256
    # What `ps` shows to everybody tells nothing about the inputs or the key.
    assert not any(str(case.folder) in command for command in commands)
    # Decoders are loaded under the limits; torch never is.
    assert all("libtorch" not in text for text in modules)


def _wait_for_children(pid: int, count: int) -> list[int]:
    """Wait until packing processes run and are ready: their streams lead nowhere then."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
            ready = [
                int(child) for child in listed if Path(f"/proc/{child}/fd/2").resolve() == Path("/dev/null")
            ]
        except OSError:
            ready = []
        if len(ready) >= count:
            return ready
        time.sleep(0.02)
    raise AssertionError("no packing processes came up")


def test_a_command_packs_by_forks_of_its_own(case: PackCase, studies: list[MadeStudy]) -> None:
    """A new interpreter for each process would import everything again."""
    case.prepare(has_reports=True)
    case.write_reports({study.study_instance_uid: "No pneumothorax." for study in studies})
    script = """
import subprocess, sys
from shardflow.cli.main import main
subprocess.Popen = None
sys.exit(main(["pack", *sys.argv[1:]]))
"""
    command = [sys.executable, "-c", script, "--config", str(case.config_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    forked = tree_digests(case.output)
    shutil.rmtree(case.output)
    case.pack()
    assert tree_digests(case.output) == forked
