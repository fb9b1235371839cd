"""What the examples train: the reference model at toy size, and batches as its tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import shardflow as sf
from shardflow.training.config import ImageConfig, ModelConfig
from shardflow.training.inputs import make_inputs
from shardflow.training.models.reference import build_model
from shardflow.training.sequences import weighted_token_loss
from shardflow.training.text import ReportTokenizer

__all__ = ["FIELDS", "MICRO_BATCHES_PER_STEP", "SPEC", "SummedLoss", "to_tensors"]

SLICES, SIDE, MAX_TOKENS = 4, 32, 64
MICRO_BATCHES_PER_STEP = 4  # over all ranks: two ranks accumulate two each, four ranks one each
SPEC = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=MICRO_BATCHES_PER_STEP, tail="drop")
FIELDS = {
    "image": sf.Slices(num_slices=SLICES, size=(SIDE, SIDE), channels=1, missing="pad"),
    "report": sf.Text(missing="pad"),
}


class SummedLoss(nn.Module):
    """A model whose forward is its loss: the sum over the batch's tokens, and their number."""

    def __init__(self, tokenizer: Path) -> None:
        super().__init__()
        self.reports = build_model(
            ModelConfig(
                language="llama",
                vision_width=32,
                vision_layers=1,
                language_width=32,
                language_layers=1,
                dropout=0.0,
            ),
            ImageConfig(rows=SIDE, columns=SIDE),
            num_places=SLICES,
            vocab_size=ReportTokenizer.load(tokenizer).vocab_size,
            max_tokens=MAX_TOKENS,
            seed=1,
        )

    def forward(self, **tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss and the number of tokens it is over."""
        labels, weights, num_tokens = (tensors.pop(name) for name in ("labels", "weights", "num_tokens"))
        return weighted_token_loss(self.reports(**tensors), labels, weights), num_tokens


def to_tensors(tokenizer: Path, device: torch.device) -> Callable[[sf.Batch], dict[str, torch.Tensor]]:
    """Return what makes a batch the arguments of :class:`SummedLoss`."""
    words = ReportTokenizer.load(tokenizer)

    def convert(batch: sf.Batch) -> dict[str, torch.Tensor]:
        inputs = make_inputs(batch, words, max_tokens=MAX_TOKENS, device=device)
        if inputs.display_range is None:
            raise ValueError("images must come in stored units, got windowed ones; use no image pipeline.")
        return {
            "images_BKHW": inputs.images_BKHW,
            "slice_mask_BK": inputs.slice_mask_BK,
            "display_range": inputs.display_range,
            "token_ids_BT": inputs.token_ids_BT,
            "token_mask_BT": inputs.token_mask_BT,
            "labels": inputs.labels_BT,
            "weights": inputs.weights_B,
            "num_tokens": torch.tensor(inputs.num_tokens, device=device),
        }

    return convert
