"""Texts with planted identifiers: templates of each language, filled with values drawn from a seed.

Categories follow the identifiers of the HIPAA safe harbor (45 CFR 164.514(b)(2)(i)(A) to (R)); ages above 89
and times of day count as dates. Templates and values are divided into a development part and a test part,
before any rule was written: rules are developed on the first and measured on the second.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, Literal, TypeAlias

from shardflow.synthetic.draws import Draws

Part: TypeAlias = Literal["development", "test"]

LANGUAGES: Final = ("de", "en", "es", "fr", "zh")
"""ISO 639-1 codes."""

CATEGORIES: Final[dict[str, str]] = {
    "name": "A",
    "place": "B",
    "date": "C",
    "telephone": "D",
    "fax": "E",
    "email": "F",
    "national number": "G",
    "record number": "H",
    "health plan": "I",
    "account": "J",
    "licence": "K",
    "vehicle": "L",
    "device": "M",
    "url": "N",
    "ip": "O",
    "biometric": "P",
    "photograph": "Q",
    "other": "R",
}
"""Categories, with their letters in the regulation."""

CLINICAL: Final = "clinical"
"""Sentences that identify no person."""

_SLOT: Final = re.compile(r"\{([^}]+)\}")
_OF_SLOT: Final = {
    "NAME, GIVEN": "name",
    "family": "name",
    "family, given": "name",
    "given": "name",
    "initial family": "name",
    "name": "name",
    "abbreviation": "place",
    "city": "place",
    "hospital": "place",
    "hospital la": "place",
    "street": "place",
    "zip": "place",
    "age": "date",
    "age words": "date",
    "date": "date",
    "date long": "date",
    "month year": "date",
    "time": "date",
    "accession": "other",
    "letters": "other",
    "biometric": "biometric",
    "email": "email",
    "ip": "ip",
    "url": "url",
}
"""Category of a slot; slots that are not here have that of their template."""

_MONTHS: Final = {
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "en": "January February March April May June July August September October November December",
    "es": "enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
}
_AGE_WORDS: Final = {
    "de": "neunzig einundneunzig zweiundneunzig vierundneunzig siebenundneunzig hundert hundertzwei",
    "en": "ninety ninety-one ninety-two ninety-four ninety-seven ninety_nine one_hundred_and_two",
    "es": "noventa noventa_y_uno noventa_y_dos noventa_y_cuatro noventa_y_siete cien ciento_dos",
    "fr": "quatre-vingt-dix quatre-vingt-onze quatre-vingt-douze quatre-vingt-quatorze"
    " quatre-vingt-dix-sept cent cent_deux",
    "zh": "九十 九十一 九十二 九十四 九十七 九十九 一百零二",
}
_AT_HOME: Final = {"de": "de", "en": "org", "es": "es", "fr": "fr", "zh": "com"}
_ASCII: Final = str.maketrans("áàäâéèêíïıóöôúüçñşğßÁÉÖÜŞ", "aaaaeeeiiiooouucnsgsAEOUS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """An identifier in a text: characters ``[start, end)``."""

    start: int
    end: int
    category: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedText:
    """A generated text."""

    language: str
    text: str
    identifiers: tuple[Planted, ...]
    """Sorted, without overlaps; none in a clinical sentence."""
    is_clinical: bool
    """Whether it is a sentence of findings; others are lines around them: labels, signatures."""


def plant(part: Part, *, num_values: int = 3, seed: int = 0) -> Iterator[PlantedText]:
    """Make the texts of a part.

    Args:
        part: Which templates and values.
        num_values: Texts made of each template, with different values; clinical sentences are made once.
        seed: Chooses the values.

    Yields:
        Texts, by language, then in the order of the templates. The same arguments give the same texts.
    """
    for language in LANGUAGES:
        sections = _sections(language)
        for (name, category), templates in sections.items():
            if name != part or category.startswith("pool "):
                continue
            for number, template in enumerate(templates):
                for copy in range(1 if category == CLINICAL else num_values):
                    draws = Draws(seed, f"planted/{language}/{part}/{category}", number, copy)
                    yield _fill(template, language, category, _Values(language, part, draws))


@cache
def _sections(language: str) -> dict[tuple[str, str], list[str]]:
    sections: dict[tuple[str, str], list[str]] = {}
    here: list[str] = []
    text = (files("shardflow.synthetic.identifiers") / f"{language}.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("= "):
            part, _, category = line[2:].partition(" ")
            here = sections.setdefault((part, category), [])
        elif line and not line.startswith("#"):
            here.append(line)
    return sections


def _fill(template: str, language: str, category: str, values: _Values) -> PlantedText:
    parts: list[str] = []
    planted: list[Planted] = []
    position = length = 0
    for match in _SLOT.finditer(template):
        before, value = template[position : match.start()], values.of(match[1])
        parts += [before, value]
        start = length + len(before)
        length = start + len(value)
        planted.append(Planted(start=start, end=length, category=_OF_SLOT.get(match[1], category)))
        position = match.end()
    text = "".join([*parts, template[position:]])
    return PlantedText(
        language=language, text=text, identifiers=tuple(planted), is_clinical=category == CLINICAL
    )


class _Values:
    """Values of the slots of one text."""

    def __init__(self, language: str, part: Part, draws: Draws) -> None:
        self._language = language
        self._draws = draws
        self._pools = {
            name.removeprefix("pool "): values
            for (owner, name), values in _sections(language).items()
            if owner == part and name.startswith("pool ")
        }

    def of(self, slot: str) -> str:
        """Return a value for a slot."""
        if slot in self._pools and slot != "name":
            return self._draws.choice(self._pools[slot])
        return _MAKERS[slot](self)

    def _name(self) -> str:
        given, family = self.of("given"), self.of("family")
        return family + given if self._language == "zh" else f"{given} {family}"

    def _initial(self) -> str:
        return f"{self.of('given')[0]}. {self.of('family')}"

    def _hospital_la(self) -> str:
        """Return a hospital after an elided article."""
        name = self.of("hospital")
        return name if name[0] in "AEHIOU" else f"établissement {name}"

    def _digits(self, count: int) -> str:
        return str(self._draws.integer(1, 9)) + "".join(
            str(self._draws.integer(0, 9)) for _ in range(count - 1)
        )

    def _letters(self, count: int) -> str:
        return "".join(self._draws.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(count))

    def _day(self) -> tuple[int, int, int]:
        return self._draws.integer(1931, 2024), self._draws.integer(1, 12), self._draws.integer(1, 28)

    def _date(self) -> str:
        year, month, day = self._day()
        if self._language == "zh":
            forms = [f"{year}-{month:02d}-{day:02d}", f"{year}.{month}.{day}", f"{year}/{month}/{day}"]
        elif self._language == "en":
            forms = [
                f"{month}/{day}/{year}",
                f"{month:02d}/{day:02d}/{year % 100:02d}",
                f"{year}-{month:02d}-{day:02d}",
                f"{day}-{self._month(month)[:3]}-{year}",
            ]
        elif self._language == "de":
            forms = [
                f"{day:02d}.{month:02d}.{year}",
                f"{day}.{month}.{year}",
                f"{day:02d}.{month:02d}.{year % 100:02d}",
            ]
        else:
            forms = [
                f"{day:02d}/{month:02d}/{year}",
                f"{day}-{month}-{year}",
                f"{day:02d}/{month:02d}/{year % 100:02d}",
            ]
        return self._draws.choice(forms)

    def _month(self, month: int) -> str:
        return _MONTHS[self._language].split()[month - 1]

    def _date_long(self) -> str:
        year, month, day = self._day()
        if self._language == "zh":
            return f"{year}年{month}月{day}日"
        name = self._month(month)
        return {
            "de": f"{day}. {name} {year}",
            "en": f"{name} {day}, {year}",
            "es": f"{day} de {name} de {year}",
            "fr": f"{day} {name} {year}",
        }[self._language]

    def _month_year(self) -> str:
        year, month, _ = self._day()
        between = " de " if self._language == "es" else " "
        return f"{self._month(month)}{between}{year}"

    def _age(self) -> str:
        return str(self._draws.integer(90, 104))

    def _age_words(self) -> str:
        return self._draws.choice(_AGE_WORDS[self._language].split()).replace("_", " ")

    def _time(self) -> str:
        hour, minute = self._draws.integer(0, 23), self._draws.integer(0, 59)
        return f"{hour:02d}:{minute:02d}"

    def _phone(self) -> str:
        digits = self._digits
        forms = {
            "de": [
                f"0{digits(3)} {digits(7)}",
                f"+49 {digits(3)} {digits(6)}",
                f"0{digits(3)}/{digits(6)}-0",
            ],
            "en": [
                f"({digits(3)}) {digits(3)}-{digits(4)}",
                f"{digits(3)}-{digits(3)}-{digits(4)}",
                f"{digits(3)}.{digits(3)}.{digits(4)}",
                f"+44 20 {digits(4)} {digits(4)}",
            ],
            "es": [
                f"6{digits(2)} {digits(3)} {digits(3)}",
                f"+34 9{digits(8)}",
                f"9{digits(2)} {digits(2)} {digits(2)} {digits(2)}",
            ],
            "fr": [
                f"0{self._draws.integer(1, 7)} " + " ".join(digits(2) for _ in range(4)),
                f"+33 {self._draws.integer(1, 7)} " + " ".join(digits(2) for _ in range(4)),
                f"0{self._draws.integer(1, 7)}." + ".".join(digits(2) for _ in range(4)),
            ],
            "zh": [
                f"1{self._draws.integer(3, 9)}{digits(9)}",
                f"0{digits(3)}-{digits(7)}",
                f"010-{digits(8)}",
            ],
        }
        return self._draws.choice(forms[self._language])

    def _email(self) -> str:
        family = self.of("family") if self._language != "zh" else "wang.wei"
        user = re.sub(r"[^a-z.]", "", family.translate(_ASCII).lower()) or "mail"
        return f"{user}{self._draws.integer(1, 99)}@mail.{_AT_HOME[self._language]}"

    def _national(self) -> str:
        digits = self._digits
        if self._language == "en":
            return f"{digits(3)}-{digits(2)}-{digits(4)}"
        if self._language == "es":
            return self._draws.choice([f"{digits(8)}{self._letters(1)}", f"{digits(8)}-{self._letters(1)}"])
        if self._language == "de":
            return f"{digits(2)} {digits(6)} {self._letters(1)} {digits(3)}"
        if self._language == "fr":
            return " ".join([str(self._draws.integer(1, 2)), *map(digits, (2, 2, 2, 3, 3, 2))])
        year, month, day = self._day()
        return f"{digits(6)}{year}{month:02d}{day:02d}{digits(3)}{self._draws.choice('0123456789X')}"

    def _national_other(self) -> str:
        if self._language == "es":
            return f"X{self._digits(7)}{self._letters(1)}"
        if self._language == "de":
            return self._digits(11)
        return self._digits(12)

    def _record(self) -> str:
        return self._draws.choice(
            [
                self._digits(7),
                f"{self._letters(2)}{self._digits(6)}",
                f"{self._digits(3)}-{self._digits(4)}",
                self._digits(5),
            ]
        )

    def _plan(self) -> str:
        return self._draws.choice(
            [f"{self._letters(3)}{self._digits(9)}", f"{self._letters(1)}{self._digits(9)}", self._digits(10)]
        )

    def _account(self) -> str:
        if self._language == "de":
            return (
                f"DE{self._digits(2)} " + " ".join(self._digits(4) for _ in range(4)) + f" {self._digits(2)}"
            )
        return self._draws.choice(
            [
                self._digits(10),
                f"{self._digits(4)}-{self._digits(6)}",
                f"{self._letters(2)}-{self._digits(5)}",
            ]
        )

    def _licence(self) -> str:
        return self._draws.choice(
            [f"{self._letters(2)}{self._digits(7)}", self._digits(9), f"{self._letters(1)}-{self._digits(6)}"]
        )

    def _plate(self) -> str:
        return {
            "de": f"{self._letters(2)}-{self._letters(2)} {self._digits(3)}",
            "en": f"{self._digits(1)}{self._letters(3)}{self._digits(3)}",
            "es": f"{self._digits(4)} {self._letters(3)}",
            "fr": f"{self._letters(2)}-{self._digits(3)}-{self._letters(2)}",
            "zh": f"{self._draws.choice('京沪粤苏浙川')}{self._letters(1)}{self._digits(5)}",
        }[self._language]

    def _vin(self) -> str:
        return f"1{self._letters(4)}{self._digits(2)}{self._letters(4)}{self._digits(6)}"

    def _serial(self) -> str:
        return self._draws.choice(
            [
                f"{self._letters(3)}{self._digits(6)}",
                f"{self._digits(4)}-{self._letters(2)}-{self._digits(4)}",
                self._digits(8),
            ]
        )

    def _url(self) -> str:
        return self._draws.choice(
            [
                f"https://pacs.clinic.example/study/{self._digits(6)}",
                f"www.images.example/{self._letters(6).lower()}",
            ]
        )

    def _ip(self) -> str:
        return "10." + ".".join(str(self._draws.integer(1, 254)) for _ in range(3))

    def _biometric(self) -> str:
        return self._draws.choice([f"FP-{self._digits(6)}", f"{self._letters(2)}{self._digits(8)}"])

    def _photo(self) -> str:
        return self._draws.choice(
            [f"IMG_{self._digits(4)}.jpg", f"DSC{self._digits(5)}.JPG", f"face-{self._digits(6)}.png"]
        )

    def _accession(self) -> str:
        return self._draws.choice(
            [
                f"{self._letters(2)}{self._digits(7)}",
                self._digits(8),
                f"{self._letters(3)}-{self._digits(2)}-{self._digits(5)}",
            ]
        )


_MAKERS: Final[dict[str, Callable[[_Values], str]]] = {
    "NAME, GIVEN": lambda made: (
        made._name() if made._language == "zh" else f"{made.of('family')}, {made.of('given')}".upper()
    ),
    "accession": _Values._accession,
    "account": _Values._account,
    "age": _Values._age,
    "age words": _Values._age_words,
    "biometric": _Values._biometric,
    "date": _Values._date,
    "date long": _Values._date_long,
    "email": _Values._email,
    "family, given": lambda made: f"{made.of('family')}, {made.of('given')}",
    "hospital la": _Values._hospital_la,
    "initial family": _Values._initial,
    "ip": _Values._ip,
    "letters": lambda made: made._letters(7),
    "licence": _Values._licence,
    "month year": _Values._month_year,
    "name": _Values._name,
    "national": _Values._national,
    "national other": _Values._national_other,
    "pager": lambda made: made._digits(5),
    "phone": _Values._phone,
    "photo": _Values._photo,
    "plan": _Values._plan,
    "plate": _Values._plate,
    "record": _Values._record,
    "serial": _Values._serial,
    "time": _Values._time,
    "url": _Values._url,
    "vin": _Values._vin,
    "zip": lambda made: made._digits(6 if made._language == "zh" else 5),
}
