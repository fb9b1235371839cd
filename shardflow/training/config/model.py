"""Settings of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from shardflow.configs import Bounds, check_fields
from shardflow.errors import ConfigError
from shardflow.training.config.ranges import Count, CountOrZero

__all__ = ["LoraSettings", "ModelSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """A small model built from these numbers, or one of transformers from a folder; nothing is downloaded."""

    path: Path | None = None
    """Folder of a LLaVA-style model or of a vision encoder-decoder, in place of the numbers below."""
    weights: Literal["stored", "random"] = "stored"
    """Of the folder: its safetensors, or only its ``config.json``, with weights that follow from the seed."""
    frozen: tuple[str, ...] = ()
    """Beginnings of parameter names that are not trained, such as ``"model.model.vision_tower"``."""
    language: Literal["gpt2", "llama"] = "gpt2"
    patch_size: Count = 8
    """Pixels on the side of a vision patch; must divide rows and columns of the view."""
    vision_width: Count = 128
    vision_layers: Count = 4
    vision_heads: Count = 4
    language_width: Count = 128
    language_layers: Count = 4
    language_heads: Count = 4
    dropout: Annotated[float, Bounds(0.0, 0.9)] = 0.1
    activation_checkpointing: bool = False
    """Recompute activations in the backward: less memory, about a third more compute."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.path is None and self.weights != "stored":
            raise ConfigError("model.weights must come with model.path, got it without; remove it.")
        for part in ("vision", "language"):
            width, heads = getattr(self, f"{part}_width"), getattr(self, f"{part}_heads")
            if width % heads or (width // heads) % 2:
                raise ConfigError(
                    f"{part}_width must be an even multiple of {part}_heads ({heads}), got {width}; "
                    f"use {2 * heads * max(1, round(width / (2 * heads)))}."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Adapters of low rank beside frozen weights, by peft; the checkpoints hold the adapters alone."""

    rank: CountOrZero = 0
    """0 trains the model itself."""
    alpha: Annotated[float, Bounds(0.0)] = 16.0
    """Adapters are scaled by ``alpha / rank``."""
    dropout: Annotated[float, Bounds(0.0, 0.9)] = 0.0
    targets: tuple[str, ...] = ()
    """Ends of names of linear layers that get one, such as ``"q_proj"``; none: all of the language blocks."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rank == 0 and replace(self, rank=1) != LoraSettings(rank=1):
            raise ConfigError(
                "lora.alpha, lora.dropout and lora.targets must come with lora.rank, got one without; remove "
                "it, or set a rank."
            )
