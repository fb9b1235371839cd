"""Settings that change while a loader runs: the same micro-batches, other threads, processes and bounds."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardflow as sf
from shardflow.errors import ConfigError, SampleError
from shardflow.format import Dataset
from shardflow.loading import Loader, World
from shardflow.sampling import BatchSpec, Position
from shardflow.storage import CacheConfig
from tests.factories import make_dataset
from tests.integration.loader_support import digest_of, flip_bit, hooked, loader_threads, locate, open_loader
from tests.object_stores import WebServer
from tests.sweeps import sampled

SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")
REPORT = {"report": sf.Text()}
READ: Mapping[str, Mapping[str, sf.Field]] = {
    "text": REPORT,
    "images": {"image": sf.Slices(num_slices=2, size=(16, 16), sampling="random"), **REPORT},
    "native": {"image": sf.Slices(), **REPORT},
}
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dataset")
    return make_dataset(folder / "a", num_samples=48, samples_per_shard=10, size=(24, 24), facts=True)


def _loader(dataset: Dataset | str, *, fields: Any = READ["images"], **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, fields, **settings)


def _eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture(scope="module")
def expected(url: str) -> list[str]:
    with _loader(url) as loader:
        return [digest_of(batch) for batch in loader]


# ---- threads and bytes -----------------------------------------------------------------------------


def test_threads_come_and_go_while_the_same_micro_batches_come_out(url: str, expected: list[str]) -> None:
    with _loader(url, num_threads=1, prefetch_bytes=1 << 20) as loader:
        most = loader.tunables.limits()["loader.num_threads"].most
        found = []
        for number, batch in enumerate(loader):
            found.append(digest_of(batch))
            wanted = (1, most, 2)[number % 3]
            loader.tunables.set("loader.num_threads", wanted)
            assert _eventually(lambda wanted=wanted: len(loader_threads()) in (wanted, 0))  # type: ignore[misc]
        assert found == expected
        assert loader.config.num_threads == loader.tunables.values()["loader.num_threads"] == wanted
    assert not loader_threads()


def test_a_lower_bound_holds_for_what_is_opened_afterwards(url: str, expected: list[str]) -> None:
    with _loader(url, prefetch_bytes=1 << 26) as loader:
        iterator = iter(loader)
        found = [digest_of(next(iterator))]
        (stream,) = loader._runtime.streams
        engine = stream._engine
        # The whole epoch fits, and is made ahead.
        assert _eventually(lambda: engine._num_ready == len(expected) - 1)
        before = engine.buffered_bytes
        assert before > 1 << 20
        loader.change({"loader.prefetch_bytes": 200_000})
        assert engine.buffered_bytes == before  # nothing is dropped
        for batch in iterator:
            found.append(digest_of(batch))
        assert found == expected
        # A batch that its consumer let go lies in the pool: as much as the new bound, and two of them.
        del batch
        assert loader._runtime.pool.free_bytes <= 200_000 + 2 * (64 << 10)


def test_what_is_made_ahead_comes_down_to_a_lower_bound(url: str) -> None:
    each = 64 << 10
    with _loader(url, prefetch_bytes=8 * each) as loader:
        iterator = iter(loader)
        next(iterator)
        (stream,) = loader._runtime.streams
        engine = stream._engine
        assert _eventually(lambda: engine._num_ready == 8)
        loader.change({"loader.prefetch_bytes": each})
        seen = [engine.buffered_bytes for _ in iterator]
        assert seen[:7] == [7 * each, 6 * each, 5 * each, 4 * each, 3 * each, 2 * each, each]
        assert max(seen[7:]) <= each
        assert len(seen) == len(loader) - 1


# ---- another execution -------------------------------------------------------------------------------


def _turns(number: int) -> Iterator[tuple[str, int | str]]:
    """What is set after a micro-batch: there and back through all executions."""
    if number == 2:
        yield "loader.execution", "process"
    if number == 5:
        yield "loader.num_threads", 2
        yield "loader.prefetch_bytes", 1 << 20
    if number == 9:
        yield "loader.execution", "workers"
    if number == 12:
        yield "loader.num_threads", 1
    if number == 15:
        yield "loader.execution", "threads"


def test_executions_change_inside_an_epoch(url: str, expected: list[str]) -> None:
    world = World(rank=0, world_size=1)
    with _loader(url, world=world, num_threads=1, prefetch_bytes=1 << 22) as loader:
        found, handed_over, pids = [], [], set()
        for number, batch in enumerate(loader):
            found.append(digest_of(batch))
            if number < len(expected) - 1:
                assert loader.position == Position(0, (number + 1) // 2)
            for name, value in _turns(number):
                loader.tunables.set(name, value)
            if loader.apply_pending():
                handed_over.append(number)
                processes = loader._runtime.processes
                pids |= set(processes.pids if processes is not None else ())
                assert bool(loader_threads()) == (processes is None)
        assert found == expected
        assert handed_over == [2, 9, 12, 15]
        assert len(pids) == 1 + 2 + 1
        assert loader._runtime.processes is None
    assert not loader_threads()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# ---- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("loader.nothing", 1, "must be one of loader.execution, "),
        ("loader.num_threads", 0, "must be a number from 1 to "),
        ("loader.num_threads", True, "must be a number from 1 to "),
        ("loader.num_threads", "many", "must be a number from 1 to "),
        ("loader.execution", "gpu", "must be one of threads, process, workers on this machine"),
        ("loader.prefetch_bytes", 1 << 50, "max_node_bytes"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    url: str, name: str, value: int | str, says: str
) -> None:
    with _loader(url) as loader:
        before = loader.tunables.values()
        with pytest.raises(ConfigError, match=says):
            loader.tunables.set(name, value)
        assert loader.tunables.values() == before


def test_the_loaders_of_a_node_stay_within_their_memory(url: str) -> None:
    world = World(rank=0, world_size=2, ranks_per_node=2)
    cap = 1 << 30
    with _loader(url, world=world, prefetch_bytes=1 << 20, read_bytes=1 << 20, max_node_bytes=cap) as loader:
        most = loader.tunables.limits()["loader.prefetch_bytes"].most
        assert most == (cap // 2 - 2 * (1 << 20)) // 2
        loader.tunables.set("loader.prefetch_bytes", most)
        with pytest.raises(ConfigError, match=r"loader.read_bytes must be a number from 65536 to 1048576 "):
            loader.tunables.set("loader.read_bytes", 2 << 20)
        loader.tunables.set("loader.prefetch_bytes", most - (1 << 20))
        assert loader.tunables.limits()["loader.read_bytes"].most == 2 << 20


def test_an_error_comes_out_of_its_own_micro_batch_while_threads_change(url: str, tmp_path: Path) -> None:
    own = make_dataset(tmp_path / "own", num_samples=48, samples_per_shard=10, size=(24, 24), facts=True)
    dataset = Dataset.open(own)
    with _loader(own, fields=REPORT) as loader:
        keys = [batch.sample_keys for batch in loader]
    row = int(Dataset.open(own).samples.column("shard").argmax())
    path, offset, _ = locate(dataset, row, "report")
    flip_bit(path, offset)
    bad = next(number for number, names in enumerate(keys) if dataset.samples.sample_key(row) in list(names))
    with _loader(own, on_bad_sample="raise", num_threads=1, prefetch_bytes=1 << 20) as loader:
        iterator = iter(loader)
        for number in range(bad):
            next(iterator)
            loader.change({"loader.num_threads": 1 + number % 4})
        with pytest.raises(SampleError):
            next(iterator)
        assert not loader.apply_pending()
    assert not loader_threads()


# ---- any changes at any time -------------------------------------------------------------------------

CACHE = CacheConfig(max_bytes=1 << 24, min_free_bytes=0, block_bytes=4096, directory=Path("later"))
VALUES: dict[str, list[int]] = {
    "loader.num_threads": [1, 2, 3, 6],
    "loader.prefetch_bytes": [1, 200_000, 1 << 22],
    "loader.read_bytes": [1, 5_000, 1 << 20],
    "cache.read_ahead_bytes": [0, 8_000, 1 << 20],
    "cache.read_ahead_threads": [1, 3],
    "cache.ram_bytes": [0, 9_000, 1 << 20],
    "cache.max_bytes": [8_192, 50_000, 1 << 24],
}
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 23),
        st.sampled_from(sorted(VALUES)).flatmap(
            lambda name: st.tuples(st.just(name), st.sampled_from(VALUES[name]))
        ),
    ),
    max_size=12,
)


@pytest.fixture(scope="module")
def read(url: str) -> dict[str, list[str]]:
    found = {}
    for name, fields in READ.items():
        with _loader(url, fields=fields) as loader:
            found[name] = [digest_of(batch) for batch in loader]
    return found


@pytest.mark.parametrize(
    ("what", "num_examples"),
    sampled(
        [("text", 4), ("images", 6), ("native", 4), ("images", 300), ("text", 100)],
        {("text", 4), ("images", 6)},
    ),
)
def test_no_change_at_any_time_changes_a_micro_batch_or_the_position(
    url: str, read: dict[str, list[str]], tmp_path: Path, what: str, num_examples: int
) -> None:
    expected = read[what]
    fields = READ[what]
    folders = count()

    @settings(max_examples=num_examples)
    @given(changes=CHANGES, stop=st.integers(1, len(expected) - 1))
    def check(changes: list[tuple[int, tuple[str, int]]], stop: int) -> None:
        cache = replace(CACHE, directory=tmp_path / f"cache-{next(folders)}")
        found: list[str] = []
        state: Mapping[str, object] = {}
        with _loader(Dataset.open(url, cache=cache), fields=fields, prefetch_bytes=300_000) as loader:
            for number, batch in enumerate(loader):
                found.append(digest_of(batch))
                del batch
                for _, (name, value) in (change for change in changes if change[0] == number):
                    loader.change({name: value})
                    assert loader.tunables.values()[name] == value
                if number < len(expected) - 1:
                    assert loader.position == Position(0, (number + 1) // 2)
                if number == stop:
                    state = loader.state_dict()
            assert found == expected
            loader.load_state_dict(state)
            # Another run goes on from there, and so does this one, with its settings as they are.
            with _loader(url, fields=fields) as other:
                other.load_state_dict(state)
                begin = other.position.step * 2 if other.epoch == 0 else 0
                rest = [digest_of(batch) for batch in other]
                assert [digest_of(batch) for batch in loader] == rest
                assert rest == (expected[begin:] if begin else rest)
        assert not loader_threads()

    check()
    assert _eventually(lambda: not _background_threads())


def _background_threads() -> list[str]:
    names = ("shardflow-loading", "shardflow-ahead", "shardflow-foresight", "shardflow-cache")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]


def test_nothing_is_left_open(url: str, tmp_path: Path) -> None:
    def run(number: int) -> None:
        cache = replace(CACHE, directory=tmp_path / "cache")
        dataset = Dataset.open(url, cache=cache)
        with _loader(dataset) as loader:
            for place, _ in enumerate(loader):
                loader.change({"loader.num_threads": 1 + place % 5, "cache.max_bytes": 1 << (14 + place % 9)})
                loader.change(
                    {"cache.read_ahead_threads": 1 + place % 7, "loader.prefetch_bytes": 1 << place}
                )
        assert dataset.cache is not None
        dataset.cache.close()

    run(0)
    gc.collect()
    assert _eventually(lambda: not _background_threads())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(4):
        run(number)
    gc.collect()
    assert _eventually(lambda: not _background_threads())
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_loader_may_be_closed_and_its_process_fork_while_settings_change(
    url: str, expected: list[str]
) -> None:
    with _loader(url, num_threads=2) as loader:
        ended = threading.Event()

        def turn() -> None:
            for place in count():
                if ended.is_set():
                    return
                loader.change({"loader.num_threads": 1 + place % 4, "loader.prefetch_bytes": 1 << place % 24})

        turning = threading.Thread(target=turn)
        turning.start()
        try:
            for _ in range(6):
                loader.set_epoch(1)
                loader.set_epoch(0)
                iterator = iter(loader)
                assert digest_of(next(iterator)) == expected[0]
                pid = os.fork()
                if not pid:
                    # The parent's locks may be held in here, by threads that are not.
                    iterator.close()
                    again = list(map(digest_of, loader)) == expected[loader.position.step * 2 :]
                    os._exit(0 if again else 3)
                assert os.waitpid(pid, 0)[1] == 0
                loader.close()
        finally:
            ended.set()
            turning.join()
        assert not loader_threads()


def test_requests_at_once_change_while_a_remote_store_is_read(url: str, expected: list[str]) -> None:
    with WebServer(Path(url)) as web, _loader(Dataset.open(web.url)) as loader:
        limits = loader.tunables.limits()["store.max_concurrency"]
        assert limits.is_live
        found = []
        for number, batch in enumerate(loader):
            found.append(digest_of(batch))
            loader.tunables.set("store.max_concurrency", 1 + number % 4)
        assert found == expected
        assert loader.tunables.values()["store.max_concurrency"] == 1 + (len(expected) - 1) % 4


def test_what_a_process_beside_the_trainer_reads_through_is_told_too(
    url: str, expected: list[str], tmp_path: Path
) -> None:
    cache = replace(CACHE, directory=tmp_path / "cache", read_ahead_bytes=0)
    low = 40_000
    with _loader(Dataset.open(url, cache=cache), execution="process", prefetch_bytes=1 << 20) as loader:
        found = [digest_of(batch) for batch in loader]
        loader.set_epoch(0)
        full = _folder_bytes(tmp_path / "cache")
        assert full > 2 * low
        iterator = iter(loader)
        again = [digest_of(next(iterator))]
        loader.tunables.set("cache.max_bytes", low)
        loader.tunables.set("loader.num_threads", 2)
        again += [digest_of(batch) for batch in iterator]
        assert found == again == expected
        assert _eventually(lambda: _folder_bytes(tmp_path / "cache") <= low)
        # Blocks that go on being read stay out, whichever process reads them.
        loader.set_epoch(0)
        assert [digest_of(batch) for batch in loader] == expected
        assert _folder_bytes(tmp_path / "cache") <= low


def _folder_bytes(folder: Path) -> int:
    found = 0
    for path in (folder / "blocks").rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += -(-path.stat().st_size // 4096) * 4096 if path.is_file() else 0
    return found


def test_processes_that_cannot_start_leave_all_as_it_was(url: str, expected: list[str]) -> None:
    dataset, _ = hooked(url, lambda path, ranges: None)  # a function that crosses no process boundary
    with _loader(dataset) as loader:
        iterator = iter(loader)
        found = [digest_of(next(iterator))]
        loader.tunables.set("loader.execution", "process")
        with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
            loader.apply_pending()
        assert loader.tunables.values()["loader.execution"] == "threads"
        assert not loader.apply_pending()
        assert found + [digest_of(batch) for batch in iterator] == expected
