"""Names of people that a title, a label, a degree or a verb announces, in English."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from shardflow.packing.deid.lexicon import fold, lexicon
from shardflow.packing.deid.text_patterns import UPPER, Category, Span, spans_of

_PART: Final = rf"(?:[{UPPER}][^\W\d_]*(?:['\N{{RIGHT SINGLE QUOTATION MARK}}-][^\W\d_]+)*)"
_NAME: Final = rf"(?:{_PART}|(?:van|von|de|der|den|del|della|di|da|la|le|bin|al)\b)(?:\.?[ \t]+|\.)"
_PEOPLE: Final = rf"(?:{_NAME}){{0,4}}{_PART}"
_TITLED: Final = re.compile(
    rf"(?:\b(?:Dr|Drs|DR|DRS|Prof|PROF)\b\.?|\b(?:Mr|Mrs|Ms|MRS)\b\.?"
    rf"|\b(?:Doctors?|Professor|Miss|Sister|Nurse|Rev\.|Sr\.)(?=\s))[ \t]+"
    rf"(?P<name>{_PEOPLE}(?:\s*(?:,|and|&|/)\s*(?:Drs?\.?\s+)?{_PEOPLE})?)"
)
_LOW_TITLED: Final = re.compile(r"\b(?:[dD]r\.?|mrs\.?|mr\.)[ \t]+(?P<name>[a-z]{2,}(?:[ \t]+[a-z]{2,})?)")
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
    r"|^[ \t]*(?:(?P<loose>re|attn|attention|requesting|ordering)|patient(?:'s)?(?:\s+name)?|name|dictating|"
    r"reporting(?:\s+(?:physician|radiologist))?|"
    r"attending(?:\s+(?:physician|radiologist))?|resident|fellow|radiologist|technologist|sonographer|"
    r"(?:referring|ordering|requesting|primary\s+care)\s+(?:physician|provider|doctor|clinician|md)|"
    r"physician|provider|transcriptionist|operator|dictator|cc|signature|address|employer|next\s+of\s+kin"
    r"|guardian|institution|"
    r"hospital|facility)[ \t]*:[ \t]*(?P<other>\S[^\n]{0,120})",
    re.IGNORECASE | re.MULTILINE,
)
_AFTER_NAME: Final = re.compile(
    r"\s{1,3}(?:and|&)\s+[a-z]+\s+by\b|,?\s{1,3}(?:M\.?D|D\.?O|R\.?N|PA-C|N\.?P|Ph\.?D|FRCR|FACR|MBBS|RT)\b"
)
"""Where a name in the line of a signature ends; what follows is left to other rules."""
_AGENT: Final = re.compile(
    r"\b(?i:discussed|communicated|reported|conveyed|relayed|given|notified|paged|called|telephoned|spoke|spoken"
    r"|telephone|signed|dictated|transcribed|interpreted|reviewed|read|"
    r"approved|verified|informed|contacted|consulted|ordered|requested|referred|attested|performed"
    r"|texted|emailed|e-mailed|messaged|d/w)\s+(?:directly\s+|verbally\s+"
    r"|in\s+person\s+|by\s+telephone\s+|by\s+phone\s+|via\s+phone\s+|electronically\s+|BY\s+PHONE\s+)*"
    rf"(?:(?:with|w/|to|by|from|WITH|TO|BY)\s+)?(?:(?:the\s+)?(?:[a-z]+\s+)?(?:nurse|physician|resident"
    rf"|attending|radiologist|doctor|team|provider|clinician|surgeon)\s+)?(?P<name>{_PEOPLE})"
)
_I_NAME: Final = re.compile(rf"\bI,\s+(?P<name>{_PEOPLE}(?:,\s+(?:M\.?D\.?|D\.?O\.?))?),")
_NAMED: Final = re.compile(
    rf"(?:\b(?:named?|patient|Patient|husband|wife|son|daughter|mother|father|brother|sister|partner|sibling|colleague"
    rf"|caregiver|guardian|neighbor|[Tt]hank\s+you|[Tt]hanks|[Dd]ear|[Rr]egards|[Ss]incerely|[Rr]esident|[Ff]ellow"
    rf"|[Aa]ttn:?)|/es/|-in-law),?\s+(?P<name>{_PEOPLE})"
    rf"|\b(?P<trainee>{_PEOPLE}),?\s+\(?PGY-?\s?\d"
)
_LEAD: Final = re.compile(
    r"i|per|by|with|to|from|and|the|of|via|attending|resident|physician|radiologist|discussed"
)
_NO_NAME: Final = re.compile(
    r"as|was|by|at|with|the|for|via|this|who|on|in|of|to|is|not|our|has|from|status|emergency"
)


def find_people(text: str) -> Iterator[Span]:
    """Find names that a title, a degree or a verb announces."""
    for pattern in (_TITLED, _I_NAME):
        yield from spans_of(pattern, text, Category.NAME, "name")
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
        if not _is_prose(match[group]) and (match["loose"] is None or _has_name(match[group])):
            cut = _AFTER_NAME.search(match[group])
            written = match[group] if cut is None else match[group][: cut.start()]
            end = match.start(group) + len(written.rstrip(" \t.,\r"))
            yield Span(start=match.start(group), end=end, category=Category.NAME)
    for pattern in (_AGENT, _NAMED):
        for match in pattern.finditer(text):
            group = match.lastgroup or "name"
            yield from _trimmed(match[group], match.start(group), keep_one=False)


def _trimmed(name: str, start: int, *, keep_one: bool) -> Iterator[Span]:
    """Yield the part of a run of capitalized words that can be a name, without common words around it."""
    known = lexicon()
    words = list(re.finditer(r"[^\W\d_]+(?:['-][^\W\d_]+)*", name))
    is_word = [
        (known.is_common(fold(word[0])) and len(word[0]) > 1 and not _is_given_name(word[0]))
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


def _is_given_name(word: str) -> bool:
    """Return whether a word, written with a capital, is a name too: *Grace*, *White*."""
    return word.istitle() and fold(word) in lexicon().names


def _has_name(line: str) -> bool:
    """Return whether a capitalized word is no known one, or a name too."""
    known = lexicon()
    return any(
        not known.may_pass(word) or known.is_name_too(fold(word))
        for word in re.findall(r"[^\W\d_]{2,}", line)
        if word[0].isupper()
    )


def _is_prose(line: str) -> bool:
    """Return whether the text after a label is a sentence about the body rather than a name."""
    words = re.findall(r"[^\W\d_]+", line)
    known = lexicon()
    return len(words) >= 2 and all(known.is_common(fold(word)) for word in words)
