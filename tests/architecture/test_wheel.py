"""The wheel holds the package with its data files, and nothing that could shadow a user's own modules."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--out-dir", folder, REPOSITORY],
        check=True,
        timeout=300,
    )
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_wheel_installs_shardflow_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"shardflow"}


def test_wheel_holds_every_tracked_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    """Word lists, rules, tables and assets of pages too, not only modules."""
    listed = subprocess.run(
        ["git", "ls-files", "shardflow"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    tracked = {name for name in listed if (REPOSITORY / name).is_file()}
    packed = {name for name in wheel.namelist() if name.startswith("shardflow/")}
    assert {Path(name).suffix for name in packed} >= {".css", ".csv", ".html", ".js", ".toml", ".txt"}
    assert "shardflow/py.typed" in packed
    assert packed == tracked


def test_metadata_names_one_command_and_no_place_that_may_not_exist(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.partition("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert not metadata.get_all("Project-URL")
    commands = wheel.read(f"{info}/entry_points.txt").decode()
    assert commands.split() == ["[console_scripts]", "shardflow", "=", "shardflow.cli.main:main"]
