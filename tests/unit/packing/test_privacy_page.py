"""The officer's page says when it shows a part of the pictures only."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardflow.packing.privacy_page import _thumbnails


@pytest.mark.parametrize(("limit", "shown"), [(2, ["input1", "input2"]), (3, ["input0", "input1", "input2"])])
def test_the_last_pictures_are_shown_and_the_rest_is_counted(
    tmp_path: Path, limit: int, shown: list[str]
) -> None:
    entry = {"png": "", "reason": "BURNED_IN_ANNOTATION", "rules": ["page"], "sample_key": "k"}
    lines = [json.dumps({**entry, "input": f"input{number}"}) + "\n" for number in range(3)]
    (tmp_path / "pictures-00.jsonl").write_text("".join(lines), encoding="ascii")
    manifest: Any = SimpleNamespace(extra={"plan_digest": "00"})
    page = _thumbnails(manifest, tmp_path, limit)
    assert [f"input{number}" for number in range(3) if f"input{number}" in page] == shown
    assert ("the last 2 of 3; all are in pictures-00.jsonl" in page) == (limit == 2)
