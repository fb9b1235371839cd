"""Assertion of findings by scope rules in the manner of ConText, over cues from ``cues.csv``.

A cue describes the findings before or after it: absent, uncertain, historical, hypothetical, present. Its
scope ends at a word that begins another thought (*but*, *apart from*), and passes from one finding to the
next only along a list (*no X, Y, or Z*). Adjectives do not end a list that "or" closes (*no focal X, large Y,
or Z*); without it they do (*no X, small Y*). Of several cues the nearest one holds. A cue that draws a
conclusion takes over the denial of what it is drawn from (*no X to suggest Y*). Parentheses between a cue and
a finding are skipped (*a nodule (series 3, images 16, 17 and 18) cannot be excluded*). A cue with the effect
``none`` only keeps its words from being read as another cue (*no change*, *without contrast*).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from shardflow.reports.language import ENGLISH, Language, load_language, table_rows
from shardflow.reports.lexicon import ConceptKind
from shardflow.reports.tokens import Match, PhraseIndex, Tokens, by_first, fold_words

Assertion = Literal["absent", "historical", "hypothetical", "present", "uncertain"]
"""Assertion of a finding; the table in docs/reports.md has examples."""


Strength: TypeAlias = Literal["", "doubtful", "likely", "possible"]
"""How strongly an uncertain finding is meant."""


@dataclass(frozen=True, slots=True)
class Cue:
    """A phrase that changes the assertion of the findings around it."""

    effect: Assertion | Literal["none", "stop"]
    direction: Literal["backward", "both", "forward"]
    """``both``: what follows, or if nothing follows in reach, what stands before; a stop stops both ways."""
    words: str
    strength: Strength = ""
    negated: Assertion | Literal[""] = ""
    """Effect where what it concludes from is denied."""
    is_denial: bool = False
    """Whether it is said with a word that denies, which may deny a change alone."""


class Judgment(NamedTuple):
    """Assertion of a finding and what it rests on."""

    assertion: Assertion
    strength: Strength = ""
    basis: Literal["cue", "list", "plain", "shadowed"] = "plain"
    """``list``: reached along a list. ``plain``: no cue speaks of it. ``shadowed``: none does, though one
    stands in its sentence."""


_REACH = 9
"""Words allowed between a cue and its first finding."""
_REACH_BACK = 12
_REACH_OF_ALTERATION = 4
"""Words before a finding among which its change may stand: "worsening left lower lobe X"."""
_REACH_OF_ASKING = 2
"""Words between a cue that asks and a hedge of what it asks for."""


@cache
def _cue_index(language: str) -> PhraseIndex[Cue]:
    phrases: dict[str, Cue] = {}
    denying = load_language(language).denying
    for row in table_rows("cues.csv", language):
        for cue in row["cues"].split("|"):
            words = " ".join(fold_words(cue, language))
            phrases[words] = Cue(
                cast("Assertion", row["effect"]),
                cast("Literal['both']", row["direction"]),
                words,
                cast("Strength", row["strength"]),
                cast("Assertion", row["negated"]),
                row["effect"] in ("absent", "none") and not denying.isdisjoint(words.split()),
            )
    return PhraseIndex(phrases)


def find_cues(tokens: Tokens, language: str = ENGLISH) -> list[Match[Cue]]:
    """Find the cues of a text, overlapping ones too, by their first words."""
    return sorted(_cue_index(language).find(tokens), key=by_first)


_OPENING = frozenset("([")
_ENDS_LIST = frozenset(":().")
_ANSWERED = frozenset(":=|-\u2013\u2014")


def _outside(words: Sequence[str], first: int, last: int) -> Sequence[int]:
    """Return the numbers of the tokens of a gap that stand in no parentheses opened and closed in it."""
    if _OPENING.isdisjoint(words[first:last]):
        return range(first, last)
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


def denials(cues: Iterable[Match[Cue]]) -> set[int]:
    """Return the tokens of the cues that deny, a change perhaps: "no signs of"."""
    return {number for cue in cues if cue.value.is_denial for number in range(cue.first, cue.last)}


def qualified(
    words: Sequence[str],
    change: Match[Any],
    sentence: tuple[int, int],
    denied: Set[int],
    of: Language,
) -> Literal["", "almost", "denied"]:
    """Return how words qualify a change: "nearly resolved", "resolved partially", "not improved".

    Args:
        words: Those of the text.
        change: Where the change is said.
        sentence: Range of its sentence.
        denied: Its `denials`.
        of: Its language.
    """
    place, is_other = change.first - 1, False
    while place >= sentence[0] and (
        words[place] in of.alteration
        or words[place] in of.closing
        or (
            not is_other
            and (words[place] in of.degree or (place in denied and words[place] not in of.denying))
        )
    ):
        # "No obvious or enlarging X": what stands before "or" is no degree of the change.
        is_other = words[place] in of.closing or (is_other and words[place] not in of.alteration)
        place -= 1
    if place >= sentence[0] and words[place] in of.almost:
        return "almost"
    if place >= sentence[0] and words[place] in of.denying:
        return "denied"
    place = change.last
    while place < sentence[1] and (words[place] in of.almost or words[place] in of.degree):
        place += 1
    # "Resolved, partially loculated" and "resolved partially loculated X" qualify what follows.
    is_over = place == sentence[1] or words[place] in of.not_attributive
    return "almost" if is_over and not of.almost.isdisjoint(words[change.last : place]) else ""


Link: TypeAlias = Literal["adjective", "and", "bare", "comma", "no", "or", "versus"]


class Scopes:
    """Scope rules of one language.

    Args:
        words: Its words.
    """

    def __init__(self, words: Language) -> None:
        self._words = words
        self._own = words.own_statement | words.adjective
        self._joints = words.closing | words.adding
        self._placing = [[word] for word in words.placing]
        self._altering = words.alteration.union(
            phrase for phrase, change in words.changes.items() if change in ("better", "worse")
        )
        self._ends_alteration = words.not_attributive | words.than

    def meant(
        self,
        tokens: Tokens,
        sentence: tuple[int, int],
        cues: Sequence[Match[Cue]],
        taken: Set[int],
        denied: Set[int],
    ) -> list[Match[Cue]]:
        """Leave out cues of one sentence: what needs another one, and denials of a change.

        "Over" means something only in "favors X over Y"; "no improvement in the X" and "X has nearly
        cleared" deny no X. Such a denial still holds for what is new: "no worsening of the X or new Y".

        Args:
            tokens: The text.
            sentence: Range of its tokens.
            cues: The sentence's cues, in order.
            taken: Tokens of its findings' names, which are no changes.
            denied: Its `denials`.
        """
        kept: list[Match[Cue]] = []
        is_preferred = False
        for number, cue in enumerate(cues):
            is_of_change = cue.value.effect == "absent" and self._is_of_change(
                tokens.words, sentence, cue, taken, denied
            )
            if is_of_change or cue.value.effect == "none":
                further = self._denied_further(tokens.words, sentence, cue, cues[number + 1 :])
                if further is not None:
                    kept.append(further)
            if is_of_change:
                continue
            if is_preferred or cue.value.words not in self._words.preferred_to:
                kept.append(cue)
            words = tokens.words[cue.first : cue.last]
            is_preferred = is_preferred or not self._words.preference.isdisjoint(words)
        return sorted(kept, key=by_first)

    def _denied_further(
        self, words: Sequence[str], sentence: tuple[int, int], cue: Match[Cue], behind: Sequence[Match[Cue]]
    ) -> Match[Cue] | None:
        """Return the denial that goes on behind one of a change, with something new: "or new Y"."""
        of, last = self._words, cue.last
        while last < sentence[1] - 1 and words[last] in of.degree:
            last += 1
        said = words[cue.first : last + 1]
        if not cue.value.is_denial or (
            self._altering.isdisjoint(said) and of.changes.get(cue.value.words) != "stable"
        ):
            return None
        # Another cue is another thought, unless it is part of the change ("no resolution of the X").
        others = [
            one.first
            for one in behind
            if one.value.effect != "none" and of.alteration.isdisjoint(words[one.first : one.last])
        ]
        for place in _outside(words, cue.last, min(others, default=sentence[1])):
            if words[place] in of.verb or words[place] in _ENDS_LIST:
                break
            if words[place] in of.closing:
                new = place + 1
                while new < sentence[1] and (words[new] in of.degree or words[new] in of.determiner):
                    new += 1
                if new < sentence[1] and of.changes.get(words[new]) == "new":
                    return Match(place, place + 1, Cue("absent", "forward", words[place]))
        return None

    def _is_of_change(
        self,
        words: Sequence[str],
        sentence: tuple[int, int],
        cue: Match[Cue],
        taken: Set[int],
        denied: Set[int],
    ) -> bool:
        """Whether what seems to deny a finding says that it has not changed, or is not quite gone."""
        of = self._words
        if not of.resolving.isdisjoint(words[cue.first : cue.last]):
            return qualified(words, cue, sentence, denied, of) != ""
        if not cue.value.is_denial:
            return False
        end = cue.last
        for place in range(cue.last, sentence[1]):
            if place in taken:
                # "Increase in heart size" is a finding.
                break
            if words[place] in self._altering:
                end = place + 1
            elif words[place] not in of.degree and (end == cue.last or words[place] not in of.closing):
                break
        if end == cue.last:
            return False
        while end < sentence[1] and words[end] in of.degree and words[end] not in self._ends_alteration:
            # "Pas d'augmentation significative de ...".
            end += 1
        behind = words[end : sentence[1]]
        # A comma may go on with a list: "no worsening, effusion, or edema".
        return not behind or (
            behind[0] in self._ends_alteration and (behind[0] != "," or of.closing.isdisjoint(behind))
        )

    def coordinate(
        self, tokens: Tokens, entities: Sequence[Match[ConceptKind]], cues: Sequence[Match[Cue]]
    ) -> list[bool]:
        """Say of each neighboring pair of one sentence's findings whether they are items of one list."""
        if len(entities) < 2:
            return []
        blocked = {
            number for cue in cues for number in range(cue.first, cue.last) if cue.value.effect != "none"
        }
        links = [
            self._link(tokens.words, before.last, after.first, blocked)
            for before, after in pairwise(entities)
        ]
        joined = [link in ("and", "or", "versus") for link in links]
        # Commas alone make a list only if it ends with "or" or "and", or if nothing but the comma stands
        # there; adjectives are part of it only if it ends with "or".
        closing: Link = "no"
        for number in range(len(links) - 1, -1, -1):
            link = links[number]
            if link == "comma":
                joined[number] = (
                    number + 1 < len(links) and joined[number + 1] and links[number + 1] != "versus"
                )
            elif link == "adjective":
                joined[number] = closing == "or" and joined[number + 1]
            elif link == "bare":
                behind = entities[number + 1].last
                # "No X, Y in the left base": with a place of its own, the last item is another statement.
                is_placed = closing == "no" and tokens.words[behind : behind + 1] in self._placing
                joined[number] = links[number + 1 : number + 2] != ["versus"] and not is_placed
            if link in ("and", "or", "versus", "no"):
                closing = link
        return joined

    def _link(self, words: Sequence[str], first: int, last: int, blocked: set[int]) -> Link:
        of = self._words
        gap = _outside(words, first, last)
        said = [words[number] for number in gap]
        # "or" and "nor" are cues themselves ("nor" denies); as links of a list they do not block.
        if not of.versus.isdisjoint(said):
            return "versus" if len(gap) <= _REACH and "," not in said else "no"
        if any(number in blocked and words[number] not in self._joints for number in gap):
            return "no"
        if not (of.verb.isdisjoint(said) and _ENDS_LIST.isdisjoint(said)):
            return "no"
        if len(said) == 1 and said[0] in of.complement:
            return "and"
        marks = [place for place, word in enumerate(said) if word in of.list]
        if not marks:
            return "and" if first == last else "no"
        tail = said[marks[-1] + 1 :]
        if not of.breaks_list.isdisjoint(tail):
            return "no"
        if any(said[place] in of.closing for place in marks):
            return "or"
        if not of.own_statement.isdisjoint(tail):
            return "no"
        is_added = any(said[place] in of.adding for place in marks)
        if not of.adjective.isdisjoint(tail):
            return "no" if is_added else "adjective"
        if is_added:
            return "and"
        return "bare" if len(gap) == 1 + len(tail) and of.unbroken.issuperset(tail) else "comma"

    def judge(
        self,
        tokens: Tokens,
        sentence: tuple[int, int],
        entities: Sequence[Match[ConceptKind]],
        cues: Sequence[Match[Cue]],
        joined: Sequence[bool],
        denied: Set[int],
    ) -> list[Judgment]:
        """Judge the findings of one sentence.

        Args:
            tokens: The text.
            sentence: Range of its tokens.
            entities: The sentence's findings, in order, with the kinds of their concepts.
            cues: The sentence's cues, in order.
            joined: From `coordinate`.
            denied: Tokens of the `denials`, those of changes too.
        """
        best: list[tuple[int, Judgment] | None] = [None] * len(entities)
        stops = [cue.first for cue in cues if cue.value.effect == "stop"]
        is_shadowed = False
        for place, cue in enumerate(cues):
            if cue.value.effect in ("none", "stop"):
                continue
            is_shadowed = is_shadowed or cue.value.effect != "present"
            reached: list[tuple[int, int]] = []
            direction = cue.value.direction
            # "X resolved with Y": it speaks of X.
            if direction == "forward" or (
                direction == "both"
                and not (cue.value.effect == "absent" and any(one.last == cue.first for one in entities))
            ):
                reached = self._forward(tokens, cue, entities, stops, joined, sentence)
            if direction == "backward" or (
                not reached and (direction == "both" or self._is_answer(tokens, cue, sentence))
            ):
                reached = self._backward(tokens, cue, entities, stops, joined)
            elif cue.value.words in self._words.versus:
                reached += self._backward(tokens, cue, entities, stops, joined)
            effect, strength = self._effect(tokens.words, cues, place, stops)
            if cue.value.negated and self._is_of_denied(tokens.words, cue, entities, best, stops):
                effect, strength = cue.value.negated, ""
            if effect is None:
                continue
            for number, distance in reached:
                held = best[number]
                is_nearer = held is None or distance < held[0]
                if is_nearer or (held is not None and distance == held[0] and effect == "absent"):
                    basis: Literal["cue", "list"] = "cue" if number == reached[0][0] else "list"
                    best[number] = (distance, Judgment(effect, strength, basis))
        # Where nothing changes, nothing is denied only to have changed.
        if denied and self._words.alteration.isdisjoint(tokens.words[sentence[0] : sentence[1]]):
            denied = set()
        silent = Judgment("present", "", "shadowed" if is_shadowed else "plain")
        found = [held[1] if held else silent for held in best]
        return [
            self._settle(tokens, sentence, entities, number, judgment, denied)
            for number, judgment in enumerate(found)
        ]

    @staticmethod
    def _is_of_denied(
        words: Sequence[str],
        cue: Match[Cue],
        entities: Sequence[Match[ConceptKind]],
        best: Sequence[tuple[int, Judgment] | None],
        stops: Sequence[int],
    ) -> bool:
        """Whether a conclusion is drawn from a finding that is denied: "no X, Y, or Z to suggest"."""
        before = [number for number, one in enumerate(entities) if one.last <= cue.first]
        held = best[before[-1]] if before else None
        if held is None or held[1].assertion != "absent":
            return False
        first = entities[before[-1]].last
        gap = words[first : cue.first]
        return len(gap) <= 6 and "," not in gap and not any(first <= stop < cue.first for stop in stops)

    def _is_answer(self, tokens: Tokens, cue: Match[Cue], sentence: tuple[int, int]) -> bool:
        """Whether a cue is all that follows a colon or dash: "Ascites: no.", "Ascites - no"."""
        return (
            cue.first > sentence[0]
            and tokens.words[cue.first - 1] in _ANSWERED
            and all(word in (".", ";", ",") for word in tokens.words[cue.last : sentence[1]])
        )

    def _effect(
        self, words: Sequence[str], cues: Sequence[Match[Cue]], place: int, stops: Sequence[int]
    ) -> tuple[Assertion | None, Strength]:
        """Return what a cue says here, given the cues before it; None for nothing."""
        cue = cues[place]
        effect = cast("Assertion", cue.value.effect)
        if not place or (effect == "absent" and not cue.value.negated):
            return effect, cue.value.strength
        before = [one for one in cues[:place] if one.last <= cue.first]
        if effect in ("historical", "present") and any(
            one.value.effect == "absent" and 0 <= cue.first - one.last <= (effect == "present")
            for one in before
        ):
            # "Resolution of prior X", "no interval development of X".
            return None, ""
        if (
            effect == "uncertain"
            and cue.value.direction != "backward"
            and before
            and before[-1].value.effect == "hypothetical"
            and cue.first - before[-1].last <= _REACH_OF_ASKING
            and "," not in words[before[-1].last : cue.first]
        ):
            # "If there is further concern for X", "rule out possible X".
            return "hypothetical", ""
        if cue.value.negated:
            denied = [one for one in before if one.value.effect not in ("none", "stop", "present")]
            if denied and denied[-1].value.effect == "absent" and denied[-1].value.direction != "backward":
                gap = words[denied[-1].last : cue.first]
                is_broken = any(denied[-1].first <= stop < cue.first for stop in stops)
                has_verb = cue.value.words.split()[0] != "to" and not self._words.verb.isdisjoint(gap)
                if not is_broken and not has_verb and "," not in gap:
                    return cue.value.negated, ""
        return effect, cue.value.strength

    def _settle(
        self,
        tokens: Tokens,
        sentence: tuple[int, int],
        entities: Sequence[Match[ConceptKind]],
        number: int,
        judgment: Judgment,
        denied: Set[int],
    ) -> Judgment:
        of, words, entity = self._words, tokens.words, entities[number]
        assertion = judgment.assertion
        is_question = words[sentence[1] - 1] == "?"
        if assertion == "absent" and denied and self._is_presupposed(words, sentence, entity.first, denied):
            return Judgment("present", "", judgment.basis)
        if assertion == "hypothetical" or (assertion == "absent" and not is_question):
            return judgment
        if entity.value in ("procedure", "device") and assertion == "historical":
            # What was done or put in stays to be seen, unless the history tells of it.
            is_told = any(word in of.history for word in words[sentence[0] : entity.first])
            return judgment if is_told else Judgment("present", "", judgment.basis)
        if (
            entity.value == "event"
            and assertion in ("present", "uncertain")
            and not of.event_cause.isdisjoint(words[max(sentence[0], entity.first - 3) : entity.first])
        ):
            return Judgment("historical", "", judgment.basis)
        if is_question and assertion in ("present", "historical", "absent"):
            return Judgment("hypothetical", "", judgment.basis)
        if assertion in ("present", "historical") and self._is_dated(words, entity.last, sentence[1]):
            return Judgment("historical", "", judgment.basis)
        if (
            assertion == "present"
            and number
            and entities[number - 1].value == "procedure"
            and words[entities[number - 1].last] in of.purpose
            and entity.first - entities[number - 1].last <= 3
        ):
            # What an operation was done for is no more.
            return Judgment("historical", "", judgment.basis)
        if (
            assertion == "uncertain"
            and words[sentence[0]] in of.asked
            and words[sentence[0]] != "?"
            and "," not in words[sentence[0] : sentence[1]]
            and of.verb.isdisjoint(words[sentence[0] : sentence[1]])
            and entity.first - sentence[0] <= 4
        ):
            # A sentence that is nothing but "Suspected X." is what was asked, not what was seen.
            return Judgment("hypothetical", "", judgment.basis)
        return judgment

    def _is_presupposed(
        self, words: Sequence[str], sentence: tuple[int, int], first: int, denied: Set[int]
    ) -> bool:
        """Whether a finding is denied only to have changed: "no worsening edema".

        A denied change denies no finding, whatever the form of its word: a noun ("no increase in", which
        `meant` leaves out), or a participle or comparative before the finding ("no worsening", "no worsened",
        "no signs of worse"). The denial must speak of the change itself: what may not be new is denied ("no
        new or worsening X"), and so is a later item of a list ("no X or worsening Y"). Words of a finding's
        own name are no change ("no increased density"), nor are adjectives of its kind ("progressive").
        """
        of = self._words
        for place in range(first - 1, max(sentence[0], first - _REACH_OF_ALTERATION) - 1, -1):
            if words[place] in of.alteration:
                change = Match(place, place + 1, None)
                return qualified(words, change, sentence, denied, of) == "denied"
            if words[place] in of.not_attributive or words[place] in of.list:
                break
        return False

    def _is_dated(self, words: Sequence[str], first: int, last: int) -> bool:
        """Whether a year follows: "in 2019"."""
        for number in range(first, min(first + 4, last - 1)):
            year = words[number + 1]
            if (
                words[number] in self._words.dating
                and len(year) == 4
                and year[:2] in ("19", "20")
                and year.isdigit()
            ):
                return True
            if words[number] in self._words.verb or words[number] == ",":
                return False
        return False

    def _forward(
        self,
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
        if cue.value.effect == "hypothetical" or cue.value.words in self._words.enumerating:
            # What is asked or warned of stays so until the end of the sentence.
            return [
                (number, len(_outside(tokens.words, cue.last, entities[number].first))) for number in numbers
            ]
        if not numbers or not self._reaches(tokens.words, cue, entities[numbers[0]]):
            return []
        reached = [numbers[0]]
        for number in numbers[1:]:
            if not joined[number - 1]:
                break
            reached.append(number)
        first = len(_outside(tokens.words, cue.last, entities[numbers[0]].first))
        # The distance of a list is that of its first item: a cue inside a list does not take other items.
        return [(number, first + (number != reached[0])) for number in reached]

    def _reaches(self, words: Sequence[str], cue: Match[Cue], entity: Match[ConceptKind]) -> bool:
        of = self._words
        gap = [words[number] for number in _outside(words, cue.last, entity.first)]
        if gap[:1] == [":"] and cue.value.effect == "absent":
            # "No: X, Y", "negative for: X".
            gap = gap[1:]
        if len(gap) > _REACH or ":" in gap:
            return False
        if "," in gap:
            # A comma before the first finding is a list of adjectives or places, or ends the thought.
            tail = gap[len(gap) - gap[::-1].index(",") :]
            if cue.value.direction == "both" or not self._own.isdisjoint(tail) or gap[0] == ",":
                return False
            if (of.closing | of.adding).isdisjoint(gap):
                return cue.value.effect == "absent" and of.verb.isdisjoint(gap)
        return cue.value.effect in ("uncertain", "hypothetical") or of.verb.isdisjoint(gap)

    def _backward(
        self,
        tokens: Tokens,
        cue: Match[Cue],
        entities: Sequence[Match[ConceptKind]],
        stops: Sequence[int],
        joined: Sequence[bool],
    ) -> list[tuple[int, int]]:
        begin = max((stop for stop in stops if stop < cue.first), default=-1)
        numbers = [
            number for number, one in enumerate(entities) if begin < one.first and one.last <= cue.first
        ]
        if not numbers:
            return []
        nearest = numbers[-1]
        distance = len(_outside(tokens.words, entities[nearest].last, cue.first))
        if distance > _REACH_BACK:
            return []
        if cue.value.words in self._words.adjoining and (
            distance or entities[nearest].value in ("device", "procedure")
        ):
            # "A nodule; the heart is normal". A normal device is there.
            return []
        if (
            cue.value.direction == "both"
            and cue.value.words not in self._words.versus
            and self._words.resolving.isdisjoint(tokens.words[cue.first : cue.last])
            and tokens.words[cue.first - 1] == ","
            and tokens.words[cue.last : cue.last + 1] not in ([], ["."], [","], [";"])
        ):
            # "X, possibly Y": it speaks of Y, whatever that is.
            return []
        reached = [nearest]
        is_closed = False
        for number in reversed(numbers[:-1]):
            gap = tokens.words[entities[number].last : entities[number + 1].first]
            is_closed = is_closed or not self._joints.isdisjoint(gap)
            if not joined[number] or (
                "," in gap
                and not is_closed
                and self._is_of_nearest(
                    tokens.words,
                    cue,
                    entities,
                    number,
                    is_pair=numbers[-2:] == [number, nearest] and not (number and joined[number - 1]),
                )
            ):
                break
            reached.append(number)
        return [(number, distance if number == nearest else distance + 1) for number in reached]

    def _is_of_nearest(
        self,
        words: Sequence[str],
        cue: Match[Cue],
        entities: Sequence[Match[ConceptKind]],
        number: int,
        *,
        is_pair: bool,
    ) -> bool:
        """Whether a cue behind "X, Y" speaks of Y alone: "X, Y resolved", "small X, Y is not seen".

        Without "and", a participle that resolves, alone or with a verb in the singular, is said of one
        finding, and so is a doubt with one; the first of two with an adjective of its own is a statement. A
        verb in the plural speaks of both.
        """
        of = self._words
        before = max(one.last for one in entities if one.last <= cue.first)
        said = words[before : cue.last]
        if not of.plural.isdisjoint(said):
            return False
        is_singular, is_resolved = not of.singular.isdisjoint(said), not of.resolving.isdisjoint(said)
        if is_resolved and (is_singular or cue.value.direction == "both"):
            return True
        if is_singular and cue.value.effect != "absent":
            return True
        begin = entities[number - 1].last if number else 0
        for place in range(entities[number].first - 1, begin - 1, -1):
            word = words[place]
            if word in of.list or word in of.not_attributive:
                break
            if (word in self._own or word in of.severity) and not (
                word in of.sides or word in of.determiner or of.changes.get(word) == "new"
            ):
                return is_pair
        return False
