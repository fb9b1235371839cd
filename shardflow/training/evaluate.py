"""The loss of a split, in which every sample counts exactly once for any number of ranks.

The plan's tail is ``mask``, so padding slots and fillers have weight 0; sums of losses and tokens travel,
never means. A whole model is called without DistributedDataParallel: nothing is exchanged until the end, and
no rank waits inside a collective for another one's data. A sharded one gathers its layers in every forward;
the plan gives all ranks the same number of them, fillers included, so none waits for ever.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from shardflow.loading import Batch
from shardflow.training.distributed import Ranks
from shardflow.training.inputs import MicroInputs
from shardflow.training.losses import weighted_token_loss
from shardflow.training.metrics import EvaluationMetrics
from shardflow.training.sharding import settle

__all__ = ["evaluate"]


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    ranks: Ranks,
    *,
    make_inputs: Callable[[Batch], MicroInputs],
    autocast: torch.dtype | None,
    global_step: int,
    epoch: int,
) -> EvaluationMetrics:
    """Measure the loss over this rank's micro-batches and add up all ranks.

    Args:
        model: The bare model; left in the mode it had.
        batches: This rank's micro-batches of one epoch with tail ``mask``.
        ranks: The ranks of the run.
        make_inputs: Moves a batch to the device.
        autocast: Type to compute in, or None for that of the weights.
        global_step: Training steps done so far.
        epoch: Training epoch, for the record.

    Raises:
        WaitTimeoutError: a rank did not finish within ``timeouts.control`` after the first one.
    """
    started = time.perf_counter()
    losses: list[float] = []
    num_tokens = num_samples = 0.0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            ranks.watch.enter(f"evaluation after {global_step} steps")
            for batch in batches:
                inputs = make_inputs(batch)
                losses.append(_loss(model, inputs, autocast))
                num_tokens += inputs.num_tokens
                num_samples += inputs.num_samples
    finally:
        model.train(was_training)
        settle(model)
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


def _loss(model: nn.Module, inputs: MicroInputs, autocast: torch.dtype | None) -> float:
    with torch.autocast(inputs.weights_B.device.type, dtype=autocast, enabled=autocast is not None):
        logits = model(*inputs.model_arguments)
    return float(weighted_token_loss(logits, inputs.labels_BT, inputs.weights_B))
