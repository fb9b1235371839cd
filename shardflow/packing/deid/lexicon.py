"""Word lists that distinguish words of reports from names.

``words.txt`` holds two kinds of words: common ones (*white*, *may*, *stone*, also when they are somebody's
name) and eponyms (*Baker* cyst), names that refer to nobody present. ``words_english.txt`` holds many more
that are nobody's name; only the strict mode accepts them, because a word here may be a name in another
country. ``words_abroad.txt`` holds words of reports in German, Spanish and French, and abbreviations,
``words_forms.txt`` parts of words, and names that are built as other words are.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache, lru_cache
from importlib.resources import files
from typing import Final, NamedTuple

from rapidfuzz.distance import OSA
from rapidfuzz.process import extractOne


def _read(name: str) -> str:
    return (files("shardflow.packing.deid") / name).read_text(encoding="utf-8")


def _words(text: str) -> frozenset[str]:
    return frozenset(word for line in text.splitlines() if not line.startswith("#") for word in line.split())


_HEADS, _PREFIXES, _UNINFLECTED, _NAMES_LIKE_TERMS, _NAMES_LIKE_ABBREVIATIONS = (
    _words(section.partition("\n")[2]) for section in _read("words_forms.txt").split("\n= ")[1:]
)
# Without -er and -y, which would turn Mayer and Hilly into words.
_SUFFIXES: Final = ("'s", "s", "es", "ed", "d", "ing", "ly", "ally", "ness", "ment")
_AFFIXED: Final = re.compile(
    r"(?:hyper|supra|intra|neuro|cardio|broncho|pneumo|hepato|spleno|nephro|osteo|chondro|cholecysto|tracheo"
    r"|thoraco|cranio|costo|sterno|immuno)[a-z]{4,}"
    r"|[a-z]{3,}(?:(?<!a)itis|itides|ectomy|ectomies|ectasis|ectasia|osis|oses|oma|omas|omata|pathy|pathies|pathic"
    r"|graphy|graphic|gram|grams|plasty|scopy|stomy|otomy|emia|uria|megaly|lithiasis|algia|plegia|ation|ations"
    r"|ational|ology|ologic|ological|ologically|metry|metric|genic|genous|lytic|trophy|trophic|plasia|plastic"
    r"|stasis|penia|phasia|phagia|pnea|rrhea|rrhage|rrhagic|rrhythmia|paresis|sclerosis|stenosis|oidal|iform"
    r"|ivity|icity|acity|uosity|tension|tention|gestion|fusion|ular|lucent|lucency|linear|like|scopic|tomies"
    r"|stomies|ostomies|tripsy|pulmonary|vascular|cardial|cranial)"
)
"""Forms of medical words, which no list covers completely; applied only to words in lower case."""
_TERMS: Final = re.compile(
    # English
    r"[a-z]{3,}(?:ectomy|ectomies|[aeio]stomy|otomy|otomies|ography|ographic|oscopy|oscopic|oplasty|omegaly|lithiasis"
    r"|ectasis|ectases|ectatic|openia|opathy|opathic|ology|ological|ologically|algia|plegia|rrhagic"
    r"|sclerosis|sclerotic|fibrosis|fibrotic|stenosis|stenotic|thrombosis|calcinosis|trophic|plastic|plasia"
    r"|pulmonary|vascular|thoracic|pleural|mediastinal|vertebral|phrenic|diaphragmatic|bronchial|cardiac|inflated"
    r"|inflation|expansion|aeration|lucency|lucencies|opacity|opacities|scoliosis)"
    # German
    r"|[a-z]{4,}(?:gra(?:ph|f)ie|gra(?:ph|f)isch(?:e[mns]?)?|skopie|skopisch(?:e[mns]?)?|ektomie|otomie|ostomie|opathie"
    r"|plasie|trophie|stenosen?|sklerosen?|nekrosen?|thrombosen?|fibrosen?|zirrhosen?|arthrosen?|skoliosen?|lordosen?"
    r"|kyphosen?|ektasien?|algien?|megalie|karzinome?|sarkome?|adenome?|angiome?|hamatome?|ismus|itat(?:en)?|[a-z]heit(?:en)?"
    r"|(?:ig|ch|ar|am|er|el)keit(?:en)?|ation(?:en)?|(?:form|art|grad|seit|fleck|knot|wand|bas|bog|streck|halt)ige?[mnrs]?"
    r"|[a-z]liche[mnrs]?|(?:[aeioys]t|og|op|[pt]h|tr)ische[mns]?|logisch|[^aeioum]bare[mnrs]?|frakturen?|ergusse?)"
    # French
    r"|[a-z]{4,}(?:graphies?|graphiques?|scopies?|scopiques?|ectomies?|otomies?|ostomies?|opathies?|plasties?|plasies?"
    r"|megalies?|ectasies?|ectasiques?|algies?|thrombotiques?|stenoses?|scleroses?|necroses?|fibroses?|thromboses?"
    r"|arthroses?|scolioses?|pneumopathies?|issements?|logiques?|logie|carcinomes?|adenomes?|angiomes?|hematomes?)"
    # Spanish
    r"|[a-z]{4,}(?:grafias?|grafic[oa]s?|scopias?|scopic[oa]s?|ectomias?|ostomias?|otomias?|opatias?|plastias?|megalias?"
    r"|ectasias?|ectasic[oa]s?|algias?|logic[oa]s?|miento|mientos)"
)
"""Forms of medical words that no name has, in lower case or not."""
_GERMAN_NOUNS: Final = re.compile(
    r"(?!conforme)[a-z]{3,}(?:" + "|".join(sorted(_HEADS)) + r")(?:e[ns]?|n|s)?"
    r"|[a-z]{3,}(?:(?:mark|[dghlnrst])odeme?n?|necho|nsonden?)"
    r"|(?:ab|an|auf|aus|be|bei|durch|ein|ent|er|fehl|fort|hoch|miss|mit|nach|neu|rest|ruck|uber|um|un|unter|ver|vor"
    r"|weg|weiter|wider|wieder|zer|zu|zusammen)[a-z]{4,}ung(?:en|s)?"
    r"|[a-z]{4,}ierung(?:en|s)?|[a-z]{8,}ung(?:en|s)?|[a-z]{5,}schaft(?:en|s)?|[a-z]{3,}ktion(?:en)?"
    r"|[a-z]{2,}(?:aden|angi|blast|chondr|fibr|gli|granul|lip|lymph|melan|menge|myel|neur|papill|sark|terat|zyt)ome?[ns]?"
    r"|[a-z]{4,}(?:best|chondr|id|ik|in|kul|kyl|mat|stom|zyt)osen?"
)
_WRITTEN: Final = re.compile(
    # German
    r"[^\W\d_]{4,}(?:ös|är)e[mnrs]?|[^\W\d_]{5,}ierte[mnrs]?"
    r"|(?:ein|zwei|drei|vier|mehr|viel|hoch|groß|klein|dick|dünn|weit|eng|lang|kurz|grob|fein|gleich)"
    r"[^\W\d_]{3,}ige[mnrs]?"
    # French
    r"|(?!mccl|auth)[^\W\d_]{4,}ements?|[^\W\d_]{4,}[ae]mment|(?!charit|félicit|nativit|trinit)[^\W\d_]{3,}ités?"
    r"|[^\W\d_]{4,}ismes?|[^\W\d_]{3,}(?:euses?|issante?s)|(?!mc)[^\W\d_]{3,}(?:[^ai]s|[aiou]t|[aeuo]ct|[eo]pt)ions?"
)
"""Endings, with their accents, that no name has."""
_PREFIXED: Final = re.compile(
    r"(?:hypo|peri|post|pre|sub|infra|inter|retro|para|micro|macro|non|un|re|multi|dextro|levo|mid|trans|hemi|hemo"
    r"|endo|vaso|angio|under)([a-z]{5,})|([a-z]{4,})like|([a-z]{3,})iness"
)
"""Prefixes and endings of a known word. Names have the prefixes too (*Middleton*, *Reynolds*)."""


_JOINED: Final = ("the", "and", "with", "without", "are", "has", "have", "was", "were")
"""Words that people write without the space beside them."""


_VOWELS: Final = frozenset("aeiouy")
_MIN_MISSPELLED: Final = 9, 11
"""Letters of a misspelled word in lower case, and of one with capitals; shorter ones are near to names."""


class Lexicon(NamedTuple):
    """Known words, folded."""

    common: frozenset[str]
    eponyms: frozenset[str]
    english: frozenset[str]
    names: frozenset[str]
    """Words that are somebody's name beside another name."""
    german: frozenset[str]
    romance: frozenset[str]
    """Spanish and French."""
    uninflected: frozenset[str]
    """Words of the three that begin sentences; they take no endings and make no compounds."""
    acronyms: frozenset[str]
    everyday: frozenset[str]
    """Words that are names too; only in lower case they are none."""

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

    def may_pass(self, written: str) -> bool:
        """Return whether the strict mode keeps a word as it is written.

        Everyday words that are names too pass in lower case only, abbreviations in capitals, and in lower
        case unless somebody has that name.

        Example:
            >>> lexicon().may_pass("Hospitalized"), lexicon().may_pass("Okafor"), lexicon().may_pass("Aki")
            (True, False, False)
        """
        word = fold(written)
        is_size = written.lower().removesuffix("n") == "größe"  # *Grosse* is a name
        return (word not in _NAMES_LIKE_TERMS or is_size) and (
            self.is_known(word)
            or word in self.english
            or word in self.uninflected
            or (word in self.everyday and written.islower())
            or self.is_acronym(written)
            or self.is_romance(word)
            or self.is_german(word)
            or self._is_prefixed(word)
            or _TERMS.fullmatch(word) is not None
            or _WRITTEN.fullmatch(written.lower()) is not None
        )

    def is_acronym(self, written: str) -> bool:
        """Return whether a word is an abbreviation, and written as one."""
        if fold(written) not in self.acronyms:
            return False
        if sum(map(str.isupper, written)) > 1:
            return True
        # No name of those here is without a vowel: *Pt*, *Hx*.
        return fold(written) not in _NAMES_LIKE_ABBREVIATIONS and (
            written.islower() or not _VOWELS.intersection(fold(written))
        )

    def is_name_too(self, word: str) -> bool:
        """Return whether a folded word is a name too: *stone*, *rose*, an eponym."""
        return word in self.names or word in self.eponyms

    def is_romance(self, word: str) -> bool:
        """Return whether a word is Spanish or French, of any gender and number."""
        return word in self.romance or any(form in self.romance for form in _romance_forms(word))

    def is_german(self, word: str) -> bool:
        """Return whether a word is German, inflected or not, or a compound by its parts or its form."""
        if word in self.german or _GERMAN_NOUNS.fullmatch(word):
            return True
        if len(word) < 4:
            return False
        stems = [word, *(word.removesuffix(end) for end in _GERMAN_ENDINGS if word.endswith(end))]
        return any(stem in self.german or _is_compound(stem, self.german) for stem in stems if len(stem) > 3)

    def is_medical(self, word: str) -> bool:
        """Return whether a word in lower case has the form of a medical one, or comes from an English word.

        Example:
            >>> lexicon().is_medical("costophrenitis"), lexicon().is_medical("middleton")
            (True, False)
        """
        if word in _NAMES_LIKE_TERMS:
            return False
        return _AFFIXED.fullmatch(word) is not None or any(
            len(stem) > 3 and (self.is_common(stem) or stem in self.english) for stem in _roots(word)
        )

    def is_misspelled(self, written: str) -> bool:
        """Return whether a word is a long, common one but for one letter, or two that changed places.

        Example:
            >>> lexicon().is_misspelled("pneumothroax"), lexicon().is_misspelled("okaforsen")
            (True, False)
        """
        word = fold(written)
        if len(word) < _MIN_MISSPELLED[not written.islower()] or not word.isalpha():
            return False
        return word not in _NAMES_LIKE_TERMS and _is_near(word, self.common)

    def is_joined(self, word: str) -> bool:
        """Return whether a word in lower case is a function word and a common one without the space between.

        Example:
            >>> lexicon().is_joined("thelungs"), lexicon().is_joined("whitehead")
            (True, False)
        """
        return word not in _NAMES_LIKE_TERMS and any(
            (word.startswith(one) and self._is_long(word.removeprefix(one)))
            or (word.endswith(one) and self._is_long(word.removesuffix(one)))
            for one in _JOINED
        )

    def _is_long(self, word: str) -> bool:
        return len(word) > 4 and self.is_common(word) and not self.is_name_too(word)

    def _is_prefixed(self, word: str) -> bool:
        """Return whether a word is a known one with a prefix or ending that names do not have."""
        match = _PREFIXED.fullmatch(word)
        return match is not None and self._is_part(match[1] or match[2] or match[3] + "y")

    def _is_part(self, word: str) -> bool:
        return (self.is_common(word) or word in self.english) and not self.is_name_too(word)


@cache
def _long_words(words: frozenset[str], least: int) -> list[str]:
    return sorted(word for word in words if len(word) >= least)


@lru_cache(maxsize=4096)
def _is_near(word: str, words: frozenset[str]) -> bool:
    long = _long_words(words, _MIN_MISSPELLED[0] - 1)
    return extractOne(word, long, scorer=OSA.distance, score_cutoff=1) is not None


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
    common, _, rest = _read("words.txt").partition("# Eponyms")
    eponyms, _, names = rest.partition("# Names")
    abroad = {part[:2]: part.partition("\n")[2] for part in _read("words_abroad.txt").split("\n= ")[1:]}
    german, spanish, french, uninflected, acronyms, everyday = (
        frozenset(map(fold, _words(abroad[name]))) for name in ("de", "es", "fr", "un", "ac", "ev")
    )
    return Lexicon(
        common=_words(common),
        eponyms=_words(eponyms.partition("\n")[2]),
        english=_words(_read("words_english.txt")),
        names=_words(names.partition("\n")[2]),
        german=german,
        romance=spanish | french,
        uninflected=uninflected,
        acronyms=acronyms,
        everyday=everyday,
    )


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


_DERIVED: Final = tuple(
    """
    ability ably ally ancy ated ating ency ible ical ity ive ively ization ize ized izing ness ously
    """.split()  # noqa: SIM905
)


def _roots(word: str) -> list[str]:
    """Return what an English word may be derived from: *progress* of *progressive*, *hazy* of *haziness*."""
    roots = []
    for suffix in _DERIVED:
        root = word.removesuffix(suffix)
        if root != word and len(root) > 3:
            roots += [root, root + "e"]
            if root.endswith("i"):
                roots.append(root[:-1] + "y")
            if root[-1] == root[-2]:
                roots.append(root[:-1])
    return roots


_GERMAN_ENDINGS: Final = (
    "e",
    "en",
    "er",
    "es",
    "em",
    "n",
    "s",
    "ern",
    "ste",
    "sten",
    "ter",
    "ten",
    "tem",
    "tes",
)
_LINKS: Final = ("", "s", "es", "n", "en", "e", "er")
_MIN_PART: Final = 4


def _is_compound(word: str, parts: frozenset[str]) -> bool:
    """Return whether a German word is made of known parts of at least four letters, and links between them.

    Example:
        >>> _is_compound("oberlappenrundherd", frozenset({"oberlappen", "rundherd"}))
        True
    """
    if not 7 <= len(word) <= 48:
        return False
    ends = {0}
    for prefix in _PREFIXES:
        if word.startswith(prefix) and len(word) - len(prefix) >= _MIN_PART:
            ends.add(len(prefix))
    for end in range(_MIN_PART, len(word) + 1):
        for start in [one for one in ends if end - one >= _MIN_PART]:
            if word[start:end] in parts or word[start:end] in _PREFIXES:
                ends.update(
                    end + len(link)
                    for link in _LINKS
                    if word.startswith(link, end) and (not link or end + len(link) < len(word))
                )
                break
    return len(word) in ends


def _romance_forms(word: str) -> list[str]:
    """Return the forms that a dictionary may list for a Spanish or French word."""
    forms = [
        word.removesuffix(end)
        for end in ("s", "es", "e", "x", "le", "ne", "les", "nes")
        if word.endswith(end) and (end[0] not in "ln" or len(word) >= len(end) + 4)
    ]
    for end, bases in _GENDERS:
        if word.endswith(end):
            forms += [word.removesuffix(end) + base for base in bases]
    return [form for form in forms if len(form) >= 3 and form not in _UNINFLECTED]


_GENDERS: Final = (
    ("a", ("o",)),
    ("as", ("o", "a")),
    ("os", ("o",)),
    ("o", ("a",)),
    ("aux", ("al", "ale")),
    ("ives", ("if",)),
    ("ive", ("if",)),
    ("euses", ("eux",)),
    ("euse", ("eux",)),
)
