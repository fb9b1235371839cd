"""Section headings for coded sections, spelled as `shardflow.reports` knows them.

Codes are those of imaging reports: LOINC document sections, and DCM section headings (DICOM PS3.16, CID 7001)
with the concepts below them (CID 7002).
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["heading_of", "is_report_section", "join_sections"]

_BY_CODE: Final[dict[str, str]] = {
    # LOINC
    "10164-2": "HISTORY",
    "11329-0": "HISTORY",
    "18782-3": "FINDINGS",
    "18783-1": "RECOMMENDATION",
    "18785-6": "INDICATION",
    "18834-2": "COMPARISON",
    "19005-8": "IMPRESSION",
    "29299-5": "INDICATION",
    "29545-1": "FINDINGS",
    "55107-7": "ADDENDUM",
    "55110-1": "IMPRESSION",
    "55111-9": "TECHNIQUE",
    "55112-7": "IMPRESSION",
    "55114-3": "COMPARISON",
    "55115-0": "EXAMINATION",
    "59768-2": "INDICATION",
    "59776-5": "FINDINGS",
    # Seen for the one above.
    "859776-5": "FINDINGS",
    # DCM
    "121060": "HISTORY",
    "121062": "INDICATION",
    "121064": "TECHNIQUE",
    "121065": "TECHNIQUE",
    "121066": "COMPARISON",
    "121068": "COMPARISON",
    "121069": "FINDINGS",
    "121070": "FINDINGS",
    "121071": "FINDINGS",
    "121072": "IMPRESSION",
    "121073": "IMPRESSION",
    "121074": "RECOMMENDATION",
    "121075": "RECOMMENDATION",
    "121076": "IMPRESSION",
    "121077": "IMPRESSION",
    "121078": "ADDENDUM",
    "121109": "INDICATION",
    "121110": "HISTORY",
    "121111": "IMPRESSION",
    # Suffixes of HL7 v2.3, 7.1.4
    "ADT": "ADDENDUM",
    "GDT": "FINDINGS",
    "IMP": "IMPRESSION",
    "REC": "RECOMMENDATION",
}
_BY_WORD: Final = (
    ("addend", "ADDENDUM"),
    ("comparison", "COMPARISON"),
    ("conclusion", "IMPRESSION"),
    ("impression", "IMPRESSION"),
    ("recommendation", "RECOMMENDATION"),
    ("finding", "FINDINGS"),
    ("indication", "INDICATION"),
    ("technique", "TECHNIQUE"),
)
_BODY: Final = frozenset({"ADDENDUM", "FINDINGS", "IMPRESSION"})
_MAX_LENGTH: Final = 60
_UNFIT: Final = re.compile(r"[^\w ,/&()-]+")


def heading_of(code: str, name: str = "") -> str:
    """Return the heading of a section; ``""`` for one whose code nobody knows and that has no name.

    Example:
        >>> heading_of("121070"), heading_of("X1", "Radiologist impression"), heading_of("X1", "Lungs")
        ('FINDINGS', 'IMPRESSION', 'LUNGS')
    """
    if (known := _BY_CODE.get(code.strip())) is not None:
        return known
    lowered = name.lower()
    for word, heading in _BY_WORD:
        if word in lowered:
            return heading
    return " ".join(_UNFIT.sub(" ", name).split())[:_MAX_LENGTH].strip().upper()


def is_report_section(heading: str) -> bool:
    """Tell whether a document with such a section is a report of findings."""
    return heading in _BODY


def join_sections(sections: list[tuple[str, str]]) -> str:
    r"""Join headings and texts; neighbours of one heading share it.

    Example:
        >>> join_sections([("FINDINGS", "A."), ("FINDINGS", "B."), ("", "C.")])
        'FINDINGS:\nA.\nB.\n\nC.\n'
    """
    parts: list[str] = []
    last = None
    for heading, text in sections:
        body = text.strip()
        if not body:
            continue
        if parts and heading == last:
            parts[-1] += f"\n{body}"
        else:
            parts.append(f"{heading}:\n{body}" if heading else body)
        last = heading
    return "\n\n".join(parts) + "\n" if parts else ""
