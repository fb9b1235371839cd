"""In torch's DataLoader: the Loader's order, length and content with 0, 2 and 3 workers, and an exact
resume.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import shardflow as sf
from shardflow.errors import SampleError, StateError
from shardflow.format import Dataset
from shardflow.loading import Batch, LoaderConfig, World
from shardflow.loading.torch_dataset import ShardIterableDataset
from shardflow.sampling import BatchSpec
from tests.factories import make_dataset
from tests.integration.loader_support import (
    flip_bit,
    frozen,
    loader_threads,
    locate,
    open_loader,
    planned_keys,
    received_keys,
)
from tests.sweeps import sampled

# torch warns of more workers than processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

# Workers, how they start, and whether they live on from epoch to epoch. A spawned one imports torch: seconds.
# That it gives the same is tested once, and what it does with an iteration is what a forked one does.
ALWAYS = [(0, "", False), (2, "fork", False), (3, "fork", True)]
WAYS = sampled([*ALWAYS, (2, "spawn", True), (1, "spawn", False)], ALWAYS)
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
FIELDS = {"image": sf.Slices(num_slices=3, size=(16, 16)), "report": sf.Text()}
SEED = 11


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(
        tmp_path_factory.mktemp("dataset") / "a", num_samples=29, samples_per_shard=6, facts=True
    )


def _dataset(
    url: str, fields: Any = None, world: World | None = None, seed: int = SEED, **settings: Any
) -> ShardIterableDataset:
    """Open a dataset, by default without fields: sequences need no pixels."""
    return ShardIterableDataset(
        Dataset.open(url),
        split="train",
        batch=SPEC,
        seed=seed,
        fields=fields or {},
        world=world,
        config=LoaderConfig(**settings),
    )


def _data_loader(dataset: ShardIterableDataset, num_workers: int, **settings: Any) -> DataLoader[Batch]:
    context = settings.pop("context", "fork")
    context = context if num_workers else None
    return DataLoader(
        dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=context, **settings
    )


@pytest.mark.parametrize(
    ("world_size", "num_workers"),
    sampled(itertools.product([1, 2, 3, 4], [0, 2, 3]), {(1, 0), (1, 3), (2, 2), (3, 0)}),
)
def test_order_is_the_plans_and_resumes_at_every_step(url: str, world_size: int, num_workers: int) -> None:
    for rank in range(world_size):
        world = World(rank=rank, world_size=world_size)
        expected = list(
            planned_keys(
                Dataset.open(url), "train", SPEC, seed=SEED, epoch=0, rank=rank, world_size=world_size
            )
        )
        dataset = _dataset(url, world=world)
        loader = _data_loader(dataset, num_workers)
        assert len(loader) == len(dataset) == len(expected)
        states = [dataset.state_dict()]
        received = []
        for batch in loader:
            received += list(received_keys([batch]))
            if dataset.state_dict() != states[-1]:
                states.append(dataset.state_dict())
        assert received == expected
        assert [(state["epoch"], state["step"]) for state in states] == [
            *((0, step) for step in range(dataset.num_steps)),
            (1, 0),
        ]
        # A state knows neither rank nor workers: resume where this rank is another one's, too.
        for state in states[1:-1]:
            dataset.load_state_dict(json.loads(json.dumps(state)))
            assert list(received_keys(loader)) == [
                entry for entry in expected if entry[1] >= int(str(state["step"]))
            ]


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_content_is_the_loaders(url: str, num_workers: int) -> None:
    expected = list(open_loader(url, SPEC, FIELDS, seed=SEED))
    dataset = _dataset(url, FIELDS)
    received = list(_data_loader(dataset, num_workers))
    assert len(received) == len(expected)
    for one, other in zip(received, expected, strict=True):
        assert isinstance(one, Batch)
        assert one.sample_keys == other.sample_keys
        assert {name: frozen(value) for name, value in one.items()} == {
            name: frozen(value) for name, value in other.items()
        }
        assert torch.from_numpy(one["image"]).shape == (2, 3, 1, 16, 16)  # writable, or torch would warn
    assert not loader_threads()


def test_batches_of_a_worker_come_in_shared_memory(url: str) -> None:
    dataset = _dataset(url, FIELDS)
    for batch in _data_loader(dataset, 2):
        base: Any = batch.buffer
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base, torch.Tensor)
        assert base.is_shared()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("is_persistent", [False, True])
def test_epochs_follow_one_another_also_with_workers_that_persist(url: str, is_persistent: bool) -> None:
    dataset = _dataset(url)
    loader = _data_loader(dataset, 2, persistent_workers=is_persistent)
    expected = [
        entry
        for epoch in (0, 1, 5)
        for entry in planned_keys(Dataset.open(url), "train", SPEC, seed=SEED, epoch=epoch)
    ]
    received = list(received_keys(loader))
    received += list(received_keys(loader))  # goes on with the next epoch
    dataset.set_epoch(5)
    received += list(received_keys(loader))
    assert received == expected
    assert (dataset.epoch, dataset.position.step) == (6, 0)


def test_a_spawned_worker_gives_the_same_and_knows_the_masks(url: str) -> None:
    dataset = _dataset(url)
    (epoch, step, micro, keys, _), *_ = planned_keys(Dataset.open(url), "train", SPEC, seed=SEED, epoch=0)
    place = {"epoch": epoch, "step": step, "micro": micro, "slot_in_batch": 1, "row": 0, "key": str(keys[1])}
    dataset.load_masks([{**place, "shard": "train-000000", "field": "", "reason": "DECODE_FAILED"}])
    received = list(received_keys(_data_loader(dataset, 1, context="spawn")))
    expected = list(planned_keys(Dataset.open(url), "train", SPEC, seed=SEED, epoch=0))
    assert received == [(epoch, step, micro, keys, (1.0, 0.0)), *expected[1:]]


@pytest.mark.parametrize(("num_workers", "context", "is_persistent"), WAYS)
def test_a_plain_loop_advances_reshuffles_and_carries_its_state(
    url: str, num_workers: int, context: str, is_persistent: bool
) -> None:
    dataset = _dataset(url)
    settings = {"persistent_workers": True} if is_persistent else {}
    loader = _data_loader(dataset, num_workers, context=context, **settings)
    received = [[list(received_keys([batch])) for batch in loader] for _ in range(3)]
    for epoch in range(3):
        expected = planned_keys(Dataset.open(url), "train", SPEC, seed=SEED, epoch=epoch)
        assert received[epoch] == [[entry] for entry in expected]
    assert received[0] != received[1]
    assert (dataset.epoch, dataset.position.step) == (3, 0)


@pytest.mark.parametrize(("num_workers", "context", "is_persistent"), WAYS)
def test_a_loop_left_at_any_micro_batch_goes_on_from_its_step(
    url: str, num_workers: int, context: str, is_persistent: bool
) -> None:
    dataset = _dataset(url)
    settings = {"persistent_workers": True, "prefetch_factor": 3} if is_persistent else {}
    loader = _data_loader(dataset, num_workers, context=context, **settings)
    steps = [4, 1, 3, 9, 2, 8, 100] if context == "fork" else [3, 5, 100]
    expected = list(planned_keys(Dataset.open(url), "train", SPEC, seed=SEED, epoch=0))
    done = 0
    for taken in steps:
        begin = done // 4 * 4
        number = begin
        for batch in loader:
            assert list(received_keys([batch])) == [expected[number]]
            number += 1
            position = dataset.position
            assert (position.epoch, position.step) == divmod(number // 4, dataset.num_steps)
            if number - begin == taken:
                break
        done = number
        if done == len(expected):
            break
        resumed = open_loader(url, SPEC, {}, seed=SEED)
        resumed.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
        assert resumed.position == dataset.position
    assert done == len(expected)


def test_two_data_loaders_share_the_position_of_their_dataset(url: str) -> None:
    dataset = _dataset(url)
    every = [
        _data_loader(dataset, number, **({"persistent_workers": True} if number else {}))
        for number in (2, 0, 1)
    ]
    received = [list(received_keys(loader)) for _ in range(2) for loader in every]
    assert received == [
        list(planned_keys(Dataset.open(url), "train", SPEC, seed=SEED, epoch=epoch)) for epoch in range(6)
    ]


def test_equal_seeds_of_the_workers_do_not_mix_iterations_up(url: str) -> None:
    dataset = _dataset(url)
    loader = _data_loader(dataset, 2)
    for epoch in range(3):
        torch.manual_seed(0)
        assert {batch.epoch for batch in loader} == {epoch}


def test_a_copy_counts_for_itself(url: str) -> None:
    dataset = _dataset(url)
    for batch in _data_loader(dataset, 2):
        if batch.step == 2:
            break
    other = copy.deepcopy(dataset)
    assert other.position == dataset.position
    assert {batch.epoch for batch in _data_loader(other, 2)} == {0}
    assert (other.epoch, dataset.epoch) == (1, 0)


def test_breaking_off_counts_what_was_received(url: str) -> None:
    dataset = _dataset(url)
    loader = _data_loader(dataset, 2, prefetch_factor=4)
    for batch in loader:
        if (batch.step, batch.slot) == (1, 3):
            break
    assert (dataset.epoch, dataset.position.step) == (0, 2)
    assert next(iter(loader)).step == 2


def test_states_pass_between_loader_and_data_loader(url: str) -> None:
    loader = open_loader(url, SPEC, {}, seed=SEED)
    for batch in loader:
        if (batch.step, batch.slot) == (1, 3):
            break
    dataset = _dataset(url)
    dataset.load_state_dict(loader.state_dict())
    assert dataset.state_dict() == loader.state_dict()
    assert dataset.plan_id == loader.plan_id
    assert list(received_keys(_data_loader(dataset, 2))) == list(received_keys(loader))
    with pytest.raises(StateError, match="seed"):
        _dataset(url, seed=1).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iteration_that_was_overtaken_is_refused(url: str, num_workers: int) -> None:
    dataset = _dataset(url)
    running = iter(_data_loader(dataset, num_workers))
    next(running)
    dataset.set_epoch(4)
    with pytest.raises(StateError, match=r"set_epoch\(\), load_state_dict\(\) or another iteration"):
        next(running)
    first = iter(_data_loader(dataset, num_workers))
    for _ in range(5):
        next(first)
    second = iter(_data_loader(dataset, num_workers))
    assert next(second).step == 1
    with pytest.raises(StateError, match="another iteration"):
        next(first)
    assert (dataset.epoch, dataset.position.step) == (4, 1)


def test_what_a_data_loader_does_to_batches_is_refused_where_it_could_not_be_counted(url: str) -> None:
    for num_workers in (0, 1):
        for size in (1, 2):
            context = "fork" if num_workers else None
            loader: Any = DataLoader(
                _dataset(url), batch_size=size, num_workers=num_workers, multiprocessing_context=context
            )
            with pytest.raises(StateError, match="batch_size=None"):
                next(iter(loader))
    dataset = _dataset(url)
    with pytest.raises(StateError, match="Leave out collate_fn"):
        next(iter(_data_loader(dataset, 1, collate_fn=lambda batch: batch.sample_keys)))
    (wrapped,) = next(iter(_data_loader(dataset, 1, collate_fn=lambda batch: (batch,))))
    with pytest.raises(StateError, match="leave out collate_fn"):
        wrapped.sample_keys  # noqa: B018
    assert dataset.position.step == 0
    kept = _data_loader(dataset, 0, collate_fn=lambda batch: batch.sample_keys)
    assert sum(1 for _ in kept) == len(dataset)  # without workers it is counted before
    assert dataset.epoch == 1


def test_batches_that_are_handed_out_in_another_order_are_refused(url: str) -> None:
    dataset = _dataset(url, FIELDS)
    has_begun = multiprocessing.get_context("fork").Event()

    def slow_first_worker(number: int) -> None:
        if number == 0:
            assert has_begun.wait(300)
            time.sleep(1.0)
        else:
            has_begun.set()

    loader = _data_loader(dataset, 2, in_order=False, worker_init_fn=slow_first_worker)
    with pytest.raises(StateError, match="leave in_order=True"):
        list(loader)
    gc.collect()


def test_track_is_a_plain_loop_by_now(url: str) -> None:
    dataset = _dataset(url)
    with pytest.warns(DeprecationWarning, match="without track"):
        tracked = dataset.track(_data_loader(dataset, 0))
    assert len(list(tracked)) == len(dataset)
    assert dataset.epoch == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_masks_and_their_bound_reach_the_main_process(tmp_path: Path, num_workers: int) -> None:
    url = make_dataset(tmp_path / "a", num_samples=29, samples_per_shard=6, facts=True)
    for row in (3, 9):
        path, offset, _ = locate(Dataset.open(url), row, "report.txt")
        flip_bit(path, offset)
    dataset = _dataset(url, FIELDS)
    first = list(received_keys(_data_loader(dataset, num_workers)))
    assert sorted(found.row for found in dataset.quarantined) == [3, 9]
    for row in (3, 9):
        path, offset, _ = locate(Dataset.open(url), row, "report.txt")
        flip_bit(path, offset)
    replay = _dataset(url, FIELDS)
    replay.load_masks(dataset.masks())
    assert list(received_keys(_data_loader(replay, num_workers))) == first
    for row in (3, 9):
        path, offset, _ = locate(Dataset.open(url), row, "report.txt")
        flip_bit(path, offset)
    strict = _dataset(url, FIELDS, max_bad_samples=1)
    with pytest.raises(SampleError, match="at most 1, got 2"):
        list(_data_loader(strict, num_workers))
    raising = _dataset(url, FIELDS, on_bad_sample="raise")
    with pytest.raises(SampleError, match="CHECKSUM_MISMATCH"):
        list(_data_loader(raising, num_workers))
    gc.collect()  # torch's iterator hangs in a cycle with the error it raised, and its workers with it


def test_workers_start_after_this_process_used_threads(url: str) -> None:
    """The parent's threads, locks and memory are none of the children's."""
    running = iter(open_loader(url, SPEC, FIELDS, seed=SEED))
    next(running)
    dataset = _dataset(url, FIELDS)
    assert len(list(_data_loader(dataset, 2))) == len(dataset)
    assert next(running).slot == 1
