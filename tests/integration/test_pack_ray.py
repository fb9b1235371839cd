"""Packing on Ray: the bytes of the local engine, whatever becomes of workers and machines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardflow.packing.engines.base import Answer, Task, WorkerLimits, WorkerSetup, decode, encode
from tests.dicom_factory import make_study, truncate
from tests.pack_case import PATIENCE_S, PackCase, tree_digests
from tests.pack_faults import HANDLERS as FAULTY

pytest.importorskip("ray", reason="Ray is not installed")

from shardflow.packing.engines.ray import PackingWorker, RayEngine
from tests.ray_cluster import descendants, foreign_listeners, packing_workers, ray_cluster

Expected = tuple[Path, dict[str, str], list[str]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Inputs, what the local engine makes of them, and the names of the studies."""
    case = PackCase(tmp_path_factory.mktemp("local"))
    case.prepare()
    studies = [
        make_study(case.dicom / f"p{number}", patient=f"P{number}", num_slices=2 + number, seed=number)
        for number in range(5)
    ]
    truncate(studies[3].files[0])
    text = case.config_path.read_text(encoding="utf-8")
    case.config_path.write_text(text + "[policy]\nmax_quarantined_share = 0.5\n", encoding="utf-8")
    case.write_faults()
    case.pack()
    digests = tree_digests(case.output)
    shutil.rmtree(case.output)
    return case.folder, digests, [study.study_instance_uid for study in studies]


@pytest.fixture
def case(tmp_path: Path, expected: Expected) -> PackCase:
    case = PackCase(tmp_path / "job")
    shutil.copytree(expected[0], case.folder, ignore=shutil.ignore_patterns("inputs-*"))
    return case


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One virtual machine of two processors."""
    folder = Path(tempfile.mkdtemp(prefix="sf-"))
    with ray_cluster(folder, num_nodes=1, num_cpus=2) as cluster:
        yield cluster
    shutil.rmtree(folder, ignore_errors=True)


def _on(cluster: Any, num_processes: int) -> list[str]:
    return [
        "execution.engine=ray",
        f"execution.ray_address={cluster.address}",
        f"execution.num_processes={num_processes}",
    ]


def test_a_worker_says_that_a_task_lacked_storage_and_runs_the_next(tmp_path: Path) -> None:
    setup = WorkerSetup(
        limits=WorkerLimits(memory_bytes=1 << 30, task_s=30.0, file_bytes=1 << 20, open_files=64),
        handlers="tests.unit.packing.pool_handlers:make_handler",
        setup={},
        log_path=tmp_path / "processes.log",
    )
    worker = PackingWorker(json.dumps(encode(setup)), str(Path.cwd()))
    tasks = [Task(kind=kind, payload={}, timeout_s=300.0) for kind in ("storage", "echo")]
    with worker._pool:
        answers = [json.loads(worker.run(json.dumps(encode(task)))) for task in tasks]
    lacking, other = (decode(Answer, answer) for answer in answers)
    assert (lacking.failure, lacking.cannot_start) == ("storage", None)
    assert lacking.detail == "writing must succeed, got: no space."
    assert other.result is not None


def _once(happened: Callable[[], bool], then: Callable[[], None]) -> threading.Thread:
    def watch() -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if happened():
                then()
                return
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_engine_does_not_show(
    case: PackCase, expected: Expected, cluster: Any, num_processes: int
) -> None:
    assert case.pack(*_on(cluster, num_processes)).status == "packed"
    assert tree_digests(case.output) == expected[1]


def test_a_killed_worker_costs_nothing_but_time(
    case: PackCase, expected: Expected, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try of a study hangs; its Ray worker is killed, and another one packs the study."""
    restarts: list[int | None] = []
    monkeypatch.setattr(RayEngine, "restart", lambda _, number=None: restarts.append(number))
    case.write_faults(study={case.sample_key(expected[2][1]): "hang_once"})
    killed: list[int] = []

    def kill() -> None:
        for pid in packing_workers(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    watching = _once((case.folder / "hang_once.done").exists, kill)
    summary = case.pack(*_on(cluster, 2), handlers=FAULTY)
    watching.join()
    assert killed
    assert summary.status == "packed"
    assert tree_digests(case.output) == expected[1]
    assert not (case.private / "resource_outcomes.jsonl").exists(), "no study is to blame"
    assert not restarts, "nor is one suspected, and tried again alone"


@pytest.mark.slow
def test_what_a_study_does_to_its_process_is_its_own_outcome(
    case: PackCase, expected: Expected, cluster: Any
) -> None:
    case.write_faults(study={case.sample_key(expected[2][1]): "kill"})
    summary = case.pack(*_on(cluster, 2), handlers=FAULTY)
    assert summary.reasons["WORKER_KILLED"] == 3
    assert tree_digests(case.output) != expected[1]


@pytest.mark.slow
def test_a_lost_machine_costs_nothing_but_time(case: PackCase, expected: Expected) -> None:
    case.write_faults(study={case.sample_key(expected[2][1]): "hang_once"})
    folder = Path(tempfile.mkdtemp(prefix="sf-"))
    with ray_cluster(folder, num_nodes=2) as cluster:
        hanging = case.folder / "hang_once.done"

        def remove() -> None:
            # The job's own machine stays; the other one goes, and with it half of the workers.
            cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
            for pid in packing_workers(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        watching = _once(hanging.exists, remove)
        summary = case.pack(*_on(cluster, 2), handlers=FAULTY)
        watching.join()
        assert summary.status == "packed"
        assert len(cluster.list_all_nodes()) == 1
    shutil.rmtree(folder, ignore_errors=True)
    assert tree_digests(case.output) == expected[1]


def test_ray_started_for_a_job_is_closed_to_others_and_leaves_nothing(tmp_path: Path) -> None:
    limits = WorkerLimits(memory_bytes=600 << 20, task_s=30.0, file_bytes=1 << 20)
    before = descendants(os.getpid())
    worker = WorkerSetup(
        limits=limits,
        handlers="tests.unit.packing.pool_handlers:make_handler",
        setup={},
        log_path=tmp_path / "processes.log",
    )
    signals: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    engine = RayEngine(1, worker)
    with engine:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGTERM, former)
        assert signals == [signal.SIGTERM], "the job ends as its handler says, and not as Ray would end it"
        engine.submit(Task(kind="raise", payload={}, timeout_s=60.0))
        done = engine.wait()
        assert done.failure == "failed"
        assert done.detail.startswith("ValueError at tests/unit/packing/pool_handlers.py")
        own = descendants(os.getpid()) - before
        assert own
        assert foreign_listeners(own | {os.getpid()}) == []
        folder = engine.folder
        assert folder is not None
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IRWXU
        assert _named_after(folder)
    assert not folder.exists()
    until = time.monotonic() + PATIENCE_S
    while (left := _named_after(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


def _named_after(folder: Path) -> list[int]:
    """Processes whose command names a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found
