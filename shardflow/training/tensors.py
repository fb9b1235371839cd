"""Model and optimizer as flat, named tensors, and back, bit for bit.

Names are the model's parameter names, never positions in an optimizer's group, so that a checkpoint does
not depend on how parameters were grouped. Tied weights appear once, under their first name. A parameter
that is a shard (``DTensor``) takes and gives its own rows, so the same checkpoint fits any number of ranks,
with whole parameters and with sharded ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardflow.errors import CheckpointError
from shardflow.training.tensor_files import PiecewiseTensors

__all__ = [
    "load_model",
    "load_optimizer",
    "named_optimizer_tensors",
    "named_tensors",
]

_STEP = "step"


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk over what a checkpoint holds of a model: trained parameters and persistent buffers.

    Frozen parameters are left out: they are the base model's, whose files the run names.
    """
    yield from ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


def named_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk over the optimizer's state as ``"<parameter name>.<entry>"``."""
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}.{entry}", value


def load_model(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into a model of the same shape; into shards their own rows.

    Raises:
        CheckpointError: a name is missing or unknown, or a shape or type differs; the first one is named.
    """
    own = dict(named_tensors(model))
    _check_names("model", own.keys(), tensors.keys())
    for name, tensor in own.items():
        _check_shape(name, tensor, tensors)
    with torch.no_grad():
        for name, tensor in own.items():
            given = _rows_for(name, tensor, tensors)
            _check_type(name, tensor, given)
            _local(tensor).copy_(given)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Give a fresh optimizer the state that its tensors were collected from.

    Raises:
        CheckpointError: a tensor belongs to no parameter, or its shape differs.
    """
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name in tensors:
        owner, _, entry = name.rpartition(".")
        if owner not in parameters:
            raise CheckpointError(
                f"optimizer state must belong to a parameter of the model, got {name}; resume with the "
                "[model] settings that wrote the checkpoint."
            )
        parameter = parameters[owner]
        state = states.setdefault(owner, {})
        if entry == _STEP:  # AdamW counts on the CPU
            state[entry] = tensors[name].clone()
            continue
        _check_shape(name, parameter, tensors)
        given = _rows_for(name, parameter, tensors)
        _check_type(name, parameter, given)
        state[entry] = _like(parameter, given.to(parameter.device, copy=True))
    for owner, state in states.items():
        optimizer.state[parameters[owner]] = state


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _rows_for(name: str, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Take the rows of a tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tensors[name]
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1 or placements != (Shard(0),):
        raise CheckpointError(
            f"{name} must be sharded by rows over one axis of ranks, got {placements}; use fully_shard as "
            "shardflow.training.sharding does."
        )
    # As torch.chunk deals rows: equal pieces rounded up, the last ones shorter or empty.
    num_rows, piece = tensor.shape[0], -(-tensor.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * piece, num_rows)
    stop = min(start + piece, num_rows)
    if isinstance(tensors, PiecewiseTensors):
        return tensors.rows(name, start, stop)
    return tensors[name][start:stop]


def _check_names(what: str, own: Iterable[str], given: Iterable[str]) -> None:
    missing, unknown = set(own) - set(given), set(given) - set(own)
    for problem, names in (("missing", missing), ("unknown", unknown)):
        if names:
            raise CheckpointError(
                f"the {what}'s tensors must be those of this configuration, got {len(names)} {problem}, "
                f"{min(names)} among them; resume with the [model] settings that wrote the checkpoint."
            )


def _check_shape(name: str, own: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    given = tensors.shape(name) if isinstance(tensors, PiecewiseTensors) else tuple(tensors[name].shape)
    if tuple(own.shape) != given:
        raise _misfit(name, own, f"{given}")


def _check_type(name: str, own: torch.Tensor, given: torch.Tensor) -> None:
    if own.dtype != given.dtype:
        raise _misfit(name, own, f"{given.dtype}")


def _misfit(name: str, own: torch.Tensor, found: str) -> CheckpointError:
    return CheckpointError(
        f"{name} must be {tuple(own.shape)} {own.dtype}, got {found}; resume with the [model] settings that "
        "wrote the checkpoint."
    )
