"""Adapters of low rank (LoRA) in a model's linear layers, by peft; everything else is frozen.

Adapters are put into the layers in place, so names of the model stay and FSDP2's blocks with them. A
checkpoint then holds the adapters alone (``tensors.named_tensors``); the base weights are the folder's or
the seed's, which the checkpoint's bindings name.
"""

from __future__ import annotations

import importlib.util
import warnings

import torch
from torch import nn

from shardflow.errors import ConfigError
from shardflow.seeds import derive
from shardflow.training.config import LoraSettings
from shardflow.training.sharding import blocks_of

__all__ = ["add_lora"]

_LINEAR = ("Linear", "Conv1D")
"""Conv1D is what transformers calls the linear layers of GPT-2."""


def add_lora(model: nn.Module, language: nn.Module, settings: LoraSettings, *, seed: int) -> None:
    """Put adapters into linear layers and freeze the rest; the model computes what it did before.

    Args:
        model: The model; changed in place.
        language: The part whose blocks get adapters where no targets are named.
        settings: The table ``[lora]``, with a rank.
        seed: Run-level seed; the adapters' first weights follow from it alone.

    Raises:
        ConfigError: peft is not installed, or no layer has such a name.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "lora.rank must be 0 where the package peft is not installed, got "
            f"{settings.rank}; install shardflow[lora], or remove the table [lora]."
        )
    from peft import LoraConfig, inject_adapter_in_model

    targets = _targets(model, language, settings.targets)
    torch.manual_seed(derive(seed, "lora-weights"))
    with warnings.catch_warnings():
        # That GPT-2 stores its matrices the other way around is put right by peft, with a warning.
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        inject_adapter_in_model(
            LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,
                lora_dropout=settings.dropout,
                target_modules=targets,
            ),
            model,
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _targets(model: nn.Module, language: nn.Module, wanted: tuple[str, ...]) -> list[str]:
    linear = {name: module for name, module in model.named_modules() if type(module).__name__ in _LINEAR}
    if wanted:
        found = [name for name in linear if any(name.endswith(end) for end in wanted)]
    else:
        inside = {id(module) for block in blocks_of(language) for module in block.modules()}
        found = [name for name, module in linear.items() if id(module) in inside]
    if not found:
        raise ConfigError(
            f"lora.targets must be ends of names of linear layers, got {list(wanted)} and none that ends so; "
            f"{next(iter(linear), 'none')} is one."
        )
    return found
