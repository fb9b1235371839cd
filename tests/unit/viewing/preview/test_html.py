"""Pieces of the page about a dataset: numbers in words, and what the style promises on paper."""

from __future__ import annotations

import re
from importlib import resources

import pytest

import shardflow.viewing
from shardflow.viewing.markup import counted

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 studies"), (1, "1 study"), (2, "2 studies"), (1000, "1,000 studies")]
)
def test_a_number_of_things_is_said_as_people_do(number: int, expected: str) -> None:
    assert counted(number, "study", "studies") == expected


def test_on_paper_the_page_is_light_and_its_marks_stay() -> None:
    """A browser that prints leaves backgrounds out: white letters on a red mark would be white on white."""
    style = (resources.files(shardflow.viewing) / "assets" / "page.css").read_text(encoding="utf-8")
    paper = style[style.index("@media print") :]
    assert "print-color-adjust:exact" in paper
    assert re.findall(r"@media ([^{]*prefers-color-scheme:dark[^{]*)\{", style) == [
        "screen and (prefers-color-scheme:dark)"
    ]
