"""What a batch holds equals a direct decode of the sample's fields, and nothing else was read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shardflow as sf
from shardflow.format import Dataset, decode_array, encode_array
from shardflow.loading import Loader
from shardflow.sampling import BatchSpec
from shardflow.storage import ByteRange, LocalStore
from tests.factories import MadeSample, make_dataset, make_sample
from tests.integration.loader_support import hooked, locate, open_loader, resized, slots_of

pytestmark = pytest.mark.fast

SPEC = BatchSpec(micro_batch_size=3, micro_batches_per_step=2, tail="mask")
REPORT: Mapping[str, sf.Field] = {"report": sf.Text()}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dataset")
    return make_dataset(
        folder / "a", num_samples=11, samples_per_shard=4, slices=(3, 9), size=(20, 24), facts=True
    )


def _loader(dataset: Dataset | str, fields: Any, **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, fields, **settings)


def _even(num_slices: int, most: int) -> list[int]:
    if num_slices <= most:
        return list(range(num_slices))
    return [(2 * place + 1) * num_slices // (2 * most) for place in range(most)]


def _stored(dataset: Dataset, row: int) -> tuple[list[NDArray[Any]], str]:
    """All slices and the report of a sample, by the simple reading path."""
    fields = dataset.read_fields(row)
    slices = [
        decode_array(name.rsplit(".")[-1], data) for name, data in fields.items() if name.startswith("s000")
    ]
    return slices, fields["report.txt"].decode()


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("sampling", ["even", "random"])
@pytest.mark.parametrize("size", [(20, 24), (10, 12), (17, 40)])
@pytest.mark.parametrize("num_slices", [1, 4, 12])
def test_images_and_texts_equal_a_direct_decode(
    url: str, num_slices: int, size: tuple[int, int], sampling: Any, dtype: Any
) -> None:
    dataset = Dataset.open(url)
    image = sf.Slices(num_slices=num_slices, size=size, sampling=sampling, dtype=dtype)
    rows = []
    for batch in _loader(dataset, {"image": image, **REPORT}):
        assert batch["image"].dtype == (dtype or np.int16)
        for slot in np.flatnonzero(batch.info.weight == 0).tolist():
            assert batch.info.sample_keys[slot] is None
            assert (batch["image"][slot] == -1024).all()
            assert not batch["image_mask"][slot].any()
            assert batch["report"][slot] == ""
        for slot, row in slots_of(batch):
            rows.append(row)
            slices, text = _stored(dataset, row)
            count = min(num_slices, len(slices))
            chosen = batch["image_index"][slot, :count].tolist()
            if sampling == "even":
                assert chosen == _even(len(slices), num_slices)
            assert chosen == sorted({*chosen} & {*range(len(slices))})
            assert batch["image_mask"][slot].tolist() == [1] * count + [0] * (num_slices - count)
            for place, index in enumerate(chosen):
                wanted = resized(slices[index], size).astype(dtype or np.int16)
                assert np.array_equal(batch["image"][slot, place, 0], wanted)
            assert (batch["image"][slot, count:] == -1024).all()
            assert batch["report"][slot] == text
            assert batch.sample_keys[slot] == dataset.samples.sample_key(row)
            assert batch.info.weight[slot] == 1
            assert batch["image_range"][slot].tolist() == [-1000, 1000]
    assert sorted(rows) == list(range(11))


def test_random_slices_depend_on_seed_epoch_and_row_only(
    tmp_path: Path, golden: Callable[[str, object], None]
) -> None:
    url = make_dataset(tmp_path / "a", num_samples=2, slices=120, size=(4, 4), facts=True)
    choices = {}
    for seed, epoch in ((1, 0), (1, 1), (2, 0)):
        fields = {"image": sf.Slices(num_slices=4, size=(4, 4), sampling="random")}
        with _loader(url, fields, seed=seed) as loader:
            loader.set_epoch(epoch)
            for batch in loader:
                for slot, row in slots_of(batch):
                    name = f"seed {seed}, epoch {epoch}, row {row}"
                    choices[name] = batch["image_index"][slot].tolist()
    assert len({tuple(choice) for choice in choices.values()}) == 6
    for extra in ("seed 1, epoch 1, row 1", "seed 2, epoch 0, row 1"):
        del choices[extra]
    golden("slice-choice", choices)


@pytest.mark.parametrize("read_bytes", [1, 2000, 1 << 20])
def test_slices_without_a_size_are_every_slice_as_it_is(url: str, read_bytes: int) -> None:
    dataset = Dataset.open(url)
    for batch in _loader(dataset, {"image": sf.Slices()}, read_bytes=read_bytes):
        for slot, row in slots_of(batch):
            assert np.array_equal(batch["image"][slot][:, 0], _stored(dataset, row)[0])
        assert not any(len(batch["image"][slot]) for slot in np.flatnonzero(batch.info.weight == 0))


# ---- what is read --------------------------------------------------------------------------------


def _ranges_read(url: str, fields: Any, **settings: Any) -> tuple[Dataset, list[tuple[str, list[ByteRange]]]]:
    calls: list[tuple[str, list[ByteRange]]] = []

    def before(path: str, ranges: Sequence[ByteRange]) -> None:
        calls.append((path, list(ranges)))

    dataset, _ = hooked(url, before)
    list(_loader(dataset, fields, **settings))
    return Dataset.open(url), calls


def test_only_the_chosen_slices_are_read_in_one_ascending_call_a_sample(url: str) -> None:
    dataset, calls = _ranges_read(url, {"image": sf.Slices(num_slices=2, size=(20, 24))})
    wanted = set()
    for row in range(11):
        slices = [name for name in dataset.read_fields(row) if name.startswith("s000")]
        names = [slices[index] for index in _even(len(slices), 2)]
        for name in [*names, "study.json"]:
            path, offset, num_bytes = locate(dataset, row, name)
            wanted.add((path.name, offset, num_bytes))
    assert len(calls) == 11
    read = [(Path(path).name, span.offset, span.num_bytes) for path, ranges in calls for span in ranges]
    assert sorted(read) == sorted(wanted)
    for _, ranges in calls:
        assert [span.offset for span in ranges] == sorted(span.offset for span in ranges)


def test_reports_alone_read_reports_alone_with_one_call_a_shard(url: str) -> None:
    dataset, calls = _ranges_read(url, REPORT)
    sizes = [len(dataset.read_fields(row)["report.txt"]) for row in range(11)]
    assert sum(span.num_bytes for _, ranges in calls for span in ranges) == sum(sizes)
    # Two steps of two micro-batches of three samples in three shards: at most one call a shard each.
    assert len(calls) <= 4 * 3


def test_one_call_never_asks_for_more_than_read_bytes_unless_one_field_is_larger(url: str) -> None:
    fields = {"image": sf.Slices(num_slices=12, size=(20, 24)), **REPORT}
    _, calls = _ranges_read(url, fields, read_bytes=2500)
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
    fields = {"image": sf.Slices(num_slices=12, size=(20, 24)), **REPORT}
    spec = BatchSpec(micro_batch_size=11, micro_batches_per_step=1)
    (batch,) = open_loader(url, spec, fields, num_threads=1)
    assert not batch.quarantined
    # Four samples a shard; with two parts a thread five samples, which here is a shard.
    assert len(spans) == 3


# ---- other samples -------------------------------------------------------------------------------


def _dataset_of(tmp_path: Path, change: Any, num_samples: int = 2) -> Dataset:
    """A dataset whose samples ``change`` has edited."""

    def changed(number: int, **settings: Any) -> MadeSample:
        sample = make_sample(number, **settings)
        fields = change(dict(sample.fields))
        return MadeSample(key=sample.key, fields=dict(sorted(fields.items())), facts=sample.facts)

    return Dataset.open(
        make_dataset(
            tmp_path / "edited", num_samples=num_samples, slices=2, size=(8, 8), make=changed, facts=True
        )
    )


def _with_series(fields: dict[str, bytes], **changes: Any) -> dict[str, bytes]:
    """Return the fields with other facts of their series."""
    study = json.loads(fields["study.json"])
    study["series"][0].update(changes)
    return {**fields, "study.json": json.dumps(study).encode()}


def _slices(loader: Loader) -> dict[int, tuple[NDArray[Any], list[float]]]:
    """Per row: its slices and their display range; every sample must be whole."""
    found = {}
    for batch in loader:
        for slot, row in slots_of(batch):
            assert batch.info.weight[slot] == 1
            slices = np.array(batch["image"][slot][: batch["image_mask"][slot].sum()])
            found[row] = slices[:, 0], batch["image_range"][slot].tolist()
    return found


def test_a_study_without_a_display_range_gets_the_extremes_of_its_slices(tmp_path: Path) -> None:
    dataset = _dataset_of(tmp_path, lambda fields: _with_series(fields, display_range=None))
    for pixels, display in _slices(_loader(dataset, {"image": sf.Slices()})).values():
        assert display == [pixels.min(), pixels.max()]


@pytest.mark.parametrize("size", [None, (8, 8)])
@pytest.mark.parametrize(
    ("stored", "delivered", "warns"),
    [
        ("uint16", "int16", True),
        ("float32", "int16", True),
        ("uint16", "float32", False),
        ("uint8", "int16", False),
        ("uint16", None, False),
        ("float32", None, False),
    ],
)
def test_pixels_that_do_not_arrive_as_they_were_stored_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: str, delivered: Any, warns: bool, size: Any
) -> None:
    pixels = np.array([[0, 255], [0.4, 40000 if stored == "uint16" else 7]]).astype(stored)
    image = np.kron(pixels, np.ones((4, 4), stored))

    def change(fields: dict[str, bytes]) -> dict[str, bytes]:
        slices = dict.fromkeys(
            (name for name in fields if name.endswith("b2nd")), encode_array("b2nd", image)
        )
        return {**_with_series(fields, dtype=image.dtype.str), **slices}

    fields = {"image": sf.Slices(num_slices=2, size=size, dtype=delivered)}
    found = _slices(_loader(_dataset_of(tmp_path, change), fields, num_threads=1))
    messages = [record.getMessage() for record in caplog.records if "cut or rounded" in record.getMessage()]
    assert len(messages) == (1 if warns else 0)
    assert all(stored in message and "leave out its dtype" in message for message in messages)
    wanted = image if not warns else np.clip(np.rint(image), -32768, 32767).astype("int16")
    assert all(np.array_equal(one, [wanted] * 2) for one, _ in found.values())


def test_other_series_and_a_second_codec_of_a_slice_are_left_alone(tmp_path: Path) -> None:
    other = np.full((9, 9), 1234, np.int16)

    def change(fields: dict[str, bytes]) -> dict[str, bytes]:
        more = {
            "s001.i0000.b2nd": encode_array("b2nd", other),
            "s000.i0001.npy": encode_array("npy", other),
            "s000.i0000.jpg": b"preview",
        }
        return {**fields, **more}

    dataset = _dataset_of(tmp_path, change)
    for row, (pixels, _) in _slices(
        _loader(dataset, {"image": sf.Slices(num_slices=4, size=(8, 8))})
    ).items():
        fields = dataset.read_fields(row)
        expected = [decode_array("b2nd", fields[f"s000.i000{index}.b2nd"]) for index in range(2)]
        assert np.array_equal(pixels, expected)


def test_more_slices_than_names_of_four_digits_stay_in_geometric_order(tmp_path: Path) -> None:
    def change(fields: dict[str, bytes]) -> dict[str, bytes]:
        kept = {name: data for name, data in fields.items() if not name.startswith("s000")}
        return kept | {
            f"s000.i{index:04d}.npy": encode_array("npy", np.full((8, 8), index, np.int16))
            for index in (10000, 2000)
        }

    dataset = _dataset_of(tmp_path, change, num_samples=1)
    pixels, _ = _slices(_loader(dataset, {"image": sf.Slices()}))[0]
    assert pixels[:, 0, 0].tolist() == [2000, 10000]
