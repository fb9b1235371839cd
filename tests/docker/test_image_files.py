"""What can be said of the images without building them; ``make images`` does the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from shardflow.config import load_config
from shardflow.packing import PackConfig
from shardflow.training.config import TrainConfig

pytestmark = pytest.mark.fast

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def test_the_settings_in_the_images_are_settings_of_the_jobs() -> None:
    pack = load_config(PackConfig, DOCKER / "pack.toml", [])
    train = load_config(TrainConfig, DOCKER / "train.toml", [])
    assert str(pack.output) == str(train.data.dataset) == "/dataset/packed"


@pytest.mark.parametrize("job", ["pack", "train"])
def test_an_image_runs_as_an_unprivileged_user_on_a_base_named_by_digest(job: str) -> None:
    """One base, wherever it is named; another one can be given in its place."""
    text = (DOCKER / f"{job}.Dockerfile").read_text(encoding="utf-8")
    (base,) = re.findall(r"^ARG BASE_IMAGE=(python:3\.11-slim@sha256:[0-9a-f]{64})$", text, re.MULTILINE)
    compose = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
    assert re.findall(r"\$\{BASE_IMAGE:-([^}]*)\}", compose) == [base, base]
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE_IMAGE}"}
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    assert "HEALTHCHECK" in text


def test_what_builds_the_wheel_in_an_image_is_pinned() -> None:
    root = DOCKER.parent
    builders = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["build-system"][
        "requires"
    ]
    pinned = {line.partition("==")[0] for line in (root / "constraints.txt").read_text("utf-8").splitlines()}
    assert set(builders) <= pinned
    for job in ("pack", "train"):
        text = (DOCKER / f"{job}.Dockerfile").read_text(encoding="utf-8")
        assert re.findall(r"pip install .*--build-constraints", text)
        assert text.count("--require-hashes") == 1
        assert (
            len(re.findall(r"pip install", text)) == 3
        )  # uv by its hash, and twice by uv, which checks hashes
        assert text.index("AS build") < text.index("COPY --from=build")


def test_every_locked_package_has_hashes_but_torch() -> None:
    """Every machine has its own build of torch."""
    text = (DOCKER.parent / "constraints.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    locked = {line.partition("==")[0]: line.count("--hash=sha256:") for line in text.splitlines()}
    assert len(locked) > 200
    assert {name for name, num_hashes in locked.items() if not num_hashes} == {"torch"}


def test_the_health_check_follows_what_a_job_writes(tmp_path: Path) -> None:
    deep = tmp_path / "run" / "checkpoints"
    deep.mkdir(parents=True)
    file = deep / "state.json"
    file.write_text("{}", encoding="utf-8")

    def code(within_s: int) -> int:
        command = [
            sys.executable,
            str(DOCKER / "recently_active.py"),
            "--within-s",
            str(within_s),
            str(tmp_path),
        ]
        return subprocess.run(command, check=False, capture_output=True).returncode

    long_ago = time.time() - 10_000
    for path in (file, deep, deep.parent, tmp_path):
        os.utime(path, (long_ago, long_ago))
    assert code(1300) == 1
    assert code(20_000) == 0
    os.utime(file)
    assert code(1300) == 0
    missing = [sys.executable, str(DOCKER / "recently_active.py"), "--within-s", "60", str(tmp_path / "none")]
    assert subprocess.run(missing, check=False, capture_output=True).returncode == 1
