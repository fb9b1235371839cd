"""Code systems and units that may be published, and how to validate their codes.

These are allowlists: a code of an unlisted system is dropped, and so is one that is not built as its system
builds them. LOINC and SNOMED CT have check digits, so that a patient number does not pass for a code. Units
of records are expressions of UCUM and the usual spellings of laboratories. An annotation in braces is
removed; an expression with unknown atoms is no unit, and its number is dropped as well, because it would
mean something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

_PERMUTED: Final = (1, 5, 7, 6, 2, 8, 3, 0, 9, 4)


def is_verhoeff(digits: str) -> bool:
    """Return whether the last digit checks the others (Verhoeff), as in SNOMED CT identifiers.

    The check is a product in the dihedral group of order 10, of digits permuted by their place.

    Source: SNOMED CT Technical Implementation Guide, 5.4.
    """
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        for _ in range(place % 8):
            digit = _PERMUTED[digit]
        total = _multiply(total, digit)
    return total == 0


def _multiply(a: int, b: int) -> int:
    turned = (a + b) % 5 if a < 5 else (a - b) % 5
    return turned + 5 * ((a < 5) != (b < 5))


def is_mod_10(digits: str, check: int) -> bool:
    """Return whether ``check`` is the mod 10 digit of the others, as in LOINC codes.

    Source: LOINC Users' Guide, appendix C.
    """
    total = sum(
        int(digit) if place % 2 else sum(divmod(2 * int(digit), 10))
        for place, digit in enumerate(reversed(digits))
    )
    return -total % 10 == check


class _System(NamedTuple):
    names: str
    """URIs, OIDs and names of HL7 tables, separated by spaces."""
    pattern: str
    check: Callable[[str], bool] | None = None


def _is_loinc(code: str) -> bool:
    """Return whether the digit after the hyphen is right."""
    digits, _, check = code.removeprefix("LA").removeprefix("LP").partition("-")
    return is_mod_10(digits, int(check))


# Lists of short words: a form such as "two to eight capitals" would let names pass.
_MODALITIES: Final = (
    "AR|ASMT|AU|BDUS|BI|BMD|CFM|CR|CT|CTPROTOCOL|DMS|DG|DOC|DX|ECG|EEG|EMG|EOG|EPS|ES|FA|FID|FS|GM|HC|HD|IO|"
    "IOL|IVOCT|IVUS|KER|KO|LEN|LP|LS|M3D|MG|MR|NM|OAM|OCT|OP|OPM|OPR|OPT|OPTBSV|OPTENF|OPV|OSS|OT|PA|PLAN|POS|"
    "PR|PT|PX|RESP|RF|RG|RTDOSE|RTIMAGE|RTINTENT|RTPLAN|RTRAD|RTRECORD|RTSEGANN|RTSTRUCT|RWV|SC|SEG|SM|SMR|SR|"
    "SRF|STAIN|TEXTUREMAP|TG|US|VA|XA|XAPROTOCOL|XC"
)
"""PS3.16, CID 29 and 32."""
_FLAGS: Final = (
    "A|AA|AC|B|CAR|D|DET|E|EX|EXP|H|HH|HM|HU|HX|I|IE|IND|L|LL|LU|LX|MS|N|NCL|ND|NEG|NR|NS|OBX|POS|QCF|R|RR|S|"
    "SDD|SYN-R|SYN-S|TOX|U|UNE|VS|W|WR|<|>"
)
"""HL7 v2 table 0078 and v3 ObservationInterpretation."""
_SERVICES: Final = (
    "AU|BG|BLB|CG|CH|CP|CT|CTH|CUS|EC|EN|GE|HM|ICU|IMG|IMM|LAB|MB|MCB|MYC|NMR|NMS|NRS|OSL|OT|OTH|OUS|PAR|PAT|"
    "PF|PHR|PHY|PT|RAD|RC|RE|RT|RUS|RX|SP|SR|TX|VR|VUS|XRC"
)
"""HL7 v2 table 0074."""
_SYSTEMS: Final[Mapping[str, _System]] = {
    "ACTCODE": _System(
        "http://terminology.hl7.org/CodeSystem/v3-ActCode http://hl7.org/fhir/v3/ActCode"
        " 2.16.840.1.113883.5.4",
        "AMB|ACUTE|ASSERTION|EMER|FLD|HH|IMP|NONAC|OBSENC|PRENC|SS|VR",
    ),
    "ACTCLASS": _System("2.16.840.1.113883.5.6", "ACT|CONC|OBS|PROC|SBADM|SPLY|ENC|CLUSTER|BATTERY"),
    "ATC": _System(
        "http://www.whocc.no/atc urn:oid:2.16.840.1.113883.6.73 2.16.840.1.113883.6.73 ATC",
        r"[A-Z]\d\d(?:[A-Z](?:[A-Z](?:\d\d)?)?)?",
    ),
    "CPT": _System(
        "http://www.ama-assn.org/go/cpt 2.16.840.1.113883.6.12 C4 CPT4 CPT CPT-4", r"\d{4}[0-9A-Z](?:-\d\d)?"
    ),
    "CVX": _System(
        "http://hl7.org/fhir/sid/cvx 2.16.840.1.113883.12.292 2.16.840.1.113883.6.59 CVX", r"\d{1,3}"
    ),
    "DCM": _System(
        "http://dicom.nema.org/resources/ontology/DCM 1.2.840.10008.2.16.4 DCM", r"1[0-4]\d{4}|" + _MODALITIES
    ),
    "HCPCS": _System("urn:oid:2.16.840.1.113883.6.285 2.16.840.1.113883.6.13 HCPCS", r"[A-V]\d{4}"),
    "ICD-10": _System(
        "http://hl7.org/fhir/sid/icd-10 2.16.840.1.113883.6.3 I10 ICD-10 ICD10", r"[A-Z]\d\d(?:\.?\d{1,3})?"
    ),
    "ICD-10-CM": _System(
        "http://hl7.org/fhir/sid/icd-10-cm 2.16.840.1.113883.6.90 I10C ICD-10-CM ICD10CM",
        r"[A-Z]\d[0-9A-Z](?:\.?[0-9A-Z]{1,4})?",
    ),
    "ICD-10-GM": _System(
        "http://fhir.de/CodeSystem/bfarm/icd-10-gm http://fhir.de/CodeSystem/dimdi/icd-10-gm",
        r"[A-Z]\d\d(?:\.\d{1,2})?[+*!]?",
    ),
    "ICD-10-PCS": _System(
        "http://www.cms.gov/Medicare/Coding/ICD10 2.16.840.1.113883.6.4 ICD-10-PCS I10P",
        r"[0-9BCDFGHX][0-9A-HJ-NP-Z]{6}",
    ),
    "ICD-9-CM": _System(
        "http://hl7.org/fhir/sid/icd-9-cm 2.16.840.1.113883.6.103 2.16.840.1.113883.6.104 I9 I9C ICD-9-CM"
        " ICD9",
        r"(?:\d{2,3}|V\d\d|E\d{3})(?:\.\d{1,2})?",
    ),
    "LOINC": _System("http://loinc.org 2.16.840.1.113883.6.1 LN LOINC", r"(?:L[AP])?\d{1,7}-\d", _is_loinc),
    "NDC": _System("http://hl7.org/fhir/sid/ndc 2.16.840.1.113883.6.69 NDC", r"\d{4,5}-\d{3,4}-\d{1,2}"),
    "RADLEX": _System("http://radlex.org http://www.radlex.org RADLEX RadLex", r"RID\d{1,6}|RPID\d{1,5}"),
    "RXNORM": _System(
        "http://www.nlm.nih.gov/research/umls/rxnorm 2.16.840.1.113883.6.88 RXNORM RxNorm", r"\d{1,7}"
    ),
    "SNOMED": _System(
        "http://snomed.info/sct 2.16.840.1.113883.6.96 SCT SNOMED SNM3 SNOMED-CT",
        r"[1-9]\d{5,17}",
        is_verhoeff,
    ),
    "SRT": _System("http://snomed.info/srt SRT", r"[A-Z]\d?-[0-9A-F]{5}"),
    # Lists of words that FHIR itself defines.
    "ALLERGY-STATUS": _System(
        "http://terminology.hl7.org/CodeSystem/allergyintolerance-clinical"
        " http://terminology.hl7.org/CodeSystem/allergyintolerance-verification",
        "active|inactive|resolved|unconfirmed|presumed|confirmed|refuted|entered-in-error",
    ),
    "CONDITION-CATEGORY": _System(
        "http://terminology.hl7.org/CodeSystem/condition-category", "problem-list-item|encounter-diagnosis"
    ),
    "CONDITION-CLINICAL": _System(
        "http://terminology.hl7.org/CodeSystem/condition-clinical http://hl7.org/fhir/condition-clinical",
        "active|recurrence|relapse|inactive|remission|resolved|unknown",
    ),
    "CONDITION-VERIFICATION": _System(
        "http://terminology.hl7.org/CodeSystem/condition-ver-status http://hl7.org/fhir/condition-ver-status",
        "unconfirmed|provisional|differential|confirmed|refuted|entered-in-error",
    ),
    "DIAGNOSTIC-SERVICE": _System(
        "http://terminology.hl7.org/CodeSystem/v2-0074 2.16.840.1.113883.12.74", _SERVICES
    ),
    "INTERPRETATION": _System(
        "http://terminology.hl7.org/CodeSystem/v3-ObservationInterpretation http://hl7.org/fhir/v2/0078"
        " 2.16.840.1.113883.5.83 HL70078 HL78",
        _FLAGS,
    ),
    "OBSERVATION-CATEGORY": _System(
        "http://terminology.hl7.org/CodeSystem/observation-category http://hl7.org/fhir/observation-category",
        "activity|exam|imaging|laboratory|procedure|social-history|survey|therapy|vital-signs",
    ),
}
_NAMES: Final = {name.lower(): short for short, system in _SYSTEMS.items() for name in system.names.split()}
_PATTERNS: Final = {short: re.compile(system.pattern) for short, system in _SYSTEMS.items()}


def system_name(system: str) -> str | None:
    """Return the short name of a code system; None if its codes are not published.

    Example:
        >>> system_name("http://loinc.org"), system_name("2.16.840.1.113883.6.96"), system_name("http://our.lab")
        ('LOINC', 'SNOMED', None)
    """
    return _NAMES.get(system.strip().removeprefix("urn:oid:").lower())


def is_code(system: str, code: str) -> bool:
    """Tell whether a code may be one of a system.

    Args:
        system: Short name.
        code: The code.

    Example:
        >>> is_code("LOINC", "8302-2"), is_code("LOINC", "8302-3"), is_code("SNOMED", "53741008")
        (True, False, True)
    """
    if _PATTERNS[system].fullmatch(code) is None:
        return False
    check = _SYSTEMS[system].check
    return check is None or check(code)


_SCHEMES: Final = {
    "DCM": re.compile(r"1[0-4]\d{4}"),
    "FMA": re.compile(r"\d{4,6}"),
    "LN": re.compile(r"\d{1,5}-\d"),
    "MDC": re.compile(r"\d{1,3}:\d{1,5}"),
    "NCIt": re.compile(r"C\d{4,6}"),
    "RADLEX": re.compile(r"RID\d{1,5}"),
    "SCPECG": re.compile(r"5(?:\.\d{1,2}){1,4}(?:-\d{1,3}){1,3}"),
    "SCT": re.compile(r"[1-9]\d{2,14}[01]0\d"),
    "SNM3": re.compile(r"[A-Z]\d?-[0-9A-F]{4,5}"),
    "SRT": re.compile(r"[A-Z]\d?-[0-9A-F]{4,5}"),
    "UMLS": re.compile(r"C\d{7}"),
}
"""Coding schemes of DICOM objects (PS3.16, table 8-1), with the form of their values: the name of a scheme
alone would let any word pass. Identifiers of SNOMED CT are those of concepts."""
_CHECKS: Final[Mapping[str, Callable[[str], bool]]] = {"LN": _is_loinc, "SCT": is_verhoeff}


@dataclass(frozen=True, slots=True)
class Code:
    """A coded concept as a file states it, unchecked."""

    scheme: str
    value: str
    meaning: str = ""

    def __repr__(self) -> str:
        return "Code()"


def allow_code(code: Code | None) -> dict[str, str] | None:
    """Return a code of a DICOM object if its scheme is public and its value has the form of the scheme.

    Returns:
        ``{"scheme", "value"}``, or None. Private schemes (``99...``) may contain anything, and are dropped.

    Example:
        >>> allow_code(Code("SCT", "10200004", "Liver"))
        {'scheme': 'SCT', 'value': '10200004'}
        >>> allow_code(Code("SCT", "10200005")) is None  # the check digit is wrong
        True
    """
    if code is None or code.scheme not in _SCHEMES or not _SCHEMES[code.scheme].fullmatch(code.value):
        return None
    check = _CHECKS.get(code.scheme)
    if check is not None and not check(code.value):
        return None
    return {"scheme": code.scheme, "value": code.value}


_ANNOTATION: Final = re.compile(r"\{[^{}]*\}")
_SPLIT: Final = re.compile(r"[/.*]")
_POWER: Final = re.compile(r"10(?:\*|\^|E)-?\d{1,2}|[xX]?10[eE^*]\d{1,2}")
_EXPONENT: Final = re.compile(r"(?<=[A-Za-z\]])(?:\+|\^)?-?\d$")
_PREFIXES: Final = ("", *["da", "d", "c", "m", "u", "µ", "μ", "n", "p", "f", "k", "h", "M", "G"])
_METRIC: Final = frozenset(
    "g l L m s mol eq Eq osm Osm U IU [iU] kat cal J Pa bar Hz V A W K Bq Ci Gy Sv N C t".split()  # noqa: SIM905
)
_OTHER: Final = frozenset(
    """
    % [ppth] [ppm] [pH] pH 1 10 100 min h d wk mo a yr hr hrs sec mmHg mm[Hg] cm[H2O] cmH2O m[H2O] deg Cel
    degC degF [degF] [lb_av] lb lbs [oz_av] oz [in_i] in [ft_i] ft [arb'U] [drp] [IU] mIU uIU mEq dB [hp_X]
    bpm breaths beats cells /uL K M cmm mm3 mcg mcL HPF LPF [HPF] [LPF] [CFU] CFU [PFU] copies ratio score
    units unit tablet tab capsule puff ACTUAT [pack_yr] {score} HU
    """.split()  # noqa: SIM905
)
_MAX_LENGTH: Final = 32


def clean_unit(text: str) -> str | None:
    """Return a unit without annotations; None if it is not a known unit.

    Example:
        >>> clean_unit("10*3/uL"), clean_unit("{Score}"), clean_unit("mg/dL (Okafor)")
        ('10*3/uL', '1', None)
    """
    bare = _ANNOTATION.sub("", text.strip())
    if not bare or bare == "/":
        return "1"
    if len(bare) > _MAX_LENGTH:
        return None
    rest = _POWER.sub("1", bare)
    return bare if all(_is_atom(atom) for atom in _SPLIT.split(rest.strip("/"))) else None


def _is_atom(atom: str) -> bool:
    if atom in _OTHER or (atom.isdigit() and len(atom) <= 4):
        return True
    base = _EXPONENT.sub("", atom)
    return base in _OTHER or any(
        base.startswith(prefix) and base[len(prefix) :] in _METRIC for prefix in _PREFIXES
    )
