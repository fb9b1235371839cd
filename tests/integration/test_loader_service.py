"""Data servers: the batches of local loading, whoever dies; runs apart; tokens, TLS and hostile requests."""

from __future__ import annotations

import dataclasses
import errno
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyarrow import flight

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.cli import serve
from shardflow.errors import ConfigError, SampleError
from shardflow.format import Dataset, manifest
from shardflow.format.table import crc32c
from shardflow.loading import Batch, Loader, World, open_blend, service, service_main
from shardflow.loading.engine import BufferPool
from shardflow.loading.service_main import DataServer, ServerOptions
from shardflow.loading.service_memory import ClientMemory, SharedBuffers
from shardflow.loading.service_wire import OPEN_RUN, encode_ticket, loader_arguments
from shardflow.sampling import BatchSpec, TokenBudget
from tests.distributed.data_servers import Chaos, server_processes
from tests.factories import make_dataset
from tests.integration.loader_support import (
    address_of,
    digest_of,
    flip_bit,
    loader_threads,
    locate,
    open_loader,
    serving,
)
from tests.sweeps import sampled

SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=3, tail="mask")
RAGGED = BatchSpec(
    budget=TokenBudget(max_tokens=64, max_samples=3), micro_batches_per_step=2, tail="mask", lanes=2
)
FIELDS: Mapping[str, sf.Field] = {
    "image": sf.Slices(num_slices=4, size=(32, 32), sampling="random"),
    "report": sf.Text(),
}
NATIVE: Mapping[str, sf.Field] = {"image": sf.Slices(), "report": sf.Text()}
TRANSFORMS = "tests.integration.loader_transforms"
TOKEN = "0123456789abcdef0123"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dataset") / "a"
    return make_dataset(folder, num_samples=40, samples_per_shard=16, facts=True)


@pytest.fixture(scope="module")
def other_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dataset") / "b"
    return make_dataset(folder, num_samples=12, samples_per_shard=16, facts=True, seed=9)


@pytest.fixture(scope="module")
def server(url: str) -> Iterator[DataServer]:
    with serving([Dataset.open(url)]) as found:
        yield found


def _loader(
    source: Any, *servers: str, spec: BatchSpec = SPEC, fields: Any = FIELDS, **settings: Any
) -> Loader:
    return open_loader(source, spec, fields, execution="service", servers=servers, **settings)


def _local(source: Any, spec: BatchSpec = SPEC, fields: Any = FIELDS, **settings: Any) -> Loader:
    return open_loader(source, spec, fields, **settings)


def _digests(batches: Iterable[Batch]) -> list[str]:
    return [digest_of(batch) for batch in batches]


def _num(loader: Loader, name: str) -> int:
    return loader.counters.totals(name).num_items


# ---- the same batches ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "spec", "transform"),
    [(FIELDS, SPEC, f"{TRANSFORMS}:jitter"), (NATIVE, RAGGED, None), ({}, SPEC, None)],
    ids=["transformed", "native, ragged", "no fields"],
)
def test_ranks_and_resumes_get_the_batches_of_local_loading(
    url: str, server: DataServer, is_shared: bool, fields: Any, spec: BatchSpec, transform: str | None
) -> None:
    arguments: dict[str, Any] = {"spec": spec, "fields": fields, "transform": transform}
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        world = World(rank=rank, world_size=world_size)
        with (
            _local(url, world=world, **arguments) as local,
            _loader(url, address_of(server), world=world, **arguments) as served,
        ):
            expected = [_digests(local), _digests(local)]
            assert [_digests(served), _digests(served)] == expected
            assert served.run_id == local.run_id
            assert not _num(served, "service_local")
            assert not loader_threads()
    with _loader(url, address_of(server), **arguments) as served:
        taken = iter(served)
        for _ in range(2 * served.num_micro_batches_per_rank):
            next(taken)
        state = served.state_dict()
    for rank in (0, 1):  # another number of ranks, and only then servers again
        world = World(rank=rank, world_size=2)
        with (
            _local(url, world=world, **arguments) as local,
            _loader(url, address_of(server), world=world, **arguments) as served,
        ):
            local.load_state_dict(state)
            served.load_state_dict(state)
            assert _digests(served) == _digests(local)


def test_selections_of_all_kinds_are_made_again(
    url: str, other_url: str, server: DataServer, tmp_path: Path
) -> None:
    dataset = Dataset.open(url)
    rows = dataset.splits["train"]
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{dataset.samples.sample_key(row)}\n" for row in rows[3:17]), encoding="ascii")
    blend = tmp_path / "blend.toml"
    blend.write_text(
        f'[[component]]\ndataset = "{url}"\nwhere = "facts.num_slices > 2"\n'
        f'[[component]]\ndataset = "{other_url}"\nkeys = "keys-2"\nrepeat = 2.5\n',
        encoding="utf-8",
    )
    other = Dataset.open(other_url)
    (tmp_path / "keys-2").write_text(
        "".join(f"{other.samples.sample_key(row)}\n" for row in other.splits["train"][:5]), encoding="ascii"
    )
    cases: list[dict[str, Any]] = [
        {"source": url, "split": "train", "where": "facts.num_slices > 2"},
        {"source": url, "split": "train", "keys": keys},
        {"source": url, "split": "train", "unit": "series", "where": "rows > 1"},
        {"source": url, "split": "train", "sampling": sf.Sampling(epoch_samples=50, limit=20)},
        {"source": open_blend(blend)},
    ]
    with serving([dataset, other]) as server:
        for case in cases:
            with _local(**case, fields={"image": FIELDS["image"]}) as local:
                expected = _digests(local)
            with _loader(
                case.pop("source"), address_of(server), fields={"image": FIELDS["image"]}, **case
            ) as served:
                assert _digests(served) == expected
                assert not _num(served, "service_local")


def test_an_older_version_is_opened(url: str, tmp_path: Path) -> None:
    old = Dataset.open(make_dataset(tmp_path / "grown", num_samples=20, samples_per_shard=16, facts=True))
    newer = dataclasses.replace(
        old.manifest, manifest_version=2, parent=old.dataset_id, extra={"note": "two"}
    )
    manifest.commit(old.store, newer)
    newest = Dataset.open(tmp_path / "grown")
    assert newest.manifest_version == 2
    with serving([Dataset.open(url), newest]) as server, _loader(old, address_of(server)) as served:
        assert _digests(served) == _digests(_local(old))
        assert not _num(served, "service_local")


# ---- bad samples and errors ----------------------------------------------------------------------


def test_bad_samples_and_errors_are_those_of_local_loading(url: str, tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "damaged", num_samples=40, samples_per_shard=16, facts=True)
    damaged = Dataset.open(folder)
    path, offset, num_bytes = locate(damaged, damaged.splits["train"][7], "s0")
    flip_bit(path, offset + num_bytes // 2)
    with serving([damaged]) as server:
        where = address_of(server)
        with _local(folder) as local, _loader(folder, where) as served:
            expected = _digests(local)
            assert _digests(served) == expected
            assert served.masks() == local.masks()
            assert [row["reason"] for row in served.masks()] == ["CHECKSUM_MISMATCH"]
            masks = served.masks()
        with _loader(folder, where) as again:
            again.load_masks(masks)
            assert _digests(again) == expected
        sentences = []
        failing: list[dict[str, Any]] = [
            {"on_bad_sample": "raise"},
            {"transform": f"{TRANSFORMS}:fail", "num_threads": 1},
        ]
        makers: list[Callable[..., Loader]] = [partial(_local, folder), partial(_loader, folder, where)]
        for make in makers:
            for settings in failing:
                with make(**settings) as loader, pytest.raises(SampleError) as caught:
                    _digests(loader)
                sentences.append(str(caught.value))
        assert sentences[:1] == sentences[2:3]
        assert sentences[1].split(" on sample ")[0] == sentences[3].split(" on sample ")[0]


@pytest.mark.parametrize("on_bad_sample", ["mask", "raise"])
def test_what_is_bad_for_a_server_alone_is_made_here(
    url: str, tmp_path: Path, on_bad_sample: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(url, tmp_path / "damaged")
    damaged = Dataset.open(tmp_path / "damaged")
    path, offset, num_bytes = locate(damaged, damaged.splits["train"][7], "s0")
    path.chmod(0o644)
    flip_bit(path, offset + num_bytes // 2)
    with (
        serving([damaged]) as server,
        _local(url) as local,
        _loader(url, address_of(server), on_bad_sample=on_bad_sample) as served,
    ):
        assert _digests(served) == _digests(local)
        assert not served.masks()
        assert _num(served, "service_local") == 1
        assert _num(served, "service")
        assert len([one for one in caplog.messages if "a sample is bad for data server" in one]) == 1


# ---- code ----------------------------------------------------------------------------------------


def test_a_server_of_other_code_refuses_and_says_which(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "transform_of_users.py"
    code = "def same(sample):\n    return sample\n"
    file.write_text(code, encoding="utf-8")
    settings: dict[str, Any] = {"transform": "transform_of_users:same"}
    dataset, allowed = Dataset.open(url), ["transform_of_users"]
    with serving([dataset], allowed=allowed) as first, serving([dataset], allowed=allowed) as second:
        where = address_of(second)
        with _loader(url, address_of(first), **settings) as served:
            stream = iter(served)
            run = served._runtime.servers
            assert run is not None
            message = json.loads(run._run.body)
            assert message["code"].keys() == {"shardflow", "transform_of_users"}
            file.write_text(f"{code}# later\n", encoding="utf-8")  # what runs is what was imported
            next(stream)
            assert _num(served, "service")
        with _loader(url, where, **settings) as served:
            stream = iter(served)
            importlib.reload(importlib.import_module("transform_of_users"))
            with pytest.raises(ConfigError, match="code of 'transform_of_users' is not that of the run"):
                next(stream)
        client, other = flight.FlightClient(f"grpc://{where}"), {"shardflow": "0" * 64}
        for told in (other, {}, {**message["code"], "numpy": "0" * 64}):
            body = json.dumps({**message, "code": told}).encode()
            with pytest.raises(flight.FlightServerError) as caught:
                list(client.do_action(flight.Action(OPEN_RUN, body)))
            named = json.loads(caught.value.extra_info)["message"].split("'")[1]
            assert named == ("numpy" if "numpy" in told else "shardflow")


def test_what_no_server_can_make_is_refused_before_step_0(url: str, server: DataServer) -> None:
    where = address_of(server)
    with pytest.raises(ConfigError, match="needs servers"):
        sf.LoaderConfig(execution="service")
    with pytest.raises(ConfigError, match="HOST:PORT"):
        sf.LoaderConfig(execution="service", servers=("data-0",))
    with pytest.raises(ConfigError, match="list of addresses"):
        sf.LoaderConfig(execution="service", servers="data-0:8815")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cannot be sent to data servers.*package\.module:name"):
        _loader(url, where, transform=lambda sample: sample)
    with (
        serving([Dataset.open(url)], allowed=["numpy"]) as strict,
        pytest.raises(ConfigError, match="--allow tests"),
    ):
        next(iter(_loader(url, address_of(strict), transform=f"{TRANSFORMS}:jitter")))


def test_a_dataset_that_is_not_served_is_refused(other_url: str, server: DataServer) -> None:
    with _loader(other_url, address_of(server)) as loader, pytest.raises(ConfigError, match="has no dataset"):
        next(iter(loader))


# ---- servers that come and go --------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["in the loader's memory", "over the network"])
def is_shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether servers make batches in the loader's memory, as on one host, or send them."""
    if not request.param:
        monkeypatch.setattr(service, "is_of_this_host", lambda _: False)
    is_shared: bool = request.param
    return is_shared


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that look for servers often."""
    monkeypatch.setattr(service, "_RESOLVE_S", 0.2)
    monkeypatch.setattr(service, "_FIRST_PAUSE_S", 0.05)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_kills", sampled([3, 100], always=[3]))
def test_kills_and_additions_lose_and_double_nothing(
    url: str, tmp_path: Path, quick: None, is_shared: bool, num_kills: int
) -> None:
    file = tmp_path / "servers"
    with server_processes(url) as processes:
        chaos = Chaos(processes, file, num_kills, seed=num_kills)
        with _loader(url, f"@{file}") as served, _local(url) as local:
            received = _digests(served)  # opens the run
            assert received == _digests(local)
            before = _num(served, "service")
            assert before
            chaos.start()
            while chaos.is_alive():
                received, expected = [], _digests(local)
                for batch in served:
                    received.append(digest_of(batch))
                    time.sleep(0.02)
                assert received == expected
            chaos.join()
            assert _num(served, "service") > before
            assert not served.masks()


def test_without_any_server_batches_are_made_here_until_one_is_back(
    url: str, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _loader(url, f"127.0.0.1:{port}") as served, _local(url) as local:
        assert _digests(served) == _digests(local)
        num_asked = len(served) - 1  # the last one is padding alone, which is made here anyway
        assert _num(served, "service_local") == num_asked
        assert [one for one in caplog.messages if "no data server answers" in one] != []
        assert len([one for one in caplog.messages if "no data server answers" in one]) == 1
        with serving([Dataset.open(url)], port=port):
            deadline = time.monotonic() + 300
            while not _num(served, "service"):
                assert time.monotonic() < deadline
                assert _digests(served) == _digests(local)


def test_a_server_that_stands_still_is_passed_over(url: str, quick: None, is_shared: bool) -> None:
    with server_processes(url) as processes:
        stopped = processes.start()
        processes.start()
        with _loader(url, *processes.running.values(), server_timeout_s=2.0) as served, _local(url) as local:
            assert _digests(served) == _digests(local)
            os.kill(stopped, signal.SIGSTOP)
            assert _digests(served) == _digests(local)
            assert _num(served, "service_resent")


def test_names_that_nobody_can_look_up_do_not_end_the_watch(
    url: str, tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "servers"
    with serving([Dataset.open(url)]) as first, serving([Dataset.open(url)]) as second:
        file.write_text(f"{address_of(first)}\n", encoding="ascii")
        with _loader(url, f"@{file}") as served:
            expected = _digests(served)
            wrong = ["data..0:8815", f"{'x' * 64}:8815", "data-0:99999", "data-0"]
            file.write_text("\n".join([*wrong, address_of(second)]), encoding="ascii")
            deadline = time.monotonic() + 300
            while not second.num_runs:
                assert time.monotonic() < deadline
                served.load_state_dict({**served.state_dict(), "epoch": 0, "step": 0})
                assert _digests(served) == expected
        told = [one for one in caplog.messages if "a line of a file of data servers is left out" in one]
        assert len(told) == len(wrong)


def test_threads_share_one_connection(url: str, server: DataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = flight.FlightClient

    def slow(*arguments: Any, **settings: Any) -> Any:
        made.append(real(*arguments, **settings))
        time.sleep(0.1)
        return made[-1]

    with _loader(url, address_of(server)) as served:
        next(iter(served))
        servers = served._runtime.servers
        assert servers is not None
        (one,) = servers._servers.values()
        one.client = None  # as after a request that failed
        monkeypatch.setattr(flight, "FlightClient", slow)
        used: list[Any] = []
        threads = [threading.Thread(target=lambda: used.append(servers._connected(one))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 1
        assert {id(client) for client in used} == {id(made[0])}


# ---- runs on one server --------------------------------------------------------------------------


def test_runs_on_one_server_never_mix_and_idle_ones_are_forgotten(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_main, "_HOUSEKEEPING_S", 0.05)
    settings: list[dict[str, Any]] = [
        {"seed": 5},
        {"seed": 6},
        {"seed": 5, "fields": NATIVE},
        {"seed": 5, "transform": f"{TRANSFORMS}:jitter"},
        {"seed": 5, "on_bad_sample": "raise"},
    ]
    with serving([Dataset.open(url)], idle_s=0.2) as server:
        loaders = [_loader(url, address_of(server), **one) for one in settings]
        expected = [_digests(_local(url, **one)) for one in settings]
        for _ in range(2):  # in the second round all were forgotten, and are described again
            found: list[list[str]] = [[] for _ in loaders]
            streams = [iter(loader) for loader in loaders]
            for loader in loaders:
                loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 0})
            streams = [iter(loader) for loader in loaders]
            for _ in range(len(loaders[0])):
                for place, stream in enumerate(streams):
                    found[place].append(digest_of(next(stream)))
            assert found == expected
            deadline = time.monotonic() + 300
            while server.num_runs:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        assert not any(_num(loader, "service_local") for loader in loaders)
        for loader in loaders:
            loader.close()


def test_a_run_is_opened_once_whoever_asks_and_fails(
    url: str, server: DataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that waited for one that failed must not open the run beside a third one."""
    under_way = most = 0
    begun, lock = [threading.Event() for _ in range(3)], threading.Lock()

    def slow(*arguments: Any) -> dict[str, Any]:
        nonlocal under_way, most
        with lock:
            under_way, number = under_way + 1, sum(event.is_set() for event in begun)
            most = max(most, under_way)
            begun[number].set()
        time.sleep(0.3)
        with lock:
            under_way -= 1
        if not number:
            raise ConfigError("it cannot be opened now.")
        return loader_arguments(*arguments)

    with _loader(url, address_of(server), seed=99) as served:
        iter(served)
        run = served._runtime.servers
        assert run is not None
        body = run._run.body
    monkeypatch.setattr(service_main, "loader_arguments", slow)

    def ask() -> None:
        with suppress(ConfigError):
            server._open(body)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    assert begun[0].wait(300)
    threads[1].start()
    threads[0].join()
    begun[1].wait(0.1)  # it begins only where it does not share the failure
    threads[2].start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert run._run.name in server._runs


# ---- bounds --------------------------------------------------------------------------------------


def test_a_client_that_is_gone_takes_no_room(url: str) -> None:
    with serving([Dataset.open(url)]) as server, _loader(url, address_of(server)) as served:
        next(iter(served))
        run = served._runtime.servers
        assert run is not None
        ticket = flight.Ticket(encode_ticket(run._run.name, {"epoch": 0, "step": 1, "micro": 0, "masks": []}))
        served.close()
        assert not loader_threads()
        client = flight.FlightClient(f"grpc://{address_of(server)}")
        for _ in range(20):
            reader = client.do_get(ticket)
            reader.cancel()
            del reader
        deadline = time.monotonic() + 300
        while server._room._num_bytes or server._num_calls:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_bytes_under_way_are_bounded_on_both_sides(url: str) -> None:
    size = max(len(batch.buffer) for batch in _local(url))
    bound = 3 * BufferPool.size_of(size)
    with serving([Dataset.open(url)], num_threads=4, max_bytes=bound) as server:
        reserved: list[int] = []
        reserve = server._room.reserved

        def watched(num_bytes: int, call: Any) -> Any:
            reserved.append(server._room._num_bytes)
            return reserve(num_bytes, call)

        server._room.reserved = watched  # type: ignore[method-assign]
        with _loader(url, address_of(server), num_threads=8, prefetch_bytes=bound) as served:
            received = _digests(served)
            held = served.counters.snapshot()["buffered_bytes"]["most"]
            num_allocated = served.num_buffers_allocated
        assert received == _digests(_local(url))
        assert 0 < max(reserved) <= bound
        assert 0 < held <= bound
        assert num_allocated <= 3 + 2  # those of the bound, and those that the consumer held


def test_on_one_host_batches_are_made_in_the_loaders_memory(
    url: str, server: DataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bool] = []
    real = service.DataServers._receive

    def receive(*arguments: Any) -> Batch:
        batch = real(*arguments)
        buffers = arguments[0].buffers
        sent.append(batch.buffer.ctypes.data not in buffers._by_address)
        return batch

    monkeypatch.setattr(service.DataServers, "_receive", receive)
    with _loader(url, address_of(server)) as served, _local(url) as local:
        assert _digests(served) == _digests(local)
        assert sent
        assert not any(sent)
        assert _digests(served) == _digests(local)
        assert _digests(served) == _digests(local)
        assert served.num_buffers_allocated < len(sent) / 2, len(sent)  # they are used again
        # A server that cannot open them, such as one of another user, sends.
        monkeypatch.setattr(server._memory, "find", lambda _: None)
        assert _digests(served) == _digests(local)
        assert not _num(served, "service_local")


def test_batches_are_sent_where_no_memory_can_be_shared(
    url: str, server: DataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with _loader(url, address_of(server)) as served, _local(url) as local:
        assert _digests(served) == _digests(local)
        assert _num(served, "service")
        assert not _num(served, "service_local")


def test_a_buffer_that_a_server_may_still_write_to_is_never_lent_again() -> None:
    buffers, server = SharedBuffers(1 << 30), ClientMemory()
    lent = buffers.lend(1000)
    place = buffers.place_of(lent)
    written = server.find(place)
    assert written is not None
    written[:4] = [1, 2, 3, 4]
    assert lent[:4].tolist() == [1, 2, 3, 4]
    buffers.forget(lent)
    del lent
    fresh = buffers.lend(1000)
    written[:4] = 9
    assert not fresh[:4].any()
    # A ticket names memory by a secret, and no other file; what is freed is unmapped.
    place = buffers.place_of(fresh)
    assert server.find({**place, "secret": "0" * len(place["secret"])}) is None
    assert server.find({**place, "secret": "\ud800"}) is None
    assert server.find({**place, "descriptor": 0}) is None
    assert server.find({**place, "pid": "self"}) is None
    assert server.find(place) is not None
    buffers.forget(fresh)
    del fresh
    server.collect()
    assert not server._mapped


def test_memory_that_could_be_cut_off_is_not_written_to() -> None:
    """A file that shrinks under a writer would end it with SIGBUS."""
    descriptor = os.memfd_create("shardflow-batch", os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, bytes(1 << 16))
        told = {"pid": os.getpid(), "descriptor": descriptor, "secret": "00" * 16}
        assert ClientMemory().find(told) is None
    finally:
        os.close(descriptor)


# ---- who may ask ---------------------------------------------------------------------------------


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="ascii")
    return str(path)


def test_a_token_is_asked_for_and_needed_beyond_this_machine(
    url: str, tmp_path: Path, token_file: str
) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        ServerOptions(datasets=(url,), host="0.0.0.0").open()
    wrong = tmp_path / "wrong"
    wrong.write_text("f" * 20, encoding="ascii")
    server = ServerOptions(datasets=(url,), token_file=token_file).open()
    try:
        refused: list[dict[str, Any]] = [{}, {"server_token_file": str(wrong)}]
        for given in refused:
            with (
                _loader(url, address_of(server), **given) as loader,
                pytest.raises(ConfigError, match="token"),
            ):
                next(iter(loader))
        client = flight.FlightClient(f"grpc://{address_of(server)}")
        for call in (
            lambda: list(client.list_actions()),
            lambda: list(client.do_action(flight.Action(OPEN_RUN, b"{}"))),
            lambda: client.do_get(flight.Ticket(b"{}")).read_all(),
            lambda: list(client.list_flights()),
        ):
            with pytest.raises(flight.FlightUnauthenticatedError):
                call()
        assert server.num_runs == 0
        with _loader(url, address_of(server), server_token_file=token_file) as served:
            assert _digests(served) == _digests(_local(url))
            assert not _num(served, "service_local")
    finally:
        server.close()


def test_this_machines_users_need_a_token_unless_it_is_left_out(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="beyond this machine needs a token"):
        ServerOptions(datasets=(url,), host="0.0.0.0", has_token=False).open()
    expected = _digests(_local(url))
    received: list[list[str]] = []

    def shown(lines: Iterable[str]) -> None:
        """Load as one does who read what the command printed."""
        try:
            text = "\n".join(lines)
            (where,) = re.findall(r"127\.0\.0\.1:\d+", text)
            given: dict[str, Any] = {}
            if found := re.search(r"token (\S{32}),", text):
                (tmp_path / "printed").write_text(found[1], encoding="ascii")
                given["server_token_file"] = str(tmp_path / "printed")
                with _loader(url, where) as loader, pytest.raises(ConfigError, match="token"):
                    next(iter(loader))
            with _loader(url, where, **given) as loader:
                received.append([*given, *_digests(loader)])
                assert _num(loader, "service")
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(serve, "show_lines", shown)
    for options in ([], ["--no-token"]):
        assert cli.main(["serve", url, "--listen", "127.0.0.1:0", *options]) == 0
    assert received == [["server_token_file", *expected], expected]
    assert cli.main(["serve", url, "--ray", "auto", "--addresses", str(tmp_path / "servers")]) == 2


def _certificate(folder: Path) -> tuple[str, str]:
    """Make a certificate of 127.0.0.1 and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return str(cert), str(key)


def test_tls_is_spoken_and_a_server_of_another_authority_is_not_believed(
    url: str, tmp_path: Path, token_file: str
) -> None:
    cert, key = _certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = _certificate(tmp_path / "other")
    options = ServerOptions(datasets=(url,), token_file=token_file, tls_cert=cert, tls_key=key)
    with pytest.raises(ConfigError, match="go together"):
        ServerOptions(datasets=(url,), tls_cert=cert).open()
    server = options.open()
    try:
        where, expected = f"localhost:{server.port}", _digests(_local(url))
        with _loader(url, where, server_token_file=token_file, server_tls_ca=cert) as served:
            assert _digests(served) == expected
            assert _num(served, "service")
        strangers: list[dict[str, Any]] = [{"server_tls_ca": other}, {}]
        for settings in strangers:  # nothing is sent, the token least of all
            with _loader(url, where, server_token_file=token_file, **settings) as served:
                assert _digests(served) == expected
                assert not _num(served, "service")
    finally:
        server.close()


def test_hostile_requests_get_a_sentence_and_harm_nobody(
    url: str, server: DataServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _loader(url, address_of(server)) as served:
        expected = _digests(served)
        run = served._runtime.servers
        assert run is not None
        body, name = run._run.body, run._run.name
    client = flight.FlightClient(f"grpc://{address_of(server)}")
    message = json.loads(body)
    marker = tmp_path / "imported"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_module.py").write_text(f"open({str(marker)!r}, 'w')\n", encoding="utf-8")

    def changed(old: str, new: str) -> bytes:
        assert old in message["settings"]
        return json.dumps({**message, "settings": message["settings"].replace(old, new)}).encode()

    bodies = [
        b"",
        b"[]",
        b"\x80\x04\x95",
        b"[" * 100_000,
        json.dumps({**message, "version": 1}).encode(),
        json.dumps({**message, "code": ["shardflow"]}).encode(),
        json.dumps({**message, "shardflow": "0.0.1"}).encode(),
        json.dumps({**message, "keys": {"../../x": "a"}}).encode(),
        json.dumps({**message, "settings": "fields = "}).encode(),
        json.dumps({**message, "lock": {}}).encode(),
        changed('type = "text"', 'type = "evil_module:Field"'),
        changed('type = "text"', 'type = "os:system"'),
        changed("seed = 5", "seed = 6"),
        changed("seed = 5", 'seed = 5\ncollate = "os:system"'),
        changed("seed = 5", "seed = 5\nunknown = 1"),
    ]
    num_runs = server.num_runs
    for hostile in bodies:
        with pytest.raises(flight.FlightServerError) as caught:
            list(client.do_action(flight.Action(OPEN_RUN, hostile)))
        assert json.loads(caught.value.extra_info)["class"] in ("ConfigError", "StateError")
    with pytest.raises(flight.FlightServerError):
        list(client.do_action(flight.Action("shutdown", b"")))
    good = {"epoch": 0, "step": 0, "micro": 0, "masks": []}
    tickets = [
        b"",
        b"{}",
        b"x" * (2 << 20),
        encode_ticket("0" * 64, good),
        encode_ticket(name, {**good, "step": 10**9}),
        encode_ticket(name, {**good, "micro": 3}),
        encode_ticket(name, {**good, "epoch": -1}),
        encode_ticket(name, {**good, "epoch": True}),
        encode_ticket(name, {**good, "masks": [{"row": 1}]}),
    ]
    for ticket in tickets:
        with pytest.raises(flight.FlightServerError) as caught:
            client.do_get(flight.Ticket(ticket)).read_all()
        assert str(tmp_path) not in str(caught.value)
    assert server.num_runs == num_runs
    assert not marker.exists()
    with _loader(url, address_of(server)) as served:
        assert _digests(served) == expected


def test_a_reply_that_was_changed_is_asked_for_again(
    url: str, server: DataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sends wrong bytes, or another micro-batch, is passed over."""
    monkeypatch.setattr(service, "is_of_this_host", lambda _: False)
    real = crc32c
    answers = iter([True, False, False] * 1000)
    monkeypatch.setattr(service_main, "crc32c", lambda data: real(data) ^ next(answers))
    with (
        serving([Dataset.open(url)]) as second,
        _loader(url, address_of(server), address_of(second)) as served,
    ):
        assert _digests(served) == _digests(_local(url))
        assert _num(served, "service_resent")
