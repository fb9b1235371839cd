"""Stored tokens of a micro-batch, fetched for all of its texts at once, without an object per sample.

A text whose tokens are damaged is a bad sample of its slot alone; the other texts of a damaged block are then
looked up one by one and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, ConfigError, FormatError
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Samples
from shardflow.format.keys import DIGEST_PATTERN
from shardflow.format.tokens import TokenIds, TokenPlaces

_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTokens:
    """Token ids to deliver, which ``shardflow tokenize`` stored beside the dataset.

    Raises:
        ConfigError: The tokenizer is not a digest, or ``max_tokens`` is below 1.
    """

    tokenizer: str
    """SHA-256 of its ``tokenizer.json``, see `shardflow.training.tokenizing.tokenizer_digest`."""
    max_tokens: int | None = None
    """Longer texts are truncated."""

    def __post_init__(self) -> None:
        if not DIGEST_PATTERN.fullmatch(self.tokenizer):
            raise ConfigError(
                "tokenizer must be the SHA-256 of a tokenizer.json, 64 hexadecimal digits, got another text."
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}; leave it out for all.")


@dataclass(frozen=True, slots=True)
class _Part:
    """Texts of one dataset: their slots, and the places of their tokens."""

    ids: TokenIds
    slots: NDArray[np.int64]
    places: TokenPlaces


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredTokens:
    """Tokens of a micro-batch before memory is allocated for them."""

    lengths: NDArray[np.int64]
    """``(B,)``."""
    bad: dict[int, BadSampleReason]
    """What is wrong with the tokens of a slot; its length is 0."""
    parts: list[_Part]
    """Places of the others."""


class TokenAssembler:
    """Assembler of the stored tokens of micro-batches. Safe for many threads.

    Args:
        samples: The samples and their datasets.
        stored: Which tokens to deliver.

    Raises:
        ConfigError: A dataset was not tokenized with this tokenizer.
        FormatError: Its tokens are damaged.
    """

    def __init__(self, samples: Samples, stored: StoredTokens) -> None:
        self._samples = samples
        self._max_tokens = stored.max_tokens
        # Several components of a blend may share a dataset, whose tables are opened once.
        opened = {id(dataset): TokenIds(dataset, stored.tokenizer) for dataset in samples.datasets}
        self._ids = [opened[id(dataset)] for dataset in samples.datasets]

    def measure(self, rows: NDArray[np.int64]) -> MeasuredTokens:
        """Look up how many tokens each text has, and their places.

        Args:
            rows: ``(B,)`` rows of the selection; -1 is a slot without a sample.
        """
        lengths = np.zeros(len(rows), np.int64)
        bad: dict[int, BadSampleReason] = {}
        parts: list[_Part] = []
        for ids, slots, inside in self._by_dataset(rows):
            for at, found in _trusted(partial(ids.find, max_tokens=self._max_tokens), slots, inside, bad):
                parts.append(_Part(ids, at, found))
                lengths[at] = found.lengths(len(at))
        return MeasuredTokens(lengths=lengths, bad=bad, parts=parts)

    def fill(
        self, measured: MeasuredTokens, offsets: NDArray[np.int64], out: NDArray[np.uint32]
    ) -> dict[int, BadSampleReason]:
        """Fetch the tokens of a micro-batch.

        Args:
            measured: From `measure`.
            offsets: ``(B + 1,)`` where the tokens of each slot belong in ``out``.
            out: ``(offsets[-1],)``.

        Returns:
            What is wrong with the tokens of a slot; its place in ``out`` is zeroed.
        """
        bad: dict[int, BadSampleReason] = {}
        for part in measured.parts:
            targets = offsets[part.slots]
            try:
                part.ids.read(part.places, targets, out)
            except FormatError:
                self._fill_each(part, targets, out, bad)
        for slot in bad:
            out[offsets[slot] : offsets[slot + 1]] = 0
        return bad

    @staticmethod
    def _fill_each(
        part: _Part, targets: NDArray[np.int64], out: NDArray[np.uint32], bad: dict[int, BadSampleReason]
    ) -> None:
        """Fetch the tokens of a part text by text, and record the bad slots."""
        for one in part.places.each():
            try:
                part.ids.read(one, targets, out)
            except FormatError as error:
                bad[int(part.slots[one.texts[0]])] = _reason(error)

    def _by_dataset(
        self, rows: NDArray[np.int64]
    ) -> Iterator[tuple[TokenIds, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the slots of each component's samples, and their rows in its table."""
        slots = np.flatnonzero(rows >= 0)
        if not self._samples.is_blend:
            yield self._ids[0], slots, rows[slots]
            return
        components = self._samples.components_of(rows[slots])
        inside = self._samples.table_rows(rows[slots])
        for component in np.unique(components).tolist():
            here = components == component
            yield self._ids[component], slots[here], inside[here]


def _trusted(
    call: Callable[[NDArray[np.int64]], _Found],
    slots: NDArray[np.int64],
    rows: NDArray[np.int64],
    bad: dict[int, BadSampleReason],
) -> list[tuple[NDArray[np.int64], _Found]]:
    """Call for all rows at once, and if any is damaged for each row alone; record the bad slots."""
    try:
        return [(slots, call(rows))]
    except FormatError:
        pass
    found: list[tuple[NDArray[np.int64], _Found]] = []
    for place, slot in enumerate(slots.tolist()):
        one = slice(place, place + 1)
        try:
            found.append((slots[one], call(rows[one])))
        except FormatError as error:
            bad[slot] = _reason(error)
    return found


def _reason(error: FormatError) -> BadSampleReason:
    is_checksum = isinstance(error, ChecksumError)
    return BadSampleReason.CHECKSUM_MISMATCH if is_checksum else BadSampleReason.INDEX_DAMAGED
