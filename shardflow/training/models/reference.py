"""Reference model: each slice becomes one prefix embedding of a causal language model.

A ViT encodes every slice alone; its class token, projected, precedes the report as one embedding. The
sequence is ``[start] [slice 1 .. slice K] [begin token] [report tokens]``:

- ``start`` is learned and never masked. It is the first position, so no row of the attention is ever fully
  masked (a softmax over nothing is NaN), not even in a micro-batch that is all padding.
- Padded slices are masked as keys, have zero embeddings and take no position: a study of two slices in a
  batch of eight is computed as a study of two slices.
- Text and images that are all padding still run through everything: every parameter takes part in every
  backward, which DistributedDataParallel needs, with gradients of exactly zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, GPT2Config, LlamaConfig, ViTConfig

from shardflow.loading.config import check_fits
from shardflow.seeds import derive
from shardflow.training.config import ImageConfig, ModelConfig
from shardflow.training.device.images import window_images
from shardflow.training.sequences import Packing

# ruff: noqa: N803, N806
# Tensors carry their axes as a suffix: B slots, K slices, H rows, W columns, T tokens, S whole sequence, D
# width, V vocabulary.


_INITIAL_STD = 0.02
_MLP_FACTOR = 4


class ReportModel(nn.Module):
    """Vision encoder, projection, causal language model.

    Args:
        vision: A transformers vision model whose first output token represents the image.
        language: A transformers causal language model that takes ``inputs_embeds``.
        vision_width: Width of the vision model's output.
        language_width: Width of the language model's embeddings.
    """

    def __init__(
        self, vision: nn.Module, language: nn.Module, *, vision_width: int, language_width: int
    ) -> None:
        super().__init__()
        self.vision = vision
        self.projection = nn.Linear(vision_width, language_width)
        self.start_embedding = nn.Parameter(torch.empty(language_width))
        self.language = language
        nn.init.normal_(self.projection.weight, std=_INITIAL_STD)
        nn.init.zeros_(self.projection.bias)
        nn.init.normal_(self.start_embedding, std=_INITIAL_STD)

    def forward(
        self,
        images_BKHW: torch.Tensor,
        slice_mask_BK: torch.Tensor,
        display_range: torch.Tensor | None,
        token_ids_BT: torch.Tensor,
        token_mask_BT: torch.Tensor,
        packing: Packing | None = None,
    ) -> torch.Tensor:
        """Predict the next token at every text position.

        Args:
            images_BKHW: ``(B, K, H, W)`` int16 or float32 in stored units.
            slice_mask_BK: ``(B, K)`` bool.
            display_range: ``(B, 2)`` or ``(B, K, 2)`` float32; None for images that are as the vision model
                takes them.
            token_ids_BT: ``(B, T)`` int64, each row opened by the begin token; ``(1, T)`` where packed.
            token_mask_BT: ``(B, T)`` bool.
            packing: Layout of the samples in one sequence; None where each has a row.

        Returns:
            Logits ``(B, T, V)``; those of padded positions mean nothing. Where packed ``(1, T, V)``.
        """
        if packing is not None:
            return self._packed_logits(images_BKHW, display_range, token_ids_BT, packing)
        prefix_BKD = self._slice_embeddings(images_BKHW, slice_mask_BK, display_range)
        batch_size, num_tokens = token_ids_BT.shape
        start_B1D = self.start_embedding.expand(batch_size, 1, -1)
        text_BTD = self._language_call("get_input_embeddings")(token_ids_BT)
        present_B1 = torch.ones_like(token_mask_BT[:, :1])
        mask_BS = torch.cat([present_B1, slice_mask_BK, token_mask_BT], dim=1).long()
        output = self.language(
            inputs_embeds=torch.cat([start_B1D, prefix_BKD, text_BTD], dim=1),
            attention_mask=mask_BS,
            # A padded slice takes no position, so what follows it keeps the position that it has without it.
            position_ids=(mask_BS.cumsum(dim=1) - 1).clamp(min=0),
            use_cache=False,
            logits_to_keep=num_tokens,
        )
        logits: torch.Tensor = output.logits
        return logits

    def _slice_embeddings(
        self, images_BKHW: torch.Tensor, slice_mask_BK: torch.Tensor, display_range: torch.Tensor | None
    ) -> torch.Tensor:
        pixels = self._pixels(images_BKHW, slice_mask_BK, display_range)
        embeddings_BKD = self._embed_slices(pixels.flatten(0, 1)).view(*slice_mask_BK.shape, -1)
        return torch.where(slice_mask_BK[:, :, None], embeddings_BKD, torch.zeros_like(embeddings_BKD))

    def _packed_logits(
        self,
        images_BKHW: torch.Tensor,
        display_range: torch.Tensor | None,
        token_ids_1T: torch.Tensor,
        packing: Packing,
    ) -> torch.Tensor:
        """Predict for one sequence of all samples; only present slices go through the vision model."""
        num_places = images_BKHW.shape[1]
        chosen_N1HW = images_BKHW.flatten(0, 1).index_select(0, packing.slice_index_N)[:, None]
        ranges = display_range
        if ranges is not None and ranges.ndim == 3:
            ranges = ranges.flatten(0, 1).index_select(0, packing.slice_index_N)
        elif ranges is not None:
            ranges = ranges.index_select(0, packing.slice_index_N // num_places)
        present_N1 = torch.ones_like(packing.slice_index_N, dtype=torch.bool)[:, None]
        slices_ND = self._embed_slices(self._pixels(chosen_N1HW, present_N1, ranges)[:, 0])
        text_TD = self._language_call("get_input_embeddings")(token_ids_1T)[0]
        start_1D = self.start_embedding[None].to(text_TD.dtype)
        elements = torch.cat([start_1D, slices_ND.to(text_TD.dtype), text_TD])
        output = self.language(
            inputs_embeds=elements.index_select(0, packing.source_S)[None],
            position_ids=packing.position_S[None],
            use_cache=False,
            logits_to_keep=packing.text_place_T,
            **self._boundaries(packing, text_TD.dtype),
        )
        # Not a view of it: FSDP2 warns of views, which might be changed in place.
        logits: torch.Tensor = output.logits
        return logits

    def _boundaries(self, packing: Packing, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments that keep attention inside each sample, for the model's kind of attention."""
        kind = str(getattr(self.language.config, "_attn_implementation", "eager"))
        if kind.startswith("flash"):
            return {
                "attention_mask": None,
                "cu_seq_lens_q": packing.study_start_U,
                "cu_seq_lens_k": packing.study_start_U,
                "max_length_q": packing.longest,
                "max_length_k": packing.longest,
            }
        return {"attention_mask": packing.attention_mask(dtype, additive=kind != "sdpa")}

    def _pixels(
        self, images_BKHW: torch.Tensor, slice_mask_BK: torch.Tensor, display_range: torch.Tensor | None
    ) -> torch.Tensor:
        dtype = self.projection.weight.dtype
        if display_range is None:
            return images_BKHW.to(dtype)
        # Windowed in float32 at least: intensities go up to thousands.
        exact = torch.promote_types(dtype, torch.float32)
        return window_images(images_BKHW, slice_mask_BK, display_range, exact).to(dtype)

    def _embed_slices(self, pixels_NHW: torch.Tensor) -> torch.Tensor:
        features = self.vision(pixel_values=pixels_NHW[:, None]).last_hidden_state[:, 0]
        embeddings_ND: torch.Tensor = self.projection(features)
        return embeddings_ND

    def _language_call(self, name: str) -> Any:
        return getattr(self.language, name)()


def build_model(
    settings: ModelConfig,
    image: ImageConfig,
    *,
    num_places: int,
    vocab_size: int,
    max_tokens: int,
    seed: int,
) -> ReportModel:
    """Build the model from settings, with weights that follow from the seed alone.

    Args:
        settings: Sizes of both parts.
        image: Size of images.
        num_places: Most slices, images or tiles of a sample.
        vocab_size: Token ids of the tokenizer.
        max_tokens: Longest text row.
        seed: Run-level seed.

    Returns:
        The model on the CPU in float32 and training mode.

    Raises:
        ConfigError: The table of positions alone does not fit into memory.
    """
    num_positions = 1 + num_places + max_tokens
    if settings.language == "gpt2":
        check_fits(
            num_positions * settings.language_width * torch.float32.itemsize,
            f"a model of {num_positions} positions",
            "lower fields.image.num_slices or text.max_tokens",
        )
    torch.manual_seed(derive(seed, "model-weights"))
    vision = AutoModel.from_config(
        ViTConfig(
            image_size=(image.rows, image.columns),
            patch_size=settings.patch_size,
            num_channels=1,
            hidden_size=settings.vision_width,
            intermediate_size=_MLP_FACTOR * settings.vision_width,
            num_hidden_layers=settings.vision_layers,
            num_attention_heads=settings.vision_heads,
            hidden_dropout_prob=settings.dropout,
            attention_probs_dropout_prob=settings.dropout,
        ),
        add_pooling_layer=False,
    )
    language = AutoModelForCausalLM.from_config(
        _language_config(settings, vocab_size, num_positions=num_positions)
    )
    model = ReportModel(
        vision, language, vision_width=settings.vision_width, language_width=settings.language_width
    )
    if settings.activation_checkpointing:
        for part in (vision, language):
            part.activation_checkpointing_enable()
    return model.train()


def _language_config(settings: ModelConfig, vocab_size: int, num_positions: int) -> Any:
    if settings.language == "gpt2":
        return GPT2Config(
            vocab_size=vocab_size,
            n_positions=num_positions,
            n_embd=settings.language_width,
            n_layer=settings.language_layers,
            n_head=settings.language_heads,
            resid_pdrop=settings.dropout,
            embd_pdrop=settings.dropout,
            attn_pdrop=settings.dropout,
            # The default ids (50256) are outside a small vocabulary.
            bos_token_id=None,
            eos_token_id=None,
        )
    return LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=num_positions,
        hidden_size=settings.language_width,
        intermediate_size=_MLP_FACTOR * settings.language_width,
        num_hidden_layers=settings.language_layers,
        num_attention_heads=settings.language_heads,
        attention_dropout=settings.dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
