"""Rows of entity views: the findings of one study that have slices, from what packing wrote of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardflow.errors import FormatError
from shardflow.format.entities import ASSERTIONS, LATERALITIES, EntityRules
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD
from shardflow.reports.assertion import Assertion
from shardflow.reports.findings import EntityKind, kind_of
from shardflow.reports.language import language_of
from shardflow.reports.lexicon import load_lexicon
from shardflow.reports.tokens import tokenize

ALIGNMENT_FIELD = "alignment.json"
CONTENT_FIELD = "report.json"
_FORMAT_VERSION = 1

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What a person says of one finding."""

    label: str = ""
    """Concept of the lexicon; empty: as read."""
    assertion: Assertion | None = None
    """None: as read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrections:
    """Corrections of a file."""

    digest: str
    """SHA-256 of what they say; equal corrections have the same."""
    of: Mapping[str, Correction]
    """By finding, as of `finding_key`."""


def finding_key(study_key: str, entity: int) -> str:
    """Return the name of a finding in a file: the key of its study and its number in the report."""
    return f"{study_key}e{entity}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EntityRow:
    """A row, but for the bytes it reads."""

    entity: int
    series: int
    slices: list[int]
    """Indices in the series, ascending; the context among them."""
    weights: list[float]
    """Of each slice; 0 in the context."""
    centre: int
    """Place of the weightiest slice; of several the middle one."""
    text: Span
    """Bytes of the report."""
    span: Span
    """Bytes of the report that name the entity, inside ``text``."""
    label: str
    anatomy: str
    assertion: str
    laterality: str
    confidence: float
    """Of its place."""
    probability: float
    """That the finding is there."""
    kind: str
    section: str
    certainty: str
    change: str
    severity: str
    reader: str
    """Rules that read the report; empty for those of earlier versions."""
    size_mm: float
    """The largest; NaN where the report gives none."""
    rows: int
    columns: int
    modality: str

    def is_above(self, threshold: float) -> bool:
        """Return whether place and finding together are surer than a threshold; equal is not enough."""
        return self.confidence * self.probability > threshold


def _kind(concept: str) -> EntityKind:
    """Return the kind of a finding that its reader left out."""
    found = load_lexicon().concepts.get(concept)
    return kind_of(found.kind) if found is not None else "finding"


def study_rows(fields: Mapping[str, bytes], rules: EntityRules) -> Iterator[EntityRow]:
    """Yield the findings of a study that have slices, by number of the entity and of the series.

    Those below the threshold are among them: `EntityRow.is_above` says so.

    Args:
        fields: The four fields of the study; without an alignment or a report it has no rows.
        rules: What goes with a finding.

    Raises:
        FormatError: The fields do not fit each other; the message names the field, and none of its content.
    """
    if not {ALIGNMENT_FIELD, CONTENT_FIELD, REPORT_FIELD} <= fields.keys():
        return
    alignment, content = _parsed(fields, ALIGNMENT_FIELD), _parsed(fields, CONTENT_FIELD)
    study = json.loads(fields[STUDY_FIELD])
    try:
        text = fields[REPORT_FIELD].decode("utf-8")
        places = _TextPlaces(text, content, rules)
        sections = [(_span(section["span"]), str(section["kind"])) for section in content["sections"]]
        for entry in _ordered(alignment["entities"]):
            entity = _item(content["entities"], entry["entity"])
            if entity["assertion"] in ASSERTIONS:
                series = _item(study["series"], entry["series"])
                yield _row(entry, entity, series, places, rules, sections, str(content.get("reader", "")))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(
            f"{ALIGNMENT_FIELD} must name entities of {CONTENT_FIELD} and slices of {STUDY_FIELD}, got "
            f"{type(error).__name__} on reading them; pack the study again."
        ) from None


def _row(
    entry: Mapping[str, Any],
    entity: Mapping[str, Any],
    series: Mapping[str, Any],
    places: _TextPlaces,
    rules: EntityRules,
    sections: Sequence[tuple[Span, str]],
    reader: str,
) -> EntityRow:
    num_slices = int(series["num_slices"])
    weights: dict[int, float] = {}
    for index, weight in zip(entry["slices"], entry["weights"], strict=True):
        if not (0 <= index < num_slices and 0 <= weight <= 1) or index in weights:
            raise ValueError
        weights[int(index)] = float(weight)
    for index in sorted(weights):
        for near in range(index - rules.context_slices, index + rules.context_slices + 1):
            if 0 <= near < num_slices:
                weights.setdefault(near, 0.0)
    slices = sorted(weights)
    heaviest = [place for place, index in enumerate(slices) if weights[index] == max(weights.values())]
    anatomy = entity.get("anatomy")
    span = places.entity(entity["span"])
    # Reports that an earlier reader read have neither kinds nor probabilities.
    probability = float(entity.get("probability", 1.0))
    if entity["laterality"] not in LATERALITIES or not (
        0 <= float(entry["confidence"]) <= 1 and 0 <= probability <= 1
    ):
        raise ValueError
    first = int(entity["span"][0])
    section = next((kind for (start, stop), kind in sections if start <= first < stop), "other")
    return EntityRow(
        entity=int(entry["entity"]),
        series=int(entry["series"]),
        slices=slices,
        weights=[weights[index] for index in slices],
        centre=heaviest[(len(heaviest) - 1) // 2],
        text=places.text(entity["span"]),
        span=span,
        label=str(entity["concept"]),
        anatomy=str(anatomy["name"]) if anatomy else "",
        assertion=str(entity["assertion"]),
        laterality=str(entity["laterality"]),
        confidence=float(entry["confidence"]),
        probability=probability,
        kind=str(entity.get("kind") or _kind(str(entity["concept"]))),
        section=str(entity.get("section") or section),
        certainty=str(entity.get("certainty") or ""),
        change=str(entity.get("change") or ""),
        severity=str(entity.get("severity") or ""),
        reader=reader,
        size_mm=max((float(size) for size in entity.get("size_mm") or ()), default=math.nan),
        rows=int(series["rows"]),
        columns=int(series["columns"]),
        modality=str(series.get("modality") or ""),
    )


class _TextPlaces:
    """From characters of a report to the bytes that go with an entity."""

    def __init__(self, text: str, content: Mapping[str, Any], rules: EntityRules) -> None:
        self._text, self._kind, self._language = text, rules.text, language_of(content)
        self._bodies = [_body(section) for section in content["sections"]]
        self._sentences: list[Span] | None = None

    def entity(self, span: Sequence[int]) -> Span:
        """Return the bytes of the entity's own words."""
        first, last = span
        if not 0 <= first < last <= len(self._text):
            raise ValueError
        return self._bytes(first, last)

    def text(self, span: Sequence[int]) -> Span:
        """Return the bytes of the text that the rules ask for."""
        first, last = span
        if self._kind == "report":
            return self._bytes(0, len(self._text))
        if self._kind == "sentence":
            # Of words that cross its end, the sentences that they touch.
            touched = [one for one in self._all_sentences() if one[0] < last and first < one[1]]
            first = min([first, *(start for start, _ in touched)])
            last = max([last, *(stop for _, stop in touched)])
        return self._bytes(first, last)

    def _all_sentences(self) -> list[Span]:
        """Return the sentences of all sections; a header is in none of them."""
        if self._sentences is None:
            self._sentences = []
            for start, stop in self._bodies:
                tokens = tokenize(self._text[start:stop], self._language)
                self._sentences += [
                    (start + tokens.starts[first], start + tokens.ends[last - 1])
                    for first, last in tokens.sentences
                ]
        return self._sentences

    def _bytes(self, first: int, last: int) -> Span:
        before = len(self._text[:first].encode())
        return before, before + len(self._text[first:last].encode())


def _ordered(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the alignments by entity and series; each pair stands once."""
    found = {(int(entry["entity"]), int(entry["series"])): entry for entry in entries}
    if len(found) != len(entries):
        raise ValueError
    return [found[place] for place in sorted(found)]


def _span(span: Sequence[Any]) -> Span:
    return int(span[0]), int(span[1])


def _body(section: Mapping[str, Any]) -> Span:
    return int(section["header"][1]), int(section["span"][1])


def _item(items: Sequence[Any], number: int) -> Any:
    if not 0 <= number < len(items):  # a negative number would count from the end
        raise IndexError
    return items[number]


def _parsed(fields: Mapping[str, bytes], name: str) -> Any:
    try:
        value = json.loads(fields[name])
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{name} must be JSON, got {type(error).__name__} on reading it; pack the study again."
        ) from None
    if not isinstance(value, dict) or value.get("format_version") != _FORMAT_VERSION:
        raise FormatError(
            f"{name} must be of format {_FORMAT_VERSION}, got another; a newer one needs a newer shardflow."
        )
    return value
