"""Pieces of the page about a dataset: numbers in words, and what the style promises on paper."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import shardflow.viewing
from shardflow.format import Dataset
from shardflow.logs import counted
from shardflow.viewing import gather, render_page
from tests.viewing_case import make_viewed_dataset

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


class _Elements(HTMLParser):
    """Counts elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.update([tag, *(f"{tag} {name}" for name, _ in attrs)])


EVIL = "</td></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def _poisoned(value: Any) -> Any:
    """Replace the end of every text in a structure by markup."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, Counter | dict):
        return type(value)({_poisoned(key): _poisoned(inner) for key, inner in value.items()})
    if isinstance(value, Mapping):
        return {_poisoned(key): _poisoned(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_poisoned(inner) for inner in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            one.name: _poisoned(getattr(value, one.name)) for one in dataclasses.fields(value) if one.init
        }
        return dataclasses.replace(value, **changes)
    return value


def test_no_text_of_a_dataset_becomes_markup_of_its_page(tmp_path: Path) -> None:
    make_viewed_dataset(tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    facts = gather(dataset)
    plain = _Elements(render_page(dataset, facts, kept_keywords=["A"], max_age_years=89))
    manifest = dataclasses.replace(
        dataset.manifest,
        created_with=_poisoned(dataset.manifest.created_with),
        key_id=EVIL,
        extra={name: _poisoned(value) for name, value in dataset.manifest.extra.items()},
    )
    dataset.manifest = manifest
    page = render_page(dataset, _poisoned(facts), kept_keywords=[EVIL], max_age_years=89)
    assert page.count("alert(1)") > 3
    found = _Elements(page).found
    assert "script" not in found
    assert found["img"] == plain.found["img"]
    assert not [name for name in found if " on" in name]
