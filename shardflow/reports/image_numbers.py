"""Numbers of series and images in a text: single ones, ranges and lists, without what only looks like them.

`mentions` decides later which of them belong together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Numbers = list[tuple[int, int]]
"""Closed ranges."""

_ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = (
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_WORDS = {
    **{word: value for value, word in enumerate((*_ONES, *_TEENS), start=1)},
    **{word: 10 * value for value, word in enumerate(_TENS, start=2)},
    **{
        f"{ten}-{one}": 10 * value + unit
        for value, ten in enumerate(_TENS, start=2)
        for unit, one in enumerate(_ONES, start=1)
    },
}
_NUMBER = re.compile(
    r"#?\s?(?:(?P<digits>\d{1,5})(?!\d|\.\d|[a-zA-Z])|"
    rf"(?P<word>{'|'.join(sorted(_WORDS, reverse=True))})\b)",
    re.IGNORECASE,
)
_RANGE = re.compile(
    r"\s*(?:-|\u2013|\u2014|\bup\s+to\b|\bto\b|\bthrough\b|\bthru\b|\buntil\b)\s*(?:(?P<image>image|img|im|slice|frame)\s*)?(?=#?\d|\w)",
    re.IGNORECASE,
)
_NEXT = re.compile(r"\s*(?:,?\s*(?:and|or|&|plus|as well as)\s*|,\s*|/\s*)(?=#?\d)", re.IGNORECASE)
_TOTAL = re.compile(
    r"\s*(?:of|out of|/)\s*(?:a\s+total\s+of\s+)?\d{1,5}(?![\d:.])\s*(?:images|slices|frames)?", re.IGNORECASE
)
# A number in front of these is a measure, a count or a date.
_UNIT = re.compile(
    r"\s?-?\s?(?:mm|cm|m|ml|cc|mg|mcg|units?|inch(?:es)?|g|t|kv|kvp|ma|mas|hz|sec|secs|seconds?|s|ms|min|minutes?|hours?|hrs?|days?|weeks?|months?|years?|"
    r"percent|x\s?\d|per|times|weeks|am|pm|radiographs?|views?|(?:images|slices|frames)(?!\s*[#:]?\s*\d)|patients|nodules|lesions|"
    r"cysts|masses|stones)\b|\s?[%\u00d7\u00b0]|/\d+/\d",
    re.IGNORECASE,
)
_FOLLOWER = re.compile(
    r"\s*(?:$|[.,;:)\]&?!]|(?:and|or|of|on|in|at|from|to|through|series|ser|se|is|are|show|shows|as|where|which|but|with|for)\b|[-\u2013])",
    re.IGNORECASE,
)


_BETWEEN = re.compile(r"\bbetween\s+(?:axial\s+)?(?:images?|slices?|frames?)\s+$", re.IGNORECASE)


def read_numbers(
    text: str, start: int, end: int, *, is_series: bool, is_plural: bool
) -> tuple[Numbers, int] | None:
    """Read the numbers that stand at a place.

    Args:
        text: The report.
        start: Where the first number must begin.
        end: Where reading ends.
        is_series: The numbers are of series: a comma is a list only before its last "and".
        is_plural: The word before was a plural; a list is likely then.

    Returns:
        The numbers and where they end; None: there are none.
    """
    first = _read_one(text, start, end, is_series=is_series)
    if first is None:
        return None
    numbers, at = [first[0]], first[1]
    while True:
        following = _NEXT.match(text, at, end)
        if following is None:
            break
        item = _read_one(text, following.end(), end, is_series=is_series)
        if item is None:
            break
        mark = following.group().strip()
        if mark == "/":
            # 45/47 are two images, 33/120 is one of 120; without a plural only close ones are two.
            near = 0 < item[0][0] - numbers[-1][1] <= 3 and not is_series and _has_series_before(text, start)
            if not near:
                break
        elif not _may_follow(text, item, end, mark, is_series=is_series, is_plural=is_plural):
            break
        numbers.append(item[0])
        at = item[1]
    total = _TOTAL.match(text, at, end)
    if total and not _UNIT.match(text, total.end(), end):
        at = total.end()
    return numbers, at


def _may_follow(
    text: str, item: tuple[tuple[int, int], int], end: int, mark: str, *, is_series: bool, is_plural: bool
) -> bool:
    if is_series and mark == ",":
        # "series 3, 5 and 7" is a list; "series 3, 45" is not known to be one.
        return (
            re.compile(r"(?:\s*,\s*\d{1,4})*\s*,?\s*(?:and|&)\s*\d{1,4}(?!\s?(?:mm|cm))").match(
                text, item[1], end
            )
            is not None
        )
    return is_plural or _FOLLOWER.match(text[item[1] : end]) is not None


def _has_series_before(text: str, start: int) -> bool:
    return (
        re.search(r"\bse(?:r|ries)?\b[^.]{0,25}$", text[max(0, start - 40) : start], re.IGNORECASE)
        is not None
    )


def _read_one(text: str, start: int, end: int, *, is_series: bool) -> tuple[tuple[int, int], int] | None:
    first = _value(text, start, end)
    if first is None:
        return None
    if not is_series and _BETWEEN.search(text[max(0, start - 25) : start]):
        link = re.compile(r"\s+and\s+(?:image\s+)?(?P<image>(?!.))?", re.IGNORECASE).match(
            text, first[1], end
        )
        last = _value(text, link.end(), end) if link else None
        if last is not None:
            return (min(first[0], last[0]), max(first[0], last[0])), last[1]
    link = _RANGE.match(text, first[1], end)
    if link and not (is_series and link["image"]):
        last = _value(text, link.end(), end)
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


def _value(text: str, start: int, end: int) -> tuple[int, int] | None:
    match = _NUMBER.match(text, start, end)
    if match is None or _UNIT.match(text, match.end(), end):
        return None
    value = int(match["digits"]) if match["digits"] else _WORDS[match["word"].lower()]
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


_TO = r"\s?[-\u2013]\s?"
_IMAGES = rf"(?P<image>\d{{1,5}})(?:{_TO}(?P<last>\d{{1,5}}))?"
_MARK = r"\s*(?:(?:no|nos|num|number|numbers|are)\b\.?)?\s*[#:=-]?\s*#?\s*"
_KEYWORD = re.compile(
    r"(?:(?P<series>series|seires|sereis|serie|sequence|ser|se)|"
    r"(?P<image>images?|imag|ima|imges?|iamges?|imgaes?|imgs?|ims?|slices?|sl|frames?))(?![^\W\d_])\.?"
    + _MARK,
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
# "(3-45)", and behind the comma of a place: "LUL, 3/45." No day of a month, no range of sizes.
_HYPHEN_PAIR = re.compile(r"[(\[](?P<series>\d{1,3})-(?P<image>\d{2,4})[)\]]")
_BARE_PAIR = re.compile(r"(?<=[^\W\d_],\s)(?P<series>\d{1,3})/(?P<image>\d{2,4})(?=\s*(?:[.;)\]]|$|,\s))")
_LAST_DAY = 31
_PLURALS = frozenset(("series", "images", "imgs", "ims", "slices", "frames"))


# Most sentences have no number, or none that could be an image's.
_HINT = re.compile(
    r"\d\s?[:/-]\s?\d|[(\[]|(?:se|im|sl|fr|s|i)[a-z]{0,6}\.?\s?[#:=(]?\s?\d|\b(?:seri|sere|seir|sequence|ima|img|"
    r"slice|frame|sl\b|ser?\b|im\b)|\d(?:st|nd|rd|th)\s|\bfrom\s\d",
    re.IGNORECASE,
)


def find_atoms(text: str, start: int, end: int) -> list[Atom]:
    """Return what gives numbers between two places of a text, in order."""
    if _HINT.search(text, start, end) is None:
        return []
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
    return [_closed(first, int(match.groupdict().get("last") or first))]


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
    for pattern in (_HYPHEN_PAIR, _BARE_PAIR):
        for match in pattern.finditer(text, start, end):
            series, image = int(match["series"]), int(match["image"])
            if (
                _NOT_A_PAIR_BEFORE.search(text[max(start, match.start() - 40) : match.start()].rstrip(", "))
                or image <= (_LAST_DAY if pattern is _BARE_PAIR else series)
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
