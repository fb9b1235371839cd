"""Word lists that distinguish words of reports from names.

``words.txt`` holds two kinds of words: common ones (*white*, *may*, *stone*, also when they are somebody's
name) and eponyms (*Baker* cyst), names that refer to nobody present. ``words_english.txt`` holds many more
that are nobody's name; only the strict mode accepts them, because a word here may be a name in another
country.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

# Without -er and -y, which would turn Mayer and Hilly into words.
_SUFFIXES: Final = ("'s", "s", "es", "ed", "d", "ing", "ly", "ally", "ness", "ment")
_AFFIXED: Final = re.compile(
    r"(?:hyper|hypo|peri|post|pre|sub|supra|infra|inter|intra|retro|para|micro|macro|non|un|re|multi|neuro"
    r"|cardio|broncho|pneumo|hepato|spleno|nephro|osteo|chondro|angio|cholecysto)[a-z]{4,}"
    r"|[a-z]{3,}(?:itis|ectomy|ectasis|ectasia|osis|oses|oma|omas|omata|pathy|pathic|graphy|graphic|gram|grams"
    r"|plasty|scopy|stomy|otomy|emia|uria|megaly|lithiasis|algia|plegia|ation|ations|ational|ography)"
)
"""Forms of medical words, which no list covers completely; applied only to words in lower case."""


class Lexicon(NamedTuple):
    """Known words, folded."""

    common: frozenset[str]
    eponyms: frozenset[str]
    english: frozenset[str]

    def is_common(self, word: str) -> bool:
        """Return whether a folded word, with or without an ending, is a common one.

        Example:
            >>> lexicon().is_common("nodules"), lexicon().is_common("okafor")
            (True, False)
        """
        return word in self.common or any(stem in self.common for stem in _stems(word))

    def is_known(self, word: str) -> bool:
        """Return whether a folded word is a common one or an eponym."""
        return self.is_common(word) or word.removesuffix("'s") in self.eponyms

    def may_pass(self, word: str) -> bool:
        """Return whether the strict mode keeps a folded word, however it is capitalized.

        Example:
            >>> lexicon().may_pass("hospitalized"), lexicon().may_pass("okafor")
            (True, False)
        """
        return self.is_known(word) or word in self.english

    def is_medical(self, word: str) -> bool:
        """Return whether a word in lower case has the form of a medical one."""
        return _AFFIXED.fullmatch(word) is not None


def fold(word: str) -> str:
    """Return a word in lower case without accents, so that one spelling represents all.

    Example:
        >>> fold("Müller"), fold("GROẞ")
        ('muller', 'gross')
    """
    if word.isascii():
        return word.lower()
    decomposed = unicodedata.normalize(
        "NFKD", word.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").casefold()
    )
    return "".join(character for character in decomposed if not unicodedata.combining(character))


@cache
def lexicon() -> Lexicon:
    """Load the shipped lists."""
    common, _, eponyms = _read("words.txt").partition("# Eponyms")
    return Lexicon(_words(common), _words(eponyms.partition("\n")[2]), _words(_read("words_english.txt")))


def _read(name: str) -> str:
    return (files("shardflow.packing.deid") / name).read_text(encoding="ascii")


def _words(text: str) -> frozenset[str]:
    return frozenset(word for line in text.splitlines() if not line.startswith("#") for word in line.split())


def _stems(word: str) -> list[str]:
    stems = []
    for suffix in _SUFFIXES:
        stem = word.removesuffix(suffix)
        if stem != word and len(stem) >= 3:
            stems += [stem, stem + "e"]
            if suffix in {"es", "ed"} and stem.endswith("i"):
                stems.append(stem[:-1] + "y")
            if suffix in {"ed", "ing"} and stem[-1] == stem[-2]:
                stems.append(stem[:-1])
    return stems
