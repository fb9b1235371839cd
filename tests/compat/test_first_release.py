"""What 0.1.0 wrote stays readable: datasets of two versions, tokens, findings, a corpus, a run's checkpoints and ledger.

`tests/compat/first_release` was written by 0.1.0 itself (its README says how), and `expected.json` holds what
0.1.0 read of it. The files are never written again: what a new version cannot read is a mistake of the new one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.cli.main import main
from shardflow.config import load_config
from shardflow.fields.types.text import Text
from shardflow.format import Dataset, decode_array
from shardflow.format.verification import verify
from shardflow.packing.versions.removal import Withdrawn, remove
from shardflow.sampling import BatchSpec, EpochPlan, LoaderState
from shardflow.training.checkpoint.files import CheckpointFolder, read_checkpoint
from shardflow.training.ledger import read_ledger

FOLDER = Path(__file__).with_name("first_release")
EXPECTED: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text(encoding="ascii"))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize("version", [1, 2])
def test_samples_and_plans_are_those_that_it_read(version: int) -> None:
    expected = EXPECTED["versions"][str(version)]
    dataset = Dataset.open(FOLDER / "dataset", version=version)
    assert dataset.dataset_id == expected["dataset_id"]
    assert {name: [rows.start, rows.stop] for name, rows in dataset.splits.items()} == expected["splits"]
    found = []
    for row in range(dataset.samples.num_samples):
        fields: dict[str, Any] = {}
        for name, data in sorted(dataset.read_fields(row).items()):
            if name.endswith(".b2nd"):
                array = decode_array("b2nd", data)
                pixels = np.ascontiguousarray(array).tobytes()
                fields[name] = [str(array.dtype), list(array.shape), digest(pixels)]
            else:
                fields[name] = digest(bytes(data))
        found.append([dataset.samples.sample_key(row), fields])
    assert found == expected["samples"]
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")
    plan = EpochPlan(dataset.splits["train"], spec, seed=7, epoch=1)
    assert [plan.step(step)[0].tolist() for step in range(plan.num_steps)] == expected["plan"]
