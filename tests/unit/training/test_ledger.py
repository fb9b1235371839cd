"""The run ledger: attempts merge into one lineage in which every committed step stands once."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.errors import CheckpointError
from shardflow.training.ledger import LedgerMicroBatch, LedgerWriter, next_attempt, read_ledger

pytestmark = pytest.mark.fast


def write_attempt(
    run: Path,
    attempt: int,
    *,
    world_size: int,
    start: int,
    steps: range,
    short_ranks: frozenset[int] = frozenset(),
) -> None:
    """Write what ``world_size`` ranks leave behind; ``short_ranks`` were killed before their last step."""
    for rank in range(world_size):
        writer = LedgerWriter(run, attempt=attempt, rank=rank, world_size=world_size, start=start)
        for step in steps[:-1] if rank in short_ranks else steps:
            micro = LedgerMicroBatch(micro=rank, keys=(f"a{attempt}s{step}r{rank}", None), weights=(1.0, 0.0))
            writer.write(step, epoch=0, step=step, micro_batches=[micro])
        writer.sync()
        writer.close()


def commit(run: Path, *steps: int) -> None:
    for step in steps:
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def attempts_of(run: Path) -> list[tuple[int, int]]:
    return [(step.global_step, step.attempt) for step in read_ledger(run)]


def test_steps_hold_the_micro_batches_of_all_ranks_in_order(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, world_size=3, start=0, steps=range(2))
    commit(tmp_path, 2)
    steps = read_ledger(tmp_path)
    assert [micro.micro for micro in steps[1].micro_batches] == [0, 1, 2]
    assert steps[1].micro_batches[2].keys == ("a1s1r2", None)
    assert steps[1].micro_batches[2].weights == (1.0, 0.0)


def test_later_attempt_supersedes_all_steps_from_its_start(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, world_size=2, start=0, steps=range(6))
    write_attempt(tmp_path, 2, world_size=1, start=4, steps=range(4, 5))
    commit(tmp_path, 4)
    assert attempts_of(tmp_path) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    commit(tmp_path, 5)
    assert attempts_of(tmp_path) == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]
    commit(tmp_path, 6)
    # Step 5 of attempt 1 is gone as well: attempt 2 started before it and will do it again.
    with pytest.raises(CheckpointError, match="global step 5"):
        read_ledger(tmp_path)


def test_step_that_one_rank_did_not_finish_is_not_there(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, world_size=2, start=0, steps=range(3), short_ranks=frozenset({1}))
    commit(tmp_path, 2)
    assert attempts_of(tmp_path) == [(0, 1), (1, 1)]
    commit(tmp_path, 3)
    with pytest.raises(CheckpointError, match="global step 2"):
        read_ledger(tmp_path)


def test_line_cut_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, world_size=1, start=0, steps=range(3))
    commit(tmp_path, 2)
    path = tmp_path / "ledger" / "attempt-0001" / "rank-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert attempts_of(tmp_path) == [(0, 1), (1, 1)]


def test_committed_step_that_is_missing_is_named(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, world_size=1, start=0, steps=range(3))
    commit(tmp_path, 5)
    with pytest.raises(CheckpointError, match="global step 3"):
        read_ledger(tmp_path)


def test_attempt_that_wrote_nothing_supersedes_nothing(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, world_size=1, start=0, steps=range(2))
    (tmp_path / "ledger" / "attempt-0002").mkdir()
    commit(tmp_path, 2)
    assert attempts_of(tmp_path) == [(0, 1), (1, 1)]
    assert next_attempt(tmp_path) == 3


def test_run_that_went_on_from_another_runs_checkpoint_begins_there(tmp_path: Path) -> None:
    write_attempt(tmp_path, 1, world_size=1, start=7, steps=range(7, 9))
    commit(tmp_path, 9)
    assert attempts_of(tmp_path) == [(7, 1), (8, 1)]


def test_empty_run_has_no_steps(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == []
    assert next_attempt(tmp_path) == 1
