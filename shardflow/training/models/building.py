"""Model of a run: the reference model or one of transformers, partly frozen, with LoRA adapters.

Adapters are put into the linear layers in place, by peft, so the model's names and FSDP2's blocks remain. A
checkpoint then holds the adapters alone (``tensors.named_tensors``); the base weights come from the folder or
the seed, which the checkpoint's bindings name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardflow.errors import ConfigError, os_reason
from shardflow.fields.transforming import load_function
from shardflow.seeds import derive
from shardflow.training.config import ImageConfig, LoraConfig, ModelConfig, TextConfig
from shardflow.training.distributed import blocks_of
from shardflow.training.models.weights import computed_from, stand_ins, used_parameters
from shardflow.training.text import ReportTokenizer

_LOGGER = logging.getLogger(__name__)
_LINEAR = ("Linear", "Conv1D")
"""Conv1D is what transformers calls the linear layers of GPT-2."""

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


def add_lora(model: nn.Module, language: nn.Module, settings: LoraConfig, *, seed: int) -> None:
    """Insert adapters into linear layers and freeze the rest; the model's outputs stay the same.

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
            "lora.rank needs the package peft, which is not installed; install shardflow[lora], or remove "
            "the table [lora]."
        )
    from peft import LoraConfig, inject_adapter_in_model

    targets = _targets(model, language, settings.targets)
    torch.manual_seed(derive(seed, "lora-weights"))
    with warnings.catch_warnings(), stand_ins(model):
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
            f"lora.targets: the name of no linear layer ends with one of {list(wanted)}; "
            f"{next(iter(linear), 'none')} is one of them."
        )
    return found


def build_report_model(
    settings: ModelConfig,
    tokenizer: ReportTokenizer,
    *,
    image: ImageConfig,
    num_places: int,
    text: TextConfig,
    lora: LoraConfig,
    seed: int,
) -> tuple[nn.Module, ReportTokenizer]:
    """Build what is trained.

    Args:
        settings: The table ``[model]``.
        tokenizer: That of ``text.tokenizer``.
        image: Size of images.
        num_places: Most slices, images or tiles of a sample.
        text: Longest text, and the prompt.
        lora: Adapters, where its rank is above 0.
        seed: Run-level seed, of all weights that are not read.

    Returns:
        The model on the CPU in training mode, every parameter that is trained taking part in every forward;
        and the tokenizer that frames reports for it.

    Raises:
        ConfigError: the model's folder, its size, names of parameters or layers do not fit the settings, or a
            package is missing.
    """
    # Both import transformers, which the models of other tasks do without.
    if settings.path is None:
        from shardflow.training.models.reference import build_model

        model: nn.Module = build_model(
            settings,
            image,
            num_places=num_places,
            vocab_size=tokenizer.vocab_size,
            max_tokens=text.max_tokens,
            seed=seed,
        )
        language: Any = model.language
    else:
        from shardflow.training.models.pretrained import build_pretrained

        model, tokenizer = build_pretrained(
            settings, image, text, tokenizer, num_places=num_places, seed=seed
        )
        inner: Any = model.model
        language = getattr(inner, "decoder", None) or inner.model.language_model
    freeze(model, settings.frozen)
    if lora.rank:
        add_lora(model, language, lora, seed=seed)
    if settings.path is not None:
        # Behind the adapters: those in a layer that takes no part have no gradient either.
        freeze_idle(model, _smallest_inputs(image))
        if settings.activation_checkpointing:
            inner.activation_checkpointing_enable()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model.frozen leaves nothing to train; name fewer parts.")
    return model, tokenizer


def build_target(settings: ModelConfig) -> nn.Module:
    """Build the model of ``model.target`` from torch's random numbers, which are seeded.

    Raises:
        ConfigError: It cannot be imported or called with ``model.arguments``, or returns no module.
    """
    make: Any = load_function(settings.target, "model.target")
    try:
        model: nn.Module = make(**settings.arguments)
    except TypeError as error:
        raise ConfigError(f"model.arguments do not fit {settings.target}: {error}.") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.target must return a torch.nn.Module, got {type(model).__name__}; correct it."
        )
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        _LOGGER.warning(
            "the model has BatchNorm, whose running statistics are each rank's own; evaluations depend "
            "on the number of ranks"
        )
    return model


def model_bindings(model: ModelConfig, lora: LoraConfig) -> dict[str, Any]:
    """Return the settings of a model that a checkpoint must match, by name."""
    found: dict[str, Any] = {}
    if model.path is not None:
        found["model.path digest"] = folder_digest(model.path)
        found["model.path weights"] = weights_digest(model.path)
    if model.frozen_dtype != "fp32":
        found["model.frozen_dtype"] = model.frozen_dtype
    if model.quantize != "none":
        found["model.quantize"] = model.quantize
    if model.frozen:
        found["model.frozen"] = list(model.frozen)
    if lora.rank:
        found |= {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.targets": list(lora.targets)}
    return found


def folder_digest(path: Path) -> str:
    """Return the identity of a model's folder: a digest of its configuration and the sizes of its weights."""
    digest = hashlib.sha256()
    try:
        digest.update((path / "config.json").read_bytes())
        for file in sorted(path.glob("*.safetensors")):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    except OSError as error:
        raise ConfigError(
            f"model.path must be a folder with a config.json, got {os_reason(error)} ({path.name}); "
            "correct it."
        ) from None
    return digest.hexdigest()


def weights_digest(path: Path) -> str:
    """Return a digest of samples of a model's weights, which tells files of equal size apart.

    Samples lie evenly over each file, its beginning and end among them; a small file is read whole.
    """
    digest = hashlib.sha256()
    try:
        for file in sorted(path.glob("*.safetensors")):
            last = max(file.stat().st_size - _SAMPLE_BYTES, 0)
            with file.open("rb", buffering=0) as stream:
                for number in range(_NUM_SAMPLES):
                    stream.seek(last * number // (_NUM_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(
            f"model.path must be a folder whose weights can be read, got {os_reason(error)} "
            f"({path.name}); correct it."
        ) from None
    return digest.hexdigest()


def freeze(model: nn.Module, beginnings: tuple[str, ...]) -> None:
    """Stop training the parameters whose names begin so.

    Raises:
        ConfigError: There are none.
    """
    names = dict(model.named_parameters())
    for beginning in beginnings:
        chosen = [name for name in names if name.startswith(beginning)]
        if not chosen:
            raise ConfigError(
                f"model.frozen: no parameter name begins with {beginning!r}; {next(iter(names))} is one "
                "of them."
            )
        for name in chosen:
            names[name].requires_grad_(False)


def freeze_idle(model: nn.Module, arguments: Sequence[Any]) -> None:
    """Freeze what no output depends on, such as an encoder's layers behind the one that features come from.

    A parameter without a gradient makes the exchange of gradients wait forever. The graph of a forward pass
    without values tells, which takes neither memory nor compute. A model that needs the values of its
    activations runs once as it is and keeps no activations; one that has no weights yet stays trained as a
    whole, and the first step names what has no gradient.

    Args:
        model: The model on the CPU, or without values on the meta device.
        arguments: Of its forward, tensors or mappings of them: a smallest micro-batch without padding.
    """
    with torch.enable_grad():
        try:
            used = used_parameters(model, arguments)
        except Exception as error:  # noqa: BLE001 - whatever a model does with tensors without values
            if any(one.is_meta for one in model.parameters()):
                _LOGGER.warning(
                    "which parameters take no part is not known before the first step (%s); name them in "
                    "model.frozen if it is refused",
                    type(error).__name__,
                )
                return
            with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
                used = computed_from(model(*arguments), model.named_parameters())
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    idle = [name for name in trained if name not in used]
    for name in idle:
        trained[name].requires_grad_(False)
    if idle:
        _LOGGER.info("%d parameters take no part and are not trained, %s among them", len(idle), idle[0])


def _smallest_inputs(image: ImageConfig) -> tuple[torch.Tensor, ...]:
    """Return the arguments of a model of reports: one slice, and a report of two tokens."""
    return (
        torch.zeros((1, 1, image.rows, image.columns)),
        torch.ones((1, 1), dtype=torch.bool),
        torch.tensor([[0.0, 1.0]]),
        torch.zeros((1, 2), dtype=torch.int64),
        torch.ones((1, 2), dtype=torch.bool),
    )
