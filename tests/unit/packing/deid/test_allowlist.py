"""The allowlist fails closed, by name and by value."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.packing.deid.allowlist import _RULES, KEYWORDS, allow_ordinal, allow_patient, allow_technical

pytestmark = pytest.mark.fast

FREE_TEXT = [
    "John Smith",
    "SENTINEL",
    "19400312",
    "1.2.840.113619.2.1",
    "Dr. Jones, Radiology",
    "4711 High St.",
]


@pytest.mark.parametrize("text", FREE_TEXT)
def test_no_listed_attribute_lets_free_text_through(text: str) -> None:
    attributes = dict.fromkeys(KEYWORDS, (text,))
    assert allow_technical(attributes) == {"has_contrast": True}
    assert allow_patient(attributes) == {"age_years": None, "sex": None}


@given(st.text(min_size=3))
def test_text_leaves_only_as_a_word_of_a_vocabulary(text: str) -> None:
    for value in allow_technical(dict.fromkeys(_RULES, (text,))).values():
        words = value if isinstance(value, list) else [value]
        assert all(isinstance(word, str) and word.isascii() and len(word) <= 20 for word in words)


@pytest.mark.parametrize("number", [19400312, 20231105, 7654321, 19400312.0, -20231105.0])
def test_no_number_is_large_enough_for_a_date_or_a_record_number(number: float) -> None:
    assert set(allow_technical(dict.fromkeys(KEYWORDS, (number,)))) == {"has_contrast"}


@pytest.mark.parametrize(
    ("number", "allowed"),
    [(None, None), (0, 0), (99_999, 99_999), (100_000, None), (20231105, None), (-1, None)],
)
def test_series_and_instance_numbers_leave_as_far_as_they_count(
    number: int | None, allowed: int | None
) -> None:
    assert allow_ordinal(number) == allowed


def test_unlisted_attributes_stay_behind() -> None:
    assert allow_technical({"PatientName": ("CT",), "StationName": ("CT",), "StudyDate": (20200101,)}) == {}


@pytest.mark.parametrize(
    ("keyword", "values", "allowed"),
    [
        ("KVP", (120.0,), {"kvp": 120.0}),
        ("KVP", (float("nan"),), {}),
        ("KVP", (19400312.0,), {}),
        ("KVP", (), {}),
        ("PixelSpacing", (0.5, 0.75), {"pixel_spacing": [0.5, 0.75]}),
        ("PixelSpacing", tuple([0.5] * 17), {}),
        ("CTDIvol", (12.5,), {"ctdi_vol": 12.5}),
        ("MRAcquisitionType", ("3D",), {"mr_acquisition_type": "3D"}),
        ("BodyPartExamined", ("chest ",), {"body_part_examined": "CHEST"}),
        ("BodyPartExamined", ("Chest of J. Smith",), {}),
        ("ViewPosition", ("PA",), {"view_position": "PA"}),
        ("ViewPosition", ("PA", "SMITH"), {}),
        (
            "ImageType",
            ("ORIGINAL", "PRIMARY", "SMITH JOHN", "AXIAL"),
            {"image_type": ["ORIGINAL", "PRIMARY", "AXIAL"]},
        ),
        ("PatientOrientation", ("A", "FR"), {"patient_orientation": ["A", "FR"]}),
        ("ConvolutionKernel", ("B30f",), {"convolution_kernel": "B30f"}),
        ("ConvolutionKernel", ("Smith^John",), {}),
        ("Manufacturer", ("SIEMENS (serial 4711)",), {"manufacturer": "SIEMENS"}),
        ("Manufacturer", ("Smith and Sons",), {}),
        ("ContrastBolusAgent", ("Omnipaque for J. Smith",), {"has_contrast": True}),
        ("ContrastBolusAgent", (" ",), {"has_contrast": False}),
    ],
)
def test_values_must_be_of_the_listed_kind(
    keyword: str, values: tuple[str | float, ...], allowed: dict[str, object]
) -> None:
    assert allow_technical({keyword: values}) == allowed


@pytest.mark.parametrize(
    ("age", "years"),
    [
        ("045Y", 45),
        ("089Y", 89),
        ("090Y", 90),
        ("101Y", 90),
        ("999Y", 90),
        ("018M", 1),
        ("051W", 0),
        ("800D", 2),
        ("45", None),
        ("0045Y", None),
        ("", None),
        ("born 1940", None),
    ],
)
def test_ages_are_whole_years_and_end_at_ninety(age: str, years: int | None) -> None:
    assert allow_patient({"PatientAge": (age,), "PatientSex": ("M",)}) == {"age_years": years, "sex": "M"}


def test_sex_is_one_of_three_codes() -> None:
    assert [allow_patient({"PatientSex": (sex,)})["sex"] for sex in ("F", "m", "O", "X", "F,SMITH")] == [
        *("F", "M", "O"),
        *(None, None),
    ]


def test_what_leaves_is_sorted_json() -> None:
    allowed = allow_technical({"KVP": (100.0,), "ImageType": ("ORIGINAL",), "EchoNumbers": (2,)})
    assert list(allowed) == sorted(allowed)
    assert json.loads(json.dumps(allowed)) == allowed
