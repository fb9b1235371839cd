"""Words in a report that give numbers of series and images, which belong together is seen later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardflow.reports.numerals import Numbers, read_numbers

__all__ = ["Atom", "find_atoms"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Atom:
    """Words that give numbers: of series, of images, or of both."""

    kind: Literal["image", "pair", "series"]
    start: int
    end: int
    numbers: Numbers
    series: int | None = None
    """Of a pair."""
    is_word: bool = True
    """Written out, not abbreviated."""


_TO = r"\s?[-\u2013]\s?"
_IMAGES = rf"(?P<image>\d{{1,5}})(?:{_TO}(?P<last>\d{{1,5}}))?"
_MARK = r"\s*(?:(?:no|nos|num|number|numbers|are)\b\.?)?\s*[#:=-]?\s*#?\s*"
_KEYWORD = re.compile(
    r"(?:(?P<series>series|seires|sereis|serie|sequence|ser|se)|"
    r"(?P<image>images?|imag|imges?|iamges?|imgaes?|imgs?|ims?|slices?|sl|frames?))(?![^\W\d_])\.?" + _MARK,
    re.IGNORECASE,
)
_COMPACT = (
    # S3I45, s2, i77, S:3 I:44
    re.compile(
        rf"(?:s\s?:?\s?|ser?)(?P<series>\d{{1,5}})\s?[,:;/]?\s?(?:im|i):?\s?{_IMAGES}(?!\w)", re.IGNORECASE
    ),
    re.compile(r"i\s?(?P<image>\d{1,5})\s?s\s?(?P<series>\d{1,5})(?!\w)", re.IGNORECASE),
    # (S4/31); S1 to S5 before a small number are vertebrae
    re.compile(r"(?<=[(\[])s(?P<series>\d{1,5})/(?P<image>(?:[6-9]|\d{2,5}))(?=[)\]])", re.IGNORECASE),
    # se/im 4/52: both names, then both numbers
    re.compile(
        rf"(?:series|ser|se|s)\s?/\s?(?:images?|img|im|i|slice)\b\.?\s?[:#=]?\s?(?P<series>\d{{1,5}})\s?[/:,]\s?{_IMAGES}(?!\w)",
        re.IGNORECASE,
    ),
)
# What may follow the number of a series at once: ":45-47", "/45", ", #45".
_AT_SERIES = re.compile(
    rf"(?:\s?:\s?|\s?,\s?#|/(?!\d+\s*[,;]?\s*(?:im|sl|fr|total))){_IMAGES}(?![\w:/])", re.IGNORECASE
)
_MORE = re.compile(
    rf"(?:\s?(?:,|&|,?\s?and)\s?\d{{1,5}}(?:{_TO}\d{{1,5}})?)+(?=\s*$|\s*[,;.)\]]|\s*(?:and|&)\s*\d+:)"
)

_PAIR = re.compile(
    rf"(?P<series>\d{{1,4}})(?P<mark>[:/])\s?(?P<image>\d{{1,5}})(?:{_TO}(?:(?P=series):)?(?P<last>\d{{1,5}}))?"
    r"(?![\w:/]|\.\d|\s?(?:[ap]\.?m\b|mm\b|cm\b|hours?\b|hrs?\b|days?\b|weeks?\b|%))",
    re.IGNORECASE,
)
_BRACKETS = re.compile(r"[(\[]([^()\[\]]{3,120})[)\]]")
_PLANE_WORDS = "axial|ax|coronal|cor|sagittal|sag|supine|prone|decubitus|arterial|venous|portal|delayed"
_PLANE = rf"(?:(?:{_PLANE_WORDS}|arrow)\s)?"
_ONLY_SLASH_PAIRS = re.compile(
    rf"\s*{_PLANE}\d{{1,4}}/\d{{1,5}}(?:[-\u2013]\d{{1,5}})?"
    rf"(?:\s*(?:,|;|&|and)\s*{_PLANE}\d{{1,4}}/\d{{1,5}})*\s*",
    re.IGNORECASE,
)
_PAIR_LEAD = re.compile(
    rf"(?:^|[,;]|\b(?:and|see|e\.g\.?,?|images?|on|at|{_PLANE_WORDS}|now|currently|prior|previously|was|to|arrow))"
    r"\s*$|&\s*$",
    re.IGNORECASE,
)
# In front of a bracket: what is counted in it is no image.
_NOT_A_PAIR_BEFORE = re.compile(
    r"\b(?:grade|score|scored|strength|pain|scale|power|dated?|ratio|motor|birads|rads|gleason|time|hours|weighting|"
    r"levels?|pressure|visual|acuity|vision|rate|stage|titer|apgar|dilution|diluted|gradient|concentration|t1|t2|at|"
    r"reader|quality|mixture|mixed|epinephrine|bupivacaine|lidocaine|contrast|saline|gadolinium|discussed|"
    r"called|telephone|phone)\s*(?:of|is|was)?\s*$",
    re.IGNORECASE,
)
_SEEN_ON = re.compile(
    r"\b(?:seen|see|visualized|shown|noted|appreciated|identified|measured|depicted|demonstrated|marked)\s(?:(?:on|at)\s)?(?=\d{1,4}:\d)",
    re.IGNORECASE,
)
# Numbers before their word, or without one: "the 4th image", "from 31 to 40 on series 4".
_NUMBER_FIRST = (
    re.compile(r"\b(?P<image>\d{1,5})(?:st|nd|rd|th)\s(?:image|slice|frame)\b", re.IGNORECASE),
    re.compile(
        r"\bfrom\s(?P<image>\d{1,5})\s(?:to|through)\s(?P<last>\d{1,5})(?=\s(?:of|on|in)\s(?:series|ser|se)\b)",
        re.IGNORECASE,
    ),
)
_PLURALS = frozenset(("series", "images", "imgs", "ims", "slices", "frames"))


def find_atoms(text: str, start: int, end: int) -> list[Atom]:
    """Return what gives numbers between two places of a text, in order."""
    pairs = {atom.start: atom for atom in (*_numbers_first(text, start, end), *_pairs(text, start, end))}
    found: list[Atom] = []
    at = start
    while at < end:
        atom = pairs.get(at)
        if (
            atom is None
            and text[at] in "sSiIfF"
            and not (at and (text[at - 1].isalnum() or text[at - 1] == "_"))
        ):
            atoms = _compact(text, at, end) or _keyword(text, at, end)
        else:
            atoms = [atom] if atom is not None else []
        found += atoms
        at = atoms[-1].end if atoms else at + 1
    return found


def _range(match: re.Match[str]) -> Numbers:
    first = int(match["image"])
    last = int(match.groupdict().get("last") or first)
    return [(min(first, last), max(first, last))]


def _compact(text: str, at: int, end: int) -> list[Atom]:
    for pattern in _COMPACT:
        match = pattern.match(text, at, end)
        if match is not None:
            return [
                Atom(
                    kind="pair", start=at, end=match.end(), series=int(match["series"]), numbers=_range(match)
                )
            ]
    return []


def _keyword(text: str, at: int, end: int) -> list[Atom]:
    match = _KEYWORD.match(text, at, end)
    if match is None:
        return []
    is_series = match["series"] is not None
    word = (match["series"] or match["image"]).lower()
    read = read_numbers(text, match.end(), end, is_series=is_series, is_plural=word in _PLURALS)
    if read is None:
        return []
    numbers, stop = read
    if is_series and len(numbers) == 1:
        # The total of "series 3/8" was read with it; a slash may as well stand before the image.
        first_end = re.compile(r"\d+").match(text, match.end(), end)
        pair = _AT_SERIES.match(text, first_end.end(), end) if first_end else None
        if first_end and pair:
            series = numbers[0][0]
            atom = Atom(kind="pair", start=at, end=pair.end(), series=series, numbers=_range(pair))
            return [atom, *_more(text, pair.end(), end, series)]
    is_word = word in ("series", "sequence", "image", "images")
    return [
        Atom(kind="series" if is_series else "image", start=at, end=stop, numbers=numbers, is_word=is_word)
    ]


def _more(text: str, at: int, end: int, series: int) -> Iterator[Atom]:
    """Read further images of a pair: "(3:45, 47 and 50)"."""
    rest = _MORE.match(text, at, end)
    if rest:
        for match in re.compile(_IMAGES).finditer(text, rest.start(), rest.end()):
            yield Atom(
                kind="pair", start=match.start(), end=match.end(), series=series, numbers=_range(match)
            )


def _numbers_first(text: str, start: int, end: int) -> Iterator[Atom]:
    for pattern in _NUMBER_FIRST:
        for match in pattern.finditer(text, start, end):
            yield Atom(kind="image", start=match.start(), end=match.end(), numbers=_range(match))


def _pairs(text: str, start: int, end: int) -> Iterator[Atom]:
    for bracket in _BRACKETS.finditer(text, start, end):
        first, last = bracket.span(1)
        if _NOT_A_PAIR_BEFORE.search(text[max(start, first - 40) : bracket.start()]):
            continue
        for match in _PAIR.finditer(text, first, last):
            # A slash is a fraction or a date as well, unless there is nothing else in the bracket.
            if match["mark"] == "/" and not _ONLY_SLASH_PAIRS.fullmatch(text, first, last):
                continue
            if _PAIR_LEAD.search(text[first : match.start()]):
                series = int(match["series"])
                yield Atom(
                    kind="pair", start=match.start(), end=match.end(), series=series, numbers=_range(match)
                )
                if match["mark"] == ":":
                    yield from _more(text, match.end(), last, series)
    for lead in _SEEN_ON.finditer(text, start, end):
        bare = _PAIR.match(text, lead.end(), end)
        if bare and bare["mark"] == ":":
            yield Atom(
                kind="pair",
                start=bare.start(),
                end=bare.end(),
                series=int(bare["series"]),
                numbers=_range(bare),
            )
