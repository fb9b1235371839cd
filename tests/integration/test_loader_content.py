"""What a batch holds equals a direct decode of the sample's fields, and nothing else was read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

import tests.factories
from shardflow.errors import ConfigError
from shardflow.fields.views import DrawKey
from shardflow.format import Dataset, decode_array, encode_array
from shardflow.loading import ImageView, Loader, LoaderConfig, NativeView
from shardflow.sampling import BatchSpec
from shardflow.storage import ByteRange, LocalStore
from tests.factories import MadeSample, make_dataset, make_sample
from tests.integration.loader_support import hooked, locate

pytestmark = pytest.mark.fast

SPEC = BatchSpec(micro_batch_size=3, micro_batches_per_step=2, tail="mask")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dataset")
    return make_dataset(folder / "a", num_samples=11, samples_per_shard=4, slices=(3, 9), size=(20, 24))


def _loader(dataset: Dataset, **settings: Any) -> Loader:
    return Loader(dataset, split="train", batch=SPEC, seed=5, config=LoaderConfig(**settings))


def _stored(dataset: Dataset, row: int) -> tuple[list[NDArray[Any]], str]:
    """All slices and the report of a sample, by the simple reading path."""
    fields = dataset.read_fields(row)
    slices = [
        decode_array(name.rsplit(".")[-1], data) for name, data in fields.items() if name.startswith("s000")
    ]
    return slices, fields["report.txt"].decode()


@pytest.mark.parametrize("dtype", ["int16", "float32"])
@pytest.mark.parametrize("slice_choice", ["even", "random"])
@pytest.mark.parametrize("size", [(20, 24), (10, 12), (17, 40)])
@pytest.mark.parametrize("num_slices", [1, 4, 12])
def test_images_and_texts_equal_a_direct_decode(
    url: str, num_slices: int, size: tuple[int, int], slice_choice: Any, dtype: Any
) -> None:
    dataset = Dataset.open(url)
    view = ImageView(
        num_slices=num_slices, rows=size[0], columns=size[1], slice_choice=slice_choice, dtype=dtype
    )
    rows = []
    for batch in _loader(dataset, view=view):
        assert batch.arrays["image"].dtype == dtype
        for slot, row in enumerate(batch.arrays["row"].tolist()):
            image, mask = batch.arrays["image"][slot], batch.arrays["slice_mask"][slot]
            if row < 0:
                assert batch.arrays["weight"][slot] == 0
                assert not image.any()
                assert not mask.any()
                assert batch.text(slot) == ""
                continue
            rows.append(row)
            slices, text = _stored(dataset, row)
            chosen = view.choose(len(slices), DrawKey(5, 0, row))
            assert mask.tolist() == [1] * len(chosen) + [0] * (num_slices - len(chosen))
            assert not image[len(chosen) :].any()
            for place, index in enumerate(chosen.tolist()):
                assert np.array_equal(image[place], _resized(slices[index], size).astype(dtype))
            assert batch.image(slot).shape == (len(chosen), *size)
            assert batch.text(slot) == text
            assert batch.sample_keys[slot] == dataset.samples.sample_key(row)
            assert batch.arrays["weight"][slot] == 1
            assert batch.arrays["display_range"][slot].tolist() == [-1000, 1000]
    assert sorted(rows) == list(range(11))


def _resized(pixels: NDArray[Any], size: tuple[int, int]) -> NDArray[Any]:
    if pixels.shape == size:
        return pixels
    common = min(size[0], pixels.shape[0]), min(size[1], pixels.shape[1])
    shrunk = cv2.resize(pixels, common[::-1], interpolation=cv2.INTER_AREA)
    resized: NDArray[Any] = cv2.resize(shrunk, size[::-1], interpolation=cv2.INTER_LINEAR)
    return resized


@pytest.mark.parametrize("read_bytes", [1, 2000, 1 << 20])
def test_a_native_view_holds_every_slice_as_it_is(url: str, read_bytes: int) -> None:
    dataset = Dataset.open(url)
    for batch in _loader(dataset, view=NativeView(), read_bytes=read_bytes):
        for slot, row in enumerate(batch.arrays["row"].tolist()):
            expected = _stored(dataset, row)[0] if row >= 0 else np.zeros((0, 0, 0), np.int16)
            assert np.array_equal(batch.image(slot), expected)


def test_text_alone_and_nothing_at_all(url: str) -> None:
    dataset = Dataset.open(url)
    for batch in _loader(dataset):
        assert sorted(batch.arrays) == ["row", "text_bytes", "text_offsets", "weight"]
        for slot, row in enumerate(batch.arrays["row"].tolist()):
            assert batch.text(slot) == (_stored(dataset, row)[1] if row >= 0 else "")
    for batch in _loader(dataset, text=False):
        assert sorted(batch.arrays) == ["row", "weight"]


# ---- what is read --------------------------------------------------------------------------------


def _ranges_read(url: str, **settings: Any) -> tuple[Dataset, list[tuple[str, list[ByteRange]]]]:
    calls: list[tuple[str, list[ByteRange]]] = []

    def before(path: str, ranges: Sequence[ByteRange]) -> None:
        calls.append((path, list(ranges)))

    dataset, _ = hooked(url, before)
    list(_loader(dataset, **settings))
    return Dataset.open(url), calls


def test_only_the_chosen_slices_are_read_in_one_ascending_call_a_sample(url: str) -> None:
    view = ImageView(num_slices=2, rows=20, columns=24)
    dataset, calls = _ranges_read(url, view=view, text=False)
    wanted = set()
    for row in range(11):
        slices = [name for name in dataset.read_fields(row) if name.startswith("s000")]
        names = [slices[index] for index in view.choose(len(slices), DrawKey(5, 0, row))]
        for name in [*names, "study.json"]:
            path, offset, num_bytes = locate(dataset, row, name)
            wanted.add((path.name, offset, num_bytes))
    assert len(calls) == 11
    read = [(Path(path).name, span.offset, span.num_bytes) for path, ranges in calls for span in ranges]
    assert sorted(read) == sorted(wanted)
    for _, ranges in calls:
        assert [span.offset for span in ranges] == sorted(span.offset for span in ranges)


def test_reports_alone_read_reports_alone_with_one_call_a_shard(url: str) -> None:
    dataset, calls = _ranges_read(url)
    sizes = [len(dataset.read_fields(row)["report.txt"]) for row in range(11)]
    assert sum(span.num_bytes for _, ranges in calls for span in ranges) == sum(sizes)
    # Two steps of two micro-batches of three samples in three shards: at most one call a shard each.
    assert len(calls) <= 4 * 3


def test_without_view_and_text_nothing_is_read(url: str) -> None:
    assert _ranges_read(url, text=False)[1] == []


def test_one_call_never_asks_for_more_than_read_bytes_unless_one_field_is_larger(url: str) -> None:
    view = ImageView(num_slices=12, rows=20, columns=24)
    _, calls = _ranges_read(url, view=view, read_bytes=2500)
    assert all(sum(span.num_bytes for span in ranges) <= 2500 or len(ranges) == 1 for _, ranges in calls)
    assert max(len(ranges) for _, ranges in calls) > 1


def test_fields_of_neighbours_are_read_in_one_call_from_a_folder(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples that lie side by side share a part, and what lies between their fields is read over."""
    spans: list[ByteRange] = []
    read = LocalStore.read_ranges

    def noted(
        self: LocalStore, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]
    ) -> None:
        spans.extend(ranges)
        read(self, path, ranges, buffers)

    monkeypatch.setattr(LocalStore, "read_ranges", noted)
    dataset = Dataset.open(url)
    view = ImageView(num_slices=12, rows=20, columns=24)
    spec = BatchSpec(micro_batch_size=11, micro_batches_per_step=1)
    config = LoaderConfig(view=view, num_threads=1)
    (batch,) = Loader(dataset, split="train", batch=spec, seed=5, config=config)
    assert not batch.quarantined
    # Four samples a shard; with two parts a thread five samples, which here is a shard.
    assert len(spans) == 3


# ---- other samples -------------------------------------------------------------------------------


def _dataset_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, num_samples: int = 2
) -> Dataset:
    """A dataset whose samples ``change`` has edited."""

    def changed(number: int, **settings: Any) -> MadeSample:
        sample = make_sample(number, **settings)
        fields = change(number, dict(sample.fields))
        return MadeSample(key=sample.key, fields=dict(sorted(fields.items())), facts=sample.facts)

    monkeypatch.setattr(tests.factories, "make_sample", changed)
    return Dataset.open(make_dataset(tmp_path / "edited", num_samples=num_samples, slices=2, size=(8, 8)))


def _whole(dataset: Dataset, **settings: Any) -> dict[int, tuple[Any, ...]]:
    """Per row: its slices, text, display range and weight."""
    found = {}
    for batch in _loader(dataset, **settings):
        for slot, row in enumerate(batch.arrays["row"].tolist()):
            if row >= 0:
                display = batch.arrays["display_range"][slot].tolist()
                weight = float(batch.arrays["weight"][slot])
                found[row] = (batch.image(slot).copy(), batch.text(slot), display, weight)
    return found


def test_a_study_without_a_display_range_gets_the_extremes_of_its_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(_: int, fields: dict[str, bytes]) -> dict[str, bytes]:
        study = json.loads(fields["study.json"])
        study["series"][0]["display_range"] = None
        return {**fields, "study.json": json.dumps(study).encode()}

    dataset = _dataset_of(tmp_path, monkeypatch, change)
    for pixels, _, display, _ in _whole(dataset, view=NativeView()).values():
        assert display == [pixels.min(), pixels.max()]


@pytest.mark.parametrize(
    ("stored", "delivered", "warns"),
    [
        ("uint16", "int16", True),
        ("float32", "int16", True),
        ("uint16", "float32", False),
        ("uint8", "int16", False),
    ],
)
def test_pixels_that_do_not_arrive_as_they_were_stored_are_warned_of_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stored: str,
    delivered: Literal["int16", "float32"],
    warns: bool,
) -> None:
    pixels = np.array([[0, 255], [0.4, 40000 if stored == "uint16" else 7]]).astype(stored)

    def change(_: int, fields: dict[str, bytes]) -> dict[str, bytes]:
        return {**fields, "s000.i0000.b2nd": encode_array("b2nd", np.kron(pixels, np.ones((4, 4), stored)))}

    dataset = _dataset_of(tmp_path, monkeypatch, change)
    _whole(dataset, view=ImageView(num_slices=2, rows=8, columns=8, dtype=delivered), num_threads=1)
    messages = [record.getMessage() for record in caplog.records if "cut or rounded" in record.getMessage()]
    assert len(messages) == (1 if warns else 0)
    assert all(stored in message and "float32" in message for message in messages)


@pytest.mark.parametrize("execution", ["threads", "process"])
@pytest.mark.parametrize("view", [ImageView(num_slices=2, rows=8, columns=8), NativeView()])
@pytest.mark.parametrize("stored", ["uint16", "float32", "uint8"])
def test_pixels_lose_nothing_by_a_type_that_nobody_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, view: Any, execution: str
) -> None:
    pixels = np.array([[0, 255], [0.4, 40000 if stored == "uint16" else 7]]).astype(stored)

    def change(_: int, fields: dict[str, bytes]) -> dict[str, bytes]:
        slices = {name for name in fields if name.endswith(".b2nd")}
        image = encode_array("b2nd", np.kron(pixels, np.ones((4, 4), stored)))
        return {**fields, **dict.fromkeys(slices, image)}

    dataset = _dataset_of(tmp_path, monkeypatch, change)
    if stored == "uint8":
        assert all(weight for *_, weight in _whole(dataset, view=view, execution=execution).values())
        return
    with pytest.raises(ConfigError, match=rf'stored as {stored} do not fit into int16.*dtype="float32"'):
        _whole(dataset, view=view, execution=execution)


def test_other_series_and_a_second_codec_of_a_slice_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = np.full((9, 9), 1234, np.int16)

    def change(_: int, fields: dict[str, bytes]) -> dict[str, bytes]:
        more = {
            "s001.i0000.b2nd": encode_array("b2nd", other),
            "s000.i0001.npy": encode_array("npy", other),
            "s000.i0000.jpg": b"preview",
        }
        return {**fields, **more}

    dataset = _dataset_of(tmp_path, monkeypatch, change)
    for row, (pixels, _, _, weight) in _whole(
        dataset, view=ImageView(num_slices=4, rows=8, columns=8)
    ).items():
        fields = dataset.read_fields(row)
        expected = [decode_array("b2nd", fields[f"s000.i000{index}.b2nd"]) for index in range(2)]
        assert np.array_equal(pixels, expected)
        assert weight == 1


def test_a_sample_without_slices_is_delivered_with_its_text(tmp_path: Path) -> None:
    dataset = Dataset.open(make_dataset(tmp_path / "a", num_samples=2, slices=0))
    for pixels, text, _, weight in _whole(dataset, view=ImageView(num_slices=3, rows=8, columns=8)).values():
        assert pixels.shape == (0, 8, 8)
        assert text
        assert weight == 1


def test_more_slices_than_names_of_four_digits_stay_in_geometric_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(_: int, fields: dict[str, bytes]) -> dict[str, bytes]:
        kept = {name: data for name, data in fields.items() if not name.startswith("s000")}
        return kept | {
            f"s000.i{index:04d}.npy": encode_array("npy", np.full((8, 8), index, np.int16))
            for index in (10000, 2000)
        }

    dataset = _dataset_of(tmp_path, monkeypatch, change, num_samples=1)
    pixels, *_ = _whole(dataset, view=NativeView())[0]
    assert pixels[:, 0, 0].tolist() == [2000, 10000]
