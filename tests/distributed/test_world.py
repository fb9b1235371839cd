"""A loader that is told nothing of its rank yields that rank's share, and says where it knew it from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardflow.format import Dataset
from tests.distributed.launcher import job
from tests.factories import make_dataset

pytestmark = pytest.mark.distributed

NUM_RANKS = 4


def test_ranks_that_say_nothing_get_different_samples(tmp_path: Path) -> None:
    url = make_dataset(tmp_path / "a", num_samples=29, samples_per_shard=6)
    arguments = [url, str(tmp_path / "out")]
    with job(
        tmp_path, "tests.distributed.world_ranks", arguments, num_ranks=NUM_RANKS, is_forked=True
    ) as running:
        finished = running.wait(600)
    assert finished.exit_code == 0, finished.text
    ranks = [
        json.loads((tmp_path / "out" / f"rank-{rank}.json").read_text(encoding="utf-8"))
        for rank in range(NUM_RANKS)
    ]
    dataset = Dataset.open(url)
    every = sorted(dataset.samples.sample_key(row) for row in dataset.splits["train"])
    for way in ("environment", "torch.distributed", "process", "fork"):
        assert sorted(key for rank in ranks for key in rank[way]) == every, way
    for way in ("workers", "spawn"):
        assert ranks[-1][way] == ranks[-1]["environment"], way
    assert [rank["fork"] for rank in ranks] == [rank["environment"] for rank in ranks]
    # Joining with the rank that the environment stated changes nothing; the loader goes on to its next epoch.
    assert sorted(key for rank in ranks for key in rank["joined since"]) == every
    assert all(sorted(rank["single"]) == every for rank in ranks)
    for way in ("mesh", "submesh"):
        assert [rank[way] for rank in ranks[::2]] == [rank[way] for rank in ranks[1::2]], way
        assert sorted(ranks[0][way] + ranks[2][way]) == every, way
    assert all("'dp', 'tp'" in rank["refusal"][0] for rank in ranks)
    for number, rank in enumerate(ranks):
        assert rank["log"][0] == f"rank {number} of 4 from the environment (RANK, WORLD_SIZE)"
        assert rank["log"][1] == f"rank {number} of 4 from torch.distributed"
        assert f"rank {number // 2} of 2 from the device mesh (dp)" in rank["log"]
