"""A minimal install: every ``--help`` works, and a command says which extra it lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardflow.cli.main import COMMANDS, EXTRAS, extra_of

REPOSITORY = Path(__file__).resolve().parents[2]
_LACKS_PACK = "shardflow pack needs the extra 'pack': pip install 'shardflow[pack]'"
# Refuses what the extras install, as if none were installed, and runs the console script.
_WITHOUT_EXTRAS = """
import sys
from shardflow.cli.main import EXTRAS, main
refused = {package for packages in EXTRAS.values() for package in packages.split()}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
def code_of(arguments):
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code
"""


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_EXTRAS + script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.fast
def test_every_help_works_without_extras() -> None:
    done = _run(
        "for name in " + repr(["", *COMMANDS]) + ": assert code_of([*name.split(), '--help']) == 0, name"
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in COMMANDS:
        assert f"usage: shardflow {name} " in done.stdout


@pytest.mark.fast
def test_a_command_says_which_extra_it_needs(tmp_path: Path) -> None:
    recipe = tmp_path / "pack.toml"
    recipe.write_text('inputs = ["in"]\noutput = "out"\nprivate_dir = "private"\n', encoding="utf-8")
    done = _run(f"sys.exit(code_of(['pack', '--config', {str(recipe)!r}]))")
    assert done.stderr == f"shardflow: {_LACKS_PACK}\n"
    assert done.returncode == 2


@pytest.mark.fast
def test_a_package_of_no_extra_is_a_mistake_of_ours() -> None:
    assert extra_of(ModuleNotFoundError(name="pydicom.uid")) == "pack"
    assert extra_of(ModuleNotFoundError(name="nowhere.found")) is None
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(EXTRAS) <= set(project["optional-dependencies"])


@pytest.mark.slow
def test_a_minimal_install_runs_every_help(tmp_path: Path) -> None:
    """The wheel with the base dependencies alone, in an environment of its own."""
    uv = [sys.executable, "-m", "uv"] if shutil.which("uv") is None else ["uv"]
    python = tmp_path / "venv" / "bin" / "python"
    constraints = REPOSITORY / "constraints.txt"
    commands: list[list[str | Path]] = [
        [*uv, "venv", "--quiet", "--python", sys.executable, python.parents[1]],
        [*uv, "pip", "install", "--quiet", "--python", python, "--constraints", constraints, REPOSITORY],
    ]
    for command in commands:
        subprocess.run(command, check=True, timeout=300)
    shardflow = python.with_name("shardflow")
    for name in ("", *COMMANDS):
        done = subprocess.run(
            [shardflow, *name.split(), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), name
    recipe = tmp_path / "pack.toml"
    recipe.write_text('inputs = ["in"]\noutput = "out"\nprivate_dir = "private"\n', encoding="utf-8")
    done = subprocess.run(
        [shardflow, "pack", "--config", recipe], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (2, "shardflow: " + _LACKS_PACK)
