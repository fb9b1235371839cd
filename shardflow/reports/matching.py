"""Phrases found in tokens: whole words, all in one pass (Aho-Corasick), the longest ones kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ahocorasick

from shardflow.reports.tokens import Tokens

__all__ = ["Match", "PhraseIndex", "keep_longest"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Match(Generic[T]):
    """A phrase at tokens ``first`` to ``last``, closed-open."""

    first: int
    last: int
    value: T


class PhraseIndex(Generic[T]):
    """Many phrases, sought at once.

    Args:
        phrases: What each phrase (folded words, joined by a blank) stands for.
    """

    def __init__(self, phrases: Mapping[str, T]) -> None:
        # The blanks around a phrase are its word boundaries; neighbours share one.
        self._automaton: Any = ahocorasick.Automaton()
        for phrase, value in phrases.items():
            self._automaton.add_word(f" {phrase} ", (len(phrase), value))
        self._automaton.make_automaton()

    def find(self, tokens: Tokens) -> list[Match[T]]:
        """Return all matches, overlapping ones too, by their ends."""
        places: dict[int, int] = {}
        at = 1
        for number, word in enumerate(tokens.words):
            places[at] = number
            at += len(word) + 1
        places[at] = len(tokens.words)
        haystack = f" {' '.join(tokens.words)} "
        return [
            Match(places[end - length], places[end + 1], value)
            for end, (length, value) in self._automaton.iter(haystack)
        ]


def keep_longest(matches: Iterable[Match[T]]) -> list[Match[T]]:
    """Keep the longest of overlapping matches, the first of equals; in the text's order."""
    taken: set[int] = set()
    kept: list[Match[T]] = []
    for match in sorted(matches, key=lambda one: (one.first - one.last, one.first)):
        span = range(match.first, match.last)
        if taken.isdisjoint(span):
            taken.update(span)
            kept.append(match)
    return sorted(kept, key=lambda one: one.first)
