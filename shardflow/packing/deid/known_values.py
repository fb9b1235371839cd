"""Known values: finds in a report what the patient's headers say about people.

The surest way to find a name in a text is to know it. The values are read when the study is packed, stay in
the memory of that process, and are written nowhere.

Masking names that are also words (*White*, *May*, *Stone*) wherever they occur would shred the text: such a
name counts only beside another part of the same name, after a title, or with a capital in the middle of a
sentence (see docs/adr/0080-report-scrubbing.md).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rapidfuzz.distance import OSA
from rapidfuzz.fuzz import ratio

from shardflow.packing.deid.lexicon import Lexicon, fold, lexicon
from shardflow.packing.deid.text_patterns import Category, Span

# All attributes of VR PN (PS3.6), wherever they stand.
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
"""Attributes whose values are looked for; none of them ever leaves."""

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
"""Letters of what is rather *CT* than a part of a name, in a field for numbers."""
_LOCAL_DIGITS: Final = 7
"""Digits of a telephone number that people say without country and area."""
_MAX_VALUES: Final = 256
"""Values of one kind that are looked for; a study names a handful of people."""


class _Expression(NamedTuple):
    """Pattern of one value in a text."""

    pattern: str
    """Regular expression; empty for a value that is not looked for."""
    needle: str
    """What is left of every match without its signs: nothing but its letters and digits, in their order; or
    a part of that."""


_NOTHING: Final = _Expression("", "")


class KnownValues:
    """The identifying values around one study, ready to be looked for in any number of texts."""

    def __init__(self, attributes: Iterable[Mapping[str, Sequence[str | int | float]]]) -> None:
        """Take values by DICOM keyword, one mapping for each file that was read."""
        found: dict[str, set[str]] = {}
        for mapping in attributes:
            for keyword, values in mapping.items():
                found.setdefault(keyword, set()).update(str(value).strip() for value in values)

        def of(*keywords: str) -> list[str]:
            return sorted({value for keyword in keywords for value in found.get(keyword, ()) if value})[
                :_MAX_VALUES
            ]

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
        """Find the places of a value, also in another case, spacing or punctuation, or misspelled."""
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
            if number + 1 < len(words):
                beside = words[number + 1]
                is_pair = any(
                    {word, bare[number + 1]} <= person and word != bare[number + 1] for person in self._people
                )
                if is_pair and _BETWEEN_PARTS.fullmatch(text, end, beside[0]):
                    yield Span(start=start, end=beside[1], category=Category.NAME)
            if number + 2 < len(words) and len(bare[number + 1]) == 1:
                third = words[number + 2]
                if any(
                    {word, bare[number + 2]} <= person for person in self._people
                ) and _BETWEEN_PARTS.fullmatch(text, end, third[0]):
                    yield Span(start=start, end=third[1], category=Category.NAME)

    def _is_misspelled(self, word: str) -> bool:
        """Whether a word is one of the longer names but for a letter or two."""
        if len(word) < 5 or self._lexicon.is_known(word):
            return False
        for part in self._fuzzy:
            if abs(len(part) - len(word)) <= 2 and (
                ratio(part, word) >= _MIN_RATIO
                or (len(part) >= 6 and OSA.distance(part, word, score_cutoff=1) <= 1)
            ):
                return True
        return False

    def _is_name_here(self, text: str, start: int, end: int) -> bool:
        """Whether a name that is also a word, or is very short, is a name at this place."""
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
        """Words of places that mean nothing else."""
        words = {fold(word) for value in values for word in _WORD.findall(value)}
        return frozenset(word for word in words if len(word) >= 4 and not self._lexicon.is_known(word)) - {
            "hospital",
            "straße",
        }

    def _phrase(self, value: str) -> _Expression:
        """A place as a whole; a single common word, such as a department's, is none."""
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


def _name_parts(name: str) -> list[str]:
    """The parts of a person name, folded, without titles and particles."""
    written = re.split(r"[\^=\s,./\\_()-]+", name)
    transcribed = [part.lower().translate(_TRANSCRIPTION) for part in written]
    parts = [fold(part).strip("'") for part in dict.fromkeys([*written, *transcribed])]
    return [part for part in parts if part and not _PARTICLE.fullmatch(part) and any(map(str.isalpha, part))]


def _id_expression(value: str) -> _Expression:
    """An identifier with its characters apart by at most two signs, leading zeros or none."""
    characters = re.sub(r"[\W_]+", "", value)
    if len(characters) < 4 or not any(map(str.isdigit, characters)):
        return _NOTHING
    stripped = characters.lstrip("0")
    body = stripped if len(stripped) >= 4 else characters
    pattern = r"(?<![^\W_])0*" + r"[\W_]{0,2}".join(map(re.escape, body)) + r"(?![^\W_])"
    return _Expression(pattern, body)


def _phone_expression(value: str) -> _Expression:
    """A telephone number with its country and area, or with as much of them as somebody wrote."""
    digits = re.sub(r"\D+", "", value)
    if len(digits) < 6:
        return _NOTHING
    abroad, local = digits[:-_LOCAL_DIGITS], digits[-_LOCAL_DIGITS:]
    signs, optional = r"[\W_]{0,3}", ""
    for digit in abroad:
        optional = f"(?:{optional}{digit}{signs})?"
    return _Expression(rf"(?<!\d)\+?0{{0,2}}{optional}{signs.join(local)}(?!\d)", local)


def _script_expressions(name: str) -> list[_Expression]:
    """A name in a script without capitals or spaces, whole and in its parts of two signs and more."""
    expressions = []
    for group in name.split("="):
        parts = [part for part in re.split(r"[\^\s]+", group) if part]
        if any(letter.isalpha() and letter.lower() == letter.upper() for letter in group):
            expressions.append(_Expression(r"[\W_]{0,2}".join(map(re.escape, parts)), "".join(parts)))
            expressions += [_Expression(re.escape(part), part) for part in parts if len(part) > 1]
    return [each for each in expressions if len(each.needle) > 1]


_MONTHS: Final = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]


def _date_expressions(value: str) -> list[_Expression]:
    """One day as people write it."""
    digits = value.replace("-", "").replace(".", "")
    if not re.fullmatch(r"\d{8}", digits) or not 1 <= int(digits[4:6]) <= 12:
        return []
    year, month, day = digits[:4], int(digits[4:6]), int(digits[6:])
    name = _MONTHS[month - 1]
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
    """Compile what may match; most values are not in a text, and to compile them takes longer than to look.

    Args:
        expressions: What to look for.
        squeezed: The text in lower case without its signs, where it is ASCII; else None, and all are taken:
            letters of other scripts may be equal to others but for their case.
    """
    kept = [
        expression.pattern
        for expression in expressions
        if expression.pattern
        and (squeezed is None or not expression.needle.isascii() or expression.needle.lower() in squeezed)
    ]
    return re.compile("|".join(kept), re.IGNORECASE) if kept else None


def _is_measure(text: str, match: re.Match[str]) -> bool:
    """Whether a short number is part of a measurement."""
    return bool(_UNIT.match(text, match.end())) or text[max(0, match.start() - 1) : match.start()] in {
        ".",
        "x",
    }
