"""The example transforms of texts: keyed section dropout, order and word masking."""

from __future__ import annotations

import re
from typing import Any

import pytest

import shardflow as sf
from examples.text_transforms import MASK, drop_sections, mask_words
from shardflow.format import Dataset
from shardflow.format.keys import REPORT_FIELD
from shardflow.format.samples import SampleFacts
from shardflow.loading import Loader, World
from shardflow.sampling import BatchSpec
from tests.factories import MadeSample, make_dataset, sample_key

SECTIONS = ("INDICATION", "FINDINGS", "IMPRESSION")
NUM_SAMPLES = 24


def _report(number: int) -> str:
    return "\n\n".join(f"{name}: words of {name.lower()} {number} and some more." for name in SECTIONS)


def _make(number: int, **_: Any) -> MadeSample:
    report = _report(number).encode()
    return MadeSample(
        key=sample_key(number),
        fields={REPORT_FIELD: report},
        facts=SampleFacts(text_bytes=len(report), num_series=0, num_slices=0, rows=0, columns=0, modality=""),
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("texts") / "a"
    return Dataset.open(make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=6, make=_make))


def _texts(dataset: Dataset, epoch: int = 0, world: World | None = None) -> dict[str, tuple[str, str]]:
    loader = Loader(
        dataset,
        split="train",
        batch=BatchSpec(micro_batch_size=4, micro_batches_per_step=2),
        seed=3,
        fields={"report": sf.Text()},
        transform=[drop_sections, mask_words],
        world=world or "single",
    )
    with loader:
        loader.set_epoch(epoch)
        return {
            str(key): (batch["report"][slot], batch["target"][slot])
            for batch in loader
            for slot, key in enumerate(batch.info.sample_keys)
        }


def test_sections_are_dropped_and_moved_and_words_masked_by_key(dataset: Dataset) -> None:
    found = _texts(dataset)
    orders = set()
    for number in range(NUM_SAMPLES):
        report, target = found[sample_key(number)]
        sections = target.split("\n\n")
        assert {*sections} <= {*_report(number).split("\n\n")}
        assert any(section.startswith("IMPRESSION") for section in sections)
        orders.add(tuple(section.partition(":")[0] for section in sections))
        words, masked = re.findall(r"\w+", target), re.findall(r"\[MASK\]|\w+", report)
        assert [(a, b) for a, b in zip(words, masked, strict=True) if b not in (a, MASK)] == []
    assert len(orders) > 4
    num_masked = sum(report.count(MASK) for report, _ in found.values())
    num_words = sum(len(re.findall(r"\w+", target)) for _, target in found.values())
    assert 0.08 < num_masked / num_words < 0.24


def test_choices_depend_on_epoch_and_sample_alone(dataset: Dataset) -> None:
    whole = _texts(dataset)
    parts: dict[str, tuple[str, str]] = {}
    for rank in range(2):
        parts |= _texts(dataset, world=World(rank=rank, world_size=2))
    assert parts == whole
    assert _texts(dataset, epoch=1) != whole
