"""Windows: the grid is MONAI's, every window comes once, and stitched outputs are the volume again."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shardflow as sf
from shardflow.errors import ConfigError, StateError
from shardflow.fields.volumes.windows import StitchedVolume, Stitcher, importance_map, scan_starts
from shardflow.format import Dataset
from shardflow.loading import Loader, World
from shardflow.sampling import CostRule, TokenBudget
from tests.integration.loader_support import (
    check_everywhere,
    flip_bit,
    frozen,
    locate,
    number_of,
    open_loader,
)
from tests.volume_cases import VolumeSeries, affine_of, make_volumes, stored_volume

pytestmark = pytest.mark.fast

SPEC = sf.BatchSpec(micro_batch_size=3, micro_batches_per_step=4, tail="mask")
NUM_SAMPLES, WITHOUT = 5, 3
ROI = (6, 7, 9)
Fields = dict[str, sf.Field]


@cache
def series_of(number: int) -> list[VolumeSeries]:
    """Volumes of many shapes, some shorter than a window, tilted and turned ones too; one study has none."""
    random = np.random.default_rng(number)
    voxels = random.integers(-1000, 2000, random.integers(4, 15, 3)).astype("int16")
    affine = affine_of(random.uniform(0.8, 2, 3), turn=0.3 * (number % 3), tilt=0.2 * (number % 2))
    localizer = VolumeSeries(voxels=np.zeros((1, 8, 8), np.int16), kind="localizer")
    first = VolumeSeries(voxels=voxels, affine=affine, brick_shape=(3, 5, 4) if number % 2 else None)
    return [localizer] if number == WITHOUT else [localizer, first]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_volumes(tmp_path_factory.mktemp("windows") / "data", series_of, num_samples=NUM_SAMPLES)


def fields_of(**settings: Any) -> Fields:
    given = {"roi_size": ROI, "center": "grid", "overlap": 0.5, "missing": "drop", **settings}
    return {"ct": sf.Volume(**given)}


def windows_of(source: Dataset | str, fields: Fields | None = None, **settings: Any) -> Loader:
    return open_loader(
        source, settings.pop("batch", SPEC), fields or fields_of(), **{"unit": "window", **settings}
    )


@pytest.mark.parametrize("overlap", [0, 0.25, 0.5, 0.8, (0.5, 0.1, 0.7)])
def test_windows_begin_where_those_of_monai_do(overlap: float | tuple[float, float, float]) -> None:
    from monai.data.utils import dense_patch_slices
    from monai.inferers.utils import _get_scan_interval

    random = np.random.default_rng(0)
    parts = overlap if isinstance(overlap, tuple) else (overlap,) * 3
    for _ in range(60):
        lengths, size = random.integers(1, 40, 3).tolist(), random.integers(1, 20, 3).tolist()
        padded = [max(length, side) for length, side in zip(lengths, size, strict=True)]
        interval = _get_scan_interval(padded, size, 3, parts)
        expected = [[axis.start for axis in each] for each in dense_patch_slices(padded, size, interval)]
        before = [max(side - length, 0) // 2 for length, side in zip(lengths, size, strict=True)]
        starts = np.stack(np.meshgrid(*scan_starts(lengths, size, parts), indexing="ij"), -1).reshape(-1, 3)
        assert (starts + before).tolist() == expected


@pytest.mark.parametrize("size", [(8, 8, 8), (5, 16, 9), (1, 3, 64)])
def test_weights_are_those_of_monai(size: tuple[int, int, int]) -> None:
    from monai.data.utils import compute_importance_map

    for mode, sigma in (("gaussian", 0.125), ("gaussian", 0.05), ("constant", 0.125)):
        expected = compute_importance_map(size, mode=mode, sigma_scale=sigma).numpy()
        np.testing.assert_allclose(importance_map(size, mode, sigma), expected, rtol=1e-5)  # type: ignore[arg-type]


def test_every_window_comes_once_in_order_and_holds_the_voxels_of_its_place(dataset: Dataset) -> None:
    places = []
    with windows_of(dataset) as loader:
        for batch in loader:
            for slot, unit in enumerate(batch.info.units):
                if unit is None:
                    continue
                number, count = batch["ct_index"][slot].tolist()
                volume, start = stored_volume(dataset, number_of(unit.study_key), 1), batch["ct_start"][slot]
                assert unit.window == number
                assert batch["ct_shape"][slot].tolist() == list(volume.shape)
                wide = np.pad(volume, 20, constant_values=-1024)
                window = wide[
                    tuple(slice(at + 20, at + 20 + side) for at, side in zip(start, ROI, strict=True))
                ]
                assert (batch["ct"][slot, 0] == window).all()
                assert count == np.prod([len(one) for one in scan_starts(volume.shape, ROI, (0.5,) * 3)])
                places.append((unit.study_key, number, count))
    counts = {key: count for key, _, count in places}
    assert len(counts) == NUM_SAMPLES - 1
    assert places == [(key, number, count) for key, count in counts.items() for number in range(count)]


def test_windows_are_equal_on_any_number_of_ranks_in_every_execution_and_after_a_resume(
    dataset: Dataset,
) -> None:
    fields = fields_of(spacing_mm=(1.5, 1.1, 1.3), orientation="RAS")
    check_everywhere(lambda **settings: windows_of(dataset, fields, **settings))


def test_a_budget_and_lanes_deliver_every_window_once(dataset: Dataset) -> None:
    rule = CostRule(text_tokens_per_1000_bytes=0, image_tokens_per_slice=10, counts_delivered=True)
    spec = sf.BatchSpec(
        budget=TokenBudget(max_tokens=40, max_samples=8, cost=rule),
        micro_batches_per_step=2,
        tail="mask",
        lanes=2,
    )
    with windows_of(dataset) as loader:
        keys = [key for batch in loader for key in batch.info.sample_keys if key]
    with windows_of(dataset, batch=spec) as loader:
        batches = [[key for key in batch.info.sample_keys if key] for batch in loader]
    assert sorted(key for batch in batches for key in batch) == sorted(keys)
    assert {len(batch) for batch in batches} <= {0, 1, 2, 3}


def test_one_window_equals_that_of_a_loader(dataset: Dataset) -> None:
    fields = fields_of(spacing_mm=(2.0, 1.5, 1.5))
    checked = 0
    with windows_of(dataset, fields) as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                if key is not None and checked % 7 == 0:
                    found = dataset.sample(key, fields)
                    assert {name: frozen(value) for name, value in found.items()} == {
                        name: frozen(value[slot]) for name, value in batch.items()
                    }
                checked += 1
    with pytest.raises(KeyError):
        dataset.sample("zzw0", fields)
    with pytest.raises(ConfigError, match="a sample is a window; write its key"):
        dataset.sample(0, fields)


# ---- stitching ---------------------------------------------------------------------------------------


def stitched(
    make: Callable[..., Loader],
    world_size: int = 1,
    *,
    model: Callable[[NDArray[Any]], Any] | None = None,
    mode: Any = "gaussian",
) -> dict[str, StitchedVolume]:
    """Return the volumes of all ranks, merged by key; at most two are open on a rank at a time."""
    merged, found = Stitcher("ct", mode=mode), []
    for rank in range(world_size):
        own = Stitcher("ct", mode=mode)
        with make(world=World(rank=rank, world_size=world_size)) as loader:
            for batch in loader:
                found += own.add(batch, batch["ct"] if model is None else model(batch["ct"]))
                parts = own.partials()
                assert len(own._open) <= 1
                found += merged.merge(pickle.loads(pickle.dumps(parts)))
        found += merged.merge(own.partials(is_last=True))
    assert merged.finish() == []
    return {volume.key: volume for volume in found}


def same(one: dict[str, StitchedVolume], other: dict[str, StitchedVolume]) -> bool:
    def content(volume: StitchedVolume) -> object:
        return frozen(volume.values), frozen(volume.affine), volume.num_windows, volume.num_masked

    return {key: content(each) for key, each in one.items()} == {
        key: content(each) for key, each in other.items()
    }


def scores(windows: NDArray[Any]) -> NDArray[np.float32]:
    """A model whose outputs depend on the place in the window, in two channels."""
    place = np.linspace(-1, 1, windows[0].size, dtype=np.float32).reshape(windows[0].shape)
    return np.concatenate([windows * place / 7, np.sin(windows + place)], axis=1)


def test_an_identity_gives_the_resampled_volume_back(dataset: Dataset) -> None:
    settings: dict[str, Any] = {"spacing_mm": (1.5, 1.1, 1.3), "orientation": "RAS", "dtype": "float32"}
    found = stitched(lambda **more: windows_of(dataset, fields_of(**settings), **more))
    assert len(found) == NUM_SAMPLES - 1
    for key, volume in found.items():
        assert volume.is_complete
        assert volume.values is not None
        shape: Any = volume.values.shape[1:]
        whole = sf.Volume(roi_size=shape, center="middle", missing="pad", **settings)
        expected = dataset.sample(key, {"ct": whole})
        np.testing.assert_allclose(volume.values, expected["ct"], rtol=1e-6, atol=1e-4)
        np.testing.assert_allclose(volume.affine, expected["ct_affine"], rtol=0, atol=1e-9)
    of_stored = stitched(lambda **more: windows_of(dataset, **more))
    for key, volume in of_stored.items():
        assert volume.values is not None
        assert (volume.values[0] == stored_volume(dataset, number_of(key), 1)).all(), (
            "integers come back exactly"
        )


def test_stitched_volumes_equal_those_of_monai(dataset: Dataset) -> None:
    import torch
    from monai.inferers import sliding_window_inference

    found = stitched(lambda **more: windows_of(dataset, **more), model=scores)
    for key, volume in found.items():
        stored = torch.from_numpy(stored_volume(dataset, number_of(key), 1).astype("float32"))[None, None]
        expected = sliding_window_inference(
            stored,
            ROI,
            1,
            lambda window: torch.from_numpy(scores(window.numpy())),
            overlap=0.5,
            mode="gaussian",
            cval=-1024,
        )
        assert volume.values is not None
        np.testing.assert_allclose(volume.values, expected[0].numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mode", ["gaussian", "constant"])
def test_volumes_are_equal_in_every_bit_on_any_number_of_ranks_and_with_lanes(
    dataset: Dataset, mode: str
) -> None:
    def make(**settings: Any) -> Loader:
        return windows_of(dataset, **settings)

    one = stitched(make, model=scores, mode=mode)
    assert all(volume.is_complete for volume in one.values())
    for world_size in (2, 4):
        assert same(one, stitched(make, world_size, model=scores, mode=mode))


def test_volumes_are_equal_in_every_bit_after_a_resume(dataset: Dataset) -> None:
    whole = stitched(lambda **more: windows_of(dataset, **more), model=scores)
    for stop in (1, 4):
        first, found = Stitcher("ct"), []
        with windows_of(dataset) as loader:
            for batch in loader:
                found += first.add(batch, scores(batch["ct"]))
                if (batch.step, batch.slot) == (stop, loader.num_micro_batches_per_rank - 1):
                    break
            state, saved = loader.state_dict(), pickle.dumps(first.partials(is_last=True))
        second = Stitcher("ct")
        found += second.merge(pickle.loads(saved))
        with windows_of(dataset) as loader:
            loader.load_state_dict(state)
            for batch in loader:
                found += second.add(batch, scores(batch["ct"]))
        assert second.finish() == []
        assert same(whole, {volume.key: volume for volume in found})


def test_a_volume_with_a_masked_window_is_incomplete(tmp_path: Path) -> None:
    damaged = make_volumes(tmp_path / "data", series_of, num_samples=3)
    whole = stitched(lambda **more: windows_of(damaged, **more), model=scores)
    path, offset, _ = locate(damaged, 0, "s001.i0000")
    flip_bit(path, offset + 20)
    for world_size in (1, 2):
        found = stitched(
            lambda **more: windows_of(damaged, max_bad_share=1.0, max_bad_samples=99, **more),
            world_size,
            model=scores,
        )
        assert found.keys() == whole.keys()
        (broken,) = (volume for volume in found.values() if not volume.is_complete)
        assert number_of(broken.key) == 0
        assert 0 < broken.num_masked < broken.num_windows == whole[broken.key].num_windows
        assert broken.values is not None
        assert np.isnan(broken.values[:, 0]).any(), "the first slice is in masked windows alone"
        others = {key for key in whole if key != broken.key}
        assert same({key: whole[key] for key in others}, {key: found[key] for key in others})


def test_a_volume_of_which_nothing_can_be_read_is_named(tmp_path: Path) -> None:
    damaged = make_volumes(tmp_path / "data", series_of, num_samples=2)
    for path in Path(damaged.store.url).rglob("*.tar"):
        os.truncate(path, 600)
    stitcher, found = Stitcher("ct"), []
    with windows_of(damaged, max_bad_share=1.0, max_bad_samples=999) as loader:
        for batch in loader:
            found += stitcher.add(batch, batch["ct"])
    found += stitcher.finish()
    assert sorted(number_of(volume.key) for volume in found) == [0, 1]
    assert all(volume.values is None and not volume.is_complete for volume in found)


def test_a_window_that_comes_twice_is_refused(dataset: Dataset) -> None:
    stitcher = Stitcher("ct")
    with windows_of(dataset) as loader:
        batch = next(iter(loader))
        stitcher.add(batch, batch["ct"])
        with pytest.raises(StateError, match="came twice"):
            stitcher.add(batch, batch["ct"])
        for wrong, message in (
            (batch["ct"][0], r"takes outputs \(B, C, D, H, W\) of 3 windows"),
            (np.full_like(batch["ct"], np.nan, np.float32), "not finite"),
            (batch["ct"] * np.float32(100), "beyond 32,768"),
            (batch["ct"][..., ::2, ::2, ::2], r"as large as the windows, \(6, 7, 9\), got \(3, 4, 5\)"),
        ):
            with pytest.raises(ConfigError, match=message):
                Stitcher("ct").add(batch, wrong)
        with pytest.raises(ConfigError, match="got a tuple of several; give it the one at full resolution"):
            Stitcher("ct").add(batch, (batch["ct"], batch["ct"][..., ::2, ::2, ::2]))
        with pytest.raises(ConfigError, match="no windows of a field 'mr'"):
            Stitcher("mr").add(batch, batch["ct"])


def test_outputs_of_a_volume_have_as_many_channels_in_every_batch(dataset: Dataset) -> None:
    stitcher = Stitcher("ct")
    with windows_of(dataset) as loader:
        batches = iter(loader)
        first = next(batches)
        assert stitcher.add(first, first["ct"]) == []  # so the next windows are of the same volume
        second = next(batches)
        with pytest.raises(ConfigError, match="2 channels, and those of other windows of the volume 1"):
            stitcher.add(second, np.repeat(second["ct"], 2, axis=1))


# ---- slips -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap": 1}, "overlap is a number from 0 and below 1"),
        ({"overlap": 0.95, "roi_size": (64, 64, 64)}, "a voxel is in up to .* windows"),
        ({"overlap": 0.5, "center": "middle"}, "write center='grid', or leave overlap out"),
        ({"irregular": "resample"}, "neither irregular='resample'"),
        ({"margin": 2}, "nor margin"),
        ({"num_samples": 2}, "leave num_samples out"),
    ],
)
def test_a_slip_of_a_spec_is_one_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fields_of(**settings)


def test_a_slip_is_one_sentence_before_step_0(dataset: Dataset) -> None:
    cases: Sequence[tuple[dict[str, Any], str]] = [
        ({"unit": "study"}, "write unit='window' for the loader"),
        ({"fields": {"ct": sf.Volume(roi_size=ROI)}}, "needs a field that cuts volumes into windows"),
        ({"batch": sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=1)}, "write tail='mask'"),
        ({"sampling": sf.Sampling(epoch_samples=3)}, "leave sampling= out"),
        (
            {
                "fields": {
                    **fields_of(),
                    "pet": sf.Volume(roi_size=ROI, center="grid", overlap=0.2, missing="drop"),
                }
            },
            "The fields 'ct' and 'pet' cut 3 studies into different numbers of windows",
        ),
    ]
    for settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            windows_of(dataset, **settings)
