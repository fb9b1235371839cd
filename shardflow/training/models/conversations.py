"""Models of transformers from a local folder that take conversations as their processor renders them.

The model gets what the processor returned and nothing else. A micro-batch without pictures looks at a blank
one that counts nothing, so that every trained parameter takes part in every backward on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from shardflow.errors import ConfigError, os_reason
from shardflow.seeds import derive
from shardflow.training.config import LoraConfig, ModelConfig
from shardflow.training.models.building import add_lora, freeze, freeze_idle
from shardflow.training.models.pretrained import read_model

# ruff: noqa: N806
# Tensors carry their axes as a suffix: N sequences, T tokens, D width, V vocabulary.


class ConversationModel(nn.Module):
    """Model of a folder that predicts the next token, or gives a sequence a score.

    Args:
        model: A model of ``AutoModelForCausalLM`` or ``AutoModelForImageTextToText``.
        has_score: Whether a linear layer over the last token of a sequence replaces the prediction.
        seed: Of that layer's weights.
    """

    def __init__(self, model: nn.Module, *, has_score: bool, seed: int) -> None:
        super().__init__()
        inner: Any = model
        self.score: nn.Linear | None = None
        if has_score:
            width = int(inner.config.get_text_config().hidden_size)
            torch.manual_seed(derive(seed, "score-weights"))
            self.score = nn.Linear(width, 1, bias=False)
            nn.init.normal_(self.score.weight, std=1 / (width + 1) ** 0.5)
            inner = inner.model  # without the layer that predicts tokens
        self.model = inner

    def forward(
        self, tokens: Mapping[str, torch.Tensor], pictures: Mapping[str, torch.Tensor], is_blank: bool = False
    ) -> torch.Tensor:
        """Return logits ``(N, T, V)``, or a score of each sequence ``(N,)``.

        Args:
            tokens: ``input_ids``, ``attention_mask`` and other entries ``(N, T)``.
            pictures: Entries of all pictures; empty for a model of text.
            is_blank: Whether the picture is one that no sequence shows.
        """
        # First, as where a sequence shows it: ranks gather the layers of a sharded model in one order.
        blank = _total(self.model.get_image_features(**pictures)) if is_blank and pictures else None
        shown = {} if is_blank else pictures
        output = self.model(**tokens, **shown, use_cache=False)
        if self.score is None:
            found: torch.Tensor = output.logits
        else:
            last_N = tokens["attention_mask"].sum(dim=1) - 1
            places = torch.arange(len(last_N), device=last_N.device)
            found = self.score(output.last_hidden_state[places, last_N])[:, 0]
        return found if blank is None else found + 0.0 * blank


def _total(features: Any) -> torch.Tensor:
    pooled = getattr(features, "pooler_output", features)
    parts = pooled if isinstance(pooled, list | tuple) else [pooled]
    return torch.stack([part.sum() for part in parts]).sum()


def build_conversation_model(
    settings: ModelConfig,
    lora: LoraConfig,
    *,
    example: Mapping[str, Mapping[str, torch.Tensor]],
    has_score: bool,
    seed: int,
) -> ConversationModel:
    """Build the model of ``model.path``.

    Args:
        settings: The table ``[model]``, with a path.
        lora: The table ``[lora]``.
        example: ``tokens`` and ``pictures`` of a small conversation, with a picture where the processor takes
            any; what they do not depend on is not trained.
        has_score: Whether it scores sequences.
        seed: Run-level seed, for weights that are not stored.

    Returns:
        The model on the CPU in float32 and training mode.

    Raises:
        ConfigError: The folder holds no such model, or it and its processor do not go together.
    """
    inner: Any = _read(settings, seed)
    config = inner.config
    if example["pictures"] and not hasattr(inner, "get_image_features"):
        raise ConfigError(
            f"fields.conversation.processor returns pictures, and model.path holds {config.model_type!r}, "
            "which takes text alone; name the model's own processor."
        )
    num_tokens = int(config.get_text_config().vocab_size)
    if int(example["tokens"]["input_ids"].max()) >= num_tokens:
        raise ConfigError(
            f"fields.conversation.processor has tokens that the {num_tokens} of model.path do not include; "
            "name the model's own processor."
        )
    model = ConversationModel(inner, has_score=has_score, seed=seed).train()
    freeze(model, settings.frozen)
    if lora.rank:
        add_lora(model, inner.get_decoder(), lora, seed=seed)
        if model.score is not None:
            model.score.requires_grad_(True)
    # Behind the adapters: those in a layer that takes no part have no gradient either.
    freeze_idle(model, (example["tokens"], example["pictures"]))
    if settings.activation_checkpointing:
        inner.activation_checkpointing_enable()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model.frozen leaves nothing to train; name fewer parts.")
    return model


def _read(settings: ModelConfig, seed: int) -> nn.Module:
    path = settings.path
    assert path is not None  # noqa: S101 - checked when the settings were read
    torch.manual_seed(derive(seed, "model-weights"))
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            "model.path must be a folder with a language model of transformers, got "
            f"{os_reason(error)} ({path.name}); correct it."
        ) from None
    has_images = type(config) in AutoModelForImageTextToText._model_mapping
    return read_model(AutoModelForImageTextToText if has_images else AutoModelForCausalLM, config, settings)
