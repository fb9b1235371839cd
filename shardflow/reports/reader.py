"""Report reader: sections, findings and mentions of images as spans of one text.

The rules have a digest: with equal digests, equal reports are read equally.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any, Final

from shardflow.errors import ConfigError
from shardflow.reports.assertion import Assertion, Judgment, Strength
from shardflow.reports.detection import Unread, detect_languages
from shardflow.reports.findings import Entity, EntityFinder, Place, probability_of
from shardflow.reports.language import ENGLISH, LANGUAGES, TABLES
from shardflow.reports.lexicon import Lexicon, load_lexicon
from shardflow.reports.mentions import Mention, find_mentions_in
from shardflow.reports.sections import Section, SectionKind, split_sections
from shardflow.reports.tokens import tokenize

RULES_VERSION: Final = 11
"""Raised whenever a rule in code reads some text otherwise than before; the tables speak for themselves."""


@cache
def rules_digest() -> str:
    """Return the SHA-256 of the shipped tables and the version of the rules."""
    hasher = hashlib.sha256(f"rules {RULES_VERSION}\n".encode("ascii"))
    root = files("shardflow.reports")
    for name in (
        "codes.csv",
        "languages.csv",
        "meanings.csv",
        "probability.csv",
        *(f"{language}/{table}" for language in LANGUAGES for table in TABLES),
    ):
        data = root.joinpath(*name.split("/")).read_bytes()
        hasher.update(f"{name} {len(data)}\n".encode("ascii"))
        hasher.update(data)
    return hasher.hexdigest()


def reader_name() -> str:
    """Return the name of the rules as ``report.json`` has it, such as ``rules-5-0123456789abcdef``."""
    return f"rules-{RULES_VERSION}-{rules_digest()[:16]}"


ENTRY_POINTS = "shardflow.report_extractors"
"""Group of entry points; each names an `Extractor`."""

Extractor = Callable[[Sequence[str]], Iterable[Iterable[Entity]]]
"""Finds entities of its own in reports: called with a batch of whole texts, it returns those of each."""

# What a section makes of a finding that its sentence calls present, or leaves open.
_BY_SECTION: dict[SectionKind, dict[Assertion, Assertion]] = {
    "comparison": {"present": "historical", "uncertain": "historical", "absent": "historical"},
    "indication": {"uncertain": "hypothetical"},
    "recommendation": {"present": "hypothetical", "uncertain": "hypothetical"},
}
_NO_SECTION: SectionKind = "other"
_UNREAD: frozenset[SectionKind] = frozenset(("examination", "signature", "technique"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportContent:
    """Content of a report, as spans of its text."""

    sections: tuple[Section, ...]
    entities: tuple[Entity, ...]
    """In the text's order."""
    mentions: tuple[Mention, ...]
    languages: tuple[str, ...] = (ENGLISH,)
    """Languages of the text, such as ``"english"``, the one with most letters first."""
    unread: tuple[Unread, ...] = ()
    """Parts in languages without rules: only extractors find something in them."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; spans are pairs of characters, closed-open."""
        row: dict[str, Any] = _to_json(self)
        return row


def _to_json(value: Any) -> Any:
    """Return a record as an object and a tuple as an array; `dataclasses.asdict` takes five times as long."""
    kind: Any = type(value)
    names = _names_of(kind)
    if names:
        return {name: _to_json(getattr(value, name)) for name in names}
    return tuple(map(_to_json, value)) if isinstance(value, tuple) else value


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    """Return the fields of a record; nothing for another type."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


class ReportReader:
    """Reads reports; made once, used for many.

    Args:
        lexicon: Names of findings and anatomy by language, or those of one language; the shipped ones else.
        extractors: Further finders by name; see `load_extractors`.
    """

    def __init__(
        self,
        lexicon: Callable[[str], Lexicon] | Lexicon | None = None,
        extractors: Sequence[tuple[str, Extractor]] = (),
    ) -> None:
        self._lexicon = lexicon
        self._finders: dict[str, EntityFinder] = {}
        self._extractors = tuple(extractors)
        self._finder(ENGLISH)

    def _finder(self, language: str) -> EntityFinder:
        finder = self._finders.get(language)
        if finder is None:
            given = self._lexicon
            if isinstance(given, Lexicon):
                lexicon = given if given.language == language else load_lexicon(language=language)
            else:
                lexicon = load_lexicon(language=language) if given is None else given(language)
            finder = self._finders[language] = EntityFinder(lexicon)
        return finder

    def read(self, text: str) -> ReportContent:
        """Read one report, but for the parts of it in a language without rules.

        Raises:
            ConfigError: An extractor answered with a span outside the text.
        """
        return self.read_many([text])[0]

    def read_many(self, texts: Sequence[str]) -> list[ReportContent]:
        """Read a batch of reports, as `read` reads one; extractors see it as a whole.

        Raises:
            ConfigError: An extractor answered with a span outside a text, or not once for each.
        """
        found: list[list[Entity]] = [[] for _ in texts]
        for name, extractor in self._extractors:
            answers = [*extractor(texts)]
            if len(answers) != len(texts):
                raise ConfigError(
                    f"the report extractor {name!r} must return the entities of each report, got "
                    f"{len(answers)} answers for {len(texts)} reports; see docs/extending.md."
                )
            for number, (text, answer) in enumerate(zip(texts, answers, strict=True)):
                found[number] += [_checked(replace(one, source=name), text) for one in answer]
        return [self._read(text, extracted) for text, extracted in zip(texts, found, strict=True)]

    def _read(self, text: str, extracted: Sequence[Entity]) -> ReportContent:
        detected = detect_languages(text)
        languages = {language for _, _, language in detected.pieces if language in LANGUAGES}
        lexicons = [self._finder(language).lexicon for language in (ENGLISH, *sorted(languages - {ENGLISH}))]
        sections = split_sections(text, *lexicons)
        entities: list[Entity] = []
        mentions: list[Mention] = []
        for language in sorted(languages):
            here = detected.blank(text, language)
            for section in sections:
                first, last = section.body
                if not here[first:last].strip():
                    continue
                tokens = tokenize(here[first:last], language, first)
                if section.kind not in _UNREAD:
                    found = self._finder(language).find_in(tokens, section=section.kind)
                    if section.part or section.kind in _BY_SECTION:
                        found = [_in_section(one, section.kind, _place(one, section, text)) for one in found]
                    entities += found
                if section.kind != "comparison":
                    # What is compared with is another examination, and so are its images.
                    mentions += [
                        replace(one, span=(one.span[0] + first, one.span[1] + first))
                        for one in find_mentions_in(tokens, language)
                    ]
        for one in extracted:
            place = one.span[0]
            kind = next((at.kind for at in sections if at.span[0] <= place < at.span[1]), _NO_SECTION)
            entities = [other for other in entities if not _is_inside(other, one)]
            if not any(_is_inside(one, other) or _is_same(one, other) for other in entities):
                entities.append(_in_section(one, kind, one.anatomy))
        entities.sort(key=lambda one: one.span)
        mentions.sort(key=lambda one: one.span)
        return ReportContent(
            sections=tuple(sections),
            entities=tuple(entities),
            mentions=tuple(mentions),
            languages=detected.languages,
            unread=detected.unread,
        )


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
                "see docs/extending.md."
            )
        loaded.append((entry.name, found))
    return loaded


def _is_inside(entity: Entity, other: Entity) -> bool:
    """Return whether the words of a finding are some of those of another."""
    return other.span[0] <= entity.span[0] and entity.span[1] <= other.span[1] and entity.span != other.span


def _is_same(entity: Entity, other: Entity) -> bool:
    return entity.span == other.span and entity.concept == other.concept


def _place(entity: Entity, section: Section, text: str) -> Place | None:
    """Return the place of a finding in the report; without one, that of its sub-header ("Liver: cyst")."""
    if entity.anatomy is not None or not section.part or entity.kind != "finding":
        return entity.anatomy
    name = re.search(r"[^\W\d_].*[^\W_]", text[slice(*section.header)], re.DOTALL)
    if name is None:
        return None
    start = section.header[0]
    return Place(span=(start + name.start(), start + name.end()), name=section.part)


def _in_section(entity: Entity, section: SectionKind, anatomy: Place | None) -> Entity:
    """Return a finding as its section makes it."""
    assertion = _BY_SECTION.get(section, {}).get(entity.assertion, entity.assertion)
    kind, certainty, probability = entity.kind, entity.certainty, entity.probability
    if assertion != entity.assertion:
        certainty, probability = "", None
    if section == "recommendation" and assertion == "hypothetical":
        kind = "recommendation"
    elif assertion == "historical":
        kind = "history"
    if probability is None:
        strength: Strength = certainty or ("possible" if assertion == "uncertain" else "")
        probability = probability_of(Judgment(assertion, strength))
    return replace(
        entity,
        anatomy=anatomy,
        section=section,
        assertion=assertion,
        kind=kind,
        certainty=certainty,
        probability=probability,
    )


def _checked(entity: Entity, text: str) -> Entity:
    spans = [entity.span] if entity.anatomy is None else [entity.span, entity.anatomy.span]
    if not all(0 <= first < last <= len(text) for first, last in spans):
        raise ConfigError(
            f"the report extractor {entity.source!r} returned a span outside the text; count "
            "characters from 0, with the end excluded."
        )
    return entity
