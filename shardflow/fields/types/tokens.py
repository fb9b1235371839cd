"""Stored tokens of a micro-batch, fetched for all of its texts at once, without an object per sample.

`Tokens` is the field that delivers them, padded or one text after another; their numbers are a table.

A text whose tokens are damaged is a bad sample of its slot alone; the other texts of a damaged block are then
looked up one by one and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, ConfigError, FormatError
from shardflow.fields.field import (
    Arrays,
    ArraySpec,
    BoundField,
    Coverage,
    Field,
    FieldContext,
    NoContent,
    SlotContent,
    SlotRequest,
    Slots,
    check_choice,
    check_count,
)
from shardflow.fields.quarantine import BadSampleReason
from shardflow.fields.reader import Samples, Shard
from shardflow.format.keys import DIGEST_PATTERN
from shardflow.format.tokens import TokenIds, TokenPlaces

_Found = TypeVar("_Found")
_MAX_TOKENS: Final = 1 << 32
_MAX_ID: Final = 1 << 32


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
    """Damage of the tokens of a slot; its length is 0."""
    parts: list[_Part]
    """Places of the others."""


class TokenAssembler:
    """Assembler of the stored tokens of micro-batches. Safe for many threads.

    Args:
        samples: The samples and their datasets.
        tokenizer: SHA-256 of its ``tokenizer.json``.
        max_tokens: Longer texts are truncated.

    Attributes:
        ids: The tokens of each dataset.

    Raises:
        ConfigError: A dataset was not tokenized with this tokenizer.
        FormatError: Its tokens are damaged.
    """

    def __init__(self, samples: Samples, tokenizer: str, max_tokens: int | None) -> None:
        self._samples, self._max_tokens = samples, max_tokens
        # Several components of a blend may share a dataset, whose tables are opened once.
        different = {id(dataset): dataset for dataset in samples.datasets}
        opened = {name: TokenIds(dataset, tokenizer) for name, dataset in different.items()}
        self.ids = [opened[id(dataset)] for dataset in samples.datasets]

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
        self, measured: MeasuredTokens, offsets: NDArray[np.int64], out: NDArray[Any]
    ) -> dict[int, BadSampleReason]:
        """Fetch the tokens of a micro-batch.

        Args:
            measured: From `measure`.
            offsets: ``(B + 1,)`` where the tokens of each slot belong in ``out``.
            out: ``(offsets[-1],)`` or more, an integer dtype of at least 32 bits.

        Returns:
            What is wrong with the tokens of a slot; its place in ``out`` is zeroed.
        """
        bad = _filled(measured, lambda part, places: part.ids.read(places, offsets[part.slots], out))
        for slot in bad:
            out[offsets[slot] : offsets[slot + 1]] = 0
        return bad

    def fill_rows(
        self, measured: MeasuredTokens, mask: NDArray[np.uint8], out: NDArray[Any]
    ) -> dict[int, BadSampleReason]:
        """Fetch the tokens of a micro-batch, a row for each slot, with zeros behind each text.

        Args:
            measured: From `measure`.
            mask: ``(B, m)``, 1 for each token.
            out: ``(B, m)``, an integer dtype of at least 32 bits.

        Returns:
            What is wrong with the tokens of a slot; its row in ``out`` is undefined.
        """
        return _filled(measured, lambda part, places: part.ids.read_rows(places, part.slots, mask, out))

    def _by_dataset(
        self, rows: NDArray[np.int64]
    ) -> Iterator[tuple[TokenIds, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the slots of each component's samples, and their rows in its table."""
        slots = np.flatnonzero(rows >= 0)
        if not self._samples.is_blend:
            yield self.ids[0], slots, self._samples.datasets[0].text_rows(rows[slots])
            return
        components = self._samples.components_of(rows[slots])
        inside = self._samples.table_rows(rows[slots])
        for component in np.unique(components).tolist():
            here = components == component
            dataset = self._samples.datasets[component]
            yield self.ids[component], slots[here], dataset.text_rows(inside[here])


def _filled(
    measured: MeasuredTokens, read: Callable[[_Part, TokenPlaces], None]
) -> dict[int, BadSampleReason]:
    """Read all texts of each part at once, and if any is damaged each alone; return the bad slots."""
    bad: dict[int, BadSampleReason] = {}
    for part in measured.parts:
        try:
            read(part, part.places)
        except FormatError:
            for one in part.places.each():
                try:
                    read(part, one)
                except FormatError as error:
                    bad[int(part.slots[one.texts[0]])] = _reason(error)
    return bad


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


@dataclass(frozen=True, kw_only=True)
class Tokens(Field):
    """Token ids of the reports, which ``shardflow tokenize`` stored beside the dataset.

    ``(B, L)`` int64, padded behind each text; L is ``max_tokens``, or without it the longest text of the
    selected samples. ``NAME_mask`` ``(B, L)`` uint8 is 1 for a token. With ``flat`` ``(T,)`` uint32, one text
    after another: slot b is ``NAME_offsets[b]`` to ``NAME_offsets[b + 1]`` (``(B + 1,)`` int64), and
    ``NAME_mask`` ``(B,)`` is 1 where there is a text. Begin and end tokens are not added.

    Example::

        sf.Tokens(tokenizer=digest, max_tokens=512)

    Raises:
        ConfigError: A setting is out of range.
    """

    type_name: ClassVar[str] = "tokens"

    tokenizer: str
    """SHA-256 of its ``tokenizer.json``, as ``shardflow tokenize`` prints it."""
    max_tokens: int | None = None
    """Longer texts are truncated."""
    pad_id: int = 0
    """Id in places without a token."""
    flat: bool = False
    """Whether texts follow one another without padding."""

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, ("pad", "drop", "error"))
        if self.flat not in (True, False):
            raise ConfigError(f"flat is True or False, got {self.flat!r}.")
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, _MAX_TOKENS)
        pad_id: Any = self.pad_id
        if isinstance(pad_id, bool) or not isinstance(pad_id, int) or abs(pad_id) > _MAX_ID:
            raise ConfigError(f"pad_id is a token id, such as 0, got {pad_id!r}.")
        tokenizer: object = self.tokenizer
        if not (isinstance(tokenizer, str) and DIGEST_PATTERN.fullmatch(tokenizer)):
            shown = "another text" if isinstance(tokenizer, str) else type(tokenizer).__name__
            raise ConfigError(
                "tokenizer is the SHA-256 of a tokenizer.json, 64 hexadecimal digits, as `shardflow "
                f"tokenize` prints it, got {shown}."
            )

    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection."""
        return BoundTokens(name, self, context)

    @classmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the ids, their mask, and for flat ones their offsets."""
        name = entry["name"]
        if not entry["flat"]:
            return {name: arrays[name], f"{name}_mask": arrays[f"{name}_mask"]}
        ids, starts, lengths = arrays[f"{name}.data"], arrays[f"{name}.start"], arrays[f"{name}.length"]
        offsets = np.zeros(len(starts), np.int64)
        np.cumsum(np.maximum(lengths, 0), out=offsets[1:])
        if offsets[-1] != len(ids):  # a text that was read is bad, and leaves a gap
            pairs = zip(starts[:-1].tolist(), lengths.tolist(), strict=True)
            ids = np.concatenate([ids[start : start + max(length, 0)] for start, length in pairs])
        return {name: ids, f"{name}_offsets": offsets, f"{name}_mask": (lengths >= 0).astype(np.uint8)}


class BoundTokens(BoundField):
    """Stored tokens, bound to a selection.

    Args:
        name: Name of the entry.
        spec: What to deliver.
        context: The samples.

    Raises:
        ConfigError: A dataset was not tokenized with this tokenizer, or a sample has no text and ``missing``
            is ``error``.
        FormatError: Its tokens are damaged.
    """

    is_beside = True

    def __init__(self, name: str, spec: Tokens, context: FieldContext) -> None:
        super().__init__(name)
        self.spec = spec
        self._samples = context.samples
        self._assembler = TokenAssembler(context.samples, spec.tokenizer, spec.max_tokens)
        self._counts = [ids.counts for ids in self._assembler.ids]
        self._num_samples = context.num_samples
        self._num_missing = context.count_missing(self.has_content)
        if self._num_missing and spec.missing == "error":
            raise ConfigError(
                f"{self._num_missing:,} of {self._num_samples:,} samples have no tokens for the field "
                f"{name!r}; write missing='pad' for padding alone, or missing='drop' to leave them out."
            )
        self.num_tokens = spec.max_tokens or self._longest(context.populations)

    def _longest(self, populations: Sequence[NDArray[np.bool_]]) -> int:
        """Return the number of tokens of the longest text of the population, at least 1."""
        every = zip(self._samples.datasets, self._counts, populations, strict=True)
        longest = [
            int(counts[one.text_rows(np.flatnonzero(used))].max(initial=0)) for one, counts, used in every
        ]
        return max(1, *longest)

    @property
    def digests(self) -> Sequence[str]:
        """Digests of the stored tokens."""
        return [ids.digest for ids in self._assembler.ids]

    @property
    def has_content(self) -> Sequence[NDArray[np.bool_]]:
        """Rows that have a token."""
        pairs = zip(self._samples.datasets, self._counts, strict=True)
        return [(counts > 0)[one.text_rows(np.arange(one.samples.num_samples))] for one, counts in pairs]

    @property
    def coverage(self) -> Coverage:
        """Number of samples that have tokens."""
        return Coverage(num_samples=self._num_samples, num_missing=self._num_missing)

    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        name, num_slots = self.name, len(slots)
        if not self.spec.flat:
            return [
                ArraySpec.of(name, np.int64, num_slots, self.num_tokens),
                ArraySpec.of(f"{name}_mask", np.uint8, num_slots, self.num_tokens),
            ]
        return [
            ArraySpec.of(f"{name}.data", np.uint32, int(self.lengths(slots).sum())),
            ArraySpec.of(f"{name}.start", np.int64, num_slots + 1),
            ArraySpec.of(f"{name}.length", np.int64, num_slots),
        ]

    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Lay out the slots, and pad them."""
        name, lengths = self.name, self.lengths(slots)
        if self.spec.flat:
            starts = arrays[f"{name}.start"]
            starts[0] = 0
            np.cumsum(lengths, out=starts[1:])
            arrays[f"{name}.length"][:] = np.where(lengths > 0, lengths, -1)
            return
        mask = arrays[f"{name}_mask"].view(np.bool_)
        dtype = np.min_scalar_type(self.num_tokens)  # several times as fast as int64
        np.less(np.arange(self.num_tokens, dtype=dtype), lengths.astype(dtype)[:, None], out=mask)
        arrays[name][lengths == 0] = self.spec.pad_id

    def fill_beside(self, arrays: Arrays, slots: Slots) -> Mapping[int, BadSampleReason]:
        """Fetch the tokens of all slots; damaged ones are those of their slot alone."""
        name, measured = self.name, self._measured(slots)
        if self.spec.flat:
            bad = self._assembler.fill(measured, arrays[f"{name}.start"], arrays[f"{name}.data"])
        else:
            ids, mask = arrays[name], arrays[f"{name}_mask"]
            bad = self._assembler.fill_rows(measured, mask, ids)
            if self.spec.pad_id:
                np.copyto(ids, self.spec.pad_id, where=mask == 0)
        return measured.bad | bad if measured.bad else bad

    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:  # noqa: ARG002
        """Return nothing: tokens are stored beside the shards."""
        return ()

    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:  # noqa: ARG002
        """Begin a slot, of which nothing is in a shard."""
        return NoContent()

    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without a text."""
        if self.spec.flat:
            arrays[f"{self.name}.length"][slot] = -1
            return
        arrays[self.name][slot] = self.spec.pad_id
        arrays[f"{self.name}_mask"][slot] = 0

    def describe(self) -> dict[str, Any]:
        """Return what presenting needs."""
        return {"type": self.spec.type_name, "name": self.name, "flat": self.spec.flat}

    def lengths(self, slots: Slots) -> NDArray[np.int64]:
        """Return how many tokens each slot gets, ``(B,)``."""
        return self._measured(slots).lengths

    def _measured(self, slots: Slots) -> MeasuredTokens:
        return slots.once(self.name, self._measure)

    def _measure(self, slots: Slots) -> MeasuredTokens:
        """Find the tokens of the slots; more of them than the counts say are damage."""
        measured = self._assembler.measure(slots.rows)
        if self.spec.flat or measured.lengths.max(initial=0) <= self.num_tokens:
            return measured
        too_long = np.flatnonzero(measured.lengths > self.num_tokens)
        rows = slots.rows.copy()
        rows[too_long] = -1
        again = self._assembler.measure(rows)
        bad = dict.fromkeys(too_long.tolist(), BadSampleReason.INDEX_DAMAGED)
        return replace(again, bad=again.bad | bad)
