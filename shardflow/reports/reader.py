"""Report reader: sections, findings and mentions of images as spans of one text.

The rules have a digest: with equal digests, equal reports are read equally.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any, Final

from shardflow.errors import ConfigError
from shardflow.reports.assertion import Assertion
from shardflow.reports.findings import Entity, EntityFinder, Place
from shardflow.reports.lexicon import Lexicon, load_lexicon
from shardflow.reports.mentions import Mention, find_mentions
from shardflow.reports.sections import Section, SectionKind, split_sections

RULES_VERSION: Final = 2
"""Raised whenever a rule in code reads some text otherwise than before; the tables speak for themselves."""

_TABLES: Final = ("anatomy.csv", "cues.csv", "findings.csv", "headers.csv")


@cache
def rules_digest() -> str:
    """Return the SHA-256 of the shipped tables and the version of the rules."""
    hasher = hashlib.sha256(f"rules {RULES_VERSION}\n".encode("ascii"))
    for name in _TABLES:
        data = files("shardflow.reports").joinpath(name).read_bytes()
        hasher.update(f"{name} {len(data)}\n".encode("ascii"))
        hasher.update(data)
    return hasher.hexdigest()


ENTRY_POINTS = "shardflow.report_extractors"
"""Group of entry points; each names an `Extractor`."""

Extractor = Callable[[str], Iterable[Entity]]
"""Finds entities of its own in a text; called with the whole report."""

# What a section makes of a finding that its sentence calls present, or leaves open.
_BY_SECTION: dict[SectionKind, dict[Assertion, Assertion]] = {
    "comparison": {"present": "historical", "uncertain": "historical", "absent": "historical"},
    "indication": {"uncertain": "hypothetical"},
    "recommendation": {"present": "hypothetical", "uncertain": "hypothetical"},
}
_UNREAD: frozenset[SectionKind] = frozenset(("examination", "signature", "technique"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportContent:
    """Content of a report, as spans of its text."""

    sections: tuple[Section, ...]
    entities: tuple[Entity, ...]
    """In the text's order."""
    mentions: tuple[Mention, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; spans are pairs of characters, closed-open."""
        return asdict(self)


class ReportReader:
    """Reads reports; made once, used for many.

    Args:
        lexicon: Names of findings and anatomy; None: the shipped ones.
        extractors: Further finders by name; see `load_extractors`.
    """

    def __init__(
        self, lexicon: Lexicon | None = None, extractors: Sequence[tuple[str, Extractor]] = ()
    ) -> None:
        self._lexicon = lexicon if lexicon is not None else load_lexicon()
        self._finder = EntityFinder(self._lexicon)
        self._extractors = tuple(extractors)

    def read(self, text: str) -> ReportContent:
        """Read one report.

        Raises:
            ConfigError: An extractor answered with a span outside the text.
        """
        sections = split_sections(text, self._lexicon)
        entities: list[Entity] = []
        mentions: list[Mention] = []
        for section in sections:
            first, last = section.body
            if section.kind not in _UNREAD:
                changes = _BY_SECTION.get(section.kind, {})
                entities += [
                    replace(_moved(one, first), assertion=changes.get(one.assertion, one.assertion))
                    for one in self._finder.find(text[first:last])
                ]
            if section.kind != "comparison":
                # What is compared with is another examination, and so are its images.
                mentions += [
                    replace(one, span=(one.span[0] + first, one.span[1] + first))
                    for one in find_mentions(text[first:last])
                ]
        for name, extractor in self._extractors:
            entities += [_checked(replace(one, source=name), text) for one in extractor(text)]
        entities.sort(key=lambda one: one.span)
        return ReportContent(sections=tuple(sections), entities=tuple(entities), mentions=tuple(mentions))


def load_extractors() -> list[tuple[str, Extractor]]:
    """Load the extractors that installed packages offer, by their names' order.

    Raises:
        ConfigError: One cannot be loaded.
    """
    loaded: list[tuple[str, Extractor]] = []
    for entry in sorted(entry_points(group=ENTRY_POINTS), key=lambda one: one.name):
        try:
            found = entry.load()
        except Exception as error:  # noqa: BLE001 -- a foreign package may raise anything
            raise ConfigError(
                f"the report extractor {entry.name!r} must be importable, got {type(error).__name__}; "
                "repair or uninstall its package."
            ) from None
        if not callable(found):
            raise ConfigError(
                f"the report extractor {entry.name!r} must be callable, got {type(found).__name__}; "
                "see docs/reports.md."
            )
        loaded.append((entry.name, found))
    return loaded


def _moved(entity: Entity, by: int) -> Entity:
    anatomy = entity.anatomy
    if anatomy is not None:
        anatomy = Place(span=(anatomy.span[0] + by, anatomy.span[1] + by), name=anatomy.name)
    return replace(entity, span=(entity.span[0] + by, entity.span[1] + by), anatomy=anatomy)


def _checked(entity: Entity, text: str) -> Entity:
    spans = [entity.span] if entity.anatomy is None else [entity.span, entity.anatomy.span]
    if not all(0 <= first < last <= len(text) for first, last in spans):
        raise ConfigError(
            f"the report extractor {entity.source!r} returned a span outside the text; count "
            "characters from 0, with the end excluded."
        )
    return entity
