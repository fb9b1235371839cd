"""A loader killed at any time goes on with the next step: nothing is lost, doubled, or out of order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launcher import job
from tests.factories import make_dataset

pytestmark = pytest.mark.distributed


def kill_many(folder: Path, wanted: int, timeout_s: float) -> dict[str, int]:
    dataset = folder / "dataset"
    make_dataset(
        dataset, num_samples=26, samples_per_shard=8, slices=(1, 5), splits={"train": 26}, facts=True
    )
    arguments = [str(dataset), str(folder), str(wanted), "1"]
    module = "tests.distributed.loader_kills"
    with job(folder, module, arguments, num_ranks=None, is_forked=True) as running:
        finished = running.wait(timeout_s)
    assert finished.exit_code == 0, finished.text
    result: dict[str, int] = json.loads(finished.stdout)
    return result


def test_twelve_kills_cost_nothing(tmp_path: Path) -> None:
    result = kill_many(tmp_path, 12, 300)
    assert result["steps"] == 21  # 26 samples in micro-batches of 1, 4 a step, masked to 7 steps; 3 epochs
    assert result["kills"] >= 12


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_thousand_kills_cost_nothing(tmp_path: Path) -> None:
    """With none lost in 3,000 the rate is below one in a thousand, with 95 % confidence."""
    assert kill_many(tmp_path, 3000, 3600)["kills"] >= 3000
