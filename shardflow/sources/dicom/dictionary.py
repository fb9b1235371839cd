"""The DICOM UIDs that packing knows: which objects are images, which encodings can be read.

Both lists fail closed: an object or an encoding that is not here is not packed, with a reason.

Source: DICOM PS3.4 annex B (storage SOP classes) and PS3.6 annex A (UIDs), edition 2024b.
"""

from __future__ import annotations

__all__ = [
    "DEFLATED",
    "ENCAPSULATED_SYNTAXES",
    "EXPLICIT_BIG",
    "EXPLICIT_LITTLE",
    "IMAGE_CLASSES",
    "IMPLICIT_LITTLE",
    "MEDIA_DIRECTORY",
    "NATIVE_SYNTAXES",
    "RLE",
    "SECONDARY_CLASSES",
    "STATED_UNITS",
]

_STORAGE = "1.2.840.10008.5.1.4.1.1."

MEDIA_DIRECTORY = "1.2.840.10008.1.3.10"
"""Media Storage Directory: a DICOMDIR."""

SECONDARY_CLASSES = frozenset(_STORAGE + end for end in ("7", "7.1", "7.2", "7.3", "7.4"))
"""Secondary captures: screen saves, dose pages, scanned film."""

IMAGE_CLASSES = SECONDARY_CLASSES | frozenset(
    _STORAGE + end
    for end in (
        *("1", "1.1", "1.1.1", "1.2", "1.2.1", "1.3", "1.3.1"),  # CR, DX, MG, intra-oral
        *("2", "2.1", "2.2"),  # CT, enhanced, legacy converted
        *("4", "4.1", "4.3", "4.4"),  # MR, enhanced, enhanced colour, legacy converted
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
"""Objects whose pixels are packed. Segmentations, dose grids, parametric maps and whole slides are not among
them."""

IMPLICIT_LITTLE = "1.2.840.10008.1.2"
EXPLICIT_LITTLE = "1.2.840.10008.1.2.1"
DEFLATED = "1.2.840.10008.1.2.1.99"
EXPLICIT_BIG = "1.2.840.10008.1.2.2"
RLE = "1.2.840.10008.1.2.5"

STATED_UNITS = frozenset(
    {"BQML", "CM2ML", "CNTS", "GML", "MLMING", "MLMINML", "PROPCNTS", "STDDEV", "UMOLML"}  # (0054,1001) Units
    | {"ED", "EDW", "HU", "HU_MOD", "MGML", "OD", "PCT", "Z_EFF"}  # (0028,1054) Rescale Type
)
"""Units that a file may state for its values; other words, and "unspecified" ones, are no unit."""

NATIVE_SYNTAXES = frozenset({IMPLICIT_LITTLE, EXPLICIT_LITTLE, DEFLATED, EXPLICIT_BIG})
"""Pixels lie in the file as they are."""

ENCAPSULATED_SYNTAXES = frozenset(
    {RLE} | {f"1.2.840.10008.1.2.4.{end}" for end in (50, 51, 57, 70, 80, 81, 90, 91, 201, 202, 203)}
)
"""RLE, JPEG (baseline, extended, lossless), JPEG-LS, JPEG 2000, HTJ2K."""
