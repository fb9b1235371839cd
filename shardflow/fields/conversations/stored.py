"""Stored conversations: their kinds, ends and pictures, and how they are rendered, counted and planned."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, ConfigError, FormatError, ShortReadError
from shardflow.fields.conversations.rendering import Rendered, Renderer, RenderError, decode_picture
from shardflow.fields.field import FieldContext, Slots
from shardflow.fields.units import PartDataset
from shardflow.format import Dataset
from shardflow.format.counts import ConversationCounts, CountedTemplate, counts_name, open_conversation_counts
from shardflow.format.keys import CONVERSATION_FIELD
from shardflow.sampling.budget import TokenBudget
from shardflow.seeds import derive

_LOGGER = logging.getLogger(__name__)
PICTURE_NAME: Final = re.compile(r"image\.\d{3,}\.(?:png|jpe?g)", re.ASCII)
"""Names of the stored fields that hold pictures of a conversation."""
_VERSION: Final = 1
_PAIRS: Final = ("chosen", "rejected")
_SCORED: Final = "reward"
_KINDS: Final = frozenset({"conversation", "preference", _SCORED, "document"})
_USER, _SYSTEM = "user", "system"
_NUM_CHECKED: Final = 64

Message = Mapping[str, Any]
Span: TypeAlias = tuple[int, int]
"""First message of a part of a conversation, and the one behind its last."""
_checked: set[tuple[str, str]] = set()
"""Names and owners of the counts that this process has compared."""


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """Conversation as stored, see docs/format.md."""

    kind: str
    messages: Sequence[Message]
    """All of them, or those that the ends of a pair share."""
    ends: Sequence[Sequence[Message]]
    """What follows: nothing, or the chosen and the rejected end."""
    images: Sequence[Mapping[str, Any]]
    score: float | None = None
    """Of a conversation of the kind ``reward``, where it is asked for."""
    first_learned: int = 0
    """Messages before it are not learned: those that ends share, or that an earlier part has."""

    @classmethod
    def parse(cls, document: Any, *, pairs: bool | None = None, scores: bool = False) -> Self:
        """Take the parts of a document.

        Args:
            document: The parsed JSON.
            pairs: Whether it must be a preference pair; None for either.
            scores: Whether it must have a score.

        Raises:
            RenderError: It is not of the form of docs/format.md, or of a kind that is not learned from.
        """
        try:
            kind, messages, images = str(document["kind"]), document["messages"], document["images"]
            version = document["format_version"]
        except (KeyError, TypeError):
            raise RenderError("it has no format_version, kind, messages and images") from None
        if version != _VERSION:
            raise RenderError(f"its format_version is {version!a}, and {_VERSION} is known")
        is_pair = kind == "preference"
        if pairs is not None and pairs != is_pair:
            raise RenderError(
                f"its kind is {kind!a}, and pairs = {'true takes preference' if pairs else 'false none'}"
            )
        if kind not in _KINDS:
            raise RenderError(f"its kind is {kind!a}, and only {', '.join(sorted(_KINDS))} are learned from")
        if scores and kind != _SCORED:
            raise RenderError(f"its kind is {kind!a}, and scores = true takes {_SCORED} alone")
        if is_pair:
            ends = [document[name] for name in _PAIRS]
            return cls(kind, messages, ends, images, first_learned=len(messages))
        return cls(kind, messages, [[]], images, float(document["score"]) if scores else None)

    def starts(self) -> list[int]:
        """Return the messages that parts may begin with: the first, and each question behind the first one.

        A pair is compared as a whole, so none of its messages is one.
        """
        if len(self.ends) > 1:
            return [0]
        roles = [str(one["role"]) for one in self.messages]
        asked = [at for at, role in enumerate(roles) if role == _USER and (not at or roles[at - 1] != _USER)]
        return [0, *asked[1:]]

    def part(self, span: Span) -> Self:
        """Return a part of the messages, behind those of the system that the conversation begins with.

        They are what the model is told each time that it is used; the first part alone learns them.
        """
        first, stop = span
        if not first:
            return replace(self, messages=self.messages[:stop])
        told = next((at for at, one in enumerate(self.messages) if one["role"] != _SYSTEM), 0)
        shown = [*self.messages[:told], *self.messages[first:stop]]
        return replace(self, messages=shown, first_learned=told)

    def split(self, max_tokens: int, count: Callable[[Span], int]) -> list[Span]:
        """Return the parts of a conversation, each with as many questions and answers as fit, at least one.

        Args:
            max_tokens: Of a part; one question with its answers may have more.
            count: Counts the tokens of a part.
        """

        def fits(first: int, stop: int) -> bool:
            return count((bounds[first], bounds[stop])) <= max_tokens

        bounds = [*self.starts(), len(self.messages)]
        last = len(bounds) - 1
        if last == 1 or fits(0, last):
            return [(0, bounds[last])]
        found, at = [], 0
        while at < last:
            low, high = at + 1, last + (at > 0)  # all that is left may fit, but not all from the beginning
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(at, middle) else (low, middle)
            found.append((bounds[at], bounds[low]))
            at = low
        return found

    def shown(self) -> list[list[int]]:
        """Return the numbers of the pictures of each end, in order."""
        return [
            [
                part["image"]
                for one in [*self.messages, *end]
                for part in one["content"]
                if part["type"] == "image"
            ]
            for end in self.ends
        ]

    def render(
        self, renderer: Renderer, members: Mapping[str, Any], *, train_on: Sequence[str]
    ) -> list[Rendered]:
        """Render each end.

        Args:
            renderer: Of the model.
            members: The pictures by name, as stored or of Pillow.
            train_on: As of `Renderer.render`, behind ``first_learned``.

        Raises:
            RenderError: It cannot be rendered.
        """
        numbers = {number for each in self.shown() for number in each}
        pictures = [
            _picture(entry, members) if number in numbers else None
            for number, entry in enumerate(self.images)
        ]
        if self.kind == "document":
            return [renderer.render_document(self.messages, pictures)]
        return [
            renderer.render([*self.messages, *end], pictures, train_on=train_on, first=self.first_learned)
            for end in self.ends
        ]


def _picture(entry: Mapping[str, Any], members: Mapping[str, Any]) -> Any:
    name = entry.get("member")
    if name is None:
        raise RenderError("it shows slices of a series; render it from pictures stored as members")
    if name not in members:
        raise RenderError("a picture that it shows is not in the sample")
    found = members[name]
    return decode_picture(found) if isinstance(found, bytes) else found


def picture_entries(renderer: Renderer) -> tuple[str, ...]:
    """Return the names of the entries of pictures that a processor returns, ascending."""
    return tuple(sorted(renderer.form(1 << 20, None).pictures))


def count_conversations(
    renderer: Renderer,
    dataset: Dataset,
    rows: NDArray[np.int64],
    entries: tuple[str, ...],
    *,
    split_at: int | None = None,
    spans: NDArray[Any] | None = None,
) -> ConversationCounts:
    """Render stored conversations, and count their tokens and pictures; 0 where one cannot be rendered.

    Args:
        renderer: Of the model.
        dataset: Of studies.
        rows: ``(n,)`` rows of its samples table.
        entries: As of `picture_entries`.
        split_at: Tokens above which a conversation is split, and has a row for each part.
        spans: ``(n, 2)``, the only part of each that is counted.

    Raises:
        ShardflowError: A sample cannot be read or trusted.
    """
    nothing = ConversationCounts.zeros(1, entries, is_split=split_at is not None)
    found = []
    for place, row in enumerate(rows.tolist()):
        names = [field.name for field in dataset.sample_fields(row)[1]]
        if CONVERSATION_FIELD not in names:
            found.append(nothing)
            continue
        wanted = [name for name in names if renderer.has_pictures and PICTURE_NAME.fullmatch(name)]
        members = dataset.read_fields(row, [CONVERSATION_FIELD, *wanted])
        try:
            stored = StoredConversation.parse(json.loads(members[CONVERSATION_FIELD]))
            if split_at is None:
                one = stored if spans is None else stored.part((int(spans[place, 0]), int(spans[place, 1])))
                found.append(count_ends(renderer, one, members, entries))
            else:
                found += _split(renderer, stored, members, entries, split_at)
        except (RenderError, RecursionError, KeyError, TypeError, ValueError, AttributeError, IndexError):
            found.append(nothing)
    return ConversationCounts.joined(found, entries, is_split=split_at is not None)


def _split(
    renderer: Renderer,
    stored: StoredConversation,
    members: Mapping[str, bytes],
    entries: tuple[str, ...],
    split_at: int,
) -> list[ConversationCounts]:
    """Return the counts of each part of a conversation."""

    @cache
    def counted(span: Span) -> ConversationCounts:
        return count_ends(renderer, stored.part(span), members, entries)

    spans = stored.split(split_at, lambda span: int(counted(span).tokens.max()))
    return [replace(counted(span), messages=np.array([span], np.uint32)) for span in spans]


def count_ends(
    renderer: Renderer, stored: StoredConversation, members: Mapping[str, Any], entries: tuple[str, ...]
) -> ConversationCounts:
    """Render a conversation, and return the counts of its ends, one row.

    Args:
        renderer: Of the model.
        stored: The conversation.
        members: Its pictures by name, as stored or of Pillow.
        entries: As of `picture_entries`.

    Raises:
        RenderError: It cannot be rendered.
    """
    found = ConversationCounts.zeros(1, entries)
    ends = stored.render(renderer, members, train_on=())
    for number, (pictures, end) in enumerate(zip(stored.shown(), ends, strict=True)):
        found.tokens[0, number] = len(end.ids)
        found.images[0, number] = len(pictures)
        for name, values in end.pictures.items():
            if name in found.rows:
                found.rows[name][0, number] = len(values)
    return found


def check_counts(
    renderer: Renderer, dataset: Dataset, counts: ConversationCounts, split_at: int | None = None
) -> None:
    """Render 64 keyed conversations or parts of them, and compare them with their stored counts.

    Args:
        renderer: Of the installed processor.
        dataset: Any dataset; its conversations are those of its studies.
        counts: By row of its studies, or by part.
        split_at: Tokens above which conversations were split; None for rows of studies.

    Raises:
        ConfigError: They differ.
    """
    name = counts_name(renderer.digest, split_at)
    rows = rows_to_check(name, dataset.text_id, len(counts))
    samples = np.searchsorted(counts.first_rows(), rows, side="right") - 1
    entries = tuple(counts.rows)
    num_other = 0
    for row, sample in zip(rows, samples, strict=True):
        stored = counts.take(row[None])
        try:
            found = count_conversations(renderer, dataset, sample[None], entries, spans=stored.messages)
        except (
            ChecksumError,
            FormatError,
            ShortReadError,
        ):  # a damaged sample, which is masked when it comes
            continue
        num_other += int(found.differs(stored).sum())
    option = "" if split_at is None else f" --max-tokens {split_at}"
    note_checked(name, dataset.text_id, num_other, len(rows), option)


def rows_to_check(name: str, owner: str, num_rows: int) -> NDArray[np.int64]:
    """Return 64 keyed rows of the counts of a name and an owner; none if this process has checked them.

    Args:
        name: Of the counts, see `counts_name`.
        owner: Digest of what they belong to.
        num_rows: Their rows.
    """
    if not num_rows or (name, owner) in _checked:
        return np.zeros(0, np.int64)
    key = int(name[:15], 16)
    return np.unique([derive(key, "checked-counts", number) % num_rows for number in range(_NUM_CHECKED)])


def note_checked(name: str, owner: str, num_other: int, num_rows: int, option: str) -> None:
    """Refuse counts of which some rows are others than what is rendered; else note that they were checked.

    Args:
        name: Of the counts.
        owner: Digest of what they belong to.
        num_other: Rows that differ.
        num_rows: Rows that were compared.
        option: Of the command that makes them, beside the processor.

    Raises:
        ConfigError: Some differ.
    """
    if num_other:
        raise ConfigError(
            f"{num_other:,} of {num_rows:,} conversations have other numbers of tokens or pictures than "
            "were counted, as another version of transformers may render them; install that version, or "
            f"delete the folder conversations/{name} of the dataset and run: shardflow tokenize DATASET "
            f"--processor DIR{option}"
        )
    _checked.add((name, owner))


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
