"""How far long work is: a bar with the time left on a terminal, a line now and then in a log."""

from __future__ import annotations

import io
import os
import pty
import re
import select
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardflow.cli.common import Pace, step_progress
from shardflow.format import Dataset
from shardflow.format.facts.making import attach_facts
from shardflow.logs import time_left
from tests.forks import Forked, command_server


@pytest.mark.fast
@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "words"),
    [
        (0, 10, 5.0, ""),
        (10, 10, 5.0, ""),
        (5, 10, 5.0, ", about 5 s left"),
        (9, 10, 0.1, ", about 1 s left"),
        (1, 10, 30.0, ", about 4 min left"),
        (1, 1000, 36.0, ", about 10.0 h left"),
    ],
)
def test_time_left_in_words(done: int, total: int, elapsed_s: float, words: str) -> None:
    assert time_left(done, total, elapsed_s) == words


@pytest.mark.fast
def test_a_log_gets_a_line_every_ten_seconds() -> None:
    now, stream = 100.0, io.StringIO()
    pace = Pace("verifying shards", stream, clock=lambda: now)
    for done in range(1, 51):
        now += 1.0
        pace.advance(done, 50)
    assert stream.getvalue().splitlines() == [
        "verifying shards: 10 of 50, about 40 s left",
        "verifying shards: 20 of 50, about 30 s left",
        "verifying shards: 30 of 50, about 20 s left",
        "verifying shards: 40 of 50, about 10 s left",
        "verifying shards: 50 of 50",
    ]


@pytest.mark.fast
def test_short_work_says_nothing_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with step_progress("reading") as advance:
        advance(1, 2)
        advance(2, 2)
    assert capsys.readouterr() == ("", "")


def _on_terminal(arguments: Sequence[str], environment: dict[str, str]) -> str:
    """What ``python ARGUMENT...`` shows on a terminal of its own, standard error and output together."""
    leader, follower = pty.openpty()
    with Path(os.devnull).open("rb") as nothing:
        streams = [nothing.fileno(), follower, follower]
        process = Forked(command_server(), arguments, streams, environment=os.environ | environment)
    os.close(follower)
    shown = b""
    while select.select([leader], [], [], 300)[0]:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux's way of saying that the other side is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(leader)
    assert process.wait(timeout=300) == 0
    return shown.decode()


_LONG_WORK = """\
import time
from shardflow.cli.common import step_progress
with step_progress("verifying shards") as advance:
    for done in range(1, 6):
        advance(done, 10)
        time.sleep(0.3)
"""


def test_a_terminal_gets_a_bar_with_counts_and_the_time_left() -> None:
    shown = _on_terminal(["-c", _LONG_WORK], {"TERM": "xterm-256color", "COLUMNS": "100"})
    assert "verifying shards" in shown
    assert " 5/10" in shown
    assert "0:00:0" in shown  # the time left


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "DATASET"),
        ("report", "DATASET", "-o", "OUT"),
        ("bench", "DATASET", "--repeats", "1"),
        (
            "synth",
            "OUT",
            "--studies",
            "1",
            "--seed",
            "1",
            "--size",
            "64",
            "--slices",
            "4",
            "--modality",
            "CT",
        ),
    ],
    ids=lambda arguments: arguments[0],
)
def test_long_commands_show_a_bar_on_a_terminal(
    dataset: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    attach_facts(Dataset.open(dataset))
    named = {"DATASET": str(dataset), "OUT": str(tmp_path / "out")}
    command = ["-m", "shardflow.cli.main", *(named.get(word, word) for word in arguments)]
    shown = _on_terminal(command, {"TERM": "xterm-256color", "COLUMNS": "100"})
    titles = {"verify": "verifying", "report": "reading", "bench": "measuring", "synth": "generating"}
    assert titles[arguments[0]] in shown
    assert "━" in shown


def test_no_color_is_heeded(dataset: Path) -> None:
    """https://no-color.org: no colours; bold is none."""
    command = ["-m", "shardflow.cli.main", "verify", str(dataset)]
    terminal = {"TERM": "xterm-256color"}
    plain = _on_terminal(command, terminal | {"NO_COLOR": "1"})
    assert "whole:" in plain
    assert not _colours(plain)
    assert _colours(_on_terminal(command, terminal | {"NO_COLOR": ""}))


def _colours(shown: str) -> set[int]:
    """The colours that escape sequences ask for: 30 to 49, 90 to 107."""
    codes = {int(code) for part in re.findall(r"\x1b\[([\d;]*)m", shown) for code in part.split(";") if code}
    return codes & {*range(30, 50), *range(90, 108)}
