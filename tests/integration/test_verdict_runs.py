"""Verdicts on real training runs of one rank in which one thing is slow, and on all that count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.verdict.one import WAIT, Found, make_inputs
from benchmarks.verdict.run import FIRST_SEED, NUM_RUNS, assign, measure, tally
from benchmarks.verdict.scenarios import CAUSES, RANK_CAUSES
from shardflow.monitoring import read_history
from shardflow.training.config import TimeoutConfig
from shardflow.training.distributed import join_ranks
from tests.verdict_scenarios import NUM_TRIES, is_right, try_scenario

_ALONE = [cause for cause in CAUSES if cause not in RANK_CAUSES]


def test_one_run_of_each_cause(tmp_path: Path) -> None:
    make_inputs(tmp_path, ["small"], num_samples=96)
    wrong: dict[str, list[Found]] = {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with join_ranks(
            "cpu", TimeoutConfig(startup_s=WAIT, steady_s=WAIT, control_s=WAIT, hang_s=0)
        ) as ranks:
            for cause in _ALONE:
                for number in range(NUM_TRIES):
                    found = try_scenario(ranks, tmp_path, cause, number)
                    written = read_history(tmp_path / f"{cause} {number}").verdicts
                    assert written, "the run itself must have written what it was bound by"
                    if is_right(found):
                        break
                else:
                    wrong[cause] = [found]
    finally:
        torch.set_num_threads(num_threads)
    assert not wrong, {cause: one[0].to_json() for cause, one in wrong.items()}


@pytest.mark.slow
def test_the_right_verdict_comes_first_nearly_always(tmp_path: Path) -> None:
    rows = measure(tmp_path, assign(FIRST_SEED, NUM_RUNS))
    summary = tally(rows)
    assert summary["num_right_had_they_been_alone"] >= 0.95 * NUM_RUNS, summary
