"""S1 to S4 with lanes and token budgets: real loaders, ragged micro-batches, epochs of different length."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data import DataLoader

import shardflow as sf
from shardflow.errors import StateError
from shardflow.format import Dataset
from shardflow.loading import Loader, World
from shardflow.loading.rows.selection import select
from shardflow.loading.torch_dataset import ShardIterableDataset
from shardflow.sampling import BatchSpec, CostRule, RankSchedule, TokenBudget
from shardflow.sampling.lane_plan import LanePlan
from tests.factories import make_dataset
from tests.integration.loader_support import Keys, open_loader, received_keys, slots_of

# torch warns of more workers than processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SEED = 11
BUDGET = TokenBudget(
    max_tokens=70, max_samples=4, over_budget="alone", cost=CostRule(text_tokens_per_1000_bytes=300)
)
SPECS = {
    "lanes": BatchSpec(
        micro_batch_size=2, micro_batches_per_step=4, tail="mask", lanes=4, window_bytes=20_000
    ),
    "more lanes than samples": BatchSpec(micro_batch_size=1, micro_batches_per_step=4, tail="mask", lanes=70),
    "budget": BatchSpec(budget=BUDGET, micro_batches_per_step=4, tail="mask", lanes=2, window_bytes=40_000),
    "packed": BatchSpec(
        budget=replace(BUDGET, padded=False), micro_batches_per_step=4, tail="repeat", lanes=4
    ),
}


def _loader(dataset: Dataset, spec: BatchSpec, **settings: Any) -> Loader:
    return open_loader(dataset, spec, {}, **{"seed": SEED, "num_threads": 1, **settings})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("dataset")
    return Dataset.open(make_dataset(folder / "a", num_samples=61, samples_per_shard=6, facts=True))


def planned(dataset: Dataset, spec: BatchSpec, epoch: int, world: World) -> Iterator[Keys]:
    """What the pure plan says a rank receives."""
    plan = select(dataset, "train").plan(spec, seed=SEED, epoch=epoch)
    schedule = RankSchedule(
        spec.micro_batches_per_step,
        world.world_size,
        lanes=spec.lanes,
        ranks_per_node=world.ranks_per_node,
    )
    for step in range(plan.num_steps):
        for micro in schedule.micros(world.rank):
            batch = plan.micro_batch(step, micro)
            keys = tuple(dataset.samples.sample_key(row) if row >= 0 else None for row in batch.rows.tolist())
            yield epoch, step, micro, keys, tuple(batch.weights.astype(float).tolist())


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "world", [(1, 0), (2, 0), (3, 0), (4, 2)], ids=lambda world: f"{world[0]} ranks, {world[1]} a node"
)
def test_every_rank_yields_the_plan_and_resumes_at_every_step(
    dataset: Dataset, name: str, world: tuple[int, int]
) -> None:
    spec = SPECS[name]
    seen: dict[tuple[int, int, int], Keys] = {}
    for rank in range(world[0]):
        here = World(rank=rank, world_size=world[0], ranks_per_node=world[1])
        loader = _loader(dataset, spec, world=here)
        for epoch in range(2):
            expected = list(planned(dataset, spec, epoch, here))
            loader.set_epoch(epoch)
            assert len(loader) == loader.num_micro_batches_in(epoch) == len(expected)
            states = [loader.state_dict()]
            received = []
            for batch in loader:
                received += list(received_keys([batch]))
                if loader.state_dict() != states[-1]:
                    states.append(loader.state_dict())
            assert received == expected
            assert len(states) == loader.num_steps_in(epoch) + 1
            seen |= {entry[:3]: entry for entry in received if entry[2] < spec.micro_batches_per_step}
            for number, state in enumerate(states[:-1]):
                again = _loader(dataset, spec, world=here)
                again.load_state_dict(json.loads(json.dumps(state)))
                assert list(received_keys(again)) == [entry for entry in expected if entry[1] >= number]
    # Together the ranks run exactly the plan, and with it every sample.
    assert seen == {
        entry[:3]: entry for epoch in range(2) for entry in planned(dataset, spec, epoch, World())
    }
    counts = Counter((key[0], sample) for key, entry in seen.items() for sample in entry[3] if sample)
    assert len(counts) == 2 * 61


@pytest.mark.parametrize("num_workers", [0, 2, 3])
def test_workers_deliver_epochs_of_different_length(dataset: Dataset, num_workers: int) -> None:
    spec = SPECS["budget"]
    lengths = {select(dataset, "train").plan(spec, seed=SEED, epoch=e).num_steps for e in range(12)}
    assert len(lengths) > 1, "the test wants epochs of different length"
    batches = ShardIterableDataset(dataset, split="train", batch=spec, seed=SEED, fields={})
    loader = DataLoader(
        batches,
        batch_size=None,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        persistent_workers=num_workers > 0,
    )
    for epoch in range(12 if not num_workers else 4):
        batches.set_epoch(epoch)
        assert list(received_keys(loader)) == list(planned(dataset, spec, epoch, World()))
    assert batches.position.step == 0


def test_ragged_micro_batches_hold_what_they_say(dataset: Dataset) -> None:
    fields = {"image": sf.Slices(num_slices=2, size=(8, 8)), "report": sf.Text()}
    sizes = set()
    with open_loader(dataset, SPECS["budget"], fields, seed=SEED) as loader:
        for batch in loader:
            size = len(batch.sample_keys)
            sizes.add(size)
            assert len(batch["image"]) == len(batch["report"]) == len(batch.info.weight) == size
            for slot, row in slots_of(batch):
                facts = dataset.samples.gather("text_bytes", row)
                assert len(batch["report"][slot].encode()) == int(facts)
            assert batch.info.weight.tolist() == [key is not None for key in batch.sample_keys]
    assert len(sizes) > 1


def test_a_state_of_other_lanes_or_another_budget_is_refused_by_name(dataset: Dataset) -> None:
    lanes, budget = SPECS["lanes"], SPECS["budget"]
    others = {
        "lanes": (lanes, replace(lanes, lanes=2)),
        "window_bytes": (lanes, replace(lanes, window_bytes=3)),
        "budget": (budget, replace(budget, budget=replace(BUDGET, max_tokens=71))),
        "kind": (lanes, budget),
    }
    for name, (saved, opened) in others.items():
        with pytest.raises(StateError, match=rf"^{name} of the loader state"):
            _loader(dataset, opened).load_state_dict(_loader(dataset, saved).state_dict())
    plain = replace(lanes, lanes=0)
    for one, other in ((plain, lanes), (lanes, plain)):
        with pytest.raises(StateError, match=r"^lanes of the loader state"):
            _loader(dataset, one).load_state_dict(_loader(dataset, other).state_dict())


@pytest.fixture
def planned_epochs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs whose boundaries are worked out, in the order of the work."""
    epochs: list[int] = []
    init = LanePlan.__init__

    def counted(self: LanePlan, *arguments: Any, epoch: int, **settings: Any) -> None:
        epochs.append(epoch)
        init(self, *arguments, epoch=epoch, **settings)

    monkeypatch.setattr(LanePlan, "__init__", counted)
    return epochs


@pytest.mark.parametrize("name", ["budget", "packed"])
@pytest.mark.parametrize("step", [0, 2, -1])
def test_a_resume_plans_its_own_epoch_and_no_other(
    dataset: Dataset, name: str, step: int, planned_epochs: list[int]
) -> None:
    """S5: a start in epoch 5 costs what one in epoch 0 costs, counted in epochs that are planned."""
    spec = SPECS[name]
    saved = _loader(dataset, spec)
    saved.set_epoch(5)
    first = step % saved.num_steps
    expected = [entry for entry in planned(dataset, spec, 5, World()) if entry[1] >= first]

    planned_epochs.clear()
    fresh = _loader(dataset, spec)
    list(fresh)
    assert planned_epochs == [0]

    planned_epochs.clear()
    resumed = _loader(dataset, spec)
    resumed.load_state_dict(saved.state_dict() | {"step": first})
    assert len(resumed) == resumed.num_steps * 4
    received = [entry for batch in resumed for entry in received_keys([batch])]
    assert received == expected
    assert planned_epochs == [5]


def test_a_loader_that_deals_by_itself_plans_its_own_epoch_only(
    dataset: Dataset, planned_epochs: list[int]
) -> None:
    shards = ShardIterableDataset(dataset, split="train", batch=SPECS["budget"], seed=SEED, fields={})
    shards.set_epoch(3)
    for _ in DataLoader(shards, batch_size=None, num_workers=0):
        pass
    assert planned_epochs == [3]
