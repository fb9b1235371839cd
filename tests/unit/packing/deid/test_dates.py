"""Days without a calendar: distances are true, origins are keyed, nothing else is said."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.packing.deid.pseudonyms import DateOffsets, DatesMode, SecretKey, StudyDates, parse_date

pytestmark = pytest.mark.fast

_KEY = SecretKey(bytes(range(32)))
_DAYS = st.dates(min_value=date(1905, 1, 1), max_value=date(2100, 1, 1))


def _dates(
    day: date | None, mode: DatesMode = "days", *, patient: str = "P1", weeks: bool = False
) -> StudyDates:
    offsets = DateOffsets.of(_KEY, patient)
    assert DateOffsets.from_int(offsets.to_int()) == offsets
    return StudyDates(offsets=offsets, study_date=day, mode=mode, keeps_weekday=weeks)


@given(_DAYS, _DAYS)
def test_studies_of_a_patient_keep_their_distance(first: date, second: date) -> None:
    days = [_dates(day).facts()["study_day"] for day in (first, second)]
    assert days[1] - days[0] == (second - first).days


@given(_DAYS, _DAYS, st.booleans())
def test_shifted_dates_keep_their_distance_and_leave_their_year(
    first: date, second: date, weeks: bool
) -> None:
    said = [
        date.fromisoformat(_dates(day, "shift", weeks=weeks).facts()["study_date"]) for day in (first, second)
    ]
    assert said[1] - said[0] == second - first
    assert timedelta(days=1) <= first - said[0] <= timedelta(days=365)
    assert not weeks or said[0].weekday() == first.weekday()


def test_a_date_that_shifts_out_of_the_calendar_is_not_said() -> None:
    early = _dates(date(1900, 1, 1), "shift")
    assert early.facts() == {"mode": "shift", "study_date": None}
    assert early.when(date(1900, 1, 1)) == {}
    assert early.placeholder(date(1900, 1, 1)) is None
    assert parse_date("18991231") is None
    assert parse_date("19000101") == date(1900, 1, 1)


def test_origins_differ_between_patients_and_keys() -> None:
    day = date(2019, 3, 14)
    offsets = DateOffsets.of(SecretKey(bytes(32)), "P1")
    other = StudyDates(offsets=offsets, study_date=day, mode="days", keeps_weekday=False)
    found = {_dates(day).facts()["study_day"], _dates(day, patient="P2").facts()["study_day"]}
    assert len(found | {other.facts()["study_day"]}) == 3


def test_the_origin_of_a_patient_never_changes() -> None:
    """Frozen: another number would tear the studies of one patient apart between versions."""
    assert _dates(date(2019, 3, 14)).facts() == {"mode": "days", "study_day": 862433}
    assert _dates(date(2019, 3, 14), "shift").facts() == {"mode": "shift", "study_date": "2018-10-22"}


def test_dates_of_a_report_are_distances() -> None:
    placeholder = _dates(date(2019, 3, 14)).placeholder
    assert placeholder(date(2019, 3, 14)) == "DATE+0"
    assert placeholder(date(2018, 3, 14)) == "DATE-365"
    assert placeholder(date(1953, 6, 7)) is None, "a birth date is an age in days"
    shifted = _dates(date(2019, 3, 14), "shift").placeholder(date(2019, 3, 20))
    assert shifted == "DATE 2018-10-28"
    assert _dates(date(2019, 3, 14), "remove").placeholder(date(2019, 3, 14)) is None
    assert _dates(None).placeholder(date(2019, 3, 14)) is None


def test_a_study_without_a_date_says_none() -> None:
    assert _dates(None).facts() == {"mode": "days", "study_day": None}
    assert _dates(None, "shift").facts() == {"mode": "shift", "study_date": None}
    assert _dates(date(2019, 3, 14), "remove").facts() == {"mode": "remove"}


@pytest.mark.parametrize(
    "value", ["", "2019", "201903", "20190230", "18991231", "2019031", "00010101", "today", "2019031412"]
)
def test_partial_and_impossible_dates_are_none(value: str) -> None:
    assert parse_date(value) is None


def test_whole_dates_are_read() -> None:
    assert parse_date("20190314") == parse_date("2019.03.14") == date(2019, 3, 14)
