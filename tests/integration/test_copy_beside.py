"""A copy brings entity views and stored tokens along, with the checks of every other file."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from shardflow.cli import main as cli
from shardflow.errors import ChecksumError, ConfigError, FormatError
from shardflow.format import Dataset, verify
from shardflow.format.copies.copying import Sidecar, copy_dataset, find_sidecars
from shardflow.format.entities import EntityDataset, EntityRules, view_folder
from shardflow.format.manifest import commit
from shardflow.format.token_manifest import TokensManifest
from shardflow.format.tokens import open_counts
from shardflow.reports.entity_views import build_view
from shardflow.storage import LocalStore, open_store
from tests.object_stores import WebServer, s3_bucket
from tests.sidecars import make_with_sidecars
from tests.unit.format.tampering import flip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beside")
    make_with_sidecars(folder)
    return folder / "data"


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "source")


def _copy(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert cli.main(["copy", *map(str, arguments), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def _files(url: str | Path) -> dict[str, bytes]:
    store = open_store(url)
    return {path: store.read(path) for path in store.list("")}


def test_there_and_back_with_all_of_it(
    s3: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote, back = f"{s3_bucket(s3, f'beside-{os.getpid()}')}/set", tmp_path / "back"
    report = _copy(capsys, source, remote)
    assert [(view["name"], view["version"]) for view in report["views"]] == [("entity", 1)]
    assert [(tokens["view"], tokens["version"]) for tokens in report["tokens"]] == [
        (sidecar.view, 1) for sidecar in _expected_tokens(source)
    ]
    _copy(capsys, remote, back)
    assert _files(source) == _files(remote) == _files(back)
    assert (verify(back).num_views, verify(back).num_tokenizations) == (1, 2)
    entities = EntityDataset.beside(Dataset.open(remote))
    assert entities.dataset_id == EntityDataset.beside(Dataset.open(source)).dataset_id
    (tokenizer,) = (path.name for path in (source / "tokens").iterdir())
    assert len(open_counts(entities, tokenizer)) == entities.samples.num_samples
    # Once more: everything is checked, nothing is copied.
    again = _copy(capsys, source, remote)
    assert (again["num_files"], again["num_copied_files"]) == (report["num_copied_files"] + 1, 0)


def _expected_tokens(source: Path) -> list[Sidecar]:
    found = find_sidecars(LocalStore(source), [Dataset.open(source).manifest])
    return [sidecar for sidecar in found if sidecar.kind is TokensManifest]


def test_they_may_stay_behind_and_come_later(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = _copy(capsys, source, tmp_path / "copy", "--no-sidecars")
    assert (report["views"], report["tokens"]) == ([], [])
    assert {path.partition("/")[0] for path in _files(tmp_path / "copy")} == {
        *("ledger.jsonl", "manifest-000001.json", "samples", "shards"),
    }
    # What an older shardflow copied is made whole by copying again.
    report = _copy(capsys, source, tmp_path / "copy")
    assert report["num_copied_files"] == 2 + 6 + 6
    assert _files(tmp_path / "copy") == _files(source)
    assert cli.main(["copy", str(source), str(tmp_path / "copy")]) == 0
    said = capsys.readouterr().out
    assert "with view entity, version 1 (" in said
    assert said.count("with tokens of ") == 2
    assert " for view entity, version 1 (" in said


@pytest.mark.parametrize("name", ["entities.tbl", "ids-000001.tbl", "counts.tbl"])
def test_a_damaged_table_leaves_no_dataset(source: Path, tmp_path: Path, name: str) -> None:
    path = next(source.rglob(name))
    flip(path, path.stat().st_size * 4)
    with pytest.raises(ChecksumError, match=r"must have the manifest's sha256, got another \(the source\)"):
        copy_dataset(LocalStore(source), LocalStore(tmp_path / "copy"))
    there = LocalStore(tmp_path / "copy").list("")
    assert path.relative_to(source).as_posix() not in there
    names = {each.rpartition("/")[2] for each in there}
    assert not names & {"view.json", "manifest.json", "manifest-000001.json"}


class _Recorder(LocalStore):
    """Remembers the names of what was put, in their order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.names: list[str] = []

    def put_new(self, path: str, data: bytes) -> None:
        super().put_new(path, data)
        self.names.append(path)

    def put_stream(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        super().put_stream(path, chunks, num_bytes)
        self.names.append(path)


def test_a_manifest_comes_after_what_it_names_and_the_datasets_last(source: Path, tmp_path: Path) -> None:
    target = _Recorder(tmp_path / "copy")
    copy_dataset(LocalStore(source), target)
    assert sorted(target.names) == LocalStore(source).list("")
    said = [name for name in target.names if name.endswith(".json")]
    assert target.names[-len(said) :] == said
    assert [name.partition("/")[0] for name in said] == ["views", "tokens", "tokens", "manifest-000001.json"]


@pytest.mark.parametrize("name", ["view.json", "manifest.json"])
def test_a_damaged_manifest_is_found_before_anything_is_copied(
    source: Path, tmp_path: Path, name: str
) -> None:
    path = next(source.rglob(name))
    path.write_bytes(path.read_bytes().replace(b'"num_s', b'"NUM_s'))
    with pytest.raises(FormatError, match="delete its folder"):
        copy_dataset(LocalStore(source), LocalStore(tmp_path / "copy"))
    assert not LocalStore(tmp_path / "copy").list("")
    copy_dataset(LocalStore(source), LocalStore(tmp_path / "copy"), with_sidecars=False)
    assert verify(tmp_path / "copy").is_whole


def test_another_view_of_the_name_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copy_dataset(LocalStore(source), LocalStore(target), with_sidecars=False)
    build_view(Dataset.open(target), EntityRules(threshold=0.9))
    before = _files(target)
    with pytest.raises(ConfigError, match=r"no other views/entity/.*--no-sidecars"):
        copy_dataset(LocalStore(source), LocalStore(target))
    assert _files(target) == before


def test_only_those_of_the_copied_versions_come_along(source: Path, tmp_path: Path) -> None:
    first = Dataset.open(source).manifest
    second = dataclasses.replace(first, manifest_version=2, parent=first.dataset_id, extra={"note": "two"})
    commit(LocalStore(source), second)
    build_view(Dataset.open(source), EntityRules(threshold=0.9), name="sure")
    unfinished = source / view_folder("half", second.dataset_id)
    unfinished.mkdir(parents=True)
    (unfinished / ".part-000000.tbl").write_bytes(b"a part")
    report = copy_dataset(LocalStore(source), LocalStore(tmp_path / "copy"), newest_only=True)
    assert [(view.name, view.version) for view in report.views] == [("sure", 2)]
    assert report.tokens == ()
    assert report.notes == (
        f"views/half/{second.dataset_id} was left behind: it is of a job that is not done",
    )
    beside = [path for path in _files(tmp_path / "copy") if path.startswith(("views/", "tokens/"))]
    assert beside == [f"views/sure/{second.dataset_id}/{name}" for name in ("entities.tbl", "view.json")]


def test_a_source_that_cannot_list_keeps_them_and_it_is_said(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with WebServer(source) as web:
        assert cli.main(["copy", web.url, str(tmp_path / "copy")]) == 0
    assert "note: what else is beside the shards was not looked for" in capsys.readouterr().out
    assert verify(tmp_path / "copy").is_whole
