"""Units of measurement that may leave: expressions of UCUM, and what laboratories write beside it.

What stands in braces is an annotation for people and is taken off; an expression whose atoms are not all
known is no unit, and its number does not leave either: it would mean something else.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["clean_unit"]

_ANNOTATION: Final = re.compile(r"\{[^{}]*\}")
_SPLIT: Final = re.compile(r"[/.*]")
_POWER: Final = re.compile(r"10(?:\*|\^|E)-?\d{1,2}|[xX]?10[eE^*]\d{1,2}")
_EXPONENT: Final = re.compile(r"(?<=[A-Za-z\]])(?:\+|\^)?-?\d$")
_PREFIXES: Final = (
    "",
    "da",
    "d",
    "c",
    "m",
    "u",
    "\N{MICRO SIGN}",
    "\N{GREEK SMALL LETTER MU}",
    "n",
    "p",
    "f",
    "k",
    "h",
    "M",
    "G",
)
_METRIC: Final = frozenset(
    [
        "g",
        "l",
        "L",
        "m",
        "s",
        "mol",
        "eq",
        "Eq",
        "osm",
        "Osm",
        "U",
        "IU",
        "[iU]",
        "kat",
        "cal",
        "J",
        "Pa",
        "bar",
        "Hz",
        "V",
        "A",
        "W",
        "K",
        "Bq",
        "Ci",
        "Gy",
        "Sv",
        "N",
        "C",
        "t",
    ]
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
    """Return a unit without annotations; None for what is none.

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
