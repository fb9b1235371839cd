"""Pieces of the page about a dataset: numbers in words, and what the style promises on paper."""

from __future__ import annotations

import re

import pytest

from shardflow.viewing.page import STYLE
from shardflow.viewing.page_sections import counted

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 studies"), (1, "1 study"), (2, "2 studies"), (1000, "1,000 studies")]
)
def test_a_number_of_things_is_said_as_people_do(number: int, expected: str) -> None:
    assert counted(number, "study", "studies") == expected


def test_on_paper_the_page_is_light_and_its_marks_stay() -> None:
    """A browser that prints leaves backgrounds out: white letters on a red mark would be white on white."""
    paper = STYLE[STYLE.index("@media print") :]
    assert "print-color-adjust:exact" in paper
    assert re.findall(r"@media ([^{]*prefers-color-scheme:dark[^{]*)\{", STYLE) == [
        "screen and (prefers-color-scheme:dark)"
    ]
