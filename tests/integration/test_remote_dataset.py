"""A dataset in an object store or behind a web server: the same steps and bytes, through passing faults."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.errors import ObjectChangedError, StorageError
from shardflow.fields.types.pictures import Slices
from shardflow.fields.types.text import Text
from shardflow.format import Dataset, verify
from shardflow.loading import Batch, Loader
from shardflow.sampling import BatchSpec
from shardflow.storage import (
    CacheConfig,
    CachedStore,
    LocalStore,
    RemoteOptions,
    RemoteStore,
    RetryPolicy,
    open_store,
)
from tests.factories import make_dataset
from tests.fault_proxy import FaultProxy
from tests.integration.loader_support import received_keys
from tests.object_stores import WebServer, s3_bucket
from tests.volume_cases import VolumeSeries, affine_of, make_volumes

SPEC = BatchSpec(micro_batch_size=3, micro_batches_per_step=4, tail="mask")
FIELDS = {"image": Slices(num_slices=2, size=(16, 16)), "report": Text(missing="pad")}
_NUMBERS = count()


@pytest.fixture
def local(tmp_path: Path) -> str:
    return make_dataset(tmp_path / "web", num_samples=40, samples_per_shard=7, facts=True)


@pytest.fixture
def remote(s3: str, local: str) -> str:
    return _uploaded(s3, local)


def _uploaded(s3: str, folder: str) -> str:
    url = s3_bucket(s3, f"data-{os.getpid()}-{next(_NUMBERS)}") + "/sets/one"
    source, target = LocalStore(folder), open_store(url)
    for path in source.list(""):
        target.put_new(path, source.read(path))
    return url


def _loader(dataset: Dataset, **settings: Any) -> Loader:
    return Loader(dataset, split="train", batch=SPEC, seed=5, fields=FIELDS, **settings)


def _assert_equal(batches: list[Batch], others: list[Batch]) -> None:
    assert list(received_keys(batches)) == list(received_keys(others))
    for batch, other in zip(batches, others, strict=True):
        for name, array in batch.arrays.items():
            assert np.array_equal(array, other.arrays[name]), name


def test_a_remote_dataset_gives_the_same_batches(local: str, remote: str) -> None:
    expected = list(_loader(Dataset.open(local)))
    dataset = Dataset.open(remote)
    _assert_equal(list(_loader(dataset)), expected)
    # A position of one is a position of the other.
    first = _loader(Dataset.open(local))
    for number, _ in enumerate(first, start=1):
        if number == SPEC.micro_batches_per_step:
            break
    second = _loader(dataset)
    second.load_state_dict(first.state_dict())
    _assert_equal(list(second), expected[SPEC.micro_batches_per_step :])


@pytest.mark.parametrize("is_cached", [False, True])
def test_crops_of_bricks_are_those_of_a_folder_and_read_few_bytes(
    s3: str, tmp_path: Path, is_cached: bool
) -> None:
    def series_of(number: int) -> list[VolumeSeries]:
        voxels = np.random.default_rng(number).integers(-900, 900, (40, 130, 150)).astype(np.int16)
        affine = affine_of((2.5, 0.8, 0.8), turn=0.1 * number)
        return [VolumeSeries(voxels=voxels, affine=affine, brick_shape=(16, 64, 64))]

    made = make_volumes(tmp_path / "volumes", series_of, num_samples=6)
    url = _uploaded(s3, made.store.url)
    cache = CacheConfig(ram_bytes=1 << 24, block_bytes=1 << 20) if is_cached else None
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=1, tail="mask")
    fields = {
        "own": sf.Volume(roi_size=(12, 40, 40)),
        "mm": sf.Volume(roi_size=(16, 32, 32), spacing_mm=(2.0, 1.0, 1.0), orientation="RAS"),
    }

    def loader_of(dataset: Dataset) -> Loader:
        return Loader(dataset, split="train", batch=spec, seed=5, fields=fields)

    expected = list(loader_of(made))
    dataset = Dataset.open(url, cache=cache)
    before = _num_bytes_of(dataset)
    loader = loader_of(dataset)
    batches: list[Batch] = []
    state: dict[str, Any] = {}
    for batch in loader:
        batches.append(batch)
        state = loader.state_dict() if len(batches) == 1 else state
    _assert_equal(batches, expected)
    whole = sum(shard.num_bytes for shard in made.manifest.shards)
    # Two regions of each volume are read, and neither all of it nor, with a cache, a brick twice.
    assert 0 < _num_bytes_of(dataset) - before < (1.0 if is_cached else 0.7) * whole
    resumed = loader_of(Dataset.open(url, cache=cache))
    resumed.load_state_dict(state)
    _assert_equal(list(resumed), expected[1:])


def _num_bytes_of(dataset: Dataset) -> int:
    store = dataset.store.origin if isinstance(dataset.store, CachedStore) else dataset.store
    assert isinstance(store, RemoteStore)
    return store.counts.num_bytes


def test_the_batches_cross_from_spawned_workers(local: str, remote: str) -> None:
    import torch.utils.data

    from shardflow.loading.torch_dataset import ShardIterableDataset

    dataset = ShardIterableDataset(Dataset.open(remote), split="train", batch=SPEC, seed=5, fields=FIELDS)
    loader: Any = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    _assert_equal(list(loader), list(_loader(Dataset.open(local))))


@pytest.mark.parametrize("fault", ["status:503", "reset:0", "reset:300"])
def test_what_passes_is_retried_and_never_masked(local: str, fault: str) -> None:
    """S6: every third request meets a fault, and no slot is masked."""
    with WebServer(Path(local)) as web, FaultProxy(web.port) as proxy:
        retry = RetryPolicy(first_wait_s=0.001, max_wait_s=0.01)
        store = RemoteStore(proxy.url, RemoteOptions(retry=retry, timeout_s=300))
        manifest = Dataset.open(local).manifest
        proxy.faults = ["", "", fault] * 1000
        loader = _loader(Dataset(store, manifest))
        _assert_equal(list(loader), list(_loader(Dataset.open(local))))
        assert store.counts.num_retries > 3
        assert loader.quarantined == []


def test_a_store_that_stays_down_stops_the_run_and_masks_nothing(local: str) -> None:
    with WebServer(Path(local)) as web, FaultProxy(web.port) as proxy:
        retry = RetryPolicy(max_attempts=3, first_wait_s=0.001, max_wait_s=0.01)
        dataset = Dataset(RemoteStore(proxy.url, RemoteOptions(retry=retry)), Dataset.open(local).manifest)
        loader = _loader(dataset)
        batches = iter(loader)
        next(batches)
        proxy.faults = ["status:503"] * 10_000
        with pytest.raises(
            StorageError, match=r"reading shards/train-\d{6}\.(tar|idx) failed: HTTP status 503"
        ):
            list(batches)
        assert loader.quarantined == []


def test_a_shard_that_is_replaced_under_a_run_stops_it(local: str) -> None:
    with WebServer(Path(local)) as web:
        dataset = Dataset.open(web.url)
        list(_loader(dataset))
        for path in (Path(local) / "shards").glob("*.tar"):
            path.write_bytes(path.read_bytes()[::-1])
        with pytest.raises(ObjectChangedError, match=r"shards/train-\d{6}\.tar has changed"):
            list(_loader(dataset))


def test_wrong_bytes_are_found_and_named(s3: str, local: str, remote: str) -> None:
    import obstore

    store = RemoteStore(remote)
    path, fields = Dataset.open(local).sample_fields(17)
    data = bytearray(store.read(path))
    data[fields[1].offset] ^= 4
    obstore.put(store._client(), path, bytes(data))
    report = verify(remote)
    assert [damage.path for damage in report.damages] == [path]
    loader = _loader(Dataset.open(remote))
    list(loader)
    assert {(row.row, row.reason) for row in loader.quarantined} == {(17, "CHECKSUM_MISMATCH")}


# ---- commands ------------------------------------------------------------------------------------


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = cli.main([*arguments, "--json"])
    out = capsys.readouterr().out
    return code, [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("where", ["s3", "http"])
def test_commands_read_a_remote_dataset(
    where: str, local: str, remote: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with WebServer(Path(local)) as web:
        url = remote if where == "s3" else web.url
        plan = "--split=train --seed=1 --epoch=0 --micro-batch-size=3 --micro-batches-per-step=4"
        assert _run(capsys, "info", url) == _run(capsys, "info", local)
        settings = [*plan.split(), "--world-size=2"]
        assert _run(capsys, "plan", url, *settings) == _run(capsys, "plan", local, *settings)
        code, (report,) = _run(capsys, "verify", url)
        assert (code, report["ok"], report["num_samples"]) == (0, True, 40)
        assert bool(report["notes"]) == (where == "http")
        for command in (["preview", "train:0", "-o"], ["report", "-o"]):
            ours, theirs = tmp_path / "ours", tmp_path / "theirs"
            assert _run(capsys, command[0], url, *command[1:], str(ours))[0] == 0
            assert _run(capsys, command[0], local, *command[1:], str(theirs))[0] == 0
            assert ours.read_bytes() == theirs.read_bytes()
        code, lines = _run(capsys, "bench", url, "--split=train", "--repeats=1", "--threads=1")
        assert code == 0
        assert lines[0]["tier"] == where
        # What a cache on this machine would give stands beside what the store gives.
        assert {"cat", "decode", "batches"} <= set(lines[0]["results"])


def test_no_dataset_there_is_told(s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    url = s3_bucket(s3, f"empty-{os.getpid()}")
    assert cli.main(["info", url]) == 1
    assert "must hold a manifest" in capsys.readouterr().err
    assert cli.main(["info", "https://user:hunter2@host/a"]) == 2
    assert "hunter2" not in capsys.readouterr().err
