"""Threads end with their iteration, memory is recycled and never overwritten under a reader, forks are
safe.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ShardflowError
from shardflow.format import Dataset
from shardflow.loading import Loader
from shardflow.sampling import BatchSpec, EpochPlan
from shardflow.storage import ByteRange
from tests.factories import make_dataset
from tests.integration.loader_support import frozen, hooked, loader_threads, open_loader, received_keys

REPOSITORY = Path(__file__).resolve().parents[2]
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")
FIELDS = {"image": sf.Slices(num_slices=4, size=(32, 32)), "report": sf.Text()}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dataset") / "a"
    return make_dataset(folder, num_samples=40, samples_per_shard=16, facts=True)


def _loader(dataset: Dataset, **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, FIELDS, **settings)


# ---- threads -------------------------------------------------------------------------------------


def test_threads_start_with_the_first_batch_and_end_with_the_last(url: str) -> None:
    loader = _loader(Dataset.open(url), num_threads=3)
    iterator = iter(loader)
    assert not loader_threads()
    next(iterator)
    assert len(loader_threads()) == 3
    for _ in iterator:
        pass
    assert not loader_threads()


def test_breaking_off_ends_the_threads(url: str) -> None:
    for _ in _loader(Dataset.open(url)):
        break
    assert not loader_threads()


def test_an_exception_in_the_loop_ends_the_threads(url: str) -> None:
    loader = _loader(Dataset.open(url))

    def train() -> None:
        for _ in loader:
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError, match="training failed") as caught:
        train()
    assert not loader_threads()  # although the traceback is still held here
    assert caught.value.__traceback__ is not None


def test_iterating_anew_ends_the_threads_of_before(url: str) -> None:
    loader = _loader(Dataset.open(url), num_threads=2)
    first, second = iter(loader), None
    next(first)
    second = iter(loader)
    assert not loader_threads()
    next(second)
    assert len(loader_threads()) == 2
    loader.close()
    assert not loader_threads()


def test_deleting_loader_and_iterator_ends_the_threads(url: str) -> None:
    loader = _loader(Dataset.open(url))
    iterator = iter(loader)
    next(iterator)
    del loader, iterator
    assert not loader_threads()


def test_an_iterator_in_a_reference_cycle_is_collected(url: str) -> None:
    iterator = iter(_loader(Dataset.open(url)))
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    gc.collect()
    assert not loader_threads()


def test_a_context_manager_ends_the_threads(url: str) -> None:
    with _loader(Dataset.open(url)) as loader:
        iterator = iter(loader)
        next(iterator)
        assert loader_threads()
    assert not loader_threads()


def test_close_waits_for_a_thread_that_is_amid_a_read(url: str) -> None:
    is_reading = threading.Event()

    def before(path: str, ranges: Sequence[ByteRange]) -> None:
        if threading.current_thread() in loader_threads():
            is_reading.set()
            # Until everything is told to end, and a while longer: only a join outlasts that.
            while not engine._is_closed:
                time.sleep(0.001)
            time.sleep(0.3)

    dataset, _ = hooked(url, before)
    loader = _loader(dataset, num_threads=2)
    iterator = iter(loader)
    engine = next(iter(loader._runtime.streams))._engine
    engine.start()
    assert is_reading.wait(300)
    loader.close()
    assert not loader_threads()
    del iterator  # it was not its end that ended them


def test_many_loaders_leave_no_descriptors_and_no_threads(url: str) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    dataset = Dataset.open(url)
    list(_loader(dataset))
    before = descriptors()
    for _ in range(20):
        for _ in _loader(dataset):
            break
    assert descriptors() <= before
    assert not loader_threads()


def test_a_process_can_exit_in_the_middle_of_an_iteration(url: str) -> None:
    code = f"""
import sys
import shardflow as sf
fields = {{"image": sf.Slices(num_slices=4, size=(64, 64)), "report": sf.Text()}}
spec = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=2)
config = sf.LoaderConfig(num_threads=4)
loader = sf.Loader(sf.open({url!r}), split="train", batch=spec, seed=1, fields=fields, config=config)
iterator = iter(loader)
next(iterator)
assert not {{"torch", "pydicom", "imagecodecs"}} & set(sys.modules)
print("one")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\n", "")


# ---- memory --------------------------------------------------------------------------------------


def test_batches_that_are_kept_are_never_overwritten(url: str) -> None:
    loader = _loader(Dataset.open(url), num_threads=3)
    copies = [{name: frozen(value) for name, value in batch.items()} for batch in loader]
    loader.set_epoch(0)
    kept = list(loader)
    loader.set_epoch(1)
    list(loader)  # another epoch through the same pool
    for batch, copy in zip(kept, copies, strict=True):
        assert {name: frozen(value) for name, value in batch.items()} == copy
    addresses = {batch.buffer.ctypes.data for batch in kept}
    assert len(addresses) == len(kept)


def test_a_slice_of_an_array_keeps_its_batch(url: str) -> None:
    loader = _loader(Dataset.open(url))
    slices, copies = [], []
    for batch in loader:
        slices.append(batch["image"][0, 0])
        copies.append(slices[-1].copy())
        del batch
    list(loader)
    assert all(np.array_equal(one, other) for one, other in zip(slices, copies, strict=True))


def test_iteration_in_its_stride_allocates_nothing(url: str) -> None:
    loader = _loader(Dataset.open(url), num_threads=2, prefetch_bytes=200_000)
    for _ in loader:
        pass
    before = loader.num_buffers_allocated
    for _ in range(3):
        for _ in loader:
            pass
    assert loader.num_buffers_allocated == before
    # Buffers of 64 KiB: three fit the bound, the consumer holds one and asks for the next one.
    assert before <= 200_000 // 65_536 + 2


def test_work_ahead_stays_within_its_bytes(url: str) -> None:
    loader = _loader(Dataset.open(url), prefetch_bytes=100_000)
    for _ in loader:
        time.sleep(0.002)
    assert loader.counters.snapshot()["buffered_bytes"]["most"] <= 100_000


def test_one_batch_larger_than_the_bound_is_delivered(url: str) -> None:
    loader = _loader(Dataset.open(url), prefetch_bytes=1)
    assert len(list(loader)) == len(loader)
    assert loader.counters.snapshot()["ready_batches"]["most"] <= 1


def test_the_threads_work_on_the_oldest_batch_first(url: str) -> None:
    """Whatever is read of a later batch, one thread stays for the first one; else both would wait here in
    vain.
    """
    plan = EpochPlan(range(40), SPEC, seed=5, epoch=0)
    samples = Dataset.open(url).samples
    first = {int(samples.gather("offset_bytes", row)) + 512 for row in plan.micro_batch(0, 0).rows.tolist()}
    read: set[int] = set()
    is_read = threading.Event()
    waited: list[bool] = []

    def before(path: str, ranges: Sequence[ByteRange]) -> None:
        if ranges[0].offset in first:
            read.add(ranges[0].offset)
            if read == first:
                is_read.set()
        else:
            waited.append(is_read.wait(300))

    dataset, _ = hooked(url, before)
    next(iter(_loader(dataset, num_threads=2)))
    assert all(waited)


# ---- forks ---------------------------------------------------------------------------------------


def _in_child(work: Any) -> int:
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a child that waits for a lock of its parent would wait for ever
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_loader_that_was_iterated_works_in_a_forked_child(url: str) -> None:
    loader = _loader(Dataset.open(url))
    expected = list(received_keys(loader))
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator)

    def child() -> int:
        loader.load_state_dict({**loader.state_dict(), "step": 0})
        return 0 if list(received_keys(loader)) == expected else 2

    # Another thread may hold any of the locks at the moment of the fork; here this one does.
    with loader.counters._lock, loader._runtime.pool._lock, loader.dataset._indexes._lock:
        assert _in_child(child) == 0
    assert next(iterator).slot == 1


def test_an_iterator_does_not_cross_a_fork(url: str) -> None:
    iterator = iter(_loader(Dataset.open(url)))
    next(iterator)

    def child() -> int:
        try:
            next(iterator)
        except ShardflowError as error:
            return 0 if "forked child" in str(error) else 3
        return 2

    assert _in_child(child) == 0
