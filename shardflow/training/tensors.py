"""Model and optimizer as flat, named tensors, and back, bit for bit.

Names are the model's parameter names, never positions in an optimizer's group, so that a checkpoint does
not depend on how parameters were grouped. Tied weights appear once, under their first name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from shardflow.errors import CheckpointError

__all__ = ["load_model", "load_optimizer", "model_tensors", "optimizer_tensors"]


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collect parameters and persistent buffers on the CPU."""
    return {name: _to_cpu(tensor) for name, tensor in _named_tensors(model)}


def load_model(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into a model of the same shape.

    Raises:
        CheckpointError: a name is missing or unknown, or a shape or type differs; the first one is named.
    """
    own = dict(_named_tensors(model))
    _check_names("model", own.keys(), tensors.keys())
    for name, tensor in own.items():
        _check_like(name, tensor, tensors[name])
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Collect the optimizer's state as ``"<parameter name>.<entry>"`` on the CPU."""
    return {
        f"{name}.{entry}": _to_cpu(value)
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Give a fresh optimizer the state that :func:`optimizer_tensors` collected.

    Raises:
        CheckpointError: a tensor belongs to no parameter, or its shape differs.
    """
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        owner, _, entry = name.rpartition(".")
        if owner not in parameters:
            raise CheckpointError(
                f"optimizer state must belong to a parameter of the model, got {name}; resume with the "
                "[model] settings that wrote the checkpoint."
            )
        parameter = parameters[owner]
        if entry == "step":  # AdamW counts on the CPU
            states.setdefault(owner, {})[entry] = tensor.clone()
            continue
        _check_like(name, parameter, tensor)
        states.setdefault(owner, {})[entry] = tensor.to(parameter.device, copy=True)
    for owner, state in states.items():
        optimizer.state[parameters[owner]] = state


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def _check_names(what: str, own: Iterable[str], given: Iterable[str]) -> None:
    missing, unknown = set(own) - set(given), set(given) - set(own)
    for problem, names in (("missing", missing), ("unknown", unknown)):
        if names:
            raise CheckpointError(
                f"the {what}'s tensors must be those of this configuration, got {len(names)} {problem}, "
                f"{min(names)} among them; resume with the [model] settings that wrote the checkpoint."
            )


def _check_like(name: str, own: torch.Tensor, given: torch.Tensor) -> None:
    if own.shape != given.shape or own.dtype != given.dtype:
        raise CheckpointError(
            f"{name} must be {tuple(own.shape)} {own.dtype}, got {tuple(given.shape)} {given.dtype}; resume "
            "with the [model] settings that wrote the checkpoint."
        )
