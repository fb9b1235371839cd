"""Counts of the conversations of a selection: what a token budget charges, and the room of packed slots."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.conversations.rendering import Renderer
from shardflow.fields.conversations.stored import check_counts
from shardflow.fields.field import FieldContext, Slots
from shardflow.fields.units import PartDataset
from shardflow.format.counts import ConversationCounts, CountedTemplate, open_conversation_counts
from shardflow.format.dataset import Dataset
from shardflow.format.keys import CONVERSATION_FIELD
from shardflow.sampling.budget import TokenBudget

_LOGGER = logging.getLogger(__name__)


class _Settings(Protocol):
    """What counts of the settings of `shardflow.Conversation`."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def max_images(self) -> int | None: ...

    @property
    def long(self) -> str: ...

    @property
    def split_long(self) -> bool: ...

    @property
    def pairs(self) -> bool: ...

    @property
    def member(self) -> str: ...

    @property
    def missing(self) -> str: ...


class PlannedCounts:
    """Counts of the conversations of a selection: what a token budget charges, and how slots are laid out.

    Args:
        spec: What is delivered.
        context: The samples.
        renderer: Of the processor whose tokens were counted.
        entries: Names of the entries of pictures.
        templates: For each dataset what makes its conversations; None where they are stored.

    Raises:
        ConfigError: The processor's tokens were not counted.
    """

    def __init__(
        self,
        spec: _Settings,
        context: FieldContext,
        renderer: Renderer,
        entries: tuple[str, ...],
        templates: Sequence[CountedTemplate] | None = None,
    ) -> None:
        if spec.member != CONVERSATION_FIELD:
            raise ConfigError(f"A token budget counts {CONVERSATION_FIELD}; leave out member, or the budget.")
        self._spec, self._renderer, self._entries = spec, renderer, entries
        self._datasets, self._populations = context.samples.datasets, context.populations
        self.templates = templates
        opened = {
            id(one): one.counts
            if isinstance(one, PartDataset)
            else open_conversation_counts(
                one, renderer.digest, template=None if templates is None else templates[place]
            )
            for place, one in enumerate(self._datasets)
        }
        self.counts = [opened[id(one)] for one in self._datasets]

    def lengths(self, name: str, budget: TokenBudget) -> list[NDArray[np.int64]]:
        """Return what a budget charges for each row of each dataset's own table, ``(num_rows,)`` each.

        Conversations that are left out count more than the budget.

        Args:
            name: Of the field, for messages.
            budget: The budget.

        Raises:
            ConfigError: Conversations are too long and ``long`` is ``error``, or some are pairs and others
                are not.
        """
        spec, found = self._spec, []
        num_long = num_other = num_lacking = num_used = 0
        for dataset, counts, used in zip(self._datasets, self.counts, self._populations, strict=True):
            rows = self._counted_rows(dataset, np.arange(dataset.samples.num_samples))
            tokens, images = counts.tokens[rows].astype(np.int64), counts.images[rows]
            lengths = tokens[:, 0]
            if spec.pairs:  # padded ones are two rows of the longer sequence
                lengths = 2 * tokens.max(axis=1) if budget.padded else tokens.sum(axis=1)
            is_long = (tokens > spec.max_tokens).any(axis=1) | (lengths > budget.max_tokens)
            if spec.max_images is not None:
                is_long |= (images > spec.max_images).any(axis=1)
            is_other = ((tokens[:, 1] > 0) != spec.pairs) & (tokens[:, 0] > 0)
            num_long += int((is_long & used).sum())
            num_other += int((is_other & used).sum())
            num_used += int(used.sum())
            is_left_out = is_long
            if self.templates is not None and spec.missing == "pad":
                is_lacking = tokens[:, 0] == 0
                num_lacking += int((is_lacking & used).sum())
                is_left_out = is_long | is_lacking
            found.append(np.where(is_left_out, budget.max_tokens + 1, np.maximum(lengths, 1)))
        if num_other:
            raise ConfigError(
                f"{num_other:,} of {num_used:,} conversations are {'no ' if spec.pairs else ''}preference "
                f"pairs; set pairs of the field {name!r} accordingly, or pack them as a dataset of their own."
            )
        if num_long and spec.long == "error":
            raise ConfigError(
                f"{num_long:,} of {num_used:,} {self._what} are longer than max_tokens of the field "
                f"{name!r} ({spec.max_tokens:,}) or of the budget ({budget.max_tokens:,}), or show more "
                'pictures than max_images; raise them, or set long = "skip" to leave these out.'
            )
        if num_long:
            _LOGGER.info("field %r leaves out %d %s that are too long", name, num_long, self._what)
        if num_lacking:
            _LOGGER.info(
                "field %r leaves out %d of %d samples, of which its template makes no conversation",
                name,
                num_lacking,
                num_used,
            )
        return found

    @property
    def _what(self) -> str:
        return "parts of conversations" if self._spec.split_long else "conversations"

    def check(self) -> None:
        """Compare the counts of 64 keyed stored conversations of each dataset with what is rendered.

        Raises:
            ConfigError: They differ.
        """
        if self.templates is not None:  # `shardflow.loading.counting` reads what they are made of
            return
        for dataset, counts in zip(self._datasets, self.counts, strict=True):
            split_at = dataset.split_at if isinstance(dataset, PartDataset) else None
            check_counts(self._renderer, dataset, counts, split_at)

    def gather(self, slots: Slots) -> ConversationCounts:
        """Return the counts of each slot that the plan gives a sample, masked or not, ``(B, 2)``."""
        found = ConversationCounts.zeros(len(slots), self._entries)
        planned = np.array(slots.planned, np.int64)
        for component, (dataset, counts) in enumerate(zip(self._datasets, self.counts, strict=True)):
            here = planned if len(self._datasets) == 1 else planned[slots.components[planned] == component]
            taken = counts.take(self._counted_rows(dataset, slots.table_rows[here]))
            found.tokens[here] = taken.tokens
            for name, rows in found.rows.items():
                rows[here] = taken.rows[name]
        return found

    def _counted_rows(self, dataset: Dataset, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of the counts of each row of a dataset: its own, or that of its stored study."""
        is_own = self.templates is not None or isinstance(dataset, PartDataset)
        return rows if is_own else dataset.text_rows(rows)
