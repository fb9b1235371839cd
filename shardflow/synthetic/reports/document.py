"""A text under construction that remembers where everything stands.

A sentence is a list of pieces: plain strings, and marks, whose place in the final text becomes the truth.
Offsets count characters from 0; the text is ASCII, so they are bytes too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Document", "Mark", "MarkKind", "Piece", "Report", "Sentence"]

MarkKind = Literal["entity", "mention", "distractor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Text whose span is part of the truth."""

    kind: MarkKind
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


Piece = str | Mark
Sentence = list[Piece]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A finished report and its truth, ready for JSON."""

    text: str
    sections: list[dict[str, Any]]
    entities: list[dict[str, Any]]
    mentions: list[dict[str, Any]]
    distractors: list[dict[str, Any]]


class Document:
    """Collects text and spans."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._marks: dict[MarkKind, list[dict[str, Any]]] = {"entity": [], "mention": [], "distractor": []}
        self._sections: list[dict[str, Any]] = []

    def add(self, text: str) -> None:
        """Append plain text."""
        self._parts.append(text)
        self._length += len(text)

    def open_section(self, name: str, header: str) -> None:
        """Start a section; ``header`` is its heading as written."""
        self._close_section()
        start = self._length
        self.add(header)
        self._sections.append({"name": name, "span": [start, -1]})

    def write(self, sentence: Iterable[Piece]) -> None:
        """Append one sentence, its first letter a capital."""
        is_first = True
        for piece in sentence:
            text = piece if isinstance(piece, str) else piece.text
            if not text:
                continue
            if is_first:
                text = text[0].upper() + text[1:]
                is_first = False
            if isinstance(piece, Mark):
                start = self._length
                section = self._sections[-1]["name"] if self._sections else ""
                row = {"span": [start, start + len(text)], "text": text, "section": section}
                self._marks[piece.kind].append({**row, **piece.facts})
            self.add(text)

    def finish(self) -> Report:
        """Return the report."""
        self._close_section()
        return Report(
            text="".join(self._parts),
            sections=self._sections,
            entities=self._marks["entity"],
            mentions=self._marks["mention"],
            distractors=self._marks["distractor"],
        )

    def _close_section(self) -> None:
        if self._sections and self._sections[-1]["span"][1] < 0:
            self._sections[-1]["span"][1] = self._length
