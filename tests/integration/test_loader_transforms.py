"""Transforms of samples: what they return is what a batch holds, equal on every way there."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ConfigError, SampleError, StateError
from shardflow.format import Dataset
from shardflow.loading import Batch, Loader
from shardflow.sampling import BatchSpec
from tests import sample_transforms as made
from tests.factories import sample_key
from tests.field_cases import case_series, make_case_dataset
from tests.integration.loader_support import (
    batches_of,
    check_everywhere,
    flip_bit,
    locate,
    number_of,
    open_loader,
)

NUM_SAMPLES = 14
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
FIELDS: Mapping[str, sf.Field] = {
    "image": sf.Image(series="modality in ('CR', 'DX')", size=(10, 8), missing="pad"),
    "report": sf.Text(missing="pad"),
}
NATIVE: Mapping[str, sf.Field] = {
    "views": sf.Image(series="modality in ('CR', 'DX')", num_images="all", missing="pad"),
    "report": sf.Text(missing="pad"),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_case_dataset(tmp_path_factory.mktemp("transforms") / "a", num_samples=NUM_SAMPLES)


def _loader(dataset: Dataset, transform: Any = None, **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, settings.pop("fields", FIELDS), transform=transform, **settings)


def _by_key(loader: Loader, name: str) -> dict[str, Any]:
    """Return an entry by sample, copied."""
    with loader:
        return {
            key: np.array(batch[name][slot]) if isinstance(batch[name], np.ndarray) else batch[name][slot]
            for batch in loader
            for slot, key in enumerate(batch.info.sample_keys)
            if key is not None and batch.info.weight[slot]
        }


# ---- what a transform returns is used ------------------------------------------------------------


def test_a_rebound_entry_and_a_new_dict_take_effect(dataset: Dataset) -> None:
    def rebind(sample: dict[str, Any]) -> dict[str, Any]:
        sample["image"] = sample["image"].astype(np.float32) * 2
        return sample

    def new(sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": sample["image"].astype(np.float32) * 2}

    plain = _by_key(_loader(dataset), "image")
    for transform in (rebind, new):
        found = _by_key(_loader(dataset, transform), "image")
        assert found.keys() == plain.keys()
        for key, image in found.items():
            assert image.dtype == np.float32
            assert np.array_equal(image, plain[key].astype(np.float32) * 2)
    in_place = _by_key(_loader(dataset, made.change_in_place), "image")
    assert all(np.array_equal(in_place[key], image + np.uint16(7)) for key, image in plain.items())
    with _loader(dataset, new) as loader:
        assert {*next(iter(loader))} == {"image"}
    with _loader(dataset, rebind) as loader:
        assert {*next(iter(loader))} == {"image", "image_mask", "image_range", "report", "report_mask"}


def test_new_keys_shapes_and_dtypes_are_delivered(dataset: Dataset) -> None:
    plain = _by_key(_loader(dataset), "image")
    with _loader(dataset, made.mark) as loader:
        for batch in loader:
            assert batch["image"].shape == (2, 1, 6, 5)
            assert (batch["offset"].shape, batch["offset"].dtype) == ((2,), np.int64)
            for slot, key in enumerate(batch.info.sample_keys):
                if key is None:
                    assert not batch["image"][slot].any()
                    assert (batch["report"][slot], batch["report_words"][slot]) == ("", None)
                    continue
                offset = int(batch["offset"][slot])
                wanted = plain[key][:, 1:7, 2:7].astype(np.float32) + offset
                assert np.array_equal(batch["image"][slot], wanted)
                assert batch["key"][slot] == key
                assert batch["num_series"][slot] == len(case_series(number_of(key)))
                assert batch["report_words"][slot] == batch["report"][slot].split()


def test_facts_are_plain_values_of_the_series_table(dataset: Dataset) -> None:
    seen: dict[str, Any] = {}
    with _loader(dataset, _Look(seen)) as loader:
        for _ in loader:
            pass
    seen.pop("synthetic")
    assert {*map(number_of, seen)} == {*range(NUM_SAMPLES)}
    for key, facts in seen.items():
        cases = case_series(number_of(key))
        assert [one["modality"] for one in facts] == [case.modality for case in cases]
        assert [(one["rows"], one["columns"]) for one in facts] == [case.shape[1:3] for case in cases]
        for one in facts:
            assert {*map(type, one.values())} <= {str, int, float, bool, list}
    assert [one["role"] for one in seen[sample_key(0)]] == ["lateral", "frontal"]
    assert "has_contrast" not in seen[sample_key(0)][0]
    assert seen[sample_key(1)][1]["has_contrast"] is True
    assert seen[sample_key(3)][0]["image_roles"] == ["frontal", "lateral"]


class _Look:
    """Notes the facts of each sample; its copies share the notes."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self.seen = seen

    def __deepcopy__(self, memo: Any) -> _Look:
        return self

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.seen[sample["__key__"]] = sample["__facts__"]
        return sample


# ---- equal on every way there --------------------------------------------------------------------


def _variants() -> list[tuple[Any, dict[str, Any]]]:
    return [
        (made.mark, {}),
        (made.native_crop, {"fields": NATIVE}),
        (made.mark, {"collate": made.pad_to_longest}),
    ]


@pytest.mark.parametrize("variant", [0, 1, 2], ids=["fixed", "varying", "collated"])
def test_content_is_equal_on_anynumber_of_of_ranks_in_every_execution_and_after_a_resume(
    dataset: Dataset, variant: int
) -> None:
    transform, settings = _variants()[variant]
    whole = check_everywhere(lambda **more: _loader(dataset, transform, **settings, **more))
    assert len({str(value) for batch in whole.values() for value in batch.items()}) > len(whole)


def test_outputs_of_varying_shape_are_lists(dataset: Dataset) -> None:
    plain = _by_key(_loader(dataset, fields=NATIVE), "views")
    with _loader(dataset, made.native_crop, fields=NATIVE) as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                wanted = plain[key] if key is not None else []
                assert len(batch["views"][slot]) == len(wanted)
                for image, whole in zip(batch["views"][slot], wanted, strict=True):
                    assert np.array_equal(image, whole[:, :, 1:])
                if wanted:
                    assert np.array_equal(batch["first"][slot], wanted[0][:, ::2])
                else:
                    assert batch["first"][slot] is None


def test_random_choices_change_with_the_epoch(dataset: Dataset) -> None:
    first = _by_key(_loader(dataset, made.mark), "offset")
    loader = _loader(dataset, made.mark)
    loader.set_epoch(1)
    assert {key: int(value) for key, value in _by_key(loader, "offset").items()} != {
        key: int(value) for key, value in first.items()
    }


def test_a_bad_member_masks_its_slot_and_nothing_else(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a", num_samples=NUM_SAMPLES)
    whole = batches_of(_loader(dataset, made.mark))
    path, offset, num_bytes = locate(dataset, 4, "s001.i0000.b2nd")
    flip_bit(path, offset + num_bytes // 2)
    first = _loader(Dataset.open(tmp_path / "a"), made.mark)
    damaged = batches_of(first)
    for place, batch in damaged.items():
        is_bad = [key == sample_key(4) for key in batch["keys"]]
        assert batch["weight"] == [
            float(key is not None and not bad) for key, bad in zip(batch["keys"], is_bad, strict=True)
        ]
        if not any(is_bad):
            assert batch == whole[place]
        else:
            assert batch["report"][is_bad.index(True)] == ""
    replayed = _loader(Dataset.open(tmp_path / "a"), made.mark)
    replayed.load_masks(first.masks())
    assert batches_of(replayed) == damaged


# ---- contract ------------------------------------------------------------------------------------


def test_outputs_count_against_prefetch_bytes(dataset: Dataset) -> None:
    def enlarge(sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": np.zeros((256, 1024), np.float32)}  # 1 MiB a sample, 2 a micro-batch

    def most_buffered(transform: Any) -> int:
        with _loader(dataset, transform, prefetch_bytes=5 << 20) as loader:
            window = loader.counters.window()
            for _ in loader:
                time.sleep(0.02)  # let the threads work ahead as far as they may
            return int(window.take()[1]["buffered_bytes"].most)

    assert 2 << 20 <= most_buffered(enlarge) <= 5 << 20


def test_a_probe_calls_once_and_leaves_global_generators_as_they_were(dataset: Dataset) -> None:
    calls = []

    def count(sample: dict[str, Any]) -> dict[str, Any]:
        calls.append(sample["__key__"])
        return sample

    state = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    with _loader(dataset, count):
        assert calls == ["synthetic"]
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index]  # noqa: NPY002


def test_a_sample_that_deviates_is_an_error_with_key_and_both_shapes(dataset: Dataset) -> None:
    with (
        _loader(dataset, made.image_of_another_shape) as loader,
        pytest.raises(
            SampleError, match=r"image_of_another_shape.*'image' as uint16 \(1, 9, 8\).*uint16 \(1, 10, 8\)"
        ) as caught,
    ):
        list(loader)
    assert any(sample_key(number) in str(caught.value) for number in range(NUM_SAMPLES))
    declared = {"image": {"dtype": "uint16", "max_shape": (1, 10, 8)}}
    found = _by_key(_loader(dataset, made.image_of_another_shape, outputs=declared), "image")
    assert {one.shape for one in found.values()} == {(1, 9, 8)}


def test_declared_outputs_stand_in_for_a_probe(dataset: Dataset) -> None:
    def needs_a_report(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] == "synthetic":
            raise ValueError
        return {"length": len(sample["report"])}

    with pytest.raises(ConfigError, match=r"needs_a_report failed.*ValueError.*declare outputs="):
        _loader(dataset, needs_a_report)
    found = _by_key(_loader(dataset, needs_a_report, outputs={"length": ("int64", ())}), "length")
    assert found.keys() == {sample_key(number) for number in range(NUM_SAMPLES)}


# ---- slips ---------------------------------------------------------------------------------------


def test_returning_none_is_one_sentence_before_step_0(dataset: Dataset) -> None:
    def forgets(sample: dict[str, Any]) -> None:
        sample["image"] += 1

    with pytest.raises(ConfigError, match=r"forgets returned None.*in place\? Then return the sample"):
        _loader(dataset, forgets)
    with pytest.raises(ConfigError, match="returned None"):
        _loader(dataset, forgets, outputs={"image": ("uint16", (1, 10, 8))})


@pytest.mark.parametrize(
    ("transform", "settings", "sentence"),
    [
        (5, {}, "got int"),
        ("tests.sample_transforms", {}, "package.module:function"),
        ("tests.sample_transforms:nothing", {}, "AttributeError"),
        (lambda sample: [sample], {}, "returned list"),
        (lambda sample: {"weight": 1}, {}, "choose another name"),
        (lambda sample: {"x": object()}, {}, "'x' as object"),
        (lambda sample: {"x": np.array(["a"])}, {}, "a batch cannot hold"),
        (lambda sample: {}, {}, "returned no entry"),
        (lambda sample: sample, {"outputs": {"x": "float32"}}, r"outputs\['x'\] is \(dtype, shape\)"),
        (lambda sample: sample, {"collate": lambda samples: None}, "return a dict"),
        (lambda sample: sample, {"execution": "workers"}, "package.module:name"),
        (None, {"collate": 3}, "collate= is a function"),
    ],
)
def test_a_slip_is_one_sentence_before_step_0(
    dataset: Dataset, transform: Any, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _loader(dataset, transform, **settings)


def test_an_error_names_transform_and_key_and_quotes_nothing(dataset: Dataset) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"] != "synthetic":
            raise ValueError(sample["report"])
        return sample

    with (
        _loader(dataset, fails) as loader,
        pytest.raises(
            SampleError,
            match=r"The transform fails failed on sample .*: ValueError in test_loader_transforms.py",
        ) as caught,
    ):
        list(loader)
    assert "report of study" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


# ---- copies, generators, identity ----------------------------------------------------------------


def test_each_thread_has_a_copy(dataset: Dataset) -> None:
    original = made.Scale(2.0)
    batches_of(_loader(dataset, original, num_threads=4))
    assert original.num_calls == 0
    with pytest.raises(ConfigError, match=r"cannot be copied \(TypeError\)"):
        _loader(dataset, _WithLock())


class _WithLock:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def test_global_generators_need_worker_processes_and_are_seeded_there(dataset: Dataset) -> None:
    for execution in ("threads", "process"):
        with pytest.raises(ConfigError, match=r"global_noise draws.*random and numpy.random.*'workers'"):
            _loader(dataset, made.global_noise, execution=execution)
    one = _by_key(_loader(dataset, made.global_noise, execution="workers", num_threads=1), "noise")
    three = _by_key(_loader(dataset, made.global_noise, execution="workers", num_threads=3), "noise")
    assert one == three
    assert len({float(value) for value in one.values()}) == NUM_SAMPLES
    with _loader(dataset, made.global_noise, execution="workers") as loader:
        assert loader.tunables.limits()["loader.execution"].choices == ("workers",)


def test_a_list_is_applied_in_order_and_a_name_is_imported(dataset: Dataset) -> None:
    steps = [made.Scale(2.0), made.Scale(0.5), "tests.sample_transforms:change_in_float"]
    with pytest.raises(ConfigError, match="AttributeError"):
        _loader(dataset, steps)
    plain = _by_key(_loader(dataset), "image")
    found = _by_key(_loader(dataset, [made.Scale(4.0), made.Scale(0.5)]), "image")
    assert all(np.array_equal(found[key], image * np.float32(2)) for key, image in plain.items())
    by_name = batches_of(_loader(dataset, "tests.sample_transforms:mark"))
    assert by_name == batches_of(_loader(dataset, made.mark))


def test_a_state_of_another_transform_is_refused_unless_accepted(dataset: Dataset) -> None:
    def state(transform: Any) -> dict[str, Any]:
        with _loader(dataset, transform) as loader:
            return loader.state_dict()

    saved = state(made.Scale(2.0))
    assert saved == state(made.Scale(2.0))
    for other in (None, made.Scale(3.0), made.mark, [made.Scale(2.0), made.mark]):
        assert state(other)["content_id"] != saved["content_id"]
        with _loader(dataset, other) as loader, pytest.raises(StateError, match="accept_content_change"):
            loader.load_state_dict(saved)
    with _loader(dataset, made.Scale(3.0), accept_content_change=True) as loader:
        loader.load_state_dict(saved)


def test_collate_makes_the_batch(dataset: Dataset) -> None:
    with _loader(dataset, made.mark, collate=made.pad_to_longest) as loader:
        for batch in loader:
            assert isinstance(batch, Batch)
            assert {*batch} == {"ids", "image", "count"}
            assert (batch["count"], batch["image"].shape) == (2, (2, 1, 6, 5))
            lengths = []
            for slot, key in enumerate(batch.info.sample_keys):
                number = None if key is None else number_of(key)
                text = "" if number is None or number % 4 == 2 else f"report of study {number}: größer"
                ids = batch["ids"][slot]
                assert ids[ids > 0].tobytes().decode() == text
                lengths.append(len(text.encode()))
            assert batch["ids"].shape == (2, max(lengths))
