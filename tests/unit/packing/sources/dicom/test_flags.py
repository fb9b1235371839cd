"""The list of flags is the page's list; the sweep checks that nothing else is ever said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardflow.format.reasons import FLAGS

pytestmark = pytest.mark.fast

PAGE = Path(__file__).resolve().parents[5] / "docs" / "dicom.md"


def test_the_page_lists_every_flag() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row for row in rows if row[0] in FLAGS] == list(FLAGS.items())
    assert all(sentence.endswith(".") for sentence in FLAGS.values())
