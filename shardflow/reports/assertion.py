"""Assertion of findings by scope rules in the manner of ConText, over cues from ``cues.csv``.

A cue describes the findings before or after it: absent, uncertain, historical, hypothetical, present. Its
scope ends at a word that begins another thought (*but*, *apart from*), and passes from one finding to the
next only along a list (*no X, Y, or Z*). Of several cues the nearest one holds. Parentheses between a cue and
a finding are skipped (*a nodule (series 3, images 16, 17 and 18) cannot be excluded*). A cue with the effect
``none`` only keeps its words from being read as another cue (*no change*, *without contrast*). Phrases are
found as whole words in one pass (Aho-Corasick), and the longest ones are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar, cast

import ahocorasick

from shardflow.reports.lexicon import ConceptKind, Tokens, fold_words, shipped_rows, word_set

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
        # The blanks around a phrase are its word boundaries; neighbors share one.
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


Assertion = Literal["absent", "historical", "hypothetical", "present", "uncertain"]
"""Assertion of a finding; the table in docs/reports.md has examples."""


@dataclass(frozen=True, slots=True)
class Cue:
    """A phrase that changes the assertion of the findings around it."""

    effect: Assertion | Literal["none", "stop"]
    direction: Literal["backward", "both", "forward"]
    """``both``: what follows, or if nothing follows in reach, what stands before; a stop stops both ways."""
    words: str


_REACH = 9
"""Words allowed between a cue and its first finding."""
_REACH_BACK = 12
_LIST_WORDS = frozenset(("or", "nor", "and", "/", "&", "either", "also", ","))
# Words behind a comma or an "and" that begin a statement of their own rather than the next item of a list.
_OWN_STATEMENT = word_set(
    """
    a an the there stable unchanged small large mild moderate severe marked trace tiny minimal new
    increased decreased persistent residual left right bilateral old chronic also now again scattered
    multiple few several known mildly moderately severely status improved worsening worsened this these
    some extensive
    """
)
_VERBS = word_set(
    """
    is are was were be been has have had shows show showed demonstrates demonstrate demonstrated
    measures measure measured seen noted identified remains remain suggests suggest represents represent
    appears appear contains reflects reflect lies projects courses terminates may might could can should
    will would does do did
    """
)
_LINKS_BROKEN_BY = word_set(
    """
    with from due to by for near adjacent after since causing involving without except within throughout
    through at on in into above below along over under about beneath following
    """
)
_EVENT_CUES = word_set(
    "from after since due following remote prior related secondary previous old sequela sequelae"
)


@cache
def _cue_index() -> PhraseIndex[Cue]:
    phrases: dict[str, Cue] = {}
    for row in shipped_rows("cues.csv"):
        for cue in row["cues"].split("|"):
            words = " ".join(fold_words(cue))
            effect = cast("Assertion", row["effect"])
            phrases[words] = Cue(effect, cast("Literal['both']", row["direction"]), words)
    return PhraseIndex(phrases)


def find_cues(tokens: Tokens) -> list[Match[Cue]]:
    """Find the cues of a text, overlapping ones too, by their first words."""
    return sorted(_cue_index().find(tokens), key=lambda one: one.first)


def _outside(words: Sequence[str], first: int, last: int) -> list[int]:
    """Return the numbers of the tokens of a gap that stand in no parentheses opened and closed in it."""
    kept: list[int] = []
    opened: int | None = None
    for number in range(first, last):
        if words[number] in ("(", "[") and opened is None:
            opened = len(kept)
        kept.append(number)
        if words[number] in (")", "]") and opened is not None:
            del kept[opened:]
            opened = None
    return kept


def coordinate(
    tokens: Tokens, entities: Sequence[Match[ConceptKind]], cues: Sequence[Match[Cue]]
) -> list[bool]:
    """Say of each neighboring pair of one sentence's findings whether they are items of one list."""
    blocked = {number for cue in cues for number in range(cue.first, cue.last) if cue.value.effect != "none"}
    links: list[str] = []
    for before, after in pairwise(entities):
        links.append(_link(tokens.words, before.last, after.first, blocked))
    joined = [link in ("list", "versus") for link in links]
    # Commas alone make a list only if it ends with "or" or "and", or if nothing but the comma stands there.
    for number in range(len(links) - 1, -1, -1):
        if links[number] == "comma":
            joined[number] = number + 1 < len(links) and joined[number + 1] and links[number + 1] != "versus"
        elif links[number] == "bare":
            joined[number] = links[number + 1 : number + 2] != ["versus"]
    return joined


def _link(
    words: Sequence[str], first: int, last: int, blocked: set[int]
) -> Literal["bare", "comma", "list", "no", "versus"]:
    gap = _outside(words, first, last)
    said = [words[number] for number in gap]
    # "or" and "nor" are cues themselves ("nor" denies); as links of a list they do not block.
    if "versus" in said or "vs" in said:
        return "versus" if len(gap) <= _REACH and "," not in said else "no"
    if any(number in blocked and words[number] not in ("nor", "or", "and") for number in gap):
        return "no"
    if any(word in _VERBS or word in (":", "(", ")", ".") for word in said):
        return "no"
    marks = [place for place, word in enumerate(said) if word in _LIST_WORDS]
    if not marks:
        return "list" if first == last else "no"
    tail = said[marks[-1] + 1 :]
    if not _LINKS_BROKEN_BY.isdisjoint(tail):
        return "no"
    if any(said[place] in ("or", "nor") for place in marks):
        return "list"
    if not _OWN_STATEMENT.isdisjoint(tail):
        return "no"
    if any(said[place] in ("and", "/", "&") for place in marks):
        return "list"
    return "bare" if len(gap) == 1 else "comma"


def assert_entities(
    tokens: Tokens,
    sentence: tuple[int, int],
    entities: Sequence[Match[ConceptKind]],
    cues: Sequence[Match[Cue]],
    joined: Sequence[bool],
) -> list[Assertion]:
    """Judge the findings of one sentence.

    Args:
        tokens: The text.
        sentence: Range of its tokens.
        entities: The sentence's findings, in order, with the kinds of their concepts.
        cues: The sentence's cues, in order.
        joined: From `coordinate`.
    """
    best: list[tuple[int, Assertion] | None] = [None] * len(entities)
    stops = [cue.first for cue in cues if cue.value.effect == "stop"]

    def offer(number: int, distance: int, effect: Assertion) -> None:
        held = best[number]
        if held is None or distance < held[0] or (distance == held[0] and effect == "absent"):
            best[number] = (distance, effect)

    for cue in cues:
        effect = cue.value.effect
        if effect == "none" or effect == "stop":
            continue
        reached: list[tuple[int, int]] = []
        if cue.value.direction != "backward":
            reached = _forward(tokens, cue, entities, stops, joined, sentence)
        if cue.value.direction == "backward" or (cue.value.direction == "both" and not reached):
            reached = _backward(tokens, cue, entities, stops, joined)
        elif cue.value.words in ("versus", "vs"):
            reached += _backward(tokens, cue, entities, stops, joined)
        for number, distance in reached:
            offer(number, distance, effect)
    found = [held[1] if held else "present" for held in best]
    is_question = tokens.words[sentence[1] - 1] == "?"
    return [
        _settle(tokens, sentence, entity, assertion, is_question)
        for entity, assertion in zip(entities, found, strict=True)
    ]


def _settle(
    tokens: Tokens,
    sentence: tuple[int, int],
    entity: Match[ConceptKind],
    assertion: Assertion,
    is_question: bool,
) -> Assertion:
    words = tokens.words
    before = words[max(sentence[0], entity.first - 3) : entity.first]
    if entity.value in ("procedure", "device") and assertion == "historical":
        # What was done or put in stays to be seen, unless the history tells of it.
        return (
            "historical"
            if any(word in ("history", "hx", "h") for word in words[sentence[0] : entity.first])
            else "present"
        )
    if (
        entity.value == "event"
        and assertion in ("present", "uncertain")
        and not _EVENT_CUES.isdisjoint(before)
    ):
        return "historical"
    if is_question and assertion in ("present", "historical", "absent"):
        return "hypothetical"
    if assertion in ("present", "historical") and _is_dated(words, entity.last, sentence[1]):
        return "historical"
    if (
        assertion == "uncertain"
        and words[sentence[0]] in ("suspected", "suspect", "query", "?")
        and _VERBS.isdisjoint(words[sentence[0] : sentence[1]])
        and entity.first - sentence[0] <= 4
    ):
        # A sentence that is nothing but "Suspected X." is what was asked, not what was seen.
        return "hypothetical"
    return assertion


def _is_dated(words: Sequence[str], first: int, last: int) -> bool:
    """Whether a year follows: "in 2019"."""
    for number in range(first, min(first + 4, last - 1)):
        year = words[number + 1]
        if (
            words[number] in ("in", "since")
            and len(year) == 4
            and year[:2] in ("19", "20")
            and year.isdigit()
        ):
            return True
        if words[number] in _VERBS or words[number] == ",":
            return False
    return False


def _forward(
    tokens: Tokens,
    cue: Match[Cue],
    entities: Sequence[Match[ConceptKind]],
    stops: Sequence[int],
    joined: Sequence[bool],
    sentence: tuple[int, int],
) -> list[tuple[int, int]]:
    """Return the findings that a cue speaks of, and how far each is."""
    end = min((stop for stop in stops if stop >= cue.last), default=sentence[1])
    numbers = [number for number, one in enumerate(entities) if cue.last <= one.first < end]
    if cue.value.effect == "hypothetical":
        # What is asked or warned of stays so until the end of the sentence.
        return [(number, len(_outside(tokens.words, cue.last, entities[number].first))) for number in numbers]
    if not numbers or not _reaches(tokens.words, cue, entities[numbers[0]]):
        return []
    reached = [numbers[0]]
    for number in numbers[1:]:
        if not joined[number - 1]:
            break
        reached.append(number)
    first = len(_outside(tokens.words, cue.last, entities[numbers[0]].first))
    # The distance of a list is that of its first item: a cue inside a list does not take other items.
    return [(number, first + (number != reached[0])) for number in reached]


def _reaches(words: Sequence[str], cue: Match[Cue], entity: Match[ConceptKind]) -> bool:
    gap = [words[number] for number in _outside(words, cue.last, entity.first)]
    if len(gap) > _REACH or ":" in gap:
        return False
    if "," in gap:
        # A comma in front of the first finding is a list of adjectives or places, or the end of the thought.
        tail = gap[len(gap) - gap[::-1].index(",") :]
        if cue.value.direction == "both" or not _OWN_STATEMENT.isdisjoint(tail) or gap[0] == ",":
            return False
        if not {"or", "and", "nor"} & set(gap):
            return cue.value.effect == "absent" and _VERBS.isdisjoint(gap)
    return cue.value.effect in ("uncertain", "hypothetical") or _VERBS.isdisjoint(gap)


def _backward(
    tokens: Tokens,
    cue: Match[Cue],
    entities: Sequence[Match[ConceptKind]],
    stops: Sequence[int],
    joined: Sequence[bool],
) -> list[tuple[int, int]]:
    begin = max((stop for stop in stops if stop < cue.first), default=-1)
    numbers = [number for number, one in enumerate(entities) if begin < one.first and one.last <= cue.first]
    if not numbers:
        return []
    nearest = numbers[-1]
    distance = len(_outside(tokens.words, entities[nearest].last, cue.first))
    if distance > _REACH_BACK:
        return []
    reached = [nearest]
    for number in reversed(numbers[:-1]):
        if not joined[number]:
            break
        reached.append(number)
    return [(number, distance if number == nearest else distance + 1) for number in reached]
