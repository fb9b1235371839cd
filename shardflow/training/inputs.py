"""A loader's batch becomes the model's tensors: small integers travel, the device does the rest.

Owns the labels (report tokens only) and the intensity window. Images cross to the device as they were
stored (int16 is half of float32) and are windowed there.
"""

# ruff: noqa: N803, N806, N815
# Tensors carry their axes as a suffix: B slots, K slices, H rows, W columns, T tokens.
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shardflow.loading import Batch
from shardflow.training.losses import IGNORED_LABEL
from shardflow.training.text import ReportTokenizer

__all__ = ["MicroInputs", "make_inputs", "window_images"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroInputs:
    """One micro-batch on the device."""

    images_BKHW: torch.Tensor
    """int16 or float32, in the unit the series was stored in."""
    slice_mask_BK: torch.Tensor
    """bool, false for padded slices."""
    display_range_B2: torch.Tensor
    """float32, the intensities that become -1 and 1."""
    token_ids_BT: torch.Tensor
    """int64."""
    token_mask_BT: torch.Tensor
    """bool, false for padding."""
    labels_BT: torch.Tensor
    """int64, the next token of each position or ``IGNORED_LABEL``."""
    weights_B: torch.Tensor
    """float32, 0 for padding slots."""
    num_tokens: float
    """Weighted labelled tokens, the micro-batch's part of the step's N; known without asking the device."""
    num_samples: float
    """Sum of the weights."""


def make_inputs(
    batch: Batch, tokenizer: ReportTokenizer, *, max_tokens: int, device: torch.device
) -> MicroInputs:
    """Tokenise a batch's reports and move everything to the device.

    Args:
        batch: One micro-batch of the loader; its buffers may be reused once the result exists.
        tokenizer: Turns reports into token ids.
        max_tokens: Longest row of tokens.
        device: Where the model lives.
    """
    arrays = batch.arrays
    weights = np.asarray(arrays["weight"], np.float32)
    rows = tokenizer.encode([batch.text(slot) for slot in range(len(weights))], max_tokens)
    labels = np.full(rows.token_ids.shape, IGNORED_LABEL, np.int64)
    labels[:, :-1] = np.where(rows.token_mask[:, 1:], rows.token_ids[:, 1:], IGNORED_LABEL)
    tokens_per_slot = (labels != IGNORED_LABEL).sum(axis=1)
    return MicroInputs(
        images_BKHW=_to_device(arrays["image"], device),
        slice_mask_BK=_to_device(arrays["slice_mask"], device).bool(),
        display_range_B2=_to_device(arrays["display_range"], device),
        token_ids_BT=_to_device(rows.token_ids, device),
        token_mask_BT=_to_device(rows.token_mask, device),
        labels_BT=_to_device(labels, device),
        weights_B=_to_device(weights, device),
        num_tokens=float(np.dot(tokens_per_slot, weights.astype(np.float64))),
        num_samples=float(weights.sum(dtype=np.float64)),
    )


def window_images(
    images_BKHW: torch.Tensor, slice_mask_BK: torch.Tensor, display_range_B2: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Map each sample's display range to [-1, 1] and clip what lies outside.

    Padded slices become 0 whatever their bytes are, so that nothing of a recycled buffer reaches the model.

    Args:
        images_BKHW: ``(B, K, H, W)`` int16 or float32.
        slice_mask_BK: ``(B, K)`` bool.
        display_range_B2: ``(B, 2)`` float32, low and high; an empty range is taken as one unit wide.
        dtype: Floating type of the result.
    """
    low_B111 = display_range_B2[:, 0].to(dtype)[:, None, None, None]
    high_B111 = display_range_B2[:, 1].to(dtype)[:, None, None, None]
    width_B111 = high_B111 - low_B111
    width_B111 = torch.where(width_B111 > 0, width_B111, torch.ones_like(width_B111))
    scaled = ((images_BKHW.to(dtype) - low_B111) / width_B111).clamp(0, 1) * 2 - 1
    return torch.where(slice_mask_BK[:, :, None, None], scaled, torch.zeros_like(scaled))


def _to_device(
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], device: torch.device
) -> torch.Tensor:
    # A copy on the CPU too: the batch's buffer goes back to the loader's pool when its last view dies, and
    # a step that holds several micro-batches must not keep the pool empty.
    return torch.tensor(array, device=device)
