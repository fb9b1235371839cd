"""Large samples tables: each block is proven when it is first read on a machine, and not read again there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ChecksumError, FormatError, StorageError
from shardflow.format import Dataset, shard_files
from shardflow.format.copies.subset import copy_subset
from shardflow.format.file_blocks import BlockDigests, open_proven
from shardflow.format.manifest import FileEntry, Manifest, commit, load
from shardflow.format.samples import COLUMNS, SamplesTable
from shardflow.format.table import BLOCK_NUM_BYTES, Table, encode_table
from shardflow.storage import ByteRange, LocalStore
from tests.unit.format.tampering import edit_manifest

pytestmark = pytest.mark.fast
NUM_SAMPLES = 5000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose samples table counts as large: 5 blocks and a bit."""
    folder = tmp_path_factory.mktemp("large") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_files, "MIN_NUM_BYTES", 1)
        with sf.ShardWriter(folder, max_samples=1000) as writer:
            for number in range(NUM_SAMPLES):
                writer.write({"__key__": f"s{number:09d}", "report.txt": "x" * (number % 7)})
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "data"))


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without node files."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    return tmp_path / "node" / f"shardflow-{os.getuid()}"


class _Counting(LocalStore):
    """A store that knows what was read of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes: dict[str, int] = {}

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        self.read_bytes[path] = self.read_bytes.get(path, 0) + sum(span.num_bytes for span in ranges)
        super().read_ranges(path, ranges, buffers)


def _whole(folder: Path) -> SamplesTable:
    path = load(LocalStore(folder)).samples.path
    return SamplesTable(Table(memoryview((folder / path).read_bytes()), name=path))


def _blocks(manifest: Manifest) -> FileEntry:
    assert manifest.samples_blocks is not None
    return manifest.samples_blocks


def _read(dataset: Dataset) -> None:
    for name in COLUMNS:
        dataset.samples.column(name)


def _node_file(node: Path) -> Path:
    (path,) = node.glob("blocks-*.tbl")
    return path


def test_rows_are_those_of_the_table_and_little_else_is_read(folder: Path) -> None:
    store, whole = _Counting(folder), _whole(folder)
    dataset = Dataset(store, load(store))
    entry = dataset.manifest.samples
    assert dataset.samples.gather("text_bytes", 17) == whole.gather("text_bytes", 17) == 3
    # Beginning, end, and the block of the row; a block of a column may lie in two of the file.
    assert 0 < store.read_bytes[entry.path] <= 4 * BLOCK_NUM_BYTES < entry.num_bytes
    for name in COLUMNS:
        np.testing.assert_array_equal(dataset.samples.column(name), whole.column(name))
    assert store.read_bytes[entry.path] == entry.num_bytes  # each byte once
    again = _Counting(folder)
    reopened = Dataset(again, dataset.manifest)
    assert [reopened.samples.sample_key(row) for row in (0, 4999)] == ["s000000000", "s000004999"]
    assert again.read_bytes == {}


def test_a_small_table_has_none(tmp_path: Path) -> None:
    with sf.ShardWriter(tmp_path / "small") as writer:
        writer.write({"__key__": "a", "report.txt": "x"})
    assert load(LocalStore(tmp_path / "small")).samples_blocks is None


def test_a_block_that_changed_is_an_error_by_name_and_the_others_are_not(folder: Path) -> None:
    dataset, whole = Dataset.open(folder), _whole(folder)
    path = folder / dataset.manifest.samples.path
    data = bytearray(path.read_bytes())
    data[3 * BLOCK_NUM_BYTES + 5] ^= 1
    path.write_bytes(data)
    expected = rf"samples-000001\.tbl must have the blocks .* offset {3 * BLOCK_NUM_BYTES}:"
    with pytest.raises(ChecksumError, match=expected):
        _read(dataset)
    key = dataset.samples.sample_key(0)
    assert key == whole.sample_key(0)


def test_a_table_with_other_rows_does_not_pass_for_it(folder: Path) -> None:
    """Its own checksums are right, as those of a table that somebody encoded anew."""
    manifest = load(LocalStore(folder))
    path = folder / manifest.samples.path
    data = path.read_bytes()
    other = data.replace(b"s000000000", b"s999999999", 1)
    path.write_bytes(other)
    with pytest.raises(ChecksumError):
        Dataset.open(folder).samples.column("sample_key")


def test_a_table_that_is_cut_under_a_reader_is_an_error(folder: Path) -> None:
    dataset = Dataset.open(folder)
    path = folder / dataset.manifest.samples.path
    os.truncate(path, 2 * BLOCK_NUM_BYTES)
    with pytest.raises(StorageError, match=r"samples-000001\.tbl ends"):
        _read(dataset)


@pytest.mark.parametrize("damage", ["flip", "zero", "cut"])
def test_a_damaged_node_file_costs_time_alone(folder: Path, node: Path, damage: str) -> None:
    whole = _whole(folder)
    _read(Dataset.open(folder))
    path = _node_file(node)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[2 * BLOCK_NUM_BYTES + 9] ^= 1
    elif damage == "zero":  # the flags reached the disk before the machine stopped, and the blocks did not
        data[: whole._table._bytes.nbytes] = bytes(whole._table._bytes.nbytes)
    else:
        del data[2 * BLOCK_NUM_BYTES :]
    path.write_bytes(data)
    again = Dataset.open(folder)
    for name in COLUMNS:
        np.testing.assert_array_equal(again.samples.column(name), whole.column(name))


def test_digests_of_another_table_are_refused(folder: Path) -> None:
    store = LocalStore(folder)
    manifest = load(store)
    path = folder / _blocks(manifest).path
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"samples-000001\.blocks must have the manifest's size"):
        Dataset.open(folder)
    shutil.copy(folder / manifest.samples.path, path)  # a table, but none of digests
    other = shard_files.write_file(folder, _blocks(manifest).path, [path.read_bytes()])
    with pytest.raises(FormatError, match="must be a file-blocks table"):
        open_proven(store, manifest.samples, other)


def test_a_hostile_dataset_cannot_fill_the_file_of_another(folder: Path, tmp_path: Path) -> None:
    """It names the table of the other one, by its SHA-256, beside digests of a table of its own."""
    hostile, whole = Path(shutil.copytree(folder, tmp_path / "hostile")), _whole(folder)
    manifest = load(LocalStore(folder))
    entry, blocks = manifest.samples, _blocks(manifest)
    columns = {name: np.array(whole.column(name)) for name in COLUMNS}
    columns["sample_key"][1] = b"s000000000"
    data = encode_table(columns, whole._table.meta)
    assert len(data) == entry.num_bytes
    (hostile / entry.path).write_bytes(data)
    digests = BlockDigests()
    digests.add(data)
    forged = shard_files.write_file(hostile, blocks.path, [digests.encode(entry)])
    assert open_proven(LocalStore(hostile), entry, forged).column("sample_key")[1] == b"s000000000"
    np.testing.assert_array_equal(
        Dataset.open(folder).samples.column("sample_key"), whole.column("sample_key")
    )


def _appended_by_an_older_one(folder: Path) -> Manifest:
    """Write a next version as a shardflow does that knows no digests: it takes over what ``extra`` says."""
    store = LocalStore(folder)
    first = load(store)
    shards, path = tuple(first.shards[:-1]), "samples/samples-000002.tbl"
    num_samples = sum(shard.num_samples for shard in shards)
    whole = _whole(folder)
    columns = {name: np.array(whole.column(name)[:num_samples]) for name in COLUMNS}
    meta = {**whole._table.meta, "splits": {"train": [0, num_samples]}}
    table = shard_files.write_file(folder, path, [encode_table(columns, meta)])
    next_one = replace(
        first,
        manifest_version=2,
        parent=first.dataset_id,
        shards=shards,
        samples=table,
        counts=replace(first.counts, packed=num_samples),
        ledger=None,
    )
    commit(store, next_one)
    return next_one


@pytest.mark.parametrize("wrong", ["missing", "of an earlier table"])
def test_a_dataset_of_an_older_shardflow_is_read_whole_and_verified(
    folder: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that knows no digests copies a dataset without them, and names them for its next table too."""
    manifest = load(LocalStore(folder))
    if wrong == "missing":
        (folder / _blocks(manifest).path).unlink()
    else:
        manifest = _appended_by_an_older_one(folder)
    samples = Dataset.open(folder).samples
    np.testing.assert_array_equal(samples.column("sample_key"), _whole(folder).column("sample_key"))
    (warning,) = caplog.messages
    assert warning.startswith(
        f"{manifest.samples.path} is read whole, which is slower: samples/samples-000001.blocks"
    )
    assert "`shardflow compact`" in warning
    report = sf.verify(folder)
    assert (report.damages, report.notes) == ((), (warning,))
    # The table is proven by its own digest.
    table = folder / manifest.samples.path
    data = bytearray(table.read_bytes())
    data[3 * BLOCK_NUM_BYTES] ^= 1
    table.write_bytes(data)
    (damage,) = sf.verify(folder).damages
    assert damage.path == manifest.samples.path


@pytest.mark.parametrize("num_bytes", [0, 1 << 64])
def test_a_size_that_is_not_the_tables_is_an_error_at_once(folder: Path, num_bytes: int) -> None:
    edit_manifest(folder, lambda body: body["samples"].update(num_bytes=num_bytes))
    with pytest.raises(ChecksumError, match=r"samples-000001\.tbl must have the manifest's size"):
        Dataset.open(folder)


def test_verify_compares_them_with_the_table(folder: Path) -> None:
    report = sf.verify(folder)
    assert report.is_whole
    assert not report.notes
    manifest = load(LocalStore(folder))
    path = folder / _blocks(manifest).path
    table = Table(memoryview(path.read_bytes()), name="digests")
    digests = np.array(table.column("block_sha256"))
    digests[1] = 0
    forged = shard_files.write_file(
        folder, _blocks(manifest).path, [encode_table({"block_sha256": digests}, table.meta)]
    )
    edit_manifest(
        folder,
        lambda body: body["extra"]["samples_blocks"].update(num_bytes=forged.num_bytes, sha256=forged.sha256),
    )
    (damage,) = sf.verify(folder).damages
    assert damage.path == forged.path
    assert "other digests than those of samples/samples-000001.tbl" in damage.problem


def test_a_copy_has_them_and_a_part_has_its_own(folder: Path, tmp_path: Path) -> None:
    sf.copy(LocalStore(folder), LocalStore(tmp_path / "copy"))
    assert sf.verify(tmp_path / "copy").is_whole
    assert (tmp_path / "copy" / _blocks(load(LocalStore(folder))).path).is_file()
    copy_subset(Dataset.open(folder), np.arange(9), tmp_path / "part")
    assert load(LocalStore(tmp_path / "part")).samples_blocks is None  # it is small
    assert sf.verify(tmp_path / "part").is_whole


def test_a_dataset_without_them_is_copied(folder: Path, tmp_path: Path) -> None:
    path = _blocks(load(LocalStore(folder))).path
    (folder / path).unlink()
    report = sf.copy(LocalStore(folder), LocalStore(tmp_path / "copy"))
    assert report.notes == (f"{path} was left behind: SRC has none",)
    assert not sf.verify(tmp_path / "copy").damages


def test_processes_fill_one_file_at_once(folder: Path, node: Path) -> None:
    script = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
import shardflow as sf
samples = sf.open(sys.argv[2]).samples
for name in sorted(samples.column_names, key=lambda name: hash((name, sys.argv[3]))):
    samples.column(name)
print(int(samples.column("text_bytes").sum()), samples.sample_key(4999))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(node.parent), str(folder), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    said = {process.communicate()[0] for process in processes}
    whole = _whole(folder)
    assert said == {f"{int(whole.column('text_bytes').sum())} s000004999\n"}
    assert len(list(node.glob("blocks-*.tbl"))) == 1
