"""Patterns of identifying text: numbers, addresses, institutions; and spans, which all finders yield.

Patterns use no known values; `known_values` does. Each one ignores what reports are full of: sizes, series
and image numbers, levels, sequences, isotopes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Final

from shardflow.packing.deid.lexicon import fold

UPPER: Final = "A-Z" + "".join(
    letter for letter in map(chr, range(0xC0, 0x17F)) if letter.isupper() and letter.isalpha()
)
"""Capital letters of Latin scripts, for a class of a pattern."""


class Category(StrEnum):
    """Category of a span; the placeholder is the category in brackets."""

    AGE = "AGE"
    """Above 89 years."""
    DATE = "DATE"
    EMAIL = "EMAIL"
    ID = "ID"
    NAME = "NAME"
    PHONE = "PHONE"
    PLACE = "PLACE"
    """Address, institution, department, station."""
    TIME = "TIME"
    URL = "URL"
    WORD = "WORD"
    """Unknown word: masked only in the strict mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Characters ``[start, end)`` of a text."""

    start: int
    end: int
    category: Category
    day: date | None = None
    """The day of a date that names exactly one."""


def merge(spans: Iterable[Span], text: str) -> list[Span]:
    """Return sorted spans that do not overlap and cover what the given ones cover.

    Names (and unknown words) with nothing but a space or a comma between them become one. Of
    overlapping spans the longest determines the category; a day is kept only in a span without overlaps.
    """
    merged: list[Span] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.end)):
        last = merged[-1] if merged else None
        is_list = (
            last is not None
            and span.category == last.category
            and span.category in {Category.NAME, Category.WORD}
            and text[last.end : span.start] in {" ", ", "}
        )
        if last is None or (span.start >= last.end and not is_list):
            merged.append(span)
            continue
        longest = max(last, span, key=lambda one: one.end - one.start)
        day = last.day if (span.start, span.end, span.day) == (last.start, last.end, last.day) else None
        if day is None and span.category is Category.DATE and last.category is Category.DATE:
            # A date inside a longer form of the same date: the longer one knows more.
            day = longest.day if longest.end >= max(last.end, span.end) else None
        merged[-1] = Span(start=last.start, end=max(last.end, span.end), category=longest.category, day=day)
    return merged


_DIGIT: Final = re.compile(r"\d")
_EMAIL: Final = re.compile(r"(?<![\w.+-])[\w.+-]+\s?@\s?[\w-]+(?:\.[\w-]+)*")
_URL: Final = re.compile(
    r"\b(?:https?|ftp)://\S+|\bwww\.[^\s,;)]+|(?<![\w.-])[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:com|org|net|edu"
    r"|gov|de|uk|ch|at|fr|es|info|health)"
    r"(?:/[^\s,;)]*)?\b|\b(?:\d{1,3}\.){3}\d{1,3}\b|\b(?:[0-9A-F]{2}:){5}[0-9A-F]{2}\b",
    re.IGNORECASE,
)
_PHONE: Final = re.compile(
    r"(?<![\w.])(?:\+?1[\s.-]?)?\(?\d{3}\)?[\s.-]{1,2}\d{3}[\s.-]\d{4}(?:\s?(?:x|ext\.?)\s?\d{1,6})?(?![\w-])"
    r"|(?<![\w.])\+\d{1,3}[\s./()-]*(?:\d[\s./()-]?){6,12}\d(?!\w)"
    r"|(?<![\w.-])0\d{2,4}[\s/-]{1,3}\d{5,8}(?!\w)"
    r"|\b(?:tel(?:ephone)?|phone|fax|pager|beeper|mobile|cell(?=\s?(?:phone|#|:|no))|ext(?:ension)?"
    r"|contact|call(?:ed)?\s+at|page[dr]?\s+at|call(?=\s\d-?\d{4}\b))"
    r"\s*(?:no|number|phone|#)?\s*[.:#]*\s*(?P<number>[+(]?\d[\d\s().-]{1,16}\d)"
    r"|(?<![\w.-])\d{3}-\d{4}(?![\w-])(?!\s?(?:mm|cm|ml|HU))"
    r"|(?<=\s)x\d{4,5}\b",
    re.IGNORECASE,
)
_SSN: Final = re.compile(
    r"(?<![\w-])\d{3}[- ]\d{2}[- ]\d{4}(?![\w-])"
    r"|\b(?i:ssn|social\s+security)(?i:\s+(?:number|no|last|four|end|ends|ending|in|is|of|with|digits))*\W{1,3}(?P<last>\d{4})\b"
)
_LABELLED: Final = re.compile(
    r"\b(?:mrn|medical\s+record|med(?:ical)?\s+rec|accession|acc|patient\s+(?:id|identifier|number|no)"
    r"|pat\.?\s?(?:id|no)|pid|account|acct|"
    r"encounter|csn|order\s*(?:number|no|id|#)|requisition|visit\s*(?:number|no|id|#)|case\s*(?:number|no"
    r"|id|#)|study\s*(?:id|number|no|#)|"
    r"exam\s*(?:id|number|no|#)|record\s*(?:number|no|id|#)|chart\s*(?:number|no|#)?|ssn|social\s+security"
    r"|(?:health\s+)?(?:plan|insurance|policy|member|beneficiary|subscriber)"
    r"\s*(?:id|number|no|#)?|certificate|licen[cs]e(?:\s+plate)?|plate\s*(?:number|no|#)|vin|vehicle"
    r"|serial|s/n|device\s*(?:id|number|no|#)|uid|npi|dea|"
    r"fingerprint(?:\s+template)?|voice\s?print|retina(?:\s+scan)?|iris(?:\s+scan)?|biometric|badge|employee|passport|job|dictation"
    r"|transcription|document|report\s*(?:id|number|no|#)|hospital\s+(?:number|no)|unit\s+(?:number|no)|mr\s?#|invoice|medicare|medicaid"
    r"|npi|dea|sn(?=\s\S*\d{3})|photo(?:graph)?|picture|image\s+file"
    r"|id)\s*"
    r"(?:id|identifier|number|numbers|num|no|nr|plate|code"
    r"|record)?[\s.:#=-]{0,4}(?:is\s+)?(?P<id>(?=[\w-]*\d)[A-Za-z0-9](?:[A-Za-z0-9]"
    r"|[-/.](?=[A-Za-z0-9])){2,})",
    re.IGNORECASE,
)
_LETTERS_ONLY: Final = re.compile(
    r"\b(?i:acc(?:ession|\.)?(?:\s*(?:number|no|num|id)\b\.?)?\s*[:#]+|accession\s+(?:number|no|id)\.?:?)\s*(?P<id>[A-Z]{4,16})\b"
)
"""An accession number without a digit, in capitals after its label."""
_FILE: Final = re.compile(
    r"(?<![\w/-])(?=[\w-]{0,60}\d)[\w-]{1,64}\.(?:jpe?g|png|tiff?|bmp|gif|heic|dcm|pdf|mp4|mov|docx?)\b",
    re.IGNORECASE,
)
_LONG_NUMBER: Final = re.compile(
    r"(?<![\w.,])#?\d{6,}(?![\w]|\.\d|,\d)"
    r"|(?<![\w.,/-])\d{5,}-\d{1,6}(?![\w-]|\s?(?:mm|ml|cm|hu)\b)"
    r"|(?<![\w.-])\d{1,4}(?:-\d{2,4}){2,}(?![\w-])"
    r"|(?<![\w.])\d{2,4}(?:[ ]\d{3,4}){2,}(?!\w|\s?(?:mm|ml|cm))"
    r"|(?<![\w.])\d+(?:\.\d+){4,}(?![\w])"
)
_CODE: Final = re.compile(r"(?<![\w.-])[A-Za-z0-9][A-Za-z0-9-]*(?!\w)")
_MIN_CODE_DIGITS: Final = 4
_LONGEST_WORD: Final = 64
_NO_CODE: Final = re.compile(
    r"\d+(?:x\d+)+(?:mm|cm)?|\d+(?:-\d+)?[-]?(?:mm|cm|ml|cc|mgy|mgycm|hu|ms|msec|mbq|mci|kvp?|mas?|hz|mhz"
    r"|mg|g|kg|years?|yrs?|s|th|day|week|year|month)(?:-old|-thick)?|"
    r"[clst]\d{1,2}(?:-[clst]?\d{1,2})+|[a-z]{1,12}-?\d{1,3}(?:-\d{1,2})*|(?:19|20)\d\ds|"
    r"(?:covid|sars)-?(?:19|cov-?2)(?:-\w+)*",
    re.IGNORECASE,
)
_ADDRESS: Final = re.compile(
    r"\b\d{1,5}\s+(?:[NSEW]\.?\s+)?(?:[A-Z][\w'.-]+\s+){1,3}(?:Street|St\b\.?|Avenue|Ave\b\.?|Road|Rd\b\.?"
    r"|Boulevard|Blvd\b\.?|Lane|Ln\b\.?|Drive|Parkway|Pkwy|Highway|Hwy|Terrace|Square|Court|Circle"
    r"|Way)(?![a-z])"
    r"(?:,?\s*(?:Apt|Suite|Unit|Ste)\.?\s*#?\w+)?"
    r"|\bP\.?\s?O\.?\s+Box\s+\d+"
    r"|\b[A-Z]\w+(?:stra(?:ss|\N{LATIN SMALL LETTER SHARP S})e|str\.|weg|platz|gasse|allee)"
    r"\s+\d{1,4}\s?[a-z]?\b"
    r"|\b[A-Z][a-z]+(?:\s[A-Z][a-z]+)?,\s*[A-Z]{2}\.?,?\s+\d{5}(?:-\d{4})?\b"
    r"|\b(?:zip(?:\s?code)?|postal\s+code|plz)\s*:?\s*[A-Z0-9-]{4,10}\b"
    r"|\b\d{5}-\d{4}\b|\b\d{5}\s+[A-Z][a-z]{3,}(?=[\s,.]|$)(?=\s*(?:,|\.|\n|$))",
)
_CITY: Final = r"[A-Z][a-z]+(?:[ -][A-Z][a-z]+){0,2}"
_TOWN: Final = re.compile(
    r"\b(?:lives?|living|resid(?:es|ing)|resident|born|raised|native|visiting|originally|(?:moved|came|relocated)"
    rf"(?:\s+[a-z]+){{0,2}})\s+(?:in|of|from|to|at)\s+(?P<town>{_CITY})"
    r"|(?:Street|St\.?|Avenue|Ave\.?|Road|Rd\.?|Boulevard|Blvd\.?|Lane|Ln\.?|Drive|Parkway|Terrace|Square|Court"
    rf"|Circle|Way),\s+(?P<after>{_CITY}(?:,?\s+[A-Z]{{2}})?(?:,?\s+\d{{5}}(?:-\d{{4}})?)?)"
)
_ABBREVIATION: Final = re.compile(
    r"\b(?i:(?:imported|transferred|transfer|referred|obtained|stud(?:y|ies)|films?|images?|imaging|scans?|exams?|records?"
    r"|priors?|CT|MRI?|PET|ultrasound)\s+(?:from|at)|(?:done|performed|acquired|treated|seen|operated|surgery)\s+at)"
    r"\s+(?:the\s+)?(?P<place>[A-Z]{3,6})\b(?!\s+[A-Z]{3})"
)
"""A hospital in capitals, even one that is a word (*CHOP*)."""
_UNITS: Final = frozenset(
    """
    icu micu sicu nicu picu pacu ccu ercp emergency clinic pet mri cta mra the end rest least
    outside level time home this surgery
    """.split()  # noqa: SIM905
)
"""What is no hospital in that place."""
_HOSPITAL: Final = re.compile(
    r"\b(?:[A-Z][\w'.&-]+\s+(?:of\s+|and\s+|the\s+|de\s+)*){1,5}(?:Hospital|Clinic|Clinics|Infirmary"
    r"|Medical\s+Cent(?:er|re)|Health\s+(?:System|Cent(?:er|re))|"
    r"Healthcare|Hospice|Sanatorium|Klinikum|Krankenhaus|University|Nursing\s+Home|Imaging\s+Cent(?:er|re)"
    r"|Radiology\s+Associates)\b"
    r"(?:\s+(?:of|at)\s+[A-Z]\w+)?"
)
_HOSPITAL_WORD: Final = re.compile(
    r"the|a|at|from|to|in|outside|our|this|general|community|local|patient|hospital|clinic|and|of"
)


def find_contacts(text: str) -> Iterator[Span]:
    """Find addresses of the network: e-mail, web pages, hosts."""
    if "@" in text:
        yield from spans_of(_EMAIL, text, Category.EMAIL)
    yield from spans_of(_URL, text, Category.URL)


def find_phones(text: str) -> Iterator[Span]:
    """Find telephone, fax and pager numbers."""
    if holds_digit(text):
        yield from spans_of(_PHONE, text, Category.PHONE, "number")


def find_labelled(text: str) -> Iterator[Span]:
    """Find numbers after a label such as *MRN*, social security numbers, and names of image files."""
    yield from spans_of(_LETTERS_ONLY, text, Category.ID, "id")
    if holds_digit(text):
        yield from spans_of(_SSN, text, Category.ID, "last")
        yield from spans_of(_LABELLED, text, Category.ID, "id")
        yield from spans_of(_FILE, text, Category.ID)


def find_places(text: str) -> Iterator[Span]:
    """Find postal addresses, hospitals, and towns that somebody lives in."""
    yield from spans_of(_ADDRESS, text, Category.PLACE)
    yield from spans_of(_TOWN, text, Category.PLACE, "town", "after")
    for match in _ABBREVIATION.finditer(text):
        if match["place"].lower() not in _UNITS:
            yield Span(start=match.start("place"), end=match.end("place"), category=Category.PLACE)
    yield from _hospitals(text)


def find_numbers(text: str) -> Iterator[Span]:
    """Find long numbers and codes without a label; a date may look like one."""
    if not holds_digit(text):
        return
    yield from spans_of(_LONG_NUMBER, text, Category.ID)
    for match in _CODE.finditer(text):
        token = match[0].rstrip("-")
        if sum(map(str.isdigit, token)) < _MIN_CODE_DIGITS or not any(map(str.isalpha, token)):
            continue
        if len(token) > _LONGEST_WORD or not _NO_CODE.fullmatch(token):
            yield Span(start=match.start(), end=match.end(), category=Category.ID)


def holds_digit(text: str) -> bool:
    """Return whether a text holds a digit of any script: half of the patterns need one."""
    return _DIGIT.search(text) is not None


def spans_of(pattern: re.Pattern[str], text: str, category: Category, *groups: str) -> Iterator[Span]:
    """Yield the span of each match: of the given group that matched, or of the whole match."""
    for match in pattern.finditer(text):
        group: int | str = next((name for name in groups if match[name] is not None), 0)
        yield Span(start=match.start(group), end=match.end(group), category=category)


def _hospitals(text: str) -> Iterator[Span]:
    for match in _HOSPITAL.finditer(text):
        words = [fold(word) for word in re.findall(r"[^\W\d_]+", match[0])]
        start = match.start()
        skipped = re.match(r"(?:(?:The|At|From|To|In|Outside|Our|This|And)\s+)+", match[0])
        if skipped is not None:
            start += skipped.end()
        if any(not _HOSPITAL_WORD.fullmatch(word) for word in words[:-1]):
            yield Span(start=start, end=match.end(), category=Category.PLACE)
