"""What lies beside a dataset is verified: bytes, and whose they are."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardflow.cli import main as cli
from shardflow.format import Damage, Dataset, verify
from shardflow.format.entities import EntityDataset, EntityManifest, EntityRules, view_folder
from shardflow.format.keys import sha256_hex
from shardflow.format.manifest import commit
from shardflow.format.table import Table, encode_table
from shardflow.format.token_manifest import tokens_folder
from shardflow.format.tokens import encode_counts
from shardflow.reports.entity_views import build_view
from shardflow.storage import LocalStore
from tests.entity_datasets import make_entity_dataset
from tests.object_stores import WebServer
from tests.sidecars import make_with_sidecars
from tests.unit.format.tampering import flip, sign


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beside")
    make_with_sidecars(folder)
    return folder / "data"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "data")


def _view(folder: Path) -> Path:
    return folder / view_folder("entity", Dataset.open(folder).dataset_id)


def _tokens(folder: Path, *, of_view: bool = False) -> Path:
    dataset = Dataset.open(folder)
    (tokenizer,) = (path.name for path in (folder / "tokens").iterdir())
    owner = EntityDataset.beside(dataset).dataset_id if of_view else dataset.dataset_id
    return folder / tokens_folder(tokenizer, owner)


def _damages(folder: Path) -> dict[str, Damage]:
    found = verify(folder).damages
    damages = {damage.path: damage for damage in found}
    assert len(damages) == len(found), "one damage a file"
    return damages


def test_whole_ones_are_counted_and_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(folder)
    assert (report.is_whole, report.notes) == (True, ())
    assert (report.num_views, report.num_tokenizations) == (1, 2)
    assert report.num_files == sum(path.is_file() for path in folder.rglob("*"))
    assert report.num_bytes == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert cli.main(["verify", str(folder)]) == 0
    assert "1 entity view, 2 tokenizations" in capsys.readouterr().out


def test_a_flipped_bit_in_any_file_beside_is_found(folder: Path) -> None:
    paths = [path for root in ("views", "tokens") for path in (folder / root).rglob("*") if path.is_file()]
    assert len(paths) == 2 + 2 + 2 + 2 * 4  # of the view, then manifest, counts and ids of 4 shards each
    for path in paths:
        flip(path, path.stat().st_size * 4 + 1)
        damages = _damages(folder)
        assert path.relative_to(folder).as_posix() in damages
        flip(path, path.stat().st_size * 4 + 1)
        assert not _damages(folder)


def test_a_missing_table_is_named(folder: Path) -> None:
    for path in (_view(folder) / "entities.tbl", _tokens(folder) / "ids-000001.tbl"):
        path.unlink()
    problems = {path.rpartition("/")[2]: damage.problem for path, damage in _damages(folder).items()}
    assert problems == {"entities.tbl": "missing", "ids-000001.tbl": "missing"}


def test_those_of_another_version_are_named(folder: Path, tmp_path: Path) -> None:
    """Somebody moved the folders of version 1 to where version 2 looks for its own."""
    first = Dataset.open(folder).manifest
    views, tokens = _view(folder), _tokens(folder)
    second = dataclasses.replace(first, manifest_version=2, parent=first.dataset_id, extra={"note": "two"})
    commit(LocalStore(folder), second)
    for place in (views, tokens):
        shutil.copytree(place, place.with_name(second.dataset_id))
    damages = _damages(folder)
    expected = {
        f"views/entity/{second.dataset_id}/view.json": "make the view again",
        f"tokens/{tokens.parent.name}/{second.dataset_id}/manifest.json": "tokenize again",
    }
    assert damages.keys() == expected.keys()
    for path, remedy in expected.items():
        assert "got another's" in damages[path].problem
        assert remedy in damages[path].problem


def test_a_fitting_manifest_does_not_make_a_table_of_another_version_right(folder: Path) -> None:
    view, tokens = _view(folder), _tokens(folder)
    body = (view / "view.json").read_bytes()
    entities = Table(memoryview((view / "entities.tbl").read_bytes()), name="entities.tbl")
    columns = {name: np.array(entities.column(name)) for name in entities.column_names}

    def with_table(data: bytes) -> None:
        (view / "entities.tbl").write_bytes(data)
        manifest = EntityManifest.decode(body, name="view.json")
        manifest = dataclasses.replace(manifest, num_bytes=len(data), sha256=sha256_hex(data))
        (view / "view.json").write_bytes(manifest.encode())

    name = (view / "entities.tbl").relative_to(folder).as_posix()
    with_table(encode_table(columns, {**entities.meta, "dataset_id": "0" * 64}))
    assert "another view or version" in _damages(folder)[name].problem
    columns["row_in_shard"][2] += 1
    with_table(encode_table(columns, entities.meta))
    assert _damages(folder)[name].problem == "a row that lies elsewhere than its study (row 2)"
    columns["row_in_shard"][2] -= 1
    with_table(encode_table(columns, entities.meta))
    assert not _damages(folder)

    counts = np.array(Table(memoryview((tokens / "counts.tbl").read_bytes()), name="c").column("text_tokens"))
    counts[0] += 1
    table = encode_counts(counts, tokenizer=tokens.parent.name, dataset_id=tokens.name)
    (tokens / "counts.tbl").write_bytes(table)
    said = json.loads((tokens / "manifest.json").read_bytes())
    (tokens / "manifest.json").write_bytes(sign({**said, "counts_sha256": sha256_hex(table)}))
    ((path, damage),) = _damages(folder).items()
    assert path.endswith("ids-000000.tbl")
    assert damage.problem == "other numbers of tokens than the table of counts"
    said["num_samples"] -= 1
    (tokens / "manifest.json").write_bytes(sign(said))
    ((path, damage),) = _damages(folder).items()
    assert (path.rpartition("/")[2], damage.problem) == ("manifest.json", "13 samples instead of 14")


def test_what_nothing_reads_is_a_note(folder: Path, tmp_path: Path) -> None:
    other = make_entity_dataset(tmp_path / "other", splits={"train": 3})
    build_view(other, EntityRules())
    shutil.copytree(tmp_path / "other" / "views", folder / "views", dirs_exist_ok=True)
    (_tokens(folder, of_view=True) / "manifest.json").unlink()
    report = verify(folder)
    assert report.is_whole
    assert (report.num_views, report.num_tokenizations) == (1, 1)
    assert len(report.notes) == 2
    strange, unfinished = sorted(report.notes, key=lambda note: "not done" in note)
    assert strange.startswith(f"views/entity/{other.dataset_id} belongs to no version")
    assert unfinished.startswith("tokens/")


def test_a_damaged_manifest_of_the_dataset_hides_no_shard_and_no_view_is_taken_for_samples(
    folder: Path,
) -> None:
    flip(folder / "manifest-000001.json", 1000)
    report = verify(folder)
    assert [damage.path for damage in report.damages] == ["manifest-000001.json"]
    assert report.num_shards == 4
    assert (report.num_views, report.num_tokenizations) == (0, 0)
    assert sum("belongs to no version of this dataset that can be read" in note for note in report.notes) == 3


def test_a_store_that_cannot_list_says_so(folder: Path) -> None:
    with WebServer(folder) as web:
        report = verify(web.url)
    assert report.is_whole
    assert any("what else is beside the shards was not looked for" in note for note in report.notes)
