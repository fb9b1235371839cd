"""Explicit mentions of images: "series 3, image 45", "se 3 im 45-47", "(5:104)", "image 45 of series 3".

Numbers are SeriesNumber and InstanceNumber (of a multi-frame image: the frame's) as the report gives them;
nothing is looked up here. Mentions of another examination, which the words around them reveal, are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardflow.reports.image_numbers import Atom, find_atoms
from shardflow.reports.lexicon import tokenize

_EXAM = (
    r"(?:examinations?|exams?|study|studies|scans?|ct|cta|pet|mri?|mra|ultrasound|us|radiographs?|x-?rays?|films?|"
    r"imaging|comparison|mammograms?|report|angiograms?|images?)"
)
_OTHER = (
    r"(?:prior|previous|earlier|outside|old|older|preceding|comparison|last|remote|baseline|referring|initial|"
    r"preoperative|historical|external|former|recent|same[\s-]day)"
)
_MONTH = (
    r"(?:january|february|march|april|may|june|july|august|september|october|november|december|"
    r"jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)"
)
_YEAR = r"(?:19|20)\d\d"
_AGO = r"(?:\w+\s)?\w+\s(?:days?|weeks?|months?|years?)\s(?:ago|earlier|before)"
_WHEN = (
    rf"(?:{_MONTH}\b|{_YEAR}\b|\d{{1,2}}[/.-]\d{{1,2}}|last\b|yesterday\b|{_AGO}|the\s(?:prior|previous)\b)"
)
_DATED = rf"\s(?:of|from|dated|performed|done|obtained)\s(?:on\s)?(?:the\s)?{_WHEN}"
_OTHER_EXAM = (
    rf"(?:\b{_OTHER}\s(?:[\w']+\s){{0,3}}?{_EXAM}\b|\b{_EXAM}(?:\s\w+)?{_DATED}|\blast\s(?:year|month|week)'?s?\b|"
    rf"\byesterday's\b|\b(?:on|at)\sbaseline\b|\b{_YEAR}\s{_EXAM}\b|\boutside\shospital\b)"
)
_THE = r"(?:the\s|an?\s|her\s|his\s|their\s)?(?:patient's\s)?"

# The rest of a sentence that begins so tells of the other examination.
_SETTING = re.compile(
    rf"^[\s\W]*(?:(?:on|in|at|from|per)\s)?{_THE}(?:{_OTHER}\s(?:[\w']+\s){{0,3}}?{_EXAM}|\w*\s?{_EXAM}{_DATED}|"
    rf"outside\shospital(?:\s\w+)?|(?:prior|previous|comparisons?)\s?:|(?:prior|previous)\s?,|in\s{_YEAR}\b|{_AGO}|"
    rf"{_YEAR}\s{_EXAM}|baseline\b|yesterday's\b)",
    re.IGNORECASE,
)
_BE = re.compile(r"\s*(?:is|was|were|are)\b")
_NOW = re.compile(r"\b(?:now|currently|today|today's|current|present\s(?:study|exam\w*))\b", re.IGNORECASE)
# "prior" alone points at an examination only where nothing else follows that is prior ("prior lobectomy").
_CUE = re.compile(
    r"\b(?:previously|formerly|originally|in\sthe\spast|initially|(?:seen|noted|than)\sbefore)\b|"
    rf"\b(?:in|compared\s(?:to|with)|versus|vs\.?)\s(?:{_MONTH}\.?\s)?{_YEAR}(?=\s*[(\[]?\s*$)|"
    r"\b(?:earlier|prior|previous|outside)\b(?=[\s(\[]*(?:$|[,:;.\d(\[]|series|ser\b|se\b|images?|im\b|img\b|was|were|"
    rf"measur|and|on|at|showed))|{_OTHER_EXAM}",
    re.IGNORECASE,
)
_WAS = re.compile(
    r"\b(?:was|were|had been|measured)\s(?:about\s|approximately\s|only\s)?\d[\d.]*(?:\sx\s[\d.]+)?"
    r"\s?(?:mm|cm)\s*[(\[]?\s*(?:on|at|see)?\s*$",
    re.IGNORECASE,
)
_FROM = re.compile(r"\bfrom\s\d[\d.]*(?:\sx\s[\d.]+)?\s?(?:mm|cm)\s*[(\[]?\s*(?:on|at)?\s*$", re.IGNORECASE)
_TO = re.compile(r"\s*[)\]]?\s*to\s", re.IGNORECASE)
_COMPARED = re.compile(
    r"\bcompar(?:ed|ison)\s(?:to|with)\s*(?:the\s)?$|\bwas\s(?:on\s|at\s)?$|"
    r"\b(?:compared\s(?:to|with)|versus|vs\.?)\s\d[\d.]*(?:\sx\s[\d.]+)?\s?(?:mm|cm)\s*[(\[]?\s*(?:on\s|at\s)?$",
    re.IGNORECASE,
)
# What is new since an examination is in this one.
_NEW_SINCE = re.compile(
    r"\b(?:new|not\s\w+)\s(?:(?:from|since|compared\s(?:to|with))\s)?(?:the\s)?$", re.IGNORECASE
)
# Words between a cue and the reference that say nothing of their own.
_SMALL = re.compile(
    r"[\s,(\[:;]*(?:(?:on|at|in|see|seen|as|was|best|it|is|of|axial|coronal|sagittal)[\s,(\[]*)*",
    re.IGNORECASE,
)
_AFTER = re.compile(
    rf"\s*[)\]]?\s*(?:(?:of|on|from|in|at)\s{_THE}(?:\w+\s){{0,2}}?(?:{_OTHER}\b|{_EXAM}(?:\s\w+)?{_DATED}|{_YEAR}\b|"
    rf"\d{{1,2}}[/.-]\d{{1,2}}[/.-]\d{{2,4}}\b|{_MONTH}\b)|"
    r"(?:previously|formerly|in\sthe\spast)\b(?!\s(?:\d|measur|described|seen|noted|report|character|treat|known|biops))|"
    rf"\(prior\)|prior[.,;)]|,\s{_OTHER}\s{_EXAM}\s*[)\].;])",
    re.IGNORECASE,
)
# A finding known from before that this examination shows: "the previously seen nodule on ...".
_KNOWN_BEFORE = re.compile(
    r"previously\s(?:seen|noted|described|reported|identified|demonstrated|characterized|treated|biopsied|known|"
    r"visualized|mentioned)\s(?!on\b|at\b|in\b)",
    re.IGNORECASE,
)


def is_of_another_examination(
    text: str, sentence: tuple[int, int], *, before: int, start: int, end: int, after: int
) -> bool:
    """Judge one reference.

    Args:
        text: The report.
        sentence: Characters of its sentence.
        before: Where the reference before it ends, or the sentence begins.
        start: Where it begins.
        end: Where it ends.
        after: Where the next one begins, or the sentence ends.
    """
    lead, tail, opening = text[before:start], text[end:after], text[sentence[0] : start]
    if _AFTER.match(tail) or (_FROM.search(lead) and _TO.match(tail)):
        return True
    setting = _SETTING.match(opening)
    if setting and not _NOW.search(opening) and not _BE.match(opening, setting.end()):
        return True
    if before > sentence[0]:
        # Words behind the reference before it belong to that one: "image 31 on prior, image 45 on current".
        behind = _AFTER.match(lead)
        lead = lead[behind.end() :] if behind else lead
    if before > sentence[0] and (_WAS.search(lead) or _COMPARED.search(lead)):
        return True
    return _is_led_there(lead)


def _is_led_there(lead: str) -> bool:
    """Whether the words in front of a reference lead to another examination."""
    cues = list(_CUE.finditer(lead))
    if not cues:
        return False
    gap = lead[cues[-1].end() :]
    if (
        _NOW.search(gap)
        or _KNOWN_BEFORE.match(lead, cues[-1].start())
        or _NEW_SINCE.search(lead[: cues[-1].start()])
    ):
        return False
    # Behind a comma a new thought begins, unless the reference itself stands there at once.
    comma = min((gap.index(mark) for mark in ",;" if mark in gap), default=None)
    return comma is None or _SMALL.fullmatch(gap, comma) is not None


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


_OF_SERIES = re.compile(
    r"\s*[)\]]?\s*,?\s*(?:of|on|in|from|at|within)\s+(?:the\s+)?(?:\w+\s+){0,2}$", re.IGNORECASE
)
_NEXT_TO = re.compile(r"\s*[)\]]?\s*[,;:/-]?\s*[(\[]?\s*$")
_GAP_OF_A_PAIR = re.compile(
    r"\s*[)\]]?[,;:/\u2013-]?\s*[(\[]?\s*(?:(?:at|on|the|axial|coronal|sagittal)\s+)*$", re.IGNORECASE
)


def find_mentions(text: str) -> list[Mention]:
    """Return the images and series that a text names, in its order."""
    tokens = tokenize(text)
    found: list[Mention] = []
    for sentence in _sentences(text, tokens.sentences, tokens.starts, tokens.ends):
        atoms = find_atoms(text, *sentence)
        if atoms:
            found += _bind(text, sentence, atoms)
    return found


def _sentences(
    text: str, ranges: list[tuple[int, int]], starts: list[int], ends: list[int]
) -> Iterator[tuple[int, int]]:
    """Give sentences as characters; no semicolon ends one here, nor the full stop of "img. 12"."""
    begin: int | None = None
    for first, last in ranges:
        if begin is None:
            begin = starts[first]
        end = ends[last - 1]
        rest = text[end : end + 3].lstrip()
        if text[end - 1] == ";" or (
            text[end - 1] == "." and rest[:1].isdigit() and _ABBREVIATED.search(text, begin, end)
        ):
            continue
        yield begin, end
        begin = None
    if begin is not None:
        yield begin, ends[-1]


_ABBREVIATED = re.compile(r"\b(?:img|im|ser|se|no|sl)\.$", re.IGNORECASE)


def _bind(text: str, sentence: tuple[int, int], atoms: list[Atom]) -> Iterator[Mention]:
    """Give every image its series, and leave out what belongs to another examination."""
    owners = _owners(text, atoms)
    used = {owner for owner in owners if owner is not None}
    groups = _groups(owners)
    for number, atom in enumerate(atoms):
        if atom.kind == "series" and (number in used or not atom.is_word):
            continue
        members = [other for other in range(len(atoms)) if groups[other] == groups[number]]
        first, last = members[0], members[-1]
        if is_of_another_examination(
            text,
            sentence,
            before=atoms[first - 1].end if first else sentence[0],
            start=atoms[first].start,
            end=atoms[last].end,
            after=atoms[last + 1].start if last + 1 < len(atoms) else sentence[1],
        ):
            continue
        yield from _mentions_of(atom, atoms, owners[number])


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


def _owners(text: str, atoms: list[Atom]) -> list[int | None]:
    """Find the series of each image: "image 45 of series 3", "series 3, image 45", or elsewhere."""
    owners: list[int | None] = [None] * len(atoms)

    def gap(number: int) -> str:
        return text[atoms[number].end : atoms[number + 1].start]

    kinds = [atom.kind for atom in atoms]
    if _is_image_first(text, atoms):
        return [number + 1 if kind == "image" else None for number, kind in enumerate(kinds)]
    for number, kind in enumerate(kinds):
        if kind != "image":
            continue
        has_next = kinds[number + 1 : number + 2] == ["series"]
        if has_next and _OF_SERIES.match(gap(number)):
            owners[number] = number + 1
        elif (
            number
            and kinds[number - 1] == "series"
            and (number - 1) not in owners[:number]
            and _GAP_OF_A_PAIR.match(gap(number - 1))
        ):
            owners[number] = number - 1
        elif has_next and _NEXT_TO.match(gap(number)) and not _begins_a_pair(text, atoms, number + 1):
            owners[number] = number + 1
    for number, kind in enumerate(kinds):
        if kind == "image" and owners[number] is None:
            owners[number] = _far_owner(text, atoms, owners, number)
    return owners


def _far_owner(text: str, atoms: list[Atom], owners: list[int | None], number: int) -> int | None:
    """Find the series of an image that has none beside it."""
    # "image 45 and image 47 of series 3": what a neighbor's series is, is the image's too.
    following = owners[number + 1] if number + 1 < len(atoms) else None
    if following is not None and following > number:
        gap = text[atoms[number].end : atoms[number + 1].start]
        if re.fullmatch(r"[\s,&]*(?:and|or|to|through|-)?\s*(?:from\s)?", gap):
            return following
    places = [other for other, atom in enumerate(atoms) if atom.kind == "series"]
    earlier = [other for other in places if other < number]
    if earlier:
        return earlier[-1]
    return places[0] if places and not _begins_a_pair(text, atoms, places[0]) else None


def _begins_a_pair(text: str, atoms: list[Atom], number: int) -> bool:
    """Whether an image of its own follows a series at once."""
    return (
        number + 1 < len(atoms)
        and atoms[number + 1].kind == "image"
        and _GAP_OF_A_PAIR.match(text[atoms[number].end : atoms[number + 1].start]) is not None
        and not (
            number + 2 < len(atoms)
            and atoms[number + 2].kind == "series"
            and _OF_SERIES.match(text[atoms[number + 1].end : atoms[number + 2].start]) is not None
        )
    )


def _is_image_first(text: str, atoms: list[Atom]) -> bool:
    """Whether every image is followed by its series: "image 3, series 2 and image 7, series 4"."""
    return (
        len(atoms) % 2 == 0
        and all(atom.kind == ("series" if number % 2 else "image") for number, atom in enumerate(atoms))
        and all(
            _NEXT_TO.match(text[image.end : series.start]) or _OF_SERIES.match(text[image.end : series.start])
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
