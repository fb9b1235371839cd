"""Reading of radiology reports: sections, findings with their assertion and place, and the images they name.

Everything found is a span of the text, which is never altered. It works by rules and word lists; no model is
loaded.
"""

from __future__ import annotations

from shardflow.reports.assertion import Assertion
from shardflow.reports.findings import Entity, EntityFinder, Place
from shardflow.reports.lexicon import Concept, Lexicon, load_lexicon
from shardflow.reports.mentions import Mention, find_mentions
from shardflow.reports.reader import (
    ENTRY_POINTS,
    RULES_VERSION,
    Extractor,
    ReportContent,
    ReportReader,
    load_extractors,
    rules_digest,
)
from shardflow.reports.sections import Section, SectionKind, split_sections

__all__ = [
    "ENTRY_POINTS",
    "RULES_VERSION",
    "Assertion",
    "Concept",
    "Entity",
    "EntityFinder",
    "Extractor",
    "Lexicon",
    "Mention",
    "Place",
    "ReportContent",
    "ReportReader",
    "Section",
    "SectionKind",
    "find_mentions",
    "load_extractors",
    "load_lexicon",
    "rules_digest",
    "split_sections",
]
