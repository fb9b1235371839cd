"""Slices of many sizes: letterboxed, in one of several sizes or in tiles, each a direct decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

import shardflow as sf
from shardflow.fields.layout import WINDOWS
from shardflow.format import Dataset, decode_array
from shardflow.loading import Loader, Selection, open_blend
from shardflow.sampling import BatchSpec, CostRule, TokenBudget
from shardflow.sampling.image_sizes import BucketDraw
from tests.factories import MadeSample, make_dataset, make_sample
from tests.integration.loader_support import open_loader, resized, slots_of

pytestmark = pytest.mark.fast

NUM_SAMPLES = 13
SIZES = [(20, 24), (48, 32), (70, 90), (16, 16)]
MODALITIES = ["CT", "CT", "DX", "CT"]
SPEC = BatchSpec(micro_batch_size=3, micro_batches_per_step=2, tail="mask")
TWO_SIZES = sf.Slices(sizes=((5, 8, 12, 2), (2, 24, 20, 1)), sampling="random")
TOKENS_PER_SLICE = (3, 10)


def _make(number: int, **settings: Any) -> MadeSample:
    kind = number % 4
    return make_sample(number, **{**settings, "size": SIZES[kind], "modality": MODALITIES[kind]})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sizes") / "a"
    return make_dataset(
        folder, num_samples=NUM_SAMPLES, samples_per_shard=4, slices=(1, 9), make=_make, facts=True
    )


def _loader(source: str | Selection, image: sf.Field, spec: BatchSpec = SPEC) -> Loader:
    return open_loader(source, spec, {"image": image})


def _chosen(url: str, row: int, most: int) -> list[NDArray[Any]]:
    """Even slices of a sample, by the simple reading path."""
    fields = Dataset.open(url).read_fields(row)
    stored = [decode_array("b2nd", data) for name, data in fields.items() if name.startswith("s000.i")]
    if len(stored) <= most:
        return stored
    return [stored[(2 * place + 1) * len(stored) // (2 * most)] for place in range(most)]


def _slices(loader: Loader, epoch: int = 0) -> dict[int, NDArray[Any]]:
    """Copies of the slices of each sample."""
    with loader:
        loader.set_epoch(epoch)
        return {
            row: np.array(batch["image"][slot][: batch["image_mask"][slot].sum()])
            for batch in loader
            for slot, row in slots_of(batch)
        }


def test_a_letterbox_keeps_the_shape_of_a_slice(url: str) -> None:
    for batch in _loader(url, sf.Slices(num_slices=3, size=(32, 24), fit="letterbox")):
        assert not batch["image_box"][batch["image_mask"] == 0].any()
        for slot, row in slots_of(batch):
            for place, piece in enumerate(_chosen(url, row, 3)):
                top, left, height, width = batch["image_box"][slot, place].tolist()
                size = SIZES[row % 4]
                assert (height == 32) or (width == 24)
                assert abs(height / width - size[0] / size[1]) < 0.08
                assert abs(top - (32 - height - top)) <= 1
                assert abs(left - (24 - width - left)) <= 1
                image = batch["image"][slot, place, 0].copy()
                inside = image[top : top + height, left : left + width]
                assert np.array_equal(inside, resized(piece, (height, width)))
                inside[:] = -1024
                assert (image == -1024).all()


def test_each_ct_gets_one_of_the_windows_and_everything_else_keeps_its_own(url: str) -> None:
    names = ("lung", "bone", "brain")
    epochs = []
    with _loader(url, sf.Slices(num_slices=1, size=(8, 8), windows=names)) as loader:
        for epoch in range(4):
            loader.set_epoch(epoch)
            epochs.append(
                {row: tuple(batch["image_range"][slot]) for batch in loader for slot, row in slots_of(batch)}
            )
    # The factory calls the unit of every sample HU; the field goes by it.
    assert {found for ranges in epochs for found in ranges.values()} == {WINDOWS[name] for name in names}
    assert len({tuple(sorted(ranges.items())) for ranges in epochs}) == 4


def test_modalities_come_with_slices(url: str) -> None:
    for batch in _loader(url, sf.Slices(num_slices=1, size=(8, 8))):
        wanted = [""] * SPEC.micro_batch_size
        for slot, row in slots_of(batch):
            wanted[slot] = MODALITIES[row % 4]
        assert batch.modalities == wanted
    assert not any(next(iter(open_loader(url, SPEC, {"report": sf.Text()}))).modalities)


def test_a_sample_gets_the_size_that_the_plan_drew(url: str) -> None:
    for epoch in range(3):
        sizes = BucketDraw.of(5, epoch).choose(np.arange(NUM_SAMPLES), [2, 1])
        assert len({*sizes.tolist()}) == 2
        found = _slices(_loader(url, TWO_SIZES), epoch)
        assert len(found) == NUM_SAMPLES
        for number, (num_slices, *size, _) in enumerate(TWO_SIZES.sizes):
            one = sf.Slices(num_slices=num_slices, size=(size[0], size[1]), sampling="random")
            for row, slices in _slices(_loader(url, one), epoch).items():
                if sizes[row] == number:
                    assert np.array_equal(found[row], slices)


def _budget(max_tokens: int) -> BatchSpec:
    cost = CostRule(text_tokens_per_1000_bytes=0, buckets=TWO_SIZES.buckets(TOKENS_PER_SLICE))
    budget = TokenBudget(max_tokens=max_tokens, max_samples=8, padded=False, cost=cost)
    return BatchSpec(budget=budget, micro_batches_per_step=1, tail="mask", lanes=1)


def _lengths(loader: Loader) -> list[int]:
    """Tokens of each micro-batch, by the sizes that its samples got."""
    tokens = {size[1:3]: each for size, each in zip(TWO_SIZES.sizes, TOKENS_PER_SLICE, strict=True)}
    with loader:
        return [
            sum(
                2 + len(image) * tokens[image.shape[2], image.shape[3]]
                for slot, _ in slots_of(batch)
                for image in [batch["image"][slot]]
            )
            for batch in loader
        ]


def test_a_token_budget_holds_for_the_sizes_that_are_drawn(url: str) -> None:
    lengths = _lengths(_loader(url, TWO_SIZES, _budget(40)))
    assert max(lengths) <= 40
    assert sum(lengths) / len(lengths) > 20


def test_a_blend_draws_sizes_by_the_row_of_the_dataset(url: str, tmp_path: Path) -> None:
    component = f'[[component]]\ndataset = "{url}"\nsplit = "train"\n'
    (tmp_path / "blend.toml").write_text(component + component)
    blend = open_blend(tmp_path / "blend.toml")
    assert max(_lengths(_loader(blend, TWO_SIZES, _budget(60)))) <= 60
    sizes = BucketDraw.of(5, 0).choose(np.arange(NUM_SAMPLES), [2, 1])
    with _loader(blend, TWO_SIZES, _budget(60)) as loader:
        found = [(row, batch["image"][slot].shape[2:]) for batch in loader for slot, row in slots_of(batch)]
    assert sorted(found) == sorted(2 * [(row, TWO_SIZES.sizes[size][1:3]) for row, size in enumerate(sizes)])


def test_tiles_are_the_slices_cut_and_an_overview(url: str) -> None:
    counts = set()
    for batch in _loader(url, sf.Slices(num_slices=2, size=(16, 20), tiles=6, padding="longest")):
        for slot, row in slots_of(batch):
            tiles = batch["image"][slot, batch["image_mask"][slot] > 0, 0]
            pieces = _chosen(url, row, 2)
            for piece, (high, wide) in zip(pieces, batch["image_grid"][slot].tolist(), strict=False):
                assert high * wide <= 6
                canvas = resized(piece, (high * 16, wide * 20))
                wanted = [cv2.resize(canvas, (20, 16), interpolation=cv2.INTER_AREA)] * (high * wide > 1)
                wanted += [
                    canvas[top : top + 16, left : left + 20]
                    for top in range(0, high * 16, 16)
                    for left in range(0, wide * 20, 20)
                ]
                assert np.array_equal(tiles[: len(wanted)], wanted)
                tiles = tiles[len(wanted) :]
                counts.add(len(wanted))
            assert not len(tiles)
    assert {1, 7} <= counts
