"""Progress: bars on a terminal, plain lines elsewhere, and never anything on standard output."""

from __future__ import annotations

import io

import pytest

from shardflow.cli.pack import BarProgress, LineProgress, make_progress

pytestmark = pytest.mark.fast


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _run(stream: io.StringIO, kind: type[BarProgress | LineProgress]) -> None:
    with make_progress(stream) as progress:
        assert isinstance(progress, kind)
        progress.phase("headers", 300)
        progress.advance(128)
        progress.advance(172)
        progress.phase("reports", 0)
        progress.phase("studies", 2)
        progress.note("split [test] gets no study")
        progress.advance()
        progress.advance()
        for name in ("samples", "ledger", "manifest", "done"):
            progress.phase(name, 0)


def test_lines_for_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    _run(stream, LineProgress)
    assert stream.getvalue().splitlines() == [
        "reading headers (300)",
        "linking reports",
        "packing studies (2)",
        "split [test] gets no study",
        "writing the samples table",
        "writing the ledger",
        "publishing the manifest",
        "done",
    ]
    assert capsys.readouterr().out == ""


def test_a_long_phase_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("shardflow.cli.pack.time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.phase("studies", 9)
    for _ in range(4):
        now += 6.0
        progress.advance()
    assert stream.getvalue().splitlines() == [
        "packing studies (9)",
        "packing studies: 2 of 9, about 42 s left",
        "packing studies: 4 of 9, about 30 s left",
    ]


def test_what_an_earlier_run_has_done_does_not_count_for_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("shardflow.cli.pack.time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.phase("headers", 1000)
    progress.advance(700)
    for _ in range(80):
        now += 1.0
        progress.advance()
    assert stream.getvalue().splitlines()[-1] == "reading headers: 780 of 1000, about 4 min left"


def test_bars_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stream = _Terminal()
    _run(stream, BarProgress)
    shown = stream.getvalue()
    assert "300/300" in shown
    assert "packing studies" in shown
    assert "split [test] gets no study" in shown
    assert capsys.readouterr().out == ""
