"""Models that take conversations as a processor renders them: of transformers, or what a function returns.

The model gets what the processor returned and nothing else. Of a packed row it gets positions that begin at 0
in each sequence, from which transformers makes block-diagonal masks, or the lengths that flash attention
takes; where the tokens of a picture see each other in both directions, the masks are made here, so that
pictures of neighboring sequences stay apart. A micro-batch without pictures looks at a blank
one that counts nothing, so that every trained parameter takes part in every backward on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from shardflow.errors import ConfigError, os_reason
from shardflow.seeds import derive
from shardflow.training.config import LoraConfig, ModelConfig
from shardflow.training.models.building import add_lora, build_target, freeze, freeze_idle
from shardflow.training.models.pretrained import read_model
from shardflow.training.models.weights import num_picture_features

# ruff: noqa: N806
PACKED_TYPES: Final = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "llama", "llava", "mistral", "qwen2", "qwen2_5_vl"}
    | {"qwen2_vl", "qwen3"}
)
"""Model types whose packed sequences are tested to be what single ones are."""

_HIDDEN: Final = "last_hidden_state"

# Tensors carry their axes as a suffix: N sequences, T tokens, D width, V vocabulary.


class ConversationModel(nn.Module):
    """Model that predicts the next token, or gives a sequence a score.

    Args:
        model: A model of ``AutoModelForCausalLM`` or ``AutoModelForImageTextToText``; or any other that takes
            the entries by their names and returns logits ``(N, T, V)``, or scores ``(N, T, 1)``.
        has_score: Whether sequences get a score, at their last token: of a model of transformers by a linear
            layer in place of the prediction.
        seed: Of that layer's weights.
    """

    def __init__(self, model: nn.Module, *, has_score: bool, seed: int) -> None:
        super().__init__()
        inner: Any = model
        self._has_score, self._is_own = has_score, not isinstance(model, PreTrainedModel)
        self._text_config = None if self._is_own else inner.config.get_text_config()
        self.score: nn.Linear | None = None
        if has_score and not self._is_own:
            width = int(inner.config.get_text_config().hidden_size)
            torch.manual_seed(derive(seed, "score-weights"))
            self.score = nn.Linear(width, 1, bias=False)
            nn.init.normal_(self.score.weight, std=1 / (width + 1) ** 0.5)
            inner = inner.model  # without the layer that predicts tokens
        self.model = inner

    def forward(
        self,
        tokens: Mapping[str, torch.Tensor],
        pictures: Mapping[str, torch.Tensor],
        is_blank: bool = False,
        segments: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits ``(N, T, V)``, of a packed row ``(1, T, V)``, or a score of each sequence ``(N,)``.

        Args:
            tokens: ``input_ids``, ``attention_mask`` and other entries ``(N, T)``; a packed row has
                ``position_ids`` in place of the mask.
            pictures: Entries of all pictures; empty for a model of text.
            is_blank: Whether the picture is one that no sequence shows.
            segments: ``(1, T)`` int64, the sequence of each token of a packed row.
            ends: ``(N,)`` int64, the last token of each sequence of a packed row.
        """
        if segments is not None and "token_type_ids" in tokens and not self._is_own:
            mask = self._packed_masks(segments, tokens["token_type_ids"])
            tokens = {**tokens, "attention_mask": mask}  # type: ignore[dict-item]
        # First, as where a sequence shows it: ranks gather the layers of a sharded model in one order.
        blank = _total(self.model.get_image_features(**pictures)) if is_blank and pictures else None
        shown = {} if is_blank else pictures
        output = self.model(**tokens, **shown, **({} if self._is_own else {"use_cache": False}))
        is_plain = isinstance(output, torch.Tensor)
        found: Any = output if is_plain else getattr(output, _HIDDEN if self.score else "logits", None)
        if self._is_own:
            self._check_output(found, tokens["input_ids"])
        if self._has_score:
            if ends is not None:
                last = found[0, ends]
            else:
                last_N = tokens["attention_mask"].sum(dim=1) - 1
                last = found[torch.arange(len(last_N), device=last_N.device), last_N]
            found = (last if self.score is None else self.score(last))[:, 0]
        result: torch.Tensor = found if blank is None else found + 0.0 * blank
        return result

    def _check_output(self, found: Any, ids_NT: torch.Tensor) -> None:  # noqa: N803
        """Refuse what a model of ``model.target`` returns where it is not what the loss takes."""
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else ()
        wanted = (*ids_NT.shape, 1) if self._has_score else tuple(ids_NT.shape)
        if len(shape) == 3 and shape[: len(wanted)] == wanted:
            return
        kind = "scores (N, T, 1)" if self._has_score else "logits (N, T, V)"
        got = (
            f"a tensor {shape}" if isinstance(found, torch.Tensor) else "neither a tensor nor one as .logits"
        )
        raise ConfigError(
            f"The model of model.target must return {kind} for input_ids {tuple(ids_NT.shape)}, got {got}; "
            "correct its forward."
        )

    def _packed_masks(self, segments: torch.Tensor, types: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the masks of each kind of layer, ``(1, 1, T, T)``, as Gemma 3 sees a single sequence.

        Args:
            segments: ``(1, T)``, the sequence of each token.
            types: ``(1, T)``, 1 for a token of a picture; those of one picture see each other.
        """
        # Where the weights are: without values, masks of all pairs of tokens take no memory either.
        weight = next(self.parameters())
        segment, is_picture = segments[0].to(weight.device), types[0].to(weight.device) == 1
        place = torch.arange(len(segment), device=segment.device)
        follows = torch.zeros_like(is_picture)
        follows[1:] = is_picture[:-1] & (segment[1:] == segment[:-1])
        picture = (is_picture & ~follows).cumsum(0)
        together = (picture[:, None] == picture[None, :]) & is_picture[:, None] & is_picture[None, :]
        sees = (segment[:, None] == segment[None, :]) & ((place[:, None] >= place[None, :]) | together)
        found = {"full_attention": sees}
        config: Any = self._text_config
        window = getattr(config, "sliding_window", None)
        if window is not None:
            found["sliding_attention"] = sees & (place[:, None] < place[None, :] + window)
        if config._attn_implementation == "eager":  # which adds the mask
            zero = torch.zeros((), dtype=weight.dtype, device=segment.device)
            least = torch.full_like(zero, torch.finfo(weight.dtype).min)
            found = {name: torch.where(one, zero, least) for name, one in found.items()}
        return {name: one[None, None] for name, one in found.items()}


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
    is_packed: bool,
    seed: int,
) -> ConversationModel:
    """Build the model of ``model.path`` or ``model.target``.

    Args:
        settings: The table ``[model]``, with a path or a target.
        lora: The table ``[lora]``.
        example: ``tokens`` and ``pictures`` of a small conversation, with a picture where the processor takes
            any; what they do not depend on is not trained.
        has_score: Whether it scores sequences.
        is_packed: Whether it gets packed rows.
        seed: Run-level seed, for weights that are not stored.

    Returns:
        The model on the CPU in float32 and training mode.

    Raises:
        ConfigError: There is no such model, or it and its processor do not go together.
    """
    inner: Any = _read(settings, seed)
    is_own = not isinstance(inner, PreTrainedModel)
    if example["pictures"] and not hasattr(inner, "get_image_features"):
        what = "that of model.target" if is_own else f"model.path holds {inner.config.model_type!r}, which"
        raise ConfigError(
            f"fields.conversation.processor returns pictures, and {what} takes text alone, as it has no "
            "get_image_features(); name the model's own processor, or set max_images of the field to 0."
        )
    num_tokens = None if is_own else int(inner.config.get_text_config().vocab_size)
    if num_tokens is not None and int(example["tokens"]["input_ids"].max()) >= num_tokens:
        raise ConfigError(
            f"fields.conversation.processor has tokens that the {num_tokens} of model.path do not include; "
            "name the model's own processor."
        )
    if example["pictures"]:
        _check_pictures(inner, example)
    if is_packed:
        _check_packed(inner, settings)
    model = ConversationModel(inner, has_score=has_score, seed=seed).train()
    freeze(model, settings.frozen)
    if lora.rank:
        add_lora(model, inner if is_own else inner.get_decoder(), lora, seed=seed)
        if model.score is not None:
            model.score.requires_grad_(True)
    # Behind the adapters: those in a layer that takes no part have no gradient either.
    try:
        freeze_idle(model, (example["tokens"], example["pictures"]))
    except TypeError as error:
        if not is_own:
            raise
        raise ConfigError(
            f"The model of model.target does not take what the processor returns ({error}); its forward gets "
            f"{', '.join([*example['tokens'], *example['pictures']])} by keyword."
        ) from error
    if settings.activation_checkpointing:
        _recompute(inner)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("model.frozen leaves nothing to train; name fewer parts.")
    return model


def _check_pictures(model: nn.Module, example: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Refuse a processor that makes another number of tokens of a picture than the model has features for."""
    token = getattr(getattr(model, "config", None), "image_token_id", None)
    features = num_picture_features(model, example["pictures"])
    if token is None or features is None:
        return
    num_tokens = int((example["tokens"]["input_ids"] == token).sum())
    if num_tokens != features:
        raise ConfigError(
            f"fields.conversation.processor writes {num_tokens} tokens for a picture of which model.path "
            f"makes {features}; name the model's own processor."
        )


def _recompute(model: Any) -> None:
    if not hasattr(model, "activation_checkpointing_enable"):
        raise ConfigError(
            "model.activation_checkpointing calls activation_checkpointing_enable() of the model, which that "
            "of model.target has not; add it, or recompute in its forward, and remove the setting."
        )
    model.activation_checkpointing_enable()


def _check_packed(model: Any, settings: ModelConfig) -> None:
    """Refuse a model that would see several sequences as one."""
    if not isinstance(model, PreTrainedModel):
        if not getattr(model, "takes_packed", False):
            raise ConfigError(
                "batch.packed gives the model of model.target several sequences in a row, apart where "
                "position_ids begin at 0; set its attribute takes_packed to True once its attention does "
                "not look beyond, or leave out batch.packed."
            )
        return
    config = model.config
    if config.model_type not in PACKED_TYPES:
        raise ConfigError(
            f"batch.packed works with models of type {', '.join(sorted(PACKED_TYPES))}, and model.path holds "
            f"{config.model_type!r}; leave out batch.packed."
        )
    if config.model_type == "gemma3" and settings.attn_implementation not in ("auto", "eager", "sdpa"):
        raise ConfigError(
            f"model.attn_implementation {settings.attn_implementation!r} takes no masks, by which the "
            "pictures of packed sequences of Gemma 3 are kept apart; set it to 'sdpa'."
        )


def _read(settings: ModelConfig, seed: int) -> nn.Module:
    torch.manual_seed(derive(seed, "model-weights"))
    if settings.target:
        return build_target(settings)
    path = settings.path
    assert path is not None  # noqa: S101 - checked when the settings were read
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            "model.path must be a folder with a language model of transformers, got "
            f"{os_reason(error)} ({path.name}); correct it."
        ) from None
    has_images = type(config) in AutoModelForImageTextToText._model_mapping
    return read_model(AutoModelForImageTextToText if has_images else AutoModelForCausalLM, config, settings)
