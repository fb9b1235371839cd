"""Explicit mentions of images: "series 3, image 45", "se 3 im 45-47", "(5:104)", "image 45 of series 3".

Numbers are SeriesNumber and InstanceNumber (of a multi-frame image: the frame's) as the report gives them;
nothing is looked up here. Mentions of another examination, which the words around them reveal, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from shardflow.reports.image_numbers import Atom, find_atoms, number_words
from shardflow.reports.language import ENGLISH, load_language
from shardflow.reports.tokens import Tokens, tokenize


@dataclass(frozen=True, kw_only=True, slots=True)
class _Patterns:
    """Patterns for mentions in one language; those of its table have the names of its pieces."""

    setting: re.Pattern[str]
    """Beginning of a sentence whose rest tells of another examination."""
    be: re.Pattern[str]
    now: re.Pattern[str]
    cue: re.Pattern[str]
    """Words that lead to another examination."""
    was: re.Pattern[str]
    """An earlier size, right before a reference."""
    from_: re.Pattern[str]
    to: re.Pattern[str]
    compared: re.Pattern[str]
    new_since: re.Pattern[str]
    """What is new since an examination is in this one."""
    small: re.Pattern[str]
    """Words between a cue and the reference that say nothing of their own."""
    after: re.Pattern[str]
    known_before: re.Pattern[str]
    """A finding known from before that this examination shows: "the previously seen nodule on ..."."""
    of_series: re.Pattern[str]
    pair_gap: re.Pattern[str]
    joint: re.Pattern[str]
    abbreviated: re.Pattern[str]


@cache
def _patterns(language: str) -> _Patterns:
    compiled = load_language(language).compile
    names = (
        "setting",
        "be",
        "now",
        "cue",
        "was",
        "to",
        "compared",
        "new_since",
        "small",
        "after",
        "known_before",
    )
    return _Patterns(
        **{name: compiled(f"@{name}@") for name in names},
        from_=compiled("@from@"),
        of_series=compiled(r"\s*[)\]]?\s*,?\s*@of_series@\s*$"),
        pair_gap=compiled(r"\s*[)\]]?[,;:/\u2013-]?\s*[(\[]?\s*(?:@pair_gap@\s+)*$"),
        joint=compiled(r"[\s,&]*@joint@?\s*(?:@joint_from@\s)?"),
        abbreviated=compiled(r"\b@abbreviated@\.$"),
    )


def _is_of_another_examination(
    text: str, sentence: tuple[int, int], of: _Patterns, *, before: int, start: int, end: int, after: int
) -> bool:
    """Judge one reference.

    Args:
        text: The report.
        sentence: Characters of its sentence.
        of: Patterns of its language.
        before: Where the reference before it ends, or the sentence begins.
        start: Where it begins.
        end: Where it ends.
        after: Where the next one begins, or the sentence ends.
    """
    lead, tail, opening = text[before:start], text[end:after], text[sentence[0] : start]
    if of.after.match(tail) or (of.from_.search(lead) and of.to.match(tail)):
        return True
    setting = of.setting.match(opening)
    if setting and not of.now.search(opening) and not of.be.match(opening, setting.end()):
        return True
    if before > sentence[0]:
        # Words behind the reference before it belong to that one: "image 31 on prior, image 45 on current".
        behind = of.after.match(lead)
        lead = lead[behind.end() :] if behind else lead
    if before > sentence[0] and (of.was.search(lead) or of.compared.search(lead)):
        return True
    return _is_led_there(lead, of)


def _is_followed_there(gap: str, of: _Patterns) -> bool:
    """Whether the words within a reference lead to another examination: "series 3 of the prior, image 4"."""
    return of.after.match(gap) is not None and of.now.search(gap) is None


def _is_led_there(lead: str, of: _Patterns) -> bool:
    """Whether the words in front of a reference lead to another examination."""
    cues = list(of.cue.finditer(lead))
    if not cues:
        return False
    gap = lead[cues[-1].end() :]
    if (
        of.now.search(gap)
        or of.known_before.match(lead, cues[-1].start())
        or of.new_since.search(lead[: cues[-1].start()])
    ):
        return False
    # Behind a comma a new thought begins, unless the reference itself stands there at once.
    comma = min((gap.index(mark) for mark in ",;" if mark in gap), default=None)
    return comma is None or of.small.fullmatch(gap, comma) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mention:
    """A reference to images of this examination."""

    span: tuple[int, int]
    """Characters of the text, closed-open: the image, or the series where it is meant whole."""
    series: int | None
    """SeriesNumber; None: the report leaves it open."""
    first: int | None
    """First image; None: the whole series."""
    last: int | None
    """Last image, included; of a single image the first one."""
    is_tentative: bool = False
    """Two bare numbers ("LUL, 3/45"): a mention only where that series has that image."""

    def __str__(self) -> str:
        """Write it like ``S3:45-47``; ``?`` a series left open, ``*`` a series as a whole."""
        series = "?" if self.series is None else f"S{self.series}"
        if self.first is None:
            return f"{series}:*"
        return f"{series}:{self.first}" + ("" if self.last == self.first else f"-{self.last}")


_DIGIT = re.compile(r"\d")
_NEXT_TO = re.compile(r"\s*[)\]]?\s*[,;:/-]?\s*[(\[]?\s*$")


def find_mentions(text: str, language: str = ENGLISH) -> list[Mention]:
    """Return the images and series that a text in some language names, in its order."""
    return find_mentions_in(tokenize(text, language), language)


def find_mentions_in(tokens: Tokens, language: str) -> list[Mention]:
    """Return the images and series that a text names that is cut already."""
    of, text = _patterns(language), tokens.text
    found: list[Mention] = []
    # Without a number there is no image; most sentences have none.
    written = number_words(language)
    has_words = written is None or not written.isdisjoint(tokens.words)
    if not has_words and _DIGIT.search(text) is None:
        return found
    for sentence in _sentences(text, tokens.sentences, tokens.starts, tokens.ends, of):
        if not has_words and _DIGIT.search(text, *sentence) is None:
            continue
        atoms = find_atoms(text, *sentence, language)
        if atoms:
            found += _bind(text, sentence, atoms, of)
    return found


def _sentences(
    text: str, ranges: list[tuple[int, int]], starts: list[int], ends: list[int], of: _Patterns
) -> Iterator[tuple[int, int]]:
    """Give sentences as characters; no semicolon ends one here, nor the full stop of "img. 12"."""
    begin: int | None = None
    for first, last in ranges:
        if begin is None:
            begin = starts[first]
        end = ends[last - 1]
        rest = text[end : end + 3].lstrip()
        if text[end - 1] == ";" or (
            text[end - 1] == "." and rest[:1].isdigit() and of.abbreviated.search(text, begin, end)
        ):
            continue
        yield begin, end
        begin = None
    if begin is not None:
        yield begin, ends[-1]


def _bind(text: str, sentence: tuple[int, int], atoms: list[Atom], of: _Patterns) -> Iterator[Mention]:
    """Give every image its series, and leave out what belongs to another examination."""
    atoms = _shared(text, atoms, of)
    owners = _owners(text, atoms, of)
    used = {owner for owner in owners if owner is not None}
    groups = _groups(owners)
    for number, atom in enumerate(atoms):
        if atom.kind == "series" and (number in used or not atom.is_word):
            continue
        members = [other for other in range(len(atoms)) if groups[other] == groups[number]]
        first, last = members[0], members[-1]
        if any(_is_followed_there(text[atoms[one].end : atoms[one + 1].start], of) for one in members[:-1]):
            continue
        if _is_of_another_examination(
            text,
            sentence,
            of,
            before=atoms[first - 1].end if first else sentence[0],
            start=atoms[first].start,
            end=atoms[last].end,
            after=atoms[last + 1].start if last + 1 < len(atoms) else sentence[1],
        ):
            continue
        yield from _mentions_of(atom, atoms, owners[number])


def _shared(text: str, atoms: list[Atom], of: _Patterns) -> list[Atom]:
    """Make one of series that share the image behind them: "series 4 and series 5, image 31"."""
    kept = atoms[-1:]
    for number in range(len(atoms) - 2, -1, -1):
        atom, after = atoms[number], kept[-1]
        has_own = number > 0 and atoms[number - 1].kind == "image"
        if (
            atom.kind == after.kind == "series"
            and not has_own
            and [one.kind for one in kept[-2:-1]] == ["image"]
            and of.joint.fullmatch(text[atom.end : after.start])
            and of.pair_gap.match(text[after.end : kept[-2].start])
        ):
            kept[-1] = replace(after, start=atom.start, numbers=[*atom.numbers, *after.numbers])
        else:
            kept.append(atom)
    return kept[::-1]


def _mentions_of(atom: Atom, atoms: list[Atom], owner: int | None) -> Iterator[Mention]:
    span = (atom.start, atom.end)
    if atom.kind == "series":
        yield from (Mention(span=span, series=one, first=None, last=None) for one in _single_numbers(atom))
        return
    owned: list[int | None] = [atom.series] if owner is None else [*_single_numbers(atoms[owner])]
    for series in owned:
        for first, last in atom.numbers:
            yield Mention(span=span, series=series, first=first, last=last, is_tentative=atom.is_tentative)


def _single_numbers(series: Atom) -> list[int]:
    # A range of series is a handful; a longer one is something else, or a slip of the pen.
    return [one for first, last in series.numbers for one in range(first, min(last, first + 20) + 1)]


def _owners(text: str, atoms: list[Atom], of: _Patterns) -> list[int | None]:
    """Find the series of each image: "image 45 of series 3", "series 3, image 45", or elsewhere."""
    owners: list[int | None] = [None] * len(atoms)

    def gap(number: int) -> str:
        return text[atoms[number].end : atoms[number + 1].start]

    kinds = [atom.kind for atom in atoms]
    if _is_image_first(text, atoms, of):
        return [number + 1 if kind == "image" else None for number, kind in enumerate(kinds)]
    for number, kind in enumerate(kinds):
        if kind != "image":
            continue
        has_next = kinds[number + 1 : number + 2] == ["series"]
        if has_next and of.of_series.match(gap(number)):
            owners[number] = number + 1
        elif (
            number
            and kinds[number - 1] == "series"
            and (number - 1) not in owners[:number]
            and of.pair_gap.match(gap(number - 1))
        ):
            owners[number] = number - 1
        elif has_next and _NEXT_TO.match(gap(number)) and not _begins_a_pair(text, atoms, number + 1, of):
            owners[number] = number + 1
    for number, kind in enumerate(kinds):
        if kind == "image" and owners[number] is None:
            owners[number] = _far_owner(text, atoms, owners, number, of)
    return owners


def _far_owner(
    text: str, atoms: list[Atom], owners: list[int | None], number: int, of: _Patterns
) -> int | None:
    """Find the series of an image that has none beside it."""
    # "image 45 and image 47 of series 3": what a neighbor's series is, is the image's too.
    following = owners[number + 1] if number + 1 < len(atoms) else None
    if following is not None and following > number:
        gap = text[atoms[number].end : atoms[number + 1].start]
        if of.joint.fullmatch(gap):
            return following
    places = [other for other, atom in enumerate(atoms) if atom.kind == "series"]
    earlier = [other for other in places if other < number]
    if earlier:
        return earlier[-1]
    return places[0] if places and not _begins_a_pair(text, atoms, places[0], of) else None


def _begins_a_pair(text: str, atoms: list[Atom], number: int, of: _Patterns) -> bool:
    """Whether an image of its own follows a series at once."""
    return (
        number + 1 < len(atoms)
        and atoms[number + 1].kind == "image"
        and of.pair_gap.match(text[atoms[number].end : atoms[number + 1].start]) is not None
        and not (
            number + 2 < len(atoms)
            and atoms[number + 2].kind == "series"
            and of.of_series.match(text[atoms[number + 1].end : atoms[number + 2].start]) is not None
        )
    )


def _is_image_first(text: str, atoms: list[Atom], of: _Patterns) -> bool:
    """Whether every image is followed by its series: "image 3, series 2 and image 7, series 4"."""
    return (
        len(atoms) % 2 == 0
        and all(atom.kind == ("series" if number % 2 else "image") for number, atom in enumerate(atoms))
        and all(
            _NEXT_TO.match(text[image.end : series.start])
            or of.of_series.match(text[image.end : series.start])
            for image, series in zip(atoms[::2], atoms[1::2], strict=True)
        )
    )


def _groups(owners: list[int | None]) -> list[int]:
    """Number the atoms so that neighbors of which one is the other's series share a number."""
    groups = list(range(len(owners)))
    for number in range(1, len(owners)):
        if owners[number] == number - 1 or owners[number - 1] == number:
            groups[number] = groups[number - 1]
    return groups
