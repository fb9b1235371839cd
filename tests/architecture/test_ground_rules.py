"""The rules of tests/conftest.py, broken on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def _run(folder: Path, body: str, *options: str, allowed: str = "") -> tuple[int, str]:
    """Run a test file under the project's own rules: exit code and output."""
    (folder / "test_probe.py").write_text(f"import pytest, subprocess\n{body}\n", encoding="utf-8")
    (folder / "allowed.txt").write_text(allowed, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q"]
    command += ["--allowed-skips", str(folder / "allowed.txt"), *options, str(folder / "test_probe.py")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_skip_that_is_not_listed_fails_the_session(tmp_path: Path, options: tuple[str, ...]) -> None:
    body = "def test_a(): pass\n" + "".join(f'def test_{n}(): pytest.skip("no reason")\n' for n in "bcd")
    listed = "# listed\n*::test_c | no reason\n"
    code, said = _run(tmp_path, body, *options, allowed=f"{listed}*::test_d | another reason\n")
    assert code == 1
    found = [f"test_probe.py::test_{n} | no reason" in said for n in "bcd"]
    assert found == [True, False, True], said


def test_skips_that_are_listed_fail_nothing(tmp_path: Path) -> None:
    body = 'def test_a(): pass\ndef test_b(): pytest.skip("no reason")'
    code, said = _run(tmp_path, body, allowed="*::test_b | no reason\n")
    assert code == 0, said


def test_module_that_is_skipped_counts_as_well(tmp_path: Path) -> None:
    body = 'pytest.skip("whole module", allow_module_level=True)'
    code, said = _run(tmp_path, body)
    assert code != 0
    assert "whole module" in said


def test_run_without_a_test_fails(tmp_path: Path) -> None:
    code, _ = _run(tmp_path, "")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize(
    "body",
    [
        "def test_a(): subprocess.Popen(['sleep', '600'])",
        "def test_a(): subprocess.run(['bash', '-c', 'sleep 600 & disown'])",
    ],
    ids=["child", "orphan"],
)
def test_process_left_behind_fails_its_test(tmp_path: Path, body: str) -> None:
    code, said = _run(tmp_path, body, "-W", "ignore", "--grace-s", "1")
    assert code == 1
    assert "processes left behind: sleep 600" in said


def test_forked_command_left_behind_fails_its_test(tmp_path: Path) -> None:
    body = (
        "from tests.forks import Forked, _serve\n"
        "KEPT = []\n"
        "def test_a():\n"
        "    sleep = ['-c', 'import time; time.sleep(600)']\n"
        "    KEPT.append(Forked(_serve('default', []), sleep, (0, 1, 2)))"
    )
    code, said = _run(tmp_path, body, "-W", "ignore", "--grace-s", "1")
    assert code == 1
    assert "processes left behind: forked: " in said


def test_golden_value_that_differs_fails(tmp_path: Path) -> None:
    tests = (
        f"def test_{n}(golden): golden('{name}', {{}})" for n, name in enumerate(("cli-options", "none"))
    )
    code, said = _run(tmp_path, "\n".join(tests))
    assert code == 1
    assert "tests/golden/cli-options.json differs; if that is meant: make golden" in said
    assert "tests/golden/none.json is missing" in said
