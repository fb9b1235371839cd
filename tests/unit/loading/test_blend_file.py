"""Blend files: strict, found from their own folder, wrong components named by position."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.tables import StoredColumn, write_table
from shardflow.loading import Loader
from shardflow.loading.rows.blend_file import evaluation_blend, open_blend
from shardflow.sampling import BatchSpec, EpochPlan
from shardflow.sampling.blend import Blend
from tests.factories import make_dataset, sample_key

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_dataset(folder / "a", splits={"train": 10, "val": 2})
    make_dataset(folder / "b", splits={"train": 20}, seed=1)
    (folder / "wanted.txt").write_text(f"{sample_key(3)}\n", encoding="utf-8")
    return folder


def component(name: str, line: str = "") -> str:
    return f'[[component]]\ndataset = "{name}"\n{line}\n'


def blend_of(folder: Path, text: str) -> Blend:
    (folder / "blend.toml").write_text(text, encoding="utf-8")
    blend = open_blend(folder / "blend.toml").population
    assert isinstance(blend, Blend)
    return blend


def counts_of(blend: Blend) -> list[int]:
    return [component.count for component in blend.components]


def test_repeats_weights_splits_and_lists(folder: Path) -> None:
    repeats = '[[component]]\ndataset = "a"\nrepeat = 0.3\n[[component]]\ndataset = "b"\nrepeat = 2.5\n'
    assert counts_of(blend_of(folder, repeats)) == [3, 50]
    weights = "epoch_samples = 100\n" + repeats.replace("repeat", "weight")
    assert counts_of(blend_of(folder, weights)) == [11, 89]
    plain = component("a", 'split = "train+val"') + component("a", 'keys = "wanted.txt"')
    blend = blend_of(folder, plain)
    assert counts_of(blend) == [12, 1]
    assert list(blend) == [*range(12), 12 + 3]


def test_the_digest_follows_samples_and_draws_and_not_the_words(folder: Path) -> None:
    one = blend_of(folder, '[[component]]\ndataset = "a"\nrepeat = 0.5\n')
    other = blend_of(folder, f'epoch_samples = 5\n[[component]]\ndataset = "{folder / "a"}"\nweight = 9.0\n')
    third = blend_of(folder, '[[component]]\ndataset = "a"\nrepeat = 0.6\n')
    assert one.digest == other.digest != third.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "component must be set, got nothing"),
        ("component = []", "a blend must have 1 to 1000 \\[\\[component\\]\\], got 0"),
        ('[[component]]\ndataset = "a"\nweight = 1.0', "component 1 must have a repeat where epoch_samples"),
        (
            'epoch_samples = 9\n[[component]]\ndataset = "a"\nrepeat = 1.0',
            "component 1 must have a weight where epoch_samples is set, got a repeat",
        ),
        (
            'epoch_samples = 9\n[[component]]\ndataset = "a"\nweight = 0.0',
            "component 1 must have a weight where epoch_samples is set, got no weight above 0",
        ),
        (
            '[[component]]\ndataset = "a"\nrepeat = 0.01',
            "component 1 of the blend must be drawn from at least",
        ),
        (
            'epoch_samples = 200_000\n[[component]]\ndataset = "a"\nweight = 1e9',
            "component 1 of the blend must be drawn from at most 10,000 times its 10 samples",
        ),
        ('[[component]]\ndataset = "a"\nrepeat = 10_001.0', ".*repeat must be from 0 to"),
        ('[[component]]\ndataset = "a"\nrepeats = 1.0', "a key must be a known setting, got 'repeats'"),
        ('[[component]]\ndataset = "a"\nrepeat = -1.0', ".*repeat must be from 0 to"),
        (
            '[[component]]\ndataset = "a"\n[[component]]\ndataset = "c"',
            "component 2 of the blend must be a dataset",
        ),
        (
            '[[component]]\ndataset = "b"\nsplit = "val"',
            "component 1 of the blend: split must be one that holds",
        ),
        (
            '[[component]]\ndataset = "a"\nversion = 2',
            "component 1 of the blend must be a dataset that can be",
        ),
        (
            '[[component]]\ndataset = "a"\nwhere = "facts.rows > 99"',
            "component 1 of the blend: where= selects none of the 10 samples",
        ),
    ],
)
def test_a_wrong_file_is_refused(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        blend_of(folder, text)
    assert str(folder) not in caught.value.message


def test_evaluation_takes_a_split_of_all_datasets_once(folder: Path) -> None:
    text = component("a", "repeat = 3.0") + component("a", 'where = "facts.rows > 1"') + component("b")
    (folder / "blend.toml").write_text(text, encoding="utf-8")
    blend = open_blend(folder / "blend.toml")
    held = evaluation_blend(blend, "val").population
    assert isinstance(held, Blend)
    assert counts_of(held) == [2]
    assert counts_of(evaluation_blend(blend, "train").population) == [10, 20]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a dataset of the blend must have split 'test', got none"):
        evaluation_blend(blend, "test")


def test_weights_change_with_the_epoch(folder: Path) -> None:
    text = (
        "epoch_samples = 90\n"
        + component("a", "weight = {0 = 2.0, 3 = 1.0, 5 = 0.0}")
        + component("b", "weight = 1.0")
    )
    blend = blend_of(folder, text)
    assert [blend.counts(epoch).tolist() for epoch in (0, 2, 3, 4, 5, 9)] == [
        [60, 30], [60, 30], [45, 45], [45, 45], [0, 90], [0, 90],
    ]  # fmt: skip
    assert blend.before(5).tolist() == [270, 180]
    assert blend.digest != blend_of(folder, text.replace("3 = 1.0, ", "")).digest
    spec = BatchSpec(micro_batch_size=5, micro_batches_per_step=3)
    for epoch in (2, 5):
        plan = EpochPlan(blend, spec, seed=7, epoch=epoch)
        rows = [row for step in range(plan.num_steps) for row in plan.step(step)[0].ravel().tolist()]
        assert sum(row < 12 for row in rows) == (60 if epoch == 2 else 0)


def test_a_thousand_components_plan_and_fit_a_state_and_a_lock(folder: Path) -> None:
    blend = blend_of(folder, "\n".join(component("b", f"repeat = {1 + n % 3}") for n in range(1000)))
    assert blend.num_draws == sum(20 * (1 + n % 3) for n in range(1000))
    selection = open_blend(folder / "blend.toml")
    spec = BatchSpec(micro_batch_size=8, micro_batches_per_step=4)
    with Loader(selection, batch=spec, seed=7, fields={}, world="single") as loader:
        state = loader.state_dict()
        assert len(json.dumps(state)) < 1024
        assert state["components"] == []
        assert len(loader.lock()["sampling"]["components"]) == 1000
        batch = next(iter(loader))
        assert len(set(batch.arrays["component"].tolist())) > 1
        loader.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"^a blend must have 1 to 1000 \[\[component\]\], got 1001"):
        blend_of(folder, component("b") * 1001)


def test_samples_of_a_component_have_weights_and_limits(folder: Path) -> None:
    dataset = Dataset.open(str(folder / "b"))
    values = np.arange(20)
    write_table(
        dataset.store,
        dataset.dataset_id,
        "t",
        "study",
        [StoredColumn(name="w", kind="int", values=values, is_missing=values < 0)],
    )
    text = component("a", "sampling = {limit = 3}") + component(
        "b", 'sampling = {weights = "t.w"}\nrepeat = 9.5'
    )
    blend = blend_of(folder, text)
    assert counts_of(blend) == [3, 190]
    plan = EpochPlan(blend, BatchSpec(micro_batch_size=1, micro_batches_per_step=1), seed=7, epoch=0)
    rows = Counter(row for step in range(plan.num_steps) for row in plan.step(step)[0].ravel().tolist())
    assert {row - 12: count for row, count in rows.items() if row >= 12} == {row: row for row in range(1, 20)}
    assert sum(count for row, count in rows.items() if row < 12) == 3
    with pytest.raises(ConfigError, match="epoch_samples must be left out"):
        blend_of(folder, component("a", "sampling = {epoch_samples = 3}"))
