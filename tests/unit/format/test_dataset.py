from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import ChecksumError, FormatError, ManifestError, NotFoundError, ShortReadError
from shardflow.format import Dataset, dataset_index, decode_array
from shardflow.format.index import ShardIndex
from shardflow.format.table import Table, encode_table
from tests.factories import make_dataset, make_sample
from tests.unit.format.tampering import edit_manifest, flip, replace_file

pytestmark = pytest.mark.fast


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "data", splits={"train": 5, "val": 2}, samples_per_shard=3)
    return tmp_path / "data"


def test_every_sample_reads_as_it_was_made(folder: Path) -> None:
    dataset = Dataset.open(folder)
    assert dataset.splits == {"train": range(5), "val": range(5, 7)}
    for row in range(7):
        made = make_sample(row)
        assert dataset.samples.sample_key(row) == made.key
        assert dataset.read_fields(row) == made.fields
        assert dataset.samples.find(made.key) == row
        facts = {
            name: int(dataset.samples.gather(name, row))
            for name in ("text_bytes", "num_slices", "rows", "columns")
        }
        assert facts == {name: getattr(made.facts, name) for name in facts}
    pixels = decode_array("b2nd", dataset.read_fields(3, ["s000.i0001.b2nd"])["s000.i0001.b2nd"])
    assert pixels[0, 0] == 3 * 16 + 1


def test_some_fields_read_in_the_order_of_the_tar(folder: Path) -> None:
    dataset = Dataset.open(folder)
    assert list(dataset.read_fields(0, ["study.json", "report.txt"])) == ["report.txt", "study.json"]
    assert dataset.read_fields(0, []) == {}
    with pytest.raises(FormatError, match=r"the field 'alignment\.json', got none"):
        dataset.read_fields(0, ["study.json", "alignment.json"])


def test_rows_outside_are_refused(folder: Path) -> None:
    for row in (-1, 7):
        with pytest.raises(IndexError):
            Dataset.open(folder).sample_fields(row)


def test_it_is_the_same_dataset_from_the_same_content(tmp_path: Path) -> None:
    one, two = (Dataset.open(make_dataset(tmp_path / name, num_samples=3)) for name in ("a", "b"))
    assert one.dataset_id == two.dataset_id
    assert one.dataset_id != Dataset.open(make_dataset(tmp_path / "c", num_samples=3, seed=1)).dataset_id
    assert len(one.dataset_id) == 64


def test_a_version_can_be_asked_for(folder: Path) -> None:
    assert Dataset.open(folder, version=1).manifest_version == 1
    with pytest.raises(ManifestError, match="versions here"):
        Dataset.open(folder, version=2)


def test_a_flipped_bit_of_a_field_is_found_before_it_is_returned(folder: Path) -> None:
    dataset = Dataset.open(folder)
    path, fields = dataset.sample_fields(1)
    for field in fields:
        flip(folder / path, 8 * (field.offset + field.num_bytes - 1) + 7)
        with pytest.raises(ChecksumError, match=rf"{path} must hold crc32c .*{field.name}"):
            dataset.read_fields(1, [field.name])
        others = {other.name for other in fields} - {field.name}
        assert dataset.read_fields(1, others) == {name: make_sample(1).fields[name] for name in others}
        flip(folder / path, 8 * (field.offset + field.num_bytes - 1) + 7)
    assert dataset.read_fields(1) == make_sample(1).fields


def test_another_whole_index_is_refused(folder: Path) -> None:
    shards = folder / "shards"
    (shards / "train-000000.idx").write_bytes((shards / "train-000001.idx").read_bytes())
    with pytest.raises(ChecksumError):
        Dataset.open(folder).read_fields(0)
    replace_file(folder, "shards/train-000000.idx", (shards / "train-000001.idx").read_bytes())
    with pytest.raises(FormatError, match="must be the index of train-000000, got one of train-000001"):
        Dataset.open(folder).read_fields(0)


def test_a_flipped_bit_of_the_samples_table_is_found_when_it_is_opened(folder: Path) -> None:
    path = folder / "samples" / "samples-000001.tbl"
    keys = [make_sample(row).key.encode() for row in (0, 1)]
    flip(path, 8 * path.read_bytes().index(b"".join(keys)))
    with pytest.raises(ChecksumError, match=r"samples-000001\.tbl must have the manifest's size and sha256"):
        Dataset.open(folder)


def test_a_samples_table_of_another_size_or_dataset_is_refused(folder: Path, tmp_path: Path) -> None:
    name = "samples/samples-000001.tbl"
    make_dataset(tmp_path / "other", splits={"train": 4, "val": 3}, samples_per_shard=3)
    other = (tmp_path / "other" / name).read_bytes()
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data + b"\0")
    with pytest.raises(ChecksumError, match=r"must have the manifest's size and sha256"):
        Dataset.open(folder)
    replace_file(folder, name, other)
    with pytest.raises(FormatError, match="is it another dataset's"):
        Dataset.open(folder)


@pytest.mark.parametrize(
    ("column", "value"), [("shard", 99), ("row_in_shard", 99), ("row_in_shard", 1), ("sample_key", b"x")]
)
def test_a_samples_table_that_disagrees_with_its_index_is_refused(
    folder: Path, column: str, value: object
) -> None:
    """Its checksums fit: a writer's mistake would else deliver another patient's study under a key."""
    name = "samples/samples-000001.tbl"
    table = Table(memoryview((folder / name).read_bytes()), name=name)
    columns = {item: table.column(item).copy() for item in table.column_names}
    columns[column][0] = value
    replace_file(folder, name, encode_table(columns, table.meta))
    with pytest.raises(FormatError, match=r"must (name the same sample|be one of the manifest)"):
        Dataset.open(folder).sample_fields(0)


def test_a_cut_shard_is_a_short_read(folder: Path) -> None:
    dataset = Dataset.open(folder)
    path, fields = dataset.sample_fields(2)
    data = (folder / path).read_bytes()
    (folder / path).write_bytes(data[: fields[-1].offset + 1])
    with pytest.raises(ShortReadError, match=path):
        dataset.read_fields(2)


@pytest.mark.parametrize(
    "name", ["samples/samples-000001.tbl", "shards/train-000000.idx", "shards/train-000000.tar"]
)
def test_a_missing_file_is_not_found(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(NotFoundError, match=name):
        Dataset.open(folder).read_fields(0)


def test_a_manifest_cannot_lead_out_of_its_folder(folder: Path) -> None:
    edit_manifest(folder, lambda body: body["shards"][0].update(path="../../etc/passwd"))
    with pytest.raises(ManifestError, match="inside the dataset"):
        Dataset.open(folder)


def test_indexes_are_kept_within_a_bound_of_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset.open(folder)
    first = dataset.shard_index(0)
    assert dataset.shard_index(0) is first
    monkeypatch.setattr(dataset_index, "_MAX_OPEN_NUM_BYTES", 1)
    dataset.shard_index(1)
    assert list(dataset._indexes._open) == [1]
    assert dataset._indexes._num_bytes == dataset.manifest.shards[1].index.num_bytes
    assert dataset.shard_index(0) is not first


def test_threads_read_at_once(folder: Path) -> None:
    dataset = Dataset.open(folder)
    found: list[bool] = []

    def read(start: int) -> None:
        for turn in range(21):
            row = (start + turn * 3) % 7
            found.append(dataset.read_fields(row) == make_sample(row).fields)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 * 21
    assert all(found)


def test_the_factory_makes_what_it_says(tmp_path: Path) -> None:
    dataset = Dataset.open(make_dataset(tmp_path / "d", num_samples=3, slices=0, codec="npy", size=(4, 6)))
    assert json.loads(dataset.read_fields(0)["study.json"])["series"] == []
    dataset = Dataset.open(make_dataset(tmp_path / "e", num_samples=1, slices=3, codec="npy", size=(4, 6)))
    payload = dataset.read_fields(0)["s000.i0002.npy"]
    assert decode_array("npy", payload).shape == (4, 6)
    index = dataset.shard_index(0)
    assert isinstance(index, ShardIndex)
    assert np.array_equal(index.field_num_bytes, [location.num_bytes for location in index.fields(0)])
