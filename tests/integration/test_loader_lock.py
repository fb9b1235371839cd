"""The lock of a run: what a resume must find again, equal on all ranks; states stay small, old ones load."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import shardflow as sf
from shardflow.errors import StateError
from shardflow.format import Dataset, manifest
from shardflow.format.facts.making import attach_facts
from shardflow.format.facts.series import open_series
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.loading import Loader, World
from shardflow.loading.rows.lock import encode_lock
from shardflow.sampling import BatchSpec
from tests.field_cases import make_case_dataset

pytestmark = pytest.mark.fast

SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
FIELDS: Mapping[str, sf.Field] = {
    "frontal": sf.Image(series="role == 'frontal'", size=(10, 8), missing="pad"),
    "report": sf.Text(missing="pad"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_case_dataset(tmp_path / "a")
    return tmp_path / "a"


def _loader(dataset: Dataset, **settings: Any) -> Loader:
    defaults: dict[str, Any] = {"split": "train", "batch": SPEC, "seed": 5, "fields": FIELDS}
    return Loader(dataset, **{**defaults, **settings})


def test_the_lock_lists_what_a_run_reads_and_is_equal_on_all_ranks(folder: Path) -> None:
    ranks = [_loader(Dataset.open(folder), world=World(rank=rank, world_size=3)) for rank in range(3)]
    locks = [json.loads(json.dumps(loader.lock())) for loader in ranks]
    assert locks[0] == locks[1] == locks[2]
    dataset = Dataset.open(folder)
    (listed,) = locks[0]["datasets"]
    assert (listed["dataset_id"], listed["manifest_version"]) == (dataset.dataset_id, 1)
    assert listed["series_table"] == open_series(dataset)[1]
    assert locks[0]["sampling"]["batch"] == SPEC.to_json()
    assert str(folder) not in json.dumps(locks[0])
    states = [loader.state_dict() for loader in ranks]
    assert states[0] == states[1] == states[2]
    digest = hashlib.sha256(encode_lock(locks[0])).hexdigest()
    assert digest.startswith(str(states[0]["lock"]))
    assert len(json.dumps(states[0])) < 600


def test_the_identity_of_a_run_covers_plan_seed_and_content(folder: Path) -> None:
    dataset = Dataset.open(folder)
    first = _loader(dataset)
    parts = {"plan_id": first.plan_id, "seed": 5, "content_id": first.lock()["content_id"]}
    assert first.run_id == sha256_hex(canonical_json(parts))
    assert first.run_id == _loader(dataset, world=World(rank=1, world_size=2)).run_id
    others = [
        _loader(dataset, seed=6),
        _loader(dataset, fields={"report": sf.Text(missing="pad")}),
        _loader(dataset, batch=dataclasses.replace(SPEC, micro_batch_size=4)),
        _loader(dataset, fields={}),
    ]
    assert len({first.run_id, *(one.run_id for one in others)}) == 5


def test_a_resume_opens_the_version_of_the_lock_where_a_newer_one_exists(folder: Path) -> None:
    old = Dataset.open(folder)
    loader = _loader(old)
    next(iter(loader))
    lock, state = loader.lock(), loader.state_dict()
    newer = dataclasses.replace(
        old.manifest, manifest_version=2, parent=old.dataset_id, extra={"note": "two"}
    )
    manifest.commit(old.store, newer)
    attach_facts(Dataset.open(folder))
    with pytest.raises(StateError, match="dataset_id"):
        _loader(Dataset.open(folder)).load_state_dict(state)
    resumed = _loader(Dataset.open(folder), lock=lock)
    assert resumed.dataset.manifest_version == 1
    resumed.load_state_dict(state, lock=lock)
    assert resumed.run_id == loader.run_id


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"series_table": "0" * 64}, r"datasets\[0\]\.series_table of loader\.lock\.json was"),
        ({"tokens": {"ab": "cd"}}, r"datasets\[0\]\.tokens\.ab of"),
        ({"manifest_version": 3}, r"datasets\[0\]\.manifest_version of"),
    ],
)
def test_the_first_entry_that_differs_is_named(folder: Path, change: dict[str, Any], named: str) -> None:
    loader = _loader(Dataset.open(folder))
    lock = loader.lock()
    lock["datasets"][0].update(change)
    with pytest.raises(StateError, match=named):
        _loader(Dataset.open(folder), lock=lock)
    with pytest.raises(StateError, match=named):
        loader.load_state_dict(loader.state_dict(), lock=lock)
    assert loader.lock() != lock  # what lock() returned is the caller's own


def test_what_a_lock_says_of_sampling_and_content_must_hold(folder: Path) -> None:
    dataset = Dataset.open(folder)
    lock = _loader(dataset).lock()
    with pytest.raises(StateError, match=r"sampling\.seed of loader\.lock\.json was 5 and is 6"):
        _loader(dataset, seed=6, lock=lock)
    fewer = {"report": sf.Text(missing="pad")}
    with pytest.raises(StateError, match=r"series_table of loader\.lock\.json"):
        _loader(dataset, fields=fewer, lock=lock)
    assert _loader(dataset, fields=fewer, lock=lock, accept_content_change=True).lock() != lock
    with pytest.raises(StateError, match=r"what loader\.lock"):
        _loader(dataset, lock={"version": 9})


def test_a_state_of_other_tables_is_refused_and_older_states_load(folder: Path) -> None:
    loader = _loader(Dataset.open(folder))
    state = loader.state_dict()
    with pytest.raises(StateError, match="its lock differs"):
        loader.load_state_dict({**state, "lock": "0" * 32})
    loader.load_state_dict({key: value for key, value in state.items() if key != "lock"})
    loader.load_state_dict({**state, "content_id": loader.lock()["content_id"]})  # all 64 digits
    former = {key: value for key, value in state.items() if key not in ("lock", "content_id")}
    with pytest.raises(StateError, match="accept_content_change"):
        loader.load_state_dict(former)
    _loader(Dataset.open(folder), accept_content_change=True).load_state_dict(former)
