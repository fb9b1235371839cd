"""Patterns of identifying text: numbers, addresses, names after a title, dates and times.

Patterns use no known values; `known_values` does. Each one ignores what reports are full of: sizes, series
and image numbers, levels, sequences, isotopes. A date without a year looks like a fraction, a level or
a count (*12/15 nodes*, *L4/5*, *image 3/14*): it is a date only if the words around it imply one. The clock
positions of radiology (*at the 3:00 position*) are not times. A year by itself stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from shardflow.packing.deid.lexicon import fold, lexicon


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
    r"|contact|call(?:ed)?\s+at|page[dr]?\s+at)"
    r"\s*(?:no|number|phone|#)?\s*[.:#]*\s*(?P<number>[+(]?\d[\d\s().-]{1,16}\d)"
    r"|(?<![\w.-])\d{3}-\d{4}(?![\w-])(?!\s?(?:mm|cm|ml|HU))"
    r"|(?<=\s)x\d{4,5}\b",
    re.IGNORECASE,
)
_SSN: Final = re.compile(r"(?<![\w-])\d{3}[- ]\d{2}[- ]\d{4}(?![\w-])")
_LABELLED: Final = re.compile(
    r"\b(?:mrn|medical\s+record|med(?:ical)?\s+rec|accession|acc|patient\s+(?:id|identifier|number|no)"
    r"|pat\.?\s?(?:id|no)|pid|account|acct|"
    r"encounter|csn|order\s*(?:number|no|id|#)|requisition|visit\s*(?:number|no|id|#)|case\s*(?:number|no"
    r"|id|#)|study\s*(?:id|number|no|#)|"
    r"exam\s*(?:id|number|no|#)|record\s*(?:number|no|id|#)|chart\s*(?:number|no|#)?|ssn|social\s+security"
    r"|(?:health\s+)?(?:plan|insurance|policy|member|beneficiary|subscriber)"
    r"\s*(?:id|number|no|#)?|certificate|licen[cs]e(?:\s+plate)?|plate\s*(?:number|no|#)|vin|vehicle"
    r"|serial|s/n|device\s*(?:id|number|no|#)|uid|npi|dea|"
    r"fingerprint|badge|employee|passport|job|dictation|transcription|document|report\s*(?:id|number|no|#)"
    r"|id)\s*"
    r"(?:id|identifier|number|numbers|num|no|nr|plate|code"
    r"|record)?[\s.:#=-]{0,4}(?:is\s+)?(?P<id>(?=[\w-]*\d)[A-Za-z0-9](?:[A-Za-z0-9]"
    r"|[-/.](?=[A-Za-z0-9])){2,})",
    re.IGNORECASE,
)
_LONG_NUMBER: Final = re.compile(
    r"(?<![\w.,])#?\d{6,}(?![\w]|\.\d|,\d)"
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
_AGE: Final = re.compile(
    r"\b(?P<age>9\d|1[0-4]\d)(?=\s?-?\s?(?:year|yr|y\.?\s?/?o\b|y\b|jahre)s?)|\b(?:age"
    r"|aged)\s*:?\s*(?:of\s+)?(?P<other>9\d|1[0-4]\d)\b(?!\s?(?:%|mm|cm))",
    re.IGNORECASE,
)
_PART: Final = r"(?:[^\W\d_a-z][^\W\d_]*(?:['\N{RIGHT SINGLE QUOTATION MARK}-][^\W\d_]+)*)"
_NAME: Final = rf"(?:{_PART}|(?:van|von|de|der|den|del|della|di|da|la|le|bin|al)\b)(?:\.?[ \t]+|\.)"
_PEOPLE: Final = rf"(?:{_NAME}){{0,4}}{_PART}"
_TITLED: Final = re.compile(
    rf"(?:\b(?:Dr|Drs|DR|DRS|Prof|PROF)\b\.?|\b(?:Mr|Mrs|Ms|MRS)\b\.?"
    rf"|\b(?:Doctors?|Professor|Miss|Sister|Nurse|Rev\.|Sr\.)(?=\s))[ \t]+"
    rf"(?P<name>{_PEOPLE}(?:\s*(?:,|and|&|/)\s*(?:Drs?\.?\s+)?{_PEOPLE})?)"
)
_LOW_TITLED: Final = re.compile(r"\b[dD]r\.?[ \t]+(?P<name>[a-z]{2,}(?:[ \t]+[a-z]{2,})?)")
_DEGREED: Final = re.compile(
    rf"(?P<name>{_PART}(?:(?:\.?[ \t]+|\.[ \t]*|,[ \t]+)(?:{_PART}|van|von|de|der)){{0,3}}\.?),?[ \t]+"
    r"(?:M\.?D\b\.?|D\.O\.|DO(?=[\s.,;)]|$)|R\.?N\b|PA-C|N\.?P\b|Ph\.?D\b\.?|FRCR|FACR|FRANZCR|MBBS|MBChB"
    r"|ARNP|CRNP|DNP|RT\(R\)|RPA|RVT|RDMS|LPN|CNP|DDS|DPM)(?![a-z])"
)
_SIGNED: Final = re.compile(
    r"^[ \t]*(?:(?:electronically|digitally)\s+)?(?:signed|dictated|transcribed|interpreted|read|reported"
    r"|reviewed|approved|verified|"
    r"finali[sz]ed|authenticated|prepared|edited|performed|ordered|requested|referred"
    r"|attested)(?:\s+(?:and|&|/)\s*\w+)?(?:\s+electronically)?"
    r"(?:\s+by|\s*:)[ \t]*:?[ \t]*(?P<name>\S[^\n]{0,120})"
    r"|^[ \t]*(?:patient(?:'s)?(?:\s+name)?|name|"
    r"attending(?:\s+(?:physician|radiologist))?|resident|fellow|radiologist|technologist|sonographer|"
    r"(?:referring|ordering|requesting|primary\s+care)\s+(?:physician|provider|doctor|clinician|md)|"
    r"physician|provider|transcriptionist|operator|dictator|cc|signature|address|employer|next\s+of\s+kin"
    r"|guardian|institution|"
    r"hospital|facility)[ \t]*:[ \t]*(?P<other>\S[^\n]{0,120})",
    re.IGNORECASE | re.MULTILINE,
)
_AGENT: Final = re.compile(
    r"\b(?:discussed|communicated|reported|conveyed|relayed|notified|paged|called|telephoned|spoke|spoken"
    r"|telephone|signed|dictated|transcribed|interpreted|reviewed|read|"
    r"approved|verified|informed|contacted|consulted|ordered|requested|referred|attested|performed"
    r"|DISCUSSED|COMMUNICATED|REPORTED|CALLED|REVIEWED|SIGNED|DICTATED)\s+(?:directly\s+|verbally\s+"
    r"|in\s+person\s+|by\s+telephone\s+|by\s+phone\s+|via\s+phone\s+|electronically\s+|BY\s+PHONE\s+)*"
    rf"(?:(?:with|to|by|from|WITH|TO|BY)\s+)?(?:(?:the\s+)?(?:[a-z]+\s+)?(?:nurse|physician|resident"
    rf"|attending|radiologist|doctor|team|provider|clinician|surgeon)\s+)?(?P<name>{_PEOPLE})"
)
_I_NAME: Final = re.compile(rf"\bI,\s+(?P<name>{_PEOPLE}(?:,\s+(?:M\.?D\.?|D\.?O\.?))?),")
_NAMED: Final = re.compile(
    rf"\b(?:named?|patient|Patient|husband|wife|son|daughter|mother|father|brother"
    rf"|sister),?\s+(?P<name>{_PEOPLE})"
)
_LEAD: Final = re.compile(
    r"i|per|by|with|to|from|and|the|of|via|attending|resident|physician|radiologist|discussed"
)
_NO_NAME: Final = re.compile(
    r"as|was|by|at|with|the|for|via|this|who|on|in|of|to|is|not|our|has|from|status|emergency"
)


def find_patterns(text: str) -> Iterator[Span]:
    """Find identifying text by its form: addresses, numbers with a label, names after a title."""
    has_digits = any(map(str.isdigit, text))
    if "@" in text:
        yield from _spans(_EMAIL, text, Category.EMAIL)
    yield from _spans(_URL, text, Category.URL)
    if has_digits:
        yield from _spans(_PHONE, text, Category.PHONE, "number")
        yield from _spans(_SSN, text, Category.ID)
        yield from _spans(_LABELLED, text, Category.ID, "id")
        yield from _spans(_ADDRESS, text, Category.PLACE)
        yield from _spans(_AGE, text, Category.AGE, "age", "other")
    yield from _hospitals(text)
    yield from _people(text)


def find_numbers(text: str) -> Iterator[Span]:
    """Find long numbers and codes without a label; a date may look like one."""
    yield from _spans(_LONG_NUMBER, text, Category.ID)
    for match in _CODE.finditer(text):
        token = match[0].rstrip("-")
        if sum(map(str.isdigit, token)) < _MIN_CODE_DIGITS or not any(map(str.isalpha, token)):
            continue
        if len(token) > _LONGEST_WORD or not _NO_CODE.fullmatch(token):
            yield Span(start=match.start(), end=match.end(), category=Category.ID)


def _spans(pattern: re.Pattern[str], text: str, category: Category, *groups: str) -> Iterator[Span]:
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


def _people(text: str) -> Iterator[Span]:
    """Find names that a title, a degree or a verb announces."""
    for pattern in (_TITLED, _I_NAME):
        yield from _spans(pattern, text, Category.NAME, "name")
    for match in _LOW_TITLED.finditer(text):
        first, *rest = match["name"].split()
        if not _NO_NAME.fullmatch(fold(first)):
            known = lexicon()
            end = match.end() if rest and not known.is_known(rest[0]) else match.start("name") + len(first)
            yield Span(start=match.start("name"), end=end, category=Category.NAME)
    for match in _DEGREED.finditer(text):
        yield from _trimmed(match["name"], match.start("name"), keep_one=True)
    for match in _SIGNED.finditer(text):
        group = "name" if match["name"] is not None else "other"
        if not _is_prose(match[group]):
            end = match.start(group) + len(match[group].rstrip(" \t.\r"))
            yield Span(start=match.start(group), end=end, category=Category.NAME)
    for pattern in (_AGENT, _NAMED):
        for match in pattern.finditer(text):
            yield from _trimmed(match["name"], match.start("name"), keep_one=False)


def _trimmed(name: str, start: int, *, keep_one: bool) -> Iterator[Span]:
    """Yield the part of a run of capitalized words that can be a name, without common words around it."""
    known = lexicon()
    words = list(re.finditer(r"[^\W\d_]+(?:['-][^\W\d_]+)*", name))
    is_word = [
        (known.is_common(fold(word[0])) and len(word[0]) > 1)
        or (len(word[0]) <= 3 and not keep_one and word[0].isupper())
        for word in words
    ]
    if keep_one:
        # Text before a degree is a name even if it is also a word: only leading words are removed.
        while len(words) > 1 and (_LEAD.fullmatch(fold(words[0][0])) or words[0][0].endswith("ed")):
            del words[0], is_word[0]
    else:
        while words and is_word[0]:
            del words[0], is_word[0]
        while words and is_word[-1]:
            del words[-1], is_word[-1]
    if words:
        yield Span(start=start + words[0].start(), end=start + words[-1].end(), category=Category.NAME)


def _is_prose(line: str) -> bool:
    """Return whether the text after a label is a sentence about the body rather than a name."""
    words = re.findall(r"[^\W\d_]+", line)
    known = lexicon()
    return len(words) >= 2 and all(known.is_common(fold(word)) for word in words)


DateOrder: TypeAlias = Literal["unknown", "mdy", "dmy"]
"""Order of day and month in 03/04/2019; if unknown, such a date is removed, because its day is ambiguous."""

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


def find_dates(text: str, order: DateOrder) -> Iterator[Span]:
    """Find dates; the span of one that names a single day holds the day."""
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
    # Without a day: a birth date is only known in its English forms, and must never become a distance.
    # Searching for the bare words first is much faster than searching for them in context.
    lowered = text.lower()
    is_abroad = any(month in lowered for month in _MONTHS_ABROAD)
    for match in _WRITTEN_ABROAD.finditer(text) if is_abroad else ():
        yield Span(start=match.start(), end=match.end(), category=Category.DATE)
    for match in _MONTH_AFTER.finditer(text):
        yield Span(start=match.start("month"), end=match.end("month"), category=Category.DATE)
    for match in _PARTIAL.finditer(text):
        first, second = int(match["a"]), int(match["b"])
        is_day = (1 <= first <= 12 and 1 <= second <= 31) or (1 <= second <= 12 and 1 <= first <= 31)
        if not is_day or _RATIO_CONTEXT.search(text[max(0, match.start("date") - 24) : match.start("date")]):
            continue
        if match["s"] == "-" and _RANGE_CONTEXT.search(text[match.start() : match.start("date")]):
            continue
        yield Span(start=match.start("date"), end=match.end("date"), category=Category.DATE)


def find_times(text: str) -> Iterator[Span]:
    """Find times of day."""
    if ":" not in text and "m" not in text.lower() and "h" not in text:
        return
    for pattern in (_TIME, _ISO_TIME):
        for match in pattern.finditer(text):
            yield Span(start=match.start(), end=match.end(), category=Category.TIME)
    for match in _BARE_TIME.finditer(text):
        yield Span(start=match.start("time"), end=match.end("time"), category=Category.TIME)


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
