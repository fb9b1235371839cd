"""Does a step cost more in a larger dataset? The plan at 10,000 and at 100,000,000 samples, paired.

Measured is the processor time of `EpochPlan.micro_batch`, which is all that is worked out anew for a step:
which rows it holds, in a full shuffle, 256 a micro-batch. Steps follow one another, as in training: a round
is 32 whole epochs of 10,000 samples, 39 steps each, beside as many steps from a random place of an epoch of
100,000,000. Making the plan of an epoch is left out (it is constant, and once an epoch), and so is reading
the samples table: a gather costs what its pages cost, in the page cache the same for any size.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from shardflow.sampling import BatchSpec, EpochPlan

__all__ = ["compare"]

NUM_FEW = 10**4
NUM_MANY = 10**8
_MICRO_BATCH_SIZE = 256
_EPOCHS_PER_ROUND = 32


def compare(*, num_rounds: int = 25) -> dict[str, float]:
    """Measure both sizes in turn, a second of processor time.

    Returns:
        Median microseconds a step at ``few`` and ``many`` samples, and ``ratio``: the median over rounds of
        many by few.
    """
    spec = BatchSpec(micro_batch_size=_MICRO_BATCH_SIZE, micro_batches_per_step=1, tail="drop")
    few = EpochPlan(range(NUM_FEW), spec, seed=1, epoch=0)
    many = EpochPlan(range(NUM_MANY), spec, seed=1, epoch=0)
    num_steps = few.num_steps * _EPOCHS_PER_ROUND
    rng = np.random.default_rng(1)
    rounds: list[tuple[float, float]] = []
    for number in range(num_rounds):
        first = int(rng.integers(many.num_steps // num_steps)) * num_steps
        numbers = range(number * _EPOCHS_PER_ROUND, (number + 1) * _EPOCHS_PER_ROUND)
        cases = [[(few.for_epoch(epoch), range(few.num_steps)) for epoch in numbers]]
        cases.append([(many, range(first, first + num_steps))])
        costs = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            costs[which] = _cost_us(cases[which])
        rounds.append((costs[0], costs[1]))
    return {
        "few": round(statistics.median(few for few, _ in rounds), 3),
        "many": round(statistics.median(many for _, many in rounds), 3),
        "ratio": round(statistics.median(many / few for few, many in rounds), 4),
    }


def _cost_us(parts: list[tuple[EpochPlan, range]]) -> float:
    """Return the processor time of a step, in microseconds."""
    start = time.thread_time()
    for plan, steps in parts:
        for step in steps:
            plan.micro_batch(step, 0)
    return (time.thread_time() - start) / sum(len(steps) for _, steps in parts) * 1e6
