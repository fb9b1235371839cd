"""What takes a second each: sweeps over every bit of a file, and a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest

from shardflow.errors import ChecksumError, FormatError, ManifestError
from shardflow.format import Dataset
from shardflow.format.codecs import CODECS, decode_array, encode_array
from shardflow.format.ledger import LedgerRow, verify_ledger
from shardflow.format.manifest import Manifest
from tests.factories import encode_ledger, make_dataset
from tests.unit.format.tampering import flip

LEDGER_ROWS = [
    LedgerRow(input="aaaa", kind="dicom", outcome="packed", reason=None, sample_key="k1"),
    LedgerRow(input="bbbb", kind="dicom", outcome="skipped", reason="DUPLICATE_INSTANCE", sample_key="k1"),
    LedgerRow(input="cccc", kind="report", outcome="quarantined", reason="DECODE_FAILED", sample_key=None),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "data", splits={"train": 5, "val": 2}, samples_per_shard=3)
    return tmp_path / "data"


def _read_row(dataset: Dataset, row: int) -> tuple[str, int]:
    return dataset.dataset_id, len(dataset.read_fields(row))


def test_every_flipped_bit_of_a_ledger_is_found_in_its_line() -> None:
    data, head = encode_ledger(LEDGER_ROWS)
    damaged = bytearray(data)
    for bit in range(8 * len(damaged)):
        damaged[bit // 8] ^= 1 << bit % 8
        problems = verify_ledger(bytes(damaged), head=head).problems
        line = 1 + data[: bit // 8].count(b"\n")
        assert problems
        assert problems[0].line == line
        assert problems[0].offset <= bit // 8
        damaged[bit // 8] ^= 1 << bit % 8


def test_every_flipped_bit_and_every_cut_of_a_manifest_is_found(folder: Path) -> None:
    data = bytearray((folder / "manifest-000001.json").read_bytes())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ManifestError):
            Manifest.parse(bytes(data))
        data[bit // 8] ^= 1 << bit % 8
    for stop in range(len(data)):
        with pytest.raises(ManifestError):
            Manifest.parse(bytes(data[:stop]))


def test_flipped_bits_of_a_payload_never_crash_nor_overrun() -> None:
    """crc32c is checked before; yet a payload that passes by must not corrupt memory."""
    pixels = np.frombuffer(bytes(i * i % 251 for i in range(512)), "<i2").reshape(16, 16)
    for codec in sorted(CODECS):
        payload = bytearray(encode_array(codec, pixels))
        room = np.full((48, 16), 9, "<i2")
        for bit in range(0, 8 * len(payload), 3):
            payload[bit // 8] ^= 1 << bit % 8
            with contextlib.suppress(FormatError):
                decode_array(codec, bytes(payload), room[16:32])
            payload[bit // 8] ^= 1 << bit % 8
        assert (room[:16] == 9).all()
        assert (room[32:] == 9).all()


def test_any_flipped_bit_of_an_index_is_found_before_it_is_used(folder: Path) -> None:
    path = folder / "shards" / "train-000000.idx"
    for bit in range(0, 8 * path.stat().st_size, 61):
        flip(path, bit)
        with pytest.raises(
            ChecksumError, match=r"train-000000\.idx must have the manifest's size and sha256"
        ):
            Dataset.open(folder).read_fields(0)
        flip(path, bit)


def test_a_dataset_crosses_a_process_boundary_as_its_place(folder: Path) -> None:
    dataset = Dataset.open(folder)
    expected = _read_row(dataset, 4)
    assert len(pickle.dumps(dataset)) < 20_000
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_read_row, (dataset, 4)) == expected
        pool.close()
        pool.join()
