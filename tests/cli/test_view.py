"""``shardflow view``: how it ends."""

from __future__ import annotations

import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pytest

from shardflow.cli import main as cli
from shardflow.cli import view
from tests.viewing_case import make_viewed_dataset

pytestmark = [pytest.mark.fast, pytest.mark.timeout(120)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_all_that_it_began(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_viewed_dataset(tmp_path / "dataset")
    running: list[str] = []

    def shown(lines: Iterable[str]) -> None:
        (line,) = lines
        found = re.search(r"http://\S+", line)
        assert found
        with urllib.request.urlopen(found[0].replace("?", "api/findings?"), timeout=300) as answer:
            assert answer.status == 200
        running.extend(thread.name for thread in threading.enumerate() if "shardflow-view" in thread.name)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(view, "show_lines", shown)
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    assert cli.main(["view", str(tmp_path / "dataset"), "--port", "0"]) == 0
    assert "shardflow-view-server" in running
    assert not [thread for thread in threading.enumerate() if "shardflow-view" in thread.name]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
