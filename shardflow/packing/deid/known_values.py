"""Finder of known values: occurrences in a report of what headers record about people.

The surest way to find a name in a text is to know it. The values are read when the study is packed, stay in
the memory of that process, and are never written.

Masking names that are also words (*White*, *May*, *Stone*) wherever they occur would shred the text: such a
name counts only beside another part of the same name, after a title, or with a capital in the middle of a
sentence (see docs/adr/0080-report-scrubbing.md).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from rapidfuzz.distance import OSA
from rapidfuzz.fuzz import ratio

from shardflow.packing.deid.lexicon import Lexicon, fold, lexicon
from shardflow.packing.deid.text_dates import MONTHS
from shardflow.packing.deid.text_patterns import Category, Span

# All attributes of VR PN (PS3.6), at any nesting level.
_NAMES: Final = tuple(
    """
    ConsultingPhysicianName ContentCreatorName CurrentObserverTrial DistributionName DocumentAuthorTrial
    EvaluatorName HumanPerformerName InterpretationAuthor InterpretationRecorder InterpretationTranscriber
    NameOfPhysiciansReadingStudy NamesOfIntendedRecipientsOfResults OperatorsName OrderEnteredBy
    OtherPatientNames PatientBirthName PatientMotherBirthName PatientName PerformingPhysicianName PersonName
    PhysicianApprovingInterpretation PhysiciansOfRecord ROIInterpreter ReferringPhysicianName
    RequestingPhysician ResponsiblePerson ReviewerName ScheduledPerformingPhysicianName
    SecondaryReviewerName SelectorPNValue VerbalSourceTrial VerifyingObserverName
    """.split()  # noqa: SIM905
)
_IDS: Final = tuple(
    """
    AccessionNumber AdmissionID DeviceSerialNumber FillerOrderNumberImagingServiceRequest
    FillerOrderNumberImagingServiceRequestRetired FillerOrderNumberProcedure InsurancePlanIdentification
    IssuerOfAdmissionID IssuerOfPatientID MedicalRecordLocator OtherPatientIDs PatientID
    PerformedProcedureStepID PlacerOrderNumberImagingServiceRequest
    PlacerOrderNumberImagingServiceRequestRetired PlacerOrderNumberProcedure RequestedProcedureID
    ScheduledProcedureStepID ServiceEpisodeID SpecimenAccessionNumber StudyID
    """.split()  # noqa: SIM905
)
_PLACES: Final = tuple(
    """
    InstitutionAddress InstitutionName InstitutionalDepartmentName PatientAddress PatientInstitutionResidence
    PerformedStationName PersonAddress ReferringPhysicianAddress RequestingService ResponsibleOrganization
    ScheduledPatientInstitutionResidence ScheduledStationName StationName
    """.split()  # noqa: SIM905
)
_PHONES: Final = (
    "PatientTelephoneNumbers",
    "PersonTelephoneNumbers",
    "ReferringPhysicianTelephoneNumbers",
)
_BIRTH_DATE: Final = "PatientBirthDate"

IDENTIFYING_KEYWORDS: Final[tuple[str, ...]] = tuple(
    sorted({*_NAMES, *_IDS, *_PLACES, *_PHONES, _BIRTH_DATE})
)
"""Attributes whose values are searched for; none of them is ever published."""

_MIN_RATIO: Final = 90.0
_WORD: Final = re.compile(r"[^\W\d_]+(?:['\N{RIGHT SINGLE QUOTATION MARK}][^\W\d_]+)*")
_TITLE: Final = re.compile(
    r"(?:\b(?:Mrs?|Ms|Miss|MRS|Dr|DR|Prof|PROF|Doctor|Patient|PATIENT|Name|NAME)\b[.:]?|[Nn]amed|\bM[RS]\.)\s+$"
)
_SENTENCE_START: Final = re.compile(r"(?:^|[.:;!?\n\r\]])[\s\"'(*-]*(?:\d+[.)]\s*)?$")
_BETWEEN_PARTS: Final = re.compile(r"[\s,.^_=-]{1,4}(?:[^\W\d_]\.?[\s,^_]{1,2})?")
_EPONYM_HEAD: Final = re.compile(
    r"(?:['\N{RIGHT SINGLE QUOTATION MARK}]s)?[\s-]+(?:[a-z]+[\s-]+)?(?:disease|syndrome|fracture|cyst|"
    r"lesion|lymphoma|node|sign|classification|type|tumou?r|contracture|ligament|deformity|catheter|line|"
    r"nodule)s?\b",
    re.IGNORECASE,
)
_TERM: Final = re.compile(
    r"(?:white|gr[ae]y)[\s-]+matter|white[\s-]+(?:blood|cell|out)|black[\s-]+blood|brown[\s-]+(?:fat|tumou?r)",
    re.IGNORECASE,
)
"""Terms that begin with a word that is a name too."""
_SIGNS: Final = re.compile(r"[\W_]+")
_UNIT: Final = re.compile(r"\s?(?:mm|cm|ml|cc|hu|mgy|mg|kg|ms|%|x\b|images?|slices?)", re.IGNORECASE)
_PARTICLE: Final = re.compile(
    r"van|von|de|der|den|del|della|di|da|la|le|el|al|bin|ibn|dos|das|jr|sr|ii|iii|iv|md|do|dr|prof"
)
_TRANSCRIPTION: Final = str.maketrans(
    {"\xe4": "ae", "\xf6": "oe", "\xfc": "ue", "\xe5": "aa", "\xf8": "oe", "\xe6": "ae"}
)
"""Transcriptions of letters that a keyboard lacks: Mueller for a name with u umlaut."""
_MAX_ABBREVIATION: Final = 2
"""Longest word of a patient identifier that is taken for an abbreviation such as *CT*, not for a name."""
_LOCAL_DIGITS: Final = 7
"""Digits of a telephone number without country and area code."""


class _Expression(NamedTuple):
    """Pattern of one value in a text."""

    pattern: str
    """Regular expression; empty for a value that is not searched for."""
    needle: str
    """Letters and digits that every match contains in this order once its other characters are removed; a
    quick test of whether the pattern can match at all."""


_NOTHING: Final = _Expression("", "")


class KnownValues:
    """Identifying values around one study, compiled to be searched for in any number of texts."""

    def __init__(self, attributes: Iterable[Mapping[str, Sequence[str | int | float]]]) -> None:
        """Collect values by DICOM keyword, from one mapping for each file that was read."""
        found: dict[str, set[str]] = {}
        for mapping in attributes:
            for keyword, values in mapping.items():
                found.setdefault(keyword, set()).update(str(value).strip() for value in values)

        def of(*keywords: str) -> list[str]:
            return sorted({value for keyword in keywords for value in found.get(keyword, ()) if value})

        self._lexicon: Lexicon = lexicon()
        names = [_name_parts(name) for name in of(*_NAMES)]
        # Some sites number their patients by name.
        names += [
            [part for part in _name_parts(value) if len(part) > _MAX_ABBREVIATION]
            for value in of("OtherPatientIDs", "PatientID")
            if not any(map(str.isdigit, value))
        ]
        self._people = [frozenset(part for part in parts if len(part) > 1) for parts in names]
        parts = {part for person in self._people for part in person}
        self._certain = {part for part in parts if len(part) >= 3 and not self._lexicon.is_common(part)}
        self._contextual = parts - self._certain
        self._joined = {
            first + second for person in self._people for first, second in itertools.permutations(person, 2)
        }
        self._fuzzy = sorted(part for part in self._certain if len(part) >= 5)
        self._places = self._place_words(of(*_PLACES))
        self._codes = [*map(_id_expression, of(*_IDS)), *map(_phone_expression, of(*_PHONES))]
        self._phrases = [self._phrase(value) for value in of(*_PLACES)]
        self._scripts = list(itertools.chain.from_iterable(map(_script_expressions, of(*_NAMES))))
        self._birth = list(itertools.chain.from_iterable(map(_date_expressions, of(_BIRTH_DATE))))

    def find(self, text: str) -> Iterator[Span]:
        """Find occurrences of the values, also in another case, spacing or punctuation, or misspelled."""
        yield from self._find_people(text)
        squeezed = _SIGNS.sub("", text).lower() if text.isascii() else None
        for expressions, category in (
            (self._scripts, Category.NAME),
            (self._codes, Category.ID),
            (self._phrases, Category.PLACE),
            (self._birth, Category.DATE),
        ):
            pattern = _alternatives(expressions, squeezed)
            for match in pattern.finditer(text) if pattern is not None else ():
                if category is not Category.ID or not (
                    match[0].isdigit() and len(match[0]) < 6 and _is_measure(text, match)
                ):
                    yield Span(start=match.start(), end=match.end(), category=category)

    def _find_people(self, text: str) -> Iterator[Span]:
        if not (self._people or self._places):
            return
        words = [(match.start(), match.end(), fold(match[0])) for match in _WORD.finditer(text)]
        bare = [word.removesuffix("'s") for *_, word in words]
        for number, (start, end, _) in enumerate(words):
            word = bare[number]
            if word in self._certain or word in self._joined or self._is_misspelled(word):
                if word not in self._lexicon.eponyms or not _EPONYM_HEAD.match(text, end):
                    yield Span(start=start, end=end, category=Category.NAME)
            elif word in self._contextual and self._is_name_here(text, start, end):
                yield Span(start=start, end=end, category=Category.NAME)
            elif word in self._places:
                yield Span(start=start, end=end, category=Category.PLACE)
            for distance in (1, 2):
                # An initial may separate two parts of a name.
                if number + distance < len(words) and (distance == 1 or len(bare[number + 1]) == 1):
                    pair, (pair_start, pair_end, _) = (
                        {word, bare[number + distance]},
                        words[number + distance],
                    )
                    is_pair = distance == 2 or len(pair) == 2
                    is_person = is_pair and any(pair <= person for person in self._people)
                    if is_person and _BETWEEN_PARTS.fullmatch(text, end, pair_start):
                        yield Span(start=start, end=pair_end, category=Category.NAME)

    def _is_misspelled(self, word: str) -> bool:
        """Return whether a word differs from one of the longer names by a letter or two."""
        if len(word) < 5 or _is_known(word):
            return False
        return any(
            ratio(part, word) >= _MIN_RATIO
            or (len(part) >= 6 and OSA.distance(part, word, score_cutoff=1) <= 1)
            for part in self._fuzzy
            if abs(len(part) - len(word)) <= 2
        )

    def _is_name_here(self, text: str, start: int, end: int) -> bool:
        """Return whether a word that may be a name, or is very short, is a name in this context."""
        before = text[max(0, start - 40) : start]
        word = text[start:end]
        if not word[0].isupper() or _TERM.match(text, start):
            return False
        if _TITLE.search(before):
            return True
        # In a text in capitals every word has one, and a sentence begins with one anyway.
        line_start = text.rfind("\n", 0, start) + 1
        line_end = text.find("\n", end)
        line = text[line_start : line_end if line_end >= 0 else len(text)]
        is_shouted = word.isupper() and (len(word) > 2 or line.isupper())
        return not is_shouted and not _SENTENCE_START.search(before)

    def _place_words(self, values: Iterable[str]) -> frozenset[str]:
        """Return the words of places that have no other meaning."""
        words = {fold(word) for value in values for word in _WORD.findall(value)}
        return frozenset(word for word in words if len(word) >= 4 and not self._lexicon.is_known(word)) - {
            "hospital",
            "straße",
        }

    def _phrase(self, value: str) -> _Expression:
        """Return the expression of a whole place; none for a single common word, such as a department's."""
        words = re.findall(r"[^\W_]+", value)
        folded = [fold(word) for word in words]
        if len("".join(folded)) < 4 or all(word.isdigit() for word in folded):
            return _NOTHING
        if len(folded) == 1 and self._lexicon.is_known(folded[0]):
            return _NOTHING
        if len(folded) == 1 and not folded[0].isalpha():
            return _id_expression(value)
        pattern = r"(?<![^\W_])" + r"[\W_]{1,3}".join(map(re.escape, words)) + r"(?![^\W_])"
        return _Expression(pattern, "".join(words))


@lru_cache(maxsize=1 << 14)
def _is_known(word: str) -> bool:
    """Return whether a folded word is known; reports share most of theirs."""
    return lexicon().is_known(word)


def _name_parts(name: str) -> list[str]:
    """Return the parts of a person name, folded, without titles and particles."""
    written = re.split(r"[\^=\s,./\\_()-]+", name)
    transcribed = [part.lower().translate(_TRANSCRIPTION) for part in written]
    parts = [fold(part).strip("'") for part in dict.fromkeys([*written, *transcribed])]
    return [part for part in parts if part and not _PARTICLE.fullmatch(part) and any(map(str.isalpha, part))]


def _id_expression(value: str) -> _Expression:
    """Return the expression of an identifier: up to two signs between characters, any leading zeros."""
    characters = re.sub(r"[\W_]+", "", value)
    if len(characters) < 4:
        return _NOTHING
    if not any(map(str.isdigit, characters)) and not _is_code_of_letters(value):
        return _NOTHING
    stripped = characters.lstrip("0")
    body = stripped if len(stripped) >= 4 else characters
    pattern = r"(?<![^\W_])0*" + r"[\W_]{0,2}".join(map(re.escape, body)) + r"(?![^\W_])"
    return _Expression(pattern, body)


def _is_code_of_letters(value: str) -> bool:
    """Return whether an identifier without a digit is no word: *QXRTLM*, but not *CHEST* or *CT-CHEST*."""
    words = re.findall(r"[^\W_]+", value)
    known = lexicon()
    return " " not in value and not all(known.may_pass(word) for word in words)


def _phone_expression(value: str) -> _Expression:
    """Return the expression of a telephone number, with all, part or none of its country and area code."""
    digits = re.sub(r"\D+", "", value)
    if len(digits) < 6:
        return _NOTHING
    abroad, local = digits[:-_LOCAL_DIGITS], digits[-_LOCAL_DIGITS:]
    signs, optional = r"[\W_]{0,3}", ""
    for digit in abroad:
        optional = f"(?:{optional}{digit}{signs})?"
    return _Expression(rf"(?<!\d)\+?0{{0,2}}{optional}{signs.join(local)}(?!\d)", local)


def _script_expressions(name: str) -> list[_Expression]:
    """Return expressions of a name in a script without case: whole, and its parts of several characters."""
    expressions = []
    for group in name.split("="):
        parts = [part for part in re.split(r"[\^\s]+", group) if part]
        if any(letter.isalpha() and letter.lower() == letter.upper() for letter in group):
            expressions.append(_Expression(r"[\W_]{0,2}".join(map(re.escape, parts)), "".join(parts)))
            expressions += [_Expression(re.escape(part), part) for part in parts if len(part) > 1]
    return [each for each in expressions if len(each.needle) > 1]


def _date_expressions(value: str) -> list[_Expression]:
    """Return expressions of the ways in which people write a day."""
    digits = value.replace("-", "").replace(".", "")
    if not re.fullmatch(r"\d{8}", digits) or not 1 <= int(digits[4:6]) <= 12:
        return []
    year, month, day = digits[:4], int(digits[4:6]), int(digits[6:])
    name = MONTHS[month - 1]
    word = rf"(?:{name}|{name[:3]}\.?{'|sept' if month == 9 else ''})"
    years, separator = rf"(?:{year}|'?{year[2:]})", r"\s?[-/. ]\s?"
    nth = rf"0?{day}(?:st|nd|rd|th)?"
    forms = [
        digits,
        rf"{year}{separator}0?{month}{separator}0?{day}",
        rf"0?{month}{separator}0?{day}{separator}{years}",
        rf"0?{day}{separator}0?{month}{separator}{years}",
        rf"{word}\s?{nth},?\s?{years}",
        rf"{nth}\s?(?:of\s)?{word},?\s?{years}",
        rf"0?{day}[-/]{name[:3]}[-/]{years}",
    ]
    # The two last digits of the year are in every form.
    return [_Expression(rf"(?<![\w/]){form}(?![\w/])", year[2:]) for form in forms]


def _alternatives(expressions: Iterable[_Expression], squeezed: str | None) -> re.Pattern[str] | None:
    """Compile the expressions that may match; compiling one takes longer than finding that it cannot.

    Args:
        expressions: Candidates.
        squeezed: The text in lower case without its signs if it is ASCII; else None, which keeps all
            expressions: outside ASCII, case folding may equate other letters.
    """
    kept = [
        expression.pattern
        for expression in expressions
        if expression.pattern
        and (squeezed is None or not expression.needle.isascii() or expression.needle.lower() in squeezed)
    ]
    return re.compile("|".join(kept), re.IGNORECASE) if kept else None


def _is_measure(text: str, match: re.Match[str]) -> bool:
    """Return whether a short number is part of a measurement."""
    return bool(_UNIT.match(text, match.end())) or text[max(0, match.start() - 1) : match.start()] in {
        ".",
        "x",
    }
