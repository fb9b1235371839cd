"""Samples of many sizes: what each view delivers is a direct decode, and the same on every way there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

import tests.factories
from shardflow.errors import ConfigError
from shardflow.fields.views import WINDOWS
from shardflow.format import Dataset, decode_array
from shardflow.loading import (
    Batch,
    ImageView,
    Loader,
    LoaderConfig,
    SizedView,
    SliceSize,
    TileView,
    World,
    open_blend,
)
from shardflow.sampling import BatchSpec, CostRule, TokenBudget
from shardflow.sampling.image_sizes import BucketDraw
from tests.factories import MadeSample, make_dataset, make_sample
from tests.integration.loader_support import flip_bit, locate

pytestmark = pytest.mark.fast

NUM_SAMPLES = 13
SIZES = [(20, 24), (48, 32), (70, 90), (16, 16)]
MODALITIES = ["CT", "CT", "DX", "CT"]
SPEC = BatchSpec(micro_batch_size=3, micro_batches_per_step=2, tail="mask")
TWO_SIZES = SizedView(
    sizes=(
        SliceSize(num_slices=5, rows=8, columns=12, weight=2),
        SliceSize(num_slices=2, rows=24, columns=20),
    ),
    slice_choice="random",
)
TILES = TileView(rows=16, columns=20, max_tiles=6, num_slices=2)


def _make(number: int, **settings: Any) -> MadeSample:
    kind = number % 4
    return make_sample(number, **{**settings, "size": SIZES[kind], "modality": MODALITIES[kind]})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests.factories, "make_sample", _make)
        folder = tmp_path_factory.mktemp("views")
        yield make_dataset(folder / "a", num_samples=NUM_SAMPLES, samples_per_shard=4, slices=(1, 9))


def loader(url: str, view: Any, *, spec: BatchSpec = SPEC, world: World | None = None, **more: Any) -> Loader:
    config = LoaderConfig(view=view, **more)
    return Loader(Dataset.open(url), split="train", batch=spec, seed=5, world=world, config=config)


def stored(url: str, row: int) -> list[NDArray[Any]]:
    """All slices of a sample, by the simple reading path."""
    fields = Dataset.open(url).read_fields(row)
    return [decode_array("b2nd", data) for name, data in fields.items() if name.startswith("s000.i")]


def by_row(batches: list[Batch]) -> dict[int, dict[str, NDArray[Any]]]:
    """Copies of what each sample got."""
    return {
        row: {"image": batch.image(slot).copy(), "range": batch.arrays["display_range"][slot].copy()}
        for batch in batches
        for slot, row in enumerate(batch.arrays["row"].tolist())
        if row >= 0
    }


def resized(piece: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    """First what shrinks by area, then what grows, as the loader does it."""
    common = min(piece.shape[0], rows), min(piece.shape[1], columns)
    piece = cv2.resize(piece, common[::-1], interpolation=cv2.INTER_AREA) if common != piece.shape else piece
    if common == (rows, columns):
        return piece
    grown: NDArray[Any] = cv2.resize(piece, (columns, rows), interpolation=cv2.INTER_LINEAR)
    return grown


def test_as_many_places_as_the_longest_study_needs(url: str) -> None:
    cap, ragged = (
        list(loader(url, ImageView(num_slices=6, rows=8, columns=8, padding=padding)))
        for padding in ("cap", "longest")
    )
    widths = set()
    for batch, full in zip(ragged, cap, strict=True):
        rows = [row for row in batch.arrays["row"].tolist() if row >= 0]
        longest = max([1, *(min(6, len(stored(url, row))) for row in rows)])
        assert batch.arrays["image"].shape[1] == longest
        assert np.array_equal(batch.arrays["image"], full.arrays["image"][:, :longest])
        assert not full.arrays["slice_mask"][:, longest:].any()
        widths.add(longest)
    assert len(widths) > 1


def test_a_letterbox_keeps_the_shape_of_a_slice(url: str) -> None:
    for batch in loader(url, ImageView(num_slices=3, rows=32, columns=24, fit="letterbox")):
        for slot, row in enumerate(batch.arrays["row"].tolist()):
            box, image = batch.arrays["content_box"][slot], batch.arrays["image"][slot]
            if row < 0:
                assert box.tolist() == [0, 0, 0, 0]
                assert not image.any()
                continue
            top, left, height, width = box.tolist()
            size = SIZES[row % 4]
            assert (height == 32) or (width == 24)
            assert abs(height / width - size[0] / size[1]) < 0.08
            assert abs(top - (32 - height - top)) <= 1
            assert abs(left - (24 - width - left)) <= 1
            chosen = [stored(url, row)[place] for place in _even(len(stored(url, row)), 3)]
            for place, piece in enumerate(chosen):
                inside = image[place, top : top + height, left : left + width]
                assert np.array_equal(inside, resized(piece, height, width))
                outside = image[place].copy()
                outside[top : top + height, left : left + width] = 0
                assert not outside.any()


def _even(num_slices: int, most: int) -> list[int]:
    if num_slices <= most:
        return list(range(num_slices))
    return [(2 * place + 1) * num_slices // (2 * most) for place in range(most)]


def test_each_ct_gets_one_of_the_windows_and_everything_else_keeps_its_own(url: str) -> None:
    view = ImageView(num_slices=1, rows=8, columns=8, windows=("lung", "bone", "brain"))
    wanted = {WINDOWS[name] for name in view.windows}
    epochs = []
    with loader(url, view) as opened:
        for epoch in range(4):
            opened.set_epoch(epoch)
            epochs.append({row: tuple(found["range"]) for row, found in by_row(list(opened)).items()})
    # The factory calls the unit of every sample HU; the view goes by it.
    assert {found for ranges in epochs for found in ranges.values()} == wanted
    assert len({tuple(sorted(ranges.items())) for ranges in epochs}) == 4
    assert {
        tuple(found["range"])
        for found in by_row(list(loader(url, ImageView(num_slices=1, rows=8, columns=8)))).values()
    } == {(-1000.0, 1000.0)}


def test_modalities_come_with_slices(url: str) -> None:
    for batch in loader(url, TILES):
        rows = batch.arrays["row"].tolist()
        assert batch.modalities == [MODALITIES[row % 4] if row >= 0 else "" for row in rows]
    assert not any(next(iter(loader(url, None))).modalities)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_unsigned_types_cut_what_they_cannot_hold(url: str, dtype: Any) -> None:
    with loader(url, ImageView(num_slices=1, rows=16, columns=16, dtype=dtype)) as opened:
        found = by_row(list(opened))
        assert opened.counters.totals("saturated").num_items > 0
    piece = stored(url, 3)[_even(len(stored(url, 3)), 1)[0]]  # of the view's own size
    assert np.array_equal(found[3]["image"][0], np.clip(piece, 0, np.iinfo(dtype).max))


def test_a_sample_gets_the_size_that_the_plan_drew(url: str) -> None:
    with loader(url, TWO_SIZES) as opened:
        for epoch in range(3):
            opened.set_epoch(epoch)
            sizes = BucketDraw.of(5, epoch).choose(np.arange(NUM_SAMPLES), [2, 1])
            found = by_row(list(opened))
            assert len(found) == NUM_SAMPLES
            for row, sample in found.items():
                size = TWO_SIZES.sizes[sizes[row]]
                num_slices = min(size.num_slices, len(stored(url, row)))
                assert sample["image"].shape == (num_slices, size.rows, size.columns)
            for number, size in enumerate(TWO_SIZES.sizes):
                one = ImageView(
                    num_slices=size.num_slices, rows=size.rows, columns=size.columns, slice_choice="random"
                )
                alone = loader(url, one)
                alone.set_epoch(epoch)
                for row, sample in by_row(list(alone)).items():
                    if sizes[row] == number:
                        assert np.array_equal(found[row]["image"], sample["image"])
        assert len({int(size) for size in sizes}) == 2


@pytest.mark.parametrize(
    "view",
    [
        TWO_SIZES,
        TILES,
        ImageView(
            num_slices=4,
            rows=8,
            columns=8,
            padding="longest",
            slice_choice="random",
            windows=("lung", "bone"),
        ),
    ],
)
def test_every_number_of_ranks_and_every_resume_gets_the_same(url: str, view: Any) -> None:
    with loader(url, view) as opened:
        opened.set_epoch(1)
        expected = by_row(list(opened))
    found: dict[int, dict[str, NDArray[Any]]] = {}
    for rank in (0, 1):
        with loader(url, view, world=World(rank=rank, world_size=2)) as one:
            one.set_epoch(1)
            found |= by_row(list(one))
    assert found.keys() == expected.keys()
    for row, sample in expected.items():
        assert np.array_equal(sample["image"], found[row]["image"])
        assert np.array_equal(sample["range"], found[row]["range"])
    with loader(url, view) as stopped, loader(url, view, num_threads=3) as again:
        stopped.set_epoch(1)
        iterator = iter(stopped)
        for _ in range(2):
            next(iterator)
        again.load_state_dict(stopped.state_dict())
        rest = by_row(list(again))
        assert rest
        for row, sample in rest.items():
            assert np.array_equal(sample["image"], expected[row]["image"])


def test_a_token_budget_holds_for_the_sizes_that_are_drawn(url: str) -> None:
    cost = CostRule(text_tokens_per_1000_bytes=0, buckets=TWO_SIZES.buckets((3, 10)))
    budget = TokenBudget(max_tokens=40, max_samples=8, padded=False, cost=cost)
    spec = BatchSpec(budget=budget, micro_batches_per_step=1, tail="mask", lanes=1)
    with loader(url, TWO_SIZES, spec=spec) as opened:
        batches = list(opened)
    assert len(by_row(batches)) == NUM_SAMPLES
    lengths = [
        sum(
            2 + len(batch.image(slot)) * (3, 10)[int(batch.arrays["size"][slot])]
            for slot in range(batch.num_slots)
            if batch.arrays["row"][slot] >= 0
        )
        for batch in batches
    ]
    assert max(lengths) <= 40
    assert sum(lengths) / len(lengths) > 20


def test_a_blend_draws_sizes_by_the_row_of_the_dataset(url: str, tmp_path: Path) -> None:
    component = f'[[component]]\ndataset = "{url}"\nsplit = "train"\n'
    (tmp_path / "blend.toml").write_text(component + component)
    cost = CostRule(text_tokens_per_1000_bytes=0, buckets=TWO_SIZES.buckets((3, 10)))
    budget = TokenBudget(max_tokens=60, max_samples=8, padded=False, cost=cost)
    spec = BatchSpec(budget=budget, micro_batches_per_step=1, tail="mask", lanes=1)
    blend = Loader(
        open_blend(tmp_path / "blend.toml"), batch=spec, seed=5, config=LoaderConfig(view=TWO_SIZES)
    )
    sizes = BucketDraw.of(5, 0).choose(np.arange(NUM_SAMPLES), [2, 1])
    num_samples = 0
    with blend:
        for batch in blend:
            used = 0
            for slot, row in enumerate(batch.arrays["row"].tolist()):
                if row >= 0:
                    num_samples += 1
                    assert batch.arrays["size"][slot] == sizes[row]
                    used += 2 + len(batch.image(slot)) * (3, 10)[sizes[row]]
            assert used <= 60
    assert num_samples == 2 * NUM_SAMPLES


def test_tiles_are_the_image_cut_and_an_overview(url: str) -> None:
    counts = set()
    for batch in loader(url, TILES):
        for slot, row in enumerate(batch.arrays["row"].tolist()):
            if row < 0:
                assert not batch.arrays["slice_mask"][slot].any()
                continue
            high, wide = batch.arrays["tile_grid"][slot].tolist()
            assert high * wide <= 6
            pieces = [stored(url, row)[place] for place in _even(len(stored(url, row)), 2)]
            each = high * wide + (high * wide > 1)
            image = batch.image(slot)
            assert len(image) == each * len(pieces)
            for number, piece in enumerate(pieces):
                canvas = resized(piece, high * 16, wide * 20)
                tiles = image[number * each : (number + 1) * each]
                for place, tile in enumerate(tiles[each - high * wide :]):
                    top, left = place // wide * 16, place % wide * 20
                    assert np.array_equal(tile, canvas[top : top + 16, left : left + 20])
                if each > 1:
                    assert np.array_equal(
                        tiles[0], cv2.resize(canvas, (20, 16), interpolation=cv2.INTER_AREA)
                    )
            counts.add(each)
    assert {1, 7} <= counts


@pytest.mark.parametrize(
    "view",
    [TWO_SIZES, TILES, ImageView(num_slices=4, rows=32, columns=24, fit="letterbox", padding="longest")],
)
def test_a_bad_sample_costs_its_slot_and_no_other(tmp_path: Path, view: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests.factories, "make_sample", _make)
        url = make_dataset(tmp_path / "bad", num_samples=NUM_SAMPLES, samples_per_shard=4, slices=(1, 9))
    expected = by_row(list(loader(url, view)))
    path, offset, _ = locate(Dataset.open(url), 6, "study.json")
    flip_bit(path, offset + 40)
    with loader(url, view) as opened:
        batches = list(opened)
        assert [row.row for row in opened.quarantined] == [6]
    found = by_row(batches)
    for row, sample in expected.items():
        if row != 6:
            assert np.array_equal(sample["image"], found[row]["image"])
    batch, slot = next(
        (batch, batch.arrays["row"].tolist().index(6)) for batch in batches if 6 in batch.arrays["row"]
    )
    assert batch.arrays["weight"][slot] == 0
    assert batch.image(slot).size == 0
    assert batch.arrays["display_range"][slot].tolist() == [0, 0]


def test_views_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="sizes"):
        SizedView(sizes=())
    with pytest.raises(ConfigError, match="windows"):
        TileView(rows=8, columns=8, max_tiles=2, windows=("heart",))
    with pytest.raises(ConfigError, match="max_tiles"):
        TileView(rows=8, columns=8, max_tiles=0)
    with pytest.raises(ConfigError, match="weight"):
        SliceSize(num_slices=1, rows=1, columns=1, weight=0)
