"""S1 to S4: every rank yields what the pure plan says, from every position, for every world size and tail."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ConfigError, PlanError, StateError
from shardflow.format import Dataset
from shardflow.loading import Loader, World
from shardflow.sampling import BatchSpec
from tests.factories import make_dataset
from tests.integration.loader_support import open_loader, planned_keys, received_keys
from tests.sweeps import sampled

NUM_SAMPLES = 29
SEED = 11
TAILS = ("drop", "repeat", "mask")
EVERY_PAIR = [
    (world_size, 1 + (world_size + number) % 3, tail)
    for world_size in (1, 2, 3, 4)
    for number, tail in enumerate(TAILS)
]
"""Of world sizes, numbers of threads and tails: each of one with each of another."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("dataset")
    return Dataset.open(
        make_dataset(folder / "a", splits={"train": NUM_SAMPLES, "val": 5}, samples_per_shard=6, facts=True)
    )


def _spec(tail: Literal["drop", "repeat", "mask"] = "mask", micro_batches_per_step: int = 4) -> BatchSpec:
    return BatchSpec(micro_batch_size=2, micro_batches_per_step=micro_batches_per_step, tail=tail)


def _loader(dataset: Dataset, spec: BatchSpec, world: World | None = None, **settings: Any) -> Loader:
    """Open a loader, by default without fields: sequences need no pixels."""
    return open_loader(dataset, spec, settings.pop("fields", {}), world=world, **{"seed": SEED, **settings})


@pytest.mark.parametrize(
    ("world_size", "num_threads", "tail"),
    sampled(itertools.product([1, 2, 3, 4], [1, 2, 3], TAILS), EVERY_PAIR),
)
def test_every_rank_yields_the_plan_and_resumes_at_every_step(
    dataset: Dataset, world_size: int, num_threads: int, tail: Literal["drop", "repeat", "mask"]
) -> None:
    spec = _spec(tail)
    how = {"num_threads": num_threads, "prefetch_bytes": 1000}
    for rank in range(world_size):
        world = World(rank=rank, world_size=world_size)
        expected = [
            list(
                planned_keys(dataset, "train", spec, seed=SEED, epoch=epoch, rank=rank, world_size=world_size)
            )
            for epoch in range(2)
        ]
        loader = _loader(dataset, spec, world, **how)
        states = [loader.state_dict()]
        assert len(loader) == len(expected[0])
        received = []
        for epoch in range(2):
            loader.set_epoch(epoch)
            for batch in loader:
                received += list(received_keys([batch]))
                if batch.slot == loader.num_micro_batches_per_rank - 1:
                    states.append(loader.state_dict())
        assert received == expected[0] + expected[1]
        assert [(state["epoch"], state["step"]) for state in states] == [
            *((epoch, step) for epoch in range(2) for step in range(loader.num_steps)),
            (2, 0),
        ]
        for state in states[:-1]:
            again = _loader(dataset, spec, world, **how)
            again.load_state_dict(json.loads(json.dumps(state)))
            assert list(received_keys(again)) == [
                entry for entry in expected[int(str(state["epoch"]))] if entry[1] >= int(str(state["step"]))
            ]


@pytest.mark.parametrize("saved_at", [1, 2, 3, 4])
@pytest.mark.parametrize("resumed_at", [1, 2, 3, 4])
def test_another_world_size_goes_on_exactly(dataset: Dataset, saved_at: int, resumed_at: int) -> None:
    """The steps that W ranks ran before, and V ranks after, are together one uninterrupted run."""
    spec = _spec()
    for stop in range(_loader(dataset, spec).num_steps + 1):
        states = []
        run: dict[tuple[int, int], tuple[str | None, ...]] = {}
        for rank in range(saved_at):
            loader = _loader(dataset, spec, World(rank=rank, world_size=saved_at))
            for batch in loader if stop else ():
                run[batch.step, batch.micro] = tuple(batch.sample_keys)
                if (batch.step + 1, batch.slot + 1) == (stop, loader.num_micro_batches_per_rank):
                    break
            states.append(loader.state_dict())
        assert all(state == states[0] for state in states)
        if stop < loader.num_steps:
            for rank in range(resumed_at):
                loader = _loader(dataset, spec, World(rank=rank, world_size=resumed_at))
                loader.load_state_dict(states[0])
                run |= {(batch.step, batch.micro): tuple(batch.sample_keys) for batch in loader}
        expected = planned_keys(dataset, "train", spec, seed=SEED, epoch=0)
        whole = {(step, micro): keys for _, step, micro, keys, _ in expected}
        assert {place: keys for place, keys in run.items() if place[1] < 4} == whole


def test_every_sample_comes_exactly_once_with_tail_mask(dataset: Dataset) -> None:
    spec = _spec()
    keys: list[str] = []
    for rank in range(3):
        for batch in _loader(dataset, spec, World(rank=rank, world_size=3)):
            keys += [
                key
                for key, weight in zip(batch.sample_keys, batch.info.weight, strict=True)
                if key and weight
            ]
    assert sorted(keys) == sorted(dataset.samples.sample_key(row) for row in dataset.splits["train"])


def test_padding_micro_batches_have_every_entry_in_the_right_shape(dataset: Dataset) -> None:
    fields = {"image": sf.Slices(num_slices=2, size=(8, 8)), "report": sf.Text()}
    loader = _loader(dataset, _spec(), World(rank=2, world_size=3), fields=fields)
    batches = list(loader)
    assert len(batches) == len(loader) == 2 * loader.num_steps
    padding = [batch for batch in batches if batch.micro >= 4]
    assert len(padding) == loader.num_steps
    for batch in padding:
        assert {name: np.shape(value) for name, value in batch.items()} == {
            name: np.shape(value) for name, value in batches[0].items()
        }
        assert batch.info.sample_keys == [None, None]
        for name in ("image_mask", "image_range", "report_mask"):
            assert not batch[name].any(), name
        assert not batch.info.weight.any()
        assert (batch["image"] == -1024).all()
        assert (batch["image_index"] == -1).all()
        assert batch["report"] == ["", ""]


# ---- the state (S4) ------------------------------------------------------------------------------


def test_a_state_counts_what_was_received_and_not_what_was_prefetched(dataset: Dataset) -> None:
    loader = _loader(dataset, _spec())
    seen = []
    for batch in loader:
        state = loader.state_dict()
        seen.append((batch.step, batch.slot, state["epoch"], state["step"]))
    last = loader.num_steps - 1
    assert seen == [
        (step, slot, *((1, 0) if (step, slot) == (last, 3) else (0, step + (slot == 3))))
        for step in range(loader.num_steps)
        for slot in range(4)
    ]


def test_a_state_is_small_json_and_equal_on_all_ranks(dataset: Dataset) -> None:
    loaders = [_loader(dataset, _spec(), World(rank=rank, world_size=4)) for rank in range(4)]
    states = [json.dumps(loader.state_dict(), sort_keys=True) for loader in loaders]
    assert len(set(states)) == 1
    assert len(states[0]) < 1000


def test_set_epoch_with_the_loaded_epoch_changes_nothing(dataset: Dataset) -> None:
    source = _loader(dataset, _spec())
    source.set_epoch(3)
    iterator = iter(source)
    for _ in range(9):
        next(iterator)
    loader = _loader(dataset, _spec())
    loader.load_state_dict(source.state_dict())
    loader.set_epoch(3)
    assert (loader.position.epoch, loader.position.step) == (3, 2)
    assert next(iter(loader)).step == 2
    loader.set_epoch(4)
    assert (loader.position.epoch, loader.position.step) == (4, 0)


def test_an_exhausted_epoch_is_followed_by_the_next_one(dataset: Dataset) -> None:
    loader = _loader(dataset, _spec())
    assert [{batch.epoch for batch in loader} for _ in range(3)] == [{0}, {1}, {2}]
    loader.set_epoch(1)
    assert {batch.epoch for batch in loader} == {1}


def test_the_normal_loop_goes_on_after_a_resume(dataset: Dataset) -> None:
    source = _loader(dataset, _spec())
    received = []
    for epoch in range(2):
        source.set_epoch(epoch)
        for batch in source:
            received += list(received_keys([batch]))
            if (batch.epoch, batch.step, batch.slot) == (1, 1, 1):
                break
    resumed = _loader(dataset, _spec())
    resumed.load_state_dict(source.state_dict())
    received = [entry for entry in received if entry[:2] < (1, 1)]  # step 1 was not finished
    for epoch in range(resumed.epoch, 3):
        resumed.set_epoch(epoch)
        received += list(received_keys(resumed))
    expected = [
        entry
        for epoch in range(3)
        for entry in planned_keys(dataset, "train", _spec(), seed=SEED, epoch=epoch)
    ]
    assert received == expected


def test_a_broken_off_iteration_begins_again_with_its_step(dataset: Dataset) -> None:
    loader = _loader(dataset, _spec())
    for batch in loader:
        if (batch.step, batch.slot) == (1, 2):
            break
    again = next(iter(loader))
    assert (again.step, again.slot) == (1, 0)


def test_a_state_of_another_run_is_refused_by_field(dataset: Dataset, tmp_path: Path) -> None:
    other = Dataset.open(make_dataset(tmp_path / "b", num_samples=NUM_SAMPLES, seed=5))
    state = _loader(dataset, _spec()).state_dict()
    refused = {
        "seed": _loader(dataset, _spec(), seed=SEED + 1),
        "dataset_id": _loader(other, _spec()),
        "split": _loader(dataset, _spec("repeat"), split="val"),
        "micro_batch_size": _loader(
            dataset, BatchSpec(micro_batch_size=1, micro_batches_per_step=4, tail="mask")
        ),
        "micro_batches_per_step": _loader(dataset, _spec(micro_batches_per_step=2)),
        "tail": _loader(dataset, _spec("drop")),
    }
    for field, loader in refused.items():
        with pytest.raises(StateError, match=field):
            loader.load_state_dict(state)
        assert (loader.position.epoch, loader.position.step) == (0, 0)


def test_a_changed_state_is_refused(dataset: Dataset) -> None:
    loader = _loader(dataset, _spec())
    state = loader.state_dict()
    for change in ({"step": 10**6}, {"step": -1}, {"version": 99}, {"epoch": "1"}):
        with pytest.raises(StateError):
            loader.load_state_dict({**state, **change})


def test_a_state_loaded_while_iterating_takes_effect_at_the_next_iter(dataset: Dataset) -> None:
    loader = _loader(dataset, _spec())
    state = loader.state_dict()
    running = iter(loader)
    for _ in range(5):
        next(running)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="retired"):
        next(running)
    first = next(iter(loader))
    assert (first.step, first.slot) == (0, 0)


@pytest.mark.parametrize("how", ["iter", "set_epoch", "close"])
def test_only_the_newest_iteration_goes_on(dataset: Dataset, how: str) -> None:
    loader = _loader(dataset, _spec())
    running = iter(loader)
    next(running)
    keep = iter(loader) if how == "iter" else None
    if how == "set_epoch":
        loader.set_epoch(7)
    if how == "close":
        loader.close()
    with pytest.raises(StateError, match="retired"):
        next(running)
    assert keep is None or next(keep).step == 0


def test_an_exhausted_iteration_stays_exhausted(dataset: Dataset) -> None:
    loader = _loader(dataset, _spec())
    running = iter(loader)
    assert len(list(running)) == len(loader)
    assert list(running) == []
    loader.set_epoch(9)
    assert list(running) == []


def test_wrong_settings_are_refused_when_the_loader_is_made(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"split .*train, val"):
        _loader(dataset, _spec(), split="test")
    with pytest.raises(PlanError, match="world_size"):
        _loader(dataset, _spec(), World(rank=0, world_size=5))
    with pytest.raises(PlanError, match="num_steps"):
        _loader(dataset, _spec("drop"), split="val")


def test_spec_is_the_former_name_of_batch(dataset: Dataset) -> None:
    spec = _spec("repeat")
    with pytest.warns(DeprecationWarning, match=r"Loader\(batch=\)"):
        former = Loader(dataset, split="train", spec=spec, seed=SEED, fields={})
    assert former.plan_id == _loader(dataset, spec).plan_id
    with pytest.raises(TypeError, match="needs batch="):
        Loader(dataset, split="train", seed=SEED, fields={})
    with pytest.raises(TypeError, match="both 'batch' and 'spec'"):
        Loader(dataset, split="train", batch=spec, spec=spec, seed=SEED, fields={})
