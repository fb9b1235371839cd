"""A samples table written shard by shard is the one encoded at once, and takes no memory for its rows."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import FormatError
from shardflow.format.manifest import FileEntry, ShardEntry
from shardflow.format.samples import FACT_COLUMNS, SampleEntry, SamplesTable
from shardflow.format.table import Table
from shardflow.packing.versions.base import RowSpool, ShardRows
from shardflow.packing.versions.files import write_rows
from tests.factories import sample_entries

pytestmark = pytest.mark.fast

NO_FILE = FileEntry(path="shards/none.idx", num_bytes=0, sha256="0" * 64)


def shard(name: str, num_samples: int) -> ShardEntry:
    return ShardEntry(
        name=name,
        split=name.partition("-")[0],
        path=f"shards/{name}.tar",
        num_bytes=0,
        sha256="0" * 64,
        index=NO_FILE,
        num_samples=num_samples,
        num_fields=0,
    )


def fill(spool: RowSpool, name: str, count: int, modality: str, width: int = 0) -> ShardRows:
    """Append ``count`` samples of a shard."""
    rows = np.arange(count)
    columns = {fact: rows + place for place, fact in enumerate(FACT_COLUMNS)}
    columns |= {"row_in_shard": rows, "offset_bytes": 2048 * rows, "num_bytes": 0 * rows + 2048}
    keys = [f"{name}{row:0{width}}".replace("-", "k").encode() for row in range(count)]
    added = spool.add({**columns, "sample_key": keys}, [modality] * count)
    return ShardRows(shard(name, count), spool, added)


def opened(path: Path) -> SamplesTable:
    return SamplesTable(Table(memoryview(path.read_bytes()), name="samples.tbl"))


def encoded(samples: SamplesTable, splits: list[str]) -> bytes:
    return SamplesTable.encode(sample_entries(samples), shard_splits=splits)


def test_rows_of_two_versions_become_one_table(tmp_path: Path) -> None:
    spool = RowSpool(tmp_path / "rows")
    first = [fill(spool, "test-000000", 2, "CT"), fill(spool, "train-000000", 3, "MR", width=30)]
    write_rows(tmp_path, "samples/1.tbl", first)
    former = opened(tmp_path / "samples/1.tbl")
    assert (tmp_path / "samples/1.tbl").read_bytes() == encoded(former, ["test", "train"])
    assert former.splits == {"test": range(2), "train": range(2, 5)}

    # The second version lacks a sample of one shard, and with the other the long keys and a modality.
    none = ShardRows(shard("train-000000", 3), former, range(2, 5)).without([*former.sample_keys()])
    assert (len(none), none.shard.num_removed) == (0, 0)
    short = ShardRows(shard("test-000000", 2), former, range(2)).without([former.sample_key(0)])
    assert short.shard.num_removed == 1
    spool = RowSpool(tmp_path / "rows")
    write_rows(tmp_path, "samples/2.tbl", [short, fill(spool, "train-000001", 4, "CR")])
    second = opened(tmp_path / "samples/2.tbl")
    assert (tmp_path / "samples/2.tbl").read_bytes() == encoded(second, ["test", "train"])
    assert second.modalities == ("CR", "CT")
    assert [second.modality(row) for row in range(5)] == ["CT", "CR", "CR", "CR", "CR"]
    (one, *_) = sample_entries(second)
    assert isinstance(one, SampleEntry)
    assert (one.sample_key, one.shard, one.row_in_shard, one.offset_bytes) == ("testk0000001", 0, 1, 2048)


def test_a_key_twice_and_too_many_modalities_are_refused(tmp_path: Path) -> None:
    spool = RowSpool(tmp_path / "rows")
    twice = [fill(spool, "train-000000", 2, "CT"), fill(spool, "train-000000", 1, "CT")]
    with pytest.raises(FormatError, match="unique in a dataset"):
        write_rows(tmp_path, "samples/1.tbl", twice)
    many = [fill(spool, f"train-{number:06d}", 1, f"M{number}") for number in range(256)]
    with pytest.raises(FormatError, match="255 modalities, got 256"):
        write_rows(tmp_path, "samples/1.tbl", many)


def test_a_sample_takes_a_few_bytes(tmp_path: Path) -> None:
    def peak(num_shards: int) -> int:
        spool = RowSpool(tmp_path / "rows")
        tracemalloc.start()
        shards = [fill(spool, f"train-{number:06d}", 2_000, "CT") for number in range(num_shards)]
        write_rows(tmp_path, "samples/1.tbl", shards)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    # As objects they took 600 bytes each, as a whole table 71.
    assert peak(42) - peak(2) < 80_000 * 16
