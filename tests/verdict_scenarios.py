"""Runs in which one thing is slow by far, for tests on a machine that is busy with others."""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.verdict.one import Found, run_scenario
from benchmarks.verdict.scenarios import CAUSES, RANK_CAUSES, Scenario, draw
from shardflow.training.distributed import Ranks

__all__ = ["NUM_TRIES", "is_right", "try_scenario"]

NUM_TRIES = 2
_LEAST_SEVERITY = 3.5
_MOST_STEP_S = 0.2
_LEAST_S = 0.9
_LEAST_STEPS = 7


def is_right(found: Found) -> bool:
    """Whether it was found, judged as if nobody else used the processors, where others are not the cause."""
    return found.code_alone == CAUSES[found.scenario.cause]


def try_scenario(ranks: Ranks, inputs: Path, cause: str, number: int) -> Found:
    """Run the first, second, ... scenario of a cause that is heavy, quick, and reads the small dataset.

    Its run folder is ``INPUTS/CAUSE NUMBER``.
    """
    drawn = (draw(seed, cause) for seed in itertools.count())
    heavy = (
        one for one in drawn if one.samples == "small" and one.severity >= _LEAST_SEVERITY and _is_quick(one)
    )
    scenario = next(itertools.islice(heavy, number, None))
    output = inputs / f"{cause} {number}"
    return run_scenario(ranks, inputs, output, scenario, least_s=_LEAST_S, least_steps=_LEAST_STEPS)


def _is_quick(scenario: Scenario) -> bool:
    slow = scenario.slowness
    works = slow.compute_works or slow.slice_works
    if slow.num_burners > 5 or works != bool(slow.num_burners):
        return False
    of_step = 1 if scenario.cause in RANK_CAUSES else 2  # micro-batches of a rank
    # Where nothing is slow, computing alone takes so long.
    times = 1.0 if scenario.cause.startswith("nothing") else scenario.severity
    return slow.num_burners > 0 or times * of_step * slow.compute_s <= _MOST_STEP_S
