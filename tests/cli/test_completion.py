"""``shardflow completion``: scripts that a shell takes, and that complete what the parser knows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pipelines.cli import build_parser
from pipelines.completion import SHELLS, describe_commands
from tests.cli.conftest import Call

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("shell", SHELLS)
def test_script_names_every_command_and_option_and_parses(call: Call, shell: str, tmp_path: Path) -> None:
    called = call("completion", shell)
    assert called.code == 0
    commands = describe_commands(build_parser())
    assert {"bench", "info", "pack", "preview", "report"} <= {command.name for command in commands}
    for command in commands:
        assert command.name in called.out
        for option in command.options:
            for flag in option.flags:
                assert flag.lstrip("-") in called.out
    assert "print-config" in called.out  # of pack
    script = tmp_path / f"script.{shell}"
    script.write_text(called.out, encoding="utf-8")
    if shutil.which(shell):
        done = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def _complete(script: str, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}\n_shardflow\n"
    code += "printf '%s\\n' \"${COMPREPLY[@]}\"\n"
    done = subprocess.run(
        ["bash", "--norc", "-c", code], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def test_bash_offers_what_fits(call: Call, tmp_path: Path) -> None:
    script = call("completion", "bash").out
    (tmp_path / "my data").mkdir()
    (tmp_path / "my file.toml").touch()
    assert _complete(script, tmp_path, "shardflow", "p") == ["pack", "plan", "preview"]
    assert _complete(script, tmp_path, "shardflow", "--v") == ["--version"]
    assert _complete(script, tmp_path, "shardflow", "preview", "--s") == ["--series", "--slices"]
    assert _complete(script, tmp_path, "shardflow", "plan", "x", "--tail", "") == ["drop", "repeat", "mask"]
    assert _complete(script, tmp_path, "shardflow", "info", "my") == ["my data"]
    assert _complete(script, tmp_path, "shardflow", "pack", "--config", "my f") == ["my file.toml"]
    assert _complete(script, tmp_path, "shardflow", "plan", "x", "--seed", "") == []
    assert _complete(script, tmp_path, "shardflow", "completion", "") == list(SHELLS)


def test_unknown_shell_is_refused(call: Call) -> None:
    called = call("completion", "tcsh")
    assert called.code == 2
    assert "bash" in called.err


def test_pack_options_are_left_out_where_packing_is_not_installed(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pipelines.pack", None)
    called = call("completion", "bash")
    assert called.code == 0
    assert "print-config" not in called.out
    assert 'words="bench' in called.out
