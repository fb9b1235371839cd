"""``shardflow verify``: exit codes and the place of a damage, as a person and as a tool see them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardflow.format import Dataset
from tests.cli.conftest import Call

pytestmark = pytest.mark.fast


def _flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.chmod(0o644)
    path.write_bytes(content)


def test_whole_dataset(call: Call, dataset: Path) -> None:
    text = call("verify", dataset)
    assert text.code == 0
    assert f"whole: {Dataset.open(dataset).dataset_id}" in text.out
    tool = call("verify", dataset, "--json")
    assert tool.code == 0
    assert tool.lines[0]["ok"] is True
    assert tool.lines[0]["damages"] == []


def test_flipped_bit_in_a_shard_is_named_with_its_place(call: Call, dataset: Path) -> None:
    opened = Dataset.open(dataset)
    shard, fields = opened.sample_fields(1)
    field = fields[0]
    _flip(dataset / shard, field.offset)
    tool = call("verify", dataset, "--json")
    assert tool.code == 1
    assert tool.lines[0]["ok"] is False
    (damage,) = tool.lines[0]["damages"]
    assert damage["path"] == shard
    assert damage["sample_key"] == opened.samples.sample_key(1)
    assert damage["field"] == field.name
    assert field.offset - 512 <= damage["offset"] <= field.offset + field.num_bytes
    text = call("verify", dataset)
    assert text.code == 1
    assert "damaged: 1 file" in text.out
    assert f"{opened.samples.sample_key(1)}.{field.name}" in text.out


@pytest.mark.parametrize("name", ["shards/train-000001.idx", "ledger.jsonl", "manifest-000001.json"])
def test_flipped_bit_in_any_other_file_is_found(call: Call, dataset: Path, name: str) -> None:
    _flip(dataset / name, (dataset / name).stat().st_size // 2)
    called = call("verify", dataset, "--json")
    assert called.code == 1
    assert name in {damage["path"] for damage in called.lines[0]["damages"]}


def test_the_first_damage_of_each_file_is_named(call: Call, dataset: Path) -> None:
    for name in ("shards/train-000000.tar", "shards/train-000002.tar", "shards/val-000000.tar"):
        _flip(dataset / name, 700)
        _flip(dataset / name, 1400)
    damages = call("verify", dataset, "--json").lines[0]["damages"]
    assert sorted(damage["path"] for damage in damages) == [
        "shards/train-000000.tar",
        "shards/train-000002.tar",
        "shards/val-000000.tar",
    ]


def test_missing_and_truncated_shard(call: Call, dataset: Path) -> None:
    (dataset / "shards/train-000000.tar").unlink()
    cut = dataset / "shards/train-000001.tar"
    cut.chmod(0o644)
    cut.write_bytes(cut.read_bytes()[:-1024])
    called = call("verify", dataset)
    assert called.code == 1
    assert "train-000000.tar" in called.out
    assert "train-000001.tar" in called.out


def test_folder_without_a_dataset_is_no_damage_report(call: Call, tmp_path: Path) -> None:
    called = call("verify", tmp_path, "--json")
    assert called.code == 2
    assert "manifest" in called.lines[0]["error"]


def test_every_version_of_the_dataset_is_left_as_it_was(call: Call, dataset: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(dataset, copy)
    call("verify", dataset)
    before = {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    after = {path.relative_to(dataset): path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    assert before == after
