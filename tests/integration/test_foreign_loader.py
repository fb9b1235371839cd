"""Shards that others wrote stream with every guarantee: order, world size, resume, lanes, budgets, damage."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading import Batch, Loader, LoaderConfig, World
from shardflow.sampling import BatchSpec, CostRule, TokenBudget
from tests.foreign_tars import make_members, picture, python_tar, webdataset_groups
from tests.integration.loader_support import flip_bit, received_keys
from tests.object_stores import WebServer, s3_bucket

NUM_SAMPLES = 46
FIELDS = {
    "txt": sf.Text(missing="pad"),
    "meta": sf.Json(member="meta.json"),
    "jpg": sf.Image(member="jpg", missing="pad"),
    "png": sf.Image(member="png", missing="pad"),
    "npy": sf.Array(member="npy", max_shape=(6,), dtype="int64"),
}
FIXED = BatchSpec(micro_batch_size=3, micro_batches_per_step=4, tail="mask")
SPECS = {
    "fixed": FIXED,
    "lanes": BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask", lanes=2, window_bytes=8192),
    "budget": BatchSpec(
        budget=TokenBudget(max_tokens=200, max_samples=6, cost=CostRule()),
        micro_batches_per_step=2,
        tail="mask",
        lanes=2,
        window_bytes=16384,
    ),
}


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    (tmp_path / "tars").mkdir()
    bounds = [0, 9, 22, 30, 41, NUM_SAMPLES]
    return [
        python_tar(tmp_path / "tars" / f"a-{number:03d}.tar", make_members(range(first, last), folder="d/"))
        for number, (first, last) in enumerate(itertools.pairwise(bounds))
    ]


@pytest.fixture
def url(tmp_path: Path, tars: list[Path], capsys: pytest.CaptureFixture[str]) -> str:
    out = str(tmp_path / "indexed")
    assert cli.main(["index", str(tars[0].parent / "a-{000..004}.tar"), "-o", out]) == 0
    assert "46 in 5 shards" in capsys.readouterr().out
    return out


def _loader(dataset: Dataset, spec: BatchSpec = FIXED, **settings: Any) -> Loader:
    return Loader(dataset, split="train", batch=spec, seed=3, **{"fields": FIELDS, **settings})


def _content(dataset: Dataset, batches: list[Batch]) -> dict[str, dict[str, Any]]:
    """The fields of each sample, None where it has none, by original key."""
    found: dict[str, dict[str, Any]] = {}
    for batch in batches:
        for slot, row in enumerate(batch.arrays["row"].tolist()):
            if row >= 0 and batch.info.weight[slot]:
                key = dataset.original_key(row)
                assert key not in found
                found[key] = {
                    name: batch[name][slot] if batch[f"{name}_mask"][slot] else None for name in FIELDS
                }
                found[key]["npy"] = found[key]["npy"][: int(batch["npy_shape"][slot, 0])]
    return found


def _assert_content(content: dict[str, dict[str, Any]], tars: list[Path]) -> None:
    expected = dict(webdataset_groups(tars))
    assert content.keys() == expected.keys()
    for key, fields in expected.items():
        number, found = int(key[-4:]), content[key]
        assert found["txt"] == (fields["txt"].decode() if "txt" in fields else None)
        assert found["meta"] == {"number": number}
        assert np.array_equal(found["npy"], np.arange(number % 7))
        for kind in ("jpg", "png"):
            if kind in fields:
                assert np.array_equal(found[kind], picture(number, kind)[0].transpose(2, 0, 1))
            else:
                assert found[kind] is None


def test_every_sample_comes_once_with_its_fields(url: str, tars: list[Path]) -> None:
    dataset = Dataset.open(url)
    _assert_content(_content(dataset, list(_loader(dataset))), tars)


@pytest.mark.parametrize("name", SPECS)
def test_every_world_runs_the_same_steps_and_resumes_on_another(url: str, name: str) -> None:
    """S1-S5, key by key: 1, 2 and 4 ranks, and stops that go on with another number of them."""
    dataset, spec = Dataset.open(url), SPECS[name]
    whole = sorted(received_keys(list(_loader(dataset, spec))))
    for size in (2, spec.micro_batches_per_step):
        ranks = [_loader(dataset, spec, world=World(rank=rank, world_size=size)) for rank in range(size)]
        received = [list(received_keys(list(rank))) for rank in ranks]
        assert {len(keys) for keys in received} == {len(ranks[0])}
        assert sorted(key for keys in received for key in keys) == whole
    num_steps = _loader(dataset, spec).num_steps
    for stop in range(1, num_steps, max(1, num_steps // 3)):
        first = _loader(dataset, spec, world=World(rank=0, world_size=2))
        for number, _ in enumerate(first, start=1):
            if number == stop * first.num_micro_batches_per_rank:
                break
        state = json.loads(json.dumps(first.state_dict()))
        rest = []
        for rank in range(spec.micro_batches_per_step):
            other = _loader(dataset, spec, world=World(rank=rank, world_size=spec.micro_batches_per_step))
            other.load_state_dict(state)
            rest += list(received_keys(list(other)))
        assert sorted(rest) == [keys for keys in whole if keys[1] >= stop]


def test_workers_of_a_data_loader_give_the_same(url: str, tars: list[Path]) -> None:
    import torch.utils.data

    from shardflow.loading.torch_dataset import ShardIterableDataset

    dataset = Dataset.open(url)
    streamed = ShardIterableDataset(dataset, split="train", batch=FIXED, seed=3, fields=FIELDS)
    loader: Any = torch.utils.data.DataLoader(streamed, batch_size=None, num_workers=2)
    _assert_content(_content(dataset, list(loader)), tars)


def test_images_may_stay_bytes_and_fields_may_be_few(url: str, tars: list[Path]) -> None:
    dataset = Dataset.open(url)
    loader = _loader(dataset, fields={"jpg": sf.Bytes(member="jpg")}, config=LoaderConfig(max_bad_share=1.0))
    expected = {key: fields["jpg"] for key, fields in webdataset_groups(tars) if "jpg" in fields}
    found = {}
    for batch in loader:
        assert {*batch} == {"jpg", "jpg_mask"}
        for slot in np.flatnonzero(batch.info.weight).tolist():
            found[dataset.original_key(int(batch.arrays["row"][slot]))] = batch["jpg"][slot]
    assert found == expected
    assert {(row.field, row.reason) for row in loader.quarantined} == {("jpg", "FIELD_MISSING")}
    assert len(loader.quarantined) == NUM_SAMPLES - len(expected)


@pytest.mark.parametrize("field", ["txt", "meta.json", "jpg", "png", "npy"])
def test_a_flipped_bit_masks_its_slot(url: str, tars: list[Path], field: str) -> None:
    dataset = Dataset.open(url)
    row = next(
        row for row in range(NUM_SAMPLES) if any(part.name == field for part in dataset.sample_fields(row)[1])
    )
    place = next(part for part in dataset.sample_fields(row)[1] if part.name == field)
    flip_bit(tars[0], place.offset + place.num_bytes // 2)
    loader = _loader(Dataset.open(url))
    content = _content(dataset, list(loader))
    assert {(bad.row, bad.reason) for bad in loader.quarantined} == {(row, "CHECKSUM_MISMATCH")}
    assert len(content) == NUM_SAMPLES - 1
    assert dataset.original_key(row) not in content


def test_an_image_that_lies_about_its_size_costs_its_slot(tmp_path: Path) -> None:
    from shardflow.format.foreign.build import ForeignSource, index_tars

    good = picture(1)[1]
    huge = bytearray(good)
    huge[16:24] = b"\x00\x00\x40\x00\x00\x00\x30\x00"
    members = [("a.png", good), ("b.png", bytes(huge)), ("c.png", b"no picture"), ("d.png", good[:60])]
    path = python_tar(tmp_path / "a.tar", members)
    index_tars([ForeignSource(place=str(path))], tmp_path / "out")
    fields = {"png": sf.Image(member="png", size=(8, 8), dtype="uint8", channels=3)}
    loader = _loader(Dataset.open(tmp_path / "out"), fields=fields)
    weights = [batch.info.weight.sum() for batch in loader]
    assert sum(weights) == 1
    assert {row.reason for row in loader.quarantined} == {"DECODE_FAILED"}


def test_fields_of_series_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="Tars of other writers have no series"):
        _loader(Dataset.open(url), fields={"image": sf.Slices(size=(8, 8))})


def test_tars_in_an_object_store_stream_from_there(
    s3: str, url: str, tars: list[Path], tmp_path: Path
) -> None:
    from shardflow.storage import open_store

    bucket = s3_bucket(s3, f"foreign-{os.getpid()}")
    for path in tars:
        open_store(f"{bucket}/wds").put_new(path.name, path.read_bytes())
    out = str(tmp_path / "out")
    assert cli.main(["index", f"{bucket}/wds/a-{{000..004}}.tar", "-o", out]) == 0
    remote = Dataset.open(out)
    _assert_content(_content(remote, list(_loader(remote))), tars)
    assert remote.manifest.shards[0].sha256 == Dataset.open(url).manifest.shards[0].sha256
    # The index itself may lie in a store; a store's index that points at this machine is refused.
    assert cli.main(["index", f"{bucket}/wds/a-{{000..004}}.tar", "-o", f"{bucket}/index"]) == 0
    assert Dataset.open(f"{bucket}/index").dataset_id == remote.dataset_id
    with WebServer(Path(url)) as web:
        assert cli.main(["verify", web.url]) == 1


def test_commands_take_a_foreign_dataset(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = "--split=train --seed=1 --epoch=0 --micro-batch-size=3"
    for arguments in (
        ["info", url],
        ["verify", url],
        ["plan", url, *plan.split(), "--micro-batches-per-step=4", "--world-size=2"],
        ["bench", url, "--repeats=1", "--threads=1"],
    ):
        capsys.readouterr()
        assert cli.main(arguments) == 0, capsys.readouterr().err
        assert capsys.readouterr().out
    for arguments in (["preview", url, "train:0", "-o", "x.png"], ["report", url, "-o", "x.html"]):
        assert cli.main(arguments) == 2
        assert "others wrote" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["{0..1"], "pattern"),
        (["TRAIN=a.tar"], "readable"),
        (["s3://u:p@b/a.tar"], "must not contain a user"),
    ],
)
def test_a_wrong_command_line_is_told(
    arguments: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["index", *arguments, "-o", str(tmp_path / "out")]) in (1, 2)
    assert match in capsys.readouterr().err
