"""Models of transformers from a local folder, called like the reference model, and their chat template.

Two kinds: LLaVA-style (features of every slice replace the image tokens of a chat) and vision
encoder-decoders (the decoder attends to the patches of all slices). Both take the loader's slices and rows of
report tokens and return logits for the rows. Padded slices run through the encoder and are masked, even if a
micro-batch has no image at all, so every trained parameter takes part in every backward on every rank. Only
safetensors are read, nothing is downloaded, and no code of the folder is run.

The chat template is rendered once, with the user's prompt after all slices and a marker in place of the
assistant's report. What precedes the report is the same for every sample, so it is kept as token ids and
never labeled; a row of a micro-batch is the last of them, the report, and the end of the assistant's turn.
That is also where generation begins.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, VisionEncoderDecoderModel
from transformers.utils import logging as transformers_logging

from shardflow.errors import ConfigError, os_reason
from shardflow.seeds import derive
from shardflow.training.config import ImageConfig, ModelConfig, TextConfig
from shardflow.training.device.images import window_images
from shardflow.training.models.weights import Answers, are_weights_later, build_without_weights
from shardflow.training.text import ReportTokenizer

# ruff: noqa: N803, N806
# Tensors carry their axes as a suffix: B slots, K slices, H rows, W columns, T tokens, P places of a slice, D
# width, V vocabulary, N any number.

_ENCODER_DECODER = "vision-encoder-decoder"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_MARKER = "shardflow-report-stands-here"
_WITH_TYPES = {"gemma3"}
"""Families whose images attend to all of themselves, which the types of tokens tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFrame:
    """Token ids around a report."""

    before: tuple[int, ...]
    """All before the row, with ``tokens_per_slice`` image tokens for each slice."""
    slice_of: tuple[int, ...]
    """For each of them the slice that it represents, or -1 for words."""
    begin: int
    """Last token before the report, the first of a row."""
    end: tuple[int, ...]
    """What ends the assistant's turn; predicted like the report."""


def chat_frame(
    tokenizer: ReportTokenizer,
    prompt: str,
    *,
    num_slices: int,
    tokens_per_slice: int,
    image_token_id: int,
    image: tuple[str, str] | None = None,
) -> ChatFrame:
    """Render the tokenizer's chat template around a report.

    Args:
        tokenizer: With the chat template of the model.
        prompt: The user's words after the slices.
        num_slices: Most slices of a sample.
        tokens_per_slice: Places of the sequence that a slice takes.
        image_token_id: Token that stands for an image.
        image: What the template writes for an image where it is not that token, and what replaces it.

    Raises:
        ConfigError: there is no template, or it does not write one image token for each slice after a first
            word.
    """
    user = [*({"type": "image"} for _ in range(num_slices)), {"type": "text", "text": prompt}]
    assistant = [{"type": "text", "text": _MARKER}]
    before, end = tokenizer.chat_parts(
        [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}], _MARKER, image=image
    )
    found = before.count(image_token_id)
    # A sequence that began with a padded slice would have a first position that may look at nothing.
    if found != num_slices or image_token_id in {before[0], before[-1]}:
        raise ConfigError(
            f"the chat template of text.tokenizer must write one image token for each of {num_slices} "
            f"slices, after some words and before others, but writes {found}; take that of model.path."
        )
    ids: list[int] = []
    slice_of: list[int] = []
    number = -1
    for token in before[:-1]:
        is_slice = token == image_token_id
        number += is_slice
        ids += [token] * (tokens_per_slice if is_slice else 1)
        slice_of += [number] * tokens_per_slice if is_slice else [-1]
    return ChatFrame(
        before=tuple(ids),
        slice_of=tuple(slice_of),
        begin=before[-1],
        end=tuple(end) or tokenizer.end_ids,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelNormalization:
    """Pixel normalization of the vision encoder, as its processor would do it."""

    mean: tuple[float, ...]
    """Of each channel, for pixels from 0 to 1; a gray slice is repeated over the channels."""
    std: tuple[float, ...]

    def pixels(
        self,
        images_BKHW: torch.Tensor,
        slice_mask_BK: torch.Tensor,
        display_range: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return ``(B * K, C, H, W)`` of ``dtype``; images without a display range are windowed already."""
        exact = torch.promote_types(dtype, torch.float32)
        if display_range is None:
            windowed = images_BKHW.to(exact)
        else:
            windowed = window_images(images_BKHW, slice_mask_BK, display_range, exact)
        gray = (windowed.flatten(0, 1)[:, None] + 1) / 2
        mean, std = (torch.tensor(v, dtype=exact, device=gray.device) for v in (self.mean, self.std))
        return ((gray - mean[:, None, None]) / std[:, None, None]).to(dtype)


class LlavaReports(nn.Module):
    """LLaVA-style model in a chat whose answer is the report.

    Args:
        model: A model of ``AutoModelForImageTextToText`` that replaces image tokens by features.
        frame: The chat around a report.
        normalization: Of the encoder's pixels.
    """

    def __init__(self, model: nn.Module, frame: ChatFrame, normalization: PixelNormalization) -> None:
        super().__init__()
        self.model = model
        self._normalization = normalization
        self._slice_of = np.array(frame.slice_of)
        config: Any = model.config
        self._has_types = config.model_type in _WITH_TYPES
        self.before_N: torch.Tensor
        self.register_buffer("before_N", torch.tensor(frame.before), persistent=False)

    def forward(
        self,
        images_BKHW: torch.Tensor,
        slice_mask_BK: torch.Tensor,
        display_range: torch.Tensor | None,
        token_ids_BT: torch.Tensor,
        token_mask_BT: torch.Tensor,
    ) -> torch.Tensor:
        """Predict the next token at every position of the rows; arguments as of the reference model."""
        (batch_size, num_slices), device = slice_mask_BK.shape, token_ids_BT.device
        here = np.flatnonzero(self._slice_of < num_slices)
        slice_of_N = torch.from_numpy(self._slice_of[here]).to(device)
        before_BN = self.before_N[torch.from_numpy(here).to(device)].expand(batch_size, -1)
        words_B1 = torch.ones_like(slice_mask_BK[:, :1])
        # An extra entry follows the last slice; -1 points to it.
        mask_BN = torch.cat([slice_mask_BK, words_B1], dim=1)[:, slice_of_N]
        mask_BS = torch.cat([mask_BN, token_mask_BT], dim=1).long()
        types = {}
        if self._has_types:
            is_slice_BN = (slice_of_N >= 0).long().expand(batch_size, -1)
            types["token_type_ids"] = torch.cat([is_slice_BN, torch.zeros_like(token_ids_BT)], dim=1)
        output = self.model(
            **types,
            input_ids=torch.cat([before_BN, token_ids_BT], dim=1),
            pixel_values=self._normalization.pixels(
                images_BKHW, slice_mask_BK, display_range, _floating_type(self.model)
            ),
            attention_mask=mask_BS,
            # A padded slice takes no position, so what follows it keeps the position that it has without it.
            position_ids=(mask_BS.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=token_ids_BT.shape[1],
        )
        logits: torch.Tensor = output.logits
        return logits


class EncoderDecoderReports(nn.Module):
    """Vision encoder-decoder whose decoder attends to the patches of all slices of a study.

    Args:
        model: A ``VisionEncoderDecoderModel``.
        normalization: Of the encoder's pixels.
    """

    def __init__(self, model: nn.Module, normalization: PixelNormalization) -> None:
        super().__init__()
        self.model = model
        self._normalization = normalization

    def forward(
        self,
        images_BKHW: torch.Tensor,
        slice_mask_BK: torch.Tensor,
        display_range: torch.Tensor | None,
        token_ids_BT: torch.Tensor,
        token_mask_BT: torch.Tensor,
    ) -> torch.Tensor:
        """Predict the next token at every position of the rows; arguments as of the reference model."""
        model: Any = self.model
        pixels = self._normalization.pixels(images_BKHW, slice_mask_BK, display_range, _floating_type(model))
        patches_NPD = model.encoder(pixel_values=pixels).last_hidden_state
        if hasattr(model, "enc_to_dec_proj"):
            patches_NPD = model.enc_to_dec_proj(patches_NPD)
        patches_BKPD = patches_NPD.unflatten(0, slice_mask_BK.shape)
        seen_BKPD = torch.where(slice_mask_BK[:, :, None, None], patches_BKPD, torch.zeros_like(patches_BKPD))
        # A study without images attends to zeros: a softmax over nothing is NaN.
        visible_BK = slice_mask_BK | ~slice_mask_BK.any(dim=1, keepdim=True)
        output = model.decoder(
            input_ids=token_ids_BT,
            attention_mask=token_mask_BT.long(),
            encoder_hidden_states=seen_BKPD.flatten(1, 2),
            encoder_attention_mask=visible_BK.repeat_interleave(patches_NPD.shape[1], dim=1).long(),
            use_cache=False,
        )
        logits: torch.Tensor = output.logits
        return logits


def build_pretrained(
    settings: ModelConfig,
    image: ImageConfig,
    text: TextConfig,
    tokenizer: ReportTokenizer,
    *,
    num_places: int,
    seed: int,
) -> tuple[nn.Module, ReportTokenizer]:
    """Build a model of transformers from ``model.path``.

    Args:
        settings: The table ``[model]``, with a path.
        image: Size of images; that which the encoder wants.
        text: Prompt and longest row.
        tokenizer: That of ``text.tokenizer``.
        num_places: Most slices or images of a sample.
        seed: Run-level seed, for weights that are not stored.

    Returns:
        The model on the CPU in float32 and training mode, and the tokenizer that frames reports for it.

    Raises:
        ConfigError: the folder holds no such model, or images, tokenizer or lengths do not fit it.
    """
    path = settings.path
    if path is None:
        raise ConfigError("model.path must name a folder, got none; set it.")
    config = _read_config(path)
    kind = VisionEncoderDecoderModel if config.model_type == _ENCODER_DECODER else AutoModelForImageTextToText
    torch.manual_seed(derive(seed, "model-weights"))
    inner = read_model(kind, config, settings).train()
    vision = config.encoder if config.model_type == _ENCODER_DECODER else config.vision_config
    normalization = _read_normalization(path, num_channels=int(getattr(vision, "num_channels", 3)))
    _check_view(image, vision)
    words = config.decoder if config.model_type == _ENCODER_DECODER else config.get_text_config()
    _check_words(words, tokenizer)
    if config.model_type == _ENCODER_DECODER:
        begin = getattr(config, "decoder_start_token_id", None)  # absent where the folder does not set it
        framed = tokenizer.framed(
            begin_id=tokenizer.begin_id if begin is None else int(begin), end_ids=tokenizer.end_ids
        )
        _check_length(words, text.max_tokens)
        return EncoderDecoderReports(inner, normalization), framed
    frame = chat_frame(
        tokenizer,
        text.prompt,
        num_slices=num_places,
        tokens_per_slice=_tokens_per_slice(inner, image, len(normalization.mean)),
        image_token_id=int(config.image_token_id),
        image=_image_words(config, tokenizer),
    )
    _check_length(words, len(frame.before) + text.max_tokens)
    return LlavaReports(inner, frame, normalization), tokenizer.framed(
        begin_id=frame.begin, end_ids=frame.end
    )


def _read_config(path: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path must be a folder with a config.json of transformers, got {os_reason(error)} "
            f"({path.name}); correct it."
        ) from None
    if config.model_type != _ENCODER_DECODER and not hasattr(config, "image_token_id"):
        raise ConfigError(
            "model.path must hold a LLaVA-style model or a vision encoder-decoder for reports, got "
            f"{config.model_type!r}; choose another, or train it on conversations by task.type = 'sft'."
        )
    if "image_grid_thw" in inspect.signature(_class_of(config).forward).parameters:
        raise ConfigError(
            f"model.path holds {config.model_type!r}, whose images have a size each, which reports of slices "
            "do not; train it on conversations by task.type = 'sft'."
        )
    return config


def _class_of(config: Any) -> Any:
    kinds: Any = AutoModelForImageTextToText._model_mapping
    return kinds.get(type(config), VisionEncoderDecoderModel)


def _image_words(config: Any, tokenizer: ReportTokenizer) -> tuple[str, str] | None:
    """Return what the template of a family writes for an image, and what its processor makes of it."""
    if config.model_type not in _WITH_TYPES:
        return None
    begin, image, end = (
        tokenizer.name_of(int(getattr(config, name)))
        for name in ("boi_token_index", "image_token_id", "eoi_token_index")
    )
    return begin, f"\n\n{begin}{image}{end}\n\n"


def read_model(kind: Any, config: Any, settings: ModelConfig) -> nn.Module:
    """Read a model of the folder ``model.path``, or make it with weights of torch's random numbers.

    Args:
        kind: The class, or auto class, of transformers.
        config: The configuration of the folder.
        settings: The table ``[model]``.

    Returns:
        The model in float32: on the CPU, or inside `weights_later` without its stored weights.

    Raises:
        ConfigError: It cannot be built, or there is no such attention for it here.
    """
    path = settings.path
    assert path is not None  # noqa: S101 - checked when the settings were read
    transformers_logging.disable_progress_bar()
    chosen = settings.attn_implementation
    attention = {} if chosen == "auto" else {"attn_implementation": chosen}
    model: nn.Module | None = None
    try:
        if settings.weights == "stored" and are_weights_later():
            model = build_without_weights(kind, config, path, attention)
        if model is None and settings.weights == "stored":
            model = kind.from_pretrained(
                str(path),
                config=config,
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
                **attention,
            )
        if model is None:
            is_auto = hasattr(kind, "from_config")
            make = kind.from_config if is_auto else kind._from_config if attention else kind
            model = make(config, **attention).float()
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, ImportError) as error:
        if attention and isinstance(error, ValueError | ImportError):
            raise ConfigError(
                f"model.attn_implementation {chosen!r} does not work with model.path here; choose another, "
                "install its package, or leave it out."
            ) from None
        raise ConfigError(
            f"model.path must hold a model that can be built, with safetensors where model.weights is "
            f"'stored', got {os_reason(error)} ({path.name}); correct it, or set model.weights."
        ) from None
    return model


def _read_normalization(path: Path, *, num_channels: int) -> PixelNormalization:
    """Read mean and deviation from the folder's processor; without one pixels go from -1 to 1."""
    for name in _PROCESSOR_FILES:
        try:
            content = json.loads((path / name).read_bytes())
        except OSError:
            continue
        except ValueError as error:
            raise ConfigError(
                f"{name} of model.path must be JSON, got {type(error).__name__}; correct it."
            ) from None
        content = content.get("image_processor", content)
        if content.get("image_mean") and content.get("image_std"):
            mean, std = (tuple(map(float, content[key])) for key in ("image_mean", "image_std"))
            if num_channels == 1:  # one gray channel looks at the mean of the three
                mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
            return PixelNormalization(mean=mean, std=std)
    return PixelNormalization(mean=(0.5,) * num_channels, std=(0.5,) * num_channels)


def _check_view(image: ImageConfig, vision: Any) -> None:
    size = getattr(vision, "image_size", None)
    wanted = (size, size) if isinstance(size, int) else tuple(size or (image.rows, image.columns))
    if wanted != (image.rows, image.columns):
        raise ConfigError(
            f"image.rows and image.columns must be {wanted[0]} and {wanted[1]}, as the vision encoder of "
            f"model.path wants, got {image.rows} and {image.columns}; set them."
        )


def _check_words(words: Any, tokenizer: ReportTokenizer) -> None:
    if tokenizer.vocab_size > words.vocab_size:
        raise ConfigError(
            f"text.tokenizer must have at most the {words.vocab_size} tokens of model.path, got "
            f"{tokenizer.vocab_size}; take the model's own."
        )


def _check_length(words: Any, num_positions: int) -> None:
    limit = getattr(words, "max_position_embeddings", None)
    if limit is not None and num_positions > limit:
        raise ConfigError(
            f"slices, prompt and text.max_tokens must fit the {limit} positions of model.path, got "
            f"{num_positions}; lower fields.image.num_slices or text.max_tokens."
        )


def _tokens_per_slice(model: Any, image: ImageConfig, num_channels: int) -> int:
    """Count the features of a slice by a forward pass: configurations spread the number over many keys."""
    with torch.no_grad(), Answers(answer=True):
        features = model.get_image_features(
            pixel_values=torch.zeros((1, num_channels, image.rows, image.columns))
        )
    pooled = getattr(features, "pooler_output", features)
    return int(pooled[0].shape[0])


def _floating_type(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
