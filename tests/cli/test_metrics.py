"""``shardflow metrics``: a run's numbers from its folder."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pytest

from shardflow.cli import main as cli
from shardflow.cli import runs
from tests.run_factory import write_run

pytestmark = pytest.mark.fast


def test_numbers_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["metrics", str(write_run(tmp_path)), "--once"]) == 0
    assert "shardflow_steps_total 60.0\n" in capsys.readouterr().out


def test_a_folder_that_is_none_and_an_address_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, told in (
        (["metrics", str(tmp_path / "missing")], "RUN must be an existing folder"),
        (["metrics", str(tmp_path), "--once"], "must be the folder of a training run"),
        (["metrics", str(tmp_path), "--listen", "9464"], "--listen must be an address and a port"),
        (["metrics", str(tmp_path), "--token-file", str(tmp_path / "t")], "--token-file must be a file"),
    ):
        assert cli.main(arguments) == cli.EXIT_CONFIGURATION
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "has_token"),
    [
        (["--listen", "127.0.0.1:0"], True),
        (["--listen", "127.0.0.1:0", "--no-token"], False),
        (["--listen", "0.0.0.0:0"], True),
        (["--listen", "0.0.0.0:0", "--no-token"], False),
        (["--listen", "127.0.0.1:0", "--token-file"], True),
    ],
)
def test_who_is_asked_for_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], has_token: bool
) -> None:
    printed: list[str] = []

    def shown(lines: Iterable[str]) -> None:
        printed.extend(lines)
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "show_lines", shown)
    if options[-1] == "--token-file":
        (tmp_path / "token").write_text("0123456789abcdef")
        options = [*options, str(tmp_path / "token")]
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        cli.main(["metrics", str(write_run(tmp_path / "run")), *options])
    assert ("?token=" in printed[0]) == has_token


def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    # Tests that a shell runs in the background inherit that interrupts are ignored.
    program = (
        "import signal, sys; from shardflow.cli import main as cli; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(cli.main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, "metrics", str(write_run(tmp_path)), "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stdout
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            with urllib.request.urlopen(found[0], timeout=300) as answer:
                assert b"shardflow_steps_total 60.0\n" in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=300) == 0
        finally:
            process.kill()
