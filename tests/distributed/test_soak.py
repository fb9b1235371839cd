"""A round of the soak (`make soak`): nothing is lost, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pack_case import REPOSITORY


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_a_round_of_everything_beside_a_steady_run(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    words = [sys.executable, "-m", "benchmarks.training.soak", "--minutes", "1", "--output", str(output)]
    finished = subprocess.run(
        words, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=3500
    )
    assert finished.returncode == 0, finished.stderr
    record = json.loads(output.read_text(encoding="utf-8"))
    assert record["loop"]["rounds"] >= 1
    assert record["steady"]["rows_equal_to_the_plan"] == 4 * record["steady"]["steps"] > 0
