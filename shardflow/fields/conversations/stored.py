"""Stored conversations: their kinds, ends and pictures, and how they are rendered and counted."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ChecksumError, ConfigError, FormatError, ShortReadError
from shardflow.fields.conversations.rendering import Rendered, Renderer, RenderError, decode_picture
from shardflow.format import Dataset
from shardflow.format.counts import ConversationCounts
from shardflow.format.keys import CONVERSATION_FIELD
from shardflow.seeds import derive

PICTURE_NAME: Final = re.compile(r"image\.\d{3,}\.(?:png|jpe?g)", re.ASCII)
"""Names of the stored fields that hold pictures of a conversation."""
_VERSION: Final = 1
_PAIRS: Final = ("chosen", "rejected")
_KINDS: Final = frozenset({"conversation", "preference", "reward", "document"})
_NUM_CHECKED: Final = 64

Message = Mapping[str, Any]
_checked: set[tuple[str, str]] = set()
"""Processors and datasets whose counts this process has compared."""


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """Conversation as stored, see docs/format.md."""

    kind: str
    messages: Sequence[Message]
    """All of them, or those that the ends of a pair share."""
    ends: Sequence[Sequence[Message]]
    """What follows: nothing, or the chosen and the rejected end."""
    images: Sequence[Mapping[str, Any]]

    @classmethod
    def parse(cls, document: Any, *, pairs: bool | None = None) -> Self:
        """Take the parts of a document.

        Args:
            document: The parsed JSON.
            pairs: Whether it must be a preference pair; None for either.

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
        return cls(kind, messages, [document[name] for name in _PAIRS] if is_pair else [[]], images)

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
            train_on: Roles whose words are learned; of a pair only behind the shared messages.

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
        first = len(self.messages) if self.kind == "preference" else 0
        return [
            renderer.render([*self.messages, *end], pictures, train_on=train_on, first=first)
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
    renderer: Renderer, dataset: Dataset, rows: NDArray[np.int64], entries: tuple[str, ...]
) -> ConversationCounts:
    """Render stored conversations, and count their tokens and pictures; 0 where one cannot be rendered.

    Args:
        renderer: Of the model.
        dataset: Of studies.
        rows: ``(n,)`` rows of its samples table.
        entries: As of `picture_entries`.

    Raises:
        ShardflowError: A sample cannot be read or trusted.
    """
    found = ConversationCounts.zeros(len(rows), entries)
    for place, row in enumerate(rows.tolist()):
        names = [field.name for field in dataset.sample_fields(row)[1]]
        if CONVERSATION_FIELD not in names:
            continue
        wanted = [name for name in names if renderer.has_pictures and PICTURE_NAME.fullmatch(name)]
        members = dataset.read_fields(row, [CONVERSATION_FIELD, *wanted])
        try:
            stored = StoredConversation.parse(json.loads(members[CONVERSATION_FIELD]))
            shown, ends = stored.shown(), stored.render(renderer, members, train_on=())
        except (RenderError, RecursionError, KeyError, TypeError, ValueError, AttributeError, IndexError):
            continue
        for number, (pictures, end) in enumerate(zip(shown, ends, strict=True)):
            found.tokens[place, number] = len(end.ids)
            found.images[place, number] = len(pictures)
            for name, values in end.pictures.items():
                if name in found.rows:
                    found.rows[name][place, number] = len(values)
    return found


def check_counts(renderer: Renderer, dataset: Dataset, counts: ConversationCounts) -> None:
    """Render 64 keyed conversations, and compare them with their stored counts.

    Args:
        renderer: Of the installed processor.
        dataset: Any dataset; its conversations are those of its studies.
        counts: By row of its studies.

    Raises:
        ConfigError: They differ.
    """
    if not len(counts) or (renderer.digest, dataset.text_id) in _checked:
        return
    key = int(renderer.digest[:15], 16)
    rows = np.unique([derive(key, "checked-counts", number) % len(counts) for number in range(_NUM_CHECKED)])
    entries = tuple(counts.rows)
    num_other = 0
    for row in rows:
        stored = counts.take(row[None])
        try:
            found = count_conversations(renderer, dataset, row[None], entries)
        except (
            ChecksumError,
            FormatError,
            ShortReadError,
        ):  # a damaged sample, which is masked when it comes
            continue
        pairs = [(found.tokens, stored.tokens), (found.images, stored.images)]
        pairs += [(found.rows[name], stored.rows[name]) for name in entries]
        num_other += not all(np.array_equal(one, other) for one, other in pairs)
    if num_other:
        raise ConfigError(
            f"{num_other:,} of {len(rows):,} conversations have other numbers of tokens or pictures than "
            "were counted, as another version of transformers may render them; install that version, or "
            "delete the folder conversations/"
            f"{renderer.digest} of the dataset and run: shardflow tokenize DATASET --processor DIR"
        )
    _checked.add((renderer.digest, dataset.text_id))
