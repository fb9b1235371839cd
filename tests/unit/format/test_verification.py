from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardflow.errors import ManifestError, StorageError
from shardflow.format import Damage, Dataset, verify
from shardflow.format.checks.shards import DamageError, ExpectedFile, check_tar
from shardflow.format.index import ShardIndex
from shardflow.format.ledger import LedgerRow
from shardflow.format.manifest import FileEntry, LedgerEntry, commit
from shardflow.format.samples import COLUMNS
from shardflow.format.table import Table, encode_table
from shardflow.format.tar import member_num_bytes
from shardflow.storage import ByteRange, LocalStore
from tests.factories import encode_ledger, make_dataset
from tests.unit.format.tampering import edit_manifest, flip, replace_file

TAR = "shards/train-000000.tar"
INDEX = "shards/train-000000.idx"
SAMPLES = "samples/samples-000001.tbl"
MANIFEST = "manifest-000001.json"
LEDGER = "ledger.jsonl"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two shards; tests that change it change it back."""
    folder = tmp_path_factory.mktemp("verified") / "data"
    make_dataset(folder, splits={"train": 3, "val": 1}, samples_per_shard=3, slices=2, size=(4, 4))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of one sample, for the exhaustive sweeps; they change it back."""
    folder = tmp_path_factory.mktemp("tiny") / "data"
    make_dataset(folder, num_samples=1, slices=1, size=(2, 2))
    return folder


class MemoryStore(LocalStore):
    """One object, in memory: a sweep over every bit writes no file."""

    def __init__(self, data: bytes) -> None:
        super().__init__("/nowhere")
        self.data = bytearray(data)

    def size(self, path: str) -> int:
        return len(self.data)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        for span, buffer in zip(ranges, buffers, strict=True):
            buffer[:] = self.data[span.offset : span.offset + span.num_bytes]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of its own for tests that do not change it back."""
    make_dataset(tmp_path / "data", splits={"train": 5, "val": 2}, samples_per_shard=3, slices=2, size=(4, 4))
    return tmp_path / "data"


def _damages(folder: Path) -> dict[str, Damage]:
    report = verify(folder)
    damages = {damage.path: damage for damage in report.damages}
    assert len(damages) == len(report.damages), "one damage a file"
    return damages


@pytest.mark.fast
def test_a_whole_dataset_is_counted_and_has_no_damage(folder: Path) -> None:
    dataset = Dataset.open(folder)
    report = verify(folder)
    assert report.damages == ()
    assert report.notes == ()
    assert report.is_whole
    assert (report.dataset_id, report.manifest_version) == (dataset.dataset_id, 1)
    assert (report.num_shards, report.num_samples, report.num_fields) == (3, 7, 28)
    assert report.num_files == 3 * 2 + 3
    assert report.num_bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    json.dumps(report.to_json())


@pytest.mark.fast
def test_sizes_of_shards_are_compared_where_their_bytes_are_not_read(folder: Path) -> None:
    tar = folder / TAR
    flip(tar, 8 * 600)
    report = verify(folder, reads_shards=False)
    assert report.is_whole
    assert (report.reads_shards, report.num_samples, report.num_fields) == (False, 7, 28)

    with tar.open("ab") as file:
        file.write(b"x")
    (folder / "shards/train-000001.tar").unlink()
    flip(folder / "samples/samples-000001.tbl", 8 * 700)
    found = {damage.path: damage.problem for damage in verify(folder, reads_shards=False).damages}

    assert set(found) == {TAR, "shards/train-000001.tar", "samples/samples-000001.tbl"}
    assert found[TAR].endswith(f"bytes instead of {tar.stat().st_size - 1}")
    assert found["shards/train-000001.tar"] == "missing"


# ---- one wrong bit anywhere ---------------------------------------------------------------------


def _flip_bits(folder: Path, name: str, bits: range) -> None:
    path = folder / name
    for bit in bits:
        flip(path, bit)
        report = verify(folder)
        flip(path, bit)
        assert [damage.path for damage in report.damages] == [name], f"bit {bit}"
        damage = report.damages[0]
        assert damage.offset is None or damage.offset <= bit // 8
        if name == TAR:
            # Exact to the byte outside payloads, to the member inside.
            assert damage.sample_key or "end of the archive" in damage.place
            assert "payload" in damage.place or damage.offset == bit // 8
    assert verify(folder).is_whole


@pytest.mark.fast
@pytest.mark.parametrize("name", [TAR, INDEX, SAMPLES, MANIFEST, LEDGER])
def test_a_flipped_bit_is_found_in_its_file(made: Path, name: str) -> None:
    num_bits = 8 * (made / name).stat().st_size
    _flip_bits(made, name, range(num_bits // 50, num_bits, num_bits // 16 + 1))


@pytest.mark.parametrize("name", [TAR, INDEX, SAMPLES, MANIFEST, LEDGER])
def test_flipped_bits_are_found_densely(made: Path, name: str) -> None:
    num_bits = 8 * (made / name).stat().st_size
    _flip_bits(made, name, range(0, num_bits, num_bits // 300))


def test_every_flipped_bit_of_a_shard_is_found_by_its_index_alone(tiny: Path) -> None:
    """Exhaustive: headers, payloads, padding, end of the archive."""
    index = Dataset.open(tiny).shard_index(0)
    store = MemoryStore((tiny / TAR).read_bytes())
    for bit in range(8 * len(store.data)):
        store.data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamageError) as caught:
            check_tar(store, ExpectedFile(TAR), index)
        store.data[bit // 8] ^= 1 << bit % 8
        found = caught.value.damage
        assert found.offset is not None
        assert found.offset == bit // 8 or (found.offset <= bit // 8 and "payload" in found.place)
    check_tar(store, ExpectedFile(TAR), index)


@pytest.mark.slow
@pytest.mark.parametrize("name", [TAR, INDEX, SAMPLES, MANIFEST, LEDGER])
def test_every_flipped_bit_of_a_dataset_is_found(tiny: Path, name: str) -> None:
    """Exhaustive over every file, through `verify`."""
    _flip_bits(tiny, name, range(8 * (tiny / name).stat().st_size))


@pytest.mark.fast
@pytest.mark.parametrize("name", [TAR, INDEX, SAMPLES, MANIFEST, LEDGER])
def test_a_cut_is_found_in_its_file(made: Path, name: str) -> None:
    path = made / name
    data = path.read_bytes()
    stops = {0, 1, 511, 512, 513, 1024, len(data) - 1024, len(data) - 512, len(data) - 1}
    for stop in sorted(
        {stop for stop in stops if 0 <= stop < len(data)} | {*range(0, len(data), len(data) // 9)}
    ):
        path.write_bytes(data[:stop])
        report = verify(made)
        path.write_bytes(data)
        assert [damage.path for damage in report.damages] == [name], f"cut at {stop}"
        if name == TAR:
            assert (report.damages[0].offset, report.damages[0].problem) == (stop, "the end of the file")


@pytest.mark.fast
@pytest.mark.parametrize("extra", [b"\0", bytes(512), bytes(10240), b"x" * 100])
@pytest.mark.parametrize("name", [TAR, INDEX, SAMPLES, MANIFEST, LEDGER])
def test_added_bytes_are_found(made: Path, name: str, extra: bytes) -> None:
    path = made / name
    data = path.read_bytes()
    path.write_bytes(data + extra)
    report = verify(made)
    path.write_bytes(data)
    assert [damage.path for damage in report.damages] == [name]
    if name == TAR:
        damage = report.damages[0]
        assert (damage.offset, damage.place) == (len(data), "after the end of the archive")


@pytest.mark.fast
def test_every_zeroed_block_of_a_tar_is_found(made: Path) -> None:
    """What a lost sector or a hole of a sparse copy looks like; a zeroed header ends a tar for most
    readers.
    """
    path = made / TAR
    data = path.read_bytes()
    num_found = 0
    for start in range(0, len(data), 512):
        if not any(data[start : start + 512]):
            continue
        path.write_bytes(data[:start] + bytes(512) + data[start + 512 :])
        damage = _damages(made)[TAR]
        assert damage.offset is not None
        assert start <= damage.offset < start + 512 or "payload" in damage.place
        num_found += 1
    path.write_bytes(data)
    assert num_found > 20


@pytest.mark.fast
def test_swapped_members_are_found(made: Path) -> None:
    """Every header and payload is valid; only their places are wrong."""
    path = made / TAR
    data = path.read_bytes()
    _, fields = Dataset.open(made).sample_fields(0)
    first, second = (
        (field.offset - 512, field.offset - 512 + member_num_bytes(field.num_bytes)) for field in fields[1:3]
    )
    path.write_bytes(
        data[: first[0]] + data[second[0] : second[1]] + data[first[0] : first[1]] + data[second[1] :]
    )
    damage = _damages(made)[TAR]
    path.write_bytes(data)
    assert damage.field == fields[1].name
    assert damage.place.startswith(f"header of {damage.sample_key}.{fields[1].name}, member 1")


# ---- many damages -------------------------------------------------------------------------------


@pytest.mark.fast
def test_nothing_stops_the_check_at_the_first_file(folder: Path) -> None:
    for name in (TAR, SAMPLES, LEDGER, "shards/train-000001.tar", "shards/val-000000.idx"):
        flip(folder / name, 8 * 200)
    (folder / "shards" / "val-000000.tar").unlink()
    damages = _damages(folder)
    assert [*damages] == [
        TAR,
        "shards/train-000001.tar",
        "shards/val-000000.tar",
        "shards/val-000000.idx",
        SAMPLES,
        LEDGER,
    ]
    assert damages["shards/val-000000.tar"].problem == "missing"


@pytest.mark.fast
def test_the_first_of_several_damages_of_a_file_is_named(made: Path) -> None:
    _, fields = Dataset.open(made).sample_fields(1)
    for field in fields[1:]:
        flip(made / TAR, 8 * field.offset)
    damage = _damages(made)[TAR]
    for field in fields[1:]:
        flip(made / TAR, 8 * field.offset)
    assert (damage.sample_key, damage.field) == (Dataset.open(made).samples.sample_key(1), fields[1].name)
    assert damage.offset == fields[1].offset


@pytest.mark.fast
@pytest.mark.parametrize("name", [TAR, INDEX, SAMPLES, LEDGER])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert _damages(folder) == {name: Damage(name, "whole file", "missing")}


@pytest.mark.fast
def test_a_damaged_manifest_does_not_hide_other_damage(folder: Path) -> None:
    flip(folder / MANIFEST, 8 * 100)
    flip(folder / TAR, 8 * 5)
    flip(folder / "shards" / "train-000001.idx", 8 * 5)
    flip(folder / SAMPLES, 8 * 5)
    flip(folder / LEDGER, 8 * 5)
    report = verify(folder)
    assert {damage.path for damage in report.damages} == {
        MANIFEST,
        TAR,
        "shards/train-000001.idx",
        SAMPLES,
        LEDGER,
    }
    assert report.dataset_id is None
    assert report.num_shards == 3


@pytest.mark.fast
def test_a_damaged_index_does_not_hide_damage_of_its_tar(folder: Path) -> None:
    _, fields = Dataset.open(folder).sample_fields(0)
    flip(folder / INDEX, 8 * 200)
    assert set(_damages(folder)) == {INDEX}
    for bit, place in (
        (8 * 5, "header of member 0"),
        (8 * (fields[0].offset + 1), "a payload"),
        (8 * 1000, "padding"),
    ):
        flip(folder / TAR, bit)
        damages = _damages(folder)
        assert set(damages) == {TAR, INDEX}
        assert damages[TAR].place.startswith(place)
        flip(folder / TAR, bit)


@pytest.mark.fast
def test_without_manifest_and_index_a_tar_is_judged_by_its_headers(folder: Path) -> None:
    flip(folder / MANIFEST, 8 * 100)
    flip(folder / INDEX, 8 * 200)
    assert set(_damages(folder)) == {MANIFEST, INDEX}
    size = (folder / TAR).stat().st_size
    data = (folder / TAR).read_bytes()
    for bit, place in (
        (8 * 5, "header of member 0"),
        (8 * (size - 1), "end of the archive"),
        (8 * 1020, "padding"),
    ):
        flip(folder / TAR, bit)
        assert _damages(folder)[TAR].place.startswith(place)
        flip(folder / TAR, bit)
    for stop in (size - 512, size - 1024, 512, 100):
        (folder / TAR).write_bytes(data[:stop])
        assert TAR in _damages(folder)


# ---- whole files in the wrong place -------------------------------------------------------------


@pytest.mark.fast
def test_a_whole_file_of_another_dataset_is_found(folder: Path, tmp_path: Path) -> None:
    make_dataset(
        tmp_path / "other", splits={"train": 5, "val": 2}, samples_per_shard=3, slices=2, size=(4, 4), seed=1
    )
    for name in (TAR, INDEX, SAMPLES, LEDGER):
        other = (tmp_path / "other" / name).read_bytes()
        mine = (folder / name).read_bytes()
        if other == mine:
            continue
        (folder / name).write_bytes(other)
        assert name in _damages(folder)
        (folder / name).write_bytes(mine)
    assert verify(folder).is_whole


@pytest.mark.fast
def test_an_index_under_the_name_of_another_shard_is_found(folder: Path) -> None:
    other = (folder / "shards" / "train-000001.idx").read_bytes()
    replace_file(folder, INDEX, other)
    damage = _damages(folder)[INDEX]
    assert (damage.place, damage.problem) == (
        "header",
        "the index of train-000001, not the one of train-000000 in the manifest",
    )


def _edit_samples(folder: Path, column: str, row: int, value: Any) -> None:
    table = Table(memoryview((folder / SAMPLES).read_bytes()), name="t")
    columns = {name: table.column(name).copy() for name in table.column_names}
    columns[column][row] = value
    replace_file(folder, SAMPLES, encode_table(columns, table.meta))


@pytest.mark.fast
@pytest.mark.parametrize("column", [name for name in COLUMNS if name not in ("rows", "columns", "modality")])
def test_a_wrong_row_of_the_samples_table_is_found_though_its_checksums_fit(
    folder: Path, column: str
) -> None:
    _edit_samples(folder, column, 4, b"zz" if column == "sample_key" else 1000)
    damage = _damages(folder)[SAMPLES]
    assert damage.place == f"row 4, column {column}"
    assert "zz" in damage.problem or "1000" in damage.problem or column == "shard"


@pytest.mark.fast
def test_a_sample_in_another_split_than_its_shard_is_found(folder: Path) -> None:
    """P6: a patient is in one split only."""
    table = Table(memoryview((folder / SAMPLES).read_bytes()), name="t")
    columns = {name: table.column(name) for name in table.column_names}
    for splits, place in (
        ({"train": [0, 4], "val": [4, 7]}, "row 4, column shard"),
        ({"train": [0, 5], "val": [5, 6], "x": [6, 7]}, "row 6, column shard"),
        ({"train": [2, 7], "val": [0, 2]}, "column splits"),
        ({"train": [0, -5], "val": [-5, 2]}, "column splits"),
    ):
        replace_file(folder, SAMPLES, encode_table(columns, {**table.meta, "splits": splits}))
        assert _damages(folder)[SAMPLES].place == place


@pytest.mark.fast
def test_a_shard_before_that_of_the_row_above_is_found(folder: Path) -> None:
    """Readers find the rows of a shard by their order, though each of them may be right."""
    table = Table(memoryview((folder / SAMPLES).read_bytes()), name="t")
    order = [0, 1, 3, 2, 4, 5, 6]
    columns = {name: table.column(name)[order] for name in table.column_names}
    replace_file(folder, SAMPLES, encode_table(columns, table.meta))
    damage = _damages(folder)[SAMPLES]
    assert (damage.place, damage.problem) == ("row 3, column shard", "a shard before that of the row above")


@pytest.mark.fast
def test_a_samples_table_is_checked_some_rows_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardflow.format.checks.shards._ROWS_AT_ONCE", 2)
    assert verify(folder).is_whole
    keys = Table(memoryview((folder / SAMPLES).read_bytes()), name="t").column("sample_key")
    _edit_samples(folder, "sample_key", 5, bytes(keys[1]))
    _edit_samples(folder, "sample_key", 3, bytes(keys[0]))
    damage = _damages(folder)[SAMPLES]
    assert (damage.place, damage.problem) == ("row 3, column sample_key", "a key that an earlier row has")
    _edit_samples(folder, "shard", 4, 0)
    assert _damages(folder)[SAMPLES].place == "row 4, column shard"


@pytest.mark.fast
def test_a_ledger_longer_than_the_window_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardflow.format.tar.WINDOW_NUM_BYTES", 64)
    assert verify(folder).is_whole
    flip(folder / LEDGER, 8 * 300)
    assert _damages(folder)[LEDGER].place.startswith("line ")


@pytest.mark.fast
def test_a_key_that_two_rows_have_is_found(folder: Path) -> None:
    """Even where the shards' indexes say so too, as a foreign writer's may."""
    keys = Table(memoryview((folder / SAMPLES).read_bytes()), name="t").column("sample_key")
    _edit_samples(folder, "sample_key", 4, bytes(keys[1]))
    damage = _damages(folder)[SAMPLES]
    assert (damage.place, damage.problem) == ("row 4, column sample_key", "a key that an earlier row has")


@pytest.mark.fast
def test_a_samples_table_without_a_sample_is_found(folder: Path) -> None:
    table = Table(memoryview((folder / SAMPLES).read_bytes()), name="t")
    columns = {name: np.delete(table.column(name), 1) for name in table.column_names}
    meta = {**table.meta, "splits": {"train": [0, 4], "val": [4, 6]}}
    replace_file(folder, SAMPLES, encode_table(columns, meta))
    assert "2 rows of train-000000 instead of 3" in _damages(folder)[SAMPLES].problem


@pytest.mark.fast
def test_a_ledger_with_other_counts_or_another_head_is_found(folder: Path) -> None:
    data, head = encode_ledger(
        [LedgerRow(input="aaaa", kind="dicom", outcome="packed", reason=None, sample_key="k")]
    )
    replace_file(folder, LEDGER, data)
    assert "head" in _damages(folder)[LEDGER].problem
    edit_manifest(folder, lambda body: body["ledger"].update(head=head))
    assert _damages(folder)[LEDGER].problem == "other counts than the manifest's"


@pytest.mark.fast
def test_a_dataset_without_a_ledger_is_whole(folder: Path) -> None:
    edit_manifest(folder, lambda body: body.update(ledger=None))
    assert verify(folder).notes == ("ledger.jsonl is named by no manifest",)
    (folder / LEDGER).unlink()
    assert verify(folder).is_whole


# ---- versions -----------------------------------------------------------------------------------


@pytest.mark.fast
def test_all_versions_are_checked(folder: Path) -> None:
    store = LocalStore(folder)
    first = Dataset.open(folder).manifest
    second = dataclasses.replace(first, manifest_version=2, parent=first.dataset_id, extra={"note": "again"})
    commit(store, second)
    report = verify(folder)
    assert report.is_whole
    assert (report.manifest_version, report.dataset_id) == (2, second.dataset_id)
    assert report.num_samples == 7, "files of both versions count once"
    flip(folder / "manifest-000002.json", 8 * 50)
    report = verify(folder)
    assert [damage.path for damage in report.damages] == ["manifest-000002.json"]
    assert report.dataset_id is None


@pytest.mark.fast
def test_versions_that_do_not_follow_each_other_are_found(folder: Path) -> None:
    store = LocalStore(folder)
    first = Dataset.open(folder).manifest
    commit(store, dataclasses.replace(first, manifest_version=2, parent="0" * 64))
    other = FileEntry(path=SAMPLES, num_bytes=first.samples.num_bytes, sha256="1" * 64)
    third = dataclasses.replace(first, manifest_version=3, samples=other)
    commit(store, third)
    damages = verify(folder).damages
    assert [(damage.path, damage.place) for damage in damages][:2] == [
        ("manifest-000002.json", "parent"),
        ("manifest-000003.json", "parent"),
    ]
    assert any("another digest than in an earlier version" in damage.problem for damage in damages)


# ---- what is no damage --------------------------------------------------------------------------


@pytest.mark.fast
def test_other_files_are_noted_and_their_names_only_if_they_are_plain(folder: Path) -> None:
    (folder / "notes.txt").write_text("x")
    (folder / "Muster^Erika 1950.dcm").write_text("x")
    (folder / "shards" / ".train-000009.tar.0123456789abcdef.tmp").write_text("half")
    report = verify(folder)
    assert report.is_whole
    assert report.notes == ("notes.txt is named by no manifest", "1 more files are named by no manifest")
    for number in range(30):
        (folder / f"extra{number:02d}").write_text("x")
    assert len(verify(folder).notes) == 21


@pytest.mark.fast
def test_what_is_no_dataset_is_an_error(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ManifestError, match="found none"):
            verify(place)
    with pytest.raises(StorageError, match="s3://"):
        verify("ftp://bucket/data")


@pytest.mark.fast
def test_an_unreadable_file_is_damage_and_no_crash(folder: Path) -> None:
    for name in (TAR, "shards/train-000001.idx", SAMPLES):
        (folder / name).unlink()
        (folder / name).mkdir()
    damages = _damages(folder)
    assert set(damages) == {TAR, "shards/train-000001.idx", SAMPLES}
    assert all(damage.problem.startswith("unreadable") for damage in damages.values())


@pytest.mark.fast
def test_progress_is_told_shard_by_shard(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    verify(folder, num_threads=1, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.fast
def test_a_shard_larger_than_the_window_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_dataset(tmp_path / "data", num_samples=3, slices=2, size=(40, 40))
    for window in (1, 511, 700, 4096):
        monkeypatch.setattr("shardflow.format.tar.WINDOW_NUM_BYTES", window)
        assert verify(tmp_path / "data").is_whole
    index = Dataset.open(tmp_path / "data").shard_index(0)
    assert isinstance(index, ShardIndex)
    field = index.fields(1)[1]
    flip(tmp_path / "data" / TAR, 8 * (field.offset + field.num_bytes - 1))
    assert _damages(tmp_path / "data")[TAR].field == field.name


@pytest.mark.fast
def test_the_ledger_entry_counts_as_a_file(folder: Path) -> None:
    entry = Dataset.open(folder).manifest.ledger
    assert isinstance(entry, LedgerEntry)
    assert entry.path == LEDGER
