"""Findings in a text: named by the lexicon, judged by the scope rules, placed by the words around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from shardflow.reports.assertion import Assertion, Cue, assert_entities, coordinate, find_cues
from shardflow.reports.attributes import Clause, find_levels, places_of, severity_of, side_of, sizes_of
from shardflow.reports.lexicon import Concept, Lexicon, Side, load_lexicon
from shardflow.reports.matching import Match, PhraseIndex, keep_longest
from shardflow.reports.tokens import Tokens, tokenize, word_set

__all__ = ["Entity", "EntityFinder", "Place", "Span"]

T = TypeVar("T")
Span = tuple[int, int]
"""Characters of the text, closed-open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Anatomy named in the text."""

    span: Span
    name: str
    """Of the lexicon; of a vertebral level its own words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entity:
    """A finding that a report speaks of."""

    span: Span
    concept: str
    """Its name in the lexicon, or an extractor's own."""
    assertion: Assertion
    anatomy: Place | None = None
    laterality: Side = ""
    """``L``, ``R``, ``B`` (both) or nothing: unsaid, or in the midline."""
    size_mm: tuple[float, ...] = ()
    severity: str = ""
    source: str = "lexicon"
    """``lexicon``, or the name of the extractor that found it."""


_NOT_ATTRIBUTIVE = word_set("is are was were be been to , . ; : ( with in of at and seen")
_QUALIFIERS = word_set(
    """
    abnormal abnormally borderline bulky calcified enlarged enlarging necrotic pathologic pathological
    pathologically prominent reactive shotty subcentimeter suspicious worrisome hypermetabolic
    """
)
_NODES = frozenset(("lymph node",))
# Places that projections are named by as well; what may stand behind them, and what ends such a name.
_PROJECTIONS = word_set("apical axillary frontal")
_OF_PROJECTIONS = word_set(
    "/ abdominal and chest erect lateral lordotic or oblique pelvic portable supine upright"
)
_PICTURES = word_set(
    "film films image images projection projections radiograph radiographs view views xray xrays"
)


class EntityFinder:
    """Finds the lexicon's findings.

    Args:
        lexicon: Words to look for; None: the shipped ones.
    """

    def __init__(self, lexicon: Lexicon | None = None) -> None:
        self.lexicon = lexicon if lexicon is not None else load_lexicon()

    @cached_property
    def _index(self) -> PhraseIndex[Concept]:
        return PhraseIndex(self.lexicon.phrases)

    def find(self, text: str) -> list[Entity]:
        """Return the findings of a text, in its order."""
        tokens = tokenize(text)
        matches = [one for one in self._index.find(tokens) if not _is_view(tokens, one)]
        concepts = keep_longest([*matches, *find_levels(tokens)])
        names = sorted((one for one in matches if one.value.kind == "anatomy"), key=lambda one: one.first)
        cues = find_cues(tokens)
        entities: list[Entity] = []
        at_concept = at_cue = at_name = 0
        for first, last in tokens.sentences:
            here, at_concept = _within(concepts, at_concept, first, last)
            said, at_cue = _within(cues, at_cue, first, last)
            inner, at_name = _within(names, at_name, first, last)
            entities += _judge(tokens, (first, last), here, said, inner)
        return entities


def _within(matches: Sequence[Match[T]], at: int, first: int, last: int) -> tuple[list[Match[T]], int]:
    """Take what lies in a sentence, from a list in order; what crosses its end is dropped."""
    found = []
    while at < len(matches) and matches[at].first < last:
        if first <= matches[at].first and matches[at].last <= last:
            found.append(matches[at])
        at += 1
    return found, at


def _is_view(tokens: Tokens, match: Match[Concept]) -> bool:
    """Whether a name of anatomy is that of a projection here: "on the frontal and lateral views"."""
    if match.last - match.first > 1 or tokens.words[match.first] not in _PROJECTIONS:
        return False
    behind = match.last
    while behind < len(tokens) and tokens.words[behind] in _OF_PROJECTIONS:
        behind += 1
    return behind < len(tokens) and tokens.words[behind] in _PICTURES


def _judge(
    tokens: Tokens,
    sentence: Span,
    concepts: Sequence[Match[Concept]],
    cues: Sequence[Match[Cue]],
    names: Sequence[Match[Concept]],
) -> Iterator[Entity]:
    findings = _findings(tokens, sentence[0], concepts)
    if not findings:
        return
    taken = {number for one in findings for number in range(one.first, one.last)}
    # The words of a finding's name are no cues.
    said = keep_longest(cue for cue in cues if taken.isdisjoint(range(cue.first, cue.last)))
    kinds = [Match(one.first, one.last, one.value.kind) for one in findings]
    joined = coordinate(tokens, kinds, said)
    assertions = assert_entities(tokens, sentence, kinds, said, joined)
    clause = Clause(
        tokens=tokens,
        sentence=sentence,
        entities=findings,
        places=[one for one in concepts if one.value.kind == "anatomy"],
        inner=names,
        cues=said,
        joined=joined,
    )
    sizes = sizes_of(clause)
    for number, (one, assertion) in enumerate(zip(findings, assertions, strict=True)):
        places = places_of(clause, number)
        yield Entity(
            span=_span(tokens, one),
            concept=one.value.name,
            assertion=assertion,
            anatomy=Place(span=_span(tokens, places[0]), name=places[0].value.name) if places else None,
            laterality=side_of(clause, number),
            size_mm=sizes.get(number, ()),
            severity=severity_of(clause, number),
        )


def _span(tokens: Tokens, match: Match[Concept]) -> Span:
    return tokens.starts[match.first], tokens.ends[match.last - 1]


def _findings(tokens: Tokens, begin: int, concepts: Sequence[Match[Concept]]) -> list[Match[Concept]]:
    """Choose what is a finding among the concepts of a sentence."""
    found: list[Match[Concept]] = []
    for number, one in enumerate(concepts):
        kind = one.value.kind
        if kind == "normal" or (kind != "anatomy" and tokens.words[one.first - 1 : one.first] == ["normal"]):
            continue
        if kind == "anatomy":
            if one.value.name in _NODES:
                found += _qualified(tokens, begin, one)
        elif kind == "state":
            found += _state(tokens, one, concepts[number + 1 :])
        else:
            found.append(one)
    if any(one.value.kind != "sign" for one in found):
        # A sign next to what it is a sign of is evidence, not another finding.
        found = [one for one in found if one.value.kind != "sign"]
    return _merge(found)


def _merge(found: list[Match[Concept]]) -> list[Match[Concept]]:
    """Make one finding of those that overlap or are neighbours ("ground-glass nodule"); the last names it."""
    merged: list[Match[Concept]] = []
    for one in sorted(found, key=lambda one: (one.first, one.last)):
        if merged and one.first <= merged[-1].last:
            before = merged.pop()
            value = one.value if one.last >= before.last else before.value
            one = Match(before.first, max(before.last, one.last), value)
        merged.append(one)
    return merged


def _qualified(tokens: Tokens, begin: int, node: Match[Concept]) -> list[Match[Concept]]:
    """Make a finding of lymph nodes that are called abnormal, from the adjective on."""
    for place in range(node.first - 1, max(begin, node.first - 8) - 1, -1):
        word = tokens.words[place]
        if word in _QUALIFIERS:
            return [Match(place, node.last, _ENLARGED_NODE)]
        if word in _NOT_ATTRIBUTIVE and word not in ("and", ","):
            break
    return []


_ENLARGED_NODE = Concept(name="lymphadenopathy", kind="finding", parent="abnormality")


def _state(
    tokens: Tokens, state: Match[Concept], following: Sequence[Match[Concept]]
) -> list[Match[Concept]]:
    """Judge an adjective: with the anatomy behind it, as a predicate, or not at all before a finding."""
    concept = replace(state.value, name=state.value.parent or state.value.name, kind="finding")
    if tokens.words[state.first - 1 : state.first] == ["non"]:
        return []
    last = state.last
    for one in following:
        if one.first - last > 2 or any(word in _NOT_ATTRIBUTIVE for word in tokens.words[last : one.first]):
            break
        if one.value.kind not in ("anatomy", "state"):
            return []
        if one.value.kind == "state":
            break
        last = one.last
    return [Match(state.first, last, concept)]
