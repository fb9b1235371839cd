"""Workflows and issue forms: they call targets of the Makefile, with fixed actions and few rights."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.licenses import IMAGES, Package, packages
from tests.conftest import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in (REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]

pytestmark = pytest.mark.fast


def _jobs(path: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    return jobs


def test_there_are_workflows_for_changes_nights_and_releases() -> None:
    assert [path.stem for path in WORKFLOWS] == ["nightly", "release", "test"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_all_work_is_a_target_of_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text("utf-8"), re.MULTILINE))
    for job in _jobs(path).values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            if "run" not in step:
                continue
            match = re.fullmatch(
                r"(?:sudo )?make (\S+|\$\{\{ matrix\.(\w+) \}\})((?: [A-Z_]+=\d+)*)", step["run"]
            )
            assert match, step["run"]
            assert {*(matrix[match[2]] if match[2] else [match[1]])} <= targets


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_fixed_and_rights_are_few(path: Path) -> None:
    content = yaml.safe_load(path.read_text("utf-8"))
    assert content["permissions"] == {}
    for name, job in content["jobs"].items():
        rights = {"contents": "read"}
        if (path.stem, name) == ("release", "release"):
            rights |= {"id-token": "write", "attestations": "write"}
        assert job["permissions"] == rights
        for step in job["steps"]:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step.get("uses", "a@" + "0" * 40))


def test_python_versions_are_those_that_are_declared() -> None:
    declared = re.findall(r'Python :: (3\.\d+)"', (REPOSITORY / "pyproject.toml").read_text("utf-8"))
    (test,) = (path for path in WORKFLOWS if path.stem == "test")
    assert _jobs(test)["test"]["strategy"]["matrix"]["python"] == declared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("check-jsonschema", ["--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS)]),
        ("check-jsonschema", ["--builtin-schema", "vendor.github-issue-forms", *map(str, FORMS)]),
        ("zizmor", ["--offline", "--no-progress", str(REPOSITORY / ".github" / "workflows")]),
    ],
    ids=["workflows", "forms", "security"],
)
def test_linters_find_nothing(tool: str, arguments: list[str]) -> None:
    command = [str(Path(sys.executable).with_name(tool)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("extras", [(), *IMAGES.values()], ids=["base", *IMAGES])
def test_nothing_that_is_installed_is_under_the_gpl(extras: tuple[str, ...]) -> None:
    found = packages(extras)
    assert len(found) >= 6
    assert [one.name for one in found if not one.license] == []
    assert [one.name for one in found if one.is_copyleft] == []


@pytest.mark.parametrize(
    ("stated", "libraries", "is_copyleft"),
    [
        ("GPL-3.0-or-later", (), True),
        ("GNU General Public License v2 (GPLv2)", (), True),
        ("AGPL-3.0", (), True),
        ("LGPL-2.1-or-later", (), False),
        ("GNU Lesser General Public License v3 (LGPLv3)", (), False),
        ("GPL-2.0-only OR MIT", (), False),
        ("MIT", ("libx264",), True),
        ("MIT", ("libavcodec",), False),
    ],
)
def test_the_gpl_is_recognized(stated: str, libraries: tuple[str, ...], is_copyleft: bool) -> None:
    assert Package(name="a", version="1", license=stated, libraries=libraries).is_copyleft == is_copyleft


def test_bills_of_materials_are_of_what_the_images_install() -> None:
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    for image, extras in IMAGES.items():
        dockerfile = (REPOSITORY / "docker" / f"{image}.Dockerfile").read_text("utf-8")
        assert re.findall(r"\*extras\['([\w-]+)'\]", dockerfile) == list(extras)
        assert f"$(call sbom_of,{image},{'$(,)'.join(extras)})" in makefile
