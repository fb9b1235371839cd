"""A copy of model and optimizer in host memory, taken between two steps; a thread writes it beside the next.

The buffers are allocated once and reused: fresh pages cost as much as the copy, and pinned ones more. One
snapshot lives at a time, so the cost in host memory is one model and optimizer, or this rank's part of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardflow.training.tensors import named_optimizer_tensors, named_tensors

__all__ = ["HostSnapshot"]


class HostSnapshot:
    """Host buffers for the tensors that this rank writes.

    Args:
        model: The model; its parameters may be shards (``DTensor``).
        optimizer: Its optimizer.
        is_first: Whether this is rank 0, which alone keeps what all ranks hold the same of.

    Attributes:
        model: Tensors of the newest :meth:`take`, on the CPU.
        optimizer: The same of the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, is_first: bool) -> None:
        self.model: dict[str, torch.Tensor] = {}
        self.optimizer: dict[str, torch.Tensor] = {}
        self._sources = model, optimizer
        self._is_first = is_first

    @property
    def num_bytes(self) -> int:
        """Size of the newest copy."""
        return sum(t.nbytes for part in (self.model, self.optimizer) for t in part.values())

    def take(self) -> None:
        """Copy everything as it is now; returns when the copy is whole."""
        model, optimizer = self._sources
        self.model = self._copy(named_tensors(model), self.model)
        self.optimizer = self._copy(named_optimizer_tensors(model, optimizer), self.optimizer)
        if torch.accelerator.is_available():  # the copies were only queued
            torch.accelerator.synchronize()

    def _copy(
        self, tensors: Iterable[tuple[str, torch.Tensor]], former: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                source = tensor.to_local().detach()
                if source.numel() == 0 and not self._is_first:
                    continue
            elif self._is_first:
                source = tensor.detach()
            else:
                continue
            target = former.get(name)
            if target is None or target.shape != source.shape or target.dtype != source.dtype:
                pinned = source.device.type != "cpu"
                target = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            target.copy_(source, non_blocking=True)
            copies[name] = target
        return copies
