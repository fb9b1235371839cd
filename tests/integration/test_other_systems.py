"""Reading and planning need no Linux: the same plan and batches where its calls do not exist."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.factories import make_dataset
from tests.other_systems import SYSTEMS
from tests.pack_case import PATIENCE_S, REPOSITORY


def run(system: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.other_systems", system, *arguments]
    return subprocess.run(
        words, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """More shards than indexes are opened one by one for: node files need locks."""
    folder = tmp_path_factory.mktemp("other") / "dataset"
    make_dataset(folder, num_samples=70, samples_per_shard=1, slices=(1, 3), facts=True)
    return str(folder)


@pytest.fixture(scope="module")
def here(dataset: str) -> dict[str, Any]:
    finished = run("linux", dataset)
    assert finished.returncode == 0, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout)
    assert (found["codes"], found["verified"]) == ([0, 0, 0], True)
    return found


@pytest.mark.parametrize("system", SYSTEMS)
def test_reading_and_planning_are_the_same(system: str, dataset: str, here: dict[str, Any]) -> None:
    finished = run(system, dataset)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == here


@pytest.mark.parametrize("system", SYSTEMS)
def test_loader_processes_are_refused_by_a_sentence(system: str, dataset: str) -> None:
    finished = run(system, dataset, "process")
    assert "execution must be 'threads' on this system, got 'process'" in finished.stderr
