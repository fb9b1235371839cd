"""Dates, times of day and ages above 89 in texts, in English, Spanish, German and French.

A date without a year looks like a fraction, a level or a count (*12/15 nodes*, *L4/5*, *image 3/14*): it is a
date only if the words around it imply one. The clock positions of radiology (*at the 3:00 position*) are not
times. A year by itself stays, outside the strict mode.
"""
# ruff: noqa: E501, ISC004 - alternatives are easier to read in long lines

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from typing import Final

from shardflow.packing.deid.pseudonyms import DateOrder
from shardflow.packing.deid.text_patterns import Category, Span, holds_digit, spans_of

MONTHS: Final = """
    january february march april may june july august september october november december
    """.split()  # noqa: SIM905
_MONTH_NUMBERS: Final = {month[:3]: number for number, month in enumerate(MONTHS, start=1)}
_MONTH: Final = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|"
    r"oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_MONTHS_ABROAD: Final = """
    enero febrero marzo abril mayo junio julio agosto septiembre setiembre octubre noviembre diciembre
    januar j\xe4nner februar feber m\xe4rz maerz april mai juni juli august september oktober november
    dezember
    janvier f\xe9vrier fevrier mars avril juin juillet ao\xfbt aout septembre octobre novembre d\xe9cembre
    decembre
    gennaio febbraio aprile maggio giugno luglio settembre ottobre dicembre
    janeiro fevereiro mar\xe7o maio junho julho setembro outubro novembro dezembro
    """.split()  # noqa: SIM905
"""Spanish, German, French, Italian, Portuguese; English ones too, for days that are written as 12. April."""
_MONTH_ABROAD: Final = "|".join(_MONTHS_ABROAD)
_WEEKDAY: Final = r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s+)?"
_YEAR: Final = r"(?:19|20)\d\d"
_NUMERIC: Final = re.compile(
    rf"(?<![\w.,/-])(?:(?P<y>{_YEAR})(?P<s>[-/.])(?P<m>\d{{1,2}})(?P=s)(?P<d>\d{{1,2}})"
    rf"|(?P<a>\d{{1,2}})(?P<t>[-/.])(?P<b>\d{{1,2}})(?P=t)(?P<z>{_YEAR}|'?\d\d)"
    rf"|(?P<c>{_YEAR}[01]\d[0-3]\d))(?=T\d|[^\w/-]|$|_)(?!\.\d)(?!-\d)"
)
_WRITTEN: Final = re.compile(
    rf"(?<![\w/]){_WEEKDAY}(?:(?P<m1>{_MONTH})[\s-]{{0,2}}(?P<d1>\d{{1,2}})(?:st|nd|rd"
    rf"|th)?(?:\s*,?[\s-]*(?P<y1>{_YEAR}|'\d\d))?"
    rf"|(?P<d2>\d{{1,2}})(?:st|nd|rd|th)?[\s-]*(?:of\s+)?(?P<m2>{_MONTH})(?:[\s,-]*(?P<y2>{_YEAR}"
    rf"|'?\d\d(?!\s?[:\w])))?"
    rf"|(?P<m3>{_MONTH})[\s,-]*(?:of\s+)?(?P<y3>{_YEAR}|'\d\d))(?![\w/])(?!\.\d)",
    re.IGNORECASE,
)
_MONTH_AFTER: Final = re.compile(
    r"\b(?:in|since|from|until|till|last|of|during|early|late|mid|through)[\s-]+(?P<month>"
    r"January|February|March|April|May|June|July|August|September|October|November|December)\b(?!\s+(?:be"
    r"|have|represent))"
)
_WRITTEN_ABROAD: Final = re.compile(
    rf"(?<![\w/])(?:(?:[12]\d|3[01]|0?[1-9])(?:\.|er|\xba)?\s*(?:de\s+)?(?:{_MONTH_ABROAD})\b(?:\s+(?:del?\s+)?{_YEAR})?"
    rf"|(?:{_MONTH_ABROAD})\s+(?:del?\s+)?{_YEAR}"
    rf"|(?<=\b(?:en|em|im)\s)(?:{_MONTH_ABROAD})\b"
    rf"|(?<=\b(?:hasta|desde)\s)(?:{_MONTH_ABROAD})\b)(?!\w)",
    re.IGNORECASE,
)
_PARTIAL: Final = re.compile(
    r"(?:\b(?:(?:ct|cta|mri?|pet|us|radiographs?|ultrasound|mammogram|films?)(?:\s+of(?:\s+the)?)?"
    r"(?:\s+[a-z]+){1,2}|on|dated|date|since|from|until|till|through|thru|to|and|of|exam|examination|study"
    r"|scan|ct|cta|mri|mr|pet|us|cxr|xray|"
    r"radiograph|radiographs|film|ultrasound|mammogram|prior|previous|comparison|compared|versus|vs|done"
    r"|performed|seen|as of|"
    r"admitted|discharged|surgery|am|pm)[\s:,.]+(?:the\s+)?)(?P<date>(?P<a>\d{1,2})(?P<s>[/-])(?P<b>\d{1,2}))"
    r"(?![\w/%-])(?!\.\d)(?!\s*(?:lymph|nodes?|cm\b|mm\b|images?|slices?|levels?|strength|vertebra|disc"
    r"|disk|series|"
    r"hours|hrs|weeks?|days?|months?|years?|minutes?|patients?|lesions?|nodules?|ribs?|points?|cases?"
    r"|lobes?|segments?|"
    r"of\b|in(?:terspace|tensity)|score|systolic|diastolic|murmur|grade))",
    re.IGNORECASE,
)
_RATIO_CONTEXT: Final = re.compile(
    r"\b(?:image|images|series|slice|slices|grade|level|levels|ratio|score|stage|zone|about)\s+\S*$",
    re.IGNORECASE,
)
_RANGE_CONTEXT: Final = re.compile(r"\b(?:from|of|to|and)[\s:,.]+$", re.IGNORECASE)
_TIME: Final = re.compile(
    r"(?<![\w:.])(?:(?:[01]?\d|2[0-3])(?::[0-5]\d){1,2}(?:\.\d+)?\s*(?:[ap]m\b|[ap]\.m\.|hours\b|hrs\b|h\b"
    r"|(?:E|C|M|P)[SD]T\b|UTC\b|Z\b)"
    r"|(?:[01]?\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?"
    r"|(?:1[0-2]|0?[1-9])\s?(?:[ap]m\b|[ap]\.m\.)"
    r"|(?:[01]\d|2[0-3])[0-5]\d\s?(?:hours|hrs|h)\b)",
    re.IGNORECASE,
)
_ISO_TIME: Final = re.compile(r"(?<=\d)T\d\d:?\d\d(?::?\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?\b")
_BARE_TIME: Final = re.compile(
    r"(?:\b(?:at|by|time|around|approximately|until|from|to|of|hours)[\s:]+|[,;]\s|\]\s?"
    r"|\d\s)(?P<time>(?:[01]?\d|2[0-3]):[0-5]\d)"
    r"(?![\w:])(?!\.\d)(?!\s*(?:position|o'?clock|axis|radian|radius|ratio|dilution|\d"
    r"|,\s*\d+(?:\.\d+)?\s*cm|and\s+\d))",
    re.IGNORECASE,
)


_UNITS: Final = "one two three four five six seven eight nine".split()  # noqa: SIM905
_TENS: Final = rf"ninety(?:[\s-]?(?:{'|'.join(_UNITS)}))?"
_HUNDRED: Final = rf"(?:one|a)[\s-]hundred(?:[\s-]and)?(?:[\s-](?:{'|'.join(_UNITS)}|ten))?"
_EINS: Final = "(?:ein|zwei|drei|vier|f\xfcnf|fuenf|sechs|sieben|acht|neun)"
_UNO: Final = "(?:uno?|dos|tres|cuatro|cinco|seis|siete|ocho|nueve|diez)"
_UN: Final = (
    "(?:un|deux|trois|quatre|cinq|six|sept|huit|neuf|dix(?:[- ](?:sept|huit|neuf))?|onze|douze|treize"
    "|quatorze|quinze|seize)"
)
_OLD: Final = r"9\d|1[0-4]\d"
_AGES: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"(?<![\w.,/])(?P<age>{_OLD})(?=\s?-?\s?(?:year|yr|y\.?\s?[/-]?\s?o\b|y\b|j[\xe4a]hr|j\.|a[\xf1n]os\b|ans\b"
        r"|a\.(?=\s)))",
        rf"\b(?:aged?|edad|alter|im\s+alter\s+von|[\xe2a]ge|[\xe2a]g[\xe9e]e?)\s*:?\s*(?:of\s+|de\s+|von\s+)?(?P<age>{_OLD})\b"
        r"(?!\s?(?:%|mm|cm|ml|mg|\.\d))",
        rf"\bturn(?:s|ed|ing)\s+(?P<age>{_OLD})\b(?!\s?(?:%|degrees|mm|cm|ml|mg|\xb0|\.\d))",
    )
)
_AGES_IN_WORDS: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"\b(?P<age>{_TENS}|{_HUNDRED})(?=[\s-]+(?:years?\b|yrs?\b|y\.?\s?/?o\b))",
        rf"\b(?:aged?|turn(?:s|ed|ing))\s+(?P<age>{_TENS}|{_HUNDRED})\b",
        r"\b(?:in\s+(?:his|her|their)\s+)(?P<age>(?:mid[\s-]|early[\s-]|late[\s-])?(?:nineties|90'?s))\b",
        r"\b(?P<age>nonagenarian|centenarian|nonagenaria?|centenari[ao]|nonag[\xe9e]naire|centenaire)s?\b",
        rf"\b(?P<age>noventa(?:\s+y\s+{_UNO})?|cien|ciento\s+{_UNO})(?=\s+a[\xf1n]os\b)",
        rf"\b(?P<age>(?:{_EINS}und)?neunzig|(?:ein)?hundert(?:(?:und)?{_EINS})?)(?=(?:-|\s)?j[\xe4a]hr)",
        rf"\b(?P<age>quatre[- ]vingts?[- ](?:et[- ])?(?:dix(?:[- ](?:sept|huit|neuf))?|onze|douze|treize|quatorze|quinze"
        rf"|seize)|cent(?:[- ]{_UN})?)(?=\s+ans\b)",
    )
)
_AGE_SEX: Final = re.compile(
    rf"(?<![\w.,/-])(?P<age>(?:{_OLD})(?=[FM]\b(?![-/]))|(?:{_OLD})(?=\s[FMfm]\s+(?:with|w/|s/p|presents?|who|c/o|p/w)))"
    rf"|(?<![\w.])[FM](?P<other>{_OLD})\b(?!\s?[-/.\d])"
)


def find_ages(text: str) -> Iterator[Span]:
    """Find ages above 89 years, in digits (*94-year-old*, *94F*) and in words."""
    for pattern in _AGES_IN_WORDS:
        yield from spans_of(pattern, text, Category.AGE, "age")
    if holds_digit(text):
        for pattern in _AGES:
            yield from spans_of(pattern, text, Category.AGE, "age")
        yield from spans_of(_AGE_SEX, text, Category.AGE, "age", "other")


def find_dates(text: str, order: DateOrder) -> Iterator[Span]:
    """Find dates; the span of one that names a single day holds the day."""
    has_digit = holds_digit(text)
    if has_digit:
        yield from _find_days(text, order)
    # Without a day: a birth date is only known in its English forms, and must never become a distance.
    # Searching for the bare words first is much faster than searching for them in context.
    lowered = text.lower()
    is_abroad = any(month in lowered for month in _MONTHS_ABROAD)
    for match in _WRITTEN_ABROAD.finditer(text) if is_abroad else ():
        yield Span(start=match.start(), end=match.end(), category=Category.DATE)
    for match in _MONTH_AFTER.finditer(text):
        yield Span(start=match.start("month"), end=match.end("month"), category=Category.DATE)
    if has_digit:
        yield from _find_partial(text)


def _find_days(text: str, order: DateOrder) -> Iterator[Span]:
    for match in _NUMERIC.finditer(text):
        span = _numeric(match, order)
        if span is not None:
            yield span
    for match in _WRITTEN.finditer(text):
        month = match["m1"] or match["m2"] or match["m3"]
        is_word = month.lower().rstrip(".") in {"may", "mar", "march"} and month[0].islower()
        if is_word and not (match["y1"] or match["y2"] or match["y3"]):
            continue  # "may 2 of them"
        number = match["d1"] or match["d2"]
        if number is not None and not 1 <= int(number) <= 31:
            continue
        day = None
        if number is not None and (year := match["y1"] or match["y2"]) is not None:
            day = _day(_full_year(year), _MONTH_NUMBERS[month[:3].lower()], int(number))
        yield Span(start=match.start(), end=match.end(), category=Category.DATE, day=day)


def _find_partial(text: str) -> Iterator[Span]:
    for match in _PARTIAL.finditer(text):
        first, second = int(match["a"]), int(match["b"])
        is_day = (1 <= first <= 12 and 1 <= second <= 31) or (1 <= second <= 12 and 1 <= first <= 31)
        if not is_day or _RATIO_CONTEXT.search(text[max(0, match.start("date") - 24) : match.start("date")]):
            continue
        if match["s"] == "-" and _RANGE_CONTEXT.search(text[match.start() : match.start("date")]):
            continue
        yield Span(start=match.start("date"), end=match.end("date"), category=Category.DATE)


_TIME_ABROAD: Final = re.compile(
    r"\b(?:\xe0|a\s+las|as|um|gegen|vers|hora|heure|uhrzeit|ora)\s*:?\s*(?P<time>(?:[01]?\d|2[0-3])(?:[:h.][0-5]\d|\s?h(?!\w)))"
    r"(?![\w:.]\d)"
    r"|(?<![\w:.,])(?P<hour>(?:[01]?\d|2[0-3])(?:[:.][0-5]\d)?)(?=\s+(?:Uhr|horas|heures)\b)"
    r"|(?<![\w:.,])(?P<clock>(?:[01]?\d|2[0-3])h[0-5]\d)\b",
    re.IGNORECASE,
)


def find_times(text: str) -> Iterator[Span]:
    """Find times of day."""
    if not holds_digit(text) or (":" not in text and "m" not in text.lower() and "h" not in text):
        return
    for pattern in (_TIME, _ISO_TIME):
        for match in pattern.finditer(text):
            yield Span(start=match.start(), end=match.end(), category=Category.TIME)
    for match in _BARE_TIME.finditer(text):
        yield Span(start=match.start("time"), end=match.end("time"), category=Category.TIME)
    yield from spans_of(_TIME_ABROAD, text, Category.TIME, "time", "hour", "clock")


def _numeric(match: re.Match[str], order: DateOrder) -> Span | None:
    """Return the span of three numbers that form a date; None if they are something else."""

    def span(day: date | None) -> Span:
        return Span(start=match.start(), end=match.end(), category=Category.DATE, day=day)

    if match["c"] is not None:
        return span(_day(int(match["c"][:4]), int(match["c"][4:6]), int(match["c"][6:])))
    if match["y"] is not None:
        month, number = int(match["m"]), int(match["d"])
        return span(_day(int(match["y"]), month, number)) if max(month, number) <= 31 else None
    first, second, year = int(match["a"]), int(match["b"]), _full_year(match["z"])
    if not (0 < first <= 31 and 0 < second <= 31 and min(first, second) <= 12):
        return None
    if match["t"] == "." and len(match["z"]) == 2 and first <= 12 and second <= 12 and len(match["a"]) == 1:
        return None  # 3.1.12 numbers a paragraph
    if first > 12 or (order == "dmy" and second <= 12):
        return span(_day(year, second, first))
    if second > 12 or order == "mdy" or first == second:
        return span(_day(year, first, second))
    return span(None)


def _full_year(text: str) -> int:
    """Return the year in four digits; two digits refer to the hundred years up to 2039."""
    number = int(text.lstrip("'"))
    return number if number > 99 else number + (2000 if number < 40 else 1900)


def _day(year: int, month: int, number: int) -> date | None:
    try:
        return date(year, month, number)
    except ValueError:
        return None
