"""Parts of a split through the loader: S1 to S5 hold, and a state of other samples is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardflow as sf
from shardflow.errors import StateError
from shardflow.format import Dataset
from shardflow.loading import Batch, Loader, World
from shardflow.loading.rows.selection import choose_rows
from shardflow.sampling import BatchSpec, TokenBudget
from tests.factories import make_dataset
from tests.integration.loader_support import open_loader, slots_of

SEED = 11
WHERE = "facts.num_slices >= 2 and facts.text_bytes < 70"
SPECS = {
    "fixed": BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask"),
    "lanes": BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask", lanes=2, window_bytes=9000),
    "budget": BatchSpec(
        budget=TokenBudget(max_tokens=60, max_samples=4),
        micro_batches_per_step=4,
        tail="mask",
        lanes=2,
        window_bytes=9000,
    ),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("subset") / "dataset"
    return Dataset.open(make_dataset(folder, splits={"test": 3, "train": 60}, slices=(0, 5), facts=True))


def loader_of(dataset: Dataset, spec: BatchSpec, rank: int = 0, world_size: int = 1) -> Loader:
    world = World(rank=rank, world_size=world_size)
    return open_loader(dataset, spec, {}, where=WHERE, seed=SEED, world=world)


def steps_of(batches: list[Batch]) -> dict[tuple[int, int], tuple[str | None, ...]]:
    return {(batch.step, batch.micro): tuple(batch.sample_keys) for batch in batches if batch.micro < 4}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_position_resumes_on_another_world(dataset: Dataset, spec: BatchSpec) -> None:
    whole = steps_of(list(loader_of(dataset, spec)))
    held = [key for keys in whole.values() for key in keys if key is not None]
    rows = list(choose_rows(dataset, "train", WHERE).rows)
    assert 8 < len(rows) < 50
    assert sorted(held) == sorted(dataset.samples.sample_key(row) for row in rows)
    first = loader_of(dataset, spec)
    states = [first.state_dict()]
    states += [first.state_dict() for batch in first if batch.slot == 3]
    for state in states[:-1]:
        rest: dict[tuple[int, int], tuple[str | None, ...]] = {}
        for rank in range(3):
            again = loader_of(dataset, spec, rank, world_size=3)
            again.load_state_dict(json.loads(json.dumps(state)))
            rest |= steps_of(list(again))
        assert rest == {place: keys for place, keys in whole.items() if place[0] >= int(str(state["step"]))}


def test_other_rows_are_refused_by_name_and_other_words_for_them_are_not(dataset: Dataset) -> None:
    spec = SPECS["fixed"]
    state = loader_of(dataset, spec).state_dict()
    for where in (None, "facts.num_slices >= 3"):
        other = open_loader(dataset, spec, {}, where=where, seed=SEED)
        with pytest.raises(StateError, match=r"^subset of the loader state must be this run's"):
            other.load_state_dict(state)
    other_words = "facts.text_bytes <= 69 and 1 < facts.num_slices"
    same = open_loader(dataset, spec, {}, where=other_words, seed=SEED)
    same.load_state_dict(state)
    assert same.plan_id == state["plan_id"]


def test_content_comes_with_the_chosen_samples(dataset: Dataset) -> None:
    fields = {"image": sf.Slices(num_slices=2, size=(16, 16)), "report": sf.Text()}
    loader = open_loader(dataset, SPECS["fixed"], fields, split="test+train", where=WHERE, seed=SEED)
    for batch in loader:
        for slot, row in slots_of(batch):
            stored = dataset.read_fields(row, ["report.txt"])["report.txt"]
            assert batch["report"][slot] == stored.decode()
            assert len(stored) < 70
            assert batch["image_mask"][slot].sum() == 2


def test_torchs_dataloader_takes_keys(dataset: Dataset, tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    from shardflow.loading.torch_dataset import ShardIterableDataset

    path = tmp_path / "wanted.txt"
    keys = [dataset.samples.sample_key(row) for row in list(dataset.splits["train"])[::2]]
    path.write_text("\n".join(keys), encoding="utf-8")
    streamed = ShardIterableDataset(
        dataset, split="train", keys=path, batch=SPECS["fixed"], seed=SEED, fields={}
    )
    found = list(DataLoader(streamed, batch_size=None))
    assert sorted(key for batch in found for key in batch.sample_keys if key) == sorted(keys)
