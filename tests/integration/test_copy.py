"""A dataset is copied whole or not at all, whatever lies there before and whenever it is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shardflow.cli import main as cli
from shardflow.errors import ChecksumError, ManifestError
from shardflow.format import Dataset, manifest, verify
from shardflow.format.copies.copying import copy_dataset, copy_object
from shardflow.format.foreign.build import ForeignSource, index_tars
from shardflow.storage import LocalStore, RemoteOptions, RemoteStore, open_store
from tests.factories import make_dataset
from tests.foreign_tars import make_members, python_tar
from tests.forks import run
from tests.object_stores import WebServer, s3_bucket

_NUMBERS = count()


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A dataset of two versions, with a private file and a stray one beside it."""
    url = make_dataset(tmp_path / "source", num_samples=18, samples_per_shard=4)
    first = Dataset.open(url).manifest
    second = dataclasses.replace(first, manifest_version=2, parent=first.dataset_id, extra={"note": "two"})
    manifest.commit(LocalStore(url), second)
    (tmp_path / "source" / ".private").mkdir()
    (tmp_path / "source" / ".private" / "ledger.jsonl").write_text("a patient")
    (tmp_path / "source" / "notes.txt").write_text("a note")
    return url


def _bucket(address: str) -> str:
    return s3_bucket(address, f"copy-{os.getpid()}-{next(_NUMBERS)}")


def _files(url: str) -> dict[str, bytes]:
    store = open_store(url)
    return {path: store.read(path) for path in store.list("") if not path.startswith(".")}


def _copy(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["copy", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_there_and_back_it_is_the_same(
    s3: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote, back = f"{_bucket(s3)}/set", str(tmp_path / "back")
    code, report = _copy(capsys, source, remote)
    assert (code, report["versions"], report["num_copied_files"]) == (0, [1, 2], 12)
    assert _copy(capsys, remote, back)[0] == 0
    expected = _files(source)
    del expected["notes.txt"]
    assert _files(remote) == _files(back) == expected
    assert verify(back).is_whole
    # Once more: everything is checked, nothing is copied.
    code, report = _copy(capsys, source, remote)
    assert (code, report["num_copied_files"], report["num_copied_bytes"]) == (0, 0, 0)


def test_the_newest_version_alone(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with WebServer(Path(source)) as web:
        code, report = _copy(capsys, web.url, str(tmp_path / "copy"), "--newest")
    assert (code, report["versions"]) == (0, [2])
    assert manifest.versions(LocalStore(tmp_path / "copy")) == [2]
    assert Dataset.open(tmp_path / "copy").dataset_id == report["dataset_id"]
    with WebServer(tmp_path / "copy") as web:
        assert Dataset.open(web.url).manifest_version == 2


def test_large_files_of_several_windows_are_whole(s3: str, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 9 + b"end"
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a.tar").write_bytes(content)
    from shardflow.format.keys import sha256_hex
    from shardflow.format.manifest import FileEntry

    entry = FileEntry(path="a.tar", num_bytes=len(content), sha256=sha256_hex(content))
    for part_bytes in (16 << 20, 5 << 20):
        target = RemoteStore(_bucket(s3), RemoteOptions(part_bytes=part_bytes))
        assert copy_object(LocalStore(tmp_path / "from"), target, entry)
        assert target.read("a.tar") == content
        assert not copy_object(LocalStore(tmp_path / "from"), target, entry)


@pytest.mark.parametrize("where", ["s3", "local"])
def test_a_damaged_source_leaves_no_dataset(s3: str, source: str, tmp_path: Path, where: str) -> None:
    path = Path(source) / "shards" / "train-000002.tar"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    target = open_store(_bucket(s3) if where == "s3" else tmp_path / "target")
    with pytest.raises(ChecksumError, match=r"train-000002\.tar must have the manifest's sha256.*the source"):
        copy_dataset(open_store(source), target)
    assert not target.list("manifest-")
    assert "shards/train-000002.tar" not in target.list("")
    path.write_bytes(data[:-1])
    with pytest.raises(ChecksumError, match="bytes, got"):
        copy_dataset(open_store(source), target)


def test_what_stands_in_the_target_is_never_trusted_nor_overwritten(source: str, tmp_path: Path) -> None:
    target = LocalStore(tmp_path / "target")
    size = Dataset.open(source).manifest.shards[0].num_bytes
    target.put_new("shards/train-000000.tar", bytes(size))
    with pytest.raises(ChecksumError, match=r"train-000000\.tar.*the target\); remove it"):
        copy_dataset(open_store(source), target)
    assert target.read("shards/train-000000.tar") == bytes(size)
    assert not target.list("manifest-")


def test_another_dataset_in_the_target_is_refused(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_dataset(tmp_path / "other", num_samples=3, seed=5)
    code, report = _copy(capsys, source, other)
    assert code == 2
    assert "another version 1" in report["error"]
    for arguments, match in (
        ([source, source], "another place"),
        ([str(tmp_path / "nothing"), str(tmp_path / "x")], "existing folder"),
        ([source, "ftp://x/y"], "DST"),
    ):
        code, report = _copy(capsys, *arguments)
        assert code == 2
        assert match in report["error"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ManifestError):
        copy_dataset(LocalStore(tmp_path / "empty"), LocalStore(tmp_path / "target"))


def test_it_may_be_killed_at_any_time(tmp_path: Path) -> None:
    source = make_dataset(tmp_path / "source", num_samples=60, samples_per_shard=1)
    target = tmp_path / "target"
    command = [sys.executable, "-m", "shardflow.cli.main", "copy", source, str(target), "--threads", "1"]
    for num_files in (1, 40, 90):
        with subprocess.Popen(command) as process:
            while process.poll() is None and len(list(target.rglob("*.*"))) < num_files:
                time.sleep(0.002)
            process.kill()
        if process.returncode:  # killed before its end
            with pytest.raises(ManifestError):
                Dataset.open(target)
    assert run([*command[1:], "--json"]).returncode == 0
    assert verify(target).is_whole
    assert Dataset.open(target).dataset_id == Dataset.open(source).dataset_id


def test_foreign_shards_are_brought_along(tmp_path: Path) -> None:
    tar = python_tar(tmp_path / "a.tar", make_members(range(5)))
    index_tars([ForeignSource(place=str(tar))], tmp_path / "indexed")
    before = Dataset.open(tmp_path / "indexed")
    copy_dataset(LocalStore(tmp_path / "indexed"), LocalStore(tmp_path / "copy"))
    tar.unlink()
    shutil.rmtree(tmp_path / "indexed")
    after = Dataset.open(tmp_path / "copy")
    assert after.dataset_id == before.dataset_id
    assert verify(tmp_path / "copy").is_whole
    assert after.read_fields(1)["npy"]
