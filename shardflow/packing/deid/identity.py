"""Evidence of identity: what headers state about a person, as keyed digests that can be compared.

A hospital writes one person under several identifiers: with and without leading zeros, in another case, with
hyphens, with the site behind a caret, under the number of another department. Surrogates keep such
identifiers apart, and so do sample keys (docs/adr/0085-links.md); a split must not, because a model that was
trained on a person must not be tested on that person.

Packing processes reduce names, birth dates and identifiers to digests of 61 bits under the secret key
(`evidence_of`). The job collects them by patient (`PatientEvidence`) and compares pairs that share one
(`judge`). A value that many patients share, such as the birth date of a phantom, is a placeholder and links
nobody. Clinical records that list several numbers of their patient are evidence too (`listed_together`).
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.packing.deid.pseudonyms import DateOffsets, parse_date

if TYPE_CHECKING:
    from shardflow.packing.deid.pseudonyms import SecretKey

MAX_SHARED: Final = 16
"""Patients that may share a value; one that more of them share is a placeholder."""

_KIND_BITS: Final = 3
_DIGESTS: Final = 1 << (64 - _KIND_BITS)
_ZEROS: Final = re.compile(r"(?<!\d)0+(?=\d)")
_WORD: Final = re.compile(r"[^\W\d_]+")
_SITE: Final = re.compile(r"[\^@]")
_SUFFIX: Final = re.compile(r"(.*\w)[-_./ ]\d{1,2}\s*")
_MIN_DIGITS: Final = 4
"""Digits of an identifier before a suffix: with fewer it may be the number of a site,"""
_YEAR_ALONE: Final = re.compile(r"[^\d]*(?:19|20)\d\d")
"""and with those of a year alone the suffix is the number of a patient: ``2019-07``."""
_MIN_COUNTED: Final = 5
"""Digits from which a count such as *12345* is a placeholder."""
_YEAR: Final = re.compile(r"(?:1[89]|20)\d\d(?!\d(?!\d))")
_AGE: Final = re.compile(r"0*(\d{1,3})([DWMY]?)")
_AGE_UNITS_A_YEAR: Final = {"D": 366, "W": 53, "M": 12, "Y": 1, "": 1}
_UMLAUTS: Final = re.compile(r"([aou])e")
_PLACEHOLDERS: Final = frozenset(
    """
    anon anonym anonymized anonymised anonymous deidentified dummy emergency name nn noname none notfall
    paciente patient phantom qa quality removed service study subject test unbekannt unknown xxx
    """.split()  # noqa: SIM905
)


class _Kind(IntEnum):
    OWN = 0
    OTHER = 1
    NAME = 2
    BIRTH = 3
    SEX = 4
    PERSON = 5
    ISSUER = 6
    DATES = 7
    """No evidence: the offsets of the identifier's dates, which others of the person take over."""


Verdict: TypeAlias = Literal["certain", "uncertain"]
Listing: TypeAlias = Literal["certain", "uncertain", "possible"]
"""How sure it is that records list the identifiers of two patients as one person's (`judge`)."""
Listed: TypeAlias = tuple[tuple[int, ...], ...]
"""Numbers that a record lists for one patient: digests of each and of its issuer (0: none stated), sorted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedPerson:
    """What one header states about its patient. Holds identifiers: never in a message, log or dataset."""

    patient_id: str
    issuer: str = ""
    """(0010,0021) *Issuer of Patient ID*."""
    other_ids: tuple[str, ...] = ()
    """(0010,1000) *Other Patient IDs*, and those of (0010,1002)."""
    name: str = ""
    birth_date: str = ""
    sex: str = ""
    age: str = ""
    """(0010,1010) *Patient's Age* on the study date, for a header without a birth date."""
    study_date: str = ""

    def __repr__(self) -> str:
        return "StatedPerson()"


def split_id(patient_id: str) -> tuple[str, str]:
    """Return an identifier without zero padding, case, hyphens and blanks, and the site that it names.

    Example:
        >>> split_id("00-1234a^WEST"), split_id("1234A")
        (('1234a', 'west'), ('1234a', ''))
    """
    core, *parts = _SITE.split(patient_id)
    site = next((word for part in parts if (word := _plain(part.partition("&")[0]))), "")
    return _ZEROS.sub("", _plain(core)), site


def _without_suffix(patient_id: str) -> str:
    """Return a normalized identifier without a suffix of one or two digits; ``""`` if many may share it."""
    core = _SITE.split(patient_id)[0]
    match = _SUFFIX.fullmatch(core)
    base = _ZEROS.sub("", _plain(core if match is None else match[1]))
    is_long = sum(map(str.isdigit, base)) >= _MIN_DIGITS and _YEAR_ALONE.fullmatch(base) is None
    return base if is_long else ""


def normalize_names(name: str) -> tuple[str, ...]:
    """Return a person name in each of its writings: alphabetic, ideographic, phonetic; without placeholders.

    Source: DICOM PS3.5, section 6.2.1 (component groups).

    Example:
        >>> normalize_names("Mueller^Anna=Miller^Ann=")
        ('anna muller', 'ann miller')
    """
    first, *others = name.split("=")
    found = [normalize_name(first)]
    # One word is a whole name where people write names without a space, but not beside a family name alone.
    is_half = not found[0] and _WORD.search(first) is not None
    found += [one for one in map(normalize_name, others) if not is_half or " " in one]
    return tuple(dict.fromkeys(one for one in found if one))


def normalize_name(name: str) -> str:
    """Return family and first given name in one spelling and order; ``""`` for a placeholder or half a name.

    Args:
        name: One component group of a person name.

    Example:
        >>> normalize_name("MUELLER^Anna^B"), normalize_name("Anna Muller")
        ('anna muller', 'anna muller')
        >>> normalize_name("ANONYMOUS^P0012")
        ''
    """
    family, *given = re.split(r"[\^,]", name.strip(), maxsplit=2)
    if any(character.isdigit() for part in (family, *given[:1]) for character in part):
        return ""
    words = _WORD.findall(_fold(family)) + _WORD.findall(_fold(given[0] if given else ""))[:1]
    if not words or any(word in _PLACEHOLDERS for word in words):
        return ""
    # Composed: one syllable of Hangul is several letters here.
    is_whole = len(words) > 1 or (len(unicodedata.normalize("NFC", words[0])) > 1 and not words[0].isascii())
    return " ".join(sorted(words)) if is_whole else ""


def _plain(text: str) -> str:
    return "".join(character for character in _fold(text) if character.isalnum())


def _fold(text: str) -> str:
    """Return a text without case, accents, and the transcription of umlauts (ue for u)."""
    folded = unicodedata.normalize("NFKD", text.casefold())
    return _UMLAUTS.sub(r"\1", "".join(one for one in folded if not unicodedata.combining(one)))


@lru_cache(maxsize=1024)
def evidence_of(key: SecretKey, person: StatedPerson) -> tuple[int, ...]:
    """Return the evidence of one header: digests of 64 bits with their kind in the lowest three, sorted.

    Equal identifiers of a person and of another's *Other Patient IDs* get equal digests.
    """
    found: set[int] = set()

    def add(kind: _Kind, domain: str, text: str) -> None:
        if text:
            found.add(_digest(key, domain, text) << _KIND_BITS | kind)

    found.add(DateOffsets.of(key, person.patient_id).to_int() << _KIND_BITS | _Kind.DATES)
    core, site = split_id(person.patient_id)
    add(_Kind.OWN, "id", core)
    for issuer in (site, _plain(person.issuer)):
        add(_Kind.ISSUER, "issuer", issuer)
    for other in person.other_ids:
        # Without letters or digits of its own it names nobody; its own identifier is no other one.
        core_of_other = split_id(other)[0]
        if core_of_other != core:
            add(_Kind.OTHER, "id", core_of_other)
    names, born = normalize_names(person.name), parse_date(person.birth_date)
    sex = person.sex.strip().upper()
    add(_Kind.SEX, "sex", sex if sex in {"F", "M"} else "")
    for name in names:
        add(_Kind.NAME, "name", name)
        for year in _birth_years(person):
            add(_Kind.PERSON, "person", f"{name}/{year}")
    if born is not None:
        # The first of January stands for an unknown day, and disproves nothing.
        is_exact = (born.month, born.day) != (1, 1)
        add(_Kind.BIRTH, "birth", born.isoformat() if is_exact else "")
        for name in names:
            add(_Kind.PERSON, "person", f"{name}/{born.isoformat()}")
        base = _without_suffix(person.patient_id)
        add(_Kind.PERSON, "person", f"{base}#{born.isoformat()}" if base else "")
    return tuple(sorted(found))


@lru_cache(maxsize=1024)
def listed_together(key: SecretKey, numbers: tuple[tuple[str, str], ...]) -> Listed:
    """Return the evidence of a record that lists numbers of its patient; ``()`` without two different ones.

    Args:
        key: The secret key.
        numbers: Each number, and who issued it. Placeholders are nobody's.
    """
    found = set()
    for number, issuer in numbers:
        core, site = split_id(number)
        if is_number(number):
            by = _plain(issuer) or site
            found.add((_digest(key, "id", core), _digest(key, "issuer", by) if by else 0))
    return tuple(sorted(found)) if 1 < len({number for number, _ in found}) <= MAX_SHARED else ()


def is_number(patient_id: str) -> bool:
    """Return whether an identifier numbers a patient, and is no placeholder.

    Example:
        >>> [is_number(one) for one in ("A17", "NONE", "UNKNOWN1", "000", "9999", "123456789")]
        [True, False, False, False, False, False]
    """
    core, _ = split_id(patient_id)
    has_digits = any(map(str.isdigit, core)) and len(set(core)) > 1
    is_counted = len(core) >= _MIN_COUNTED and "1234567890".startswith(core)
    return has_digits and not is_counted and _PLACEHOLDERS.isdisjoint(_WORD.findall(core))


def own_numbers(tokens: Iterable[int]) -> frozenset[int]:
    """Return the digests of a patient's own identifier, as `listed_together` makes them."""
    return _Record.of(tokens).values[_Kind.OWN]


def may_be_issued_by(tokens: Iterable[int], issuer: int) -> bool:
    """Return whether a patient's headers state no other issuer than a record does (0: it states none)."""
    stated = _Record.of(tokens).values[_Kind.ISSUER]
    return not issuer or not stated or issuer in stated


def _digest(key: SecretKey, domain: str, text: str) -> int:
    return key.bucket(f"identity-{domain}", text, _DIGESTS)


def _birth_years(person: StatedPerson) -> tuple[int, ...]:
    """Return the years of birth that a header allows: of a whole or partial date, else by age."""
    stated = _YEAR.match(person.birth_date.strip())
    if stated is not None:
        return (int(stated[0]),)
    age, study = _AGE.fullmatch(person.age.strip().upper()), parse_date(person.study_date)
    if age is None or study is None:
        return ()
    least = int(age[1]) // _AGE_UNITS_A_YEAR[age[2]]
    return study.year - least - 1, study.year - least


def offsets_in(tokens: Iterable[int]) -> DateOffsets | None:
    """Return the offsets of dates in the evidence of a patient; None if an earlier release wrote it."""
    kinds = (1 << _KIND_BITS) - 1
    found = [token >> _KIND_BITS for token in tokens if token & kinds == _Kind.DATES]
    return DateOffsets.from_int(found[0]) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPerson:
    """How a patient who is one person with others appears in the dataset."""

    patient_key: str
    """Surrogate of the identifier that stands for all of the person."""
    dates: DateOffsets
    """Those of that identifier."""


@dataclass(frozen=True, slots=True)
class _Record:
    """Evidence of one patient, by kind."""

    values: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, tokens: Iterable[int]) -> _Record:
        values: list[set[int]] = [set() for _ in _Kind]
        for token in tokens:
            values[token & (1 << _KIND_BITS) - 1].add(token >> _KIND_BITS)
        return cls(tuple(map(frozenset, values)))

    def agrees(self, other: _Record, kind: _Kind) -> bool | None:
        """Return whether a value is the same; None if one of them has none."""
        own, others = self.values[kind], other.values[kind]
        return bool(own & others) if own and others else None

    def names(self, other: _Record) -> bool:
        """Return whether either is named among the other's further identifiers, or both name a third."""
        own, others = self.values, other.values
        return bool(
            own[_Kind.OTHER] & (others[_Kind.OWN] | others[_Kind.OTHER])
            or own[_Kind.OWN] & others[_Kind.OTHER]
        )


def judge(
    one: Sequence[int], other: Sequence[int], *, same_pixels: bool, listed: Listing | None = None
) -> tuple[Verdict | None, list[str]]:
    """Judge whether two patients are one person.

    Equal pixels are certain: the images would be in two splits whoever is in them. Identifiers that are equal
    after normalization, and those that a header names, need a birth date or a name that agrees: two people
    may differ in a leading zero. Name, birth date and sex that all agree are certain, without a sex, with an
    unknown day, or with an age in place of the date they are not. Nor are identifiers that agree but for a
    suffix of one or two digits, with one birth date: they are of visits, or of twins. A list of one patient's
    numbers in a record is certain unless name, birth date or sex contradict it.

    Args:
        one: Evidence of a patient, see `evidence_of`.
        other: Of another.
        same_pixels: Whether they share an image.
        listed: Whether records list the identifiers of both as one patient's: *uncertain* if an issuer
            differs from that of the headers, or several patients write such a number; *possible* if they
            are in no list together, and share a further number that may be a family's: never certain.

    Returns:
        The verdict, None if nothing links them; and the names of what agrees and (with ``not_``) differs.
    """
    if listed == "possible":
        verdict, evidence = judge(one, other, same_pixels=same_pixels)
        return verdict or "uncertain", ["record", *evidence]
    a, b = _Record.of(one), _Record.of(other)
    birth, name, sex = (a.agrees(b, kind) for kind in (_Kind.BIRTH, _Kind.NAME, _Kind.SEX))
    may_share_issuer = a.agrees(b, _Kind.ISSUER) is not False
    same_id = bool(a.agrees(b, _Kind.OWN)) and may_share_issuer
    is_named, shares_person = a.names(b), bool(a.agrees(b, _Kind.PERSON))
    # Dates of one year that differ are of two people. Without a name, identifiers agree but for a suffix.
    is_person = shares_person and bool(name) and birth is not False
    is_suffixed = shares_person and bool(birth) and not name and not same_id and may_share_issuer
    evidence = [
        word
        for word, holds in (
            ("pixels", same_pixels),
            ("patient_id", same_id),
            ("other_patient_ids", is_named),
            ("record", listed is not None),
            ("name_and_birth_date", is_person and birth),
            ("name_and_birth_year", is_person and not birth),
            ("patient_id_before_suffix", is_suffixed),
        )
        if holds
    ]
    evidence += [
        word if agrees else f"not_{word}"
        for word, agrees in (("birth_date", birth), ("name", name), ("sex", sex))
        if agrees is not None
    ]
    if same_pixels:
        return "certain", evidence
    is_stated = is_named or listed is not None
    if is_person and sex is not False:
        return ("certain" if (sex and birth) or same_id or is_stated else "uncertain"), evidence
    if not (same_id or is_stated or is_person):
        return ("uncertain" if is_suffixed else None), evidence
    if birth is False:
        return ("uncertain" if name or is_stated else None), evidence
    is_certain = sex is not False and (birth or name or (listed == "certain" and name is None))
    return ("certain" if is_certain else "uncertain"), evidence


class PatientEvidence:
    """Evidence of all patients, 12 bytes a value and patient.

    Attributes:
        patients: Their surrogates.
        listed: Lists of one patient's numbers in records, in order.
    """

    def __init__(self) -> None:
        self.patients: list[str] = []
        self.listed: dict[Listed, None] = {}
        self._numbers: dict[str, int] = {}
        self._last: list[int] = []
        self._owners = array("I")
        self._tokens = array("Q")

    def add(self, patient: str, tokens: Sequence[int]) -> int:
        """Add what a file states about its patient; return the number of the patient."""
        number = self._numbers.setdefault(patient, len(self.patients))
        if number == len(self.patients):
            self.patients.append(patient)
            self._last.append(0)
        # Most files of a patient state the same.
        summary = hash(tuple(tokens))
        if tokens and summary != self._last[number]:
            self._last[number] = summary
            self._tokens.extend(tokens)
            self._owners.extend([number] * len(tokens))
        return number

    def add_lists(self, listed: Iterable[Listed]) -> None:
        """Add what records list as one patient's numbers."""
        self.listed.update((one, None) for one in listed if one)

    def find(self, patient: str) -> int | None:
        """Return the number of a patient; None if unknown."""
        return self._numbers.get(patient)

    def sorted(self) -> SortedEvidence:
        """Return the evidence for comparisons."""
        owners = np.array(self._owners, np.uint32)
        tokens = np.array(self._tokens, np.uint64)
        order = np.lexsort((tokens, owners))
        owners, tokens = owners[order], tokens[order]
        is_new = np.ones(len(owners), np.bool_)
        is_new[1:] = (owners[1:] != owners[:-1]) | (tokens[1:] != tokens[:-1])
        return SortedEvidence(owners[is_new].astype(np.int64), tokens[is_new])


@dataclass(frozen=True, slots=True, eq=False)
class SortedEvidence:
    """Evidence by patient."""

    owners: NDArray[np.int64]
    """``(n,)`` number of the patient, ascending."""
    tokens: NDArray[np.uint64]
    """``(n,)`` evidence, ascending for each patient."""

    def of(self, patient: int) -> list[int]:
        """Return the evidence of a patient."""
        start, stop = np.searchsorted(self.owners, [patient, patient + 1])
        found: list[int] = self.tokens[start:stop].tolist()
        return found

    def without_placeholders(self) -> SortedEvidence:
        """Return the evidence without further identifiers that more than `MAX_SHARED` patients share."""
        kinds = self.tokens & np.uint64((1 << _KIND_BITS) - 1)
        values = self.tokens >> np.uint64(_KIND_BITS)
        is_other = kinds == np.uint64(_Kind.OTHER)
        shared, counts = np.unique(values[is_other], return_counts=True)
        is_kept = ~(is_other & np.isin(values, shared[counts > MAX_SHARED]))
        return SortedEvidence(self.owners[is_kept], self.tokens[is_kept])

    def are_own(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of some numbers (`listed_together`) are a patient's own identifier, ``(n,)``."""
        kinds = self.tokens & np.uint64((1 << _KIND_BITS) - 1)
        return np.isin(numbers, self.tokens[kinds == np.uint64(_Kind.OWN)] >> np.uint64(_KIND_BITS))

    def owners_of(self, numbers: Collection[int]) -> dict[int, list[int]]:
        """Return the patients whose own identifier each of some numbers is (`listed_together`)."""
        values = self.tokens >> np.uint64(_KIND_BITS)
        chosen = self.tokens & np.uint64((1 << _KIND_BITS) - 1) == np.uint64(_Kind.OWN)
        chosen &= np.isin(values, np.fromiter(numbers, np.uint64, len(numbers)))
        found: dict[int, list[int]] = {}
        for value, owner in zip(values[chosen].tolist(), self.owners[chosen].tolist(), strict=True):
            found.setdefault(value, []).append(owner)
        return found

    def pairs(self) -> NDArray[np.int64]:
        """Return patients that share an identifier, or a birth date and a name or the base of an identifier.

        Returns:
            ``(n, 2)``, ascending.
        """
        kinds = self.tokens & np.uint64((1 << _KIND_BITS) - 1)
        masks = (
            np.isin(kinds, [np.uint64(_Kind.OWN), np.uint64(_Kind.OTHER)]),
            kinds == np.uint64(_Kind.PERSON),
        )
        values = self.tokens >> np.uint64(_KIND_BITS)
        found = [pairs_of_equal(values[chosen], self.owners[chosen]) for chosen in masks]
        return np.unique(np.concatenate(found), axis=0)


def pairs_of_equal(values: NDArray[np.uint64], owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pairs of different owners of equal values, ``(n, 2)``, each ascending.

    Args:
        values: ``(m,)``; one that more than `MAX_SHARED` owners share pairs nobody.
        owners: ``(m,)``.
    """
    order = np.lexsort((owners, values))
    values, owners = values[order], owners[order]
    is_new = np.ones(len(values), np.bool_)
    is_new[1:] = (values[1:] != values[:-1]) | (owners[1:] != owners[:-1])
    values, owners = values[is_new], owners[is_new]
    is_first = np.ones(len(values), np.bool_)
    is_first[1:] = values[1:] != values[:-1]
    starts = np.flatnonzero(is_first)
    sizes = np.diff(np.append(starts, len(values)))
    found = list(_pairs(owners, starts, sizes))
    return np.unique(np.concatenate(found), axis=0) if found else np.empty((0, 2), np.int64)


def _pairs(
    owners: NDArray[np.int64], starts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> Iterator[NDArray[np.int64]]:
    """Yield the pairs of runs of owners, all runs of a size together."""
    for size in range(2, MAX_SHARED + 1):
        chosen = starts[sizes == size]
        if not len(chosen):
            continue
        runs = owners[chosen[:, None] + np.arange(size)]
        first, second = np.triu_indices(size, 1)
        yield np.stack([runs[:, first].ravel(), runs[:, second].ravel()], axis=1)
