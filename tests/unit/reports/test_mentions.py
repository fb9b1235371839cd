"""Explicit mentions of series and images."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardflow.reports import find_mentions

pytestmark = pytest.mark.fast

WORDS = """
series image images se im 3 45 45-47 : / , and of ( ) prior study (3:45) S3I45 to 10:45 slice .
; \u0663
"""
words = st.sampled_from([*WORDS.split(), "\n"])
texts = st.one_of(st.text(max_size=200), st.lists(words, max_size=40).map(" ".join))


def said(text: str) -> str:
    return " ".join(map(str, find_mentions(text)))


@given(texts)
@settings(max_examples=200, deadline=None)
def test_mentions_lie_in_the_text_and_are_ranges(text: str) -> None:
    for one in find_mentions(text):
        assert 0 <= one.span[0] < one.span[1] <= len(text)
        assert (one.first is None) == (one.last is None)
        assert one.first is None or (one.last is not None and 0 <= one.first <= one.last)
        assert one.series is not None or one.first is not None


@given(st.integers(1, 9999), st.integers(1, 9999))
@settings(max_examples=30, deadline=None)
def test_one_image_said_in_many_ways(series: int, image: int) -> None:
    forms = (
        "(series {s}, image {i})",
        "(se {s} im {i})",
        "(Se:{s}/Im:{i})",
        "(ser. {s}, img. {i})",
        "(S{s}I{i})",
        "({s}:{i})",
        "(se/im {s}/{i})",
        "on image {i} of series {s}",
        "on image {i}, series {s}",
        "on series #{s} at slice number {i}",
    )
    assert {said("Nodule " + form.format(s=series, i=image) + ".") for form in forms} == {
        f"S{series}:{image}"
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Cyst (series 3, images 12, 45-47, and 60).", "S3:12 S3:45-47 S3:60"),
        ("Cyst on both series 4 and series 5, image 31.", "S4:31 S5:31"),
        ("Cyst on series 4, series 5 and series 6, image 31.", "S4:31 S5:31 S6:31"),
        ("Image 12 of series 3 and series 5, image 20.", "S3:12 S5:20"),
        ("Compare series 3 with series 5, image 20.", "S3:* S5:20"),
        ("Key images 3:45 and 3:50-52.", "S3:45 S3:50-52"),
        ("Seen (image 3:45, 47 and 4:50).", "S3:45 S3:47 S4:50"),
        ("On image 31: 12 x 9 mm.", "?:31"),
        ("Series 2: 5 mm axial.", "S2:*"),
        ("Nodule (04/23).", ""),
        ("Cyst on image 45 of series 3 and image 20 of series 5.", "S3:45 S5:20"),
        ("Cyst (image 45, series 3; image 60, series 5).", "S3:45 S5:60"),
        ("Cyst (image 12) and stone (image 45), both on series 4.", "S4:12 S4:45"),
        ("Cyst between images 45 and 50 of series 3.", "S3:45-50"),
        ("Cyst (image 5 of 10).", "?:5"),
        ("Cyst (slice 33/120).", "?:33"),
        ("Cyst (3:45, 47 and 5:20).", "S3:45 S3:47 S5:20"),
        ("Cyst (series four, image forty-five).", "S4:45"),
        ("Series 3, 5 and 7 are degraded.", "S3:* S5:* S7:*"),
        ("Images 45, 3 mm cyst.", "?:45"),
    ],
)
def test_numbers_ranges_and_lists(text: str, expected: str) -> None:
    assert said(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Disc at T2/3 and L4/5.",
        "Node of 3/4 cm.",
        "Called at 10:45 on 3/14.",
        "Called (10:45 am).",
        "Strength (4/5).",
        "Series of 3 images, 5 mm slices.",
        "Images 5 mm thick.",
        "Glucagon IM 1 mg.",
        "Seen 3 series ago.",
    ],
)
def test_what_only_looks_like_images(text: str) -> None:
    assert said(text) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Cyst, previously on series 3, image 40.", ""),
        ("On the prior CT, series 3 image 40, it was 5 mm.", ""),
        ("Cyst on series 3 image 40 of the outside MRI.", ""),
        ("Comparison: CT 2019, series 3, image 45.", ""),
        ("Cyst 9 mm (series 3, image 45), previously 7 mm (series 2, image 39).", "S3:45"),
        ("Cyst now 9 mm (3:45), was 7 mm (2:39).", "S3:45"),
        ("Cyst grew from 7 mm (3:45) to 9 mm (5:20).", "S5:20"),
        ("Compared with prior, the cyst (series 3, image 45) has grown.", "S3:45"),
        ("The previously seen cyst on series 3, image 45 is stable.", "S3:45"),
        ("Prior lobectomy with clips (series 3, image 45).", "S3:45"),
    ],
)
def test_other_examinations_are_left_out(text: str, expected: str) -> None:
    assert said(text) == expected


CASES = [
    line.rpartition(" => ")[::2]
    for line in Path(__file__).with_name("mention_cases.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


@pytest.mark.parametrize(("text", "names"), CASES, ids=[text for text, _ in CASES])
def test_references_as_reports_write_them(text: str, names: str) -> None:
    assert said(text) == ("" if names == "none" else names)
