"""Tiles: pixels of the slide at the place that a batch names, from tissue, equal on any number of ranks."""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.fields.field import DrawKey
from shardflow.fields.volumes.crops import Turns
from shardflow.fields.volumes.tiles import GridAxis
from shardflow.fields.volumes.windows import step_of
from shardflow.format import Dataset
from shardflow.loading import Loader
from tests.factories import MadeSample, make_dataset
from tests.integration.loader_support import check_everywhere, flip_bit, locate, number_of, open_loader
from tests.slide_cases import make_slide_pixels, slide_sample
from tests.volume_cases import VolumeSeries, volume_sample

pytestmark = pytest.mark.fast

NUM_SAMPLES, WITHOUT = 6, 4
SPEC = sf.BatchSpec(micro_batch_size=6, micro_batches_per_step=4, tail="mask")
SIZE = (40, 56)


@cache
def pixels_of(number: int) -> NDArray[np.uint8]:
    """Slides of several sizes, on white glass; one is smaller than a tile at a coarse scale."""
    rows, columns = (32, 44) if number == 3 else (180 + 20 * number, 260 - 12 * number)
    pixels = make_slide_pixels(rows, columns, seed=number)
    pixels[pixels.min(axis=2) > 235] = 255
    return pixels


def make_sample(number: int, **_: Any) -> MadeSample:
    if number == WITHOUT:
        return volume_sample(number, [VolumeSeries(voxels=np.zeros((4, 8, 8), np.int16))])
    return slide_sample(number, pixels_of(number))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("tiles") / "data"
    made = make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=3, make=make_sample, facts=True)
    return Dataset.open(made)


def tiles_of(dataset: Dataset, batch: sf.BatchSpec = SPEC, loader: Any = None, **settings: Any) -> Loader:
    spec = sf.Tiles(**{"size": SIZE, "mpp": 0.25, "missing": "drop", **settings})
    return open_loader(dataset, batch, {"tile": spec}, **(loader or {}))


def expected(number: int, start: tuple[int, int], span: tuple[int, int] = SIZE) -> NDArray[np.uint8]:
    """Return a region of a slide, white where it is outside."""
    pixels, (row, column) = pixels_of(number), start
    found = np.full((*span, 3), 255, np.uint8)
    rows = slice(max(row, 0), min(row + span[0], pixels.shape[0]))
    columns = slice(max(column, 0), min(column + span[1], pixels.shape[1]))
    found[rows.start - row : rows.stop - row, columns.start - column : columns.stop - column] = pixels[
        rows, columns
    ]
    return found


def test_tiles_are_the_pixels_of_the_slide_and_the_same_everywhere(dataset: Dataset) -> None:
    def make(**settings: Any) -> Loader:
        return tiles_of(dataset, num_samples=3, loader=settings)

    batches = check_everywhere(make)
    assert sum(sum(weight > 0 for weight in batch["weight"]) for batch in batches.values()) == 3 * (
        NUM_SAMPLES - 1
    )
    starts = set()
    with make() as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                if key is None:
                    continue
                number, start = number_of(key), tuple(batch["tile_start"][slot].tolist())
                pixels = expected(number, start)
                assert np.array_equal(batch["tile"][slot], pixels.transpose(2, 0, 1))
                assert batch["tile_shape"][slot].tolist() == list(pixels_of(number).shape[:2])
                assert batch["tile_mpp"][slot] == pytest.approx([0.25, 0.25])
                assert (pixels != 255).any()  # from tissue
                assert 0 < batch["tile_tissue"][slot] <= 1
                assert batch["tile_mask"][slot] == 1
                starts.add((number, start))
    assert len(starts) > 10


@pytest.mark.parametrize(("size", "ratio"), [((9, 7), 1.973), ((21, 15), 1.06)])
def test_each_pixel_is_in_one_tile_of_a_grid_of_a_broken_ratio(
    dataset: Dataset, size: tuple[int, int], ratio: float
) -> None:
    counts: dict[int, NDArray[np.int64]] = {}
    batch_spec = sf.BatchSpec(micro_batch_size=64, micro_batches_per_step=4, tail="mask")
    settings = {"size": size, "mpp": 0.25 * ratio, "center": "grid", "loader": {"unit": "window"}}
    with tiles_of(dataset, batch_spec, **settings) as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                if key is None:
                    continue
                number = number_of(key)
                count = counts.setdefault(number, np.zeros(pixels_of(number).shape[:2], int))
                start, mpp = batch["tile_start"][slot], batch["tile_mpp"][slot]
                span = np.rint(mpp * size / 0.25).astype(int)
                assert (abs(span - np.multiply(size, ratio)) <= ratio + 1).all() or number == 3
                (top, left), (bottom, right) = np.maximum(start, 0), start + span
                count[top:bottom, left:right] += 1
                inside = expected(number, tuple(start.tolist()), tuple(span.tolist()))
                mean = cv2.resize(inside, size[::-1], interpolation=cv2.INTER_AREA)
                assert np.array_equal(mean.transpose(2, 0, 1), batch["tile"][slot])
    assert len(counts) == NUM_SAMPLES - 1
    assert all((count == 1).all() for count in counts.values())


@given(
    side=st.integers(1, 5000),
    ratio=st.floats(0.99, 70) | st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    tile=st.integers(2, 600),
    overlap=st.sampled_from([0.0, 0.0, 0.25, 0.5]),
)
def test_tiles_of_a_grid_leave_no_gap_at_any_magnification(
    side: int, ratio: float, tile: int, overlap: float
) -> None:
    axis = GridAxis(side / ratio, tile, step_of(tile, overlap))
    edges = [axis.edges(number, side) for number in range(axis.num)]
    assert edges[0][0] <= 0
    assert edges[-1][1] >= side
    for (first, last), (start, end) in itertools.pairwise(edges):
        assert start == last if not overlap else first <= start <= last
        assert start < side
        assert end >= last
    for first, last in edges[:-1]:
        assert abs(last - first - tile * ratio) <= 1
        assert last < side or overlap


@pytest.mark.parametrize(("mpp", "level"), [(0.5, 1), (1.0, 4), (2.0, 4)])
def test_a_resolution_comes_from_the_coarsest_level_that_is_fine_enough(
    dataset: Dataset, mpp: float, level: int
) -> None:
    """The region of the source, averaged over squares: as two averages where a coarser level is read."""
    step = round(mpp / 0.25)
    span = SIZE[0] * step, SIZE[1] * step
    with tiles_of(dataset, mpp=mpp) as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                if key is None:
                    continue
                start = tuple(batch["tile_start"][slot].tolist())
                assert all(at % level == 0 for at in start)
                assert batch["tile_mpp"][slot] == pytest.approx([mpp, mpp], rel=0.02)
                source = expected(number_of(key), start, span)
                mean = cv2.resize(source, SIZE[::-1], interpolation=cv2.INTER_AREA)
                difference = np.abs(mean.astype(int) - batch["tile"][slot].transpose(1, 2, 0).astype(int))
                # Rounded twice; at the lower and right edge a coarse level lacks a part of a square.
                assert np.percentile(difference, 90) <= 2


def test_the_share_of_tiles_from_tissue_is_exact(dataset: Dataset) -> None:
    rows = np.array([1, 4, 5, 9, 12])
    for share in (Fraction(0), Fraction(1, 3), Fraction("0.35"), Fraction(1)):
        turns = Turns("tile-foreground", [rows], [share], 7)
        for epoch in range(3):
            found = [
                turns.is_turn(DrawKey(1, epoch, row, (), row, crop), 0)
                for row in rows.tolist()
                for crop in range(7)
            ]
            assert sum(found) == 35 * share // 1
        assert not turns.is_turn(DrawKey(1, 0, 2, (), 2, 0), 0)
    spec = sf.BatchSpec(micro_batch_size=8, micro_batches_per_step=1, tail="mask")
    glass = {}
    for foreground in (0.0, 1.0):
        settings = {"size": (8, 8), "num_samples": 8, "foreground": foreground}
        with tiles_of(dataset, spec, **settings) as loader:
            glass[foreground] = sum(
                int(np.count_nonzero(batch["tile_tissue"][batch.info.weight > 0] == 0)) for batch in loader
            )
    assert glass[1.0] == 0 < glass[0.0]


@pytest.mark.parametrize("overlap", [0.0, 0.4])
def test_a_grid_covers_every_slide(dataset: Dataset, overlap: float) -> None:
    canvases: dict[int, NDArray[np.int16]] = {}
    counts: dict[int, int] = {}
    with tiles_of(dataset, center="grid", overlap=overlap, loader={"unit": "window"}) as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                if key is None:
                    continue
                number = number_of(key)
                rows, columns = pixels_of(number).shape[:2]
                canvas = canvases.setdefault(number, np.full((rows + 99, columns + 99, 3), -1, np.int16))
                row, column = batch["tile_start"][slot].tolist()
                tile = batch["tile"][slot].transpose(1, 2, 0)
                canvas[row + 40 : row + 40 + SIZE[0], column + 40 : column + 40 + SIZE[1]] = tile
                counts[number] = counts.get(number, 0) + 1
                assert batch["tile_index"][slot, 1] > batch["tile_index"][slot, 0]
                assert batch["tile_tissue"][slot] > 0 or (tile == 255).all()
    assert canvases.keys() == set(range(NUM_SAMPLES)) - {WITHOUT}
    for number, canvas in canvases.items():
        rows, columns = pixels_of(number).shape[:2]
        assert np.array_equal(canvas[40 : 40 + rows, 40 : 40 + columns], pixels_of(number))


def test_evaluation_and_padding(dataset: Dataset) -> None:
    fixed = sf.Tiles(size=SIZE, mpp=0.25, num_samples=4, missing="pad").for_evaluation()
    found = [dataset.sample(row, {"tile": fixed}) for row in range(NUM_SAMPLES)]
    assert [int(one["tile_mask"]) for one in found] == [int(row != WITHOUT) for row in range(NUM_SAMPLES)]
    assert (found[WITHOUT]["tile"] == 255).all()
    assert found[0]["tile_tissue"] > 0.7
    again = dataset.sample(0, {"tile": fixed})
    assert np.array_equal(again["tile"], found[0]["tile"])


def test_a_damaged_tile_masks_its_slot(dataset: Dataset, tmp_path: Path) -> None:
    made = make_dataset(tmp_path / "data", num_samples=3, samples_per_shard=3, make=make_sample, facts=True)
    damaged = Dataset.open(made)
    path, offset, num_bytes = locate(damaged, 1, "s000.l00.tif")
    for at in range(offset + num_bytes // 3, offset + num_bytes, 40):
        flip_bit(path, at)
    with tiles_of(damaged) as loader:
        weights = {
            number_of(key): float(batch.info.weight[slot])
            for batch in loader
            for slot, key in enumerate(batch.info.sample_keys)
            if key is not None
        }
    assert weights[0] == weights[2] == 1
    assert weights.get(1, 0.0) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 256}, r"size is rows and columns \(H, W\) of a tile"),
        ({"size": (256, 0)}, "each side of size"),
        ({"mpp": -1}, "mpp is microns per pixel"),
        ({"foreground": 2}, "foreground is a share from 0 to 1"),
        ({"center": "middle"}, "center is one of 'random', 'tissue', 'grid'"),
        ({"center": "tissue", "num_samples": 2}, "write center='random', or leave num_samples out"),
        ({"center": "grid", "foreground": 0.5}, "leave it out"),
        ({"overlap": 0.5}, "write center='grid', or leave overlap out"),
        ({"series": " "}, "series is an expression"),
    ],
)
def test_a_slip_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sf.Tiles(**settings)


def test_a_field_that_does_not_fit_says_what_to_write(dataset: Dataset, tmp_path: Path) -> None:
    def bind(spec: sf.Field, **settings: Any) -> None:
        with open_loader(dataset, SPEC, {"tile": spec}, **settings):
            pass

    with pytest.raises(
        ConfigError, match=r"5 slides of the field 'tile' are stored coarser than mpp=0\.1, up to 0\.25"
    ):
        bind(sf.Tiles(mpp=0.1, missing="drop"))
    with pytest.raises(ConfigError, match="1 of 6 samples have no slide"):
        bind(sf.Tiles())
    with pytest.raises(ConfigError, match="selects slides, which "):
        bind(sf.Image(series="kind == 'slide'", size=(32, 32), missing="drop"))
    with pytest.raises(ConfigError, match="selects series that are no slides"):
        bind(sf.Tiles(series="modality == 'CT'", missing="drop"))
    with pytest.raises(ConfigError, match="unit='window' for the loader"):
        bind(sf.Tiles(center="grid", missing="drop"))

    def without_scale(number: int, **_: Any) -> MadeSample:
        return slide_sample(number, pixels_of(number), mpp=None)

    made = make_dataset(tmp_path / "data", num_samples=2, samples_per_shard=3, make=without_scale, facts=True)
    with pytest.raises(ConfigError, match="2 slides of the field 'tile' state no scale"):
        tiles_of(Dataset.open(made))
    with tiles_of(Dataset.open(made), mpp=None) as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                if key is not None:
                    start = tuple(batch["tile_start"][slot].tolist())
                    assert np.array_equal(
                        batch["tile"][slot].transpose(1, 2, 0), expected(number_of(key), start)
                    )
                    assert np.isnan(batch["tile_mpp"][slot]).all()
