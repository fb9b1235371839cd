"""A dataset written from Python is whole, every reader reads it, and it appears as a whole or not at all."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from shardflow.errors import ConfigError, FormatError, StorageError
from shardflow.fields.types.columns import Column
from shardflow.fields.types.members import Array, Json
from shardflow.fields.types.pictures import Image
from shardflow.format import Dataset, decode_array, verify, webdataset_decoder
from shardflow.format.index import ShardIndex
from shardflow.format.keys import parse_slice_field
from shardflow.format.samples import SampleEntry, SampleFacts, SamplesTable
from shardflow.format.table import Table
from shardflow.format.writer import ShardWriter
from shardflow.loading import Loader
from shardflow.sampling import BatchSpec
from tests import writer_killed
from tests.factories import make_sample
from tests.forks import run

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore::ResourceWarning")]

VOLUME = np.arange(3 * 8 * 6, dtype="<i2").reshape(3, 8, 6)


def samples(count: int = 12) -> Iterator[dict[str, Any]]:
    """Make samples with slices, texts, JSON and bytes; every third one is text alone."""
    for number in range(count):
        sample: dict[str, Any] = {
            "__key__": f"k{number}",
            "report.txt": f"No effusion, {number} mm.",
            "json": {"number": number, "share": 0.5},
            "image.npy": np.full((2, 2), number, "u1"),
            "label.cls": b"1",
        }
        if number % 3:
            sample["s000.b2nd"] = VOLUME + number
            sample["study.json"] = {"series": [{"modality": "CT" if number % 2 else "MR"}]}
        yield sample


def write(path: Path, **settings: Any) -> str:
    with ShardWriter(path, **settings) as writer:
        for sample in samples():
            writer.write(sample)
    assert writer.dataset_id is not None
    return writer.dataset_id


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_is_written_is_whole_and_reads_back(tmp_path: Path) -> None:
    dataset_id = write(tmp_path / "d", splits={"train": 3, "val": 1}, max_samples=4)
    assert verify(tmp_path / "d").is_whole
    dataset = Dataset.open(tmp_path / "d")
    assert dataset.dataset_id == dataset_id
    assert (dataset.manifest.counts.packed, dataset.samples.num_samples) == (12, 12)
    assert set(dataset.splits) == {"train", "val"}
    by_key = {sample["__key__"]: sample for sample in samples()}
    for row in range(12):
        sample = by_key.pop(dataset.samples.sample_key(row))
        fields = dataset.read_fields(row)
        assert fields["report.txt"].decode() == sample["report.txt"]
        assert json.loads(fields["json"]) == sample["json"]
        assert np.array_equal(decode_array("npy", fields["image.npy"]), sample["image.npy"])
        assert fields["label.cls"] == b"1"
        slices = [name for name in fields if parse_slice_field(name)]
        assert slices == ([f"s000.i000{index}.b2nd" for index in range(3)] if "s000.b2nd" in sample else [])
        for index, name in enumerate(slices):
            assert np.array_equal(decode_array("b2nd", fields[name]), sample["s000.b2nd"][index])
        study = sample.get("study.json", {"series": [{"modality": ""}]})
        assert dataset.samples.modality(row) == study["series"][0]["modality"]
        shape = [int(dataset.samples.gather(name, row)) for name in ("num_slices", "rows", "columns")]
        assert shape == ([3, 8, 6] if slices else [0, 0, 0])
    assert not by_key


def test_webdataset_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "d", max_samples=5)
    tars = sorted(str(path) for path in (tmp_path / "d" / "shards").glob("train-*.tar"))
    assert len(tars) == 3
    pipeline = webdataset.WebDataset(tars, shardshuffle=False).decode(webdataset_decoder, post=[])
    found = list(pipeline)
    assert [sample["__key__"] for sample in found] == [f"k{number}" for number in range(12)]
    assert found[4]["json"] == {"number": 4, "share": 0.5}
    assert np.array_equal(found[4]["s000.i0002.b2nd"], VOLUME[2] + 4)


def test_the_loader_streams_it(tmp_path: Path) -> None:
    write(tmp_path / "d")
    loader = Loader(
        Dataset.open(tmp_path / "d"),
        split="train",
        seed=1,
        batch=BatchSpec(micro_batch_size=4, micro_batches_per_step=1),
        fields={},
    )
    keys = [key for batch in loader for key in batch.sample_keys if key is not None]
    assert sorted(keys) == sorted(f"k{number}" for number in range(12))


def test_the_samples_table_is_the_one_that_packing_would_write(tmp_path: Path) -> None:
    entries, offset = [], 0
    with ShardWriter(tmp_path / "d") as writer:
        for number in range(5):
            made = make_sample(number, slices=(0, 3), modality="CT" if number % 2 else "MR")
            writer.write({"__key__": made.key, **made.fields})
            num_bytes = sum(512 + -(-len(payload) // 512) * 512 for payload in made.fields.values())
            has_slices = bool(made.facts.num_slices)
            facts = SampleFacts(
                **{
                    name: getattr(made.facts, name)
                    for name in ("text_bytes", "num_series", "num_slices", "rows", "columns")
                },
                modality=made.facts.modality if has_slices else "",
            )
            entries.append(
                SampleEntry(
                    sample_key=made.key,
                    shard=0,
                    row_in_shard=number,
                    offset_bytes=offset,
                    num_bytes=num_bytes,
                    facts=facts,
                )
            )
            offset += num_bytes
    table = (tmp_path / "d" / "samples" / "samples-000001.tbl").read_bytes()
    assert table == SamplesTable.encode(entries, shard_splits=["train"])


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, splits={"train": 1, "val": 1}, target_bytes=8000)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_a_shard_ends_before_it_passes_its_size(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "d", target_bytes=5000) as writer:
        for number, size in enumerate([600, 600, 600, 9000, 10]):
            writer.write({"__key__": f"k{number}", "x": bytes(size)})
    shards = Dataset.open(tmp_path / "d").manifest.shards
    assert [shard.num_samples for shard in shards] == [3, 1, 1]


def test_a_group_stays_together_and_a_split_can_be_named(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "d", splits={"train": 1, "val": 1, "never": 0}) as writer:
        for number in range(40):
            writer.write({"__key__": f"k{number}", "x": b""}, group=f"patient {number % 8}")
        writer.write({"__key__": "held", "x": b""}, split="test")
    dataset = Dataset.open(tmp_path / "d")
    assert set(dataset.splits) == {"train", "val", "test"}
    found: dict[int, set[str]] = {}
    for split, rows in dataset.splits.items():
        for row in rows:
            key = dataset.samples.sample_key(row)
            if key != "held":
                found.setdefault(int(key[1:]) % 8, set()).add(split)
    assert all(len(splits) == 1 for splits in found.values())
    assert len(dataset.splits["test"]) == 1


GOOD = {"__key__": "a", "report.txt": "No effusion."}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no key": ({"report.txt": "x"}, "__key__"),
    "dot": ({"__key__": "a.b", "x": b""}, r"\[a-z0-9\]"),
    "upper case": ({"__key__": "DOE", "x": b""}, r"\[a-z0-9\]"),
    "twice": ({"__key__": "a", "x": b""}, "a key of its own"),
    "no field": ({"__key__": "b", "__url__": "x.tar"}, "a field beside its __key__"),
    "field name": ({"__key__": "b", "Report.txt": "x"}, "field name"),
    "text as json": ({"__key__": "b", "report.json": "x"}, "got a str in report.json"),
    "array as text": ({"__key__": "b", "x.txt": VOLUME}, "got a ndarray in x.txt"),
    "number": ({"__key__": "b", "label.bin": 3}, "got a int in label.bin"),
    "no number": ({"__key__": "b", "a.json": {"x": float("nan")}}, "JSON holds"),
    "surrogate": ({"__key__": "b", "a.txt": "\udc80"}, "lone surrogates"),
    "gap": ({"__key__": "b", "s000.i0001.npy": VOLUME[0]}, "without gaps"),
    "no primary series": ({"__key__": "b", "s001.npy": VOLUME}, "without gaps"),
    "shapes": ({"__key__": "b", "s000.i0000.npy": VOLUME[0], "s000.i0001.npy": VOLUME[0, :3]}, "one shape"),
    "both ways": ({"__key__": "b", "s000.npy": VOLUME, "s000.i0000.npy": VOLUME[0]}, "each field once"),
    "long name": ({"__key__": "b" * 64, "f" * 40: b""}, "100 ASCII"),
    "objects": ({"__key__": "b", "x.npy": np.array([["a"]], object)}, "numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_sample_that_cannot_be_stored_is_refused_and_leaves_no_trace(tmp_path: Path, case: str) -> None:
    sample, expected = REFUSED[case]
    with ShardWriter(tmp_path / "d") as writer:
        writer.write(GOOD)
        with pytest.raises(FormatError, match=expected) as caught:
            writer.write(sample)
        assert "DOE" not in str(caught.value)
        writer.write({**GOOD, "__key__": "c"})
    assert verify(tmp_path / "d").is_whole
    assert Dataset.open(tmp_path / "d").samples.num_samples == 2


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> None:
        with ShardWriter(tmp_path / "d", max_samples=1) as writer:
            for sample in samples(4):
                writer.write(sample)
            raise KeyError("a user's own mistake")

    with pytest.raises(KeyError):
        broken()
    assert not list((tmp_path / "d").iterdir())
    write(tmp_path / "d")


def test_without_a_sample_there_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="must hold a sample"), ShardWriter(tmp_path / "d"):
        pass
    assert not list((tmp_path / "d").iterdir())


def test_a_failed_manifest_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise StorageError("no space")

    monkeypatch.setattr("shardflow.format.writer.commit", fail)
    with pytest.raises(StorageError, match="no space"):
        write(tmp_path / "d")
    assert not list((tmp_path / "d").iterdir())


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "d")
    before = digests(tmp_path / "d")
    with pytest.raises(ConfigError, match="new or empty folder"):
        ShardWriter(tmp_path / "d")
    with ShardWriter(tmp_path / "e") as writer:
        with pytest.raises(ConfigError, match="new or empty folder"):
            ShardWriter(tmp_path / "e")
        writer.write(GOOD)
    assert digests(tmp_path / "d") == before


def test_settings_are_checked(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"target_bytes": 0},
        {"max_samples": 0},
        {"split": "Train"},
        {"splits": {}},
        {"splits": {"train": 0}},
        {"splits": {"train": 2, "val": -1}},
    ]
    for settings in wrong:
        with pytest.raises(ConfigError):
            ShardWriter(tmp_path / "d", **settings)
    with ShardWriter(tmp_path / "d") as writer:
        writer.write(GOOD)
    with pytest.raises(ConfigError, match="open"):
        writer.write({**GOOD, "__key__": "b"})
    writer.close()


PHOTO = np.arange(12 * 10, dtype=np.uint16).reshape(12, 10) * 500


def typed(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a sample with a value of every type, and its columns."""
    sample = {
        "__key__": f"k{number}",
        "label.cls": number % 3,
        "report.txt": f"No effusion, {number} mm.",
        "meta.json": {"share": 0.5, "number": number},
        "vector.npy": np.arange(5, dtype="f4") + number,
        "flags.npy": np.array([[[[True]]]]),
        "points.npz": {"b": np.arange(3) + number, "a": np.zeros((2, 2))},
        "photo.png": PHOTO + number,
        "color.png": np.full((4, 5, 3), [number, 2, 3], np.uint8),
        "raw.bin": b"\0\1",
    }
    columns: dict[str, Any] = {
        "label": number % 3,
        "age": 60 + number if number % 2 else 60.5,
        "sex": "FM"[number % 2],
        "is_new": np.bool_(number % 2),
        "vector": [number, 0.5],
        "late": None if number < 9 else 1,
    }
    if number % 4 == 0:
        del columns["sex"]
    return sample, columns


def write_typed(path: Path, part: int = 0, num_parts: int = 1, stop: int = 12, **settings: Any) -> None:
    """Write a part of twelve samples."""
    size = 12 // num_parts
    with ShardWriter(path, part=part, num_parts=num_parts, max_samples=2, **settings) as writer:
        for number in range(part * size, part * size + size):
            if number >= stop:
                raise KeyError("stopped")
            sample, columns = typed(number)
            writer.write(sample, columns=columns)


def test_values_of_every_type_are_what_webdataset_and_fields_read(tmp_path: Path) -> None:
    write_typed(tmp_path / "d")
    assert verify(tmp_path / "d").is_whole
    tars = sorted(str(path) for path in (tmp_path / "d" / "shards").glob("*.tar"))
    found = list(webdataset.WebDataset(tars, shardshuffle=False).decode())
    assert len(found) == 12
    for number, sample in enumerate(found):
        assert sample["label.cls"] == number % 3
        assert sample["report.txt"] == f"No effusion, {number} mm."
        assert sample["meta.json"] == {"share": 0.5, "number": number}
        assert np.array_equal(sample["vector.npy"], np.arange(5) + number)
        assert sample["flags.npy"].shape == (1, 1, 1, 1)
        assert np.array_equal(sample["points.npz"]["b"], np.arange(3) + number)
        assert sample["raw.bin"] == b"\0\1"
    fields = {
        "photo": Image(member="photo.png"),
        "color": Image(member="color.png"),
        "points": Array(member="points.npz", array="b", shape=(3,), dtype="int64"),
        "cls": Json(member="label.cls"),
        "label": Column("labels.label"),
        "age": Column("labels.age"),
        "sex": Column("labels.sex", missing="pad"),
        "is_new": Column("labels.is_new"),
        "vector": Column("labels.vector"),
        "late": Column("labels.late", missing="pad"),
    }
    loader = Loader(
        Dataset.open(tmp_path / "d"),
        split="train",
        seed=1,
        batch=BatchSpec(micro_batch_size=4, micro_batches_per_step=1),
        fields=fields,
    )
    seen = set()
    for batch in loader:
        assert (batch["photo"].dtype, batch["photo"].shape) == (np.uint16, (4, 1, 12, 10))
        for slot, key in enumerate(batch.sample_keys):
            number = int(str(key)[1:])
            seen.add(number)
            assert np.array_equal(batch["photo"][slot, 0], PHOTO + number)
            assert batch["color"][slot, :, 0, 0].tolist() == [number, 2, 3]
            assert batch["points"][slot].tolist() == [number, number + 1, number + 2]
            assert batch["cls"][slot] == batch["label"][slot] == number % 3
            assert batch["age"][slot] == (60 + number if number % 2 else 60.5)
            assert bool(batch["is_new"][slot]) == bool(number % 2)
            assert batch["vector"][slot].tolist() == [number, 0.5]
            assert batch["sex_mask"][slot] == (number % 4 > 0)
            if number % 4:
                assert batch.info.classes["sex"][batch["sex"][slot]] == "FM"[number % 2]
            assert batch["late_mask"][slot] == (number >= 9)
    assert seen == set(range(12))


def test_parts_in_any_order_by_any_number_of_writers_give_the_same_bytes(tmp_path: Path) -> None:
    for part in range(3):
        write_typed(tmp_path / "one", part, 3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda part: write_typed(tmp_path / "threads", part, 3), (2, 0, 1)))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as processes:
        jobs = [processes.submit(write_typed, tmp_path / "processes", part, 3) for part in (1, 2, 0)]
        for job in jobs:
            job.result()
    assert verify(tmp_path / "one").is_whole
    expected = digests(tmp_path / "one")
    assert digests(tmp_path / "threads") == digests(tmp_path / "processes") == expected
    # Shards that a part ends where one writer would end them are those of one writer.
    write_typed(tmp_path / "whole")
    assert digests(tmp_path / "whole").keys() - expected.keys() == set()
    assert [name for name in expected if name.endswith(".tar")]
    dataset = Dataset.open(tmp_path / "one")
    assert [dataset.samples.sample_key(row) for row in range(12)] == [f"k{number}" for number in range(12)]


@pytest.mark.parametrize("stop", [0, 1, 5, 11])
def test_a_stopped_writer_goes_on(tmp_path: Path, stop: int) -> None:
    write_typed(tmp_path / "whole")
    with pytest.raises(KeyError):
        write_typed(tmp_path / "d", stop=stop, resume=True)
    with pytest.raises(ConfigError, match="resume=True"):
        write_typed(tmp_path / "d")
    write_typed(tmp_path / "d", resume=True)
    assert digests(tmp_path / "d") == digests(tmp_path / "whole")
    write_typed(tmp_path / "d", resume=True)  # finished: nothing is left to do
    assert digests(tmp_path / "d") == digests(tmp_path / "whole")
    with (
        ShardWriter(tmp_path / "d", resume=True) as writer,
        pytest.raises(FormatError, match="no further samples"),
    ):
        writer.write({"__key__": "other", "x": b""})


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_finished_part_is_replayed_while_another_one_publishes(tmp_path: Path, num_before: int) -> None:
    path = tmp_path / "d"

    def opened(part: int) -> ShardWriter:
        return ShardWriter(path, max_samples=2, part=part, num_parts=2, resume=True)

    with opened(0) as first:
        for number in range(10):
            first.write({"__key__": f"a{number}", "x": b""})
    stopped = opened(1)
    for number in range(5):
        stopped.write({"__key__": f"b{number}", "x": b""})
    stopped.abandon()
    with opened(0) as first:
        for number in range(num_before):
            first.write({"__key__": f"a{number}", "x": b""})
        with opened(1) as second:
            for number in range(10):
                second.write({"__key__": f"b{number}", "x": b""})
        assert second.dataset_id is not None
        for number in range(num_before, 10):
            first.write({"__key__": f"a{number}", "x": b""})
    assert first.dataset_id == second.dataset_id


def test_a_resumed_writer_refuses_other_samples_and_settings(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        write_typed(tmp_path / "d", stop=5, resume=True)
    with pytest.raises(ConfigError, match="must have the same splits"):
        ShardWriter(tmp_path / "d", resume=True)
    with pytest.raises(FormatError, match="got 1 of the 4 stored"):
        write_first(tmp_path / "d", "k0")
    with pytest.raises(FormatError, match="in the same order"):
        write_first(tmp_path / "d", "k1")
    with ShardWriter(tmp_path / "d", max_samples=2, resume=True) as writer:
        with pytest.raises(ConfigError, match="one writer at a time"):
            ShardWriter(tmp_path / "d", max_samples=2, resume=True)
        for number in range(12):
            sample, columns = typed(number)
            writer.write(sample, columns=columns)


def write_first(path: Path, key: str) -> None:
    with ShardWriter(path, max_samples=2, resume=True) as writer:
        writer.write({"__key__": key, "x": b""})


def test_parts_must_fit_together(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "d", num_parts=2) as first:
        first.write(GOOD, columns={"label": 1})
    assert first.dataset_id is None
    with pytest.raises(ConfigError, match="each part once"):
        ShardWriter(tmp_path / "d", num_parts=2)
    with pytest.raises(ConfigError, match="must have the same splits"):
        ShardWriter(tmp_path / "d", part=1, num_parts=3)
    with (
        pytest.raises(FormatError, match="got a in two parts"),
        ShardWriter(tmp_path / "d", part=1, num_parts=2, resume=True) as second,
    ):
        second.write(GOOD)
    with ShardWriter(tmp_path / "e", num_parts=2) as first:
        first.write(GOOD, columns={"label": 1})
    with (
        pytest.raises(FormatError, match="got int and text"),
        ShardWriter(tmp_path / "e", part=1, num_parts=2) as second,
    ):
        second.write({**GOOD, "__key__": "b"}, columns={"label": "edema"})
    with ShardWriter(tmp_path / "e", part=1, num_parts=2) as second:
        second.write({**GOOD, "__key__": "b"}, columns={"label": 2})
    assert second.dataset_id is not None
    assert Dataset.open(tmp_path / "e").samples.num_samples == 2


WRONG_COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"label": "edema"}, "got text after int"),
    "length": ({"vector": [1.0]}, "got lists of 1 floats after lists of 2 floats"),
    "name": ({"Label": 1}, "a-z, 0-9 and _"),
    "large": ({"label": 1 << 70}, "64 bits"),
    "object": ({"label": {"a": 1}}, "got another dict"),
    "infinite": ({"vector": [1.0, float("inf")]}, "finite"),
}


@pytest.mark.parametrize("case", WRONG_COLUMNS)
def test_a_column_that_cannot_be_stored_refuses_the_sample(tmp_path: Path, case: str) -> None:
    columns, expected = WRONG_COLUMNS[case]
    with ShardWriter(tmp_path / "d") as writer:
        writer.write(GOOD, columns={"label": 1, "vector": [1, 2]})
        with pytest.raises(FormatError, match=expected):
            writer.write({**GOOD, "__key__": "b"}, columns=columns)
        writer.write({**GOOD, "__key__": "b"}, columns={"label": 2})
    assert Dataset.open(tmp_path / "d").samples.num_samples == 2


def test_a_kill_at_any_point_leaves_nothing_or_the_dataset_and_the_writer_goes_on(tmp_path: Path) -> None:
    done = run(["-m", "tests.writer_killed", tmp_path])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == list(writer_killed.POINTS)


def test_each_index_is_decoded_once_for_the_samples_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, decoded = ShardIndex.decode, []

    def count(table: Table) -> ShardIndex:
        decoded.append(table.name)
        return decode(table)

    monkeypatch.setattr(ShardIndex, "decode", count)
    write(tmp_path / "d", max_samples=4)
    assert len(decoded) == len(set(decoded)) == 3
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"manifest-000001.json", "samples", "shards"}
    monkeypatch.undo()
    assert verify(tmp_path / "d").is_whole
