"""Classes of series descriptions: one word of a closed list says what a description calls its series.

People write anything into a description, so none is published. Its words are searched for the field's own
terms: phases of contrast in CT, weightings in MR, attenuation correction in PET, and what was computed from
other images. Two phases in one description, or none, are no class.
"""

from __future__ import annotations

import re
from typing import Final

from shardflow.packing.deid.pixel_rules import split_words

_SURVEY: Final = r"(?<!skeletal )(?<!bone )(?<!myeloma )survey"
_MADE: Final = (
    (
        "localizer",
        r"scouts?|locali[sz]ers?|topograms?|surview|scanogram|lokalizer|" + _SURVEY,
    ),
    ("mip", r"(thick )?m(in|ax)? ?i ?ps?|maximum intensity( projection)?"),
    ("volume_rendering", r"vrt?|volume render(ing|ed)?"),
    ("perfusion", r"perf(usion)?|ctp|cbf|cbv|mtt|tmax|ttp|(pc)?asl|arterial spin( label+ing)?|dsc|dce"),
    ("subtraction", r"subtraction|subtracted|subtraktion|dsa"),
    ("angiography", r"angio(graphy|graphie|grafia|gram)?|cta|mra|tof"),
)
"""What a series is, whatever phase it is of."""
_NO: Final = r"(non?|without|w ?o|ohne|sans|sin|senza|pre)"
_NOT_BOTH: Final = r"(?<!with )(?<!\bw )(?<!and )"
"""Series with and without contrast are of no phase."""
_CONTRAST: Final = r"(contrast(e|o)?|km|iv|inj(ection)?|gad(o(linium)?)?|gd)"
_PHASES: Final = (
    (
        "non_contrast",
        rf"{_NOT_BOTH}{_NO} (iv )?{_CONTRAST}|noncon(trast)?|non con|unenhanced|plain|nati(v|ve|vo|va)|平扫",
    ),
    ("arterial", r"(early |late |hepatic )?art(?! red)(erial|eriell|erielle|eriosa|erielle|eriale)?|动脉期"),
    (
        "portal_venous",
        r"portal( ?ven(ous|os|oes|osa|euse))?|portalven(ous|os|oes|ose)|porto ?venous|pvp?|门静?脉期",
    ),
    ("nephrographic", r"nephro(graphic|genic|graphique|grafica)?|实质期"),
    ("excretory", r"excretory|excretion|urograph(y|ic)|urogram|pyelographic|排泄期"),
    ("delayed", r"delay(ed)?|late( phase| venous)?|spat(phase)?|spaet(phase)?|tardi(f|ve|a|vo)|延迟期"),
    ("venous", r"ven(ous|os|oes|osa|euse)?( phase)?|静脉期"),
)
"""Phases of contrast, in the order in which their words are taken out of a description."""
_WEIGHTINGS: Final = (
    ("t1", r"t 1 ?(flair|dark fluid)"),
    ("flair", r"(t 2 )?(t 2 ?)?flair|dark fluid"),
    ("adc", r"e?adc|apparent diffusion( coefficient)?"),
    ("dwi", r"dwi|diff(usion)?|dti|resolve|trace(w)?"),
    ("swi", r"swi|swan|suscept(ibility)?"),
    ("stir", r"stir|tirm"),
    ("t2_star", r"t 2 ?(star|s)|(t 2 )?(gre|ffe|hemo|heme)"),
    ("t1", r"t 1( ?w(i|eighted)?)?|mp ?rage|b ?ravo|fspgr|vibe|lava|thrive"),
    ("t2", r"t 2( ?w(i|eighted)?)?|haste|ssfse"),
    ("pd", r"pd( ?w)?|proton density"),
)
_CORRECTED: Final = r"att(enuation)?( |n )?corr(ected|ection)?"
_CORRECTIONS: Final = (
    (
        "not_attenuation_corrected",
        r"nac|(no|non|not|un|without|w ?o|ohne|sans|sin|senza) ?(ac|corrected|"
        + _CORRECTED
        + r")|uncorrected",
    ),
    ("attenuation_corrected", r"(ct|mr)? ?ac|" + _CORRECTED),
)
_ATTENUATION_MAP: Final = (("attenuation_map", r"(ct|mr) ?ac|ac ct|attenuation( correction| map)?|mu ?map"),)

_Terms = tuple[tuple[str, re.Pattern[str]], ...]


def _compiled(terms: tuple[tuple[str, str], ...]) -> _Terms:
    return tuple((name, re.compile(rf"(?<![^ ])(?:{pattern})(?![^ ])")) for name, pattern in terms)


_FIRST: Final[dict[str, _Terms]] = {
    "CT": _compiled((*_ATTENUATION_MAP, *_MADE)),
    "MR": _compiled((*_ATTENUATION_MAP, *_MADE, *_WEIGHTINGS)),
    "PT": _compiled((*_MADE[:3], *_CORRECTIONS)),
}
"""Classes by modality; the first whose words are found is the series' own."""
_ONE: Final[dict[str, _Terms]] = {"CT": _compiled(_PHASES)}
"""Likewise behind those: the one whose words are found, if no other's are."""


def description_class(modality: str, description: str) -> str | None:
    """Return the class of a series by the words of its description, in any case; None if it names none.

    Example:
        >>> description_class("CT", "ABD/PEL PortalVenous 3.0"), description_class("CT", "Art+Ven 1.0 B30f")
        ('portal_venous', None)
        >>> description_class("MR", "ax_T2_FLAIR fs"), description_class("PT", "WB uncorrected NAC")
        ('flair', 'not_attenuation_corrected')
    """
    # The star of T2* is the only sign that says something.
    words = split_words(description.replace("*", " star "))
    for name, pattern in _FIRST.get(modality, ()):
        if pattern.search(words):
            return name
    found = []
    for name, pattern in _ONE.get(modality, ()):
        words, count = pattern.subn("", words)
        if count:
            found.append(name)
    return found[0] if len(found) == 1 else None
