"""Stored token ids through the loader: the same on any number of ranks, masked where they are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.errors import ConfigError, SampleError
from shardflow.format import Dataset
from shardflow.format.tokens import tokens_folder
from shardflow.loading import ImageView, Loader, LoaderConfig, Selection, StoredTokens, World, open_blend
from shardflow.sampling import BatchSpec
from shardflow.training.text import train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.factories import make_dataset
from tests.integration.loader_support import loader_threads

SPEC = BatchSpec(micro_batch_size=4, micro_batches_per_step=2, tail="mask")
NUM_SAMPLES = 14


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_dataset(folder / "data", num_samples=20)
    train_tokenizer(Dataset.open(folder / "data"), "train", 300, folder / "bpe")
    return TextTokenizer(folder / "bpe")


@pytest.fixture
def dataset(tmp_path: Path, tokenizer: TextTokenizer) -> Dataset:
    dataset = Dataset.open(make_dataset(tmp_path / "a", num_samples=NUM_SAMPLES, samples_per_shard=5))
    tokenize_dataset(dataset, tokenizer)
    return dataset


def expected_ids(dataset: Dataset, tokenizer: TextTokenizer, row: int) -> list[int]:
    return tokenizer.encode([dataset.read_fields(row, ["report.txt"])["report.txt"].decode()])[0]


def received(
    source: Dataset | Selection, *, world: World | None = None, **settings: object
) -> dict[tuple[int, int], tuple[float, list[int]]]:
    """Per component and row: weight and tokens."""
    loader = Loader(
        source,
        split="" if isinstance(source, Selection) else "train",
        batch=SPEC,
        seed=5,
        world=world,
        config=LoaderConfig(**{"text": False, **settings}),  # type: ignore[arg-type]
    )
    found = {}
    for batch in loader:
        for slot, (component, row) in enumerate(
            zip(batch.components, batch.arrays["row"].tolist(), strict=True)
        ):
            if row < 0:
                assert not len(batch.tokens(slot))
            else:
                weight = float(batch.arrays["weight"][slot])
                found[component, row] = (weight, batch.tokens(slot).tolist())
    return found


@pytest.mark.parametrize("max_tokens", [None, 4])
@pytest.mark.parametrize("view", [None, ImageView(num_slices=2, rows=8, columns=8)])
def test_every_sample_comes_with_the_tokens_of_its_text(
    dataset: Dataset, tokenizer: TextTokenizer, max_tokens: int | None, view: ImageView | None
) -> None:
    stored = StoredTokens(tokenizer=tokenizer.digest, max_tokens=max_tokens)
    found = received(dataset, tokens=stored, view=view, text=view is not None)
    assert found == {
        (0, row): (1.0, expected_ids(dataset, tokenizer, row)[:max_tokens]) for row in range(NUM_SAMPLES)
    }
    parts = [
        received(dataset, tokens=stored, view=view, world=World(rank=rank, world_size=2)) for rank in (0, 1)
    ]
    assert {**parts[0], **parts[1]} == found


def test_tokens_alone_of_a_local_dataset_take_one_thread(dataset: Dataset, tokenizer: TextTokenizer) -> None:
    stored = StoredTokens(tokenizer=tokenizer.digest)
    for text, num_threads in ((False, 1), (True, 3)):
        config = LoaderConfig(text=text, tokens=stored, num_threads=3)
        with Loader(dataset, split="train", batch=SPEC, seed=5, config=config) as loader:
            batches = iter(loader)
            next(batches)
            assert len(loader_threads()) == num_threads


def test_tokens_come_through_a_process_beside_the_trainer(dataset: Dataset, tokenizer: TextTokenizer) -> None:
    stored = StoredTokens(tokenizer=tokenizer.digest)
    assert received(dataset, tokens=stored, execution="process") == received(dataset, tokens=stored)


def test_a_blend_takes_the_tokens_of_each_component(
    dataset: Dataset, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    other = Dataset.open(make_dataset(tmp_path / "b", num_samples=6, samples_per_shard=2, seed=3))
    component = '[[component]]\ndataset = "{}"\nsplit = "train"\n'
    text = component.format("a") + component.format("b")
    (tmp_path / "blend.toml").write_text(text)
    stored = StoredTokens(tokenizer=tokenizer.digest)
    with pytest.raises(ConfigError, match="run: shardflow tokenize"):
        received(open_blend(tmp_path / "blend.toml"), tokens=stored)
    tokenize_dataset(other, tokenizer)
    found = received(open_blend(tmp_path / "blend.toml"), tokens=stored)
    assert found == {
        (component, row): (1.0, expected_ids(each, tokenizer, row))
        for component, each in enumerate((dataset, other))
        for row in range(each.samples.num_samples)
    }


@pytest.mark.parametrize("column", ["first_token", "token_ids"])
def test_damaged_tokens_mask_their_samples_and_no_others(
    dataset: Dataset, tokenizer: TextTokenizer, column: str
) -> None:
    """A block holds all texts of so small a shard; those of the other shards do not notice."""
    folder = Path(dataset.store.url) / tokens_folder(tokenizer.digest, dataset.dataset_id)
    path = folder / "ids-000001.tbl"
    content = bytearray(path.read_bytes())
    data_start = len(content) - 12 - 4 * 2  # trailer, and the checksums of two blocks
    content[data_start - 100 if column == "token_ids" else data_start - 64 * 9] ^= 1
    path.chmod(0o644)
    stored = StoredTokens(tokenizer=tokenizer.digest)
    whole = received(dataset, tokens=stored)
    path.write_bytes(content)
    found = received(Dataset.open(dataset.store.url), tokens=stored)
    masked = set(range(5, 10))
    assert {place: value for place, value in found.items() if place[1] not in masked} == {
        place: value for place, value in whole.items() if place[1] not in masked
    }
    assert all(found[0, row] == (0.0, []) for row in masked)
    with pytest.raises(SampleError, match=r"CHECKSUM_MISMATCH \(shard train-000001, field tokens\)"):
        received(Dataset.open(dataset.store.url), tokens=stored, on_bad_sample="raise")


@pytest.mark.fast
def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        StoredTokens(tokenizer="gpt2")
    with pytest.raises(ConfigError, match="at least 1"):
        StoredTokens(tokenizer="ab" * 32, max_tokens=0)
    assert StoredTokens(tokenizer="ab" * 32).max_tokens is None
