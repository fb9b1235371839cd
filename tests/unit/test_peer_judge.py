"""The comparison with peers is judged rightly: repetitions, losses, order, and what did not end."""

from __future__ import annotations

import pytest

from benchmarks.peers.judge import Run, judge_epoch, judge_resume

pytestmark = pytest.mark.fast


def run_of(*ranks: list[str], end: str = "end", text: str = "") -> Run:
    """Ranks by the batches they received, each batch a word of one-letter keys."""
    last = {"event": end, "text": text} if text else {"event": end}
    return Run([[{"event": "batch", "keys": list(batch)} for batch in batches] + [last] for batches in ranks])


def test_epoch_counts_what_came_twice_and_what_never_came() -> None:
    found = judge_epoch(run_of(["ab", "cd"], ["ef"]), run_of(["abef", "dc"]))
    assert found["batches_per_rank"] == [2, 1]
    assert not found["is_equal"]
    assert (found["num_distinct"], found["num_dropped"], found["num_repeated"]) == (6, 97, 0)
    assert (found["num_same_steps"], found["num_steps"]) == (2, 2)
    again = judge_epoch(run_of(["ab", "ab"], ["ef", "gh"]), run_of(["abef", "xy"]))
    assert again["is_equal"]
    assert (again["num_repeated"], again["num_same_steps"]) == (2, 1)


def test_resume_is_exact_only_if_every_step_is() -> None:
    whole, first = run_of(["ab", "cd", "ef"]), run_of(["ab"])
    exact = judge_resume(first, run_of(["c", "e"], ["d", "f"]), whole)
    assert exact["is_exact"]
    assert (exact["num_repeated"], exact["num_lost"]) == (0, 0)
    swapped = judge_resume(first, run_of(["cf", "ed"]), whole)
    assert not swapped["is_exact"]
    assert (swapped["num_repeated"], swapped["num_lost"], swapped["num_same_steps"]) == (0, 0, 1)
    late = judge_resume(first, run_of(["ab", "cd"]), whole)
    assert (late["num_repeated"], late["num_lost"]) == (2, 2)
    assert not judge_resume(run_of(["ba"]), run_of(["cd", "fe"]), run_of(["xy", "cd", "ef"]))["is_repeatable"]


def test_what_did_not_end_says_why() -> None:
    refused = run_of(["ab"], end="error", text="ValueError: no")
    assert judge_resume(run_of(["ab"]), refused, run_of(["ab"])) == {"end": "ValueError: no"}
    assert judge_epoch(run_of(["ab"], end="hang"), None)["end"] == "hang"
    assert Run([[], [{"event": "begin"}]]).end == "crash"
