"""Reading of radiology reports: sections, findings with their assertion and place, and the images they name.

Everything found is a span of the text, which is never altered. It works by rules and word lists; no model is
loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
    from shardflow.reports.findings import Entity, EntityFinder
    from shardflow.reports.lexicon import Lexicon, load_lexicon
    from shardflow.reports.mentions import find_mentions
    from shardflow.reports.reader import (
        ENTRY_POINTS,
        Extractor,
        ReportReader,
        load_extractors,
        rules_digest,
    )
    from shardflow.reports.sections import Section, SectionKind, split_sections

__all__ = [
    "ENTRY_POINTS",
    "Entity",
    "EntityFinder",
    "Extractor",
    "Lexicon",
    "ReportReader",
    "Section",
    "SectionKind",
    "find_mentions",
    "load_extractors",
    "load_lexicon",
    "rules_digest",
    "split_sections",
]
_SOURCES: Final = {
    "ENTRY_POINTS": ".reader:ENTRY_POINTS",
    "Entity": ".findings:Entity",
    "EntityFinder": ".findings:EntityFinder",
    "Extractor": ".reader:Extractor",
    "Lexicon": ".lexicon:Lexicon",
    "ReportReader": ".reader:ReportReader",
    "Section": ".sections:Section",
    "SectionKind": ".sections:SectionKind",
    "find_mentions": ".mentions:find_mentions",
    "load_extractors": ".reader:load_extractors",
    "load_lexicon": ".lexicon:load_lexicon",
    "rules_digest": ".reader:rules_digest",
    "split_sections": ".sections:split_sections",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
