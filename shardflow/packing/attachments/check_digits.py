"""Check digits of code systems, so that a patient number does not pass for a code."""

from __future__ import annotations

from typing import Final

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
