"""Units: series and images as samples, each delivered alone, once an epoch, on any number of ranks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ConfigError, SampleError, StateError
from shardflow.fields.units import UnitDataset
from shardflow.format import Dataset
from shardflow.format.facts.units import Unit
from shardflow.loading import Batch, Loader, World
from shardflow.sampling import BatchSpec, CostRule, TokenBudget
from tests.factories import sample_key
from tests.field_cases import case_series, make_case_dataset, pixels_of
from tests.integration.loader_support import (
    batches_of,
    check_everywhere,
    flip_bit,
    frozen,
    locate,
    number_of,
    open_loader,
)

pytestmark = pytest.mark.fast

NUM_SAMPLES = 14
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
ALL = "modality is not missing"
FIELDS: Mapping[str, sf.Field] = {
    "image": sf.Image(series=ALL, num_images="all", missing="pad"),
    "report": sf.Text(missing="pad"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_case_dataset(tmp_path_factory.mktemp("units") / "a", num_samples=NUM_SAMPLES)


def _loader(source: Any, unit: str, *, fields: Mapping[str, sf.Field] = FIELDS, **settings: Any) -> Loader:
    where = {"where": ALL} if isinstance(source, Dataset) else {}
    return open_loader(source, settings.pop("batch", SPEC), fields, unit=unit, **{**where, **settings})


def _rows(unit: str) -> set[tuple[int, ...]]:
    """Return every series or image of the dataset, from what was written."""
    found: set[tuple[int, ...]] = set()
    for number in range(NUM_SAMPLES):
        for series, case in enumerate(case_series(number)):
            if unit == "series":
                found.add((number, series))
            else:
                found |= {(number, series, image) for image in range(case.shape[0])}
    return found


def _units(batch: Batch) -> list[tuple[int, tuple[int, ...]]]:
    """Return the slots that hold a sample, and its place."""
    return [
        (slot, (number_of(one.study_key), *(each for each in (one.series, one.image) if each is not None)))
        for slot, one in enumerate(batch.info.units)
        if one is not None
    ]


@pytest.mark.parametrize("unit", ["series", "image"])
def test_every_row_is_delivered_alone_and_once_with_the_text_of_its_study(
    dataset: Dataset, unit: str
) -> None:
    seen: Counter[tuple[int, ...]] = Counter()
    keys: Counter[str] = Counter()
    with _loader(dataset, unit) as loader:
        for batch in loader:
            for slot, (number, series, *image) in _units(batch):
                stored = pixels_of(number, series)
                expected = stored if unit == "series" else stored[image[0] : image[0] + 1]
                found = batch["image"][slot]
                assert len(found) == len(expected) == batch["image_mask"][slot].sum()
                for one, wanted in zip(found, expected, strict=True):
                    assert np.array_equal(one, wanted[None])
                text = "" if number % 4 == 2 else f"report of study {number}: größer"
                assert batch["report"][slot] == text
                seen[number, series, *image] += 1
                keys[batch.info.sample_keys[slot] or ""] += 1
    assert set(seen) == _rows(unit)
    assert {*seen.values()} == {1}
    assert {*keys.values()} == {1}


@pytest.mark.parametrize("unit", ["series", "image"])
def test_rows_are_equal_on_any_number_of_ranks_in_every_execution_and_after_a_resume(
    dataset: Dataset, unit: str
) -> None:
    check_everywhere(lambda **settings: _loader(dataset, unit, **settings))


def test_where_selects_series_and_single_images_of_series_with_several_roles(dataset: Dataset) -> None:
    frontal = {(number, 1, 0) for number in range(0, NUM_SAMPLES, 4)}
    frontal |= {(number, 0, 0) for number in range(NUM_SAMPLES) if number % 4 in (2, 3)}
    lateral = {(number, 0, 0) for number in range(0, NUM_SAMPLES, 4)}
    lateral |= {(number, 0, 1) for number in range(3, NUM_SAMPLES, 4)}
    for role, expected in {"frontal": frontal, "lateral": lateral}.items():
        where = f"role == '{role}'"
        with _loader(dataset, "image", where=where, fields={"image": sf.Image(series=where)}) as loader:
            found = set()
            for batch in loader:
                for slot, place in _units(batch):
                    number, series, image = place
                    assert np.array_equal(batch["image"][slot], pixels_of(number, series)[image][None])
                    found.add(place)
        assert found == expected
    with _loader(dataset, "series", where="modality == 'CT' and num_slices >= 6") as loader:
        found = {place for batch in loader for _, place in _units(batch)}
    assert found == {(number, 0) for number in range(1, NUM_SAMPLES, 4)}


def test_no_expression_leaves_out_localizers_and_says_so(
    dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="shardflow"), _loader(dataset, "series", where=None) as loader:
        found = {place for batch in loader for _, place in _units(batch)}
    num_localizers = len(range(1, NUM_SAMPLES, 4))
    assert found == _rows("series") - {(number, 2) for number in range(1, NUM_SAMPLES, 4)}
    assert f"{num_localizers} series left out" in caplog.text


def test_plans_belong_to_the_unit_and_the_selected_rows(dataset: Dataset) -> None:
    def plan_id(unit: str, where: str | None = ALL) -> str:
        return _loader(dataset, unit, where=where).plan_id

    found = [
        plan_id("study", None),
        plan_id("series"),
        plan_id("image"),
        plan_id("series", "modality == 'CT'"),
    ]
    assert len({*found}) == len(found)
    assert plan_id("series", "modality == 'CT'") == plan_id("series", "modality in ('CT',)")
    state = _loader(dataset, "series").state_dict()
    with pytest.raises(StateError, match="view of the loader state"):
        _loader(dataset, "image").load_state_dict(state)


@pytest.mark.parametrize("unit", ["series", "image"])
def test_a_token_budget_charges_for_the_row(dataset: Dataset, unit: str) -> None:
    rule = CostRule(
        text_tokens_per_1000_bytes=0, image_tokens_per_slice=10, max_slices=1000, tokens_per_sample=1
    )
    budget = TokenBudget(max_tokens=60, max_samples=8, cost=rule)
    spec = BatchSpec(budget=budget, micro_batches_per_step=2, tail="mask", lanes=2)
    seen: Counter[tuple[int, ...]] = Counter()
    with _loader(dataset, unit, batch=spec) as loader:
        for batch in loader:
            places = [place for _, place in _units(batch)]
            seen.update(places)
            lengths = [
                10 * (1 if unit == "image" else case_series(number)[series].shape[0]) + 1
                for number, series, *_ in places
            ]
            assert len(places) <= 1 or max(lengths) * len(lengths) <= budget.max_tokens
    assert seen == Counter(_rows(unit))
    whole = batches_of(_loader(dataset, unit, batch=spec))
    for rank in range(2):
        part = batches_of(_loader(dataset, unit, batch=spec, world=World(rank=rank, world_size=2)))
        assert part == {place: whole[place] for place in part}


def _blend(folder: Path, dataset: Dataset) -> Any:
    root = dataset.store.url.removeprefix("file://")
    (folder / "blend.toml").write_text(
        f"""
[[component]]
dataset = "{root}"
unit = "series"
where = "modality == 'CT'"
repeat = 2.0

[[component]]
dataset = "{root}"
unit = "image"
where = "modality == 'DX'"

[[component]]
dataset = "{root}"
""",
        encoding="utf-8",
    )
    return sf.blend(folder / "blend.toml")


def test_a_blend_mixes_series_images_and_studies(dataset: Dataset, tmp_path: Path) -> None:
    blend = _blend(tmp_path, dataset)
    seen: Counter[tuple[int, ...]] = Counter()
    with _loader(blend, "study") as loader:
        for batch in loader:
            for slot, place in _units(batch):
                number, rest = place[0], place[1:]
                seen[batch.components[slot], *place] += 1
                stored = [pixels_of(number, series) for series in range(len(case_series(number)))]
                count = sum(map(len, stored)) if not rest else len(stored[rest[0]]) if len(rest) == 1 else 1
                assert len(batch["image"][slot]) == count
    expected = Counter[tuple[int, ...]]((2, number) for number in range(NUM_SAMPLES))
    expected.update((1, *place) for place in _rows("image") if place[0] % 4 == 0)
    expected.update((0, *place) for place in _rows("series") if place[0] % 4 == 1 for _ in range(2))
    assert seen == expected
    whole = batches_of(_loader(blend, "study"))
    assert batches_of(_loader(blend, "study", execution="process")) == whole
    parts: dict[tuple[int, int], Any] = {}
    for rank in range(2):
        parts |= batches_of(_loader(blend, "study", world=World(rank=rank, world_size=2)))
    assert {place: parts[place] for place in whole} == whole


def test_a_bad_member_masks_the_rows_that_need_it_alone(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a", num_samples=NUM_SAMPLES)
    path, offset, num_bytes = locate(dataset, 5, "s000.i0002.b2nd")
    flip_bit(path, offset + num_bytes // 2)
    opened = Dataset.open(tmp_path / "a")
    for unit, bad in (("series", (5, 0)), ("image", (5, 0, 2))):
        with _loader(opened, unit) as loader:
            for batch in loader:
                for slot, place in _units(batch):
                    assert batch.info.weight[slot] == (place != bad)


def test_a_row_without_the_content_of_a_field_is_dropped_or_padded(dataset: Dataset) -> None:
    wanted = {"ct": sf.Slices(series="kind == 'volume'", num_slices=2, size=(8, 8))}
    with pytest.raises(ConfigError, match="samples have no image for the field 'ct'"):
        _loader(dataset, "series", fields=wanted)
    dropped = {"ct": sf.Slices(series="kind == 'volume'", num_slices=2, size=(8, 8), missing="drop")}
    with _loader(dataset, "series", fields=dropped) as loader:
        found = {place for batch in loader for _, place in _units(batch)}
    assert found == {(number, series) for number in range(1, NUM_SAMPLES, 4) for series in (0, 1)}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"unit": "slice"}, "unit is one of 'study', 'series', 'image', 'window', 'entity'"),
        (
            {"unit": "study", "where": "modality == 'CT'"},
            r"write facts.modality of the study, or any\(series.m",
        ),
        ({"unit": "series", "where": "modalty == 'CT'"}, "did you mean modality"),
        ({"unit": "series", "where": "modality == 'MR'"}, "selects no series"),
        ({"unit": "entity", "where": None}, "shardflow entities"),
    ],
)
def test_a_slip_is_one_sentence_before_step_0(
    dataset: Dataset, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _loader(dataset, **settings)


def test_keys_name_the_place_and_find_the_row(dataset: Dataset) -> None:
    images = UnitDataset.beside(dataset, "image", ALL)
    for row in range(images.samples.num_samples):
        assert images.samples.find(images.samples.sample_key(row)) == row
    key = images.samples.sample_key(0)
    with _loader(dataset, "image") as loader:
        units = {unit for batch in loader for unit in batch.info.units}
    assert Unit(sample_key(0), 0, 0) in units
    assert key == f"{sample_key(0)}s0i0"


def test_bytes_of_rows_follow_each_other_and_add_up_to_those_of_the_studies(dataset: Dataset) -> None:
    for unit in ("series", "image"):
        samples = UnitDataset.beside(dataset, unit, ALL).samples
        offset, num_bytes = samples.column("offset_bytes")[:], samples.column("num_bytes")[:]
        same = np.flatnonzero(np.diff(samples.column("shard")[:].astype(np.int64)) == 0)
        assert (offset[same] + num_bytes[same] <= offset[same + 1]).all()
        assert num_bytes.sum() == dataset.studies.column("num_bytes").sum()


EVERY: Mapping[str, sf.Field] = {
    "views": sf.Image(series="modality in ('CR', 'DX')", num_images="all", missing="pad"),
    "ct": sf.Slices(series="kind == 'volume'", num_slices=3, size=(9, 12), sampling="random", missing="pad"),
    "report": sf.Text(missing="pad"),
    "study": sf.Json(member="study.json", max_bytes=1 << 14),
}


@pytest.mark.parametrize("unit", ["study", "series", "image"])
def test_one_sample_equals_that_of_a_loader_in_epoch_0(dataset: Dataset, unit: str) -> None:
    where = None if unit == "study" else ALL
    checked = 0
    with _loader(dataset, unit, where=where, fields=EVERY, seed=11) as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                if key is None:
                    continue
                found = loader.dataset.sample(key, EVERY, seed=11)
                assert found.keys() == dict(batch).keys()
                for name, value in batch.items():
                    assert frozen(found[name]) == frozen(value[slot]), name
                checked += 1
    assert checked == loader.dataset.samples.num_samples


def test_a_dataset_is_indexed_by_key_and_row_with_default_fields(dataset: Dataset) -> None:
    sample = sf.open(dataset.store.url)[sample_key(4)]
    assert sample["report"] == "report of study 4: größer"
    frontal, lateral = pixels_of(4, 1), pixels_of(4, 0)
    for found, expected in zip(sample["image"], (frontal, lateral), strict=True):
        assert np.array_equal(found, expected)
    assert dataset[4]["report"] == sample["report"]
    with pytest.raises(KeyError, match="no sample of this key"):
        dataset["nokey"]
    with pytest.raises(IndexError):
        dataset[NUM_SAMPLES]
    assert (
        dataset[-1]["report"]
        == dataset[NUM_SAMPLES - 1]["report"]
        == f"report of study {NUM_SAMPLES - 1}: größer"
    )
    assert len(dataset) == NUM_SAMPLES
    assert dataset.store.url not in repr(dataset)
    assert f"{NUM_SAMPLES} samples (train {NUM_SAMPLES}), modalities CR, CT, DX>" in repr(dataset)
    with pytest.raises(ConfigError, match="takes a sample key or a row"):
        dataset[1.5]  # type: ignore[index]


def test_one_sample_that_is_dropped_or_damaged_is_an_error(tmp_path: Path) -> None:
    made = make_case_dataset(tmp_path / "a", num_samples=NUM_SAMPLES)
    wanted = {"x": sf.Image(series="role == 'lateral'", missing="drop")}
    assert np.array_equal(made.sample(sample_key(0), wanted)["x"], pixels_of(0, 0))
    with pytest.raises(ConfigError, match="has nothing for the field 'x'; write missing='pad'"):
        made.sample(sample_key(1), wanted)
    # That other samples lack what is required does not matter to one that has it.
    required = {"x": sf.Image(series="role == 'lateral'"), "m": sf.Json(member="study.json")}
    assert np.array_equal(made.sample(sample_key(0), required)["x"], pixels_of(0, 0))
    with pytest.raises(ConfigError, match="has nothing for the field 'x'"):
        made.sample(sample_key(1), required)
    with pytest.raises(SampleError):
        made.sample(sample_key(0), {**required, "n": sf.Json(member="other.json")})
    path, offset, num_bytes = locate(made, 0, "s000.i0000.b2nd")
    flip_bit(path, offset + num_bytes // 2)
    with pytest.raises(SampleError):
        Dataset.open(tmp_path / "a").sample(sample_key(0), wanted)
