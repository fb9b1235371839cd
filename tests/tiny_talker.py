"""A small language model of nobody's library, for ``model.target``: words so far, mixed by decay."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

__all__ = ["PackedTalker", "SeeingTalker", "Talker", "make_deaf", "make_flat", "make_mute", "make_score"]


class Talker(nn.Module):
    """Logits ``(N, T, V)`` from a running mean of the words of a sequence."""

    def __init__(self, vocab_size: int = 420, width: int = 16, num_outputs: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, num_outputs or vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Predict the next token everywhere."""
        seen = self.words(input_ids)
        if attention_mask is not None:
            seen = seen * attention_mask[..., None].to(seen.dtype)
        mean = seen.cumsum(dim=1) / torch.arange(1, seen.shape[1] + 1, device=seen.device)[:, None]
        logits: torch.Tensor = self.head(seen + torch.tanh(self.mix(mean)))
        return logits


def make_score(**arguments: Any) -> Talker:
    """Return a model that scores tokens, ``(N, T, 1)``."""
    return Talker(num_outputs=1, **arguments)


class _WrongTalker(Talker):
    """The same, with a slip."""

    def __init__(self, slip: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.slip = slip

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        """Return something else."""
        logits = super().forward(input_ids, attention_mask)
        return logits[:, -1] if self.slip == "flat" else {"logits": logits}


class _DeafTalker(Talker):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Take nothing by its name."""
        return super().forward(ids)


def make_flat(**arguments: Any) -> Talker:
    """Return a model that predicts after the last token alone."""
    return _WrongTalker("flat", **arguments)


def make_mute(**arguments: Any) -> Talker:
    """Return a model that returns a dictionary."""
    return _WrongTalker("mute", **arguments)


def make_deaf(**arguments: Any) -> Talker:
    """Return a model that takes no argument by its name."""
    return _DeafTalker(**arguments)


class PackedTalker(Talker):
    """The same, whose words end where positions begin again."""

    takes_packed = True

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predict the next token everywhere."""
        if position_ids is None:
            return super().forward(input_ids, attention_mask)
        starts = [*torch.nonzero(position_ids[0] == 0)[:, 0].tolist(), input_ids.shape[1]]
        own = super().forward
        return torch.cat([own(input_ids[:, start:stop]) for start, stop in pairwise(starts)], dim=1)


class SeeingTalker(Talker):
    """The same with pictures, which add their mean to every word."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.look = nn.Linear(3, self.mix.in_features)

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return ``(P, 1, D)``, a place for each picture."""
        found: torch.Tensor = self.look(pixel_values.mean(dim=(-1, -2)))[:, None]
        return found

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predict the next token everywhere."""
        logits = super().forward(input_ids, attention_mask)
        if pixel_values is None:
            return logits
        seen: torch.Tensor = self.head(self.get_image_features(pixel_values).mean(dim=0))
        return logits + seen
