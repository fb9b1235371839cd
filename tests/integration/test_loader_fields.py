"""Fields: a batch holds a direct decode, equal on every way there; a bad member masks its slot alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ConfigError, StateError
from shardflow.fields.types.pixels import check_fill
from shardflow.format import Dataset
from shardflow.format.samples import SampleFacts
from shardflow.loading import Loader
from shardflow.sampling import BatchSpec
from tests.factories import MadeSample, make_dataset, sample_key
from tests.field_cases import case_series, make_case_dataset, pixels_of
from tests.integration.loader_support import (
    batches_of,
    check_everywhere,
    flip_bit,
    locate,
    open_loader,
    resized,
    slots_of,
)

pytestmark = pytest.mark.fast

NUM_SAMPLES = 14
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
FIELDS: Mapping[str, sf.Field] = {
    "frontal": sf.Image(series="role == 'frontal'", size=(10, 8), missing="pad"),
    "views": sf.Image(series="modality in ('CR', 'DX')", num_images="all", missing="pad"),
    "ct": sf.Slices(
        series="modality == 'CT' and kind == 'volume'",
        num_slices=4,
        size=(9, 12),
        fit="letterbox",
        sampling="random",
        missing="pad",
    ),
    "volume": sf.Slices(series="role == 'contrast'", missing="pad"),
    "report": sf.Text(missing="pad"),
    "study": sf.Text(member="study.json", max_bytes=1 << 14),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_case_dataset(tmp_path_factory.mktemp("fields") / "a", num_samples=NUM_SAMPLES)


def _loader(dataset: Dataset, fields: Any = FIELDS, **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, fields, **settings)


def test_every_image_of_a_radiograph_study_is_delivered_in_the_order_of_acquisition(dataset: Dataset) -> None:
    fields = {"views": sf.Image(series="modality in ('CR', 'DX')", num_images="all", missing="drop")}
    delivered = 0
    with _loader(dataset, fields) as loader:
        for batch in loader:
            assert batch["views_mask"].shape == (SPEC.micro_batch_size, 2)
            for slot, number in slots_of(batch):
                cases = case_series(number)
                order = sorted(range(len(cases)), key=lambda place: cases[place].series_number or 0)
                expected = [one for place in order for one in pixels_of(number, place)]
                found = batch["views"][slot]
                assert len(found) == len(expected) == batch["views_mask"][slot].sum()
                for image, wanted in zip(found, expected, strict=True):
                    assert image.dtype == np.uint16
                    assert np.array_equal(image, wanted[None])
                delivered += len(found)
    assert delivered == sum(
        case.shape[0]
        for number in range(NUM_SAMPLES)
        for case in case_series(number)
        if case.modality in ("CR", "DX")
    )


def test_one_image_of_a_role_is_resized_and_masked_where_there_is_none(dataset: Dataset) -> None:
    with _loader(dataset) as loader:
        for batch in loader:
            assert batch["frontal"].shape == (SPEC.micro_batch_size, 1, 10, 8)
            assert batch["frontal"].dtype == np.uint16
            for slot, number in slots_of(batch):
                has_frontal = number % 4 != 1
                assert batch["frontal_mask"][slot] == has_frontal
                if not has_frontal:
                    assert not batch["frontal"][slot].any()
                    continue
                place = 1 if number % 4 == 0 else 0
                stored = pixels_of(number, place)[0]
                wanted = cv2.resize(stored, (8, 10), interpolation=cv2.INTER_AREA)
                assert np.array_equal(batch["frontal"][slot, 0], wanted.astype(np.uint16))
                assert batch["frontal_range"][slot].tolist() == [-10.0 * place, 100.0 + number]


def test_slices_of_the_first_acquired_series_and_native_stacks(dataset: Dataset) -> None:
    with _loader(dataset) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                if number % 4 != 1:
                    assert not batch["ct_mask"][slot].any()
                    continue
                indexes, box = batch["ct_index"][slot], batch["ct_box"][slot, 0].tolist()
                assert sorted(set(indexes.tolist())) == indexes.tolist()
                stored = pixels_of(number, 1)
                assert box == [0, 0, 9, 12]
                for place, index in enumerate(indexes.tolist()):
                    wanted = cv2.resize(stored[index], (12, 9), interpolation=cv2.INTER_AREA)
                    assert np.array_equal(batch["ct"][slot, place, 0], wanted)
                assert batch["volume"][slot].shape == (5, 1, 12, 16)
                assert np.array_equal(batch["volume"][slot][:, 0], stored)


def test_text_is_that_of_the_sample(dataset: Dataset) -> None:
    with _loader(dataset) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                has_report = number % 4 != 2
                assert batch["report"][slot] == (f"report of study {number}: größer" if has_report else "")
                assert batch["report_mask"][slot] == has_report
                assert sample_key(number) in batch["study"][slot]


def test_content_is_equal_on_any_number_of_ranks_in_every_execution_and_after_a_resume(
    dataset: Dataset,
) -> None:
    check_everywhere(lambda **settings: _loader(dataset, **settings))


def test_random_slices_change_with_the_epoch_and_the_seed_alone(dataset: Dataset) -> None:
    def drawn(epoch: int = 0, **settings: Any) -> dict[int, list[int]]:
        with _loader(dataset, {"ct": FIELDS["ct"]}, **settings) as loader:
            loader.set_epoch(epoch)
            return {
                number: batch["ct_index"][slot].tolist()
                for batch in loader
                for slot, number in slots_of(batch)
            }

    assert drawn() == drawn()
    assert drawn().keys() == drawn(1).keys()
    assert drawn(1) != drawn() != drawn(seed=6)


def test_tiles_put_together_are_the_image_of_a_whole_number_of_tiles(dataset: Dataset) -> None:
    field = sf.Image(
        series="modality in ('CR', 'DX')", num_images="all", size=(10, 8), tiles=5, missing="drop"
    )
    with _loader(dataset, {"x": field}) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                cases = case_series(number)
                order = sorted(range(len(cases)), key=lambda place: cases[place].series_number or 0)
                pictures = [one for place in order for one in pixels_of(number, place)]
                tiles = batch["x"][slot, batch["x_mask"][slot] > 0]
                for picture, grid in zip(pictures, batch["x_grid"][slot].tolist(), strict=False):
                    high, wide = grid
                    assert high * wide <= 5
                    canvas = resized(picture, (high * 10, wide * 8)).astype(tiles.dtype)
                    expected = [cv2.resize(canvas, (8, 10), interpolation=cv2.INTER_AREA)] * (high * wide > 1)
                    expected += [
                        canvas[row * 10 : row * 10 + 10, column * 8 : column * 8 + 8]
                        for row in range(high)
                        for column in range(wide)
                    ]
                    assert np.array_equal(tiles[: len(expected), 0], expected)
                    tiles = tiles[len(expected) :]
                assert not len(tiles)


def test_places_without_an_image_hold_the_fill(dataset: Dataset) -> None:
    whole = sf.Slices(series="kind == 'volume'", num_slices=7, size=(9, 12), fit="letterbox", missing="pad")
    with _loader(dataset, {"ct": whole}) as loader:
        for batch in loader:
            empty = batch["ct"][batch["ct_mask"] == 0]
            assert (empty == -1024).all()
            assert empty.dtype == np.int16
    other = sf.Slices(series="kind == 'volume'", num_slices=7, size=(8, 8), fill=-5, missing="pad")
    with _loader(dataset, {"ct": other}) as loader:
        assert all((batch["ct"][batch["ct_mask"] == 0] == -5).all() for batch in loader)
    with pytest.raises(ConfigError, match="does not fit into uint16"):
        _loader(dataset, {"x": sf.Image(series="modality == 'DX'", size=(8, 8), fill=-1, missing="pad")})


@pytest.mark.filterwarnings("error")
def test_a_fill_beyond_the_dtype_is_one_sentence() -> None:
    for fill in (1e30, -1.0, 0.5, float("nan")):
        with pytest.raises(ConfigError, match="does not fit into uint16"):
            check_fill("image", fill, np.dtype(np.uint16))
    assert check_fill("image", 65535, np.dtype(np.uint16)) == 65535


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"split": ["train"]},
            r"split is a name such as 'train', or several as 'train\+val', got \['train'\]",
        ),
        ({"seed": "7"}, "seed must be an integer"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_slips_of_a_loader_are_one_sentence(
    dataset: Dataset, settings: Mapping[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {"split": "train", "seed": 5, "batch": SPEC, "fields": {}, **settings}
    with pytest.raises(ConfigError, match=message):
        sf.Loader(dataset, **arguments)


def test_a_slab_is_contiguous(dataset: Dataset) -> None:
    fields = {
        "ct": sf.Slices(series="kind == 'volume'", num_slices=3, size=(8, 8), sampling="slab", missing="drop")
    }
    with _loader(dataset, fields) as loader:
        for batch in loader:
            for slot, _ in slots_of(batch):
                assert np.diff(batch["ct_index"][slot]).tolist() == [1, 1]


def test_a_bad_member_masks_its_slot_and_nothing_else(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a", num_samples=NUM_SAMPLES)
    whole = batches_of(_loader(dataset))
    for number, field in (
        (4, "s001.i0000.b2nd"),
        (5, "s001.i0002.b2nd"),
        (3, "study.json"),
        (8, "report.txt"),
    ):
        path, offset, num_bytes = locate(dataset, number, field)
        flip_bit(path, offset + num_bytes // 2)
    damaged = batches_of(_loader(Dataset.open(tmp_path / "a")))
    bad = {sample_key(number) for number in (3, 4, 5, 8)}
    for place, batch in damaged.items():
        for slot, key in enumerate(batch["keys"]):
            assert batch["weight"][slot] == (key is not None and key not in bad)
        if not bad & {*batch["keys"]}:
            assert batch == whole[place]
    first = _loader(Dataset.open(tmp_path / "a"))
    batches_of(first)
    replayed = _loader(Dataset.open(tmp_path / "a"))
    replayed.load_masks(first.masks())
    assert batches_of(replayed) == damaged


def test_no_fields_deliver_rows_keys_and_weights_and_read_nothing(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a", num_samples=NUM_SAMPLES)
    with _loader(dataset, FIELDS) as loader:
        expected = [(batch.info.sample_keys, batch.info.weight.tolist()) for batch in loader]
    for shard in dataset.manifest.shards:
        (tmp_path / "a" / shard.path).unlink()
    with _loader(dataset, {}) as loader:
        batches = list(loader)
    assert [(batch.info.sample_keys, batch.info.weight.tolist()) for batch in batches] == expected
    assert all(not dict(batch) and list(batch.torch()) == ["weight"] for batch in batches)
    rows = [row for batch in batches for row in batch.arrays["row"].tolist() if row >= 0]
    assert sorted(rows) == list(range(NUM_SAMPLES))


def test_a_transform_may_make_all_entries_itself(dataset: Dataset) -> None:
    with _loader(dataset, {}) as loader:
        expected = [batch.info.sample_keys for batch in loader]
    made = Loader(
        dataset,
        split="train",
        batch=SPEC,
        seed=5,
        fields={},
        transform=lambda sample: {"name": sample["__key__"]},
    )
    with made as loader:
        assert [batch["name"] for batch in loader] == [[key or "" for key in keys] for keys in expected]


def test_fields_for_evaluation_draw_nothing_at_random() -> None:
    slices = sf.Slices(num_slices=2, sampling="slab", windows=("lung", "bone"), missing="pad")
    found = slices.for_evaluation()
    assert found == sf.Slices(num_slices=2, windows=("lung",), missing="pad")
    assert sf.Image(windows=("lung", "bone")).for_evaluation() == sf.Image(windows=("lung",))
    assert sf.Text().for_evaluation() == sf.Text()


def test_samples_without_the_content_are_an_error_dropped_or_padded(dataset: Dataset) -> None:
    wanted = {"x": sf.Image(series="role == 'lateral'", size=(8, 8))}
    with pytest.raises(ConfigError, match=r"7 of 14 samples have no image for the field 'x'.*missing='pad'"):
        _loader(dataset, wanted)
    dropped = _loader(dataset, {"x": sf.Image(series="role == 'lateral'", size=(8, 8), missing="drop")})
    assert dropped.selection.population_of(0).sum() == 7
    with dropped, pytest.raises(ConfigError, match="No table knows"):
        _loader(dataset, {"x": sf.Text(member="document.000.txt", missing="drop")})
    with pytest.raises(ConfigError, match="have no report"):
        _loader(dataset, {"report": sf.Text()})


def test_a_population_without_such_images_is_padded(dataset: Dataset, tmp_path: Path) -> None:
    every = {
        "lateral": sf.Image(series="role == 'lateral'", size=(9, 7), missing="pad"),
        "ct": sf.Slices(series="kind == 'volume'", num_slices=2, size=(8, 8), missing="pad"),
        "native": sf.Slices(series="kind == 'volume'", missing="pad"),
        "longest": sf.Slices(num_slices=3, size=(8, 8), padding="longest", missing="pad"),
        "tiles": sf.Image(size=(8, 8), tiles=4, missing="pad"),
        "mask": sf.Mask(like="ct"),
        "text": sf.Text(missing="pad"),
    }
    with _loader(dataset, every, where="facts.modality == 'CR' and facts.num_slices == 1") as loader:
        batch = next(iter(loader))
    # What other samples of the dataset have decides dtype and fill.
    assert (batch["lateral"].dtype, batch["ct"].dtype) == (np.uint16, np.int16)
    assert (batch["ct"] == -1024).all()
    assert not batch["ct_mask"].any()
    assert not batch["lateral_mask"].any()
    texts = Dataset.open(make_dataset(tmp_path / "texts", splits={"train": 4}, make=_text_alone))
    with _loader(texts, every) as loader:
        batch = next(iter(loader))
    assert batch["ct"].shape == (2, 2, 1, 8, 8)
    assert not any(batch[f"{name}_mask"].any() for name in every if name != "text")
    assert texts.sample(0, every)["native"].shape[0] == 0
    with pytest.raises(ConfigError, match="matches no image of the selected samples"):
        _loader(dataset, {"x": sf.Image(series="role == 'fronta1'", missing="pad")})
    with pytest.raises(ConfigError, match="matches no image"):
        _loader(texts, {"x": sf.Image()})


def _text_alone(number: int, **_: Any) -> MadeSample:
    study = json.dumps({"format_version": 1, "sample_key": sample_key(number), "series": []}).encode()
    report = f"report of study {number}".encode()
    facts = SampleFacts(text_bytes=len(report), num_series=0, num_slices=0, rows=0, columns=0, modality="")
    return MadeSample(key=sample_key(number), fields={"report.txt": report, "study.json": study}, facts=facts)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"x": sf.Image(series="rol == 'frontal'")}, r"did you mean role or rows or group\?\n"),
        ({"x": sf.Image(series="role == 'sagittal'")}, "Roles of their images"),
        ({"weight": sf.Text(missing="pad")}, "reserved"),
        ({"x": sf.Text(missing="pad"), "x_mask": sf.Text(missing="pad")}, "beside 'x'"),
        ({"X": sf.Text(missing="pad")}, "not valid"),
        ({"x": "frontal"}, "not a field"),
        ({"x": sf.Image(series="rows > 'a'", missing="pad")}, "field 'x': The column rows"),
        ({"x": sf.Image(series="modality == 'DX'", windows=("lung",), missing="pad")}, "in HU"),
        ({"x": sf.Text}, r"call it, such as sf\.Text\(\)"),
        ({3: sf.Text(missing="pad")}, "not valid"),
        ("frontal", "maps names to fields"),
        (sf.Text(), "maps names to fields"),
    ],
)
def test_a_slip_in_fields_is_one_sentence_before_step_0(dataset: Dataset, fields: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _loader(dataset, fields)
    if "maps" in sentence or "not" in sentence:
        with pytest.raises(ConfigError, match=sentence):
            dataset.sample(0, fields)


def test_a_configuration_of_another_kind_is_named(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="LoaderConfig"):
        sf.Loader(dataset, split="train", seed=1, batch=SPEC, world="single", config={"num_threads": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"size": 512},
        {"size": (0, 4)},
        {"size": (512, 512, 3)},
        {"fit": "letterbox"},
        {"dtype": "float16"},
        {"num_images": 0},
        {"windows": "lung"},
        {"windows": ("chest",)},
        {"missing": "skip"},
        {"channels": 2},
        {"tiles": 4},
        {"series": " "},
        {"series": 5},
        {"resolution": "small"},
        {"padding": "shortest"},
    ],
)
def test_a_wrong_setting_of_an_image_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        sf.Image(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sizes": ((2, 8, 8, 1),), "num_slices": 2}, "in place of num_slices"),
        ({"sizes": ((2, 8, 8, 1),), "size": (8, 8)}, "in place of size"),
        ({"sizes": ((2, 8, 8),)}, "num_slices, rows, columns, weight"),
        ({"sizes": ((2, 8, 8, 0),)}, "each number of sizes"),
        ({"sizes": ((2, 8, 8, 1),) * 17}, "at most 16"),
        ({"sizes": 4}, "is a list"),
        ({"augment_pool": 1.5}, "from 0 to 1"),
        ({"augment_pool": 0.5, "size": (8, 8), "resolution": "small"}, "resolution='full'"),
        ({"tiles": 4}, "tiles needs size"),
    ],
)
def test_a_wrong_setting_of_slices_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        sf.Slices(**settings)


def test_a_dataset_without_small_versions_or_variants_refuses_to_deliver_them(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"variants\.small_px"):
        _loader(dataset, {"x": sf.Image(size=(8, 8), resolution="small", missing="pad")})
    with pytest.raises(ConfigError, match=r"variants\.augment"):
        _loader(dataset, {"x": sf.Slices(augment_pool=0.5, missing="pad")})


LONGEST: Mapping[str, sf.Field] = {
    "ct": sf.Slices(series="role != 'localizer'", num_slices=9, size=(8, 8), padding="longest"),
    "tiles": sf.Image(num_images="all", size=(10, 8), tiles=4, padding="longest"),
    "sized": sf.Slices(sizes=((3, 8, 12, 2), (1, 16, 8, 1)), sampling="random", fit="letterbox"),
    "marked": sf.Mask(like="ct"),
    "drawn": sf.Mask(like="sized"),
}


def test_places_follow_the_largest_sample_of_a_micro_batch(dataset: Dataset) -> None:
    cap = {name: replace(LONGEST[name], padding="cap") for name in ("ct", "tiles")}  # type: ignore[call-arg]
    numbers = set()
    with _loader(dataset, LONGEST) as longest, _loader(dataset, cap) as full:
        for batch, other in zip(longest, full, strict=True):
            for name in cap:
                places = max(1, int(other[f"{name}_mask"].sum(axis=1).max()))
                assert batch[name].shape[1] == batch[f"{name}_mask"].shape[1] == places
                assert np.array_equal(batch[name], other[name][:, :places])
                numbers.add((name, places))
            assert batch["marked"].shape[:2] == batch["ct"].shape[:2]
            for slices, mask in zip(batch["sized"], batch["drawn"], strict=True):
                assert slices.shape[0] == mask.shape[0]
                assert slices.shape[2:] == mask.shape[2:]
                assert slices.shape[2:] in {(8, 12), (16, 8), (0, 0)}
    assert len({places for name, places in numbers if name == "ct"}) > 2


def test_sizes_and_places_are_equal_on_every_way_there(dataset: Dataset) -> None:
    check_everywhere(partial(_loader, dataset, LONGEST))


def test_a_masked_sample_keeps_its_places_after_a_resume(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a", num_samples=NUM_SAMPLES)
    path, offset, num_bytes = locate(dataset, 5, "s000.i0003.b2nd")
    flip_bit(path, offset + num_bytes // 2)
    with _loader(dataset, LONGEST) as loader:
        expected = batches_of(loader)
        masks = loader.masks()
    assert len(masks) == 1
    with _loader(dataset, LONGEST) as resumed:
        resumed.load_masks(masks)
        assert batches_of(resumed) == expected


def test_a_transform_may_return_pictures_whose_number_varies(dataset: Dataset) -> None:
    with _loader(dataset, LONGEST) as loader:
        expected = [batch["ct"] for batch in loader]
        with _loader(dataset, LONGEST, transform=_same) as transformed:
            for wanted, batch in zip(expected, transformed, strict=True):
                for slot, weight in enumerate(batch.info.weight):
                    assert not weight or np.array_equal(batch["ct"][slot], wanted[slot])


def _same(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: sample[name] for name in ("ct", "ct_mask", "ct_index")}


def test_what_is_left_out_is_logged_once(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"x": sf.Image(series="modality in ('CR', 'DX')", size=(8, 8), missing="drop")}
    with caplog.at_level(logging.INFO, logger="shardflow.loading.loader"), _loader(dataset, fields):
        pass
    lines = [record.getMessage() for record in caplog.records if "field 'x'" in record.getMessage()]
    assert lines == ["field 'x': 10 of 10 samples; delivered 10 frontal; left out 7 lateral"]


@pytest.mark.parametrize(("series", "is_warned"), [("modality == 'CT'", True), ("kind == 'volume'", False)])
def test_a_localizer_in_place_of_other_images_is_a_warning(
    dataset: Dataset, caplog: pytest.LogCaptureFixture, series: str, *, is_warned: bool
) -> None:
    field = sf.Slices(series=series, num_slices=2, size=(8, 8), missing="drop")
    with caplog.at_level(logging.WARNING, logger="shardflow.loading.loader"), _loader(dataset, {"x": field}):
        pass
    lines = [record.getMessage() for record in caplog.records if "localizer" in record.getMessage()]
    assert len(lines) == is_warned
    assert all("delivers localizer images and leaves out" in line for line in lines)


def test_a_dataset_and_a_batch_spec_are_asked_for_by_name(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"sf\.open\(path\), got str"):
        Loader("data", split="train", batch=SPEC, seed=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"BatchSpec\.simple.* got int"):
        Loader(dataset, split="train", batch=2, seed=1)  # type: ignore[arg-type]


def test_no_pixel_loses_bits_unless_asked(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    everything = {"x": sf.Image(num_images="all", series="kind != 'localizer'")}
    with _loader(dataset, everything) as loader:
        batch = next(iter(loader))
        assert all(image.dtype == np.int32 for images in batch["x"] for image in images)
    narrow = {"x": sf.Image(series="modality == 'DX'", size=(8, 8), dtype="uint8", missing="drop")}
    with _loader(dataset, narrow) as loader:
        for _ in loader:
            pass
        assert loader.counters.snapshot()["saturated"]["num_items"] > 0
    assert "leave out its dtype" in caplog.text


def test_a_state_of_other_fields_is_refused_unless_accepted(dataset: Dataset) -> None:
    small = {"ct": sf.Slices(series="kind == 'volume'", num_slices=2, size=(8, 8), missing="pad")}
    large = {"ct": sf.Slices(series="kind == 'volume'", num_slices=2, size=(12, 12), missing="pad")}
    with _loader(dataset, small) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with _loader(dataset, large) as loader, pytest.raises(StateError, match="accept_content_change"):
        loader.load_state_dict(state)
    with _loader(dataset, large, accept_content_change=True) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader))["ct"].shape[-1] == 12


def test_default_fields_deliver_every_picture_the_first_volume_and_the_report(dataset: Dataset) -> None:
    delivered: dict[str, int] = {"pictures": 0, "slices": 0, "reports": 0}
    with _loader(dataset, None) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                cases = case_series(number)
                pictures = [one for one in batch["image"][slot] if one is not None]
                if number % 4 == 1:  # CT: the volume acquired first, and no localizer
                    assert not pictures
                    assert np.array_equal(batch["slices"][slot][:, 0], pixels_of(number, 1))
                    delivered["slices"] += 1
                else:
                    assert len(pictures) == sum(case.shape[0] for case in cases)
                    assert not len(batch["slices"][slot])
                    delivered["pictures"] += len(pictures)
                assert batch["report_mask"][slot] == (number % 4 != 2)
                delivered["reports"] += int(batch["report_mask"][slot])
    assert delivered == {"pictures": 4 * 2 + 3 + 3 * 2, "slices": 4, "reports": 11}
    assert batches_of(_loader(dataset, None, execution="process")) == batches_of(_loader(dataset, None))


def test_default_fields_are_those_that_the_population_has(dataset: Dataset) -> None:
    for where, names in (
        ("facts.modality == 'CT'", {"slices", "report"}),
        ("facts.modality == 'DX'", {"image", "report"}),
        ("not facts.has_report", {"image"}),
    ):
        with Loader(dataset, split="train", batch=SPEC, seed=5, fields=None, where=where) as loader:
            batch = next(iter(loader))
            assert {name for name in batch if name in {"image", "slices", "report"}} == names


def test_default_fields_of_images_need_the_series_table(tmp_path: Path) -> None:
    dataset = Dataset.open(make_dataset(tmp_path / "a"))
    with pytest.raises(ConfigError, match="attach DATASET --facts"):
        _loader(dataset, None)
    with pytest.raises(ConfigError, match="leave it out for the default fields"):
        _loader(dataset, "default")


def _doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"].astype(np.int32) * 2}


def test_a_torch_data_loader_takes_units_and_transforms(dataset: Dataset) -> None:
    data = pytest.importorskip("torch.utils.data")
    from shardflow.loading.torch_dataset import ShardIterableDataset

    settings: dict[str, Any] = {"split": "train", "batch": SPEC, "seed": 5, "unit": "image"}
    settings |= {"fields": {"x": sf.Image(size=(8, 8))}, "transform": _doubled}
    with Loader(dataset, **settings) as loader:
        expected = [(batch.info.sample_keys, batch["x"].tobytes()) for batch in loader]
    batches = data.DataLoader(ShardIterableDataset(dataset, **settings), batch_size=None)
    assert [(batch.info.sample_keys, batch["x"].tobytes()) for batch in batches] == expected


def test_frameworks_that_rebuild_a_mapping_get_a_dict(dataset: Dataset) -> None:
    torch = pytest.importorskip("torch")
    with _loader(dataset) as loader:
        batch = next(iter(loader))
        assert type(batch)({"ct": 1}) == {"ct": 1}  # type: ignore[call-arg, arg-type]
        converted = torch.utils.data.default_convert(batch)
        assert type(converted) is dict
        assert {*converted} == {*batch}
        assert torch.equal(converted["ct"], torch.from_numpy(batch["ct"]))


def test_a_batch_is_a_mapping(dataset: Dataset) -> None:
    with _loader(dataset) as loader:
        batch = next(iter(loader))
        assert isinstance(batch, Mapping)
        assert {*FIELDS} <= {*dict(batch)}
        assert len(batch) == len(dict(batch))
        assert (batch.info.step, batch.info.epoch, batch.num_slots) == (0, 0, 2)
        with pytest.raises(KeyError, match="it has frontal"):
            batch["image"]
