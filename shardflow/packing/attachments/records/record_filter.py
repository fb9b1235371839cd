"""Record filter: the only way by which codes, numbers, dates and texts of a record reach the dataset.

Readers of formats find the values; the filter decides what may be published, and counts the rest by reason
without quoting it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from zoneinfo import ZoneInfo

from shardflow.errors import ConfigError, SourceError
from shardflow.packing.attachments.codes import clean_unit, is_code, system_name
from shardflow.packing.sources.attachments import DAY_S
from shardflow.packing.sources.documents.facts import has_time_of_day, parse_moment

if TYPE_CHECKING:
    from datetime import datetime

    from shardflow.packing.sources.attachments import StudyContext
    from shardflow.packing.sources.documents.facts import People
    from shardflow.packing.sources.reports import ReportDocument

Fact: TypeAlias = dict[str, Any]

FreeText: TypeAlias = Literal["drop", "scrub"]
"""Treatment of free text: dropped, or packed as separate, scrubbed documents."""

_STATUSES: Final = frozenset(
    """
    aborted active amended appended arrived available cancelled completed confirmed corrected current
    discharged draft
    ended entered-in-error final finished held in-progress inactive intended new not-done not-taken nullified
    on-hold onleave partial planned preliminary preparation recorded refuted registered rejected resolved
    revoked stopped superseded suspended triaged unconfirmed unknown
    """.split()  # noqa: SIM905
)
_SEXES: Final = {"f": "F", "female": "F", "m": "M", "male": "M", "o": "O", "other": "O"}
_COMPARATORS: Final = frozenset({"<", "<=", ">", ">="})
_NUMBER: Final = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?")
_LONG_NUMBER: Final = re.compile(r"\d{5,}")
_WORDS: Final = re.compile(r"[^\W_]+")
_MAX_DISPLAY: Final = 200
_MAX_NOTE: Final = 200
_MAX_CODES: Final = 16
_MAX_DIGITS: Final = 15
_NO_UNIT: Final = "1"
_MAX_PLAIN: Final = 100_000
"""Numbers without a unit are below it: from six digits on they are dates, telephones and file numbers."""
_MIN_PART: Final = 3


class RecordFilter:
    """Writes the facts of one attachment for one study.

    Args:
        study: The study, and how identifiers may leave it.
        people: Everybody whom the document names.
        free_text: Treatment of free text.
        max_days: Largest distance from the study at which a day is published; facts that lie farther lose
            only their time, which would reveal birth dates and ages above 89.
        time_zone: IANA name of the zone of the images' clock; empty for the zone that their headers state.
        local_systems: Published name and codes of systems of one's own, by what records call them.
        first_document: Number of the first text document.
    """

    def __init__(
        self,
        study: StudyContext,
        people: People,
        *,
        free_text: FreeText = "scrub",
        max_days: int = 3653,
        time_zone: str = "",
        local_systems: Mapping[str, tuple[str, frozenset[str]]] | None = None,
        first_document: int = 0,
    ) -> None:
        # Imported for the first record: their patterns take long to compile, and every job reads settings
        # of records.
        from shardflow.packing.deid.known_values import KnownValues
        from shardflow.packing.deid.lexicon import fold

        self._study = study
        self._people = people.values()
        self._free_text = free_text
        self._max_days = max_days
        self._zone = ZoneInfo(time_zone) if time_zone else study.utc_offset
        self._local = local_systems or {}
        self._first = first_document
        self._known = KnownValues([self._people])
        # A code or a number that identifies somebody is dropped from every field.
        self._identifiers = {
            form for value in (*people.words(), study.patient_id) for form in _identifying_forms(value)
        }
        # Displays are short, so one with a word of a name is dropped, even if the word is a common one.
        self._parts = {
            fold(word)
            for keyword, values in self._people.items()
            if keyword.endswith("Name")
            for value in values
            for word in _WORDS.findall(value)
            if len(word) >= _MIN_PART
        }
        self._displays: dict[str, str | None] = {}
        self.facts: list[Fact] = []
        self.documents: list[bytes] = []
        self.document_rows: list[dict[str, Any]] = []
        self.left_out: Counter[str] = Counter()
        self._notes: int | None = None
        self._num_notes = 0

    def add(self, source: str, kind: str, fact: Mapping[str, Any]) -> None:
        """Add a fact; missing values are omitted, and an empty fact is not added."""
        said = {name: value for name, value in fact.items() if value not in (None, [], {}, "")}
        if not said.keys() - {"status", "when", "end", "section"}:
            self.left_out["EMPTY_RECORD"] += 1
            return
        self.facts.append({"kind": kind, "source": source, **said})

    def codes(self, coded: Iterable[tuple[str, str, str]]) -> list[dict[str, str]]:
        """Return the codes that may be published.

        Args:
            coded: System (URI, OID or name), code and display of each.
        """
        kept: list[dict[str, str]] = []
        for system, code, display in coded:
            if not code:
                continue
            name, listed = self._local.get(system.strip().removeprefix("urn:oid:").lower(), (None, None))
            name = name or system_name(system)
            if name is None:
                self.left_out["UNKNOWN_CODE_SYSTEM"] += 1
                continue
            is_known = is_code(name, code.strip()) if listed is None else code.strip() in listed
            if not is_known or _squeezed(code) in self._identifiers:
                self.left_out["MALFORMED_CODE"] += 1
            elif len(kept) < _MAX_CODES:
                shown = self._display(display)
                row = {"system": name, "code": code.strip(), **({} if shown is None else {"display": shown})}
                if row not in kept:
                    kept.append(row)
        return kept

    def quantity(self, number: Any, unit: str, comparator: str = "") -> dict[str, Any] | None:
        """Return a number with its unit; None if either is unusable."""
        value = self.number(number)
        if value is None:
            return None
        cleaned = clean_unit(unit)
        if cleaned is None:
            self.left_out["UNKNOWN_UNIT"] += 1
            return None
        if cleaned == _NO_UNIT and abs(value) >= _MAX_PLAIN:
            self.left_out["LONG_NUMBER"] += 1
            return None
        said: dict[str, Any] = {"number": value, "unit": cleaned}
        if comparator in _COMPARATORS:
            said["comparator"] = comparator
        return said

    def number(self, number: Any) -> float | int | None:
        """Return a finite number that identifies nobody."""
        if isinstance(number, str):
            text = number.strip()
            if not _NUMBER.fullmatch(text):
                return None
            number = float(text) if any(sign in text for sign in ".eE") else int(text[: _MAX_DIGITS + 2])
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return None
        if not math.isfinite(number) or abs(number) >= 10**_MAX_DIGITS:
            self.left_out["MALFORMED_NUMBER"] += 1
            return None
        if _squeezed(str(number)) in self._identifiers and abs(number) >= 10_000:
            self.left_out["IDENTIFIER"] += 1
            return None
        return number

    def when(self, text: str) -> dict[str, Any] | None:
        """Return the publishable form of a time: relative to the study, and not far from it.

        A time of day is ``seconds`` from the study; a date alone has none.
        """
        if not text.strip():
            return None
        moment = parse_moment(text)
        if moment is None:
            self.left_out["PARTIAL_DATE"] += 1
            return None
        plain = self._on_clock(moment)
        seconds = self._study.seconds_from_study(plain)
        if seconds is None or abs(seconds) > self._max_days * DAY_S:
            self.left_out["DATE_NOT_TOLD"] += 1
            return None
        said = dict(self._study.when(plain))
        published = self._study.published_seconds(plain) if said and has_time_of_day(text) else None
        return {**said, **({} if published is None else {"seconds": math.ceil(published)})} or None

    def _on_clock(self, moment: datetime) -> datetime:
        """Return a time on the clock of the images, without a zone."""
        if moment.tzinfo is not None and self._zone is not None:
            moment = moment.astimezone(self._zone)
        elif moment.tzinfo is not None:
            self.left_out["UTC_OFFSET_IGNORED"] += 1
        return moment.replace(tzinfo=None)

    def status(self, text: str) -> str | None:
        """Return a status that is on the list."""
        word = text.strip().lower()
        if word and word not in _STATUSES:
            self.left_out["UNKNOWN_STATUS"] += 1
        return word if word in _STATUSES else None

    def sex(self, text: str) -> str | None:
        """Return F, M or O."""
        return _SEXES.get(text.strip().lower())

    def document(self, text: str, kind: str) -> int | None:
        """Add a free text; return its number, or None if it is not published."""
        if not text.strip():
            return None
        if self._free_text == "drop":
            self.left_out["FREE_TEXT"] += 1
            return None
        cleaned = self._study.scrub(text.replace("\r\n", "\n").replace("\r", "\n"), self._people)
        number = self._first + len(self.documents)
        self.documents.append(cleaned.strip("\n").encode("utf-8", "replace") + b"\n")
        self.document_rows.append({"document": number, "kind": kind})
        return number

    def text_of(self, document: ReportDocument | None) -> str:
        """Return the text of a PDF or RTF in a record; empty, and counted, if it cannot be read."""
        if document is None or self._free_text == "drop":
            return ""
        try:
            return document.read()
        except (ConfigError, SourceError):
            self.left_out["UNREADABLE_DOCUMENT"] += 1
            return ""

    def note(self, text: str, kind: str) -> Fact:
        """Add a free text that may be a word or two; short ones share a document, a line each."""
        cleaned = text.strip()
        if not cleaned or self._free_text == "drop" or "\n" in cleaned or len(cleaned) > _MAX_NOTE:
            return {"document": self.document(text, kind)}
        if self._notes is None:
            self._notes = self.document(cleaned, "notes")
        else:
            said = self._study.scrub(cleaned, self._people).encode("utf-8", "replace")
            self.documents[self._notes - self._first] += said + b"\n"
        self._num_notes += 1
        return {"document": self._notes, "line": self._num_notes - 1}

    def _display(self, text: str) -> str | None:
        cleaned = " ".join(text.split())
        if not cleaned or len(cleaned) > _MAX_DISPLAY:
            return None
        if cleaned not in self._displays:
            self._displays[cleaned] = cleaned if self._is_controlled(cleaned) else None
            self.left_out["UNCONTROLLED_DISPLAY"] += self._displays[cleaned] is None
        return self._displays[cleaned]

    def _is_controlled(self, text: str) -> bool:
        """Return whether a display consists of known words, none of them a name in this record."""
        from shardflow.packing.deid.lexicon import fold
        from shardflow.packing.deid.report_text import scrub

        if any(fold(word) in self._parts for word in _WORDS.findall(text)):
            return False
        if scrub(text, self._known, mode="strict").text != text:
            return False
        return self._study.scrub(text, self._people) == text


def _identifying_forms(text: str) -> Iterator[str]:
    """Yield a value without its signs, and the long numbers in it."""
    yield _squeezed(text) or text
    yield from _LONG_NUMBER.findall(_squeezed(text))


def _squeezed(text: str) -> str:
    return "".join(filter(str.isalnum, text)).lower()
