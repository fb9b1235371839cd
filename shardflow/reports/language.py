"""Words of reports in one language: cues, words that end scopes, sides, severities, changes, headers.

All that depends on the language of a report is in a folder of tables beside this module (``english/``):

* ``findings.csv``, ``anatomy.csv``: the names (`shardflow.reports.lexicon`);
* ``cues.csv``: effect, direction, strength, negated, cues (`shardflow.reports.assertion`);
* ``words.csv``: role, words; the roles are the fields of `Language`;
* ``headers.csv``: kind, headers (`shardflow.reports.sections`);
* ``forms.csv``: place, ending, forms; how names are inflected (`shardflow.reports.lexicon`);
* ``spellings.csv``: written, folded; one spelling for several (`shardflow.reports.tokens`);
* ``patterns.csv``: name, pattern; pieces of the patterns for sizes and mentions (`Language.compile`).

Words of a cell are joined by ``|``. Code holds no words. Findings and anatomy of all languages are the
concepts of the English tables, which alone give their kinds, parents and sides.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from shardflow.errors import ConfigError

ENGLISH: Final = "english"
LANGUAGES: Final = (ENGLISH, "german", "spanish", "french", "chinese")
"""Languages with rules; all others are not read (`shardflow.reports.detection`)."""
TABLES: Final = (
    "anatomy.csv",
    "cues.csv",
    "findings.csv",
    "forms.csv",
    "headers.csv",
    "patterns.csv",
    "spellings.csv",
    "words.csv",
)

Side = Literal["", "B", "L", "R"]
Change: TypeAlias = Literal["", "better", "new", "resolved", "stable", "worse"]
"""Change of a finding against an earlier examination; empty: unsaid."""
Words: TypeAlias = frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Language:
    """Roles of words in one language; each is a set of single words, unless it says phrases."""

    name: str
    abbreviation: Words
    """Words whose full stop ends no sentence."""
    abbreviation_of_number: Words
    """The same, only before a number."""
    title: Words
    """Words before names of persons."""
    goes_on: Words
    """Words that do not end a line that is a sentence."""
    after_ordinal: Words
    """Words before which a number and a full stop are an ordinal."""
    elided: Words
    """Words that lose their end before an apostrophe and stand alone: *d'* in French."""
    link: Words
    """Words behind which a name is not inflected: *fracture of ...*."""
    level_link: Words
    """What joins vertebral levels."""
    weighting: Words
    """Words behind T1 or T2 that make it a weighting."""
    list: Words
    """What stands between items of a list."""
    closing: Words
    """What a list of denied findings ends with."""
    adding: Words
    complement: Words
    """What joins a finding to what it is of: "no consolidation of pneumonia"."""
    versus: Words
    own_statement: Words
    """What begins a statement of its own behind a comma or "and"."""
    adjective: Words
    """The same, unless the list is closed later: "no effusion, large mass, or cyst"."""
    unbroken: Words
    """Adjectives that a list of bare names goes on with: "no effusion, focal consolidation"."""
    placing: Words
    """What makes a statement of its own of the item before it, behind a mere comma: "no X, Y in ..."."""
    verb: Words
    breaks_list: Words
    event_cause: Words
    history: Words
    dating: Words
    """What a year stands behind that makes a finding one of the past: "in 2019"."""
    plural: Words
    singular: Words
    """Verbs of a cue that speaks of one finding: "edema has resolved"."""
    almost: Words
    """What stands before "resolved" where something is left."""
    alteration: Words
    """Nouns and participles of change: a denial of them denies no finding ("no improvement in the X")."""
    degree: Words
    """What may stand between a denial, or "almost", and a change: "no evidence of significant worsening"."""
    denying: Words
    resolving: Words
    """Words of a cue by which a finding is gone."""
    than: Words
    """What makes a limit of a change before a number: "larger than 4 mm"."""
    asked: Words
    purpose: Words
    preference: Words
    preferred_to: Words
    """Cues that mean something only behind a preference: "favors X over Y"."""
    adjoining: Words
    """Cues that speak only of what stands right before them: "interstitial markings are normal"."""
    enumerating: Words
    """Cues that list what is possible until the end of their sentence."""
    perfect: Words
    """Verbs before which an adjective tells of a change: "has enlarged"."""
    no_side_before: Words
    severity: Words
    preposition: Words
    place_verb: Words
    not_attributive: Words
    node_qualifier: Words
    node_behind: Words
    """Qualifiers that stand behind the name."""
    node: Words
    """Names of anatomy that are findings if they are qualified."""
    projection: Words
    of_projection: Words
    picture: Words
    not_normal: Words
    negated_state: Words
    inference: Words
    """Cues behind which another finding's words begin."""
    determiner: Words
    advice: Words
    """Words of a sentence that plans for something."""
    plain: Words
    """Words of reports that name no finding; `shardflow reports lint` passes over them."""
    sides: Mapping[str, Side]
    changes: Mapping[str, Change]
    """By phrase."""
    pieces: Mapping[str, str]
    """Pieces of patterns by name."""
    fold: Callable[[str], str]
    """Gives words in lower case their one spelling; in a language without blanks, of the same length."""

    @property
    def spoken(self) -> Words:
        """All words that have a role."""
        roles = [cast("Words", getattr(self, name)) for name in _ROLES]
        phrases = (word for phrase in self.changes for word in phrase.split())
        return frozenset().union(*roles, self.sides, phrases)

    @property
    def is_spaced(self) -> bool:
        """Whether blanks stand between words."""
        return "unspaced" not in self.pieces

    @property
    def has_capital_nouns(self) -> bool:
        """Whether nouns begin with a capital."""
        return "capital_nouns" in self.pieces

    def compile(self, template: str) -> re.Pattern[str]:
        r"""Compile a pattern whose pieces, such as ``@unit@``, are of this language; case does not count.

        A piece that the language lacks matches nothing. Without blanks between words, letters beyond ASCII
        are no part of words, and ``\b`` holds everywhere.
        """
        while "@" in template:
            template = _PIECE.sub(lambda match: f"(?:{self.pieces.get(match[1], _NEVER)})", template)
        if self.is_spaced:
            return re.compile(template, re.IGNORECASE)
        return re.compile(template.replace(r"\b", ""), re.IGNORECASE | re.ASCII)

    def normalize(self, text: str) -> str:
        """Return a text of the same length whose signs are those that the rules know."""
        return text if self.is_spaced else self.fold(text.translate(_NARROW))


_ROLES: Final = tuple(one.name for one in fields(Language) if one.type == "Words")
_PIECE: Final = re.compile("@([a-z_]+)@")
_NEVER: Final = "(?!)"
_NARROW: Final[dict[int, int | str]] = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F) if code != ord("\uff5e")},
    **dict(zip(map(ord, "\u3002\uff5e~\u3000\u3010\u3011\u2236"), ".-- []:", strict=True)),
}
"""Full-width signs, digits and letters."""


def table_rows(name: str, language: str = ENGLISH) -> list[dict[str, str]]:
    """Read a table of a language."""
    with files("shardflow.reports").joinpath(language, name).open("r", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def shared_rows(name: str) -> list[dict[str, str]]:
    """Read a table that no language changes."""
    with files("shardflow.reports").joinpath(name).open("r", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _folding(spellings: Mapping[str, str]) -> Callable[[str], str]:
    if not spellings:
        return str
    if max(map(len, spellings)) == 1:
        table = str.maketrans(dict(spellings))
        return lambda text: text.translate(table)
    pattern = re.compile("|".join(map(re.escape, spellings)))
    return lambda text: pattern.sub(lambda match: spellings[match.group()], text)


def language_of(report: Mapping[str, Any]) -> str:
    """Return the first language of a ``report.json`` that has rules; English for none."""
    return next((str(name) for name in report.get("languages", ()) if name in LANGUAGES), ENGLISH)


@cache
def load_language(name: str = ENGLISH) -> Language:
    """Load the words of a language.

    Raises:
        ConfigError: A role is missing from its table, or unknown.
    """
    fold = _folding({row["written"]: row["folded"] for row in table_rows("spellings.csv", name)})
    roles = {
        row["role"]: frozenset(fold(word) for word in row["words"].split("|") if word)
        for row in table_rows("words.csv", name)
    }
    sides: dict[str, Side] = {}
    changes: dict[str, Change] = {}
    for role in sorted(roles):
        kind, _, value = role.partition("_")
        if kind == "side" and value in get_args(Side):
            sides.update(dict.fromkeys(roles.pop(role), cast("Side", value)))
        elif kind == "change" and value in get_args(Change):
            changes.update(dict.fromkeys(roles.pop(role), cast("Change", value)))
    if set(_ROLES) != roles.keys():
        wrong = ", ".join(sorted(set(_ROLES) ^ roles.keys()))
        raise ConfigError(f"words.csv of {name} must hold each role of Language once; correct {wrong}.")
    return Language(
        name=name,
        sides=sides,
        changes=changes,
        pieces={row["name"]: row["pattern"] for row in table_rows("patterns.csv", name)},
        fold=fold,
        **roles,
    )
