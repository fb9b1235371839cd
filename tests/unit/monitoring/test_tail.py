"""What readers of a growing metrics.jsonl are given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardflow.monitoring.history import METRICS_FILE, MetricsTail

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("is_escaped", [True, False])
def test_a_text_holds_nothing_that_a_terminal_obeys(tmp_path: Path, is_escaped: bool) -> None:
    texts = ["\x1b[31mred", "\x1b]0;title\x07", "\x9b2J", "plain, \u00e9 too"]
    line = json.dumps({"event": "else", "time_s": 1.0, "hosts": texts, "settings": {texts[0]: 1}})
    if not is_escaped:  # JSON lets the second half of them stand
        line = line.replace("\\u009b", "\x9b")
    (tmp_path / METRICS_FILE).write_text(line + "\n", encoding="utf-8")
    (event,) = MetricsTail(tmp_path).read()
    found = event.values["hosts"]
    mark = "\N{REPLACEMENT CHARACTER}"
    assert found == [f"{mark}[31mred", f"{mark}]0;title{mark}", f"{mark}2J", "plain, \u00e9 too"]
    assert list(event.values["settings"]) == [found[0]]
