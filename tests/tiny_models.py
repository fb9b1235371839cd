"""Tiny models of transformers in local folders, with random weights: LLaVA-style and encoder-decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)
from transformers.utils import logging as transformers_logging

from shardflow.training.checkpoint.tensors import named_optimizer_tensors, named_tensors
from shardflow.training.config import TrainConfig
from shardflow.training.model_fields import num_places
from shardflow.training.models.building import build_report_model
from shardflow.training.text import ReportTokenizer

__all__ = [
    "IMAGE_TOKEN",
    "TEMPLATE",
    "make_encoder_decoder",
    "make_llava",
    "model_of",
    "model_tensors",
    "optimizer_tensors",
]

IMAGE_TOKEN = "<image>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %} {% endfor %}"
)
SIZE, PATCH = 16, 8


def model_of(config: TrainConfig) -> tuple[nn.Module, ReportTokenizer]:
    """Build the model of a configuration, as a run does."""
    return build_report_model(
        config.model,
        ReportTokenizer.load(config.text.folder),
        image=config.image,
        num_places=num_places(config.image_field),
        text=config.text,
        lora=config.lora,
        seed=config.run.seed,
    )


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copy parameters and persistent buffers; of a model that is not sharded."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model)}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copy the optimizer's state; of a model that is not sharded."""
    return {name: tensor.detach().clone() for name, tensor in named_optimizer_tensors(model, optimizer)}


def make_llava(folder: Path, tokenizer: Path, *, template: str = TEMPLATE) -> Path:
    """Save a LLaVA-style model (CLIP, Llama) with its tokenizer and processor settings; 4 tokens a slice."""
    words = _tokenizer(tokenizer, with_image_token=True)
    words.chat_template = template
    torch.manual_seed(5)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=PATCH,
    )
    language = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=language,
        image_token_index=words.convert_tokens_to_ids(IMAGE_TOKEN),
    )
    _save(LlavaForConditionalGeneration(config), words, folder)
    processor = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    return folder


def make_encoder_decoder(folder: Path, tokenizer: Path) -> Path:
    """Save a vision encoder-decoder (ViT, GPT-2 with cross-attention) and its tokenizer."""
    words = _tokenizer(tokenizer, with_image_token=False)
    torch.manual_seed(6)
    encoder = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=PATCH,
    )
    decoder = GPT2Config(
        vocab_size=len(words),
        n_embd=48,
        n_layer=2,
        n_head=2,
        n_positions=64,
        add_cross_attention=True,
        is_decoder=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id = words.bos_token_id
    _save(VisionEncoderDecoderModel(config), words, folder)
    return folder


def _tokenizer(folder: Path, *, with_image_token: bool) -> Any:
    words = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    if with_image_token:
        words.add_tokens([IMAGE_TOKEN], special_tokens=True)
    return words


def _save(model: Any, words: Any, folder: Path) -> None:
    transformers_logging.disable_progress_bar()
    model.save_pretrained(str(folder))
    words.save_pretrained(str(folder))
