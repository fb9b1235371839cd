"""Tables beside datasets of tars that others wrote, indexed and copied: written, and read again."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import shardflow as sf
from shardflow.cli.main import main
from shardflow.format import Dataset
from shardflow.format.facts.columns import open_columns
from shardflow.format.foreign.places import local_folder
from shardflow.loading.column_writer import ColumnWriter
from shardflow.storage import CacheConfig, LocalStore, open_store
from shardflow.training.text import train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.factories import make_dataset
from tests.foreign_tars import make_members, python_tar
from tests.integration.loader_support import open_loader

NUM_SAMPLES = 13
SPEC = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    (tmp_path / "tars").mkdir()
    python_tar(tmp_path / "tars" / "a-0.tar", make_members(range(6), folder="d/"))
    python_tar(tmp_path / "tars" / "a-1.tar", make_members(range(6, NUM_SAMPLES), folder="d/"))
    return tmp_path / "tars"


def write_csv(path: Path, key: str, rows: list[tuple[str, int]]) -> str:
    """Write a table of a class and a number for each sample but the last."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([key, "odd", "score"])
        lines.writerows((name, number % 2, number / 4) for name, number in rows[:-1])
    return str(path)


def check_tables(url: str, beside: Path, keys: list[tuple[str, int]], version: int) -> None:
    """Write tables of all kinds beside a dataset as version ``version``, and read each back."""
    beside.mkdir()
    by_path = write_csv(
        beside / "path.csv", "path", [(f"d/Case_{number:04d}", number + version) for _, number in keys]
    )
    by_key = write_csv(beside / "key.csv", "sample_key", [(key, number + version) for key, number in keys])
    assert main(["attach", url, by_path, "--name", "placed", "--on", "path"]) == 0
    assert main(["attach", url, by_key, "--name", "keyed", "--on", "sample_key"]) == 0
    assert main(["folds", url, "--k", "3", "--stratify", "keyed.odd", "--name", f"folds{version}"]) == 0

    fields = {
        "placed": sf.Column("placed.score", missing="pad"),
        "keyed": sf.Column("keyed.score", missing="pad"),
        "fold": sf.Column(f"folds{version}.fold"),
        "meta": sf.Json(member="meta.json"),
    }
    seen = []
    with open_loader(sf.open(url), SPEC, fields) as loader:
        writer = ColumnWriter(loader, name="predictions", columns={"twice": "int"})
        for batch in loader:
            for slot in np.flatnonzero(batch.info.weight).tolist():
                number = batch["meta"][slot]["number"]
                seen.append(number)
                assert batch["placed_mask"][slot] == batch["keyed_mask"][slot] == (number != NUM_SAMPLES - 1)
                if number != NUM_SAMPLES - 1:
                    assert batch["placed"][slot] == batch["keyed"][slot] == (number + version) / 4
                assert batch["fold"][slot] in range(3)
            numbers = [0 if one is None else one["number"] for one in batch["meta"]]
            writer.add(batch, twice=np.array(numbers) * 2 + version)
        done = writer.finish()
    assert sorted(seen) == list(range(NUM_SAMPLES))
    assert done is not None
    assert (done.number, done.num_samples) == (version, NUM_SAMPLES)

    rows = beside / "rows.csv"
    new, shown = f"quality{version}", ["--show", "predictions.twice", "-o", str(rows)]
    assert main(["review", url, "--table", new, "--add", "ok", *shown]) == 0
    with rows.open(newline="") as file:
        filled = list(csv.DictReader(file))
    for row in filled:
        row[f"{new}.ok"] = str(int(row["predictions.twice"]) > 9)
    with rows.open("w", newline="") as file:
        lines = csv.DictWriter(file, filled[0])
        lines.writeheader()
        lines.writerows(filled)
    assert main(["review", url, "--read", str(rows)]) == 0
    # And a table that is there: its next version.
    again = beside / "again.csv"
    assert main(["review", url, "--table", new, "-o", str(again)]) == 0
    assert main(["review", url, "--read", str(again), "--mark", "seen"]) == 0

    dataset = sf.open(url)
    columns = open_columns(dataset)
    number_of = dict(keys)
    expected = [number_of[dataset.studies.sample_key(row)] * 2 + version for row in range(NUM_SAMPLES)]
    assert columns.stored("predictions.twice").values.tolist() == expected
    assert columns.stored(f"{new}.ok").values.tolist() == [value > 9 for value in expected]
    assert columns.stored(f"{new}.seen").values.all()
    chosen = open_loader(dataset, SPEC, {"ok": sf.Column(f"{new}.ok")}, where=f"{new}.ok and keyed.odd == 1")
    with chosen as loader:
        assert loader.selection.population_of(0).sum() == sum(
            value > 9 and (value - version) // 2 < NUM_SAMPLES - 1 and ((value - version) // 2 + version) % 2
            for value in expected
        )


def test_tables_are_written_beside_indexed_tars_and_beside_a_copy(
    tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, copied = str(tmp_path / "indexed"), str(tmp_path / "copied")
    assert main(["index", str(tars / "a-*.tar"), "-o", url]) == 0
    dataset = sf.open(url)
    originals = {dataset.studies.sample_key(row): dataset.original_key(row) for row in range(NUM_SAMPLES)}
    keys = sorted(((key, int(name[-4:])) for key, name in originals.items()), key=lambda one: one[1])
    before = {path: path.read_bytes() for path in tars.iterdir()}
    check_tables(url, tmp_path / "first", keys, 1)
    assert {path: path.read_bytes() for path in tars.iterdir()} == before

    assert main(["copy", url, copied]) == 0
    assert sf.open(copied).tables == sf.open(url).tables
    for path in before:
        path.unlink()
    check_tables(copied, tmp_path / "second", keys, 2)
    assert sf.open(url).tables["keyed"] != sf.open(copied).tables["keyed"]

    assert main(["attach", copied, "--name", "placed", "--remove"]) == 0
    assert "placed" not in sf.open(copied).tables
    capsys.readouterr()
    assert main(["attach", copied, "--delete-old", "--runs", "none", "--json"]) == 0
    deleted = {(one["name"], one["number"]) for one in json.loads(capsys.readouterr().out)["deleted"]}
    assert {("keyed", 1), ("placed", 1), ("placed", 2), ("placed", 3)} <= deleted


def test_tokens_of_indexed_tars_are_stored_and_read(tars: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "indexed")
    assert main(["index", str(tars / "a-*.tar"), "-o", url]) == 0
    make_dataset(tmp_path / "words", num_samples=20)
    train_tokenizer(Dataset.open(tmp_path / "words"), "train", 300, tmp_path / "bpe")
    tokenizer = TextTokenizer(tmp_path / "bpe")
    assert tokenize_dataset(Dataset.open(url), tokenizer).num_samples == NUM_SAMPLES
    fields = {
        "ids": sf.Tokens(tokenizer=tokenizer.digest, max_tokens=64, missing="pad"),
        "text": sf.Text(missing="pad"),
    }
    with open_loader(sf.open(url), SPEC, fields) as loader:
        for batch in loader:
            for slot in np.flatnonzero(batch.info.weight * batch["text_mask"]).tolist():
                found = batch["ids"][slot][batch["ids_mask"][slot] > 0].tolist()
                assert found == tokenizer.encode([batch["text"][slot]])[0]


def test_the_folder_of_a_dataset_is_found_behind_its_stores(tars: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "indexed")
    assert main(["index", str(tars / "a-*.tar"), "-o", url]) == 0
    cached = sf.open(url, cache=CacheConfig(ram_bytes=1 << 20))
    for store in (open_store(url), sf.open(url).store, cached.store):
        found = local_folder(store)
        assert isinstance(found, LocalStore)
        assert found.root == Path(url)
    assert local_folder(open_store("s3://bucket/chest")) is None


def test_a_table_is_written_from_a_dataset_that_is_read_through_a_cache(tars: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "indexed")
    assert main(["index", str(tars / "a-*.tar"), "-o", url]) == 0
    cache = CacheConfig(directory=tmp_path / "cache", max_bytes=1 << 24, min_free_bytes=0)
    for version in (1, 2):
        cached = sf.open(url, cache=cache)
        assert cached.cache is not None
        with open_loader(cached, SPEC, {}) as loader:
            writer = ColumnWriter(loader, name="predictions", columns={"seen": "int"})
            for batch in loader:
                writer.add(batch, seen=batch.arrays["row"] * version)
            done = writer.finish()
        assert done is not None
        assert done.number == version
        for opened in (sf.open(url), sf.open(url, cache=cache)):
            found = open_columns(opened).stored("predictions.seen").values.tolist()
            assert found == [row * version for row in range(NUM_SAMPLES)]
