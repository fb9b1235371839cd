"""S6, S8, S9: damage is found before a sample is yielded and costs one slot; a wait names what it waits
for.
"""

from __future__ import annotations

import json
import random
import threading
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shardflow as sf
from shardflow.errors import (
    FormatError,
    ManifestError,
    NotFoundError,
    SampleError,
    StateError,
    StorageError,
    WaitTimeoutError,
)
from shardflow.format import Dataset
from shardflow.loading import Loader, World
from shardflow.sampling import BatchSpec
from shardflow.storage import ByteRange
from tests.factories import MadeSample, make_dataset, make_sample
from tests.integration.loader_support import (
    flip_bit,
    hooked,
    lend_facts,
    loader_threads,
    locate,
    open_loader,
    received_keys,
    slots_of,
)

SPEC = BatchSpec(micro_batch_size=4, micro_batches_per_step=2, tail="mask")
REPORT: Mapping[str, sf.Field] = {"report": sf.Text()}
FIELDS = {"image": sf.Slices(num_slices=8, size=(16, 16)), **REPORT}
NATIVE = {"image": sf.Slices(), **REPORT}
NUM_SAMPLES = 14


@pytest.fixture
def url(tmp_path: Path) -> str:
    return make_dataset(tmp_path / "a", num_samples=NUM_SAMPLES, samples_per_shard=5, facts=True)


def _loader(dataset: Dataset | str, fields: Any = FIELDS, **settings: Any) -> Loader:
    return open_loader(dataset, settings.pop("batch", SPEC), fields, **settings)


def _content(loader: Loader) -> dict[int, tuple[float, NDArray[Any], str]]:
    """Per row: weight, slices and text."""
    found = {}
    for batch in loader:
        for slot, row in slots_of(batch):
            slices = np.array(batch["image"][slot][: batch["image_mask"][slot].sum()])
            found[row] = (float(batch.info.weight[slot]), slices, batch["report"][slot])
    return found


def _weights(loader: Loader) -> dict[int, float]:
    return {row: float(batch.info.weight[slot]) for batch in loader for slot, row in slots_of(batch)}


# ---- one bad sample (S6, S9) ---------------------------------------------------------------------


@pytest.mark.parametrize("field", ["report.txt", "s000.i0000", "s000.i0001", "study.json"])
@pytest.mark.parametrize("fields", [FIELDS, NATIVE], ids=["image", "native"])
def test_a_flipped_bit_masks_its_slot_and_nothing_else(url: str, field: str, fields: Any) -> None:
    dataset = Dataset.open(url)
    before = _content(_loader(dataset, fields))
    steps = list(received_keys(_loader(dataset, fields)))
    row = 6
    path, offset, num_bytes = locate(dataset, row, field)
    flip_bit(path, offset + num_bytes // 2, bit=3)
    loader = _loader(url, fields)
    after = _content(loader)
    assert set(after) == set(before)
    for number, (weight, pixels, text) in after.items():
        if number == row:
            assert (weight, pixels.shape[0], text) == (0, 0, "")
        else:
            assert weight == 1
            assert np.array_equal(pixels, before[number][1])
            assert text == before[number][2]
    (found,) = loader.quarantined
    assert found.row == row
    assert found.key == dataset.samples.sample_key(row)
    assert (found.shard, found.reason) == ("train-000001", "CHECKSUM_MISMATCH")
    assert found.field.startswith(field)
    assert json.loads(json.dumps(loader.masks())) == [found.to_json()]
    # Step counts and keys never change, only the slot's weight.
    again = list(received_keys(_loader(url, fields)))
    assert [entry[:4] for entry in again] == [entry[:4] for entry in steps]
    assert sum(sum(entry[4]) for entry in again) == NUM_SAMPLES - 1


def test_a_masked_slot_is_empty(url: str) -> None:
    path, offset, _ = locate(Dataset.open(url), 3, "s000.i0001")
    flip_bit(path, offset)
    for batch in _loader(url):
        for slot, weight in enumerate(batch.info.weight.tolist()):
            if not weight:
                for name in ("image_mask", "image_range", "report_mask"):
                    assert not batch[name][slot].any()
                assert (batch["image"][slot] == -1024).all()
                assert (batch["image_index"][slot] == -1).all()
                assert batch["report"][slot] == ""


def test_a_bad_sample_raises_where_that_is_asked_for(url: str) -> None:
    dataset = Dataset.open(url)
    path, offset, _ = locate(dataset, 6, "s000.i0001")
    flip_bit(path, offset)
    with pytest.raises(SampleError, match=r"train-000001, field s000\.i0001\.b2nd") as caught:
        list(_loader(url, on_bad_sample="raise"))
    assert dataset.samples.sample_key(6) in str(caught.value)
    assert not loader_threads()


def test_the_bound_on_bad_samples_stops_the_run(url: str) -> None:
    dataset = Dataset.open(url)
    for row in range(4):
        path, offset, _ = locate(dataset, row, "report.txt")
        flip_bit(path, offset)
    assert len(_content(_loader(url, max_bad_samples=4))) == NUM_SAMPLES
    with pytest.raises(SampleError, match="at most 3, got 4"):
        list(_loader(url, max_bad_samples=3))
    with pytest.raises(SampleError, match="at most 0, got 1"):
        list(_loader(url, max_bad_samples=0))
    assert not loader_threads()


@pytest.mark.parametrize(("execution", "num_ranks"), [("threads", 1), ("process", 1), ("threads", 4)])
def test_an_epoch_that_is_masked_in_large_part_ends_in_an_error(
    tmp_path: Path, execution: str, num_ranks: int
) -> None:
    """Indexes that are cut while the run reads, as by a copy that fails: 90 of 140 samples are below 100."""
    url = make_dataset(tmp_path / "a", num_samples=140, samples_per_shard=10, slices=0)
    for number in range(9):
        index = Path(url) / "shards" / f"train-{number:06d}.idx"
        with index.open("r+b") as file:
            file.truncate(index.stat().st_size // 2)
    ranks = [World(rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")

    def loaders(**settings: Any) -> list[Loader]:
        settings |= {"batch": spec, "execution": execution}
        return [_loader(url, REPORT, world=world, **settings) for world in ranks]

    for loader in loaders():
        with loader, pytest.raises(SampleError, match=rf"at most 0\.05 of the {140 // num_ranks}.*got 9"):
            list(loader)
    tolerant = loaders(max_bad_share=0.7 if num_ranks == 1 else 1.0)
    for loader in tolerant:
        with loader:
            list(loader)
    assert sum(len(loader.quarantined) for loader in tolerant) == 90


def test_the_share_is_one_of_an_epoch_and_counts_what_a_checkpoint_masks(tmp_path: Path) -> None:
    url = make_dataset(tmp_path / "a", num_samples=100, samples_per_shard=10, slices=0)
    for row in range(9):
        path, offset, _ = locate(Dataset.open(url), row, "report.txt")
        flip_bit(path, offset)
    loader = _loader(url, REPORT, max_bad_share=0.09)
    for _ in range(3):  # nine in each epoch, never more
        list(loader)
    assert len(loader.quarantined) == 27
    replay = _loader(url, REPORT, max_bad_share=0.08)
    replay.load_masks(loader.masks())
    with pytest.raises(SampleError, match="max_bad_share"):
        list(replay)


@pytest.mark.parametrize("seed", range(6))
def test_ranks_never_disagree_on_steps_whatever_is_damaged(url: str, seed: int) -> None:
    """R9: any damage, any world size: every rank yields ``len(loader)``, and only the damaged are masked."""
    rng = random.Random(seed)
    dataset = Dataset.open(url)
    damaged = set(rng.sample(range(NUM_SAMPLES), rng.randint(1, NUM_SAMPLES)))
    for row in damaged:
        path, offset, num_bytes = locate(dataset, row, rng.choice(["report.txt", "s000.i0000", "s000.i0001"]))
        flip_bit(path, offset + rng.randrange(num_bytes), bit=rng.randrange(8))
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
    how: dict[str, Any] = {"num_threads": rng.randint(1, 3), "prefetch_bytes": rng.choice([1, 10**6])}
    for world_size in range(1, 5):
        weights: Counter[int] = Counter()
        lengths = set()
        for rank in range(world_size):
            world = World(rank=rank, world_size=world_size)
            loader = _loader(url, batch=spec, seed=seed, world=world, max_bad_share=1.0, **how)
            batches = list(loader)
            lengths.add((len(batches), len(loader)))
            for batch in batches:
                for slot, row in slots_of(batch):
                    weights[row] += int(batch.info.weight[slot])
        assert len(lengths) == 1
        assert len(set(lengths.pop())) == 1
        assert {row for row, weight in weights.items() if weight == 1} == set(range(NUM_SAMPLES)) - damaged


def test_masks_of_a_checkpoint_are_masked_again_without_reading(url: str, tmp_path: Path) -> None:
    dataset = Dataset.open(url)
    path, offset, _ = locate(dataset, 6, "report.txt")
    flip_bit(path, offset)
    first = _loader(url)
    masked = list(received_keys(first))
    flip_bit(path, offset)  # the storage is whole again, as on another node
    replay = _loader(url, max_bad_samples=0)
    replay.load_masks(first.masks())
    assert list(received_keys(replay)) == masked
    assert replay.masks() == first.masks()
    fresh = _loader(url)
    assert list(received_keys(fresh)) != masked
    assert list(received_keys(fresh)) == list(received_keys(replay))  # the next epoch is not masked


def test_what_is_read_wrong_once_is_read_again(url: str) -> None:
    dataset, store = hooked(url, lambda _path, _ranges: None)
    expected = _content(_loader(url))
    spoiled: set[int] = set()

    def damage(_path: str, span: ByteRange, buffer: memoryview) -> None:
        if span.offset not in spoiled:
            spoiled.add(span.offset)
            buffer[0] ^= 1

    store.damage = damage
    loader = _loader(dataset)
    found = _content(loader)
    assert loader.quarantined == []
    assert all(np.array_equal(found[row][1], expected[row][1]) for row in expected)


def test_a_truncated_shard_masks_what_lies_behind_its_end(url: str) -> None:
    dataset = Dataset.open(url)
    path, offset, _ = locate(dataset, 7, "s000.i0001")
    with path.open("r+b") as file:
        file.truncate(offset + 5)
    loader = _loader(url)
    weights = _weights(loader)
    assert weights == {row: float(row not in (7, 8, 9)) for row in range(NUM_SAMPLES)}
    assert {found.reason for found in loader.quarantined} == {"FIELD_TRUNCATED"}
    text = _loader(url, REPORT)
    assert {row.row for batch in text for row in batch.quarantined} == {8, 9}


def test_a_damaged_index_masks_the_samples_of_its_shard(url: str) -> None:
    index = Path(Dataset.open(url).store.url) / "shards" / "train-000001.idx"
    flip_bit(index, index.stat().st_size // 2)
    loader = _loader(url)
    weights = _weights(loader)
    assert weights == {row: float(not 5 <= row < 10) for row in range(NUM_SAMPLES)}
    assert {found.reason for found in loader.quarantined} == {"INDEX_DAMAGED"}


def test_a_samples_table_that_names_another_sample_than_the_index_is_a_damage(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Dataset.open(url)
    gather = dataset.samples.gather

    def lying(name: str, rows: Any) -> NDArray[Any]:
        found = gather(name, rows)
        return found + 1 if name == "row_in_shard" else found

    monkeypatch.setattr(dataset.samples, "gather", lying)
    loader = _loader(dataset, max_bad_share=1.0)
    assert not any(_weights(loader).values())
    assert {(found.reason, found.row) for found in loader.quarantined} == {
        ("INDEX_DAMAGED", row) for row in range(NUM_SAMPLES)
    }


def _edited(tmp_path: Path, change: Any) -> Dataset:
    """A dataset whose bytes and tables are as its index says, and wrong all the same in sample 3."""

    def changed(number: int, **settings: Any) -> MadeSample:
        sample = make_sample(number, **settings)
        fields = dict(sample.fields)
        if number == 3:
            change(fields)
        return MadeSample(key=sample.key, fields=dict(sorted(fields.items())), facts=sample.facts)

    whole, edited = (
        Dataset.open(make_dataset(tmp_path / name, num_samples=8, make=make, facts=name == "whole"))
        for name, make in (("whole", make_sample), ("edited", changed))
    )
    lend_facts(whole, edited)
    return edited


@pytest.mark.parametrize(
    ("edits", "reason", "field"),
    [
        ({"s000.i0001.b2nd": b"no frame"}, "DECODE_FAILED", "s000.i0001.b2nd"),
        ({"study.json": b"{"}, "TEXT_UNREADABLE", "study.json"),
        ({"study.json": b'{"series": []}'}, "TEXT_UNREADABLE", "study.json"),
        ({"study.json": b'{"series": [{"display_range": [1]}]}'}, "TEXT_UNREADABLE", "study.json"),
        ({"report.txt": b"longer than the samples table says " * 9}, "SIZE_MISMATCH", "report.txt"),
        ({"report.txt": None}, "FIELD_MISSING", "report.txt"),
    ],
)
def test_a_sample_that_is_wrong_as_packed_is_masked(
    tmp_path: Path, edits: dict[str, bytes | None], reason: str, field: str
) -> None:
    def change(fields: dict[str, bytes]) -> None:
        for name, data in edits.items():
            fields.pop(name)
            if data is not None:
                fields[name] = data

    loader = _loader(_edited(tmp_path, change))
    weights = _weights(loader)
    assert weights == {row: float(row != 3) for row in range(8)}
    (found,) = loader.quarantined
    assert (found.reason, found.field) == (reason, field)


def test_a_report_that_is_no_utf8_is_masked(tmp_path: Path) -> None:
    def change(fields: dict[str, bytes]) -> None:
        fields["report.txt"] = b"\xff" * len(fields["report.txt"])

    loader = _loader(_edited(tmp_path, change))
    assert [row for row, weight in _weights(loader).items() if not weight] == [3]
    assert loader.quarantined[0].reason == "TEXT_UNREADABLE"


def test_a_slice_of_another_size_than_the_tables_say_is_masked(tmp_path: Path) -> None:
    def change(fields: dict[str, bytes]) -> None:
        fields.update(make_sample(3, slices=2, size=(9, 9)).fields)

    loader = _loader(_edited(tmp_path, change), NATIVE)
    assert [found.row for found in loader.quarantined] == []
    assert [row for row, weight in _weights(loader).items() if not weight] == [3]


def _outcome(folder: str, expected: dict[int, tuple[float, NDArray[Any], str]]) -> str:
    """What a loader makes of a dataset with one flipped bit: ``refused``, ``masked``, ``same``, or
    ``WRONG``.
    """
    try:
        loader = _loader(folder, NATIVE)
        found = _content(loader)
    except (ManifestError, FormatError, StorageError):
        return "refused"
    bad = {entry.row for entry in loader.quarantined}
    for row, (weight, pixels, text) in expected.items():
        if row in bad:
            continue
        if not (found[row][0] == weight and np.array_equal(found[row][1], pixels) and found[row][2] == text):
            return "WRONG"
    return "masked" if bad else "same"


def _sweep(tmp_path: Path, stride: int) -> Counter[tuple[str, str]]:
    """Flip one bit at a time in every ``stride``-th byte of every file; count the outcomes by file kind."""
    folder = make_dataset(
        tmp_path / "small", num_samples=4, samples_per_shard=2, slices=2, size=(4, 4), facts=True
    )
    expected = _content(_loader(folder, NATIVE))
    outcomes: Counter[tuple[str, str]] = Counter()
    for path in sorted(Path(folder).rglob("*")):
        # A loader without where= reads neither the ledger nor the facts of studies.
        if path.is_dir() or path.name == "ledger.jsonl" or "study" in path.parts:
            continue
        for offset in range(0, path.stat().st_size, stride):
            flip_bit(path, offset, bit=offset // stride % 8)
            outcomes[path.suffix, _outcome(folder, expected)] += 1
            flip_bit(path, offset, bit=offset // stride % 8)
    return outcomes


def _check_sweep(outcomes: Counter[tuple[str, str]]) -> None:
    assert not [kind for kind in outcomes if kind[1] == "WRONG"], outcomes
    assert outcomes[".json", "refused"] == sum(
        count for kind, count in outcomes.items() if kind[0] == ".json"
    )
    assert outcomes[".idx", "masked"] == sum(count for kind, count in outcomes.items() if kind[0] == ".idx")
    assert outcomes[".tar", "masked"] > 0
    assert outcomes[".tar", "same"] > 0  # headers and padding: not read


def test_a_flipped_bit_anywhere_is_found_before_a_sample_is_yielded(tmp_path: Path) -> None:
    _check_sweep(_sweep(tmp_path, stride=151))


@pytest.mark.slow
def test_a_flipped_bit_in_every_byte_is_found_before_a_sample_is_yielded(tmp_path: Path) -> None:
    _check_sweep(_sweep(tmp_path, stride=1))


# ---- storage that fails or stalls ----------------------------------------------------------------


def test_a_missing_shard_is_an_error_and_masks_nothing(url: str) -> None:
    dataset = Dataset.open(url)
    (Path(dataset.store.url) / "shards" / "train-000001.tar").unlink()
    loader = _loader(url)
    with pytest.raises(NotFoundError, match=r"train-000001\.tar"):
        list(loader)
    assert loader.quarantined == []
    assert not loader_threads()


def test_a_store_that_fails_is_an_error_with_the_threads_traceback(url: str) -> None:
    def before(path: str, ranges: Sequence[ByteRange]) -> None:
        raise StorageError(f"{path} must be readable, got EIO.")

    dataset, _ = hooked(url, before)
    with pytest.raises(StorageError, match="EIO") as caught:
        list(_loader(dataset))
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names.index("take") < names.index("read_ranges")
    assert not loader_threads()


def test_a_stalled_read_ends_in_an_error_that_names_shard_stage_and_tier(url: str) -> None:
    release = threading.Event()

    def before(path: str, ranges: Sequence[ByteRange]) -> None:
        if path.endswith("train-000001.tar"):
            threading.Timer(4, release.set).start()
            release.wait(300)

    dataset, _ = hooked(url, before)
    loader = _loader(dataset, wait_timeout_s=1.5)
    iterator = iter(loader)
    with pytest.raises(
        WaitTimeoutError, match=r"within 1\.5 s.*stage read of shard train-000001, tier local for \d\.\d s"
    ):
        list(iterator)
    with pytest.raises(StateError, match="micro-batches left"):
        next(iterator)  # which is no end of the epoch
    # The position is where it was, and the loader can be asked again once the storage answers.
    assert sum(1 for _ in loader) <= len(loader)
    assert not loader_threads()


def test_an_exception_in_a_field_is_raised_and_never_masked(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*_: Any) -> None:
        raise ZeroDivisionError("a bug in the field")

    loader = _loader(url)
    monkeypatch.setattr(type(loader._fields.bound[1]), "check", check)
    with pytest.raises(ZeroDivisionError, match="a bug in the field") as caught:
        list(loader)
    assert "check" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert loader.quarantined == []
    assert not loader_threads()
