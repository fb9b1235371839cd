"""Does a reference to images belong to another examination? Read from the words around it."""

from __future__ import annotations

import re

__all__ = ["is_of_another_examination"]

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
