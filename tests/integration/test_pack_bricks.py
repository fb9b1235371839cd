"""Volumes packed in bricks: the voxels that slices give, everywhere and through any kill; damage is found."""

from __future__ import annotations

import io
import shutil
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ChecksumError, FormatError
from shardflow.format.checks.verification import verify
from shardflow.format.dataset import Dataset, DatasetBlocks
from shardflow.format.keys import parse_slice_field, parse_volume_field, sha256_hex
from shardflow.format.table import Table, encode_table
from shardflow.packing.versions.removal import Withdrawn, compact, remove
from shardflow.sampling import BatchSpec
from shardflow.storage import CacheConfig
from shardflow.viewing.study import read_study
from tests.dicom_factory import make_study
from tests.integration.loader_support import open_loader
from tests.pack_case import PackCase, tree_digests
from tests.sweeps import sampled
from tests.unit.format.tampering import replace_file
from tests.volume_cases import encode_volume

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("packs_inline")]

BRICKS = """
[volumes]
storage = "bricks"
modalities = ["CT"]
brick_shape = [4, 32, 32]
[variants]
small_px = 16
"""
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=1, tail="mask")
FIELDS = {
    "all": sf.Slices(series="kind == 'volume'", missing="pad"),
    "some": sf.Slices(num_slices=5, size=(24, 20), sampling="random", missing="pad"),
    "small": sf.Slices(resolution="small", num_slices=2, size=(16, 12), missing="pad"),
}


def _prepare(case: PackCase, settings: str) -> None:
    case.prepare()
    make_study(case.dicom / "a", patient="A", num_slices=11, size=(70, 50), seed=1)
    make_study(case.dicom / "b", patient="B", num_slices=4, size=(40, 33), seed=2)
    make_study(case.dicom / "c", patient="C", num_slices=9, size=(70, 50), seed=3, modality="MR")
    make_study(case.dicom / "d", patient="D", num_slices=1, size=(30, 40), seed=4)
    make_study(case.dicom / "e", patient="E", num_slices=6, size=(33, 64), seed=5)
    text = case.config_path.read_text(encoding="utf-8")
    text = text.replace("10KiB", "64KiB")
    case.config_path.write_text(text + settings, encoding="utf-8")
    case.write_faults()


@pytest.fixture(scope="module")
def in_slices(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    case = PackCase(tmp_path_factory.mktemp("slices"))
    _prepare(case, "[variants]\nsmall_px = 16\n")
    case.pack()
    return case.open()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackCase:
    case = PackCase(tmp_path_factory.mktemp("bricks"))
    _prepare(case, BRICKS)
    case.pack()
    return case


@pytest.fixture(scope="module")
def in_bricks(packed: PackCase) -> Dataset:
    return packed.open()


def _members(dataset: Dataset, row: int) -> dict[str, bytes]:
    """Read the members of a sample as any tar reader does."""
    path, _ = dataset.sample_fields(row)
    key = dataset.studies.sample_key(row)
    with tarfile.open(fileobj=io.BytesIO(bytes(dataset.store.map(path)))) as tar:
        return {
            name.partition(".")[2]: tar.extractfile(name).read()  # type: ignore[union-attr]
            for name in tar.getnames()
            if name.startswith(f"{key}.")
        }


def test_blosc2_reads_the_voxels_of_the_slices(in_slices: Dataset, in_bricks: Dataset) -> None:
    num_volumes = 0
    for row in range(in_slices.studies.num_samples):
        members, slices = _members(in_bricks, row), _members(in_slices, row)
        names = sorted(name for name in slices if parse_slice_field(name) is not None)
        expected = np.stack([blosc2.ndarray_from_cframe(slices[name])[...] for name in names])
        assert set(names).isdisjoint(members) or names[0] in members
        for name in [name for name in members if parse_volume_field(name) is not None]:
            found = blosc2.ndarray_from_cframe(members[name])
            num_volumes += 1
            assert found.dtype == expected.dtype
            assert np.array_equal(found[...], expected)
            assert np.array_equal(in_bricks.read_volume(row, 0), expected)
            assert np.array_equal(
                in_bricks.read_volume(row, 0, (1, 2, 3), (3, 30, 30)), expected[1:3, 2:30, 3:30]
            )
    assert num_volumes == 3  # neither the MR nor the single slice
    assert in_bricks.manifest.format_version == 2
    assert in_slices.manifest.format_version == 1


def test_batches_equal_those_of_slices(in_slices: Dataset, in_bricks: Dataset) -> None:
    for split in in_slices.splits:
        with (
            open_loader(in_slices, SPEC, FIELDS, split=split) as first,
            open_loader(in_bricks, SPEC, FIELDS, split=split) as second,
        ):
            for expected, found in zip(first, second, strict=True):
                assert dict(found).keys() == dict(expected).keys()
                for name, value in dict(expected).items():
                    assert _equal(found[name], value), name
                assert found.info.sample_keys == expected.info.sample_keys


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return bool(np.array_equal(found, expected))
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(_equal, found, expected))
    return bool(found == expected)


def test_tables_and_pictures_equal_those_of_slices(in_slices: Dataset, in_bricks: Dataset) -> None:
    for column in ("num_series", "num_slices", "rows", "columns", "modality"):
        assert np.array_equal(in_bricks.studies.column(column), in_slices.studies.column(column)), column
    for row in range(in_slices.studies.num_samples):
        expected, found = read_study(in_slices, row), read_study(in_bricks, row)
        assert found.indexes == expected.indexes
        assert all(map(np.array_equal, found.slices, expected.slices))
    with pytest.raises(FormatError, match="must be stored in bricks"):
        in_slices.read_volume(0, 0)


@pytest.mark.parametrize(
    "point",
    sampled(["none", "advance:studies:1", "advance:studies:3", "phase:ledger"], {"advance:studies:3"}),
)
def test_a_killed_job_makes_the_same_bytes(packed: PackCase, tmp_path: Path, point: str) -> None:
    case = PackCase(tmp_path / "job")
    shutil.copytree(packed.folder, case.folder, ignore=shutil.ignore_patterns("out", "inputs-*"))
    if point != "none":
        assert case.drive(point).returncode == -signal.SIGKILL
    case.pack("execution.num_processes=2")
    assert tree_digests(case.output) == tree_digests(packed.output)


def test_a_damaged_brick_is_found_and_masked(packed: PackCase, tmp_path: Path) -> None:
    shutil.copytree(packed.output, tmp_path / "out")
    dataset = Dataset.open(tmp_path / "out")
    row = next(
        row
        for row in range(dataset.studies.num_samples)
        if dataset.shard_index(int(dataset.studies.gather("shard", row))).volumes_of(
            int(dataset.studies.gather("row_in_shard", row))
        )
    )
    path, fields = dataset.sample_fields(row)
    field = next(field for field in fields if parse_volume_field(field.name) is not None)
    data = bytearray((tmp_path / "out" / path).read_bytes())
    data[field.offset + field.num_bytes // 2] ^= 4
    (tmp_path / "out" / path).write_bytes(data)

    with pytest.raises(ChecksumError, match="a brick must have crc32c"):
        dataset.read_volume(row, 0)
    (damage,) = verify(str(tmp_path / "out")).damages
    assert damage.field == field.name
    split = next(split for split, rows in dataset.splits.items() if row in rows)
    bad = set()
    with open_loader(dataset, SPEC, {"ct": sf.Slices(missing="pad")}, split=split) as loader:
        for batch in loader:
            for key, weight in zip(batch.info.sample_keys, batch.info.weight, strict=True):
                bad |= {key} if not weight else set()
    assert dataset.studies.sample_key(row) in bad


def test_an_index_of_other_bricks_is_found(packed: PackCase, tmp_path: Path) -> None:
    """An index with valid checksums of its own, whose columns are not those of the frame."""
    dataset = Dataset.open(packed.output)
    number = next(place for place, shard in enumerate(dataset.manifest.shards) if shard.num_volumes)
    entry = dataset.manifest.shards[number]
    table = Table(dataset.store.map(entry.index.path), name="i")
    for column, problem in (
        ("brick_crc32c", "brick 1 has another crc32c"),
        ("brick_num_bytes", "another crc32c than in the index"),
        ("volume_shape", "another shape"),
        ("volume_dtype", "another shape, dtype"),
    ):
        columns = {name: table.column(name).copy() for name in table.column_names}
        if column == "volume_dtype":
            columns[column][0] = b"<u2"
        elif column == "volume_shape":
            columns[column][0, 2] -= 1
        else:
            columns[column][1] ^= 1
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(packed.output, tmp_path / "out")
        replace_file(tmp_path / "out", entry.index.path, encode_table(columns, table.meta))

        (damage,) = verify(str(tmp_path / "out")).damages
        assert problem in damage.problem, column


def test_compaction_keeps_the_bricks(packed: PackCase, tmp_path: Path) -> None:
    case = PackCase(tmp_path / "job")
    shutil.copytree(packed.folder, case.folder)
    before = case.open()
    rows = before.studies.column("shard").tolist()
    row = next(place for place, shard in enumerate(rows) if rows.count(shard) > 1)
    remove(case.output, case.private, Withdrawn(sample_keys=[before.studies.sample_key(row)]))
    compact(case.output, case.private)

    after, num_volumes = case.open(), 0
    assert after.manifest.manifest_version == 3
    for place in range(after.studies.num_samples):
        former = before.studies.find(after.studies.sample_key(place))
        names = after.slice_names(place, 0)
        assert after.read_fields(place, names) == before.read_fields(former, names)
        num_volumes += bool(names) and after.sample_fields(place)[1][-2].name.endswith("volume.b2nd")
    assert num_volumes >= 1


def test_a_cache_fetches_bricks_and_not_volumes(packed: PackCase, in_bricks: Dataset, tmp_path: Path) -> None:
    cached = Dataset.open(packed.output, cache=CacheConfig(ram_bytes=1 << 22, block_bytes=4096))
    blocks = DatasetBlocks(in_bricks, block_bytes=4096, digests=None)
    for row in range(in_bricks.studies.num_samples):
        path = in_bricks.sample_fields(row)[0]
        index = in_bricks.shard_index(int(in_bricks.studies.gather("shard", row)))
        for field in index.volumes_of(int(in_bricks.studies.gather("row_in_shard", row))).values():
            volume, found = index.volume(field), blocks(path)
            assert found is not None
            plan = volume.plan((0, 0, 0), (1, 1, 1))
            (number,) = found.find(plan.brick_ranges())
            assert found.span(number).num_bytes <= max(4096, plan.read_num_bytes)
            assert found.span(number).num_bytes < index.field_num_bytes[field] / 2
            for _ in range(2):
                assert np.array_equal(cached.read_volume(row, 0), in_bricks.read_volume(row, 0))
    assert cached.cache is not None


def test_the_bytes_of_a_volume_stay_the_same(golden: Callable[[str, object], None]) -> None:
    """They depend on the versions of Blosc2 and zstd too, which the constraints pin."""
    ramp = np.add.outer(np.arange(9), np.add.outer(np.arange(20), 3 * np.arange(30))).astype("<i2")
    ramp[:4, :10] = -1024
    found = {}
    for name, array in {
        "ramp": ramp,
        "zeros": np.zeros((3, 4, 5), "<f4"),
        "mask": (ramp > 30).astype("|u1"),
    }.items():
        encoded = encode_volume(array, brick_shape=(4, 8, 16))
        columns = {key: sha256_hex(column.tobytes()) for key, column in encoded.stored.columns.items()}
        found[name] = {"frame": sha256_hex(encoded.read_frame()), "num_bytes": encoded.num_bytes, **columns}
    golden("bricks", found)
