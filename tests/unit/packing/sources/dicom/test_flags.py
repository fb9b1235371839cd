"""The list of flags is the page's list; the sweep checks that nothing else is ever said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardflow.format.reasons import FLAGS, PHASE_NAMES

pytestmark = pytest.mark.fast

PAGE = Path(__file__).resolve().parents[5] / "docs" / "dicom.md"


def test_the_page_lists_every_flag() -> None:
    page = PAGE.read_text(encoding="utf-8")
    family = {f"split_by_{name}" for name in PHASE_NAMES}  # one row of the page, with its names in order
    rows = re.findall(r"^\| `([a-z_]+)` \| (.+?) \|$", page, re.MULTILINE)
    assert [row for row in rows if row[0] in FLAGS] == [row for row in FLAGS.items() if row[0] not in family]
    (names,) = re.findall(r"^\| `split_by_\*` \| .*: (.+)\. \|$", page, re.MULTILINE)
    assert names == ", ".join(f"`{name}`" for name in PHASE_NAMES)
    assert all(sentence.endswith(".") for sentence in FLAGS.values())
