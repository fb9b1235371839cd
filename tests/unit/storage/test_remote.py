"""Remote stores: the contract of all stores against an S3 and a web server, and faults on the way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError

from shardflow.errors import (
    AlreadyExistsError,
    ConfigError,
    NoListingError,
    NotFoundError,
    ObjectChangedError,
    ShortReadError,
    StorageError,
)
from shardflow.storage import (
    ByteRange,
    ByteStore,
    RemoteOptions,
    RemoteStore,
    RequestCost,
    RetryPolicy,
    open_store,
)
from shardflow.storage.requests import PassingFaultError, Retrying, translated
from tests.conformance.stores import CONTENT, StoreConformance
from tests.fault_proxy import FaultProxy
from tests.object_stores import WebServer, s3_bucket

_BUCKETS = count()
QUICK = RemoteOptions(
    retry=RetryPolicy(max_attempts=4, deadline_s=20, first_wait_s=0.001, max_wait_s=0.01),
    timeout_s=10,
    request_bytes=4096,
    cost=RequestCost(latency_s=0.001, place_bytes_per_s=700_000),
    part_bytes=5 << 20,
)


def _bucket(address: str, prefix: str = "") -> str:
    return s3_bucket(address, f"bucket-{os.getpid()}-{next(_BUCKETS)}") + prefix


@pytest.fixture
def store(s3: str) -> RemoteStore:
    return RemoteStore(_bucket(s3, "/some/prefix"), QUICK)


class TestRemoteStore(StoreConformance):
    """The contract of all stores, on S3."""


def _read(store: ByteStore, path: str, offset: int, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    store.read_ranges(path, [ByteRange(offset, num_bytes)], [memoryview(buffer)])
    return bytes(buffer)


# ---- S3 ------------------------------------------------------------------------------------------


def test_a_large_object_goes_in_parts_and_is_written_once(s3: str) -> None:
    url = _bucket(s3)
    store = RemoteStore(url, QUICK)
    content = os.urandom(1 << 20) * 12
    pieces = [content[at : at + 700_000] for at in range(0, len(content), 700_000)]
    store.put_stream("shards/big.tar", iter(pieces), len(content))
    assert store.size("shards/big.tar") == len(content)
    assert RemoteStore(url).read("shards/big.tar") == content
    with pytest.raises(AlreadyExistsError, match=r"big\.tar must be new"):
        store.put_stream("shards/big.tar", iter(pieces), len(content))
    # The hidden name it went through is gone.
    assert store.list("") == ["shards/big.tar"]
    assert _hidden(s3, url) == []


def _hidden(s3: str, url: str) -> list[str]:
    import obstore

    client = RemoteStore(url)._client()
    return [meta["path"] for page in obstore.list(client) for meta in page if "/." in f"/{meta['path']}"]


@pytest.mark.parametrize("num_bytes", [1000, 11 << 20], ids=["small", "large"])
@pytest.mark.parametrize("where", ["s3", "local"])
def test_a_stream_that_fails_leaves_nothing(s3: str, tmp_path: Path, num_bytes: int, where: str) -> None:
    store = RemoteStore(_bucket(s3), QUICK) if where == "s3" else open_store(tmp_path / "local")

    class WrongError(Exception):
        pass

    def broken() -> Iterator[bytes]:
        yield bytes(num_bytes // 2)
        raise WrongError

    with pytest.raises(WrongError):
        store.put_stream("a/b", broken(), num_bytes)
    for wrong_size in (num_bytes - 1, num_bytes + 1):
        with pytest.raises(StorageError, match=r"a/b must have"):
            store.put_stream("a/b", [bytes(num_bytes)], wrong_size)
    assert store.list("") == []


def test_two_objects_of_one_prefix_do_not_see_each_other(s3: str) -> None:
    url = _bucket(s3)
    RemoteStore(f"{url}/a", QUICK).put_new("x", b"1")
    RemoteStore(f"{url}/ab", QUICK).put_new("x", b"2")
    assert RemoteStore(f"{url}/a", QUICK).list("") == ["x"]
    assert RemoteStore(f"{url}/a/", QUICK).url == f"{url}/a"


def test_a_store_that_overwrites_is_refused(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    put = obstore.put

    def overwrite(*arguments: Any, mode: str, **settings: Any) -> Any:
        assert mode == "create"
        return put(*arguments, **settings)

    monkeypatch.setattr(obstore, "put", overwrite)
    with pytest.raises(StorageError, match="refuse to write an object twice"):
        RemoteStore(_bucket(s3), QUICK).put_new("a", b"1")


@pytest.mark.parametrize(
    ("url", "endpoint"), [("gs://b/x", "GOOGLE_BASE_URL"), ("az://b/x", "AZURE_STORAGE_ENDPOINT")]
)
def test_a_plain_http_endpoint_of_a_cloud_is_refused_at_once(
    url: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        endpoint: "http://127.0.0.1:9",
        "GOOGLE_SKIP_SIGNATURE": "true",
        "AZURE_SKIP_SIGNATURE": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "a",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    store = RemoteStore(url)
    with pytest.raises(StorageError, match=r"must go to an https:// endpoint, but .* plain HTTP"):
        store.read("a")
    assert store.counts.num_retries == 0


def test_missing_credentials_are_named_after_few_tries() -> None:
    text = "Error performing PUT http://169.254.169.254/latest/api/token in 2ms - HTTP error: no answer"
    with pytest.raises(PassingFaultError, match="no credentials") as caught, translated("reading", "a"):
        raise GenericError(text)
    assert caught.value.max_attempts == 3


def test_a_wrong_bucket_is_told_at_once(s3: str) -> None:
    store = RemoteStore("s3://no-such-bucket-here", QUICK)
    with pytest.raises(NotFoundError, match="manifest"):
        store.read("manifest-000001.json")
    with pytest.raises(StorageError, match="404"):
        store.list("")
    assert store.counts.num_retries == 0


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_not_tried_again(s3: str, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    url = _bucket(s3)
    with FaultProxy(int(s3.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = RemoteStore(url, QUICK)
        proxy.faults = [f"status:{status}"]
        with pytest.raises(StorageError, match=r"reading a was refused.*credentials"):
            store.read("a")
    assert store.counts.num_retries == 0


def test_a_write_whose_answer_was_lost_is_done(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = _bucket(s3)
    with FaultProxy(int(s3.rpartition(":")[2])) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = RemoteStore(url, QUICK)
        # The object is written, the answer is cut: the next try meets it.
        proxy.faults = ["lost"]
        store.put_new("a", CONTENT)
        assert store.counts.num_retries == 1
        assert store.read("a") == CONTENT
        proxy.faults = ["lost"]
        with pytest.raises(AlreadyExistsError):
            store.put_new("a", b"other")


# ---- any store: faults on the way ----------------------------------------------------------------


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "web" / "shards").mkdir(parents=True)
    (tmp_path / "web" / "shards" / "a.tar").write_bytes(CONTENT)
    with WebServer(tmp_path / "web") as server:
        yield server


@pytest.fixture
def proxy(web: WebServer) -> Iterator[FaultProxy]:
    with FaultProxy(web.port) as found:
        yield found


@pytest.mark.parametrize(
    "fault", ["status:500", "status:503", "status:429", "reset:0", "reset:100", "reset:2000"]
)
def test_a_fault_that_passes_is_tried_again(proxy: FaultProxy, fault: str) -> None:
    store = RemoteStore(proxy.url, QUICK)
    proxy.faults = [fault] * 3
    assert _read(store, "shards/a.tar", 100, 4000) == CONTENT[100:4100]
    assert store.counts.num_retries == 3


def test_a_fault_that_stays_is_an_error_within_tries(proxy: FaultProxy) -> None:
    store = RemoteStore(proxy.url, QUICK)
    proxy.faults = ["status:503"] * 99
    with pytest.raises(
        StorageError, match=r"reading shards/a\.tar failed.*503.*4 attempts.*no attempts left"
    ):
        _read(store, "shards/a.tar", 0, 10)
    assert proxy.num_requests == 4


def test_a_silent_server_is_left_at_the_deadline(proxy: FaultProxy) -> None:
    policy = RetryPolicy(max_attempts=50, deadline_s=0.4, first_wait_s=0.001, max_wait_s=0.01)
    store = RemoteStore(proxy.url, RemoteOptions(retry=policy, timeout_s=0.2))
    proxy.faults = ["hold"] * 99
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"a timeout.*deadline 0\.4 s"):
        _read(store, "shards/a.tar", 0, 10)
    assert time.monotonic() - start < 10


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_an_address_where_nothing_answers_is_named_after_three_tries(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = f"http://127.0.0.1:{_free_port()}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = RemoteStore(
        f"{server}/sets/ct" if scheme == "http" else "s3://bucket/ct"
    )  # with the usual policy
    with pytest.raises(
        StorageError, match=rf"a refused connection in the last of 3 .*nothing answers at {server}"
    ):
        store.read("manifest-000001.json")
    if scheme == "s3":
        with pytest.raises(StorageError, match=r"listing .* in the last of 3 attempts"):
            store.list("manifest-")


def test_a_name_that_does_not_exist_is_named_after_three_tries() -> None:
    store = RemoteStore("http://no-such-host.invalid:9000/ct")
    with pytest.raises(
        StorageError, match=r"a name that is not known here .* 3 attempts .*no-such-host\.invalid:9000"
    ):
        store.read("manifest-000001.json")


def test_a_store_that_answered_is_waited_for(web: WebServer) -> None:
    proxy = FaultProxy(web.port)
    with proxy:
        store = RemoteStore(proxy.url, QUICK)
        with pytest.raises(NotFoundError):  # an answer, too
            store.read("shards/b.tar")
    with pytest.raises(
        StorageError, match=r"a refused connection in the last of 4 attempts .*no attempts left"
    ):
        store.read("shards/a.tar")


def test_a_store_that_refused_is_waited_for() -> None:
    faults = iter(
        [
            PassingFaultError("503", is_refusal=True),
            *(PassingFaultError("a refused connection", is_unreached=True) for _ in range(9)),
        ]
    )

    def attempt(_: int) -> None:
        raise next(faults)

    retrying = Retrying(RetryPolicy(max_attempts=5, first_wait_s=0))
    with pytest.raises(StorageError, match=r"in the last of 5 attempts .*no attempts left"):
        retrying("reading", attempt)


def test_the_budget_is_shared_by_all_requests() -> None:
    retrying = Retrying(RetryPolicy(max_attempts=100, first_wait_s=0, budget=5))

    def fails(_: int) -> None:
        raise PassingFaultError("HTTP status 503")

    with pytest.raises(StorageError, match=r"6 attempts.*budget is spent"):
        retrying("reading a", fails)
    with pytest.raises(StorageError, match=r"1 attempts.*budget is spent"):
        retrying("reading b", fails)
    for _ in range(10):
        retrying("reading c", lambda _: None)
    with pytest.raises(StorageError, match=r"2 attempts.*budget is spent"):
        retrying("reading d", fails)


def test_an_object_that_changes_is_named(web: WebServer) -> None:
    for prefix in ("", "W/"):
        web.etag_prefix = prefix
        store = RemoteStore(web.url, QUICK)
        assert _read(store, "shards/a.tar", 0, 10) == CONTENT[:10]
        (web.folder / "shards" / "a.tar").write_bytes(CONTENT[::-1])
        with pytest.raises(ObjectChangedError, match=r"shards/a\.tar has changed"):
            _read(store, "shards/a.tar", 100, 10)
        with pytest.raises(ObjectChangedError):
            store.size("shards/a.tar")
        (web.folder / "shards" / "a.tar").write_bytes(CONTENT)


def test_a_server_without_ranges_is_refused(web: WebServer) -> None:
    web.supports_ranges = False
    store = RemoteStore(web.url, QUICK)
    with pytest.raises(StorageError, match=r"server without ranges.*3 attempts"):
        _read(store, "shards/a.tar", 100, 10)
    assert store.counts.num_retries == 2


def test_plain_http_reads_and_neither_writes_nor_lists(web: WebServer) -> None:
    store = open_store(web.url)
    assert store.read("shards/a.tar") == CONTENT
    assert store.size("shards/a.tar") == len(CONTENT)
    with pytest.raises(NotFoundError, match=r"shards/b\.tar"):
        store.size("shards/b.tar")
    with pytest.raises(ShortReadError):
        _read(store, "shards/a.tar", len(CONTENT) - 5, 10)
    with pytest.raises(ShortReadError):
        _read(open_store(web.url), "shards/a.tar", len(CONTENT) + 5, 10)
    with pytest.raises(StorageError, match="plain HTTP"):
        store.put_new("b", b"")
    with pytest.raises(NoListingError, match="plain HTTP"):
        store.list("manifest-")


def test_near_ranges_share_a_request_and_large_ones_are_cut(web: WebServer) -> None:
    store = RemoteStore(web.url, QUICK)
    ranges = [ByteRange(0, 100), ByteRange(700, 100), ByteRange(9000, 5000)]
    buffers = [bytearray(span.num_bytes) for span in ranges]
    store.read_ranges("shards/a.tar", ranges, [memoryview(buffer) for buffer in buffers])
    assert web.num_requests == 3
    assert buffers == [CONTENT[span.offset : span.offset + span.num_bytes] for span in ranges]


def test_requests_run_side_by_side(proxy: FaultProxy) -> None:
    store = RemoteStore(proxy.url, QUICK)
    assert store.size("shards/a.tar") == len(CONTENT)
    # Each is answered only when all have come: one after another they would wait for ever.
    barrier = threading.Barrier(4, timeout=300)
    proxy.before_answer = barrier.wait
    assert _read(store, "shards/a.tar", 0, 16384) == CONTENT


# ---- addresses, processes, installation ----------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host/a",
        "s3://key@bucket/a",
        "https://host/a?X-Amz-Signature=secret",
        "https://host/a#secret",
        "s3://",
    ],
)
def test_an_address_with_credentials_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(StorageError) as caught:
        open_store(url)
    for part in ("secret", "user", "key@"):
        assert part not in str(caught.value).replace("contain a user", "")


def test_messages_hold_no_bucket_and_no_credentials(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "TOPSECRET")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = RemoteStore("s3://patient-doe/jane", QUICK)
    for call in (store.read, store.size, store.list):
        with pytest.raises(StorageError) as caught:
            call("a")
        text = "".join(str(error) for error in (caught.value, caught.value.__cause__))
        assert not any(word in text for word in ("TOPSECRET", "doe", "jane"))
        assert "127.0.0.1:1" in text  # the server alone
        assert caught.value.__suppress_context__


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_every_scheme_makes_a_store_without_asking_anyone(scheme: str) -> None:
    assert open_store(f"{scheme}://bucket/a/b/").url == f"{scheme}://bucket/a/b"


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    store = open_store("s3://bucket/a")
    with pytest.raises(ConfigError, match=r"shardflow\[remote\]"):
        store.read("a")


def test_importing_storage_does_not_import_the_client() -> None:
    code = "import sys, shardflow.storage; sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_fork_is_told_instead_of_waiting_for_ever(web: WebServer) -> None:
    store = open_store(web.url)
    assert store.size("shards/a.tar") == len(CONTENT)
    for used in (store, open_store(web.url)):
        child = os.fork()
        if not child:
            signal.alarm(20)
            try:
                used.read("shards/a.tar")
            except StorageError as error:
                os._exit(7 if "spawn" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(StorageError, match=r"file://.*s3://"):
        open_store("ftp://host/a")
