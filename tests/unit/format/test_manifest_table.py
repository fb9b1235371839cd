"""Manifests that the processes of a node share: the same entries, made when they are asked for."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardflow.errors import ManifestError
from shardflow.format import Dataset, manifest_table
from shardflow.format.keys import sha256_hex
from shardflow.format.manifest import CheckedShards, Manifest, load
from shardflow.format.manifest_table import load_shared
from shardflow.storage import LocalStore
from tests.factories import make_dataset
from tests.unit.format.tampering import edit_manifest

pytestmark = pytest.mark.fast


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without node files, on which every manifest is large."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    monkeypatch.setattr(manifest_table, "MIN_SHARED_BYTES", 1)
    return tmp_path / "node" / f"shardflow-{os.getuid()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "data", splits={"train": 9, "val": 3}, samples_per_shard=2)
    return tmp_path / "data"


def _remove_one(body: dict[str, Any]) -> None:
    body["shards"][1]["num_removed"] = 1
    body["splits"]["train"]["num_samples"] -= 1


def _same(shared: Manifest, parsed: Manifest) -> bool:
    return asdict(shared) | {"shards": None, "_digest": None} == asdict(parsed) | {
        "shards": None,
        "_digest": None,
    } and _told(shared) == _told(parsed)


def _told(manifest: Manifest) -> tuple[Any, ...]:
    return (
        list(manifest.shards),
        manifest.splits,
        manifest.dataset_id,
        manifest.format_version,
        manifest.index_num_bytes,
    )


@pytest.mark.usefixtures("node")
def test_it_is_the_manifest_that_each_process_would_parse(folder: Path) -> None:
    edit_manifest(folder, _remove_one)
    store = LocalStore(folder)
    parsed = load(store)
    for shared in (load_shared(store), load_shared(store, 1), pickle.loads(pickle.dumps(load_shared(store)))):
        assert isinstance(shared.shards, CheckedShards)
        assert _same(shared, parsed)
        assert shared.encode() == parsed.encode()
        assert [shared.shards[place] for place in range(-7, 7)] == [*parsed.shards, *parsed.shards]
        assert shared.shards[2:5] == parsed.shards[2:5]
        places = [(shard.name, shard.path, shard.num_bytes, shard.num_volumes) for shard in parsed.shards]
        for manifest in (shared, parsed):
            assert [manifest.shard_place(number) for number in range(7)] == places
        for number, shard in enumerate(parsed.shards):
            assert (shared.shards.find(shard.path), shared.shards.find(shard.index.path)) == (number, number)
        for path in ("shards", "shards/train-000000.tas", "shards/train-000000.tar.gz", parsed.samples.path):
            assert shared.shards.find(path) is None
        for place in (7, -8):
            with pytest.raises(IndexError):
                shared.shards[place]
    with pytest.raises(ManifestError, match="versions here"):
        load_shared(store, 2)


def test_it_is_parsed_once_on_a_node(folder: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(folder)
    load_shared(store)
    assert [path.name.partition("-")[0] for path in node.glob("*.tbl")] == ["manifest"]
    monkeypatch.setattr(Manifest, "parse", lambda *_: pytest.fail("parsed again"))
    load_shared(store)
    monkeypatch.undo()
    edit_manifest(folder, lambda body: body["extra"].update(note="another"))
    assert load_shared(store).dataset_id == load(store).dataset_id  # by its bytes, not by its name


@pytest.mark.parametrize("damage", ["flip", "cut", "another"])
def test_a_damaged_node_file_costs_time_alone(
    folder: Path, node: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(folder)
    load_shared(store)
    (path,) = node.glob("manifest-*.tbl")
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "another":
        make_dataset(tmp_path / "other", num_samples=2)
        load_shared(LocalStore(tmp_path / "other"))
        (other,) = node.glob("manifest-*.tbl")
        other.rename(path)
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    assert _same(load_shared(store), load(store))
    assert "parsed by each process" in caplog.text
    caplog.clear()
    assert isinstance(load_shared(store).shards, CheckedShards)
    assert not caplog.text


def test_a_dataset_reads_and_crosses_processes_without_its_node_file(folder: Path, node: Path) -> None:
    dataset = Dataset.open(folder)
    fields = [dataset.read_fields(row) for row in range(len(dataset))]
    for path in node.glob("*.tbl"):
        path.unlink()
    again = pickle.loads(pickle.dumps(dataset))
    assert [again.read_fields(row) for row in range(len(again))] == fields
    assert again.dataset_id == dataset.dataset_id


def test_a_manifest_that_cannot_be_trusted_is_no_node_file(folder: Path, node: Path) -> None:
    path = folder / "manifest-000001.json"
    path.write_bytes(path.read_bytes().replace(b'"train"', b'"tra1n"', 1))
    with pytest.raises(ManifestError, match=r"manifest-000001\.json"):
        load_shared(LocalStore(folder))
    assert not list(node.glob("*.tbl"))


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("num_bytes", [97, 700, 1 << 20])
def test_entries_are_read_from_a_stream_of_bytes(
    folder: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(body: dict[str, Any]) -> None:
        _remove_one(body)
        body["extra"]["a"] = {"b": 1, "shards": [], "text": 'of ,"shards":[ and é'}

    edit_manifest(folder, edit)
    parsed = load(LocalStore(folder))
    monkeypatch.setattr(manifest_table, "_PIECE_NUM_BYTES", num_bytes)
    monkeypatch.setattr(manifest_table, "_BLOCK", 3)
    monkeypatch.setattr(Manifest, "parse", lambda *_: pytest.fail("parsed whole"))
    assert _same(load_shared(LocalStore(folder)), parsed)


def _bricks(body: dict[str, Any]) -> None:
    body["shards"][3]["num_volumes"] = 2
    body["format_version"] = 2


@pytest.mark.usefixtures("node")
def test_a_dataset_with_bricks_says_so(folder: Path) -> None:
    edit_manifest(folder, _bricks)
    shared = load_shared(LocalStore(folder))
    assert shared.format_version == 2
    assert _same(shared, load(LocalStore(folder)))


_WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a name twice": lambda body: body["shards"][2].update(name=body["shards"][1]["name"]),
    "a path twice": lambda body: body["shards"][2].update(path=body["shards"][1]["index"]["path"]),
    "the samples' path": lambda body: body["shards"][2].update(path=body["samples"]["path"]),
    "a path outside": lambda body: body["shards"][2].update(path="../x.tar"),
    "all removed": lambda body: body["shards"][2].update(num_removed=2),
    "no removed": lambda body: body["shards"][2].update(num_removed=0),
    "other sums": lambda body: body["splits"]["train"].update(num_samples=8),
    "another split": lambda body: body["shards"][2].update(split="val"),
    "bricks unsaid": lambda body: body["shards"][3].update(num_volumes=2),
    "a negative size": lambda body: body["shards"][2].update(num_bytes=-1),
    "an entry more": lambda body: body["shards"][2].update(note="x"),
    "a key more": lambda body: body.update(zebra=1),
    "a key less": lambda body: body.pop("counts"),
    "no digest": lambda body: body["shards"][2].update(sha256="0"),
    "another format": lambda body: body.update(format_version=3),
}


@pytest.mark.parametrize("wrong", _WRONG)
def test_what_a_process_would_refuse_is_refused(folder: Path, node: Path, wrong: str) -> None:
    def edit(body: dict[str, Any]) -> None:
        _WRONG[wrong](body)

    edit_manifest(folder, edit)
    with pytest.raises(ManifestError) as expected:
        load(LocalStore(folder))
    with pytest.raises(ManifestError) as found:
        load_shared(LocalStore(folder))
    assert str(found.value) == str(expected.value)
    assert not list(node.glob("*.tbl"))


_OTHER_BYTES: dict[str, tuple[bytes, bytes]] = {
    "a comma before the first entry": (b',"shards":[', b',"shards":[,'),
    "a comma behind the last entry": (b'],"splits":', b',],"splits":'),
    "no comma between two": (b"},{", b"}{"),
    "two commas between two": (b"},{", b"},,{"),
    "a bracket between two": (b"},{", b"},[{"),
    "an entry inside another list": (b',"shards":[{', b',"shards":[[{'),
    "shards twice": (b',"shards":[', b',"shards":[],"shards":['),
    "shards twice, once as an object": (b',"shards":[', b',"shards":{},"shards":['),
    "shards behind the splits": (b"}\n", b',"shards":[]}\n'),
    "an entry of a shard twice": (b'"num_fields":', b'"num_fields":1,"num_fields":'),
    "an escaped letter": (b'"split":"train"', b'"split":"tra\\u0069n"'),
    "a space": (b'"num_fields":', b'"num_fields": '),
    "a leading zero": (b'"num_samples":2,"path"', b'"num_samples":02,"path"'),
    "an exponent": (b'"num_samples":2,"path"', b'"num_samples":2e0,"path"'),
    "a fraction": (b'"num_samples":2,"path"', b'"num_samples":2.0,"path"'),
    "a sum as a fraction": (b'"num_shards":2', b'"num_shards":2.0'),
    "a byte behind the end": (b"}\n", b"}\n\n"),
    "no line end": (b"}\n", b"} "),
    "a byte order mark": (b'{"config_digest"', b'\xef\xbb\xbf{"config_digest"'),
}


@pytest.mark.parametrize("case", _OTHER_BYTES)
@pytest.mark.parametrize("num_bytes", [64, 1 << 20])
def test_bytes_that_no_writer_makes_are_refused_though_their_digest_fits(
    folder: Path, node: Path, case: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "manifest-000001.json"
    named = f',"digest":"{load(LocalStore(folder)).dataset_id}"'.encode()
    before, behind = path.read_bytes().split(named)
    old, new = _OTHER_BYTES[case]
    assert (before + behind).count(old) > 0
    # In the part behind the digest if it is there, so that the digest can be put in again.
    if old in behind:
        at = behind.rindex(old) if old == b"}\n" else behind.index(old)
        behind = behind[:at] + new + behind[at + len(old) :]
    else:
        before = before.replace(old, new, 1)
    digest = sha256_hex((before + behind)[:-1])
    path.write_bytes(before + f',"digest":"{digest}"'.encode() + behind)
    monkeypatch.setattr(manifest_table, "_PIECE_NUM_BYTES", num_bytes)
    for reader in (load, load_shared):
        with pytest.raises(ManifestError):
            reader(LocalStore(folder))
    assert not list(node.glob("*.tbl"))


@pytest.mark.usefixtures("node")
def test_numbers_that_no_column_holds_are_read_by_each_process(folder: Path) -> None:
    edit_manifest(folder, lambda body: body["shards"][2].update(num_bytes=1 << 64))
    assert load_shared(LocalStore(folder)) == load(LocalStore(folder))


@pytest.mark.usefixtures("node")
def test_objects_that_also_have_shards_cost_a_bounded_number_of_parses(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(body: dict[str, Any]) -> None:
        body["extra"]["a"] = [{"b": 1, "shards": [{}]}] * 200

    edit_manifest(folder, edit)
    parsed = load(LocalStore(folder))
    num_parses = 0

    def counted(text: bytes) -> Any:
        nonlocal num_parses
        num_parses += 1
        return json.loads(text)

    monkeypatch.setattr(manifest_table, "json", SimpleNamespace(loads=counted))
    assert _same(load_shared(LocalStore(folder)), parsed)
    assert num_parses < 20


def test_every_changed_byte_is_noticed(folder: Path, node: Path) -> None:
    path = folder / "manifest-000001.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 211):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ManifestError):
            load_shared(LocalStore(folder))
    assert not list(node.glob("*.tbl"))
