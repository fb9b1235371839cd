"""When a study was made, without saying when: one keyed origin per patient.

The studies of a patient keep their distances in days; the calendar is gone. The origin hangs on nothing but
the key and the patient identifier, so a study that is added years later falls into its place and no sample
that is written ever becomes wrong (docs/adr/0081-one-keyed-origin-per-patient.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from shardflow.deid.pseudonyms import SecretKey

__all__ = ["DatesMode", "StudyDates", "parse_date"]

DatesMode: TypeAlias = Literal["days", "shift", "remove"]
"""``days``: distances in days. ``shift``: dates, moved into the past by 1 to 365 days. ``remove``:
nothing."""

_ORIGINS: Final = 1_000_000
_MAX_SHIFT_DAYS: Final = 365
_MAX_SHIFT_WEEKS: Final = 52
_DATE: Final = re.compile(r"(\d{4})[.-]?(\d{2})[.-]?(\d{2})")
_FIRST_YEAR: Final = 1900
_SAID_WITHIN_DAYS: Final = 3653
"""Distance from the study up to which a date of a report is said: the ones far away are birth dates."""
_MAX_PAST_DAYS: Final = 89 * 365
"""Distance from the study up to which a record's day is said: an age of 90 years and more identifies."""


def parse_date(value: str) -> date | None:
    """Read a DICOM date; None where it is partial, impossible or before 1900.

    Example:
        >>> parse_date("20190314"), parse_date("201903"), parse_date("20190230")
        (datetime.date(2019, 3, 14), None, None)
    """
    match = _DATE.fullmatch(value.strip())
    if match is None or int(match[1]) < _FIRST_YEAR:
        return None
    try:
        return date(int(match[1]), int(match[2]), int(match[3]))
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyDates:
    """The dates of one study of one patient."""

    key: SecretKey
    patient_id: str
    study_date: date | None
    mode: DatesMode
    keeps_weekday: bool

    def facts(self) -> dict[str, Any]:
        """Return what ``study.json`` says of the day of the study."""
        if self.mode == "remove":
            return {"mode": self.mode}
        if self.mode == "shift":
            shifted = None if self.study_date is None else self._shift(self.study_date)
            return {"mode": self.mode, "study_date": None if shifted is None else shifted.isoformat()}
        day = None
        if self.study_date is not None:
            origin = self.key.bucket("date-origin", self.patient_id, _ORIGINS)
            day = self.study_date.toordinal() + origin
        return {"mode": self.mode, "study_day": day}

    def when(self, day: date) -> dict[str, Any]:
        """Return what a record of the study may say of a day; nothing of one that tells a great age."""
        if self.mode == "shift":
            shifted = self._shift(day)
            return {} if shifted is None else {"date": shifted.isoformat()}
        if self.mode == "remove" or self.study_date is None:
            return {}
        distance = (day - self.study_date).days
        return {"day_offset": distance} if distance > -_MAX_PAST_DAYS else {}

    def say(self) -> Callable[[date], str | None]:
        """Return how a date of the report is written, for `shardflow.deid.report_text.scrub`."""

        def said(day: date) -> str | None:
            if self.mode == "remove" or self.study_date is None:
                return None
            distance = (day - self.study_date).days
            if abs(distance) > _SAID_WITHIN_DAYS:
                return None
            if self.mode == "days":
                return f"DATE{distance:+d}"
            shifted = self._shift(day)
            return None if shifted is None else f"DATE {shifted.isoformat()}"

        return said

    def _shift(self, day: date) -> date | None:
        """Move a date by the patient's own number of days; None where that leaves the calendar."""
        if self.keeps_weekday:
            days = 7 * (1 + self.key.bucket("date-shift-weeks", self.patient_id, _MAX_SHIFT_WEEKS))
        else:
            days = 1 + self.key.bucket("date-shift", self.patient_id, _MAX_SHIFT_DAYS)
        shifted = day - timedelta(days=days)
        return shifted if shifted.year >= _FIRST_YEAR else None
