"""Numbers of series and images in a text: single ones, ranges and lists, without what only looks like them.

`mentions` decides later which of them belong together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from shardflow.reports.language import ENGLISH, load_language
from shardflow.reports.tokens import fold_words

Numbers = list[tuple[int, int]]
"""Closed ranges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Patterns:
    """Patterns for numbers of series and images in one language."""

    words: Mapping[str, int]
    """Numbers written as words."""
    plurals: frozenset[str]
    whole: frozenset[str]
    """Names of series and images that are written out."""
    number: re.Pattern[str]
    range: re.Pattern[str]
    next: re.Pattern[str]
    total: re.Pattern[str]
    unit: re.Pattern[str]
    """Behind a measure, a count or a date."""
    follower: re.Pattern[str]
    between: re.Pattern[str]
    between_and: re.Pattern[str]
    listed: re.Pattern[str]
    series_before: re.Pattern[str]
    keyword: re.Pattern[str]
    at_series: re.Pattern[str]
    """What may follow the number of a series at once: ":45-47", "/45", ", #45"."""
    more: re.Pattern[str]
    only_slash_pairs: re.Pattern[str]
    pair_lead: re.Pattern[str]
    no_pair: re.Pattern[str]
    """In front of a bracket: what is counted in it is no image."""
    seen_on: re.Pattern[str]
    number_first: tuple[re.Pattern[str], ...]
    """Numbers before their word, or without one: "the 4th image", "from 31 to 40 on series 4"."""
    compact: tuple[re.Pattern[str], ...]
    bare_pair: re.Pattern[str]
    initial: re.Pattern[str]
    hint: re.Pattern[str]
    """Most sentences have no number, or none that could be an image's."""


_TO = r"\s?[-\u2013]\s?"
_IMAGES = rf"(?P<image>\d{{1,5}})(?:{_TO}(?P<last>\d{{1,5}}))?"
_COMPACT = (
    # S3I45, s2, i77, S:3 I:44
    rf"(?:s\s?:?\s?|ser?)(?P<series>\d{{1,5}})\s?[,:;/]?\s?@image_letter@:?\s?{_IMAGES}(?!\w)",
    r"i\s?(?P<image>\d{1,5})\s?s\s?(?P<series>\d{1,5})(?!\w)",
    # (S4/31); S1 to S5 before a small number are vertebrae
    r"(?<=[(\[])s(?P<series>\d{1,5})/(?P<image>(?:[6-9]|\d{2,5}))(?=[)\]])",
    # se/im 4/52: both names, then both numbers
    (
        rf"(?:series|ser|se|s)\s?/\s?(?:images?|img|im|i|slice)\b\.?\s?[:#=]?\s?(?P<series>\d{{1,5}})"
        rf"\s?[/:,]\s?{_IMAGES}(?!\w)"
    ),
)
"""Forms of consoles, in reports of any language."""


@cache
def _patterns(language: str) -> _Patterns:
    of = load_language(language)
    compiled = of.compile
    words = of.pieces["numbers"].split("|") if "numbers" in of.pieces else []
    written = "|".join(sorted(words, reverse=True)) or "(?!)"
    plane = r"(?:(?:@plane@|arrow)\s)?"
    pair = rf"{plane}\d{{1,4}}/\d{{1,5}}"
    return _Patterns(
        words={word: value for value, word in enumerate(words, start=1)},
        plurals=frozenset(of.pieces["plural"].split("|")),
        whole=frozenset(of.pieces["whole"].split("|")),
        number=compiled(rf"#?\s?(?:(?P<digits>\d{{1,5}})(?!\d|\.\d|[a-zA-Z])|(?P<word>{written})\b)"),
        range=compiled(
            r"\s*(?:-|\u2013|\u2014|@range_word@)\s*(?:(?P<image>@range_image@)\s*)?(?=#?\d|[^\W_])"
        ),
        next=compiled(r"\s*(?:,?\s*@next_word@\s*|,\s*|/\s*)(?=#?\d)"),
        total=compiled(r"\s*@total@\d{1,5}(?![\d:.])\s*@total_what@?"),
        unit=compiled(r"\s?-?\s?@counted@\b|\s?[%\u00d7\u00b0]|/\d+/\d"),
        follower=compiled(r"\s*(?:$|[.,;:)\]&?!]|@follower@\b|[-\u2013])"),
        between=compiled("@between@$"),
        between_and=compiled("@between_and@(?P<image>(?!.))?"),
        listed=compiled(r"(?:\s*,\s*\d{1,4})*\s*,?\s*(?:@and@|&)\s*\d{1,4}(?!\s?@unit@)"),
        series_before=compiled("@series_before@$"),
        keyword=compiled(
            r"(?:(?P<series>@series_word@)|(?P<image>@image_word@))(?![^\W\d_])\.?"
            r"\s*@numbered@?\s*[#:=-]?\s*#?\s*"
        ),
        at_series=compiled(rf"(?:\s?:\s?|\s?,\s?#|/(?!\d+\s*[,;]?\s*@short_total@)){_IMAGES}(?![\w:/])"),
        more=compiled(
            rf"(?:\s?(?:,|&|,?\s?@and@)\s?\d{{1,5}}(?:{_TO}\d{{1,5}})?)+"
            r"(?=\s*$|\s*[,;.)\]]|\s*(?:@and@|&)\s*\d+:)"
        ),
        only_slash_pairs=compiled(rf"\s*{pair}(?:[-\u2013]\d{{1,5}})?(?:\s*(?:,|;|&|@and@)\s*{pair})*\s*"),
        pair_lead=compiled(r"(?:^|[,;]|\b(?:@pair_lead@|@plane@))\s*$|&\s*$"),
        no_pair=compiled(r"\b@no_pair@\s*@no_pair_more@?\s*$"),
        seen_on=compiled(r"@seen_on@(?=\d{1,4}:\d)"),
        number_first=tuple(
            compiled(f"@{name}@") for name in ("series_first", "image_first", "image_first_range")
        ),
        compact=tuple(map(compiled, _COMPACT)),
        bare_pair=compiled(r"(?<=[^\W\d_],\s)(?P<series>\d{1,3})/(?P<image>\d{2,4})(?=\s*(?:[.;)\]]|$|,\s))"),
        initial=compiled("@initials@"),
        hint=compiled(r"\d\s?[:/-]\s?\d|[(\[]|@hint@"),
    )


@cache
def number_words(language: str) -> frozenset[str] | None:
    """Return the tokens that written numbers begin with; None where words are not told apart."""
    of = load_language(language)
    if not of.is_spaced:
        return None
    return frozenset(fold_words(word, language)[0] for word in _patterns(language).words)


_PAIR = re.compile(
    rf"(?P<series>\d{{1,4}})(?P<mark>[:/])\s?(?P<image>\d{{1,5}})(?:{_TO}(?:(?P=series):)?(?P<last>\d{{1,5}}))?"
    r"(?![\w:/]|\.\d|\s?(?:[ap]\.?m\b|mm\b|cm\b|hours?\b|hrs?\b|days?\b|weeks?\b|%))",
    re.IGNORECASE,
)
_BRACKETS = re.compile(r"[(\[]([^()\[\]]{3,120})[)\]]")
# "(3-45)", and behind the comma of a place: "LUL, 3/45." No day of a month, no range of sizes.
_HYPHEN_PAIR = re.compile(r"[(\[](?P<series>\d{1,3})-(?P<image>\d{2,4})[)\]]")
_LAST_DAY = 31


def _read_numbers(
    text: str, start: int, end: int, of: _Patterns, *, is_series: bool, is_plural: bool
) -> tuple[Numbers, int] | None:
    """Read the numbers that stand at a place.

    Args:
        text: The report.
        start: Where the first number must begin.
        end: Where reading ends.
        of: Patterns of its language.
        is_series: The numbers are of series: a comma is a list only before its last "and".
        is_plural: The word before was a plural; a list is likely then.

    Returns:
        The numbers and where they end; None: there are none.
    """
    first = _read_one(text, start, end, of, is_series=is_series)
    if first is None:
        return None
    numbers, at = [first[0]], first[1]
    while True:
        following = of.next.match(text, at, end)
        if following is None:
            break
        item = _read_one(text, following.end(), end, of, is_series=is_series)
        if item is None:
            break
        mark = following.group().strip()
        if mark == "/":
            # 45/47 are two images, 33/120 is one of 120; without a plural only close ones are two.
            near = (
                0 < item[0][0] - numbers[-1][1] <= 3 and not is_series and _has_series_before(text, start, of)
            )
            if not near:
                break
        elif not _may_follow(text, item, end, mark, of, is_series=is_series, is_plural=is_plural):
            break
        numbers.append(item[0])
        at = item[1]
    total = of.total.match(text, at, end)
    if total and not of.unit.match(text, total.end(), end):
        at = total.end()
    return numbers, at


def _may_follow(
    text: str,
    item: tuple[tuple[int, int], int],
    end: int,
    mark: str,
    of: _Patterns,
    *,
    is_series: bool,
    is_plural: bool,
) -> bool:
    if is_series and mark == ",":
        # "series 3, 5 and 7" is a list; "series 3, 45" is not known to be one.
        return of.listed.match(text, item[1], end) is not None
    return is_plural or of.follower.match(text[item[1] : end]) is not None


def _has_series_before(text: str, start: int, of: _Patterns) -> bool:
    return of.series_before.search(text[max(0, start - 40) : start]) is not None


def _read_one(
    text: str, start: int, end: int, of: _Patterns, *, is_series: bool
) -> tuple[tuple[int, int], int] | None:
    first = _value(text, start, end, of)
    if first is None:
        return None
    if not is_series and of.between.search(text[max(0, start - 25) : start]):
        link = of.between_and.match(text, first[1], end)
        last = _value(text, link.end(), end, of) if link else None
        if last is not None:
            return (min(first[0], last[0]), max(first[0], last[0])), last[1]
    link = of.range.match(text, first[1], end)
    if link and not (is_series and link["image"]):
        last = _value(text, link.end(), end, of)
        if last is not None:
            return _closed(first[0], last[0]), last[1]
    return (first[0], first[0]), first[1]


_LONGEST_SHORTENED = 20
"""Images of a shortened range at most: 100-98 is one that runs backward."""


def _closed(first: int, last: int) -> tuple[int, int]:
    """Return a range in order; a shorter last number leaves out the digits it shares: 33-5 is 33 to 35."""
    digits, given = str(first), str(last)
    if len(given) < len(digits):
        whole = int(digits[: -len(given)] + given)
        last = whole if first < whole <= first + _LONGEST_SHORTENED else last
    return min(first, last), max(first, last)


def _value(text: str, start: int, end: int, of: _Patterns) -> tuple[int, int] | None:
    match = of.number.match(text, start, end)
    if match is None or of.unit.match(text, match.end(), end):
        return None
    value = int(match["digits"]) if match["digits"] else of.words[match["word"].lower()]
    return value, match.end()


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
    is_tentative: bool = False
    """Two bare numbers that may mean something else as well; they count where a series has that image."""


def find_atoms(text: str, start: int, end: int, language: str = ENGLISH) -> list[Atom]:
    """Return what gives numbers between two places of a text, in order."""
    of = _patterns(language)
    if of.hint.search(text, start, end) is None:
        return []
    pairs = {
        atom.start: atom for atom in (*_numbers_first(text, start, end, of), *_pairs(text, start, end, of))
    }
    found: list[Atom] = []
    at = start
    for place in sorted({*pairs, *(match.start() for match in of.initial.finditer(text, start, end))}):
        if place < at:
            continue
        if place in pairs:
            atoms = [pairs[place]]
        else:
            atoms = _compact(text, place, end, of) or _keyword(text, place, end, of)
        found += atoms
        at = atoms[-1].end if atoms else at
    return found


def _range(match: re.Match[str]) -> Numbers:
    first = int(match["image"])
    return [_closed(first, int(match.groupdict().get("last") or first))]


def _compact(text: str, at: int, end: int, of: _Patterns) -> list[Atom]:
    for pattern in of.compact:
        match = pattern.match(text, at, end)
        if match is not None:
            return [
                Atom(
                    kind="pair", start=at, end=match.end(), series=int(match["series"]), numbers=_range(match)
                )
            ]
    return []


def _keyword(text: str, at: int, end: int, of: _Patterns) -> list[Atom]:
    match = of.keyword.match(text, at, end)
    if match is None:
        return []
    is_series = match["series"] is not None
    if not is_series and (named := _named_pairs(text, at, match.end(), end, of)):
        return named
    word = (match["series"] or match["image"]).lower()
    read = _read_numbers(text, match.end(), end, of, is_series=is_series, is_plural=word in of.plurals)
    if read is None:
        return []
    numbers, stop = read
    if is_series and len(numbers) == 1:
        # The total of "series 3/8" was read with it; a slash may as well stand before the image.
        first_end = re.compile(r"\d+").match(text, match.end(), end)
        pair = of.at_series.match(text, first_end.end(), end) if first_end else None
        if first_end and pair and not of.unit.match(text, pair.end(), end):
            series = numbers[0][0]
            atom = Atom(kind="pair", start=at, end=pair.end(), series=series, numbers=_range(pair))
            return [atom, *_more(text, pair.end(), end, series, of)]
    is_word = word in of.whole
    return [
        Atom(kind="series" if is_series else "image", start=at, end=stop, numbers=numbers, is_word=is_word)
    ]


def _named_pairs(text: str, at: int, place: int, end: int, of: _Patterns) -> list[Atom]:
    """Read pairs behind a word for images: "images 3:45, 47 and 4:50"; "image 31: 12 mm" is none."""
    found: list[Atom] = []
    pair = _PAIR.match(text, place, end)
    while pair and pair["mark"] == ":" and " " not in pair.group():
        series = int(pair["series"])
        found.append(Atom(kind="pair", start=at, end=pair.end(), series=series, numbers=_range(pair)))
        found += _more(text, pair.end(), end, series, of)
        following = of.next.match(text, found[-1].end, end)
        at = following.end() if following else end
        pair = _PAIR.match(text, at, end)
    return found


def _more(text: str, at: int, end: int, series: int, of: _Patterns) -> Iterator[Atom]:
    """Read further images of a pair: "(3:45, 47 and 50)"."""
    rest = of.more.match(text, at, end)
    if rest:
        for match in re.compile(_IMAGES).finditer(text, rest.start(), rest.end()):
            yield Atom(
                kind="pair", start=match.start(), end=match.end(), series=series, numbers=_range(match)
            )


def _numbers_first(text: str, start: int, end: int, of: _Patterns) -> Iterator[Atom]:
    for pattern in of.number_first:
        for match in pattern.finditer(text, start, end):
            if "series" in pattern.groupindex:
                number = int(match["series"])
                yield Atom(kind="series", start=match.start(), end=match.end(), numbers=[(number, number)])
            else:
                yield Atom(kind="image", start=match.start(), end=match.end(), numbers=_range(match))


def _pairs(text: str, start: int, end: int, of: _Patterns) -> Iterator[Atom]:
    for bracket in _BRACKETS.finditer(text, start, end):
        first, last = bracket.span(1)
        if of.no_pair.search(text[max(start, first - 40) : bracket.start()]):
            continue
        for match in _PAIR.finditer(text, first, last):
            # A slash is a fraction or a date as well (04/23), unless there is nothing else in the bracket.
            if match["mark"] == "/" and (
                match["series"][0] == "0" or not of.only_slash_pairs.fullmatch(text, first, last)
            ):
                continue
            if of.pair_lead.search(text[first : match.start()]):
                series = int(match["series"])
                yield Atom(
                    kind="pair", start=match.start(), end=match.end(), series=series, numbers=_range(match)
                )
                if match["mark"] == ":":
                    yield from _more(text, match.end(), last, series, of)
    for pattern in (_HYPHEN_PAIR, of.bare_pair):
        for match in pattern.finditer(text, start, end):
            series, image = int(match["series"]), int(match["image"])
            if (
                of.no_pair.search(text[max(start, match.start() - 40) : match.start()].rstrip(", "))
                or image <= (_LAST_DAY if pattern is of.bare_pair else series)
                or not series
            ):
                continue
            yield Atom(
                kind="pair",
                start=match.start("series"),
                end=match.end("image"),
                series=series,
                numbers=[(image, image)],
                is_tentative=True,
            )
    for lead in of.seen_on.finditer(text, start, end):
        bare = _PAIR.match(text, lead.end(), end)
        if bare and bare["mark"] == ":":
            yield Atom(
                kind="pair",
                start=bare.start(),
                end=bare.end(),
                series=int(bare["series"]),
                numbers=_range(bare),
            )
