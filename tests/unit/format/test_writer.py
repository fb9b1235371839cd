"""A dataset written from Python is whole, every reader reads it, and it appears as a whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from shardflow.errors import ConfigError, FormatError, StorageError
from shardflow.format import Dataset, decode_array, verify, webdataset_decoder
from shardflow.format.keys import parse_slice_field
from shardflow.format.samples import SampleEntry, SampleFacts, SamplesTable
from shardflow.format.writer import ShardWriter
from shardflow.loading import Loader
from shardflow.sampling import BatchSpec
from tests.factories import make_sample

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
    "number": ({"__key__": "b", "label.cls": 3}, "got a int in label.cls"),
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
