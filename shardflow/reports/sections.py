"""Sections of a report. They cover the text in order; nothing is lost or altered.

A header is a name at the beginning of a line, with a colon, or alone on its line. Known names
(``headers.csv`` of each language) may hold a typing error, have any case and follow a sentence on its line.
Unknown names in capitals open a section, too; names of anatomy under the findings are its sub-sections. A
finding in capitals that its line answers ("PNEUMOTHORAX: None") is no header but the first word of findings.
A second examination in one report begins where its header follows findings or an impression.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Literal, cast

from rapidfuzz.distance import DamerauLevenshtein

from shardflow.reports.assertion import find_cues
from shardflow.reports.attributes import sized
from shardflow.reports.language import Change, load_language, table_rows
from shardflow.reports.lexicon import Concept, Lexicon, load_lexicon
from shardflow.reports.tokens import PhraseIndex, fold_words, keep_longest, tokenize

SectionKind = Literal[
    "addendum",
    "comparison",
    "examination",
    "findings",
    "findings_impression",
    "impression",
    "indication",
    "notification",
    "other",
    "preamble",
    "recommendation",
    "signature",
    "technique",
]
"""``preamble``: what stands before the first header. ``other``: a header that nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A stretch of a report."""

    kind: SectionKind
    span: tuple[int, int]
    """Header and body, with the white space behind them; characters, closed-open."""
    header: tuple[int, int]
    """The header with its colon; empty at the section's start where there is none."""
    exam: int = 0
    """Number of its examination in the report, from 0."""
    part: str = ""
    """Anatomy that a sub-header of the findings names."""

    @property
    def body(self) -> tuple[int, int]:
        """Characters behind the header."""
        return self.header[1], self.span[1]


@dataclass(frozen=True, slots=True)
class _Header:
    start: int
    end: int
    kind: SectionKind
    part: str = ""
    is_answered: bool = False
    """Whether it is the name of a finding, with an answer, and belongs to the body."""


_NAME = r"[^\W\d_][^\n:.;?!\u3002\uff0c\uff1a\uff1b\u3011]{0,59}?"
# A name and its colon at the beginning of a line; bullets, numbers and stars may stand before it.
_GAP = r"[^\S\n]{0,60}"
_AT_LINE = re.compile(
    rf"^{_GAP}(?:[*#=_>\u2022\u3010-]+|\d{{1,2}}[.)])?{_GAP}(?P<name>{_NAME}){_GAP}[*_]*"
    r"(?P<mark>[:\uff1a]|\u3011[:\uff1a]?|[^\S\n]-(?=[^\S\n]))[*_]*",
    re.MULTILINE,
)
_ALONE = re.compile(rf"^{_GAP}[*#=_-]*{_GAP}(?P<name>{_NAME}){_GAP}[*=_-]*{_GAP}$", re.MULTILINE)
# A known name in capitals behind the end of a sentence.
_INLINE = re.compile(
    r"(?<=[.;?!:\])])[^\S\n]{1,60}(?P<name>[A-Z\u00c0-\u00de][A-Z\u00c0-\u00de' /&()-]{2,40}):"
)
_LONGEST_NAME = 6
"""Words of a header."""
_LONGEST_ANSWER = 16
"""Tokens of what answers a finding, with the colon."""
_SIGNS = frozenset(".,;()[]+-/")
_BODY_KINDS = frozenset(("findings", "findings_impression", "impression"))


def split_sections(text: str, *lexicons: Lexicon) -> list[Section]:
    """Cut a report into sections that cover it in order; an empty text has none.

    Args:
        text: Any text.
        lexicons: Names of anatomy for sub-headers, in each language whose headers count; none: the shipped
            ones of English.
    """
    headers = _headers(text, lexicons or (load_lexicon(),))
    sections: list[Section] = []
    if not headers or headers[0].start > 0:
        end = headers[0].start if headers else len(text)
        if end:
            sections.append(Section(kind="preamble", span=(0, end), header=(0, 0)))
    exam, has_body = 0, False
    current: SectionKind = "preamble"
    headers = list(_without_inner(headers))
    for number, header in enumerate(headers):
        end = headers[number + 1].start if number + 1 < len(headers) else len(text)
        kind = header.kind
        if (header.part or header.is_answered) and kind == "other":
            # An organ belongs to what it stands in; without a section around it, it is a finding.
            kind = current if current in _BODY_KINDS or current == "addendum" else "findings"
        if kind == "examination" and has_body:
            exam, has_body = exam + 1, False
        has_body = has_body or kind in _BODY_KINDS
        current = kind
        sections.append(
            Section(
                kind=kind,
                span=(header.start, end),
                header=(header.start, header.start if header.is_answered else header.end),
                exam=exam,
                part=header.part,
            )
        )
    return list(_with_last_paragraph(text, sections))


def _without_inner(headers: Sequence[_Header]) -> Iterator[_Header]:
    """Leave out answered findings that stand in a section of findings, of no part, already."""
    is_body = False
    for header in headers:
        if not (header.is_answered and is_body):
            yield header
        is_body = header.is_answered or (not header.part and header.kind in (*_BODY_KINDS, "addendum"))


def _with_last_paragraph(text: str, sections: list[Section]) -> Iterator[Section]:
    """Without findings or impression, the last paragraph of the last exam's text is the findings."""
    if any(section.kind in _BODY_KINDS for section in sections):
        yield from sections
        return
    told = [
        one for one in sections if one.kind not in ("signature", "addendum", "notification", "recommendation")
    ]
    for section in sections:
        cut = _last_paragraph(text, section) if told and section is told[-1] else None
        if cut is None:
            yield section
            continue
        start, end = section.span
        if cut > start:
            yield Section(
                kind=section.kind,
                span=(start, cut),
                header=section.header,
                exam=section.exam,
                part=section.part,
            )
        yield Section(kind="findings", span=(cut, end), header=(cut, cut), exam=section.exam)


def _last_paragraph(text: str, section: Section) -> int | None:
    body = text[section.body[0] : section.body[1]]
    breaks = list(re.finditer(r"\n[^\S\n]*\n\s*", body.rstrip()))
    if breaks:
        return section.body[0] + breaks[-1].end()
    if section.kind == "preamble" and body.strip():
        return section.span[0]
    return None


def _headers(text: str, lexicons: Sequence[Lexicon]) -> list[_Header]:
    found: dict[int, _Header] = {}
    for pattern in (_AT_LINE, _INLINE, _ALONE):
        for match in pattern.finditer(text):
            header = _read_header(match, lexicons, is_alone=pattern is _ALONE, is_inline=pattern is _INLINE)
            if header is not None and not any(
                header.start < other.end and other.start < header.end for other in found.values()
            ):
                found[header.start] = header
    return [found[start] for start in sorted(found)]


def _read_header(
    match: re.Match[str], lexicons: Sequence[Lexicon], *, is_alone: bool, is_inline: bool
) -> _Header | None:
    name = match["name"]
    start = match.start("name") if is_inline else match.start()
    is_dash = not is_alone and not is_inline and match["mark"].strip() == "-"
    for lexicon in lexicons:
        words = tuple(fold_words(name, lexicon.language))
        if not words or len(words) > _LONGEST_NAME + 6:
            continue
        kind = _known_kind(words, lexicon.language, is_fuzzy=not is_inline and not is_alone)
        if kind is not None:
            # Alone on its line, or before a dash, a name must look like a header, not like a sentence.
            has_case = name.lower() != name.upper()
            if (is_alone or is_dash) and has_case and not (name.isupper() or name.istitle()):
                return None
            return _Header(start, match.end(), kind)
    if is_alone or is_inline or is_dash:
        return None
    for lexicon in lexicons:
        concept = _anatomy(name, lexicon)
        if concept is not None:
            return _Header(start, match.end(), "other", concept.name)
    if name.isupper():
        is_examination = any(_modality(lexicon.language).search(name) for lexicon in lexicons)
        is_answered = (
            match["mark"] == ":"
            and not is_examination
            and any(
                _is_finding(name, lexicon) and _is_answer(match.string, match.end("name"), lexicon)
                for lexicon in lexicons
            )
        )
        return _Header(
            start, match.end(), "examination" if is_examination else "other", is_answered=is_answered
        )
    return None


def _anatomy(name: str, lexicon: Lexicon) -> Concept | None:
    """Return the anatomy that a name or all of its parts are; the first one of several."""
    language = lexicon.language
    concept = lexicon.phrases.get(" ".join(fold_words(name, language)))
    if concept is not None and concept.kind == "anatomy":
        return concept
    found = [
        lexicon.phrases.get(" ".join(fold_words(part, language)))
        for part in _joint(language).split(name)
        if part.strip()
    ]
    return found[0] if found and all(one is not None and one.kind == "anatomy" for one in found) else None


def _is_finding(name: str, lexicon: Lexicon) -> bool:
    """Return whether a name ends with that of a finding, and asks for none: "HISTORY OF STROKE"."""
    tokens = tokenize(name, lexicon.language)
    if any(one.value.effect in ("historical", "hypothetical") for one in find_cues(tokens, lexicon.language)):
        return False
    words = tokens.words
    phrases = (" ".join(words[first:]) for first in range(len(words)))
    return any(
        phrase in lexicon.phrases and lexicon.phrases[phrase].kind in ("disease", "finding")
        for phrase in phrases
    )


def _is_answer(text: str, colon: int, lexicon: Lexicon) -> bool:
    """Return whether the first sentence behind a name is its answer: "None", "Small", "4 mm, stable".

    Anything else is a sentence of its own ("The aorta is normal"), or says nothing ("N/A").
    """
    end = text.find("\n", colon)
    answer = text[colon : end if end >= 0 else None].lstrip("*_ \t\u00a0")
    tokens = tokenize(answer, lexicon.language)
    of, last = load_language(lexicon.language), tokens.sentences[0][1]
    words = tokens.words
    if last > _LONGEST_ANSWER:
        return False
    cues = [
        one
        for one in keep_longest(find_cues(tokens, lexicon.language))
        if one.last <= last and one.value.effect not in ("none", "stop", "hypothetical")
    ]
    measured = sized(tokens, lexicon.language)
    measured.update(number for number in range(last) if words[number] in of.severity)
    if measured and any(one.value.effect == "absent" for one in cues):
        # "None on the right, mild on the left".
        return False
    said = measured.union(number for number in range(last) if words[number] in of.sides)
    for first, behind, _ in (*cues, *_changes(lexicon.language).find(tokens)):
        said.update(range(first, behind))
    placed = next((number for number in range(last) if words[number] in of.placing), last)
    for first, behind in combinations(range(placed + 1, last + 1), 2):
        concept = lexicon.phrases.get(" ".join(words[first:behind]))
        if concept is not None and concept.kind == "anatomy":
            said.update(range(first, behind))
    beside = of.placing | of.determiner | of.adding | of.degree
    if any(
        one.first <= 1 and one.value.effect == "absent" and one.value.direction != "forward" for one in cues
    ):
        # "None seen on this study".
        beside |= of.verb | of.plain
    # The first token is the colon.
    return not said.isdisjoint(range(1, last)) and all(
        number in said or words[number] in _SIGNS or words[number] in beside for number in range(1, last)
    )


@cache
def _changes(language: str) -> PhraseIndex[Change]:
    phrases = load_language(language).changes.items()
    return PhraseIndex({" ".join(fold_words(phrase, language)): one for phrase, one in phrases})


@cache
def _joint(language: str) -> re.Pattern[str]:
    return load_language(language).compile(r"\s*(?:/|,|&|\b@and@\b)\s*")


@cache
def _modality(language: str) -> re.Pattern[str]:
    return load_language(language).compile(r"\b@modality@\b")


@cache
def _known(language: str) -> dict[tuple[str, ...], SectionKind]:
    known: dict[tuple[str, ...], SectionKind] = {}
    for row in table_rows("headers.csv", language):
        for header in row["headers"].split("|"):
            known[tuple(fold_words(header, language))] = cast("SectionKind", row["kind"])
    return known


def _known_kind(words: tuple[str, ...], language: str, *, is_fuzzy: bool) -> SectionKind | None:
    known = _known(language)
    if words in known:
        return known[words]
    # Numbers and brackets of "ADDENDUM 1" are no part of the name.
    bare = tuple(word for word in words if word not in ("(", ")", "the", "*") and not word.isdigit())
    if bare in known:
        return known[bare]
    if is_fuzzy and len(words) <= _LONGEST_NAME:
        return _misspelt(" ".join(bare), language)
    return None


@cache
def _long_headers(language: str) -> dict[str, SectionKind]:
    return {" ".join(words): kind for words, kind in _known(language).items() if len(" ".join(words)) >= 7}


def _misspelt(name: str, language: str) -> SectionKind | None:
    """Find a name that differs by one slip, in a longer one by two."""
    if len(name) < 6:
        return None
    best: tuple[int, SectionKind] | None = None
    for known, kind in _long_headers(language).items():
        allowed = 2 if len(known) >= 10 else 1
        if abs(len(known) - len(name)) > allowed:
            continue
        slips = DamerauLevenshtein.distance(name, known, score_cutoff=allowed)
        if slips <= allowed and (best is None or slips < best[0]):
            best = (slips, kind)
    return best[1] if best else None
