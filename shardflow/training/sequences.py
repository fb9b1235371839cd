"""Packed sequences, several studies in one row, and the loss of a micro-batch.

Padded rows waste the difference of their lengths; a packed micro-batch is one row, study after study, each
with its own start, slices and text. Positions begin at 0 in each study, and attention stays inside it, as a
block-diagonal mask or, for kernels that take them, as cumulative lengths, so the loss equals that of the
padded rows, up to the order of additions (docs/adr/0050). Everything is computed on the host, from masks, and
travels as a few small integers per element.

The loss is a weighted sum over tokens, never a mean: a mean over a micro-batch would make the step depend on
how its samples were assigned to micro-batches of unequal length; sums add up to the same step for every world
size (docs/adr/0050).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

# ruff: noqa: N803, N806, N815
# Tensors carry their axes as a suffix: B slots, K slices, T text tokens, S elements of the sequence, N slices
# that are present, D width, V vocabulary.

IGNORED_LABEL = -100
"""Label of a position that is not predicted: padding, and the last token of a row."""
# A vision model without input has no gradients, and ranks would wait for them; with a single slice its
# gradients have another memory layout, which DistributedDataParallel has to copy.
_FEWEST_SLICES = 2
_LENGTH_MULTIPLE = 8  # kernels like round sizes, and fewer distinct shapes fragment memory less
_START = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Where the elements of a packed sequence come from; on the device."""

    slice_index_N: torch.Tensor
    """int64, the slices to look at, as places in the flattened ``(B, K)``; two at least, even if they
    are not in the sequence."""
    source_S: torch.Tensor
    """int64, what is at each place: 0 the start embedding, from 1 on the slices of ``slice_index_N``,
    then the text tokens."""
    position_S: torch.Tensor
    """int64, place within the study."""
    segment_S: torch.Tensor
    """int64, number of the study; what rounds the length up is one of its own."""
    text_place_T: torch.Tensor
    """int64, positions of the text tokens in the sequence."""
    study_start_U: torch.Tensor
    """int32, where each study begins, and the length: ``cu_seqlens`` of variable-length attention."""
    longest: int
    """Elements of the longest study."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], *, longest: int) -> Packing:
        """Take the tensors of a `PackedRow` by their names."""
        names = [entry.name for entry in fields(cls) if entry.name != "longest"]
        return cls(**{name: tensors[name] for name in names}, longest=longest)

    def attention_mask(self, dtype: torch.dtype, *, additive: bool) -> torch.Tensor:
        """Return the attention mask, ``(1, 1, S, S)``: each place sees the same study up to itself.

        Args:
            dtype: Of the result, where it is additive.
            additive: 0 where one may look, and where not what leaves nothing of a softmax; else bool.
        """
        same_study = self.segment_S[:, None] == self.segment_S[None, :]
        visible = torch.tril(same_study)[None, None]
        if not additive:
            return visible
        zero = torch.zeros((), dtype=dtype, device=visible.device)
        return torch.where(visible, zero, torch.full_like(zero, torch.finfo(dtype).min))


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """A packed micro-batch on the host: arrays by name, as `Packing` has them, and the text."""

    arrays: dict[str, NDArray[Any]]
    """``slice_index_N``, ``source_S``, ``position_S``, ``segment_S``, ``text_place_T``, ``study_start_U``;
    ``token_ids`` ``(1, T)``, ``labels`` ``(T, 1)`` and ``weights`` ``(T,)``."""
    longest: int


def pack_row(
    slice_mask_BK: NDArray[Any],
    token_ids_BT: NDArray[np.int64],
    token_mask_BT: NDArray[np.bool_],
    labels_BT: NDArray[np.int64],
    weights_B: NDArray[np.float32],
) -> PackedRow:
    """Lay the slots of a micro-batch out one after another.

    Args:
        slice_mask_BK: Which slices are there.
        token_ids_BT: Text, padded on the right; at least one token in each row.
        token_mask_BT: Which tokens are there.
        labels_BT: The next token of each.
        weights_B: Weight of each slot; slots of weight 0 are in the sequence and count nothing.
    """
    is_slice = np.asarray(slice_mask_BK, bool)
    num_slices = is_slice.sum(axis=1)
    num_tokens = token_mask_BT.sum(axis=1)
    lengths = 1 + num_slices + num_tokens
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    rounded = -(-total // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE

    slice_index = np.flatnonzero(is_slice)
    num_spare = max(0, _FEWEST_SLICES - len(slice_index))
    num_looked_at = len(slice_index) + num_spare
    source = np.full(rounded, _START, np.int64)
    slice_place = _places(starts + 1, num_slices)
    source[slice_place] = np.arange(1, 1 + len(slice_index))
    text_place = _places(starts + 1 + num_slices, num_tokens)
    source[text_place] = 1 + num_looked_at + np.arange(len(text_place))

    bounds = [*starts.tolist(), total, *([rounded] if rounded > total else [])]
    sizes = np.diff(bounds)
    position = np.arange(rounded) - np.repeat(np.array(bounds[:-1], np.int64), sizes)
    return PackedRow(
        {
            "slice_index_N": np.append(slice_index, np.zeros(num_spare, np.int64)),
            "source_S": source,
            "position_S": position,
            "segment_S": np.repeat(np.arange(len(sizes), dtype=np.int64), sizes),
            "text_place_T": text_place,
            "study_start_U": np.array(bounds, np.int32),
            "token_ids": token_ids_BT[token_mask_BT][None],
            "labels": labels_BT[token_mask_BT][:, None],
            "weights": np.repeat(weights_B, num_tokens),
        },
        int(sizes.max()),
    )


def _places(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of runs one after another: ``sizes[i]`` of them from ``starts[i]`` on."""
    before = np.cumsum(sizes) - sizes
    places: NDArray[np.int64] = np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(
        starts - before, sizes
    )
    return places


def weighted_token_loss(
    logits_BTV: torch.Tensor, labels_BT: torch.Tensor, weights_B: torch.Tensor
) -> torch.Tensor:
    """Sum the negative log-likelihood over the labeled tokens, each weighted as its sample is.

    Args:
        logits_BTV: ``(B, T, V)``, any float type; half precision is widened to float32 first.
        labels_BT: ``(B, T)`` int64, the token that follows each position, or :data:`IGNORED_LABEL`.
        weights_B: ``(B,)`` float, 1 for a sample and 0 for a padding slot.

    Returns:
        A scalar in nats, 0 with zero gradients where nothing is labeled or weighted.
    """
    if logits_BTV.dtype in {torch.float16, torch.bfloat16}:
        logits_BTV = logits_BTV.float()
    losses = functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return (losses.view_as(labels_BT).sum(dim=1) * weights_B.to(losses.dtype)).sum()
