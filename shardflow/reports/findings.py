"""Findings of a text: named by the lexicon, judged by scope rules, and described by the words around them.

The description is the place of a finding, its side, size and severity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, TypeAlias, TypeVar

from shardflow.reports.assertion import (
    Assertion,
    Cue,
    Judgment,
    Scopes,
    Strength,
    denials,
    find_cues,
)
from shardflow.reports.attributes import (
    Clause,
    change_of,
    find_levels,
    place_of,
    severity_of,
    side_of,
    sizes_of,
)
from shardflow.reports.language import Change, Side, load_language, shared_rows
from shardflow.reports.lexicon import (
    Concept,
    ConceptKind,
    Lexicon,
    load_lexicon,
)
from shardflow.reports.tokens import Match, PhraseIndex, Tokens, by_first, fold_words, keep_longest, tokenize

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
    def _meanings(self) -> dict[str, dict[str, Concept]]:
        """Meanings of a name by the anatomy that it stands with."""
        found: dict[str, dict[str, Concept]] = {}
        for row in shared_rows("meanings.csv"):
            concept = self.lexicon.concepts.get(row["means"])
            if concept is not None and row["name"] in self.lexicon.concepts:
                found.setdefault(row["name"], {})[row["within"]] = concept
        return found

    def _meant(self, concept: Concept, place: Concept | None, names: Sequence[Match[Concept]]) -> Concept:
        """Return what a name means with its place; without one, in the anatomy that the text speaks of."""
        meanings = self._meanings.get(concept.name)
        if meanings is None:
            return concept
        if place is not None:
            for name in (place.name, *self.lexicon.ancestors(place)):
                if name in meanings:
                    return meanings[name]
            return concept
        usual = meanings.get("*")
        if usual is None:
            return concept
        spoken = {name for one in names for name in (one.value.name, *self.lexicon.ancestors(one.value))}
        possible = {one.name: one for name, one in meanings.items() if name in spoken}
        return next(iter(possible.values())) if len(possible) == 1 else usual

    @cached_property
    def _changes(self) -> PhraseIndex[Change]:
        phrases = self._of.changes.items()
        return PhraseIndex({" ".join(fold_words(phrase, self._of.name)): one for phrase, one in phrases})

    def find(self, text: str) -> list[Entity]:
        """Return the findings of a text, in its order."""
        return self.find_in(tokenize(text, self._of.name))

    def find_in(
        self, tokens: Tokens, named: Sequence[Match[Concept]] = (), section: str = ""
    ) -> list[Entity]:
        """Return the findings of a text that is cut already, with spans of its report.

        Args:
            tokens: The text.
            section: Kind of the section that it is.
            named: Names that something else than the lexicon found; those of the lexicon beside and inside
                them do not count.
        """
        cues = find_cues(tokens, self._of.name)
        # Words of a phrase that only says how something has changed are no findings ("has enlarged").
        silent = {
            number
            for cue in cues
            if cue.value.effect == "none" and cue.last - cue.first > 1
            for number in range(cue.first, cue.last)
        }
        matches = self._index.find(tokens)
        if silent:
            matches = [
                one
                for one in matches
                if not (one.first in silent and one.last - 1 in silent and one.value.kind != "anatomy")
            ]
        if not self._of.projection.isdisjoint(tokens.words):
            matches = [one for one in matches if not self._is_view(tokens, one)]
        if named:
            taken = {number for one in named for number in range(one.first - 1, one.last + 1)}
            others = [one for one in matches if taken.isdisjoint(range(one.first, one.last))]
            matches = [*others, *named]
        concepts = keep_longest([*matches, *find_levels(tokens, self._of)])
        names = sorted((one for one in matches if one.value.kind == "anatomy"), key=by_first)
        changes = keep_longest(self._changes.find(tokens))
        entities: list[Entity] = []
        sentences = tokens.sentences
        for sentence, here, said, inner, changed in zip(
            sentences,
            _by_sentence(concepts, sentences),
            _by_sentence(cues, sentences),
            _by_sentence(names, sentences),
            _by_sentence(changes, sentences),
            strict=True,
        ):
            if here:
                entities += self._judge(tokens, sentence, here, said, inner, changed, names, section)
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
        spoken: Sequence[Match[Concept]],
        section: str,
    ) -> Iterator[Entity]:
        findings = self._findings(tokens, sentence[0], concepts)
        if not findings:
            return
        taken = {number for one in findings for number in range(one.first, one.last)}
        # The words of a finding's name are no cues.
        said = keep_longest(cue for cue in cues if taken.isdisjoint(range(cue.first, cue.last)))
        denied = denials(said)
        said = self._scopes.meant(tokens, sentence, said, self._named(tokens, findings, taken), denied)
        kinds = [Match(one.first, one.last, one.value.kind) for one in findings]
        joined = self._scopes.coordinate(tokens, kinds, said)
        judgments = self._scopes.judge(tokens, sentence, kinds, said, joined, denied)
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
            denied=denied,
        )
        sizes = sizes_of(clause)
        is_advice = any(one.assertion == "hypothetical" for one in judgments) and (
            not self._of.advice.isdisjoint(tokens.words[sentence[0] : sentence[1]])
        )
        for number, (one, judgment) in enumerate(zip(findings, judgments, strict=True)):
            place = place_of(clause, number)
            change = change_of(clause, number)
            # What is denied has not changed and has no size ("no X larger than 4 mm"), unless it is gone.
            is_gone = change == "resolved"
            is_denied = judgment.assertion == "absent"
            concept = self._meant(one.value, place.value if place else None, spoken)
            yield Entity(
                span=_span(tokens, one),
                concept=concept.name,
                assertion=judgment.assertion,
                anatomy=Place(span=_span(tokens, place), name=place.value.name) if place else None,
                laterality=side_of(clause, number),
                size_mm=() if is_denied and not is_gone else sizes.get(number, ()),
                severity=severity_of(clause, number),
                kind=kind_of(one.value.kind, judgment.assertion, is_advice=is_advice),
                section=section,
                change=change if is_denied == is_gone else "",
                certainty=judgment.strength,
                basis=judgment.basis,
                probability=probability_of(judgment),
            )

    def _findings(
        self, tokens: Tokens, begin: int, concepts: Sequence[Match[Concept]]
    ) -> list[Match[Concept]]:
        """Choose what is a finding among the concepts of a sentence."""
        found: list[Match[Concept]] = []
        states: list[Match[Concept]] = []
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
                states += self._state(tokens, one, concepts[number + 1 :])
            else:
                found.append(one)
        # A sign next to what it is a sign of is evidence, not another finding.
        found = [one for one in found if one.value.kind != "sign"] or found
        return _merge(found, states) if states or len(found) > 1 else found

    def _qualified(self, tokens: Tokens, begin: int, node: Match[Concept]) -> list[Match[Concept]]:
        """Make a finding of lymph nodes that are called abnormal, from the adjective on."""
        of = self._of
        for place in range(node.first - 1, max(begin, node.first - 8) - 1, -1):
            word = tokens.words[place]
            if word in of.node_qualifier:
                return [Match(place, node.last, _ENLARGED_NODE)]
            if word in of.not_attributive and word not in of.adding and word != ",":
                break
        if of.node_behind:
            for place in range(node.last, min(node.last + _NODE_REACH, len(tokens))):
                if tokens.words[place] in of.node_behind:
                    return [Match(node.first, node.last, _ENLARGED_NODE)]
                if tokens.words[place] in (",", ".", ";"):
                    break
        return []

    def _named(self, tokens: Tokens, findings: Sequence[Match[Concept]], taken: set[int]) -> set[int]:
        """Add what makes findings of nodes from behind to the tokens of names: no change is said by it."""
        behind = self._of.node_behind
        if not behind:
            return taken
        return taken.union(
            number
            for one in findings
            if one.value is _ENLARGED_NODE
            for number in range(one.last, min(one.last + _NODE_REACH, len(tokens)))
            if tokens.words[number] in behind
        )

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
            if one.first - last > _STATE_REACH or any(
                word in of.not_attributive for word in words[last : one.first]
            ):
                break
            if one.value.kind not in ("anatomy", "state"):
                return []
            if one.value.kind == "state":
                break
            last = one.last
        return [Match(state.first, last, concept)]


_STATE_REACH = 4
"""Words between an adjective and the noun that it is said of: "calcified 5 mm right apical granuloma"."""
_NODE_REACH = 4
"""Words behind nodes among which their qualifier may stand."""
_ENLARGED_NODE = Concept(name="lymphadenopathy", kind="finding", parent="abnormality")


def _by_sentence(matches: Sequence[Match[T]], sentences: Sequence[Span]) -> list[list[Match[T]]]:
    """Divide matches in order among the sentences; what crosses the end of one is dropped."""
    found: list[list[Match[T]]] = [[] for _ in sentences]
    number = 0
    for one in matches:
        while one.first >= sentences[number][1]:
            number += 1
        if one.last <= sentences[number][1]:
            found[number].append(one)
    return found


def _span(tokens: Tokens, match: Match[Concept]) -> Span:
    return tokens.offset + tokens.starts[match.first], tokens.offset + tokens.ends[match.last - 1]


def kind_of(kind: ConceptKind, assertion: Assertion = "present", *, is_advice: bool = False) -> EntityKind:
    """Return what a finding is, by the kind of its concept and what is said of it.

    Args:
        kind: Of the concept.
        assertion: Of the finding.
        is_advice: Whether its sentence plans for something.
    """
    if assertion == "historical":
        return "history"
    if assertion == "hypothetical" and is_advice:
        return "recommendation"
    return _KINDS.get(kind, "finding")


def _merge(found: list[Match[Concept]], states: list[Match[Concept]]) -> list[Match[Concept]]:
    """Make one finding of those that overlap or are neighbors ("ground-glass nodule"); the last names it.

    A state is no neighbor: a "tortuous calcified aorta" has two.
    """
    merged: list[Match[Concept]] = []
    for one in sorted([*found, *states], key=lambda one: (one.first, one.last)):
        if merged and one.first < merged[-1].last + (one not in states):
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


@cache
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
