"""Attributes of findings, from the words around them: place, side, severity, size and change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from shardflow.reports.assertion import Cue, qualified
from shardflow.reports.language import Change, Language, Side, load_language
from shardflow.reports.lexicon import Concept
from shardflow.reports.tokens import Match, Tokens

_DIGIT = re.compile(r"\d")
_NUMBER = r"(\d{1,3}(?:@decimal@\d{1,2})?)"
_NEXT = rf"(?:\s?@by@\s?{_NUMBER}(?:\s?(@unit@))?)?"
_SIZE = (
    rf"(?<![\w.,:/-]){_NUMBER}(?:\s?(@unit@))?{_NEXT}{_NEXT}"
    rf"(?:(?:\s?[-\u2013]\s?|\s@size_to@\s){_NUMBER})?[\s-]?(@unit_written@)?(?!\w)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SizePatterns:
    """Patterns for sizes in one language."""

    size: re.Pattern[str]
    is_cm: re.Pattern[str]
    not_now: re.Pattern[str]
    now: re.Pattern[str]
    grown_from: re.Pattern[str]
    into: re.Pattern[str]
    """What joins an earlier and a later size, where it may also join two diameters."""
    distance: re.Pattern[str]
    gap: re.Pattern[str]
    """What separates a size from the finding behind it."""


@cache
def _size_patterns(language: str) -> _SizePatterns:
    compiled = load_language(language).compile
    return _SizePatterns(
        size=compiled(_SIZE),
        is_cm=compiled("@unit_cm@"),
        not_now=compiled(r"\b@size_before@(?:\s+@size_before_more@)*\s*$"),
        now=compiled(r"\b@size_now@\s*$"),
        grown_from=compiled(r"\b@size_from@\s(?:@size_before_more@\.?\s)*$"),
        into=compiled(r"\s?@size_into@\s?"),
        distance=compiled(r"\s*@distance@\b"),
        gap=compiled(r"[,;:(]|\b@size_gap@\b"),
    )


@cache
def _level(language: str) -> re.Pattern[str]:
    return load_language(language).compile("@level@")


@dataclass(kw_only=True, slots=True, eq=False)
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
    denied: Set[int] = frozenset()
    """Tokens of cues that deny, a change perhaps."""
    sides: list[tuple[int, int, Side]] = field(init=False)
    """Tokens and sides of the sentence's words and places that name one."""
    has_severity: bool = field(init=False)
    """Whether any word of the sentence names a severity."""
    _windows: dict[int, tuple[int, int, int]] = field(init=False, default_factory=dict)
    _phrases: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        words = self.tokens.words[slice(*self.sentence)]
        self.sides = [(one.first, one.last, one.value.side) for one in self.places if one.value.side]
        sides, following = self.of.sides, self.of.no_side_before
        if not sides.keys().isdisjoint(words):
            self.sides += [
                (number, number + 1, sides[word])
                for number, word in enumerate(words, self.sentence[0])
                if word in sides
                and following.isdisjoint(self.tokens.words[number + 1 : number + 2])
                and (len(word) > 1 or self._is_letter_of_side(number))
            ]
        self.has_severity = not self.of.severity.isdisjoint(words)

    def _is_letter_of_side(self, number: int) -> bool:
        """Whether a letter is a side: not in "3 L", "L 4", "r/o" or "Dr. L Smith"."""
        words, first = self.tokens.words, self.sentence[0]
        before, after = words[max(0, number - 1) : number], words[number + 1 : number + 2]
        titles = words[max(first, number - 2) : number] if before == ["."] else before
        return (
            self.of.title.isdisjoint(titles)
            and not any(cue.first <= number < cue.last for cue in self.cues)
            and not any(word[0].isdigit() or word == "/" for word in before)
            and not any(word.isdigit() or word == "/" for word in after)
        )

    def window(self, number: int) -> tuple[int, int, int]:
        """Return where a finding's own words may stand: tokens (begin, end of its list's last, end)."""
        window = self._windows.get(number)
        if window is None:
            window = self._windows[number] = self._window(number)
        return window

    def phrase(self, number: int) -> int:
        """Return the token that a finding's noun phrase begins at, adjectives and determiner included."""
        phrase = self._phrases.get(number)
        if phrase is None:
            phrase = self._phrases[number] = self._phrase(number)
        return phrase

    def _window(self, number: int) -> tuple[int, int, int]:
        words, of = self.tokens.words, self.of
        before = self.entities[number - 1].last if number else self.sentence[0]
        last = number
        while last < len(self.joined) and self.joined[last]:
            # What stands behind an item of a list is its own: "nodule on the right and cyst on the left".
            if number == last and any(
                word in of.placing for word in words[self.entities[last].last : self.entities[last + 1].first]
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

    def _phrase(self, number: int) -> int:
        words, of = self.tokens.words, self.of
        begin = self.entities[number - 1].last if number else self.sentence[0]
        near, has_side = self.entities[number].first, False
        while near > begin:
            word = words[near - 1]
            if word in of.adding or word in of.closing:
                # "Left and right effusions" is one phrase, "right cyst and left nodule" are two.
                if not (has_side and near - 2 >= begin and self._has_side(near - 2)):
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
            has_side = has_side or self._has_side(near - 1)
            near -= 1
        return near

    def _has_side(self, number: int) -> bool:
        """Whether a token is of a word or place that names a side."""
        return self.tokens.words[number] in self.of.sides or any(
            first <= number < last for first, last, _ in self.sides
        )


def find_levels(tokens: Tokens, of: Language) -> Iterator[Match[Concept]]:
    """Find vertebral levels (T8, L3-L4, L4 on L5, L4 to S1)."""
    number, words = 0, tokens.words
    levels = [place for place, word in enumerate(words) if word[-1].isdigit() and _is_level(words, place, of)]
    for place in levels:
        if place < number:
            continue
        last = place + 1
        while last in levels or (
            words[last : last + 1] and words[last] in of.level_link and last + 1 in levels
        ):
            last += 1
        yield Match(place, last, Concept(name=" ".join(words[place:last]), kind="anatomy", parent="spine"))
        number = last


def _is_level(words: Sequence[str], number: int, of: Language) -> bool:
    word = words[number]
    if not _level(of.name).fullmatch(word):
        return False
    # T1 and T2 are weightings too; S3 may be a series.
    after = words[number + 1 : number + 2]
    return not (word in ("t1", "t2") and after and after[0] in of.weighting)


def place_of(clause: Clause, number: int) -> Match[Concept] | None:
    """Return the anatomical name of the place that a finding lies in; None where none is said.

    First what follows it ("nodule in the right upper lobe"), then what stands right before it
    ("rib fracture"), then what its sentence began with ("the spleen is enlarged").
    """
    entity, words = clause.entities[number], clause.tokens.words
    after: list[Match[Concept]] = []
    earlier: list[Match[Concept]] = []
    if clause.places:
        begin, behind, end = clause.window(number)
        after = [place for place in clause.places if behind <= place.first and place.last <= end]
        for place in after:
            before = words[max(behind, place.first - 4) : place.first]
            if place.first == behind or not clause.of.preposition.isdisjoint(before):
                return place
        earlier = [place for place in clause.places if begin <= place.first and place.last <= entity.first]
        for place in reversed(earlier):
            if _is_attribute(clause, place.last, entity.first):
                return place
    for place in clause.inner:
        if entity.first <= place.first and place.last <= entity.last:
            return place
    if after:
        return after[0]
    return earlier[-1] if earlier and number == 0 else None


def _is_attribute(clause: Clause, first: int, last: int) -> bool:
    gap, of = clause.tokens.words[first:last], clause.of
    if not of.adding.isdisjoint(gap[:-1]):
        # "At the right base and a small left X" are two places.
        return False
    return (
        len(gap) <= 5 and "," not in gap and of.preposition.isdisjoint(gap) and of.place_verb.isdisjoint(gap)
    )


def side_of(clause: Clause, number: int) -> Side:
    """Return the side a finding is said to be on."""
    if not clause.sides:
        return ""
    entity = clause.entities[number]
    begin, behind, end = clause.window(number)
    near = clause.phrase(number)
    found = _sides(clause, near, entity.first) | _sides(clause, entity.first, entity.last)
    found = found or _sides(clause, behind, end)
    if not found and number == 0:
        # What stands before an earlier finding is said of that one.
        found = _sides(clause, begin, near)
    return "B" if len(found) > 1 else found.pop() if found else ""


def _sides(clause: Clause, first: int, last: int) -> set[Side]:
    return {side for start, end, side in clause.sides if first <= start and end <= last}


def severity_of(clause: Clause, number: int) -> str:
    """Return the word for a finding's severity, or nothing."""
    if not clause.has_severity:
        return ""
    entity, words = clause.entities[number], clause.tokens.words
    _, behind, end = clause.window(number)
    for place in range(entity.first - 1, clause.phrase(number) - 1, -1):
        if words[place] in clause.of.severity:
            return _written(clause.tokens, place)
    for place in range(behind, end):
        if words[place] in clause.of.severity:
            return _written(clause.tokens, place)
    return ""


def _written(tokens: Tokens, place: int) -> str:
    return tokens.text[tokens.starts[place] : tokens.ends[place]].lower()


_CHANGE_REACH = 6
"""Words between a finding and its change."""


def _compared(clause: Clause, change: Match[Change]) -> int | None:
    """Return the end of a comparison of sides: "larger than on the left", "X, worse on the left"."""
    words, of = clause.tokens.words[: clause.sentence[1]], clause.of
    if change.value not in ("better", "worse"):
        return None
    side = _side_behind(words, change.last, of)
    is_placed = side is not None and words[change.last] in of.placing
    behind = change.last if side is None else side + 1
    if not of.than.isdisjoint(words[behind : behind + 1]):
        other = _side_behind(words, behind + 1, of) if side is None or is_placed else None
        return None if other is None else other + 1
    # "The X is worse on the left" is a change, and so is "X, worse in the left lower lobe".
    is_apart = words[change.first - 1] in (",", "(") and of.not_attributive.union([")"]).issuperset(
        words[behind : behind + 1]
    )
    return behind if is_placed and is_apart else None


def _side_behind(words: Sequence[str], first: int, of: Language) -> int | None:
    """Return the token of a side behind "the", "on the" or "that on the"."""
    for number in range(first, min(first + 4, len(words))):
        word = words[number]
        if word in of.sides:
            return number
        if word in of.verb or word in of.list or not (word in of.determiner or word in of.not_attributive):
            break
    return None


def change_of(clause: Clause, number: int) -> Change:
    """Return how a finding has changed: what is said right before it or its list, else behind it."""
    if not clause.changes:
        return ""
    words = clause.tokens.words
    _, behind, end = clause.window(number)
    compared = {change: _compared(clause, change) for change in clause.changes}
    changes = [change for change in clause.changes if compared[change] is None]
    first = number
    while first and clause.joined[first - 1]:
        first -= 1
    for start in dict.fromkeys((clause.entities[number].first, clause.entities[first].first)):
        for change in reversed(changes):
            if change.last <= start and _precedes(clause, change, start):
                is_inside = all(
                    one.last <= change.first or start <= one.first for one in clause.entities
                ) and not any(change.last <= one.first and one.last <= start for one in clause.entities)
                if is_inside:
                    return _as_qualified(clause, change)
            if change.last <= start and len(words[change.last : start]) <= _CHANGE_REACH:
                break
    for change, last in compared.items():
        if last is not None:
            if behind <= change.first and words[last : last + 1] == [","]:
                # "X, right larger than left, is worse".
                behind = last
        elif (
            behind <= change.first
            and change.last <= end
            and change.first - behind <= 2 * _CHANGE_REACH
            and _follows(clause, change, behind)
            and not _is_of_next(clause, change, number)
        ):
            return _as_qualified(clause, change)
    return ""


def _precedes(clause: Clause, change: Match[Change], start: int) -> bool:
    """Whether a change may be said of the finding at a token behind it: "new 1.2 x 0.9 cm left apical X"."""
    of, gap = clause.of, clause.tokens.words[change.last : start]
    if len(gap) > _CHANGE_REACH:
        sized = max((place for place, word in enumerate(gap) if word[0].isdigit()), default=-1)
        if len(gap) - 1 - (sized + 1) > _CHANGE_REACH:
            return False
    return not any(word in (",", ":") or word in of.verb or word in of.adding for word in gap)


def _follows(clause: Clause, change: Match[Change], behind: int) -> bool:
    """Whether a change may be said of the finding before it: "X in the left base, 12 mm, stable".

    Behind a comma, only places and sizes may stand between, and no anatomy that it describes may follow.
    """
    words, of = clause.tokens.words, clause.of
    gap = words[behind : change.first]
    if "," not in gap[1:]:
        return True
    while gap and gap[-1] in of.degree:
        gap = gap[:-1]
    if gap[-1:] != [","] or not of.verb.isdisjoint(gap):
        return False
    if any(change.last <= place.first for place in clause.places) and (
        words[change.last] not in of.not_attributive
    ):
        # "X in the left base, stable mediastinal contour".
        return False
    commas = [place for place, word in enumerate(gap) if word == ","]
    return all(
        gap[first + 1] in of.placing or any(word[0].isdigit() for word in gap[first:last])
        for first, last in pairwise(commas)
    )


def _is_of_next(clause: Clause, change: Match[Change], number: int) -> bool:
    """Whether a change is said of the finding behind it: "X with decrease in size of the Y"."""
    words, of = clause.tokens.words, clause.of
    while number < len(clause.joined) and clause.joined[number]:
        number += 1
    if number + 1 == len(clause.entities):
        return False
    start = clause.entities[number + 1].first
    return (
        change.last < start
        and (words[change.last - 1] in of.preposition or words[change.last] in of.preposition)
        and (of.breaks_list - of.placing).isdisjoint(words[change.last : start])
        and _precedes(clause, change, start)
    )


def _as_qualified(clause: Clause, change: Match[Change]) -> Change:
    """Return what a change says with the words around it."""
    words, of = clause.tokens.words, clause.of
    if not of.than.isdisjoint(words[change.last : change.last + 1]) and any(
        word[0].isdigit() for word in words[change.last + 1 : change.last + 2]
    ):
        return ""
    qualifier = qualified(words, change, clause.sentence, clause.denied, of)
    if qualifier == "almost" and change.value == "resolved":
        return "better"
    if qualifier == "denied" and change.value != "stable":
        return "" if change.value == "resolved" else "stable"
    return change.value


def sizes_of(clause: Clause) -> dict[int, tuple[float, ...]]:
    """Return the sizes in mm of the findings that have one, by their numbers in the clause."""
    tokens, of = clause.tokens, _size_patterns(clause.of.name)
    found: dict[int, tuple[float, ...]] = {}
    first, last = clause.sentence
    text_start, text_end = tokens.starts[first], tokens.ends[last - 1]
    if _DIGIT.search(tokens.text, text_start, text_end) is None:
        return found
    for found_size in of.size.finditer(tokens.text, text_start, text_end):
        before = tokens.text[max(text_start, found_size.start() - 60) : found_size.start()]
        has_grown = of.grown_from.search(before) is not None
        match = _later(found_size, of) if has_grown else found_size
        size = _millimeters(match, of)
        if size is None or of.distance.match(tokens.text, match.end(), text_end):
            continue
        if of.not_now.search(before) and not (has_grown and _is_spoken_span(found_size)):
            continue
        owner = _owner(clause, match.start(), match.end())
        if owner is not None and (owner not in found or of.now.search(before)):
            found[owner] = size
    return found


def sized(tokens: Tokens, language: str) -> set[int]:
    """Return the tokens of a text's sizes."""
    of = _size_patterns(language)
    found = [match.span() for match in of.size.finditer(tokens.text) if _millimeters(match, of)]
    return {
        number
        for first, last in found
        for number in range(len(tokens))
        if first <= tokens.starts[number] and tokens.ends[number] <= last
    }


def _later(match: re.Match[str], of: _SizePatterns) -> re.Match[str]:
    """Return the second of the sizes in "von 6 auf 8 mm", which without "von" would be two diameters."""
    for number in (3, 5):
        end = max(match.end(number - 2), match.end(number - 1))
        if match.group(number) and of.into.fullmatch(match.string, end, match.start(number)):
            return of.size.match(match.string, match.start(number), match.endpos) or match
    return match


def _is_spoken_span(match: re.Match[str]) -> bool:
    """Whether a word says the span: the later size is in "from 6 to 8 mm", and not in "from 6-8 mm"."""
    if match.group(7) is None:
        return False
    end = max(match.end(number) for number in range(1, 7))
    return any(letter.isalpha() for letter in match.string[end : match.start(7)])


def _millimeters(match: re.Match[str], of: _SizePatterns) -> tuple[float, ...] | None:
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
        round(float(number.replace(",", ".")) * (10 if of.is_cm.fullmatch(unit or last_unit) else 1), 2)
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
            gap = tokens.text[end : tokens.starts[entity.first]]
            if not _size_patterns(clause.of.name).gap.search(gap):
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
