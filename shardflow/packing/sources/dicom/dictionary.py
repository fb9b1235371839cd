"""Tables of the DICOM standard: UIDs of image classes and encodings, tags of attributes, sequences of people.

The lists of classes and encodings fail closed: what is missing is not packed, with a reason. The tags that
packing itself needs are listed because pydicom's dictionary loads all of pydicom: a third of a second and
30 MB in every process; ``keywords.txt`` and ``sequences.txt`` hold them. Other keywords, such as those of a
site's own rules, are looked up there.

Source: DICOM PS3.4 annex B (storage SOP classes) and PS3.6 chapter 6 and annex A (registry of data
elements, UIDs), edition 2024b.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Final, NamedTuple

_STORAGE = "1.2.840.10008.5.1.4.1.1."

MEDIA_DIRECTORY = "1.2.840.10008.1.3.10"
"""Media Storage Directory: a DICOMDIR."""

SECONDARY_CLASSES = frozenset(_STORAGE + end for end in ("7", "7.1", "7.2", "7.3", "7.4"))
"""Secondary captures: screen saves, dose pages, scanned film."""

NUCLEAR = _STORAGE + "20"
DOSE_GRID = _STORAGE + "481.2"
PARAMETRIC_MAP = _STORAGE + "30"
MAP_CLASSES = frozenset({DOSE_GRID, PARAMETRIC_MAP})
"""Computed volumes: RT dose and parametric maps."""

WHOLE_SLIDE = _STORAGE + "77.1.6"
"""VL Whole Slide Microscopy Image: a level of a slide."""

IMAGE_CLASSES = (
    SECONDARY_CLASSES
    | MAP_CLASSES
    | {WHOLE_SLIDE}
    | frozenset(
        _STORAGE + end
        for end in (
            *("1", "1.1", "1.1.1", "1.2", "1.2.1", "1.3", "1.3.1"),  # CR, DX, MG, intra-oral
            *("2", "2.1", "2.2"),  # CT, enhanced, legacy converted
            *("4", "4.1", "4.3", "4.4"),  # MR, enhanced, enhanced color, legacy converted
            *("3", "3.1", "6", "6.1", "6.2", "6.3"),  # ultrasound, with the retired classes
            *("5", "20"),  # nuclear medicine
            *("12.1", "12.1.1", "12.2", "12.2.1", "12.3"),  # angiography, fluoroscopy
            *("13.1.1", "13.1.2", "13.1.3", "13.1.4", "13.1.5"),  # 3D X-ray, tomosynthesis
            *("14.1", "14.2"),  # intravascular optical coherence tomography
            *(
                "77.1",
                "77.2",
                "77.1.1",
                "77.1.1.1",
                "77.1.2",
                "77.1.2.1",
                "77.1.3",
                "77.1.4",
                "77.1.4.1",
                "77.1.7",
            ),
            *("77.1.5.1", "77.1.5.2", "77.1.5.4"),  # ophthalmology
            *("128", "128.1", "130"),  # PET
            "481.1",  # RT image
        )
    )
)
"""Objects whose pixels are packed. Segmentations are not among them."""

IMPLICIT_LITTLE = "1.2.840.10008.1.2"
EXPLICIT_LITTLE = "1.2.840.10008.1.2.1"
DEFLATED = "1.2.840.10008.1.2.1.99"
EXPLICIT_BIG = "1.2.840.10008.1.2.2"
RLE = "1.2.840.10008.1.2.5"

STATED_UNITS = frozenset(
    # (0054,1001) Units
    {"BQML", "CM2ML", "CNTS", "GML", "MLMING", "MLMINML", "PROPCNTS", "PROPCPS", "STDDEV", "UMOLML"}
    | {"ED", "EDW", "HU", "HU_MOD", "MGML", "OD", "PCT", "Z_EFF"}  # (0028,1054) Rescale Type
    | {"GY"}  # (3004,0002) Dose Units
)
"""Units that a file may state for its values; other words, and "unspecified" ones, are no unit."""

MAP_UNITS = frozenset(
    # UCUM codes of PS3.16, CID 82, 7180, 9301 and 9302
    {"1", "%", "[hnsf'U]", "{counts}", "{ratio}", "{Particles}/[100]g{Tissue}", "deg", "rad", "ppm", "ppb"}
    | {"mm2/s", "um2/s", "10-6.mm2/s", "10-3.mm2/s", "mm", "cm", "mm2", "cm2", "mm3", "cm3", "ml"}
    | {"s", "ms", "us", "/s", "/ms", "/min", "Hz", "kHz", "mm/s", "cm/s", "m/s", "T", "mT", "kPa", "Pa"}
    | {"ml/min", "ml/ml", "ml/s", "ml/ml/min", "ml/min/ml", "ml/(100.g)", "ml/(100.g.min)", "ml/min/(100.g)"}
    | {"g/ml", "mg/ml", "ug/ml", "mg/dl", "mmol/l", "umol/ml", "umol/min/ml", "mmol/kg"}
    | {"Bq/ml", "kBq/ml", "MBq/ml", "{propcounts}", "{propcounts}/s", "{counts}/s", "Gy", "cGy"}
    | {"g/ml{SUVbw}", "{SUVbw}g/ml", "{SUVlbm}g/ml", "{SUVibw}g/ml", "{SUVbsa}cm2/ml"}
)
"""Units that a parametric map may state for its values."""

NATIVE_SYNTAXES = frozenset({IMPLICIT_LITTLE, EXPLICIT_LITTLE, DEFLATED, EXPLICIT_BIG})
"""Syntaxes with uncompressed pixels."""

ENCAPSULATED_SYNTAXES = frozenset(
    {RLE} | {f"1.2.840.10008.1.2.4.{end}" for end in (50, 51, 57, 70, 80, 81, 90, 91, 201, 202, 203)}
)
"""RLE, JPEG (baseline, extended, lossless), JPEG-LS, JPEG 2000, HTJ2K."""


class Attribute(NamedTuple):
    """An entry of the registry."""

    tag: int
    representation: str
    """Value representation; the first one where the registry allows several."""


def find_attribute(keyword: str) -> Attribute | None:
    """Look a keyword up; None where the registry does not have it."""
    known = KNOWN.get(keyword)
    if known is not None:
        return Attribute(*known)
    from pydicom.datadict import dictionary_VR, tag_for_keyword

    tag = tag_for_keyword(keyword)
    return None if tag is None else Attribute(int(tag), str(dictionary_VR(tag)).split(" or ", maxsplit=1)[0])


def _words(name: str) -> Iterator[str]:
    text = resources.files(__package__).joinpath(name).read_text(encoding="ascii")
    return (word for line in text.splitlines() if not line.startswith("#") for word in line.split())


def _known() -> Iterator[tuple[str, tuple[int, str]]]:
    words = _words("keywords.txt")
    for keyword, tag, representation in zip(words, words, words, strict=True):
        yield keyword, (int(tag.replace(",", ""), 16), representation)


KNOWN: Final = dict(_known())
"""Tag and value representation of the attributes that packing reads, by keyword."""


def _tags() -> Iterator[int]:
    group = 0
    for word in _words("sequences.txt"):
        if word.endswith(":"):
            group = int(word[:-1], 16)
        else:
            yield group << 16 | int(word, 16)


SEQUENCES: Final = frozenset(_tags())
