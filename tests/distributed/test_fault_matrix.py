"""docs/reliability.md as tests: after every fault the run ends as one that nobody touched."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardflow.training.ledger import compare_ledgers, read_records
from tests.distributed.faults import CASES, LONGER_CASES, NUM_STEPS, PREPARATION_S, case_of
from tests.distributed.launcher import job
from tests.distributed.runs import differing_weights
from tests.tiny_runs import make_tiny_input

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3300)]

MATRIX_TIMEOUT_S = 3000
SWEEP_TIMEOUT_S = 3600
WHOLE = ("whole", "whole-4")
KILLED = -9
STOPPED = 75


@dataclass(frozen=True, slots=True)
class Matrix:
    """What the cases left behind."""

    output: Path

    def run(self, name: str) -> Path:
        return self.output / name / "run"

    def result(self, name: str) -> dict[str, Any]:
        path = self.output / name / "result.json"
        assert path.exists(), f"case {name} did not end"
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result

    def said(self, name: str, rank: int, start: int = 0) -> str:
        return (self.output / name / f"start-{start}-rank-{rank}.err").read_text(encoding="utf-8")

    def check(self, name: str) -> list[list[int]]:
        """The run has ended, with the ledger and the weights of one that nobody touched."""
        case = case_of(name)
        undisturbed = "whole-bad" if case.dataset == "bad" else f"whole{'-4' * (case.world_size == 4)}"
        starts: list[list[int]] = self.result(name)["starts"]
        assert set(starts[-1]) == {0}, f"{starts}\n{self.said(name, 0, len(starts) - 1)}"
        mine, other = read_records(self.run(name)), read_records(self.run(undisturbed))
        assert len(other) == NUM_STEPS
        assert list(compare_ledgers(mine, other)) == []
        assert self.result(name)["left"] == []
        assert differing_weights(self.run(name), self.run(undisturbed)) == []
        return starts


def run_cases(folder: Path, names: Sequence[str], timeout_s: float) -> Matrix:
    """Run cases once a session, whichever pytest worker asks first."""
    folder.mkdir(exist_ok=True)
    source, output, done = folder / "input", folder / "output", folder / "done"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            source.mkdir()
            output.mkdir()
            make_tiny_input(source)
            arguments = [str(source), str(output), *names]
            module = "tests.distributed.faults"
            with job(folder, module, arguments, num_ranks=None, is_forked=True) as running:
                finished = running.wait(timeout_s)
            assert finished.exit_code == 0, finished.text
            done.touch()
    return Matrix(output)


@pytest.fixture(scope="session")
def matrix(shared_folder: Path) -> Matrix:
    return run_cases(shared_folder / "faults", list(CASES), MATRIX_TIMEOUT_S)


def kills_in(cases: Iterable[str]) -> list[str]:
    return [name for name in cases if name.startswith("kill-")]


@pytest.mark.parametrize("name", kills_in(CASES))
def test_killed_rank_costs_nothing_and_is_named(matrix: Matrix, name: str) -> None:
    starts = matrix.check(name)
    case = case_of(name)
    survivors = [rank for rank in range(case.world_size) if rank != case.rank]
    assert starts[0][case.rank] == KILLED
    assert len(starts) == 2
    for rank in survivors:
        assert starts[0][rank] == 1
        said = matrix.said(name, rank)
        assert f"rank {case.rank} ended without an error" in said
        assert "Traceback" not in said


def test_stopped_rank_is_named_in_time_and_everybodys_stacks_are_kept(matrix: Matrix) -> None:
    starts = matrix.check("stop-without-end")
    assert 0 not in starts[0]
    assert "rank 1 has been stopped by a signal" in (matrix.said("stop-without-end", 0))
    health = matrix.run("stop-without-end") / "health"
    (fault,) = (json.loads(line) for line in (health / "faults.jsonl").read_text().splitlines())
    assert (fault["kind"], fault["rank"]) == ("stopped", 1)
    for rank in (0, 1):
        assert "most recent call first" in (health / f"rank-{rank:05d}.stacks").read_text()


def test_asked_to_stop_all_ranks_leave_with_75_and_a_checkpoint(matrix: Matrix) -> None:
    starts = matrix.check("asked-to-stop")
    assert starts == [[STOPPED, STOPPED], [0, 0]]


def test_asked_to_stop_with_all_their_processes_while_these_start(matrix: Matrix) -> None:
    name = "asked-to-stop-while-execution-changes"
    assert matrix.check(name) == [[STOPPED, STOPPED], [0, 0]]
    (summary,) = (matrix.output / name / "start-1-rank-0.out").read_text(encoding="utf-8").splitlines()
    assert json.loads(summary)["resumed_from"] == "step-00000003"  # no other one is due then


def test_error_on_one_rank_is_told_to_the_others_without_foreign_text(matrix: Matrix) -> None:
    starts = matrix.check("error-in-transform")
    assert len(starts) == 2
    said = matrix.said("error-in-transform", 0)
    assert "rank 1 failed: ValueError at" in said
    faults = (matrix.run("error-in-transform") / "health" / "faults.jsonl").read_text()
    assert "Doe" not in said + faults


def test_bad_sample_is_masked_the_same_after_a_kill(matrix: Matrix) -> None:
    starts = matrix.check("bad-sample")
    assert starts[0][1] == KILLED
    masked = sum(
        weight == 0
        for record in read_records(matrix.run("bad-sample"))
        for micro in record.micro_batches
        for key, weight in zip(micro.keys, micro.weights, strict=True)
        if key is not None
    )
    assert masked >= 1


def test_full_disk_at_a_checkpoint_is_said_by_every_rank_and_costs_nothing(matrix: Matrix) -> None:
    starts = matrix.check("full-disk")
    assert starts[0] == [1, 1]
    assert all("could not be written" in matrix.said("full-disk", rank) for rank in (0, 1))


def test_slow_storage_changes_nothing(matrix: Matrix) -> None:
    assert matrix.check("slow-storage") == [[0, 0]]


def test_killed_loader_process_ends_its_rank_and_costs_nothing(matrix: Matrix) -> None:
    starts = matrix.check("loader-process-killed")
    assert starts[0] == [1, 1]
    assert "SIGKILL" in matrix.said("loader-process-killed", 1)
    assert "rank 1 failed" in matrix.said("loader-process-killed", 0)


def test_preparation_longer_than_every_timeout_of_an_exchange_trips_nothing(matrix: Matrix) -> None:
    assert matrix.check("long-preparation") == [[0, 0]]
    assert matrix.result("long-preparation")["elapsed_s"] > PREPARATION_S


def test_read_that_never_ends_is_named_with_shard_and_tier(matrix: Matrix) -> None:
    starts = matrix.check("read-that-never-ends")
    assert starts[0] == [1, 1]
    for rank in (0, 1):
        assert "shard train-" in matrix.said("read-that-never-ends", rank)
        assert "tier local" in matrix.said("read-that-never-ends", rank)


@pytest.mark.slow
@pytest.mark.timeout(SWEEP_TIMEOUT_S)
def test_a_hundred_kills_at_random_times_cost_nothing(tmp_path: Path) -> None:
    names = [f"random-{seed}" for seed in range(100)]
    swept = run_cases(tmp_path / "sweep", [*WHOLE, *names], SWEEP_TIMEOUT_S)
    starts = [len(swept.check(name)) for name in names]
    assert sum(number > 1 for number in starts) > len(names) / 2  # the rest came too late, when all was done


@pytest.mark.slow
def test_rank_killed_at_other_points_costs_nothing_and_is_named(tmp_path: Path) -> None:
    names = kills_in(LONGER_CASES)
    killed = run_cases(tmp_path / "kills", [*WHOLE, *names], MATRIX_TIMEOUT_S)
    for name in names:
        test_killed_rank_costs_nothing_and_is_named(killed, name)


@pytest.mark.slow
def test_preparation_of_a_minute_under_timeouts_of_five_seconds_trips_nothing(tmp_path: Path) -> None:
    prepared = run_cases(tmp_path / "minute", ["whole", "preparation-of-a-minute"], MATRIX_TIMEOUT_S)
    assert prepared.check("preparation-of-a-minute") == [[0, 0]]
    assert prepared.result("preparation-of-a-minute")["elapsed_s"] > 60
