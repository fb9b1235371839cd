"""One step's gradient: micro-batches in, one sum out, the same for every number of ranks.

With L the sum of the weighted token losses of all micro-batches of the step and N their weighted tokens,
the gradient is that of L / N. DDP and FSDP2 average over ranks, so each rank's loss is multiplied by the
world size first; N is known only after the last micro-batch, so ``updates`` divides the sum by it before
clipping (docs/adr/0050).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from shardflow.errors import TrainingError
from shardflow.seeds import derive
from shardflow.training.hooks import LoopHook
from shardflow.training.inputs import MicroInputs
from shardflow.training.losses import weighted_token_loss
from shardflow.training.sharding import bare, held_back


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSums:
    """What one rank's micro-batches of a step add up to."""

    loss: float
    """Sum of the weighted token losses in nats."""
    num_tokens: float
    num_samples: float


def seed_micro_batch(seed: int, epoch: int, step: int, micro: int) -> None:
    """Key the model's random numbers (dropout) by the micro-batch.

    Whichever rank runs it draws the same numbers, so another world size trains the same model, and a
    checkpoint needs no generator states.
    """
    torch.manual_seed(derive(seed, "model-randomness", epoch, step, micro))


def accumulate_gradients(
    model: nn.Module,
    micro_batches: Iterable[tuple[int, MicroInputs]],
    *,
    num_micro_batches: int,
    world_size: int,
    position: tuple[int, int, int],
    autocast: torch.dtype | None,
    loss_scale: float = 1.0,
    exchange_each: bool = False,
    hooks: LoopHook | None = None,
) -> RankSums:
    """Run this rank's micro-batches of a step; then ``grad`` holds the gradient of the *sum* over all ranks.

    Args:
        model: The model as the ranks hold it together; its gradients must be None or zero.
        micro_batches: Number within the step and inputs of each, fillers included, in order.
        num_micro_batches: How many ``micro_batches`` gives; gradients are exchanged in the last one only.
        world_size: Ranks of the model's process group.
        position: Seed, epoch and step, the key of the random numbers.
        autocast: Type to compute in, or None for that of the weights.
        loss_scale: Another factor of the gradients, but not of the sums that are returned.
        exchange_each: Exchange gradients after every micro-batch instead, to keep no whole ones.
        hooks: Called around each forward and backward.

    Raises:
        TrainingError: another number of micro-batches came.
    """
    seed, epoch, step = position
    hooks = hooks or LoopHook()
    losses: list[torch.Tensor] = []
    num_tokens = num_samples = 0.0
    for slot, (micro, inputs) in enumerate(micro_batches):
        seed_micro_batch(seed, epoch, step, micro)
        is_exchanged = exchange_each or slot == num_micro_batches - 1
        with contextlib.nullcontext() if is_exchanged else held_back(model):
            hooks.on_forward()
            loss = compute_loss(model, inputs, autocast)
            hooks.on_backward(is_exchanged=is_exchanged)
            torch.autograd.backward(loss * (world_size * loss_scale))
            hooks.on_backward_end()
        losses.append(loss.detach())
        num_tokens += inputs.num_tokens
        num_samples += inputs.num_samples
    if len(losses) != num_micro_batches:
        raise TrainingError(
            f"a step must have {num_micro_batches} micro-batches on this rank, got {len(losses)} (epoch "
            f"{epoch}, step {step}); this is a bug of the loader."
        )
    # One wait for the device a step, not one a micro-batch.
    return RankSums(
        loss=float(torch.stack(losses).double().sum()), num_tokens=num_tokens, num_samples=num_samples
    )


def warm_up(model: nn.Module, inputs: MicroInputs, *, autocast: torch.dtype | None) -> None:
    """Run one forward and backward of weight 0, so that gradient buckets have their final layout at step 0.

    DistributedDataParallel rebuilds its buckets after the first backward, in the order in which gradients
    became ready; an all-reduce adds the ranks in an order that depends on an element's place in its bucket.
    Without this, a fresh run's first step and a resumed run's first step use the initial layout and all
    others the rebuilt one, and weights differ in the last bits from three ranks on (docs/adr/0051).
    Weights, buffers, optimizer and random numbers are as before; gradients are None.

    Args:
        model: The model, just wrapped.
        inputs: Any micro-batch of the run's shapes, all weights 0.
        autocast: As in the steps.

    Raises:
        TrainingError: a parameter took no part; the first exchange of a step would hang or fail.
    """
    device = inputs.weights_B.device
    devices = [] if device.type == "cpu" else [device]
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.autograd.backward(compute_loss(model, inputs, autocast))
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    idle = [name for name, p in bare(model).named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise TrainingError(
            f"every parameter must take part in every step, got {len(idle)} without a gradient, {idle[0]} "
            "among them; use it in the forward, or set requires_grad to false."
        )
    model.zero_grad(set_to_none=True)


def compute_loss(model: nn.Module, inputs: MicroInputs, autocast: torch.dtype | None) -> torch.Tensor:
    """Return the sum of the weighted token losses of a micro-batch."""
    with torch.autocast(inputs.weights_B.device.type, dtype=autocast, enabled=autocast is not None):
        logits = model(*inputs.model_arguments)
    return weighted_token_loss(logits, inputs.labels_BT, inputs.weights_B)
