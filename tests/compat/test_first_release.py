"""What 0.1.0 wrote stays readable: two versions of a dataset, a corpus, a run's checkpoint and ledger.

`tests/compat/first_release` was written by 0.1.0 itself (its README says how), and `expected.json` holds what
0.1.0 read of it. The files are never written again: what a new version cannot read is its mistake.
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
from shardflow.format import Dataset, decode_array
from shardflow.loading.rows.selection import open_view
from shardflow.monitoring.goodput import measure_goodput
from shardflow.sampling import BatchSpec, EpochPlan, LoaderState
from shardflow.training.checkpoint.files import read_checkpoint
from shardflow.training.config import TrainConfig
from shardflow.training.ledger import read_ledger
from shardflow.training.run import train

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


@pytest.mark.parametrize("name", ["dataset", "texts"])
def test_every_byte_verifies(name: str) -> None:
    report = sf.verify(str(FOLDER / name))
    assert report.is_whole, report.damages


def test_batches_hold_its_slices_reports_tokens_and_findings(tmp_path: Path) -> None:
    """Pixels need the table of series, which is made of what 0.1.0 stored."""
    spec = BatchSpec(micro_batch_size=1, micro_batches_per_step=1)
    shutil.copytree(FOLDER / "dataset", tmp_path / "dataset")
    with pytest.raises(sf.ConfigError, match="shardflow attach DATASET --facts"):
        sf.Loader(Dataset.open(tmp_path / "dataset"), split="train", batch=spec, seed=3, fields=_IMAGE)
    assert main(["attach", str(tmp_path / "dataset"), "--facts"]) == 0
    dataset = Dataset.open(tmp_path / "dataset")
    (tokenizer,) = (path.name for path in (FOLDER / "dataset" / "tokens").iterdir())
    fields = {
        **_IMAGE,
        "report": sf.Text(),
        "tokens": sf.Tokens(tokenizer=tokenizer),
    }
    with sf.Loader(dataset, split="train", batch=spec, seed=3, fields=fields) as loader:
        batches = list(loader)
        assert loader.quarantined == []
    keys = {key for batch in batches for key in batch.sample_keys}
    assert keys == {key for key, _ in EXPECTED["versions"]["2"]["samples"]}
    assert all(batch["report"][0] and batch["image"].any() for batch in batches)
    assert all(len(batch["tokens"][0]) > 10 for batch in batches)
    assert len(open_view(dataset, "entity")) == 0  # no finding of the three reports was aligned well enough


def test_dialogues_are_read_as_conversations() -> None:
    dataset = Dataset.open(FOLDER / "texts")
    assert dataset.samples.num_samples == 2
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=1)
    with sf.Loader(dataset, split="train", batch=spec, seed=3, fields={"text": sf.Text()}) as loader:
        (batch,) = loader
    assert sorted(text.count("Effusion?") for text in batch["text"]) == [0, 1]


def test_checkpoint_and_ledger_are_read() -> None:
    run = FOLDER / "run"
    ledger = [[s.global_step, s.epoch, s.step, list(s.keys)] for s in read_ledger(run)]
    assert ledger == EXPECTED["ledger"]
    checkpoint = read_checkpoint(run / "checkpoints" / "step-00000003")
    assert checkpoint.state["versions"]["shardflow"] == "0.1.0"
    assert sum(tensor.numel() for tensor in checkpoint.model.values()) > 4000
    state = LoaderState.from_json(checkpoint.state["loader"])
    dataset = Dataset.open(FOLDER / "dataset")
    assert (state.dataset_id, state.epoch, state.step) == (dataset.dataset_id, 3, 0)
    assert measure_goodput(run).num_steps == 3
    assert main(["ledger", "show", str(run)]) == 0


def test_run_goes_on(tmp_path: Path) -> None:
    """With what it trains on written as it is now; the error says each thing that is written anew."""
    for name in ("dataset", "run", "tokenizer"):
        shutil.copytree(FOLDER / name, tmp_path / name)
    text = (FOLDER / "train-0.1.0.toml").read_text(encoding="ascii")
    (tmp_path / "train.toml").write_text(text, encoding="ascii")
    with pytest.raises(sf.ConfigError, match=r"write num_slices in \[fields\.image\]"):
        load_config(TrainConfig, tmp_path / "train.toml", [])
    now = text.replace("[image]\nnum_slices = 2\n", _FIELDS + "[image]\n")
    (tmp_path / "train.toml").write_text(now, encoding="ascii")
    assert main(["attach", str(tmp_path / "dataset"), "--facts"]) == 0
    longer = ["run.max_steps=5", "run.num_epochs=5"]
    with pytest.raises(sf.StateError, match=r"go on with run\.accept_content_change=true"):
        train(load_config(TrainConfig, tmp_path / "train.toml", longer))
    longer.append("run.accept_content_change=true")
    summary = train(load_config(TrainConfig, tmp_path / "train.toml", longer))
    assert (summary.outcome, summary.resumed_from, summary.global_step) == ("finished", "step-00000003", 5)
    ledger = read_ledger(tmp_path / "run")
    assert len({step.attempt for step in ledger[:3]} | {ledger[3].attempt}) == 2


_IMAGE = {"image": sf.Slices(num_slices=2, size=(16, 16))}
_FIELDS = """[fields.image]
type = "slices"
series = "series == 0"
num_slices = 2
size = [8, 8]
dtype = "float32"
missing = "pad"
[fields.report]
type = "text"
missing = "pad"
"""
