"""Predictions of all ranks become one table: the same on any number of ranks, and after kill -9."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ConfigError, StateError, WaitTimeoutError
from shardflow.format import Dataset
from shardflow.format.facts.columns import image_starts, open_columns
from shardflow.format.facts.series import open_series
from shardflow.loading import Batch, World
from shardflow.loading.column_writer import ColumnWriter, WrittenTable
from shardflow.storage import write_atomic
from tests.field_cases import make_case_dataset
from tests.forks import run
from tests.integration.loader_support import open_loader

SPEC = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
COLUMNS: dict[str, Any] = {
    "edema": "float",
    "grade": ["severe", "mild"],
    "count": "int",
    "sure": "bool",
    "vector": "floats",
}
ROWS = "tables/predictions-000001/*/rows.tbl"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_case_dataset(tmp_path_factory.mktemp("writer") / "data")


def predictions(batch: Batch) -> dict[str, Any]:
    """What a model says, a function of the row; padding holds what a table must never hold."""
    row = np.where(batch.arrays["weight"] > 0, batch.arrays["row"], -1000)
    return {
        "edema": row[:, None] / 8 + 0.001,
        "grade": np.where(row >= 0, row % 2, -7),
        "count": row * 10,
        "sure": row % 3 == 0,
        "vector": np.stack([row, -row], axis=1),
    }


def predict(
    dataset: Dataset, folder: Path, world_size: int = 1, *, partial: bool = False, **settings: Any
) -> WrittenTable:
    """Run all ranks of a world one after another."""
    spec = settings.pop("spec", SPEC)
    worlds = [World(rank=rank, world_size=world_size) for rank in range(world_size)]
    loaders = [open_loader(dataset, spec, {}, world=world, **settings) for world in worlds]
    writers = [ColumnWriter(one, name="predictions", columns=COLUMNS, to=folder) for one in loaders]
    for loader, writer in zip(loaders, writers, strict=True):
        with loader:
            for number, batch in enumerate(loader):
                writer.add(batch, **predictions(batch))
                if number % 2:
                    writer.flush()
    results = [writer.finish(partial=partial) for writer in reversed(writers)]
    assert results[:-1] == [None] * (world_size - 1)
    assert results[-1] is not None
    return results[-1]


def rows_of(folder: Path) -> bytes:
    (path,) = folder.glob(ROWS)
    return path.read_bytes()


@pytest.mark.parametrize("unit", ["study", "series", "image"])
def test_tables_of_1_2_and_4_ranks_are_equal_and_read_as_columns(
    dataset: Dataset, tmp_path: Path, unit: str
) -> None:
    done = [predict(dataset, tmp_path / str(size), size, unit=unit) for size in (1, 2, 4)]
    assert len({rows_of(tmp_path / str(size)) for size in (1, 2, 4)}) == 1
    assert len({one.digest for one in done}) == 1
    assert not list(tmp_path.glob("*/tables/*-parts"))
    opened = sf.open(dataset.store.url, tables=[str(tmp_path / "4")])
    fields = {name: sf.Column(f"predictions.{name}") for name in COLUMNS}
    seen = 0
    with open_loader(opened, SPEC, fields, unit=unit) as loader:
        assert done[0].num_samples == len(np.flatnonzero(loader.selection.population_of(0)))
        for batch in loader:
            for slot in np.flatnonzero(batch.info.weight).tolist():
                row = int(batch.arrays["row"][slot])
                seen += 1
                assert (
                    batch["edema"][slot] == np.float32(row / 8 + 0.001)
                    or batch["edema"][slot] == row / 8 + 0.001
                )
                assert batch.info.classes["grade"][batch["grade"][slot]] == ("severe", "mild")[row % 2]
                assert (batch["count"][slot], batch["sure"][slot]) == (row * 10, row % 3 == 0)
                assert batch["vector"][slot].tolist() == [row, -row]
    assert seen == done[0].num_samples > 0


def test_a_value_of_an_image_is_at_its_image(dataset: Dataset, tmp_path: Path) -> None:
    predict(dataset, tmp_path, unit="image")
    opened = sf.open(dataset.store.url, tables=[str(tmp_path)])
    values = open_columns(opened).stored("predictions.count")
    first, starts = open_series(dataset)[0].first_series(), image_starts(dataset)
    with open_loader(dataset, SPEC, {}, unit="image") as loader:
        for batch in loader:
            for slot, place in enumerate(batch.info.units):
                if place is not None:
                    series = first[dataset.studies.find(place.study_key)] + place.series
                    assert values.values[starts[series] + place.image] == batch.arrays["row"][slot] * 10


def test_samples_that_come_twice_have_their_first_value(dataset: Dataset, tmp_path: Path) -> None:
    """Of weighted draws and epochs the first in the order of the run counts, for every number of ranks."""
    spec = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="repeat")
    for size in (1, 2, 4):
        worlds = [World(rank=rank, world_size=size) for rank in range(size)]
        loaders = [open_loader(dataset, spec, {}, world=world) for world in worlds]
        writers = [
            ColumnWriter(one, name="predictions", columns={"when": "int"}, to=tmp_path / str(size))
            for one in loaders
        ]
        for loader, writer in zip(loaders, writers, strict=True):
            for _ in range(2):
                for batch in loader:
                    when = (batch.epoch * 100 + batch.step) * 100 + batch.micro
                    writer.add(batch, when=[when] * batch.num_slots)
        done = [writer.finish() for writer in reversed(writers)][-1]
        assert done is not None
        assert done.num_missing == 0
        assert done.num_repeated >= done.num_samples  # each of the second epoch, and of the tail
        opened = sf.open(dataset.store.url, tables=[str(tmp_path / str(size))])
        found = open_columns(opened).column("predictions.when")
        train = opened.splits["train"]
        assert found.values[train.start : train.stop].max() < 100 * 100  # epoch 0
    assert len({rows_of(tmp_path / str(size)) for size in (1, 2, 4)}) == 1


def test_a_missing_sample_is_refused_unless_partial(dataset: Dataset, tmp_path: Path) -> None:
    with open_loader(dataset, SPEC, {}, world="single") as loader:
        writer = ColumnWriter(loader, name="predictions", columns=COLUMNS, to=tmp_path)
        for batch in list(loader)[1:]:
            writer.add(batch, **predictions(batch))
    with pytest.raises(ConfigError, match=r"of 1\d samples have no value .*partial=True"):
        writer.finish()
    assert not list(tmp_path.glob("tables/predictions-0*"))
    done = writer.finish(partial=True)
    assert done is not None
    assert done.num_missing > 0


def test_no_text_can_enter(dataset: Dataset, tmp_path: Path) -> None:
    """Neither parts nor the table hold a byte of a text of the batch; sample keys are not in them either."""
    with open_loader(dataset, SPEC, {}, world="single") as loader:
        writer = ColumnWriter(loader, name="predictions", columns=COLUMNS, to=tmp_path)
        keys = []
        for batch in loader:
            writer.add(batch, **predictions(batch))
            keys += [key for key in batch.sample_keys if key]
            with pytest.raises(ConfigError, match="needs numbers") as refused:
                writer.add(
                    batch, **{**predictions(batch), "edema": [f"CANARY{key}" for key in batch.sample_keys]}
                )
            assert "CANARY" not in str(refused.value)
        writer.flush()
        parts = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert any(path.suffix == ".tbl" for path in parts)
        written = b"".join(path.read_bytes() for path in parts)
        writer.finish()
    written += b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"CANARY" not in written
    assert not [key for key in keys if key.encode() in written]


# ---- kills -----------------------------------------------------------------------------------------------


KILLS = {
    "before the second part is there": ("link", "part-00000-000002.tbl"),
    "after a part, before the state": ("replace", "state.json"),
    "between the rows of the table and its manifest": ("link", "manifest.json"),
    "after the table": ("unlink", "session.json"),
}


def run_killed(url: str, folder: str, point: str) -> None:
    """Predict with a state saved after each flush; SIGKILL at a point."""
    call, ending = KILLS.get(point, ("", ""))

    def killing(function: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **settings: Any) -> Any:
            if any(str(one).endswith(ending) for one in arguments):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **settings)

        return changed

    if call:
        setattr(os, call, killing(getattr(os, call)))
    where, dataset = Path(folder), Dataset.open(url)
    state = where / "state.json"
    with open_loader(dataset, SPEC, {}, world="single") as loader:
        if state.exists():
            loader.load_state_dict(json.loads(state.read_text(encoding="utf-8")))
        writer = ColumnWriter(loader, name="predictions", columns=COLUMNS, to=where, resume=True)
        if loader.epoch == 0:
            for number, batch in enumerate(loader):
                writer.add(batch, **predictions(batch))
                if number % 4 == 3:
                    writer.flush()
                    write_atomic(state, [json.dumps(loader.state_dict()).encode()], replace=True)
        writer.finish()


@pytest.mark.parametrize("point", KILLS)
def test_kills_lose_and_double_nothing(dataset: Dataset, tmp_path: Path, point: str) -> None:
    predict(dataset, tmp_path / "whole")
    call = "from tests.integration.test_column_writer import run_killed; run_killed(%r, %r, %r)"
    folder = tmp_path / "killed"
    folder.mkdir()
    for one, code in ((point, -signal.SIGKILL), ("", 0)):
        done = run(["-c", call % (dataset.store.url, str(folder), one)])
        assert done.returncode == code, done.stderr
    assert rows_of(folder) == rows_of(tmp_path / "whole")
    assert not list(folder.glob("tables/*-parts"))


def test_slips_are_one_sentence(dataset: Dataset, tmp_path: Path) -> None:
    def make(**settings: Any) -> ColumnWriter:
        given = {
            "name": "scores",
            "columns": {"edema": "float"},
            "to": tmp_path,
            "world": "single",
            **settings,
        }
        return ColumnWriter(dataset, **given)

    for settings, words in (
        ({"name": "facts"}, "name of a table"),
        ({"columns": {}}, "at least one column"),
        ({"columns": {"Edema": "float"}}, "name of a column"),
        ({"columns": {"edema": "string"}}, "list of the names of its classes"),
        ({"columns": {"edema": ["clear", "1.2.840.113619.2.55.3"]}}, "no identifiers"),
    ):
        with pytest.raises(ConfigError, match=words):
            make(**settings)
    writer = make()
    with open_loader(dataset, SPEC, {}, world="single") as loader:
        batch = next(iter(loader))
    with open_loader(dataset, SPEC, {}, world="single", unit="series") as loader:
        series = next(iter(loader))
    added: list[tuple[Any, dict[str, Any], str]] = [
        (batch, {}, "a value for each column"),
        (batch, {"edema": [0.5]}, "the slots of the batch"),
        (batch, {"edema": ["a", "b"]}, "needs numbers"),
        (batch, {"edema": [np.nan, np.nan]}, "not a number"),
        (dict(batch), {"edema": [0.1, 0.2]}, "the batch of the loader"),
        (series, {"edema": [0.1, 0.2]}, "rows of unit 'study'"),
    ]
    for given, values, words in added:
        with pytest.raises(ConfigError, match=words):
            writer.add(given, **values)
    with pytest.raises(ConfigError, match="No value was added"):
        writer.finish()
    with pytest.raises(ConfigError, match="resume=True"):
        make()
    with pytest.raises(StateError, match="another columns"):
        make(columns={"edema": "int"}, resume=True)


def test_a_rank_that_never_ends_is_named(dataset: Dataset, tmp_path: Path) -> None:
    world = World(rank=0, world_size=2)
    writer = ColumnWriter(
        dataset, name="scores", columns={"edema": "float"}, to=tmp_path, world=world, timeout_s=0.1
    )
    with pytest.raises(WaitTimeoutError, match="rank 1 to call finish"):
        writer.finish()
