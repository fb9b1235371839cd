"""Fields of the previous study: a direct decode of the person's earlier study, equal on every way there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.cli.bench_measure import BenchOptions, measure
from shardflow.cli.plan_tables import fields_report
from shardflow.errors import ConfigError, SampleError
from shardflow.fields.decode import ThreadState
from shardflow.fields.previous import PreviousStudies
from shardflow.format import Dataset
from shardflow.format.facts.making import attach_facts
from shardflow.format.keys import STUDY_FIELD
from shardflow.loading import Loader, Selection, open_blend
from shardflow.loading.binding import bind_fields
from shardflow.loading.rows.selection import select
from shardflow.sampling import BatchSpec, CostRule, TokenBudget
from shardflow.storage import ByteRange, Cache, CacheConfig, CachedStore
from shardflow.telemetry import StageCounters
from tests.factories import MadeSample, make_dataset, sample_key
from tests.field_cases import case_series, make_case, pixels_of
from tests.integration.loader_support import (
    check_everywhere,
    flip_bit,
    hooked,
    locate,
    number_of,
    open_loader,
    resized,
    slots_of,
)

pytestmark = pytest.mark.fast

SPLITS = {"train": range(14), "val": range(14, 22)}
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
FIELDS: Mapping[str, sf.Field] = {
    "frontal": sf.Image(series="role == 'frontal'", size=(10, 8), missing="pad"),
    "prior": sf.Image(series="role == 'frontal'", size=(10, 8), study="previous", missing="pad"),
    "prior_views": sf.Image(num_images="all", study="previous", missing="pad"),
    "prior_ct": sf.Slices(
        series="kind == 'volume'",
        num_slices=3,
        sampling="random",
        padding="longest",
        study="previous",
        missing="pad",
    ),
    "prior_report": sf.Text(study="previous", missing="pad"),
    "prior_study": sf.Json(member=STUDY_FIELD, study="previous", missing="pad"),
}

_UNKNOWN: Any = "next"


def _day(number: int) -> int:
    return number * 5 % 14


def _make(number: int, **settings: Any) -> MadeSample:
    """Make study ``number`` of one of three persons; days of a person are in no order of rows."""
    made = make_case(number, **settings)
    study = json.loads(made.fields[STUDY_FIELD])
    study["patient"], study["dates"] = {"patient_key": "abc"[number % 3] * 8}, {"study_day": _day(number)}
    return replace(made, fields={**made.fields, STUDY_FIELD: json.dumps(study).encode()})


def _earlier(number: int) -> int | None:
    """Return the person's study of the latest earlier day in the same split."""
    split = next(rows for rows in SPLITS.values() if number in rows)
    known = [one for one in split if one % 3 == number % 3 and _day(one) < _day(number)]
    return max(known, key=_day, default=None)


def _dataset(folder: Path) -> Dataset:
    sizes = {name: len(rows) for name, rows in SPLITS.items()}
    dataset = Dataset.open(make_dataset(folder, splits=sizes, make=_make))
    attach_facts(dataset)
    return dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return _dataset(tmp_path_factory.mktemp("previous") / "a")


def _loader(dataset: Dataset | Selection, fields: Any = FIELDS, **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, fields, **settings)


def _frontal(number: int | None) -> Any:
    """Return the frontal image of a study as it is delivered; None if it has none."""
    if number is None or number % 4 == 1:
        return None
    return resized(pixels_of(number, 1 if number % 4 == 0 else 0)[0].astype(np.uint16), (10, 8))


@pytest.mark.parametrize("split", SPLITS)
def test_a_slot_holds_a_direct_decode_of_the_earlier_study_of_its_split(dataset: Dataset, split: str) -> None:
    num_priors = num_slots = 0
    with _loader(dataset, split=split) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                earlier, num_slots = _earlier(number), num_slots + 1
                num_priors += earlier is not None
                for name, of in (("frontal", number), ("prior", earlier)):
                    wanted = _frontal(of)
                    assert batch[f"{name}_mask"][slot] == (wanted is not None)
                    assert np.array_equal(
                        batch[name][slot, 0], np.zeros((10, 8)) if wanted is None else wanted
                    )
                texts = {None: ""} if earlier is None or earlier % 4 == 2 else {}
                assert batch["prior_report"][slot] == texts.get(None, f"report of study {earlier}: größer")
                described = batch["prior_study"][slot]
                assert batch["prior_study_mask"][slot] == (earlier is not None)
                assert described is None if earlier is None else number_of(described["sample_key"]) == earlier
                cases = [] if earlier is None else case_series(earlier)
                is_volume = [case.kind == "volume" for case in cases]
                assert batch["prior_ct_mask"][slot].sum() == 3 * any(is_volume)
                if earlier is not None and any(is_volume):
                    stored = pixels_of(earlier, 1)  # acquired first
                    wanted = stored[batch["prior_ct_index"][slot]][:, None]
                    assert np.array_equal(batch["prior_ct"][slot], wanted)
    assert num_slots == len(SPLITS[split])
    assert 0 < num_priors < num_slots


def test_batches_are_equal_on_any_number_of_ranks_in_every_execution_and_after_a_resume(
    dataset: Dataset,
) -> None:
    check_everywhere(partial(_loader, dataset))


def _add(sample: dict[str, Any]) -> dict[str, Any]:
    return {"both": sample["frontal"].astype(np.int64) + sample["prior"]}


def test_a_transform_gets_the_earlier_study_as_well(dataset: Dataset) -> None:
    fields = {name: FIELDS[name] for name in ("frontal", "prior")}
    with _loader(dataset, fields) as plain, _loader(dataset, fields, transform=_add) as loader:
        for before, batch in zip(plain, loader, strict=True):
            assert np.array_equal(batch["both"], before["frontal"].astype(np.int64) + before["prior"])


def test_a_flipped_bit_masks_the_study_and_those_whose_earlier_study_it_is(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path / "a")
    later = [number for number in SPLITS["train"] if (_earlier(number) or 1) % 4 == 0]
    damaged = _earlier(later[0])
    assert damaged is not None
    path, offset, num_bytes = locate(dataset, damaged, "s001.i0000")
    flip_bit(path, offset + num_bytes // 2)
    fields = {name: FIELDS[name] for name in ("frontal", "prior")}
    with _loader(dataset, fields) as loader:
        weights = {
            number: float(batch.info.weight[slot]) for batch in loader for slot, number in slots_of(batch)
        }
        masks = loader.masks()
    users = {number for number in SPLITS["train"] if _earlier(number) == damaged}
    assert users
    assert {number for number, weight in weights.items() if not weight} == {damaged, *users}
    reasons = {number_of(str(row["key"])): row["reason"] for row in masks}
    assert reasons.pop(damaged) == "CHECKSUM_MISMATCH"
    assert set(reasons.values()) == {"PREVIOUS_STUDY_CHECKSUM_MISMATCH"}
    # Without a field of its own image only those that use it as the earlier study are masked.
    with _loader(dataset, {"prior": FIELDS["prior"]}) as loader:
        masked = {
            number for batch in loader for slot, number in slots_of(batch) if not batch.info.weight[slot]
        }
    assert masked == users
    with (
        _loader(dataset, {"prior": FIELDS["prior"]}, on_bad_sample="raise") as loader,
        pytest.raises(SampleError, match="the previous study of sample"),
    ):
        list(loader)
    with _loader(dataset, fields) as resumed:
        resumed.load_masks(masks)
        again = {number: batch.info.weight[slot] for batch in resumed for slot, number in slots_of(batch)}
    assert again == weights


def test_samples_without_an_earlier_study_are_dropped_or_refused(dataset: Dataset) -> None:
    drop = {"prior": sf.Text(study="previous", missing="drop")}
    with _loader(dataset, drop) as loader:
        found = sorted(number for batch in loader for _, number in slots_of(batch))
    kept = [number for number in SPLITS["train"] if (_earlier(number) or 2) % 4 != 2]
    assert found == sorted({*kept, *(n for n in SPLITS["train"] if _earlier(n) == 0)})
    with pytest.raises(ConfigError, match="of 14 samples lack an earlier study"):
        _loader(dataset, {"prior": sf.Text(study="previous")})


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"prior": sf.Text(study="previous", missing="pad")}, {"unit": "series"}, "write unit='study'"),
        (
            {"prior": sf.Text(study="previous", missing="pad")},
            {"where": "facts.study_day == 0"},
            "No sample has an earlier study",
        ),
        ({"prior": sf.Text(study=_UNKNOWN)}, {}, "study is one of 'own', 'previous'"),
        (
            {"image": FIELDS["frontal"], "prior": sf.Mask(like="image", study="previous")},
            {},
            "not for fields of type 'mask'",
        ),
        (
            {"prior": sf.Json(member="study.json", study="previous", missing="drop")},
            {},
            "write missing='pad'",
        ),
    ],
)
def test_what_cannot_be_delivered_is_refused_before_step_0(
    dataset: Dataset, fields: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _loader(dataset, fields, **settings)


def test_a_file_of_fields_says_it_and_the_plan_counts_who_has_none(dataset: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "fields.toml"
    file.write_text(
        '[fields.prior]\ntype = "image"\nseries = "role == \'frontal\'"\nsize = [10, 8]\n'
        'study = "previous"\nmissing = "pad"\n'
    )
    assert sf.read_fields(file) == {"prior": FIELDS["prior"]}
    selection = select(dataset, "train")
    left, bound = bind_fields(selection, sf.read_fields(file), StageCounters())
    counted = fields_report(selection, left, bound)["fields"]["prior"]
    assert counted["missing"] == sum(_frontal(_earlier(number)) is None for number in SPLITS["train"])
    earlier = {_earlier(number) for number in SPLITS["train"]}
    assert counted["delivered"] == {"frontal": sum(_frontal(number) is not None for number in earlier)}


def test_one_sample_and_a_selected_part_have_the_same_earlier_study(dataset: Dataset) -> None:
    fields = {"prior": FIELDS["prior"]}
    number = next(one for one in SPLITS["train"] if _frontal(_earlier(one)) is not None)

    assert np.array_equal(dataset.sample(sample_key(number), fields)["prior"][0], _frontal(_earlier(number)))
    # The earlier study need not be selected itself.
    with _loader(dataset, fields, where=f"facts.study_day == {_day(number)}") as loader:
        (found,) = [batch["prior"][slot, 0] for batch in loader for slot, _ in slots_of(batch)]
    assert np.array_equal(found, _frontal(_earlier(number)))


def test_a_cache_foresees_and_fetches_earlier_studies(dataset: Dataset, tmp_path: Path) -> None:
    config = CacheConfig(directory=tmp_path / "cache", max_bytes=1 << 24, min_free_bytes=0, block_bytes=4096)
    reads: set[tuple[str, ByteRange]] = set()
    origin, store = hooked(
        dataset.store.url, lambda path, ranges: reads.update((path, one) for one in ranges)
    )
    with _loader(origin) as plain:
        batches = list(plain)
    cached = Dataset(CachedStore(store, Cache(config)), dataset.manifest)
    with _loader(cached) as loader:
        numbers = range(loader.plan.num_steps * SPEC.micro_batches_per_step)
        stream, thread = loader._runtime.planner.follow(loader.plan, numbers), ThreadState()
        foreseen = {
            (read.path, one)
            for planned in stream._plan_epoch(loader.plan, numbers, 0)
            for read in stream.locate(planned, thread)
            for one in read.ranges
        }
        stream.close()
        # What is read of the shards themselves is what is fetched ahead, of earlier studies too.
        assert foreseen == {(path, one) for path, one in reads if path.endswith(".tar")}
        for batch, expected in zip(loader, batches, strict=True):
            assert np.array_equal(batch["prior"], expected["prior"])
            assert batch["prior_report"] == expected["prior_report"]
    previous = PreviousStudies(select(dataset, "train"))
    assert [one if one >= 0 else None for one in previous.rows(np.arange(14)).tolist()] == [
        _earlier(number) for number in SPLITS["train"]
    ]


def test_a_cache_keeps_what_is_needed_for_earlier_studies(dataset: Dataset, tmp_path: Path) -> None:
    config = CacheConfig(directory=tmp_path / "cache", max_bytes=1 << 24, min_free_bytes=0, block_bytes=4096)
    cache = Cache(config)
    cached = Dataset(CachedStore(dataset.store, cache), dataset.manifest)
    number = next(one for one in SPLITS["train"] if _frontal(_earlier(one)) is not None)
    where = f"facts.study_day == {_day(number)}"
    with _loader(cached, {"prior": FIELDS["prior"]}, where=where) as loader:
        next(iter(loader))
        planner = loader._runtime.planner
        (one,) = planner._cached
        stream = planner.follow(loader.plan, range(1))
        planner._fill_epoch(loader.plan, 0, [one], stream)
        cache.forecast.report(one.run, 0, 0, 0)
        rows = np.arange(dataset.samples.num_samples)
        steps = cache.forecast.distances(dataset.dataset_id, rows, rows + 1, is_scan=True)
        stream.close()
    assert set(np.flatnonzero(np.isfinite(steps)).tolist()) == {number, _earlier(number)}


def test_a_blend_keeps_to_the_component(dataset: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "blend.toml"
    file.write_text(
        "".join(f'[[component]]\ndataset = "{dataset.store.url}"\nsplit = "{split}"\n' for split in SPLITS)
    )
    num_priors = 0
    with _loader(open_blend(file), {"prior": FIELDS["prior"], "study": FIELDS["prior_study"]}) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                earlier = _earlier(number)
                wanted, study = _frontal(earlier), batch["study"][slot]
                assert batch["prior_mask"][slot] == (wanted is not None)
                assert wanted is None or np.array_equal(batch["prior"][slot, 0], wanted)
                assert (study and number_of(study["sample_key"])) == earlier
                num_priors += earlier is not None
    assert num_priors


@pytest.mark.parametrize("is_said", [False, True])
def test_a_token_budget_charges_for_what_is_delivered_of_both_studies(
    dataset: Dataset, tmp_path: Path, *, is_said: bool
) -> None:
    rule = (
        CostRule(image_tokens_per_slice=10, counts_delivered=True)
        if is_said
        else CostRule(image_tokens_per_slice=10, max_slices=99)
    )
    rule = replace(rule, text_tokens_per_1000_bytes=100, max_text_tokens=3, tokens_per_sample=1)
    spec = BatchSpec(
        budget=TokenBudget(max_tokens=90, max_samples=4, cost=rule),
        micro_batches_per_step=4,
        tail="mask",
        lanes=4,
        window_bytes=9000,
    )
    fields = {
        "views": sf.Image(num_images=2, series="modality in ('CR', 'DX')", missing="pad"),
        "prior_tiles": sf.Image(num_images="all", size=(10, 8), tiles=4, study="previous", missing="pad"),
        "prior_ct": sf.Slices(
            series="kind == 'volume'", num_slices=3, sampling="random", study="previous", missing="pad"
        ),
        "prior_report": sf.Text(study="previous", missing="pad"),
        "prior_study": sf.Json(member=STUDY_FIELD, study="previous", missing="pad"),
    }
    fullest = 0
    with open_loader(dataset, spec, fields) as loader:
        for batch in loader:
            lengths = [
                1
                + 10
                * int(sum(batch[f"{name}_mask"][slot].sum() for name in ("views", "prior_tiles", "prior_ct")))
                + min(3, -(-len(batch["prior_report"][slot].encode()) // 10))
                for slot, _ in slots_of(batch)
            ]
            assert len(lengths) < 2 or max(lengths) * len(lengths) <= 90
            fullest = max(fullest, len(lengths))
    assert fullest > 1
    check_everywhere(partial(open_loader, dataset, spec, fields))
    # What is delivered decides the steps, so it is part of the plan's identity; how large it is, is not.
    sized = {**fields, "views": replace(fields["views"], size=(9, 9))}  # type: ignore[call-arg]
    fewer = {**fields, "views": replace(fields["views"], num_images=1)}  # type: ignore[call-arg]
    plans = [open_loader(dataset, spec, one).plan_id for one in (fields, sized, fewer)]
    assert plans[0] == plans[1] != plans[2]


def test_bench_handles_what_is_read_of_earlier_studies(dataset: Dataset) -> None:
    options = BenchOptions(
        split="train",
        num_threads=1,
        num_repeats=1,
        max_bytes=1 << 30,
        fields={name: FIELDS[name] for name in ("frontal", "prior")},
    )
    measured = measure(dataset, options)
    pictures = [one for number in SPLITS["train"] for one in (_frontal(number), _frontal(_earlier(number)))]
    assert measured.num_samples == len(SPLITS["train"])
    assert measured.num_slices == sum(one is not None for one in pictures)
    assert measured.decoded_bytes == sum(
        _stored(one).nbytes
        for number in SPLITS["train"]
        for one in (number, _earlier(number))
        if _frontal(one) is not None
    )


def _stored(number: int | None) -> Any:
    assert number is not None
    return pixels_of(number, 1 if number % 4 == 0 else 0)[0]


def test_what_a_token_budget_cannot_charge_for_is_refused(dataset: Dataset) -> None:
    sized = sf.Slices(sizes=((3, 8, 8, 1), (1, 16, 8, 1)), missing="pad")
    rule = CostRule(buckets=sized.buckets([4, 16]))
    budget = TokenBudget(max_tokens=90, max_samples=4, cost=rule)
    spec = BatchSpec(budget=budget, micro_batches_per_step=4, lanes=4)
    with pytest.raises(ConfigError, match="leave out sizes= of the field"):
        open_loader(dataset, spec, {"ct": sized, "prior": FIELDS["prior"]})
    delivered = CostRule(counts_delivered=True, image_tokens_per_slice=3)
    with pytest.raises(ConfigError, match="drawn sizes of the field 'ct'"):
        open_loader(dataset, replace(spec, budget=replace(budget, cost=delivered)), {"ct": sized})
    with pytest.raises(ConfigError, match="must come without max_slices"):
        CostRule(counts_delivered=True, max_slices=3)
    assert CostRule.from_json(delivered.to_json()) == delivered
    assert "counts_delivered" not in rule.to_json()
