"""Words of reports in one language: cues, words that end scopes, sides, severities, changes, headers.

All that depends on the language of a report is in a folder of tables beside this module (``english/``):

* ``findings.csv``, ``anatomy.csv``: the names (`shardflow.reports.lexicon`);
* ``cues.csv``: effect, direction, strength, negated, cues (`shardflow.reports.assertion`);
* ``words.csv``: role, words; the roles are the fields of `Language`;
* ``headers.csv``: kind, headers (`shardflow.reports.sections`);
* ``meanings.csv``: name, within, means; what a name means in some anatomy, `*` in any.

Words of a cell are joined by ``|``. Code holds no words.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Final, Literal, TypeAlias, cast, get_args

from shardflow.errors import ConfigError

ENGLISH: Final = "english"
LANGUAGES: Final = (ENGLISH,)
"""Languages with rules; all others are not read (`shardflow.reports.detection`)."""
TABLES: Final = ("anatomy.csv", "cues.csv", "findings.csv", "headers.csv", "meanings.csv", "words.csv")

Side = Literal["", "B", "L", "R"]
Change: TypeAlias = Literal["", "better", "new", "resolved", "stable", "worse"]
"""Change of a finding against an earlier examination; empty: unsaid."""
Words: TypeAlias = frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Language:
    """Roles of words in one language; each is a set of single words, unless it says phrases."""

    name: str
    list: Words
    """What stands between items of a list."""
    closing: Words
    """What a list of denied findings ends with."""
    adding: Words
    versus: Words
    own_statement: Words
    """What begins a statement of its own behind a comma or "and"."""
    adjective: Words
    """The same, unless the list is closed later: "no effusion, large mass, or cyst"."""
    verb: Words
    breaks_list: Words
    event_cause: Words
    history: Words
    since: Words
    asked: Words
    purpose: Words
    preference: Words
    preferred_to: Words
    """Cues that mean something only behind a preference: "favors X over Y"."""
    perfect: Words
    """Verbs before which an adjective tells of a change: "has enlarged"."""
    no_side_before: Words
    severity: Words
    preposition: Words
    place_verb: Words
    not_attributive: Words
    node_qualifier: Words
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

    @property
    def spoken(self) -> Words:
        """All words that have a role."""
        others = ("name", "sides", "changes")
        roles = [getattr(self, one.name) for one in fields(self) if one.name not in others]
        phrases = (word for phrase in self.changes for word in phrase.split())
        return frozenset().union(*roles, self.sides, phrases)


def table_rows(name: str, language: str = ENGLISH) -> list[dict[str, str]]:
    """Read a table of a language."""
    with files("shardflow.reports").joinpath(language, name).open("r", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def shared_rows(name: str) -> list[dict[str, str]]:
    """Read a table that no language changes."""
    with files("shardflow.reports").joinpath(name).open("r", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def load_language(name: str = ENGLISH) -> Language:
    """Load the words of a language.

    Raises:
        ConfigError: A role is missing from its table, or unknown.
    """
    roles = {row["role"]: frozenset(row["words"].split("|")) for row in table_rows("words.csv", name)}
    sides: dict[str, Side] = {}
    changes: dict[str, Change] = {}
    for role in sorted(roles):
        kind, _, value = role.partition("_")
        if kind == "side" and value in get_args(Side):
            sides.update(dict.fromkeys(roles.pop(role), cast("Side", value)))
        elif kind == "change" and value in get_args(Change):
            changes.update(dict.fromkeys(roles.pop(role), cast("Change", value)))
    wanted = {one.name for one in fields(Language)} - {"name", "sides", "changes"}
    if wanted != roles.keys():
        wrong = ", ".join(sorted(wanted ^ roles.keys()))
        raise ConfigError(f"words.csv of {name} must hold each role of Language once; correct {wrong}.")
    return Language(name=name, sides=sides, changes=changes, **roles)
