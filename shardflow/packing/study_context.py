"""What the attachments of a study may know of it, and the ways in which identifiers may leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from shardflow.packing.links import seconds_of_day
from shardflow.sources.attachments import StoredSeries, StudyContext

if TYPE_CHECKING:
    from shardflow.packing.privacy import StudyPrivacy
    from shardflow.sources.dicom import AttributeValue, InstanceHeader, Stack

__all__ = ["ContextMaker", "stored_series"]


def stored_series(number: int, stack: Stack, facts: Mapping[str, Any]) -> StoredSeries:
    """Describe a series as it is stored.

    Args:
        number: Of the series in the sample.
        stack: Its slices.
        facts: Its object of ``study.json``.
    """
    affine = stack.geometry.affine_lps
    return StoredSeries(
        number=number,
        facts=facts,
        series_uid=stack.series_instance_uid,
        frame_of_reference_uid=stack.slices[0].instance.frame_of_reference_uid,
        sop_uids=tuple(part.instance.sop_instance_uid for part in stack.slices),
        frames=tuple(part.frame for part in stack.slices),
        rows=stack.rows,
        columns=stack.columns,
        affine_lps=None if affine is None else tuple((row[0], row[1], row[2], row[3]) for row in affine),
    )


class ContextMaker:
    """Makes the context of each attachment of one study.

    Args:
        sample_key: Of the study.
        headers: Of its images, not empty.
        series: As they are stored.
        privacy: Of the study.
        people: Reads what headers say of people; asked once, for the first text.
    """

    def __init__(
        self,
        sample_key: str,
        headers: Sequence[InstanceHeader],
        series: Sequence[StoredSeries],
        privacy: StudyPrivacy,
        people: Callable[[], Sequence[Mapping[str, AttributeValue]]],
    ) -> None:
        self._sample_key = sample_key
        self._headers = headers
        self._series = series
        self._privacy = privacy
        self._people = people
        self._begun = self._begin()

    def __call__(self, counts: Mapping[tuple[str, str], int]) -> StudyContext:
        """Make the context of the next attachment."""
        first = self._headers[0]
        return StudyContext(
            sample_key=self._sample_key,
            study_uid=first.study_instance_uid,
            patient_id=first.patient_id,
            series=tuple(self._series),
            surrogate=self._privacy.surrogate,
            scrub=self._scrub,
            when=lambda moment: self._privacy.when(moment.date()),
            seconds_from_study=self._seconds,
            counts=dict(counts),
        )

    def _scrub(self, text: str, people: Mapping[str, Sequence[str]]) -> str:
        return self._privacy.scrub_text(text, [*self._people(), people])

    def _seconds(self, moment: datetime) -> float | None:
        if self._begun is None or self._privacy.removes_dates:
            return None
        return (moment.replace(tzinfo=None) - self._begun).total_seconds()

    def _begin(self) -> datetime | None:
        """Return the moment at which the study began, by the headers of that day."""
        day = self._privacy.study_date
        if day is None:
            return None
        text = day.strftime("%Y%m%d")
        times = [
            seconds_of_day(one.study_time)
            for one in self._headers
            if one.study_date.replace(".", "").replace("-", "") == text
        ]
        seconds = min((one for one in times if one is not None), default=None)
        midnight = datetime(day.year, day.month, day.day)  # noqa: DTZ001 - the clock of the hospital
        return None if seconds is None else midnight + timedelta(seconds=seconds)
