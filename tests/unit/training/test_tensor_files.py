"""Tensor files: what the safetensors package reads and writes, by rows, and nothing that does not fit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardflow.training.checkpoint.tensors import PiecewiseTensors, TensorFile, TensorFileError, write_tensors

TENSORS = {
    "weight": torch.arange(24.0).reshape(6, 4),
    "half": torch.arange(6).to(torch.bfloat16).reshape(3, 2),
    "flags": torch.tensor([True, False, True]),
    "step": torch.tensor(7.0),
    "wide": torch.arange(5, dtype=torch.float64),
    "nothing": torch.empty((0, 3)),
    "count": torch.tensor([-3, 2**40]),
}


def open_written(path: Path, tensors: dict[str, torch.Tensor]) -> TensorFile:
    facts = write_tensors(path, tensors)
    return TensorFile(path, num_bytes=facts["num_bytes"], sha256=facts["sha256"])


def open_bytes(path: Path, data: bytes) -> TensorFile:
    path.write_bytes(data)
    return TensorFile(path, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def assert_equal(found: object, expected: dict[str, torch.Tensor]) -> None:
    tensors = dict(found)  # type: ignore[call-overload]
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", TENSORS)
    assert_equal(load_file(tmp_path / "file"), TENSORS)


def test_what_safetensors_wrote_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "other")
    file = open_bytes(tmp_path / "file", (tmp_path / "other").read_bytes())
    assert_equal(PiecewiseTensors([file]), TENSORS)


def test_rows_of_one_and_of_several_files(tmp_path: Path) -> None:
    whole = TENSORS["weight"]
    cuts = [(0, 3), (3, 3), (3, 5), (5, 6)]
    files = [open_written(tmp_path / str(n), {"weight": whole[a:b]}) for n, (a, b) in enumerate(cuts)]
    pieces = PiecewiseTensors(files)
    assert pieces.shape("weight") == (6, 4)
    assert torch.equal(pieces["weight"], whole)
    for start in range(6):
        for stop in range(start + 1, 7):
            assert torch.equal(pieces.rows("weight", start, stop), whole[start:stop]), (start, stop)
    single = PiecewiseTensors([open_written(tmp_path / "single", {"weight": whole})])
    assert torch.equal(single.rows("weight", 2, 5), whole[2:5])
    assert single.rows("weight", 6, 6).shape == (0, 4)


def test_writing_to_what_was_read_changes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = open_written(path, {"weight": TENSORS["weight"]})
    before = path.read_bytes()
    file.rows("weight", 0, 6).fill_(9)
    assert path.read_bytes() == before


def test_no_existing_file_is_overwritten(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", TENSORS)
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "file", TENSORS)


def test_a_type_that_the_format_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="phase of type"):
        write_tensors(tmp_path / "file", {"phase": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a":1}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}',
        b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}',
        b'{"a":{"dtype":"P64","shape":[1],"data_offsets":[0,8]}}',
        b'{"a":' + b"[" * 100_000,
    ],
)
def test_a_strangers_header_is_refused_in_words(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(TensorFileError, match="header"):
        open_bytes(tmp_path / "file", len(header).to_bytes(8, "little") + header + bytes(8))


@pytest.mark.parametrize("size", [0, 2**63, 10_000])
def test_a_header_that_is_longer_than_the_file_is_refused(tmp_path: Path, size: int) -> None:
    header = json.dumps({}).encode()
    with pytest.raises(TensorFileError):
        open_bytes(tmp_path / "file", size.to_bytes(8, "little") + header)
