"""The strict mode: words that are on no list, and names that are words beside them.

A word in lower case passes in Spanish, German and French, whose names have capitals; in English, where lists
are long, it must be known, but for a slip of the keyboard. A capital in the middle of a Spanish or French
sentence is a name unless it is an eponym. Chinese has neither spaces nor capitals: `text_chinese` finds its
names by context alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from shardflow.packing.deid.lexicon import Lexicon, fold, lexicon
from shardflow.packing.deid.text_patterns import Category, Span

_WORD: Final = re.compile(r"[^\W\d_]+(?:['\N{RIGHT SINGLE QUOTATION MARK}][^\W\d_]+)*")
_YEAR: Final = re.compile(r"(?<![\w.,/-])(?:19|20)\d\d(?![\w/-]|[.,]\d|\s?(?:mm|cm|ml|hu|mg))", re.IGNORECASE)
_REMEMBERED: Final = 1 << 14
"""Words whose judgment is kept: reports share most of theirs."""
_FUNCTION_WORDS: Final = {
    "de": frozenset(
        """
        der die das den dem des ein eine einen einem einer und mit ohne bei von vom zum zur im ist
        wurde wurden kein keine keinen weder noch nicht durch auf aus fur sich seit nach unter uber bei
        als am jahre
        """.split()  # noqa: SIM905
    ),
    "romance": frozenset(
        """
        el la los las un una del al con sin por para se su y de en le les une des du au aux et par
        pour sur dans avec sans est sont son sa ce cet cette ces qui que ne il elle peut plus deux ou a ans
        anos pas d l n no hay muy mas sus como
        """.split()  # noqa: SIM905
    ),
    "en": frozenset(
        """
        the of and with without is are was were to for from by at no not this that there has have
        been or an it as
        """.split()  # noqa: SIM905
    ),
}
_START: Final = re.compile(
    r"(?:^|[.:;!?\n\r\])]|[-*\N{BULLET}]|\d[.)])[\s\"'(*\N{INVERTED QUESTION MARK}-]*$"
)
_ELISION: Final = re.compile(r"(?:[dljnsmtc]|qu)['\N{RIGHT SINGLE QUOTATION MARK}]", re.IGNORECASE)
_APOSTROPHE: Final = re.compile(r"['\N{RIGHT SINGLE QUOTATION MARK}]")
_BETWEEN: Final = re.compile(r"[ \t]|-|,[ \t]|[ \t][A-Z]\.?[ \t]")
_TITLES: Final = frozenset(
    """
    dr dra drs sr sra srta don dona prof pr me mr mme mlle mm monsieur madame docteur seguridad social
    """.split()  # noqa: SIM905
)


def find_unknown_words(text: str) -> Iterator[Span]:
    """Find words that are on no list, and years.

    Args:
        text: Without Chinese characters; see `shardflow.packing.deid.text_chinese.latin`.
    """
    known = lexicon()
    words = [(match.start(), match.end()) for match in _WORD.finditer(text)]
    # An initial with a full stop (*V.a.*, *d. h.*) is no word of a language.
    parts = [
        part
        for start, end in words
        if end - start > 1 or text[end : end + 1] != "."
        for part in _APOSTROPHE.split(fold(text[start:end]))
    ]
    language = _language(text, parts)
    unknown: list[bool] = []
    for start, end in words:
        elided = _ELISION.match(text, start, end)
        start = elided.end() if elided is not None and language == "romance" else start
        unknown.append(_is_unknown(text, start, end, known, language))
    _add_neighbors(text, words, unknown, known)
    for (start, end), is_unknown in zip(words, unknown, strict=True):
        if is_unknown:
            elided = _ELISION.match(text, start, end) if language == "romance" else None
            yield Span(start=start if elided is None else elided.end(), end=end, category=Category.WORD)


def find_years(text: str) -> Iterator[Span]:
    """Find years by themselves."""
    for match in _YEAR.finditer(text):
        yield Span(start=match.start(), end=match.end(), category=Category.DATE)


def find_names_that_are_words(text: str) -> Iterator[Span]:
    """Find pairs of capitalized words that are names too: *Rose White*."""
    known = lexicon()
    for match in _PAIR.finditer(text):
        first, second = fold(match["first"]), fold(match["second"])
        if first in known.names and known.is_name_too(second) and not _HEAD.match(text, match.end()):
            yield Span(start=match.start(), end=match.end(), category=Category.NAME)


_PAIR: Final = re.compile(
    r"\b(?P<first>[A-Z][a-z]{1,11}),?[ \t](?:[A-Z]\.?[ \t])?(?P<second>[A-Z][a-z]{2,11})\b"
)
_HEAD: Final = re.compile(
    r"(?:['\N{RIGHT SINGLE QUOTATION MARK}]s)?[\s-]{1,3}(?:cyst|lesion|sign|fracture|disease|node|nodule"
    r"|catheter|line|syndrome|type|matter|tumor|test|score|classification|criteria|procedure|defect|deformity|scale"
    r"|grade|angle|aneurysm|contracture|duct|esophagus|hernia|hump|lymphoma|muscular|oesophagus|palsy|pouch|pouche|ring"
    r"|tendon|thyroiditis|tube|vein|[AB][ ]line|Fraktur|Katheter"
    r"|Klassifikation|Knoten|Krankheit|Linie|Linien|Raum|Score|Syndrom|Typ|Winkel|Zeichen|Zyste"
    r"|Hospital|Clinic|Street|Road)s?\b",
    re.IGNORECASE,
)
# A number behind any other eponym may be an age, a time or a date: *Jones 54*, *Foley 14:30*.
_GRADED: Final = frozenset(("cobb", "garden", "gleason", "neer", "risser", "rockwood", "salter", "weber"))
_GRADE: Final = re.compile(r"[ ](?:\d{1,2}(?!\d|[:/-]\d|\.\d+\.|[ ]?[ap]\.?m\b)|[IV]{1,3}\b)")


@lru_cache(maxsize=_REMEMBERED)
def _is_foreign(word: str) -> tuple[bool, bool]:
    """Return whether a folded word is German, and whether it is Spanish or French, and no English one."""
    known = lexicon()
    if len(word) <= 3 or known.is_common(word) or word in known.english:
        return False, False
    return known.is_german(word), known.is_romance(word)


def _language(text: str, words: list[str]) -> str:
    """Return the language of a text by its words and letters: ``de``, ``romance`` or ``en``."""
    # Names have such letters too: they count no more than one function word.
    counts = {
        "en": 0,
        "de": min(2, len(_LETTERS_DE.findall(text))),
        "romance": min(2, len(_LETTERS_ROMANCE.findall(text))),
    }
    for word in words:
        for name, listed in _FUNCTION_WORDS.items():
            counts[name] += 2 * (word in listed)
        is_german, is_romance = _is_foreign(word)
        counts["de"] += is_german
        counts["romance"] += is_romance
    best = max(counts, key=lambda name: (counts[name], name == "en"))
    return best if counts[best] else "en"


def _is_unknown(text: str, start: int, end: int, known: Lexicon, language: str) -> bool:
    written = text[start:end]
    if _REMOVED in written:  # somebody removed a name before, and wrote on without a space
        start = end - len(written.lstrip("X"))
        written = written.strip("X")
        end = start + len(written)
    word = fold(written)
    if len(word) <= 1 or set(word) == {"x"}:
        return False
    if word == "weder" and _NEITHER.match(text, end) and _START.search(text, max(0, start - 12), start):
        return False
    if _ENTITY.fullmatch(text, start - 1, end + 1):
        return False
    if _begins_sentence(text, start, known, language):
        return False
    if _CONTRACTED.fullmatch(word) and known.is_common(_CONTRACTED.sub(r"\1", word)):
        return False
    if written.islower():
        return language == "en" and _is_unknown_word(written)
    if word in _GERMAN_ABBREVIATIONS and language != "de":
        return True
    eponym = word.removesuffix("'s")
    if {eponym} <= known.eponyms & known.names and not _is_eponym_here(text, start, end, known):
        return True
    is_title = written[0].isupper() and not written.isupper()
    if language == "romance" and is_title and not _START.search(text, max(0, start - 12), start):
        is_term = word in known.eponyms or known.is_acronym(written) or word in _TITLES
        return not (is_term or text[end : end + 2].strip()[:1] == ":")
    return _is_unknown_word(written) and not (is_title and _is_noun_here(text, start, end, known, language))


@lru_cache(maxsize=_REMEMBERED)
def _is_unknown_word(written: str) -> bool:
    """Return whether a word is on no list, and has no form of a term; in lower case more forms are terms."""
    known = lexicon()
    if known.may_pass(written) or known.is_misspelled(written):
        return False
    return not (written.islower() and (known.is_medical(fold(written)) or known.is_joined(written)))


_GERMAN_ABBREVIATIONS: Final = frozenset(("km", "lk", "nw", "ol", "ul"))
"""Two capitals that a German report needs; in other languages they may be somebody's initials."""
# A noun after *weder*, with or without an article or adjective; where a verb follows, it is somebody's name.
_NEITHER: Final = re.compile(
    r"[ \t]+(?:eine?[mnrs]?\b|(?:(?!wurde)[a-z]+[^\Wt]e[nrs]?[ \t]+)?(?=[A-Z\u00c4\u00d6\u00dc]))"
    r"[^.;:!?\n]{1,80}\bnoch\b[ \t]+(?!am\b|nicht\b|in\b|im\b|zu\b)\w"
)
# Words that begin sentences and are surnames too; before an article or a noun they are nobody's. An
# adjective has its article before it, and people and departments follow surnames: *Lange Radiologie*.
_OPENER: Final = {
    "de": re.compile(
        r"(?:Daher|Endlich|Ferner|Immer|Kaum|Trotz|Wegen|Weiter)[ \t]+"
        r"(?:(?:das|dem|den|der|des|die|eine?[mnrs]?|keine?[mnrs]?)\b|(?P<noun>{noun}))"
        r"|(?:Bland|Breit|Derb|Dick|Eng|Fein|Flach|Frisch|Glatt|Grob|Groß|Hart|Klein|Kräftig|Kurz|Lang|Rasch|Rund|Scharf|Schlank"
        r"|Schwach|Stark|Tief|Weich|Weit|Zart)"
        r"(?:er)?e[mnrs]?[ \t]+(?P<named>{noun})".replace(
            "{noun}", r"[A-Z\u00c4\u00d6\u00dc][a-z\u00e4\u00f6\u00fc\u00df]{3,}\b(?![,:])"
        )
    ),
    "romance": re.compile(
        r"(?:Así|Contra|Hors|Lors|Puis|Salvo|Sauf|Sólo|Solo)[ \t]+"
        r"(?:(?:(?:au|aux|de|del|des|du|el|la|las|le|les|los|un|una|une)[ \t]+"
        r"|[dl]['\N{RIGHT SINGLE QUOTATION MARK}])++"
        r"(?![A-Z\u00c0-\u00de][a-z\u00e0-\u00ff])"
        r"|[a-z\u00e0-\u00ff]{3,}(?:asis|itis|osis|omas?|megalia|algia|patía|uria|emia|miento|ción|ciones"
        r"|ites?|oses?|omes?|tions?|ements?|megalie|pathies?|plasies?|fractures?)\b)"
        r"|(?:Avis|Bonne?|Fausse|Faux|Grande?|Grosse?|Jeune|Large|Légère?|Longue?|Mauvaise?|Nulle|Petite?|Vieille)s?"
        r"[ \t]+(?:[a-zà-ÿ]{3,}(?:[st]ions?|ements?|graphies?|ismes?|ités?|mégalies?|pathies?)"
        r"|aspect|calibre|chenal|état|lésions?|nodules?)\b"
    ),
}
_SENTENCE: Final = re.compile(r"(?:^|\n|[a-z\u00e4\u00f6\u00fc\u00df]{4}[.:;!?])[ \t]*$")
_OFFICE: Final = re.compile(
    r".*(?:abteilung|ambulanz|anasthesie|arzt|arztin|assistent|assistentin|assistenz|befund|chirurg|chirurgie|chirurgin"
    r"|diktat|dienst|eltern|frau|gatte|gattin|iatrie|klinik|kollege|kollegin|kopie|leitung|loge|logie|login|mann"
    r"|mutter|patient|patientin|patienten|person|pflege|praxis|rucksprache|schwester|sohn|station|strasse|telefon"
    r"|telefonat|tochter|unterschrift|vater|vertretung|visite|zimmer)"
)


def _begins_sentence(text: str, start: int, known: Lexicon, language: str) -> bool:
    """Return whether a word that is a name too begins a sentence here: *Kleiner Pleuraerguss*, *Sauf une*."""
    pattern = _OPENER.get(language)
    match = None if pattern is None else pattern.match(text, start)
    if match is None or not _SENTENCE.search(text, max(0, start - 12), start):
        return False
    noun = fold(next(filter(None, match.groupdict().values()), ""))
    return not noun or (known.is_german(noun) and not known.is_name_too(noun) and not _OFFICE.fullmatch(noun))


_LETTERS_DE: Final = re.compile(r"[äöüß]", re.IGNORECASE)
_LETTERS_ROMANCE: Final = re.compile(r"[àâçèéêëíîïñóôúûœ]", re.IGNORECASE)
# No name follows *kein*, or *ein* with an adjective; verbs and prepositions in -en are no adjectives.
_ADJECTIVE: Final = (
    r"[a-zäöüß]{2,}(?:[^aeiou]ig|lich|[eioshrt]isch|[mnrstv]al|är|ell|iv|bar|los|haft|sam|förmig|ös|iert|weit|groß|klein)"
    r"e[mnrs]?"
)
_INDEFINITE: Final = re.compile(
    rf"\b[Kk]ein(?:e[mnrs]?)?[ \t]+(?:{_ADJECTIVE}[ \t]+)*$|\b[Ee]ine?[mnrs]?[ \t]+(?:{_ADJECTIVE}[ \t]+)+$"
)
_NAME_BESIDE: Final = re.compile(r"[ \t]*[-/][^\W\d_]|[ \t]+[A-ZÄÖÜ]")
# Nor is a name followed by a part of the body or a finding in the genitive: *Anhebung der Nervenwurzel*.
_GENITIVE: Final = {
    "de": re.compile(rf"[ \t]+(?:der|des)[ \t]+(?:{_ADJECTIVE}[ \t]+)*(?P<noun>[A-ZÄÖÜ][a-zäöüß]{{3,}})\b"),
    "romance": re.compile(
        r"[ \t]+(?:d(?:e|el|es|u)[ \t]+(?:la[ \t]+|l['\N{RIGHT SINGLE QUOTATION MARK}])?"
        r"|d['\N{RIGHT SINGLE QUOTATION MARK}])(?P<noun>[a-zà-ÿ]{4,})\b"
    ),
}
_TITLE_BEFORE: Final = re.compile(
    r"(?:\b(?i:frau|herrn?|dr|prof|lt|kolleg(?:in|en)|laut|gemäß|an|durch|für|von"
    # Somebody, and an object in the dative: *hat X der Operation zugestimmt*.
    r"|als|bevor|da|dass|hat(?:te)?|ist|kann|konnte|möchte|muss|nachdem|ob|soll(?:te)?|war|weil|wenn|wie|will|wird"
    r"|wollte|wurde)\.?|[:,])[ \t]*$"
)
# Departments, people and times, which follow whoever is on duty: *X der Notaufnahme*, *X de urgencias*.
_NOT_OF_BODY: Final = re.compile(
    rf"(?:{_OFFICE.pattern}|anmeldung|anruf|ansicht|auffassung|auftrag|.*aufnahme|bericht|eingriff|einrichtung|endoskopie"
    r"|fall|familie|firma|geburtshilfe|hauses|.*heilkunde|.*haus|hersteller|hinweis|inner|.*institut|.*kolleg|kontakt"
    r"|.*labor|.*medizin|meinung|morgen|orthopadie|plan|pforte|.*sekretariat|.*sprechstunde|tag|.*team|termin"
    r"|.*therapie|uberzeugung|.*universitat|verdacht|verwaltung|wache|wunsch|.*zentrale?|.*zentrum)(?:e[mnrs]?|innen|n|s)?"
    r"|(?:accord|accueil|anesthesie|astreinte|avis|bloc|bureau|cabinet|centre|.*chirurgie|clinique|consultation"
    r"|direction|domicile|epouse|equipe|etage|famille|fille|fils|garde|hopital|imagerie|infirmerie|jour|laboratoire"
    r"|maison|maternite|matin|medecine|mere|nuit|.*pedie|part|patiente?|pere|permanence|pharmacie|reanimation|retour"
    r"|secretariat|service|soins?|soir|.*therapie|unite|urgence|vacance|ville|.*logie|.*iatrie"
    r"|acuerdo|admision|alta|anestesia|.*cirugia|consulta|centro|dia|direccion|enfermeria|equipo|familia|farmacia"
    r"|guardia|hija|hijo|hospital|maternidad|madre|manana|medicina|noche|padre|paciente|parte|planta|quirofano|sala"
    r"|servicio|tarde|.*terapia|turno|unidad|urgencia|.*logia|.*iatria)s?"
)


def _is_noun_here(text: str, start: int, end: int, known: Lexicon, language: str) -> bool:
    """Return whether an unknown word with a capital is a noun by the words around it."""
    word = fold(text[start:end])
    if end - start < _MIN_NOUN or known.is_name_too(word) or word in known.everyday:
        return False
    before = text[max(0, start - 60) : start]
    if _TITLE_BEFORE.search(before):
        return False
    if language == "de" and _INDEFINITE.search(before) and not _NAME_BESIDE.match(text, end):
        return True
    pattern = _GENITIVE.get(language)
    match = None if pattern is None else pattern.match(text, end)
    if match is None:
        return False
    noun = fold(match["noun"])
    is_word = known.is_german(noun) if language == "de" else known.is_romance(noun)
    return is_word and not known.is_name_too(noun) and not _NOT_OF_BODY.fullmatch(noun)


_MIN_NOUN: Final = 5
_REMOVED: Final = "X" * 3
_ENTITY: Final = re.compile(r"&(?:gt|lt|amp|nbsp|quot|apos);|<(?:br|p|b|i|u|ul)>", re.IGNORECASE)
_CONTRACTED: Final = re.compile(
    r"(.{2,})(?:n['\N{RIGHT SINGLE QUOTATION MARK}]t|['\N{RIGHT SINGLE QUOTATION MARK}](?:re|ve|ll|d))"
)


def _is_eponym_here(text: str, start: int, end: int, known: Lexicon) -> bool:
    """Return whether a name is part of a term: *Smith fracture*, *circle of Willis*, *Hill-Sachs*."""
    word = fold(text[start:end])
    # In a text of capitals nothing tells a word from a name.
    if word in known.common and text[max(0, start - _AROUND) : end + _AROUND].isupper():
        return True
    if word in _GRADED and _GRADE.match(text, end):
        return True
    if _HEAD.match(text, end) or _OF.search(text, max(0, start - 24), start):
        return True
    beside = _BESIDE.match(text, end), _BESIDE_BEFORE.search(text, max(0, start - 24), start)
    return any(match is not None and fold(match[1]) in known.eponyms for match in beside)


_AROUND: Final = 16
_OF: Final = re.compile(
    r"\bof[ ]$|\bmorbus[ ]$"
    r"|\b(?:ángulo|angle|anévrisme|canal|cul-de-sac|clasificación|classification|critères?|enfermedad|escala|fractura|fracture|lignes?"
    r"|líneas?|maladie|signe|signo|síndrome|syndrome|sonda|sonde|test)[ ](?:del?|du)[ ]$",
    re.IGNORECASE,
)
_BESIDE: Final = re.compile(r"(?:-|[ ])(?:(?:and|AND)[ ])?([A-Z][A-Za-z]+)")
_BESIDE_BEFORE: Final = re.compile(r"([A-Z][A-Za-z]+)(?:-|[ ])(?:(?:and|AND)[ ])?$")


def _add_neighbors(text: str, words: list[tuple[int, int]], unknown: list[bool], known: Lexicon) -> None:
    """Extend unknown capitalized words over neighbors that are names too."""
    for order in (range(1, len(words)), range(len(words) - 2, -1, -1)):
        step = 1 if order.step > 0 else -1
        for at in order:
            near = at - step
            if unknown[at] or not unknown[near]:
                continue
            (start, end), (near_start, near_end) = words[at], words[near]
            written, beside = text[start:end], text[near_start:near_end]
            gap = text[near_end:start] if near < at else text[end:near_start]
            if (
                written[0].isupper()
                and beside[0].isupper()
                and _BETWEEN.fullmatch(gap)
                and known.is_name_too(fold(written))
                and not _HEAD.match(text, end)
            ):
                unknown[at] = True
