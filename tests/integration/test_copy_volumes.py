"""Copies that store volumes in bricks or slices again: equal bytes there and back, those of packing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.errors import ChecksumError, FormatError
from shardflow.format import Dataset, verify
from shardflow.format.codecs import decode_field
from shardflow.format.copies.subset import copy_subset
from shardflow.format.facts.series import open_series
from shardflow.format.facts.studies import open_studies
from shardflow.format.index import ShardIndex
from shardflow.format.keys import parse_slice_field, parse_volume_field
from shardflow.format.table import Table, encode_table
from shardflow.format.tables import StoredColumn, write_table
from tests.dicom_factory import make_study
from tests.forks import run
from tests.integration.loader_support import flip_bit, locate
from tests.pack_case import PackCase, tree_digests

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("packs_inline")]


def _pack(folder: Path, settings: str, codec: str = "htj2k") -> Dataset:
    folder.mkdir(exist_ok=True)
    case = PackCase(folder)
    case.prepare()
    make_study(case.dicom / "a", patient="A", num_slices=37, size=(70, 50), seed=1)
    make_study(case.dicom / "b", patient="B", num_slices=4, size=(40, 33), seed=2)
    make_study(case.dicom / "c", patient="C", num_slices=9, size=(70, 50), seed=3, modality="MR")
    make_study(case.dicom / "d", patient="D", num_slices=1, size=(30, 40), seed=4)
    make_study(case.dicom / "e", patient="E", num_slices=6, size=(33, 64), seed=5)
    text = case.config_path.read_text(encoding="utf-8").replace('"10KiB"', f'"64KiB"\ncodec = "{codec}"')
    case.config_path.write_text(text + settings, encoding="utf-8")
    case.write_faults()
    case.pack()
    return case.open()


@pytest.fixture(scope="module")
def in_slices(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    made = _pack(tmp_path_factory.mktemp("slices"), "[variants]\nsmall_px = 16\n")
    series = np.arange(open_series(made)[0].num_series)
    scores = StoredColumn(name="score", kind="int", values=series, is_missing=series < 0)
    write_table(made.store, made.dataset_id, "scores", "series", [scores])
    return Dataset.open(made.store.url)


@pytest.fixture(scope="module")
def packed_in_bricks(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    settings = '[variants]\nsmall_px = 16\n[volumes]\nstorage = "bricks"\n'
    return _pack(tmp_path_factory.mktemp("packed"), settings)


@pytest.fixture(scope="module")
def in_bricks(in_slices: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    target = tmp_path_factory.mktemp("bricks") / "out"
    assert cli.main(["copy", in_slices.store.url, str(target), "--volumes", "bricks"]) == 0
    return Dataset.open(target)


def test_slices_become_the_bricks_of_packing(
    in_slices: Dataset, in_bricks: Dataset, packed_in_bricks: Dataset
) -> None:
    assert verify(in_bricks.store.url).is_whole
    assert in_bricks.manifest.format_version == 2
    assert sum(shard.num_volumes for shard in in_bricks.manifest.shards) == 4  # not the single slice
    for row in range(in_slices.studies.num_samples):
        key = in_slices.studies.sample_key(row)
        packed = packed_in_bricks.studies.find(key)
        assert in_bricks.studies.sample_key(row) == key
        assert in_bricks.read_fields(row) == packed_in_bricks.read_fields(packed)
        assert open_series(in_bricks)[0].facts_of(row) == open_series(packed_in_bricks)[0].facts_of(packed)
    for column in ("num_series", "num_slices", "rows", "columns", "modality", "text_bytes"):
        mine, theirs = in_bricks.studies.column(column), in_slices.studies.column(column)
        assert np.array_equal(mine, theirs), column
    for name in open_studies(in_slices)[0].column_names:
        mine, theirs = (open_studies(one)[0].array(name) for one in (in_bricks, in_slices))
        assert np.array_equal(mine, theirs), name
    assert tuple(in_bricks.tables) == ("scores",)


def test_bricks_become_the_slices_that_were(in_slices: Dataset, in_bricks: Dataset, tmp_path: Path) -> None:
    assert cli.main(["copy", in_bricks.store.url, str(tmp_path / "back"), "--volumes", "slices"]) == 0
    back = Dataset.open(tmp_path / "back")
    assert verify(back.store.url).is_whole
    assert back.manifest.format_version == 1
    for mine, theirs in zip(back.manifest.shards, in_slices.manifest.shards, strict=True):
        assert (mine.sha256, mine.index.sha256) == (theirs.sha256, theirs.index.sha256)
    for row in range(back.studies.num_samples):
        assert open_series(back)[0].facts_of(row) == open_series(in_slices)[0].facts_of(row)


def test_fast_slices_and_bricks_have_equal_values_and_go_there_and_back(
    in_slices: Dataset, in_bricks: Dataset, tmp_path: Path
) -> None:
    fast = _pack(tmp_path / "fast", "[variants]\nsmall_px = 16\n", "fast")
    text = '[variants]\nsmall_px = 16\n[volumes]\nstorage = "bricks"\n'
    fast_bricks = _pack(tmp_path / "fast-bricks", text, "fast")
    rows = np.arange(fast.studies.num_samples)
    copy_subset(fast, rows, tmp_path / "bricks", volumes="bricks")
    copy_subset(Dataset.open(tmp_path / "bricks"), rows, tmp_path / "back", volumes="slices")
    copy_subset(in_bricks, rows, tmp_path / "other", volumes="slices", codec="fast")
    bricks, back, other = (Dataset.open(tmp_path / name) for name in ("bricks", "back", "other"))
    for dataset in (fast, fast_bricks, bricks, back, other):
        assert verify(dataset.store.url).is_whole
    for row in rows.tolist():
        key, found = fast.studies.sample_key(row), fast.read_fields(row)
        assert back.read_fields(row) == found
        assert bricks.read_fields(row) == fast_bricks.read_fields(fast_bricks.studies.find(key))
        slices = {name for name in found if parse_slice_field(name) is not None}
        assert {name.rpartition(".")[2] for name in slices} == {"b2nd"}
        for dataset in (in_slices, other):
            there = dataset.read_fields(dataset.studies.find(key))
            for name in slices:
                stored = name if name in there else name.replace(".b2nd", ".htj2k")
                assert np.array_equal(decode_field(name, found[name]), decode_field(stored, there[stored]))
    volumes = [name for name in fast_bricks.read_fields(0) if parse_volume_field(name) is not None]
    frames = fast_bricks.read_fields(0), in_bricks.read_fields(0)
    assert all(frames[0][name] != frames[1][name] for name in volumes)


def test_a_codec_without_a_change_of_storage_is_refused(
    in_slices: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["copy", in_slices.store.url, str(tmp_path / "x"), "--codec", "fast"]) == 2
    assert "add --volumes" in capsys.readouterr().err


def test_a_codec_that_changes_no_volume_is_said(
    in_slices: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--volumes", "slices", "--codec", "fast"]
    assert cli.main(["copy", in_slices.store.url, str(tmp_path / "x"), *options]) == 0
    assert "note: no volume of SRC changes to slices, so none is in fast" in capsys.readouterr().out
    options[1] = "bricks"
    assert cli.main(["copy", in_slices.store.url, str(tmp_path / "y"), *options]) == 0
    assert "note: no volume" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["volume", None])
def test_volumes_that_a_user_wrote_become_bricks(
    tmp_path: Path, kind: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their study need not state what slices say by themselves, but that they are a volume."""
    voxels = np.random.default_rng(0).integers(-900, 900, (3, 20, 24, 26)).astype(np.int16)
    affine = np.diag([0.8, 0.8, 2.5, 1.0]).tolist()
    stated = {"modality": "CT", "unit": "HU", "affine_lps": affine, "slice_spacing_mm": 2.5}
    with sf.ShardWriter(str(tmp_path / "data"), splits={"train": 1}) as writer:
        for number, volume in enumerate(voxels):
            series = stated if kind is None else {**stated, "kind": kind}
            writer.write({"__key__": f"ct{number}", "s000.b2nd": volume, "study.json": {"series": [series]}})
    assert cli.main(["attach", str(tmp_path / "data"), "--facts"]) == 0
    assert cli.main(["copy", str(tmp_path / "data"), str(tmp_path / "bricks"), "--volumes", "bricks"]) == 0
    said = capsys.readouterr().out
    assert verify(tmp_path / "bricks").is_whole
    made = Dataset.open(tmp_path / "bricks")
    if kind is None:
        assert "note: no volume of SRC changes to bricks; a volume is a series of kind 'volume'" in said
        assert made.manifest.format_version == 1
        return
    assert "3 volumes stored in bricks" in said
    assert made.manifest.format_version == 2
    former = Dataset.open(tmp_path / "data")
    for row in range(3):
        assert np.array_equal(made.read_volume(row, 0), voxels[int(made.studies.sample_key(row)[2:])])
        mine, theirs = (
            [{**facts, "codec": ""} for facts in open_series(one)[0].facts_of(row)] for one in (made, former)
        )
        assert mine == theirs
    assert cli.main(["attach", str(tmp_path / "bricks"), "--facts"]) == 0
    copy_subset(made, np.arange(3), tmp_path / "back", volumes="slices")
    back = Dataset.open(tmp_path / "back")
    for row in range(3):
        again, before = back.read_fields(row), former.read_fields(row)
        assert {**again, "study.json": b""} == {**before, "study.json": b""}


def test_without_other_members_the_manifest_names_the_codec(tmp_path: Path) -> None:
    """No small version says what the slices were."""
    made = _pack(tmp_path / "job", "")
    rows = np.flatnonzero(np.asarray(made.studies.column("num_slices")) > 1)
    copy_subset(made, rows, tmp_path / "bricks", volumes="bricks")
    copy_subset(Dataset.open(tmp_path / "bricks"), np.arange(len(rows)), tmp_path / "back", volumes="slices")
    back = Dataset.open(tmp_path / "back")
    for row, former in enumerate(rows.tolist()):
        assert back.read_fields(row) == made.read_fields(former)


def test_a_part_keeps_its_bricks_and_changes_with_where(
    in_bricks: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--where", "facts.num_slices >= 6"]
    for name, volumes in (("kept", []), ("slices", ["--volumes", "slices"])):
        assert cli.main(["copy", in_bricks.store.url, str(tmp_path / name), *where, *volumes, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["num_volumes"] == 3 * bool(volumes)
        assert verify(str(tmp_path / name)).is_whole
    kept, slices = Dataset.open(tmp_path / "kept"), Dataset.open(tmp_path / "slices")
    assert sum(shard.num_volumes for shard in kept.manifest.shards) == kept.studies.num_samples == 3
    for row in range(3):
        former = in_bricks.studies.find(kept.studies.sample_key(row))
        volume = in_bricks.read_volume(former, 0)
        assert np.array_equal(kept.read_volume(row, 0), volume)
        assert kept.read_fields(row) == in_bricks.read_fields(former)
        names = slices.slice_names(row, 0)
        fields = slices.read_fields(row, names)
        decoded = [decode_field(name, fields[name]) for name in names]
        assert np.array_equal(np.stack(decoded), volume)


def test_a_killed_copy_is_no_dataset_and_starts_again(
    in_slices: Dataset, in_bricks: Dataset, tmp_path: Path
) -> None:
    code = (
        "import os, signal, sys, numpy\n"
        "from pathlib import Path\n"
        "from shardflow.format import Dataset\n"
        "from shardflow.format.copies.subset import copy_subset\n"
        "def stop(done, total):\n"
        f"    if done == total - 1: os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
        "source = Dataset.open(sys.argv[1])\n"
        "rows = numpy.arange(source.studies.num_samples)\n"
        "copy_subset(source, rows, Path(sys.argv[2]), volumes='bricks', progress=stop)\n"
    )
    target = tmp_path / "out"
    killed = run(["-c", code, in_slices.store.url, target])
    assert killed.returncode == -signal.SIGKILL
    assert list(target.rglob("*.tar*"))
    assert not list(target.glob("manifest-*"))
    assert cli.main(["copy", in_slices.store.url, str(target), "--volumes", "slices"]) == 2
    assert cli.main(["copy", in_slices.store.url, str(target), "--volumes", "bricks"]) == 0
    assert tree_digests(target) == tree_digests(Path(in_bricks.store.url.removeprefix("file://")))


def _longest(dataset: Dataset) -> int:
    return int(np.argmax(np.asarray(dataset.studies.column("num_slices"))))


@pytest.mark.parametrize("volumes", ["bricks", "slices"])
def test_damage_is_named_and_never_copied(
    in_slices: Dataset, in_bricks: Dataset, tmp_path: Path, volumes: str
) -> None:
    source = in_slices if volumes == "bricks" else in_bricks
    copied = tmp_path / "source"
    assert cli.main(["copy", source.store.url, str(copied)]) == 0
    source = Dataset.open(copied)
    row = _longest(source)
    is_pixels = parse_slice_field if volumes == "bricks" else parse_volume_field
    names = [field.name for field in source.sample_fields(row)[1] if is_pixels(field.name) is not None]
    name = names[len(names) // 2]
    path, offset, num_bytes = locate(source, row, name)
    flip_bit(path, offset + num_bytes // 2)
    rows = np.arange(source.studies.num_samples)
    with pytest.raises(ChecksumError) as found:
        copy_subset(source, rows, tmp_path / "out", volumes=volumes)  # type: ignore[arg-type]
    assert path.stem in str(found.value)
    assert name in str(found.value)
    assert not list((tmp_path / "out").glob("manifest-*"))


def test_a_missing_slice_is_named(in_slices: Dataset, tmp_path: Path) -> None:
    """An index, valid by itself, that has lost a slice."""
    copied = tmp_path / "source"
    assert cli.main(["copy", in_slices.store.url, str(copied)]) == 0
    source = Dataset.open(copied)
    row = _longest(source)
    shard = int(source.studies.gather("shard", row))
    entry = source.manifest.shards[shard]
    table = Table(source.store.map(entry.index.path), name="i")
    meta = json.loads(json.dumps(table.meta))
    place = meta["field_names"].index("s000.i0005.htj2k")
    meta["field_names"][place] = "s000.j0005.htj2k"
    index = ShardIndex.decode(
        Table(memoryview(encode_table({n: table.column(n) for n in table.column_names}, meta)), name="i")
    )
    source.shard_index = lambda number: index  # type: ignore[method-assign,assignment]
    with pytest.raises(FormatError, match=rf"must have its 37 slices, got 36 .*{entry.name}.*s000\.i0005"):
        copy_subset(source, np.array([row]), tmp_path / "out", volumes="bricks")
    assert not list((tmp_path / "out").glob("manifest-*"))
