"""What can be said of the SLURM scripts without a SLURM; ``test_slurm.py`` runs them on one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.deploy.manifests import DEPLOY

pytestmark = pytest.mark.fast

SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sbatch"))


def directives(script: Path) -> dict[str, str]:
    """The ``#SBATCH`` options; SLURM stops reading them at the first command."""
    head = re.split(r"^(?!#|$)", script.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", head, re.MULTILINE)
    assert len(found) == script.read_text(encoding="utf-8").count("\n#SBATCH"), "an option after a command"
    return dict(found)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_bash_understands_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_it_is_warned_and_may_come_back(script: Path) -> None:
    options = directives(script)
    assert re.fullmatch(r"B:USR1@\d+", options["signal"])
    assert "requeue" in options
    assert options["open-mode"] == "append"  # else a requeued job loses its log


@pytest.mark.parametrize(
    ("variables", "said", "code"),
    [
        ({}, "pack --config a.toml", 0),
        (
            {"SLURM_ARRAY_TASK_ID": "3", "SHARDFLOW_TASKS": "8", "SLURM_ARRAY_TASK_COUNT": "1"},
            "pack --config a.toml --task 3/8",
            0,
        ),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "1"}, "", 1),
    ],
)
def test_an_array_packs_in_tasks(tmp_path: Path, variables: dict[str, str], said: str, code: int) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "shardflow"
    command.write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    done = subprocess.run(
        ["bash", str(DEPLOY / "slurm" / "pack.sbatch"), "--config", "a.toml"],
        env={"PATH": os.environ["PATH"], "SHARDFLOW_VENV": str(tmp_path), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.stdout.strip(), done.returncode) == (said, code), done.stderr


def test_the_warning_leaves_time_for_a_checkpoint() -> None:
    script = DEPLOY / "slurm" / "train.sbatch"
    words = shlex.split(script.read_text(encoding="utf-8"), comments=True)
    timeout_s = int(words[words.index("--shutdown-timeout") + 1])
    assert timeout_s < int(directives(script)["signal"].partition("@")[2])
