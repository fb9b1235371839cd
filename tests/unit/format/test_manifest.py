from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import AlreadyExistsError, ManifestError
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.format.manifest import Manifest, commit, latest_version, load, manifest_path, versions
from shardflow.storage import LocalStore
from tests.factories import make_dataset
from tests.unit.format.tampering import sign

pytestmark = pytest.mark.fast


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "data", splits={"train": 3, "val": 1}, samples_per_shard=2)
    return tmp_path / "data"


@pytest.fixture
def manifest(folder: Path) -> Manifest:
    return load(LocalStore(folder))


def test_a_manifest_comes_back(manifest: Manifest) -> None:
    assert Manifest.parse(manifest.encode()) == manifest


def test_the_file_is_canonical_and_carries_its_digest(folder: Path, manifest: Manifest) -> None:
    data = (folder / "manifest-000001.json").read_bytes()
    assert data == manifest.encode()
    body = json.loads(data)
    digest = body.pop("digest")
    assert digest == manifest.dataset_id == sha256_hex(canonical_json(body))
    # Without JSON at hand: the digest's member is cut out of the bytes (docs/format.md, section 8).
    assert sha256_hex(data.replace(f'"digest":"{digest}",'.encode(), b"").rstrip(b"\n")) == digest


def test_splits_are_the_sums_of_their_shards(manifest: Manifest) -> None:
    assert manifest.splits == {
        "train": {"num_samples": 3, "num_shards": 2},
        "val": {"num_samples": 1, "num_shards": 1},
    }


def test_every_file_is_named(folder: Path, manifest: Manifest) -> None:
    named = {entry.path for entry in manifest.files()} | {"manifest-000001.json"}
    assert named == set(LocalStore(folder).list(""))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format_version": 3}, "newer formats need a newer shardflow"),
        ({"format_version": 2}, "and no others"),
        ({"format": "other"}, "got 'other' 1"),
        ({"splits": {}}, "the sums of its shards"),
        ({"shards": None}, "every entry of format 1"),
        ({"shards": [{"name": "x"}]}, "every entry of format 1"),
        ({"counts": {"packed": 1}}, "every entry of format 1"),
        ({"samples": {"path": "x", "num_bytes": 1, "sha256": "short"}}, "64 hexadecimal digits"),
        ({"samples": {"path": "x", "num_bytes": "1", "sha256": "0" * 64}}, "num_bytes must be an integer"),
        ({"samples": {"path": "x", "num_bytes": True, "sha256": "0" * 64}}, "num_bytes must be an integer"),
        ({"samples": {"path": "x", "num_bytes": -1, "sha256": "0" * 64}}, "num_bytes must be an integer"),
        ({"samples": {"path": "../x", "num_bytes": 1, "sha256": "0" * 64}}, "inside the dataset"),
        ({"samples": {"path": None, "num_bytes": 1, "sha256": "0" * 64}}, "inside the dataset"),
        ({"samples": {"path": "ledger.jsonl", "num_bytes": 1, "sha256": "0" * 64}}, "got one twice"),
        ({"counts": {"packed": -1, "skipped": 0, "quarantined": 0}}, "packed must be"),
        ({"manifest_version": "1"}, "manifest_version must be"),
        ({"parent": "x"}, "parent must be 64"),
        ({"surprise": 1}, "and no others"),
    ],
)
def test_a_signed_manifest_of_another_shape_is_refused(
    manifest: Manifest, change: dict[str, Any], match: str
) -> None:
    body = {**json.loads(manifest.encode()), **change}
    with pytest.raises(ManifestError, match=match):
        Manifest.parse(sign(body))


@pytest.mark.parametrize(
    "key", ["parent", "created_with", "config_digest", "key_id", "ledger", "counts", "extra", "samples"]
)
def test_a_missing_entry_is_refused(manifest: Manifest, key: str) -> None:
    body = json.loads(manifest.encode())
    del body[key]
    with pytest.raises(ManifestError, match="every entry of format 1"):
        Manifest.parse(sign(body))


def test_unreadable_manifests_say_so() -> None:
    for data in (b"", b"\n", b"{}\n", b"[]\n", b"null\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        with pytest.raises(ManifestError):
            Manifest.parse(data)


def test_no_folder_and_no_manifest_say_so(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ManifestError, match="found none; is the path right"):
        load(LocalStore(tmp_path / "nothing"))
    with pytest.raises(
        ManifestError, match=r"manifest-000007\.json must exist, found none; versions here: \[1\]"
    ):
        load(LocalStore(folder), 7)
    (folder / "manifest-000001.json").unlink()
    with pytest.raises(ManifestError, match="found none; is the path right, and did packing finish"):
        latest_version(LocalStore(folder))


def test_a_folder_that_is_no_dataset_is_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody names the folder of ten million DICOM files instead of the dataset."""
    (tmp_path / "patient" / "study").mkdir(parents=True)
    visited: list[str] = []

    def walk(*arguments: Any, **settings: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for where, folders, files in original(*arguments, **settings):
            visited.append(where)
            yield where, folders, files

    original = os.walk
    monkeypatch.setattr("shardflow.storage.local.os.walk", walk)
    with pytest.raises(ManifestError, match="found none"):
        latest_version(LocalStore(tmp_path))
    assert visited == [str(tmp_path)]


def test_errors_name_the_file(folder: Path) -> None:
    (folder / "manifest-000001.json").write_bytes(b"{")
    with pytest.raises(ManifestError, match=r"manifest-000001\.json: a manifest must end"):
        load(LocalStore(folder))


def test_the_newest_version_is_loaded_unless_one_is_asked_for(folder: Path, manifest: Manifest) -> None:
    store = LocalStore(folder)
    second = dataclasses.replace(manifest, manifest_version=2, parent=manifest.dataset_id)
    assert commit(store, second) == second.dataset_id != manifest.dataset_id
    (folder / "manifest-3.json").write_bytes(b"not one of ours")
    (folder / "manifest-000003.json.bak").write_bytes(b"not one of ours")
    assert versions(store) == [1, 2]
    assert load(store) == second
    assert load(store, 1) == manifest


def test_a_version_is_written_once(folder: Path, manifest: Manifest) -> None:
    with pytest.raises(AlreadyExistsError):
        commit(LocalStore(folder), manifest)


def test_a_manifest_under_another_number_is_refused(folder: Path, manifest: Manifest) -> None:
    (folder / manifest_path(2)).write_bytes(manifest.encode())
    with pytest.raises(ManifestError, match="must hold version 2, got 1"):
        load(LocalStore(folder))
