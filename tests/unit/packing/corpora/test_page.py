"""The page says what becomes of a line as the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.packing.corpora.config import REASONS

pytestmark = pytest.mark.fast

PAGE = Path(__file__).resolve().parents[4] / "docs" / "corpora.md"


def test_every_reason_is_on_the_page() -> None:
    rows = [
        line
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `") and line[3].isupper()
    ]
    assert rows == [
        f"| `{reason}` | {info.outcome} | {info.meaning} | {info.remedy} |"
        for reason, info in REASONS.items()
    ]
