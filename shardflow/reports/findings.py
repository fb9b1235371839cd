"""Findings of a text: named by the lexicon, judged by scope rules, and described by the words around them.

The description is the place of a finding, its side, size and severity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, TypeAlias, TypeVar

from shardflow.reports.assertion import (
    Assertion,
    Cue,
    Judgment,
    Match,
    PhraseIndex,
    Scopes,
    Strength,
    find_cues,
    keep_longest,
)
from shardflow.reports.language import Change, Language, Side, load_language, shared_rows
from shardflow.reports.lexicon import (
    Concept,
    ConceptKind,
    Lexicon,
    Tokens,
    fold_words,
    load_lexicon,
    tokenize,
    word_set,
)

_SIZE = re.compile(
    r"(?<![\w.,:/-])(\d{1,3}(?:\.\d{1,2})?)(?:\s?(mm|cm))?"
    r"(?:\s?(?:x|\u00d7|by)\s?(\d{1,3}(?:\.\d{1,2})?)(?:\s?(mm|cm))?)?"
    r"(?:\s?(?:x|\u00d7|by)\s?(\d{1,3}(?:\.\d{1,2})?)(?:\s?(mm|cm))?)?"
    r"(?:(?:\s?[-\u2013]\s?|\s(?:to)\s)(\d{1,3}(?:\.\d{1,2})?))?"
    r"[\s-]?(mm|cm|millimet(?:er|re)s?|centimet(?:er|re)s?)?(?!\w)",
    re.IGNORECASE,
)
_NOT_NOW = re.compile(
    r"\b(?:previously|prior|was|were|formerly|from|compared (?:to|with)|versus|vs\.?|earlier|"
    r"initially|had been|last)"
    r"(?:\s+(?:measur\w+|about|approximately|a|up|to|at))*\s*$",
    re.IGNORECASE,
)
_DISTANCE = re.compile(
    r"\s*(?:above|below|from|away|distal|proximal|deep|superior|inferior|anterior|posterior|medial|lateral|cephalad|"
    r"caudal|beyond|past|slices?|sections?|intervals?|per)\b",
    re.IGNORECASE,
)
_LEVEL = re.compile(r"(?:[ctl](?:[1-9]|1[0-2])|s[1-5])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """One sentence's tokens, findings, places and cues."""

    tokens: Tokens
    sentence: tuple[int, int]
    entities: Sequence[Match[Concept]]
    places: Sequence[Match[Concept]]
    """Anatomical names outside the findings, vertebral levels too; in order."""
    inner: Sequence[Match[Concept]]
    """Anatomical names within the findings' own ("rib fracture")."""
    cues: Sequence[Match[Cue]]
    joined: Sequence[bool]
    of: Language
    changes: Sequence[Match[Change]] = ()

    def window(self, number: int) -> tuple[int, int, int]:
        """Return where a finding's own words may stand: tokens (begin, end of its list's last, end)."""
        words, of = self.tokens.words, self.of
        before = self.entities[number - 1].last if number else self.sentence[0]
        last = number
        while last < len(self.joined) and self.joined[last]:
            # What stands behind an item of a list is its own: "nodule on the right and cyst on the left".
            if number == last and any(
                word in of.preposition
                for word in words[self.entities[last].last : self.entities[last + 1].first]
            ):
                break
            last += 1
        end = self.sentence[1]
        if last + 1 < len(self.entities):
            end = self.phrase(last + 1)
        entity, begin = self.entities[number], before
        for cue in self.cues:
            # What a stop or an inference separates is said of something else.
            if (
                cue.value.effect in ("absent", "uncertain", "stop", "hypothetical")
                or cue.value.words in self.of.inference
            ):
                if cue.first >= self.entities[last].last and (
                    cue.value.effect == "stop"
                    or (cue.value.direction == "forward" and words[cue.first - 1] != ":")
                ):
                    end = min(end, cue.first)
                if cue.last <= entity.first and cue.value.effect == "stop":
                    begin = max(begin, cue.last)
        return begin, self.entities[last].last, max(end, self.entities[last].last)

    def phrase(self, number: int) -> int:
        """Return the token that a finding's noun phrase begins at, adjectives and determiner included."""
        words, of = self.tokens.words, self.of
        begin = self.entities[number - 1].last if number else self.sentence[0]
        near, has_side = self.entities[number].first, False
        while near > begin:
            word = words[near - 1]
            if word in of.adding or word in of.closing:
                # "Left and right effusions" is one phrase, "right cyst and left nodule" are two.
                if not (has_side and near - 2 >= begin and words[near - 2] in of.sides):
                    break
            elif (
                word in (",", ":", "(", ";", ".")
                or word in of.preposition
                or word in of.breaks_list
                or word in of.verb
                or word in of.place_verb
            ):
                break
            elif word in of.determiner:
                near -= 1
                break
            has_side = has_side or word in of.sides
            near -= 1
        return near


def find_levels(tokens: Tokens) -> Iterator[Match[Concept]]:
    """Find vertebral levels (T8, L3-L4, L4 on L5, L4 to S1)."""
    number, words = 0, tokens.words
    while number < len(words):
        if _is_level(tokens, number):
            last = number + 1
            while last < len(words) and (
                _is_level(tokens, last)
                or (
                    words[last] in ("on", "to", "through", "/", "-", "\u2013")
                    and last + 1 < len(words)
                    and _is_level(tokens, last + 1)
                )
            ):
                last += 1
            yield Match(
                number, last, Concept(name=" ".join(words[number:last]), kind="anatomy", parent="spine")
            )
            number = last
        else:
            number += 1


def _is_level(tokens: Tokens, number: int) -> bool:
    if not _LEVEL.fullmatch(tokens.words[number]):
        return False
    # T1 and T2 are weightings too; S3 may be a series.
    after = tokens.words[number + 1 : number + 2]
    return not (tokens.words[number] in ("t1", "t2") and after and after[0] in _T_WORDS)


_T_WORDS = word_set(
    """
    weighted hyperintense hypointense hyperintensity hypointensity signal shine flair images sequence
    sequences bright dark prolongation shortening intensity isointense hyperintensities and w fs
    """
)


def places_of(clause: Clause, number: int) -> list[Match[Concept]]:
    """Return the anatomical names that a finding's place is said with, the one it lies in first.

    First what follows it ("nodule in the right upper lobe"), then what stands right before it
    ("rib fracture"), then what its sentence began with ("the spleen is enlarged").
    """
    entity, words = clause.entities[number], clause.tokens.words
    begin, behind, end = clause.window(number)
    after = [place for place in clause.places if behind <= place.first and place.last <= end]
    with_preposition = [
        place
        for place in after
        if any(word in clause.of.preposition for word in words[max(behind, place.first - 4) : place.first])
        or place.first == behind
    ]
    earlier = [place for place in clause.places if begin <= place.first and place.last <= entity.first]
    inside = [place for place in clause.inner if entity.first <= place.first and place.last <= entity.last]
    close = [place for place in earlier if _is_attribute(clause, place.last, entity.first)]
    return [*with_preposition[:1], *close[::-1], *inside, *after[:1], *(earlier[::-1] if number == 0 else ())]


def _is_attribute(clause: Clause, first: int, last: int) -> bool:
    gap, of = clause.tokens.words[first:last], clause.of
    return len(gap) <= 5 and not any(
        word == "," or word in of.preposition or word in of.place_verb for word in gap
    )


def side_of(clause: Clause, number: int) -> Side:
    """Return the side a finding is said to be on."""
    entity = clause.entities[number]
    begin, behind, end = clause.window(number)
    inside = [*_sides(clause, entity.first, entity.last)]
    near = clause.phrase(number)
    for sides in (
        [*inside, *_sides(clause, near, entity.first)],
        [*_sides(clause, behind, end)],
        # What stands before an earlier finding is said of that one.
        [*_sides(clause, begin, near)] if number == 0 else [],
    ):
        found = {side for side in sides if side}
        if found:
            return found.pop() if len(found) == 1 else "B"
    return ""


def _sides(clause: Clause, first: int, last: int) -> Iterator[Side]:
    words = clause.tokens.words
    for number in range(first, last):
        side = clause.of.sides.get(words[number], "")
        if side and (number + 1 >= len(words) or words[number + 1] not in clause.of.no_side_before):
            yield side
    for place in clause.places:
        if first <= place.first and place.last <= last and place.value.side:
            yield place.value.side


def severity_of(clause: Clause, number: int) -> str:
    """Return the word for a finding's severity, or nothing."""
    entity, words = clause.entities[number], clause.tokens.words
    _, behind, end = clause.window(number)
    for place in range(entity.first - 1, clause.phrase(number) - 1, -1):
        if words[place] in clause.of.severity:
            return words[place]
    for place in range(behind, end):
        if words[place] in clause.of.severity:
            return words[place]
    return ""


_CHANGE_REACH = 6
"""Words between a finding and its change."""


def change_of(clause: Clause, number: int) -> Change:
    """Return how a finding has changed: what is said right before it or its list, else behind it."""
    words, of = clause.tokens.words, clause.of
    _, behind, end = clause.window(number)
    first = number
    while first and clause.joined[first - 1]:
        first -= 1
    for start in dict.fromkeys((clause.entities[number].first, clause.entities[first].first)):
        for change in reversed(clause.changes):
            gap = words[change.last : start]
            if change.last <= start and len(gap) <= _CHANGE_REACH:
                if not any(word in (",", ":") or word in of.verb or word in of.adding for word in gap):
                    is_inside = all(
                        one.last <= change.first or start <= one.first for one in clause.entities
                    ) and not any(change.last <= one.first and one.last <= start for one in clause.entities)
                    if is_inside:
                        return change.value
                break
    for change in clause.changes:
        if behind <= change.first and change.last <= end:
            gap = words[behind : change.first]
            if len(gap) <= 2 * _CHANGE_REACH and "," not in gap[1:]:
                return change.value
    return ""


def sizes_of(clause: Clause) -> dict[int, tuple[float, ...]]:
    """Return the sizes in mm of the findings that have one, by their numbers in the clause."""
    tokens, found = clause.tokens, {}
    first, last = clause.sentence
    text_start, text_end = tokens.starts[first], tokens.ends[last - 1]
    for match in _SIZE.finditer(tokens.text, text_start, text_end):
        size = _millimeters(match)
        if size is None or _DISTANCE.match(tokens.text, match.end(), text_end):
            continue
        before = tokens.text[max(text_start, match.start() - 60) : match.start()]
        if _NOT_NOW.search(before):
            continue
        owner = _owner(clause, match.start(), match.end())
        if owner is not None and (owner not in found or re.search(r"\b(?:now|to|currently)\s*$", before)):
            found[owner] = size
    return found


def _millimeters(match: re.Match[str]) -> tuple[float, ...] | None:
    unit_behind = match.group(8)
    if unit_behind is None and not (match.group(2) or match.group(4) or match.group(6)):
        return None
    numbers = [
        (match.group(1), match.group(2)),
        (match.group(3), match.group(4)),
        (match.group(5), match.group(6)),
    ]
    if match.group(7):
        # A span of sizes: its larger end.
        numbers = [(match.group(7), None)]
    last_unit = unit_behind or match.group(6) or match.group(4) or match.group(2)
    sizes = [
        round(float(number) * (10 if (unit or last_unit).lower().startswith("c") else 1), 2)
        for number, unit in numbers
        if number
    ]
    return tuple(sizes) if 0 < max(sizes) < 1000 else None


def _owner(clause: Clause, start: int, end: int) -> int | None:
    """Return whose size it is: what follows at once ("9 mm nodule"), else what stands before."""
    tokens = clause.tokens
    before: int | None = None
    for number, entity in enumerate(clause.entities):
        if tokens.starts[entity.first] >= end:
            gap = tokens.text[end : tokens.starts[entity.first]].lower()
            if not re.search(
                r"[,;:(]|\b(?:in|with|and|at|is|are|on|to|up|thick|causing|without|no|from)\b", gap
            ):
                return number
            break
        if tokens.ends[entity.last - 1] <= start:
            before = number
    if before is None:
        return None
    first = clause.entities[before].last
    for cue in clause.cues:
        if cue.value.effect in ("stop", "absent") and tokens.starts[cue.first] < start and cue.first >= first:
            return None
    return before


T = TypeVar("T")
Span = tuple[int, int]
"""Characters of the text, closed-open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Anatomy named in the text."""

    span: Span
    name: str
    """Of the lexicon; of a vertebral level its own words."""


EntityKind: TypeAlias = Literal["device", "finding", "history", "procedure", "recommendation", "symptom"]
"""``history``: what was and is not said to be there now, and what happened to a person.
``recommendation``: what is looked for or planned."""
_KINDS: dict[ConceptKind, EntityKind] = {
    "device": "device",
    "event": "history",
    "procedure": "procedure",
    "symptom": "symptom",
}


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
    kind: EntityKind = "finding"
    section: str = ""
    """Kind of the section that it stands in; `ReportReader` fills it."""
    change: Change = ""
    """Against an earlier examination."""
    certainty: Strength = ""
    """How strongly an uncertain finding is meant."""
    basis: str = ""
    """What the assertion rests on, as of `shardflow.reports.assertion.Judgment`."""
    probability: float | None = None
    """That what it names is there, from 0 to 1, given these words; `ReportReader` fills what is None."""


class EntityFinder:
    """Finds the lexicon's findings.

    Args:
        lexicon: Words to look for; None: the shipped ones.
    """

    def __init__(self, lexicon: Lexicon | None = None) -> None:
        self.lexicon = lexicon if lexicon is not None else load_lexicon()
        self._of = load_language(self.lexicon.language)
        self._scopes = Scopes(self._of)

    @cached_property
    def _index(self) -> PhraseIndex[Concept]:
        return PhraseIndex(self.lexicon.phrases)

    @cached_property
    def _changes(self) -> PhraseIndex[Change]:
        return PhraseIndex({" ".join(fold_words(phrase)): one for phrase, one in self._of.changes.items()})

    def find(self, text: str) -> list[Entity]:
        """Return the findings of a text, in its order."""
        tokens = tokenize(text)
        cues = find_cues(tokens, self._of.name)
        # Words of a phrase that only says how something has changed are no findings ("has enlarged").
        silent = {
            number
            for cue in cues
            if cue.value.effect == "none" and cue.last - cue.first > 1
            for number in range(cue.first, cue.last)
        }
        matches = [
            one
            for one in self._index.find(tokens)
            if not (one.first in silent and one.last - 1 in silent and one.value.kind != "anatomy")
            and not self._is_view(tokens, one)
        ]
        concepts = keep_longest([*matches, *find_levels(tokens)])
        names = sorted((one for one in matches if one.value.kind == "anatomy"), key=lambda one: one.first)
        changes = keep_longest(self._changes.find(tokens))
        entities: list[Entity] = []
        at_concept = at_cue = at_name = at_change = 0
        for first, last in tokens.sentences:
            here, at_concept = _within(concepts, at_concept, first, last)
            said, at_cue = _within(cues, at_cue, first, last)
            inner, at_name = _within(names, at_name, first, last)
            changed, at_change = _within(changes, at_change, first, last)
            entities += self._judge(tokens, (first, last), here, said, inner, changed)
        return entities

    def _is_view(self, tokens: Tokens, match: Match[Concept]) -> bool:
        """Whether a name of anatomy is that of a projection here: "on the frontal and lateral views"."""
        if match.last - match.first > 1 or tokens.words[match.first] not in self._of.projection:
            return False
        behind = match.last
        while behind < len(tokens) and tokens.words[behind] in self._of.of_projection:
            behind += 1
        return behind < len(tokens) and tokens.words[behind] in self._of.picture

    def _judge(
        self,
        tokens: Tokens,
        sentence: Span,
        concepts: Sequence[Match[Concept]],
        cues: Sequence[Match[Cue]],
        names: Sequence[Match[Concept]],
        changes: Sequence[Match[Change]],
    ) -> Iterator[Entity]:
        findings = self._findings(tokens, sentence[0], concepts)
        if not findings:
            return
        taken = {number for one in findings for number in range(one.first, one.last)}
        # The words of a finding's name are no cues.
        said = keep_longest(cue for cue in cues if taken.isdisjoint(range(cue.first, cue.last)))
        said = self._scopes.meant(tokens, said)
        kinds = [Match(one.first, one.last, one.value.kind) for one in findings]
        joined = self._scopes.coordinate(tokens, kinds, said)
        judgments = self._scopes.judge(tokens, sentence, kinds, said, joined)
        clause = Clause(
            tokens=tokens,
            sentence=sentence,
            entities=findings,
            places=[one for one in concepts if one.value.kind == "anatomy"],
            inner=names,
            cues=said,
            joined=joined,
            of=self._of,
            changes=[one for one in changes if taken.isdisjoint(range(one.first, one.last))],
        )
        sizes = sizes_of(clause)
        is_advice = not self._of.advice.isdisjoint(tokens.words[sentence[0] : sentence[1]])
        for number, (one, judgment) in enumerate(zip(findings, judgments, strict=True)):
            places = places_of(clause, number)
            change = change_of(clause, number)
            yield Entity(
                span=_span(tokens, one),
                concept=one.value.name,
                assertion=judgment.assertion,
                anatomy=Place(span=_span(tokens, places[0]), name=places[0].value.name) if places else None,
                laterality=side_of(clause, number),
                size_mm=sizes.get(number, ()),
                severity=severity_of(clause, number),
                kind=_kind(one.value.kind, judgment.assertion, is_advice=is_advice),
                # What is denied has not changed, unless it is gone.
                change=change if (judgment.assertion == "absent") == (change == "resolved") else "",
                certainty=judgment.strength,
                basis=judgment.basis,
                probability=probability_of(judgment),
            )

    def _findings(
        self, tokens: Tokens, begin: int, concepts: Sequence[Match[Concept]]
    ) -> list[Match[Concept]]:
        """Choose what is a finding among the concepts of a sentence."""
        found: list[Match[Concept]] = []
        for number, one in enumerate(concepts):
            kind = one.value.kind
            if kind == "normal":
                continue
            if kind == "anatomy":
                if one.value.name in self._of.node:
                    found += self._qualified(tokens, begin, one)
            elif one.first > begin and tokens.words[one.first - 1] in self._of.not_normal:
                continue
            elif kind == "state":
                found += self._state(tokens, one, concepts[number + 1 :])
            else:
                found.append(one)
        if any(one.value.kind != "sign" for one in found):
            # A sign next to what it is a sign of is evidence, not another finding.
            found = [one for one in found if one.value.kind != "sign"]
        return _merge(found)

    def _qualified(self, tokens: Tokens, begin: int, node: Match[Concept]) -> list[Match[Concept]]:
        """Make a finding of lymph nodes that are called abnormal, from the adjective on."""
        of = self._of
        for place in range(node.first - 1, max(begin, node.first - 8) - 1, -1):
            word = tokens.words[place]
            if word in of.node_qualifier:
                return [Match(place, node.last, _ENLARGED_NODE)]
            if word in of.not_attributive and word not in of.adding and word != ",":
                break
        return []

    def _state(
        self, tokens: Tokens, state: Match[Concept], following: Sequence[Match[Concept]]
    ) -> list[Match[Concept]]:
        """Judge an adjective: with the anatomy behind it, as a predicate, or not at all before a finding."""
        of, words = self._of, tokens.words
        concept = replace(state.value, name=state.value.parent or state.value.name, kind="finding")
        if words[state.first - 1 : state.first] and words[state.first - 1] in of.negated_state | of.perfect:
            return []
        last = state.last
        for one in following:
            if one.first - last > 2 or any(word in of.not_attributive for word in words[last : one.first]):
                break
            if one.value.kind not in ("anatomy", "state"):
                return []
            if one.value.kind == "state":
                break
            last = one.last
        return [Match(state.first, last, concept)]


_ENLARGED_NODE = Concept(name="lymphadenopathy", kind="finding", parent="abnormality")


def _within(matches: Sequence[Match[T]], at: int, first: int, last: int) -> tuple[list[Match[T]], int]:
    """Take what lies in a sentence, from a list in order; what crosses its end is dropped."""
    found = []
    while at < len(matches) and matches[at].first < last:
        if first <= matches[at].first and matches[at].last <= last:
            found.append(matches[at])
        at += 1
    return found, at


def _span(tokens: Tokens, match: Match[Concept]) -> Span:
    return tokens.starts[match.first], tokens.ends[match.last - 1]


def _kind(kind: ConceptKind, assertion: Assertion, *, is_advice: bool) -> EntityKind:
    if assertion == "historical":
        return "history"
    if assertion == "hypothetical" and is_advice:
        return "recommendation"
    return _KINDS.get(kind, "finding")


def _merge(found: list[Match[Concept]]) -> list[Match[Concept]]:
    """Make one finding of those that overlap or are neighbors ("ground-glass nodule"); the last names it."""
    merged: list[Match[Concept]] = []
    for one in sorted(found, key=lambda one: (one.first, one.last)):
        if merged and one.first <= merged[-1].last:
            before = merged.pop()
            value = one.value if one.last >= before.last else before.value
            one = Match(before.first, max(before.last, one.last), value)
        merged.append(one)
    return merged


@cache
def _probabilities() -> dict[tuple[str, str, str], float]:
    return {
        (row["assertion"], row["certainty"], row["basis"]): float(row["probability"])
        for row in shared_rows("probability.csv")
    }


def probability_of(judgment: Judgment) -> float:
    """Return how often what is judged so is there.

    The shares in ``probability.csv`` are counted by ``benchmarks/reports`` on sentences written by hand; an
    uncertain finding has the share that its hedge stands for. They are used for every language.
    """
    known = _probabilities()
    key = (judgment.assertion, judgment.strength, judgment.basis)
    return (
        known.get(key)
        or known[judgment.assertion, judgment.strength, _USUAL_BASIS.get(judgment.assertion, "")]
    )


_USUAL_BASIS = {"absent": "cue", "present": "plain"}
