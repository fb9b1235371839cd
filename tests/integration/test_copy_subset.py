"""A copy of a part of a dataset: its samples alone, with facts, labels and persons, and whole by itself."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.errors import ChecksumError, ConfigError, StorageError
from shardflow.format import Dataset, verify
from shardflow.format.copies.subset import copy_subset
from shardflow.format.facts.columns import open_columns
from shardflow.format.facts.series import open_series
from shardflow.format.facts.studies import open_studies
from shardflow.format.tables import StoredColumn, write_table
from shardflow.storage import LocalStore
from tests.factories import make_dataset
from tests.forks import run
from tests.integration.loader_support import flip_bit, locate

NUM = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("subset") / "source"
    splits = {"test": 4, "train": 20}
    made = Dataset.open(make_dataset(folder, splits=splits, samples_per_shard=5, slices=(1, 4), facts=True))
    number = np.arange(NUM)
    column = StoredColumn(
        name="grade", kind="category", values=number % 3, is_missing=number % 7 == 0, names=("a", "b", "c")
    )
    write_table(made.store, made.dataset_id, "labels", "study", [column])
    series = np.arange(open_series(made)[0].num_series)
    of_series = StoredColumn(name="score", kind="int", values=series, is_missing=series < 0)
    write_table(made.store, made.dataset_id, "scores", "series", [of_series])
    return Dataset.open(folder)


def test_a_part_holds_its_samples_alone_and_reads_the_same(
    source: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "labels.grade in ('a', 'b') and facts.num_slices >= 2"
    target = tmp_path / "part"
    assert cli.main(["copy", source.store.url, str(target), "--where", where, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    grade = open_columns(source).column("labels.grade")
    assert grade.is_missing is not None
    slices = np.asarray(source.studies.column("num_slices"))
    chosen = np.flatnonzero((np.asarray(grade.values) < 2) & ~grade.is_missing & (slices >= 2))
    part = Dataset.open(target)
    assert part.dataset_id == report["dataset_id"] != source.dataset_id
    keys = [key.decode() for key in part.studies.column("sample_key").tolist()]
    assert keys == [source.studies.sample_key(row) for row in chosen.tolist()]
    assert verify(str(target)).is_whole
    for row, former in enumerate(chosen.tolist()):
        assert part.read_fields(row) == source.read_fields(former)
        assert open_series(part)[0].facts_of(row) == open_series(source)[0].facts_of(former)
    for name, column in open_columns(part).items():
        if column.unit == "study" and name != "facts.previous_row":
            mine, theirs = open_columns(part).column(name), open_columns(source).gather(name, chosen)
            assert _shown(mine) == _shown(theirs), name
    assert len(open_columns(part).stored("scores.score").values) == open_series(part)[0].num_series
    previous = open_studies(part)[0].array("previous_row")
    assert ((previous < len(chosen)) | (previous == previous.max())).all()
    spec = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")
    with sf.Loader(part, split="train", seed=3, batch=spec, where="labels.grade == 'a'") as loader:
        seen = [key for batch in loader for key in batch.info.sample_keys if key]
    assert seen
    others = [row for row in range(NUM) if row not in chosen]
    held = b"".join(path.read_bytes() for path in target.rglob("*") if path.is_file())
    assert not any(source.studies.sample_key(row).encode() in held for row in others)
    assert where.encode() not in held
    assert not (target / "copying.json").exists()


def _shown(column: Any) -> list[Any]:
    missing = np.zeros(len(column.values), bool) if column.is_missing is None else column.is_missing
    return [
        None if gone else column.names[value] if column.names is not None else value
        for value, gone in zip(column.values.tolist(), missing.tolist(), strict=True)
    ]


def test_a_killed_copy_starts_again_and_gives_the_same_bytes(source: Dataset, tmp_path: Path) -> None:
    rows = np.arange(0, NUM, 2)
    copy_subset(source, rows, tmp_path / "once", shard_bytes=20_000)
    assert len(list((tmp_path / "once" / "shards").glob("*.tar"))) > 2
    code = (
        "import os, signal, sys, numpy\n"
        "from pathlib import Path\n"
        "from shardflow.format import Dataset\n"
        "from shardflow.format.copies.subset import copy_subset\n"
        "def stop(done, total):\n"
        f"    if done == 9: os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        f"copy_subset(Dataset.open(sys.argv[1]), numpy.arange(0, {NUM}, 2), Path(sys.argv[2]),"
        " shard_bytes=20_000, progress=stop)\n"
    )
    killed = run(["-c", code, source.store.url, tmp_path / "twice"])
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(ConfigError, match="DST must be a new or empty folder"):
        copy_subset(source, rows[1:], tmp_path / "twice")
    copy_subset(source, rows, tmp_path / "twice", shard_bytes=20_000)
    files = [
        {
            path.relative_to(tmp_path / name).as_posix(): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file() and not path.name.endswith(".tmp")
        }
        for name in ("once", "twice")
    ]
    assert files[0] == files[1]


def test_what_cannot_be_copied_is_one_sentence(
    source: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    cases = (
        (
            str(tmp_path / "full"),
            ["--where", "labels.grade == 'a'"],
            "new or empty folder, it holds something",
        ),
        (str(tmp_path / "new"), ["--where", "labels.grade == 'z'"], "where= selects none of the 24"),
        (str(tmp_path / "new"), ["--where", "labels.grad == 'a'"], "did you mean labels.grade"),
        (str(tmp_path / "new"), ["--where", "labels.grade == 'a'", "--newest"], "apply to whole copies"),
        ("s3://bucket/part", ["--split", "train"], "DST is a URL; copy to a folder first"),
    )
    for target, arguments, sentence in cases:
        assert cli.main(["copy", source.store.url, target, *arguments]) == 2
        assert sentence in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "new").exists()


def test_a_damaged_field_stops_the_copy(tmp_path: Path) -> None:
    url = make_dataset(tmp_path / "data", num_samples=6, facts=True)
    path, offset, _ = locate(Dataset.open(url), 3, "study.json")
    flip_bit(path, offset)
    with pytest.raises((ChecksumError, StorageError)):
        copy_subset(Dataset.open(url), np.arange(6), tmp_path / "part")
    assert not (tmp_path / "part" / "manifest-000001.json").exists()
    assert not list(LocalStore(tmp_path / "part").list("manifest"))
