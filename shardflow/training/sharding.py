"""How several ranks hold one model: whole on each (DDP), or in shares (FSDP2); and when they exchange.

Both average gradients over ranks, so a step is the same sum under either (docs/adr/0050, 0125). Blocks are
the layers that a transformers model names as not to be split.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardflow.training.config import ParallelSettings
from shardflow.training.distributed import Ranks

__all__ = ["bare", "blocks_of", "compile_blocks", "gather_whole", "held_back", "replicate", "settle", "shard"]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model, inner ones first."""
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]


def compile_blocks(model: nn.Module) -> None:
    """Compile each block in place; parameter names stay, and equal blocks share one compilation."""
    for block in blocks_of(model):
        block.compile()


def shard(
    model: nn.Module, ranks: Ranks, settings: ParallelSettings, *, compute: torch.dtype | None
) -> nn.Module:
    """Leave each rank its rows of every parameter; exchanges nothing yet.

    Args:
        model: The model on the CPU, with the same weights on every rank; changed in place. Its blocks move to
            the device one by one, so that the device never holds it whole.
        ranks: The ranks of the run.
        settings: The table ``[parallel]``.
        compute: Type that layers are gathered and computed in, or None for that of the weights. Gradients
            are added up in float32 or the wider type of the weights.
    """
    mesh = DeviceMesh.from_group(ranks.group, ranks.device.type, mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=None if compute is None else torch.float32
    )
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, mp_policy=policy)
    # Intensities go up to thousands and have no place in half precision; the model windows them first.
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, cast_forward_inputs=False))
    return model


def replicate(model: nn.Module, ranks: Ranks) -> DistributedDataParallel:
    """Wrap a model that every rank holds whole; a collective."""
    return DistributedDataParallel(
        model,
        device_ids=None if ranks.device.type == "cpu" else [ranks.device.index],
        process_group=ranks.group,
        # No buffer of the model changes in training, so there is nothing to send around before every forward.
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )


def bare(model: nn.Module) -> nn.Module:
    """Return the model without its wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def held_back(model: nn.Module) -> Iterator[None]:
    """Run backwards whose gradients stay on the rank until one outside the block."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def settle(model: nn.Module) -> None:
    """Give up what a forward without a backward left gathered, so that parameters are shares again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole on every rank; a collective where it is a share."""
    whole = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()
