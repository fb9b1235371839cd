"""Blends through the loader: text-only corpora beside images, S1 to S6, equal keys in two datasets."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path

import pytest

import shardflow as sf
from shardflow.errors import ConfigError, StateError
from shardflow.format import Dataset
from shardflow.loading import Batch, Selection, World, open_blend
from shardflow.sampling import BatchSpec, TokenBudget
from tests.factories import make_dataset
from tests.integration.loader_support import flip_bit, locate, open_loader, slots_of

SEED = 11
FIELDS = {"image": sf.Slices(num_slices=2, size=(16, 16), missing="pad"), "report": sf.Text()}
BLEND = """
[[component]]
dataset = "images"
repeat = 1.5

[[component]]
dataset = "texts"
repeat = 0.6

[[component]]
dataset = "images"
where = "facts.num_slices >= 3"
"""
SPECS = {
    "fixed": BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask"),
    "lanes": BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask", lanes=4, window_bytes=9000),
    "budget": BatchSpec(
        budget=TokenBudget(max_tokens=60, max_samples=4),
        micro_batches_per_step=4,
        tail="mask",
        lanes=4,
        window_bytes=9000,
    ),
}
Held = dict[tuple[int, int, int], tuple[tuple[str | None, ...], tuple[int, ...]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets with equal keys; one has no images."""
    folder = tmp_path_factory.mktemp("blend")
    make_dataset(folder / "images", splits={"test": 2, "train": 21}, slices=(1, 5), facts=True)
    make_dataset(folder / "texts", splits={"test": 3, "train": 30}, slices=0, seed=5, facts=True)
    (folder / "blend.toml").write_text(BLEND, encoding="utf-8")
    return folder


@pytest.fixture
def blend(folder: Path) -> Selection:
    return open_blend(folder / "blend.toml")


def held(batches: list[Batch]) -> Held:
    return {
        (batch.epoch, batch.step, batch.micro): (tuple(batch.sample_keys), tuple(batch.components))
        for batch in batches
        if batch.micro < 4
    }


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_position_resumes_on_another_world_across_epochs(blend: Selection, spec: BatchSpec) -> None:
    loader = open_loader(blend, spec, {}, seed=SEED)
    states, received = [loader.state_dict()], []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            received.append(batch)
            if batch.slot == 3:
                states.append(loader.state_dict())
    whole = held(received)
    assert all(len(json.dumps(state)) < 1024 for state in states)
    for state in states[:-1]:
        place = int(str(state["epoch"])), int(str(state["step"]))
        rest: Held = {}
        for rank in range(3):
            again = open_loader(blend, spec, {}, seed=SEED, world=World(rank=rank, world_size=3))
            again.load_state_dict(json.loads(json.dumps(state)))
            rest |= held(list(again))
        assert rest == {
            key: value for key, value in whole.items() if key[0] == place[0] and key[1] >= place[1]
        }


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_each_component_is_drawn_from_as_often_as_the_file_says(
    blend: Selection, folder: Path, spec: BatchSpec
) -> None:
    images, texts = Dataset.open(folder / "images"), Dataset.open(folder / "texts")
    uses: Counter[tuple[int, str]] = Counter()
    loader = open_loader(blend, spec, {}, seed=SEED)
    for epoch in range(4):
        loader.set_epoch(epoch)
        draws: Counter[int] = Counter()
        for batch in loader:
            for key, component in zip(batch.sample_keys, batch.components, strict=True):
                if key is not None:
                    uses[component, key] += 1
                    draws[component] += 1
        third = [row for row in images.splits["train"] if images.samples.column("num_slices")[row] >= 3]
        assert draws == {0: 32, 1: 18, 2: len(third)}
    for component, dataset in enumerate((images, texts)):
        counts = [uses[component, dataset.samples.sample_key(row)] for row in dataset.splits["train"]]
        assert max(counts) - min(counts) <= 1


def test_what_comes_belongs_to_its_component(blend: Selection, folder: Path) -> None:
    """Equal keys and rows in two datasets: text, images and rows are those of the one that was drawn from."""
    datasets = [Dataset.open(folder / name) for name in ("images", "texts", "images")]
    num_text_only = 0
    for batch in open_loader(blend, SPECS["lanes"], FIELDS, seed=SEED):
        arrays = batch.arrays
        assert batch["image"].shape[1:] == (2, 1, 16, 16)
        assert arrays["component"].tolist() == batch.components
        for slot, (component, row) in enumerate(zip(batch.components, arrays["row"].tolist(), strict=True)):
            if component < 0:
                assert (row, batch.sample_keys[slot], arrays["weight"][slot]) == (-1, None, 0)
                continue
            dataset = datasets[component]
            assert batch.sample_keys[slot] == dataset.samples.sample_key(row)
            assert batch["report"][slot] == dataset.read_fields(row, ["report.txt"])["report.txt"].decode()
            has_images = bool(dataset.samples.column("num_slices")[row])
            assert has_images == (component != 1)
            assert batch["image_mask"][slot].any() == has_images
            assert (batch["image"][slot] != -1024).any() == has_images
        num_text_only += set(batch.components) == {1}
    assert num_text_only


def test_a_sample_drawn_again_shows_other_slices_on_every_world(tmp_path: Path) -> None:
    """Which slices are taken hangs on the slot of the plan: a second draw of an epoch takes its own."""
    make_dataset(tmp_path / "images", splits={"train": 6}, slices=12, facts=True)
    (tmp_path / "again.toml").write_text(
        '[[component]]\ndataset = "images"\nrepeat = 4.0\n', encoding="utf-8"
    )
    fields = {"image": sf.Slices(num_slices=3, size=(16, 16), sampling="random")}

    def shown(world_size: int) -> dict[tuple[int, int, int], tuple[int, tuple[int, ...]]]:
        found = {}
        for rank in range(world_size):
            world = World(rank=rank, world_size=world_size)
            blend = open_blend(tmp_path / "again.toml")
            for batch in open_loader(blend, SPECS["fixed"], fields, seed=SEED, world=world):
                for slot, row in slots_of(batch):  # the first pixel says which slice it is
                    slices = tuple(batch["image"][slot, :, 0, 0, 0].tolist())
                    found[batch.step, batch.micro, slot] = (row, slices)
        return found

    whole = shown(1)
    assert len(whole) == 24
    # Of 220 ways to take 3 of 12 slices, 24 draws take others nearly always; keyed by the row they are 6.
    assert len(set(whole.values())) > 18
    assert shown(3) == whole


def test_a_bad_sample_is_masked_and_names_its_component(folder: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "images", splits={"train": 8}, slices=2, facts=True)
    make_dataset(tmp_path / "texts", splits={"train": 8}, slices=0, seed=5, facts=True)
    (tmp_path / "two.toml").write_text(
        '[[component]]\ndataset = "images"\n[[component]]\ndataset = "texts"\n', encoding="utf-8"
    )
    texts = Dataset.open(tmp_path / "texts")
    path, offset, _ = locate(texts, 3, "report.txt")
    flip_bit(path, offset)
    loader = open_loader(open_blend(tmp_path / "two.toml"), SPECS["fixed"], FIELDS, seed=SEED)
    assert sum(batch.info.weight.sum() for batch in loader) == 15
    (row,) = loader.quarantined
    assert (row.component, row.row, row.key) == (1, 3, texts.samples.sample_key(3))
    again = open_loader(open_blend(tmp_path / "two.toml"), SPECS["fixed"], FIELDS, seed=SEED)
    again.load_masks(json.loads(json.dumps(loader.masks())))
    assert again.quarantined == [row]
    assert sum(batch.info.weight.sum() for batch in again) == 15


def test_a_changed_component_is_refused_by_its_position(blend: Selection, folder: Path) -> None:
    state = open_loader(blend, SPECS["fixed"], {}, seed=SEED).state_dict()
    other = folder / "other.toml"
    for change, number in (("repeat = 0.6", 2), ("num_slices >= 3", 3)):
        other.write_text(
            BLEND.replace(change, change.replace("0.6", "0.7").replace("3", "2")), encoding="utf-8"
        )
        with pytest.raises(StateError, match=rf"^component {number} of the blend must be this run's 1:"):
            open_loader(open_blend(other), SPECS["fixed"], {}, seed=SEED).load_state_dict(state)
    plain = open_loader(Dataset.open(folder / "images"), SPECS["fixed"], {}, seed=SEED)
    with pytest.raises(StateError, match=r"^components of the loader state must be this run's 0, got 3"):
        plain.load_state_dict(state)
    moved = folder / "sub" / "moved.toml"
    moved.parent.mkdir(exist_ok=True)
    moved.write_text(
        BLEND.replace('"images"', '"../images"').replace('"texts"', '"../texts"'), encoding="utf-8"
    )
    # Paths are no part of a blend's identity.
    open_loader(open_blend(moved), SPECS["fixed"], {}, seed=SEED).load_state_dict(state)


def test_a_blend_is_not_narrowed_down_again(blend: Selection) -> None:
    with pytest.raises(ConfigError, match="split= must be left out where a blend is given"):
        open_loader(blend, SPECS["fixed"], {}, split="train", seed=SEED)


def test_torchs_dataloader_takes_a_blend_in_workers(blend: Selection) -> None:
    from torch.utils.data import DataLoader

    from shardflow.loading.torch_dataset import ShardIterableDataset

    expected = held(list(open_loader(blend, SPECS["lanes"], {}, seed=SEED)))
    streamed = ShardIterableDataset(blend, batch=SPECS["lanes"], seed=SEED, fields=FIELDS)
    sent = pickle.loads(pickle.dumps(streamed))  # as to spawned workers, without their import of torch
    loader = DataLoader(sent, batch_size=None, num_workers=2, multiprocessing_context="fork")
    received = list(loader)
    assert held(received) == expected
    assert sum(batch.info.weight.sum() for batch in received) == streamed._loader.plan.num_samples
