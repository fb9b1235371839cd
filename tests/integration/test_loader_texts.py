"""Text alone takes a short way; what is odd about a sample is found there and told by the long one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardflow as sf
from shardflow.fields.slots import SlotAssembler
from shardflow.format import Dataset
from shardflow.loading import Loader
from shardflow.sampling import BatchSpec
from shardflow.storage import LocalStore
from tests.factories import make_dataset
from tests.integration.loader_support import flip_bit, hooked, locate, open_loader

SPEC = BatchSpec(micro_batch_size=8, micro_batches_per_step=1, tail="mask")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_dataset(tmp_path / "a", num_samples=40, samples_per_shard=16)


def _loader(dataset: Dataset) -> Loader:
    return open_loader(dataset, SPEC, {"report": sf.Text()})


def _texts(loader: Loader) -> dict[str, str]:
    return {
        key: batch["report"][slot]
        for batch in loader
        for slot, key in enumerate(batch.sample_keys)
        if key is not None and batch.info.weight[slot]
    }


def _stored(dataset: Dataset) -> dict[str, str]:
    found = {}
    for row in dataset.splits["train"]:
        fields = dataset.read_fields(row)
        found[dataset.samples.sample_key(row)] = fields.get("report.txt", b"").decode()
    return found


@pytest.mark.parametrize("is_local", [True, False])
def test_every_text_is_the_stored_one_and_takes_the_short_way(
    url: str, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the long way")

    monkeypatch.setattr(SlotAssembler, "fill", refuse)
    dataset = Dataset.open(url) if is_local else hooked(url, lambda *_: None)[0]
    assert isinstance(dataset.store, LocalStore) == is_local
    assert _texts(_loader(dataset)) == _stored(Dataset.open(url))


def test_each_kind_of_damage_costs_its_slot_and_no_other(url: str) -> None:
    dataset = Dataset.open(url)
    whole = _stored(dataset)
    rows = [row for row in dataset.splits["train"] if whole[dataset.samples.sample_key(row)]]
    flipped, cut = dataset.samples.sample_key(rows[2]), dataset.samples.sample_key(rows[-1])
    path, offset, _ = locate(dataset, rows[2], "report.txt")
    flip_bit(path, offset + 1)
    path, offset, num_bytes = locate(dataset, rows[-1], "report.txt")
    with path.open("r+b") as file:
        file.truncate(offset + num_bytes - 1)
    loader = _loader(Dataset.open(url))
    found = _texts(loader)
    reasons = {row.key: row.reason for row in loader.quarantined}
    assert reasons[flipped] == "CHECKSUM_MISMATCH"
    assert reasons[cut] == "FIELD_TRUNCATED"
    # Behind the cut there may be others of the shard; nothing else is lost, and nothing is wrong.
    assert {key: whole[key] for key in whole if key not in reasons} == found
