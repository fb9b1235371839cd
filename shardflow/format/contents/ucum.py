"""Conversion between units of measure of one kind, in the spellings of UCUM and of laboratories.

Factors are exact fractions, so that 13.2 g/dL is 132 g/L on every machine. A word that is not known here is a
kind of its own, which converts into nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from functools import cache
from typing import Final, NamedTuple


class _Unit(NamedTuple):
    factor: Fraction
    """In base units."""
    powers: tuple[tuple[str, int], ...]
    """Base units and their exponents, ascending."""


_PREFIXES: Final = {
    "da": "10", "d": "1/10", "c": "1/100", "m": "1e-3", "u": "1e-6", "µ": "1e-6", "μ": "1e-6", "n": "1e-9",
    "p": "1e-12", "f": "1e-15", "h": "100", "k": "1000", "M": "1e6", "G": "1e9",
}  # fmt: skip


def _table(text: str) -> dict[str, str]:
    return dict(entry.strip().split(" = ") for entry in text.split(";"))


# Factor and base units of what may have a prefix, and of what has none.
_METRIC: Final = _table("""
    m = 1 m; s = 1 s; g = 1 g; mol = 1 mol; A = 1 A; L = 1e-3 m3; l = 1e-3 m3; eq = 1 eq; Eq = 1 eq;
    osm = 1 osm; Osm = 1 osm; U = 1 U; IU = 1 iu; [iU] = 1 iu; [IU] = 1 iu; Hz = 1 s-1; N = 1000 g m s-2;
    Pa = 1000 g m-1 s-2; bar = 1e8 g m-1 s-2; m[H2O] = 9806650 g m-1 s-2; mH2O = 9806650 g m-1 s-2;
    m[Hg] = 133322387.415 g m-1 s-2; mHg = 133322387.415 g m-1 s-2; J = 1000 g m2 s-2; cal = 4184 g m2 s-2;
    W = 1000 g m2 s-3; V = 1000 g m2 s-3 A-1; Ohm = 1000 g m2 s-3 A-2; S = 1e-3 g-1 m-2 s3 A2;
    T = 1000 g s-2 A-1; Bq = 1 Bq; Ci = 37e9 Bq; Gy = 1 Gy; Sv = 1 Sv
""")
_OTHER: Final = _table("""
    % = 1/100; [ppth] = 1e-3; [ppm] = 1e-6; K = 1000; beats = 1; breaths = 1; cells = 1; copies = 1;
    sec = 1 s; min = 60 s; h = 3600 s; hr = 3600 s; hrs = 3600 s; d = 86400 s; wk = 604800 s;
    mo = 2629800 s; a = 31557600 s; yr = 31557600 s; bpm = 1/60 s-1; mcg = 1e-6 g; mcL = 1e-9 m3;
    cmm = 1e-9 m3; mIU = 1e-3 iu; uIU = 1e-6 iu; [lb_av] = 453.59237 g; lb = 453.59237 g; lbs = 453.59237 g;
    [oz_av] = 28.349523125 g; oz = 28.349523125 g; [in_i] = 0.0254 m; in = 0.0254 m; [ft_i] = 0.3048 m;
    ft = 0.3048 m; unit = 1 U; units = 1 U; tab = 1 tablet; [pH] = 1 pH; Cel = 1 Cel; dB = 1 dB; HU = 1 HU;
    lux = 1 lux
""")
# Kelvins = number * factor + offset.
_TEMPERATURES: Final = {
    **dict.fromkeys(("Cel", "degC", "deg C"), (Fraction(1), Fraction("273.15"))),
    **dict.fromkeys(("[degF]", "degF", "deg F"), (Fraction(5, 9), Fraction("459.67") * 5 / 9)),
}
_POWER_OF_TEN: Final = re.compile(r"[xX]?10[*^eE]([+-]?\d{1,2})")
_EXPONENT: Final = re.compile(r"(.*[A-Za-z\]µμ])\^?([+-]?\d)")
_ANNOTATION: Final = re.compile(r"\{[^{}]*\}")


@cache
def conversion(unit: str, target: str) -> tuple[float, float] | None:
    """Return the scale and offset with which numbers in a unit become numbers in another one.

    ``number * scale + offset``; None where the two are not of one kind, such as mass and amount of substance.

    Example:
        >>> conversion("g/dL", "g/L"), conversion("[degF]", "Cel"), conversion("mg/dL", "mmol/L")
        ((10.0, 0.0), (0.5555555555555556, -17.77777777777778), None)
    """
    if unit == target:
        return 1.0, 0.0
    if unit in _TEMPERATURES and target in _TEMPERATURES:
        (factor, zero), (target_factor, target_zero) = _TEMPERATURES[unit], _TEMPERATURES[target]
        return float(factor / target_factor), float((zero - target_zero) / target_factor)
    found, wanted = _parse(unit), _parse(target)
    if found is None or wanted is None or found.powers != wanted.powers:
        return None
    return float(found.factor / wanted.factor), 0.0


def _parse(text: str) -> _Unit | None:
    """Return a product of units; None if it is not written as one."""
    factor, powers = Fraction(1), Counter[str]()
    sign = 1
    for part in re.split(r"([./])", _ANNOTATION.sub("", text.strip())):
        if part in (".", "/"):
            sign = -1 if part == "/" else 1
        elif part:
            atom = _atom(part)
            if atom is None:
                return None
            factor *= atom.factor**sign
            for name, exponent in atom.powers:
                powers[name] += sign * exponent
    return _Unit(factor, tuple(sorted((name, exponent) for name, exponent in powers.items() if exponent)))


def _atom(text: str) -> _Unit | None:
    if text.isdigit():
        return _Unit(Fraction(text), ()) if int(text) else None
    if match := _POWER_OF_TEN.fullmatch(text):
        return _Unit(Fraction(10) ** int(match[1]), ())
    whole = _named(text)
    if whole is None and (match := _EXPONENT.fullmatch(text)):
        base, exponent = _named(match[1]), int(match[2])
        if base is not None:
            return _Unit(
                base.factor**exponent, tuple((name, exponent * power) for name, power in base.powers)
            )
    return whole or _Unit(Fraction(1), ((text, 1),))


def _named(text: str) -> _Unit | None:
    if text in _OTHER:
        return _definition(_OTHER[text])
    for prefix in ("", *_PREFIXES):
        if text.startswith(prefix) and (rest := text[len(prefix) :]) in _METRIC:
            known = _definition(_METRIC[rest])
            return known._replace(factor=known.factor * Fraction(_PREFIXES.get(prefix, "1")))
    return None


def _definition(text: str) -> _Unit:
    factor, *bases = text.split(" ")
    matches = [re.fullmatch(r"(\D+?)(-?\d)?", base) for base in bases]
    return _Unit(
        Fraction(factor), tuple(sorted((match[1], int(match[2] or 1)) for match in matches if match))
    )
