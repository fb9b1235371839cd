"""Blend files: strict, found from their own folder, wrong components named by position."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.loading.blend_file import evaluation_blend, open_blend
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
        ("component = []", "a blend must have 1 to 10 \\[\\[component\\]\\], got 0"),
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
