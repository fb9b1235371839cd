"""The wheel holds the package with its data files, and nothing that could shadow a user's own modules."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def _build(sources: Path, folder: Path) -> dict[str, bytes]:
    """Build the source distribution, and the wheel from it."""
    command = [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(folder), str(sources)]
    subprocess.run(command, check=True, timeout=300)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in {".whl", ".gz"}}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return _build(REPOSITORY, tmp_path_factory.mktemp("distributions"))


@pytest.fixture(scope="module")
def wheel(distributions: dict[str, bytes]) -> zipfile.ZipFile:
    (name,) = (name for name in distributions if name.endswith(".whl"))
    return zipfile.ZipFile(io.BytesIO(distributions[name]))


def test_two_builds_have_the_same_bytes(distributions: dict[str, bytes], tmp_path: Path) -> None:
    """Of a copy elsewhere, whose files have other times."""
    clone = tmp_path / "clone"
    for name in subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split("\0"):
        if name and (REPOSITORY / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, clone / name)
            os.utime(clone / name, (1, 1))
    again = _build(clone, tmp_path / "again")
    assert {name.rpartition(".")[2] for name in again} == {"whl", "gz"}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in again.items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in distributions.items()
    }


def test_sources_hold_what_is_tracked_and_nothing_else(distributions: dict[str, bytes]) -> None:
    (name,) = (name for name in distributions if name.endswith(".gz"))
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    with tarfile.open(fileobj=io.BytesIO(distributions[name])) as archive:
        found = {one.name.partition("/")[2] for one in archive if one.isfile()}
    assert found - {"PKG-INFO"} <= set(listed)
    assert {name for name in listed if name.startswith("shardflow/")} <= found
    assert {"README.md", "LICENSE", "pyproject.toml", "shardflow/__init__.py"} <= found


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
