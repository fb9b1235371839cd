"""``shardflow completion``: scripts that a shell takes, and that complete what the parser knows."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from shardflow.cli.main import command_parsers
from tests.cli.conftest import Call

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_script_names_every_command_and_option_and_parses(call: Call, shell: str, tmp_path: Path) -> None:
    called = call("completion", shell)
    assert called.code == 0
    for name, parser in command_parsers().items():
        assert name in called.out
        for flag in parser._option_string_actions:
            assert flag.lstrip("-") in called.out
    script = tmp_path / f"script.{shell}"
    script.write_text(called.out, encoding="utf-8")
    if shutil.which(shell):
        done = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")


def _complete(script: str, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}\n_shtab_shardflow\n"
    code += "printf '%s\\n' \"${COMPREPLY[@]}\"\n"
    done = subprocess.run(
        ["bash", "--norc", "-c", code], cwd=folder, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def test_bash_offers_what_fits(call: Call, tmp_path: Path) -> None:
    script = call("completion", "bash").out
    (tmp_path / "my data").mkdir()
    (tmp_path / "my file.toml").touch()
    assert sorted(_complete(script, tmp_path, "shardflow", "p")) == ["pack", "pack-text", "plan", "preview"]
    assert _complete(script, tmp_path, "shardflow", "--v") == ["--version"]
    assert _complete(script, tmp_path, "shardflow", "preview", "--s") == ["--series", "--slices"]
    assert _complete(script, tmp_path, "shardflow", "plan", "x", "--tail", "") == ["drop", "repeat", "mask"]
    assert _complete(script, tmp_path, "shardflow", "info", "my") == ["my data"]
    assert "my file.toml" in _complete(script, tmp_path, "shardflow", "pack", "--config", "my f")
    assert _complete(script, tmp_path, "shardflow", "plan", "x", "--seed", "") == []
    assert _complete(script, tmp_path, "shardflow", "completion", "") == ["bash", "fish", "zsh"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_offers_what_fits(call: Call, tmp_path: Path) -> None:
    script = tmp_path / "shardflow.fish"
    script.write_text(call("completion", "fish").out, encoding="utf-8")
    (tmp_path / "my data").mkdir()

    def offered(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"],
            cwd=tmp_path,
            env=os.environ | {"HOME": str(tmp_path), "TERM": "dumb"},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        return [each.split("\t")[0] for each in done.stdout.splitlines()]

    assert sorted(offered("shardflow p")) == ["pack", "pack-text", "plan", "preview"]
    assert offered("shardflow preview --sl") == ["--slices"]
    assert sorted(offered("shardflow plan x --tail ")) == ["drop", "mask", "repeat"]
    assert offered("shardflow completion z") == ["zsh"]
    assert [name.replace("\\", "") for name in offered("shardflow info my")] == ["my data/"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_offers_what_fits(call: Call, tmp_path: Path) -> None:
    """zsh completes in its line editor only, so the test types into a terminal."""
    script = tmp_path / "shardflow.zsh"
    script.write_text(call("completion", "zsh").out, encoding="utf-8")
    leader, follower = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path), "TERM": "dumb", "PS1": "ready> ", "COLUMNS": "200"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    try:
        load = f'autoload -Uz compinit && compinit -u -D && eval "$(<{script})"'
        _type(leader, f"{load} && print lo''aded\n", until="loaded")
        # A prefix that one name has is completed; one of several lists them.
        _type(leader, "shardflow prev\t", until="preview ")
        _type(leader, "--sl\t", until="--slices ")
        _type(leader, "\x15shardflow completion f\t", until="fish ")
        _type(leader, "\x15shardflow plan x --tail m\t", until="mask ")
        assert "print a script that completes" in _type(leader, "\x15shardflow \t\t", until="verify")
    finally:
        shell.kill()
        shell.wait()
        os.close(leader)


def _type(terminal: int, keys: str, *, until: str) -> str:
    """Type into a terminal and read what appears, until a text does."""
    os.write(terminal, keys.encode())
    seen, deadline = "", time.monotonic() + 300
    while until not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{until!r} did not appear after {keys!r}: {seen!r}"
        seen += os.read(terminal, 65536).decode(errors="replace").replace("\a", "")  # it rings, too
    return seen


def test_unknown_shell_is_refused(call: Call) -> None:
    called = call("completion", "tcsh")
    assert called.code == 2
    assert "bash" in called.err
