"""The words around a report: a chat template, with a place for every slice.

The template is rendered once, with the user's prompt behind all slices and a marker where the assistant's
report stands. What is before the report is the same for every sample, so it is kept as token ids and never
labelled; a row of a micro-batch is the last of them, the report, and what ends the assistant's turn. That
is also where generation begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardflow.errors import ConfigError
from shardflow.training.text import ReportTokenizer

__all__ = ["ChatFrame", "chat_frame"]

_MARKER = "shardflow-report-stands-here"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFrame:
    """Token ids around a report."""

    before: tuple[int, ...]
    """All before the row, with ``tokens_per_slice`` image tokens for each slice."""
    slice_of: tuple[int, ...]
    """For each of them the slice that it stands for, or -1 for words."""
    begin: int
    """Last token before the report, the first of a row."""
    end: tuple[int, ...]
    """What ends the assistant's turn; predicted like the report."""


def chat_frame(
    tokenizer: ReportTokenizer, prompt: str, *, num_slices: int, tokens_per_slice: int, image_token_id: int
) -> ChatFrame:
    """Render the tokenizer's chat template around a report.

    Args:
        tokenizer: With the chat template of the model.
        prompt: What the user says behind the slices.
        num_slices: Most slices of a sample.
        tokens_per_slice: Places of the sequence that a slice takes.
        image_token_id: Token that the template puts down for an image.

    Raises:
        ConfigError: there is no template, or it does not put down one image token for each slice behind a
            first word.
    """
    user = [*({"type": "image"} for _ in range(num_slices)), {"type": "text", "text": prompt}]
    assistant = [{"type": "text", "text": _MARKER}]
    before, end = tokenizer.chat_parts(
        [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}], _MARKER
    )
    found = before.count(image_token_id)
    # A sequence that began with a padded slice would have a first position that may look at nothing.
    if found != num_slices or image_token_id in {before[0], before[-1]}:
        raise ConfigError(
            f"the chat template of text.tokenizer must put down one image token for each of {num_slices} "
            f"slices, behind some words and before others, got {found}; take the template of model.path."
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
