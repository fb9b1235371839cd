"""Identifying text in Spanish, German and French.

Names after titles, labels and verbs, numbers after labels, telephone numbers, addresses and institutions. Forms that do not depend on a language are in `text_patterns`, dates and ages of all of them in `text_dates`.
"""
# ruff: noqa: E501 - alternatives are easier to read in long lines

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from shardflow.packing.deid.lexicon import fold, lexicon
from shardflow.packing.deid.text_patterns import UPPER, Category, Span, holds_digit, spans_of

_PART: Final = rf"(?:(?:[dDlL]['\N{{RIGHT SINGLE QUOTATION MARK}}])?[{UPPER}][^\W\d_]*(?:['\N{{RIGHT SINGLE QUOTATION MARK}}-][^\W\d_]+)*\.?)"
_PARTICLE: Final = r"(?:(?:de|del|la|las|los|y|von|vom|van|der|den|zu|zur|zum|du|des|le|di|da)[ \t]+)"
_PEOPLE: Final = rf"{_PARTICLE}{{0,3}}{_PART}(?:,?[ \t]+{_PARTICLE}{{0,3}}{_PART}){{0,4}}"
_TITLED: Final = re.compile(
    r"(?<![\w.])(?:(?:Dr|Dra|Drs|Dres|Sr|Sra|Srta|D|D\xf1a|Prof|Profa|Lic|DR|DRA|SR|SRA|SRTA|PROF|M|Mgr|Pr|PR|PD|OA|O\xc4)\.?"
    r"(?:[ \t]*(?:med|h\.c|habil|dent)\.?)*|Don|Do\xf1a|[Dd]octora?|[Ss]e\xf1or(?:a|ita)?|Herrn?|Frau|Mme|Mmes|Mlle|Mr|MM\.|Me"
    r"|Monsieur|Madame|Mademoiselle|Docteure?|[Dd]octeure?|Professeure?|Profesora?|[Kk]ollegin|[Kk]ollegen?|(?:Ober|Chef|Assistenz|Haus)"
    r"(?:arzt|\xe4rztin)|Schwester|Pfleger|[Ee]nfermer[ao]|[Ii]nfirmi\xe8re?|[Cc]onfr\xe8re)[ \t]+"
    r"(?:(?:Dr|Prof|Dra|Pr|Dipl|Kollege|Kollegin|Kollegen)\b\.?[ \t]*(?:med\.?[ \t]*)?)*"
    rf"(?P<name>{_PEOPLE})"
)
_LABELLED: Final = re.compile(
    r"^[ \t]*(?:paciente|nombre(?:\s+y\s+apellidos)?|apellidos?(?:\s+y\s+nombres?)?|m\xe9dico(?:\s+\w+)?|radi\xf3log[oa](?:\s+\w+)?|fdo\.?"
    r"|firma(?:do)?(?:\s+por)?|t\xe9cnic[oa]|solicitad[oa]\s+por|informad[oa]\s+por|hij[oa]|espos[oa]|familiar|copia(?:\s+para)?"
    r"|(?:patient(?:in)?|nach|vor)?name|patient(?:in)?|gez\.?|\xfcberweiser|zuweiser|mtr?a?r?a?|untersucher(?:in)?|unterschrift|befundet(?:\s+von)?"
    r"|befunder|anforderer|anforderung\s+durch|hausarzt|kopie(?:\s+an)?|ehefrau|ehemann|sohn|tochter"
    r"|patiente?|(?:pr\xe9)?nom(?:\s+(?:du|de\s+la)\s+patiente?)?|m\xe9decin(?:\s+\w+)?|sign\xe9(?:\s+par)?|manipulat(?:eur|rice)|radiologue"
    r"|prescripteur|op\xe9rateur|copie(?:\s+\xe0)?|dict\xe9\s+par|valid\xe9\s+par|relu\s+par|interpr\xe9t\xe9\s+par)\s*(?P<colon>:)?[ \t]*"
    rf"(?P<name>(?-i:{_PEOPLE}))[ \t]*[.;]?[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_AGENT: Final = re.compile(
    r"\b(?:comentad[oa]|comenta|hablad[oa]|habla|discutid[oa]|informad[oa]|avis(?:a|ado|ada)|comunica(?:do|da)?|remitid[oa]|revisad[oa]|firmad[oa]"
    r"|solicitad[oa]|consultad[oa]|llamada(?:\s+telef\xf3nica)?|besprochen|mitteilung|r\xfccksprache|befundet|vidiert|angefordert|informiert"
    r"|discut\xe9s?|discut\xe9es?|appel\xe9e?|pr\xe9venue?|communiqu\xe9e?s?|adress\xe9e?|dict\xe9e?|valid\xe9e?|relue?|vue?|interpr\xe9t\xe9e?|demand\xe9e?)"
    r"\s+(?:telefonisch\s+|por\s+tel\xe9fono\s+)?(?:con|por|a|al|mit|an|von|durch|avec|par|\xe0|au)\s+"
    rf"(?-i:(?P<name>{_PEOPLE}))",
    re.IGNORECASE,
)
_KIN: Final = re.compile(
    r"(?:\b(?:[Hh]r|(?<!\d[ \t-])[Ff]r|[Pp]at)\.|\b(?:[Ll]a\s+hija|[Ee]l\s+hijo|[Ss]u\s+(?:esposa|marido|hij[oa])|[Dd](?:er|ie)\s+(?:Sohn|Tochter|Ehefrau|Ehemann|Mutter|Vater)"
    r"|[Ss]on\s+(?:\xe9pouse|mari|fils|fr\xe8re)|[Ss]a\s+(?:fille|m\xe8re|s\u0153ur)|[Ll]a\s+fille|[Ll]e\s+(?:fils|mari)|[Ll]'\xe9pouse)),?\s+"
    rf"(?P<name>{_PEOPLE})"
)

_NUMBER_WORD: Final = r"n\.?\s?[\xba\xb0o]\.?|n\xfam\.?|n\xfamero|num\xe9ro|nr\.?|nummer|no\.?|id|code|codigo|c\xf3digo|de|del|du|la|le|des|dispositivo"
_ID_LABEL: Final = (
    r"nhc|historia(?:\s+cl\xednica)?|h\.?\s?c\.?|d\.?n\.?i\.?|n\.?i\.?e\.?|n\.?i\.?f\.?|pasaporte|documento(?:\s+de\s+identidad)?|tarjeta(?:\s+sanitaria)?"
    r"|cip|nuhsa|seguridad\s+social|afiliaci\xf3n|p\xf3liza|cuenta(?:\s+bancaria)?|colegiad[oa]|matr\xedcula|bastidor|serie|huella(?:\s+dactilar)?"
    r"|petici\xf3n|acceso|estudio|episodio|exploraci\xf3n|foto(?:graf\xeda)?"
    r"|pat(?:ient(?:en)?)?[.-]{0,2}\s?(?:nr|nummer|id)|patienten-?id|fall(?:nummer|-?nr)|aufnahme(?:nummer|-?nr)|auftrags?(?:nummer|-?nr)|anforderungs(?:nummer|-?nr)"
    r"|untersuchungs-?(?:id|nummer|nr)|(?:kranken)?versicherten(?:nummer|-?nr)|kvnr|krankenkasse|sozialversicherungs(?:nummer|-?nr)|sv-?nr|rvnr"
    r"|steuer-?(?:id|nummer)|personalausweis|reisepass|konto(?:nummer|-?nr)|iban|lanr|bsnr|arzt(?:nummer|-?nr)|kennzeichen|fahrgestell(?:nummer|-?nr)"
    r"|serien?-?\s?(?:nummer|nr)|fingerabdruck(?:-id)?|lichtbild"
    r"|ipp|nda|nip|nir|ins|dossier|s\xe9curit\xe9\s+sociale|ss|adh\xe9rent|mutuelle|compte|rib|rpps|adeli|finess|plaque|immatricul(?:ation|\xe9e?)"
    r"|s\xe9rie|empreinte(?:\s+digitale)?|demande|acc\xe8s|examen|carte\s+(?:vitale|d'identit\xe9)|photo(?:graphie)?"
)
_NUMBERED: Final = re.compile(
    rf"(?<!\w)(?:{_ID_LABEL})[\s.:#\xba\xb0-]{{0,4}}(?:(?:{_NUMBER_WORD})[\s.:#\xba\xb0-]{{1,3}}){{0,3}}"
    r"(?P<id>(?=[\w.-]*\d)[A-Z0-9](?:[A-Z0-9]|[-/._](?=[A-Z0-9])|[ ](?=[A-Z0-9]{1,9}(?:\W|$))(?=\S*\d|(?-i:[A-Z]{1,3}\b))){2,40})",
    re.IGNORECASE,
)
_PLATE: Final = re.compile(
    r"\b(?:license\s+plate|plate(?:\s+(?:number|no))?|kennzeichen|matr\xedcula|immatricul(?:ation|\xe9e?)|plaque)[\s.:#]{1,3}"
    r"(?P<id>(?=[A-Z \-]{0,6}\d)[A-Z0-9]{1,7}(?-i:[ -][A-Z0-9]{1,4}){0,2})(?![\w-])",
    re.IGNORECASE,
)
_NATIONAL: Final = re.compile(
    r"(?<![\w-])(?:[12]\s?\d\d\s?(?:0\d|1[0-2]|[2-9]\d)\s?(?:\d\d|2[AB])\s?\d{3}\s?\d{3}(?:\s?\d\d)?"
    r"|\d\d\s?[0-3]\d[01]\d\d\d\s?[A-Z]\s?\d{3}|\d{8}-?[A-Z]|[XYZ]-?\d{7}-?[A-Z]"
    r"|[A-Z]{2}\d\d(?:\s?[A-Z0-9]{4}){3,7}(?:\s?[A-Z0-9]{1,4})?)(?![\w-])"
)
"""French NIR, German pension insurance number, Spanish DNI and NIE, IBAN."""
_PHONES: Final = re.compile(
    r"(?<![\w.,])(?:(?:\+|00)\d{2}[\s.]?\(?\d{1,4}\)?(?:[\s./-]?\d{2,4}){2,5}|0\d(?:[ .-]\d\d){4}|[679]\d\d(?:[ .]\d{3}){2}|[89]\d\d(?:[ .]\d\d){3}"
    r"|0\d{2,5}\s?[/-]?\s?\d{4,8}(?:-\d{1,4})?)(?![\w-])"
    r"|\b(?:tel(?:efon|\xe9fono|\xe9phone|efax|f)?|t\xe9l(?:\xe9phone|\xe9copie)?|tfno|m\xf3vil|(?:tele)?fax|r\xfcckruf|handy|mobil(?:e|nummer)?|portable"
    r"|durchwahl|joignable|erreichbar|llamar|appeler|busca|bip)\b[.:]?\s*(?:[a-z\xe0]{1,7}\s+){0,2}[:.]?\s*(?P<number>[+(]?\d[\d\s()./-]{3,18}\d)",
    re.IGNORECASE,
)
_WORD: Final = rf"[{UPPER}][\w'\N{{RIGHT SINGLE QUOTATION MARK}}.-]*"
_JOINED: Final = r"(?:de|del|la|las|los|du|des|le|les|d'|am|an|der|im|in|zu|zur|y|et|und)"
_WHERE: Final = re.compile(
    # Streets: the kind first (es, fr), or last (de, in text_patterns).
    rf"\b(?:\d{{1,4}}[ \t]?(?:bis|ter)?,?[ \t]+)?(?:[Cc]alle|[Aa]vda\.?|[Aa]venida|[Pp]laza|[Pp]aseo|C/|[Cc]tra\.?|[Rr]ue|[Aa]venue|[Bb]oulevard|[Bb]d\.?"
    rf"|[Ii]mpasse|[Pp]lace|[Aa]ll\xe9e|[Cc]hemin|[Qq]uai)[ \t]+(?:{_JOINED}[ \t]*)*{_WORD}(?:[ \t]+(?:{_JOINED}[ \t]*)*{_WORD})*(?:,?[ \t]*\d{{1,4}}\b)?"
    rf"|\b(?:Am|An[ \t]+der|Im|Zum|Zur|Auf[ \t]+der)[ \t]+{_WORD}[ \t]+\d{{1,4}}[ \t]?[a-z]?\b"
    rf"|\b[{UPPER}][\w.-]{{1,40}}?(?:stra(?:ss|\xdf)e|str\.|weg|platz|gasse|allee|damm|ufer|ring)[ \t]+\d{{1,4}}[ \t]?[a-z]?\b"
    rf"|(?<![\w-])\d{{5}}[ \t]+{_WORD}(?:[ -](?:{_JOINED}[ -])?{_WORD})*"
    # Institutions.
    rf"|\b(?:Hospital|Cl\xednica|Centro[ \t]+(?:de[ \t]+Salud|M\xe9dico)|Sanatorio|H\xf4pital|H\xf4pitaux|Clinique|Polyclinique|CHU|CHR|CHRU|CH|Institut|Instituto"
    rf"|Klinikum|Universit\xe4tsklinikum|Krankenhaus|Klinik|Praxis|MVZ)[ \t]+(?:{_JOINED}[ \t]*)*{_WORD}(?:[ \t]+(?:{_JOINED}[ \t]*)*{_WORD})*"
    rf"|\b(?:{_WORD}[ \t]+){{0,4}}[{UPPER}]?[\w-]{{0,30}}(?:[Kk]rankenhaus|[Kk]linikum|[Kk]linik|[Hh]ospital)(?:[ \t]+{_WORD}){{0,2}}"
)
_TOWN: Final = re.compile(
    r"\b(?:(?:[Nn]atural|[Rr]esidente|[Vv]ecin[oa]|[Pp]rocedente|[Oo]riginaire)[ \t]+(?:de|en)|[Vv]ive[ \t]+en|[Rr]eside[ \t]+en|(?:[Ww]ohnhaft|[Ww]ohnt)[ \t]+in"
    r"|stammt[ \t]+aus|aus[ \t]+Richtung|geboren[ \t]+in|(?:[Dd]emeurant|[Hh]abit(?:e|ant)|[Dd]omicili\xe9e?|[Nn]\xe9e?)[ \t]+\xe0)[ \t]+"
    rf"(?P<town>{_WORD}(?:[ -](?:{_JOINED}[ -])?{_WORD})*)"
    r"|\b(?:[Dd]omicilio|[Dd]irecci\xf3n|[Aa]nschrift|[Aa]dresse|[Dd]omicile|[Ww]ohnt)[ \t]*:?[ \t]+(?P<line>[^\n]{4,80}?)(?=[ \t]*(?:[.;]\s|[.;]?$|\n))"
    r"|\b(?:[Cc]\xf3digo[ \t]+postal|C\.?P\.?|PLZ|[Cc]ode[ \t]+postal)[ \t]*:?[ \t]*(?P<zip>\d{4,5})\b",
    re.MULTILINE,
)


def find_people_abroad(text: str) -> Iterator[Span]:
    """Find names that a title, a label, a verb or a relative announces."""
    for pattern in (_TITLED, _LABELLED, _AGENT, _KIN):
        for match in pattern.finditer(text):
            yield from _trimmed(match["name"], match.start("name"), is_certain=pattern is _TITLED)


def find_numbers_abroad(text: str) -> Iterator[Span]:
    """Find numbers after a label, and national numbers by their form."""
    if holds_digit(text):
        yield from spans_of(_NUMBERED, text, Category.ID, "id")
        yield from spans_of(_PLATE, text, Category.ID, "id")
        yield from spans_of(_NATIONAL, text, Category.ID)


def find_phones_abroad(text: str) -> Iterator[Span]:
    """Find telephone and fax numbers as they are grouped in these countries."""
    if holds_digit(text):
        yield from spans_of(_PHONES, text, Category.PHONE, "number")


def find_places_abroad(text: str) -> Iterator[Span]:
    """Find postal addresses, institutions and towns."""
    for match in _WHERE.finditer(text):
        words = [fold(word) for word in re.findall(r"[^\W\d_]+", match[0])]
        if any(map(str.isdigit, match[0])) or not _GENERAL.issuperset(words):
            yield Span(start=match.start(), end=match.end(), category=Category.PLACE)
    yield from spans_of(_TOWN, text, Category.PLACE, "town", "line", "zip")


_GENERAL: Final = frozenset(
    """
    hospital hopital hopitaux clinica clinique klinik klinikum krankenhaus general central centre
    centro chu ch chr praxis mvz medico universitatsklinikum universitario place salud de del la las
    los du des le les am an der im in zu zur y et und the of
    """.split()  # noqa: SIM905
)


def _trimmed(name: str, start: int, *, is_certain: bool) -> Iterator[Span]:
    """Yield a run of capitalized words without known words around it, unless a title says that it is a name."""
    words = list(re.finditer(r"[^\W\d_]+(?:['\N{RIGHT SINGLE QUOTATION MARK}-][^\W\d_]+)*", name))
    known = lexicon()
    if not is_certain:
        while words and known.may_pass(words[0][0]) and not known.is_name_too(fold(words[0][0])):
            del words[0]
        while words and known.may_pass(words[-1][0]) and not known.is_name_too(fold(words[-1][0])):
            del words[-1]
    if words:
        yield Span(start=start + words[0].start(), end=start + words[-1].end(), category=Category.NAME)
