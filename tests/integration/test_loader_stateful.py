"""In torchdata's StatefulDataLoader: an exact resume at every micro-batch, also where an epoch has ended."""

from __future__ import annotations

import copy
import gc

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from shardflow.errors import StateError
from shardflow.format import Dataset
from shardflow.loading import Batch
from shardflow.loading.torch_dataset import ShardIterableDataset
from shardflow.sampling import BatchSpec
from tests.factories import make_dataset
from tests.integration.loader_support import planned_keys, received_keys
from tests.sweeps import sampled

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # by torchdata itself
]

SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
SEED = 11


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("dataset") / "a", num_samples=29, samples_per_shard=6)


def _dataset(url: str, seed: int = SEED) -> ShardIterableDataset:
    return ShardIterableDataset(Dataset.open(url), split="train", batch=SPEC, seed=seed, fields={})


@pytest.mark.parametrize(
    ("num_workers", "is_persistent"),
    sampled([(0, False), (1, False), (1, True), (2, False), (2, True)], {(0, False), (2, True)}),
)
def test_a_stateful_data_loader_resumes_at_every_micro_batch(
    url: str, num_workers: int, is_persistent: bool
) -> None:
    expected = [
        entry
        for epoch in range(2)
        for entry in planned_keys(Dataset.open(url), "train", SPEC, seed=SEED, epoch=epoch)
    ]
    per_epoch = len(expected) // 2

    def opened() -> tuple[ShardIterableDataset, StatefulDataLoader[Batch]]:
        dataset = _dataset(url)
        context = "fork" if num_workers else None
        return dataset, StatefulDataLoader(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            multiprocessing_context=context,
            persistent_workers=is_persistent,
        )

    dataset, loader = opened()
    states = []
    for number, batch in enumerate(loader, start=1):
        assert list(received_keys([batch])) == [expected[number - 1]]
        states.append(copy.deepcopy(loader.state_dict()))
    states.append(copy.deepcopy(loader.state_dict()))
    for number, state in zip([*range(1, per_epoch + 1), per_epoch], states, strict=True):
        if number % 3 != 1 and number < per_epoch - 2:
            continue
        dataset, loader = opened()
        loader.load_state_dict(state)
        received = list(received_keys(loader))
        if not received:  # the state is one of an epoch whose end was not seen yet
            received = list(received_keys(loader))
            assert number == per_epoch
        elif number < per_epoch:
            assert received == expected[number:per_epoch], number
            assert (dataset.epoch, dataset.position.step) == (1, 0)
            received = list(received_keys(loader))
        assert received == expected[per_epoch:], number
        assert (dataset.epoch, dataset.position.step) == (2, 0)
    gc.collect()


def test_a_stateful_data_loader_of_other_workers_or_another_run_is_refused(url: str) -> None:
    first: StatefulDataLoader[Batch] = StatefulDataLoader(_dataset(url), batch_size=None)
    next(iter(first))
    other: StatefulDataLoader[Batch] = StatefulDataLoader(_dataset(url, seed=1), batch_size=None)
    other.load_state_dict(first.state_dict())
    with pytest.raises(StateError, match="seed"):
        next(iter(other))
