"""Remote stores against real servers: nginx, and S3 by a Ceph RADOS Gateway, with faults between."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from shardflow.errors import NotFoundError, ShortReadError, StorageError
from shardflow.format import Dataset, verify
from shardflow.format.copies.copying import copy_dataset
from shardflow.storage import ByteRange, LocalStore, RemoteOptions, RemoteStore, RetryPolicy, open_store
from tests.conformance.stores import StoreConformance
from tests.factories import make_dataset
from tests.fault_proxy import FaultProxy, Schedule
from tests.integration.test_remote_faults import SHARES, assert_equal, epoch_batches, small_requests
from tests.object_stores import CEPH_KEYS, ceph_bucket, ceph_gateway, nginx

_NUMBERS = count()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.open(
        make_dataset(tmp_path_factory.mktemp("web"), num_samples=60, samples_per_shard=11, facts=True)
    )


# ---- nginx ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def web(dataset: Dataset) -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="shardflow-nginx-") as folder,
        nginx(Path(dataset.store.url), Path(folder)) as address,
    ):
        yield address


def _impatient(url: str) -> RemoteStore:
    return RemoteStore(url, RemoteOptions(retry=RetryPolicy(max_attempts=3, first_wait_s=0.001)))


def test_an_epoch_from_nginx_is_the_epoch_from_disk(web: str, dataset: Dataset) -> None:
    assert verify(web).is_whole
    batches, loader = epoch_batches(Dataset.open(web))
    assert_equal(batches, epoch_batches(dataset)[0])
    assert loader.quarantined == []


def test_an_epoch_from_nginx_through_a_bad_network(web: str, dataset: Dataset) -> None:
    port = int(web.rpartition(":")[2])
    with FaultProxy(port, schedule=Schedule(seed=77, shares=SHARES)) as proxy:
        batches, loader = epoch_batches(Dataset(small_requests(proxy.url), dataset.manifest))
    assert_equal(batches, epoch_batches(dataset)[0])
    assert proxy.met.total() > 0
    assert loader.quarantined == []


def test_nginx_names_what_it_does_not_do(web: str, dataset: Dataset) -> None:
    path = dataset.manifest.shards[0].path
    buffer = memoryview(bytearray(10))
    with pytest.raises(StorageError, match="without ranges"):
        _impatient(f"{web}/no-ranges").read_ranges(path, [ByteRange(5, 10)], [buffer])
    with pytest.raises(StorageError, match="a broken connection"):
        _impatient(f"{web}/silent").read_ranges(path, [ByteRange(5, 10)], [buffer])
    store = _impatient(web)
    with pytest.raises(NotFoundError):
        store.read("shards/nothing.tar")
    with pytest.raises(ShortReadError):
        store.read_ranges(path, [ByteRange(store.size(path) - 5, 10)], [buffer])


def test_a_server_that_limits_requests_is_asked_as_often_as_it_bears(web: str, dataset: Dataset) -> None:
    retry = RetryPolicy(first_wait_s=0.05, max_wait_s=1.0, budget=10_000, max_attempts=100)
    store = RemoteStore(f"{web}/limited", RemoteOptions(retry=retry, request_bytes=4096, pause_s=0.2))
    path = dataset.manifest.shards[0].path
    assert store.read(path) == dataset.store.read(path)
    assert store.counts.num_retries > 0


# ---- S3 by Ceph ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ceph_address() -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory(prefix="shardflow-ceph-") as folder,
        ceph_gateway(Path(folder)) as address,
    ):
        yield address


@pytest.fixture
def bucket(ceph_address: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {**CEPH_KEYS, "AWS_ENDPOINT_URL": ceph_address, "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    return ceph_bucket(f"bucket-{next(_NUMBERS)}")


@pytest.mark.slow
class TestCeph(StoreConformance):
    """The contract of all stores, on S3 that checks signatures and conditions."""

    @pytest.fixture
    def store(self, bucket: str) -> RemoteStore:
        return RemoteStore(f"{bucket}/some/prefix", RemoteOptions(request_bytes=4096, part_bytes=5 << 20))

    def test_a_large_object_goes_in_parts(self, store: RemoteStore) -> None:
        content = bytes(range(256)) * 45_000
        store.put_stream("shards/big.tar", [content[:700_000], content[700_000:]], len(content))
        assert store.list("") == ["shards/big.tar"]
        assert RemoteStore(store.url).read("shards/big.tar") == content

    def test_keys_of_a_profile_are_good_keys(
        self, store: RemoteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = "\n".join(f"{name.lower()} = {value}" for name, value in CEPH_KEYS.items())
        (tmp_path / "credentials").write_text(f"[ward]\n{keys}\n")
        for name in CEPH_KEYS:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_PROFILE", "ward")
        store.put_new("a", b"1")
        assert store.read("a") == b"1"

    def test_a_wrong_secret_is_refused_at_once_and_not_repeated(
        self, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put_new("a", b"1")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
        stranger = RemoteStore(store.url)
        with pytest.raises(StorageError, match="was refused by the store") as caught:
            stranger.read("a")
        assert "another-secret" not in str(caught.value)
        assert stranger.counts.num_retries == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_an_epoch_from_ceph_through_a_bad_network(
    bucket: str, ceph_address: str, dataset: Dataset, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/sets/one"
    copy_dataset(LocalStore(dataset.store.url), open_store(url))
    port = int(ceph_address.rpartition(":")[2])
    with FaultProxy(port, schedule=Schedule(seed=seed, shares=SHARES)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        batches, loader = epoch_batches(Dataset(small_requests(url), dataset.manifest))
    assert_equal(batches, epoch_batches(dataset)[0])
    assert proxy.met.total() > 0
    assert loader.quarantined == []
