"""The loss of a split, in which every sample counts exactly once for any number of ranks.

The plan's tail is ``mask``, so padding slots and fillers have weight 0; sums of losses and tokens travel,
never means. A whole model is called without DistributedDataParallel: no rank waits inside a forward for
another one's data. A sharded one gathers its layers in every forward; the plan gives all ranks the same
number of them, fillers included, so none waits for ever.

A stop does not wait for the end of a long evaluation: every other second ranks tell each other whether one
was asked for, after micro-batches that all of them derive from the same numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import nn

from shardflow.loading import Batch
from shardflow.training.distributed import Ranks
from shardflow.training.inputs import MicroInputs
from shardflow.training.metrics import EvaluationMetrics
from shardflow.training.sharding import settle
from shardflow.training.step import compute_loss

_LOOK_EVERY_S: Final = 2.0
"""Whether to stop is asked about so often; schedulers leave 30 s and more."""


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    ranks: Ranks,
    *,
    make_inputs: Callable[[Batch], MicroInputs],
    autocast: torch.dtype | None,
    global_step: int,
    epoch: int,
    is_stopping: Callable[[], bool] = lambda: False,
) -> EvaluationMetrics | None:
    """Measure the loss over this rank's micro-batches and add up all ranks.

    Args:
        model: The bare model; left in the mode it had.
        batches: This rank's micro-batches of one epoch with tail ``mask``.
        ranks: The ranks of the run.
        make_inputs: Moves a batch to the device.
        autocast: Type to compute in, or None for that of the weights.
        global_step: Training steps done so far.
        epoch: Training epoch, for the record.
        is_stopping: Whether this rank was asked to stop.

    Returns:
        The same on every rank; None where any rank was asked to stop: all of them left off together.

    Raises:
        WaitTimeoutError: a rank did not come as far as the first one within ``timeouts.control``.
    """
    started = time.perf_counter()
    losses: list[float] = []
    num_tokens = num_samples = 0.0
    next_look, is_cut_off = 1, False
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ranks.watch.enter(f"evaluation after {global_step} steps")
            for batch in batches:
                inputs = make_inputs(batch)
                losses.append(float(compute_loss(model, inputs, autocast)))
                num_tokens += inputs.num_tokens
                num_samples += inputs.num_samples
                if len(losses) == next_look:
                    each_s = (time.perf_counter() - started) / next_look
                    told = ranks.gather_numbers([is_stopping(), each_s], ranks.timeouts.control)
                    if is_cut_off := bool(told[:, 0].any()):
                        break
                    # The slowest rank's pace, so that all look again after the same micro-batch.
                    next_look += max(1, int(_LOOK_EVERY_S / max(float(told[:, 1].max()), 1e-3)))
    finally:
        model.train(was_training)
        settle(model)
    if is_cut_off:
        return None
    ranks.meet("evaluation done", ranks.timeouts.control)
    own = [math.fsum(losses), num_tokens, num_samples]
    sums = ranks.gather_numbers(own, ranks.timeouts.control).sum(dim=0).tolist()
    return EvaluationMetrics(
        global_step=global_step,
        epoch=epoch,
        loss=sums[0] / sums[1] if sums[1] else None,
        num_tokens=sums[1],
        num_samples=sums[2],
        evaluation_s=time.perf_counter() - started,
    )
