"""Scrubber of report texts: replaces identifying text by its category, such as ``[NAME]``.

Three layers search the original text: values of this study's headers (`known_values`), forms such as phone
numbers and dates (`text_patterns`), and in the strict mode every word that is on no list (`lexicon`). An
identifier of a form that no pattern describes is missed; docs/deidentification.md lists the limits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import chain
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from shardflow.errors import ConfigError
from shardflow.packing.deid.known_values import KnownValues
from shardflow.packing.deid.pseudonyms import DateOrder, ReportTextMode
from shardflow.packing.deid.text_abroad import (
    find_numbers_abroad,
    find_people_abroad,
    find_phones_abroad,
    find_places_abroad,
)
from shardflow.packing.deid.text_chinese import (
    find_chinese_dates,
    find_chinese_numbers,
    find_chinese_people,
    find_chinese_places,
    is_chinese,
    latin,
)
from shardflow.packing.deid.text_dates import find_ages, find_dates, find_times
from shardflow.packing.deid.text_patterns import (
    Category,
    Span,
    find_contacts,
    find_labelled,
    find_numbers,
    find_phones,
    find_places,
    merge,
)
from shardflow.packing.deid.text_people import find_people
from shardflow.packing.deid.unknown_words import find_names_that_are_words, find_unknown_words, find_years

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Family: TypeAlias = Callable[[str], Iterable[Span]]

FAMILIES: Final[dict[str, Family]] = {
    "ages": find_ages,
    "contacts": find_contacts,
    "labelled numbers": find_labelled,
    "labelled numbers abroad": find_numbers_abroad,
    "people": find_people,
    "people abroad": find_people_abroad,
    "names that are words": find_names_that_are_words,
    "phones": find_phones,
    "phones abroad": find_phones_abroad,
    "places": find_places,
    "places abroad": find_places_abroad,
}
"""Families of rules by name; `find_spans` adds dates, times and long numbers, which depend on each other."""

CHINESE_FAMILIES: Final[dict[str, Family]] = {
    "Chinese dates": find_chinese_dates,
    "Chinese numbers": find_chinese_numbers,
    "Chinese people": find_chinese_people,
    "Chinese places": find_chinese_places,
}
"""Families for texts with Chinese characters."""

STRICT_FAMILIES: Final[dict[str, Family]] = {"unknown words": find_unknown_words, "years": find_years}
"""Families of the strict mode."""

Recognizer: TypeAlias = Callable[[str], Iterable[tuple[int, int, str]]]
"""Finds identifying text beside the rules: start and end (characters, closed-open) and `Category` of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScrubbedText:
    """A text that may be published."""

    text: str
    counts: dict[str, int]
    """Number of replacements by category in lower case; sorted."""


def find_spans(
    text: str,
    known: KnownValues,
    *,
    mode: ReportTextMode,
    order: DateOrder = "unknown",
    recognize: Family | None = None,
) -> list[Span]:
    """Find text that identifies a person.

    Args:
        text: Of a report.
        known: Values of the study's headers.
        mode: How much is found; nothing with ``keep``.
        order: How the source writes 03/04/2019.
        recognize: Finds more than the rules do.

    Returns:
        Sorted spans without overlaps. Birth dates have no day.
    """
    if mode == "keep":
        return []
    births: set[tuple[int, int]] = set()
    spans: list[Span] = []
    for span in known.find(text):
        spans.append(span)
        if span.category is Category.DATE:
            births.add((span.start, span.end))
    plain = latin(text)
    for find in FAMILIES.values():
        spans += find(plain)
    if is_chinese(text):
        for find in CHINESE_FAMILIES.values():
            spans += find(text)
    times = [*find_dates(plain, order), *find_times(plain)]
    covered = {position for span in times for position in range(span.start, span.end)}
    spans += times
    spans += [span for span in find_numbers(plain) if not covered.issuperset(range(span.start, span.end))]
    if recognize is not None:
        spans += recognize(text)
    if mode == "strict":
        for find in STRICT_FAMILIES.values():
            spans += find(plain)
    return [
        replace(span, day=None)
        if any(start < span.end and span.start < end for start, end in births)
        else span
        for span in merge(spans, text)
    ]


def load_recognizers(entries: Iterable[EntryPoint], *others: Family) -> Family | None:
    """Return what searches texts beside the rules; None if nothing does.

    Args:
        entries: Recognizers that packages offer (`shardflow.packing.registry.offered_recognizers`).
        others: Further families, such as a model's.

    Raises:
        ConfigError: A recognizer cannot be imported, or is nothing to call; or, when a text is searched, its
            answer is no span of the text. No text is published then.
    """
    families = list(others)
    for entry in entries:
        try:
            found = entry.load()
        except Exception as error:  # noqa: BLE001 -- a foreign package may raise anything
            raise ConfigError(
                f"the recognizer {entry.name!r} must be importable, got {type(error).__name__}; repair or "
                "uninstall its package."
            ) from None
        if not callable(found):
            raise ConfigError(
                f"the recognizer {entry.name!r} must be callable, got {type(found).__name__}; see "
                "docs/extending.md."
            )
        families.append(partial(_recognized, entry.name, found))
    return (lambda text: chain.from_iterable(find(text) for find in families)) if families else None


def _recognized(name: str, find: Recognizer, text: str) -> Iterator[Span]:
    for answer in find(text):
        try:
            start, end, category = answer
            span = Span(start=index(start), end=index(end), category=Category(category))
        except (TypeError, ValueError):
            span = None
        if span is None or not 0 <= span.start < span.end <= len(text):
            raise ConfigError(
                f"the recognizer {name!r} must return spans of the text as (start, end, category), with one "
                f"of {', '.join(Category)}; see docs/extending.md."
            ) from None
        yield span


def scrub(
    text: str,
    known: KnownValues,
    *,
    mode: ReportTextMode,
    order: DateOrder = "unknown",
    recognize: Family | None = None,
    date_placeholder: Callable[[date], str | None] = lambda _: None,
) -> ScrubbedText:
    """Replace text that identifies a person.

    Args:
        text: Of a report.
        known: Values of the study's headers.
        mode: How much is replaced.
        order: How the source writes 03/04/2019.
        recognize: Finds more, such as `TextModel.find`.
        date_placeholder: Returns what replaces a single day inside the brackets, such as its distance from
            the study; None removes the day.

    Example:
        >>> scrub("Seen by Dr. Okafor on 2019-03-14.", KnownValues(()), mode="scrub").text
        'Seen by Dr. [NAME] on [DATE].'
    """
    if mode == "keep":
        return ScrubbedText(text=text, counts={})
    parts: list[str] = []
    counts: Counter[str] = Counter()
    position = 0
    for span in find_spans(text, known, mode=mode, order=order, recognize=recognize):
        placeholder = None if span.day is None else date_placeholder(span.day)
        parts += [text[position : span.start], f"[{placeholder or span.category}]"]
        counts[span.category.lower()] += 1
        position = span.end
    parts.append(text[position:])
    return ScrubbedText(text="".join(parts), counts=dict(sorted(counts.items())))


_MODEL_CATEGORIES: Final = (
    (r"age", Category.AGE),
    (r"date|time", Category.DATE),
    (r"e-?mail", Category.EMAIL),
    (r"phone|tel|fax|contact", Category.PHONE),
    (r"url|web|ip", Category.URL),
    (r"loc|city|street|zip|address|hospital|org|place|state|country|gpe|facility|vendor", Category.PLACE),
    (r"per|name|patient|doctor|staff|hcw|phys|user", Category.NAME),
    (r"id|num|record|account|device|license|licence|plate|ssn|bio", Category.ID),
)


class TextModel:
    """Token classifier of a local folder, which finds what no rule does; needs shardflow[deid-model].

    It only adds spans: what the rules replace stays replaced. One window is read at a time, on one CPU
    thread, so that the same text gives the same spans in every process.

    Args:
        folder: Its folder.

    Raises:
        ConfigError: transformers is missing, the folder holds no such model, or labels have no names.
    """

    def __init__(self, folder: Path) -> None:
        from shardflow.reports.token_classifier import TokenClassifier

        self._classifier = TokenClassifier(folder, setting="deid.model", extra="deid-model")

    def find(self, text: str) -> Iterator[Span]:
        """Find what the model labels; words are covered whole."""
        for start, end, label in self._classifier.find([text], is_joined=False)[0]:
            yield Span(start=start, end=end, category=_category(label))


def _category(label: str) -> Category:
    """Return the category of a label such as ``PATIENT``."""
    name = label.lower()
    return next(
        (category for pattern, category in _MODEL_CATEGORIES if re.search(pattern, name)), Category.WORD
    )
