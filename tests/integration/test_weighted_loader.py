"""Loaders with weights, classes and limits: the same batches on any world size and after a resume."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.errors import ConfigError, StateError
from shardflow.format import Dataset
from shardflow.format.tables import StoredColumn, write_table
from shardflow.loading import open_blend
from tests.factories import make_dataset

NUM = 40
SPEC = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("weighted") / "dataset"
    made = Dataset.open(make_dataset(folder, num_samples=NUM, facts=True))
    number = np.arange(NUM)
    none = np.zeros(NUM, bool)
    columns = [
        StoredColumn(name="weight", kind="int", values=number % 4, is_missing=none),
        StoredColumn(name="share", kind="float", values=(number % 4) / 10, is_missing=none),
        StoredColumn(name="age", kind="int", values=number + 20, is_missing=none),
        StoredColumn(name="bad", kind="float", values=np.where(number == 3, -1.0, 1.0), is_missing=none),
        StoredColumn(name="zero", kind="int", values=number * 0, is_missing=none),
        StoredColumn(name="gaps", kind="int", values=number % 4, is_missing=number % 5 == 0),
        StoredColumn(
            name="finding",
            kind="category",
            values=np.where(number < 30, 0, 1),
            is_missing=number % 10 == 9,
            names=("common", "rare"),
        ),
    ]
    write_table(made.store, made.dataset_id, "t", "study", columns)
    return Dataset.open(str(folder))


def batches(
    dataset: Any, sampling: sf.Sampling | None, *, world: sf.World, epochs: int = 2, **more: Any
) -> list[Any]:
    """Keys and weights of the micro-batches of a rank."""
    with sf.Loader(
        dataset, split="train", seed=7, batch=SPEC, fields={}, sampling=sampling, world=world, **more
    ) as loader:
        found = []
        for epoch in range(loader.epoch, epochs):
            loader.set_epoch(epoch)
            found += [(b.epoch, b.step, b.micro, tuple(b.sample_keys)) for b in loader]
        return found


@pytest.mark.parametrize(
    "sampling",
    [
        sf.Sampling(weights="t.weight"),
        sf.Sampling(weights={0: "t.weight", 1: ""}, epoch_samples=50),
        sf.Sampling(balance="t.finding", missing_class="own", epoch_samples=30),
        sf.Sampling(limit=3, epoch_samples=20),
    ],
)
def test_equal_on_1_2_and_4_ranks_and_after_a_resume(dataset: Dataset, sampling: sf.Sampling) -> None:
    alone = batches(dataset, sampling, world=sf.World())
    for world_size in (2, 4):
        ranks = [
            batches(dataset, sampling, world=sf.World(rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        assert sorted(one for rank in ranks for one in rank) == sorted(alone)
    options: dict[str, Any] = {"split": "train", "seed": 7, "batch": SPEC, "fields": {}, "sampling": sampling}
    with sf.Loader(dataset, world="single", **options) as loader:
        iterator = iter(loader)
        for _ in range(8):
            next(iterator)
        state = loader.state_dict()
        assert state["step"] == 2
        if sampling.weights == "t.weight":
            assert state["version"] == 3
    with sf.Loader(dataset, world="single", **options) as resumed:
        resumed.load_state_dict(state)
        rest = [(b.epoch, b.step, b.micro, tuple(b.sample_keys)) for b in resumed]
    assert rest == [one for one in alone if one[0] == 0 and one[1] >= 2]
    other = sf.Loader(dataset, world="single", **{**options, "sampling": sf.Sampling(epoch_samples=33)})
    with pytest.raises(StateError, match="of the loader state must be this run's"):
        other.load_state_dict(state)


def counts_of(dataset: Dataset, sampling: sf.Sampling, epochs: int = 1) -> Counter[int]:
    found = batches(dataset, sampling, world=sf.World(), epochs=epochs)
    return Counter(dataset.samples.find(key) for *_, keys in found for key in keys if key is not None)


def test_counts_follow_weights_and_classes(dataset: Dataset) -> None:
    drawn = counts_of(dataset, sf.Sampling(weights="t.weight", epoch_samples=60))
    assert drawn == {row: row % 4 for row in range(NUM) if row % 4}
    assert drawn == counts_of(dataset, sf.Sampling(weights="t.share", epoch_samples=60))
    classes = counts_of(dataset, sf.Sampling(balance="t.finding", missing_class="drop", epoch_samples=54))
    assert sum(classes[row] for row in range(30)) == 27
    assert all(row % 10 != 9 for row in classes)
    assert {classes[row] for row in range(30, 40)} == {0, 3}
    own = counts_of(dataset, sf.Sampling(balance="t.finding", missing_class="own", epoch_samples=60))
    assert sum(own[row] for row in range(9, 40, 10)) == 20


def test_limit_takes_the_first_keys_and_repeats_them(dataset: Dataset) -> None:
    first = sorted(dataset.samples.column("sample_key").tolist())[:3]
    drawn = counts_of(dataset, sf.Sampling(limit=3, epoch_samples=24))
    assert {dataset.samples.column("sample_key")[row] for row in drawn} == set(first)
    assert set(drawn.values()) == {8}


def test_bad_input_is_one_sentence_before_step_0(dataset: Dataset) -> None:
    wrong = {
        "must be at least 0, got negative": sf.Sampling(weights="t.bad"),
        "must be above 0 for some sample": sf.Sampling(weights="t.zero"),
        "must be known for every sample, got 8 of 40": sf.Sampling(weights="t.gaps"),
        "did you mean 't.weight'": sf.Sampling(weights="t.wieght"),
        "use balance=": sf.Sampling(weights="t.finding"),
        "a column of classes, got fractions": sf.Sampling(balance="t.share"),
        "a column of classes, got 40 numbers for 40 samples": sf.Sampling(balance="t.age"),
        'missing_class="drop" to leave them out': sf.Sampling(balance="t.finding"),
    }
    for sentence, sampling in wrong.items():
        with pytest.raises(ConfigError, match=sentence):
            sf.Loader(dataset, split="train", seed=7, batch=SPEC, fields={}, sampling=sampling)
    with pytest.raises(ConfigError, match="got str"):
        sf.Loader(dataset, split="train", seed=7, batch=SPEC, fields={}, sampling="t.finding")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights or balance, got both"):
        sf.Sampling(weights="a", balance="b")
    with pytest.raises(ConfigError, match="must begin with epoch 0"):
        sf.Sampling(weights={1: "a"})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"limit": -3}, "limit must be at least 1, got -3"),
        ({"limit": True}, "limit must be a whole number"),
        ({"limit": "3"}, "limit must be a number, got text"),
        ({"epoch_samples": 0}, "epoch_samples must be at least 1"),
        ({"epoch_samples": 7.5}, "epoch_samples must be a whole number"),
        ({"balance": ["labels.finding"]}, "balance must be text, got list"),
    ],
)
def test_a_slip_in_sampling_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        sf.Sampling(**settings)


def test_a_loader_process_draws_the_same(dataset: Dataset, tmp_path: Path) -> None:
    sampling = sf.Sampling(weights="t.weight")
    process = sf.LoaderConfig(execution="process")
    assert batches(dataset, sampling, world=sf.World(), epochs=1, config=process) == batches(
        dataset, sampling, world=sf.World(), epochs=1
    )


def test_draws_of_a_sample_in_an_epoch_differ(dataset: Dataset) -> None:
    sampling = sf.Sampling(limit=1, epoch_samples=8)
    spec = sf.BatchSpec(micro_batch_size=8, micro_batches_per_step=1)
    fields = {"image": sf.Slices(num_slices=1, size=(8, 8), sampling="random")}

    def noise(sample: dict[str, Any]) -> dict[str, Any]:
        return {"noise": np.array([sample["__rng__"].random()])}

    with sf.Loader(
        dataset,
        split="train",
        seed=7,
        batch=spec,
        fields=fields,
        sampling=sampling,
        transform=noise,
        world="single",
    ) as loader:
        batch = next(iter(loader))
        assert len({*batch["noise"].ravel().tolist()}) == 8


def test_the_selection_crosses_a_process(dataset: Dataset) -> None:
    with sf.Loader(
        dataset, split="train", seed=7, batch=SPEC, fields={}, sampling=sf.Sampling(weights="t.weight")
    ) as one:
        again = pickle.loads(pickle.dumps(one.selection))
        plan = again.plan(SPEC, seed=7, epoch=1)
        assert plan.step(0)[0].tolist() == one.selection.plan(SPEC, seed=7, epoch=1).step(0)[0].tolist()


def test_the_plan_shows_realized_counts(dataset: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(dataset.store.url), "--split", "train", "--seed", "7", "--epoch", "1"]
    arguments += [
        "--micro-batch-size",
        "2",
        "--micro-batches-per-step",
        "4",
        "--world-size",
        "2",
        "--summary",
    ]
    weighted = [*arguments, "--weights", "t.weight", "--epoch-samples", "60"]
    assert cli.main([*weighted, "--json"]) == 0
    (line,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["class"], one["num_samples"], one["num_draws"]) for one in line["classes"]] == [
        ("weight 1", 10, 10),
        ("weight 2", 10, 20),
        ("weight 3", 10, 30),
    ]
    assert cli.main([*arguments, "--balance", "t.finding", "--missing-class", "own"]) == 0
    shown = capsys.readouterr().out
    assert "common" in shown
    assert "rare" in shown
    assert "missing" in shown
    assert cli.main([*arguments, "--balance", "t.finding"]) == 2
    assert "4 of 40 without" in capsys.readouterr().err


def test_workers_of_a_data_loader_draw_the_same(dataset: Dataset) -> None:
    from torch.utils.data import DataLoader

    from shardflow.loading.torch_dataset import ShardIterableDataset

    sampling = sf.Sampling(weights="t.weight")
    made = ShardIterableDataset(
        dataset, split="train", batch=SPEC, seed=7, fields={}, sampling=sampling, world="single"
    )
    found = [tuple(batch.sample_keys) for batch in DataLoader(made, batch_size=None, num_workers=2)]
    assert found == [keys for *_, keys in batches(dataset, sampling, world=sf.World(), epochs=1)]


def test_a_resume_opens_the_weights_that_the_lock_lists(tmp_path: Path) -> None:
    made = Dataset.open(make_dataset(tmp_path / "dataset", num_samples=NUM))

    def attach(values: Any) -> Dataset:
        column = StoredColumn(name="w", kind="int", values=values, is_missing=np.zeros(NUM, bool))
        write_table(made.store, made.dataset_id, "t", "study", [column])
        return Dataset.open(str(tmp_path / "dataset"))

    options: dict[str, Any] = {"split": "train", "seed": 7, "batch": SPEC, "fields": {}, "world": "single"}
    options["sampling"] = sf.Sampling(weights="t.w")
    with sf.Loader(attach(np.arange(NUM) % 3), **options) as first:
        state, lock, keys = first.state_dict(), first.lock(), next(iter(first)).sample_keys
    newer = attach(np.arange(NUM) % 5)
    with (
        sf.Loader(newer, **options) as other,
        pytest.raises(StateError, match=r"^sampling of the loader state"),
    ):
        other.load_state_dict(state)
    with sf.Loader(newer, lock=lock, **options) as resumed:
        resumed.load_state_dict(state, lock=lock)
        assert next(iter(resumed)).sample_keys == keys


@pytest.mark.parametrize("unit", ["study", "series"])
def test_a_resume_selects_by_the_tables_that_the_lock_lists(tmp_path: Path, unit: str) -> None:
    made = Dataset.open(make_dataset(tmp_path / "dataset", num_samples=NUM, slices=(1, 3), facts=True))
    where = "t.w != 1" if unit == "study" else "t.w != 1 and num_slices > 0"
    (tmp_path / "blend.toml").write_text(
        f'[[component]]\ndataset = "dataset"\nunit = "{unit}"\nwhere = "{where}"\n', encoding="utf-8"
    )

    def attach(values: Any) -> None:
        column = StoredColumn(name="w", kind="int", values=values, is_missing=np.zeros(NUM, bool))
        write_table(made.store, made.dataset_id, "t", "study", [column])

    def opened(lock: Any) -> tuple[sf.Loader, sf.Loader]:
        options: dict[str, Any] = {"seed": 7, "batch": SPEC, "fields": {}, "world": "single"}
        dataset = Dataset.open(tmp_path / "dataset")
        blend = open_blend(tmp_path / "blend.toml", lock=lock[1])
        alone = sf.Loader(dataset, split="train", unit=unit, where=where, lock=lock[0], **options)
        return alone, sf.Loader(blend, **options)

    attach(np.arange(NUM) % 3)
    first = opened([None, None])
    locks = [loader.lock() for loader in first]
    assert [set(lock["datasets"][0]["tables"]) for lock in locks] == [{"t"}, {"t"}]
    attach(np.arange(NUM) % 5)
    for former, newest, resumed in zip(first, opened([None, None]), opened(locks), strict=True):
        assert newest.plan_id != former.plan_id == resumed.plan_id
        assert newest.lock()["datasets"][0]["tables"] != former.lock()["datasets"][0]["tables"]
        assert resumed.lock() == former.lock()
